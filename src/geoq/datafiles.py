"""Files of the command line: columns by name from CSV, Parquet, NPZ and NetCDF, predictions that were made elsewhere, and calibrations."""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from scipy.interpolate import RBFInterpolator

from geoq import state
from geoq.arrays import flat
from geoq.core.estimator import GeoQ
from geoq.data.table import Schema, is_frame, listed
from geoq.rollout.estimator import RolloutGeoQ

# One row per run. A name can end with its unit in brackets, as in "load [kN]".
Columns: TypeAlias = dict[str, np.ndarray]
UNIT = re.compile(r"^(.*?)\s*[\[(]([^\])]*)[\])]$")
# Predictions between known rows are interpolated for at most this many inputs, from this many rows.
MOST_INPUTS, N_NEAR = 64, 50


def read(path: str) -> Columns:
    """The columns of a file by its suffix; raises unless all have the same number of rows."""
    suffix = Path(path).suffix.lower()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist, or is not a file.")
    if suffix == ".csv":
        columns = _read_csv(path)
    elif suffix == ".npz":
        with np.load(path) as file:
            columns = {name: file[name] for name in file.files}
    elif suffix == ".parquet":
        frame = _with_frames(path, "read_parquet")(path)
        columns = {str(name): np.asarray(frame[name]) for name in frame.columns}
    elif suffix in (".nc", ".nc4"):
        with import_module("geoq.xarray").xr.open_dataset(path) as data:
            units = {name: data[name].attrs.get("units") for name in data.data_vars}
            columns = {f"{n} [{u}]" if u else str(n): data[n].values for n, u in units.items()}
    else:
        raise ValueError(f"{path} has the suffix {suffix!r}; use .csv, .parquet, .npz or .nc.")
    lengths = {name: len(values) for name, values in columns.items() if values.ndim}
    if len({*lengths.values()}) != 1 or len(lengths) < len(columns):
        text = f"columns of different lengths, {lengths}"
        raise ValueError(f"{path} has {text}; give each run one row.")
    return columns


def _read_csv(path: str) -> Columns:
    text = Path(path).read_text(encoding="utf-8-sig")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    mark = max(",;\t", key=lines[0].count) if lines else ","
    head, *rows = list(csv.reader(lines, delimiter=mark, skipinitialspace=True)) or [[]]
    if not rows or all(re.fullmatch(r"[-+.\deE]*", name) for name in head):
        text = "a first line with the names of its columns, and a line per run"
        raise ValueError(f"{path} needs {text}.")
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            text = f"{len(row)} cells, but there are {len(head)} names"
            raise ValueError(f"line {number} of {path} has {text}.")
    columns = zip(*rows, strict=True)
    return {name.strip(): _values(own) for name, own in zip(head, columns, strict=True)}


def _values(cells: Sequence[str]) -> np.ndarray:
    """The numbers of a column, nan where it is empty; its texts if one of them is no number."""
    try:
        return np.array([float(cell) if cell.strip() else np.nan for cell in cells])
    except ValueError:
        return np.array([cell.strip() for cell in cells], dtype=object)


def write(path: str, columns: Columns) -> None:
    """Write columns to a file by its suffix."""
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow([n if v.ndim == 1 else f"mean {n}" for n, v in columns.items()])
            flattened = [v if v.ndim == 1 else flat(v).mean(axis=1) for v in columns.values()]
            out.writerows(zip(*(v.tolist() for v in flattened), strict=True))
    elif suffix == ".npz":
        arrays: Any = {n: v.astype(str) if v.dtype == object else v for n, v in columns.items()}
        np.savez(path, **arrays)
    elif suffix == ".parquet":
        frame = _with_frames(path, "DataFrame")({n: v.tolist() for n, v in columns.items()})
        (frame.to_parquet if hasattr(frame, "to_parquet") else frame.write_parquet)(path)
    elif suffix in (".nc", ".nc4"):
        xr = import_module("geoq.xarray").xr
        data = xr.Dataset()
        for name, values in columns.items():
            found = UNIT.match(name)
            dims = ["run", *(f"{found[1] if found else name}_{i}" for i in range(1, values.ndim))]
            values = values.astype(str) if values.dtype == object else values
            data[found[1] if found else name] = (dims, values, {"units": found[2]} if found else {})
        data.to_netcdf(path)
    else:
        raise ValueError(f"{path} has the suffix {suffix!r}; use .csv, .parquet, .npz or .nc.")


def _with_frames(path: str, name: str) -> Any:
    """A function of polars, or of pandas if it can use Parquet."""
    for library, *others in (("polars",), ("pandas", "pyarrow")):
        try:
            for other in others:
                import_module(other)
            return getattr(import_module(library), name)
        except ImportError:
            continue
    way_out = 'pip install polars, or "pandas[parquet]"'
    raise ImportError(f"{path} needs a library of data frames; {way_out}.")


def chosen(columns: Columns, names: Sequence[str], path: str) -> list[str]:
    """The columns with these names, with or without their units; raises for a name that is missing or has another unit."""
    bare = {(m[1] if (m := UNIT.match(name)) else name): name for name in columns}
    found = [n if n in columns else bare.get(m[1] if (m := UNIT.match(n)) else n) for n in names]
    for name, own in zip(names, found, strict=True):
        if own is None:
            raise ValueError(f"{path} has no column {name!r}, but {listed([*columns])}.")
        if own != name and UNIT.match(name) and UNIT.match(own):
            raise ValueError(f"{path} has the column {own!r}, but {name!r} is needed; convert it.")
    return [own for own in found if own is not None]


def stacked(columns: Columns, names: Sequence[str]) -> Any:
    """Some columns as one array; as a data frame if one of them holds text."""
    parts = [columns[name] for name in names]
    if any(part.dtype.kind not in "fiub" for part in parts):
        for library in ("pandas", "polars"):
            try:
                return import_module(library).DataFrame({n: columns[n].tolist() for n in names})
            except ImportError:
                continue
        raise ImportError('columns of text need pandas; pip install "geoq[tables]".')
    if len(parts) == 1 and parts[0].ndim > 1:
        return parts[0]
    return np.stack(parts, axis=1).astype(float)


def predictions_of(paths: Sequence[str], outputs: Sequence[str], n: int) -> list[np.ndarray]:
    """The predictions of the deployed model and of each fold: a file each, or one file with the columns deployed, fold_1, ..."""
    found = []
    for path in paths:
        columns = read(path)
        parts = [name for name in columns if re.fullmatch(r"deployed|fold_\d+", name)]
        if parts and len(paths) == 1:
            order = sorted(parts, key=lambda name: int("0" + name[5:]) if name[0] == "f" else 0)
            found += [np.asarray(columns[name], dtype=float) for name in order]
        elif len(columns) == len(outputs) == 1:
            found.append(np.asarray(next(iter(columns.values())), dtype=float))
        else:
            values = stacked(columns, chosen(columns, outputs, path))
            found.append(values[:, 0] if len(outputs) == 1 and values.ndim == 2 else values)
        if len(found[-1]) != n:
            text = f"{len(found[-1])} predictions for {n} rows"
            raise ValueError(f"{path} has {text}; give one per row.")
    return found


def tabulated(x: Any, y: np.ndarray) -> Callable[[Any], np.ndarray]:
    """A surrogate of known predictions. Between the known rows, where only its sensitivity is measured, it interpolates."""
    schema = Schema.of(x) if is_frame(x) else None

    def numbers(rows: Any) -> np.ndarray:
        return flat(np.asarray(rows, dtype=float)) if schema is None else schema.table(rows).array

    known = numbers(x)
    row_of = {row.tobytes(): i for i, row in enumerate(known)}
    first = np.array(sorted(row_of.values()))
    filled, scale = np.nan_to_num(known), np.nan_to_num(known).std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)

    def surrogate(rows: Any) -> np.ndarray:
        asked = numbers(rows)
        place = np.array([row_of.get(row.tobytes(), -1) for row in asked])
        answers, new = y[place].astype(float), place < 0
        if new.any() and known.shape[1] > MOST_INPUTS:
            answers[new] = np.inf  # no answer
        elif new.any():
            near = {"neighbors": min(N_NEAR, len(first)), "kernel": "linear"}
            between = RBFInterpolator(filled[first] / scale, flat(y[first]), **near)
            answers[new] = between(np.nan_to_num(asked[new]) / scale).reshape(-1, *y.shape[1:])
        return answers

    return surrogate


def load(path: str, surrogate: Any = None) -> tuple[Any, dict[str, Any]]:
    """The calibration of a file, and its names. Without a surrogate it can describe itself and has no answers to new queries."""
    tree, arrays = state.read(path)
    labels = tree["labels"] or {}
    if "dims" in labels or tree["estimator"] == "RolloutGeoQ":
        if surrogate is None:
            way_out = "pass --surrogate package.module:name"
            raise ValueError(f"{path} holds labelled arrays or forecasts; {way_out}.")
        face: Any = import_module("geoq.xarray").Labelled if "dims" in labels else RolloutGeoQ
        return face.load(path, surrogate=surrogate), {}
    known = arrays["answers.surrogate"]
    stand_in = surrogate or (lambda rows: np.resize(known, (len(rows), *known.shape[1:])))
    return state.load(path, GeoQ, surrogate=stand_in, content=(tree, arrays)), labels


def with_predictions(estimator: Any, inputs: Sequence[Any], predictions: Sequence[Any]) -> None:
    """Replace the surrogate by its predictions at queries from one file or from several."""
    known = np.concatenate(predictions)
    x = inputs[0]
    if len(inputs) > 1:
        nw = import_module("narwhals")
        frames = [nw.from_native(part) for part in inputs] if is_frame(x) else []
        x = nw.concat(frames).to_native() if frames else np.concatenate(inputs)
    table = tabulated(x, known.reshape(len(known), *estimator.fitted_.output_shape))
    estimator.fitted_ = replace(estimator.fitted_, surrogate=table)
