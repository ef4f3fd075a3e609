"""Cases of a benchmark in parallel processes of one thread each, with a limit of time."""

import argparse
import math
import time
import traceback
from pathlib import Path

import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits


def finished(task, cases, *, jobs=1, minutes=None):
    """Yield the result of each case as soon as it is measured, and print how long it took.

    A case that fails is printed and left out, so that it does not end the others.

    Args:
        task: maps the parts of a case to its result.
        cases: tuples; they start in this order.
        jobs: number of processes.
        minutes: no case starts after this time; None means no limit.
    """
    started = time.time()
    deadline = math.inf if minutes is None else started + 60 * minutes
    late = []
    parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    tasks = (delayed(_attempt)(task, case, deadline) for case in cases)
    for case, result, failure, seconds in parallel(tasks):
        if seconds is None:
            late.append(case)
            continue
        passed = time.time() - started
        print(*case, f"{seconds:.0f} s, {passed:.0f} s in all", failure, flush=True)
        if not failure:
            yield result
    if late:
        print(f"out of time, not started: {late}", flush=True)


def _attempt(task, case, deadline):
    """The case, its result, a message if it failed, and its seconds; None as seconds if it was too late to start."""
    started = time.time()
    if started > deadline:
        return case, None, "", None
    torch.set_num_threads(1)
    result, failure = None, ""
    try:
        with threadpool_limits(1):
            result = task(*case)
    except Exception:  # noqa: BLE001 - one case must not end the others
        failure = f"FAILED\n{traceback.format_exc()}"
    return case, result, failure, time.time() - started


def add_options(parser, n_seeds):
    """Add the options that all benchmarks of the suite have."""
    parser.add_argument("--small", action="store_true", help="a short trial run")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="some problems")
    parser.add_argument("--seeds", type=int, default=n_seeds, help="seeds 0, 1, ...")
    parser.add_argument("--seed-list", type=int, nargs="+", help="these seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--minutes", type=float, help="start no case after this many minutes"
    )
    parser.add_argument("--out", type=Path, help="where to write the results")


def chosen_seeds(arguments: argparse.Namespace) -> list[int]:
    """The seeds of the options; a small run has one."""
    seeds = arguments.seed_list or list(range(arguments.seeds))
    return seeds[:1] if arguments.small else seeds


def chosen_problems(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, known, small
) -> list[str]:
    """The problems of the options, in the order of ``known``."""
    names = arguments.problems or list(small if arguments.small else known)
    if unknown := set(names) - set(known):
        parser.error(
            f"--problems {' '.join(sorted(unknown))} does not exist; choose from {' '.join(known)}."
        )
    return [name for name in known if name in names]
