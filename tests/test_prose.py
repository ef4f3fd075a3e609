"""Every measured number in the prose of README, CHANGELOG and docs is recomputed from the results files."""

from statistics import geometric_mean

import pytest

from benchmarks import derived, prose
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
    # A function can have several names.
    called = {NUMBERS[anchor] for anchor in used & set(NUMBERS)}
    assert [name for name, function in NUMBERS.items() if function not in called] == []
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
        ("0.4", -0.4, 12, False),
        ("-0.4", -0.4, 12, True),
        ("2e-8", 2.1e-8, 12, True),
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


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("It agrees to 2e-8 and 1.5e-3.", ["2e-8", "1.5e-3"]),
        ("The change is -0.4 and the ratio 0.7.", ["-0.4", "0.7"]),
        ("It needs 16 times the data and 3 times as long.", ["16", "3"]),
        ("It runs for 3 hours, then 1 hour, then 12 h.", ["3", "1", "12"]),
        ("It is faster by a factor of 3 and a factor of\n  20.", ["3", "20"]),
        ("It lowers the loss by 5-15 %.", ["5", "15"]),
        ("It has 5<!--horizon.worst_run-->-15 %.", ["15"]),
        ("It takes 9\n  to 17<!--horizon.worst_run--> times as long.", ["9"]),
        ("It has 1, 2 or 3 %.", ["1", "2", "3"]),
        ("With a probability of 0.37, at the level 0.83.", ["0.37", "0.83"]),
        ("The coverage lies in [0.91, 0.97].", ["0.91", "0.97"]),
        ("It is twice as fast, at half of the loss.", ["twice as", "half of the loss"]),
        ("It doubles the horizon, ten times.", ["doubles", "ten times"]),
        ("Four times as steep.", ["Four times"]),
    ],
)
def test_ratios_exponents_signs_and_ranges_are_measured(sentence, found):
    assert [number for _, number, _ in prose.without_anchor("", sentence)] == found


@pytest.mark.parametrize(
    "sentence",
    [
        "The levels 0.5 and 0.99, a probability of at least 0.9, the 0.95 quantile.",
        "Data in [0, 1] and [0.25, 0.75]; dt = 0.05; commit 4e71260; lorenz-63.",
        "It is called twice, with half of the weight; the factor of each step.",
        "Every forecast has 40 leads, every 6 hours; up to 24 h it is good.",
        "A code block needs `16` times the data, and `1e-9` is not zero.",
    ],
)
def test_settings_need_no_anchor(sentence):
    assert not prose.without_anchor("", sentence)


def test_a_phrase_is_a_setting_of_its_page_alone():
    sentence = "It is 9 to 17 times as expensive as the training of the surrogate"
    sentence += ", computed from the paper's Table 2."
    assert not prose.without_anchor("docs/cost.md", sentence)
    assert len(prose.without_anchor("docs/speed.md", sentence)) == 2
    shorter = sentence.partition(",")[0]
    assert len(prose.without_anchor("docs/cost.md", shorter)) == 2


def test_a_difference_from_the_default_has_a_sign():
    # A ratio of losses above 1 is a larger loss.
    for method in (derived.BLEND, "One number per lead and channel"):
        other, default = derived.weather(method), derived.weather(derived.DEFAULT)
        ratio = geometric_mean(derived.error_ratios(other, default))
        smaller = derived.loss_smaller(method, "blocks")
        assert smaller == pytest.approx(100 * (1 - ratio))
    assert smaller < -30
    for folds in ("blocks", "clusters"):
        smaller = derived.loss_smaller(derived.BLEND, folds)
        assert NUMBERS[f"weather.static_{folds}_smaller"]() == smaller


def test_an_anchor_that_names_several_cells_is_refused():
    with pytest.raises(LookupError, match="different cells"):
        prose.value("defaults; geometric mean; all; nothing")
    with pytest.raises(LookupError, match="names 3 different cells"):
        prose.value("kuramoto_sivashinsky; GeoQ; pinball")
