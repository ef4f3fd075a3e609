"""A few rows of a table in a file: enough to call the surrogate again after loading.

A file stores the numbers of the rows, the levels of the columns, and the name of each type. Where the library of the data frame
is installed, the rows are rebuilt from them; elsewhere the estimator is loaded without them.
"""

from typing import Any

import numpy as np

from geoq.table import Column, LevelColumn, Schema, Table, TimeColumn


def frame_state(table: Table) -> dict[str, Any]:
    """The library of the data frame, and the types of its columns by the names of narwhals."""
    import narwhals as nw

    found = nw.from_native(table.native, eager_only=True)
    return {
        "library": found.implementation.value,
        "dtypes": [str(type(dtype).__name__) for dtype in found.schema.values()],
    }


def rebuilt(schema: Schema, array: np.ndarray, stored: dict[str, Any]) -> Table | None:
    """The table that the numbers and ``frame_state`` describe; None if the library of its data frame is not installed."""
    try:
        import narwhals as nw

        columns = {
            column.name: nw.new_series(
                column.name,
                values_of(column, numbers, dtype),
                getattr(nw, dtype),
                backend=stored["library"],
            )
            for column, numbers, dtype in zip(
                schema.columns, array.T, stored["dtypes"], strict=True
            )
        }
        return Table(nw.from_dict(columns).to_native(), array, schema)
    except ImportError:
        return None


def values_of(column: Column, numbers: np.ndarray, dtype: str) -> list[Any]:
    """The values of a column as Python objects."""

    def value(number: float) -> Any:
        if isinstance(column, LevelColumn):
            text = column.levels[int(number)]
            return text == "True" if dtype == "Boolean" else text
        if isinstance(column, TimeColumn):
            return np.datetime64(round(number * 1e6), "us").item()
        return int(number) if "Int" in dtype else float(number)

    return [None if np.isnan(number) else value(number) for number in numbers]
