"""SQuAD 2.0's exact match and F1, worked by hand after the definitions of its official script."""

import pytest

from classify.squad import exact_match, normalized, token_f1


def test_case_punctuation_articles_and_spaces_do_not_count() -> None:
    assert normalized("  The  U.S. — a\tstate's an-swer ") == "us — states answer"
    assert normalized("A, the!") == ""
    assert normalized("theatre, another Ann") == "theatre another ann"  # articles are whole words


@pytest.mark.parametrize(
    ("prediction", "references", "exact", "f1"),
    [
        ("The North Sea.", ["North Sea"], 1, 1),
        ("sea", ["North Sea"], 0, 2 / 3),  # precision 1, recall 1/2
        ("in the cold North Sea", ["North Sea"], 0, 2 * (2 / 4) * (2 / 2) / (2 / 4 + 2 / 2)),
        ("sea sea", ["sea salt sea"], 0, 0.8),  # precision 1, recall 2/3: a word counts as often as it occurs
        ("sea sea", ["sea salt"], 0, 0.5),  # one of the two counts
        ("Baltic", ["North Sea"], 0, 0),
        ("1980", ["the 1970s", "in 1980", "1980"], 1, 1),  # the best reference
        ("", ["North Sea"], 0, 0),
        ("", [], 1, 1),  # no answer, and none expected
        ("North Sea", [], 0, 0),
        ("", ["the", "sea"], 0, 0),  # a reference of articles only is left out
        ("a", ["the"], 1, 1),  # unless there is no other
    ],
)
def test_the_best_reference_counts(prediction: str, references: list[str], exact: float, f1: float) -> None:
    assert exact_match(prediction, references) == exact
    assert token_f1(prediction, references) == pytest.approx(f1)
