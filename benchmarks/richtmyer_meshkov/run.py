"""The paper's fourth problem: a Fourier neural operator predicts how a shocked interface between two gases rolls up.

    python -m benchmarks.richtmyer_meshkov.run --data FILE --work DIR --device cuda   # 2 seeds, all methods
    python -m benchmarks.richtmyer_meshkov.run --coarse                               # a smaller version for two CPU cores
    python -m benchmarks.richtmyer_meshkov.run --small                                # coarse grid, few steps: two minutes
    python -m benchmarks.richtmyer_meshkov.pictures DIR/fields.npz docs           # draw the pictures

The surrogate maps the initial field to 12 later ones, on 240 x 480 cells; fields are binary (1 is heavy gas). K-means on
the initial fields gives 11 clusters: one is the test set, each of the other 10 is a fold. The clustering is the same for
all seeds. Seed s takes the s-th cluster among the clusters with 5 to 15 % of the simulations; this rule was fixed before
any score was computed.

Two errors are bounded, in separate rows: the error of the thresholded prediction (setting "binary", 0 or 1) and the error
of the probability (setting "probability"). A cell is covered if error <= bound (1 + 1e-6) + 1e-6. Most cells are right,
so the zero bound has a high coverage. The rows therefore also give the coverage and the correlation within 4 cells of the
predicted interface, the fraction of wrong cells whose bound is at least one half, and the fraction of all cells whose
bound is. "(rounded)" is a continuous bound of the 0/1 error after rounding. "expected error" is the map behind a two-valued
bound, not a bound. The background penalty lowers the increment, so "(background penalty)" is no bound of level 0.95.

Each trained network and the rows of each method are stored in the work folder as soon as they are ready. The same command
continues an interrupted run. To measure a method again, delete its files.
"""

import argparse
import json
import logging
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import record
from benchmarks.richtmyer_meshkov import data as simulations
from benchmarks.richtmyer_meshkov import fourier_operator
from benchmarks.richtmyer_meshkov.bounds import BINARY, PROBABILITY
from benchmarks.richtmyer_meshkov.methods import METHODS
from benchmarks.richtmyer_meshkov.networks import compile_unets
from benchmarks.richtmyer_meshkov.operator_training import TrainOperator
from benchmarks.richtmyer_meshkov.pictures import draw, slug
from benchmarks.richtmyer_meshkov.scores import (
    FLAG,
    TOLERANCE,
    as_bytes,
    fields_of,
    score,
    surrogate_accuracy,
)
from benchmarks.richtmyer_meshkov.study import (
    COARSE,
    SMALL,
    Settings,
    Study,
    clusters_of,
)

# Stages of a run; each stores its results in the work folder.


@contextmanager
def stage(name):
    started = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def write_whole(path, write):
    """Write a file under another name and rename it, so that an interrupted run leaves no incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    write(unfinished)
    unfinished.rename(path)


def as_json(path, content):
    write_whole(path, lambda file: file.write_text(json.dumps(content)))


def train_networks(study, names):
    """Train the networks that have no file yet."""
    recipe = TrainOperator(study.settings.operator, str(study.x.device))
    for name in names:
        file, (rows, seed) = study.networks.file(name), study.trainings[name]
        if file.is_file():
            continue
        with stage(f"seed {study.seed} network {name}"):
            started = time.perf_counter()
            network = recipe.with_seed(seed)(study.x[rows], study.y[rows]).network
            write_whole(file, partial(fourier_operator.save, network))
            seconds = time.perf_counter() - started
            as_json(file.with_suffix(".json"), {"seconds": seconds})


def part_of(folder, method, setting):
    """File of the rows of a method in a setting."""
    return folder / "rows" / f"{slug(method.name)}-{setting.name}.json"


def measure(study, method, setting, part):
    """Measure a method in a setting, and store its rows and arrays."""
    on_gpu = study.x.is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with last_training() as ended:
        answer = method.answer(study, setting)
    answer.bound.sum().item()  # waits for the device
    seconds = time.perf_counter() - started
    answers = {method.name: answer}
    if method.continuous and setting == BINARY:
        rounded = answer._replace(bound=(answer.bound >= FLAG).float())
        answers[f"{method.name} (rounded)"] = rounded
    if answer.expected is not None:
        # The expected error is scored too, although it is no bound.
        shown = answer._replace(bound=answer.expected, safe=None)
        answers[f"{method.name}, expected error"] = shown
    rows = [
        {
            "method": name,
            "setting": setting.name,
            "seed": study.seed,
            "tolerance": TOLERANCE,
            "most_steps": study.settings.training.n_steps,
            **ended,
            **score(setting, study, one),
            "seconds": seconds,
            "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30
            if on_gpu
            else None,
        }
        for name, one in answers.items()
    ]
    fields = fields_of(setting, study, method, answer)
    write_whole(part.with_suffix(".npz"), lambda file: save_arrays(file, fields))
    as_json(part, [row | {"commit": record.COMMIT} for row in rows])
    for row in rows:
        print(
            f"seed {study.seed} {setting.name:11s} {row['method']:50s} pinball {1000 * row['pinball']:7.3f}e-3  "
            f"correlation {row['correlation']:.3f}  coverage {row['coverage']:.4f} (band {row['band_coverage']:.3f})  "
            f"recall {row['recall']:.3f} at {row['flagged']:.4f}  {seconds:.1f} s, step {ended['best_step']} of "
            f"{ended['last_step']}",
            flush=True,
        )


@contextmanager
def last_training():
    """Held-out loss, best step and last step of the last training inside the block; None if there was none."""
    ended = dict.fromkeys(("held_out_loss", "best_step", "last_step"))

    class Remember(logging.Handler):
        def emit(self, record):
            if record.msg.startswith("trained"):
                _, *numbers = record.args
                ended.update(zip(ended, numbers, strict=True))

    logger, handler = logging.getLogger("geoq.training"), Remember()
    logger.addHandler(handler)
    try:
        yield ended
    finally:
        logger.removeHandler(handler)


def save_arrays(file, arrays):
    with file.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def describe(study, path):
    """Store the accuracy of the surrogate, and the arrays of its predictions for the pictures."""
    case = study.median_case
    common = {
        "truth": as_bytes(study.y_test[case]),
        "prediction": as_bytes(study.p[case]),
        "support_distance": study.support_distance.cpu().numpy(),
    }
    write_whole(study.folder / "case.npz", lambda file: save_arrays(file, common))
    as_json(path, surrogate_accuracy(study))


def run(study, methods):
    """Measure what is missing of a seed; yields after each method, so that the results can be written."""
    accuracy = study.folder / "surrogate.json"
    missing = [
        (method, setting, part)
        for method in methods
        for setting in method.settings
        if not (part := part_of(study.folder, method, setting)).is_file()
    ]
    if missing or not accuracy.is_file():
        # Before all methods, so that no method is charged for it.
        train_networks(study, ["deployed", *study.fold_names])
        with stage(f"seed {study.seed} predictions"):
            study.predict()
    if not accuracy.is_file():
        with stage(f"seed {study.seed} accuracy of the surrogate"):
            describe(study, accuracy)
    for method, setting, part in missing:
        # If a method fails, the other methods are still measured, and the next run tries the method again.
        try:
            train_networks(study, method.networks(study))
            measure(study, method, setting, part)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        torch.cuda.empty_cache()
        yield


def collect(work, path, **facts):
    """Write the results file from all stored rows."""
    rows, surrogates = [], []
    for folder in sorted(work.glob("seed-*")):
        if not (folder / "surrogate.json").is_file():
            continue
        parts = [
            part_of(folder, method, setting)
            for setting in (BINARY, PROBABILITY)
            for method in METHODS
            if setting in method.settings
        ]
        for part in filter(Path.is_file, parts):
            rows += json.loads(part.read_text())
        networks = {
            file.stem: json.loads(file.read_text())["seconds"]
            for file in sorted((folder / "networks").glob("*.json"))
        }
        accuracy = json.loads((folder / "surrogate.json").read_text())
        surrogates.append(accuracy | {"training_seconds": networks})
    facts |= {"coverage_tolerance": TOLERANCE, "surrogates": surrogates}
    return record.write(path.stem, rows, path, **facts)


def collect_fields(work, seed, path):
    """Write all arrays of the pictures into one file."""
    folder, arrays = work / f"seed-{seed}", {}
    for file in [folder / "case.npz", *sorted((folder / "rows").glob("*.npz"))]:
        with np.load(file) as stored:
            arrays |= {f"{file.stem}/{name}": stored[name] for name in stored.files}
    write_whole(path, lambda file: save_arrays(file, arrays))


def read_data(file, work, settings, device):
    """The simulations of a file, or new simulations if no file is given."""
    if file is not None:
        return simulations.load(file)
    n, shape = settings.n_simulations, settings.shape
    return simulations.simulate(n, shape, 0, device, parts=work / "simulations")


def check_same(work, facts):
    """Raise if the work folder belongs to other simulations or other networks."""
    path = work / "facts.json"
    if not path.is_file():
        as_json(path, facts)
    known = json.loads(path.read_text())
    if known != facts:
        differing = [name for name in facts if known.get(name) != facts[name]]
        raise SystemExit(
            f"{work} holds results of a run with other {' and '.join(differing)}; choose another folder with --work."
        )


def settings_of(arguments):
    small, coarse = arguments.small, arguments.coarse
    settings = SMALL if small else COARSE if coarse else Settings()
    operator, training = settings.operator, settings.training
    return replace(
        settings,
        operator=replace(operator, n_epochs=arguments.epochs or operator.n_epochs),
        training=replace(training, n_steps=arguments.steps or training.n_steps),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--small",
        action="store_true",
        help="few coarse simulations and short trainings",
    )
    size.add_argument(
        "--coarse", action="store_true", help="a smaller version for two CPU cores"
    )
    parser.add_argument(
        "--data", type=Path, help="file written by benchmarks.richtmyer_meshkov.data"
    )
    parser.add_argument("--work", type=Path, help="folder of networks and rows")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds, by default 0 1")
    parser.add_argument("--device", help="by default cuda if there is a GPU")
    parser.add_argument(
        "--memory",
        type=float,
        help="fraction of the GPU memory to use, such as 0.48 where two seeds run at once",
    )
    parser.add_argument(
        "--method",
        action="append",
        choices=[method.name for method in METHODS],
        metavar="NAME",
        help="measure this method only; may be repeated, and the order is kept",
    )
    parser.add_argument(
        "--epochs", type=int, help="epochs of each training of the operator"
    )
    parser.add_argument(
        "--steps", type=int, help="largest number of steps of each learned bound"
    )
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument(
        "--fields", type=Path, help="file of the arrays for the pictures"
    )
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("geoq").setLevel(logging.INFO)
    small = arguments.small
    settings = settings_of(arguments)
    suffix = "-small" if small else "_coarse" if arguments.coarse else ""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = arguments.work or Path(f"build/richtmyer_meshkov{suffix}")
    seeds = arguments.seeds or ([0] if small else [0, 1])
    by_name = {method.name: method for method in METHODS}
    methods = [by_name[name] for name in arguments.method or by_name]
    with stage("data"):
        data = read_data(arguments.data, work, settings, device)
        checksum = simulations.checksum(data)
        # Networks and rows depend on these; the number of training steps of a bound may differ.
        check_same(work, {"data": checksum, "networks": settings.of_networks})
        facts = {
            "data_checksum": checksum,
            "simulations": f"{len(data.u)} of seed {data.seed}, {data.tube}",
            "settings": repr(settings),
            "small": small,
        }
    with stage("clusters"):
        cluster = clusters_of(torch.from_numpy(data.u0).to(device), settings.n_clusters)
    if torch.device(device).type == "cuda":
        compile_unets()
        if arguments.memory:
            torch.cuda.set_per_process_memory_fraction(arguments.memory)
    out = arguments.out or record.RESULTS / f"richtmyer_meshkov{suffix}.json"
    fields = arguments.fields or work / "fields.npz"
    for seed in seeds:
        study = Study.of(settings, seed, work / f"seed-{seed}", data, cluster, device)
        with stage(f"seed {seed}"):
            for _ in run(study, methods):
                collect(work, out, **facts)
        del study  # frees the memory of the device
        collect_fields(work, seeds[0], fields)
    print(collect(work, out, **facts))
    if arguments.pictures:
        draw(fields, arguments.pictures)


if __name__ == "__main__":
    main()
