"""The site: every page has a place, every public name has an entry, and the pages build without a warning or a connection."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import warnings
from html import unescape
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest

import geoq
from tests.test_docs import section

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GALLERY = sorted((DOCS / "gallery").glob("*.py"))


def public_names() -> set[str]:
    """The names of all modules that list what is public, relative to geoq."""
    names = set()
    for module in pkgutil.walk_packages(geoq.__path__, "geoq."):
        path = Path(geoq.__path__[0], *module.name.split(".")[1:])
        file = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        if "\n__all__" in file.read_text():
            found, prefix = importlib.import_module(module.name), module.name.removeprefix("geoq.")
            own = (*found.__all__, *getattr(found, "WITH_TORCH", ()))
            names |= {f"{prefix}.{name}" for name in own}
    return names | set(geoq.__all__) | set(geoq._WITH_TORCH)


def test_every_public_name_has_a_page():
    listed = re.findall(r"^   ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert sorted(public_names() - set(listed)) == []


@pytest.mark.parametrize("name", sorted(public_names()))
def test_what_has_arguments_states_what_it_returns(name):
    module, _, last = f"geoq.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), last)
    members = vars(found).items() if inspect.isclass(found) else [(last, found)]
    for member, value in members:
        function = getattr(value, "__func__", value)
        text = getattr(function, "__doc__", None) or ""
        if inspect.isfunction(function) and member[:1] != "_" and "Args:" in text:
            returned = inspect.signature(function).return_annotation
            assert "Returns" in text or returned in (None, "None"), member


def test_pages_are_short():
    index = (DOCS / "index.md").read_text()
    how_to = re.findall(r"^\| \[.*?\]\((.*?)\)", section(index, "How to"), re.MULTILINE)
    tables = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", flags=re.DOTALL)
    texts = {page.name: tables.sub("", page.read_text()) for page in DOCS.glob("*.md")}
    lengths = {name: len(texts[name].splitlines()) for name in how_to}
    assert {name: n for name, n in lengths.items() if n > 150} == {}
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in texts.values()]
    assert sum(len(text.split()) for text in prose) <= 35_000


def test_every_page_has_one_place_in_the_navigation():
    rows = re.findall(r"^\| \[.*?\]\(([^)#]+)\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert sorted(row for row in rows if "/" not in row) == sorted(pages)


def texts_of(path: Path) -> list[str]:
    """All strings of a module; a value in an f-string is a line break."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = [n.values for n in nodes if isinstance(n, ast.JoinedStr)]
    parts += [[n] for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [
        "".join(
            getattr(part, "value", "") if isinstance(part, ast.Constant) else "\n" for part in text
        )
        for text in parts
    ]


def test_every_message_that_is_explained_exists():
    rows = re.findall(r"^\| (\".*?\") \|", (DOCS / "messages.md").read_text(), re.MULTILINE)
    quoted = [
        part for row in rows for text in re.findall('"(.*?)"', row) for part in text.split(" ... ")
    ]
    texts = [text for path in Path(geoq.__path__[0]).rglob("*.py") for text in texts_of(path)]
    assert [q for q in quoted if not any(q in text for text in texts)] == []


@pytest.mark.parametrize("script", GALLERY, ids=lambda path: path.stem)
def test_a_script_of_the_gallery_is_short_and_states_what_it_teaches(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 60
    assert ast.get_docstring(ast.parse(text)).count("You learn:") == 1


@pytest.mark.parametrize("number", ["03", "05", "06", "18"])
def test_a_quick_script_of_the_gallery_draws_a_picture(number, monkeypatch):
    """All scripts are executed by ``make docs``."""
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: None)
    (script,) = [path for path in GALLERY if path.stem.startswith(f"plot_{number}")]
    with plt.rc_context({"backend": "agg"}), warnings.catch_warnings():
        exec(compile(script.read_text(), script.name, "exec"), {"__name__": "gallery"})  # noqa: S102
    drawn = [axes for number in plt.get_fignums() for axes in plt.figure(number).axes]
    plt.close("all")
    assert len(drawn) >= 1
    assert all(axes.has_data() for axes in drawn)
    assert any(axes.get_title() for axes in drawn)


def broken(pages: dict[Path, str]) -> list[tuple[str, str]]:
    """Links to files and places that do not exist, and headings that leave out a depth, each with its page."""
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    found = []
    for page, text in pages.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^":]+)"', text):
            path, _, place = unquote(unescape(link)).partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (place and place not in ids.get(target, {place})):
                found.append((page.name, link))
        depths = [int(depth) for depth in re.findall(r"<h([1-6])\b", text.partition("<article")[2])]
        jumps = [b for a, b in pairwise([0, *depths]) if b > a + 1]
        found += [(page.name, f"h{depth}") for depth in jumps]
    return found


def test_the_site_builds_without_a_warning_and_reads_nothing_from_outside(tmp_path):
    """Without the pictures of the gallery, which ``make docs`` draws."""
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-D", "plot_gallery=0"]
    folders = ["-c", "docs", "-d", tmp_path / "doctrees", ".", tmp_path / "site"]
    done = subprocess.run(
        [*command, *folders], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    site = (tmp_path / "site").resolve()
    pages = {page: page.read_text() for page in site.rglob("*.html") if "_static" not in page.parts}
    assert len(pages) > 100
    assert broken(pages) == []
    assert broken({site / "a.html": '<a href="b"><article><h1><h3>'}) == [
        ("a.html", "b"),
        ("a.html", "h3"),
    ]
    for page, text in pages.items():
        loaded = r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"https?:|<link\b[^>]*\bhref=\"https?:"
        assert not re.search(loaded, text), page
        # A thumbnail stands beside its title.
        pictures = [tag for tag in re.findall(r"<img\b[^>]*>", text) if "_thumb" not in tag]
        assert [tag for tag in pictures if not re.search(r'alt="[^"]', tag)] == [], page
