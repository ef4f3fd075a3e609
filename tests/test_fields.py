"""The default bound of fields: scale, coefficient, edge of the data and learned factor."""

from dataclasses import replace

import numpy as np
import pytest
from made import LEVEL, at_distance, made_tuples
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GeoQ, Grid, GroupFolds, Mesh, RandomFolds, Training
from geoq.bounds.climatology import Climatology
from geoq.bounds.factor import FieldFactor, _validated
from geoq.bounds.fields import MIN_FRACTION, FieldBound, NoFactor, low_rank_scale
from geoq.bounds.network import Sight, displacement, inputs, prediction
from geoq.data.domain import Layout, Shapes
from geoq.metrics import pinball
from geoq.quantiles import inverse_cdf_quantile, pinball_loss

GRID = (6, 8)
PLANE = Layout(Grid(2), GRID, on_cells=True)
PLAIN = FieldBound(factor=NoFactor())
QUICK = FieldFactor(
    widths=(8,),
    n_splits=3,
    training=Training(n_steps=60, batch_size=16, learning_rate=1e-2, check_every=20),
)
SIZES = np.array([1.0, 3.0, 0.2, 10.0])


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# The scale


def separable():
    """The size of the channel times a map of 6 x 8 cells."""
    return SIZES[:, None, None] * np.exp(2 * uniform(*GRID, seed=1))


def separable_errors(n=30, seed=2):
    """Errors whose 0.95 quantile is 0.95 times the separable scale."""
    return separable() * uniform(n, 4, *GRID, seed=seed)


def scale_of(error, rank=3, quantile=LEVEL, weight=None, n_axes=2):
    weight = np.full(len(error), 1 / len(error)) if weight is None else weight
    return low_rank_scale(error.__getitem__, weight, error.shape[1:], n_axes, quantile, rank)


def test_a_tuple_of_weight_3_counts_as_three_tuples_and_an_error_of_nan_does_not_count():
    error = uniform(7, 2, 3)
    weight = np.array([3.0, 1, 1, 1, 1, 1, 1])
    repeated = scale_of(np.concatenate([error[:1], error[:1], error]), 1, 0.7, n_axes=1)
    assert_allclose(scale_of(error, 1, 0.7, weight, n_axes=1), repeated)
    absent = np.concatenate([error[:1], error[:1], error, np.full_like(error, np.nan)])
    assert_allclose(scale_of(absent, 1, 0.7, n_axes=1), repeated)


@pytest.mark.parametrize("seed", range(3))
def test_a_low_rank_scale_is_more_accurate_than_a_scale_for_each_cell(seed):
    """30 tuples with normal errors, whose 0.95 quantile is 1.96 times the scale."""
    error = separable() * abs(normal(30, 4, *GRID, seed=seed))

    def relative_error(scale):
        return np.sqrt((np.log(scale / (1.96 * separable())) ** 2).mean())

    low_rank = relative_error(scale_of(error, 1))
    assert low_rank < 0.1
    assert low_rank < 0.6 * relative_error(inverse_cdf_quantile(error, LEVEL))


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_coefficient_of_each_channel_minimises_its_pinball_loss(rank):
    error = separable_errors()
    scale = scale_of(error, rank)

    def loss(factor):
        return pinball_loss(error, factor * scale, LEVEL).mean(axis=(0, 2, 3))

    for factor in (0.9, 0.99, 1.01, 1.1):
        assert (loss(1.0) <= loss(factor)).all()


def test_scales_of_cells_and_channels_without_errors_are_small_but_positive():
    error = separable_errors()
    error[:, 1, 2, 3] = 0
    scale = scale_of(error, 4)
    assert 0.1 * MIN_FRACTION < scale[1, 2, 3] / scale[1].mean() < 10 * MIN_FRACTION
    error[:, 3] = 0
    for unit in (1e-9, 1.0, 1e9):
        scale = scale_of(unit * error)
        assert (scale[3] > 0).all()
        assert scale[3].max() < 0.1 * scale[:3].mean(axis=(1, 2)).min()
    rare = (uniform(200, 1, *GRID, seed=5) < 0.03) * uniform(200, 1, *GRID)
    assert (scale_of(rare, 1) > 0).all()
    assert_allclose(scale_of(np.zeros((10, 2, *GRID))), MIN_FRACTION)


# The bound without a factor


def fields(n=60, seed=0, unit=1.0):
    """Exponentially distributed errors with a map that both channels have in common."""
    scale = unit * np.exp(2 * uniform(*GRID, seed=99))
    error = -scale * np.log(uniform(n, 2, *GRID, seed=seed + 1))
    return made_tuples(error, 0 * error, distance=1 + uniform(n, seed=seed))


def test_inside_the_data_the_bound_is_a_multiple_of_the_scale_and_beyond_it_rises_with_the_steepest_slope():
    tuples = fields()
    bound = PLAIN.fit(tuples, LEVEL)
    inside = tuples.relation.support_distance <= bound.edge
    ratio = bound(tuples.features)[inside] / scale_of(tuples.error)
    assert_allclose(ratio, ratio.mean())
    other = replace(tuples.features, anchor_error=tuples.error)
    assert_array_equal(bound(other), bound(tuples.features))
    tuples = fields()
    bound = PLAIN.fit(tuples, LEVEL)
    far, farther = (bound(at_distance(tuples.features, d)) for d in (5.0, 6.0))
    slope = np.sort(tuples.error / tuples.relation.support_distance[:, None, None, None], axis=0)
    assert_allclose(farther - far, np.broadcast_to(2 * slope[56], far.shape))


def test_the_bound_covers_new_fields_whatever_does_not_count():
    queries = fields(200, seed=50)
    bound = PLAIN.fit(fields(200), LEVEL)
    assert 0.93 < (queries.error <= bound(queries.features)).mean() < 0.98
    tuples, queries = fields(200), fields(200, seed=50)
    tuples.errors[uniform(200, 2, *GRID) < 0.5] = np.nan
    tuples.errors[:, :, 0] = np.nan
    exact = np.isnan(tuples.errors).all(axis=0)
    tuples = replace(tuples, points=replace(tuples.points, exact=exact))
    bound = PLAIN.fit(tuples, LEVEL)(queries.features)
    assert not bound[:, exact].any()
    assert 0.93 < (queries.error <= bound)[:, ~exact].mean() < 0.98


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_a_channel_without_errors_does_not_change_the_coverage_of_the_others(unit):
    tuples = fields(unit=unit)
    tuples.errors[:, 1] = 0
    bound = PLAIN.fit(tuples, LEVEL)(tuples.features)
    assert 0.94 < (tuples.error <= bound)[:, 0].mean() < 0.98
    assert (bound[:, 1].mean(axis=0) < 0.01 * bound[:, 0].mean(axis=0)).all()


def test_rows_of_a_table_raise():
    x = normal(40, 3)
    with pytest.raises(ValueError, match=r"bound_model=FieldBound is for fields, but .* \(3,\)"):
        GeoQ(lambda x: x, None, bound_model=FieldBound()).fit(x, x)


# The factor


def tuples_of(x, error, **settings):
    return made_tuples(error, x, distance=1 + uniform(len(x), seed=7), **settings)


def driven(n=120, seed=0, grid=GRID, strength=1.0, **settings):
    """In channel 0 the size of the error is exp of the first input field; in channel 1 it is random."""
    x = normal(n, 2, *grid, seed=seed)
    drive = np.exp(strength * x[:, 0])
    size = np.stack([drive, np.ones_like(drive)], axis=1)
    return tuples_of(x, size * abs(normal(n, 2, *grid, seed=seed + 1)), **settings)


def noise(n=120, seed=0):
    """Errors that do not depend on the inputs."""
    return tuples_of(normal(n, 2, *GRID, seed=seed), abs(normal(n, 2, *GRID, seed=seed + 1)))


def fit(tuples, factor=QUICK):
    return FieldBound(factor=factor).fit(tuples, LEVEL)


def loss_by_channel(bound, tuples):
    missed = pinball_loss(tuples.error, bound(tuples.features), LEVEL)
    return np.moveaxis(missed, 1, 0).reshape(2, -1).mean(axis=1)


BOUND = fit(driven())
QUERIES = driven(200, seed=100)


@pytest.mark.parametrize("grid", [GRID, (12,)])
def test_the_factor_lowers_the_loss_only_in_the_channel_that_the_inputs_determine(grid):
    tuples, queries = driven(grid=grid), driven(200, seed=100, grid=grid)
    learned, plain = (loss_by_channel(fit(tuples, f), queries) for f in (QUICK, NoFactor()))
    assert learned[0] < 0.7 * plain[0]
    assert learned[1] < 1.02 * plain[1]


def test_the_factor_covers_new_queries_and_does_not_raise_the_loss_of_noise():
    covered = (QUERIES.error <= BOUND(QUERIES.features)).mean(axis=(0, 2, 3))
    assert ((covered > 0.93) & (covered < 0.98)).all()
    queries = noise(200, seed=100)
    learned, plain = (loss_by_channel(fit(noise(), f), queries) for f in (QUICK, NoFactor()))
    assert (learned < 1.02 * plain).all()


def test_a_factor_is_learned_from_the_errors_that_count():
    tuples = driven()
    tuples.errors[uniform(*tuples.errors.shape) < 0.3] = np.nan
    learned = fit(tuples)
    assert learned.factor is not None
    assert loss_by_channel(learned, QUERIES)[0] < 1.1 * loss_by_channel(BOUND, QUERIES)[0]


def test_the_same_random_state_gives_the_same_bounds_and_another_gives_others():
    features = QUERIES[:20].features
    other = replace(QUICK, training=replace(QUICK.training, random_state=1))
    assert_array_equal(fit(driven())(features), BOUND(features))
    assert (fit(driven(), other)(features) != BOUND(features)).any()


@pytest.mark.parametrize("far", [10.0, 1e3, 1e6])
def test_factors_far_from_the_data_stay_in_the_range_of_held_out_tuples(far):
    """Without limits, inputs that are a million times larger would have a factor of exp(1e6)."""
    features, one = QUERIES[:5].features, np.ones((5, 96))
    factor = BOUND.factor(replace(features, inputs=far * features.inputs), one).reshape(5, 2, 48)
    near = BOUND.factor(driven().features, np.ones((120, 96))).reshape(120, 2, 48)
    # The limits are the range of the single networks, which is wider than the range of their mean.
    assert (factor.max(axis=(0, 2)) < 3 * near.max(axis=(0, 2))).all()
    assert (factor.min(axis=(0, 2)) > near.min(axis=(0, 2)) / 3).all()
    farther = [BOUND.factor(at_distance(features, d), one) for d in (10.0, 1000.0)]
    assert_array_equal(*farther)


@pytest.mark.parametrize(("strength", "exponents"), [(-1, [0.0]), (1, [0.75, 1.0])])
def test_held_out_tuples_choose_the_exponent_of_a_channel(strength, exponents):
    """It is near 1 if they resemble the training tuples, and 0 if their errors depend on the inputs in the opposite way."""
    tuples, parts = driven(90, seed=100, strength=strength), np.split(np.arange(90), 3)
    factor, _ = _validated(BOUND.factor, tuples, parts, BOUND.plain, LEVEL)
    assert factor.exponent[0] in exponents


@pytest.mark.parametrize("reach", [0, 1, 5, 17])
@pytest.mark.parametrize("n_splits", [2, 5])
def test_training_times_are_farther_than_the_reach_from_validation_times(reach, n_splits):
    """100 times in random order, with two tuples each."""
    position = np.random.default_rng(0).permutation(200) % 100
    tuples = driven(200, position=position, reach=reach)
    splits = replace(QUICK, n_splits=n_splits).splits(tuples)
    validated = np.concatenate([held_out for _, held_out in splits])
    assert sorted(validated.tolist()) == list(range(200))
    for rows, held_out in splits:
        assert abs(position[rows][:, None] - position[held_out]).min() > reach
        # All tuples beyond the reach are used for training.
        assert len(rows) + len(held_out) >= 200 - 2 * 2 * reach


@pytest.mark.parametrize("n_splits", [2, 5])
def test_tuples_of_one_point_are_in_the_same_part(n_splits):
    tuples = replace(driven(), point=np.arange(120) % 40)
    splits = replace(QUICK, n_splits=n_splits).splits(tuples)
    assert sorted(np.concatenate([own for _, own in splits]).tolist()) == list(range(120))
    for rows, held_out in splits:
        assert not set((rows % 40).tolist()) & set((held_out % 40).tolist())
        assert len(rows) + len(held_out) == 120


@pytest.mark.parametrize(
    "tuples", [driven(position=np.arange(120), reach=200), driven(18)], ids=["dependent", "few"]
)
def test_no_factor_is_learned_if_all_times_depend_on_each_other_or_tuples_are_few(tuples):
    bound = fit(tuples)
    assert bound.factor is None
    assert "no learned factor" in bound.describe()


def never(x, y):
    pytest.fail("a surrogate was trained before the shapes were checked")


@pytest.mark.parametrize(
    ("x_shape", "sees", "settings", "message"),
    [
        ((2, 8, 6), (inputs,), {"domain": Grid(2)}, r"row of the inputs has shape \(2, 8, 6\)"),
        ((48,), (inputs,), {}, r"inputs has shape \(48,\) and an error has shape .*remove inputs"),
        (
            (2, 6, 8),
            (inputs, displacement),
            {"representation": lambda x: x.reshape(len(x), -1)},
            r"row of the representation has shape \(96,\) and an error",
        ),
    ],
)
def test_fields_on_other_cells_raise_before_training(x_shape, sees, settings, message):
    model = FieldBound(factor=replace(QUICK, sees=sees))
    estimator = GeoQ(lambda x: np.zeros((len(x), 2, *GRID)), never, bound_model=model, **settings)
    with pytest.raises(ValueError, match=message):
        estimator.fit(normal(40, *x_shape), normal(40, 2, *GRID, seed=1))
    shapes = Shapes(z=(2, 6, 8), error=GRID, inputs=(2, 6, 8), outputs=(96,))
    Sight((inputs,), PLANE).check(shapes)
    with pytest.raises(ValueError, match=r"row of the outputs has shape \(96,\)"):
        Sight((inputs, prediction), PLANE).check(shapes)


# All forms of fields, through the estimator

NODES = np.random.default_rng(5).uniform(size=(40, 2))
BRIEF = FieldFactor(
    widths=(4,),
    dropout=0.0,
    n_splits=2,
    training=Training(n_steps=6, batch_size=8, check_every=3, learning_rate=1e-2),
)
FORMS = {
    "line": ((1, 16), (2, 16), None),
    "line without channels": ((80,), (80,), None),
    "plane": ((3, 6, 8), (6, 8), None),
    "volume": ((2, 5, 6, 5), (1, 5, 6, 5), None),
    "periodic volume": ((1, 5, 6, 5), (1, 5, 6, 5), Grid(3, (True, False, True))),
    "parameters to a volume": ((3,), (2, 5, 6, 5), None),
    "another resolution": ((1, 6, 8), (1, 12, 16), None),
    "field to a number": ((2, 6, 8), (), None),
    "volume to numbers": ((1, 5, 6, 5), (3,), None),
    "mesh": ((2, 40), (1, 40), Mesh(NODES)),
    "parameters to a mesh": ((3,), (2, 40), Mesh(NODES)),
    "mesh to a number": ((2, 40), (), Mesh(NODES)),
    "cloud in space": ((40,), (2, 40), Mesh(normal(40, 3))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_finite_bounds_and_a_file_gives_the_same(form, tmp_path):
    x_shape, y_shape, domain = FORMS[form]
    ones = (1,) * len(y_shape)
    x, y = normal(40, *x_shape), normal(40, *y_shape, seed=1)
    size = np.exp(x.reshape(40, -1)[:, 0]).reshape(-1, *ones)

    def mean(x):
        average = x.reshape(len(x), -1).mean(axis=1).reshape(-1, *ones)
        return np.broadcast_to(average, (len(x), *y_shape)).copy()

    model = FieldBound(factor=BRIEF, reference=Climatology())
    estimator = GeoQ(mean, None, folds=RandomFolds(3), domain=domain, bound_model=model)
    queries = normal(7, *x_shape, seed=2)
    bound = estimator.fit(x, size * y).bound(queries)
    assert bound.shape == (7, *y_shape)
    assert np.isfinite(bound).all()
    assert (bound >= 0).all()
    estimator.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=mean)
    assert_array_equal(loaded.bound(queries), bound)
    assert loaded.bound_model == model
    assert loaded.describe() == estimator.describe()


def test_a_function_of_the_user_is_not_stored(tmp_path):
    sees = (lambda features, bound: features.inputs,)
    x = normal(40, 1, *GRID)
    model = FieldBound(factor=replace(QUICK, sees=sees))
    estimator = GeoQ(lambda x: 0 * x, None, folds=RandomFolds(3), bound_model=model)
    estimator.fit(x, np.exp(x) * normal(40, 1, *GRID, seed=1))
    assert "learned from a function on" in estimator.describe()
    with pytest.raises(TypeError, match="a file cannot hold"):
        estimator.save(tmp_path / "a.geoq")


def through(domain, grid, *, n=80, factor=None, folds=None, **settings):
    """An estimator whose error in each cell has the size exp of the input there, and a function to draw such fields."""

    def draw(n, seed=0):
        x = normal(n, 1, *grid, seed=seed)
        return x, np.exp(x) * abs(normal(n, 1, *grid, seed=seed + 1))

    training = Training(n_steps=30, batch_size=8, learning_rate=2e-2, check_every=15)
    known = factor or replace(BRIEF, widths=(8,), training=training)
    how = {"folds": folds or RandomFolds(3), "bound_model": FieldBound(factor=known)}
    estimator = GeoQ(lambda x: 0 * x, None, domain=domain, **how)
    change = settings.pop("change", lambda rows: rows)
    x, y = draw(n)
    return estimator.fit(change(x), change(y), **settings), draw


@pytest.mark.parametrize(("grid", "domain"), [((5, 6, 5), None), ((40,), Mesh(NODES))], ids=["3-D", "mesh"])  # fmt: skip
def test_the_factor_lowers_the_loss_of_the_scale_of_each_cell(grid, domain):
    losses = []
    for factor in (None, NoFactor()):
        estimator, draw = through(domain, grid, factor=factor)
        x, y = draw(80, seed=10)
        losses.append(pinball(y, estimator.bound(x), LEVEL))
    assert losses[0] < 0.75 * losses[1]


def test_renumbered_nodes_have_the_same_bounds():
    """Regular nodes have many neighbours at the same distance."""
    regular = np.stack(np.meshgrid(np.arange(6.0), np.arange(6.0)), -1).reshape(-1, 2)
    order = np.random.default_rng(1).permutation(36)
    one, draw = through(Mesh(regular), (36,), n=40)
    other, _ = through(Mesh(regular[order]), (36,), n=40, change=lambda rows: rows[..., order])
    x, _ = draw(5, seed=10)
    assert one.fitted_.bound.factor is not None
    assert_allclose(one.bound(x)[..., order], other.bound(x[..., order]), rtol=1e-3)


def test_rolled_fields_have_rolled_bounds_on_periodic_axes():
    def difference(domain):
        (one, draw), (other, _) = (
            through(domain, (6, 9), n=40, change=lambda rows, k=k: np.roll(rows, k, 3))
            for k in (0, 2)
        )
        x, _ = draw(5, seed=10)
        return abs(np.roll(one.bound(x), 2, 3) / other.bound(np.roll(x, 2, 3)) - 1).max()

    assert difference(Grid(2, periodic=(False, True))) < 1e-3
    assert difference(Grid(2)) > 1e-2


def test_the_networks_see_prediction_and_companion_unless_points_depend_on_each_other():
    """Fold surrogates of time series differ systematically from the deployed surrogate."""
    estimator, _ = through(Grid(1), (24,))
    assert "from inputs and prediction and expected error on" in estimator.describe()
    groups = np.repeat(np.arange(20), 4)
    grouped, _ = through(Grid(1), (24,), folds=GroupFolds(3), groups=groups)
    assert "learned from inputs on" in grouped.describe()
