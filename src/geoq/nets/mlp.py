"""Fully connected networks, with the part that serves as phi."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


class MLP(nn.Sequential):
    """Hidden layers with ReLU, then a linear output.

    ``encoder`` ends with hidden layer number ``n_encoder_layers`` (all of them by default), ``head`` is the rest; the
    paper's Forrester surrogate is ``MLP(1, 1, hidden=(64, 64, 16, 32), n_encoder_layers=3)``.
    """

    def __init__(
        self,
        n_inputs: int,
        n_outputs: int,
        *,
        hidden: Sequence[int],
        n_encoder_layers: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        widths = [n_inputs, *hidden]
        layers = []
        for n_in, n_out in zip(widths, hidden, strict=False):
            layer = [nn.Linear(n_in, n_out), nn.ReLU()]
            layers.append(
                nn.Sequential(*layer, nn.Dropout(dropout))
                if dropout
                else nn.Sequential(*layer)
            )
        split = len(layers) if n_encoder_layers is None else n_encoder_layers
        encoder = nn.Sequential(*layers[:split])
        head = nn.Sequential(*layers[split:], nn.Linear(widths[-1], n_outputs))
        super().__init__(OrderedDict(encoder=encoder, head=head))
