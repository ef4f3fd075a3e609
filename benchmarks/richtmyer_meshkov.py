"""The paper's fourth problem: a Fourier neural operator predicts how a shocked interface between two gases rolls up.

    python benchmarks/richtmyer_meshkov.py --data FILE --work DIR --device cuda   # 2 seeds, all methods
    python benchmarks/richtmyer_meshkov.py --small                                # coarse grid, few steps: two minutes
    python benchmarks/richtmyer_meshkov_pictures.py DIR/fields.npz docs           # draw what was measured

The surrogate maps the initial field to 12 later ones, on 240 x 480 cells; fields are binary (1 is heavy gas). K-means on
the initial fields gives 11 clusters: one is the test set, each of the other 10 is a fold. The clustering is the same for
all seeds; seed s takes the s-th cluster among those with 5 to 15 % of the simulations, a rule made before any score.

Two errors are bounded, in rows of their own: that of the thresholded prediction (setting "binary", 0 or 1) and that of the
probability ("probability"). A cell is covered where error <= bound (1 + 1e-6) + 1e-6. The zero bound covers nearly
everything, so coverage says little; the rows also give coverage and correlation in the band of cells up to 4 from the
predicted interface, the share of wrong cells where a bound is at least a half, and the area where it is. "(rounded)" is a
continuous bound of the 0/1 error, as 1 where it is at least a half and as 0 elsewhere. "expected error" is the map that
verdicts are read off, and no bound. "(background penalty)" is no bound of level 0.95: the penalty lowers the level.

Each trained network and each method's rows are kept in the work folder as soon as they are done, so the same command goes
on where it was cut; to measure a method again, delete its part.
"""

import argparse
import json
import logging
import time
import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import fourier_operator
import numpy as np
import record
import richtmyer_meshkov_data as simulations
import torch
from fourier_operator import (
    FourierOperator,
    OperatorSurrogate,
    OperatorTraining,
    TrainOperator,
)
from record import QUANTILE
from richtmyer_meshkov_methods import (
    BINARY,
    METHODS,
    PROBABILITY,
    compile_unets,
    interface_distance,
    n_kept_apart,
    wrong,
)
from richtmyer_meshkov_pictures import SHOWN, SHOWN_TIMES, draw, slug
from sklearn.cluster import KMeans

from geoq import Training
from geoq.increment import pinball_loss
from geoq.metrics import correlation, coverage, pinball, relative_l2
from geoq.neighbors import Neighbors
from geoq.surrogate import evaluate, few_threads

TOLERANCE = 1e-6
BAND = 4
# Bounds from here on count as a warning: the cell is flagged.
FLAG = 0.5


@dataclass(frozen=True)
class Settings:
    """How much of everything: the paper's numbers, or few for a small run."""

    shape: tuple[int, int] = (240, 480)
    n_simulations: int = 1000
    n_clusters: int = 11
    test_share: tuple[float, float] = (0.05, 0.15)
    n_members: int = 10
    n_passes: int = 20
    # The deployed network has dropout as well, so that MC dropout needs no other.
    operator: OperatorTraining = field(
        default_factory=lambda: OperatorTraining(
            make_network=partial(FourierOperator, dropout=0.1),
            n_epochs=12,
            batch_size=8,
        )
    )
    # Five levels: a cell sees 92 cells around it, about as far as the interface gets.
    widths: tuple[int, ...] = (32, 64, 128, 128, 128)
    training: Training = field(
        default_factory=lambda: Training(
            n_steps=4000, batch_size=4, check_every=250, patience=3, n_decays=2
        )
    )

    @property
    def of_networks(self):
        """What the trained networks depend on, beside the data."""
        return repr((self.operator, self.n_clusters, self.test_share, self.n_members))


SMALL = Settings(
    shape=(24, 48),
    n_simulations=44,
    n_clusters=5,
    test_share=(0.1, 0.4),
    n_members=3,
    n_passes=4,
    operator=OperatorTraining(
        make_network=partial(
            FourierOperator,
            width=12,
            modes=(6, 6),
            n_blocks=2,
            n_projection=16,
            internal=(24, 48),
            dropout=0.1,
        ),
        n_epochs=10,
        batch_size=8,
        learning_rate=1e-2,
    ),
    widths=(8, 16),
    training=Training(n_steps=40, batch_size=4, check_every=20),
)


# Which simulation is what.


def clusters_of(u0, n_clusters):
    """K-means on the initial fields, in as many coordinates as there are fields: all distances stay as they are."""
    flat = u0.flatten(1).double()
    flat = flat - flat.mean(dim=0)
    variance, axes = torch.linalg.eigh(flat @ flat.T)
    coordinates = (axes * variance.clamp(min=0).sqrt()).cpu().numpy()
    with few_threads(coordinates.size):
        return KMeans(n_clusters, n_init=10, random_state=0).fit_predict(coordinates)


def chosen_cluster(cluster, seed, test_share):
    """The seed-th cluster among those that are neither tiny nor huge."""
    share = np.bincount(cluster) / len(cluster)
    least, most = test_share
    fit = np.flatnonzero((share >= least) & (share <= most))
    if seed >= len(fit):
        raise SystemExit(
            f"seed {seed}, but only {len(fit)} of {len(share)} clusters hold between {least:.0%} and {most:.0%} of the "
            "simulations; choose a smaller seed."
        )
    return fit[seed]


@dataclass(frozen=True)
class Networks(Mapping):
    """Trained networks by name, read from their files when they are asked for."""

    folder: Path
    names: tuple[str, ...]
    device: str
    loaded: dict = field(default_factory=dict)

    def file(self, name):
        return self.folder / f"{name}.pt"

    def __getitem__(self, name):
        if name not in self.loaded:
            network = fourier_operator.load(self.file(name)).to(self.device)
            self.loaded[name] = OperatorSurrogate(network)
        return self.loaded[name]

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


@dataclass
class Study:
    """One seed: its training and test simulations, its networks, and what they predict."""

    settings: Settings
    seed: int
    folder: Path
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    fold: np.ndarray
    known: dict = field(default_factory=dict)

    @staticmethod
    def of(settings, seed, folder, data, cluster, device):
        test = cluster == chosen_cluster(cluster, seed, settings.test_share)

        def fields(which, rows):
            return torch.from_numpy(which[rows]).to(device).float()

        return Study(
            settings,
            seed,
            folder,
            fields(data.u0, ~test),
            fields(data.u, ~test),
            fields(data.u0, test),
            fields(data.u, test),
            np.unique(cluster[~test], return_inverse=True)[1],
        )

    def remembered(self, key, answer):
        """What answers for both errors is asked once; the first setting is charged."""
        if key not in self.known:
            self.known[key] = answer()
        return self.known[key]

    @property
    def fold_names(self):
        return [f"fold-{number}" for number in range(self.fold.max() + 1)]

    @property
    def members(self):
        others = range(1, self.settings.n_members)
        return ["deployed", *(f"member-{number}" for number in others)]

    @cached_property
    def kept_apart(self):
        """Rows that calibrate the split conformal bound."""
        order = np.random.default_rng(self.seed).permutation(len(self.x))
        return np.sort(order[: n_kept_apart(len(self.x))])

    @cached_property
    def trainings(self):
        """The rows and the seed of each network; the deployed one is a member, and its dropout serves MC dropout."""
        everything, first = np.arange(len(self.x)), 100 * self.seed
        of_members = {
            name: (everything, first + number)
            for number, name in enumerate(self.members)
        }
        of_folds = {
            name: (np.flatnonzero(self.fold != number), first)
            for number, name in enumerate(self.fold_names)
        }
        proper = np.setdiff1d(everything, self.kept_apart)
        return of_members | of_folds | {"split": (proper, first)}

    @cached_property
    def networks(self):
        folder = self.folder / "networks"
        return Networks(folder, tuple(self.trainings), str(self.x.device))

    @cached_property
    def p(self):
        """Probabilities that the deployed network gives to the test cases."""
        return evaluate(self.networks["deployed"], self.x_test, "surrogate")

    @cached_property
    def cross_fit(self):
        """Probabilities of the training simulations by the networks that have not seen them."""
        result = torch.empty_like(self.y)
        for number, name in enumerate(self.fold_names):
            rows = np.flatnonzero(self.fold == number)
            result[rows] = evaluate(self.networks[name], self.x[rows], name)
        return result

    def held_out_by_time(self):
        """Truth and cross-fitted probability, one time after the other."""
        return zip(self.y.unbind(1), self.cross_fit.unbind(1), strict=True)

    @cached_property
    def distance(self):
        return interface_distance(self.p)

    @cached_property
    def cross_fit_distance(self):
        return interface_distance(self.cross_fit)

    def predict(self):
        """Ask the networks, and find the interfaces in what they predict."""
        for distance in (self.distance, self.cross_fit_distance):
            distance.sum().item()  # waits for the device

    @cached_property
    def support_distance(self):
        """Mean distance of each test case to its nearest 20 training simulations, in wrong cells of the initial field."""
        nearest = Neighbors(self.x.flatten(1))
        k = min(20, len(self.x))
        return nearest.nearest(self.x_test.flatten(1), k)[0].square().mean(dim=1)

    @cached_property
    def median_case(self):
        """The test case whose share of wrong cells is the median."""
        share = wrong(self.y_test, self.p).mean(dim=(1, 2, 3))
        return int(share.argsort()[len(share) // 2])


# Scores.


def score(setting, study, answer):
    """How good a bound is, on all cells and where the errors are."""
    y, bound = study.y_test, answer.bound
    error = setting.error(y, answer.p)
    allowed = bound * (1 + TOLERANCE) + TOLERANCE
    band, misses = study.distance <= BAND, wrong(y, answer.p) > 0
    lost = pinball_loss(error, bound, QUANTILE).double()
    nothing = dict.fromkeys(
        ("safe_fraction", "safe_pinball", "safe_correlation", "safe_coverage")
    )
    return {
        "pinball": pinball(error, bound, QUANTILE),
        "correlation": correlation(error, bound),
        "coverage": coverage(error, allowed),
        **(nothing if answer.safe is None else inside(answer.safe, error, bound)),
        "relative_l2": relative_l2(y, setting.prediction(answer.p)),
        "band_coverage": coverage(error, allowed, band),
        "band_correlation": correlation(error, bound, band),
        "recall": float((bound >= FLAG)[misses].double().mean()),
        "flagged": float((bound >= FLAG).double().mean()),
        "mean_bound": float(bound.double().mean()),
        "case_correlation": correlation(case_means(error), case_means(bound)),
        "wrong_cells": float(misses.double().mean()),
        "pinball_by_time": lost.mean(dim=(0, 2, 3)).tolist(),
        "pinball_by_case": lost.mean(dim=(1, 2, 3)).tolist(),
    }


def inside(safe, error, bound):
    allowed = bound * (1 + TOLERANCE) + TOLERANCE
    return {
        "safe_fraction": float(safe.double().mean()),
        "safe_pinball": pinball(error, bound, QUANTILE, safe),
        "safe_correlation": correlation(error, bound, safe),
        "safe_coverage": coverage(error, allowed, safe),
    }


def case_means(field):
    return field.double().mean(dim=(1, 2, 3))


def surrogate_accuracy(study):
    """Relative L2 and share of wrong cells of the deployed network, in sample and not, and of the folds' on held-out data."""
    in_sample = evaluate(study.networks["deployed"], study.x, "surrogate")
    pairs = {
        "in_sample": (study.y, in_sample),
        "cross_fit": (study.y, study.cross_fit),
        "test": (study.y_test, study.p),
    }
    return {
        "seed": study.seed,
        "n_train": len(study.y),
        "n_test": len(study.y_test),
        "fold_sizes": np.bincount(study.fold).tolist(),
        "median_case": study.median_case,
        **{
            f"{setting.name} relative_l2 {name}": relative_l2(y, setting.prediction(p))
            for setting in (BINARY, PROBABILITY)
            for name, (y, p) in pairs.items()
        },
        **{
            f"wrong_cells {name}": float(wrong(y, p).double().mean())
            for name, (y, p) in pairs.items()
        },
    }


def fields_of(setting, study, method, answer):
    """What the pictures need of a bound: two times of the median case, means of all cases, and which cells it finds."""
    times = [time - 1 for time in SHOWN_TIMES]
    shown = slice(None) if method.name == SHOWN[0] else times
    bound, error = answer.bound, setting.error(study.y_test, answer.p)
    misses = wrong(study.y_test, answer.p) > 0
    # A verdict has one level; what it was read off has all.
    score = bound if answer.expected is None else answer.expected
    maps = {"bound": bound}
    if answer.expected is not None:
        maps["expected"] = answer.expected
    return {
        **{name: as_bytes(m[study.median_case, shown]) for name, m in maps.items()},
        "case_bound": case_means(bound).cpu().numpy(),
        "case_error": case_means(error).cpu().numpy(),
        "flagged_and_recall": flagged_and_recall(score, misses),
        "at_one_half": np.array([shares(bound >= FLAG, misses)]),
    }


def flagged_and_recall(score, misses):
    """Cells by falling score: which share of all has been flagged, and which share of the wrong ones found."""
    ordered = score.flatten().sort(descending=True).values
    places = np.geomspace(1e-3, 0.3, 60) * (len(ordered) - 1)
    levels = ordered[torch.as_tensor(places).long().to(ordered.device)]
    return np.array([shares(score >= level, misses) for level in levels])


def shares(flagged, misses):
    return [float(flagged.double().mean()), float(flagged[misses].double().mean())]


def as_bytes(field):
    return (255 * field).round().to(torch.uint8).cpu().numpy()


# Stages, each of which leaves what it has done in the work folder.


@contextmanager
def stage(name):
    started = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def whole(path, write):
    """Write a file beside its place and move it there, so that a cut never leaves half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    write(unfinished)
    unfinished.rename(path)


def as_json(path, content):
    whole(path, lambda file: file.write_text(json.dumps(content)))


def train_networks(study, names):
    """Those of them that have not been trained before."""
    recipe = TrainOperator(study.settings.operator, str(study.x.device))
    for name in names:
        file, (rows, seed) = study.networks.file(name), study.trainings[name]
        if file.is_file():
            continue
        with stage(f"seed {study.seed} network {name}"):
            started = time.perf_counter()
            network = recipe.with_seed(seed)(study.x[rows], study.y[rows]).network
            whole(file, partial(fourier_operator.save, network))
            seconds = time.perf_counter() - started
            as_json(file.with_suffix(".json"), {"seconds": seconds})


def part_of(folder, method, setting):
    """Where the rows of a method in a setting are kept."""
    return folder / "rows" / f"{slug(method.name)}-{setting.name}.json"


def measure(study, method, setting, part):
    """Rows of a method in a setting, as a part of its own."""
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
        # A map of where errors are, and no bound.
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
    whole(part.with_suffix(".npz"), lambda file: save_arrays(file, fields))
    as_json(part, rows)
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
    """How the last network that was trained meanwhile ended; None for each if there was none."""
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
    """The accuracy of the surrogate, and what the pictures need of it."""
    case = study.median_case
    common = {
        "truth": as_bytes(study.y_test[case]),
        "prediction": as_bytes(study.p[case]),
        "support_distance": study.support_distance.cpu().numpy(),
    }
    whole(study.folder / "case.npz", lambda file: save_arrays(file, common))
    as_json(path, surrogate_accuracy(study))


def run(study, methods):
    """Do what is missing of a seed; yields after each part, so that the results can be written at once."""
    accuracy = study.folder / "surrogate.json"
    missing = [
        (method, setting, part)
        for method in methods
        for setting in method.settings
        if not (part := part_of(study.folder, method, setting)).is_file()
    ]
    if missing or not accuracy.is_file():
        # Here, so that no method is charged what all of them share.
        train_networks(study, ["deployed", *study.fold_names])
        with stage(f"seed {study.seed} predictions"):
            study.predict()
    if not accuracy.is_file():
        with stage(f"seed {study.seed} accuracy of the surrogate"):
            describe(study, accuracy)
    for method, setting, part in missing:
        # Hours of other methods are not lost for one that fails; its part stays missing, and the next run tries again.
        try:
            train_networks(study, method.networks(study))
            measure(study, method, setting, part)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        torch.cuda.empty_cache()
        yield


def collect(work, path, **facts):
    """The results file, from all parts that are there."""
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
    return record.write("richtmyer_meshkov", rows, path, **facts)


def collect_fields(work, seed, path):
    """All that the pictures need, in one file."""
    folder, arrays = work / f"seed-{seed}", {}
    for file in [folder / "case.npz", *sorted((folder / "rows").glob("*.npz"))]:
        with np.load(file) as stored:
            arrays |= {f"{file.stem}/{name}": stored[name] for name in stored.files}
    whole(path, lambda file: save_arrays(file, arrays))


def read_data(file, work, settings, device):
    """The simulations of a file; made here, batch by batch, where none is given."""
    if file is not None:
        return simulations.load(file)
    n, shape = settings.n_simulations, settings.shape
    return simulations.simulate(n, shape, 0, device, parts=work / "simulations")


def check_same(work, facts):
    """Refuse a work folder that holds parts of another data set or of other networks."""
    path = work / "facts.json"
    if not path.is_file():
        as_json(path, facts)
    known = json.loads(path.read_text())
    if known != facts:
        differing = [name for name in facts if known.get(name) != facts[name]]
        raise SystemExit(
            f"{work} holds parts of a run with other {' and '.join(differing)}; choose another folder with --work."
        )


def settings_of(arguments):
    settings = SMALL if arguments.small else Settings()
    operator, training = settings.operator, settings.training
    return replace(
        settings,
        operator=replace(operator, n_epochs=arguments.epochs or operator.n_epochs),
        training=replace(training, n_steps=arguments.steps or training.n_steps),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="coarse, few and short")
    parser.add_argument(
        "--data", type=Path, help="simulations, as their script wrote them"
    )
    parser.add_argument("--work", type=Path, help="where networks and parts are kept")
    parser.add_argument("--seeds", type=int, nargs="+", help="test clusters, 0 1")
    parser.add_argument("--device", help="cuda where there is one")
    parser.add_argument(
        "--memory",
        type=float,
        help="share of the GPU's memory, where several seeds run at once, as 0.48",
    )
    parser.add_argument(
        "--method",
        action="append",
        choices=[method.name for method in METHODS],
        metavar="NAME",
        help="only this one; may be repeated",
    )
    parser.add_argument("--epochs", type=int, help="of each operator's training")
    parser.add_argument("--steps", type=int, help="at most, of each learned bound")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--fields", type=Path, help="where to write what pictures need")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("geoq").setLevel(logging.INFO)
    small = arguments.small
    settings = settings_of(arguments)
    suffix = "-small" if small else ""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = arguments.work or Path(f"build/richtmyer_meshkov{suffix}")
    seeds = arguments.seeds or ([0] if small else [0, 1])
    methods = [m for m in METHODS if m.name in (arguments.method or [m.name])]
    with stage("data"):
        data = read_data(arguments.data, work, settings, device)
        checksum = simulations.checksum(data)
        # What networks and parts depend on; bounds trained for longer may stand beside others.
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
        del study  # its fields fill the device
        collect_fields(work, seeds[0], fields)
    print(collect(work, out, **facts))
    if arguments.pictures:
        draw(fields, arguments.pictures)


if __name__ == "__main__":
    main()
