"""Where fields lie: the grid that the shapes determine, meshes, and answers for all forms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq import (
    FieldScaleIncrement,
    GeoQ,
    Grid,
    GroupFolds,
    Mesh,
    RandomFolds,
    Training,
)
from geoq.increments import FieldFactor, IndicatorIncrement
from geoq.increments.domain import layout_of
from geoq.increments.factor import NoFactor
from geoq.increments.shapes import Shapes
from geoq.metrics import pinball

BRIEF = FieldFactor(
    widths=(4,),
    dropout=0.0,
    n_splits=2,
    training=Training(n_steps=6, batch_size=8, check_every=3, learning_rate=1e-2),
)


def shapes(inputs, error):
    return Shapes(z=inputs, error=error, inputs=inputs, outputs=error)


@pytest.mark.parametrize(
    ("inputs", "error", "cells"),
    [
        # fields to fields
        ((64,), (64,), (64,)),
        ((1, 64), (2, 64), (64,)),
        ((2, 64), (2, 64), (64,)),
        ((3, 9), (9,), (9,)),
        ((1, 64), (50, 64), (64,)),
        ((8, 12), (8, 12), (8, 12)),
        ((24, 64), (24, 64), (24, 64)),
        ((2, 6, 8), (2, 6, 8), (6, 8)),
        ((3, 16, 16), (16, 16), (16, 16)),
        ((10, 16, 16), (1, 16, 16), (16, 16)),
        ((20, 64, 64), (20, 64, 64), (64, 64)),
        ((3, 32, 64), (4, 3, 32, 64), (32, 64)),
        ((1, 8, 8, 8), (2, 8, 8, 8), (8, 8, 8)),
        ((2, 8, 8, 8), (2, 8, 8, 8), (8, 8, 8)),
        ((2, 4, 8, 8, 8), (2, 4, 8, 8, 8), (8, 8, 8)),
        # parameters to fields
        ((3,), (64,), (64,)),
        ((5,), (1, 16, 16), (16, 16)),
        ((5,), (2, 8, 8, 8), (8, 8, 8)),
        # another resolution of the inputs
        ((1, 16, 16), (1, 32, 32), (32, 32)),
    ],
)
def test_the_shapes_determine_the_grid(inputs, error, cells):
    layout = layout_of(None, shapes(inputs, error))
    assert (layout.cells, layout.on_cells) == (cells, True)


@pytest.mark.parametrize(
    ("inputs", "error", "cells"),
    [
        ((64,), (), (64,)),
        ((2, 64), (3,), (64,)),
        ((1, 16, 16), (), (16, 16)),
        ((1, 16, 16), (20,), (16, 16)),
        ((2, 8, 8, 8), (3,), (8, 8, 8)),
    ],
)
def test_a_few_numbers_for_each_field_lie_on_no_cells(inputs, error, cells):
    layout = layout_of(None, shapes(inputs, error))
    assert (layout.cells, layout.on_cells, layout.n_axes) == (cells, False, 0)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((8, 8, 8), (8, 8, 8), r"8 channels on a grid of shape \(8, 8\), or a grid of"),
        ((10, 64), (10, 64), r"pass domain=Grid\(1\) or domain=Grid\(2\)"),
        ((2, 4, 64, 64), (1, 4, 64, 64), r"pass domain=Grid\(2\) or domain=Grid\(3\)"),
        ((64, 64), (64,), r"64 channels on a grid of shape \(64,\), or a grid"),
        ((24, 32, 2), (24, 32, 3), r"channels come first.*numpy\.moveaxis\(x, -1, 1\)"),
        ((24, 32, 3), (24, 32, 3), r"last axis is short.*pass domain=Grid\(3\) if"),
        ((100, 3), (100, 1), r"numpy\.moveaxis\(y, -1, 1\)\.$"),
        ((5,), (3,), "there is no grid of at least 8 cells; put the grid last"),
        ((3,), (), "use an increment model for tables"),
    ],
)
def test_shapes_with_several_grids_or_none_are_refused(inputs, error, message):
    with pytest.raises(ValueError, match=message) as caught:
        layout_of(None, shapes(inputs, error))
    assert str(inputs) in str(caught.value)
    assert str(error) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(4), r"Grid\(n_axes=4\).*choose 1, 2 or 3"),
        (lambda: Grid(2, periodic=(True,)), "pass a tuple of length 2"),
        (lambda: Mesh(np.zeros((3, 2))), "at least 8 nodes"),
        (lambda: Mesh(np.full((9, 2), np.nan)), "18 values that are not finite"),
        (lambda: Mesh(np.zeros((9, 2)), 0), "n_neighbors=0"),
        (
            lambda: FieldScaleIncrement(factor=FieldFactor(domain=Grid(1))),
            "pass the domain to FieldScaleIncrement alone",
        ),
    ],
)
def test_impossible_domains_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("domain", "inputs", "error", "message"),
    [
        (Grid(2), (3,), (64,), r"domain=Grid\(2\), but an error has shape \(64,\)"),
        (Mesh(np.eye(9)), (9,), (2, 8), "interpolated to common nodes"),
    ],
)
def test_shapes_that_do_not_fit_the_domain_are_refused(domain, inputs, error, message):
    model = FieldScaleIncrement(domain=domain)
    with pytest.raises(ValueError, match=message):
        model.check_shapes(shapes(inputs, error))


def nodes(n=40):
    return np.random.default_rng(5).uniform(size=(n, 2))


def drawn(shape, n=40, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape))


FORMS = {
    "line": ((1, 16), (2, 16), None),
    "line without channels": ((16,), (16,), None),
    "plane": ((3, 6, 8), (6, 8), None),
    "volume": ((2, 5, 6, 5), (1, 5, 6, 5), None),
    "periodic volume": ((1, 5, 6, 5), (1, 5, 6, 5), Grid(3, (True, False, True))),
    "volume without channels": ((5, 6, 5), (5, 6, 5), Grid(3)),
    "parameters to a line": ((3,), (16,), None),
    "parameters to a volume": ((3,), (2, 5, 6, 5), None),
    "another resolution": ((1, 6, 8), (1, 12, 16), None),
    "field to a number": ((2, 6, 8), (), None),
    "volume to numbers": ((1, 5, 6, 5), (3,), None),
    "mesh": ((2, 40), (1, 40), Mesh(nodes())),
    "mesh without channels": ((40,), (40,), Mesh(nodes())),
    "parameters to a mesh": ((3,), (2, 40), Mesh(nodes())),
    "mesh to a number": ((2, 40), (), Mesh(nodes())),
    "cloud in space": (
        (40,),
        (2, 40),
        Mesh(np.random.default_rng(6).normal(size=(40, 3))),
    ),
}


def calibrated(x_shape, y_shape, domain, **settings):
    model = FieldScaleIncrement(domain=domain, factor=BRIEF)
    size = np.exp(drawn(x_shape).reshape(40, -1)[:, 0]).reshape(
        -1, *(1,) * len(y_shape)
    )
    geoq = GeoQ(
        lambda x: np.broadcast_to(
            x.reshape(len(x), -1).mean(1).reshape(-1, *(1,) * len(y_shape)),
            (len(x), *y_shape),
        ).copy(),
        None,
        folds=RandomFolds(3),
        increment_model=model,
        **settings,
    )
    return geoq.fit(drawn(x_shape), size * drawn(y_shape, seed=1))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_finite_bounds_of_the_shape_of_the_error(form, tmp_path):
    geoq = calibrated(*FORMS[form])
    x = drawn(FORMS[form][0], n=7, seed=2)
    answer = geoq.assess(x)
    assert answer.error_hat.shape == (7, *FORMS[form][1])
    assert np.isfinite(answer.error_hat).all()
    assert (answer.error_hat >= 0).all()
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate)
    assert np.array_equal(loaded.bound(x), answer.error_hat)
    assert loaded.increment_model == geoq.increment_model


def driven(grid, n=80, seed=0):
    """In each cell the size of the error is exp of the input; the surrogate returns 0."""
    x = drawn((1, *grid), n, seed)
    return x, np.exp(x) * abs(drawn((1, *grid), n, seed + 1))


def zero(x):
    return np.zeros_like(x)


def with_factor(domain, **settings):
    training = Training(n_steps=30, batch_size=8, learning_rate=2e-2, check_every=15)
    factor = replace(BRIEF, widths=(8,), training=training, **settings)
    return FieldScaleIncrement(domain=domain, factor=factor)


def fitted(model, x, y):
    geoq = GeoQ(zero, None, folds=RandomFolds(3), increment_model=model)
    return geoq.fit(x, y)


@pytest.mark.parametrize(
    ("grid", "domain"), [((5, 6, 5), None), ((40,), Mesh(nodes()))], ids=["3-D", "mesh"]
)
def test_the_factor_lowers_the_loss_of_the_scale_of_each_cell(grid, domain):
    x, y = driven(grid)
    x_new, y_new = driven(grid, seed=10)
    plain = FieldScaleIncrement(domain=domain, factor=NoFactor())
    learned, scale = (
        pinball(abs(y_new), fitted(model, x, y).bound(x_new), 0.95)
        for model in (with_factor(domain), plain)
    )
    assert learned < 0.75 * scale


def test_renumbered_nodes_have_the_same_bounds():
    """Regular nodes have many neighbours at the same distance."""
    regular = np.stack(np.meshgrid(np.arange(6.0), np.arange(6.0)), -1).reshape(-1, 2)
    order = np.random.default_rng(1).permutation(36)
    x, y = driven((36,), n=40)
    answer = fitted(with_factor(Mesh(regular)), x, y)
    other = fitted(with_factor(Mesh(regular[order])), x[..., order], y[..., order])
    assert answer.increment_model_.factor_ is not None
    x_new, _ = driven((36,), n=5, seed=10)
    assert_close(
        answer.bound(x_new)[..., order],
        other.bound(x_new[..., order]),
        rtol=1e-3,
        atol=0,
    )


def test_rolled_fields_have_rolled_bounds_on_periodic_axes():
    x, y = driven((6, 7), n=40)
    x_new, _ = driven((6, 7), n=5, seed=10)
    axis = 3

    def difference(domain):
        answer, other = (
            fitted(with_factor(domain), np.roll(x, k, axis), np.roll(y, k, axis)).bound(
                np.roll(x_new, k, axis)
            )
            for k in (0, 2)
        )
        return abs(np.roll(answer, 2, axis) / other - 1).max()

    assert difference(Grid(2, periodic=(False, True))) < 1e-3
    assert difference(None) > 1e-2


def test_a_surface_has_no_gradient_across_it():
    """Values that change along a tilted plane only are seen with their slope."""
    plane = np.random.default_rng(0).uniform(size=(200, 2))
    tilted = np.stack([plane[:, 0], plane[:, 1], plane[:, 0] + plane[:, 1]], axis=1)
    (stencils,) = Mesh(tilted).stencils(1)
    values = torch.from_numpy(tilted[:, 0])[None, None]
    own, mean, *slope = stencils(values).double()[0]
    assert_close(own, values[0, 0])
    assert_close(mean, own, atol=0.1, rtol=0)
    # The gradient of the first coordinate within the plane is (2, -1, 1) / 3.
    ratio = torch.stack(slope) / slope[0]
    assert_close(
        ratio.mean(1), torch.tensor([1.0, -0.5, 0.5]).double(), atol=1e-3, rtol=0
    )


def test_wrong_cells_of_a_volume_and_of_a_mesh():
    training = Training(n_steps=20, batch_size=8, check_every=10)
    for grid, domain in (((5, 6, 5), None), ((40,), Mesh(nodes()))):
        model = IndicatorIncrement(
            0.8, domain=domain, widths=(4, 4), n_networks=1, training=training
        )
        x, y = driven(grid, n=40)
        geoq = fitted(model, x, (y > 2).astype(float))
        assert set(np.unique(geoq.bound(x))) <= {0.0, 1.0}


def test_the_networks_see_the_prediction_unless_points_depend_on_each_other():
    """Fold surrogates of time series differ systematically from the deployed surrogate."""
    x, y = driven((24,))
    groups = np.repeat(np.arange(20), 4)
    geoq = GeoQ(zero, None, folds=RandomFolds(3), increment_model=with_factor(None))
    assert "from inputs and prediction on" in geoq.fit(x, y).increment_model_.describe()
    geoq.folds = GroupFolds(3)
    geoq.fit(x, y, groups=groups)
    assert "learned from inputs on" in geoq.increment_model_.describe()
