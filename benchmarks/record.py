"""Results files: one row per method, setting and seed, and the code and machine that produced them."""

import ast
import hashlib
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoq
from benchmarks.rivals.remembered import RememberedTraining
from geoq.metrics import correlation, coverage, pinball, relative_l2

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUANTILE = 0.95
PACKAGES = ("geoq", "torch", "numpy", "scipy", "scikit-learn", "lightgbm")


# Results and pages may change while the benchmarks run one after the other.
SOURCES = (".", ":!benchmarks/results", ":!docs")


def commit() -> str:
    """The commit of the code, with a mark if tracked files other than results and pages differ from it."""
    if "GEOQ_COMMIT" in os.environ:  # for runs outside the repository
        return os.environ["GEOQ_COMMIT"]
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", *SOURCES],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


# Read at the import: the files may be at another commit when the results are written.
COMMIT = commit()


@dataclass
class Stopwatch:
    """Seconds spent inside ``with watch.running()`` blocks.

    A remembered training counts with the seconds that it took when it was done.
    """

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


@dataclass
class Memo:
    """Results by key; each is computed once. ``seconds_saved`` are the seconds of the repeated requests."""

    known: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    seconds_saved: float = 0.0

    def __call__(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of ``make()``, or the earlier result for the same key."""
        if key in self.known:
            self.seconds_saved += self.known[key][1]
        else:
            self.known[key] = self.timed(make)
        return self.known[key][0]

    def timed(self, make: Callable[[], Any]) -> tuple[Any, float]:
        """Result and seconds of a call; results from the memo count with the seconds that they took."""
        saved, started = self.seconds_saved, _now()
        made = make()
        return made, _now() - started + self.seconds_saved - saved


def _now() -> float:
    """The time after all work on the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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
    """One row of a results file; columns whose names start with ``safe_`` are restricted to the mask ``safe``."""
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


def trainings(fitted: Any) -> dict[str, Any]:
    """First, best and last held-out loss of the networks of a fitted method, for its row; nothing for other methods."""
    parts = (getattr(fitted, name, None) for name in ("increment_model_", "scheme_"))
    for part in (fitted, *parts):
        if results := getattr(part, "trainings_", ()):
            return {"trainings": [asdict(result) for result in results]}
    return {}


def is_untrained(line: dict[str, Any]) -> bool:
    """Whether the networks of a row have their initial weights."""
    results = line.get("trainings") or [line]
    steps = [result.get("best_step") for result in results]
    return any(step is not None for step in steps) and not any(steps)


def _named(line: dict[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("method", "setting", "seed")}


def write(
    problem: str, rows: list[dict[str, Any]], path: Path | None = None, **extra: Any
) -> Path:
    """Write the rows, the machine, the device, the commit, the versions and the seeds; return the path.

    All rows have one commit: the commit that a row names, or the commit of this run. Parts of a file that are measured
    apart from the rows (``extra``) name their own commit, see ``part``.

    Rows of methods whose networks have their initial weights do not describe the method: they are left out, printed, and
    listed under "untrained". Small runs, with the condition ``small=True``, keep them.

    Raises:
        ValueError: The rows were measured at different commits; or the file belongs to the published results, and its commit
            does not contain the code that measured them. Small runs and files in other folders may have any commit.
    """
    untrained = [] if extra.get("small") else [*filter(is_untrained, rows)]
    for line in untrained:
        print(f"left out, no step lowered the held-out loss: {_named(line)}")
    rows = [line for line in rows if line not in untrained]
    target = path or RESULTS / f"{problem}.json"
    commits = sorted({r.get("commit", COMMIT) for r in rows}) or [COMMIT]
    if len(commits) > 1:
        raise ValueError(
            f"{target.name} would mix rows of the commits {', '.join(c[:10] for c in commits)}; measure all rows at one "
            f"commit, or write the older rows to {target.stem}@COMMIT.json; the tables show both and mark the older rows."
        )
    if target.resolve().parent == RESULTS.resolve() and not extra.get("small"):
        _refuse_changed_code(target, [commits[0], *_commits_of_parts(extra)])
    rows = [{key: r[key] for key in r if key != "commit"} for r in rows]
    record = {
        "problem": problem,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": commits[0],
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "seeds": sorted({r["seed"] for r in rows}),
        **({"untrained": [*map(_named, untrained)]} if untrained else {}),
        **extra,
    }
    target.parent.mkdir(exist_ok=True)
    target.write_text(as_text(record, rows))
    return target


def _commits_of_parts(extra: dict[str, Any]) -> list[str]:
    parts = [part for part in extra.values() if isinstance(part, dict)]
    return [part["commit"] for part in parts if "commit" in part]


def _refuse_changed_code(target: Path, commits: list[str]) -> None:
    """Refuse commits that do not identify the code: with changes that are not committed, or outside a repository."""
    for found in commits:
        if found.endswith("+changes") or found == "unknown":
            raise ValueError(
                f"{target.name} would have the commit {found!r}, which does not contain the code that measured it; commit the "
                "changes first and measure again, or write to another folder with --out."
            )


def part(**content: Any) -> dict[str, Any]:
    """A part of a results file that is measured apart from the rows of the file, with its own commit."""
    return {"commit": COMMIT, **content}


def as_text(record: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """JSON with one line per row. JSON has no nan: the correlation with a constant bound becomes null."""
    head = json.dumps(_without_nan(record), indent=1, allow_nan=False)
    lines = ",\n".join(json.dumps(_without_nan(row), allow_nan=False) for row in rows)
    return f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n'


def load(problem: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Content of a results file, with the rows that only other runs have: NAME@COMMIT.json."""
    path = folder / f"{problem}.json"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.json"))
        raise SystemExit(
            f"{path} does not exist; choose one of {', '.join(known)}, or run its benchmark first."
        )
    record = json.loads(path.read_text())
    for part in sorted(folder.glob(f"{problem}@*.json")):
        other = json.loads(part.read_text())
        known = {identity(row) for row in record["rows"]}
        record["rows"] += [
            row | {"run": where(other)}
            for row in other["rows"]
            if identity(row) not in known
        ]
    return record


def where(record: dict[str, Any]) -> str:
    """Machine, GPU and commit of a results file."""
    gpu = "" if record["device"] == "cpu" else f", {record['device']}"
    return f"{record['machine']}{gpu}, commit {record['commit'][:10]}"


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row measures."""
    return tuple(row.get(key) for key in ("method", "setting", "origin", "seed"))


def measured(path: Path, **conditions: Any) -> list[dict[str, Any]]:
    """Rows of an earlier run under the same conditions; no rows if there is none.

    A condition ``source`` (the fingerprint of the code) ensures that the same code measured the rows. The rows then count
    as rows of this run, even if a commit without effect on that code lies between.
    """
    if not path.is_file():
        return []
    earlier = json.loads(path.read_text())
    same = all(earlier.get(key) == value for key, value in conditions.items())
    return earlier["rows"] if same else []


def source(module: str) -> str:
    """Fingerprint of the code that the rows of a module depend on.

    It is a hash of the syntax trees of the module and of all modules that it imports from geoq and benchmarks, directly
    or indirectly. Comments and docstrings do not change it. Imports inside functions do not count: the benchmarks use
    them for drawing.
    """
    trees: dict[str, ast.Module] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in trees:
            trees[name] = ast.parse(_file(name).read_text())
            waiting += _imported_modules(trees[name])
    code = "".join(name + _code(trees[name]) for name in sorted(trees))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _file(module: str) -> Path:
    """File of a module of geoq or benchmarks; it may not exist."""
    package, *parts = module.split(".")
    folder = Path(geoq.__file__).parent if package == "geoq" else ROOT / package
    path = folder.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported_modules(tree: ast.Module) -> list[str]:
    """Modules of geoq and benchmarks that define what a module imports."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [_defining_module(node.module, alias.name) for alias in node.names]
    return [name for name in names if name.split(".")[0] in ("geoq", "benchmarks")]


def _defining_module(module: str, name: str) -> str:
    """The submodule of this name, or the module that a package imports the name from, or the module itself."""
    if module.split(".")[0] not in ("geoq", "benchmarks"):
        return module
    if _file(f"{module}.{name}").is_file():
        return f"{module}.{name}"
    if _file(module).name == "__init__.py":
        for node in ast.parse(_file(module).read_text()).body:
            if isinstance(node, ast.ImportFrom) and name in {
                a.name for a in node.names
            }:
                return _defining_module(node.module, name)
    return module


def _code(tree: ast.Module) -> str:
    """The syntax tree as text, without docstrings."""
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if has_docstring and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    # Python 3.12 added an empty list to each function and class.
    return ast.dump(tree).replace(", type_params=[]", "")


def installed(package: str) -> str | None:
    """Version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    if isinstance(value, float):  # no result is known to more than seven digits
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
