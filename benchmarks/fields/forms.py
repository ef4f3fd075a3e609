"""Problems of other forms: a mesh, parameters to a field, and a field to a few numbers, with a reduced-order surrogate."""

import numpy as np
from scipy.sparse import coo_matrix, csc_matrix
from scipy.sparse.linalg import spsolve
from scipy.spatial import Delaunay
from scipy.spatial.distance import cdist

from benchmarks.fields.problems import (
    DARCY,
    Problem,
    burgers_fields,
    darcy,
    darcy_fields,
    random_fields,
)

# An L-shaped plate with irregular nodes, denser at the inner corner.
N_NODES = 300


def plate(n_nodes=N_NODES):
    """Coordinates of the nodes and the triangles between them."""
    rng = np.random.default_rng(0)
    corner = np.array([0.5, 0.5])
    candidates = rng.uniform(size=(40 * n_nodes, 2))
    inside = (candidates > corner).sum(axis=1) < 2
    density = np.exp(-2 * np.linalg.norm(candidates - corner, axis=1))
    dense = rng.uniform(size=len(candidates)) < density
    nodes = candidates[inside & dense][:n_nodes]
    triangles = Delaunay(nodes).simplices
    centre = nodes[triangles].mean(axis=1)
    return nodes, triangles[(centre > corner).sum(axis=1) < 2]


NODES, TRIANGLES = plate()


def _boundary(nodes=NODES, triangles=TRIANGLES):
    """The nodes of edges that belong to one triangle."""
    edges = np.sort(triangles[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2), axis=1)
    edge, count = np.unique(edges, axis=0, return_counts=True)
    on_boundary = np.zeros(len(nodes), dtype=bool)
    on_boundary[edge[count == 1].ravel()] = True
    return on_boundary


BOUNDARY = _boundary()


def conductivities(rng, n):
    """Gaussian fields of the logarithm of the conductivity at the nodes."""
    covariance = np.exp(-((cdist(NODES, NODES) / 0.25) ** 2)) + 1e-8 * np.eye(len(NODES))
    return (np.linalg.cholesky(covariance) @ rng.normal(size=(len(NODES), n))).T[:, None]


def poisson(x):
    """-div(exp(x) grad u) = 1 with u = 0 on the boundary, by linear finite elements."""
    corners = NODES[TRIANGLES]
    e1, e2 = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    twice = e1[:, 0] * e2[:, 1] - e1[:, 1] * e2[:, 0]
    sides = corners[:, [2, 0, 1]] - corners[:, [1, 2, 0]]
    local = np.einsum("tia,tja->tij", sides, sides) / (2 * abs(twice))[:, None, None]
    row, column = np.repeat(TRIANGLES, 3, axis=1), np.tile(TRIANGLES, (1, 3))
    load = np.zeros(len(NODES))
    np.add.at(load, TRIANGLES, np.repeat(abs(twice)[:, None] / 6, 3, axis=1))
    free, answers = ~BOUNDARY, []
    for field in x[:, 0]:
        stiffness = np.exp(field)[TRIANGLES].mean(axis=1)[:, None, None] * local
        shape = (len(NODES), len(NODES))
        matrix = coo_matrix((stiffness.ravel(), (row.ravel(), column.ravel())), shape)
        matrix, u = csc_matrix(matrix)[free][:, free], np.zeros(len(NODES))
        u[free] = spsolve(matrix, load[free])
        answers.append(u)
    return np.stack(answers)[:, None]


# A plume in the plane: place, width, wind and decay of a source.
def plume_parameters(rng, n):
    return rng.uniform([0.2, 0.2, 0.05, -1, 0], [0.8, 0.8, 0.15, 1, 1], size=(n, 5))


def plume(x):
    down, right = np.mgrid[0 : 1 : DARCY * 1j, 0 : 1 : DARCY * 1j]
    a, b, width, wind, decay = (part[:, None, None] for part in x.T)
    along = (right - b) * np.cos(wind) + (down - a) * np.sin(wind)
    across = (down - a) * np.cos(wind) - (right - b) * np.sin(wind)
    spread = width * np.sqrt(1 + 4 * np.maximum(along, 0))
    tail = np.where(along > 0, np.exp(-3 * decay * along), np.exp(-((along / width) ** 2)))
    return (tail * np.exp(-((across / spread) ** 2)) * width / spread)[:, None]


def outflow(x):
    """The mean and the largest pressure of a Darcy flow, and the flow through one side."""
    pressure = darcy(x)[:, 0]
    through = (np.exp(x[:, 0, 0]) * pressure[:, 0]).sum(axis=1)
    return np.stack([pressure.mean((1, 2)), pressure.max((1, 2)), through], axis=1)


def reduced(x, y, n_axes=24, ridge=1e-3):
    """Kernel ridge regression between the leading principal axes of the inputs and the outputs."""
    flat, mean = x.reshape(len(x), -1), x.reshape(len(x), -1).mean(axis=0)
    _, size, axes = np.linalg.svd(flat - mean, full_matrices=False)
    size = size / np.sqrt(len(x))
    kept = slice(0, min(n_axes, int((size > 1e-6 * size[0]).sum())))
    axes = axes[kept] / (size[0] if flat.shape[1] > n_axes else size[kept, None])
    z = (flat - mean) @ axes.T
    scale = np.median(cdist(z, z)) ** 2
    kernel = np.exp(-cdist(z, z, "sqeuclidean") / scale)
    target = y.reshape(len(y), -1)
    centre = target.mean(axis=0)
    weights = np.linalg.solve(kernel + ridge * np.eye(len(x)), target - centre)

    def surrogate(x):
        z_new = (x.reshape(len(x), -1) - mean) @ axes.T
        near = np.exp(-cdist(z_new, z, "sqeuclidean") / scale)
        return (centre + near @ weights).reshape(-1, *y.shape[1:])

    return surrogate


# Three problems that were written before the companion was run on them, and run once.
def phases(x, time=1.0, n_steps=200):
    """Allen-Cahn, u_t = 0.01 u_xx + u - u^3, on a periodic interval."""
    for _ in range(n_steps):
        curved = (np.roll(x, 1, 2) - 2 * x + np.roll(x, -1, 2)) * (x.shape[2] / 2 / np.pi) ** 2
        x = x + time / n_steps * (0.01 * curved + x - x**3)
    return x


def reaction(x, time=1.0, n_steps=100):
    """FitzHugh-Nagumo in a periodic square: a fast variable that diffuses, and a slow one."""
    u, v = x[:, 0], x[:, 1]
    for _ in range(n_steps):
        beside = sum(np.roll(u, shift, axis) for shift in (-1, 1) for axis in (1, 2)) - 4 * u
        change = 0.5 * beside + u - u**3 / 3 - v
        u, v = u + time / n_steps * change, v + time / n_steps * 0.3 * (u + 0.7 - 0.8 * v)
    return np.stack([u, v], axis=1)


def reagents(rng, n):
    parts = [random_fields(rng, n, (16, 16), 3.0) for _ in range(2)]
    return 1.5 * np.stack(parts, axis=1)


def media(rng, n):
    """Logarithm of the square of the speed, and the displacement at the start."""
    return np.stack([0.4 * random_fields(rng, n, (64,), 2.0), random_fields(rng, n, (64,), 3.0)], 1)


def wave(x, time=1.5, n_steps=150):
    """The displacement of a wave at rest in a medium whose speed depends on the place, on a periodic interval."""
    size, dt = 2 * np.pi / x.shape[2], time / n_steps
    stiffness, u, speed = np.exp(x[:, 0]), x[:, 1], np.zeros_like(x[:, 1])
    for _ in range(n_steps):
        force = np.roll(u, -1, 1) - 2 * u + np.roll(u, 1, 1)
        speed = speed + dt * stiffness * force / size**2
        u = u + dt * speed
    return u[:, None]


NEW = (
    Problem("Allen-Cahn", burgers_fields(), {}, phases),
    Problem("FitzHugh-Nagumo", reagents, {}, reaction, n_modes=4),
    Problem("Wave in a medium", media, {}, wave, in_time=False),
)
_FORMS = (
    Problem("Poisson on a mesh", conductivities, {}, poisson),
    Problem("Plume of five parameters", plume_parameters, {}, plume),
    Problem("Three numbers of a Darcy flow", darcy_fields(), {}, outflow),
)
FORMS = {problem.name: problem for problem in _FORMS}
NEW = {problem.name: problem for problem in NEW}
