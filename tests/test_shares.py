import pytest
import torch
from torch.testing import assert_close

from geoq.shares import N_BINS, CellShares, PredictedShares


def fit(value, greater):
    """One channel of one row."""
    value, greater = torch.as_tensor(value).float(), torch.as_tensor(greater)
    return PredictedShares.fit(greater.bool()[None, None], value[None, None])


def at(shares, *values):
    return shares(torch.tensor(values)[None, None])[0, 0].sigmoid()


def test_shares_of_few_values_are_counted_and_linear_in_between_as_logits():
    """Of 99 predictions of 1 49 are wrong, of 99 of 3 9; half a cell of each kind is added."""
    shares = fit([1.0] * 99 + [3.0] * 99, [1] * 49 + [0] * 50 + [1] * 9 + [0] * 90)
    assert_close(at(shares, 1.0, 3.0), torch.tensor([0.495, 0.095]))
    half = torch.tensor([0.495, 0.095]).logit().mean().sigmoid()
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


def test_channels_have_tables_of_their_own():
    value = torch.tensor([[0.0, 1.0]]).expand(200, 2, 2)
    greater = torch.zeros(200, 2, 2, dtype=torch.bool)
    greater[:100, 0, 0] = greater[:100, 1, 1] = True
    logit = PredictedShares.fit(greater, value)(value[:1])[0]
    assert_close(logit.sigmoid()[0], logit.sigmoid()[1].flip(0))
    assert logit[0, 0] == 0
    assert logit[0, 1] < -5


@pytest.mark.parametrize("share", [0, 1])
def test_what_never_or_always_happens_is_not_taken_for_certain(share):
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    answer = at(fit(value, torch.full((1000,), share)), 0.0, 1e9, -1e9)
    assert ((answer > 0) & (answer < 1)).all()
    assert ((answer - share).abs() < 0.02).all()


def test_equal_predictions_have_one_share():
    shares = fit([2.0] * 100, [1] * 30 + [0] * 70)
    assert shares.value.shape == (1, N_BINS)
    assert_close(at(shares, 2.0, 5.0), torch.tensor([30.5 / 101, 30.5 / 101]))


def test_chunks_do_not_change_the_shares(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(50, 2, 30, generator=generator)
    greater = torch.rand(50, 2, 30, generator=generator) < value.sigmoid()
    whole = PredictedShares.fit(greater, value)
    monkeypatch.setattr("geoq.surrogate.CHUNK_NUMBERS", 8 * 30 * 7)
    parts = PredictedShares.fit(greater, value)
    assert_close(parts.value, whole.value)
    assert_close(parts.logit, whole.logit)


def test_cells_have_the_share_of_their_errors():
    greater = torch.zeros(100, 1, 3, dtype=torch.bool)
    greater[:50, 0, 0] = greater[:10, 0, 1] = greater[:1, 0, 2] = True
    shares = CellShares.fit(greater)(torch.zeros(4, 1, 3)).sigmoid()
    assert_close(shares, torch.tensor([[0.5, 0.1, 0.01]]))
