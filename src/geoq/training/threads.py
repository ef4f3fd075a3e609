"""How many threads train a surrogate: one thread if its network and its data are small, because it gains nothing from more.

Measured on two cores with ten busy processes: 400 steps of a network with 5,000 weights took 69 s with two threads and 2.4 s with
one thread. Large networks, and models that are not torch modules, keep all threads.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from geoq.arrays import Rows, few_threads


def n_weights(surrogate: object) -> int | None:
    """The number of weights of the torch modules that a surrogate consists of; None without modules on the CPU.

    A module is found as the surrogate itself, in the object of a bound method, and in the closure of a function.
    """
    modules = [part for part in _parts(surrogate) if isinstance(part, nn.Module)]
    weights = {id(w): w for module in modules for w in module.parameters()}.values()
    if not weights or any(weight.device.type != "cpu" for weight in weights):
        return None
    return sum(weight.numel() for weight in weights)


def threads_for(
    n_weights: int | None, x: Rows | None = None
) -> AbstractContextManager[None]:
    """Use one thread while a small network is trained on few data.

    Args:
        n_weights: the number of weights; None if it is not available.
        x: the inputs, all of which a batch can contain; None if the batches of a small network are small.
    """
    if n_weights is None:
        return nullcontext()
    # An optimiser stores about four numbers for each weight.
    return few_threads(max(4 * n_weights, 0 if x is None else math.prod(x.shape)))


def _parts(surrogate: Any) -> Iterator[Any]:
    """The surrogate and the objects that it directly refers to."""
    if isinstance(surrogate, partial):
        yield from chain(
            _parts(surrogate.func), surrogate.args, surrogate.keywords.values()
        )
        return
    owner = getattr(surrogate, "__self__", surrogate)
    yield owner
    if not isinstance(owner, nn.Module):
        yield from getattr(owner, "__dict__", {}).values()
    for cell in getattr(surrogate, "__closure__", None) or ():
        yield cell.cell_contents
