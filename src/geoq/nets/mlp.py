"""Fully connected networks whose first layers can serve as the representation."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


class MLP(nn.Sequential):
    """Fully connected network: hidden layers with ReLU, then a linear output layer.

    ``encoder`` contains the first hidden layers and can serve as the representation phi; ``head`` contains all other layers. The
    example is the surrogate of the paper's Forrester problem.

    Args:
        n_inputs: number of inputs.
        n_outputs: number of outputs.
        hidden: width of each hidden layer.
        n_encoder_layers: number of hidden layers in ``encoder``; None puts all of them there.
        dropout: probability of dropout after each hidden layer; 0 adds no dropout layers.

    Example:
        >>> import torch
        >>> network = MLP(1, 1, hidden=(64, 64, 16, 32), n_encoder_layers=3)
        >>> x = torch.zeros(5, 1)
        >>> network(x).shape, network.encoder(x).shape
        (torch.Size([5, 1]), torch.Size([5, 16]))
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
            layer: list[nn.Module] = [nn.Linear(n_in, n_out), nn.ReLU()]
            if dropout:
                layer.append(nn.Dropout(dropout))
            layers.append(nn.Sequential(*layer))
        split = len(layers) if n_encoder_layers is None else n_encoder_layers
        encoder = nn.Sequential(*layers[:split])
        head = nn.Sequential(*layers[split:], nn.Linear(widths[-1], n_outputs))
        super().__init__(OrderedDict(encoder=encoder, head=head))
