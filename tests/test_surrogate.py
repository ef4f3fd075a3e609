"""Arrays at the border, and the user's callables: what they receive, and what they must return."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from geoq import absolute_error, arrays, norm_error, relative_norm_error
from geoq.arrays import chunks, own_copy, restore, take, to_numbers
from geoq.checks import check_finite, check_unit
from geoq.surrogate import TRAINED, answers_of, check_callable, errors_of, evaluate


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_error_functionals_by_hand(kind):
    y, y_hat = kind([[3.0, 4.0], [0.0, 2.0]]), kind([[0.0, 0.0], [0.0, 3.0]])
    for functional, expected in (
        (absolute_error, [[3.0, 4.0], [0.0, 1.0]]),
        (norm_error, [5.0, 1.0]),
        (relative_norm_error, [1.0, 0.5]),
    ):
        assert functional(y, y_hat).tolist() == expected


def test_booleans_and_small_integers_are_numbers():
    y, y_hat = np.array([[True, False], [True, True]]), np.array([[0.5, 0.25], [1, 0]])
    for functional in (absolute_error, norm_error):
        error = functional(torch.from_numpy(y), torch.from_numpy(y_hat))
        assert_allclose(error, functional(y, y_hat))
    small = np.array([[20], [16]], dtype=np.uint8)
    assert_allclose(relative_norm_error(small, np.array([[19.0], [15.0]])), [0.05, 0.0625])


ARRAY = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "array",
    [
        ARRAY,
        ARRAY[::-1],
        ARRAY.astype(">f8"),
        np.broadcast_to(np.arange(3.0), (2, 3)),
        ARRAY.astype(int),
        ARRAY.astype("f2"),
        np.array([[True, False, True]]),
        np.ma.array(ARRAY),
        torch.from_numpy(ARRAY).requires_grad_(),
        torch.from_numpy(ARRAY).bfloat16(),
        torch.from_numpy(ARRAY > 2),
    ],
)
def test_any_array_of_numbers_is_converted(array):
    found = to_numbers(array, "x")
    assert type(found) is np.ndarray
    assert found.dtype in (np.float32, np.float64)
    assert found.dtype.isnative
    plain = array.detach().float().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
    assert found.tolist() == plain.astype(float).tolist()


def test_a_plain_array_and_a_tensor_share_their_memory_and_copies_do_not():
    for array in (np.zeros(3), torch.zeros(3)):
        to_numbers(array, "x")[0] = 1.0
        own_copy(array)[1] = 2.0
        assert array.tolist() == [1.0, 0.0, 0.0]


def test_results_come_back_as_the_users_kind():
    assert isinstance(restore(np.ones(2), np.zeros(1)), np.ndarray)
    back = restore(np.ones((2, 2)).T, torch.zeros(1))
    assert isinstance(back, torch.Tensor)
    assert take(np.arange(3), np.array([2, 0])).tolist() == [2, 0]
    assert take(torch.arange(3), np.array([2, 0])).tolist() == [2, 0]


def test_the_first_bad_value_is_named_and_all_are_counted():
    x = np.zeros((3, 2))
    check_finite(x + 1e308, "x", "")  # the sum overflows
    x[1, 0], x[2, 1] = np.nan, np.inf
    with pytest.raises(
        ValueError, match=r"x\[1, 0\] is nan \(2 of 6 values are not finite\); go\."
    ):
        check_finite(x, "x", "go")


@pytest.mark.parametrize(
    ("x", "by_column", "usable"),
    [
        (ARRAY, True, True),
        (ARRAY.astype("f4"), True, True),
        (ARRAY * 1e30, True, True),
        (ARRAY * [1, 1, 1e150], True, False),
        (ARRAY * [1, 1, 1e-150], True, False),
        (ARRAY * [1, 1, 1e-150], False, True),
        (ARRAY.astype("f4") * np.float32(1e19), False, False),
        (ARRAY * 1e19, False, True),
        (ARRAY * 0, True, True),
        (np.arange(3.0) * 1e-150, True, False),
    ],
)
def test_units_whose_squares_overflow_or_vanish_raise(x, by_column, usable):
    if usable:
        check_unit(x, "x", by_column=by_column)
    else:
        with pytest.raises(ValueError, match=r"x.* ranges from .*another unit"):
            check_unit(x, "x", by_column=by_column)


@pytest.mark.parametrize(("n_rows", "numbers"), [(10, 1), (7, 2**22), (5, 2**30), (1, 0), (0, 3)])
def test_chunks_cover_all_rows_once(n_rows, numbers):
    covered = [row for part in chunks(n_rows, numbers) for row in range(n_rows)[part]]
    assert covered == list(range(n_rows))


def test_a_function_is_called_on_copies_of_chunks_and_may_use_its_memory_again(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_NUMBERS", 4)
    sizes, buffer, x = [], np.empty((9, 2)), np.arange(10.0).reshape(5, 2)

    def double(part):
        sizes.append(len(part))
        part *= 2
        buffer[: len(part)] = part
        return buffer[: len(part)]

    assert_array_equal(evaluate(double, x, "f"), 2 * np.arange(10.0).reshape(5, 2))
    assert_array_equal(x, np.arange(10.0).reshape(5, 2))
    assert sizes == [2, 2, 1]


def test_a_function_of_tensors_runs_without_gradients():
    slope = torch.ones(1, requires_grad=True)
    assert not evaluate(lambda x: x * slope, torch.zeros(3, 2), "f").any()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:-1], r"f returned shape \(3, 2\) for 4 inputs; it must return one row"),
        (lambda x: x.sum(), r"f returned shape \(\) for 4 inputs|must be a NumPy array"),
        (lambda x: x * np.nan, r"f\(x\)\[0, 0\] is nan \(8 of 8 values"),
        (lambda x: x.tolist(), r"the output of f must be a NumPy array.*got list"),
        (lambda x: None, r"the output of f must be a NumPy array.*got NoneType"),
        (lambda x: x.astype(str), r"the output of f has dtype <U32, but must hold real numbers"),
    ],
)
def test_functions_that_do_not_answer_row_by_row_raise(function, message):
    with pytest.raises((ValueError, TypeError), match=message):
        evaluate(function, np.ones((4, 2)), "f")


def test_rows_of_different_shapes_in_different_chunks_raise(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_NUMBERS", 2)
    with pytest.raises(ValueError, match=r"rows of shape \(1,\) and of shape \(2,\)"):
        answers_of(lambda x: x if x[0, 0] == 0 else x[:, :1], np.arange(4.0).reshape(2, 2), "f")


def test_masked_answers_and_series_are_numbers():
    masked = answers_of(lambda x: np.ma.masked_less(x, 1), np.arange(3), "f")
    assert_array_equal(masked, [np.nan, 1, 2])
    pandas = pytest.importorskip("pandas")
    assert_array_equal(answers_of(lambda x: pandas.Series(x), np.arange(3), "f"), [0, 1, 2])


def test_errors_are_nan_where_the_truth_is_and_the_prediction_stands_in_for_it():
    y, prediction = np.array([[1.0, np.nan], [np.nan, 3.0]]), np.array([[2.0, 9.0], [9.0, 1.0]])
    assert_array_equal(errors_of(prediction, absolute_error, y, y), [[1, np.nan], [np.nan, 2]])
    assert_array_equal(errors_of(prediction, norm_error, y, y), [1, 2])


@pytest.mark.parametrize(
    ("prediction", "functional", "message"),
    [
        (
            np.ones((4, 1)),
            absolute_error,
            r"surrogate returned shape \(4, 1\) for y of shape \(4,\)",
        ),
        (np.full(4, 2.0), lambda y, y_hat: y - y_hat, "returned -1, but an error is nonneg"),
        (np.ones(4), lambda y, y_hat: abs(y - y_hat) + np.inf, "must return finite numbers"),
        (np.ones(4), lambda y, y_hat: abs(y - y_hat).sum(keepdims=True), "one row per input"),
    ],
)
def test_errors_that_are_no_errors_raise(prediction, functional, message):
    with pytest.raises(ValueError, match=message):
        errors_of(prediction, functional, np.ones(4), np.ones(4))


class Ridge:
    def fit(self, x, y):
        return self

    def predict(self, x):
        return x


class Network:
    """What a network has, with its switch on."""

    def __init__(self):
        self.training = True

    def eval(self):
        return self

    def state_dict(self):
        return {}

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("surrogate", Ridge(), r"as surrogate\(x\), got Ridge; pass surrogate=model.pred"),
        ("surrogate", Ridge, "got the class Ridge; pass surrogate=model.predict"),
        ("surrogate", Network, "got the class Network; pass a trained object"),
        ("representation", Network, "got the class Network; pass a trained object"),
        ("train_surrogate", Ridge, r"got the class Ridge; pass lambda x, y: Ridge\(\).fit\(x, y\).predict"),
        ("train_surrogate", Network, "got the class Network; pass a function that"),
        (TRAINED, Ridge(), r"as surrogate\(x\), got Ridge; return model.predict from train_surrogate"),
        (TRAINED, None, "NoneType; return a function from train_surrogate"),
        ("error_functional", "mse", r"as error_functional\(y, y_hat\), got str; .* geoq.absolute_error"),
        ("surrogate", Network(), r"surrogate is in training mode.*call surrogate\.eval\(\) first"),
        (TRAINED, Network(), r"training mode.*; return model.eval\(\) from train_surr"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_gets_the_hint(name, function, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_callable(function, name)


def test_a_class_whose_objects_answer_is_a_recipe():
    class Trained(Ridge):
        def __call__(self, x):
            return self.predict(x)

    check_callable(Trained, "train_surrogate")
