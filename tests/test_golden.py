"""No answer of any estimator changes unless ``make golden`` renews the stored ones."""

import golden
import numpy as np
import pytest


@pytest.mark.filterwarnings("ignore:n=15 independent points")
@pytest.mark.parametrize("case", golden.CASES, ids=lambda case: case.__name__)
def test_answers_are_the_stored_ones(case):
    stored = np.load(golden.FILE)
    answers = case()
    names = {name.split(".", 1)[1] for name in stored.files if name.startswith(f"{case.__name__}.")}
    assert {*answers} == names
    for part, values in answers.items():
        expected = stored[f"{case.__name__}.{part}"]
        size = np.abs(expected[np.isfinite(expected)].astype(float)).max(initial=0.0)
        np.testing.assert_allclose(
            values,
            expected,
            rtol=0,
            atol=golden.TOLERANCES[golden.CASES[case]] * size,
            err_msg=part,
        )
