import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from conftest import fresh
from safetensors.torch import save_file
from sklearn.linear_model import Ridge
from torch import nn

from geoq import (
    DistanceRegion,
    FieldIncrement,
    FieldScaleIncrement,
    GeoQ,
    IndicatorIncrement,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    SupportRegion,
    TemporalFolds,
    Training,
    TwoLawIncrement,
    WholeField,
    archive,
)
from geoq.increments import FieldFactor, inputs, log_bound
from geoq.surrogate import absolute_error, relative_norm_error

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))
NETWORK = fresh(nn.Linear, 2, 1).double()


class Tenth:
    """An increment model of the user, which a file does not contain."""

    quantile = 0.95

    def fit(self, calibration):
        return self

    def __call__(self, features):
        return features.norm[:, None] / 10


def surrogate(x):
    return (
        NETWORK.to(x.device, x.dtype)(x)
        if isinstance(x, torch.Tensor)
        else x @ NETWORK.weight.detach().numpy().T
    )


def encoder(x):
    return x[:, :1] ** 2


@pytest.fixture
def saved(problem, tmp_path):
    geoq = GeoQ(surrogate, None, folds=RandomFolds(3), increment_model=QUICK)
    geoq.fit(problem.x, problem.y).save(tmp_path / "a.geoq")
    return geoq, tmp_path / "a.geoq"


def assert_same(geoq, loaded, queries):
    a, b = geoq.assess(queries), loaded.assess(queries)
    for name in (
        "prediction",
        "error_hat",
        "safe",
        "support_score",
        "anchors",
        "increment",
    ):
        one, other = (torch.as_tensor(getattr(part, name)) for part in (a, b))
        assert torch.equal(one, other), name
    assert a.threshold == b.threshold
    assert a.reason(0) == b.reason(0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"representation": encoder, "n_anchors": 3},
        {"folds": TemporalFolds(3, gap=3), "safe_region": SafeRegion(5)},
        {"increment_model": Tenth()},
    ],
    ids=["plain", "encoder", "gap", "own model"],
)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_loaded_estimator_answers_bit_for_bit(problem, tmp_path, settings, kind):
    x, y, queries = problem.x.cpu(), problem.y.cpu(), problem.queries.cpu()
    if kind == "numpy":
        x, y, queries = x.numpy(), y.numpy(), queries.numpy()
    settings = {"folds": RandomFolds(3), "increment_model": QUICK, **settings}
    geoq = GeoQ(surrogate, None, **settings).fit(x, y)
    geoq.save(tmp_path / "a.geoq")
    own = (
        {"increment_model": Tenth()} if isinstance(geoq.increment_model, Tenth) else {}
    )
    loaded = GeoQ.load(
        tmp_path / "a.geoq",
        surrogate=surrogate,
        representation=geoq.representation,
        **own,
    )
    assert_same(geoq, loaded, queries)


def test_fields_survive_too(tmp_path):
    x = torch.randn(40, 1, 6, 5, generator=torch.Generator().manual_seed(0))
    model = FieldIncrement(
        widths=(4, 8), training=Training(n_steps=10, check_every=5, batch_size=8)
    )
    geoq = GeoQ(
        lambda x: x, None, folds=RandomFolds(2), increment_model=model, n_support=5
    )
    geoq.fit(x, 2 * x).save(tmp_path / "a.geoq")
    assert_same(
        geoq, GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: x), x[:5] + 0.1
    )


SHORT = Training(n_steps=20, check_every=10, batch_size=8, learning_rate=1e-2)
OF_FIELDS = [
    FieldScaleIncrement(
        factor=FieldFactor(
            widths=(4,), n_splits=2, sees=(inputs, log_bound), training=SHORT
        )
    ),
    IndicatorIncrement(quantile=0.8, widths=(4, 8), training=SHORT),
]


@pytest.mark.parametrize("model", OF_FIELDS, ids=["factor", "indicator"])
def test_models_for_fields_answer_bit_for_bit(tmp_path, model):
    """Whether a cell is wrong is in the first input field, so that there is something to learn and to store."""
    x = torch.randn(60, 2, 6, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, :1] > 1).float() if isinstance(model, IndicatorIncrement) else x.exp()
    y = y.expand(-1, 2, -1, -1)
    geoq = GeoQ(torch.zeros_like, None, folds=RandomFolds(2), increment_model=model)
    geoq.fit(x[:40], y[:40]).save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=torch.zeros_like)
    assert_same(geoq, loaded, x[40:])
    assert loaded.increment_model == model
    assert (geoq.assess(x[40:]).increment < 0).any()


def test_a_learned_factor_and_conformal_factors_are_in_the_file(tmp_path):
    x = torch.randn(120, 2, 6, 5, generator=torch.Generator().manual_seed(0))
    model = OF_FIELDS[0]
    geoq = GeoQ(torch.zeros_like, None, folds=RandomFolds(2), increment_model=model)
    geoq.fit(x[:60], x[:60].exp())
    plain = geoq.bound(x)
    geoq.conformalize(x[60:], x[60:].exp(), guarantee=WholeField(0.8))
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=torch.zeros_like)
    assert loaded.increment_model_.factor_ is not None
    assert torch.equal(loaded.bound(x), geoq.bound(x))
    assert loaded.conformal_factors_ == geoq.conformal_factors_
    assert not torch.equal(loaded.bound(x), plain)


def test_a_loaded_estimator_can_be_saved_again(saved, problem, tmp_path):
    geoq, path = saved
    GeoQ.load(path, surrogate=surrogate).save(tmp_path / "b.geoq")
    assert_same(
        geoq, GeoQ.load(tmp_path / "b.geoq", surrogate=surrogate), problem.queries
    )


@pytest.mark.parametrize(
    "region",
    [DistanceRegion(0.8), SafeRegion(quantile=0.8), SafeRegion(5)],
    ids=repr,
)
def test_a_loaded_estimator_has_the_settings_of_the_saved_one(
    problem, tmp_path, region
):
    folds = RandomFolds(3)
    settings = {"safe_region": region, "increment_model": QUICK, "n_support": 20}
    geoq = GeoQ(surrogate, None, folds=folds, **settings)
    geoq.fit(problem.x, problem.y).save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    assert repr(loaded) == repr(geoq)
    with pytest.raises(ValueError, match="a file stores only the name of the fold"):
        loaded.fit(problem.x, problem.y)
    loaded.set_params(folds=folds).fit(problem.x, problem.y)
    assert_same(geoq, loaded, problem.queries)


def test_the_region_in_the_file_is_the_one_that_was_fitted(saved, tmp_path):
    geoq, _ = saved
    geoq.set_params(safe_region=SafeRegion(7)).save(tmp_path / "b.geoq")
    loaded = GeoQ.load(tmp_path / "b.geoq", surrogate=surrogate)
    assert loaded.safe_region == SupportRegion()


def test_another_surrogate_is_refused_with_the_largest_difference(saved):
    with pytest.raises(
        ValueError, match=r"surrogate is not the one .* differ by up to 0\.5"
    ):
        GeoQ.load(saved[1], surrogate=lambda x: surrogate(x) + 0.5)


# An accurate surrogate: its errors are 3e-4 of its answers.
ACCURATE_X = np.random.default_rng(0).normal(size=(200, 3))
ACCURATE_Y = ACCURATE_X @ [1.0, 2.0, 3.0] + 1e-3 * np.sin(3 * ACCURATE_X[:, 0])


def ridge(x, y):
    return Ridge(1e-6).fit(x, y).predict


ACCURATE = ridge(ACCURATE_X, ACCURATE_Y)


def rowwise(model):
    """The same model, called on one row at a time."""
    join = torch.cat if isinstance(model, nn.Module) else np.concatenate
    return lambda x: join([model(x[i : i + 1]) for i in range(len(x))])


def squared(y, y_hat):
    return (y - y_hat) ** 2


@pytest.mark.parametrize("error", [absolute_error, relative_norm_error, squared])
@pytest.mark.parametrize("calibration", [True, False])
def test_another_surrogate_is_refused_if_it_differs_by_a_part_of_the_error(
    tmp_path, error, calibration
):
    path = tmp_path / "a.geoq"
    geoq = GeoQ(ACCURATE, ridge, folds=RandomFolds(5), error_functional=error)
    geoq.fit(ACCURATE_X, ACCURATE_Y).save(path, calibration=calibration)
    own = {"error_functional": squared} if error is squared else {}
    for same in (
        ACCURATE,
        rowwise(ACCURATE),
        lambda x: ACCURATE(x).astype(np.float32),
        lambda x: ACCURATE(x) * (1 + 1e-7),
    ):
        GeoQ.load(path, surrogate=same, **own)
    half = ridge(ACCURATE_X[:100], ACCURATE_Y[:100])
    for other in (half, lambda x: ACCURATE(x) * (1 + 1e-4)):
        with pytest.raises(
            ValueError, match=r"differ by up to \S+, which is \S+ % of the typical"
        ):
            GeoQ.load(path, surrogate=other, **own)


@pytest.mark.filterwarnings("ignore:the errors of the surrogate are")
def test_a_surrogate_without_errors_may_differ_only_by_rounding(tmp_path):
    geoq = GeoQ(ACCURATE, None, folds=RandomFolds(5))
    geoq.fit(ACCURATE_X, ACCURATE(ACCURATE_X)).save(tmp_path / "a.geoq")
    GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: ACCURATE(x) * (1 + 1e-12))
    with pytest.raises(ValueError, match=r"inf % of the typical error 0"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: ACCURATE(x) * (1 + 1e-6))


def test_a_network_in_single_precision_is_the_same_one_in_any_batch(tmp_path):
    """The errors are about as small as the rounding of single precision."""
    model = fresh(nn.Conv2d, 1, 2, 3, padding=1)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 8, 8, generator=random)
    with torch.no_grad():
        y = model(x) * (1 + 1e-5 * torch.randn(60, 1, 1, 1, generator=random))
    geoq = GeoQ(model, None, folds=RandomFolds(3), increment_model=TwoLawIncrement())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        geoq.fit(x, y).save(tmp_path / "a.geoq")
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    GeoQ.load(tmp_path / "a.geoq", surrogate=rowwise(model))
    torch.set_num_threads(n_threads)
    with pytest.raises(ValueError, match="surrogate is not the one"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: 1.001 * model(x))


def test_a_surrogate_of_another_shape_is_refused(saved):
    with pytest.raises(ValueError, match=r"surrogate returns shape \(8, 2\)"):
        GeoQ.load(saved[1], surrogate=lambda x: x)


def test_a_missing_or_additional_representation_is_refused(saved, problem, tmp_path):
    with pytest.raises(
        ValueError, match="saved with no representation, but this call differs"
    ):
        GeoQ.load(saved[1], surrogate=surrogate, representation=encoder)
    geoq = GeoQ(
        surrogate,
        None,
        representation=encoder,
        folds=RandomFolds(3),
        increment_model=QUICK,
    )
    geoq.fit(problem.x, problem.y).save(tmp_path / "b.geoq")
    with pytest.raises(ValueError, match="pass representation="):
        GeoQ.load(tmp_path / "b.geoq", surrogate=surrogate)
    with pytest.raises(ValueError, match="representation is not the one"):
        GeoQ.load(
            tmp_path / "b.geoq",
            surrogate=surrogate,
            representation=lambda x: encoder(x) + 1,
        )


def test_an_increment_model_of_the_user_must_be_passed_to_load(problem, tmp_path):
    geoq = GeoQ(surrogate, None, folds=RandomFolds(3), increment_model=Tenth())
    geoq.fit(problem.x, problem.y).save(tmp_path / "a.geoq")
    with pytest.raises(ValueError, match="pass the fitted model as increment_model"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)


def test_a_truncated_file_is_refused(saved):
    path = saved[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or not a geoq file"):
        GeoQ.load(path, surrogate=surrogate)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9, 0.999])
def test_one_altered_byte_is_refused(saved, place):
    path = saved[1]
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"altered|truncated"):
        GeoQ.load(path, surrogate=surrogate)


def test_an_altered_number_is_refused(saved):
    """The threshold moved in the header, with the arrays untouched."""
    path = saved[1]
    content = path.read_bytes()
    assert b'n_anchors\\": 1,' in content
    path.write_bytes(content.replace(b'n_anchors\\": 1,', b'n_anchors\\": 2,'))
    with pytest.raises(ValueError, match="altered after it was written"):
        GeoQ.load(path, surrogate=surrogate)


def test_foreign_files_are_refused_and_nothing_in_them_runs(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code of the file was run",))

    (tmp_path / "pickle").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "text").write_text(json.dumps({"format": "geoq 1"}))
    (tmp_path / "empty").write_bytes(b"")
    for name in ("pickle", "text", "empty"):
        with pytest.raises(ValueError, match="truncated or not a geoq file"):
            GeoQ.load(tmp_path / name, surrogate=surrogate)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="has format None"):
        GeoQ.load(tmp_path / "other.safetensors", surrogate=surrogate)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        GeoQ.load(tmp_path / "missing", surrogate=surrogate)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a"
    archive.write(path, {"a": 1}, {"t": torch.ones(2)})
    before = path.read_bytes()

    class Interrupted(KeyboardInterrupt):
        pass

    def interrupted(*_args, **_kwargs):
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", interrupted)
        with pytest.raises(Interrupted):
            archive.write(path, {"a": 2}, {"t": torch.ones(2)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_numpy_numbers_are_numbers(tmp_path):
    archive.write(tmp_path / "a", {"n": np.int64(2), "tau": np.float32(0.5)}, {})
    assert archive.read(tmp_path / "a")[0] == {"n": 2, "tau": 0.5}


def table(n=80):
    x = np.random.default_rng(0).normal(size=(n, 2))
    return x, x @ NETWORK.weight.detach().numpy().T + 0.1 * x[:, :1] ** 2


def test_tuples_of_one_point_share_its_arrays_also_in_a_file(tmp_path):
    geoq = GeoQ(surrogate, None).fit(*table())
    assert geoq.calibration_.stored_error.values is geoq.error_
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    for one, other in ((geoq, loaded), (geoq, pickle.loads(pickle.dumps(geoq)))):
        tuples, again = one.calibration_, other.calibration_
        assert again.stored_error.values is other.error_
        assert torch.equal(tuples.error, again.error)
        for part, same in zip(tuples.features.parts, again.features.parts, strict=True):
            assert torch.equal(part, same)


def test_a_file_without_calibration_tuples_gives_the_same_answers(tmp_path):
    x, y = table()
    geoq, path = GeoQ(surrogate, None).fit(x, y), tmp_path / "a.geoq"
    geoq.save(path)
    size = path.stat().st_size
    geoq.save(path, calibration=False)
    assert path.stat().st_size < 0.7 * size
    loaded = GeoQ.load(path, surrogate=surrogate)
    assert_same(geoq, loaded, x[:7] + 0.1)
    assert loaded.assess(x).reason(3) == geoq.assess(x).reason(3)
    assert (loaded.bounds(x, (0.5,))[0.5] == geoq.bounds(x, (0.5,))[0.5]).all()
    message = r"calibration_.error is needed here, but .* saved with calibration=False"
    with pytest.raises(AttributeError, match=message):
        _ = loaded.calibration_.error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"safe_region": SafeRegion()}, "calibration=False .*=SafeRegion"),
        ({"increment_model": Tenth()}, r"calibration=False .* increment_model=Tenth"),
    ],
)
def test_tuples_that_the_answers_need_are_not_left_out(tmp_path, settings, message):
    geoq = GeoQ(surrogate, None, **settings).fit(*table())
    with pytest.raises(ValueError, match=message):
        geoq.save(tmp_path / "a.geoq", calibration=False)
