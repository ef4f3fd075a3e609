"""Saving and loading of a calibrated RolloutGeoQ: what a file contains, and how an estimator is restored from it."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from geoq import archive
from geoq.archive import state_of, with_prefix, without_prefix
from geoq.arrays import to_tensor
from geoq.checks import check_count, check_fitted
from geoq.folds import UnavailableFolds
from geoq.geometry import Embedding, Geometry
from geoq.increments.climatology import FittedClimatology
from geoq.regions.field_region import FittedFieldRegion
from geoq.regions.local_region import FittedLocalRegion, LocalRegion
from geoq.regions.safe_region import DistanceRegion, FittedDistanceRegion, FittedRegion
from geoq.representation import Representation, Standardization
from geoq.rollout.additive import AdditiveRecursion
from geoq.rollout.checks import one_step
from geoq.rollout.features import ReferenceStates
from geoq.rollout.forcing import Forcing
from geoq.rollout.horizon import HeldOutRollouts
from geoq.rollout.output import Output
from geoq.rollout.region import FittedRolloutRegion, RolloutRegion
from geoq.rollout.saturating import SaturatingGrowth
from geoq.surrogate import Surrogate, evaluate

if TYPE_CHECKING:
    from geoq.rollout.estimator import RolloutGeoQ

_SCHEMES: dict[str, type[SaturatingGrowth | AdditiveRecursion]] = {
    scheme.__name__: scheme for scheme in (SaturatingGrowth, AdditiveRecursion)
}
_RULES: dict[str, type[RolloutRegion | DistanceRegion]] = {
    rule.__name__: rule for rule in (RolloutRegion, DistanceRegion)
}
_HELD_OUT = ("bound", "error", "supported", "start", "excess")
# Arrays without nan and infinity.
_FINITE = ("mean", "scale", "points.", "climatology.", "scheme.", "probe.")


def save(geoq: "RolloutGeoQ", path: str | Path, **labels: Any) -> None:
    """Write a calibrated estimator to one file; ``labels`` are further numbers, which ``load`` ignores."""
    check_fitted(geoq, "held_out_")
    scheme = geoq.scheme_
    if not isinstance(scheme, SaturatingGrowth | AdditiveRecursion):
        raise TypeError(
            f"scheme={type(scheme).__name__} cannot be saved; use {' or '.join(_SCHEMES)}."
        )
    settings, weights = scheme.state()
    geometry = geoq.reference_states_.geometry
    output = geoq.reference_states_.output
    numbers = {
        "estimator": "RolloutGeoQ",
        "n_anchors": geometry.n_anchors,
        "n_support": geoq.n_support,
        "n_support_of_queries": geometry.n_support,
        "output_shape": output.shape,
        "state_shape": geoq.forcing_.state,
        "forcing_shape": geoq.forcing_.shape,
        "n_calibrated": geoq.n_calibrated_,
        "n_starts": geoq.n_starts,
        "folds": repr(geoq.folds),
        "safe_region": _region_state(geoq.safe_region_),
        "scheme": type(scheme).__name__,
        "scheme_settings": settings,
        "numpy": isinstance(geoq.probes_, np.ndarray),
        "cuda": geoq.limit_.is_cuda,
    }
    arrays = {
        "mean": geoq.normalization_.mean,
        "scale": geoq.normalization_.scale,
        "points.z": geometry.points.z,
        "output": output.places,
        **with_prefix("climatology.", state_of(geoq.reference_states_.climatology)),
        **with_prefix("held_out.", geoq.held_out_.arrays),
        **with_prefix("scheme.", weights),
        **with_prefix("probe.", _answers(geoq)),
    }
    region = geoq.safe_region_
    if isinstance(region, FittedRolloutRegion) and region.initial is not None:
        arrays |= with_prefix("region.", region.initial.state())
    if not geometry.points.shared:
        arrays["points.normalized"] = geometry.points.normalized
    archive.write(path, numbers | labels, arrays)


def _region_state(region: FittedRegion) -> dict[str, Any]:
    rule: Any = getattr(region, "rule", region)
    if type(rule) not in _RULES.values():
        raise TypeError(
            f"the safe region {type(rule).__name__} cannot be saved; use {' or '.join(_RULES)}."
        )
    return {
        "rule": type(rule).__name__,
        "settings": asdict(rule),
        "threshold": region.threshold,
        "meaning": region.meaning,
    }


def load(
    cls: type["RolloutGeoQ"],
    path: str | Path,
    *,
    surrogate: Surrogate,
    representation: Representation | None,
) -> "RolloutGeoQ":
    """Read a calibrated estimator; see ``RolloutGeoQ.load``."""
    numbers, stored = archive.read(path)
    if numbers.get("estimator") != "RolloutGeoQ":
        raise ValueError(
            f"{path} does not contain a RolloutGeoQ; load it with the class that saved it."
        )
    archive.check_given(surrogate, "surrogate", path)
    with archive.restoring(path):
        _check(numbers, stored)
        arrays = archive.placed(numbers, stored)
        geoq = cls(
            surrogate,
            None,
            representation=representation,
            folds=UnavailableFolds(numbers["folds"]),
            n_starts=numbers["n_starts"],
            n_calibration=numbers["n_calibrated"],
            n_anchors=numbers["n_anchors"],
            n_support=numbers["n_support"],
        )
        _restore(geoq, numbers, arrays)
    present = _answers(geoq)
    with archive.restoring(path):
        expected, typical = arrays["probe.surrogate"], _typical_error(geoq)
    _check_surrogate(geoq, present["surrogate"], expected, typical)
    name = "representation"
    archive.check_same(name, present.get(name), arrays.get(f"probe.{name}"))
    with archive.restoring(path):
        # The callables have answered at these states, so that an error here lies in the file.
        states, *forcing = geoq.forcing_.split(geoq.probes_)
        geoq.assess(states, 1, forcing=forcing[0][:, None] if forcing else None)
    return geoq


def _typical_error(geoq: "RolloutGeoQ") -> Tensor:
    """The median held-out error of one step. Of large states, a file contains only the largest error of each step."""
    typical = geoq.held_out_.error[:, 0].median(dim=0).values
    possible = len(typical) in (1, len(geoq.reference_states_.output.places))
    archive.check_value("array 'held_out.error'", possible, "not of the output's shape")
    return typical


def _check_surrogate(
    geoq: "RolloutGeoQ", answer: Tensor, expected: Tensor, typical: Tensor
) -> None:
    """Refuse another surrogate: its distance from the original one is compared with the held-out errors of one step."""
    output = geoq.reference_states_.output

    def distance(one: Tensor, other: Tensor) -> Tensor:
        gap = (output(one[:, None]) - output(other[:, None])).abs().flatten(1)
        return gap if gap.shape[1] == len(typical) else gap.amax(dim=1, keepdim=True)

    if answer.shape == expected.shape:
        # First the coordinates that are not bounded.
        others = output.left_out((expected[0].numel(),))
        unbounded = (part.flatten(1)[:, others] for part in (answer, expected))
        if others.any():
            archive.check_same("surrogate", *unbounded)
    archive.check_surrogate(answer, expected, typical, distance)


def _check(numbers: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    """Refuse values that no calibration has, and arrays whose lengths differ."""
    # The factors of a scheme are infinite from the step at which too few calibration rollouts are left.
    archive.check_values(arrays, finite=_FINITE, defined=("scheme.factor_",), errors=())
    archive.check_number("threshold", numbers["safe_region"]["threshold"], above=-1e-9)
    archive.check_value(
        "numpy", isinstance(numbers["numpy"], bool), "not true or false"
    )
    archive.check_value("array 'probe.x'", len(arrays["probe.x"]) > 0, "empty")
    used = ("n_anchors", "n_support_of_queries")
    for name in (*used, "n_support", "n_calibrated", "n_starts"):
        check_count(numbers[name], name)
    for name in used:
        possible = numbers[name] <= len(arrays["points.z"])
        archive.check_value(name, possible, "larger than the data")
    shapes = (numbers["state_shape"], numbers["forcing_shape"] or [0])
    same = sum(map(math.prod, shapes)) == arrays["mean"].numel()
    archive.check_value("state_shape and forcing_shape", same, "not possible")
    n_held_out = len(arrays["held_out.error"])
    for part in _HELD_OUT:
        same = len(arrays[f"held_out.{part}"]) == n_held_out
        archive.check_value(f"array 'held_out.{part}'", same, "too short or too long")
    negative = bool((arrays["held_out.error"] < 0).any())
    archive.check_value("array 'held_out.error'", not negative, "negative")


def _restore(
    geoq: "RolloutGeoQ", numbers: dict[str, Any], arrays: dict[str, Tensor]
) -> None:
    """Restore everything that ``assess`` needs."""
    assert geoq.surrogate is not None
    geoq.surrogate_, geoq.n_calibrated_ = geoq.surrogate, geoq.n_calibration
    geoq.normalization_ = Standardization(arrays["mean"], arrays["scale"])
    state, shape = numbers["state_shape"], numbers["forcing_shape"]
    geoq.forcing_ = Forcing(tuple(state), None if shape is None else tuple(shape))
    z = arrays["points.z"]
    geometry = Geometry(
        Embedding(z, arrays.get("points.normalized", z)),
        n_anchors=geoq.n_anchors,
        n_support=numbers["n_support_of_queries"],
    )
    geoq.limit_, geoq.data_range_ = geoq.forcing_.limits(
        geometry.points.normalized, geoq.normalization_
    )
    climatology = FittedClimatology(**without_prefix("climatology.", arrays))
    output = Output(arrays["output"], tuple(numbers["output_shape"]))
    geoq.output = output.index(geoq.forcing_.state)
    geoq.reference_states_ = ReferenceStates(geometry, climatology, output)
    scheme = _SCHEMES[numbers["scheme"]].from_state(
        numbers["scheme_settings"], without_prefix("scheme.", arrays)
    )
    geoq.scheme = geoq.scheme_ = scheme
    region = numbers["safe_region"]
    geoq.safe_region = _RULES[region["rule"]](**region["settings"])
    left_out = output.left_out(geoq.forcing_.state)
    own = without_prefix("region.", arrays)
    geoq.safe_region_ = _restored_region(geoq.safe_region, region, left_out, own)
    geoq.held_out_ = HeldOutRollouts(
        **{part: arrays[f"held_out.{part}"] for part in _HELD_OUT},
        quantile=scheme.quantile,
    )
    probes = arrays["probe.x"]
    geoq.probes_ = probes.cpu().numpy() if numbers["numpy"] else probes


def _restored_region(
    rule: RolloutRegion | DistanceRegion,
    stored: dict[str, Any],
    left_out: Tensor,
    arrays: dict[str, Tensor],
) -> FittedRegion:
    meaning = tuple(stored["meaning"])
    if isinstance(rule, DistanceRegion):
        return FittedDistanceRegion(stored["threshold"], meaning, rule)
    first = rule.initial_rule(left_out)
    initial: FittedFieldRegion | FittedLocalRegion | None = None
    if isinstance(first, LocalRegion):
        initial = FittedLocalRegion.from_state(first, arrays)
    elif first is not None:
        initial = FittedFieldRegion.from_state(first, arrays)
    return FittedRolloutRegion(stored["threshold"], rule, initial, meaning)


def _answers(geoq: "RolloutGeoQ") -> dict[str, Tensor]:
    """The stored states, and the answers of the callables at them."""
    step, phi = geoq.forcing_.step(geoq.surrogate_), geoq.representation
    after = one_step(step)(geoq.probes_)
    answers = {"x": to_tensor(geoq.probes_, "x"), "surrogate": after}
    if phi is not None:
        phi = geoq.forcing_.representation(phi)
        answers["representation"] = evaluate(phi, geoq.probes_, "representation")
    return answers
