"""Pinball loss of bounds for wrong cells by the number of calibration simulations.

python -m benchmarks.richtmyer_meshkov.few_fields --data FILE       # the simulations of Richtmyer-Meshkov, coarsened to 60 x 120
python -m benchmarks.richtmyer_meshkov.few_fields --small           # few simulations and short trainings

The surrogate was not trained on the calibration simulations, so it serves as its own fold surrogate. A seed determines the
calibration simulations and the initial weights. GeoQ uses one network instead of three.
"""

import argparse
import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from torch import nn

from benchmarks import record
from benchmarks.richtmyer_meshkov import data as simulations
from benchmarks.richtmyer_meshkov.bounds import (
    BINARY,
    binned_chance,
    by_distance_and_doubt,
    by_doubt,
    zero_bound,
)
from benchmarks.richtmyer_meshkov.methods import X_AND_P, default
from benchmarks.richtmyer_meshkov.networks import frequency_by_p_and_cell
from benchmarks.richtmyer_meshkov.operator_training import (
    OperatorSurrogate,
    OperatorTraining,
    train_operator,
)
from benchmarks.richtmyer_meshkov.scores import score
from benchmarks.richtmyer_meshkov.study import (
    SMALL,
    Settings,
    Study,
    coarse_operator,
)
from geoq import IndicatorIncrement
from geoq.increments.prior import CellPrior
from geoq.nets.unet import FiLMBlock
from geoq.training.loop import seeded

FIVE_RESOLUTIONS = (16, 32, 64, 64, 64)


class TorchStart(IndicatorIncrement):
    """Networks whose convolutions start with PyTorch's default initialisation."""

    def _build(self, *sizes):
        networks = super()._build(*sizes)
        with seeded(self.training.random_state):
            for module in self.networks_.modules():
                if isinstance(module, FiLMBlock):
                    module.first.reset_parameters()
                    module.second.reset_parameters()
        return networks


def with_five_resolutions(study, setting, **form):
    """GeoQ with deeper networks."""
    other = copy.copy(study)
    other.settings = replace(study.settings, widths=FIVE_RESOLUTIONS)
    return default(other, setting, sees=X_AND_P, **form)


METHODS = {
    "Zero bound": zero_bound,
    "p bins, two-valued": partial(binned_chance, bins_of=by_doubt),
    "Distance x p bins, two-valued": partial(
        binned_chance, bins_of=by_distance_and_doubt
    ),
    "Frequency by p and cell": frequency_by_p_and_cell,
    "GeoQ (start from cells)": partial(default, sees=X_AND_P, prior=CellPrior()),
    "GeoQ": partial(default, sees=X_AND_P),
    "GeoQ (five resolutions)": with_five_resolutions,
    "GeoQ (five resolutions, torch's start)": partial(
        with_five_resolutions, increment=TorchStart
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of simulations: the first train the surrogate, the next are the test set, the others calibrate."""

    n_train: int
    n_test: int
    n_calibration: tuple[int, ...]
    coarser: int
    settings: Settings


FULL = Sizes(
    n_train=160,
    n_test=140,
    n_calibration=(30, 100, 300),
    coarser=4,
    settings=Settings(
        shape=(60, 120),
        operator=OperatorTraining(
            make_network=coarse_operator,
            n_epochs=14,
            batch_size=8,
            learning_rate=5e-3,
            compiled=False,
        ),
        # The defaults of IndicatorIncrement.
        widths=IndicatorIncrement().widths,
        training=IndicatorIncrement().training,
    ),
)
FEW = Sizes(n_train=16, n_test=8, n_calibration=(12, 20), coarser=1, settings=SMALL)


def coarsened(u, factor):
    """Coarser fields: 1 where more than half of the cells are 1."""
    fields = torch.from_numpy(u).float()
    flat = fields.flatten(0, -3)[:, None]
    mean = torch.cat(
        [nn.functional.avg_pool2d(part, factor) for part in flat.split(64)]
    )
    return (mean > 0.5).float().view(*fields.shape[:-2], *mean.shape[-2:])


def measure(sizes, x, y, network, methods, n, seed):
    """Rows of all methods for n calibration simulations."""
    torch.set_num_threads(1)
    first = sizes.n_train + sizes.n_test
    test = slice(sizes.n_train, first)
    chosen = np.random.default_rng(seed).permutation(np.arange(first, len(x)))[:n]
    settings = replace(
        sizes.settings, training=sizes.settings.training.with_seed_offset(seed)
    )
    fold = np.arange(n) % 2
    study = Study(settings, seed, None, x[chosen], y[chosen], x[test], y[test], fold)
    study.networks = dict.fromkeys(
        ("deployed", *study.fold_names), OperatorSurrogate(network)
    )
    return [scored(study, name, n) for name in methods]


def scored(study, name, n):
    scores = score(BINARY, study, METHODS[name](study, BINARY))
    kept = ("pinball", "coverage", "recall", "flagged", "wrong_cells")
    row = {"method": name, "setting": f"{n} simulations", "seed": study.seed}
    return row | {k: scores[k] for k in kept}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="few simulations and short trainings"
    )
    parser.add_argument(
        "--data", type=Path, help="file written by benchmarks.richtmyer_meshkov.data"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--method",
        action="append",
        choices=METHODS,
        metavar="NAME",
        help="measure this method only; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    small, sizes = arguments.small, FEW if arguments.small else FULL
    if not small and arguments.data is None:
        parser.error(
            "--data is missing; pass a file of benchmarks.richtmyer_meshkov.data, or --small."
        )
    data = (
        simulations.simulate(SMALL.n_simulations, SMALL.shape)
        if small
        else simulations.load(arguments.data)
    )
    x, y = (coarsened(u, sizes.coarser) for u in (data.u0, data.u))
    seen = slice(sizes.n_train)
    network = train_operator(x[seen], y[seen], sizes.settings.operator, device="cpu")
    out = (
        arguments.out or record.RESULTS / f"few_fields{'-small' if small else ''}.json"
    )
    facts = {
        "data_checksum": simulations.checksum(data),
        "settings": repr(sizes),
        "small": small,
    }
    methods = [name for name in METHODS if name in (arguments.method or METHODS)]
    asked = [(n, seed) for n in sizes.n_calibration for seed in arguments.seeds]
    measured = Parallel(n_jobs=arguments.jobs, return_as="generator")(
        delayed(measure)(sizes, x, y, network, methods, *one) for one in asked
    )
    rows = []
    for part in measured:
        rows += part
        record.write("few_fields", rows, out, **facts)
        for row in part:
            print(
                f"{row['setting']:16s} {row['method']:33s} seed {row['seed']} pinball {1000 * row['pinball']:.3f}e-3",
                flush=True,
            )
    print(out)


if __name__ == "__main__":
    main()
