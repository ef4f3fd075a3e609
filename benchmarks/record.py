"""Results files: one row per problem, method and seed, with the command, the code and the machine that produced them.

A file is ``benchmarks/results/NAME.json.gz``, compressed with a fixed time stamp, so that equal rows give equal bytes. Rows that only a
run at another commit has are in ``NAME@COMMIT.json.gz``. ``python -m benchmarks.record NAME`` prints a file as JSON, one row per line.
"""

import ast
import gzip
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import geoq

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ENDING = ".json.gz"
QUANTILE = 0.95
PACKAGES = ("geoq", "torch", "numpy", "scipy", "scikit-learn", "lightgbm")
# Results and pages may change while the benchmarks run one after the other.
SOURCES = (".", ":!benchmarks/results", ":!docs")
# The columns that identify a row.
KEYS = (
    *("problem", "method", "setting", "shift", "form", "folds", "origin", "surrogate", "seed"),
    *("kind", "n", "forcing", "tolerance", "n_starts", "n_jobs", "points", "engine"),
)


def commit():
    """The commit of the code, with a mark if tracked files other than results and pages differ from it."""
    if "GEOQ_COMMIT" in os.environ:  # for runs outside the repository
        return os.environ["GEOQ_COMMIT"]
    ask = {"cwd": ROOT, "stderr": subprocess.DEVNULL, "text": True}
    status = ["git", "status", "--porcelain", "--untracked-files=no", "--", *SOURCES]
    try:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], **ask).strip()
        changed = subprocess.check_output(status, **ask).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


# Read at the import: the files may be at another commit when the results are written.
COMMIT = commit()


def source():
    """Fingerprint of the package and of the modules of the benchmarks that are imported; comments and docstrings do not count."""
    loaded = (sys.modules[n] for n in list(sys.modules) if n.split(".")[0] == "benchmarks")
    main = getattr(sys.modules["__main__"], "__file__", None) or __file__
    files = {Path(m.__file__) for m in loaded if getattr(m, "__file__", None)} | {Path(main)}
    files = {file for file in files if ROOT in file.resolve().parents}
    files |= set(Path(geoq.__file__).parent.rglob("*.py"))
    code = hashlib.sha256()
    for file in sorted(files):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        code.update(ast.dump(tree).encode())
    return code.hexdigest()[:16]


def trainings(fitted, *, checks=False):
    """First, best and last held-out loss of the networks of a fitted method, for its row; nothing for other methods."""
    bound = getattr(getattr(fitted, "fitted_", None), "bound", None)
    for part in (fitted, bound, getattr(bound, "factor", None)):
        for name in ("trainings_", "trainings", "training"):
            found = getattr(part, name, None)
            found = found if isinstance(found, tuple) else (found,)
            if found and all(hasattr(result, "best_step") for result in found):
                left_out = () if checks else ("checks",)
                known = [{k: v for k, v in vars(r).items() if k not in left_out} for r in found]
                return {"trainings": known}
    return {}


def is_untrained(row):
    """Whether the networks of a row have their initial weights."""
    steps = [result.get("best_step") for result in row.get("trainings") or [row]]
    return any(step is not None for step in steps) and not any(steps)


def path_of(name, folder=RESULTS):
    """The results file of a name."""
    return folder / f"{name}{ENDING}"


def write(name, rows, path=None, **extra):
    """Write the rows, the command, the machine, the commit, the versions and the seeds; return the path.

    All rows have one commit: the commit that a row names, or the commit of this run. A published file that code with another
    fingerprint has measured is renamed to ``NAME@COMMIT``, so that its rows stay in the tables. Rows of methods whose networks have
    their initial weights do not describe the method: they are left out, printed, and listed under "untrained". Small runs, with the
    condition ``small=True``, keep them.

    Raises:
        ValueError: the rows were measured at different commits; or the file belongs to the published results, and its commit
            does not contain the code that measured them. Small runs and files in other folders may have any commit.
    """
    target, small = path or path_of(name), extra.get("small")
    untrained = [*extra.pop("untrained", []), *([] if small else filter(is_untrained, rows))]
    rows = [row for row in rows if row not in untrained]
    commits = sorted({row.get("commit", COMMIT) for row in rows}) or [COMMIT]
    if len(commits) > 1:
        raise ValueError(
            f"{target.name} would mix rows of the commits {', '.join(c[:10] for c in commits)}; measure all rows at one commit, or "
            f"write the older rows to {name}@COMMIT{ENDING}; the tables show both and mark the older rows."
        )
    unclear = commits[0].endswith("+changes") or commits[0] == "unknown"
    published = target.resolve().parent == RESULTS.resolve() and not small
    if published and unclear:
        raise ValueError(
            f"{target.name} would have the commit {commits[0]!r}, which does not contain the code that measured it; commit the "
            "changes first and measure again, or write to another folder with --out."
        )
    listed = [{key: row[key] for key in KEYS if key in row} for row in untrained]
    head = {
        "problem": name,
        "command": command(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "device": device(),
        "commit": commits[0],
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in PACKAGES},
        "seeds": sorted({row["seed"] for row in rows}),
        **({"untrained": listed} if listed else {}),
        **extra,
    }
    rows = [{key: row[key] for key in row if key != "commit"} for row in rows]
    earlier = read(target) if published and target.is_file() else extra
    if earlier.get("source") != extra.get("source"):
        target.rename(path_of(f"{name}@{earlier['commit'][:10]}", target.parent))
    save({**head, "rows": rows}, target)
    return target


def command():
    """The command of this process, without the options that change where and how fast it runs."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    words = sys.argv[1:]
    for option in ("--jobs", "--minutes", "--out", "--pictures"):
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    return " ".join(["python -m", module.name if module else "?", *words])


def device():
    """The name of the GPU, or cpu."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else "cpu"


def fingerprint(*arrays):
    """A hash of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def installed(package):
    """Version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def as_text(content):
    """JSON with one line per row. JSON has no nan: the correlation with a constant bound becomes null."""
    rows = ",\n".join(json.dumps(_rounded(row), allow_nan=False) for row in content["rows"])
    head = {key: content[key] for key in content if key != "rows"}
    return (
        f'{json.dumps(_rounded(head), indent=1, allow_nan=False)[:-2]},\n "rows": [\n{rows}\n]}}\n'
    )


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    if isinstance(value, float):  # no result is known to more than seven digits
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def save(content, path):
    """Write a file whole or not at all: an interrupted run leaves no incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    unfinished.write_bytes(gzip.compress(as_text(content).encode(), mtime=0))
    unfinished.replace(path)


def read(path):
    """The content of one file."""
    return json.loads(gzip.decompress(path.read_bytes()))


def load(name, folder=RESULTS):
    """The content of a results file, with the rows that only runs at other commits have; these name their run."""
    path = path_of(name, folder)
    if not path.is_file():
        known = sorted(file.name.removesuffix(ENDING) for file in folder.glob(f"*{ENDING}"))
        raise SystemExit(
            f"{path} does not exist; choose one of {', '.join(known)}, or run its benchmark first."
        )
    record = read(path)
    for part in sorted(folder.glob(f"{name}@*{ENDING}")):
        other, known = read(part), {identity(row) for row in record["rows"]}
        new = [row for row in other["rows"] if identity(row) not in known]
        record["rows"] += [row | {"run": where(other)} for row in new]
    return record


def where(record):
    """Machine, GPU and commit of a results file."""
    gpu = "" if record["device"] == "cpu" else f", {record['device']}"
    return f"{record['machine']}{gpu}, commit {record['commit'][:10]}"


def identity(row):
    """What a row measures."""
    return tuple(row.get(key) for key in KEYS)


def finished(path, **conditions):
    """Rows and untrained rows of an earlier run under the same conditions, such as the fingerprint of the code.

    They count as rows of this run, even if a commit without effect on the code lies between.
    """
    earlier = read(path) if path.is_file() else {}
    if earlier and all(earlier.get(key) == value for key, value in conditions.items()):
        return earlier["rows"], earlier.get("untrained", [])
    return [], []


if __name__ == "__main__":
    print(as_text(load(sys.argv[1])))
