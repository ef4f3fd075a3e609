"""The size of the package: lines of each folder, of modules and of functions, and the number of classes and protocols.

A commit that shrinks a folder lowers its number. Raising a number needs a sentence in CONTRIBUTING.md, section "Small is a feature".
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PACKAGE

ROOT = PACKAGE.parents[1]
# Lines of the modules in the root of the package alone, and of each folder with what is below it.
BUDGET = {
    "src/geoq": 3169,
    "src/geoq/bounds": 2306,
    "src/geoq/core": 4228,
    "src/geoq/data": 2306,
    "src/geoq/nets": 321,
    "src/geoq/planning": 1203,
    "src/geoq/plots": 1047,
    "src/geoq/regions": 1251,
    "src/geoq/report": 721,
    "src/geoq/rollout": 2849,
    "src/geoq/serving": 703,
    "src/geoq/training": 1348,
    "tests": 15698,
    "benchmarks": 14535,
    "docs/gallery": 1107,
}
MAX_CLASSES, MAX_PROTOCOLS = 172, 4
MAX_MODULE, MAX_FUNCTION = 450, 50
# Longer than allowed, with their present lengths; nothing may be added here.
LONG_MODULES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

MODULES = sorted(PACKAGE.rglob("*.py"))


def count_lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """All classes and functions of the package, with the path of their module."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(path.relative_to(PACKAGE)), node


def longer(lengths: dict[str, int], most: int, known: dict[str, int]) -> dict[str, int]:
    """What is longer than allowed."""
    return {name: n for name, n in lengths.items() if n > known.get(name, most)}


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_stays_within_its_budget(folder):
    pattern = "*.py" if ROOT / folder == PACKAGE else "**/*.py"
    assert count_lines(sorted((ROOT / folder).glob(pattern))) <= BUDGET[folder]


def test_every_folder_of_the_package_has_a_budget():
    folders = {str(path.parent.relative_to(ROOT)) for path in MODULES}
    assert folders <= {*BUDGET}


def test_no_module_is_longer_than_450_lines():
    lengths = {str(path.relative_to(PACKAGE)): count_lines([path]) for path in MODULES}
    assert not longer(lengths, MAX_MODULE, LONG_MODULES)


def test_no_function_is_longer_than_50_lines():
    lengths: dict[str, int] = {}
    for module, node in definitions():
        if not isinstance(node, ast.ClassDef):
            name = f"{module} {node.name}"
            lengths[name] = max(lengths.get(name, 0), node.end_lineno - node.lineno + 1)
    assert not longer(lengths, MAX_FUNCTION, LONG_FUNCTIONS)


def test_the_number_of_classes_and_protocols():
    classes = [node for _, node in definitions() if isinstance(node, ast.ClassDef)]
    protocols = [c for c in classes if any("Protocol" in ast.unparse(base) for base in c.bases)]
    assert len(classes) <= MAX_CLASSES
    assert len(protocols) <= MAX_PROTOCOLS
