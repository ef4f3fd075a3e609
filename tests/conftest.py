"""Options and problems shared by all tests; annotations are checked while they run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook
from reading_order import REFUSING

# One thread: the networks here are small, and threads that wait for each other on a busy machine take minutes.
torch.set_num_threads(1)

PACKAGE = Path(__file__).parents[1] / "src" / "geoq"


def checked_modules() -> list[str]:
    """All modules of geoq whose annotations are checked while the tests run."""
    names = [
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    ]
    return [f"geoq.{name}" for name in names if name not in REFUSING]


with install_import_hook(
    [*checked_modules(), "benchmarks.rivals"], "typecheck.checked"
):
    import benchmarks.rivals  # noqa: F401
    import geoq
    import geoq.baselines
    import geoq.metrics
    import geoq.plots


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors live: cpu or cuda")
    parser.addoption(
        "--dtype", default="float64", help="precision of tensors: float32 or float64"
    )


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.config.getoption("--dtype"))


@dataclass(frozen=True)
class Problem:
    """A smooth map of the plane, and least squares as its surrogate: exact, instant, wrong in a known way."""

    x: torch.Tensor
    y: torch.Tensor
    queries: torch.Tensor

    @staticmethod
    def truth(x):
        return (x[:, 0] ** 2 + 0.5 * x[:, 1])[:, None]

    @staticmethod
    def train(x, y):
        ones = torch.ones_like if isinstance(x, torch.Tensor) else np.ones_like
        stack = torch.cat if isinstance(x, torch.Tensor) else np.concatenate
        solve = torch.linalg.lstsq if isinstance(x, torch.Tensor) else np.linalg.lstsq

        def design(x):
            return stack([x, ones(x[:, :1])], 1)

        weights = solve(design(x), y)[0]
        return lambda x: design(x) @ weights


@pytest.fixture
def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=generator, dtype=torch.float64)
    queries = 1.5 * torch.randn(40, 2, generator=generator, dtype=torch.float64)
    x, queries = x.to(device, dtype), queries.to(device, dtype)
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
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    yield
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def fresh(
    make: Callable[..., torch.nn.Module], *args: Any, **settings: Any
) -> torch.nn.Module:
    """A network in eval mode whose initial weights come from seed 0, not from the global state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args, **settings).eval()
