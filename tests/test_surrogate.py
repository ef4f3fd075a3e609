"""Arrays at the border, and the user's callables: what they receive, and what they must return."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from geoq import absolute_error, arrays, norm_error, relative_norm_error
from geoq.arrays import chunks, own_copy, restore, take, to_numbers
from geoq.checks import check_finite, check_unit
from geoq.surrogate import answers_of, errors_of


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


def test_arrays_share_their_memory_and_results_come_back_as_the_users_kind():
    for array in (np.zeros(3), torch.zeros(3)):
        to_numbers(array, "x")[0] = 1.0
        own_copy(array)[1] = 2.0
        assert array.tolist() == [1.0, 0.0, 0.0]
    assert isinstance(restore(np.ones(2), np.zeros(1)), np.ndarray)
    back = restore(np.ones((2, 2)).T, torch.zeros(1))
    assert isinstance(back, torch.Tensor)
    assert take(np.arange(3), np.array([2, 0])).tolist() == [2, 0]
    assert take(torch.arange(3), np.array([2, 0])).tolist() == [2, 0]


def test_the_first_bad_value_is_named_and_all_are_counted():
    x = np.zeros((3, 2))
    check_finite(x + 1e308, "x", "")  # the sum overflows
    x[1, 0], x[2, 1] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"x\[1, 0\] is nan \(2 of 6 values are NaN.*\); go\."):
        check_finite(x, "x", "go")


@pytest.mark.parametrize(("x", "by_column", "usable"), [
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
])  # fmt: skip
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


def test_answers_of_functions_are_rows_of_numbers(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_NUMBERS", 2)
    with pytest.raises(ValueError, match=r"rows of shape \(1,\) and of shape \(2,\)"):
        answers_of(lambda x: x if x[0, 0] == 0 else x[:, :1], np.arange(4.0).reshape(2, 2), "f")
    masked = answers_of(lambda x: np.ma.masked_less(x, 1), np.arange(3), "f")
    assert_array_equal(masked, [np.nan, 1, 2])
    pandas = pytest.importorskip("pandas")
    assert_array_equal(answers_of(lambda x: pandas.Series(x), np.arange(3), "f"), [0, 1, 2])


def test_errors_are_nan_where_the_truth_is_and_the_prediction_stands_in_for_it():
    y, prediction = np.array([[1.0, np.nan], [np.nan, 3.0]]), np.array([[2.0, 9.0], [9.0, 1.0]])
    assert_array_equal(errors_of(prediction, absolute_error, y, y), [[1, np.nan], [np.nan, 2]])
    assert_array_equal(errors_of(prediction, norm_error, y, y), [1, 2])
