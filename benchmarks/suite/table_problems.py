"""Tables for ``benchmarks.suite.tables``: data sets and functions of other packages.

Data sets of vega_datasets, statsmodels and scikit-learn are split by rows: the upper quarter of one column is outside the training
data, and one level of a category can be left out of them. Functions of SMT and OpenTURNS are sampled: the training data fill the
inner half of each range.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from sklearn import ensemble
from sklearn.compose import make_column_transformer
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


def pipeline(x, model):
    """One-hot categories, seconds for dates, standardised numbers, then a model."""
    category = [c for c in x if x[c].dtype.kind in "OTU" or str(x[c].dtype) == "str"]
    date = [c for c in x if x[c].dtype.kind == "M"]
    number = [c for c in x if c not in (*category, *date)]
    columns = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), category),
        (make_pipeline(FunctionTransformer(_seconds), StandardScaler()), date),
        (StandardScaler(), number),
    )
    return make_pipeline(columns, model)


def _seconds(x):
    return x.astype("int64").to_numpy(dtype=float)


def forest():
    return ensemble.RandomForestRegressor(100, random_state=0)


def boosting():
    return ensemble.GradientBoostingRegressor(random_state=0)


def process():
    kernel = ConstantKernel() * RBF() + WhiteKernel(1e-6, (1e-12, 1.0))
    return GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)


def rows_of(table, target, shifted, model, seed, unseen=None):
    """A data set: the upper quarter of a column is outside, its upper tenth far outside; a level is left out."""
    table = table.dropna(subset=[target]).reset_index(drop=True)

    def pairs(rows):
        part = table.iloc[rows]
        return Pairs(part.drop(columns=target), part[target].to_numpy(dtype=float))

    kept, queries = np.ones(len(table), dtype=bool), {}
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
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(kept))
    n_inside = len(rows) // 3
    queries["inside"] = pairs(rows[:n_inside])
    train = pairs(rows[n_inside:])
    some = {s: q for s, q in queries.items() if len(q.y) >= N_LEAST}
    return TableProblem(train, some, pipeline(train.x, model))


def cars(seed):
    """Categories, dates and missing values; cars of Japan and heavy cars are left out."""
    from vega_datasets import local_data

    table = local_data.cars().drop(columns="Name")
    model = ensemble.HistGradientBoostingRegressor(max_iter=100, random_state=0)
    origin = ("Origin", "Japan")
    return rows_of(table, "Miles_per_Gallon", "Weight_in_lbs", model, seed, origin)


def barley(seed):
    """Two categories and a year; one site is left out."""
    from vega_datasets import local_data

    return rows_of(local_data.barley(), "yield", None, forest(), seed, ("site", "Duluth"))


def weather(seed):
    """A date, numbers and a category; days with snow and windy days are left out."""
    from vega_datasets import local_data

    table = local_data.seattle_weather().sample(700, random_state=seed)
    return rows_of(table, "temp_max", "wind", boosting(), seed, ("weather", "snow"))


def affairs(seed):
    """A survey with eight ordered answers and many equal rows."""
    from statsmodels.api import datasets

    table = datasets.fair.load_pandas().data.sample(700, random_state=seed)
    return rows_of(table, "rate_marriage", "age", boosting(), seed)


def engel(seed):
    """Expenditure over income: one input with a heavy tail, and noise that grows."""
    from statsmodels.api import datasets

    return rows_of(datasets.engel.load_pandas().data, "foodexp", "income", forest(), seed)


def diabetes(seed):
    from sklearn.datasets import load_diabetes

    return rows_of(load_diabetes(as_frame=True).frame, "target", "bmi", boosting(), seed)


class Box:
    """Ranges of numbers, those of some columns in logarithms; the training data fill the inner half."""

    def __init__(self, low, high, log=()):
        self.low, self.high = np.array(low, dtype=float), np.array(high, dtype=float)
        self.log = np.isin(np.arange(len(self.low)), log)

    def sample(self, n, setting, rng):
        """Points inside, or with at least one input outside: up to 1.25, or beyond 1.5 and up to 2 half-widths."""
        least, width = {"inside": (0.0, 1.0), "mild": (1.0, 1.25), "far": (1.5, 2.0)}[setting]
        u = rng.uniform(-width, width, (20 * n + 1000, len(self.low)))
        u = u[abs(u).max(axis=1) >= least][:n]
        low, high = (self._scaled(end, np.log) for end in (self.low, self.high))
        return self._scaled((low + high) / 2 + u * (high - low) / 4, np.exp)

    def _scaled(self, values, function):
        return function(values, out=values.copy(), where=np.broadcast_to(self.log, values.shape))


def sampled(box, columns, truth, model, n, seed):
    """A function of NumPy rows at random points of a box."""
    rng = np.random.default_rng(seed)

    def pairs(n, setting):
        x = box.sample(n, setting, rng)
        return Pairs(pd.DataFrame(x, columns=columns), truth(x))

    train = pairs(n, "inside")
    queries = {s: pairs(N_QUERIES, s) for s in ("inside", "mild", "far")}
    return TableProblem(train, queries, pipeline(train.x, model))


def borehole(seed):
    """SMT's water flow with the radius of influence and the transmissivity over three decades."""
    from smt.problems import WaterFlow

    function = WaterFlow(ndim=8)
    low, high = function.xlimits.T.copy()
    # The inner half of these ranges spans three decades.
    low[1:3], high[1:3] = (1e2, 1e1), (1e8, 1e7)
    columns = ["rw", "r", "Tu", "Hu", "Tl", "Hl", "L", "Kw"]
    box = Box(low, high, log=(1, 2))
    return sampled(box, columns, lambda x: function(x)[:, 0], boosting(), 400, seed)


def robot_arm(seed):
    """SMT's robot arm: two lengths and two angles, with a gap in the first length."""
    from smt.problems import RobotArm

    function = RobotArm(ndim=4)
    columns = ["length 1", "angle 1", "length 2", "angle 2"]
    box = Box(*function.xlimits.T)
    found = sampled(box, columns, lambda x: function(x)[:, 0], process(), 350, seed)

    def parts(pairs, low, high):
        within = pairs.x["length 1"].between(low, high).to_numpy()
        return [Pairs(pairs.x[rows], pairs.y[rows]) for rows in (~within, within)]

    train, _ = parts(found.train, 0.45, 0.55)
    inside, gap = parts(found.queries["inside"], 0.47, 0.53)
    return TableProblem(train, found.queries | {"inside": inside, "gap": gap}, found.model)


def flood(seed):
    """OpenTURNS' flood model: the height of the water over eight inputs."""
    from openturns.usecases.flood_model import FloodModel

    model = FloodModel()
    marginals = [model.distribution.getMarginal(i) for i in range(8)]
    box = Box(*([m.computeQuantile(level)[0] for m in marginals] for level in (0.01, 0.99)))
    columns = ["Q", "Ks", "Zv", "Zm", "B", "L", "Zb", "Hd"]
    return sampled(box, columns, lambda x: np.array(model.model(x))[:, 0], forest(), 400, seed)


def repeats(seed):
    """OpenTURNS' Ishigami function: 80 places with five noisy measurements each, and a new measurement at each query."""
    from openturns.usecases.ishigami_function import IshigamiModel

    rng, function = np.random.default_rng(1000 + seed), IshigamiModel().model

    def noisy(x):
        return np.array(function(x))[:, 0] + rng.normal(0, 0.7, len(x))

    box = Box([-np.pi] * 3, [np.pi] * 3)
    found = sampled(box, ["X1", "X2", "X3"], noisy, forest(), 80, seed)
    x = found.train.x.loc[np.repeat(np.arange(80), 5)].reset_index(drop=True)
    return TableProblem(Pairs(x, noisy(x.to_numpy())), found.queries, found.model)


def cantilever(seed):
    """SMT's beam with twelve cross sections, two of them left out; one of the others is rare."""
    from smt.problems import MixedCantileverBeam

    function, rng = MixedCantileverBeam(), np.random.default_rng(seed)
    box, weights = Box([10.0, 1.0], [20.0, 2.0]), np.array([1.0] * 9 + [0.15])

    def pairs(n, setting, sections, p):
        number = box.sample(n, setting, rng)
        code = rng.choice(sections, n, p=p)
        x = pd.DataFrame(number, columns=["length", "area"])
        x = x.assign(section=[f"section {c}" for c in code])
        return Pairs(x, 1e6 * np.ravel(function(np.column_stack([code, number]))))

    seen, new = (np.arange(10), weights / weights.sum()), (np.array([10, 11]), None)
    train = pairs(400, "inside", *seen)
    queries = {s: pairs(N_QUERIES, s, *seen) for s in ("inside", "mild", "far")}
    queries["unseen"] = pairs(N_QUERIES, "inside", *new)
    return TableProblem(train, queries, pipeline(train.x, process()))


_LISTED = cars, barley, weather, affairs, engel, diabetes, borehole
PROBLEMS = {make.__name__: make for make in _LISTED} | {"robot-arm": robot_arm, "flood": flood}
PROBLEMS |= {"ishigami-repeats": repeats, "cantilever": cantilever}
