import re
from pathlib import Path

import pytest
import torch

import geoq.increments
from geoq import (
    FieldIncrement,
    FieldScaleIncrement,
    GeoQ,
    IndicatorIncrement,
    NormScaledIncrement,
    RandomFolds,
    TwoLawIncrement,
)
from geoq.increments.protocol import (
    ChecksErrors,
    ChecksShapes,
    HasExpectedError,
    HasLevels,
    IncrementModel,
    MayBeNegative,
    NotConformalizable,
    Storable,
    check_increment_model,
    warn_if_few,
)

CAPABILITIES = {
    TwoLawIncrement: {MayBeNegative, Storable, HasLevels, ChecksShapes},
    FieldScaleIncrement: {MayBeNegative, Storable, ChecksShapes},
    NormScaledIncrement: {Storable},
    FieldIncrement: {Storable, ChecksShapes},
    IndicatorIncrement: {
        MayBeNegative,
        Storable,
        HasLevels,
        HasExpectedError,
        NotConformalizable,
        ChecksShapes,
        ChecksErrors,
    },
}


class Constant:
    """The smallest increment model."""

    quantile = 0.9

    def fit(self, calibration):
        self.largest_ = calibration.increment.max()
        return self

    def __call__(self, features):
        return self.largest_.expand_as(features.anchor_error)


class WithoutQuantile:
    """A model of the user that lacks the quantile level."""

    def fit(self, calibration):
        return self

    def __call__(self, features):
        return features.anchor_error


def never(x, y):
    pytest.fail("training started")


def pairs(n=40):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1] ** 2


def test_a_model_with_quantile_fit_and_call_is_enough():
    x, y = pairs()
    geoq = GeoQ(lambda x: 0 * x[:, :1], None, increment_model=Constant()).fit(x, y)
    assert (geoq.bound(x) >= geoq.increment_model_.largest_).all()
    assert not any(
        isinstance(Constant(), kind) for kind in CAPABILITIES[IndicatorIncrement]
    )


@pytest.mark.parametrize("model", CAPABILITIES, ids=lambda model: model.__name__)
def test_each_model_has_exactly_its_capabilities(model):
    every = CAPABILITIES[IndicatorIncrement]
    assert isinstance(model(), IncrementModel)
    assert {kind for kind in every if isinstance(model(), kind)} == CAPABILITIES[model]


def test_a_model_without_a_quantile_is_refused_before_training():
    x, y = pairs()
    geoq = GeoQ(
        lambda x: 0 * x[:, :1],
        never,
        folds=RandomFolds(2),
        increment_model=WithoutQuantile(),
    )
    with pytest.raises(TypeError, match=r"has no quantile; pass an object with quant"):
        geoq.fit(x, y)


def test_a_class_in_place_of_a_model_is_refused():
    with pytest.raises(
        TypeError, match=r"Constant is a class; call it, .*Constant\(\)"
    ):
        check_increment_model(Constant)


def test_a_function_in_place_of_a_model_is_refused():
    with pytest.raises(TypeError, match=r"has no quantile and no fit; pass an object"):
        check_increment_model(lambda features: features.anchor_error)


def test_an_impossible_quantile_of_the_user_is_refused():
    model = Constant()
    model.quantile = 95
    with pytest.raises(ValueError, match=r"Constant.quantile=95"):
        check_increment_model(model)


def test_the_protocol_documents_that_increments_can_be_negative():
    assert "nonnegative, unless the model also implements ``MayBeNegative``" in (
        IncrementModel.__doc__
    )
    negative = {model for model in CAPABILITIES if may_be_negative(model())}
    assert negative == {TwoLawIncrement, FieldScaleIncrement, IndicatorIncrement}
    for model in negative:
        assert model.__name__ in MayBeNegative.__doc__


def may_be_negative(model):
    return isinstance(model, MayBeNegative) and model.may_be_negative


def test_few_points_for_a_quantile_level_are_warned_of():
    warn_if_few(0.95, 19)
    with pytest.warns(UserWarning, match="n=18 independent .* needs at least 19"):
        warn_if_few(0.95, 18)


def test_capabilities_are_named_only_in_the_protocol():
    for path in Path(geoq.increments.__file__).parent.glob("*.py"):
        if path.name != "protocol.py":
            assert not re.search(r"\b(getattr|hasattr)\(", path.read_text()), path.name
