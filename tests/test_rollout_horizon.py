from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq.rollout.horizon import HeldOutRollouts, count_apart, over_tolerance


def drawn(generator, n, n_steps=30, spacing=1000):
    """Held-out rollouts whose errors grow at random rates, with bounds that do not depend on these rates."""
    size = torch.randn(n, 1, 1, generator=generator).mul(0.5).exp()
    noise = torch.rand(n, n_steps, 2, generator=generator)
    step = torch.arange(1, n_steps + 1)[:, None] / n_steps
    bound = step * torch.rand(n, 1, 1, generator=generator).add(1).expand_as(noise)
    return HeldOutRollouts(
        bound=bound,
        error=size * noise * step,
        supported=torch.randint(5, n_steps + 1, (n,), generator=generator),
        start=spacing * torch.arange(n),
        quantile=0.9,
    )


def trusted_steps(rollouts, trust, tolerance):
    within = trust.within(over_tolerance(rollouts.bound, tolerance))
    return torch.minimum(within.long().cumprod(dim=1).sum(dim=1), rollouts.supported)


def is_broken(rollouts, trust, tolerance):
    """Whether the error of each rollout exceeds the tolerance at a trusted step."""
    exceeds = (rollouts.error > tolerance).any(dim=2)
    step = torch.arange(exceeds.shape[1])
    return (exceeds & (step < trusted_steps(rollouts, trust, tolerance)[:, None])).any(
        dim=1
    )


def test_the_expected_fraction_of_broken_rollouts_is_the_one_of_split_conformal_prediction():
    generator, fractions = torch.Generator().manual_seed(0), []
    tolerance = torch.tensor(0.6)
    for _ in range(300):
        calibration, fresh = drawn(generator, 59), drawn(generator, 50)
        trust = calibration.trust(tolerance)
        assert trust.n_apart == 59
        fractions.append(float(is_broken(fresh, trust, tolerance).double().mean()))
    assert 0.08 < np.mean(fractions) < 0.105


@pytest.mark.parametrize("spacing", [1, 3, 1000])
def test_a_larger_tolerance_never_has_a_shorter_horizon(spacing):
    """Although longer horizons overlap more, so that fewer held-out rollouts count."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        rollouts = drawn(generator, 60, spacing=spacing)
        before = torch.zeros(60)
        for tolerance in torch.logspace(-1.5, 0.7, 40):
            steps = trusted_steps(rollouts, rollouts.trust(tolerance), tolerance)
            assert (steps >= before).all()
            before = steps


@pytest.mark.parametrize("spacing", [1, 3, 10, 1000])
def test_the_limit_is_the_largest_one_that_satisfies_the_inequality(spacing):
    """G / (G + 1) a / n + 1 / (G + 1) <= 1 - tau, or no broken rollout."""
    rollouts = drawn(torch.Generator().manual_seed(3), 60, spacing=spacing)
    counts = set()
    for tolerance in torch.linspace(0.1, 1.5, 20):

        def satisfied(trust, tolerance=tolerance):
            n_broken = int(is_broken(rollouts, trust, tolerance).sum())
            longest = int(trusted_steps(rollouts, trust, tolerance).max())
            g = count_apart(rollouts.start, max(1, longest))
            counts.add(n_broken)
            return (
                not n_broken or g / (g + 1) * n_broken / 60 + 1 / (g + 1) < 0.1 + 1e-9
            )

        trust = rollouts.trust(tolerance)
        assert satisfied(trust)
        ratios = over_tolerance(rollouts.bound, tolerance).flatten()
        larger = ratios[(ratios >= trust.limit) & (ratios <= 1)]
        if len(larger):
            beyond = float(larger.min()) * (1 + 1e-6)
            assert not satisfied(replace(trust, limit=beyond))
    assert max(counts) > 0


def test_the_limit_of_nineteen_rollouts_is_the_second_smallest_critical_value():
    """Level 0.9 allows one broken rollout of 19."""
    critical = torch.arange(1.0, 20.0) / 20
    rollouts = HeldOutRollouts(
        bound=torch.stack([critical / 2, critical], dim=1)[..., None],
        error=torch.tensor([0.0, 2.0]).expand(19, 2)[..., None],
        supported=torch.full((19,), 2),
        start=10 * torch.arange(19),
        quantile=0.9,
    )
    one = torch.tensor(1.0)
    trust = rollouts.trust(one)
    assert trust.limit == pytest.approx(critical[1])
    assert int(is_broken(rollouts, trust, one).sum()) == 1
    # Two rollouts are unsafe before their error exceeds the tolerance, so that no limit breaks them.
    some_unsafe = replace(rollouts, supported=torch.tensor([1, 1, *[2] * 17]))
    assert some_unsafe.trust(one).limit == pytest.approx(critical[3])
    assert rollouts.trust(torch.tensor(3.0)).limit == np.inf


def test_rollouts_that_overlap_count_once():
    assert count_apart(torch.tensor([0, 4, 5, 9, 11, 30]), 5) == 4
    assert count_apart(torch.arange(7), 1) == 7
    rollouts = drawn(torch.Generator().manual_seed(2), 60)
    overlapping = replace(rollouts, start=torch.arange(60))
    tolerance = torch.tensor(3.0)
    apart, together = (r.trust(tolerance) for r in (rollouts, overlapping))
    assert together.limit <= apart.limit
    assert not is_broken(overlapping, together, tolerance).any()
    longest = int(trusted_steps(overlapping, together, tolerance).max())
    assert together.n_apart == count_apart(overlapping.start, longest)
    assert together.broken == pytest.approx(1 / (together.n_apart + 1))
    assert (
        f"9 held-out rollouts that do not overlap, but there are {together.n_apart}"
        in (str(together))
    )
    assert "overlap" not in str(apart)


def test_an_infinite_bound_exceeds_every_tolerance():
    bound = torch.tensor([[[1.0, 2.0], [torch.inf, 1.0]]])
    ratio = over_tolerance(bound, torch.tensor([2.0, torch.inf]))
    assert_close(ratio, torch.tensor([[0.5, torch.inf]]))
