"""Processes that are killed, that meet on one file or folder, and disks that are full. Children are forks of this process."""

import os
import resource
import shutil
import signal
import subprocess
import time
import warnings
from collections import Counter
from contextlib import contextmanager

import numpy as np

import geoq
from benchmarks.hostile.cases import CASES, linear, table
from benchmarks.hostile.mutations import same

ONE = CASES[0]
FOLDS = geoq.RandomFolds(8)


def train(x, y):
    """A recipe that takes a few milliseconds."""
    time.sleep(0.01)
    weights = np.linalg.lstsq(x, y)[0]
    return lambda q: q @ weights


def calibrated(checkpoint=None):
    return geoq.GeoQ(linear, train, folds=FOLDS).fit(*table(), checkpoint=checkpoint)


def another():
    """An estimator for the same surrogate with other answers."""
    x, y = table(seed=5)
    return geoq.GeoQ(linear, None, folds=geoq.RandomFolds(3)).fit(x, y)


def forked(work):
    """The number of a child process that does the work and ends with status 0, or 1 if the work raises."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def killed_after(child, seconds):
    """Kill a child after some seconds; whether the child was still running."""
    time.sleep(seconds)
    ended, _ = os.waitpid(child, os.WNOHANG)
    if ended:
        return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def leftovers(folder):
    return len(list(folder.glob(".*.tmp")))


def kills_during_fit(n_kills, folder, rng):
    """Kill calibrations and start them again until they are complete; the answers must not change."""
    expected = ONE.answers(calibrated(folder / "undisturbed"))
    # The second calibration is timed: the first one in a process takes longer.
    started = time.perf_counter()
    calibrated(folder / "timed")
    duration = time.perf_counter() - started
    counts, run = Counter(), 0
    while counts["kills"] < n_kills:
        place, run = folder / f"fit-{run}", run + 1
        for _ in range(4):
            child = forked(lambda place=place: calibrated(place))
            counts["kills"] += killed_after(child, duration * rng.random())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answers = ONE.answers(calibrated(place))
        counts["same" if same(answers, expected) else "wrong"] += 1
        counts["leftovers"] += leftovers(place)
        shutil.rmtree(place)
    return counts


def kills_during_save(n_kills, folder, rng):
    """Kill processes that save two estimators in turn; the file must contain one of them."""
    both = (ONE.fitted, another())
    expected = [ONE.answers(estimator) for estimator in both]
    target = folder / "saved.geoq"
    both[0].save(target)

    def save_forever():
        while True:
            for estimator in both:
                estimator.save(target)

    counts = Counter()
    for _ in range(n_kills):
        counts["kills"] += killed_after(forked(save_forever), 0.05 * rng.random())
        answers = ONE.answers(ONE.load(target))
        known = any(same(answers, one) for one in expected)
        counts["same" if known else "wrong"] += 1
    both[0].save(target)
    counts["leftovers"] = leftovers(folder)
    return counts


def two_on_one_checkpoint(n_pairs, folder, rng):
    """Two processes calibrate in one folder at the same time; both must get the answers of one process."""
    expected = ONE.answers(calibrated())
    counts = Counter()
    for pair in range(n_pairs):
        place = folder / f"pair-{pair}"
        outputs = [folder / f"{pair}-{number}.npz" for number in range(2)]

        def work(output, place=place):
            np.savez(output, *ONE.answers(calibrated(place)))

        children = []
        for output in outputs:
            children.append(forked(lambda output=output: work(output)))
            time.sleep(0.02 * rng.random())
        for child, output in zip(children, outputs, strict=True):
            if os.waitpid(child, 0)[1]:
                counts["refused"] += 1
                continue
            with np.load(output) as stored:
                answers = [stored[name] for name in stored.files]
            counts["same" if same(answers, expected) else "wrong"] += 1
    return counts


def two_on_one_file(n_loads, folder, rng):
    """Two processes save to one path while this process loads from it; each load must give one of the two."""
    del rng
    both = (ONE.fitted, another())
    expected = [ONE.answers(estimator) for estimator in both]
    target = folder / "shared.geoq"
    both[0].save(target)

    def save_often(estimator):
        for _ in range(2 * n_loads):
            estimator.save(target)

    children = [forked(lambda e=estimator: save_often(e)) for estimator in both]
    counts = Counter()
    for _ in range(n_loads):
        try:
            answers = ONE.answers(ONE.load(target))
        except ValueError:
            counts["refused"] += 1
            continue
        known = any(same(answers, one) for one in expected)
        counts["same" if known else "wrong"] += 1
    for child in children:
        failed = os.waitpid(child, 0)[1]
        counts["failed saves" if failed else "saves complete"] += 1
    counts["leftovers"] = leftovers(folder)
    return counts


@contextmanager
def small_disk(folder, n_bytes):
    """A file system of a given size; None where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    try:
        yield folder if done else None
    finally:
        if done:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def full_disk(n_tries, folder, rng):
    """Save and calibrate on a small file system; the old file stays whole, and the calibration is completed in memory."""
    counts = Counter()
    expected, calibration = ONE.answers(ONE.fitted), ONE.answers(calibrated())
    with small_disk(folder / "disk", 2**17) as disk:
        if disk is None:
            return None
        for _ in range(n_tries):
            shutil.rmtree(disk / "ck", ignore_errors=True)
            ONE.fitted.save(disk / "a.geoq")
            # What stays free is between nothing and twice the size of the file.
            size = (disk / "a.geoq").stat().st_size
            free = int(rng.integers(0, 2 * size))
            fill(disk / "filler", shutil.disk_usage(disk).free - free)
            counts[refused_or_whole(disk / "a.geoq", expected)] += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    answers = ONE.answers(calibrated(disk / "ck"))
                except OSError:
                    counts["refused before training"] += 1
                else:
                    counts["same" if same(answers, calibration) else "wrong"] += 1
            (disk / "filler").unlink()
    return counts


def fill(path, n_bytes):
    with path.open("wb") as file:
        try:
            file.write(bytes(max(0, n_bytes)))
        except OSError:
            return


def refused_or_whole(path, expected):
    try:
        ONE.fitted.save(path)
        kind = "same"
    except OSError:
        kind = "refused"
    whole = same(ONE.answers(ONE.load(path)), expected)
    return kind if whole and not leftovers(path.parent) else "wrong"


def limited_files(n_tries, folder, rng):
    """Processes that may not write large files: every save is refused or complete, and the old file stays whole."""
    target, expected = folder / "limited.geoq", ONE.answers(ONE.fitted)
    ONE.fitted.save(target)
    size, counts = target.stat().st_size, Counter()

    def save(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        ONE.fitted.save(target)

    for _ in range(n_tries):
        limit = int(rng.integers(1, 2 * size))
        devnull = os.open(os.devnull, os.O_WRONLY)
        status = os.waitpid(forked(lambda limit=limit: save(limit)), 0)[1]
        os.close(devnull)
        whole = same(ONE.answers(ONE.load(target)), expected)
        as_expected = whole and bool(status) == (limit < size)
        outcome = "refused" if status else "same"
        counts[outcome if as_expected else "wrong"] += 1
    counts["leftovers"] = leftovers(folder)
    return counts
