"""The skeleton of the benchmarks: problems x seeds x methods from the command line, in processes of one thread each.

    python -m benchmarks.suite.defaults --problems branin darcy --methods "GeoQ*" "CV+" --seeds 700 701 --jobs 2

``--small`` is a short trial run of a part of the problems. Rows are written as soon as a problem and seed is measured. The same
command continues an interrupted run: it measures the methods that the file lacks, and begins a new file if the code has changed.
"""

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from benchmarks import record


@dataclass(frozen=True)
class Benchmark:
    """What a script measures.

    Attributes:
        name: name of the results file.
        problems: names of the problems, in the order of the tables.
        measure: ``measure(problem, seed, methods, small=False)`` returns rows with the columns ``method``, ``seed`` and
            ``problem`` or ``setting``.
        methods: the methods of a problem; the rows of a method may have further names that begin with its name.
        seeds: the seeds that are measured without ``--seeds``; a dictionary if they depend on the problem.
        small: the problems of a small run, which has the first seed only.
        facts: further content of the results file.
        method_of: the method of a row.
    """

    name: str
    problems: Sequence[str]
    measure: Callable[..., list[dict[str, Any]]]
    methods: Callable[[str], Sequence[str]]
    seeds: Sequence[int] | dict[str, Sequence[int]] = (0,)
    small: Sequence[str] = ()
    facts: Callable[[], dict[str, Any]] = dict
    method_of: Callable[[dict[str, Any]], Any] = itemgetter("method")


def parser_of(summary):
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=summary.splitlines()[0])
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="some of the problems")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help='such as GP or "GeoQ*"')
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--small", action="store_true", help="a short trial run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing later")
    parser.add_argument("--out", type=Path, help=f"where to write the results, FILE{record.ENDING}")
    return parser


def script(benchmark, summary):
    """The ``main`` of a script without options of its own."""
    return lambda words=None: run(benchmark, parser_of(summary).parse_args(words))


def run(benchmark, asked, **settings):
    """Measure what the results file lacks; ``settings`` are passed to ``measure``."""
    name = f"{benchmark.name}-small" if asked.small else benchmark.name
    path = asked.out or record.path_of(name)
    conditions = {"source": record.source(), "small": asked.small}
    rows, untrained = record.finished(path, **conditions)
    cases = missing(benchmark, asked, rows + untrained)
    task = partial(benchmark.measure, small=asked.small, **settings)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for libraries that the processes load later
    for new in measured(task, cases, jobs=asked.jobs, minutes=asked.minutes):
        again = {record.identity(row) for row in new}
        rows = [row for row in rows if record.identity(row) not in again] + new
        facts = conditions | benchmark.facts()
        record.write(benchmark.name, in_order(benchmark, rows), path, untrained=untrained, **facts)
    print(path)
    return path


def problem_of(row):
    """The problem that a row belongs to."""
    return row.get("problem") or row["setting"]


def in_order(benchmark, rows):
    """Rows in the order of the problems and seeds, whatever finished first."""
    known = list(benchmark.problems)
    return sorted(rows, key=lambda row: (known.index(problem_of(row)), row["seed"]))


def missing(benchmark, asked, rows):
    """Problems and seeds with the methods that have no row."""
    problems = asked.problems or (asked.small and benchmark.small) or benchmark.problems
    if unknown := " ".join(sorted(set(problems) - set(benchmark.problems))):
        known = " ".join(benchmark.problems)
        raise SystemExit(f"--problems {unknown} does not exist; choose from {known}.")
    cases, patterns, found = [], asked.methods or ["*"], False
    for problem in (name for name in benchmark.problems if name in problems):
        methods = benchmark.methods(problem)
        methods = [m for m in methods if any(fnmatchcase(m, pattern) for pattern in patterns)]
        found = found or bool(methods)
        known = benchmark.seeds[problem] if isinstance(benchmark.seeds, dict) else benchmark.seeds
        for seed in asked.seeds or (known[:1] if asked.small else known):
            own = [row for row in rows if (problem_of(row), row["seed"]) == (problem, seed)]
            done = {benchmark.method_of(row) for row in own}
            if left := [method for method in methods if method not in done]:
                cases.append((problem, seed, left))
    if not found:
        names = ", ".join(dict.fromkeys(m for p in problems for m in benchmark.methods(p)))
        raise SystemExit(f"--methods {' '.join(patterns)} matches no method; choose from {names}.")
    return cases


def measured(task, cases, *, jobs=1, minutes=math.inf):
    """Yield the result of each case as soon as it is there, and print how long it took.

    A case that fails is printed and left out, so that it does not end the others. No case starts after some minutes.
    """
    started, late = time.time(), []
    parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    calls = (delayed(_attempt)(task, case, started + 60 * minutes) for case in cases)
    for case, result, failure, seconds in parallel(calls):
        if seconds is None:
            late.append(case[:2])
            continue
        took = f"{seconds:.0f} s, {time.time() - started:.0f} s in all"
        print(*case[:2], took, failure, flush=True)
        if not failure:
            yield result
    if late:
        print(f"out of time, not started: {late}", flush=True)


def _attempt(task, case, deadline):
    """The case, its result, a message if it failed, and its seconds; None as seconds if it was too late to start."""
    started = time.time()
    if started > deadline:
        return case, None, "", None
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    result, failure = None, ""
    try:
        with threadpool_limits(1):
            result = task(*case)
    except Exception:  # noqa: BLE001 - one case must not end the others
        failure = f"FAILED\n{traceback.format_exc()}"
    return case, result, failure, time.time() - started
