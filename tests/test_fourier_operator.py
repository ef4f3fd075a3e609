from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import fresh
from torch.nn import functional
from torch.testing import assert_close

from benchmarks.richtmyer_meshkov import fourier_operator, operator_training
from geoq.baselines import DeepEnsemble, MCDropout

SIZE = (16, 32)
TINY = {
    "n_times": 2,
    "width": 8,
    "modes": (4, 4),
    "n_blocks": 2,
    "n_projection": 8,
    "internal": SIZE,
}


@pytest.fixture
def recipe():
    training = operator_training.OperatorTraining(
        make_network=partial(fourier_operator.FourierOperator, **TINY),
        n_epochs=2,
        batch_size=4,
        compiled=False,
    )
    return operator_training.TrainOperator(training, device="cpu")


def random_fields(n, size=SIZE, *, width=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (n, *size) if width is None else (n * size[0], size[1], width)
    return torch.randn(shape, generator=generator)


def interfaces(n, n_times=2, size=(15, 30)):
    """Heavy gas to the right of a wavy line that grows with time."""
    generator = torch.Generator().manual_seed(0)
    phase, amplitude = torch.rand(2, n, 1, 1, generator=generator)
    y = torch.arange(size[0])[:, None] * (2 * torch.pi / size[0])
    x = torch.arange(size[1]).float()
    heavy = [
        x > size[1] / 2 + (1 + time) * 3 * amplitude * torch.sin(y + 6.3 * phase)
        for time in range(n_times + 1)
    ]
    return heavy[0].byte(), torch.stack(heavy[1:], 1).byte()


@pytest.mark.parametrize(
    ("size", "modes"), [(SIZE, (4, 6)), ((15, 21), (3, 5)), ((8, 9), (4, 4))]
)
def test_the_matrix_products_are_the_truncated_fft(size, modes):
    convolution = fresh(fourier_operator.SpectralConvolution, 5, modes, size)
    fields = random_fields(3, size, width=5).requires_grad_()
    direction = random_fields(3, size, width=5, seed=1)
    results = []
    for module in (convolution, fourier_operator.FFTConvolution(convolution)):
        output = module(fields)
        variables = (fields, convolution.weight)
        results.append(
            (
                output.detach(),
                *torch.autograd.grad((output * direction).sum(), variables),
            )
        )
    for by_product, by_fft in zip(*results, strict=True):
        assert_close(
            by_product, by_fft, rtol=1e-5, atol=1e-5 * float(by_fft.abs().max())
        )


def test_one_mode_is_multiplied_by_its_complex_weight():
    """A wave cos(2 y - 3 x) has the pair of modes (2, 3) and (-2, -3); a weight of i shifts it by a quarter wave."""
    convolution = fresh(fourier_operator.SpectralConvolution, 1, (4, 5), SIZE)
    with torch.no_grad():
        convolution.weight.zero_()
        # Wave number -2 in y is row 8 - 2, and 3 in x is column 3.
        convolution.weight[1, 6 * 5 + 3] = 1.0
    y = torch.arange(SIZE[0])[:, None] * (2 * torch.pi / SIZE[0])
    x = torch.arange(SIZE[1]) * (2 * torch.pi / SIZE[1])
    phase = 3 * x - 2 * y
    assert_close(
        convolution(phase.cos()[..., None])[..., 0], -phase.sin(), atol=1e-5, rtol=0
    )


def test_the_whole_network_in_bfloat16_is_close_to_the_fft_in_float32():
    network = fresh(fourier_operator.FourierOperator, **TINY)
    u0, _ = interfaces(4)
    assert operator_training.relative_difference(network, u0) < 1e-2


def test_a_shift_in_y_shifts_the_output_of_the_convolution():
    convolution = fresh(fourier_operator.SpectralConvolution, 4, (3, 3), SIZE)
    fields = random_fields(2, SIZE, width=4)

    def rolled(fields):
        return fields.unflatten(0, (2, SIZE[0])).roll(3, 1).flatten(0, 1)

    assert_close(convolution(rolled(fields)), rolled(convolution(fields)))


def test_without_coordinates_a_shift_in_y_shifts_the_output_of_the_network():
    """15 of 30 cells are 16 of the 32 cells inside."""
    network = fresh(fourier_operator.FourierOperator, **TINY | {"internal": (32, 32)})
    with torch.no_grad():
        network.lift.weight[:, 1:] = 0
    u0 = random_fields(2, (30, 20))
    assert_close(network(u0.roll(15, 1)), network(u0).roll(15, 2))


def test_resizing_along_x_is_linear_interpolation():
    lines = random_fields(3, (1, 30))
    for n_to in (32, 20):
        matrix = fourier_operator.interpolation(30, n_to, lines, periodic=False)
        expected = functional.interpolate(lines, n_to, mode="linear")
        assert_close(lines @ matrix.T, expected)


def test_the_network_of_the_paper_has_38_million_weights():
    with torch.device("meta"):
        network = fourier_operator.FourierOperator()
    weights = sum(weight.numel() for weight in network.parameters())
    assert (
        weights == 4 * (2 * 48 * 24 * 64 * 64 + 65 * 64) + 4 * 64 + 65 * 128 + 129 * 12
    )


def test_cells_near_an_interface_are_those_with_both_gases_around_them():
    """The interface lies between x = 14 and x = 15 in all rows but the first, where there is no heavy gas."""
    u = torch.zeros(1, 1, 20, 30, dtype=torch.uint8)
    u[..., 1:, 15:] = 1
    near = operator_training.labelled(u) >> 1
    assert near[0, 0, 10].nonzero()[:, 0].tolist() == list(range(11, 19))
    # y is periodic: the first row is a neighbour of the last ones.
    assert near[0, 0, :, 29].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 16, 17, 18, 19]


def test_augmented_pairs_are_shifted_and_mirrored_alike():
    u0, _ = interfaces(6)
    labels = u0[:, None].expand(-1, 2, -1, -1)
    rows = torch.tensor([4, 0, 3])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        initial, later = operator_training.gathered(u0, labels, rows, augment=True)
    assert_close(later.float(), initial[:, None].expand(-1, 2, -1, -1))
    for row, field in zip(rows, initial, strict=True):
        lines = {tuple(line.tolist()) for line in field}
        assert lines == {tuple(line.tolist()) for line in u0[row].float()}


def test_training_learns_how_an_interface_grows(recipe):
    u0, u = interfaces(24)
    training = replace(recipe.training, n_epochs=20, learning_rate=1e-2)
    trained = replace(recipe, training=training)(u0, u)
    untrained = fresh(fourier_operator.FourierOperator, **TINY)
    before, after = (
        functional.binary_cross_entropy(
            operator_training.probabilities(network, u0), u.float()
        )
        for network in (untrained, trained.network)
    )
    assert after < before / 5


def test_the_seed_decides_the_weights(recipe):
    u0, u = interfaces(8)
    one, same, other = (
        recipe.with_seed(seed)(u0, u).network.state_dict() for seed in (1, 1, 2)
    )
    assert_close(one, same, rtol=0, atol=0)
    assert not torch.equal(one["output.weight"], other["output.weight"])


def test_a_surrogate_answers_in_the_kind_of_array_it_is_asked_in():
    surrogate = operator_training.OperatorSurrogate(
        fresh(fourier_operator.FourierOperator, **TINY)
    )
    u0, u = interfaces(5)
    answer = surrogate(u0.numpy())
    assert isinstance(answer, np.ndarray)
    assert answer.dtype == np.float32
    assert answer.shape == tuple(u.shape)
    for kind in (torch.uint8, torch.float32, torch.float64):
        assert_close(surrogate(u0.to(kind)), torch.from_numpy(answer))


def test_mc_dropout_and_the_ensemble_take_the_recipe(recipe):
    u0, u = interfaces(8)
    network = partial(fourier_operator.FourierOperator, **TINY, dropout=0.2)
    random = replace(recipe, training=replace(recipe.training, make_network=network))
    baselines = MCDropout(random, n_passes=3), DeepEnsemble(recipe, n_members=2)
    for baseline in baselines:
        bound = baseline.fit(u0, u).predict(u0)
        assert bound.error_hat.shape == u.shape
        assert (bound.error_hat > 0).any()


def test_a_saved_network_answers_the_same(tmp_path):
    network = fresh(fourier_operator.FourierOperator, **TINY)
    u0, _ = interfaces(3)
    fourier_operator.save(network, tmp_path / "operator.pt")
    loaded = fourier_operator.load(tmp_path / "operator.pt")
    assert_close(
        operator_training.probabilities(loaded, u0),
        operator_training.probabilities(network, u0),
        rtol=0,
        atol=0,
    )


def test_fields_with_an_axis_too_many_are_refused():
    network = fresh(fourier_operator.FourierOperator, **TINY)
    with pytest.raises(ValueError, match=r"u0 has shape \(2, 1, 15, 30\), but"):
        network(torch.zeros(2, 1, 15, 30))


def test_later_fields_of_another_number_of_times_are_refused(recipe):
    u0, u = interfaces(4, n_times=3)
    with pytest.raises(ValueError, match="but a network of 2 times needs"):
        recipe(u0, u)


def test_more_modes_than_the_grid_has_are_refused():
    with pytest.raises(ValueError, match=r"modes=\(4, 17\), but a grid of \(16, 32\)"):
        fourier_operator.SpectralConvolution(2, (4, 17), SIZE)
