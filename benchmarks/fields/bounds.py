"""Are the bounds of fields narrow? Thirteen problems of all forms, against two simple methods and without the companion.

    python -m benchmarks.fields.bounds --jobs 14          # about five minutes on 16 cores
    python -m benchmarks.fields.bounds --small

The form "set aside" has a surrogate that has not seen the pairs of the calibration; "folds" trains fold surrogates.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from benchmarks.fields.forms import FORMS, NEW, NODES, reduced
from benchmarks.fields.operator import train
from benchmarks.fields.problems import PROBLEMS
from benchmarks.record import QUANTILE
from benchmarks.runs import Benchmark, script
from benchmarks.third_party.rivals import conformal_quantile
from geoq import GeoQ, Mesh, RandomFolds, Training
from geoq.metrics import coverage, pinball
from geoq.parts import FieldBound, FieldFactor

ALL = PROBLEMS | FORMS | NEW
FULL = {"n_train": 300, "n_queries": 200, "sizes": (200, 50), "n_folded": 100, "n_steps": 500}
SMALL = {"n_train": 30, "n_queries": 10, "sizes": (30,), "n_folded": 25, "n_steps": 3}


@dataclass(frozen=True)
class Alone(FieldBound):
    """The default without a companion."""

    uses_companion: ClassVar[bool] = False


OURS = {"GeoQ": FieldBound, "GeoQ (no companion)": Alone}
RIVALS = ("per cell", "regression")


def estimator(name, method, surrogate, recipe, *, small):
    """GeoQ with the domain of the problem."""
    factor, domain = FieldFactor(), Mesh(NODES) if name == "Poisson on a mesh" else None
    if small:
        training = Training(n_steps=5, batch_size=8, check_every=5)
        factor = replace(factor, training=training, widths=(4,), n_splits=2)
    bound = OURS[method](factor=factor)
    return GeoQ(surrogate, recipe, folds=RandomFolds(5), domain=domain, bound_model=bound)


def recipe_of(problem, seed, n_steps):
    if problem.name in FORMS:
        return reduced
    modes = {"n_modes": problem.n_modes, "in_time": problem.in_time}
    return partial(train, seed=seed, n_steps=n_steps, **modes)


def summaries(x, p):
    """Mean, deviation, extremes and roughness of each channel of inputs and prediction; numbers stay."""
    found = [np.ones((len(x), 1))]
    for part in (x, p):
        if part.ndim == 2:
            found.append(part)
            continue
        flat = part.reshape(len(part), part.shape[1], -1)
        rough = abs(np.diff(part, axis=-1)).reshape(len(part), part.shape[1], -1)
        found += [flat.mean(2), flat.std(2), flat.min(2), flat.max(2), rough.mean(2)]
    return np.concatenate(found, axis=1)


def regression_scaled(x, p, errors, x_new, p_new):
    """Split conformal bounds of errors divided by a regression of the size of a field's error on its summaries."""
    features, new = summaries(x, p), summaries(x_new, p_new)
    mean, scale = features.mean(0), features.std(0) + 1e-12
    mean[0], scale[0] = 0, 1
    features, new = (features - mean) / scale, (new - mean) / scale
    size = np.log(errors.reshape(len(errors), -1).mean(axis=1) + 1e-12)

    def solved(rows):
        own = features[rows]
        return np.linalg.solve(own.T @ own + np.eye(own.shape[1]), own.T @ size[rows])

    fold, held_out = np.arange(len(x)) % 5, np.zeros(len(x))
    for number in range(5):
        held_out[fold == number] = features[fold == number] @ solved(fold != number)
    as_rows = (-1,) + (1,) * (errors.ndim - 1)
    found = (new @ solved(slice(None))).clip(held_out.min(), held_out.max())
    scaled = errors / np.exp(held_out).reshape(as_rows)
    return np.exp(found).reshape(as_rows) * conformal_quantile(scaled)


def measure(name, seed, wanted, *, small=False):
    """One row per form, number of pairs and method."""
    problem, sizes = ALL[name], SMALL if small else FULL
    rng, n_train = np.random.default_rng(100 + seed), sizes["n_train"]
    n_queries = sizes["n_queries"]
    x = problem.draw(rng, n_train + max(sizes["sizes"]) + n_queries)
    y = problem.solve(x)
    recipe = recipe_of(problem, seed, sizes["n_steps"])
    surrogate = recipe(x[:n_train], y[:n_train])
    x_new, y_new = x[-n_queries:], y[-n_queries:]
    ours, rows = [m for m in wanted if m in OURS], []

    def row(method, form, n, truth, bound):
        about = {"method": method, "setting": name, "seed": seed, "n": n, "form": form}
        losses = {"pinball": pinball(truth, bound, QUANTILE), "coverage": coverage(truth, bound)}
        rows.append(about | losses)

    def fit(method, model, train_surrogate, pairs, folder=None):
        geoq = estimator(name, method, model, train_surrogate, small=small)
        return geoq.fit(*pairs, checkpoint=folder, progress=None).bound(x_new)

    p_new = surrogate(x_new)
    truth = abs(p_new - y_new)
    for n in sizes["sizes"]:
        pairs = x[n_train : n_train + n], y[n_train : n_train + n]
        p = surrogate(pairs[0])
        errors = abs(p - pairs[1])
        simple = {
            "per cell": np.broadcast_to(conformal_quantile(errors), truth.shape),
            "regression": regression_scaled(pairs[0], p, errors, x_new, p_new),
        }
        for method in (m for m in RIVALS if m in wanted):
            row(method, "set aside", n, truth, simple[method])
        for method in ours:
            row(method, "set aside", n, truth, fit(method, surrogate, None, pairs))
    pairs = x[: sizes["n_folded"]], y[: sizes["n_folded"]]
    deployed = recipe(*pairs)
    truth = abs(deployed(x_new) - y_new)
    with tempfile.TemporaryDirectory() as folder:  # all methods have the same fold surrogates
        for method in ours:
            bound = fit(method, deployed, recipe, pairs, folder)
            row(method, "folds", sizes["n_folded"], truth, bound)
    return rows


METHODS, SMALLEST = [*RIVALS, *OURS], ("Plume of five parameters",)
BENCHMARK = Benchmark("fields_bounds", list(ALL), measure, lambda _: METHODS, range(4), SMALLEST)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
