"""What is installed: the wheel and the source archive, their requirements, and the types that a user's program sees."""

import subprocess
import sys
import tarfile
import zipfile
from html import escape
from pathlib import Path

import numpy as np
import pytest

import geoq

ROOT = Path(__file__).parents[1]
PROGRAM = """
import numpy as np
from geoq import Assessment, GeoQ, RandomFolds

estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5))
answer: Assessment = estimator.fit(np.zeros((9, 1)), np.zeros(9)).assess(np.zeros((1, 1)))
text: str = answer.reason(0)
"""


def run(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    built = run("build", "--no-isolation", "--outdir", folder)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_the_wheel_contains_the_package_and_is_small(archives):
    with zipfile.ZipFile(archives[0]) as wheel:
        files = {name for name in wheel.namelist() if name.startswith("geoq/")}
        (metadata,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        text = wheel.read(metadata).decode()
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= files
    assert "geoq/py.typed" in files
    assert archives[0].stat().st_size < 1_000_000
    assert f"\nVersion: {geoq.__version__}\n" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist")]
    always = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert always == {
        *("cloudpickle", "jaxtyping", "joblib", "narwhals", "numpy", "safetensors"),
        *("scikit-learn", "scipy", "threadpoolctl", "tqdm"),
    }


def test_the_source_archive_builds_again_and_contains_no_results(archives):
    with tarfile.open(archives[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/geoq/py.typed"} <= names
    assert not [name for name in names if name.startswith(("benchmarks", "tests"))]


def test_a_program_of_a_user_has_types(tmp_path):
    """A wrong argument is found, so the annotations are read and not ``Any``."""
    (tmp_path / "program.py").write_text(PROGRAM + "number: int = answer.reason(0)\n")
    checked = run("mypy", tmp_path / "program.py")  # with the settings and the cache of `make lint`
    assert "program.py:8: error: Incompatible types in assignment" in checked.stdout
    assert checked.stdout.count("error:") == 1


def test_completion_offers_public_names_only():
    assert set(dir(geoq)) == {*geoq.__all__, *geoq._WITH_TORCH}


def test_a_notebook_shows_the_settings_and_after_fit_the_description():
    estimator = geoq.GeoQ(lambda x: x[:, 0], None, folds=geoq.RandomFolds(3))
    assert "<lambda>" not in estimator._repr_html_()  # escaped
    assert "held out" not in estimator._repr_html_()
    x = np.random.default_rng(0).uniform(size=(60, 1))
    shown = estimator.fit(x, x[:, 0] ** 2)._repr_html_()
    assert escape(repr(estimator)) in shown
    assert escape(estimator.describe()) in shown


@pytest.mark.parametrize(
    ("extra", "needed"),
    [("plots", "matplotlib"), ("xarray", "xarray"), ("serve", "starlette"), ("torch", "torch")],
)
def test_a_missing_extra_is_named_with_its_command(extra, needed):
    asked = {"serve": "serving", "torch": "parts.FieldFactor"}.get(extra, extra)
    module, _, name = asked.partition(".")
    program = f"import sys; sys.modules['{needed}'] = None; import geoq.{module} as m; m.{name or '__name__'}"
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert f'pip install "geoq[{extra}]"' in done.stderr
