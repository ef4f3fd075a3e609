"""Every measured number in the prose of README and docs is recomputed from the results files."""

import pytest

from benchmarks import prose
from benchmarks.derived import NUMBERS

TEXTS = {str(page.relative_to(prose.ROOT)): page.read_text() for page in prose.PAGES}


@pytest.mark.parametrize("page", TEXTS)
def test_a_number_with_an_anchor_equals_its_source(page):
    wrong = [
        f"{number} is {prose.value(anchor)[0]:.6g} ({anchor})"
        for number, unit, anchor in prose.anchors(TEXTS[page])
        if not prose.agrees(number, *prose.source(anchor, unit))
    ]
    assert not wrong


@pytest.mark.parametrize("page", TEXTS)
def test_a_measured_number_has_an_anchor(page):
    assert not prose.without_anchor(page, TEXTS[page])


def test_names_of_functions_and_phrases_are_used():
    used = {anchor for text in TEXTS.values() for _, _, anchor in prose.anchors(text)}
    assert set(NUMBERS) <= used
    unused = [
        phrase
        for page, found in prose.phrases().items()
        for phrase in found
        if " ".join(phrase.split()) not in " ".join(prose.prose(TEXTS[page]).split())
    ]
    assert not unused


@pytest.mark.parametrize(
    ("number", "exact", "places", "agrees"),
    [
        ("0.65", 0.65, 2, True),
        ("0.7", 0.65, 2, True),
        ("0.65", 0.6549, 12, True),
        ("0.65", 0.6551, 12, False),
        ("0.64", 0.65, 2, False),
        ("0.650", 0.65, 2, True),
        ("0.654", 0.65, 2, False),
        ("65", 65.0, 0, True),
        ("1,200", 1200, 0, True),
    ],
)
def test_a_number_is_compared_at_the_digits_that_it_shows(
    number, exact, places, agrees
):
    assert prose.agrees(number, exact, places) == agrees


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("The loss is 0.28 at the level 0.95.", ["0.28"]),
        ("It wins on 19 of the 20 problems with 15 folds and 200 points.", ["19"]),
        ("It takes 70 s, 3 ms, 5 % and 2 GiB.", ["70", "3", "5", "2"]),
        ("It is 3 to 4 times as long; `n=0.5`, lorenz-63, float32.", ["3", "4"]),
        ("The loss is 0.28<!--kinds; GeoQ; inside the data-->.", []),
        ("The loss is 0.28 <!--kinds; GeoQ; inside the data-->.", ["0.28"]),
    ],
)
def test_measured_numbers_are_found(sentence, found):
    assert [number for _, number, _ in prose.without_anchor("", sentence)] == found


def test_an_anchor_that_names_several_cells_is_refused():
    with pytest.raises(LookupError, match="different cells"):
        prose.value("defaults; geometric mean; all; nothing")
    with pytest.raises(LookupError, match="names 2 different cells"):
        prose.value("kuramoto_sivashinsky; GeoQ; pinball")
