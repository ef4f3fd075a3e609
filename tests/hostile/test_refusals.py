"""What a user can write by mistake: each line raises the exception with the essential words, before any training."""

import copy
import re
import warnings
from itertools import cycle

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold

from geoq import (
    MLP,
    ClusterFolds,
    CombinedFolds,
    GeoQ,
    GroupFolds,
    NestedFolds,
    PredictedFolds,
    RandomFolds,
    Region,
    RolloutGeoQ,
    SensitivityMetric,
    TemporalFolds,
    TrainedFolds,
    Training,
    TrainNetwork,
    TrainRollout,
    WholeField,
    parts,
    relative_norm_error,
)
from geoq.bounds.two_laws import TwoLawBound
from geoq.data.coordinates import Coordinates
from geoq.data.metric import StandardizedMetric
from geoq.regions.region import PaperRegion
from geoq.regions.table_scores import EachInput, EachPair

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:The groups parameter"),
]

X = np.random.default_rng(0).uniform(-1, 1, (120, 2))
NEW = np.random.default_rng(1).uniform(-1, 1, (50, 2))


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1] ** 2


def rough(x):
    """A surrogate with an error of about a tenth."""
    return 0.9 * truth(x)


Y = truth(X)
FITTED = GeoQ(rough, None, folds=RandomFolds(3)).fit(X, Y)
TENSOR = torch.from_numpy(X)
ROWS = np.arange(120)
MASK = ROWS < 60
LABELS = ROWS // 4
TURNS = cycle((-0.5, 0.5))  # for answers that differ from call to call


def never(x, y):
    pytest.fail("training started")


def fit(surrogate=rough, recipe=never, x=X, y=Y, groups=None, fold_kwargs=None, **settings):
    return GeoQ(surrogate, recipe, **settings).fit(x, y, groups=groups)


def no_retraining(surrogate=rough, **settings):
    return fit(surrogate, None, **{"folds": RandomFolds(3), **settings})


def random_batches():
    rng = np.random.default_rng(0)
    return lambda x: rough(x) + rng.normal(size=len(x))


class Splits:
    """A fold scheme of the user that yields whatever it is given."""

    def __init__(self, *folds):
        self.folds = folds

    def split(self, points, y=None, groups=None):
        return self.folds


class Own:
    """A bound model, a region, a reference or a metric of the user that returns what it is given."""

    def __init__(self, fitted=None, **methods):
        self.fitted = fitted
        vars(self).update(methods)

    def fit(self, *args):
        return self.fitted


def bound(answer):
    return {"bound_model": Own(answer)}


def region(score):
    class Fitted:
        def support_score(self, features):
            return score(features)

        def explain(self, features, names):
            return ""

    return {"safe_region": Own(Fitted())}


class NoMetric(StandardizedMetric):
    def fit(self, coordinates, points, outputs, predict):
        return None


class NoCoordinates(StandardizedMetric):
    def coordinates(self, points, schema):
        return None


class Model(Ridge):
    pass


class Network:
    """What a network has, in training mode."""

    def __init__(self):
        self.training = True

    def eval(self):
        return self

    def state_dict(self):
        return {}

    def __call__(self, x):
        return rough(x)


def shared():
    """A recipe that fits the same model object in each fold."""
    model = GaussianProcessRegressor(optimizer=None, alpha=1e-6)
    return lambda x, y: model.fit(x, y).predict


def fitted_again():
    """A deployed model, and a recipe that fits it again but returns copies."""
    model = Ridge().fit(X, Y)
    return model.predict, lambda x, y: copy.deepcopy(model.fit(x, y)).predict


def spoiled(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def quantised():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(TENSOR.float(), 0.1, 0, torch.qint8)


STATES = np.stack([np.cos(0.1 * np.arange(80)), np.sin(0.1 * np.arange(80))], axis=1)


def rollouts(trajectories=STATES, step=lambda x: 0.99 * x, recipe=None, **settings):
    estimator = RolloutGeoQ(step, recipe, n_calibration=5, n_starts=10, **settings)
    return estimator.fit(STATES if trajectories is None else trajectories)


def shared_step():
    """A recipe of rollouts whose steps all have the factor of the last one."""
    factors = []
    return lambda runs: factors.append(1 - len(factors) / 100) or (lambda x: factors[-1] * x)


V, T = ValueError, TypeError
# What the user wrote -> the exception and the essential words.
REFUSALS = {
    # arrays
    "x is a generator": (lambda: fit(x=(row for row in X)), T, "got generator; pass an array of numbers"),
    "x is a dict": (lambda: fit(x={"u": X[:, 0]}), T, "got dict; pass an array of numbers"),
    "x is a sparse array": (lambda: fit(x=scipy.sparse.csr_array(X)), T, r"got csr_array; pass x.toarray\(\)"),
    "x is a sparse tensor": (lambda: fit(x=TENSOR.to_sparse()), T, r"x is a sparse, nested or .*pass x.to_dense\(\)"),
    "x is a nested tensor": (lambda: fit(x=torch.nested.nested_tensor([TENSOR], layout=torch.jagged)), T, r"x is a sparse, nested or .* x.to_padded_tensor\(0.0\)"),
    "x is quantised": (lambda: fit(x=quantised()), T, r"x is a .* quantised tensor.* x.dequantize\(\)"),
    "x has dates": (lambda: fit(x=X.astype("M8[s]")), T, r"dtype datetime64\[s\].*\(x - x\[0\]\) / numpy.timedelta64"),
    "x has objects": (lambda: fit(x=X.astype(object)), T, r"x has dtype object, but must hold .*pass x.astype\(float\) if all are numbers, a data frame"),
    "x is a column": (lambda: fit(x=pd.Series(Y)), T, r"x is a Series, not a table in memory; pass x.to_frame\(\)"),
    "y has a column of text": (lambda: fit(y=pd.DataFrame({"y": Y, "name": "a"})), T, "y has dtype object, but must hold real numbers"),
    "x is complex": (lambda: fit(x=X + 1j), T, "x has dtype complex128.*pass its real and imaginary parts"),
    "x is masked": (lambda: fit(x=np.ma.masked_less(X, -0.9)), V, r"x is masked in \d+ of 240 values.*x.filled\(0\)"),
    "nan in x": (lambda: fit(x=spoiled(X, 17, np.nan)), V, r"x\[17, 0\] is nan \(2 of 240 values.*remove or impute .*or pass a data frame, where values can be missing"),
    "inf in y": (lambda: fit(y=spoiled(Y, 5, np.inf)), V, r"y\[5\] is inf \(1 of 120 values.*remove or impute"),
    "nan in fields": (lambda: fit(x=X, y=spoiled(X, (3, 1), np.nan)), V, r"y\[3, 1\] is nan .*numpy.ma.masked_invalid\(y\)"),
    "y is masked": (lambda: fit(y=np.ma.masked_array(Y, mask=ROWS == 5)), V, r"y is masked in 1 of 120 .*leave these rows"),
    "y is shorter": (lambda: fit(y=Y[:-1]), V, "x has 120 rows and y has 119"),
    "no samples": (lambda: fit(x=X[:0], y=Y[:0]), V, r"x has shape \(0, 2\) and holds no samples"),
    "x in a huge unit": (lambda: fit(x=1e200 * X), V, r"x\[:, 0\] ranges .*pass it in another unit"),
    "y overflows in single precision": (lambda: fit(x=X.astype("f4"), y=Y.astype("f4") * np.float32(1e25)), V, "y ranges from .*another unit"),
    "a query of another shape": (lambda: FITTED.assess(NEW[:, :1]), V, r"x has shape \(50, 1\), but GeoQ was fitted on rows of shape \(2,\)"),
    "a query without a row axis": (lambda: FITTED.assess(NEW[0]), V, "a single query needs a first dimension of 1"),
    "no query": (lambda: FITTED.assess(NEW[:0]), V, "pass at least one query"),
    # models
    "no recipe": (lambda: GeoQ(rough), T, r"pass a function train_surrogate\(x, y\).*, or None if the surr"),
    "no model at all": (lambda: fit(None, None), V, "surrogate=None and train_surrogate=None"),
    "a number as surrogate": (lambda: fit(3), T, "surrogate must be callable"),
    "a class as surrogate": (lambda: fit(Network), T, "surrogate must be .* the class Network"),
    "a model as surrogate": (lambda: fit(Model()), T, r"got Model; pass .*surrogate=model.predict"),
    "a class of models as surrogate": (lambda: fit(Model), T, "got the class Model; pass .*surrogate=model.predict"),
    "a class of models as recipe": (lambda: fit(None, Model), T, r"got the class Model; pass .*lambda x, y: Model\(\).fit\(x, y\).predict"),
    "a class of networks as recipe": (lambda: fit(None, Network), T, "got the class Network; pass a function that"),
    "a class as representation": (lambda: fit(representation=Network), T, "got the class Network; pass a trained object"),
    "a model as recipe": (lambda: fit(None, Model()), T, r"train_surrogate\(x, y\), got Model; pass .*lambda x, y"),
    "a network in training mode": (lambda: no_retraining(Network()), V, "surrogate is in training mode"),
    "a recipe that returns such a network": (lambda: fit(None, lambda x, y: Network()), V, r"return model.eval\(\) from train_surrogate"),
    "a recipe that returns a model": (lambda: fit(None, lambda x, y: Model()), T, "got Model; return .*model.predict from train_surrogate"),
    "a recipe that returns nothing": (lambda: fit(None, lambda x, y: None), T, "NoneType; return a function .*from train_surrogate"),
    "predictions of another shape": (lambda: no_retraining(lambda x: x), V, r"surrogate returned shape \(120, 2\) for y of shape \(120,\)"),
    "one prediction": (lambda: no_retraining(lambda x: x[:1]), V, "it must return one row per input"),
    "predictions of nan": (lambda: no_retraining(lambda x: rough(x) * np.nan), V, r"surrogate\(x\)\[0\] is nan"),
    "predictions as text": (lambda: no_retraining(lambda x: rough(x).astype(str)), T, "the output of surrogate has dtype <U32"),
    "predictions as a list": (lambda: no_retraining(lambda x: rough(x).tolist()), T, "the output of surrogate must be a NumPy array.*got list; pass numpy.asarray"),
    "no predictions": (lambda: no_retraining(lambda x: None), T, "the output of surrogate must be a NumPy array.*got NoneType"),
    "a centred batch": (lambda: no_retraining(lambda x: truth(x - x.mean(0))), V, "in another batch"),
    "a sorted batch": (lambda: no_retraining(lambda x: np.sort(rough(x))), V, "the other rows or on their order"),
    "a random surrogate": (lambda: no_retraining(random_batches()), V, "two answers to the same inputs"),
    "a squeezed answer": (lambda: no_retraining(lambda x: np.asarray(rough(x).squeeze())), V, "for 1 inputs"),
    "a random recipe's surrogate": (lambda: fit(None, lambda x, y: random_batches()), V, "two answers to the same inputs"),
    "one model object for all folds": (lambda: fit(None, shared()), V, "build the model inside"),
    "one model object for the folds": (lambda: fit(copy.deepcopy(shared())(X, Y), shared()), V, "a fold surrogate changed when the next"),
    "the deployed model is fitted again": (lambda: fit(*fitted_again()), V, "the deployed surrogate changed during fit.*build the model inside"),
    "the row that is named is the row of the user": (lambda: no_retraining(lambda x: np.where(x[:, 0] == X[117, 0], np.nan, rough(x))), V, r"surrogate\(x\)\[117\] is nan"),
    "too few trained folds": (lambda: fit(rough, TrainedFolds([rough])), V, "TrainedFolds has 1 entries, but there are 15 folds"),
    "a trained fold that is no function": (lambda: fit(rough, TrainedFolds([rough, 3])), T, r"TrainedFolds.surrogates\[1\] must be callable"),
    "predicted folds of lists": (lambda: fit(rough, PredictedFolds([Y.tolist()] * 3), folds=RandomFolds(3)), T, r"arrays\[0\] must be a NumPy array.*got list"),
    "predicted folds of few rows": (lambda: fit(rough, PredictedFolds([Y, Y, Y[1:]]), folds=RandomFolds(3)), V, r"arrays\[2\] has 119 rows, but x has 120"),
    "predicted folds of nan": (lambda: fit(rough, PredictedFolds([Y * np.nan] * 3), folds=RandomFolds(3)), V, r"surrogate\(x\)\[\d+\] is nan"),
    "predicted folds of columns": (lambda: fit(rough, PredictedFolds([X] * 3), folds=RandomFolds(3)), V, r"shape \(\d+, 2\) for y of shape \(\d+,\)"),
    "trained folds without a surrogate": (lambda: fit(None, TrainedFolds([rough] * 15)), V, "TrainedFolds, which does not train"),
    # errors and representations
    "error functional: a name": (lambda: fit(error_functional="mae"), T, "error_functional must be callable .*geoq.absolute_error"),
    "error functional: one number": (lambda: fit(error_functional=lambda y, _: y.mean(keepdims=True)), V, r"error_functional returned shape \(1,\) for 8 inputs"),
    "error functional: signed": (lambda: no_retraining(error_functional=lambda y, y_hat: y - y_hat - 9), V, "take its absolute value"),
    "error functional: infinite": (lambda: no_retraining(error_functional=lambda y, y_hat: abs(y - y_hat) / 0), V, "must return finite numbers"),
    "error functional: text": (lambda: fit(error_functional=lambda y, y_hat: abs(y - y_hat).astype(str)), T, "must hold real numbers"),
    "error functional: divides by zero": (lambda: fit(error_functional=relative_norm_error, y=np.where(ROWS == 100, 0, 1 + Y)), V, r"y\[100\] is zero \(1 of 120 rows are\)"),
    "representation: too few rows": (lambda: fit(representation=lambda x: x[:-1]), V, "representation returned shape"),
    "representation: infinite": (lambda: fit(representation=lambda x: x / 0), V, r"representation\(x\)\[0, 0\] is"),
    "representation: random": (lambda: fit(representation=random_batches()), V, "representation gave"),
    "representation: none": (lambda: fit(representation=None), T, "representation must be callable"),
    "representation: a class": (lambda: fit(representation=SensitivityMetric), T, "class SensitivityMetric, but an object is needed"),
    "metric: fits nothing": (lambda: no_retraining(representation=NoMetric()), T, "NoMetric.fit returned NoneType; return a FittedMetric"),
    "metric: no coordinates": (lambda: fit(representation=NoCoordinates()), T, r"NoCoordinates\.coordinates returned NoneType.*Coordinates.fit"),
    "metric: a weight of 0": (lambda: SensitivityMetric(min_weight=0), V, "min_weight=0, but it is a fraction"),
    # folds and groups
    "folds: a number": (lambda: fit(folds=5), T, r"folds=5 has no split, but folds must be a Folds; pass for example folds=RandomFolds"),
    "folds: a name": (lambda: fit(folds="random"), T, r"folds='random' is not usable, but folds must be a Folds; pass for example folds=Rand"),
    "folds: a class": (lambda: fit(folds=RandomFolds), T, r"folds is the class RandomFolds.*pass for example folds=RandomFolds\(5\)"),
    "folds: a class among others": (lambda: CombinedFolds(RandomFolds), T, "folds is the class RandomFolds"),
    "folds: none combined": (CombinedFolds, V, "needs at least one scheme"),
    "folds: too many": (lambda: fit(folds=ClusterFolds(121)), V, "n_folds=121"),
    "folds: half a fold": (lambda: fit(folds=RandomFolds(2.5)), V, "RandomFolds.n_folds=2.5 must be an integer"),
    "folds: no fraction": (lambda: fit(folds=NestedFolds(3, "0.2")), V, "smallest='0.2'.*strictly between 0 and 1"),
    "folds: no seed": (lambda: fit(folds=RandomFolds(3, "a")), V, "RandomFolds.random_state='a' must be an integer"),
    "folds: rows as floats": (lambda: fit(folds=Splits((ROWS[MASK] * 1.0, ROWS[~MASK]))), T, "the training rows of fold 1 .* dtype float64.*pass integers"),
    "folds: masks": (lambda: fit(folds=Splits((MASK, ~MASK))), T, r"the training rows of fold 1 .* dtype bool .*numpy.flatnonzero\(mask\)"),
    "folds: three parts": (lambda: fit(folds=Splits((ROWS[MASK], ROWS[~MASK], ROWS))), T, r"but a fold is a pair; yield \(training rows, held-out rows\)"),
    "folds: one part": (lambda: fit(folds=Splits(ROWS)), T, "is array.*, but a fold is a pair"),
    "folds: a matrix": (lambda: fit(folds=Splits((ROWS[MASK][:, None], ROWS[~MASK]))), T, r"shape \(60, 1\), but a list of row numbers"),
    "groups: too few": (lambda: fit(groups=["a", "b"]), V, r"groups has shape \(2,\) for 120 points"),
    "groups: a generator": (lambda: fit(groups=(i for i in LABELS)), V, r"groups has shape \(\) for 120 points"),
    "groups: nan": (lambda: fit(groups=[np.nan, *LABELS[1:]]), V, r"groups\[0\] is nan"),
    "groups: none": (lambda: fit(groups=[*LABELS[1:], None]), V, r"groups\[119\] is None"),
    "groups: mixed": (lambda: fit(groups=np.array([1, "a"] * 60, dtype=object)), T, "convert them to strings"),
    "groups: none for GroupFolds": (lambda: fit(folds=GroupFolds()), V, r"call fit\(x, y, groups=labels\)"),
    "groups: separated by blocks": (lambda: fit(folds=TemporalFolds(7), groups=LABELS), V, "separates the points of group 4; choose folds that hold out whole"),
    "groups: separated by another splitter": (lambda: fit(folds=KFold(7), groups=LABELS), V, "separates the points of group"),
    "groups: too few to divide": (lambda: fit(groups=LABELS // 10), V, "groups was given|to divide"),
    # settings
    "n_anchors: zero": (lambda: fit(n_anchors=0), V, "n_anchors=0 must be an integer >= 1"),
    "n_anchors: more than a fold leaves": (lambda: fit(n_anchors=81, folds=RandomFolds(3)), V, "n_anchors=81, but a fold of RandomFolds.* leaves only 80 points; lower n_anchors"),
    "n_support: more than a fold leaves": (lambda: fit(n_support=100, folds=RandomFolds(3)), V, "n_support=100, but a fold of RandomFolds.* leaves only 80 points"),
    "domain: a number": (lambda: fit(domain=3), T, "domain=3 is not a domain"),
    "an unknown setting": (lambda: GeoQ(None, None).set_params(k=3), V, "GeoQ has no parameter 'k'"),
    "region: a name": (lambda: fit(safe_region="distance"), T, "safe_region='distance' has no fit"),
    "region: a class": (lambda: fit(safe_region=Region), T, "safe_region is the class Region, but an object"),
    "region: nothing fitted": (lambda: no_retraining(safe_region=Own(None)), T, r"Own.fit returned None; return an object with support_score"),
    "region: a column": (lambda: no_retraining(**region(lambda f: f.support_distance[:, None])).assess(NEW), V, r"support_score returned shape \(50, 1\) for 50 queries"),
    "region: too many neighbours": (lambda: fit(safe_region=PaperRegion(n_neighbors=121), folds=RandomFolds(3)), V, r"PaperRegion\(n_neighbors=121\), but .* only 119 others"),
    "score: one input as a pair": (lambda: EachPair(1), V, "n_inputs=1 must be an integer >= 2"),
    "score: a weight above 1": (lambda: EachInput(2), V, "min_weight=2, but it is a fraction"),
    "bound: a class": (lambda: fit(bound_model=TwoLawBound), T, r"bound_model=TwoLawBound is a class; call it, bound_model=TwoLawBound\(\)"),
    "bound: a number": (lambda: fit(bound_model=3), T, "bound_model=3 has no fit"),
    "bound: a function": (lambda: fit(bound_model=lambda features: 0.0), T, r"has no fit; pass an object with fit\(tuples, quantile\)"),
    "bound: a list": (lambda: no_retraining(**bound(lambda f: [1.0] * 8)), T, "returned bounds of type list; return an array"),
    "bound: a column": (lambda: no_retraining(**bound(lambda f: f.support_distance[:, None])), V, r"shape \(8, 1\) for anchor errors"),
    "bound: few rows": (lambda: no_retraining(**bound(lambda f: f.support_distance[:3])), V, r"shape \(3,\) for anchor errors"),
    "bound: integers": (lambda: no_retraining(**bound(lambda f: f.support_distance.astype(int))), T, "return an array of floating-point numbers"),
    "bound: a tensor": (lambda: no_retraining(**bound(lambda f: torch.from_numpy(f.support_distance))), T, "return an array of floating-point numbers"),
    "bound: negative": (lambda: no_retraining(**bound(lambda f: -1 - f.support_distance)), V, "bounds are nonnegative"),
    "bound: nan": (lambda: no_retraining(**bound(lambda f: f.support_distance * np.nan)), V, "returned nan"),
    "bound: nothing fitted": (lambda: no_retraining(bound_model=Own(None)), T, "must return the fitted bound"),
    "bound: a class fitted": (lambda: no_retraining(bound_model=Own(Own)), T, "must return the fitted bound"),
    # answers
    "levels: in percent": (lambda: FITTED.predict_interval(NEW, 90), V, r"quantile=90, but a quantile level .*; 90 % is 0.9\."),
    "levels: one number for a table": (lambda: FITTED.assess(NEW).to_frame(levels=0.9), T, "levels=0.9 must be a sequence"),
    "progress: a flag": (lambda: GeoQ(rough, None).fit(X, Y, progress=True), T, r"progress=True, but it is called as progress\(state\); pass a function"),
    "levels: one number": (lambda: FITTED.bounds(NEW, 0.9), T, r"levels=0.9 must be a sequence of numbers; pass for example \(0.5, 0.9\)"),
    "levels: a word among them": (lambda: FITTED.bounds(NEW, ("a", 0.9)), V, "levels='a', but a quantile level"),
    "levels: above 1": (lambda: FITTED.bounds(NEW, (0.5, 1.5)), V, "levels=1.5, but a quantile level"),
    "query: a word": (lambda: FITTED.assess(NEW).reason("0"), T, "query='0' is a str, but the number of a row is needed; choose 0 to 49"),
    "query: not asked": (lambda: FITTED.assess(NEW).reason(50), IndexError, "query=50, but 50 were assessed; choose 0 to 49"),
    "query: before the first": (lambda: FITTED.assess(NEW).reason(-51), IndexError, "query=-51, but 50 were assessed; choose 0 to 49"),
    "expected error of a quantile": (lambda: FITTED.expected_error(NEW), T, "an upper quantile of the error and not its mean"),
    # conformal factors
    "guarantee: a class": (lambda: FITTED.conformalize(NEW, truth(NEW), guarantee=WholeField), T, "guarantee is the class WholeField, but"),
    "confidence: in words": (lambda: WholeField("0.9"), V, "confidence='0.9', but a probability lies"),
    "pairs: too few": (lambda: FITTED.conformalize(NEW[:12], truth(NEW[:12])), V, r"19 safe pairs are needed, and there are \d+"),
    "pairs: of fit": (lambda: FITTED.conformalize(X, Y), V, r"120 of 120 pairs equal pairs of fit up to rounding \(x\[0\] and its y are row 0"),
    "pairs: two of fit": (lambda: FITTED.conformalize(np.r_[NEW, X[5:7]], np.r_[truth(NEW), Y[5:7]]), V, r"2 of 52 pairs .*x\[50\] and its y are row 5"),
    "pairs: one y is lacking": (lambda: FITTED.conformalize(NEW, truth(NEW)[:-1]), V, "x has 50 rows and y has 49"),
    "pairs: without a bound": (lambda: FITTED.conformalize(spoiled(NEW, (5, 0), 1e100), truth(NEW)), V, r"pair 5 of 50 has no bound: input 0 is 1e\+100"),
    "pairs: nan in y": (lambda: FITTED.conformalize(NEW, spoiled(truth(NEW), 3, np.nan)), V, r"y\[3\] is nan"),
    # networks
    "Training: a seed in words": (lambda: Training(random_state="a"), V, "Training.random_state='a' must be an integer"),
    "Training: half a step": (lambda: Training(n_steps=10.5), V, "Training.n_steps=10.5 must be an integer >= 1"),
    "Training: a rate of nan": (lambda: Training(learning_rate=np.nan), V, "Training.learning_rate=nan must lie between 0 and"),
    "TrainNetwork: a number": (lambda: TrainNetwork(3), T, r"called as make_network\(\)"),
    "TrainNetwork: a loss in words": (lambda: TrainNetwork(MLP, loss="mse"), T, r"loss\(y, y_hat\)"),
    "TrainNetwork: a class": (lambda: TrainNetwork(MLP, training=Training), T, "training is the class Training"),
    "TrainRollout: no steps": (lambda: TrainRollout(MLP, n_rollout=0), V, "n_rollout=0 must be an integer >= 1"),
    "TrainRollout: a number": (lambda: TrainRollout(MLP, fine_tuning=5), T, "fine_tuning=5 is not usable"),
    "paper: widths in words": (lambda: parts.NormScaledBound(hidden="ab"), V, "hidden='ab' must be a tuple"),
    "paper: a training in words": (lambda: parts.NormScaledBound(training="long"), T, r"pass for example training=Training\("),
    "factor: all dropped": (lambda: parts.FieldFactor(dropout=2), V, "dropout is a fraction"),
    "factor: one split": (lambda: parts.FieldFactor(n_splits=1), V, "n_splits=1 must be an integer >= 2"),
    "factor: blind": (lambda: parts.FieldFactor(sees=()), V, "a network must see at least one field"),
    "indicator: half a network": (lambda: parts.IndicatorBound(n_networks=1.5), V, "n_networks=1.5 must be an integer"),
    "indicator: values in words": (lambda: parts.IndicatorBound(values="x"), T, r"called as values\(prediction\)"),
    # rollouts
    "trajectories: a dict": (lambda: rollouts({"run": STATES}), T, "trajectories must be a NumPy array.*got dict"),
    "trajectories: a word among them": (lambda: rollouts([STATES, "b"]), T, r"trajectories\[1\] must be a NumPy array.*got str"),
    "trajectories: masked": (lambda: rollouts(np.ma.masked_less(STATES, -0.9)), V, "trajectories is masked in"),
    "trajectories: an extreme unit": (lambda: rollouts(STATES * 1e200), V, "trajectories.* ranges .*another unit"),
    "rollouts: a centred batch": (lambda: rollouts(step=lambda x: 0.99 * (x - x.mean(0))), V, "in another batch"),
    "rollouts: a random step": (lambda: rollouts(step=lambda x: x + next(TURNS)), V, "two answers"),
    "rollouts: one model object for all folds": (lambda: rollouts(recipe=shared_step(), folds=RandomFolds(3)), V, "a fold surrogate changed when the next"),
    "rollouts: a recipe of random steps": (lambda: rollouts(None, recipe=lambda runs: lambda x: x + next(TURNS)), V, "two answers"),
    "rollouts: steps in words": (lambda: rollouts().assess(STATES, "3"), V, "n_steps='3' must be an integer"),
    "growth: no companion": (lambda: parts.MemberGrowth(companion="auto"), T, "companion='auto'.*RandomFeatures"),
    "growth: members": (lambda: parts.MemberGrowth(n_members=-1), V, "n_members=-1 must be an integer >= 0"),
    "growth: no features": (lambda: parts.RandomFeatures(0), V, "n_features=0 must be an integer >= 1"),
    "recursion: a number": (lambda: parts.AdditiveRecursion(psi=3), T, r"called as psi\(features\)"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_mistake_raises_with_the_essential_words(call, kind, words):
    with pytest.raises(kind) as raised:
        call()
    assert re.search(words, str(raised.value)), str(raised.value)


NOT_NUMBERS = ("0.9", None, [0.9], np.array([0.9, 0.5]), np.array(0.9), 1j, np.nan, True, 1.0, 0, 95)  # fmt: skip


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize("make", [
    lambda q: fit(quantile=q),
    lambda q: rollouts(quantile=q),
    lambda q: Region(quantile=q),
    lambda q: PaperRegion(quantile=q),
    lambda q: WholeField(confidence=q),
])  # fmt: skip
def test_quantile_levels_are_numbers_between_0_and_1(make, value):
    with pytest.raises(ValueError, match=r"=.*, but a (quantile level|probability) lies strictly"):
        make(value)


def test_tidy_values_are_accepted():
    """What looks like the mistakes above."""
    expected = FITTED.bound(NEW)
    masked = np.ma.masked_array(X, mask=False)
    pairs = [(ROWS[MASK], ROWS[~MASK]), [ROWS[~MASK].tolist(), ROWS[MASK].tolist()]]
    for estimator in (
        no_retraining(x=masked),
        no_retraining(x=X.tolist(), y=Y.tolist(), surrogate=lambda x: rough(np.asarray(x))),
        no_retraining(groups=ROWS),
        no_retraining(n_anchors=np.int64(1), n_support=np.int32(20)),
    ):
        np.testing.assert_array_equal(estimator.bound(NEW), expected)
    assert len(no_retraining(folds=Splits(*pairs)).fitted_.tuples) == 120
    assert no_retraining(quantile=np.float32(0.5)).bound(NEW).mean() < expected.mean()
    assert no_retraining(x=np.ma.array(X), error_functional=lambda y, p: abs(y - p) ** 2)
    for levels in ((0.5, 0.9), [0.5], np.array([0.5, 0.9]), torch.tensor([0.5])):
        assert len(FITTED.bounds(NEW, levels)) == len(levels)
    assert Coordinates.fit(X, logarithms=True).log.tolist() == [False, False]
