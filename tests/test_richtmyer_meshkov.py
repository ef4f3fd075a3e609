import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.testing import assert_close

from benchmarks import tables
from benchmarks.richtmyer_meshkov import bounds, methods
from benchmarks.richtmyer_meshkov.scores import score
from benchmarks.richtmyer_meshkov.study import (
    Settings,
    Study,
    chosen_cluster,
    clusters_of,
)
from geoq import metrics

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small run with its pictures, and the command that made it."""
    folder = tmp_path_factory.mktemp("results")
    script = "benchmarks.richtmyer_meshkov.run"
    file = folder / "richtmyer_meshkov.json"
    command = [sys.executable, "-m", script, "--small", "--device", "cpu"]
    command += ["--work", folder / "work", "--out", file, "--pictures", folder]
    subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=900
    )
    return folder, command


def rows_of(results):
    return json.loads((results[0] / "richtmyer_meshkov.json").read_text())["rows"]


def test_a_small_run_scores_every_method_in_its_settings(results):
    expected = set()
    for method in methods.METHODS:
        expected |= {(method.name, setting.name) for setting in method.settings}
        if method.continuous:
            expected.add((f"{method.name} (rounded)", "binary"))
        seeing = ("(default", "(one", "Classifier", "two-valued", "Frequency")
        if any(name in method.name for name in seeing):
            maps = f"{method.name}, expected error"
            expected |= {(maps, setting.name) for setting in method.settings}
    rows = rows_of(results)
    measured = [(row["method"], row["setting"]) for row in rows]
    assert len(measured) == len(set(measured))
    assert set(measured) == expected
    for row in rows:
        assert np.isfinite([row["pinball"], row["mean_bound"]]).all()
        assert np.mean(row["pinball_by_time"]) == pytest.approx(row["pinball"], 1e-5)
        has_flag = row["method"].startswith("GeoQ") and "expected" not in row["method"]
        assert (row["safe_fraction"] is not None) == has_flag


def test_the_zero_bound_covers_all_cells_but_the_wrong_ones(results):
    zero = next(row for row in rows_of(results) if row["method"] == "Zero bound")
    assert zero["setting"] == "binary"
    assert zero["coverage"] == pytest.approx(1 - zero["wrong_cells"], abs=1e-6)
    assert zero["pinball"] == pytest.approx(0.95 * zero["wrong_cells"], 1e-5)
    assert zero["recall"] == 0


def test_bounds_of_the_deployed_surrogate_share_its_errors(results):
    own = ("Split conformal", "MC dropout", "Deep ensemble")
    rows = [r for r in rows_of(results) if not r["method"].startswith(own)]
    for setting in ("binary", "probability"):
        shared = {r["relative_l2"] for r in rows if r["setting"] == setting}
        assert len(shared) == 1


def test_a_rerun_measures_only_what_is_missing(results):
    folder, command = results
    networks = sorted((folder / "work").glob("seed-0/networks/*.pt"))
    written = [network.stat().st_mtime_ns for network in networks]
    assert len(networks) == 3 + 4 + 3  # members, folds, members for the 80 %
    before = rows_of(results)
    (folder / "work/seed-0/rows/distance-bins-probability.json").unlink()
    again = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.count("pinball") == 1
    assert "Distance bins" in again.stdout
    assert [network.stat().st_mtime_ns for network in networks] == written
    for one, other in zip(before, rows_of(results), strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_a_folder_with_parts_of_other_networks_is_refused(results):
    longer = [*results[1], "--epochs", "11"]
    refused = subprocess.run(
        longer, cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "holds results of a run with other networks; choose" in refused.stderr


def test_the_results_name_their_data(results):
    record = json.loads((results[0] / "richtmyer_meshkov.json").read_text())
    assert len(record["data_checksum"]) == 64
    assert record["coverage_tolerance"] == 1e-6
    (surrogate,) = record["surrogates"]
    assert surrogate["n_train"] + surrogate["n_test"] == 44
    assert sum(surrogate["fold_sizes"]) == surrogate["n_train"]


def test_the_small_run_draws_every_picture(results):
    drawn = {path.name for path in results[0].glob("richtmyer-meshkov*")}
    names = ("-median.png", "-distance.png", "-recall.png", ".gif")
    assert drawn == {f"richtmyer-meshkov{name}" for name in names}
    assert (results[0] / "richtmyer-meshkov.gif").stat().st_size < 2**20


def test_the_tables_show_the_interface_beside_the_paper(results):
    page = tables.render("richtmyer_meshkov", "GeoQ (paper, k_a=5)", folder=results[0])
    assert "**Near the interface (probability)**" in page
    assert "| wrong cells found | area flagged |" in page
    assert "| method | pinball x 1000 | correlation |" in page
    assert "seed 0 alone" in page
    assert "0.001 / 0.501 / 1.000 / 0.083" in page
    assert "not public" in page


def test_tables_mark_rows_of_other_runs():
    """A sign for each run, the same in all settings; none where all rows are of one run."""
    rows = [
        {"method": "a", "setting": "binary"},
        {"method": "b", "setting": "binary", "run": "2 cores, commit 1234567"},
        {"method": "c", "setting": "binary", "run": "GPU, commit 1234567"},
        {"method": "b", "setting": "probability"},
    ]
    names = [tables.marked(rows, r["method"], r["setting"]) for r in rows]
    assert names == ["a", "b †", "c ‡", "b"]
    assert tables.other_runs(rows) == [
        "† 2 cores, commit 1234567. ‡ GPU, commit 1234567."
    ]
    assert tables.other_runs(rows[:1]) == []


def blobs(shape, seed=0):
    """Smooth random fields between 0 and 1, periodic in y."""
    rng = np.random.default_rng(seed)
    noise = ndimage.gaussian_filter(
        rng.normal(size=shape), (0, 0, 3, 3), mode=("wrap", "wrap", "wrap", "nearest")
    )
    return torch.from_numpy(1 / (1 + np.exp(-30 * noise))).float()


def toy_study(n_train=30, n_test=8):
    """Truths that are drawn with the predicted probabilities, so that these are right on average."""
    p = blobs((n_train + n_test, 12, 10, 14))
    y = torch.from_numpy(np.random.default_rng(1).random(p.shape) < p.numpy()).float()
    study = SimpleNamespace(
        y=y[:n_train], cross_fit=p[:n_train], y_test=y[n_train:], p=p[n_train:]
    )
    study.held_out_by_time = lambda: zip(
        study.y.unbind(1), study.cross_fit.unbind(1), strict=True
    )
    return study


def with_distances(study):
    study.distance = bounds.interface_distance(study.p)
    study.cross_fit_distance = bounds.interface_distance(study.cross_fit)
    return study


def test_the_distance_is_scipys_chessboard_distance_around_the_period():
    p = blobs((2, 3, 20, 40))
    heavy = (p > 0.5).numpy()
    tiled = np.concatenate([heavy] * 3, axis=2)
    expected = np.empty(tiled.shape, dtype=int)
    for place in np.ndindex(tiled.shape[:2]):
        to_light, to_heavy = (
            ndimage.distance_transform_cdt(side, metric="chessboard")
            for side in (tiled[place], ~tiled[place])
        )
        expected[place] = np.where(tiled[place], to_light, to_heavy)
    middle = expected[:, :, 20:40].clip(max=bounds.FARTHEST)
    assert middle.max() > 4
    assert_close(bounds.interface_distance(p).long(), torch.from_numpy(middle))


def test_the_level_of_a_bin_is_the_quantile_of_its_errors():
    """Twenty errors 0.01, ..., 0.20 in bin 0: the 19th. Bin 1 is a wrong cell in four, bin 2 one in thirty, bin 3 empty."""
    error = torch.cat(
        [torch.arange(1, 21) / 100, torch.tensor([0.0, 1, 0, 0]), torch.zeros(30)]
    )
    error[-1] = 1
    bins = torch.cat([torch.zeros(20), torch.ones(4), torch.full((30,), 2.0)]).int()
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(error)))
    error, bins = error[shuffled], bins[shuffled]
    level = bounds.quantile_by_bin(error, bins, 4, fewest=1)
    pooled = bounds.quantile_of_all(error)  # the 52nd of 54
    assert pooled == 0.2
    assert_close(level, torch.tensor([0.19, 1.0, 0.0, 0.2]))
    assert_close(
        bounds.quantile_by_bin(error, bins, 4, fewest=10),
        torch.tensor([0.19, 0.2, 0.0, 0.2]),
    )


def test_binned_bounds_look_up_the_level_of_a_cells_own_bin():
    study = with_distances(toy_study())
    binned = bounds.binned(
        study, bounds.PROBABILITY, bins_of=bounds.by_distance_and_doubt
    )
    edges = (0, *bounds.DOUBT_EDGES, 1)
    time = 5
    y, p = study.y[:, time], study.cross_fit[:, time]
    doubt, asked = (torch.minimum(f, 1 - f) for f in (p, study.p[:, time]))
    n_checked = 0
    for low, high in pairwise(edges):
        here = study.cross_fit_distance[:, time] == 1
        here &= (doubt > low) & (doubt <= high)
        there = study.distance[:, time] == 1
        there &= (asked > low) & (asked <= high)
        if here.sum() < bounds.FEWEST or not there.any():
            continue
        level = np.quantile((y - p).abs()[here], 0.95, method="inverted_cdf")
        assert_close(
            binned.bound[:, time][there], torch.full((int(there.sum()),), float(level))
        )
        n_checked += 1
    assert n_checked > 2


def test_the_chance_of_a_bin_is_its_fraction_of_wrong_cells():
    """One of four in bin 0, three of three in bin 1, which is too few unless three are enough; of all, four of seven."""
    is_wrong = torch.tensor([1.0, 0, 0, 0, 1, 1, 1])
    bins = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    fraction = bounds.fraction_by_bin
    assert_close(fraction(is_wrong, bins, 2, fewest=3), torch.tensor([0.25, 1.0]))
    assert_close(fraction(is_wrong, bins, 2, fewest=4), torch.tensor([0.25, 4 / 7]))


def test_one_chance_of_a_wrong_cell_bounds_both_errors():
    """A two-valued bound covers the same cells in both settings."""
    study = toy_study()
    chance = (
        torch.from_numpy(np.random.default_rng(3).random(study.p.shape)).float() / 9
    )
    covered = []
    for setting in (bounds.BINARY, bounds.PROBABILITY):
        bound = bounds.two_valued_bound(study, setting, chance).bound
        covered.append(setting.error(study.y_test, study.p) <= bound + 1e-6)
    assert torch.equal(*covered)
    assert 0.5 < covered[0].double().mean() < 1


def test_two_valued_bounds_of_bins_are_their_quantiles():
    study = with_distances(toy_study())
    study.remembered = lambda key, answer: answer()
    one, other = (
        answer(study, bounds.BINARY, bins_of=bounds.by_distance_and_doubt).bound
        for answer in (bounds.binned, bounds.binned_chance)
    )
    assert_close(one, other)


def test_no_constant_beats_the_best_constant():
    study = toy_study()
    for setting in (bounds.BINARY, bounds.PROBABILITY):
        bound = bounds.best_constant(study, setting).bound
        error = setting.error(study.y_test, study.p)
        least = metrics.pinball(error, bound, 0.95)
        for constant in np.linspace(0, 1, 41):
            other = torch.full_like(bound, constant)
            assert least <= metrics.pinball(error, other, 0.95) + 1e-9


def test_the_static_bounds_are_quantiles_over_the_symmetry():
    study = toy_study()
    error = (study.y - study.cross_fit).abs().numpy()
    cell = bounds.static(study, bounds.PROBABILITY).bound[0]
    expected = np.quantile(error, 0.95, axis=0, method="inverted_cdf")
    assert_close(cell, torch.from_numpy(expected))
    column = bounds.static_column(study, bounds.PROBABILITY).bound[0, :, 0]
    expected = np.quantile(error, 0.95, axis=(0, 2), method="inverted_cdf")
    assert_close(column, torch.from_numpy(expected))


def test_the_best_factor_is_that_of_an_error_that_is_the_scale():
    scale = torch.linspace(0.01, 0.2, 50)
    assert bounds.best_factor(4 * scale, scale) == 4
    assert bounds.best_factor(0 * scale, scale) == 0


def test_the_penalty_lowers_the_increment_of_the_background():
    from geoq import FieldIncrement, Training
    from geoq.crossfit import CalibrationSet
    from geoq.geometry import GeometricFeatures

    generator = torch.Generator().manual_seed(0)
    error = (torch.rand(24, 2, 6, 8, generator=generator) > 0.8).float()
    features = GeometricFeatures(
        torch.randn(24, 6, 8, generator=generator),
        torch.ones(24),
        torch.zeros_like(error),
        torch.zeros_like(error),
        torch.zeros(24, 6, 8),
    )
    point = torch.arange(24)
    calibration = CalibrationSet(features, error, point, point, 0 * point)
    field = FieldIncrement(
        0.95, widths=(4, 8), training=Training(n_steps=60, batch_size=8, check_every=20)
    )
    plain = field.fit(calibration)(features)
    penalised = methods.BackgroundPenalty(field, penalty=0.5).fit(calibration)
    calm = error == 0
    assert penalised.quantile == 0.95
    assert penalised(features)[calm].mean() < 0.9 * plain[calm].mean()


def toy_answer(study):
    noise = torch.from_numpy(np.random.default_rng(2).random(study.p.shape)).float()
    safe = torch.tensor([True, False] * (len(study.p) // 2))
    return bounds.Answer(noise, study.p, safe)


def test_scores_are_those_of_the_library():
    study = with_distances(toy_study())
    answer = toy_answer(study)
    row = score(bounds.PROBABILITY, study, answer)
    error, bound = (study.y_test - study.p).abs().numpy(), answer.bound.numpy()
    band = study.distance.numpy() <= 4
    safe = answer.safe.numpy()
    assert row["pinball"] == metrics.pinball(error, bound, 0.95)
    assert row["correlation"] == metrics.correlation(error, bound)
    assert row["band_correlation"] == metrics.correlation(error, bound, band)
    assert row["safe_pinball"] == metrics.pinball(error, bound, 0.95, safe)
    assert row["coverage"] == pytest.approx(metrics.coverage(error, bound), abs=1e-4)
    assert row["relative_l2"] == metrics.relative_l2(study.y_test, study.p)
    missed = error > 0.5
    assert row["wrong_cells"] == pytest.approx(missed.mean())
    assert row["recall"] == pytest.approx((bound >= 0.5)[missed].mean())
    assert row["flagged"] == pytest.approx((bound >= 0.5).mean())
    by_case = [metrics.pinball(*both, 0.95) for both in zip(error, bound, strict=True)]
    assert row["pinball_by_case"] == pytest.approx(by_case, rel=1e-5)


def test_a_bound_may_fall_short_by_the_tolerance_alone():
    study = with_distances(toy_study())
    study.p, study.y_test = torch.zeros_like(study.p), torch.ones_like(study.p)
    for short, covered in ((1e-6, 1.0), (1e-5, 0.0)):
        bound = torch.full_like(study.p, 1 - short)
        row = score(bounds.BINARY, study, bounds.Answer(bound, study.p))
        assert row["coverage"] == covered


def test_clusters_are_those_of_the_fields_themselves():
    from sklearn.cluster import KMeans

    u0 = (blobs((30, 1, 10, 14))[:, 0] > 0.5).to(torch.uint8)
    flat = u0.flatten(1).double().numpy()
    expected = KMeans(4, n_init=10, random_state=0).fit(flat)
    found = clusters_of(u0, 4)
    within = sum(
        ((flat[found == c] - flat[found == c].mean(axis=0)) ** 2).sum()
        for c in range(4)
    )
    assert within == pytest.approx(expected.inertia_, rel=0.02)


def test_the_test_cluster_is_kept_from_training_and_folds(tmp_path):
    cluster = np.array([0] * 2 + [1] * 6 + [2] * 5 + [3] * 7)
    number = np.arange(20, dtype=np.uint8)
    data = SimpleNamespace(
        u0=np.tile(number[:, None, None], (1, 2, 3)),
        u=np.tile(number[:, None, None, None], (1, 12, 2, 3)),
    )
    settings = Settings(test_fraction=(0.2, 0.5))
    for seed, expected in ((0, 1), (1, 2), (2, 3)):
        study = Study.of(settings, seed, tmp_path, data, cluster, "cpu")
        assert set(cluster[study.x_test[:, 0, 0].int().numpy()]) == {expected}
        seen = study.x[:, 0, 0].int().numpy()
        assert expected not in cluster[seen]
        labels = np.unique(cluster[seen])
        np.testing.assert_array_equal(labels[study.fold], cluster[seen])
    with pytest.raises(SystemExit, match="seed 3, but only 3 of 4 clusters"):
        chosen_cluster(cluster, 3, settings.test_fraction)


def test_each_network_is_trained_on_what_it_may_see(tmp_path):
    cluster = np.repeat(np.arange(11), 10)
    u0 = np.zeros((110, 2, 3), dtype=np.uint8)
    data = SimpleNamespace(u0=u0, u=np.zeros((110, 12, 2, 3), dtype=np.uint8))
    study = Study.of(Settings(), 1, tmp_path, data, cluster, "cpu")
    trainings = study.trainings
    assert len(trainings) == 30
    for number in range(10):
        rows, _ = trainings[f"fold-{number}"]
        assert number not in study.fold[rows]
        assert len(rows) == 90
    split = [trainings[name] for name in study.split_members]
    assert len({seed for _, seed in split}) == len(split) == 10
    for rows, _ in split:
        assert len(rows) == 80
        assert not np.intersect1d(rows, study.kept_apart).size
    members = [trainings[name] for name in study.members]
    assert len({seed for _, seed in members}) == len(members) == 10
    assert all(len(rows) == 100 for rows, _ in members)


def test_few_fields_scores_every_number_of_simulations(tmp_path):
    """In other processes: a bound of 0 or 1 loses what it does not find, and a little of what it flags in vain."""
    file = tmp_path / "few_fields.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.richtmyer_meshkov.few_fields",
        "--small",
    ]
    command += ["--seeds", "0", "--jobs", "2", "--out", file]
    subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    rows = json.loads(file.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["12 simulations"] * 8 + [
        "20 simulations"
    ] * 8
    assert len({row["method"] for row in rows}) == 8
    for row in rows:
        found = row["recall"] * row["wrong_cells"]
        missed, in_vain = row["wrong_cells"] - found, row["flagged"] - found
        # Numbers in the file have seven digits, and cells that were missed are a difference.
        loss = pytest.approx(0.95 * missed + 0.05 * in_vain, rel=1e-5)
        assert row["pinball"] == loss
