import pytest
import torch
from torch.testing import assert_close

from geoq.increments import LowRankScale
from geoq.increments.scale import MIN_FRACTION
from geoq.quantiles import inverse_cdf_quantile, pinball_loss

SIZES = torch.tensor([1.0, 3.0, 0.2, 10.0], dtype=torch.float64)


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def even(error):
    return torch.full((len(error),), 1 / len(error), dtype=torch.float64)


def scale_of(error, scale, quantile=0.95, weight=None):
    weight = even(error) if weight is None else weight
    return scale.fit(error.__getitem__, weight, error[0], quantile)


def separable():
    """The size of the channel times a map of 6 x 8 cells."""
    return SIZES[:, None, None] * (2 * uniform(6, 8, seed=1)).exp()


def separable_errors(n=30, seed=2):
    """Errors whose 0.95 quantile is 0.95 times the separable scale."""
    return separable() * uniform(n, 4, 6, 8, seed=seed)


def test_a_tuple_of_weight_3_counts_as_three_tuples():
    error = uniform(7, 2, 3)
    weight = torch.tensor([3.0, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
    repeated = torch.cat([error[:1], error[:1], error])
    scale = LowRankScale(rank=1)
    weighted = scale_of(error, scale, 0.7, weight)
    assert_close(weighted, scale_of(repeated, scale, 0.7))


@pytest.mark.parametrize("seed", range(3))
def test_a_low_rank_scale_is_more_accurate_than_a_scale_for_each_cell(seed):
    """30 tuples with normal errors, whose 0.95 quantile is 1.96 times the scale."""
    noise = torch.randn(
        30, 4, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    error = separable() * noise.abs()

    def relative_error(scale):
        return float((scale / (1.96 * separable())).log().square().mean().sqrt())

    low_rank = relative_error(scale_of(error, LowRankScale(rank=1)))
    assert low_rank < 0.1
    assert low_rank < 0.6 * relative_error(inverse_cdf_quantile(error, 0.95))


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_coefficient_of_each_channel_minimises_its_pinball_loss(rank):
    error = separable_errors()
    scale = scale_of(error, LowRankScale(rank=rank))

    def loss(factor):
        missed = pinball_loss(error, (factor * scale).expand_as(error), 0.95)
        return missed.mean(dim=(0, 2, 3))

    for factor in (0.9, 0.99, 1.01, 1.1):
        assert (loss(1.0) <= loss(factor)).all()


def test_with_rank_0_the_scale_of_a_channel_is_the_quantile_of_all_its_errors():
    error = separable_errors()
    pooled = inverse_cdf_quantile(error.transpose(1, 3).reshape(-1, 4), 0.95)
    assert_close(
        scale_of(error, LowRankScale(rank=0)), pooled[:, None, None].expand(4, 6, 8)
    )


def test_at_full_rank_the_scale_of_a_channel_is_its_mean_error_times_a_number():
    error = separable_errors() + 0.1 * uniform(30, 4, 6, 8, seed=4)
    ratio = scale_of(error, LowRankScale(rank=4)) / error.mean(dim=0)
    assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_units_of_a_channel_change_only_its_own_scale(rank):
    error = separable_errors()
    unit = torch.tensor([1.0, 1e6, 1.0, 1e-6], dtype=torch.float64)[:, None, None]
    scale = LowRankScale(rank=rank)
    assert_close(scale_of(unit * error, scale), unit * scale_of(error, scale))


def test_the_scale_of_a_cell_without_errors_is_small_but_positive():
    error = separable_errors()
    error[:, 1, 2, 3] = 0
    scale = scale_of(error, LowRankScale(rank=4))
    fraction = scale[1, 2, 3] / scale[1].mean()
    assert 0.1 * MIN_FRACTION < fraction < 10 * MIN_FRACTION


def test_the_scale_of_a_channel_without_errors_is_smallest_in_any_unit():
    error = separable_errors()
    error[:, 3] = 0
    for unit in (1e-9, 1.0, 1e9):
        scale = scale_of(unit * error, LowRankScale())
        assert (scale[3] > 0).all()
        assert scale[3].max() < 0.1 * scale[:3].mean(dim=(1, 2)).min()


def test_the_scale_is_positive_where_the_quantile_of_the_errors_is_zero():
    """Three percent of the errors are positive."""
    wrong = uniform(200, 1, 6, 8, seed=5) < 0.03
    scale = scale_of(wrong * uniform(200, 1, 6, 8), LowRankScale(rank=1))
    assert (scale > 0).all()


def test_without_any_error_the_scale_is_constant():
    scale = scale_of(torch.zeros(10, 2, 6, 8), LowRankScale())
    assert_close(scale, torch.full_like(scale, MIN_FRACTION))


def test_all_dimensions_before_the_grid_are_channels():
    error = separable_errors()
    scale = LowRankScale(rank=2)
    assert_close(
        scale_of(error.reshape(30, 2, 2, 6, 8), scale),
        scale_of(error, scale).reshape(2, 2, 6, 8),
    )
    line = LowRankScale(n_spatial=1, rank=2)
    assert_close(
        scale_of(error.reshape(30, 4, 48), line),
        scale_of(error, scale).reshape(4, 48),
    )
