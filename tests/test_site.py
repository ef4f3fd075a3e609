"""The site: every page has a place, every public name has an entry, and the pages build without a warning or a connection."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import geoq

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def public_names() -> set[str]:
    """The names of all modules that list what is public, relative to geoq."""
    names = set()
    for module in pkgutil.walk_packages(geoq.__path__, "geoq."):
        path = Path(geoq.__path__[0], *module.name.split(".")[1:])
        file = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        if "\n__all__" in file.read_text():
            prefix = module.name.removeprefix("geoq.")
            found = importlib.import_module(module.name)
            names |= {f"{prefix}.{name}" for name in (*found.__all__, *dir_with_torch(found))}
    return names | set(geoq.__all__) | set(geoq._WITH_TORCH)


def dir_with_torch(module) -> list[str]:
    return list(getattr(module, "WITH_TORCH", ()))


def test_every_public_name_has_a_page():
    listed = re.findall(r"^   ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert sorted(public_names() - set(listed)) == []


def test_every_page_has_one_place_in_the_navigation():
    rows = re.findall(r"^\| \[.*?\]\(([^)#]+)\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert sorted(row for row in rows if "/" not in row) == sorted(pages)


def test_the_site_builds_without_a_warning_and_reads_nothing_from_outside(tmp_path):
    """Without the pictures of the gallery, which ``make docs`` draws."""
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-D", "plot_gallery=0"]
    folders = ["-c", "docs", "-d", tmp_path / "doctrees", ".", tmp_path / "site"]
    done = subprocess.run(
        [*command, *folders], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text()
        loaded = r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"https?:|<link\b[^>]*\bhref=\"https?:"
        assert not re.search(loaded, text), page
        # A thumbnail stands beside its title.
        pictures = [tag for tag in re.findall(r"<img\b[^>]*>", text) if "_thumb" not in tag]
        assert [tag for tag in pictures if not re.search(r'alt="[^"]', tag)] == [], page
