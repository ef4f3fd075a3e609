import pytest
import torch
from torch.testing import assert_close

from geoq.increments.prior import N_BINS, CellPrior, PredictionPrior


def rows(value):
    return torch.arange(len(value))


def fit(value, greater):
    """One channel of one cell, a row per prediction."""
    value, greater = torch.as_tensor(value).float(), torch.as_tensor(greater)
    return PredictionPrior.fit(
        greater.bool()[:, None, None], value[:, None, None], rows(value)
    )


def at(shares, *values):
    return shares(torch.tensor(values)[:, None, None]).sigmoid().flatten()


def test_shares_of_few_values_are_counted_and_linear_in_between_as_logits():
    """Of 990 predictions of 1 half are wrong, of 990 of 3 a tenth."""
    shares = fit(
        [1.0] * 990 + [3.0] * 990, [1] * 495 + [0] * 495 + [1] * 99 + [0] * 891
    )
    assert_close(at(shares, 1.0, 3.0), torch.tensor([0.5, 0.1]), rtol=0.01, atol=0)
    half = at(shares, 1.0, 3.0).logit().mean().sigmoid()
    assert_close(at(shares, 2.0), half[None])
    assert_close(at(shares, -50.0, 50.0), at(shares, 1.0, 3.0))


def test_a_law_of_the_prediction_is_found_however_rare_its_errors():
    """Nearly all predictions are certain; those in doubt are a hundredth, and hold the errors."""
    generator = torch.Generator().manual_seed(0)
    certain = 8 + torch.rand(200_000, generator=generator)
    doubtful = 4 * torch.rand(2_000, generator=generator)
    value = torch.cat([certain, doubtful])
    chance = (-2 * value).sigmoid() * 2  # 1 at 0, 0.04 at 2
    greater = torch.rand(len(value), generator=generator) < chance
    shares = fit(value, greater)
    asked = torch.tensor([0.25, 0.5, 1.0, 1.5, 2.0])
    found = at(shares, *asked.tolist())
    assert_close(found, 2 * (-2 * asked).sigmoid(), rtol=0.35, atol=0.02)
    assert (at(shares, 8.5) < 1e-4).all()


def test_what_the_prediction_does_not_tell_is_left_to_the_cells():
    """A surrogate that answers 0 or 1 anywhere, and errs in the first cell by half, in the second hardly."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.rand(2000, 1, 2, generator=generator) < 0.5).float()
    chance = torch.tensor([0.5, 0.02])
    greater = torch.rand(2000, 1, 2, generator=generator) < chance
    found = PredictionPrior.fit(greater, value, rows(value))(value[:5]).sigmoid()
    assert_close(found, chance.expand_as(found), rtol=0.1, atol=0.01)


def test_prediction_and_cell_add_as_logits():
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(5000, 1, 3, generator=generator)
    cell = torch.tensor([-1.0, -3.0, -4.0])
    greater = torch.rand(5000, 1, 3, generator=generator) < (value + cell).sigmoid()
    asked = value[:200]
    moderate = asked.abs() < 1.5
    gap = (PredictionPrior.fit(greater, value, rows(value))(asked) - asked - cell)[
        moderate
    ]
    blind = (CellPrior.fit(greater)(asked) - asked - cell)[moderate]
    assert gap.abs().mean() < 0.3
    assert blind.abs().mean() > 0.6


def test_channels_have_tables_of_their_own():
    """The first channel errs where 0 is predicted, the second where 1 is."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.rand(4000, 2, 1, generator=generator) < 0.5).float()
    coin = torch.rand(4000, 2, 1, generator=generator) < 0.5
    greater = coin & (value == torch.tensor([0.0, 1.0])[:, None])
    shares = PredictionPrior.fit(greater, value, rows(value))
    none, all_ = (
        shares(torch.full((1, 2, 1), v)).sigmoid().flatten() for v in (0.0, 1.0)
    )
    assert_close(none, torch.tensor([0.5, 0.0]), rtol=0.1, atol=0.01)
    assert_close(all_, torch.tensor([0.0, 0.5]), rtol=0.1, atol=0.01)


@pytest.mark.parametrize("share", [0, 1])
def test_what_never_or_always_happens_is_not_taken_for_certain(share):
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    answer = at(fit(value, torch.full((1000,), share)), 0.0, 1e9, -1e9)
    assert ((answer > 0) & (answer < 1)).all()
    assert ((answer - share).abs() < 0.02).all()


def test_equal_predictions_have_one_share():
    shares = fit([2.0] * 1000, [1] * 300 + [0] * 700)
    assert shares.value.shape == (1, N_BINS)
    assert_close(at(shares, 2.0, 5.0), torch.tensor([0.3, 0.3]), rtol=0.01, atol=0)


def test_chunks_do_not_change_the_shares(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(50, 2, 30, generator=generator)
    greater = torch.rand(50, 2, 30, generator=generator) < value.sigmoid()
    whole = PredictionPrior.fit(greater, value, rows(value))
    monkeypatch.setattr("geoq.surrogate.CHUNK_NUMBERS", 8 * 30 * 7)
    parts = PredictionPrior.fit(greater, value, rows(value))
    for name, table in whole.state_dict().items():
        assert_close(parts.state_dict()[name], table)


def test_cells_have_the_share_of_their_errors():
    greater = torch.zeros(100, 1, 3, dtype=torch.bool)
    greater[:50, 0, 0] = greater[:10, 0, 1] = greater[:1, 0, 2] = True
    shares = CellPrior.fit(greater)(torch.zeros(4, 1, 3)).sigmoid()
    assert_close(shares, torch.tensor([[0.5, 0.1, 0.01]]))


def test_few_errors_leave_no_peaks():
    """Of 10,000 predictions that tell nothing some are wrong, however few: nowhere a share far above theirs."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(100, 1, 100, generator=generator)
    for n_greater in (1, 3, 10, 31):
        greater = torch.zeros(10_000, dtype=torch.bool)
        greater[torch.randperm(10_000, generator=generator)[:n_greater]] = True
        shares = PredictionPrior.fit(greater.view(100, 1, 100), value, rows(value))
        assert shares(value).sigmoid().max() < 0.05


def test_cells_that_tell_nothing_are_not_believed():
    """Of 20 rows a cell's own share looks as if it told much; on other rows that would cost."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(120, 1, 4000, generator=generator)
    truth = -1.5 * value.abs() - 3
    greater = torch.rand(value.shape, generator=generator) < truth.sigmoid()
    shares = PredictionPrior.fit(greater[:20], value[:20], rows(value[:20]))

    def loss(logit):
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logit, greater[20:].float()
        )

    constant = greater[:20].float().mean().logit().expand_as(truth[20:])
    assert loss(shares(value[20:])) < loss(constant)
    assert loss(shares(value[20:])) < 1.02 * loss(truth[20:])


def test_errors_in_few_cells_are_found():
    """Not only in cells that were looked at by chance."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.zeros(64, 64)
    chance[:, 4] = 0.3
    value = torch.randn(4000, 1, 64 * 64, generator=generator)
    greater = torch.rand(value.shape, generator=generator) < chance.flatten()
    found = (
        PredictionPrior.fit(greater, value, rows(value))(value[:50])
        .sigmoid()
        .mean(dim=0)
    )
    assert_close(found.view(64, 64)[:, 4].mean(), torch.tensor(0.3), rtol=0.1, atol=0)


def test_copies_of_a_point_do_not_vouch_for_each_other():
    """Errors are noise, but each row is there twice: cells that judge themselves by a copy would seem to know them."""
    generator = torch.Generator().manual_seed(0)
    value = torch.zeros(10, 1, 400)
    greater = torch.rand(10, 1, 400, generator=generator) < 0.1
    twice, unit = greater.repeat(2, 1, 1), torch.arange(10).repeat(2)
    honest = PredictionPrior.fit(twice, value.repeat(2, 1, 1), unit)
    fooled = PredictionPrior.fit(twice, value.repeat(2, 1, 1), torch.arange(20))
    assert honest.offset.std() < 0.2 * fooled.offset.std()


def test_one_row_is_enough():
    greater = torch.tensor([[[True, False, False, False]]])
    shares = PredictionPrior.fit(greater, torch.zeros(1, 1, 4), torch.zeros(1).long())
    assert shares(torch.zeros(2, 1, 4)).isfinite().all()
