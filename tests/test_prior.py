import pytest
import torch
from torch.testing import assert_close

from geoq.increments.prior import N_BINS, CellPrior, PredictionPrior


def fit(is_larger, prediction, group=None):
    """A fitted prior of predictions; each row is a group."""
    rows = torch.arange(len(prediction))
    return PredictionPrior().fit(
        is_larger, prediction, rows if group is None else group
    )


def fit_cell(value, is_larger):
    """The prior of one channel with one cell, from one prediction per row."""
    value, is_larger = torch.as_tensor(value).float(), torch.as_tensor(is_larger).bool()
    return fit(is_larger[:, None, None], value[:, None, None])


def frequency_at(prior, *values):
    return prior(torch.tensor(values)[:, None, None]).sigmoid().flatten()


def test_frequencies_are_interpolated_as_logits_between_two_predictions():
    """The prediction 1 is wrong in 495 of 990 cases, the prediction 3 in 99 of 990 cases."""
    prior = fit_cell(
        [1.0] * 990 + [3.0] * 990, [1] * 495 + [0] * 495 + [1] * 99 + [0] * 891
    )
    at_both = frequency_at(prior, 1.0, 3.0)
    assert_close(at_both, torch.tensor([0.5, 0.1]), rtol=0.01, atol=0)
    assert_close(frequency_at(prior, 2.0), at_both.logit().mean().sigmoid()[None])
    assert_close(frequency_at(prior, -50.0, 50.0), at_both)


def test_rare_errors_are_resolved():
    """One of eleven predictions is uncertain, and nearly all errors are there."""
    generator = torch.Generator().manual_seed(0)
    certain = 8 + torch.rand(200_000, generator=generator)
    uncertain = 4 * torch.rand(20_000, generator=generator)
    value = torch.cat([certain, uncertain])
    probability = (-2 * value).sigmoid() * 2  # 1 at 0, 0.04 at 2
    is_larger = torch.rand(len(value), generator=generator) < probability
    prior = fit_cell(value, is_larger)
    queries = torch.tensor([0.25, 0.5, 1.0, 1.5, 2.0])
    found = frequency_at(prior, *queries.tolist())
    assert_close(found, 2 * (-2 * queries).sigmoid(), rtol=0.15, atol=0)
    assert (frequency_at(prior, 8.5) < 1e-4).all()


def test_uninformative_predictions_leave_the_frequency_of_each_cell():
    """The predictions are random; half of the errors in the first cell are larger, and few in the second cell."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.rand(2000, 1, 2, generator=generator) < 0.5).float()
    probability = torch.tensor([0.5, 0.02])
    is_larger = torch.rand(2000, 1, 2, generator=generator) < probability
    found = fit(is_larger, value)(value[:5]).sigmoid()
    assert_close(found, probability.expand_as(found), rtol=0.1, atol=0.01)


def test_the_logits_of_prediction_and_cell_are_added():
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(5000, 1, 3, generator=generator)
    cell = torch.tensor([-1.0, -3.0, -4.0])
    is_larger = torch.rand(5000, 1, 3, generator=generator) < (value + cell).sigmoid()
    queries = value[:200]

    def mean_difference(rule):
        logit = rule.fit(is_larger, value, torch.arange(5000))(queries)
        difference = (logit - queries - cell).abs()
        return difference[queries.abs() < 1.5].mean()

    assert mean_difference(PredictionPrior()) < 0.3
    assert mean_difference(CellPrior()) > 0.6


def test_each_channel_has_its_own_table():
    """The first channel has errors where 0 is predicted, the second channel where 1 is predicted."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.rand(4000, 2, 1, generator=generator) < 0.5).float()
    coin = torch.rand(4000, 2, 1, generator=generator) < 0.5
    prior = fit(coin & (value == torch.tensor([0.0, 1.0])[:, None]), value)
    at_0, at_1 = (
        prior(torch.full((1, 2, 1), v)).sigmoid().flatten() for v in (0.0, 1.0)
    )
    assert_close(at_0, torch.tensor([0.5, 0.0]), rtol=0.1, atol=0.01)
    assert_close(at_1, torch.tensor([0.0, 0.5]), rtol=0.1, atol=0.01)


@pytest.mark.parametrize("frequency", [0, 1])
def test_frequencies_0_and_1_give_finite_logits(frequency):
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    prior = fit_cell(value, torch.full((1000,), frequency))
    found = frequency_at(prior, 0.0, 1e9, -1e9)
    assert ((found > 0) & (found < 1)).all()
    assert ((found - frequency).abs() < 0.02).all()


def test_equal_predictions_have_one_frequency():
    prior = fit_cell([2.0] * 1000, [1] * 300 + [0] * 700)
    assert prior.value.shape == (1, N_BINS)
    assert_close(
        frequency_at(prior, 2.0, 5.0), torch.tensor([0.3, 0.3]), rtol=0.01, atol=0
    )


def test_chunks_do_not_change_the_prior(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(50, 2, 30, generator=generator)
    is_larger = torch.rand(50, 2, 30, generator=generator) < value.sigmoid()
    whole = fit(is_larger, value)
    monkeypatch.setattr("geoq.arrays.CHUNK_NUMBERS", 8 * 30 * 7)
    parts = fit(is_larger, value)
    for name, table in whole.state_dict().items():
        assert_close(parts.state_dict()[name], table)


def test_the_cell_prior_is_the_frequency_of_each_cell():
    is_larger = torch.zeros(100, 1, 3, dtype=torch.bool)
    is_larger[:50, 0, 0] = is_larger[:10, 0, 1] = is_larger[:1, 0, 2] = True
    prior = CellPrior().fit(is_larger, torch.zeros(100, 1, 3), torch.arange(100))
    found = prior(torch.zeros(4, 1, 3)).sigmoid()
    assert_close(found, torch.tensor([[0.5, 0.1, 0.01]]))


def test_few_errors_make_no_peaks():
    """A few of 10,000 errors are larger, at random predictions: no prediction gets a high frequency."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(100, 1, 100, generator=generator)
    for n_larger in (1, 3, 10, 31):
        is_larger = torch.zeros(10_000, dtype=torch.bool)
        is_larger[torch.randperm(10_000, generator=generator)[:n_larger]] = True
        prior = fit(is_larger.view(100, 1, 100), value)
        assert prior(value).sigmoid().max() < 0.05


def test_uninformative_cells_do_not_raise_the_loss_on_new_rows():
    """The frequencies in 20 rows differ between cells by chance only."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(120, 1, 4000, generator=generator)
    truth = -1.5 * value.abs() - 3
    is_larger = torch.rand(value.shape, generator=generator) < truth.sigmoid()
    logit = fit(is_larger[:20], value[:20])(value[20:])

    def loss(logit):
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logit, is_larger[20:].float()
        )

    constant = is_larger[:20].float().mean().logit().expand_as(truth[20:])
    assert loss(logit) < loss(constant)
    assert loss(logit) < 1.02 * loss(truth[20:])


def test_errors_in_a_few_cells_are_sampled():
    """Errors are in one of 64 columns, and 131 of 4096 cells are sampled in each row."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.zeros(64, 64)
    probability[:, 4] = 0.3
    value = torch.randn(4000, 1, 64 * 64, generator=generator)
    is_larger = torch.rand(value.shape, generator=generator) < probability.flatten()
    found = fit(is_larger, value)(value[:50]).sigmoid().mean(dim=0)
    assert_close(found.view(64, 64)[:, 4].mean(), torch.tensor(0.3), rtol=0.1, atol=0)


def test_copies_of_a_row_in_one_group_do_not_make_cells_seem_informative():
    """Errors are noise, but each row occurs twice. If the copies are in different groups, a cell is validated by itself."""
    generator = torch.Generator().manual_seed(0)
    value = torch.zeros(10, 1, 400)
    is_larger = torch.rand(10, 1, 400, generator=generator) < 0.1
    twice, values = is_larger.repeat(2, 1, 1), value.repeat(2, 1, 1)
    grouped = fit(twice, values, group=torch.arange(10).repeat(2))
    separate = fit(twice, values, group=torch.arange(20))
    assert grouped.offset.std() < 0.2 * separate.offset.std()


def test_one_row_gives_finite_logits():
    is_larger = torch.tensor([[[True, False, False, False]]])
    prior = fit(is_larger, torch.zeros(1, 1, 4))
    assert prior(torch.zeros(2, 1, 4)).isfinite().all()


def test_predictions_that_do_not_belong_to_errors_are_refused():
    is_larger = torch.zeros(5, 1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"3 predictions and 4 errors; use prior=Cell"):
        fit(is_larger, torch.zeros(5, 3))
