"""What every benchmark writes down: one row per method, setting and seed, and where it was measured."""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geoq.baselines import RememberedTraining
from geoq.metrics import correlation, coverage, pinball, relative_l2

RESULTS = Path(__file__).parent / "results"
QUANTILE = 0.95
PACKAGES = ("geoq", "torch", "numpy", "scipy", "scikit-learn", "lightgbm")


def commit() -> str:
    """The commit the code is at, marked if files have been changed since."""
    if "GEOQ_COMMIT" in os.environ:  # where the code runs without its repository
        return os.environ["GEOQ_COMMIT"]
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


# Of the code that runs: the files may be at another commit when the results are written.
COMMIT = commit()


@dataclass
class Stopwatch:
    """Seconds spent inside a ``with watch:`` block, remembered trainings charged as if they had been done."""

    training: RememberedTraining | None = None
    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        saved = self.training.seconds_saved if self.training else 0.0
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        if self.training:
            self.seconds += self.training.seconds_saved - saved


def row(
    method: str,
    *,
    setting: str = "",
    seed: int,
    y: np.ndarray,
    prediction: np.ndarray,
    error_hat: np.ndarray,
    safe: np.ndarray,
    train_seconds: float,
    inference_seconds: float,
) -> dict[str, Any]:
    """One line of the tables; ``safe`` is the mask that the safe_ columns are restricted to."""
    error = abs(y - prediction)
    return {
        "method": method,
        "setting": setting,
        "seed": seed,
        "pinball": pinball(error, error_hat, QUANTILE),
        "correlation": correlation(error, error_hat),
        "coverage": coverage(error, error_hat),
        "safe_fraction": float(safe.mean()),
        "safe_pinball": pinball(error, error_hat, QUANTILE, safe),
        "safe_correlation": correlation(error, error_hat, safe),
        "safe_coverage": coverage(error, error_hat, safe),
        "relative_l2": relative_l2(y, prediction),
        "train_seconds": train_seconds,
        "inference_seconds": inference_seconds,
    }


def write(
    problem: str, rows: list[dict[str, Any]], path: Path | None = None, **extra: Any
) -> Path:
    """Write the rows with machine, device, commit, versions and seeds."""
    target = path or RESULTS / f"{problem}.json"
    record = {
        "problem": problem,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": COMMIT,
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "seeds": sorted({r["seed"] for r in rows}),
        **extra,
    }
    target.parent.mkdir(exist_ok=True)
    target.write_text(as_text(record, rows))
    return target


def as_text(record: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """JSON with a line per row; it has no nan, so a correlation with a constant bound becomes null."""
    head = json.dumps(_without_nan(record), indent=1, allow_nan=False)
    lines = ",\n".join(json.dumps(_without_nan(row), allow_nan=False) for row in rows)
    return f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n'


def installed(package: str) -> str | None:
    """Version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    if isinstance(
        value, float
    ):  # seven digits are more than any of these numbers carries
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
