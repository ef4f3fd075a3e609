"""Columns of tables: their values as numbers, and numbers as their values."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

# The number of a level that does not occur in the data of ``fit``.
UNSEEN = -1.0


@dataclass(frozen=True)
class Column:
    """A column of numbers, of dates and times, or of levels (categories, strings or booleans).

    Attributes:
        name: the name of the column.
        kind: "number", "time" (in seconds since 1970) or "level".
        levels: the levels in the data of ``fit``; the numbers of the column are their positions.
        dtype: the name of the type of the column in narwhals.
        unit, zone: the unit of dates and times, and their time zone.
        level_type: the type of the levels in Python; empty if there are several.
        categories, ordered: the levels that the type of a categorical column declares, and whether they have an order.
        label: the name in the data frame, which can be a number or a tuple; None if a file cannot hold it.
    """

    name: str
    kind: str = "number"
    levels: tuple[str, ...] = ()
    dtype: str = "Float64"
    unit: Any = "us"
    zone: str = ""
    level_type: str = ""
    categories: tuple[Any, ...] = ()
    ordered: bool = False
    label: Any = None

    def cast(self, series: Any) -> Any:
        """The values in the type of ``fit``, where nothing is lost; raises if dates or levels are of another type."""
        import narwhals as nw

        dtype = type(series.dtype).__name__
        if self.kind == "number":
            if dtype == self.dtype or series.is_null().any():
                return series
            values = series.to_numpy()
            with np.errstate(invalid="ignore"):
                kept = np.array_equal(values.astype(self.dtype.lower()), values)
            return series.cast(getattr(nw, self.dtype) if kept else nw.Float64)
        if self.kind == "time" and dtype == self.dtype == "Datetime":
            zone = series.dtype.time_zone or ""
            if bool(zone) != bool(self.zone):
                raise TypeError(
                    f"column {self.name!r} has {zone or 'no'} time zone, but {self.zone or 'none'} in the data of fit; convert it."
                )
        if self.kind == "level":
            given = _level_type(series)
            if self.level_type and given and given != self.level_type:
                raise TypeError(
                    f"column {self.name!r} holds levels of the type {given}, but {self.level_type} in the data of fit, so the model "
                    f"would not know them; convert the column, for example with .astype({self.level_type})."
                )
        new = self._typed(series)
        kept = new is series or np.array_equal(
            self.encode(new), self.encode(series), equal_nan=True
        )
        return new if kept else series

    def _typed(self, series: Any) -> Any:
        """Dates or levels in the type of ``fit``; levels that it does not have follow its own."""
        import narwhals as nw

        own, dtype = series.dtype, type(series.dtype).__name__
        if self.kind == "time":
            zone = self.zone or None
            if dtype == self.dtype == "Datetime" and own.time_zone != zone:
                series = series.dt.convert_time_zone(zone)
            wanted = nw.Datetime(self.unit, zone) if self.dtype == "Datetime" else nw.Date()
            return series if series.dtype == wanted else series.cast(wanted)
        if not self.categories:
            return series if dtype == self.dtype else series.cast(getattr(nw, self.dtype))
        declared, ordered = _declared(series)
        present = declared or sorted({text for text in _texts(series) if text is not None})
        known = [*self.categories, *(c for c in present if c not in self.categories)]
        if (known, self.ordered) == (declared, ordered):
            return series
        if not hasattr(series.to_native(), "iloc"):
            return series.cast(nw.String).cast(nw.Enum(known))
        as_levels = series if declared else series.cast(nw.Categorical)
        native = as_levels.to_native().cat.set_categories(known, ordered=self.ordered)
        return nw.from_native(native, series_only=True)

    def encode(self, series: Any) -> np.ndarray:
        """The values as numbers; raises if the column holds something else than in the data of ``fit``."""
        import narwhals as nw

        dtype = series.dtype
        held, usable = {
            "number": ("numbers", dtype.is_numeric() or dtype == nw.Boolean),
            "time": ("dates", dtype in (nw.Date, nw.Datetime)),
            "level": ("categories", not (dtype.is_float() or dtype.is_temporal())),
        }[self.kind]
        if not usable:
            raise TypeError(
                f"column {self.name!r} has dtype {dtype}, but it held {held} in the data of fit; convert it to the same type."
            )
        if self.kind == "level":
            number: dict[Any, float] = {level: float(i) for i, level in enumerate(self.levels)}
            number[None] = np.nan
            return np.array([number.get(text, UNSEEN) for text in _texts(series)])
        if self.kind == "time":
            series = series.cast(nw.Datetime("us")) if dtype == nw.Date else series
            stamps = series.dt.timestamp("us").cast(nw.Float64).to_numpy()
            return np.asarray(stamps, dtype=float) / 1e6
        return np.asarray(series.cast(nw.Float64).to_numpy(), dtype=float)

    def text(self, value: float) -> str:
        """A value in words."""
        if self.kind == "level":
            return repr(self.levels[int(value)])
        if self.kind == "time":
            date = np.datetime_as_string(np.datetime64(round(value), "s"))
            return str(date).removesuffix("T00:00:00").replace("T", " ")
        return f"{value:.4g}"

    def build(self, numbers: np.ndarray, library: Any) -> Any:
        """A series with these numbers in the type of ``fit``."""
        import narwhals as nw

        make = partial(nw.new_series, self.name, backend=library)
        if self.kind == "number":
            whole = "Int" in self.dtype
            values = [None if np.isnan(n) else int(n) if whole else float(n) for n in numbers]
            return make(values, getattr(nw, self.dtype))
        if self.kind == "time":
            stamps = [None if np.isnan(n) else np.datetime64(round(n * 1e6), "us") for n in numbers]
            dates = make([s if s is None else s.item() for s in stamps], nw.Datetime("us"))
            return self._typed(dates.dt.replace_time_zone("UTC") if self.zone else dates)
        texts = [None if np.isnan(n) else self.levels[int(n)] for n in numbers]
        if self.level_type == "bool":
            return make([t if t is None else t == "True" for t in texts], getattr(nw, self.dtype))
        plain = replace(self, categories=tuple(map(str, self.categories)))
        found = plain._typed(make(texts, nw.String))
        if plain.categories == self.categories:
            return found
        native = found.to_native().cat.rename_categories([*self.categories])
        return nw.from_native(native, series_only=True)


def column_of(series: Any, label: Any) -> Column:
    """The column with this name in a data frame; raises if it can be neither a number, nor a date, nor a category."""
    import narwhals as nw

    dtype, name = series.dtype, str(label)
    storable = isinstance(label, str | int | float | tuple)
    make = partial(Column, name, dtype=type(dtype).__name__, label=label if storable else None)
    if dtype == nw.Date:
        return make("time")
    if dtype == nw.Datetime:
        return make("time", unit=dtype.time_unit, zone=dtype.time_zone or "")
    if dtype.is_numeric():
        return make(dtype="Float64") if dtype.is_decimal() else make()
    if dtype in (nw.Boolean, nw.String, nw.Categorical, nw.Enum, nw.Object):
        levels = tuple(sorted({text for text in _texts(series) if text is not None}))
        categories, ordered = _declared(series)
        make = partial(make, categories=tuple(categories), ordered=ordered)
        return make("level", levels, level_type=_level_type(series))
    raise TypeError(
        f"column {name!r} has dtype {dtype}, but a column must hold numbers, dates, booleans, strings or categories; convert or "
        "drop it."
    )


def _declared(series: Any) -> tuple[list[Any], bool]:
    """The categories that the type of a column declares, and whether they have an order; none for other types."""
    native = series.to_native()
    if hasattr(native, "iloc"):
        of = getattr(native, "cat", None)
        return ([], False) if of is None else ([*of.categories], bool(of.ordered))
    return [*getattr(series.dtype, "categories", ())], False


def _texts(series: Any) -> list[str | None]:
    """The levels as text; raises if a column of objects mixes strings with something else."""
    import narwhals as nw

    found = series.to_list()
    if series.dtype == nw.Object:
        for row, value in enumerate(found):
            if not isinstance(value, str | bool | np.bool_) and not _is_missing(value):
                raise TypeError(
                    f"column {series.name!r} has dtype object, and {value!r} in row {row} is a {type(value).__name__}, not a "
                    f"string; convert the column, for example with x[{series.name!r}].astype(float) or .astype(str)."
                )
    return [None if _is_missing(value) else str(value) for value in found]


def _level_type(series: Any) -> str:
    """The type of the levels in Python; empty without levels, or if there are several."""
    if series.dtype.is_numeric():
        return "int"
    types = {type(v).__name__.rstrip("_") for v in series.to_list() if not _is_missing(v)}
    return types.pop() if len(types) == 1 else ""


def _is_missing(value: object) -> bool:
    return value is None or type(value).__name__ == "NAType" or value != value  # noqa: PLR0124 (nan)
