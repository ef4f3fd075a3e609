"""Are the bounds of fields narrow? Ten problems of all forms, against two simple methods and with other settings of GeoQ.

python -m benchmarks.fields.bounds --out FILE --processes 14      # about five minutes on 16 cores
python -m benchmarks.fields.bounds --small --problems Burgers     # seconds
"""

import argparse
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from benchmarks import record
from benchmarks.fields.forms import FORMS, NODES, reduced
from benchmarks.fields.operator import train
from benchmarks.fields.problems import PROBLEMS
from geoq import FieldScaleIncrement, GeoQ, Grid, Mesh, RandomFolds, Training
from geoq.increments import FieldFactor, inputs
from geoq.metrics import coverage, pinball

ALL = PROBLEMS + FORMS
LEVEL = record.QUANTILE
N_TRAIN, N_QUERIES, SIZES, N_FOLDED = 300, 200, (200, 50), 100
N_OPERATOR_STEPS = 500
PERIODIC = {
    "Burgers",
    "Kuramoto-Sivashinsky",
    "Lorenz-96",
    "Schroedinger",
    "Transport",
    "Heat in a cube",
}


def domain_of(problem):
    return Mesh(NODES) if problem.name == "Poisson on a mesh" else None


def methods_of(problem, x):
    """Settings of GeoQ by name. The factor sees the inputs and the prediction (x, p), the default, or the inputs alone (x)."""
    increment = partial(FieldScaleIncrement, domain=domain_of(problem))
    methods = {
        "GeoQ (x, p)": increment(),
        "GeoQ (x)": increment(factor=FieldFactor(sees=(inputs,))),
    }
    if problem.name in PERIODIC:
        n_axes = x.ndim - 2
        grid = Grid(n_axes, periodic=(True,) * n_axes)
        methods["GeoQ (periodic)"] = FieldScaleIncrement(domain=grid)
    return methods


def recipe_of(problem, seed, n_steps):
    if problem in FORMS:
        return reduced
    return partial(
        train,
        seed=seed,
        n_steps=n_steps,
        n_modes=problem.n_modes,
        in_time=problem.in_time,
    )


def per_cell(errors):
    """Split conformal bounds of each cell."""
    place = min(int(np.ceil((len(errors) + 1) * LEVEL)), len(errors)) - 1
    return np.sort(errors, axis=0)[place]


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
    ridge = 1.0 * np.eye(features.shape[1])

    def solved(rows):
        own = features[rows]
        return np.linalg.solve(own.T @ own + ridge, own.T @ size[rows])

    fold = np.arange(len(x)) % 5
    held_out = np.zeros(len(x))
    for number in range(5):
        held_out[fold == number] = features[fold == number] @ solved(fold != number)
    as_rows = (-1,) + (1,) * (errors.ndim - 1)
    scaled = errors / np.exp(held_out).reshape(as_rows)
    low, high = held_out.min(), held_out.max()
    factor = np.exp((new @ solved(slice(None))).clip(low, high)).reshape(as_rows)
    return factor * per_cell(scaled)


def rows_of(problem, seed, settings):
    """One row per form, number of pairs and method."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(100 + seed)
    n_train, n_queries = settings["n_train"], settings["n_queries"]
    sizes, n_folded = settings["sizes"], settings["n_folded"]
    x = problem.draw(rng, n_train + max(sizes) + n_queries)
    y = problem.solve(x)
    recipe = recipe_of(problem, seed, settings["n_steps"])
    surrogate = recipe(x[:n_train], y[:n_train])
    x_new, y_new = x[-n_queries:], y[-n_queries:]
    rows = []
    for n in sizes:
        pairs = x[n_train : n_train + n], y[n_train : n_train + n]
        about = {"setting": problem.name, "seed": seed, "n": n, "form": "set aside"}
        p, p_new = surrogate(pairs[0]), surrogate(x_new)
        errors, truth = abs(p - pairs[1]), abs(p_new - y_new)
        bounds = {
            "per cell": np.broadcast_to(per_cell(errors), truth.shape),
            "regression": regression_scaled(pairs[0], p, errors, x_new, p_new),
        }
        rows += [_row(about, name, truth, bound) for name, bound in bounds.items()]
        for name, model in methods_of(problem, x).items():
            model = _shortened(model, settings)
            geoq = GeoQ(surrogate, None, folds=RandomFolds(5), increment_model=model)
            rows.append(_fitted(about, name, geoq, pairs, x_new, truth))
    pairs = x[:n_folded], y[:n_folded]
    deployed = recipe(*pairs)
    truth = abs(deployed(x_new) - y_new)
    about |= {"n": n_folded, "form": "folds"}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in methods_of(problem, x).items():
            model = _shortened(model, settings)
            geoq = GeoQ(deployed, recipe, folds=RandomFolds(5), increment_model=model)
            # All methods have the same fold surrogates.
            rows.append(_fitted(about, name, geoq, pairs, x_new, truth, folder))
    return rows


def _shortened(model, settings):
    if settings["training"] is None:
        return model
    model.factor = FieldFactor(
        sees=model.factor.sees if model.factor else None,
        training=settings["training"],
        widths=(4,),
        n_splits=2,
    )
    return model


def _fitted(about, name, geoq, pairs, x_new, truth, checkpoint=None):
    started = time.perf_counter()
    geoq.fit(*pairs, checkpoint=checkpoint)
    seconds = time.perf_counter() - started
    factor = geoq.increment_model_.factor_
    sees = [] if factor is None else [f.__name__ for f in factor.settings.sees]
    row = _row(about, name, truth, geoq.bound(x_new))
    return row | {"seconds": seconds, "sees": sees}


def _row(about, method, truth, bound):
    return {
        "method": method,
        **about,
        "pinball": float(pinball(truth, bound, LEVEL)),
        "coverage": float(coverage(truth, bound)),
    }


SETTINGS = {
    "n_train": N_TRAIN,
    "n_queries": N_QUERIES,
    "sizes": SIZES,
    "n_folded": N_FOLDED,
    "n_steps": N_OPERATOR_STEPS,
    "training": None,
}
SMALL = {
    "n_train": 40,
    "n_queries": 20,
    "sizes": (40,),
    "n_folded": 30,
    "n_steps": 5,
    "training": Training(n_steps=10, batch_size=8, check_every=5),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [problem.name for problem in ALL]
    parser.add_argument("--problems", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a run of seconds")
    parser.add_argument(
        "--out", type=Path, default=record.RESULTS / "fields_bounds.json"
    )
    arguments = parser.parse_args()
    settings = SMALL if arguments.small else SETTINGS
    chosen = [problem for problem in ALL if problem.name in arguments.problems]
    tasks = [(p.name, seed) for seed in arguments.seeds for p in chosen]
    source, rows = record.source("benchmarks.fields.bounds"), []
    with get_context("spawn").Pool(arguments.processes) as pool:
        for done in pool.imap(partial(_task, settings=settings), tasks):
            rows += done
            print(done[0]["setting"], done[0]["seed"], flush=True)
            record.write("fields_bounds", rows, arguments.out, source=source)


def _task(task, settings):
    name, seed = task
    return rows_of(next(p for p in ALL if p.name == name), seed, settings)


if __name__ == "__main__":
    main()
