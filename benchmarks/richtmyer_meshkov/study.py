"""One seed of the benchmark: its simulations, its networks and their predictions."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans

from benchmarks.richtmyer_meshkov import fourier_operator
from benchmarks.richtmyer_meshkov.bounds import interface_distance, n_kept_apart, wrong
from benchmarks.richtmyer_meshkov.fourier_operator import FourierOperator
from benchmarks.richtmyer_meshkov.operator_training import (
    OperatorSurrogate,
    OperatorTraining,
    TrainOperator,
)
from benchmarks.timing import Memo, now
from geoq import Training
from geoq.arrays import few_threads

# The deployed network has dropout, so MC dropout can use it.
OPERATOR = OperatorTraining(
    make_network=partial(FourierOperator, dropout=0.1), n_epochs=12, batch_size=8
)
TRAINING = Training(n_steps=4000, batch_size=4, check_every=250, patience=3, n_decays=2)


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; the defaults are the paper's."""

    shape: tuple[int, int] = (240, 480)
    n_simulations: int = 1000
    n_clusters: int = 11
    test_fraction: tuple[float, float] = (0.05, 0.15)
    n_members: int = 10
    n_passes: int = 20
    operator: OperatorTraining = OPERATOR
    # With five resolutions an output depends on 92 cells around it, about as far as the interface moves.
    widths: tuple[int, ...] = (32, 64, 128, 128, 128)
    training: Training = TRAINING

    @property
    def of_networks(self):
        """The settings that the trained networks depend on."""
        return repr((self.operator, self.n_clusters, self.test_fraction, self.n_members))


def smaller(width, modes, n_blocks, n_projection, internal, **training):
    """The training of a smaller operator."""
    sizes = {"width": width, "modes": (modes, modes), "n_blocks": n_blocks, "internal": internal}
    make = partial(FourierOperator, **sizes, n_projection=n_projection, dropout=0.1)
    return OperatorTraining(make_network=make, batch_size=8, **training)


# Fits two CPU cores: a quarter of the resolution, a fifth of the simulations, half of the folds and members.
COARSE = Settings(
    shape=(60, 120),
    n_simulations=200,
    n_clusters=6,
    test_fraction=(0.1, 0.25),
    n_members=5,
    operator=smaller(20, 12, 3, 32, (64, 128), n_epochs=16, learning_rate=5e-3),
    widths=(16, 32, 64),
    training=Training(n_steps=800, batch_size=4, check_every=100, patience=3, n_decays=2),
)
SMALL = Settings(
    shape=(16, 32),
    n_simulations=30,
    n_clusters=4,
    test_fraction=(0.05, 0.4),
    n_members=2,
    n_passes=3,
    operator=smaller(12, 6, 2, 16, (24, 48), n_epochs=3, learning_rate=1e-2),
    widths=(8, 16),
    training=Training(n_steps=4, batch_size=4, check_every=2),
)


def clusters_of(u0, n_clusters):
    """K-means clusters of the initial fields, which are rotated into as many coordinates as there are fields."""
    flat = u0.flatten(1).double()
    flat = flat - flat.mean(dim=0)
    variance, axes = torch.linalg.eigh(flat @ flat.T)
    coordinates = (axes * variance.clamp(min=0).sqrt()).cpu().numpy()
    with few_threads(coordinates.size):
        return KMeans(n_clusters, n_init=10, random_state=0).fit_predict(coordinates)


def chosen_cluster(cluster, seed, test_fraction):
    """The test cluster of a seed: the clusters with an allowed size in order, counted from 0."""
    fraction = np.bincount(cluster) / len(cluster)
    least, most = test_fraction
    fit = np.flatnonzero((fraction >= least) & (fraction <= most))
    if seed >= len(fit):
        allowed = f"{len(fit)} of {len(fraction)} clusters hold {least:.0%} to {most:.0%}"
        raise SystemExit(f"seed {seed}, but only {allowed} of the simulations; use a smaller one.")
    return fit[seed]


@dataclass
class Networks:
    """Networks by name. A network is trained at its first use and kept in a file; ``seconds`` of all trainings by name.

    The name of the folder depends on the data and on the settings of the networks.
    """

    folder: Path
    recipe: TrainOperator
    trainings: dict
    x: torch.Tensor
    y: torch.Tensor
    loaded: dict = field(default_factory=dict)
    spent: float = 0.0

    def __getitem__(self, name):
        if name not in self.loaded:
            file = self.folder / f"{name}.pt"
            if not file.is_file():
                self._train(name, file)
            network = fourier_operator.load(file).to(self.x.device)
            self.loaded[name] = OperatorSurrogate(network)
        return self.loaded[name]

    def _train(self, name, file):
        (rows, seed), started = self.trainings[name], now()
        network = self.recipe.with_seed(seed)(self.x[rows], self.y[rows]).network
        seconds = now() - started
        self.spent += seconds
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        fourier_operator.save(network, unfinished)
        file.with_suffix(".json").write_text(json.dumps(seconds))
        unfinished.replace(file)
        print(f"network {name}: {seconds:.1f} s", flush=True)

    @property
    def seconds(self):
        files = sorted(self.folder.glob("*.json"))
        return {file.stem: json.loads(file.read_text()) for file in files}


@dataclass
class Study:
    """Training and test simulations, networks and predictions of one seed."""

    settings: Settings
    seed: int
    folder: Path
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    fold: np.ndarray
    # Results that both settings need; the first setting is charged their time.
    remembered: Memo = field(default_factory=Memo)

    @staticmethod
    def of(settings, seed, work, data, device):
        """The study of a seed, with its networks in a folder below ``work``."""
        u0 = torch.from_numpy(data.u0).to(device)
        cluster = clusters_of(u0, settings.n_clusters)
        of_networks = f"{data.checksum} {settings.of_networks}"
        folder = work / f"seed-{seed}-{hashlib.sha256(of_networks.encode()).hexdigest()[:10]}"
        test = cluster == chosen_cluster(cluster, seed, settings.test_fraction)

        def fields(which, rows):
            return torch.from_numpy(which[rows]).to(device).float()

        parts = [fields(which, rows) for rows in (~test, test) for which in (data.u0, data.u)]
        fold = np.unique(cluster[~test], return_inverse=True)[1]
        return Study(settings, seed, folder, *parts, fold)

    @property
    def fold_names(self):
        return [f"fold-{number}" for number in range(self.fold.max() + 1)]

    @property
    def members(self):
        return ["deployed", *(f"member-{number}" for number in range(1, self.settings.n_members))]

    @property
    def split_members(self):
        """Networks that are not trained on the rows ``kept_apart``."""
        return ["split", *(f"split-{number}" for number in range(1, self.settings.n_members))]

    @cached_property
    def kept_apart(self):
        """Rows that calibrate split conformal prediction and the scaled ensemble."""
        order = np.random.default_rng(self.seed).permutation(len(self.x))
        return np.sort(order[: n_kept_apart(len(self.x))])

    @cached_property
    def trainings(self):
        """Training rows and seed of each network. The deployed network is the first member of the ensemble."""
        everything, first = np.arange(len(self.x)), 100 * self.seed
        proper, found = np.setdiff1d(everything, self.kept_apart), {}
        for names, rows in ((self.members, everything), (self.split_members, proper)):
            found |= {name: (rows, first + number) for number, name in enumerate(names)}
        for number, name in enumerate(self.fold_names):
            found[name] = np.flatnonzero(self.fold != number), first
        return found

    @cached_property
    def networks(self):
        recipe = TrainOperator(self.settings.operator, str(self.x.device))
        return Networks(self.folder, recipe, self.trainings, self.x, self.y)

    @cached_property
    def p(self):
        """Probabilities of the test cases by the deployed network."""
        return self.networks["deployed"](self.x_test)

    @cached_property
    def cross_fit(self):
        """Probabilities of the training simulations by the fold networks that were not trained on them."""
        result = torch.empty_like(self.y)
        for number, name in enumerate(self.fold_names):
            rows = np.flatnonzero(self.fold == number)
            result[rows] = self.networks[name](self.x[rows])
        return result

    def held_out_by_time(self):
        """Pairs of truth and cross-fitted probability, one per time."""
        return zip(self.y.unbind(1), self.cross_fit.unbind(1), strict=True)

    @cached_property
    def distance(self):
        return interface_distance(self.p)

    @cached_property
    def cross_fit_distance(self):
        return interface_distance(self.cross_fit)

    @cached_property
    def median_case(self):
        """The test case with the median fraction of wrong cells."""
        fraction = wrong(self.y_test, self.p).mean(dim=(1, 2, 3))
        return int(fraction.argsort()[len(fraction) // 2])
