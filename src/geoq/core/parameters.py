"""Constructor arguments of estimators that are dataclasses, with the methods that scikit-learn's ``clone`` needs.

The estimators are not subclasses of scikit-learn's ``BaseEstimator``, because importing scikit-learn would nearly double the
time of ``import geoq``.
"""

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
# Settings are shown in full up to this many characters. Longer settings are shown by the name of their type.
LONGEST_SETTING = 100
_MODELS = ("surrogate", "train_surrogate")


def get_params(estimator: Any, deep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 (scikit-learn's signature)
    """The constructor arguments by name, as scikit-learn's ``clone`` needs them.

    Example:
        >>> from geoq import RandomFolds
        >>> get_params(RandomFolds(3))
        {'n_folds': 3, 'random_state': 0}
    """
    del deep
    return {part.name: getattr(estimator, part.name) for part in fields(estimator)}


def set_params(estimator: T, /, **params: Any) -> T:
    """Change constructor arguments; if one of the names is wrong, none is changed."""
    names = [*get_params(estimator)]
    for name in params:
        if name not in names:
            raise ValueError(
                f"{type(estimator).__name__} has no parameter {name!r}; it has {', '.join(names)}."
            )
    for name, value in params.items():
        setattr(estimator, name, value)
    return estimator


def represent(estimator: Any, *, fitted: bool) -> str:
    """The names of the two models, all settings that differ from the defaults, and whether the estimator is fitted."""
    defaults = get_params(type(estimator)(None, None))
    parts = [
        f"{name}={_name(value) if name in _MODELS else _short(value)}"
        for name, value in get_params(estimator).items()
        if name in _MODELS or repr(value) != repr(defaults[name])
    ]
    state = "fitted" if fitted else "not fitted"
    return f"{type(estimator).__name__}({', '.join(parts)}), {state}"


def _name(value: object) -> str:
    """The name of a function or class; the name of the type of any other object."""
    if value is None:
        return "None"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _short(value: object) -> str:
    text = _name(value) if hasattr(value, "__qualname__") else repr(value)
    fits = len(text) <= LONGEST_SETTING and "\n" not in text
    return text if fits else f"{_name(value)}(...)"
