from dataclasses import dataclass
from typing import Any

import pytest
from sklearn.base import clone

from geoq import GeoQ, RandomFolds
from geoq.core.parameters import LONGEST_SETTING, get_params, represent, set_params


@dataclass
class Estimator:
    surrogate: Any
    train_surrogate: Any
    n_anchors: int = 1
    setting: Any = None


def test_parameters_are_the_constructor_arguments_by_name():
    estimator = Estimator(None, len, n_anchors=3)
    estimator.learned_ = 5
    assert get_params(estimator) == {
        "surrogate": None,
        "train_surrogate": len,
        "n_anchors": 3,
        "setting": None,
    }


def test_an_unknown_name_raises_and_changes_nothing():
    estimator = Estimator(None, None)
    with pytest.raises(ValueError, match=r"no parameter 'k'; it has surrogate, .*"):
        set_params(estimator, n_anchors=5, k=3)
    assert estimator.n_anchors == 1
    assert set_params(estimator, n_anchors=5).n_anchors == 5


def test_the_clone_of_scikit_learn_has_the_parameters_but_not_what_was_learned():
    estimator = GeoQ(None, max, folds=RandomFolds(3), n_anchors=4)
    estimator.fitted_ = 0
    copy = clone(estimator)
    assert repr(copy) == repr(GeoQ(None, max, folds=RandomFolds(3), n_anchors=4))


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (2, "2"),
        (len, "len"),
        (list, "list"),
        ("a\nb", "'a\\nb'"),
        ("a" * LONGEST_SETTING, "str(...)"),
    ],
)
def test_settings_other_than_the_default_are_shown_and_long_ones_by_their_type(setting, text):
    estimator = Estimator(len, None, setting=setting)
    assert represent(estimator, fitted=False) == (
        f"Estimator(surrogate=len, train_surrogate=None, setting={text}), not fitted"
    )


def test_a_model_is_shown_by_its_type_and_a_fitted_estimator_as_fitted():
    assert represent(Estimator(RandomFolds(3), None), fitted=True) == (
        "Estimator(surrogate=RandomFolds, train_surrogate=None), fitted"
    )
