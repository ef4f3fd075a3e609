"""Modules are read in the order of Algorithm 1, and import only from those above them."""

import ast
from pathlib import Path

import pytest
from reading_order import READING_ORDER

PACKAGE = Path(__file__).parents[1] / "src" / "geoq"


def noun(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imported_nouns(path: Path) -> set[str]:
    names = set()
    tree = ast.parse(path.read_text())
    # Imports for annotations alone are not executed.
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "geoq":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "geoq."
        ):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {
                a.name.split(".")[1] for a in node.names if a.name.startswith("geoq.")
            }
    return names


def test_every_module_has_its_place():
    assert {noun(path) for path in modules()} <= set(READING_ORDER)


@pytest.mark.parametrize(
    "path", modules(), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_module_imports_only_from_modules_above_it(path):
    place = READING_ORDER.index(noun(path))
    allowed = set(READING_ORDER[:place]) | {noun(path)}
    assert imported_nouns(path) <= allowed
