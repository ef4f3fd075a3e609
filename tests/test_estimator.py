import copy
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import fresh
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.tree import DecisionTreeRegressor
from torch import nn
from torch.testing import assert_close

from geoq import (
    ClusterFolds,
    CombinedFolds,
    DistanceRegion,
    FieldIncrement,
    FieldScaleIncrement,
    GeoQ,
    GroupFolds,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    SensitivityMetric,
    StandardizedMetric,
    TemporalFolds,
    Training,
    TwoLawIncrement,
    WholeField,
    arrays,
    identity,
    norm_error,
)
from geoq.increments.factor import NoFactor

QUICK = NormScaledIncrement(training=Training(n_steps=60, check_every=20))
SCHEMES = [
    RandomFolds(3),
    ClusterFolds(3),
    NestedFolds(3),
    TemporalFolds(3, gap=4),
    CombinedFolds(RandomFolds(3), NestedFolds(3)),
]


def calibrate(problem, **settings):
    settings = {"folds": RandomFolds(3), "increment_model": QUICK, **settings}
    return GeoQ(None, problem.train, **settings).fit(problem.x, problem.y)


@pytest.mark.parametrize("folds", SCHEMES, ids=repr)
def test_the_estimate_is_the_anchor_error_plus_a_nonnegative_increment(problem, folds):
    assessment = calibrate(problem, folds=folds).assess(problem.queries)
    assert_close(assessment.error_hat, assessment.anchor_error + assessment.increment)
    assert (assessment.increment >= 0).all()


@pytest.mark.parametrize(
    "representation", [StandardizedMetric(), identity, lambda x: x[:, :1] ** 3]
)
def test_a_calibration_point_keeps_its_observed_error(problem, representation):
    """With one anchor and one support point psi is zero there, and g(0) = 0."""
    geoq = calibrate(problem, n_anchors=1, n_support=1, representation=representation)
    assert_close(geoq.bound(problem.x), geoq.error_)


def test_the_bound_grows_and_the_flag_falls_outside_the_data(problem):
    geoq = calibrate(problem, folds=CombinedFolds(RandomFolds(3), NestedFolds(3)))
    line = torch.linspace(0, 10, 11, device=problem.x.device, dtype=problem.x.dtype)
    assessment = geoq.assess(torch.stack([line, 0 * line], dim=1))
    assert assessment.error_hat[-1] > 5 * assessment.error_hat[0]
    assert assessment.safe[0]
    assert not assessment.safe[-1]


def test_coverage_is_near_the_level_where_queries_are_like_the_data(problem):
    geoq = calibrate(problem, increment_model=NormScaledIncrement())
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(500, 2, generator=generator, dtype=torch.float64).to(
        problem.x
    )
    error = (problem.truth(queries) - geoq.surrogate_(queries)).abs()
    covered = (error <= geoq.bound(queries)).double().mean().item()
    assert 0.88 < covered <= 1.0


def test_numpy_and_torch_give_the_same_answers_in_their_own_kind(problem):
    with_torch = calibrate(problem).assess(problem.queries)
    x, y, queries = (
        part.cpu().numpy() for part in (problem.x, problem.y, problem.queries)
    )
    geoq = GeoQ(None, problem.train, folds=RandomFolds(3), increment_model=QUICK).fit(
        x, y
    )
    with_numpy = geoq.assess(queries)
    for name in ("prediction", "error_hat", "safe", "support_score", "anchors"):
        theirs, mine = getattr(with_torch, name), getattr(with_numpy, name)
        assert isinstance(theirs, torch.Tensor)
        assert isinstance(mine, np.ndarray)
        np.testing.assert_allclose(mine, theirs.cpu().numpy(), rtol=1e-4, atol=1e-6)
    assert isinstance(with_numpy.features.displacement, np.ndarray)
    assert isinstance(geoq.bound(queries), np.ndarray)


def test_single_precision_stays_single(problem):
    geoq = GeoQ(None, problem.train, folds=RandomFolds(3), increment_model=QUICK)
    geoq.fit(problem.x.float(), problem.y.float())
    assert geoq.bound(problem.queries.float()).dtype == torch.float32


def test_a_given_surrogate_is_kept_and_never_retrained(problem):
    surrogate = problem.train(problem.x, problem.y)
    geoq = GeoQ(surrogate, None, folds=RandomFolds(3), increment_model=QUICK)
    assert geoq.fit(problem.x, problem.y).surrogate_ is surrogate


def test_by_default_the_units_of_the_inputs_do_not_matter(problem):
    """Another unit for one input changes nothing; under the identity it would."""
    unit = torch.tensor([1000.0, 1.0], device=problem.x.device, dtype=problem.x.dtype)

    def bounds(representation, scale):
        geoq = GeoQ(
            lambda x: problem.truth(x / scale) + 0.1,
            None,
            representation=representation,
            folds=RandomFolds(3),
            increment_model=QUICK,
        )
        return (
            geoq.fit(problem.x * scale, problem.y)
            .assess(problem.queries * scale)
            .anchors
        )

    metric = SensitivityMetric()
    assert torch.equal(bounds(metric, 1), bounds(metric, unit))
    assert not torch.equal(bounds(identity, 1), bounds(identity, unit))


def test_answers_do_not_depend_on_the_chunks(problem, monkeypatch):
    geoq = calibrate(problem)
    whole = geoq.assess(problem.queries)
    monkeypatch.setattr(arrays, "CHUNK_NUMBERS", 6)
    parts = geoq.assess(problem.queries)
    # The increment's network works in single precision, where products of other sizes round differently on a GPU.
    assert_close(parts.error_hat, whole.error_hat, rtol=1e-5, atol=1e-6)
    assert torch.equal(parts.anchors, whole.anchors)


def test_a_norm_gives_one_number_per_query(problem):
    geoq = calibrate(problem, error_functional=norm_error)
    assert geoq.bound(problem.queries).shape == (40,)


def test_vector_errors_have_one_bound_per_coordinate(problem):
    y = torch.cat([problem.y, 10 * problem.y], dim=1)
    geoq = GeoQ(None, problem.train, folds=RandomFolds(3), increment_model=QUICK)
    bound = geoq.fit(problem.x, y).bound(problem.queries)
    assert bound.shape == (40, 2)
    assert (bound[:, 1] > bound[:, 0]).double().mean() > 0.9


@pytest.mark.parametrize(
    ("grid", "channels_in", "channels_out"),
    [((16,), (), ()), ((16,), (2,), (3, 2)), ((6, 5), (1,), (4,))],
)
def test_fields_of_any_layout_run_from_end_to_end(
    grid, channels_in, channels_out, device, dtype
):
    generator = torch.Generator().manual_seed(0)
    shape = (60, *channels_in, *grid)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
    mean = x.reshape(60, -1, *grid).mean(dim=1)
    y = (
        mean.reshape(60, *(1,) * len(channels_out), *grid).expand(
            60, *channels_out, *grid
        )
        ** 2
    )
    model = FieldIncrement(
        n_spatial=len(grid),
        widths=(4, 8),
        training=Training(n_steps=20, check_every=10, batch_size=8),
    )
    geoq = GeoQ(
        None,
        lambda _x, y: lambda x: y.mean(dim=0).expand(len(x), *y.shape[1:]),
        folds=RandomFolds(2),
        increment_model=model,
    ).fit(x, y)
    assessment = geoq.assess(x[:7])
    assert assessment.error_hat.shape == (7, *channels_out, *grid)
    assert assessment.features.displacement.shape == (7, *channels_in, *grid)
    assert "mean error bound" in assessment.reason(0)


def test_scalar_inputs_and_outputs_need_no_second_dimension():
    x = np.linspace(0, 1, 50)
    geoq = GeoQ(lambda x: x, None, folds=RandomFolds(3), increment_model=QUICK).fit(
        x, x**2
    )
    assert geoq.bound(np.array([0.5, 2.0])).shape == (2,)


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
def test_groups_reach_the_folds_and_the_threshold(problem):
    groups = np.repeat(np.arange(6), 20)
    geoq = GeoQ(
        None, problem.train, folds=GroupFolds(), increment_model=QUICK, n_support=5
    )
    calibration = geoq.fit(problem.x, problem.y, groups=groups).calibration_
    assert calibration.position.tolist() == groups[calibration.point.cpu()].tolist()


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
def test_overlapping_windows_are_safe_with_a_gap_and_not_without(device):
    """Windows one step apart are near twins; without a gap they set a threshold that nothing new can meet."""
    time = torch.arange(300, dtype=torch.float64, device=device) * 0.05
    states = torch.stack([torch.sin(time * k + k) for k in (1.0, 1.7, 2.3, 3.1)], dim=1)
    x, y, new = states[:240], states[1:241], states[280:]

    def safe_fraction(gap):
        geoq = GeoQ(
            lambda x: x,
            None,
            folds=TemporalFolds(4, gap=gap),
            increment_model=QUICK,
            safe_region=SafeRegion(),
        )
        return geoq.fit(x, y).assess(new).safe.double().mean()

    assert safe_fraction(30) > safe_fraction(0)


def test_the_reason_names_anchors_distances_errors_and_threshold(problem):
    geoq = calibrate(problem, n_anchors=2)
    assessment = geoq.assess(problem.queries)
    reason = assessment.reason(3)
    for row, error in zip(
        assessment.anchors[3], assessment.observed_error[3], strict=True
    ):
        assert f"anchor row {int(row)}: observed error {float(error):.3g}" in reason
        assert_close(error, geoq.error_[row].mean())
    assert f"threshold {geoq.safe_region_.threshold:.3g}" in reason
    assert ("NOT safe" in reason) == (not assessment.safe[3])


def test_the_anchor_distances_are_those_in_representation_space(problem):
    geoq = calibrate(problem, n_anchors=2)
    assessment = geoq.assess(problem.queries)

    def nu(x):
        return geoq.metric_(geoq.coordinates_(x))

    expected = (nu(problem.queries)[:, None] - nu(problem.x)[assessment.anchors]).norm(
        dim=2
    )
    assert_close(assessment.anchor_distance, expected)


def test_the_reason_lists_at_most_five_anchors(problem):
    assessment = calibrate(problem, n_anchors=12).assess(problem.queries)
    assert "and 7 more anchors" in assessment.reason(0)


def test_fit_leaves_the_callers_increment_model_alone(problem):
    model = NormScaledIncrement(training=Training(n_steps=20, check_every=10))
    before = copy.deepcopy(vars(model))
    calibrate(problem, increment_model=model)
    assert vars(model) == before


def test_an_interrupted_fit_leaves_the_estimator_as_it_was(problem):
    geoq = calibrate(problem)
    before = geoq.bound(problem.queries)

    def interrupted(x, y):
        raise KeyboardInterrupt

    geoq.set_params(train_surrogate=interrupted)
    with pytest.raises(KeyboardInterrupt):
        geoq.fit(2 * problem.x + 1, problem.y)
    assert torch.equal(geoq.bound(problem.queries), before)


def test_clone_keeps_the_trained_surrogate(problem):
    network = fresh(nn.Linear, 2, 1)
    copied = clone(GeoQ(network, None, n_anchors=3))
    assert copied.n_anchors == 3
    assert torch.equal(copied.surrogate.weight, network.weight)


def test_an_increment_model_of_the_users_own_is_fifteen_lines(problem):
    from sklearn.ensemble import HistGradientBoostingRegressor

    class BoostedIncrement:
        """An upper quantile of the increment by boosted trees, for scalar errors."""

        quantile = 0.95

        def fit(self, calibration):
            trees = HistGradientBoostingRegressor(
                loss="quantile", quantile=0.95, max_iter=30, random_state=0
            )
            psi = calibration.features.flat.cpu().numpy()
            self.trees = trees.fit(psi, calibration.increment[:, 0].cpu().numpy())
            return self

        def __call__(self, features):
            increment = self.trees.predict(features.flat.cpu().numpy()).clip(min=0)
            return torch.from_numpy(increment[:, None]).to(features.support_distance)

    bound = calibrate(problem, increment_model=BoostedIncrement()).bound(
        problem.queries
    )
    assert (bound >= 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_anchors": 0}, "n_anchors=0: n_anchors must be an integer >= 1"),
        (
            {"n_anchors": 81},
            r"n_anchors=81, but fold 1 of 3 leaves only 80 points; lower n_anchors",
        ),
        ({"n_support": 100}, "n_support=100, but fold 1 of 3 leaves only 80 points"),
        (
            {"safe_region": SafeRegion(n_neighbors=120)},
            r"SafeRegion\(n_neighbors=120\), but a calibration point has only 119 others",
        ),
        ({"folds": ClusterFolds(121)}, "n_folds=121"),
        ({"representation": lambda x: x[:-1]}, "representation returned shape"),
        ({"representation": lambda x: x / 0}, r"representation\(x\)\[0, 0\] is"),
        (
            {"error_functional": lambda y, _: y.mean()},
            r"error_functional returned shape \(\) for 8 pairs",
        ),
        (
            {"increment_model": FieldIncrement(n_spatial=2)},
            "do not end in the same grid",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_settings_are_refused_before_anything_is_trained(
    problem, settings, message
):
    def never(x, y):
        pytest.fail("training started")

    with pytest.raises(ValueError, match=message):
        GeoQ(None, never, **{"folds": RandomFolds(3), **settings}).fit(
            problem.x, problem.y
        )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda x, y: (x.index_fill(0, torch.tensor([17]), torch.nan), y),
            r"x\[17, 0\] is nan \(2 of 240",
        ),
        (
            lambda x, y: (x, y.index_fill(0, torch.tensor([5]), torch.inf)),
            r"y\[5, 0\] is inf",
        ),
        (lambda x, y: (x, y[:-1]), "x has 120 rows and y has 119"),
        (lambda x, y: (x[:0], y[:0]), r"x has shape \(0, 2\) and holds no samples"),
    ],
)
def test_bad_data_are_refused_before_anything_is_trained(problem, spoil, message):
    def never(x, y):
        pytest.fail("training started")

    with pytest.raises(ValueError, match=message):
        GeoQ(None, never).fit(*spoil(problem.x.cpu(), problem.y.cpu()))


@pytest.mark.parametrize(
    ("surrogate", "kind", "message"),
    [
        (None, ValueError, "surrogate=None and train_surrogate=None"),
        (fresh(nn.Linear, 2, 1).train(), ValueError, "surrogate is in training mode"),
        (3, TypeError, "surrogate must be callable"),
        (
            lambda x: x,
            ValueError,
            r"surrogate returned shape \(120, 2\) for y of shape \(120, 1\)",
        ),
        (lambda x: x[:1], ValueError, "it must return one row per input"),
        (lambda x: x[:, :1] * torch.nan, ValueError, r"surrogate\(x\)\[0, 0\] is nan"),
    ],
    ids=["none", "training", "number", "shape", "rows", "nan"],
)
def test_bad_surrogates_are_refused(problem, surrogate, kind, message):
    with pytest.raises(kind, match=message):
        GeoQ(surrogate, None, folds=RandomFolds(3)).fit(problem.x, problem.y)


def test_a_surrogate_that_changes_its_mind_is_refused(problem):
    answers = iter(range(10**6))
    with pytest.raises(
        ValueError, match="surrogate gave two answers to the same inputs, up to 1 apart"
    ):
        GeoQ(lambda x: x[:, :1] * 0 + next(answers), None, folds=RandomFolds(3)).fit(
            problem.x, problem.y
        )


def test_a_recipe_that_refits_the_deployed_model_is_refused(problem):
    """All folds would share one model object, and the deployed surrogate would be the one of the last fold."""
    x, y = problem.x.cpu().numpy(), problem.y.cpu().numpy()
    tree = DecisionTreeRegressor(random_state=0)

    def train(x, y):
        fitted = tree.fit(x, y)
        return lambda x: fitted.predict(x)[:, None]

    with pytest.raises(
        ValueError,
        match=r"changed when the next one was trained.* build the model inside",
    ):
        GeoQ(train(x, y), train, folds=RandomFolds(3)).fit(x, y)


def linear(problem):
    return fresh(nn.Linear, 2, 1).to(problem.x)


def test_numpy_references_for_a_torch_module_are_refused_before_training(problem):
    def never(x, y):
        pytest.fail("training started")

    with pytest.raises(
        TypeError, match=r"but y is a NumPy array; .* y=torch.from_numpy\(y\)\."
    ):
        GeoQ(linear(problem), never).fit(problem.x, problem.y.cpu().numpy())


def test_a_module_of_another_dtype_is_refused_before_training(problem):
    def never(x, y):
        pytest.fail("training started")

    with pytest.raises(TypeError, match=r"surrogate has weights of torch.float16"):
        GeoQ(linear(problem).half(), never).fit(problem.x, problem.y)


@pytest.mark.parametrize("name", ["surrogate", "representation"])
def test_a_module_switched_to_training_after_the_fit_is_refused(
    problem, name, tmp_path
):
    module = linear(problem)
    surrogate = module if name == "surrogate" else problem.train(problem.x, problem.y)
    representation = module if name == "representation" else SensitivityMetric()
    geoq = GeoQ(
        surrogate,
        None,
        representation=representation,
        folds=RandomFolds(3),
        increment_model=QUICK,
    )
    geoq.fit(problem.x, problem.y)
    module.train()
    for ask in (
        lambda: geoq.assess(problem.queries),
        lambda: geoq.bound(problem.queries),
        lambda: geoq.conformalize(problem.x, problem.y),
        lambda: geoq.save(tmp_path / "random.geoq"),
    ):
        with pytest.raises(ValueError, match=rf"{name} is in training mode"):
            ask()
    module.eval()
    geoq.bound(problem.queries)


def test_masks_are_references_like_their_numbers(problem):
    mask = problem.y > 0
    bounds = [
        GeoQ(lambda x: x[:, :1], None, folds=RandomFolds(3), increment_model=QUICK)
        .fit(problem.x, y)
        .bound(problem.queries)
        for y in (mask, mask.to(problem.x))
    ]
    assert_close(*bounds)


def test_numpy_data_for_a_torch_module_are_refused():
    with pytest.raises(
        TypeError, match="surrogate is a torch module, but x is a NumPy array"
    ):
        GeoQ(fresh(nn.Linear, 2, 1), None).fit(
            np.random.default_rng(0).normal(size=(99, 2)), np.ones((99, 1))
        )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda q: q[:, :1],
            r"x has shape \(40, 1\), but GeoQ was fitted on rows of shape \(2,\)",
        ),
        (lambda q: q[0], "a single query needs a first dimension of 1"),
        (lambda q: q[:0], "pass at least one query"),
    ],
)
def test_bad_queries_are_refused(problem, spoil, message):
    geoq = calibrate(problem)
    with pytest.raises(ValueError, match=message):
        geoq.assess(spoil(problem.queries))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"increment_model": NormScaledIncrement},
            r"increment_model=NormScaledIncrement is a class; call it, inc.*NormScaledIncrement\(\)",
        ),
        ({"increment_model": 3}, "increment_model=3 has no quantile and no fit"),
        ({"safe_region": "distance"}, "safe_region='distance' has no fit"),
        (
            {"safe_region": DistanceRegion},
            "safe_region is the class DistanceRegion, but an object",
        ),
        (
            {"representation": SensitivityMetric},
            r"the class SensitivityMetric, .* pass SensitivityMetric\(\)",
        ),
        ({"representation": None}, "representation=None: .* leave it out"),
        ({"error_functional": "mae"}, "error_functional must be callable"),
        ({"folds": RandomFolds}, "folds is the class RandomFolds"),
        ({"representation": nn.Flatten}, "representation must be .* the class Flatten"),
        ({"surrogate": nn.Linear}, "surrogate must be .* the class Linear"),
    ],
    # Not str: what is passed shows its place in memory, which differs between processes.
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_parts_of_another_kind_are_refused_before_anything_is_trained(
    problem, settings, message
):
    def never(x, y):
        pytest.fail("training started")

    settings = {"surrogate": None, "train_surrogate": never} | settings
    with pytest.raises(TypeError, match=message):
        GeoQ(**settings).fit(problem.x, problem.y)


def test_the_absence_of_a_recipe_names_the_choice(problem):
    with pytest.raises(
        TypeError,
        match=r"pass a function train_surrogate\(x, y\).*, or None if the surr",
    ):
        GeoQ(problem.train(problem.x, problem.y))


def test_a_class_in_place_of_a_guarantee_is_refused(problem):
    with pytest.raises(TypeError, match="guarantee is the class WholeField, but"):
        calibrate(problem).conformalize(problem.x, problem.y, guarantee=WholeField)


def test_a_model_in_place_of_its_training_gets_the_hint(problem):
    class Ridge:
        def predict(self, x):
            return x

    with pytest.raises(
        TypeError, match=r"train_surrogate\(x, y\), got Ridge; pass lambda x, y"
    ):
        GeoQ(None, Ridge()).fit(problem.x, problem.y)


def test_settings_changed_after_the_fit_do_not_reach_the_file(problem, tmp_path):
    geoq = calibrate(problem, n_anchors=2)
    geoq.set_params(n_anchors=7, n_support=3).save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate_)
    assert loaded.n_anchors == 2
    assert torch.equal(loaded.bound(problem.queries), geoq.bound(problem.queries))


def test_safe_coverage_meets_its_level_without_retraining(device):
    """Each point is held out by three families of folds; a factor is validated only by points that it was not learned from."""
    generator = torch.Generator().manual_seed(0)
    x, new = (
        torch.randn(n, 3, generator=generator, dtype=torch.float64).to(device)
        for n in (200, 4000)
    )

    def truth(x, seed):
        noise = torch.randn(
            len(x), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        return x[:, 0] + 0.3 * torch.sin(3 * x[:, 1]) + 0.3 * noise.to(device)

    geoq = GeoQ(lambda x: x[:, 0], None).fit(x, truth(x, 1))
    assessment = geoq.assess(new)
    covered = (truth(new, 2) - new[:, 0]).abs() <= assessment.error_hat
    assert covered[assessment.safe].double().mean() > 0.93


def noisy(n, device, seed):
    """Inputs and outputs whose errors under the surrogate x_0 are all noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = x[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64).abs()
    return x.to(device), y.to(device)


def first(x):
    return x[:, 0]


def test_pairs_set_aside_make_the_bound_hold_at_its_level(device, tmp_path):
    """The errors of the calibration are half as large as the errors of the queries."""
    x, y = noisy(200, device, 0)
    geoq = GeoQ(first, None, folds=RandomFolds(5)).fit(x, (first(x) + y) / 2)
    before = geoq.assess(x)
    geoq.conformalize(*noisy(400, device, 1))
    new, truth = noisy(4000, device, 2)
    after = geoq.assess(new)
    covered = (truth - first(new)).abs() <= after.error_hat
    assert abs(covered[after.safe].double().mean() - 0.95) < 0.02
    assert_close(after.error_hat, after.anchor_error + after.increment)
    geoq.save(tmp_path / "scaled.geoq")
    loaded = GeoQ.load(tmp_path / "scaled.geoq", surrogate=first)
    assert torch.equal(loaded.bound(new), geoq.bound(new))
    geoq.conformalize(*noisy(400, device, 1))  # from the plain bound, not from itself
    assert torch.equal(loaded.bound(new), geoq.bound(new))
    assert (geoq.fit(x, (first(x) + y) / 2).bound(x) == before.error_hat).all()


def fields(n, device, seed):
    """Fields of noise, each with its own random amplitude."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = (
        torch.randn(n, 2, 6, 8, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    amplitude = torch.rand(n, 1, 1, 1, generator=generator, dtype=torch.float64).exp()
    return x.to(device), (amplitude * noise).to(device)


def of_fields(device):
    model = FieldScaleIncrement(factor=NoFactor())
    geoq = GeoQ(torch.zeros_like, None, folds=RandomFolds(5), increment_model=model)
    return geoq.fit(*fields(100, device, 0))


def test_whole_fields_are_covered_if_that_is_the_guarantee(device):
    """Nine of ten new fields have 95 % of their values within the bound; with a pointwise guarantee fewer do."""
    new, truth = fields(400, device, 2)

    def fraction(**guarantee):
        geoq = of_fields(device).conformalize(*fields(200, device, 1), **guarantee)
        assessment = geoq.assess(new)
        within = (truth.abs() <= assessment.error_hat).double().mean(dim=(1, 2, 3))
        return (within[assessment.safe] >= 0.95).double().mean()

    assert fraction(guarantee=WholeField(0.9)) > 0.85
    assert fraction() < 0.75


@pytest.mark.parametrize("size", [0.5, 2.0])
def test_conformal_factors_scale_bounds_below_the_anchor_error(device, size):
    geoq = of_fields(device)
    x, y = fields(100, device, 1)
    plain = geoq.assess(x)
    geoq.conformalize(x, size * y)
    finished = geoq.assess(x)
    factor = torch.where(
        plain.safe, geoq.conformal_factors_.safe, geoq.conformal_factors_.unsafe
    )
    scaled = factor[:, None, None, None] * plain.error_hat
    assert (plain.increment < 0).any()
    assert (geoq.conformal_factors_.safe > 1) == (size > 1)
    assert_close(finished.error_hat, scaled)


def test_too_few_safe_pairs_are_refused(device):
    x, y = noisy(200, device, 0)
    geoq = GeoQ(first, None, folds=RandomFolds(5)).fit(x, y)
    with pytest.raises(
        ValueError, match=r"19 safe pairs are needed, and there are \d+"
    ):
        geoq.conformalize(*noisy(12, device, 1))


def test_bounds_at_several_levels_cover_at_their_level_and_do_not_cross(device):
    geoq = GeoQ(first, None, folds=RandomFolds(5)).fit(*noisy(1000, device, 0))
    new, truth = noisy(4000, device, 1)
    bounds = geoq.bounds(new, (0.5, 0.95, 0.9))
    assert (bounds[0.5] <= bounds[0.9]).all()
    assert (bounds[0.9] <= bounds[0.95]).all()
    assert_close(bounds[0.95], geoq.bound(new))
    error = (truth - first(new)).abs()
    safe = geoq.assess(new).safe
    for level, bound in bounds.items():
        assert abs((error <= bound)[safe].double().mean() - level) < 0.06


def test_levels_may_come_in_an_array(problem):
    geoq = calibrate(problem)
    expected = geoq.bounds(problem.queries, (0.5, 0.9))
    for levels in (
        np.array([0.5, 0.9]),
        torch.tensor([0.5, 0.9], dtype=torch.float32),
    ):
        bounds = geoq.bounds(problem.queries, levels)
        assert_close(bounds, expected)


def test_one_level_alone_gets_the_hint(problem):
    with pytest.raises(TypeError, match=r"levels=0.9 must be a sequence"):
        calibrate(problem).bounds(problem.queries, 0.9)


def test_the_error_functional_comes_back_with_the_file(problem, tmp_path):
    geoq = calibrate(problem, error_functional=norm_error)
    geoq.save(tmp_path / "own.geoq")
    loaded = GeoQ.load(tmp_path / "own.geoq", surrogate=geoq.surrogate_)
    assert loaded.error_functional is norm_error
    geoq = calibrate(problem, error_functional=lambda y, p: norm_error(y, p))
    geoq.save(tmp_path / "users.geoq")
    loaded = GeoQ.load(tmp_path / "users.geoq", surrogate=geoq.surrogate_)
    with pytest.raises(ValueError, match="pass it to load as error_functional"):
        loaded.conformalize(problem.x, problem.y)


def test_a_number_of_folds_is_not_a_fold_scheme(problem):
    with pytest.raises(
        TypeError,
        match=r"folds=5 has no split, but folds must be a Folds; pass for example folds=RandomFolds",
    ):
        GeoQ(None, problem.train, folds=5).fit(problem.x, problem.y)


def test_lists_are_converted(problem):
    x, y = problem.x.numpy(), problem.y.numpy()

    def train(x, y):
        weights = np.linalg.lstsq(x, y, rcond=None)[0]
        return lambda x: x @ weights

    of_lists = GeoQ(None, train).fit(x.tolist(), y.tolist())
    assert (of_lists.bound(x.tolist()) == GeoQ(None, train).fit(x, y).bound(x)).all()


def test_an_unfitted_estimator_says_so(problem, tmp_path):
    for ask in (
        lambda geoq: geoq.assess(problem.x),
        lambda geoq: geoq.save(tmp_path / "never"),
    ):
        with pytest.raises(NotFittedError, match="call fit first"):
            ask(GeoQ(None, problem.train))


def test_an_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match="GeoQ has no parameter 'k'"):
        GeoQ(None, None).set_params(k=3)


def test_importing_geoq_needs_no_extra():
    """Matplotlib, GPyTorch, LightGBM, xarray and scikit-learn itself are imported only when they are needed."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'gpytorch', 'lightgbm', 'faiss', 'xarray'])); "
        "import geoq; print('sklearn' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    ("n", "quantile", "few"), [(18, 0.95, True), (19, 0.95, False), (18, 0.9, False)]
)
def test_fewer_points_than_the_level_needs_are_warned_of(problem, n, quantile, few):
    geoq = GeoQ(
        None,
        problem.train,
        folds=RandomFolds(3),
        increment_model=TwoLawIncrement(quantile),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        geoq.fit(problem.x[:n], problem.y[:n])
    messages = [str(w.message) for w in caught if "independent" in str(w.message)]
    assert len(messages) == few
    if few:
        assert "n=18 independent points" in messages[0]
        assert "quantile=0.95" in messages[0]


def test_the_repr_is_short_and_names_what_was_chosen(problem):
    wide = nn.Sequential(*(nn.ReLU() for _ in range(50))).eval()
    geoq = GeoQ(wide, problem.train, folds=RandomFolds(3), n_anchors=2)
    assert repr(geoq) == (
        "GeoQ(surrogate=Sequential, train_surrogate=Problem.train, "
        "folds=RandomFolds(n_folds=3, random_state=0), n_anchors=2), not fitted"
    )
    geoq = GeoQ(None, problem.train, increment_model=FieldIncrement())
    assert "increment_model=FieldIncrement(...)" in repr(geoq)
    assert repr(calibrate(problem)).endswith("), fitted")


def test_a_loaded_estimator_shows_the_folds_it_was_calibrated_with(problem, tmp_path):
    geoq = calibrate(problem)
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate_)
    loaded.save(tmp_path / "b.geoq")
    again = GeoQ.load(tmp_path / "b.geoq", surrogate=geoq.surrogate_)
    for estimator in (loaded, again):
        assert repr(estimator.folds) == repr(geoq.folds)
        assert f"folds={geoq.folds!r}" in repr(estimator)
    with pytest.raises(
        ValueError, match="a file stores only the name of the fold scheme"
    ):
        loaded.fit(problem.x, problem.y)


def test_what_load_is_given_must_be_callable(problem, tmp_path):
    class Ridge:
        def predict(self, x):
            return x

    calibrate(problem).save(tmp_path / "a.geoq")
    with pytest.raises(TypeError, match=r"got Ridge; pass surrogate=model.predict"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=Ridge())
    with pytest.raises(TypeError, match=r"as error_functional\(y, y_hat\), got str"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=first, error_functional="mse")


def test_a_reason_for_a_query_that_was_not_asked_names_the_range(problem):
    assessment = calibrate(problem).assess(problem.queries[:3])
    for query in (3, -4):
        with pytest.raises(IndexError, match=rf"query={query}, but 3 .* choose 0 to 2"):
            assessment.reason(query)
    assert (
        assessment.reason(-1).splitlines()[1:] == assessment.reason(2).splitlines()[1:]
    )


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "geoq", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage: geoq" in result.stdout
    assert "demo" in result.stdout
