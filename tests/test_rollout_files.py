import numpy as np
import pytest
from henon import QUERIES, STATES, TRAINING, analogue, same_answers, small

from geoq import (
    DistanceRegion,
    GeoQ,
    RolloutGeoQ,
    SafeRegion,
    TemporalFolds,
    Training,
)
from geoq.rollout import AdditiveRecursion, RolloutRegion, SaturatingGrowth

SURROGATE = analogue([STATES[:300]])
SUM = AdditiveRecursion(training=Training(n_steps=30, check_every=10))


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": SaturatingGrowth(0.9)},
        {"scheme": SUM, "representation": np.tanh},
        {"safe_region": DistanceRegion(0.8)},
    ],
    ids=["SaturatingGrowth", "AdditiveRecursion", "DistanceRegion"],
)
def test_a_loaded_estimator_gives_the_answers_of_the_saved_one(tmp_path, settings):
    path, phi = tmp_path / "rollout.geoq", settings.get("representation")
    geoq = small(SURROGATE, None, **settings)
    geoq.fit(STATES[300:800]).save(path)
    loaded = RolloutGeoQ.load(path, surrogate=SURROGATE, representation=phi)
    same_answers(geoq, loaded)
    assert loaded.safe_region_.rule == geoq.safe_region_.rule
    assert loaded.safe_region_.threshold == geoq.safe_region_.threshold
    assert loaded.get_params()["safe_region"] == geoq.safe_region
    each = np.array([0.2, 0.7])
    ours, theirs = (g.assess(QUERIES, 50, each) for g in (geoq, loaded))
    np.testing.assert_array_equal(ours.trusted_horizon, theirs.trusted_horizon)
    assert ours.trust == theirs.trust


def test_a_loaded_estimator_has_the_settings_of_the_saved_one(tmp_path):
    path, folds = tmp_path / "rollout.geoq", TemporalFolds(4)
    geoq = small(SURROGATE, None, folds=folds, safe_region=RolloutRegion(0.8))
    geoq.fit(TRAINING).save(path)
    loaded = RolloutGeoQ.load(path, surrogate=SURROGATE)
    assert repr(loaded) == repr(geoq)
    with pytest.raises(ValueError, match="a file stores only the name of the fold"):
        loaded.fit(TRAINING)
    loaded.set_params(folds=folds).fit(TRAINING)
    same_answers(geoq, loaded)
    assert loaded.safe_region_.rule == geoq.safe_region_.rule
    assert loaded.safe_region_.threshold == geoq.safe_region_.threshold
    assert loaded.safe_region_.initial.threshold == geoq.safe_region_.initial.threshold


def test_an_output_of_one_number_can_be_saved(tmp_path):
    geoq = small(SURROGATE, None, output=0).fit(STATES[300:800].astype(np.float32))
    geoq.save(tmp_path / "rollout.geoq")
    loaded = RolloutGeoQ.load(tmp_path / "rollout.geoq", surrogate=SURROGATE)
    same_answers(geoq, loaded)


def test_other_callables_and_other_classes_are_refused(tmp_path):
    path = tmp_path / "rollout.geoq"
    geoq = small(SURROGATE, None, representation=np.tanh, scheme=SUM)
    geoq.fit(STATES[300:800]).save(path)
    other = analogue([STATES[:250]])
    with pytest.raises(ValueError, match="surrogate is not the one"):
        RolloutGeoQ.load(path, surrogate=other, representation=np.tanh)
    with pytest.raises(ValueError, match="saved with a representation"):
        RolloutGeoQ.load(path, surrogate=SURROGATE)
    with pytest.raises(ValueError, match=r"load it with RolloutGeoQ\.load"):
        GeoQ.load(path, surrogate=SURROGATE)
    GeoQ(SURROGATE, None).fit(STATES[:-1], STATES[1:]).save(tmp_path / "one.geoq")
    with pytest.raises(ValueError, match="does not contain a RolloutGeoQ"):
        RolloutGeoQ.load(tmp_path / "one.geoq", surrogate=SURROGATE)


def test_files_of_large_states_support_only_one_tolerance_for_all_coordinates(
    tmp_path, monkeypatch
):
    geoq = small(SURROGATE, None).fit(STATES[300:800])
    monkeypatch.setattr("geoq.rollout.horizon.MOST_STORED", 100)
    geoq.save(tmp_path / "large.geoq")
    loaded = RolloutGeoQ.load(tmp_path / "large.geoq", surrogate=SURROGATE)
    assert loaded.held_out_.bound.shape == (100, 40, 1)
    same_answers(geoq, loaded)
    geoq.assess(QUERIES, 50, np.array([0.2, 0.7]))
    with pytest.raises(ValueError, match=r"shape \(2,\).*largest error.*pass a number"):
        loaded.assess(QUERIES, 50, np.array([0.2, 0.7]))


def test_objects_that_a_file_cannot_contain_are_refused(tmp_path):
    geoq = small(SURROGATE, None, safe_region=SafeRegion()).fit(TRAINING)
    with pytest.raises(TypeError, match="safe region SafeRegion cannot be saved"):
        geoq.save(tmp_path / "region.geoq")
    scheme = AdditiveRecursion(
        psi=lambda features: features.displacement,
        training=Training(n_steps=1, check_every=1),
    )
    geoq = small(SURROGATE, None, scheme=scheme).fit(TRAINING)
    with pytest.raises(ValueError, match=r"psi=.* is a function of the user"):
        geoq.save(tmp_path / "scheme.geoq")
    assert not [*tmp_path.iterdir()]


def ridge_step(states):
    """A step that is linear in the monomials of the state, with an error of about 1e-3."""

    def monomials(x):
        return np.stack([np.ones(len(x)), x[:, 0], x[:, 1], x[:, 0] ** 2], axis=1)

    noisy = states[1:] + 1e-3 * np.random.default_rng(0).normal(
        size=(len(states) - 1, 2)
    )
    weights = np.linalg.lstsq(monomials(states[:-1]), noisy)[0]
    return lambda x: monomials(x) @ weights


@pytest.mark.parametrize("large", [False, True])
def test_another_step_is_refused_if_it_differs_by_a_part_of_its_error(
    tmp_path, monkeypatch, large
):
    if large:
        monkeypatch.setattr("geoq.rollout.horizon.MOST_STORED", 100)
    step, path = ridge_step(STATES[:300]), tmp_path / "rollout.geoq"
    small(step, None).fit(STATES[300:800]).save(path)
    for same in (step, lambda x: step(x) * (1 + 1e-12)):
        RolloutGeoQ.load(path, surrogate=same)
    for other in (ridge_step(STATES[:200]), lambda x: step(x) * (1 + 1e-4)):
        with pytest.raises(ValueError, match=r"which is \S+ % of the typical error"):
            RolloutGeoQ.load(path, surrogate=other)
