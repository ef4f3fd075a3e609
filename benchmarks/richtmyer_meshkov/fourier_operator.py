"""The surrogate of the Richtmyer-Meshkov benchmark: a Fourier neural operator from the initial field to 12 later ones.

The network is the paper's (model appendix). Its transforms are products with fixed matrices, because only 24 of 512
modes are used: a truncated transform reads the field once, an FFT would read and write it several times. Fields have the
shape (n * n_y, n_x, channels), so that every step is a batched matrix product without a copy.
"""

import math

import torch
from torch import nn
from torch.nn import functional


def product(matrix, fields):
    """The matrix times each field. It is cast before it is expanded, because a cast would copy it for every field."""
    return torch.bmm(matrix.to(fields.dtype).expand(len(fields), -1, -1), fields)


def pointwise(layer, fields):
    """A 1x1 convolution, row by row: the gradient of its weights is then many short sums instead of one long sum."""
    weight = layer.weight.to(fields.dtype).T.expand(len(fields), -1, -1)
    return torch.bmm(fields, weight) + layer.bias.to(fields.dtype)


def waves(wave_numbers, n_points):
    """Cosine and sine of each wave number at each point of a periodic grid."""
    turns = wave_numbers[:, None] * torch.arange(n_points) % n_points
    angle = 2 * math.pi * turns.double() / n_points
    return angle.cos().float(), angle.sin().float()


def interpolation(n_from, n_to, like, *, periodic):
    """Matrix (n_to, n_from) that resizes a line of cells linearly, as ``interpolate`` does, or around the period."""
    cells = torch.arange(n_from, device=like.device)
    places = torch.arange(n_to, device=like.device) + 0.5
    places = places * (n_from / n_to) - 0.5
    if not periodic:
        places = places.clamp(0, n_from - 1)
    distance = (places[:, None] - cells).abs()
    if periodic:
        distance = torch.minimum(distance, n_from - distance)
    return (1 - distance).clamp(min=0).to(like.dtype)


class SpectralConvolution(nn.Module):
    """Mixes the channels of the lowest Fourier modes: wave numbers -m_y to m_y - 1 in y and 0 to m_x - 1 in x."""

    def __init__(self, width, modes, size):
        super().__init__()
        self.width, self.modes, self.size = width, modes, size
        (m_y, m_x), (n_y, n_x) = modes, size
        if 2 * m_y > n_y or 2 * m_x > n_x:
            raise ValueError(f"modes={modes}, but a grid of {size} has fewer; lower modes.")
        # Real and imaginary part, mode, channel in, channel out.
        self.weight = nn.Parameter(torch.randn(2, 2 * m_y * m_x, width, width) / width)
        cos, sin = waves(torch.cat([torch.arange(m_y), torch.arange(-m_y, 0)]), n_y)
        self._buffer("to_modes_y", torch.cat([cos, sin]) / n_y)
        self._buffer("from_modes_y", torch.cat([cos, sin]).T)
        cos, sin = waves(torch.arange(m_x), n_x)
        self._buffer("to_modes_x", torch.cat([cos, -sin]) / n_x)
        # The modes left out are the conjugates of all but the first.
        twice = torch.full((2 * m_x,), 2.0)
        twice[[0, m_x]] = 1.0
        self._buffer("from_modes_x", torch.cat([cos, -sin]).T * twice)

    def _buffer(self, name, matrix):
        self.register_buffer(name, matrix.contiguous(), persistent=False)

    def forward(self, fields):
        return self._to_grid(self._mixed(self._to_modes(fields)))

    def _to_modes(self, fields):
        """(n * n_y, n_x, width) to (modes, n, real then imaginary part of the channels)."""
        (m_y, m_x), n_y = self.modes, self.size[0]
        along_x = product(self.to_modes_x, fields)
        both = product(self.to_modes_y, along_x.view(-1, n_y, 2 * m_x * self.width))
        (cos_real, cos_imag), (sin_real, sin_imag) = (
            part.unbind(2) for part in both.view(-1, 2, 2 * m_y, 2, m_x, self.width).unbind(1)
        )
        spectrum = torch.cat([cos_real + sin_imag, cos_imag - sin_real], -1)
        return spectrum.flatten(1, 2).transpose(0, 1)

    def _mixed(self, spectrum):
        real, imag = self.weight.to(spectrum.dtype)
        rows = torch.cat([real, imag], 2), torch.cat([-imag, real], 2)
        return torch.bmm(spectrum, torch.cat(rows, 1))

    def _to_grid(self, spectrum):
        m_y, m_x = self.modes
        parts = spectrum.view(2 * m_y, m_x, -1, 2, self.width).permute(3, 2, 0, 1, 4)
        real, imag = parts.unbind(0)
        cos, sin = torch.stack([real, imag], 2), torch.stack([-imag, real], 2)
        both = torch.cat([cos, sin], 1).flatten(2)
        along_x = product(self.from_modes_y, both)
        return product(self.from_modes_x, along_x.view(-1, 2 * m_x, self.width))


class Block(nn.Module):
    def __init__(self, width, modes, size, dropout):
        super().__init__()
        self.convolution = SpectralConvolution(width, modes, size)
        self.local = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, fields):
        mixed = self.convolution(fields) + pointwise(self.local, fields)
        return self.dropout(functional.gelu(mixed))


class FourierOperator(nn.Module):
    """Logits of the heavy gas at later times from a binary initial field, in the precision of the input.

    Two departures from the paper: the interpolation in y is periodic, so that the network commutes with shifts in y, and
    the last interpolation is applied to the logits instead of the probabilities.
    """

    def __init__(
        self,
        n_times=12,
        width=64,
        modes=(24, 24),
        n_blocks=4,
        n_projection=128,
        internal=(256, 512),
        dropout=0.0,
    ):
        super().__init__()
        self.settings = {"n_times": n_times, "width": width, "modes": modes, "n_blocks": n_blocks}
        self.settings |= {"n_projection": n_projection, "internal": internal, "dropout": dropout}
        self.internal = internal
        self.lift = nn.Linear(3, width)
        blocks = [Block(width, modes, internal, dropout) for _ in range(n_blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.projection = nn.Linear(width, n_projection)
        self.output = nn.Linear(n_projection, n_times)
        # PyTorch's default initialisation shrinks the field by a factor of 12 over four blocks, which slows the training.
        for layer in (*(block.local for block in self.blocks), self.projection):
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, u0):
        if u0.ndim != 3:
            raise ValueError(f"u0 has shape {tuple(u0.shape)}; pass fields of shape (n, n_y, n_x).")
        fields = self.blocks(self._lifted(u0))
        hidden = functional.gelu(pointwise(self.projection, fields))
        return self._resized(product(self.output.weight, hidden.transpose(1, 2)), u0)

    def _lifted(self, u0):
        """First layer, applied to the field and its two coordinates; the coordinates are computed once for all fields."""
        n_y, n_x = self.internal
        to_y = interpolation(u0.shape[1], n_y, u0, periodic=True)
        to_x = interpolation(u0.shape[2], n_x, u0, periodic=False)
        resized = product(to_y, u0) @ to_x.T
        of_field, of_y, of_x = self.lift.weight.T
        y = torch.linspace(0, 1, n_y, device=u0.device)[:, None, None]
        x = torch.linspace(0, 1, n_x, device=u0.device)[:, None]
        position = (y * of_y + x * of_x + self.lift.bias).to(u0.dtype)
        lifted = resized[..., None] * of_field.to(u0.dtype) + position
        return lifted.flatten(0, 1)

    def _resized(self, logits, u0):
        """(n * internal y, n_times, internal x) to (n, n_times, y, x)."""
        n_times, (n_y, n_x) = logits.shape[1], self.internal
        to_x = interpolation(n_x, u0.shape[2], u0, periodic=False)
        to_y = interpolation(n_y, u0.shape[1], u0, periodic=True)
        along_x = (logits.flatten(0, 1) @ to_x.T).view(-1, n_y, n_times * u0.shape[2])
        resized = product(to_y, along_x).unflatten(2, (n_times, -1)).transpose(1, 2)
        return resized + self.output.bias.to(u0.dtype)[:, None, None]


def save(network, path):
    torch.save({"settings": network.settings, "weights": network.state_dict()}, path)


def load(path):
    """A saved network in eval mode on the CPU."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    # Its initial weights are drawn and overwritten; the caller's random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        network = FourierOperator(**saved["settings"])
    network.load_state_dict(saved["weights"])
    return network.eval()
