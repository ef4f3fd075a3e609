"""Answers of every estimator on fixed data; ``make golden`` stores them, ``test_golden.py`` compares with the stored ones.

Surrogates are closed-form or nearest-neighbour models, so that answers depend on geoq alone. Cases that train a network
of geoq's own take few steps, because rounding differs between machines and training amplifies it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsRegressor

import geoq
from geoq import GeoQ, RolloutGeoQ
from geoq.increments import Climatology, FieldFactor
from geoq.rollout import AdditiveRecursion

FILE = Path(__file__).parent / "data" / "golden.npz"
# Relative to the largest value of an array: closed-form answers, and answers of networks.
TOLERANCES = {"closed": 1e-6, "float32": 1e-4, "network": 5e-3}
PARTS = (
    "prediction",
    "error_hat",
    "safe",
    "support_score",
    "anchor_error",
    "increment",
    "anchors",
    "anchor_distance",
)

Answers = dict[str, np.ndarray]


def _array(values: object) -> np.ndarray:
    return values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _answers(assessment: object, parts: tuple[str, ...] = PARTS) -> Answers:
    return {part: _array(getattr(assessment, part)) for part in parts}


def table(n_outputs: int = 1, n: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)) * [1.0, 10.0, 0.1]
    columns = [
        np.sin(2 * x[:, 0]) + 0.02 * x[:, 1] ** 2,
        np.exp(x[:, 0] / 2),
        50 * x[:, 2] ** 2,
    ]
    return x, np.stack(columns[:n_outputs], axis=1)


def queries(n: int = 60) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(n, 3)) * [1.6, 16.0, 0.16]


def least_squares(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    def design(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.ones_like(x[:, :1])], axis=1)

    weights = np.linalg.lstsq(design(x), y, rcond=None)[0].astype(x.dtype)
    return lambda x: design(x) @ weights


def _fitted(x: np.ndarray, y: np.ndarray, **settings: object) -> GeoQ:
    groups = settings.pop("groups", None)
    return GeoQ(least_squares(x, y), least_squares, **settings).fit(x, y, groups=groups)


def default() -> Answers:
    return _answers(_fitted(*table()).assess(queries()))


def default_float32() -> Answers:
    x, y = (part.astype(np.float32) for part in table())
    return _answers(_fitted(x, y).assess(queries().astype(np.float32)))


def default_vector() -> Answers:
    return _answers(_fitted(*table(3)).assess(queries()))


def default_tensors() -> Answers:
    x, y = table()
    surrogate = least_squares(x, y)

    def tensors(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(surrogate(x.numpy()))

    fitted = GeoQ(tensors, None).fit(torch.from_numpy(x), torch.from_numpy(y))
    return _answers(fitted.assess(torch.from_numpy(queries())))


def bounds_at_levels() -> Answers:
    fitted = _fitted(*table(3))
    bounds = fitted.bounds(queries(), (0.5, 0.9, 0.99))
    return {str(level): _array(bound) for level, bound in bounds.items()}


def conformalized() -> Answers:
    x, y = table(3, n=400)
    fitted = _fitted(x[:150], y[:150])
    plain = fitted.conformalize(x[150:], y[150:]).bound(queries())
    whole = fitted.conformalize(x[150:], y[150:], guarantee=geoq.WholeField(0.9))
    return {"pointwise": _array(plain), "whole": _array(whole.bound(queries()))}


def climatology() -> Answers:
    x, y = table(3)
    model = geoq.TwoLawIncrement(reference=Climatology())
    return _answers(_fitted(x, y, increment_model=model).assess(queries()))


def norm_errors_in_groups() -> Answers:
    x, y = table(3)
    groups = np.arange(len(x)) // 10
    settings = {"error_functional": geoq.norm_error, "folds": geoq.GroupFolds(5)}
    return _answers(_fitted(x, y, groups=groups, **settings).assess(queries()))


def temporal() -> Answers:
    x, y = table()
    folds = geoq.TemporalFolds(5, gap=3)
    return _answers(_fitted(x, y, folds=folds, n_anchors=4).assess(queries()))


def paper() -> Answers:
    training = geoq.Training(n_steps=60, check_every=20)
    fitted = _fitted(
        *table(3),
        representation=geoq.identity,
        folds=geoq.ClusterFolds(5),
        increment_model=geoq.NormScaledIncrement(0.95, training=training),
        safe_region=geoq.SafeRegion(),
        n_anchors=3,
    )
    return _answers(fitted.assess(queries()))


def fields(n: int = 48) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    grid = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    wave = rng.normal(size=(n, 2, 3)) / [1, 2, 3]
    x = sum(
        wave[:, :, k, None, None] * np.sin((k + 1) * (grid[:, None] + grid))
        for k in range(3)
    )
    return x, np.roll(x, 1, axis=2) ** 2 + 0.3 * x


def _ridge(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    model = Ridge(alpha=1.0).fit(x.reshape(len(x), -1), y.reshape(len(y), -1))
    return lambda x: model.predict(x.reshape(len(x), -1)).reshape(-1, *y.shape[1:])


def _field_answers(increment_model: object, **settings: object) -> Answers:
    x, y = fields()
    fitted = GeoQ(
        _ridge(x[:36], y[:36]),
        _ridge,
        folds=geoq.RandomFolds(3),
        increment_model=increment_model,
        **settings,
    )
    return _answers(fitted.fit(x[:36], y[:36]).assess(1.2 * x[36:]))


def field_default() -> Answers:
    training = geoq.Training(n_steps=30, batch_size=8, check_every=10, patience=2)
    factor = FieldFactor(training=training, n_splits=3, dropout=0.0)
    return _field_answers(geoq.FieldScaleIncrement(factor=factor))


def field_paper() -> Answers:
    training = geoq.Training(n_steps=20, batch_size=8, check_every=10)
    return _field_answers(geoq.FieldIncrement(widths=(8, 16), training=training))


def indicator() -> Answers:
    training = geoq.Training(n_steps=20, batch_size=4, check_every=10)
    model = geoq.IndicatorIncrement(widths=(8, 16), n_networks=2, training=training)
    x, y = fields()
    wrong = (y > 0.3).astype(float)

    def train(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        surrogate = _ridge(x, y)
        return lambda x: (surrogate(x) > 0.4).astype(float)

    fitted = GeoQ(
        train(x[:36], wrong[:36]),
        train,
        folds=geoq.RandomFolds(3),
        increment_model=model,
    ).fit(x[:36], wrong[:36])
    expected = _array(fitted.expected_error(x[36:]))
    return {**_answers(fitted.assess(x[36:])), "expected": expected}


def henon(n: int = 1200) -> np.ndarray:
    states = np.zeros((n, 2))
    for k in range(n - 1):
        states[k + 1] = 1 - 1.4 * states[k, 0] ** 2 + states[k, 1], 0.3 * states[k, 0]
    return states


def _nearest(segments: list[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    now = np.concatenate([piece[:-1] for piece in segments])
    soon = np.concatenate([piece[1:] for piece in segments])
    return KNeighborsRegressor(3, weights="distance").fit(now, soon).predict


def _rollouts(dtype: type = np.float64, **settings: object) -> Answers:
    states = henon().astype(dtype)
    fitted = RolloutGeoQ(
        None, _nearest, n_calibration=30, n_starts=15, n_support=5, **settings
    ).fit(states[:900])
    assessment = fitted.assess(states[900:908], n_steps=40, tolerance=0.5)
    return _answers(
        assessment,
        (
            "prediction",
            "error_hat",
            "safe",
            "support_score",
            "supported_horizon",
            "trusted_horizon",
        ),
    )


def rollouts() -> Answers:
    return _rollouts()


def rollouts_float32() -> Answers:
    return _rollouts(np.float32)


def rollouts_paper() -> Answers:
    training = geoq.Training(n_steps=20, batch_size=8, check_every=10)
    scheme = AdditiveRecursion(training=training)
    return _rollouts(scheme=scheme, folds=geoq.ClusterFolds(3))


def sklearn() -> Answers:
    from geoq.sklearn import GeoQRegressor

    x, y = table()
    fitted = GeoQRegressor(Ridge(), folds=geoq.RandomFolds(5)).fit(x, y[:, 0])
    return _answers(fitted.assess(queries()))


def xarray() -> Answers:
    import xarray as xr

    from geoq.xarray import XarrayGeoQ

    x, y = table(3)
    time = np.arange(len(x))
    inputs = xr.DataArray(x, {"time": time, "input": list("abc")})
    outputs = xr.DataArray(y, {"time": time, "output": list("uvw")})
    fitted = XarrayGeoQ(GeoQ(None, least_squares), "time").fit(inputs, outputs)
    new = xr.DataArray(queries(), {"time": np.arange(60), "input": list("abc")})
    answer = fitted.assess(new)
    return {name: answer[name].values for name in PARTS}


CASES: dict[Callable[[], Answers], str] = {
    default: "closed",
    default_float32: "float32",
    default_vector: "closed",
    default_tensors: "closed",
    bounds_at_levels: "closed",
    conformalized: "closed",
    climatology: "closed",
    norm_errors_in_groups: "closed",
    temporal: "closed",
    paper: "network",
    field_default: "network",
    field_paper: "network",
    indicator: "network",
    rollouts: "closed",
    rollouts_float32: "float32",
    rollouts_paper: "network",
    sklearn: "closed",
    xarray: "closed",
}


def compute() -> Answers:
    """All answers, named ``case.part``."""
    torch.set_num_threads(1)
    return {
        f"{case.__name__}.{part}": values
        for case in CASES
        for part, values in case().items()
    }


def main() -> None:
    """Store the answers; with ``--bits`` compare with the stored ones bit for bit instead."""
    answers = compute()
    if "--bits" not in sys.argv:
        FILE.parent.mkdir(exist_ok=True)
        np.savez_compressed(FILE, **answers)
        print(f"{len(answers)} arrays written to {FILE}")  # noqa: T201
        return
    stored = np.load(FILE)
    changed = {*answers} ^ {*stored.files}
    changed |= {
        name
        for name in {*answers} & {*stored.files}
        if answers[name].tobytes() != stored[name].tobytes()
    }
    print(f"{len(answers)} arrays, {len(changed)} differ: {sorted(changed)}")  # noqa: T201
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
