"""Pictures show the values of the assessment and the errors that are passed."""

from dataclasses import replace

import numpy as np
import pytest
from made import Largest
from matplotlib.figure import Figure

from geoq import GeoQ, Grid, Mesh, RandomFolds, Region, RolloutGeoQ, plots
from geoq.data.domain import Layout, Table
from geoq.parts import Norm
from geoq.regions.field_scores import Windows
from geoq.rollout.fitted import RolloutAssessment


def test_the_error_over_the_input(scene, tmp_path):
    _, x, error, a = scene
    bound, figure = a.error_hat[:, 0], Figure()
    axes = plots.error_over_input(figure.subplots(), x, error, bound, a.safe, (0.0, 1.0))
    figure.savefig(tmp_path / "picture.png")  # fails if a label cannot be drawn
    true, estimate = axes.lines[:2]
    np.testing.assert_array_equal(true.get_ydata(), error)
    np.testing.assert_array_equal(estimate.get_ydata(), bound)
    assert true.get_linestyle() != estimate.get_linestyle()


def test_a_summary_shows_each_query_once_and_the_threshold(scene):
    *_, a = scene
    figure = Figure()
    (axes,) = plots.summary(figure, a)
    figure.draw_without_rendering()
    safe, unsafe = (points.get_offsets() for points in axes.collections)
    np.testing.assert_allclose(safe[:, 1], a.error_hat[a.safe, 0])
    np.testing.assert_allclose(unsafe[:, 0], a.support_score[~a.safe])
    (threshold,) = axes.lines
    assert set(threshold.get_xdata()) == {1}
    assert axes.get_title() == f"{a.safe.sum()} of 200 queries safe"
    assert axes.get_ylabel() == "error bound"


def test_the_title_of_a_summary_gives_the_coverage_of_safe_and_other_queries(scene, monkeypatch):
    _, _, error, a = scene
    monkeypatch.setattr("geoq.plots.answers.MOST_POINTS", 70)
    _, right = plots.summary(Figure(), a, error=error[:, None])
    held = error <= a.error_hat[:, 0]
    title = f"covered: {held[a.safe].mean():.1%} of safe, {held[~a.safe].mean():.1%} of not safe"
    assert right.get_title() == f"{title}; level 0.95"
    assert sum(len(points.get_offsets()) for points in right.collections) == 70


def of_fields(a, shape, domain=None):
    """Return the assessment with random fields of this shape as its answers."""
    values = np.random.default_rng(0).random((len(a), *shape))
    domain = domain or Grid(min(2, len(shape)))
    cells = shape[len(shape) - domain.n_axes :]
    fitted = replace(a.fitted, layout=Layout(domain, cells, on_cells=True))
    return with_bound(replace(a, prediction=values - 0.5, fitted=fitted), values)


def with_bound(a, bound):
    return replace(a, error_hat=bound, anchor_error=bound, increment=0 * bound)


def as_tensor(array):
    return pytest.importorskip("torch").from_numpy(array)


@pytest.mark.parametrize("as_kind", [np.asarray, as_tensor])
def test_maps_of_errors_have_the_same_range(scene, as_kind):
    a = of_fields(scene[-1], (3, 4, 6))
    row = int(np.flatnonzero(a.safe)[0])
    expected, error = a.error_hat / 4, a.error_hat / 2
    error[row, 2, 0] = 2.0  # a quarter of the cells is not covered
    arrays = {n: as_kind(v) for n, v in vars(a).items() if isinstance(v, np.ndarray)}
    shown = replace(a, **{name: array for name, array in arrays.items() if name != "lost"})
    figure = Figure(figsize=(13, 3))
    names = {"expected": as_kind(expected), "error": as_kind(error)}
    axes = plots.fields(figure, shown, row, channel=2, **names)
    figure.draw_without_rendering()
    for panel, values in zip(axes, (a.prediction, a.error_hat, expected, error), strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), values[row, 2])
    assert {panel.images[0].get_clim() for panel in axes[1:]} == {(0, 2.0)}
    assert axes[3].get_title() == "true error, 75.0% within the bound"
    title = figure.get_suptitle().replace("\n", " ")
    assert title.startswith(f"query {row}, channel 2: safe (support score")
    plots.fields(figure := Figure(), a, 0)
    assert figure.get_suptitle().startswith("query 0, channel 0: NOT safe (")


def test_fields_on_a_line_are_lines(scene):
    a = of_fields(scene[-1], (2, 30), Grid(1))
    error, truth = 2 * a.error_hat, a.prediction + 1
    upper, lower = plots.fields(Figure(), a, 5, channel=1, error=error, truth=truth, extent=(0, 3))
    for line, values in zip(upper.lines, (a.prediction, truth), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values[5, 1])
    bound, true = lower.lines
    np.testing.assert_array_equal(bound.get_ydata(), a.error_hat[5, 1])
    np.testing.assert_array_equal(true.get_ydata(), error[5, 1])
    assert bound.get_linestyle() != true.get_linestyle()
    np.testing.assert_allclose(upper.lines[0].get_xdata()[[0, -1]], [0.05, 2.95])


def test_meshes_are_maps_in_the_plane_and_lines_on_a_line(scene, tmp_path):
    nodes = np.random.default_rng(0).uniform(size=(40, 2))
    a = of_fields(scene[-1], (40,), Mesh(nodes))
    figure = Figure()
    first, _ = plots.fields(figure, a, 3)
    figure.savefig(tmp_path / "mesh.png")
    (drawn,) = first.collections
    assert len(drawn.get_array()) > 40  # triangles between the nodes
    a = of_fields(scene[-1], (40,), Mesh(nodes[:, :1]))
    upper, _ = plots.fields(Figure(), a, 3)
    order = np.argsort(nodes[:, 0])
    np.testing.assert_array_equal(upper.lines[0].get_xdata(), nodes[order, 0])
    np.testing.assert_array_equal(upper.lines[0].get_ydata(), a.prediction[3, order])


def test_a_volume_is_drawn_by_layers_the_one_with_the_largest_bound_first(scene):
    a = of_fields(scene[-1], (2, 3, 4, 5), Grid(3))
    a.error_hat[7, 1, 2, 0, 0] = 9.0
    support = np.arange(60.0).reshape(3, 4, 5)
    for layer, shown in ((None, 2), (1, 1)):
        figure = Figure()
        axes = plots.fields(figure, a, 7, channel=1, layer=layer, support=support)
        drawn = a.prediction[7, 1], a.error_hat[7, 1], support
        for panel, values in zip(axes, drawn, strict=True):
            np.testing.assert_array_equal(panel.images[0].get_array(), values[shown])
        assert f"channel 1, layer {shown} (of 0 to 2):" in figure.get_suptitle().replace("\n", " ")
    with pytest.raises(IndexError, match="layer=3, but 3 were"):
        plots.fields(Figure(), a, 7, layer=3)


@pytest.mark.parametrize("spike", [True, False])
def test_the_panel_of_support_has_the_limit_and_the_title_the_reason(spike):
    x = np.random.default_rng(0).normal(size=(150, 48))
    region = Region((Windows(),)) if spike else Region()
    how = {"domain": Grid(1), "folds": RandomFolds(5), "bound_model": Largest()}
    estimator = GeoQ(np.sin, None, safe_region=region, **how).fit(x, np.sin(x) + 0.02 * x)
    answer = estimator.assess(x[:1] + (20 * (np.arange(48) == 30) if spike else 0.4))
    support = answer.support_map(0)
    *_, panel = plots.fields(figure := Figure(), answer, 0, support=support)
    np.testing.assert_array_equal(panel.lines[0].get_ydata(), support)
    assert panel.lines[1].get_ydata() == [1, 1]
    words = "" if spike else ", because of the whole field and not of a place"
    title = figure.get_suptitle().replace("\n", " ")
    assert title.endswith(f"safe up to 1){words}: {answer.explanation(0)}")
    assert (" around cell " in title) == spike
    a = of_fields(answer, (4, 6), Grid(2))
    *_, panel = plots.fields(figure := Figure(), a, 0, support=support[:24].reshape(4, 6))
    assert panel.get_title() == "support score"
    assert 1 in {line.get_ydata()[0] for line in figure.axes[-1].lines}


def test_triangles_do_not_fill_a_notch_and_nodes_without_triangles_are_points(scene):
    at = np.linspace(0, 1, 21)
    square = np.stack(np.meshgrid(at, at), axis=-1).reshape(-1, 2)
    fine = np.column_stack([np.tile(at, 8), np.repeat(np.geomspace(1e-5, 1e-4, 8), 21)])
    cloud = np.random.default_rng(0).uniform(size=(40, 3))
    drawn = []
    for nodes in (square[(square <= 0.5).any(axis=1)], fine, cloud):
        a = of_fields(scene[-1], (len(nodes),), Mesh(nodes))
        drawn.append(plots.fields(Figure(), a, 3)[0])
    middles = [path.vertices[:3].mean(axis=0) for path in drawn[0].collections[0].get_paths()]
    inside = (np.array(middles) <= 0.5).any(axis=1)
    assert inside.sum() == 600  # two for each of the 300 squares
    assert (~inside).sum() <= 6  # at the corner
    assert len(drawn[1].collections[0].get_offsets()) == len(fine)
    assert drawn[2].name == "3d"


@pytest.mark.parametrize(("settings", "message"), [
    ({"row": 200}, "row=200, but 200 were assessed; choose 0 to 199"),
    ({"channel": 3}, "channel=3, but 3 were assessed; choose 0 to 2"),
    ({"truth": np.zeros((200, 4, 6))}, r"truth has shape \(200, 4, 6\), but the predictions"),
    ({"error": -np.ones((200, 3, 4, 6))}, "never negative; pass errors and not outputs"),
])  # fmt: skip
def test_rows_channels_and_arrays_that_do_not_belong_to_the_answer_raise(scene, settings, message):
    a = of_fields(scene[-1], (3, 4, 6))
    with pytest.raises((ValueError, IndexError), match=message):
        plots.fields(Figure(), a, **({"row": 0} | settings))


def test_answers_that_are_no_fields_and_other_mistakes_raise(scene, unchecked):
    _, _, error, a = scene
    assert isinstance(a.fitted.layout.domain, Table | None)
    with pytest.raises(ValueError, match=r"shape \(1,\), but a picture shows a field; use plots."):
        plots.fields(Figure(), a, 0)
    fields = of_fields(a, (4, 6))
    with pytest.raises(ValueError, match="row=3 is NOT safe"):
        plots.fields(Figure(), replace(fields, lost=np.arange(200) == 3, asked=scene[1]), 3)
    with pytest.raises(ValueError, match=r"error has shape \(200,\), but the bounds"):
        plots.summary(Figure(), a, error=error)
    with pytest.raises(TypeError, match="figure is a Axes, but an empty figure is needed"):
        plots.summary(Figure().subplots(), a)


def forecasts(tolerance):
    """Return three rollouts of six steps: one trusted to the end, one up to its tolerance, one that diverges."""
    angle = 0.2 * np.arange(100)
    states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    matrix = np.array([[0.98, 0.2], [-0.2, 0.98]])
    estimator = RolloutGeoQ(lambda x: x @ matrix, None, n_calibration=4).fit(states)
    a = estimator.assess(states[:3], 6, None if tolerance is None else np.asarray(tolerance))
    bound = np.full((3, 6, 2), 0.1)
    bound[1, 3:] = 0.9
    bound[2, 2:] = np.inf
    safe = np.isfinite(bound).all(axis=2)
    horizons = {}
    if tolerance is not None:
        ratio = (bound / tolerance).max(axis=2)
        horizons = {"trusted_horizon": np.array([6, 3, 2]), "bound_over_tolerance": ratio}
    return replace(
        a,
        prediction=np.where(np.isfinite(bound), 0.0, np.nan),
        error_hat=bound,
        safe=safe,
        support_score=np.where(safe, 0.5, 2.0),
        supported_horizon=np.array([6, 6, 2]),
        diverged_at=np.array([0, 0, 3]),
        **horizons,
    )


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


def test_rollouts_show_bound_and_trust():
    a = forecasts(0.5)
    assert isinstance(a, RolloutAssessment)
    error = abs(a.prediction - 0.05)
    figure = Figure(figsize=(7, 6))
    whole, until, ends = plots.rollouts(figure, a, [0, 1, 2], error=error)
    figure.draw_without_rendering()
    curves = lines_of(until)
    np.testing.assert_array_equal(curves["bound"].get_ydata(), a.error_hat[1, :, 0])
    np.testing.assert_array_equal(curves["true error"].get_ydata(), error[1, :, 0])
    assert set(curves["tolerance"].get_ydata()) == {0.5}
    limit = 0.5 * np.array(a.trust.largest_ratio)
    np.testing.assert_array_equal(curves["limit of trust"].get_ydata(), limit)
    assert set(curves["calibration horizon"].get_xdata()) == {4}
    (trusted,) = until.patches
    assert (trusted.get_x(), trusted.get_width()) == (0.5, 3)
    assert whole.get_title() == "rollout 0: trusted for 6 of 6 steps"
    title = until.get_title().replace("\n", " ")
    assert "step 4: the largest bound is 1.8 times its tolerance" in title
    curves = lines_of(ends)
    assert set(curves["diverged"].get_xdata()) == {3}
    assert curves["step not safe"].get_xdata().tolist() == [3, 4, 5, 6]
    assert "diverged" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_rollouts_with_a_tolerance_of_a_norm_show_the_norm_at_whole_steps():
    plain, figure = forecasts(None), Figure()
    with pytest.warns(UserWarning, match="n_steps=20"):
        a = plain.fitted.assess(plain.asked, 20, Norm(np.array([3.0, 4.0])), None)
    (axes,) = plots.rollouts(figure, a, [1], error=np.full(a.error_hat.shape, 12.0))
    assert figure.get_supylabel() == "root mean square error / tolerance"
    bound, true = (lines_of(axes)[name].get_ydata() for name in ("bound", "true error"))
    np.testing.assert_allclose(bound, a.bound_over_tolerance[1])
    np.testing.assert_allclose(true, (25 / 2) ** 0.5)
    assert (axes.get_xticks() % 1 == 0).all()


def test_rollouts_without_a_tolerance_are_supported_and_not_trusted():
    _, until, _ = plots.rollouts(Figure(), forecasts(None), [0, 1, 2])
    (supported,) = until.patches
    assert (supported.get_label(), supported.get_width()) == ("supported", 6)
    assert until.get_title() == "rollout 1: supported for 6 of 6 steps"
    with pytest.raises(IndexError, match="rows=3, but 3 were assessed; choose 0 to 2"):
        plots.rollouts(Figure(), forecasts(None), [0, 3])
