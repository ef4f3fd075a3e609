"""Pictures show the values of the assessment and the errors that are passed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from geoq import plots
from geoq.rollout import RolloutAssessment
from geoq.rollout.horizon import Trust
from geoq.rollout.joint_band import JointBand


@pytest.fixture
def axes(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    yield axes
    figure.savefig(tmp_path / "picture.png")  # fails if a label cannot be drawn
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert axes.get_legend() is not None


def test_the_error_over_the_input(axes, scene):
    _, x, error, a = scene
    drawn = plots.error_over_input(
        axes, x, error, a.error_hat[:, 0], a.safe, (0.0, 1.0)
    )
    assert drawn is axes
    true, estimate = axes.lines[:2]
    np.testing.assert_array_equal(true.get_ydata(), error)
    np.testing.assert_array_equal(estimate.get_ydata(), a.error_hat[:, 0])
    assert true.get_linestyle() != estimate.get_linestyle()


def test_estimates_against_errors(axes, scene):
    _, _, error, a = scene
    plots.estimate_against_error(axes, error, a.error_hat[:, 0], a.safe)
    shown = sum(len(points.get_offsets()) for points in axes.collections)
    assert shown == len(error)


def test_a_summary_shows_each_query_once_and_the_threshold(scene):
    *_, a = scene
    figure = Figure()
    (axes,) = plots.summary(figure, a)
    figure.draw_without_rendering()
    safe, unsafe = (points.get_offsets() for points in axes.collections)
    np.testing.assert_allclose(safe[:, 1], a.error_hat[a.safe, 0])
    np.testing.assert_allclose(unsafe[:, 0], a.support_score[~a.safe])
    (threshold,) = axes.lines
    assert set(threshold.get_xdata()) == {a.threshold}
    assert axes.get_title() == f"{a.safe.sum()} of 200 queries safe"


def test_the_title_of_a_summary_gives_the_coverage_of_safe_and_other_queries(scene):
    _, _, error, a = scene
    _, right = plots.summary(Figure(), a, error=error[:, None])
    held = error <= a.error_hat[:, 0]
    title = f"covered: {held[a.safe].mean():.1%} of safe, {held[~a.safe].mean():.1%} of not safe; level 0.95"
    assert right.get_title() == title
    assert sum(len(points.get_offsets()) for points in right.collections) == 200


def test_a_summary_of_many_values_draws_some_and_counts_all(scene, monkeypatch):
    _, _, error, a = scene
    monkeypatch.setattr(plots.answers, "MOST_POINTS", 70)
    _, right = plots.summary(Figure(), a, error=error[:, None])
    assert sum(len(points.get_offsets()) for points in right.collections) == 70
    assert (
        f"{(error <= a.error_hat[:, 0])[a.safe].mean():.1%} of safe"
        in right.get_title()
    )


def test_a_summary_of_perfect_answers_can_be_drawn(scene):
    *_, a = scene
    zero = np.zeros_like(a.error_hat)
    perfect = with_bound(replace(a, support_score=zero[:, 0], threshold=0.0), zero)
    figure = Figure()
    plots.summary(figure, perfect, error=zero)
    figure.draw_without_rendering()


def of_fields(a, shape):
    """Return the assessment with random fields of this shape as its answers."""
    values = np.random.default_rng(0).random((len(a), *shape))
    return with_bound(replace(a, prediction=values - 0.5), values)


def with_bound(a, bound):
    return replace(a, error_hat=bound, anchor_error=bound, increment=0 * bound)


def as_tensors(a):
    arrays = {
        name: torch.from_numpy(value)
        for name, value in vars(a).items()
        if isinstance(value, np.ndarray)
    }
    return replace(a, **arrays)


@pytest.mark.parametrize("kind", [lambda a: a, as_tensors])
def test_maps_of_errors_have_the_same_range(scene, kind):
    a = of_fields(scene[-1], (3, 4, 6))
    row = int(np.flatnonzero(a.safe)[0])
    expected, error = a.error_hat / 4, a.error_hat / 2
    error[row, 2, 0] = 2.0  # a quarter of the cells is not covered
    figure = Figure(figsize=(13, 3))
    shown = kind(a)
    if isinstance(shown.error_hat, torch.Tensor):
        expected, error = torch.from_numpy(expected), torch.from_numpy(error)
        row = torch.tensor(row)
    axes = plots.fields(figure, shown, row, channel=2, expected=expected, error=error)
    figure.draw_without_rendering()
    row = int(row)
    for panel, values in zip(
        axes, (a.prediction, a.error_hat, expected, error), strict=True
    ):
        np.testing.assert_array_equal(panel.images[0].get_array(), values[row, 2])
    assert {panel.images[0].get_clim() for panel in axes[1:]} == {(0, 2.0)}
    assert axes[3].get_title() == "true error, 75.0% within the bound"
    title = figure.get_suptitle().replace("\n", " ")
    assert title.startswith(f"query {row}, channel 2: safe (support score")


def test_the_title_of_maps_states_that_a_query_is_not_safe(scene):
    a = of_fields(scene[-1], (4, 6))
    figure = Figure()
    plots.fields(figure, a, 0)
    title = figure.get_suptitle().replace("\n", " ")
    assert title.startswith("query 0: NOT safe (support score")


def test_maps_are_arranged_to_be_large(scene):
    a = of_fields(scene[-1], (5, 5))
    given = {"expected": a.error_hat, "error": a.error_hat}

    def shape(*size):
        axes = plots.fields(Figure(figsize=size), a, 0, **given)
        return axes[0].get_gridspec().get_geometry()

    assert [shape(12, 3), shape(6, 6), shape(3, 12)] == [(1, 4), (2, 2), (4, 1)]


def test_titles_fit_the_figure(scene):
    a = of_fields(scene[-1], (4, 6))
    for width in (3, 6.4, 13):
        figure = Figure(figsize=(width, 3))
        plots.fields(figure, a, 0)
        figure.draw_without_rendering()
        extent = figure._suptitle.get_window_extent()
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width


def test_fields_on_a_line_are_lines(scene):
    a = of_fields(scene[-1], (2, 30))
    error = 2 * a.error_hat
    upper, lower = plots.fields(Figure(), a, 5, channel=1, error=error)
    np.testing.assert_array_equal(upper.lines[0].get_ydata(), a.prediction[5, 1])
    bound, true = lower.lines
    np.testing.assert_array_equal(bound.get_ydata(), a.error_hat[5, 1])
    np.testing.assert_array_equal(true.get_ydata(), error[5, 1])
    assert bound.get_linestyle() != true.get_linestyle()


def test_one_error_for_all_channels_is_shown_with_each_of_them(scene):
    a = of_fields(scene[-1], (3, 4, 6))
    a = with_bound(a, a.error_hat.max(axis=1))
    first, bound = plots.fields(Figure(), a, 7, channel=2)
    np.testing.assert_array_equal(first.images[0].get_array(), a.prediction[7, 2])
    np.testing.assert_array_equal(bound.images[0].get_array(), a.error_hat[7])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"row": 200}, "row=200, but the queries of the assessment are 0 to 199"),
        ({"row": -1}, "row=-1, but the queries of the assessment are 0 to 199"),
        ({"channel": 3}, "channel=3, but the channels of prediction are 0 to 2"),
        ({"channel": -1}, "channel=-1, but the channels of prediction are 0 to 2"),
        ({"extent": (0, 1, 2)}, r"extent=\(0, 1, 2\), but it has the edges"),
        ({"extent": (0, np.nan)}, "extent=.*but it has the edges"),
        ({"truth": np.zeros((200, 4, 6))}, r"truth has shape \(200, 4, 6\), but"),
    ],
)
def test_rows_channels_and_grids_that_do_not_exist_are_refused(
    scene, settings, message
):
    a = of_fields(scene[-1], (3, 4, 6))
    with pytest.raises(ValueError, match=message):
        plots.fields(Figure(), a, **({"row": 0} | settings))


def test_answers_that_are_not_fields_are_refused(scene):
    *_, a = scene
    with pytest.raises(ValueError, match=r"shape \(1,\), so it is no field.*a plane"):
        plots.fields(Figure(), a, 0, extent=(0, 1, 0, 1))
    number = with_bound(a, a.error_hat[:, 0])
    with pytest.raises(ValueError, match=r"error_hat .* shape \(\), but.*summary"):
        plots.fields(Figure(), number, 0)
    volume = of_fields(a, (2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"three axes.*error_hat\[row, ..., 0\]"):
        plots.fields(Figure(), volume, 0)


def test_the_truth_has_the_range_of_the_prediction(scene):
    a = of_fields(scene[-1], (4, 6))
    truth = a.prediction + 1
    drawn, true, _ = plots.fields(Figure(), a, 3, truth=truth, extent=(0, 3, -1, 1))
    np.testing.assert_array_equal(true.images[0].get_array(), truth[3])
    ends = a.prediction[3].min(), truth[3].max()
    assert drawn.images[0].get_clim() == true.images[0].get_clim() == ends
    assert drawn.images[0].get_extent() == [0, 3, -1, 1]
    a = of_fields(scene[-1], (30,))
    upper, _ = plots.fields(Figure(), a, 3, truth=a.prediction + 1, extent=(0, 3))
    assert [line.get_label() for line in upper.lines] == ["prediction", "truth"]
    np.testing.assert_allclose(upper.lines[0].get_xdata()[[0, -1]], [0.05, 2.95])


def test_wrong_cells_have_a_fixed_range(scene):
    a = of_fields(scene[-1], (4, 6))
    a = with_bound(a, np.zeros_like(a.error_hat))
    expected = a.error_hat + 0.002
    _, *maps = plots.fields(Figure(), a, 0, expected=expected)
    assert {panel.images[0].get_clim() for panel in maps} == {(0, 1)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda error: error[:5],
            r"error has shape \(5, 1\), but the bounds have shape \(200, 1\)",
        ),
        (
            lambda error: -error,
            "error contains -.*never negative; pass errors and not outputs",
        ),
        (
            lambda error: error * np.nan,
            "not finite in 200 of 200 places where the bound is finite",
        ),
    ],
)
def test_arrays_that_cannot_be_errors_are_refused(scene, spoil, message):
    *_, a = scene
    with pytest.raises(ValueError, match=message):
        plots.summary(Figure(), a, error=spoil(a.error_hat))


def forecasts(tolerance):
    """Return three rollouts of six steps: one trusted to the end, one up to its tolerance, one that diverges."""
    bound = np.full((3, 6, 2), 0.1)
    bound[1, 3:] = 0.9
    bound[2, 2:] = np.inf
    safe = np.isfinite(bound).all(axis=2)
    horizons = {}
    if tolerance is not None:
        horizons = {
            "trust": Trust(
                0.5,
                (0.1, 0.4, 0.8, 1.6),
                0.05,
                n_rollouts=40,
                n_apart=40,
                quantile=0.95,
            ),
            "trusted_horizon": np.array([6, 3, 2]),
            "bound_over_tolerance": (bound / tolerance).max(axis=2),
        }
    return RolloutAssessment(
        prediction=np.where(np.isfinite(bound), 0.0, np.nan),
        error_hat=bound,
        safe=safe,
        support_score=np.where(safe, 0.5, 2.0),
        supported_horizon=np.array([6, 6, 2]),
        diverged_at=np.array([0, 0, 3]),
        threshold=1.0,
        meaning=("near", "far"),
        n_calibrated=4,
        joint=JointBand(torch.ones(9, 4), 10 * torch.arange(9)),
        tolerance=tolerance,
        **horizons,
    )


@pytest.mark.parametrize("kind", [lambda a: a, as_tensors])
def test_rollouts_show_bound_and_trust(kind):
    a = forecasts(0.5)
    error = abs(a.prediction - 0.05)
    figure, shown = Figure(figsize=(7, 6)), kind(a)
    whole, until, ends = plots.rollouts(
        figure, shown, [0, 1, 2], error=error if shown is a else torch.from_numpy(error)
    )
    figure.draw_without_rendering()
    curves = {line.get_label(): line for line in until.lines}
    np.testing.assert_array_equal(curves["bound"].get_ydata(), a.error_hat[1, :, 0])
    np.testing.assert_array_equal(curves["true error"].get_ydata(), error[1, :, 0])
    assert set(curves["tolerance"].get_ydata()) == {0.5}
    limit = 0.5 * np.array(a.trust.largest_ratio)
    assert (limit[:-1] == 0.5).tolist() == [True, False, False]
    np.testing.assert_array_equal(curves["limit of trust"].get_ydata(), limit)
    assert set(curves["calibration horizon"].get_xdata()) == {4}
    (trusted,) = until.patches
    assert (trusted.get_x(), trusted.get_width()) == (0.5, 3)
    assert whole.get_title() == "rollout 0: trusted for 6 of 6 steps"
    assert "step 4: the largest bound is 1.8 times its tolerance" in until.get_title()
    curves = {line.get_label(): line for line in ends.lines}
    assert set(curves["diverged"].get_xdata()) == {3}
    assert curves["step not safe"].get_xdata().tolist() == [3, 4, 5, 6]
    assert "diverged" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_rollouts_are_divided_by_a_tolerance_per_coordinate():
    a = forecasts(np.array([0.5, 0.2]))
    (axes,) = plots.rollouts(Figure(), a, [0])
    curves = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(curves["bound"].get_ydata(), 0.5)
    assert set(curves["tolerance"].get_ydata()) == {1.0}


def test_rollouts_without_a_tolerance_are_supported_and_not_trusted():
    _, until, _ = plots.rollouts(Figure(), forecasts(None), [0, 1, 2])
    (supported,) = until.patches
    assert supported.get_label() == "supported"
    assert supported.get_width() == 6
    assert until.get_title() == "rollout 1: supported for 6 of 6 steps"


def test_rollouts_that_do_not_exist_are_refused():
    a = forecasts(None)
    with pytest.raises(
        ValueError, match="rows=3, but the rollouts of the assessment are 0 to 2"
    ):
        plots.rollouts(Figure(), a, [0, 3])
    with pytest.raises(ValueError, match="rows is empty"):
        plots.rollouts(Figure(), a, [])
