"""What no verdict may be based on: hand-picked answers, items of the training data, and the same answers twice."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evaluation.evaluate.statistics import Difference, suite_statistics
from evaluation.suites.suite import Item, Measure, Scored

Call = Callable[..., tuple[int, str]]

F1 = Measure("f1", "Words in common with the reference.", is_share=True)
ERROR = Measure("error", "The share of words that are wrong.", higher_is_better=False, is_share=True)
LENGTH = Measure("length", "Words of the answer.")
RATIO = Measure("ratio", "Hits per try.", aggregate=lambda rows: len(rows) / 100, is_share=True, reads=("f1",))
MEASURES = (F1, ERROR, LENGTH, RATIO)
NUM = 100


def scored(value_I: np.ndarray, missing: set[int] = frozenset(), name: str = "") -> dict[str, Scored]:  # type: ignore[assignment]
    """Returns the rows of a model whose answers are worth this; those of `missing` failed. `name` is in the answers."""
    names = [measure.name for measure in MEASURES if measure is not RATIO]
    return {
        f"q{n}": Scored(f"q{n}", {}, "", dict.fromkeys([*names, "ratio"], "the file has no answer"))
        if n in missing
        else Scored(
            f"q{n}", {"f1": value, "error": 1 - value, "length": 9 * value}, f"{name}{n}" if name else repr(value)
        )
        for n, value in enumerate(value_I.tolist())
    }


def compared(
    a: dict[str, Scored], b: dict[str, Scored], measure: Measure = F1, **more: dict[str, set[str]]
) -> Difference:
    items = [Item(f"q{n}", ()) for n in range(len(a))]
    (row,) = suite_statistics("s", [measure], items, {"a": a, "b": b}, seed=0, **more).differences
    return row


@pytest.fixture
def values() -> tuple[np.ndarray, np.ndarray]:
    """Shares of 100 items of two models, of which the second is better by .15."""
    generator = np.random.default_rng(0)
    a_I = generator.uniform(0, 0.7, NUM)
    return a_I, np.clip(a_I + 0.15 + generator.normal(0, 0.2, NUM), 0, 1)


def test_picked_answers_win_nothing(values: tuple[np.ndarray, np.ndarray]) -> None:
    a_I, b_I = values
    assert compared(scored(a_I), scored(b_I)).better == "b"
    worst_first = np.argsort(a_I - b_I)
    picked = set(worst_first[:55].tolist())  # all but the 45 answers that do best
    kept = [n for n in range(NUM) if n not in picked]
    assert (a_I - b_I)[kept].mean() > 0.02
    row = compared(scored(a_I, picked), scored(b_I))
    assert (row.conclusion.kind, row.better) == ("none", "")
    assert row.conclusion.reason == "55 of 100 answers of a are missing or could not be scored"
    assert not np.isfinite([row.difference.mean, row.difference.low, row.p, row.holm_p]).any()


@pytest.mark.parametrize("measure", [F1, ERROR])
def test_a_few_missing_answers_give_a_bound(values: tuple[np.ndarray, np.ndarray], measure: Measure) -> None:
    a_I, b_I = values
    missing_a, missing_b = {3, 8, 50}, {8, 20}
    row = compared(scored(a_I, missing_a), scored(b_I, missing_b), measure)
    assert row.conclusion.kind == "bound"
    assert row.conclusion.reason == (
        "3 of 100 answers of a are missing or could not be scored; 2 of 100 answers of b are missing or could not be"
        " scored"
    )
    ends = []
    for worth_a, worth_b in ((0.0, 1.0), (1.0, 0.0)):
        filled_a, filled_b = a_I.copy(), b_I.copy()
        filled_a[list(missing_a)], filled_b[list(missing_b)] = worth_a, worth_b
        ends.append(compared(scored(filled_a), scored(filled_b)).difference)
    assert (row.conclusion.low, row.conclusion.high) == pytest.approx((ends[0].low, ends[1].high), abs=2e-3)
    both = [n for n in range(NUM) if n not in missing_a | missing_b]
    assert abs(row.difference.mean) == pytest.approx(float((b_I - a_I)[both].mean()))
    assert row.better == ("b" if ends[1].high < 0 else "")


def test_a_bound_shows_what_holds_for_any_worth_of_the_missing_answers(values: tuple[np.ndarray, np.ndarray]) -> None:
    a_I, _ = values
    wide = compared(scored(a_I * 0.2, set(range(9))), scored(np.minimum(a_I + 0.3, 1)))
    assert (wide.conclusion.kind, wide.better, wide.conclusion.high < 0, wide.p < 0.05) == ("bound", "b", True, True)
    near = compared(scored(a_I, set(range(9))), scored(np.clip(a_I + 0.05, 0, 1)))
    assert (near.conclusion.kind, near.better, near.p) == ("bound", "", 1.0)
    assert near.conclusion.low < 0 < near.conclusion.high


def test_without_a_known_range_there_is_no_verdict_and_two_percent_are_let_pass(
    values: tuple[np.ndarray, np.ndarray],
) -> None:
    a_I, b_I = values
    for measure in (LENGTH, RATIO):
        row = compared(scored(a_I, {1, 2, 3}), scored(b_I), measure)
        assert row.conclusion.kind == "none"
        assert row.conclusion.reason.endswith(f", and nothing bounds what {measure.name} would be with them")
        assert compared(scored(a_I, {1, 2}), scored(b_I), measure).conclusion.kind != "none"


def test_algorithms_with_missing_answers_have_no_verdict_either(values: tuple[np.ndarray, np.ndarray]) -> None:
    a_I, b_I = values
    runs = {"a": ["a/1", "a/2"], "b": ["b/1", "b/2"]}
    found = {}
    for num in (2, 5, 20):
        rows = {"a/1": scored(a_I), "a/2": scored(a_I, set(range(num))), "b/1": scored(b_I), "b/2": scored(b_I)}
        items = [Item(f"q{n}", ()) for n in range(NUM)]
        (found[num],) = suite_statistics("s", [F1], items, rows, runs, seed=0).algorithms
    assert [row.conclusion.kind for row in found.values()] == ["worse", "bound", "none"]
    assert found[5].difference.low < found[2].difference.low
    assert found[20].conclusion.reason == "20 of 100 answers of a are missing or could not be scored"


def test_the_verdict_is_on_items_outside_the_training_data(values: tuple[np.ndarray, np.ndarray]) -> None:
    """Where a has seen the items it is better, elsewhere b is."""
    a_I, b_I = values
    a_I = a_I.copy()
    a_I[:70] = 1.0
    assert compared(scored(a_I), scored(b_I)).better == "a"
    row = compared(scored(a_I), scored(b_I), seen={"a": {f"q{n}" for n in range(70)}})
    assert (row.better, row.num_items, row.num_items_seen) == ("b", 30, 70)
    row = compared(scored(a_I), scored(b_I), seen={"a": {f"q{n}" for n in range(60)}, "b": {"q99", "q0"}})
    assert (row.num_items, row.num_items_seen) == (39, 61)
    none = compared(scored(a_I), scored(b_I), seen={"a": {f"q{n}" for n in range(81)}})
    assert (none.conclusion.kind, none.conclusion.reason) == (
        "none", "only 19 of 100 items are outside the training data, and at least 20 were expected",
    )  # fmt: skip


def test_the_same_answers_under_two_names_are_one_model(values: tuple[np.ndarray, np.ndarray]) -> None:
    """Two raters of the same answers do not make two models, and Holm corrects for two pairs only."""
    a_I, b_I = values
    rated, otherwise = scored(a_I, name="a"), scored(np.minimum(a_I + 0.1, 1), name="a")
    other = scored(b_I, name="b")
    items = [Item(f"q{n}", ()) for n in range(NUM)]
    found = suite_statistics("s", [F1], items, {"one": rated, "again": otherwise, "b": other}, seed=0)
    assert [(row.a, row.b) for row in found.differences] == [("one", "b"), ("again", "b")]
    assert found.same_answers == (("one", "again"),)
    smallest = min(row.p for row in found.differences)
    assert min(row.holm_p for row in found.differences) == pytest.approx(2 * smallest)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Returns a file of answers, and a suite of 100 items that counts their length, from 0 to 1."""
    (tmp_path / "suite.py").write_text(
        "from evaluation.suites.suite import Item, Measure, Request, Scored, Suite, failed\n"
        "MEASURES = (Measure('f1', 'Length.', is_share=True),)\n"
        "def read(source):\n"
        "    ask = 'Question number {} of them?'.format\n"
        "    return [Item(f'q{n}', ({'role': 'user', 'content': ask(n)},)) for n in range(100)]\n"
        "def score(model, items, tools):\n"
        "    answers = model.answer([Request(item.messages, item_id=item.item_id) for item in items])\n"
        "    return [failed(item, one.failure, MEASURES) if one.failure\n"
        "            else Scored(item.item_id, {'f1': len(one.text) / 9}, one.text)\n"
        "            for item, one in zip(items, answers)]\n"
        "SUITE = Suite('drop', 'Lengths', 'conversations', MEASURES, read, score)\n"
    )

    def of(name: str, lengths: dict[int, int]) -> str:
        rows = [{"item_id": f"q{n}", "output": name[0] * length} for n, length in lengths.items()]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{name}={tmp_path / name}.jsonl"

    return of


def evaluated(heed_main: Call, place: Path, *given: str) -> tuple[int, str, str]:
    """Returns the exit code, what the terminal says, and the top of the page."""
    fixed = ["--suite", f"{place / 'suite.py'}:SUITE", "--data", "none", "--out", str(place / "out")]
    code, said = heed_main("evaluate", *fixed, *given)
    page = place / "out" / "report.html"
    return code, " ".join(said.split()), page.read_text().partition("<section")[0] if page.exists() else ""


def test_the_terminal_and_the_page_withhold_a_verdict_from_picked_answers(
    heed_main: Call, saved: Callable[..., str], tmp_path: Path
) -> None:
    long = saved("long", {n: 5 + n % 3 for n in range(100)})
    picked = saved("picked", dict.fromkeys(range(45), 8))
    code, said, _ = evaluated(heed_main, tmp_path, picked, long)
    assert code == 2
    assert (
        "model 'picked': the file answers 45 of 100 items of drop; at least 90% were expected (--max-failed-share 0.1)"
        in said
    )
    code, said, page = evaluated(heed_main, tmp_path, picked, long, "--max-failed-share", "0.6")
    sentence = (
        "drop: no verdict on picked and long in f1: 55 of 100 answers of picked are missing or could not be scored."
    )
    assert code == 0
    assert sentence in said
    assert sentence in page
    assert "is better" not in said + page


def test_a_bound_is_worded_as_one(heed_main: Call, saved: Callable[..., str], tmp_path: Path) -> None:
    long = saved("long", {n: 6 + n % 3 for n in range(100)})
    short = saved("short", {n: 1 + n % 4 for n in range(95)})
    code, said, page = evaluated(heed_main, tmp_path, short, long)
    assert code == 0
    for text in (said, page):
        assert "drop: long is better than short in f1, whatever the missing answers are worth: +5" in text
        assert "(5 of 100 answers of short are missing or could not be scored)" in text
    near = saved("near", {n: 6 + (n + 1) % 3 for n in range(95)})
    _, said, page = evaluated(heed_main, tmp_path, near, long, "--out", str(tmp_path / "two"))
    assert (
        "drop: no difference in f1 is shown between near and long, with what is missing counted as worst and as" in said
    )


def test_the_terminal_and_the_page_say_on_which_items_the_verdict_is(
    heed_main: Call, saved: Callable[..., str], tmp_path: Path
) -> None:
    long, short = saved("long", {n: 6 + n % 3 for n in range(100)}), saved("short", {n: 1 + n % 4 for n in range(100)})
    for num, sentence in (
        (60, "drop: long is better than short in f1, on the 40 items outside the training data: +49.7 points"),
        (100, "drop: no verdict on long and short in f1: only 0 of 100 items are outside the training data, and at"),
    ):
        (tmp_path / "seen.txt").write_text("\n\n".join(f"Question number {n} of them?" for n in range(num)))
        code, said, page = evaluated(
            heed_main, tmp_path, long, short, "--training-data", f"long={tmp_path / 'seen.txt'}"
        )
        assert code == 0
        assert sentence in said
        assert sentence in page
    assert "is better" not in said + page


def test_one_line_says_that_two_files_hold_the_same_answers(
    heed_main: Call, saved: Callable[..., str], tmp_path: Path
) -> None:
    one = saved("one", {n: 1 + n % 4 for n in range(100)})
    code, said, page = evaluated(heed_main, tmp_path, one, one.replace("one=", "again="))
    assert code == 0
    for text in (said, page):
        assert "drop: one and again gave the same answers: they are one model, and there is no comparison." in text


def test_no_verdict_is_undecided_in_ci(heed_main: Call, saved: Callable[..., str], tmp_path: Path) -> None:
    """More than 10% of answers are missing; fewer than 20 items are outside the training data."""
    long = saved("long", {n: 5 + n % 3 for n in range(100)})
    gate = ("--fail-if", "picked worse than long", "--max-failed-share", "0.6")
    code, said, _ = evaluated(heed_main, tmp_path, saved("picked", dict.fromkeys(range(89), 1)), long, *gate)
    assert (code, "undecided whether picked is worse than long: 11 of 100 answers of picked are" in said) == (2, True)
    (tmp_path / "seen.txt").write_text("\n\n".join(f"Question number {n} of them?" for n in range(81)))
    picked, more = saved("picked", dict.fromkeys(range(100), 1)), ("--training-data", f"long={tmp_path / 'seen.txt'}")
    code, said, _ = evaluated(heed_main, tmp_path, picked, long, *gate, *more, "--out", str(tmp_path / "seen"))
    assert (code, "only 19 of 100 items are outside the training data" in said) == (2, True)
    code, said, _ = evaluated(heed_main, tmp_path, picked, long, *gate, "--out", str(tmp_path / "clean"))
    assert (code, "drop: picked is shown to be worse than long in f1" in said) == (1, True)


@pytest.mark.parametrize(("num", "measure", "is_cautious"), [(19, LENGTH, True), (20, LENGTH, False), (19, F1, False)])
def test_a_difference_of_few_means_says_how_often_such_ones_are_false(
    num: int, measure: Measure, is_cautious: bool
) -> None:
    generator = np.random.default_rng(0)
    a_I = generator.uniform(0.4, 0.6, num)
    row = compared(scored(a_I), scored(a_I - 0.3 + 0.01 * generator.normal(size=num)), measure)
    said = "With fewer than 20 items, up to 10% of such verdicts are false if values are skewed."
    assert (row.better, row.conclusion.caution) == ("a", said if is_cautious else "")
