"""Tables: data frames of pandas or polars, which the user's callables receive unchanged and the geometry uses as numbers.

A column becomes one column of numbers. Numbers stay as they are, a date becomes its seconds since 1970, a category becomes the
number of its level, and a missing value becomes nan. Libraries of data frames are imported only if a data frame is passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from geoq.data.column import Column, column_of

# Names and levels are listed in messages up to this many.
N_LISTED = 8


@dataclass(frozen=True)
class Schema:
    """The columns of the table of ``fit``, with their levels, and the library of the data frame."""

    columns: tuple[Column, ...]
    library: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, j: int) -> str:
        return self.columns[j].name

    def named(self, names: "Names | None") -> "Schema":
        """The same columns with other names."""
        if names is None:
            return self
        pairs = enumerate(self.columns)
        return replace(self, columns=tuple(replace(column, name=names[j]) for j, column in pairs))

    @staticmethod
    def of(frame: Any) -> "Schema":
        """The columns of a data frame; raises if a column can be neither a number, nor a date, nor a category."""
        found = _narwhals(frame, "x")
        columns = tuple(column_of(found.get_column(name), name) for name in found.columns)
        return Schema(columns, found.implementation.value)

    def table(self, frame: Any, name: str = "x") -> "Table":
        """A data frame with these columns. Columns in another order are put into the order of ``fit``."""
        if isinstance(frame, Table):
            return frame
        if not is_frame(frame):
            raise TypeError(
                f"{name} is a {type(frame).__name__}, but GeoQ was fitted on a table with the columns {listed(self.names)}; "
                "pass a table with these columns, for one row such as table[:1]."
            )
        found = _narwhals(frame, name)
        if found.implementation.value != self.library:
            found = _in_library(found, self.library)
        given = {str(column): column for column in found.columns}
        lacking = [n for n in self.names if n not in given]
        beyond = [n for n in given if n not in self.names]
        if lacking or beyond:
            ways_out = ("add", lacking), ("drop", beyond)
            way_out = " and ".join(
                f"{verb} {listed(columns)}" for verb, columns in ways_out if columns
            )
            raise ValueError(
                f"{name} has other columns than {listed(self.names)}, on which GeoQ was fitted; {way_out}."
            )
        ordered = [given[n] for n in self.names]
        if ordered != found.columns:
            found = _narwhals(found.to_native()[ordered], name)
        pairs = [(c, found.get_column(n)) for c, n in zip(self.columns, ordered, strict=True)]
        arrays = [column.encode(part) for column, part in pairs]
        changed = [new for column, part in pairs if (new := column.cast(part)) is not part]
        if changed:
            found = found.with_columns(*changed)
        return Table(self._labelled(found.to_native()), np.stack(arrays, axis=1), self)

    def _labelled(self, native: Any) -> Any:
        """The data frame with the names of ``fit``, which are text in a file and can be numbers."""
        pairs = zip(native.columns, self.columns, strict=True)
        labels = [own if column.label is None else column.label for own, column in pairs]
        return native if [*native.columns] == labels else native.set_axis(labels, axis=1)

    def build(self, array: np.ndarray) -> "Table | None":
        """The table with these numbers; None if the library of its data frame is not installed."""
        try:
            import narwhals as nw

            pairs = zip(self.columns, array.T, strict=True)
            series = {c.name: c.build(numbers, self.library) for c, numbers in pairs}
            return Table(self._labelled(nw.from_dict(series).to_native()), array, self)
        except ImportError:
            return None


# Names of inputs, one for each number. A schema also gives their values in words.
Names: TypeAlias = Sequence[str] | Schema


@dataclass(frozen=True)
class Table:
    """Rows of a data frame: the frame itself for the user's callables, and its columns as numbers.

    Attributes:
        native: the data frame, or a Series of outputs.
        array: the numbers, one column per column of the frame.
        schema: the columns; None for outputs.
    """

    native: Any
    array: np.ndarray
    schema: Schema | None = None

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: Any) -> "Table":
        return replace(self, native=_take(self.native, rows), array=self.array[rows])

    def copy(self) -> "Table":
        """The same rows with a data frame of their own."""
        copy = getattr(self.native, "copy", None) or self.native.clone
        return replace(self, native=copy())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.array.shape

    def like(self, array: np.ndarray) -> "Table":
        """A table of the same kind with these numbers: each value is a value of this table, or a number."""
        import narwhals as nw

        parts: dict[Any, Any] = {}
        for name, values, order in zip(self.native.columns, array.T, self._orders.T, strict=True):
            own, ordered = self.native[name], self.array[:, len(parts)][order]
            places = np.searchsorted(ordered, values).clip(max=len(ordered) - 1)
            if np.array_equal(ordered[places], values, equal_nan=True):
                found = _take(own, order[places])
                parts[name] = found.reset_index(drop=True) if hasattr(found, "iloc") else found
            else:
                known = nw.from_native(own, series_only=True)
                new = nw.new_series(str(name), values, backend=known.implementation)
                parts[name] = new.cast(known.dtype).to_native()
        return Table(type(self.native)(parts), array, self.schema)

    @cached_property
    def _orders(self) -> np.ndarray:
        return self.array.argsort(axis=0, kind="stable")


def is_frame(x: object) -> bool:
    """Whether x is a data frame in memory."""
    if isinstance(x, np.ndarray) or hasattr(x, "dims"):
        return False
    return _collector(x) is None and hasattr(x, "columns") and hasattr(x, "shape")


def _collector(x: object) -> str | None:
    """The method that brings the rows of a lazy data frame into memory; None for anything else."""
    lazy = hasattr(type(x), "columns")
    return next((m for m in ("collect", "compute") if lazy and hasattr(x, m)), None)


def cell(x: Any, column: int) -> str:
    """A value of the first row of a table or an array as text; a string is quoted."""
    if not isinstance(x, Table):
        return f"{float(x[0].reshape(-1)[column]):.4g}"
    found = x.native[x.native.columns[column]].to_list()[0]
    return repr(found) if isinstance(found, str) else str(found)


def in_words(names: Names | None, column: int, value: float) -> str:
    """A value of a column in words; dates and levels need the schema of a table."""
    return names.columns[column].text(value) if isinstance(names, Schema) else f"{value:.4g}"


def schema_of(x: Any) -> Schema:
    """The columns of a table; the columns of an array are named by their numbers."""
    if isinstance(x, Table) and x.schema is not None:
        return x.schema
    return Schema(tuple(Column(str(j)) for j in range(x.shape[1])))


def input_rows(x: Any) -> Any:
    """Inputs as rows: a data frame becomes a table, a list becomes an array."""
    _check_unlabelled(x, "x")
    if is_frame(x):
        table: Any = Schema.of(x).table(x)
        infinite = np.argwhere(np.isinf(table.array))
        if len(infinite):
            row, j = infinite[0]
            raise ValueError(
                f"column {table.schema[int(j)]!r} is {table.array[row, j]} in row {row}; remove or impute these rows first."
            )
        return table
    collector = "to_frame" if hasattr(x, "to_frame") else _collector(x)
    if collector:
        raise TypeError(f"x is a {type(x).__name__}, not a table in memory; pass x.{collector}().")
    return _stacked(x, "x") if isinstance(x, list | tuple) else x


def output_rows(y: Any) -> Any:
    """Outputs as rows: a data frame or a Series becomes a table of numbers, a list becomes an array."""
    _check_unlabelled(y, "y")
    if isinstance(y, list | tuple):
        return _stacked(y, "y")
    if not is_frame(y) and not hasattr(y, "to_numpy"):
        return y
    import narwhals as nw

    found = _narwhals(y, "y") if is_frame(y) else None
    parts = [nw.from_native(y, series_only=True)] if found is None else [*found.iter_columns()]
    if not all(part.dtype.is_numeric() or part.dtype == nw.Boolean for part in parts):
        return y.to_numpy()  # which is refused as an array
    columns = [Column(str(part.name or "y")).encode(part) for part in parts]
    return Table(y, columns[0] if found is None else np.stack(columns, axis=1))


def _check_unlabelled(array: Any, name: str) -> None:
    if hasattr(array, "dims"):
        raise TypeError(
            f"{name} is a {type(array).__name__} of xarray; use Labelled(estimator, dimension) (from geoq.xarray import Labelled), or "
            f"pass {name}.values."
        )


def _stacked(rows: Sequence[Any], name: str) -> np.ndarray:
    """A list as an array; raises for rows of different shapes."""
    shapes = list(dict.fromkeys(np.shape(row) for row in rows))
    if len(shapes) > 1:
        raise ValueError(
            f"{name} is a list of rows with different shapes, such as {shapes[0]} and {shapes[1]}, but all samples need the same "
            "shape; interpolate fields on different meshes or grids to common nodes, and let the surrogate answer there."
        )
    return np.asarray(rows)


def output_names(y: Any) -> tuple[str, ...] | None:
    """The names of the outputs, with their units if the data frame has ``attrs["units"]``; None if they have no names."""
    given = y.native if isinstance(y, Table) else y
    units = getattr(given, "attrs", {}).get("units", {})
    if is_frame(given):
        found = [str(name) for name in given.columns]
        return tuple(f"{n} ({units[n]})" if n in units else n for n in found)
    name = getattr(given, "name", None)
    return None if name is None else (str(name),)


def check_same_order(x: Any, y: Any, name: str = "y") -> None:
    """Raise if the indices of x and of y, or of groups, have labels in common, but at other places."""
    indices: Any = [getattr(getattr(part, "native", part), "index", None) for part in (x, y)]
    own, other = indices
    if not (hasattr(own, "equals") and hasattr(other, "isin")) or own.equals(other):
        return
    common = int(own.isin(other).sum())
    if common and len(own) == len(other):
        raise ValueError(
            f"the index of {name} has {common} of the {len(own)} labels of the index of x, in another order; pass {name}.loc[x.index], drop "
            f"the same rows of x and {name}, or pass {name}.to_numpy() if the rows correspond."
        )


def listed(names: Sequence[str]) -> str:
    """Quoted names for a message, the first few of them if they are many."""
    return first_few([repr(name) for name in names])


def first_few(texts: Sequence[str]) -> str:
    """Texts for a message, the first few of them if they are many."""
    more = f", ... ({len(texts)} in all)" if len(texts) > N_LISTED else ""
    return ", ".join(texts[:N_LISTED]) + more


def lacking_levels(table: Table, rows: np.ndarray) -> str:
    """The levels of a table that some of its rows lack, in words; empty if they have all."""
    assert table.schema is not None
    lacking = [
        f"{column.name}={level!r}"
        for column, numbers in zip(table.schema.columns, table.array[rows].T, strict=True)
        for number, level in enumerate(column.levels)
        if number not in numbers
    ]
    return first_few(lacking)


def _take(rows: Any, where: Any) -> Any:
    return rows.iloc[where] if hasattr(rows, "iloc") else rows[where]


def _narwhals(frame: Any, name: str) -> Any:
    """The data frame behind the interface of narwhals; raises if columns have the same name."""
    import narwhals as nw

    names = [str(column) for column in frame.columns]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"{name} has several columns named {listed(twice)}; rename or drop them.")
    if not names:
        raise ValueError(f"{name} has no columns; pass a table with one column per input.")
    return nw.from_native(frame, eager_only=True)


def _in_library(found: Any, library: Any) -> Any:
    """The same values in a data frame of another library; as it is if that is not installed."""
    import narwhals as nw

    try:
        return nw.from_dict({str(n): found[n].to_list() for n in found.columns}, backend=library)
    except ImportError:
        return found
