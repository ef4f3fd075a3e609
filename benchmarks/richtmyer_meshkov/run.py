"""The paper's fourth problem: a Fourier neural operator predicts how a shocked interface between two gases rolls up.

    python -m benchmarks.richtmyer_meshkov.run --device cuda     # 2 seeds, all methods; SIMULATIONS names the file of the data
    python -m benchmarks.richtmyer_meshkov.run --coarse          # a smaller version for two CPU cores
    python -m benchmarks.richtmyer_meshkov.run --methods "binary: GeoQ*"
    python -m benchmarks.richtmyer_meshkov.run --small

The surrogate maps the initial field to 12 later ones, on 240 x 480 cells; fields are binary (1 is heavy gas). K-means on
the initial fields gives 11 clusters: one is the test set, each of the other 10 is a fold. The clustering is the same for
all seeds. Seed s takes the s-th cluster among the clusters with 5 to 15 % of the simulations; this rule was fixed before
any score was computed.

Two errors are bounded, in separate rows: the error of the thresholded prediction (setting "binary", 0 or 1) and the error
of the probability (setting "probability"). Most cells are right, so the zero bound has a high coverage. The rows therefore also give
the coverage and the correlation within 4 cells of the predicted interface, the fraction of wrong cells whose bound is at least one
half, and the fraction of all cells whose bound is. "(rounded)" is a continuous bound of the 0/1 error after rounding. "expected error"
is the map behind a two-valued bound. The background penalty lowers the increment, so "(background penalty)" is no bound of level 0.95.

The trained networks are kept in the folder --work, and so are the arrays of the pictures (fields-SEED.npz).
"""

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.richtmyer_meshkov import data as simulations
from benchmarks.richtmyer_meshkov import scores
from benchmarks.richtmyer_meshkov.bounds import BINARY
from benchmarks.richtmyer_meshkov.methods import METHODS, NAMES, SETTINGS
from benchmarks.richtmyer_meshkov.pictures import slug
from benchmarks.richtmyer_meshkov.study import COARSE, SMALL, Settings, Study
from benchmarks.runs import Benchmark, parser_of, run
from benchmarks.timing import now

PROBLEM = "richtmyer_meshkov"


def method_of(row):
    return f"{row.get('setting')}: {row.get('method')}"


def measure(problem, seed, wanted, *, small=False, settings=None, read=None, work=None, device=""):
    """Rows of some methods in their settings, and of the surrogate."""
    del small
    study, arrays = Study.of(settings, seed, work, read(), device), {}
    rows = [{"kind": "surrogates", "problem": problem, **scores.accuracy(study)}]
    arrays |= {
        "case/truth": scores.as_bytes(study.y_test[study.median_case]),
        "case/prediction": scores.as_bytes(study.p[study.median_case]),
    }
    for name in wanted:
        setting, method = name.split(": ", 1)
        found, answer = of_method(study, SETTINGS[setting], method)
        rows += [{"problem": problem, "seed": seed} | row for row in found]
        own = scores.arrays_of(study, method, answer)
        arrays |= {f"{slug(method)}-{setting}/{key}": array for key, array in own.items()}
    rows[0]["training_seconds"] = study.networks.seconds
    keep(work / f"fields-{seed}.npz", arrays)
    return rows


def of_method(study, setting, name):
    """Rows and answer of a method."""
    method = METHODS[name]
    started, trained = now(), study.networks.spent
    answer = method.answer(study, setting)
    answer.bound.sum().item()  # waits for the device
    seconds = now() - started - (study.networks.spent - trained)
    answers = {name: answer}
    if method.continuous and setting == BINARY:
        rounded = answer._replace(bound=(answer.bound >= scores.FLAG).float())
        answers[f"{name} (rounded)"] = rounded
    if answer.expected is not None:
        # The expected error is scored too, although it is no bound.
        shown = answer._replace(bound=answer.expected, safe=None)
        answers[f"{name}, expected error"] = shown
    about = {"seconds": seconds, "tolerance": scores.TOLERANCE}
    rows = [
        {"method": own, "setting": setting.name, **scores.score(setting, study, one), **about}
        for own, one in answers.items()
    ]
    print(setting.name, name, f"pinball {1000 * rows[0]['pinball']:.3f}e-3", flush=True)
    return rows, answer


def keep(path, arrays):
    """Add arrays to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files} | arrays
    np.savez_compressed(path, **arrays)


def read_data(file, work, settings, device):
    """The simulations of a file, or new simulations if no file is given."""
    if file is not None:
        return simulations.load(file)
    n, shape = settings.n_simulations, settings.shape
    return simulations.simulate(n, shape, 0, device, parts=work / "simulations")


def main(words=None):
    parser = parser_of(__doc__)
    parser.add_argument("--coarse", action="store_true", help="a smaller version for CPU cores")
    parser.add_argument("--data", type=Path, default=os.environ.get("SIMULATIONS"))
    parser.add_argument("--work", type=Path, help="folder of networks and arrays")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(words)
    ending = "-small" * asked.small or "_coarse" * asked.coarse
    settings = SMALL if asked.small else COARSE if asked.coarse else Settings()
    work = asked.work or Path(f"build/{PROBLEM}{ending}")
    file = None if ending else asked.data
    read = partial(read_data, file, work, settings, asked.device)
    data = read()
    facts = {
        "data_checksum": data.checksum,
        "simulations": f"{len(data.u)} of seed {data.seed}, {data.tube}",
        "settings": repr(settings),
    }
    name, how = PROBLEM + "_coarse" * asked.coarse, ((0, 1), (), lambda: facts, method_of)
    benchmark = Benchmark(name, (PROBLEM,), measure, lambda _: NAMES, *how)
    where = {"settings": settings, "read": read, "work": work, "device": asked.device}
    return run(benchmark, asked, **where)


if __name__ == "__main__":
    main()
