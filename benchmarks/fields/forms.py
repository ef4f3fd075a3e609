"""Problems of other forms: a mesh, parameters to a field, and a field to a few numbers, with a reduced-order surrogate."""

import numpy as np
from scipy.sparse import coo_matrix, csc_matrix
from scipy.sparse.linalg import spsolve
from scipy.spatial import Delaunay
from scipy.spatial.distance import cdist

from benchmarks.fields.problems import DARCY, Problem, darcy, darcy_fields

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


_FORMS = (
    Problem("Poisson on a mesh", conductivities, {}, poisson),
    Problem("Plume of five parameters", plume_parameters, {}, plume),
    Problem("Three numbers of a Darcy flow", darcy_fields(), {}, outflow),
)
FORMS = {problem.name: problem for problem in _FORMS}
