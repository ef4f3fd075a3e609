"""The examples of all pages run as they stand, and the README shows what they print and where things are."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PICTURES = ROOT / "docs" / "pictures.md"
# Pages whose code blocks are fragments about the reader's own data.
FRAGMENTS = {"cost.md", "rollouts.md", "weather.md"}
SHOW_OUTPUT = {"tutorial-network.md", "tutorial-operator.md"}
# The modules of these packages are named in the tree as well.
NAMED_PACKAGES = (
    "data",
    "core",
    "bounds",
    "regions",
    "rollout",
    "planning",
    "training",
    "nets",
    "plots",
    "report",
)


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(page: Path) -> dict[str, object]:
    names: dict[str, object] = {}
    with np.errstate(all="raise", under="ignore"), torch.random.fork_rng():  # a page may seed torch
        for block in code_blocks(page):
            exec(compile(block, page.name, "exec"), names)  # noqa: S102
    return names


def runnable_pages() -> list[Path]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [
        page
        for page in pages
        if code_blocks(page) and page != PICTURES and page.name not in FRAGMENTS
    ]


def test_the_readme_prints_what_it_shows(capsys):
    with pytest.warns(UserWarning, match="A Gaussian process") as caught:
        names = run(README)
    quoted = [line[2:] for line in README.read_text().splitlines() if line.startswith("> ")]
    assert str(caught[0].message) == " ".join(quoted)
    shown = re.search(r"```text\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert capsys.readouterr().out == shown[1]
    assert names["answer"].safe.tolist() == [True, False]
    assert str(caught[0].message).split(". ")[0] in names["estimator"].describe()


@pytest.mark.parametrize("page", runnable_pages(), ids=lambda page: page.name)
def test_the_code_blocks_of_a_page_run_one_after_the_other(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)  # where they save files
    run(page)
    shown = "".join(re.findall(r"```text\n(.*?)```", page.read_text(), flags=re.DOTALL))
    if page.name in SHOW_OUTPUT:  # words and flags; digits can differ between machines
        words = [re.sub(r"[\d.]+", "0", text).split() for text in (shown, capsys.readouterr().out)]
        assert words[0] == words[1]


def test_each_form_of_data_has_a_row_and_one_example():
    page = (ROOT / "docs" / "which-form.md").read_text()
    linked = re.findall(r"\]\(#([\w-]+)\)", page)
    forms = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)[1:]
    titles = [title.lower().replace(" ", "-") for title in forms[::2]]
    assert sorted(linked) == sorted(titles)
    assert all(text.count("```python") == 1 for text in forms[1::2])


@pytest.mark.slow
def test_the_page_of_pictures_draws_what_it_shows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = run(PICTURES)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in PICTURES.parent.glob("pictures-*.png")}
    assert drawn == set(re.findall(r"\((pictures-.*?\.png)\)", PICTURES.read_text()))
    # The statement of the page about rollout 2.
    wrong = (names["error"][2] > 0.5).any(axis=1)
    assert wrong.argmax() + 1 == 9 == names["forecast"].trusted_horizon[2] + 1


def test_the_tree_names_every_module():
    tree = CONTRIBUTING.read_text().split("src/geoq/\n")[1].split("```")[0]
    package = ROOT / "src" / "geoq"
    members = [path for path in package.iterdir() if not path.name.startswith(("_", "py"))]
    missing = [path.name for path in members if f"\n  {path.name}" not in "\n" + tree]
    words = set(re.findall(r"\w+", tree))
    for name in NAMED_PACKAGES:
        modules = (package / name).glob("[!_]*.py")
        missing += [f"{name}/{m.name}" for m in modules if m.stem not in words]
    assert not missing


def test_the_tree_names_nothing_that_is_gone():
    tree = CONTRIBUTING.read_text().split("src/geoq/\n")[1].split("tests/  ")[0]
    named = re.findall(r"^  (\w+(?:\.py|/))", tree, flags=re.MULTILINE)
    gone = [name for name in named if not (ROOT / "src" / "geoq" / name).exists()]
    assert not gone
