"""The number of lines that each folder may have; a commit that shrinks a folder lowers its number."""

import pytest
from conftest import PACKAGE

ROOT = PACKAGE.parents[1]
# Raising a number needs a sentence in CONTRIBUTING.md, section "Small is a feature".
BUDGET = {"src/geoq": 24_900, "tests": 20_200, "benchmarks": 13_000}


def count_lines(folder):
    """The lines of all Python files below a folder."""
    files = (ROOT / folder).rglob("*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_stays_within_its_budget(folder):
    assert count_lines(folder) <= BUDGET[folder]
