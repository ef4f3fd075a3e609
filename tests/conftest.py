"""Problems shared by all tests; annotations are checked while the tests run."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Networks here are small, and threads that wait for each other on a busy machine take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from jaxtyping import config, install_import_hook

PACKAGE = Path(__file__).parents[1] / "src" / "geoq"
install_import_hook("geoq", "typecheck.checked")

import geoq


@dataclass(frozen=True)
class Problem:
    """A smooth map of the plane, and least squares as its surrogate: exact, instant, wrong in a known way."""

    x: np.ndarray
    y: np.ndarray
    queries: np.ndarray

    @staticmethod
    def truth(x: np.ndarray) -> np.ndarray:
        return (x[:, 0] ** 2 + 0.5 * x[:, 1])[:, None]

    @staticmethod
    def train(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        def design(x: np.ndarray) -> np.ndarray:
            return np.concatenate([x, np.ones_like(x[:, :1])], axis=1)

        weights = np.linalg.lstsq(design(x), y)[0]
        return lambda x: design(x) @ weights


@pytest.fixture
def problem() -> Problem:
    rng = np.random.default_rng(0)
    x, queries = rng.normal(size=(120, 2)), 1.5 * rng.normal(size=(40, 2))
    return Problem(x, Problem.truth(x), queries)


@pytest.fixture(scope="module")
def scene():
    """A calibrated GeoQ, queries beyond its data, their true errors and its assessment, for pictures."""
    x = np.linspace(0, 1, 120)[:, None]
    fitted = geoq.GeoQ(lambda x: 0 * x, None).fit(x, np.sin(6 * x))
    queries = np.linspace(-0.5, 1.5, 200)[:, None]
    assessment = fitted.assess(queries)
    return fitted, queries[:, 0], abs(np.sin(6 * queries))[:, 0], assessment


@pytest.fixture(autouse=True)
def no_global_seeding() -> Iterator[None]:
    """Nothing in the package may touch the global random state."""

    def states() -> list[bytes]:
        torch = sys.modules.get("torch")
        own = [] if torch is None else [torch.get_rng_state().numpy().tobytes()]
        return [np.random.get_state()[1].tobytes(), *own]  # noqa: NPY002

    before = states()
    yield
    # torch may have been imported by the test
    assert states()[: len(before)] == before


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without checks of annotations, which users do not have: for tests that pass what annotations forbid."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def fresh(make: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """A network in eval mode whose initial weights come from seed 0, not from the global state."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args, **settings).eval()
