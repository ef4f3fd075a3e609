r"""The default scheme for rollouts: the bound follows simulated members of the forecast, and saturates.

This is a departure from the paper. The paper's sum of increments grows without limit, but the error of a chaotic system
saturates, and it depends on the state that a rollout starts from. The bound B of coordinate j at step n begins with a conformal
factor per step (see ``step_factors``), as a number or times the climatology, the tau quantile of the distance of a value to the
values in the data, whichever has the smaller loss at steps around n:

.. math:: B_{n,j} = k_{n,j} \quad \text{or} \quad B_{n,j} = k_{n,j} \, C_j(\widehat u_{n,j})

Each source of members (see ``members``), first the surrogate and then a companion, refines B to

.. math:: k^{1-x} \min(k, 1)^x \, (g_j + \min(\sigma'_j, B_j))^{1-x} B_j^x, \quad x = \min(1, v)^p, \quad
    \sigma'_j = s_j v \Bigl(\frac{\sigma_j}{s_j \overline\sigma}\Bigr)^\gamma, \quad v = \lambda \overline\sigma

- For the surrogate, :math:`\sigma_j` is the mean distance of the members from the forecast, and g is zero. A companion that is
  more accurate than the surrogate estimates the error itself: there g is the distance of the forecast from the mean of the
  companion's members, and :math:`\sigma` their standard deviation.
- :math:`s_j` is the median climatology, and :math:`\overline\sigma` the quadratic mean of :math:`\sigma_j / s_j` over the
  coordinates.
- x is the degree of saturation: members that are far apart know no more than B.

The pinball loss on held-out rollouts chooses the exponents and :math:`\lambda` from grids, and whether a refinement is used: it
must lower the loss of B to 0.99 for the surrogate and to 0.8 for the companion.

Last, the bound follows the course c of the forecast: the logarithms of how much a step changes the state and of its support
distance, in the first step and as means up to step n.

.. math:: k_{n,j} \, e^{w_n \cdot c_n} B_{n,j}

The weights w are a ridge regression of :math:`\log \max_j E_{n,j} / B_{n,j}` on c at each step, averaged over steps like the factors.
It must lower the loss to 0.97 where each fifth of the rollouts is predicted by the others. Past the calibration horizon no error was
measured, and the bound is the climatology times its last factor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from geoq.checks import check_integer, check_object
from geoq.quantiles import inverse_cdf_quantile, n_required, pinball_loss
from geoq.rollout.features import Reference, RolloutCalibration, RolloutFeatures
from geoq.rollout.members import RandomFeatures, Source
from geoq.rollout.series import PerStep, Rollouts, Values

Setting: TypeAlias = Mapping[str, float]
Parts: TypeAlias = tuple[np.ndarray, ...]
# One number for each step and coordinate.
Steps: TypeAlias = Float[np.ndarray, " n_steps n_coordinates"]
# Up to this many coordinates have a conformal factor each. More coordinates form groups of neighbouring ones.
MOST_SINGLE, GROUP_SIZE = 32, 8
# The factors of step n are averaged over the steps between (1 - WINDOW) n and (1 + WINDOW) n.
WINDOW = 0.15
# Settings are compared at this many steps, equally spaced in log(n) because they differ in the early steps, and coordinates.
N_COMPARED, N_COORDINATES = 30, 16
START: Setting = {"lam": 2.0, "gamma": 0.5, "p": 2.0}
GRID: Mapping[str, tuple[float, ...]] = {
    "lam": (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0),
    "gamma": (0.0, 0.25, 0.5, 0.75, 1.0),
    "p": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
}
STATIC = ("a number per step", "a factor per step times the climatology")
# The sources of members, and the fraction to which each must lower the loss.
SOURCES = {"members of the surrogate": 0.99, "a ridge model of the same data": 0.8}
LEAST = 1e-9
# The course of the forecast, the fraction to which it must lower the loss, and the ridge.
COURSE, GAIN, RIDGE = "the course of the forecast", 0.97, 3.0


@dataclass(frozen=True)
class MemberGrowth:
    """A bound that follows members of the forecast and a companion of the surrogate; the module has the formula.

    Attributes:
        n_members: the number of members. With 0 the bound depends on the step and the climatology alone.
        companion: the second model; None switches it off.

    Example:
        >>> MemberGrowth(n_members=8, companion=None)
        MemberGrowth(n_members=8, companion=None)
    """

    n_members: int = 16
    companion: RandomFeatures | None = field(default_factory=RandomFeatures)

    def __post_init__(self) -> None:
        check_integer(self.n_members, "n_members", 0)
        if self.companion is not None:
            check_object(self.companion, RandomFeatures, "companion", "RandomFeatures()")

    def fit(self, calibration: RolloutCalibration, quantile: float) -> "FittedGrowth":
        """Fit the bound to the held-out rollouts, and refine it where that lowers the loss."""
        features, error = calibration.features, calibration.error
        if not features.alive.any():
            raise ValueError(
                f"all {len(calibration)} calibration rollouts diverge at their first step, so there is no error to fit the bound "
                "to; train the surrogate longer, or standardise its states."
            )
        scale, climatology = Scale.of(features), _climatology(features)
        part = _compared(error.shape[1], scale)
        loss = partial(_loss, part(error / scale.typical), quantile)
        losses, factors, lost = {}, [], []
        for name, shape in zip(STATIC, (np.ones_like(error), climatology), strict=True):
            losses[name] = loss(part(shape))
            factors.append(step_factors(error, shape, quantile))
            each = np.nan_to_num(pinball_loss(error, factors[-1] * shape, quantile))
            lost.append(averaged(each.sum(axis=(0, 2))[:, None]))
        use = lost[1] <= lost[0]
        least = loss(part(np.where(use, climatology, 1.0)))
        first = np.concatenate([np.where(use, factors[1], factors[0]), factors[1][-1:]])
        used = calibration.sources[: (1 + (self.companion is not None)) * (self.n_members > 0)]
        about = losses, tuple(source.step_error for source in used)
        fitted = FittedGrowth(scale, np.append(use, True), first, (), *about)
        for place, (source, (name, gain)) in enumerate(zip(used, SOURCES.items(), strict=False)):
            parts = scale.parts(features, place, fitted(features))
            setting, losses[name] = _best(loss, tuple(map(part, parts)))
            if losses[name] < gain * least:
                least = losses[name]
                factor = _layer_factors(parts, setting, error / scale.typical, quantile)
                layers = *fitted.layers, Layer(place, source, setting, factor)
                fitted = replace(fitted, layers=layers)
        if used:
            course, held_out = Course.fit(calibration, fitted(features), quantile)
            losses[COURSE] = loss(part((held_out / scale.typical).clip(min=LEAST)))
            fitted = replace(fitted, course=course if losses[COURSE] < GAIN * least else None)
        return fitted


@dataclass(frozen=True)
class Scale:
    """s, and the weight of each coordinate in a mean."""

    typical: Float[np.ndarray, " n_coordinates"]
    weight: Float[np.ndarray, " n_coordinates"]

    @staticmethod
    def of(features: RolloutFeatures) -> "Scale":
        # The median, so that one fold surrogate with very large errors does not determine it.
        typical = inverse_cdf_quantile(_climatology(features)[features.alive], 0.5)
        varies = (features.climatology > 0).any(axis=(0, 1))
        varies |= not varies.any()
        return Scale(typical, varies / varies.sum())

    def parts(self, features: RolloutFeatures, place: int, below: Values) -> Parts:
        """What a layer needs, in units of s: g, the mean spread and its pattern, and B."""
        gap, spread = features.members[place] / self.typical
        spread = spread.clip(min=LEAST)
        mean = np.sqrt(spread**2 @ self.weight)[..., None]
        return gap, mean, spread / mean, (below / self.typical).clip(min=LEAST)


def _climatology(features: RolloutFeatures) -> Values:
    """The climatology; 1 for a coordinate that never varies."""
    return np.where(features.climatology > 0, features.climatology, 1.0)


def _refined(parts: Parts, setting: Setting, factor: Any = 1.0) -> Values:
    """The refined bound with the factors k of its steps, in units of s."""
    gap, mean, pattern, below = parts
    v = setting["lam"] * mean
    x = v.clip(max=1.0) ** setting["p"]
    near = gap + np.minimum(v * pattern ** setting["gamma"], below)
    k = factor ** (1 - x) * np.minimum(factor, 1.0) ** x
    return np.asarray(k * (near.clip(min=LEAST) ** (1 - x) * below**x))


def _layer_factors(parts: Parts, setting: Setting, error: Values, quantile: float) -> np.ndarray:
    """The factors of a refinement, in a few passes because they count less where it is saturated."""
    factor = np.ones(error.shape[1:])
    for _ in range(4):
        usable = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0)
        factor = usable * step_factors(error, _refined(parts, setting, usable), quantile)
    return factor


def _compared(n_steps: int, scale: Scale) -> Callable[[np.ndarray], np.ndarray]:
    """A function that returns the steps and coordinates of an array at which settings are compared."""
    steps = np.unique(np.logspace(0, np.log10(n_steps), N_COMPARED).round().astype(int)) - 1
    varies = np.flatnonzero(scale.weight)
    places = np.linspace(0, len(varies) - 1, min(len(varies), N_COORDINATES)).astype(int)

    return lambda values: values[:, steps][..., varies[places] % values.shape[2]]


def _loss(error: Values, quantile: float, shape: Values) -> float:
    """The sum over the steps of the pinball loss divided by the mean error of the step."""
    shape = np.where(np.isfinite(shape), shape, 1.0)  # infinite after most rollouts have diverged
    factor = np.nan_to_num(inverse_cdf_quantile(error / shape, quantile))
    lost = np.nansum(pinball_loss(error, factor * shape, quantile), axis=(0, 2))
    size = np.nansum(error, axis=(0, 2))
    return float((lost[size > 0] / size[size > 0]).sum())


def _best(loss: Callable[[Values], float], parts: Parts) -> tuple[Setting, float]:
    """The setting with the smallest loss, found one exponent after the other, and its loss."""

    def loss_of(setting: Setting) -> float:
        return loss(_refined(parts, setting))

    found, setting, least = START, START, np.inf
    while loss_of(setting) < least - LEAST:
        found, least = setting, loss_of(setting)
        for name, values in GRID.items():
            setting = min((setting, *({**setting, name: v} for v in values)), key=loss_of)
    return found, least


@dataclass(frozen=True)
class Course:
    """The refinement by the course c: its mean, its range about the mean in the data, the weights w, and the factors k."""

    mean: Float[np.ndarray, " n_calibrated 4"]
    limits: Float[np.ndarray, " 2 n_calibrated 4"]
    weight: Float[np.ndarray, " n_calibrated 4"]
    factor: Steps

    @staticmethod
    def fit(calibration: RolloutCalibration, below: Values, quantile: float) -> tuple[Any, Values]:
        """The refinement of a bound, and the bound of each fifth of the rollouts as predicted by the others."""
        error, course, held_out = calibration.error, _course(calibration.features), below.copy()
        with np.errstate(divide="ignore", invalid="ignore"):
            target = np.log(np.where(error > 0, error / below, 0.0).max(axis=2))
        for own in np.arange(5)[:, None] == 5 * np.arange(len(error)) // len(error):
            held_out[own] *= Course.of(course[~own], target[~own])(course[own])
        fitted = Course.of(course, target)
        factor = step_factors(error, below * fitted(course), quantile)
        return replace(fitted, factor=factor), held_out

    @staticmethod
    def of(course: np.ndarray, target: PerStep) -> "Course":
        """Ridge regression of the finite targets on the course at each step, with factors of 1."""
        known = np.isfinite(target)[..., None]
        mean = np.where(known, course, 0.0).sum(axis=0) / known.sum(axis=0).clip(min=1)
        x, y = np.where(known, course - mean, 0.0), np.where(known, target[..., None], 0.0)
        gram = np.einsum("nsk,nsl->skl", x, x) + RIDGE * np.eye(x.shape[2])
        weight = np.linalg.solve(gram, np.einsum("nsk,nsl->skl", x, y))[..., 0]
        limits = np.stack([x.min(axis=0), x.max(axis=0)])
        return Course(mean, limits, np.log(averaged(np.exp(weight))), np.ones((len(mean), 1)))

    def __call__(self, course: np.ndarray) -> np.ndarray:
        """The bounds of the calibrated steps, relative to those without this refinement."""
        n = min(len(self.mean), course.shape[1])
        x = (course[:, :n] - self.mean[:n]).clip(*self.limits[:, :n])
        return np.exp((x * self.weight[:n]).sum(axis=2))[..., None] * self.factor[:n]


def _course(features: RolloutFeatures) -> np.ndarray:
    """The course c of forecasts."""
    each = np.log(np.stack([features.change, features.support_distance], axis=2) + LEAST)
    so_far = each.cumsum(axis=1) / np.arange(1, features.n_steps + 1)[:, None]
    return np.concatenate([np.broadcast_to(each[:, :1], each.shape), so_far], axis=2)


@dataclass(frozen=True)
class Layer:
    """A refinement of the bound: the number of its source in the features, the source, the setting and the factors k."""

    place: int
    source: Source
    setting: Setting
    factor: Float[np.ndarray, " n_calibrated n_coordinates"]


@dataclass(frozen=True)
class FittedGrowth:
    """The fitted bound: at which steps its first factors multiply the climatology, these factors, and the layers that refine it.

    The last step stands for those past the calibration horizon. ``losses`` has the losses of all bounds that were compared, and
    ``step_errors`` the held-out errors of single steps of the sources.
    """

    scale: Scale
    climatological: Bool[np.ndarray, " n_known"]
    factor: Float[np.ndarray, " n_known n_coordinates"]
    layers: tuple[Layer, ...]
    losses: Mapping[str, float]
    step_errors: tuple[float, ...]
    course: Course | None = None

    def __call__(self, features: RolloutFeatures) -> Values:
        n_known = len(self.factor) - 1
        at = np.arange(features.n_steps).clip(max=n_known)
        use, factor = self.climatological[at, None], self.factor[at]
        bound: Values = factor * np.where(use, _climatology(features), 1.0)
        for layer in self.layers:
            parts = (part[:, :n_known] for part in self.scale.parts(features, layer.place, bound))
            refined = _refined((*parts,), layer.setting, layer.factor[: features.n_steps])
            bound[:, :n_known] = refined * self.scale.typical
        if self.course is not None:
            bound[:, :n_known] *= self.course(_course(features))
        return bound

    def with_members(
        self, features: RolloutFeatures, step: Any, rows: Rollouts, reference: Reference, like: Any
    ) -> RolloutFeatures:
        """The features of forecasts with the members that the layers need."""
        given = step, rows, features.support_distance, reference, like
        found: list[Any] = [None] * len(SOURCES)
        for layer in self.layers:
            found[layer.place] = layer.source.members(*given)
        return replace(features, members=tuple(found))

    def describe(self) -> str:
        least, layers = min(self.losses[name] for name in STATIC), self.layers
        first = STATIC[int(self.climatological[:-1].mean() > 0.5)]
        names = [first, *([*SOURCES][layer.place] for layer in layers)]
        used = " and ".join(names + [COURSE] * (self.course is not None))
        losses = ", ".join(f"{name} {loss / least:.2g}" for name, loss in self.losses.items())
        errors = " for the surrogate and ".join(f"{size:.2g}" for size in self.step_errors)
        errors = f"; the held-out error of a single step is {errors} standard deviations for the ridge model"
        return (
            f"the bound follows {used}, which has the smallest loss on held-out rollouts (relative to the best bound without "
            f"members: {losses}){errors * (len(self.step_errors) > 1)}"
        )


def step_factors(error: Values, shape: Values, quantile: float) -> Steps:
    r"""The conformal factor of each step and coordinate on the bounds ``shape``.

    .. math:: k_n = \text{geometric mean of } q_m(\tau) \text{ over } |m - n| \le 0.15 n, \text{ between }
        q_n(\tau \pm \sqrt{\tau (1 - \tau) / m_n})

    Here :math:`m_n` is the number of rollouts that have not diverged at step n. The factor :math:`q_n(\tau)` is the smallest one
    for which a new rollout that has not diverged is expected to have the fraction tau of its values in the group covered. The
    mean reduces the noise between the steps, and the limits keep the factor of a step whose errors differ from its neighbours.
    The factors are infinite from the first step with too few rollouts, and zero without errors.
    """
    # A coordinate counts at a step if any rollout has an error there: the copied values of a window of lags, fixed boundary values
    # and constant parameters would otherwise count as covered.
    exact = ~np.asarray((error > 0).any(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(exact, np.nan, error / shape)
    n_alive = (~np.isnan(error).all(axis=2)).sum(axis=0)
    n_finite = int(np.logical_and.accumulate(n_alive >= n_required(quantile)).sum())
    n_alive = n_alive.clip(min=1)
    slack = np.sqrt(quantile * (1 - quantile) / n_alive)
    level = quantile * (n_alive + 1) / n_alive
    levels = level, level - slack, level + slack
    found, least, most = (group_quantiles(ratio, level)[:n_finite] for level in levels)
    factor = np.full(error.shape[1:], np.inf)
    factor[:n_finite] = averaged(found).clip(least, most)
    factor[:n_finite][exact[:n_finite]] = 0.0
    return factor


def group_quantiles(ratio: Values, level: Float[np.ndarray, " n_steps"]) -> Steps:
    """The quantile of the ratios of each group at each step, repeated for its coordinates; zero if all of them are nan."""
    (_, n_steps, n_coordinates), parts = ratio.shape, []
    size = 1 if n_coordinates <= MOST_SINGLE else GROUP_SIZE
    for first in range(0, n_coordinates, size):
        values = ratio[:, :, first : first + size]
        ordered = np.sort(values.swapaxes(0, 1).reshape(n_steps, -1), axis=1)  # nan comes last
        n = (~np.isnan(ordered)).sum(axis=1)
        place = (np.minimum(np.ceil(n * level - 1e-9), n) - 1).clip(min=0).astype(int)
        found = np.nan_to_num(ordered[np.arange(n_steps), place], posinf=np.inf)
        parts.append(np.repeat(found[:, None], values.shape[2], axis=1))
    return np.concatenate(parts, axis=1)


def averaged(values: Steps) -> Steps:
    """The geometric mean of each column over neighbouring steps; a zero does not count."""
    counts, step = values > 0, np.arange(len(values))
    logarithm = np.log(values, where=counts, out=np.zeros_like(values))
    total, number = (np.pad(part.cumsum(axis=0), ((1, 0), (0, 0))) for part in (logarithm, counts))
    half = np.round(WINDOW * (step + 1)).astype(int)
    first, end = (step - half).clip(min=0), (step + half + 1).clip(max=len(values))
    mean = (total[end] - total[first]) / (number[end] - number[first]).clip(min=1)
    return np.asarray(np.exp(mean))
