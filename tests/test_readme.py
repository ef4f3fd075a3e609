"""What the README and the page of pictures show runs as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"


def run(page: Path) -> dict[str, object]:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    with np.errstate(all="raise"):
        for block in blocks:
            exec(compile(block, page.name, "exec"), names)  # noqa: S102
    return names


def test_the_examples_run_one_after_the_other(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where they save pictures
    names = run(README)
    printed = capsys.readouterr().out
    assert "NOT safe" in printed
    assert names["a"].safe.tolist() == [True, False]


@pytest.mark.slow
def test_the_page_of_pictures_draws_what_it_shows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "pictures.md"
    names = run(page)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in page.parent.glob("pictures-*.png")}
    assert drawn == set(re.findall(r"\((pictures-.*?\.png)\)", page.read_text()))
    # What the page says of its last field.
    assert names["strings"].safe.tolist() == [True, False]


def test_the_tree_names_every_module():
    tree = README.read_text()
    package = README.parent / "src" / "geoq"
    modules = [
        path for path in package.iterdir() if not path.name.startswith(("_", "py"))
    ]
    missing = [path.name for path in modules if f"  {path.name}" not in tree]
    assert not missing
