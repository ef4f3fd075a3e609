"""Markdown tables from rows of results, and the statements ahead, behind and no clear difference.

A table has one line per group of rows; a column is a function of the rows of a group, such as ``mean("coverage", 3)``.
"""

import math
import re
import statistics
from dataclasses import dataclass
from typing import Any

from scipy.stats import t as student

from benchmarks.record import where

Row = dict[str, Any]
NONE = "-"
CONFIDENCE = 0.95


# Rows


def select(rows, **wanted):
    """The rows with these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def group(rows, *keys):
    """Rows by the values of some columns, in the order of their first rows; several columns give tuples."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in keys)
        found.setdefault(key if len(keys) > 1 else key[0], []).append(row)
    return found


def joined(groups):
    """Groups by several columns, with one name for the first columns of a table."""
    return {
        " | ".join(f"{k:g}" if isinstance(k, float) else str(k) for k in key): rows
        for key, rows in groups.items()
    }


def values(rows, column):
    """The numbers of a column; None and nan do not count."""
    found = (row.get(column) for row in rows)
    return [v for v in found if v is not None and not math.isnan(v)]


def average(rows, column):
    """The mean of a column; nan without numbers."""
    found = values(rows, column)
    return statistics.fmean(found) if found else math.nan


# Comparisons


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios, and the interval of their mean logarithm by Student's t."""

    mean: float
    low: float
    high: float
    n: int
    better: int

    @classmethod
    def of(cls, ratios):
        """The ratios of independent problems or seeds; one of them has no interval."""
        logs = [math.log(ratio) for ratio in ratios]
        centre, n, reach = statistics.fmean(logs), len(logs), math.inf
        if n > 1:
            error = statistics.stdev(logs) / math.sqrt(n)
            reach = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
        low, high = (math.exp(min(centre + sign * reach, 700)) for sign in (-1, 1))
        return cls(math.exp(centre), low, high, n, sum(log < 0 for log in logs))

    @property
    def word(self):
        """Ahead or behind if the interval excludes 1."""
        if self.n < 2:
            return "one only"
        return "ahead" if self.high < 1 else "behind" if self.low > 1 else "no clear difference"

    @property
    def range(self):
        high = f"{self.high:.2f}" if self.high < 100 else ">100"
        return f"{self.low:.2f} to {high}" if self.n > 1 else NONE

    def __str__(self):
        return f"{self.mean:.2f} ({self.range})" if self.n > 1 else f"{self.mean:.2f}"


def paired(ours, theirs, column="pinball", *, over=("problem",), within=("seed",)):
    """Ratios of a column to the same column of other rows, with equal ``over`` and ``within``.

    There is one ratio for each value of ``over``: the geometric mean over ``within``. Rows without a partner are left out.
    """
    keys = (*over, *within)

    def known(rows):
        return {tuple(r[k] for k in keys): r[column] for r in rows if r.get(column)}

    mine, others, found = known(ours), known(theirs), {}
    for key in mine.keys() & others.keys():
        found.setdefault(key[: len(over)], []).append(mine[key] / others[key])
    return [statistics.geometric_mean(ratios) for _, ratios in sorted(found.items())]


def compare(ours, theirs, column="pinball", **how):
    """The comparison of paired rows in a cell: mean, interval and word; empty for the same rows, a dash where nothing is paired."""
    if theirs and theirs[0] in ours:
        return ""
    ratios = paired(ours, theirs, column, **how)
    if not ratios:
        return NONE
    found = Ratio.of(ratios)
    return f"{found} {found.word}" if found.n > 1 else str(found)


# Columns


def number(value, digits=2):
    """A number with some decimals; a dash for None and nan."""
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def mean(column, digits=2, factor=1):
    """The mean of a column."""
    return lambda rows: number(factor * average(rows, column), digits)


def means(*columns, digits=2):
    """The means of some columns by their names, with spaces for underscores."""
    return {column.replace("_", " "): mean(column, digits) for column in columns}


def only(column, **wanted):
    """A column of the rows with these values."""
    return lambda rows: column(select(rows, **wanted))


def least(column, digits=2, largest=False):  # noqa: FBT002
    """The smallest or the largest number of a column."""
    extreme = max if largest else min
    return lambda rows: number(extreme(values(rows, column), default=math.nan), digits)


def spread(column, digits=None, factor=1):
    """Mean and standard deviation over the rows."""

    def cell(rows):
        found = [factor * value for value in values(rows, column)]
        if not found:
            return NONE
        centre = statistics.fmean(found)
        shown = digits if digits is not None else 3 if abs(centre) >= 0.1 else 4
        text = f"{centre:.{shown}f}"
        return text if len(found) == 1 else f"{text} ± {statistics.pstdev(found):.{shown}f}"

    return cell


def table(first, groups, columns, *, best=None, ranked=bool):
    """A table with one line per group and one column per function of its rows; ``best`` columns have their extreme in bold."""
    lines = [
        [str(name), *(cell(rows) for cell in columns.values())] for name, rows in groups.items()
    ]
    for place, name in enumerate(columns, 1):
        extreme = (best or {}).get(name)
        known = [line for line in lines if line[place] not in ("", NONE)]
        known = [line for line in known if extreme is max or ranked(line[0])]
        if extreme and known:
            line = extreme(known, key=lambda line, at=place: float(line[at].split()[0]))
            line[place] = f"**{line[place]}**"
    return as_table([first, *columns], lines)


def as_table(head, lines):
    """Markdown from cells."""
    rows = [f"| {' | '.join(row)} |" for row in (head, *lines)]
    return "\n".join([rows[0], "|---" * (rows[0].count("|") - 1) + "|", *rows[1:]])


# Around the tables


def page(*parts):
    """Paragraphs and tables, one after the other."""
    return "\n\n".join(parts)


def signed(text, rows):
    """Tables with a sign after the methods that another run measured, and the explanation of the signs."""
    rows = list(rows)
    runs = list(dict.fromkeys(row["run"] for row in rows if "run" in row))
    marks = dict(zip(runs, "†‡§¶", strict=False))
    for method, own in group((row for row in rows if "run" in row), "method").items():
        of_method = [sign for run, sign in marks.items() if any(r.get("run") == run for r in own)]
        if of_method:
            start = f"^\\| {re.escape(str(method))} \\|"
            text = re.sub(start, f"| {method} {' '.join(of_method)} |", text, flags=re.MULTILINE)
    signs = {run: sign if sign in text else "Other rows:" for run, sign in marks.items()}
    notes = " ".join(f"{sign} {run}." for run, sign in signs.items())
    return f"{text}\n\n{notes}" if notes else text


def footer(record):
    """The command, the seeds, the machine and the commit of a results file, and the rows that it leaves out."""
    seeds = ", ".join(map(str, record["seeds"]))
    text = (
        f"`{record['command']}`, seed{'s' * (len(record['seeds']) > 1)} {seeds}, {where(record)}."
    )
    left_out = group(record.get("untrained", []), "method")
    if not left_out:
        return text
    cases = "; ".join(
        f"{method} ({', '.join(dict.fromkeys(_case(row) for row in rows))})"
        for method, rows in left_out.items()
    )
    return f"{text} Left out, because no step of the training lowered the held-out loss: {cases}."


def _case(row):
    return f"{row.get('problem') or row['setting'].split(', ')[0]} {row['seed']}".strip()
