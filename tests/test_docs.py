"""Names, labels, links and words of the documentation; ``python tests/test_docs.py`` prints all words to replace."""

import importlib
import io
import re
import tokenize
from pathlib import Path

import pytest

from benchmarks import record, tables

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "geoq"
EQUATIONS = ROOT / "docs" / "equations.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
# All labels of the paper's LaTeX source, one per line: grep -o '\\label{[^}]*}' paper.tex
LABELS = set((ROOT / "tests" / "data" / "paper_labels.txt").read_text().split())

PAGES = [ROOT / "README.md", CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))]
TABLE_PAGES = sorted(record.RESULTS.glob("*.md"))
LINKED_PAGES = [*PAGES, *TABLE_PAGES, ROOT / "CHANGELOG.md"]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Words that are not used, each with the reason or the word to use. CONTRIBUTING.md explains them.
NOT_ALLOWED = {
    r"tells|telling|told|tell(?= \w)": "data contain, describe or determine",
    r"says|said": "states, gives, returns",
    r"knows": "reads, contains, was trained on",
    r"verdicts?": "flag, classification",
    r"judge[sd]?|judging": "evaluate",
    r"hears?|heard": "read, used",
    r"loud\w*": "large",
    r"promise[sd]?|promising": "guarantee",
    r"forgets?|forgot|forgotten": "lost, unavailable",
    r"believe[sd]?": "assumed, clamped to",
    r"vouch\w*": "support",
    r"brought": "given",
    r"sceptics?": "reader",
    r"so many|so few": "the number",
    r"no two|none of which": "a sentence with a subject",
    r"may well|at the most|as of|by itself tells": "a shorter phrase",
    r"those of|that of": "repeat the noun",
    r"(?:a|the|this|that|its|their|same|larger|expected|which|what) shares?(?! (?:a|the|one|their|its)\b)"
    r"|shares? of": "fraction",
    r"(?:a|one|per|each|of) unit of (?:rows|tuples|points|time)|rows of a unit": "group",
    r"the finish|a finish|conformal finish|finish_": "conformal factors",
    r"borders?": "checks",
}
PATTERNS = {
    # An underscore is no letter, so that parts of identifiers are found as well.
    re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE): instead
    for words, instead in NOT_ALLOWED.items()
}


def prose_of_page(path: Path) -> list[tuple[int, str]]:
    """Return numbered lines without inline code, links' targets and generated tables."""
    text = path.read_text()
    # Generated tables are written by the benchmarks; their line numbers are kept.
    text = re.sub(
        r"<!-- (\S+) -->\n.*?<!-- /\1 -->",
        lambda match: "\n" * match[0].count("\n"),
        text,
        flags=re.DOTALL,
    )
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return list(enumerate(text.splitlines(), start=1))


def prose_of_source(path: Path) -> list[tuple[int, str]]:
    """Return numbered lines of names, comments, docstrings and messages: everything but operators and numbers."""
    kept = (tokenize.NAME, tokenize.COMMENT, tokenize.STRING)
    kept += (getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),)
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in kept:
            parts = token.string.splitlines()
            lines += [(token.start[0] + i, part) for i, part in enumerate(parts)]
    return lines


def violations(path: Path) -> list[str]:
    read = prose_of_source if path.suffix == ".py" else prose_of_page
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} -> {instead}"
        for number, line in read(path)
        for pattern, instead in PATTERNS.items()
        for match in pattern.finditer(line)
    ]
    return list(dict.fromkeys(found))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=name_of)
def test_only_plain_words_are_used(path):
    assert not violations(path)


def code_spans(page: Path) -> set[str]:
    return set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text()))


def labels_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:eq|alg|sec|tab|subsec|append):\w+", text))


@pytest.mark.parametrize("path", [EQUATIONS, *SOURCES], ids=name_of)
def test_labels_are_labels_of_the_paper(path):
    assert labels_in(path.read_text()) <= LABELS


def test_the_central_equations_are_listed():
    central = {label for label in LABELS if label.startswith(("eq:anchor", "eq:safe"))}
    listed = labels_in(EQUATIONS.read_text())
    assert central | {"eq:dz", "eq:dd", "eq:psi", "alg:geoq"} <= listed


def resolve(name: str) -> object:
    """Return what a dotted name relative to geoq refers to; the longest prefix that is a module is imported."""
    parts = name.split(".")
    for n_module in range(len(parts), -1, -1):
        try:
            target = importlib.import_module(".".join(["geoq", *parts[:n_module]]))
        except ModuleNotFoundError:
            continue
        for part in parts[n_module:]:
            annotations = getattr(target, "__annotations__", {})
            target = getattr(target, part, annotations.get(part))
        return target
    return None


def is_found(name: str) -> bool:
    homes = ("", "parts.", "core.calibrate.", "rollout.")
    return any(resolve(home + name) is not None for home in homes)


def names_in(page: Path) -> list[str]:
    """Return dotted names, and names of classes with or without arguments."""
    spans = [span.split("(")[0] for span in sorted(code_spans(page))]
    dotted = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
    named = r"[A-Z][a-z]\w*[A-Z]\w*|GeoQ"
    return [
        span
        for span in spans
        if re.fullmatch(f"{dotted}|{named}", span)
        and not re.search(r"\.(py|md|geoq|json|png|tex)$", span)
    ]


def test_names_of_the_equations_exist_in_the_code():
    names = names_in(EQUATIONS)
    assert len(names) > 20
    assert [name for name in names if not is_found(name)] == []


def can_be_imported(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return module == "geoq" and name in {path.stem for path in PACKAGE.iterdir()}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_imported_by_a_page_exist(page):
    """A name in an import statement of a page exists in the package, whether the page is executed or not."""
    pattern = r"^from (geoq[\w.]*) import (?:\(([^)]*)\)|(.*))$"
    imports = re.findall(pattern, page.read_text(), flags=re.MULTILINE)
    names = [
        (module, name.strip())
        for module, inside, line in imports
        for name in (inside or line).split(",")
        if name.strip()
    ]
    assert [name for name in names if not can_be_imported(*name)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_named_by_a_page_exist(page):
    prose = re.sub(r"<!-- (\S+) -->\n.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
    scripts = set(re.findall(r"(?:benchmarks|docs|src|tests)/[\w/]+\.py", prose))
    assert [name for name in sorted(scripts) if not (ROOT / name).exists()] == []


def slug(heading: str) -> str:
    """Return the anchor of a heading: lower case, without punctuation, hyphens for spaces."""
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", LINKED_PAGES, ids=name_of)
def test_links_and_anchors_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(target)
    assert not broken


def test_the_index_lists_every_page():
    index = ROOT / "docs" / "index.md"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", index.read_text()))
    assert listed == {page.name for page in index.parent.glob("*.md")} - {"index.md"}


def marked_tables() -> list[tuple[str, str]]:
    """Page and name of all generated tables; each has the markers around its own lines."""
    found = [
        (name_of(page), name)
        for page in tables.pages()[1:]  # the README has no markers
        for name in re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.MULTILINE)
    ]
    marked = [(name_of(page), name) for page in tables.pages() for name in tables.marked(page)]
    assert marked == [("README.md", "in_short"), *found]
    return marked


@pytest.mark.parametrize(("page", "name"), marked_tables())
def test_the_tables_of_a_page_are_made_from_the_results_file(page, name):
    assert tables.marked(ROOT / page)[name] == tables.render(name)


def test_every_results_file_with_tables_is_shown_on_a_page():
    files = record.RESULTS.glob(f"*{record.ENDING}")
    published = [path.name.removesuffix(record.ENDING) for path in files]
    shown = {tables.FILES.get(name, name) for _, name in marked_tables()}
    assert shown == {name for name in published if "@" not in name}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_named_by_a_page_exist(page):
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()))
    texts = {file: (ROOT / file).read_text() for file, _ in named}
    assert [(f, n) for f, n in named if f"def {n}(" not in texts[f]] == []


def section(page: str, title: str) -> str:
    return page.split(f"## {title}")[1].split("\n## ")[0]


def test_each_statement_about_guarantees_has_a_test():
    """The proved statements of the summary and the bold terms of the lists all have a row in the table of tests."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (by proof|by construction) \|", section(page, "In short"), re.MULTILINE
    )
    assert [how for _, how in rows].count("by proof") == 6
    statements = [statement for statement, _ in rows]
    for title in ("After `conformalize`", "By construction", "Checked", "Measured"):
        bold = r"^(?:- )?\*\*([A-Z].*?)\.?\*\*"
        found = re.findall(bold, section(page, title), re.MULTILINE)
        assert found
        statements += found
    without = "Queries that are not exchangeable"  # has no guarantee
    statements = [s.lower() for s in statements if s != without]
    table = section(page, "Tests of these statements").lower()
    assert len(statements) >= 20
    tested = [row.split(" | ") for row in re.findall(r"^\| (.* \| `.*) \|$", table, re.MULTILINE)]
    assert [s for s in statements if s not in {name for name, _ in tested}] == []
    # A proof is tested by a test; a benchmark alone would not be enough.
    proved = {statement.lower() for statement, how in rows if how == "by proof"}
    assert [n for n, tests in tested if n in proved and "tests/" not in tests] == []


def contributing_sections() -> dict[str, str]:
    parts = re.split(r"^## ", CONTRIBUTING.read_text(), flags=re.MULTILINE)[1:]
    blocks = {
        part.splitlines()[0]: re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
        for part in parts
    }
    return {title: found[0] for title, found in blocks.items() if found}


def test_contributing_shows_the_three_parts():
    titles = [title.removeprefix("How to add a ") for title in contributing_sections()]
    assert titles == ["fold scheme", "bound model", "safe region"]


@pytest.mark.parametrize("title", contributing_sections())
def test_what_contributing_shows_works_and_is_short(title):
    block = contributing_sections()[title]
    assert len(block.splitlines()) < 30
    exec(compile(block, title, "exec"), {})  # noqa: S102


if __name__ == "__main__":
    for checked in [*PAGES, *SOURCES]:
        print("\n".join(violations(checked)), end="\n" if violations(checked) else "")  # noqa: T201
