"""What a bound model of the user needs, and what it may leave out or add."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from made import Largest

from geoq import GeoQ, RandomFolds, norm_error
from geoq.bounds.protocol import BoundModel, bounds_of
from geoq.bounds.two_laws import FittedTwoLaws, TwoLawBound
from geoq.core.geometry import Features

X = np.random.default_rng(0).normal(size=(60, 2))
Y = X[:, :1] ** 2


def fitted(model, **settings):
    settings = {"folds": RandomFolds(4), "bound_model": model, **settings}
    return GeoQ(lambda x: 0 * x[:, :1], None, **settings).fit(X, Y)


def test_a_model_with_fit_is_enough_and_its_level_is_that_of_the_estimator():
    estimator = fitted(Largest())
    assert isinstance(Largest(), BoundModel)
    assert (estimator.bound(X) == Y.max()).all()
    assert estimator.bounds(X, (0.5, 0.95))[0.95].max() == pytest.approx(Y.max())
    assert "The bound is a function." in estimator.describe()
    seen = []

    class Recording(TwoLawBound):
        def fit(self, tuples, quantile):
            seen.append(quantile)
            return TwoLawBound().fit(tuples, quantile)

    assert isinstance(fitted(Recording(), quantile=0.8).fitted_.bound, FittedTwoLaws)
    assert seen == [0.8]
    assert FittedTwoLaws.has_levels


@dataclass(frozen=True)
class WithLevels:
    """A bound that computes its levels, and the mean of the error."""

    level: float = 0.0
    has_levels: ClassVar[bool] = True
    uses_anchor_error: ClassVar[bool] = False

    def fit(self, tuples, quantile):
        return WithLevels(quantile)

    def __call__(self, features, quantile=None):
        return np.full(features.anchor_error.shape, quantile or self.level)

    def expected_error(self, features):
        return np.full(features.anchor_error.shape, 0.25)

    def describe(self):
        return "It is its level"


def test_optional_parts_are_used():
    estimator = fitted(WithLevels(), quantile=0.9)
    assert (estimator.bound(X) == 0.9).all()
    assert (estimator.bounds(X, (0.5,))[0.5] == 0.5).all()
    assert (estimator.expected_error(X) == 0.25).all()
    assert "It is its level." in estimator.describe()
    assert "the bound is the anchor error" not in estimator.assess(X).reason(0)
    with pytest.raises(TypeError, match=r"estimates an upper quantile .* bounds\(x, \(0.5,\)\)"):
        fitted(TwoLawBound()).expected_error(X)


def test_a_bound_of_two_values_cannot_be_scaled():
    class TwoValues(WithLevels):
        scalable = False

        def fit(self, tuples, quantile):
            return TwoValues(quantile)

    with pytest.raises(TypeError, match=r"TwoValues cannot be conformalized.*bounds\(x, levels\)"):
        fitted(TwoValues()).conformalize(X + 1, Y)


def test_a_model_that_needs_no_neighbourhood_gets_no_sides():
    class Plain(Largest):
        uses_neighborhood = False

    assert not fitted(Plain()).fitted_.tuples.relation.side.any()
    assert fitted(Largest()).fitted_.tuples.relation.side.any()


def test_a_model_checks_shapes_before_and_errors_after_the_first_training():
    calls = []

    class Checking(Largest):
        def check_shapes(self, shapes, layout):
            calls.append((*shapes, layout.is_table))

        def check_errors(self, prediction, error):
            calls.append((prediction.shape, error.shape))

    estimator = GeoQ(
        None,
        lambda x, y: calls.append("trained") or (lambda x: 0 * x[:, :1]),
        folds=RandomFolds(2),
        bound_model=Checking(),
        error_functional=norm_error,
    )
    estimator.fit(X, Y)
    assert calls[:3] == [((2,), (), (2,), (1,), True), "trained", ((60, 1), (60,))]


def features(n: int = 4) -> Features:
    zeros = np.zeros((n, 1))
    return Features(zeros, zeros[:, 0], zeros.astype(np.float32), zeros, zeros)


def test_bounds_have_the_precision_of_the_errors():
    assert bounds_of(lambda f: np.ones((4, 1)), features()).dtype == np.float32
