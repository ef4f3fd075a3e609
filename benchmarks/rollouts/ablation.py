"""The paper's ablation of the additive recursion, and other ways to train it."""

import time
from functools import partial

import torch
from threadpoolctl import threadpool_limits

from benchmarks.paper_numbers import PAPER
from benchmarks.record import QUANTILE, trainings
from benchmarks.rollouts.data import HIDDEN, load, recipe_of
from benchmarks.rollouts.methods import (
    FixedSteps,
    Remembered,
    RolledOut,
    StoppedByRollouts,
    capped,
)
from benchmarks.rollouts.scores import Clock
from geoq import ClusterFolds, RolloutGeoQ, identity
from geoq.rollout import AdditiveRecursion

# The parts of the choices, which use different folds or add up to a long run; the longest one runs first.
PARTS = ("K_f = 20", "K_f = 5", "K_f = 10", "training", "K_f = 2")
INITIAL = "initial weights"


def part_of(name):
    """The part that a choice belongs to."""
    if name.startswith("K_f"):
        return name
    paper = name in PAPER["kuramoto_sivashinsky_ablation"]
    return "K_f = 5" if paper else "training"


def absolute_displacement(features):
    displacement = features.displacement.flatten(start_dim=2).abs()
    return torch.cat([displacement, features.support_distance[..., None]], dim=2)


def length_of_displacement(features):
    length = features.displacement.flatten(start_dim=2).norm(dim=2, keepdim=True)
    return torch.cat([length, features.support_distance[..., None]], dim=2)


def displacement_alone(features):
    return features.displacement.flatten(start_dim=2)


def choices(surrogate, seed, settings):
    """Arguments of RolloutGeoQ for each row of the paper's table and four more; each row varies one choice."""
    form = partial(AdditiveRecursion, QUANTILE, training=settings.increment_training)
    default = {
        "representation": surrogate.encoder,
        "scheme": form(),
        "n_anchors": 50,
        "folds": ClusterFolds(5, random_state=seed),
    }
    varied = {
        "phi = encoder, psi = (dz, dd), k_a = 50, K_f = 5": {},
        "phi = identity": {"representation": identity},
        "psi = (abs dz, dd)": {"scheme": form(psi=absolute_displacement)},
        "psi = (length of dz, dd)": {"scheme": form(psi=length_of_displacement)},
        "psi = dz": {"scheme": form(psi=displacement_alone)},
        "k_a = 1": {"n_anchors": 1},
        "k_a = 10": {"n_anchors": 10},
        "k_a = 100": {"n_anchors": 100},
        **{
            f"K_f = {n_folds}": {"folds": ClusterFolds(n_folds, random_state=seed)}
            for n_folds in (2, 10, 20)
        },
        **{
            name: {"scheme": scheme(QUANTILE, training=settings.increment_training)}
            for name, scheme in {
                INITIAL: partial(FixedSteps, n_fixed=0),
                "trained for a fixed number of steps": partial(
                    FixedSteps, n_fixed=settings.n_fixed
                ),
                "stopped by rollouts of all folds": StoppedByRollouts,
                "h with the widths of the surrogate": partial(
                    AdditiveRecursion, hidden=HIDDEN
                ),
            }.items()
        },
    }
    return {name: default | change for name, change in varied.items()}


def ablate(dt, seed, settings, part):
    """Rows of one part of the ablation, for the sum and the capped sum; the parts use different folds."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        data = load(dt, seed, settings)
        recipe = recipe_of(settings, seed)
        remembered = Remembered(recipe)
        started = time.perf_counter()
        surrogate = remembered([data.train])
        clock = Clock(time.perf_counter() - started, data, settings, dt, seed)
        clock.own_rollout(RolledOut(surrogate, settings.n_test))
        rows = []
        for name, change in choices(surrogate, seed, settings).items():
            if part_of(name) != part:
                continue
            # The total number of rollouts does not depend on the number of folds.
            n_starts = -(-5 * settings.n_starts // change["folds"].n_folds)
            # Variants with the same folds share their trainings; other folds are trained together.
            variant = RolloutGeoQ(
                surrogate,
                remembered if part in ("K_f = 5", "training") else recipe,
                n_calibration=settings.n_calibration,
                n_starts=n_starts,
                **change,
            )
            seconds = clock.of(lambda v=variant: v.fit(data.train), remembered)
            started = time.perf_counter()
            a = variant.assess(data.x0, settings.n_test)
            asking = time.perf_counter() - started
            for setting, bound in (
                (f"sum, dt={dt}", a),
                (f"capped sum, dt={dt}", capped(a, variant)),
            ):
                line = clock.row(name, bound, a.safe, seconds, asking)
                line |= {"setting": setting, "part": part} | trainings(variant)
                line["n_steps"] = variant.scheme_.n_steps_
                rows.append(line)
        return rows
