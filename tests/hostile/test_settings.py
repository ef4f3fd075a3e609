"""Attacks by unusable settings: each is refused before the first training, with the name of the setting."""

from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from sklearn.model_selection import GroupKFold, KFold

from geoq import (
    MLP,
    ClusterFolds,
    CombinedFolds,
    FieldIncrement,
    FieldScaleIncrement,
    GeoQ,
    Grid,
    GroupFolds,
    IndicatorIncrement,
    Mesh,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    SupportRegion,
    TemporalFolds,
    Training,
    TrainNetwork,
    TwoLawIncrement,
    default_folds,
    relative_norm_error,
)
from geoq.fold_plan import draw_folds
from geoq.increments import Climatology, FieldFactor, LowRankScale, inputs
from geoq.increments.prior import CellPrior
from geoq.rollout import AdditiveRecursion, SaturatingGrowth, TrainRollout
from geoq.sklearn import GeoQRegressor

X = np.random.default_rng(0).uniform(-1, 1, (120, 2))
Y = X[:, 0] ** 2


def make(kind, **settings):
    """An object as a user makes it: in the tests the annotations of a constructor are checked before its own checks."""
    made = object.__new__(kind)
    for part in fields(kind):
        default = (
            part.default_factory()
            if part.default_factory is not MISSING
            else part.default
        )
        object.__setattr__(made, part.name, settings.get(part.name, default))
    getattr(made, "__post_init__", lambda: None)()
    return made


ARRAY = np.array(0.9)
HAS_TRAINING = (NormScaledIncrement, FieldIncrement, IndicatorIncrement, FieldFactor)
HAS_QUANTILE = (
    TwoLawIncrement,
    NormScaledIncrement,
    FieldIncrement,
    FieldScaleIncrement,
    IndicatorIncrement,
    SafeRegion,
    SupportRegion,
    SaturatingGrowth,
    AdditiveRecursion,
)


@pytest.mark.parametrize("kind", HAS_QUANTILE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("quantile", ["0.9", ARRAY, np.nan, None, True, (0.9,)])
def test_quantile_levels_that_are_not_numbers_are_refused(kind, quantile):
    with pytest.raises(ValueError, match="a quantile level lies strictly between"):
        make(kind, quantile=quantile)


@pytest.mark.parametrize("kind", HAS_TRAINING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("training", [Training, "long", None, 1000])
def test_trainings_that_are_not_a_training_are_refused(kind, training):
    with pytest.raises(TypeError, match=r"training.* pass for example training=Train"):
        make(kind, training=training)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Training, {"random_state": "a"}, "random_state must be an integer, the seed"),
        (Training, {"n_steps": True}, "n_steps must be an integer >= 1"),
        (Training, {"n_steps": 10.5}, "n_steps must be an integer >= 1"),
        (Training, {"n_decays": "1"}, "n_decays must be an integer from 0 to 4"),
        (Training, {"learning_rate": np.nan}, "learning_rate must be > 0"),
        (Training, {"learning_rate": "fast"}, "learning_rate must be > 0"),
        (Training, {"learning_rate": ARRAY}, "learning_rate must be > 0"),
        (Training, {"validation_fraction": np.nan}, "between 0 and 1, exclusive"),
        (Training, {"validation_fraction": "x"}, "between 0 and 1, exclusive"),
        (TrainNetwork, {"make_network": 3}, r"called as make_network\(\)"),
        (TrainNetwork, {"make_network": MLP, "loss": "mse"}, r"loss\(y, y_hat\)"),
        (TrainNetwork, {"make_network": MLP, "training": Training}, "is the class"),
        (TrainRollout, {"make_network": MLP, "training": "x"}, "training='x'"),
        (TrainRollout, {"make_network": MLP, "n_rollout": 0}, "n_rollout=0 must be"),
        (TrainRollout, {"make_network": MLP, "fine_tuning": 5}, "fine_tuning=5"),
        (
            TwoLawIncrement,
            {"reference": Climatology},
            r"pass for example reference=Climatology\(\)",
        ),
        (
            TwoLawIncrement,
            {"reference": "x"},
            r"pass for example reference=Climatology\(\)",
        ),
        (NormScaledIncrement, {"hidden": "ab"}, "hidden='ab' must be a tuple"),
        (NormScaledIncrement, {"hidden": 64}, "hidden=64 must be a tuple"),
        (NormScaledIncrement, {"hidden": (64, 0)}, "tuple of integers >= 1"),
        (NormScaledIncrement, {"hidden": np.array([8])}, "tuple of integers >= 1"),
        (FieldIncrement, {"widths": ()}, r"widths=\(\) is empty"),
        (FieldIncrement, {"widths": "ab"}, "widths='ab' must be a tuple"),
        (FieldIncrement, {"weights": (1.0, np.nan)}, "must be a tuple of numbers >= 0"),
        (FieldIncrement, {"weights": (-1.0,)}, "must be a tuple of numbers >= 0"),
        (FieldIncrement, {"n_spatial": "2"}, "n_spatial='2', but fields"),
        (FieldIncrement, {"n_spatial": np.array([1])}, "choose 1 or 2"),
        (FieldScaleIncrement, {"factor": FieldFactor}, "factor is the class FieldFac"),
        (FieldScaleIncrement, {"factor": "x"}, "factor='x' has no"),
        (
            FieldScaleIncrement,
            {"reference": "x"},
            r"pass for example reference=Climatology\(\)",
        ),
        (FieldScaleIncrement, {"domain": 3}, "domain=3 is not a domain"),
        (Grid, {"n_axes": 1, "periodic": True}, "True or False, for each axis"),
        (Mesh, {"coordinates": np.zeros(20)}, r"shape \(20,\).*\(n_nodes, n_dimen"),
        (FieldFactor, {"dropout": 2}, "dropout is a fraction"),
        (FieldFactor, {"dropout": np.nan}, "dropout is a fraction"),
        (FieldFactor, {"dropout": "x"}, "dropout is a fraction"),
        (FieldFactor, {"widths": ()}, r"widths=\(\) is empty"),
        (FieldFactor, {"n_splits": 2.5}, "n_splits must be at least 2"),
        (FieldFactor, {"n_splits": "5"}, "n_splits must be at least 2"),
        (FieldFactor, {"sees": inputs}, "a network must see at least one field"),
        (FieldFactor, {"sees": ()}, "a network must see at least one field"),
        (IndicatorIncrement, {"n_networks": 1.5}, "n_networks=1.5 must be an integer"),
        (IndicatorIncrement, {"prior": CellPrior}, "prior is the class CellPrior"),
        (IndicatorIncrement, {"prior": "cells"}, "prior='cells' has no fit"),
        (IndicatorIncrement, {"values": "x"}, r"called as values\(prediction\)"),
        (LowRankScale, {"rank": -1}, "rank=-1 must be an integer >= 0"),
        (LowRankScale, {"rank": "3"}, "rank='3' must be an integer >= 0"),
        (SaturatingGrowth, {"exponents": ()}, r"exponents=\(\) is empty"),
        (SaturatingGrowth, {"exponents": 1.0}, "exponents=1.0 must be a tuple"),
        (SaturatingGrowth, {"exponents": (np.nan,)}, "must be a tuple of numbers >= 0"),
        (AdditiveRecursion, {"psi": 3}, r"called as psi\(features\)"),
        (AdditiveRecursion, {"hidden": "ab"}, "hidden='ab' must be a tuple"),
        (AdditiveRecursion, {"training": Training}, "training is the class Training"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_unusable_settings_are_refused_when_the_object_is_made(kind, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(kind, **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Training, {"n_steps": np.int64(10), "learning_rate": np.float32(1e-3)}),
        (NormScaledIncrement, {"hidden": ()}),
        (NormScaledIncrement, {"hidden": [8, 8], "quantile": np.float32(0.5)}),
        (FieldIncrement, {"weights": [1, 2]}),
        (FieldFactor, {"dropout": 0}),
        (SaturatingGrowth, {"exponents": (0.0,)}),
        (LowRankScale, {"rank": 0}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_usual_settings_are_accepted(kind, settings):
    make(kind, **settings)


class Counted:
    """A recipe that counts its trainings."""

    def __init__(self):
        self.n = 0

    def __call__(self, x, y):
        self.n += 1
        return lambda x: 0 * x[:, 0] + 0.5


LABELS = np.arange(120) // 4


@pytest.mark.parametrize(
    ("settings", "data", "message"),
    [
        (
            {"folds": make(RandomFolds, n_folds=2.5)},
            {},
            "RandomFolds.n_folds=2.5 must be an integer",
        ),
        (
            {"folds": make(ClusterFolds, n_folds="5")},
            {},
            "ClusterFolds.n_folds='5' must be",
        ),
        (
            {"folds": make(TemporalFolds, n_folds=2.5)},
            {},
            "TemporalFolds.n_folds=2.5 must be",
        ),
        ({"folds": make(TemporalFolds, gap=1.5)}, {}, "TemporalFolds.gap=1.5"),
        ({"folds": make(NestedFolds, smallest="x")}, {}, r"smallest='x'"),
        ({"folds": make(NestedFolds, smallest=np.nan)}, {}, r"smallest=nan"),
        (
            {"folds": make(RandomFolds, random_state="a")},
            {},
            "random_state='a' must be",
        ),
        ({}, {"groups": ["a", "b"]}, r"groups has shape \(2,\) for 120 points"),
        ({}, {"groups": LABELS[:, None]}, r"groups has shape \(120, 1\) for 120"),
        ({}, {"groups": {"a": 1}}, r"groups has shape \(\) for 120 points"),
        ({}, {"groups": (i for i in LABELS)}, "groups is a generator; pass a list"),
        ({}, {"groups": [np.nan, *LABELS[1:]]}, r"groups\[0\] is nan"),
        ({}, {"groups": [*LABELS[1:], None]}, r"groups\[119\] is None"),
        (
            {},
            {"groups": np.array([1, "a"] * 60, dtype=object)},
            "convert them to strings",
        ),
        (
            {"folds": TemporalFolds(7)},
            {"groups": LABELS},
            "separates the points of group 4; choose folds that hold out whole",
        ),
        ({"folds": KFold(7)}, {"groups": LABELS}, "separates the points of group"),
        ({}, {"groups": LABELS // 10}, "needs|to divide"),
        (
            {"error_functional": relative_norm_error},
            {"y": np.where(np.arange(120) == 100, 0, 1 + Y)},
            r"y\[100\] is zero \(1 of 120 rows are\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The groups parameter is ignored by KFold")
def test_unusable_folds_groups_and_outputs_are_refused_before_training(
    settings, data, message
):
    recipe = Counted()
    with pytest.raises((ValueError, TypeError), match=message):
        GeoQ(None, recipe, **settings).fit(**({"x": X, "y": Y} | data))
    assert recipe.n == 0


@pytest.mark.parametrize(
    "folds",
    [
        default_folds(),
        default_folds(GroupFolds(5)),
        RandomFolds(4),
        ClusterFolds(4),
        NestedFolds(4),
        CombinedFolds(RandomFolds(3), GroupFolds(3)),
        GroupKFold(5),
        TemporalFolds(5),
    ],
    ids=repr,
)
def test_groups_are_held_out_whole_in_all_families(folds):
    order = np.random.default_rng(1).permutation(30).repeat(4)
    labels = LABELS if isinstance(folds, TemporalFolds) else order
    plan = draw_folds(folds, X, labels)
    for train, held_out in plan.splits:
        assert not set(labels[train]) & set(labels[held_out])
        assert len(train)
        assert len(held_out)
    assert plan.n_groups == 30
    assert len(set(plan.family)) == len(getattr(folds, "schemes", [folds]))


def test_groups_of_one_point_each_are_folds_of_points():
    with_groups, without = (
        draw_folds(default_folds(), X, groups) for groups in (np.arange(120), None)
    )
    for one, other in zip(with_groups.splits, without.splits, strict=True):
        np.testing.assert_array_equal(one[1], other[1])


def test_the_scikit_learn_interface_honours_groups():
    with pytest.raises(ValueError, match=r"groups has shape \(2,\)"):
        GeoQRegressor().fit(X, Y, groups=["a", "b"])


def test_networks_are_trained_without_gradients_outside():
    """``torch.no_grad`` around fit concerns the code of the user, not the trainings inside."""
    few = Training(n_steps=4, check_every=2)
    geoq = GeoQ(
        None,
        TrainNetwork(lambda: MLP(2, 1, hidden=(4,)), training=few),
        folds=RandomFolds(3),
        increment_model=NormScaledIncrement(hidden=(4,), training=few),
    )
    expected = geoq.fit(X, Y[:, None]).bound(X)
    with torch.no_grad():
        np.testing.assert_array_equal(geoq.fit(X, Y[:, None]).bound(X), expected)
