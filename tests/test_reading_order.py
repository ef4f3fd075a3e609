"""Modules are read in the order of the data and of Algorithm 1, and import only from those above them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PACKAGE
from reading_order import READING_ORDER, UPWARD


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    name_of(path): path
    for path in PACKAGE.rglob("*.py")
    if path.parent / "__init__.py" != PACKAGE / path.name
}


def place(module: str) -> int:
    """The place of a module: its own, or that of the folder that contains it."""
    parents = [module, *(module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1))]
    return next(READING_ORDER.index(name) for name in parents if name in READING_ORDER)


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of geoq that the code imports; imports for annotations alone are not executed."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "geoq":
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full.removeprefix("geoq.") in MODULES else str(node.module)
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.startswith("geoq."))
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_every_module_has_its_place_and_every_place_a_module():
    assert {place(module) for module in MODULES} == set(range(len(READING_ORDER)))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_modules_above_it(module):
    names = {
        name.removeprefix("geoq.") for name in imported(ast.parse(MODULES[module].read_text()))
    }
    below = {name for name in names - {"geoq"} if place(name) > place(module)}
    assert {(module, name) for name in below} <= UPWARD
