"""Tables for ``benchmarks.suite.tables``: data sets and functions of other packages.

Data sets of vega_datasets, statsmodels and scikit-learn are split by rows: the upper quarter of one column is outside the training
data, and one level of a category can be left out of them. Functions of SMT and OpenTURNS are sampled: the training data fill the
inner half of each range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

N_QUERIES = 300
# A setting with fewer queries is left out.
N_LEAST = 10


@dataclass(frozen=True)
class Pairs:
    """A table of inputs and their outputs."""

    x: pd.DataFrame
    y: np.ndarray


@dataclass(frozen=True)
class TableProblem:
    """Training pairs and queries by setting: inside, mild, far and unseen."""

    train: Pairs
    queries: dict[str, Pairs]
    model: Any


def pipeline(x: pd.DataFrame, model: Any) -> Any:
    """One-hot categories, seconds for dates, standardised numbers, then a model."""
    category = [c for c in x if x[c].dtype.kind in "OTU" or str(x[c].dtype) == "str"]
    date = [c for c in x if x[c].dtype.kind == "M"]
    number = [c for c in x if c not in (*category, *date)]
    return make_pipeline(
        make_column_transformer(
            (OneHotEncoder(handle_unknown="ignore", sparse_output=False), category),
            (make_pipeline(FunctionTransformer(_seconds), StandardScaler()), date),
            (StandardScaler(), number),
        ),
        model,
    )


def _seconds(x: pd.DataFrame) -> np.ndarray:
    return x.astype("int64").to_numpy(dtype=float)


def forest() -> RandomForestRegressor:
    return RandomForestRegressor(100, random_state=0)


def boosting() -> GradientBoostingRegressor:
    return GradientBoostingRegressor(random_state=0)


def histogram() -> HistGradientBoostingRegressor:
    return HistGradientBoostingRegressor(max_iter=100, random_state=0)


def process() -> GaussianProcessRegressor:
    kernel = ConstantKernel() * RBF() + WhiteKernel(1e-6, (1e-12, 1.0))
    return GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)


def rows_of(
    table: pd.DataFrame,
    target: str,
    shifted: str | None,
    model: Any,
    seed: int,
    unseen: tuple[str, str] | None = None,
) -> TableProblem:
    """A data set: the upper quarter of a column is outside, its upper half far outside; a level is left out."""
    table = table.dropna(subset=[target]).reset_index(drop=True)
    rng = np.random.default_rng(seed)

    def pairs(rows: np.ndarray) -> Pairs:
        part = table.iloc[rows]
        return Pairs(part.drop(columns=target), part[target].to_numpy(dtype=float))

    kept = np.ones(len(table), dtype=bool)
    queries = {}
    if unseen is not None:
        new = (table[unseen[0]] == unseen[1]).to_numpy()
        queries["unseen"] = pairs(np.flatnonzero(new))
        kept &= ~new
    if shifted is not None:
        value = table[shifted]
        low, high = (value[kept].quantile(level) for level in (0.75, 0.9))
        queries["mild"] = pairs(np.flatnonzero(kept & (value > low) & (value <= high)))
        queries["far"] = pairs(np.flatnonzero(kept & (value > high)))
        kept &= (value <= low).to_numpy()
    rows = rng.permutation(np.flatnonzero(kept))
    n_inside = len(rows) // 3
    queries["inside"] = pairs(rows[:n_inside])
    train = pairs(rows[n_inside:])
    some = {s: q for s, q in queries.items() if len(q.y) >= N_LEAST}
    return TableProblem(train, some, pipeline(train.x, model))


def cars(seed: int) -> TableProblem:
    """Categories, dates and missing values; cars of Japan and heavy cars are left out."""
    from vega_datasets import local_data

    table = local_data.cars().drop(columns="Name")
    origin = ("Origin", "Japan")
    return rows_of(table, "Miles_per_Gallon", "Weight_in_lbs", histogram(), seed, origin)


def barley(seed: int) -> TableProblem:
    """Two categories and a year; one site is left out."""
    from vega_datasets import local_data

    site = ("site", "Duluth")
    return rows_of(local_data.barley(), "yield", None, forest(), seed, site)


def weather(seed: int) -> TableProblem:
    """A date, numbers and a category; days with snow and windy days are left out."""
    from vega_datasets import local_data

    table = local_data.seattle_weather().sample(700, random_state=seed)
    kind = ("weather", "snow")
    return rows_of(table, "temp_max", "wind", boosting(), seed, kind)


def affairs(seed: int) -> TableProblem:
    """A survey with eight ordered answers and many equal rows."""
    from statsmodels.api import datasets

    table = datasets.fair.load_pandas().data.sample(700, random_state=seed)
    return rows_of(table, "rate_marriage", "age", boosting(), seed)


def engel(seed: int) -> TableProblem:
    """Expenditure over income: one input with a heavy tail, and noise that grows."""
    from statsmodels.api import datasets

    table = datasets.engel.load_pandas().data
    return rows_of(table, "foodexp", "income", forest(), seed)


def diabetes(seed: int) -> TableProblem:
    from sklearn.datasets import load_diabetes

    table = load_diabetes(as_frame=True).frame
    return rows_of(table, "target", "bmi", boosting(), seed)


@dataclass(frozen=True)
class Box:
    """Ranges of numbers, some of them in logarithms; the training data fill the inner half."""

    low: np.ndarray
    high: np.ndarray
    log: np.ndarray

    def sample(self, n: int, setting: str, rng: np.random.Generator) -> np.ndarray:
        """Points inside, or with at least one input outside: up to 1.25, or beyond 1.5 and up to 2 half-widths."""
        width = {"inside": 1.0, "mild": 1.25, "far": 2.0}[setting]
        least = {"inside": 0.0, "mild": 1.0, "far": 1.5}[setting]
        u = rng.uniform(-width, width, (20 * n + 1000, len(self.low)))
        u = u[abs(u).max(axis=1) >= least][:n]
        low, high = (
            np.where(self.log, np.log(np.where(self.log, end, 1)), end)
            for end in (self.low, self.high)
        )
        found = (low + high) / 2 + u * (high - low) / 4
        return np.where(self.log, np.exp(np.where(self.log, found, 0)), found)


def sampled(
    box: Box,
    columns: list[str],
    truth: Callable[[pd.DataFrame], np.ndarray],
    model: Any,
    n: int,
    seed: int,
) -> TableProblem:
    """A function at random points of a box."""
    rng = np.random.default_rng(seed)

    def pairs(n: int, setting: str) -> Pairs:
        x = pd.DataFrame(box.sample(n, setting, rng), columns=columns)
        return Pairs(x, truth(x))

    train = pairs(n, "inside")
    queries = {s: pairs(N_QUERIES, s) for s in ("inside", "mild", "far")}
    return TableProblem(train, queries, pipeline(train.x, model))


def borehole(seed: int) -> TableProblem:
    """SMT's water flow with the radius of influence and the transmissivity over three decades."""
    from smt.problems import WaterFlow

    function = WaterFlow(ndim=8)
    low, high = function.xlimits.T
    low, high = low.copy(), high.copy()
    log = np.zeros(8, dtype=bool)
    log[[1, 2]] = True
    # The inner half of these ranges spans three decades.
    low[2], high[2] = 1e1, 1e7
    low[1], high[1] = 1e2, 1e8
    columns = ["rw", "r", "Tu", "Hu", "Tl", "Hl", "L", "Kw"]
    box = Box(low, high, log)
    return sampled(box, columns, lambda x: function(x.to_numpy())[:, 0], boosting(), 400, seed)


def robot_arm(seed: int) -> TableProblem:
    """SMT's robot arm: two lengths and two angles, with a gap in the first length."""
    from smt.problems import RobotArm

    function = RobotArm(ndim=4)
    low, high = function.xlimits.T
    found = sampled(
        Box(low, high, np.zeros(4, dtype=bool)),
        ["length 1", "angle 1", "length 2", "angle 2"],
        lambda x: function(x.to_numpy())[:, 0],
        process(),
        350,
        seed,
    )
    x, y = found.train.x, found.train.y
    gap = x["length 1"].between(0.45, 0.55).to_numpy()
    inside = found.queries["inside"]
    hole = inside.x["length 1"].between(0.47, 0.53).to_numpy()
    queries = found.queries | {
        "inside": Pairs(inside.x[~hole], inside.y[~hole]),
        "gap": Pairs(inside.x[hole], inside.y[hole]),
    }
    return TableProblem(Pairs(x[~gap], y[~gap]), queries, found.model)


def flood(seed: int) -> TableProblem:
    """OpenTURNS' flood model: the height of the water over eight inputs."""
    from openturns.usecases.flood_model import FloodModel

    model = FloodModel()
    marginals = [model.distribution.getMarginal(i) for i in range(8)]
    low, high = (
        np.array([m.computeQuantile(level)[0] for m in marginals]) for level in (0.01, 0.99)
    )
    columns = ["Q", "Ks", "Zv", "Zm", "B", "L", "Zb", "Hd"]
    box = Box(low, high, np.zeros(8, dtype=bool))
    return sampled(
        box, columns, lambda x: np.array(model.model(x.to_numpy()))[:, 0], forest(), 400, seed
    )


def repeats(seed: int) -> TableProblem:
    """OpenTURNS' Ishigami function: 80 places with five noisy measurements each, and a new measurement at each query."""
    from openturns.usecases.ishigami_function import IshigamiModel

    rng = np.random.default_rng(1000 + seed)
    function = IshigamiModel().model
    bound = np.full(3, np.pi)

    def noisy(x: pd.DataFrame) -> np.ndarray:
        truth = np.array(function(x.to_numpy()))[:, 0]
        return truth + rng.normal(0, 0.7, len(x))

    box = Box(-bound, bound, np.zeros(3, dtype=bool))
    found = sampled(box, ["X1", "X2", "X3"], noisy, forest(), 80, seed)
    x = found.train.x.loc[np.repeat(np.arange(80), 5)].reset_index(drop=True)
    return TableProblem(Pairs(x, noisy(x)), found.queries, found.model)


def cantilever(seed: int) -> TableProblem:
    """SMT's beam with twelve cross sections, two of them left out; one of the others is rare."""
    from smt.problems import MixedCantileverBeam

    function = MixedCantileverBeam()
    rng = np.random.default_rng(seed)
    box = Box(np.array([10.0, 1.0]), np.array([20.0, 2.0]), np.zeros(2, dtype=bool))
    weights = np.array([1.0] * 9 + [0.15])

    def pairs(n: int, setting: str, sections: np.ndarray) -> Pairs:
        number = box.sample(n, setting, rng)
        code = rng.choice(sections, n, p=weights / weights.sum() if len(sections) > 2 else None)  # fmt: skip
        y = 1e6 * np.ravel(function(np.column_stack([code, number])))
        x = pd.DataFrame(number, columns=["length", "area"])
        return Pairs(x.assign(section=[f"section {c}" for c in code]), y)

    seen, new = np.arange(10), np.array([10, 11])
    train = pairs(400, "inside", seen)
    queries = {s: pairs(N_QUERIES, s, seen) for s in ("inside", "mild", "far")}
    queries["unseen"] = pairs(N_QUERIES, "inside", new)
    return TableProblem(train, queries, pipeline(train.x, process()))


PROBLEMS: dict[str, Callable[[int], TableProblem]] = {
    "cars": cars,
    "barley": barley,
    "weather": weather,
    "affairs": affairs,
    "engel": engel,
    "diabetes": diabetes,
    "borehole": borehole,
    "robot-arm": robot_arm,
    "flood": flood,
    "ishigami-repeats": repeats,
    "cantilever": cantilever,
}
