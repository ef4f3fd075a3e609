"""What the README shows runs as it stands."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_examples_run_one_after_the_other(capsys):
    names: dict[str, object] = {}
    with np.errstate(all="raise"):
        for block in blocks():
            exec(compile(block, "README.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "NOT safe" in printed
    assert names["a"].safe.tolist() == [True, False]


def test_the_tree_names_every_module():
    tree = README.read_text()
    package = README.parent / "src" / "geoq"
    modules = [
        path for path in package.iterdir() if not path.name.startswith(("_", "py"))
    ]
    missing = [path.name for path in modules if f"  {path.name}" not in tree]
    assert not missing
