"""Constructor arguments of estimators, in the manner of scikit-learn, for dataclasses.

The estimators are dataclasses with ``get_params`` instead of subclasses of scikit-learn's ``BaseEstimator``. ``clone`` accepts
both, and importing scikit-learn would nearly double the time of ``import geoq``.
"""

from dataclasses import fields
from typing import Any

# Settings are shown in full up to this many characters, and by their type beyond.
LONGEST_SETTING = 100
_MODELS = ("surrogate", "train_surrogate")


def get_params(estimator: Any) -> dict[str, Any]:
    """The constructor arguments by name."""
    return {part.name: getattr(estimator, part.name) for part in fields(estimator)}


def set_params(estimator: Any, params: dict[str, Any]) -> None:
    """Change constructor arguments; refuse names that the constructor does not have."""
    known = get_params(estimator)
    for name, value in params.items():
        if name not in known:
            raise ValueError(
                f"{type(estimator).__name__} has no parameter {name!r}; it has {', '.join(known)}."
            )
        setattr(estimator, name, value)


def represent(estimator: Any, *, fitted: bool) -> str:
    """A repr that shows the models and all settings that differ from the defaults."""
    usual = get_params(type(estimator)(None, None))
    parts = [
        f"{name}={_name(value) if name in _MODELS else _short(value)}"
        for name, value in get_params(estimator).items()
        if name in _MODELS or repr(value) != repr(usual[name])
    ]
    state = "fitted" if fitted else "not fitted"
    return f"{type(estimator).__name__}({', '.join(parts)}), {state}"


def _name(part: object) -> str:
    """The name of a function or class; the name of the type of any other object."""
    if part is None:
        return "None"
    return str(getattr(part, "__qualname__", type(part).__name__))


def _short(value: object) -> str:
    text = _name(value) if hasattr(value, "__qualname__") else repr(value)
    flat = len(text) <= LONGEST_SETTING and "\n" not in text
    return text if flat else f"{_name(value)}(...)"
