"""The metrics by hand: accuracy and macro F1, entities as `conlleval` counts them, answers as SQuAD 2.0's script."""

import csv
import gzip
from pathlib import Path

import pytest

from classify.metrics import (
    entities,
    exact_match,
    normalized,
    sequence_metrics,
    span_metrics,
    token_f1,
    token_metrics,
)

SQUAD = Path(__file__).parents[3] / "shared" / "data" / "instructgpt" / "squadv2_samples.csv.gz"


def best_match(predicted: str, answers: list[str]) -> tuple[float, float]:
    return exact_match(predicted, answers), token_f1(predicted, answers)


def test_accuracy_and_macro_f1() -> None:
    """a: 2 of 3 found, 1 wrong: P 2/3, R 2/3. b: P 1/2, R 1/2. c, predicted once, is no gold label: F1 0."""
    metrics, by_label = sequence_metrics(["a", "a", "b", "a", "c"], ["a", "a", "b", "b", "a"], seed=1)
    assert metrics["accuracy"].mean == pytest.approx(3 / 5)
    assert metrics["macro_f1"].mean == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert metrics["macro_f1"].low < metrics["macro_f1"].mean < metrics["macro_f1"].high
    b = by_label["b"]
    assert (b.precision, b.recall, b.num_gold) == (1.0, 0.5, 2)
    assert by_label["c"].f1 == 0
    assert by_label["a"].f1 == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-X I-X O", {("X", 1, 2)}),
        ("B-X B-X", {("X", 0, 0), ("X", 1, 1)}),
        ("B-X I-Y I-Y", {("X", 0, 0), ("Y", 1, 2)}),  # I- of another type opens an entity
        ("O I-X I-X B-X", {("X", 1, 2), ("X", 3, 3)}),
        ("I-X O I-X", {("X", 0, 0), ("X", 2, 2)}),
        ("O O", set()),
        ("O B-LOC-ATION", {("LOC-ATION", 1, 1)}),
    ],
)
def test_entities(tags: str, expected: set[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == expected


def test_an_entity_counts_only_whole() -> None:
    """Gold: PER 0-1, LOC 3, and PER 0 of the second sentence. Found: PER 0 (too short), LOC 3, and nothing."""
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "O"]]
    found = [["B-PER", "O", "O", "B-LOC"], ["O", "O"]]
    metrics, by_type = token_metrics(found, gold, seed=1)
    assert metrics["precision"].mean == pytest.approx(1 / 2)
    assert metrics["recall"].mean == pytest.approx(1 / 3)
    assert metrics["f1"].mean == pytest.approx(2 / 5)
    assert (by_type["PER"].f1, by_type["PER"].num_gold, by_type["LOC"].f1) == (0, 2, 1)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Red, kite!", "red kite"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.", "us"),
        ("“quoted”", "“quoted”"),  # the script removes ASCII's punctuation only
        ("The", ""),
        ("well-known\tfact", "wellknown fact"),
    ],
)
def test_answers_are_compared_without_case_articles_and_punctuation(text: str, bare: str) -> None:
    assert normalized(text) == bare


def test_f1_of_answers() -> None:
    assert token_f1("the red kite", ["a big red kite"]) == pytest.approx(2 * 2 / (2 + 3))
    assert token_f1("red red kite", ["red kite kite"]) == pytest.approx(2 * 2 / 6)  # in common: red once, kite once
    assert token_f1("blue", ["red kite"]) == 0
    assert token_f1("", [""]) == 1
    assert token_f1("", ["kite"]) == token_f1("kite", [""]) == 0


def test_the_best_of_several_answers_counts() -> None:
    assert best_match("kite", ["the red kite", "Kite."]) == (1, 1)
    assert best_match("red ball", ["the red kite", "a ball"]) == (0, pytest.approx(2 / 3))
    assert best_match("", []) == (1, 1)
    assert best_match("kite", []) == (0, 0)
    assert best_match("", ["the"]) == (1, 1)  # an answer of articles alone counts as none
    assert best_match("kite", ["the", "kite"]) == (1, 1)


def test_questions_without_an_answer_count_apart() -> None:
    predicted, answers = ["kite", "", "ball", ""], [["red kite"], [], [], ["cake"]]
    metrics, _ = span_metrics(predicted, answers, ["one", "one", "two", "two"])
    assert metrics["exact_match"].mean == pytest.approx(1 / 4)
    assert metrics["f1"].mean == pytest.approx((2 / 3 + 1 + 0 + 0) / 4)
    assert metrics["answerable_f1"].mean == pytest.approx(1 / 3)
    assert metrics["answerable_exact_match"].mean == 0
    assert metrics["unanswerable_f1"].mean == pytest.approx(1 / 2)
    assert 0 <= metrics["f1"].low <= metrics["f1"].mean <= metrics["f1"].high <= 1


def test_published_answers_score_themselves() -> None:
    """Every reference of InstructGPT's published SQuAD samples matches itself, and no answer matches none."""
    if not SQUAD.is_file():
        pytest.skip(f"{SQUAD} is not there")
    with gzip.open(SQUAD, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    answered = [row["ref_text"].split("|") for row in rows if row["ref_text"]]
    assert len(answered) > 100
    for golds in answered:
        assert all(best_match(gold, golds) == (1, 1) for gold in golds if normalized(gold))
        exact, f1 = best_match("", golds)
        assert (exact, f1) == ((0, 0) if any(map(normalized, golds)) else (1, 1))


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
