"""Training steps recorded as CUDA graphs.

A GPU replays a recorded step as a whole. It then does not wait for the launch of each small operation.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

logger = logging.getLogger(__name__)

Step = Callable[[Tensor], None]
# Returns all tensors that a step changes (weights, buffers, the state of the optimiser) under names of any kind.
StepState = Callable[[], dict[Any, Tensor]]


def recorded(step: Step, rows: Int[Tensor, " *shape"], state: StepState) -> Step:
    """A function that replays a step as a CUDA graph, or the step itself if it does not run on a GPU or cannot be recorded.

    The step must do the same operations at every call, because decisions that Python takes during the recording are not taken
    again. All calls have row numbers of the same shape. The recording changes no tensor of the state.
    """
    if not rows.is_cuda:
        return step
    before = {name: value.clone() for name, value in state().items()}
    fixed, replay = rows.clone(), step
    # CUDA requires some steps on another stream before a recording; their changes are undone below.
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
        logger.info("the training steps are launched one by one: %s", exc)
    else:

        def replay(rows: Tensor) -> None:
            fixed.copy_(rows)
            graph.replay()

    for name, value in state().items():
        # Adam has no state before its first step.
        value.copy_(before[name]) if name in before else value.zero_()
    return replay
