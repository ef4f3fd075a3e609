"""Where errors and inputs lie: tables, the grid that the shapes determine, and meshes."""

import numpy as np
import pytest

from geoq import GeoQ, Grid, Mesh, RandomFolds, Table
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.data.domain import Layout, Shapes, layout_of


def shapes(inputs, error):
    return Shapes(z=inputs, error=error, inputs=inputs, outputs=error)


@pytest.mark.parametrize(
    ("inputs", "error", "cells"),
    [
        # fields to fields
        ((80,), (80,), (80,)),
        ((1, 64), (2, 64), (64,)),
        ((3, 9), (9,), (9,)),
        ((8, 12), (8, 12), (8, 12)),
        ((2, 6, 8), (2, 6, 8), (6, 8)),
        ((20, 64, 64), (20, 64, 64), (64, 64)),
        ((3, 32, 64), (4, 3, 32, 64), (32, 64)),
        ((2, 8, 8, 8), (2, 8, 8, 8), (8, 8, 8)),
        # parameters to fields
        ((3,), (80,), (80,)),
        ((5,), (1, 16, 16), (16, 16)),
        ((5,), (2, 8, 8, 8), (8, 8, 8)),
        # another resolution of the inputs
        ((1, 16, 16), (1, 32, 32), (32, 32)),
        # a few numbers for each field, which lie on no cells
        ((2, 64), (3,), (64,)),
        ((1, 16, 16), (), (16, 16)),
        ((1, 16, 16), (20,), (16, 16)),
        ((2, 8, 8, 8), (3,), (8, 8, 8)),
    ],
)
def test_the_shapes_determine_the_grid(inputs, error, cells):
    layout = layout_of(None, shapes(inputs, error))
    on_cells = error[-len(cells) :] == cells
    assert (layout.cells, layout.on_cells, layout.n_axes) == (
        cells,
        on_cells,
        on_cells * len(cells),
    )


@pytest.mark.parametrize(
    ("inputs", "error"), [((3,), ()), ((64,), ()), ((5,), (3,)), ((100,), (64,)), ((2, 3), (5,))]
)
def test_rows_of_numbers_are_rows_of_a_table(inputs, error):
    assert layout_of(None, shapes(inputs, error)) == layout_of(Table(), shapes(inputs, error))
    assert Layout().is_table


@pytest.mark.parametrize(("inputs", "error", "message"), [
    ((8, 8, 8), (8, 8, 8), r"8 channels on a grid of shape \(8, 8\), or a grid of"),
    ((10, 64), (10, 64), r"pass domain=Grid\(1\) or domain=Grid\(2\)"),
    ((2, 4, 64, 64), (1, 4, 64, 64), r"pass domain=Grid\(2\) or domain=Grid\(3\)"),
    ((80, 80), (80,), r"80 channels on a grid of shape \(80,\), or a grid"),
    ((24, 32, 2), (24, 32, 3), r"channels come first.*numpy\.moveaxis\(x, -1, 1\)"),
    ((24, 32, 3), (24, 32, 3), r"last axis is short.*pass domain=Grid\(3\) if"),
    ((100, 3), (100, 1), r"numpy\.moveaxis\(y, -1, 1\)\.$"),
])  # fmt: skip
def test_shapes_with_several_grids_raise(inputs, error, message):
    with pytest.raises(ValueError, match=message) as caught:
        layout_of(None, shapes(inputs, error))
    assert str(inputs) in str(caught.value)
    assert str(error) in str(caught.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Grid(4), r"Grid\(n_axes=4\).*choose 1, 2 or 3"),
    (lambda: Grid(2, periodic=(True,)), "pass a tuple of length 2"),
    (lambda: Mesh(np.zeros((3, 2))), "at least 8 nodes"),
    (lambda: Mesh(np.full((9, 2), np.nan)), "18 values that are not finite"),
    (lambda: Mesh(np.zeros((9, 2)), 0), "n_neighbors=0"),
    (lambda: Mesh("nodes"), r"has shape \(\), but it needs one row of coordinates for each"),
    (lambda: Grid(2).layout(shapes((3,), (64,))), r"Grid\(2\), but an error has shape \(64,\)"),
    (lambda: Mesh(np.eye(9)).layout(shapes((9,), (2, 8))), "interpolated to common nodes"),
])  # fmt: skip
def test_impossible_domains_and_shapes_that_do_not_fit_raise(unchecked, make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("shape", "n_axes", "channels_last"),
    [
        ((24, 32, 3), 2, True),
        ((5, 24, 32, 1), 2, True),
        ((100, 3), 1, True),
        ((3, 24, 32), 2, False),
        ((24, 3), 2, False),  # a thin grid without channels
        ((2, 100, 4), 2, False),  # a thin grid with two channels
        ((3, 16), 1, False),
        ((24, 32, 5), 2, False),
    ],
)
def test_shapes_that_look_like_channels_last_are_warned_of(recwarn, shape, n_axes, channels_last):
    Grid(n_axes).layout(shapes(shape, shape))
    assert len(recwarn) == channels_last
    if channels_last:
        order = (0, len(shape), *range(1, len(shape)))
        assert f"x.permute{order}" in str(recwarn[0].message)
        assert str(shape) in str(recwarn[0].message)


def test_the_domain_overrules_the_shapes_for_bound_and_region_alike():
    """Five channels on a line, or a plane of 5 x 40 cells."""
    x = np.random.default_rng(0).normal(size=(40, 5, 40)).cumsum(axis=-1)
    for domain in (Grid(1), Grid(2, periodic=(False, True)), Mesh(x[:2, 0].T)):
        model = FieldBound(factor=NoFactor())
        estimator = GeoQ(np.tanh, None, domain=domain, folds=RandomFolds(3), bound_model=model)
        fitted = estimator.fit(x, x).fitted_
        assert fitted.layout.domain == fitted.region.view.layout.domain == domain
        assert fitted.layout.cells == x.shape[-domain.n_axes :]


def test_meshes_are_equal_if_their_nodes_are_and_their_curve_visits_all_nodes():
    nodes = np.random.default_rng(5).uniform(size=(40, 2))
    assert Mesh(nodes) == Mesh(nodes.copy()) != Mesh(nodes, 5)
    assert hash(Mesh(nodes)) == hash(Mesh(nodes.copy()))
    order = Mesh(nodes).order
    assert np.sort(order).tolist() == list(range(40))
    steps = [
        np.linalg.norm(np.diff(given, axis=0), axis=1).mean() for given in (nodes[order], nodes)
    ]
    assert steps[0] < 0.6 * steps[1]
