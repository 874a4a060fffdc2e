"""What a comparison concludes nothing from: prompts of the training data, the same responses, a judge of positions."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation.judges.external import read_verdict_file
from evaluation.statistics.summary import summarise
from evaluation.verdicts import Verdict, read_verdicts
from preferences.statistics.intervals import share_interval

Call = Callable[..., tuple[int, str]]

NUM = 40
ASKED = "Number {} is the number of the fox that is asked about here today, is it not?"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Forty prompts, two policies' responses, and a judge of length: `long` wins on the first 30 prompts."""
    prompts = [{"prompt_id": f"p{n}", "prompt": ASKED.format(n)} for n in range(NUM)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for name, lengths in (("long", [9] * 30 + [1] * 10), ("short", [5] * NUM)):
        rows = [{"prompt_id": f"p{n}", "output": name[0] * length} for n, length in enumerate(lengths)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judges.py").write_text("def length(prompts, responses):\n    return [len(r) for r in responses]\n")
    return tmp_path


def compared(
    heed_main: Call, place: Path, *more: str, policies: tuple[str, ...] = ("long", "short")
) -> tuple[str, str]:
    """Returns what the terminal says, and the top of the page."""
    given = [name if "=" in name else f"{name}={place / name}.jsonl" for name in policies]
    judge = ["--judge", f"{place / 'judges.py'}:length", "--prompts", str(place / "prompts.jsonl")]
    code, said = heed_main(
        "compare", *given, *judge, *(more if "--out" in more else ("--out", str(place / "out"), *more))
    )
    assert code == 0, said
    return " ".join(said.split()), (Path(more[-1] if more else place / "out") / "report.html").read_text().partition(
        "<section"
    )[0]


def test_prompts_of_the_training_data_are_left_out(heed_main: Call, place: Path) -> None:
    said, _ = compared(heed_main, place)
    assert "long is preferred to short 75% of the time" in said.replace("Long", "long").replace("Short", "short")
    seen = place / "seen.txt"
    seen.write_text("\n\n".join(ASKED.format(n) for n in range(20)))
    said, _ = compared(heed_main, place, "--training-data", f"long={seen}", "--out", str(place / "clean"))
    report = json.loads((place / "clean" / "report.json").read_text())
    (pair,) = report["summary"]["judges"][0]["pairs"]
    assert (pair["win_rate"]["num_prompts"], pair["win_rate"]["mean"], pair["conclusion"]["kind"]) == (
        20, 0.5, "undecided",
    )  # fmt: skip
    assert "20 prompts in the training data of long are left out." in said
    assert report["settings"]["training_data"]["long"]["files"] == {str(seen): 20}
    seen.write_text("\n\n".join(ASKED.format(n) for n in range(25)))
    said, page = compared(heed_main, place, "--training-data", str(seen), "--out", str(place / "few"))
    for text in (said, page):
        assert (
            "No verdict on long and short: only 15 of 40 prompts are outside the training data, and at least 20 were"
            " expected." in text
        )
        assert "is preferred" not in text
    (withheld,) = json.loads((place / "few" / "report.json").read_text())["summary"]["withheld"]
    assert withheld["conclusion"]["kind"] == "none"


def test_the_same_responses_are_one_policy_and_holm_counts_real_pairs(heed_main: Call, place: Path) -> None:
    said, page = compared(heed_main, place, policies=("long", f"again={place / 'long.jsonl'}", "short"))
    summary = json.loads((place / "out" / "report.json").read_text())["summary"]
    pairs = summary["judges"][0]["pairs"]
    assert [(pair["policy_a"], pair["policy_b"]) for pair in pairs] == [("long", "short"), ("again", "short")]
    assert {pair["significance"]["num_pairs"] for pair in pairs} == {2}
    for text in (said, page):
        assert "No verdict on long and again: they gave the same responses, so they are one policy." in text


def battle(number: int, left: str, right: str, winner: str, judge: str = "arena_user_1") -> dict[str, object]:
    ask = {"role": "user", "content": ASKED.format(number)}
    return {
        "question_id": str(number), "model_a": left, "model_b": right, "winner": winner, "judge": judge, "turn": 1,
        "conversation_a": [ask, {"role": "assistant", "content": f"{left} {number}"}],
        "conversation_b": [ask, {"role": "assistant", "content": f"{right} {number}"}],
    }  # fmt: skip


def test_an_arena_file_keeps_who_was_shown_first(heed_main: Call, tmp_path: Path) -> None:
    """The judge takes the left one nine times in ten, and A is left in four of five battles."""
    rows = []
    for n in range(200):
        left, right = ("A", "B") if n % 5 else ("B", "A")
        rows.append(battle(n, left, right, "model_a" if n % 8 else "model_b"))
    (tmp_path / "arena.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = heed_main(
        "verdicts", str(tmp_path / "arena.jsonl"), "--format", "arena", "--out", str(tmp_path / "out")
    )
    assert code == 0, said
    firsts = {(v.policy_a if v.first == "a" else v.policy_b) for v in read_verdicts(tmp_path / "out/verdicts.parquet")}
    assert firsts == {"A", "B"}
    (pair,) = json.loads((tmp_path / "out" / "report.json").read_text())["summary"]["judges"][0]["pairs"]
    assert pair["position_bias"]["num_verdicts"] == 200
    assert pair["conclusion"]["kind"] == "undecided"
    assert pair["win_rate"]["mean"] == pytest.approx(0.5, abs=0.01)
    # A judge that was asked in both orders has no order.
    (tmp_path / "both.jsonl").write_text(json.dumps(battle(0, "A", "B", "model_a", "gpt4_pair")) + "\n")
    assert [v.first for v in read_verdict_file(str(tmp_path / "both.jsonl"), "arena", judge="j").verdicts] == [""]


def test_a_judge_of_positions_is_named_on_the_terminal_and_the_page(heed_main: Call, tmp_path: Path) -> None:
    rows = [battle(n, *(("A", "B") if n % 2 else ("B", "A")), "model_a") for n in range(100)]
    (tmp_path / "arena.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = heed_main(
        "verdicts", str(tmp_path / "arena.jsonl"), "--format", "arena", "--out", str(tmp_path / "out")
    )
    assert code == 0, said
    page = (tmp_path / "out" / "report.html").read_text().partition("<section")[0]
    sentence = "follows position: it prefers the response shown first 100% of the time"
    for text in (" ".join(said.split()), page):
        assert "Cannot tell which of A and B is better: the judge arena follows position" in text
        assert sentence in text
        assert "too few prompts" not in text
        assert "No difference" not in text


@pytest.mark.parametrize(("num_failed", "kind"), [(0, "better"), (1, "better"), (3, "bound"), (9, "none")])
def test_verdicts_that_failed_are_bounded_as_missing_answers_are(
    heed_main: Call, place: Path, num_failed: int, kind: str
) -> None:
    """`long` wins on 36 of 80 prompts and ties on the rest, of which some fail: 1 is below 2%, 9 are above 10%."""
    for name, lengths in (("long", [9] * 36 + [1] * 44), ("short", [5] * 80)):
        rows = [{"prompt_id": f"p{n}", "output": name[0] * length} for n, length in enumerate(lengths)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt_id": f"p{n}", "prompt": ASKED.format(n)} for n in range(80)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (place / "judges.py").write_text(
        "def length(prompts, responses):\n"
        f"    failing = [f' {{n}} is' for n in range(80 - {num_failed}, 80)]\n"
        "    gone = lambda prompt: any(one in prompt[-1]['content'] for one in failing)\n"
        "    tied = lambda prompt: int(prompt[-1]['content'].split()[1]) >= 36\n"
        "    return [None if gone(p) else 0 if tied(p) else len(r) for p, r in zip(prompts, responses)]\n"
    )
    said, page = compared(heed_main, place, "--max-failed-share", "0.2", "--out", str(place / "out"))
    (pair,) = json.loads((place / "out" / "report.json").read_text())["summary"]["judges"][0]["pairs"]
    assert (pair["conclusion"]["kind"], pair["different"], pair["num_failed"]) == (kind, kind != "none", num_failed)
    sentence = f"{num_failed} of 80 verdicts of the judge length failed"
    for text in (said, page):
        assert (sentence in text) == (kind in ("bound", "none"))
        assert ("is preferred to short" in text.replace("Short", "short")) == (kind != "none")
    # The interval holds for the worst and the best of what the failed verdicts may have been.
    if kind == "bound":
        ends = [share_interval(np.array([1.0] * 36 + [0.5] * 41 + [end] * 3)) for end in (0.0, 1.0)]
        assert pair["win_rate"]["low"] <= ends[0].low + 0.005
        assert pair["win_rate"]["high"] >= ends[1].high - 0.005
        assert pair["win_rate"]["mean"] == pytest.approx((36 + 41 / 2) / 77)


def test_failed_verdicts_that_could_turn_a_difference_show_none() -> None:
    """26 wins of 38 show a difference; 26 of 40, with both failures lost, do not, whichever policy is called a."""
    for names in (("a", "b"), ("b", "a")):
        rows = [
            Verdict(f"p{n}", *names, 0, 0, "j", "j", math.nan if n > 37 else float((n < 26) == (names[0] == "a")),
                    failure="timed out" if n > 37 else "")
            for n in range(40)
        ]  # fmt: skip
        (pair,) = summarise(rows, ("a", "b"), seed=0).judges[0].pairs
        assert (pair.conclusion.kind, pair.different) == ("bound", False)
        assert summarise(rows[:38], ("a", "b"), seed=0).judges[0].pairs[0].different
        assert pair.significance.p == summarise(
            [replace(row, failure="", preference_a=float(names[0] == "b")) if row.failure else row for row in rows],
            ("a", "b"),
            seed=0,
        ).judges[0].pairs[0].significance.p  # fmt: skip


@pytest.mark.parametrize(
    ("gate", "code", "said"),
    [
        ("short worse than long", 1, "judge length: short is shown to be worse than long in win rate (25.0%, 14."),
        ("long worse than short", 0, "judge length: long is shown not to be worse than short in win rate (75.0%, 59."),
        ("long worse than near", 2, "judge length: long is not shown to be, nor shown not to be, worse than near in"),
        ("near worse than long by .3", 0, "near is shown not to be worse than long by more than 30 points in win rate"),
        ("long worse than near in same by .2", 0, "judge same: long is shown not to be worse than near by more than"),
        ("long worse than again", 0, "long is not worse than again: they gave the same responses, so they are one"),
        ("long worse than near in nobody", 2, "no judge 'nobody'; one of length, same was expected"),
        ("long worse than near by 2", 2, "judge length of this comparison is a share, from 0 to 1; .02, which is 2"),
        ("long worse than other", 2, "no model is called 'other'; one of long, short, near, again was expected"),
    ],
)
def test_the_exit_code_says_whether_a_policy_got_worse(
    heed_main: Call, place: Path, gate: str, code: int, said: str
) -> None:
    """`near` is as often longer as shorter than `long`."""
    near = [{"prompt_id": f"p{n}", "output": "n" * (9 if n >= 20 else 1)} for n in range(NUM)]
    (place / "near.jsonl").write_text("".join(json.dumps(row) + "\n" for row in near))
    (place / "judges.py").write_text(
        "def length(prompts, responses):\n    return [len(r) for r in responses]\n"
        "def same(prompts, responses):\n    return [1 for r in responses]\n"
    )
    names = {name: f"{name}={place / name}.jsonl" for name in ("long", "short", "near")}
    judges = [word for name in ("length", "same") for word in ("--judge", f"{place / 'judges.py'}:{name}")]
    found, printed = heed_main(
        "compare", *names.values(), f"again={place / 'long.jsonl'}", *judges, "--prompts", str(place / "prompts.jsonl"),
        "--out", str(place / "out"), "--fail-if", gate,
    )  # fmt: skip
    assert (found, said in " ".join(printed.split())) == (code, True), printed
    assert (place / "out").exists() == ("was expected" not in printed)  # refused before anything was judged


def test_no_verdict_is_undecided_in_ci(heed_main: Call, place: Path) -> None:
    """More than 10% of verdicts failed; fewer than 20 prompts are outside the training data."""
    (place / "judges.py").write_text(
        "def length(prompts, responses):\n"
        "    return [None if ' number of' in p[0]['content'] and r[:1] == 's' and any(f'Number {n} ' in"
        " p[0]['content'] for n in range(5)) else len(r) for p, r in zip(prompts, responses)]\n"
    )
    policies = [f"{name}={place / name}.jsonl" for name in ("long", "short")]
    seen = place / "seen.txt"
    seen.write_text("\n\n".join(ASKED.format(n) for n in range(25)))
    given = ["compare", *policies, "--judge", f"{place / 'judges.py'}:length", "--fail-if", "short worse than long"]
    given += ["--prompts", str(place / "prompts.jsonl")]
    for name, more, said in (
        ("failed", ["--max-failed-share", ".5"], "undecided whether short is worse than long: 5 of 40 verdicts of the"),
        ("clean", ["--max-failed-share", ".5", "--training-data", str(seen)], "only 15 of 40 prompts are outside"),
        ("share", [], "failed on 5 of 40 verdicts, more than 10% (--max-failed-share)"),
    ):
        code, printed = heed_main(*given, *more, "--out", str(place / name))
        assert (code, said in " ".join(printed.split())) == (2, True), printed
