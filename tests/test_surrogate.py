import numpy as np
import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import absolute_error, arrays, norm_error, relative_norm_error
from geoq.arrays import chunks, restore, take, to_tensor
from geoq.checks import TRAINED, check_callable, check_finite, check_pairs
from geoq.surrogate import evaluate, observe


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_error_functionals_by_hand(kind):
    y, y_hat = kind([[3.0, 4.0], [0.0, 2.0]]), kind([[0.0, 0.0], [0.0, 3.0]])
    for functional, expected in (
        (absolute_error, [[3.0, 4.0], [0.0, 1.0]]),
        (norm_error, [5.0, 1.0]),
        (relative_norm_error, [1.0, 0.5]),
    ):
        assert functional(y, y_hat).tolist() == expected


@pytest.mark.parametrize("functional", [absolute_error, norm_error])
def test_masks_are_subtracted_as_numpy_does(functional):
    y, y_hat = np.array([[True, False], [True, True]]), np.array([[0.5, 0.25], [1, 0]])
    error = functional(torch.from_numpy(y), torch.from_numpy(y_hat))
    np.testing.assert_allclose(error, functional(y, y_hat))


def test_small_integers_do_not_overflow_in_a_norm():
    y = np.array([[20], [16]], dtype=np.uint8)
    error = relative_norm_error(y, np.array([[19.0], [15.0]]))
    np.testing.assert_allclose(error, [0.05, 0.0625])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3)[::-1],
        np.arange(6.0, dtype=">f8").reshape(2, 3),
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(6).reshape(2, 3),
        np.array([[True, False, True]]),
    ],
    ids=["plain", "reversed", "big-endian", "read-only", "integers", "booleans"],
)
def test_any_numeric_array_becomes_the_tensor_of_its_values(array):
    tensor = to_tensor(array, "x")
    assert tensor.is_floating_point()
    assert tensor.tolist() == array.astype(float).tolist()


def test_a_plain_array_shares_its_memory():
    array = np.zeros(3)
    to_tensor(array, "x")[0] = 1.0
    assert array[0] == 1.0


def test_half_precision_is_computed_in_single():
    assert to_tensor(torch.zeros(2, dtype=torch.bfloat16), "x").dtype == torch.float32


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([1.0, 2.0], "x must be a NumPy array or a torch tensor, got list"),
        (np.array(["a"]), "x has dtype <U1, but must hold real numbers"),
        (np.array([1j]), "x is complex"),
    ],
)
def test_other_things_are_refused(array, message):
    with pytest.raises(TypeError, match=message):
        to_tensor(array, "x")


def test_results_come_back_as_the_users_kind(device):
    tensor = torch.ones(2, device=device)
    assert isinstance(restore(tensor, np.zeros(1)), np.ndarray)
    assert restore(tensor, torch.zeros(1)).device.type == "cpu"


def test_rows_are_taken_from_either_kind():
    rows = torch.tensor([2, 0])
    assert take(np.arange(3), rows).tolist() == [2, 0]
    assert take(torch.arange(3), rows).tolist() == [2, 0]


def test_the_first_bad_value_is_named_and_all_are_counted():
    x = torch.zeros(3, 2)
    x[1, 0], x[2, 1] = torch.nan, torch.inf
    with pytest.raises(ValueError, match=r"x\[1, 0\] is nan \(2 of 6 values"):
        check_finite(x, "x")


@pytest.mark.parametrize(
    ("masked", "message"),
    [
        (4, "same places are missing in all samples.* fill them with 0 in x, and mask"),
        (3, "remove or"),
    ],
)
def test_values_missing_at_the_same_places_of_all_samples_are_to_be_masked(
    masked, message
):
    x = torch.zeros(4, 1, 3, 3)
    x[:masked, :, 1, 1:] = torch.nan
    with pytest.raises(ValueError, match=message):
        check_pairs(x, x)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 3, 3)])
def test_a_missing_column_or_field_is_not_a_mask(shape):
    """Neither a table with an empty column nor fields without any value have a mask."""
    x = torch.zeros(4, 2)
    y = torch.zeros(shape)
    y[..., :1] = torch.nan
    if len(shape) == 3:
        y[:] = torch.nan
    with pytest.raises(ValueError, match="remove or impute"):
        check_pairs(x, y)


@pytest.mark.parametrize(
    ("n_rows", "row_numbers"), [(10, 1), (7, 2**22), (5, 2**30), (1, 0)]
)
def test_chunks_cover_all_rows_once(n_rows, row_numbers):
    covered = [
        row for part in chunks(n_rows, row_numbers) for row in range(n_rows)[part]
    ]
    assert covered == list(range(n_rows))


def test_a_function_is_called_on_chunks_and_answers_as_on_the_whole(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_NUMBERS", 4)
    sizes = []

    def double(x):
        sizes.append(len(x))
        return 2 * x

    x = np.arange(10.0).reshape(5, 2)
    assert_close(evaluate(double, x, "f"), torch.from_numpy(2 * x))
    assert sizes == [2, 2, 1]


def test_user_functions_run_without_gradients():
    assert not evaluate(fresh(nn.Linear, 2, 1), torch.zeros(3, 2), "f").requires_grad


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: x[:-1],
            r"f returned shape \(3, 2\) for 4 inputs; it must return one row",
        ),
        (lambda x: x.sum(), r"f returned shape \(\) for 4 inputs"),
        (lambda x: x / 0 * 0, r"f\(x\)\[0, 0\] is nan"),
    ],
)
def test_functions_that_do_not_answer_row_by_row_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        evaluate(function, torch.ones(4, 2), "f")


def test_a_module_on_numpy_arrays_is_refused_with_the_way_out():
    for module, cast in ((nn.Linear, "float"), (double_linear, "double")):
        with pytest.raises(
            TypeError,
            match=rf"f is a torch module, but x is a NumPy .*from_numpy\(x\)\.{cast}\(\)",
        ):
            evaluate(fresh(module, 2, 1), np.zeros((3, 2)), "f")


def double_linear(*sizes):
    return nn.Linear(*sizes).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.long, torch.bool])
def test_numbers_of_another_dtype_than_the_weights_are_named(dtype):
    x = torch.zeros(3, 2, dtype=dtype)
    with pytest.raises(
        TypeError,
        match=rf"f has weights of torch.float32 and failed on x of {dtype} .*x\.float\(\)",
    ):
        evaluate(fresh(nn.Linear, 2, 1), x, "f")


def test_a_module_may_take_numbers_of_another_dtype_than_its_weights():
    class Casting(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    assert len(evaluate(fresh(Casting, 2, 1), torch.zeros(3, 2).double(), "f")) == 3


def test_other_failures_of_a_module_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluate(fresh(nn.Linear, 2, 1), torch.zeros(3, 5), "f")


def test_a_prediction_of_another_shape_than_y_is_refused():
    with pytest.raises(
        ValueError, match=r"surrogate returned shape \(4, 1\) for y of shape \(4,\)"
    ):
        observe(lambda x: x[:, None], absolute_error, torch.ones(4), torch.ones(4))


def test_a_negative_error_is_refused():
    with pytest.raises(
        ValueError, match=r"error_functional returned -1, but an error is nonneg"
    ):
        observe(
            lambda x: x + 1, lambda y, y_hat: y - y_hat, torch.ones(4), torch.ones(4)
        )


def test_a_network_in_training_mode_is_refused():
    with pytest.raises(
        ValueError, match=r"surrogate is in training mode.*surrogate.eval\(\)"
    ):
        check_callable(fresh(nn.Linear, 1, 1).train(), "surrogate")


class Ridge:
    def fit(self, x, y):
        return self

    def predict(self, x):
        return x


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        (
            "surrogate",
            Ridge(),
            r"as surrogate\(x\), got Ridge; pass surrogate=model.pred",
        ),
        ("surrogate", Ridge, "got the class Ridge; pass surrogate=model.predict"),
        ("surrogate", nn.Linear, "got the class Linear; pass a trained object"),
        ("representation", nn.Linear, "got the class Linear; pass a trained object"),
        (
            "train_surrogate",
            Ridge,
            r"got the class Ridge; pass lambda x, y: Ridge\(\).fit\(x, y\).predict",
        ),
        ("train_surrogate", nn.Linear, "got the class Linear; pass a function that"),
        (
            TRAINED,
            Ridge(),
            r"as surrogate\(x\), got Ridge; return model.predict from train_surrogate",
        ),
        (TRAINED, None, "NoneType; return a function from train_surrogate"),
        (
            "error_functional",
            "mse",
            r"as error_functional\(y, y_hat\), got str; .* geoq.absolute_error",
        ),
    ],
)
def test_what_cannot_be_called_gets_the_hint(name, function, message):
    with pytest.raises(TypeError, match=message):
        check_callable(function, name)


def test_a_class_whose_objects_answer_is_a_recipe():
    class Trained(Ridge):
        def __call__(self, x):
            return self.predict(x)

    check_callable(Trained, "train_surrogate")


def test_a_recipe_that_returns_a_network_in_training_mode_gets_the_hint():
    with pytest.raises(ValueError, match=r"; return model.eval\(\) from train_surr"):
        check_callable(fresh(nn.Linear, 1, 1).train(), TRAINED)
