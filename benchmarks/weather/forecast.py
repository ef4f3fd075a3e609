"""The surrogate of the weather benchmark: a U-Net from three past states to forty future ones."""

from dataclasses import dataclass, replace

import torch
from torch import nn

BATCH, LEARNING_RATE, CLIP = 16, 1e-3, 1.0
ROWS_AT_ONCE = 64


class Convolution(nn.Module):
    """A 3 x 3 convolution with periodic longitude and zeros beyond the poles; with repeated values some trainings diverged."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.inner = nn.Conv2d(n_in, n_out, kernel_size=3, padding=(1, 0))

    def forward(self, field):
        return self.inner(nn.functional.pad(field, (1, 1, 0, 0), mode="circular"))


def block(n_in, n_out, dropout):
    first, second = Convolution(n_in, n_out), Convolution(n_out, n_out)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Dropout(dropout))


class GlobeUNet(nn.Module):
    """The paper's encoder and decoder; ``widths`` are the channels per resolution, the last for the bottleneck."""

    def __init__(self, n_in, n_out, widths=(32, 64, 128, 256), dropout=0.1):
        super().__init__()
        down = zip((n_in, *widths[:-1]), widths, strict=True)
        up = zip(widths[:0:-1], widths[-2::-1], strict=True)
        self.down = nn.ModuleList(block(a, b, dropout) for a, b in down)
        self.up = nn.ModuleList(block(a + b, b, dropout) for a, b in up)
        self.output = nn.Conv2d(widths[0], n_out, kernel_size=1)

    def forward(self, field):
        # Half precision on a GPU.
        with torch.autocast(field.device.type, torch.bfloat16, enabled=field.is_cuda):
            skips = []
            for part in self.down:
                field = nn.functional.avg_pool2d(field, 2) if skips else field
                field = part(field)
                skips.append(field)
            for part, skip in zip(self.up, skips[-2::-1], strict=True):
                raised = nn.functional.interpolate(field, size=skip.shape[2:], mode="nearest")
                field = part(torch.cat([raised, skip], dim=1))
            return self.output(field).float()


@dataclass(frozen=True)
class Frame:
    """Standardisation of the states, and the forecast that the network corrects: ``centre + damping (last - centre)``."""

    centre: torch.Tensor  # (channel, lat or 1, lon or 1)
    scale: torch.Tensor  # (channel, 1, 1)
    damping: torch.Tensor  # (lead, channel, 1, 1)

    def seen(self, x):
        return (x - self.centre) / self.scale

    def first_guess(self, x):
        return self.damping * self.seen(x[:, -1:])

    def states(self, emitted):
        return self.centre + self.scale * emitted


@dataclass(frozen=True)
class Direct:
    """The paper's form: the network predicts the states, standardised per channel."""

    name = "direct"

    def fit(self, x, y):
        del x
        centre = y.mean(dim=(0, 1, 3, 4))[:, None, None]
        scale = y.std(dim=(0, 1, 3, 4))[:, None, None]
        return Frame(centre, scale, y.new_zeros(*y.shape[1:3], 1, 1))


@dataclass(frozen=True)
class Anomalies:
    """The network corrects damped persistence of the anomaly from each cell's mean."""

    name = "anomalies"

    def fit(self, x, y):
        centre = y.mean(dim=(0, 1))
        anomaly = y - centre
        scale = anomaly.square().mean(dim=(0, 1, 3, 4)).sqrt()[:, None, None]
        last = x[:, -1:] - centre
        product = (last * anomaly).sum(dim=(0, 3, 4))
        damping = product / last.square().sum(dim=(0, 3, 4))
        return Frame(centre, scale, damping[..., None, None])


FORMS = {form.name: form for form in (Anomalies(), Direct())}


@dataclass(frozen=True)
class Forecast:
    """A trained surrogate; ``network`` has the dropout layers."""

    network: nn.Module
    frame: Frame

    @torch.no_grad()
    def __call__(self, x):
        parts = [emitted(self.network, self.frame, part) for part in x.split(ROWS_AT_ONCE)]
        return torch.cat([self.frame.states(part) for part in parts])


def emitted(network, frame, x):
    guess = frame.first_guess(x)
    correction = network(frame.seen(x).flatten(1, 2))
    return guess + correction.unflatten(1, guess.shape[1:3])


def lead_weights(y):
    """From 1 at the first lead to 2 at the last."""
    return torch.linspace(1, 2, y.shape[1], device=y.device)[:, None, None, None]


@dataclass(frozen=True)
class TrainForecast:
    """The recipe: ``n_steps`` steps of Adam; cell means and damping are fitted to the given windows."""

    form: Direct | Anomalies
    n_steps: int
    seed: int = 0
    widths: tuple[int, ...] = (32, 64, 128, 256)

    def __call__(self, x, y):
        *_, (_, forecast) = self.stages(x, y, self.n_steps)
        return forecast

    def with_seed(self, random_state):
        return replace(self, seed=random_state)

    def stages(self, x, y, every):
        """Pairs of step and forecast after every ``every`` steps; the forecast is always the same object."""
        frame = self.form.fit(x, y)
        target, weight = frame.seen(y), lead_weights(y)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(self.seed)
            n_in, n_out = x[0, :, :, 0, 0].numel(), y[0, :, :, 0, 0].numel()
            network = GlobeUNet(n_in, n_out, self.widths).to(x.device)
            forecast = Forecast(network, frame)
            parameters = [*network.parameters()]
            optimizer = torch.optim.Adam(parameters, LEARNING_RATE, fused=True)
            # All batches are drawn before the first step, so that no step waits for the host.
            batches = self._batches(len(x)).to(x.device)
            for step, rows in enumerate(batches, start=1):
                network.train()
                optimizer.zero_grad()
                error = emitted(network, frame, x[rows]) - target[rows]
                (weight * error.square()).mean().backward()
                nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                if step % every == 0 or step == self.n_steps:
                    network.eval()
                    yield step, forecast

    def _batches(self, n_rows):
        generator = torch.Generator().manual_seed(self.seed)
        batch = min(BATCH, n_rows)
        n_passes = -(-self.n_steps * batch // n_rows)
        orders = [torch.randperm(n_rows, generator=generator) for _ in range(n_passes)]
        return torch.cat(orders)[: self.n_steps * batch].view(self.n_steps, batch)


def chosen_steps(recipe, x, y, *, gap, check_every, patience):
    """Number of steps with the smallest loss on the last fifth of the windows, with a gap before it.

    Random windows would have targets in common with the training windows, and their loss would never rise.
    """
    n_validation = round(0.2 * len(x))
    n_train = len(x) - n_validation - gap
    if n_train < 1:
        raise ValueError(f"{len(x)} windows leave none to train on; use more days.")
    weight = lead_weights(y)
    best_loss, best_step = float("inf"), 0
    for step, forecast in recipe.stages(x[:n_train], y[:n_train], check_every):
        error = (forecast(x[-n_validation:]) - y[-n_validation:]) / forecast.frame.scale
        loss = float((weight * error.square()).mean())
        if loss < best_loss:
            best_loss, best_step = loss, step
        elif step - best_step >= patience * check_every:
            break
    return best_step
