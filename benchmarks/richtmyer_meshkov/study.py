"""One seed of the benchmark: its simulations, its networks and their predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans

from benchmarks.record import Memo
from benchmarks.richtmyer_meshkov import fourier_operator
from benchmarks.richtmyer_meshkov.bounds import interface_distance, n_kept_apart, wrong
from benchmarks.richtmyer_meshkov.fourier_operator import FourierOperator
from benchmarks.richtmyer_meshkov.operator_training import (
    OperatorSurrogate,
    OperatorTraining,
)
from geoq import Training
from geoq.arrays import few_threads
from geoq.neighbors import Neighbors
from geoq.surrogate import evaluate


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; the defaults are the paper's."""

    shape: tuple[int, int] = (240, 480)
    n_simulations: int = 1000
    n_clusters: int = 11
    test_fraction: tuple[float, float] = (0.05, 0.15)
    n_members: int = 10
    n_passes: int = 20
    # The deployed network has dropout, so MC dropout can use it.
    operator: OperatorTraining = field(
        default_factory=lambda: OperatorTraining(
            make_network=partial(FourierOperator, dropout=0.1),
            n_epochs=12,
            batch_size=8,
        )
    )
    # With five resolutions an output depends on 92 cells around it, about as far as the interface moves.
    widths: tuple[int, ...] = (32, 64, 128, 128, 128)
    training: Training = field(
        default_factory=lambda: Training(
            n_steps=4000, batch_size=4, check_every=250, patience=3, n_decays=2
        )
    )

    @property
    def of_networks(self):
        """The settings that the trained networks depend on."""
        return repr(
            (self.operator, self.n_clusters, self.test_fraction, self.n_members)
        )


# An operator for fields of 60 x 120 cells.
coarse_operator = partial(
    FourierOperator,
    width=20,
    modes=(12, 12),
    n_blocks=3,
    n_projection=32,
    internal=(64, 128),
)
# Fits two CPU cores: a quarter of the resolution, a fifth of the simulations, half of the folds and members.
COARSE = Settings(
    shape=(60, 120),
    n_simulations=200,
    n_clusters=6,
    test_fraction=(0.1, 0.25),
    n_members=5,
    operator=OperatorTraining(
        make_network=partial(coarse_operator, dropout=0.1),
        n_epochs=16,
        batch_size=8,
        learning_rate=5e-3,
    ),
    widths=(16, 32, 64),
    training=Training(
        n_steps=800, batch_size=4, check_every=100, patience=3, n_decays=2
    ),
)
SMALL = Settings(
    shape=(24, 48),
    n_simulations=44,
    n_clusters=5,
    test_fraction=(0.1, 0.4),
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


# Training and test simulations.


def clusters_of(u0, n_clusters):
    """K-means clusters of the initial fields.

    The fields are rotated into as many coordinates as there are fields, which keeps all distances.
    """
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
        raise SystemExit(
            f"seed {seed}, but only {len(fit)} of {len(fraction)} clusters hold between {least:.0%} and {most:.0%} of the "
            "simulations; choose a smaller seed."
        )
    return fit[seed]


@dataclass(frozen=True)
class Networks(Mapping):
    """Trained networks by name; a network is read from its file at its first use."""

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
    def of(settings, seed, folder, data, cluster, device):
        test = cluster == chosen_cluster(cluster, seed, settings.test_fraction)

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

    @property
    def fold_names(self):
        return [f"fold-{number}" for number in range(self.fold.max() + 1)]

    @property
    def members(self):
        others = range(1, self.settings.n_members)
        return ["deployed", *(f"member-{number}" for number in others)]

    @property
    def split_members(self):
        """Networks that are not trained on the rows ``kept_apart``."""
        others = range(1, self.settings.n_members)
        return ["split", *(f"split-{number}" for number in others)]

    @cached_property
    def kept_apart(self):
        """Rows that calibrate split conformal prediction and the scaled ensemble."""
        order = np.random.default_rng(self.seed).permutation(len(self.x))
        return np.sort(order[: n_kept_apart(len(self.x))])

    @cached_property
    def trainings(self):
        """Training rows and seed of each network. The deployed network is the first member of the ensemble."""
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
        of_split = {
            name: (proper, first + number)
            for number, name in enumerate(self.split_members)
        }
        return of_members | of_folds | of_split

    @cached_property
    def networks(self):
        folder = self.folder / "networks"
        return Networks(folder, tuple(self.trainings), str(self.x.device))

    @cached_property
    def p(self):
        """Probabilities of the test cases by the deployed network."""
        return evaluate(self.networks["deployed"], self.x_test, "surrogate")

    @cached_property
    def cross_fit(self):
        """Probabilities of the training simulations by the fold networks that were not trained on them."""
        result = torch.empty_like(self.y)
        for number, name in enumerate(self.fold_names):
            rows = np.flatnonzero(self.fold == number)
            result[rows] = evaluate(self.networks[name], self.x[rows], name)
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

    def predict(self):
        """Compute the predictions and the distances to the predicted interfaces."""
        for distance in (self.distance, self.cross_fit_distance):
            distance.sum().item()  # waits for the device

    @cached_property
    def support_distance(self):
        """Mean distance of each test case to its nearest 20 training simulations, in differing cells of the initial field."""
        nearest = Neighbors(self.x.flatten(1))
        k = min(20, len(self.x))
        return nearest.nearest(self.x_test.flatten(1), k)[0].square().mean(dim=1)

    @cached_property
    def median_case(self):
        """The test case with the median fraction of wrong cells."""
        fraction = wrong(self.y_test, self.p).mean(dim=(1, 2, 3))
        return int(fraction.argsort()[len(fraction) // 2])
