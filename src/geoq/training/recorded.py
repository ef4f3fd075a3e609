"""Steps recorded as a CUDA graph: replayed as a whole, they do not wait for each of their small kernels to be launched."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

logger = logging.getLogger(__name__)

Step = Callable[[Tensor], None]
# All that a step changes (weights, buffers, what the optimiser remembers), by any name, as the tensors themselves.
Numbers = Callable[[], dict[Any, Tensor]]


def recorded(step: Step, rows: Int[Tensor, " *shape"], numbers: Numbers) -> Step:
    """The step for GPUs as a graph, or the step itself where it cannot be recorded; nothing is changed by the recording.

    A step must do the same operations at every call: what Python decides while it is recorded stays decided.
    """
    if not rows.is_cuda:
        return step
    before = {name: value.clone() for name, value in numbers().items()}
    fixed, replay = rows.clone(), step
    # Recording needs steps taken before on another stream; what they changed is put back below.
    with torch.cuda.device(rows.device):
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(3):
                    step(fixed)
        finally:
            current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(rows.device), torch.cuda.graph(graph):
            step(fixed)
    except RuntimeError as exc:
        logger.info("steps are launched one by one, not recorded: %s", exc)
    else:

        def replay(rows: Tensor) -> None:
            fixed.copy_(rows)
            graph.replay()

    for name, value in numbers().items():
        # Adam keeps nothing before its first step.
        value.copy_(before[name]) if name in before else value.zero_()
    return replay
