"""Simulations of the Richtmyer-Meshkov instability: a shock runs from air into sulfur hexafluoride.

    python -m benchmarks.richtmyer_meshkov.data --out FILE --seed 0 --n 1000   # continues an interrupted run
    python -m benchmarks.richtmyer_meshkov.data --out FILE --small             # 16 coarse simulations

A tube of height 1 and length 2 on 240 x 480 cells, periodic in y, open in x, in the frame in which the interface is at rest after
the shock has passed. Both gases start at pressure 1, air with density 1. Only the interface is random: 4 to 8 of the first 8 modes
with random phases and a root mean square of 0.02 to 0.05. The data are the cells where the volume fraction of the heavy gas exceeds
one half, at the start and at 12 equally spaced times. The last is t = 2, when the modes have rolled up into mushrooms.
"""

import argparse
import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from benchmarks.richtmyer_meshkov import euler, riemann
from benchmarks.richtmyer_meshkov.euler import Euler

SHAPE, SMALL_SHAPE = (240, 480), (32, 64)
# Simulations per batch, which limits the memory.
BATCH = 125


@dataclass(frozen=True)
class Tube:
    """The experiment without its interface: gases, shock, positions and times."""

    shape: tuple[int, int] = SHAPE
    gammas: tuple[float, float] = (1.4, 1.09)
    densities: tuple[float, float] = (1.0, 5.04)
    mach: float = 1.5
    # The interface is at most four times its root mean square away from its mean.
    shock: float = 0.78
    interface: float = 1.0
    duration: float = 2.0
    n_snapshots: int = 12
    # Vortices are up to a quarter faster than the waves of the plane problem.
    courant: float = 0.75

    @property
    def spacing(self):
        return 1 / self.shape[0]

    @property
    def solver(self):
        return Euler(self.gammas, self.spacing)

    @property
    def gases(self):
        """Shocked air, air and heavy gas, in the frame in which the shocked interface is at rest."""
        pairs = zip(self.densities, self.gammas, strict=True)
        air, heavy = (riemann.Gas(density, 0.0, 1.0, gamma) for density, gamma in pairs)
        shocked = air.behind_shock(self.mach)
        _, velocity = riemann.contact(shocked, heavy)
        return [replace(gas, velocity=gas.velocity - velocity) for gas in (shocked, air, heavy)]

    @property
    def steps_between_snapshots(self):
        """Number of time steps, from the fastest wave of the plane problem: moving air, or air shocked twice."""
        shocked, air, heavy = self.gases
        pressure, _ = riemann.contact(shocked, heavy)
        twice = riemann.Gas(shocked.density_at(pressure), 0.0, pressure, shocked.gamma)
        fastest = 2 * max(abs(gas.velocity) / 2 + gas.sound for gas in (shocked, air, twice))
        step = self.courant * self.spacing / fastest
        return math.ceil(self.duration / self.n_snapshots / step)

    @property
    def time_step(self):
        return self.duration / self.n_snapshots / self.steps_between_snapshots

    def fraction(self, interfaces, device="cpu", dtype=torch.float64, n_lines=16):
        """Fraction of each cell to the right of the interfaces; exact in x, mean of ``n_lines`` lines per cell in y."""
        n_rows, n_columns = self.shape
        y = (np.arange(n_rows * n_lines) + 0.5) / (n_rows * n_lines)
        edges = self.interface + np.stack([displaced(y) for displaced in interfaces])
        edges = torch.as_tensor(edges * n_rows, device=device, dtype=dtype)
        ends = torch.arange(1, n_columns + 1, device=device, dtype=dtype)
        lines = edges.reshape(-1, n_rows, n_lines, 1).unbind(2)
        return sum((ends - line).clamp(0, 1) for line in lines) / n_lines

    def start(self, interfaces, device, dtype):
        """The conserved state before the shock has met the interfaces."""
        z = self.fraction(interfaces, device, dtype)
        cells = torch.arange(self.shape[1], device=device)
        behind = (cells + 0.5 < self.shock / self.spacing).expand_as(z)
        shocked, air, heavy = self.gases

        def either(name):
            where_shocked = torch.full_like(z, getattr(shocked, name))
            return where_shocked.where(behind, getattr(air, name))

        m1, m2 = (1 - z) * either("density"), z * heavy.density
        u, p = either("velocity"), either("pressure")
        return self.solver.conserved((m1, m2, u, torch.zeros_like(u), p, z))


@dataclass(frozen=True)
class DataSet:
    """Heavy gas as one bit per cell (n, 1 + n_times, y, bytes), at the start and at the later times."""

    bits: np.ndarray
    seed: int
    tube: Tube

    @cached_property
    def fields(self):
        """Heavy gas as 0 and 1, (n, 1 + n_times, y, x)."""
        return np.unpackbits(self.bits, axis=-1, count=self.tube.shape[1])

    @property
    def u0(self):
        return self.fields[:, 0]

    @property
    def u(self):
        return self.fields[:, 1:]

    @property
    def checksum(self):
        return hashlib.sha256(np.ascontiguousarray(self.bits)).hexdigest()

    def save(self, path):
        """Write the bits, their checksum and the settings to one file without pickles."""
        made_with = json.dumps({"seed": self.seed, "tube": asdict(self.tube)})
        write(path, bits=self.bits, checksum=self.checksum, made_with=made_with)


def load(path):
    """The data set of a file; raises if the bits do not match the stored checksum."""
    with np.load(path) as file:
        bits, expected = file["bits"], str(file["checksum"])
        made_with = json.loads(str(file["made_with"]))
    tube = {k: tuple(v) if isinstance(v, list) else v for k, v in made_with["tube"].items()}
    found = DataSet(bits, made_with["seed"], Tube(**tube))
    if found.checksum != expected:
        raise ValueError(
            f"{path} was changed: its bits have checksum {found.checksum[:12]}..., but the stored checksum is {expected[:12]}...; "
            "run the simulations again."
        )
    return found


def write(path, **arrays):
    """Write a compressed file; an interrupted run leaves no incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)
    unfinished.replace(path)


def interface(seed, index):
    """The interface of one simulation: displacement as a function of y."""
    rng = np.random.default_rng([seed, index])
    modes = rng.choice(np.arange(1, 9), size=rng.integers(4, 9), replace=False)
    amplitudes = rng.uniform(0.2, 1, modes.size)
    phases = rng.uniform(0, 2 * np.pi, modes.size)
    amplitudes *= rng.uniform(0.02, 0.05) / np.sqrt((amplitudes**2).sum() / 2)
    return lambda y: np.cos(2 * np.pi * modes * y[:, None] + phases) @ amplitudes


def stepper(tube, *, compile):
    """One time step as a function of the state, compiled on request."""
    solver, dt = tube.solver, tube.time_step

    def step(state):
        return solver.step(state, dt)

    return torch.compile(step, fullgraph=True, dynamic=False) if compile else step


@torch.no_grad()
def run(tube, step, interfaces, device):
    """The bits of some simulations."""
    state = tube.start(interfaces, device, torch.float32)
    frames = [state[5] > 0.5]
    for _ in range(tube.n_snapshots):
        for _ in range(tube.steps_between_snapshots):
            state = step(state)
        frames.append(state[5] > 0.5)
    return np.packbits(torch.stack(frames, dim=1).cpu().numpy(), axis=-1)


def simulate(n, shape=SHAPE, seed=0, device="cpu", *, batch=BATCH, compile=None, parts=None):
    """The first n simulations of a seed; batches in the folder ``parts`` are read from there."""
    compile = torch.device(device).type == "cuda" if compile is None else compile
    tube, size = Tube(shape=tuple(shape)), math.ceil(n / math.ceil(n / batch))
    step, run_key = stepper(tube, compile=compile), key(tube, seed, device, size, compile)
    batches = []
    # All batches have one size, so that the step is compiled once.
    for first in range(0, n, size):
        path = parts and parts / f"{run_key}-{first:05d}.npz"
        if path and path.exists():
            batches.append(np.load(path)["bits"])
            continue
        interfaces = [interface(seed, first + i) for i in range(size)]
        batches.append(run(tube, step, interfaces, device))
        if path:
            write(path, bits=batches[-1])
            print(f"{min(first + size, n)} of {n} simulations", flush=True)
    return DataSet(np.concatenate(batches)[:n], seed, tube)


def key(tube, seed, device, size, compile):
    """Hash of the settings, the code and the device that the batches depend on."""
    files = (__file__, euler.__file__, riemann.__file__)
    code = [Path(file).read_text() for file in files]
    made_with = [asdict(tube), seed, [str(device), size, compile, torch.__version__], code]
    return hashlib.sha256(json.dumps(made_with).encode()).hexdigest()[:16]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, help="simulations; 1000, or 16 with --small")
    parser.add_argument("--small", action="store_true", help="coarse simulations")
    parser.add_argument("--batch", type=int, default=BATCH, help="simulations per batch")
    asked = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n, shape = (16, SMALL_SHAPE) if asked.small else (1000, SHAPE)
    parts = asked.out.with_name(f"{asked.out.name}.parts")
    made = simulate(asked.n or n, shape, asked.seed, device, batch=asked.batch, parts=parts)
    made.save(asked.out)
    shutil.rmtree(parts)
    print(f"{asked.out}: checksum {made.checksum}")


if __name__ == "__main__":
    main()
