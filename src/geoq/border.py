"""What GeoQ refuses, and the way out; said before anything is trained."""

from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch import Tensor, nn

from geoq.coverage import n_needed
from geoq.fold_surrogates import FoldSurrogates, TrainedFolds
from geoq.geometry import Embedding
from geoq.increment import ChecksShapes, IncrementModel, Shapes
from geoq.representation import Representation
from geoq.safe_region import DistanceRegion, SafeRegion, SafeRule
from geoq.surrogate import (
    Array,
    ErrorFunctional,
    Surrogate,
    TrainSurrogate,
    check_callable,
    check_finite,
    check_kind,
    check_pairs,
    evaluate,
    restore,
    to_tensor,
    warn,
)


def check_count(count: object, name: str, what: str = "something") -> None:
    """Refuse what counts nothing."""
    if not isinstance(count, Integral) or count < 1:
        raise ValueError(
            f"{name}={count!r}, but it counts {what}; choose a whole number, 1 or more."
        )


def check_any_model(surrogate: object, train_surrogate: object, given: str) -> None:
    """Refuse the absence of any model."""
    if surrogate is None and train_surrogate is None:
        raise ValueError(
            "surrogate=None and train_surrogate=None, so there is no model whose error could be estimated; "
            f"pass a trained surrogate, or a function train_surrogate({given}) that returns one."
        )


def check_not_only_folds(
    surrogate: object, train_surrogate: object, *, brought: bool
) -> None:
    """Refuse fold surrogates that were brought along without the one that is deployed."""
    if surrogate is None and brought and not callable(train_surrogate):
        raise ValueError(
            f"surrogate=None and train_surrogate is a {type(train_surrogate).__name__}, which trains nothing, so "
            "there is no model whose error could be estimated; pass the trained surrogate."
        )


def check_brought(train_surrogate: object) -> None:
    """Refuse fold surrogates that were brought along and cannot be called, or would answer at random."""
    if isinstance(train_surrogate, TrainedFolds):
        for number, surrogate in enumerate(train_surrogate.surrogates):
            check_callable(surrogate, f"TrainedFolds.surrogates[{number}]")


def check_models(
    surrogate: Surrogate | None,
    train_surrogate: TrainSurrogate | FoldSurrogates | None,
    representation: Representation | None,
    error_functional: ErrorFunctional,
) -> None:
    """Refuse what cannot be called, and the absence of any model."""
    check_any_model(surrogate, train_surrogate, "x, y")
    brought = isinstance(train_surrogate, FoldSurrogates)
    check_not_only_folds(surrogate, train_surrogate, brought=brought)
    check_brought(train_surrogate)
    callables = {
        "surrogate": surrogate,
        "train_surrogate": None if brought else train_surrogate,
        "representation": representation,
        "error_functional": error_functional,
    }
    for name, function in callables.items():
        if function is not None:
            check_callable(function, name)


def check_parts(increment_model: object, safe_region: object) -> None:
    """Refuse an increment model or a safe region that is none, or a class where an object is wanted and vice versa."""
    model, region = increment_model, safe_region
    if isinstance(model, type) or not isinstance(model, IncrementModel):
        uncalled = getattr(model, "__qualname__", None)
        raise TypeError(
            f"increment_model={uncalled or repr(model)} cannot be fitted; "
            + (f"call it, increment_model={uncalled}(), or " if uncalled else "")
            + "pass an object such as increment_model=PowerLawIncrement(quantile=0.9)."
        )
    if isinstance(region, SafeRegion | DistanceRegion):
        raise TypeError(
            f"safe_region is a {type(region).__name__} that has its threshold already, but fit finds that; pass the "
            f"class, safe_region={type(region).__name__}."
        )
    if not isinstance(region, SafeRule):
        raise TypeError(
            f"safe_region={region!r} cannot be fitted; pass a class such as safe_region=DistanceRegion."
        )


def inputs_of(x: Array, y: Array, surrogate: Surrogate | None) -> Tensor:
    """The inputs in the precision of both, refused if they are no finite pairs, or of a kind the surrogate cannot take."""
    inputs, outputs = check_pairs(x, y)
    if isinstance(surrogate, nn.Module):
        check_kind(surrogate, x, "surrogate", "x")
        check_kind(surrogate, y, "surrogate", "y")
    return inputs.to(torch.promote_types(inputs.dtype, outputs.dtype))


def warn_if_few(increment_model: IncrementModel, n_units: int) -> None:
    """Warn of fewer independent points than can show the level at all."""
    quantile = getattr(increment_model, "quantile", None)
    if not isinstance(quantile, Real) or not 0 < float(quantile) < 1:
        return  # a model of the user's own need not know its level
    needed = n_needed(float(quantile))
    if n_units < needed:
        warn(
            f"n={n_units} independent points (or groups, or stretches of time), but at quantile={quantile} fewer than "
            f"{needed} cannot show the level; take the bounds as guesses, give more data, or choose a lower quantile for "
            "the increment model."
        )


def check_shapes(
    increment_model: IncrementModel,
    error_functional: ErrorFunctional,
    y: Array,
    embedding: Embedding,
) -> None:
    """Let the error functional and the increment model refuse the shapes of these pairs."""
    same = restore(to_tensor(y, "y"), y)
    error = to_tensor(error_functional(y, same), "the output of error_functional")
    if error.ndim == 0 or len(error) != len(y):
        raise ValueError(
            f"error_functional returned shape {tuple(error.shape)} for {len(y)} pairs; "
            "it must return one row per pair."
        )
    if isinstance(increment_model, ChecksShapes):
        parts = (embedding.z, error, embedding.normalized, y)
        increment_model.check_shapes(Shapes(*(tuple(part.shape[1:]) for part in parts)))


def check_repeats(surrogate: Surrogate, x: Array) -> None:
    """Refuse a surrogate that answers the same question in two ways: dropout hidden in a lambda, say."""
    check_same_twice(lambda: evaluate(surrogate, x, "surrogate"), "inputs")


def check_same_twice(answer: Callable[[], Tensor], what: str) -> None:
    """Refuse a surrogate whose answers to the same inputs, or states, differ."""
    first, second = (answer().nan_to_num() for _ in range(2))
    difference = float((first - second).abs().max())
    if difference > 1e-3 * float(first.abs().max()):
        raise ValueError(
            f"surrogate gave two answers to the same {what}, up to {difference:.3g} apart, so its error would be "
            "random; switch dropout and sampling off, or fix their seed."
        )


def check_queries(x: Array, shape: tuple[int, ...]) -> None:
    """Refuse queries of another shape than the rows that GeoQ was fitted on."""
    check_rows(x, "x", shape, "GeoQ was fitted on rows", "query")


def check_rows(
    rows: Array, name: str, shape: tuple[int, ...], fitted_on: str, one: str
) -> None:
    """Refuse rows of another shape than those fitted on, and none at all."""
    tensor = to_tensor(rows, name)
    if tensor.ndim == 0 or tuple(tensor.shape[1:]) != shape or not len(tensor):
        single = (
            f"; a single {one} needs a first dimension of 1"
            if tuple(tensor.shape) == shape
            else ""
        )
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but {fitted_on} of shape {shape}; "
            f"pass at least one {one} of that shape{single}."
        )
    check_finite(tensor, name)
