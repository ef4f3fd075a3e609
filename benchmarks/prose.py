"""Numbers in the prose of the pages: every measured number names what it was measured by.

A number is followed by an anchor, an HTML comment that no reader of the page sees:

    The loss is 0.180<!--forrester; GeoQ; pinball-->, and it is smaller on 19<!--suite.wins_inside--> problems.

The first form names a cell of a generated table: the block, words of the title or cells that identify the row, and the column.
``#2`` after the column selects the second number of the cell; "smallest of", "largest of", "mean of", "below 1 in" or "above 1
in" before the block combine all rows of a column. A star in a row stands for any characters. The second form names a function of ``benchmarks.derived``.
Settings need no anchor: numbers in backticks and formulas, integers without a unit, the quantile levels that the pages use, and the
phrases of ``benchmarks/constants.txt``.

python -m benchmarks.prose docs/forrester.md      # list the numbers without an anchor, each with cells of that value
"""

import fnmatch
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.derived import NUMBERS
from benchmarks.record import ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
SIGNED = rf"(?<![\w.])-?{DIGITS}"
# A number counts as measured if it has decimals or an exponent, is a percentage, a count out of a total or a ratio, or has a
# unit of time or memory. All other integers are sizes and settings. A hyphen is a sign, or it joins the ends of a range; it does
# not belong to the number in "lorenz-63". Commits such as 4e71260 have no exponent.
DECIMALS = r"\d+(?:,\d{3})*\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d{1,3}"
# Other numbers between a number and its unit; "###" stands for a number with an anchor.
MORE = rf"(?:(?:\s+(?:to|and|or)\s+|[-\u2013])(?:{DIGITS}|#+)|,\s+{DIGITS})*"
UNITS = r"%|of\s(?:the\s)?\d|m?s\b|minutes?\b|h(?:ours?)?\b|[MG]iB\b|times\b"
# Words for ratios; "twice" and "half of" alone are usually no measurements ("called twice", "half of the weight").
WORDS = (
    r"twice\s(?:as|the)|doubles|doubled|halves|halved",
    r"half\sof\s(?:the\s)?(?:\w+\s)?(?:loss|errors?|queries|time|memory)",
    r"(?:two|three|four|five|ten)\stimes",
)
MEASURED = re.compile(
    rf"(?:(?<![\w.,#-])-?|(?<=[\d#]-))(?:{DECIMALS}|{DIGITS}(?={MORE}\s(?:{UNITS})))(?!\w)"
    rf"|\bfactor\sof\s+{DIGITS}|\b(?:{'|'.join(WORDS)})\b",
    re.IGNORECASE,
)
ANCHORED = re.compile(rf"(-?{DIGITS})(\s+%)?<!--([^>]+?)-->")
# The quantile levels that the pages use; another level or probability is a measurement.
LEVEL = r"(?:0\.(?:5|8|9|95|99)(?!\d)|95 %|90 %)"
CONSTANTS = (
    rf"(?:levels?|nominal|probability|quantile level,)\s(?:is\s)?(?:of\s)?(?:at\sleast\s)?{LEVEL}(?:\sand\s{LEVEL})?",
    rf"{LEVEL}\s(?:quantile|\(quantile)",
    r"1 - 0\.95",
    r"at\sleast\s95 %",
    r"\b1\.96\b",
    r"dt (?:= )?0\.(?:05|25)(?!\d)",
    r"\[0\.25, 0\.75\]",  # the training interval of Forrester's problem
    # Lead times and time steps of forecasts.
    r"(?:[Uu]p to 24|every 6|start 6|over 6 (?:h )?and 12) h(?:ours)?\b",
)
PHRASES = Path(__file__).with_name("constants.txt")
BLOCK = re.compile(r"^<!-- ([\w-]+) -->\n(.*?)^<!-- /\1 -->", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A cell of a generated table, with everything that an anchor can name."""

    title: str
    row: tuple[str, ...]
    column: str
    text: str
    is_summary: bool

    @property
    def number(self) -> float:
        return to_float(re.findall(SIGNED, self.text)[0])


SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "smallest of ": min,
    "largest of ": max,
    "mean of ": statistics.fmean,
    "below 1 in ": lambda numbers: sum(number < 1 for number in numbers),
    "above 1 in ": lambda numbers: sum(number > 1 for number in numbers),
}


def plain(text: str) -> str:
    """Return a cell without marks of rank, emphasis and run."""
    return re.sub(r"\*\*|</?u>|[†‡§`]", "", text).strip()


@cache
def cells() -> dict[str, list[Cell]]:
    """Return the cells of all generated tables by block; the longest one if several pages show a block."""
    blocks: dict[str, str] = {}
    for page in PAGES:
        for name, text in BLOCK.findall(page.read_text()):
            blocks[name] = max(blocks.get(name, ""), text, key=len)
    return {name: list(cells_of(text)) for name, text in blocks.items()}


def cells_of(block: str) -> Iterator[Cell]:
    """Return the cells of a block. The second column of a name is called "name (2)"."""
    title, head, group = "", [], ""
    for line in block.splitlines():
        if not line.startswith("|"):
            title, head = (plain(line) or title), []
            continue
        row = tuple(plain(cell) for cell in line[1:].rstrip("|").split("|"))
        if not head:
            for i, name in enumerate(row):
                n_before = row[:i].count(name)
                head.append(f"{name} ({n_before + 1})" if n_before else name)
        elif not set(line) <= set("|- "):
            # An empty first cell repeats the cell above it.
            group = row[0] or group
            is_summary = line.startswith("| **")
            for column, text in zip(head, row, strict=False):
                yield Cell(title, (group, *row[:-1]), column, text, is_summary)


def named(anchor: str) -> list[Cell]:
    """Return the cells with the column, and with the words of the row and of the title, that an anchor names."""
    block, *words, column = (part.strip() for part in anchor.split(";"))
    found = [cell for cell in cells()[block] if cell.column == column]
    for word in words:
        first = [cell for cell in found if fnmatch.filter(cell.row[:2], word)]
        in_row = [cell for cell in found if fnmatch.filter(cell.row, word)]
        found = first or in_row or [cell for cell in found if word in cell.title]
    return found


def value(anchor: str) -> tuple[float, int]:
    """Return the number that an anchor refers to, and the number of its decimals (a large one if it was not rounded).

    Raises:
        LookupError: The anchor names nothing, or several cells with different content.
    """
    if ";" not in anchor:
        return float(NUMBERS[anchor.strip()]()), 12
    for start, summary in SUMMARIES.items():
        if anchor.startswith(start):
            found = [c for c in named(anchor.removeprefix(start)) if not c.is_summary]
            places = min(decimals(re.findall(SIGNED, c.text)[0]) for c in found)
            return summary([cell.number for cell in found]), places
    name, _, place = anchor.partition("#")
    texts = {cell.text for cell in named(name)}
    if len(texts) != 1:
        raise LookupError(f"{anchor!r} names {len(texts)} different cells")
    number = re.findall(SIGNED, texts.pop())[int(place or 1) - 1]
    return to_float(number), decimals(number)


def to_float(number: str) -> float:
    return float(number.replace(",", ""))


def decimals(number: str) -> int:
    """Return the decimal place of the last digit: 2 for 0.25, 0 for 25, -1 for 2e1."""
    mantissa, _, exponent = number.partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def agrees(number: str, exact: float, places: int) -> bool:
    """Return whether a number of a page is a value of ``places`` decimals, rounded to the digits that the page shows."""
    slack = 0.5 * 10.0 ** -decimals(number)
    # A value of fewer digits is shown as it is, and a value of more digits was rounded before.
    slack = slack + 0.5 * 10.0**-places if places > decimals(number) else 0.0
    return abs(to_float(number) - exact) <= slack + 1e-9


def source(anchor: str, unit: str) -> tuple[float, int]:
    """Return value and decimals of an anchor; a cell is a fraction, also where the page gives a percentage."""
    exact, places = value(anchor)
    return (100 * exact, places - 2) if unit and ";" in anchor else (exact, places)


def blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def prose(page: str) -> str:
    """Return a page with empty lines in place of code, formulas, generated tables and headings."""
    for pattern in (BLOCK, re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)):
        page = pattern.sub(blank, page)
    page = re.sub(r"^#.*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    page = re.sub(r"\$\$.*?\$\$", blank, page, flags=re.DOTALL)
    page = re.sub(r"\$[^$\n]+\$", "$", page)
    return re.sub(r"`[^`\n]+`", "`", page)


def phrases() -> dict[str, list[str]]:
    """Return the phrases with settings by page."""
    found: dict[str, list[str]] = {}
    for line in PHRASES.read_text().splitlines():
        page, _, phrase = line.partition(": ")
        found.setdefault(page, []).append(phrase)
    return found


def constants(name: str) -> re.Pattern[str]:
    """Return the pattern of all settings of a page; phrases may run over the end of a line."""
    literal = [r"\s+".join(map(re.escape, p.split())) for p in phrases().get(name, [])]
    return re.compile("|".join([*CONSTANTS, *literal]))


def without_anchor(name: str, page: str) -> list[tuple[int, str, str]]:
    """Return line, number and context of the measured numbers of a page that have no anchor."""
    text = ANCHORED.sub(lambda m: "#" * 3 + blank(m), prose(page))
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = constants(name).sub(lambda m: re.sub(r"\w", "#", m[0]), text)
    return [
        (
            text.count("\n", 0, m.start()) + 1,
            m[0].split()[-1] if m[0].startswith("factor") else m[0],
            text[max(0, m.start() - 60) : m.end() + 40].replace("\n", " "),
        )
        for m in MEASURED.finditer(text)
    ]


def anchors(page: str) -> list[tuple[str, str, str]]:
    """Return number, percent sign (or nothing) and anchor."""
    return ANCHORED.findall(prose(page))


def main() -> None:
    for name in sys.argv[1:]:
        for line, number, context in without_anchor(name, (ROOT / name).read_text()):
            print(f"{name}:{line}: {number} in {context!r}")
            for block, all_cells in cells().items():
                for cell in all_cells:
                    if number in re.findall(DIGITS, cell.text):
                        where = "; ".join((block, cell.title, cell.row[0], cell.column))
                        print(f"    {where} = {cell.text}")


if __name__ == "__main__":
    main()
