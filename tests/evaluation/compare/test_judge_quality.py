"""Judges with a planted fault, measured against people: what they do is found, and nothing else. Then the command."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.compare.report.quality import figure_rows, findings
from evaluation.judges.judge import Pair, ScoreJudge
from evaluation.judges.quality import JudgeQuality, judge_key, measure_judge, read_labelled
from evaluation.verdicts import Side, Verdict
from lm.tokenizer import Messages, Tokenizer
from reward.comparisons import encode_response
from reward.external import Scored
from reward.scoring import RewardModel

Call = Callable[..., tuple[int, str]]
Rows = list[dict[str, Any]]


def ignore(_done: int, _total: int) -> None:
    """Ignores progress."""


def scoring(function: Callable[[str], float], name: str = "judge") -> ScoreJudge:
    def score(_conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        return [Scored(function(text)) for text in responses]

    return ScoreJudge(name, "function", "judges.py:f", score)


@dataclass(frozen=True)
class OrderedJudge:
    """Sees each pair in both orders. `prefers` gives its preference for the text that it is shown first."""

    prefers: Callable[[str, str], float]
    name: str = "judge"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "language model", "spec": f"http://host/v1#{self.name}"}

    def judge(self, pairs: Sequence[Pair], on_progress: Callable[[int, int], None]) -> list[Verdict]:
        on_progress(len(pairs), len(pairs))
        sides: tuple[Side, Side] = ("a", "b")
        return [
            pair.verdict(self.name, self._preference_a(pair, first), first=first) for pair in pairs for first in sides
        ]

    def _preference_a(self, pair: Pair, first: Side) -> float:
        if first == "a":
            return self.prefers(pair.a.text, pair.b.text)
        return 1 - self.prefers(pair.b.text, pair.a.text)


def file_of(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def llmbar(*pairs: tuple[str, str]) -> Rows:
    """Rows whose first text is the right one."""
    return [{"input": f"Q {n}", "output_1": a, "output_2": b, "label": 1} for n, (a, b) in enumerate(pairs)]


def measured(judge: Any, *files: str, max_tasks: int = 0) -> JudgeQuality:
    return measure_judge(judge, read_labelled(files, max_tasks), 0.1, ignore)


def differing(num: int, seed: int = 0) -> Rows:
    """Pairs in which people prefer the text with "good" in it, of random lengths."""
    lengths = np.random.default_rng(seed).integers(1, 60, size=(num, 2))
    return llmbar(*((f"good {'x' * one}", f"bad {'x' * other}") for one, other in lengths))


def test_agreement_by_hand(tmp_path: Path) -> None:
    """Two pairs right, one wrong, one tied: 62.5%, and two of three without the tie."""
    rows = llmbar(("aaa", "a"), ("aaaa", "aa"), ("a", "aaa"), ("aa", "bb"))
    found = measured(scoring(len), file_of(tmp_path / "pairs.jsonl", rows))
    assert (found.agreement.mean, found.agreement.num_pairs) == (0.625, 4)
    assert (found.decided.mean, found.decided.num_pairs) == (pytest.approx(2 / 3), 3)
    assert math.isnan(found.people.mean)
    assert ("two people agree", "-", "no pair has two") in figure_rows(found)
    assert ("prefers the first shown", "-", "it scores each response alone: the order cannot move it") in figure_rows(
        found
    )


@pytest.mark.parametrize(
    ("num_right", "expected"),
    [(16, "11.9% (7.4 to 18.6) of 134 judgments: opposite to people."), (118, "88.1% (81.4 to 92.6) of 134"),
     (67, "50.0% (41.5 to 58.5) of 134 judgments: not shown to differ from chance.")],
)  # fmt: skip
def test_worse_than_chance_is_called_opposite(tmp_path: Path, num_right: int, expected: str) -> None:
    """16 of 134 is what a judge of length gets on LLMBar's Neighbor."""
    rows = llmbar(*([("long", "s")] * num_right + [("s", "long")] * (134 - num_right)))
    found = measured(scoring(len), file_of(tmp_path / "pairs.jsonl", rows))
    assert expected in findings(found)[0]
    assert ("more often than chance" in findings(found)[0]) == (num_right == 118)


def test_a_judge_of_length_is_found_and_a_fair_one_is_not(tmp_path: Path) -> None:
    source = file_of(tmp_path / "pairs.jsonl", differing(200))
    by_length, fair = measured(scoring(len), source), measured(scoring(lambda text: float("good" in text)), source)
    assert by_length.length.judge == 1.0
    assert by_length.length.difference.low > 0.3
    assert by_length.length.people == fair.length.people == fair.length.judge
    assert "prefers the longer response more than people do" in " ".join(findings(by_length))
    assert (fair.length.difference.mean, fair.agreement.mean, len(findings(fair))) == (0.0, 1.0, 1)


def test_longer_is_by_characters_and_not_by_words(tmp_path: Path) -> None:
    """People prefer "incomprehensibly", one word of 16 characters, to eight words of one; the judge prefers these."""
    rows = llmbar(*[("incomprehensibly", "a b c d e f g h")] * 30)
    found = measured(scoring(lambda text: len(text.split())), file_of(tmp_path / "pairs.jsonl", rows))
    assert (found.length.judge, found.length.people, found.length.num_pairs) == (0.0, 1.0, 30)


def test_a_judge_of_position_is_found_in_both_orders(tmp_path: Path) -> None:
    source = file_of(tmp_path / "pairs.jsonl", differing(100))
    always_first = measured(OrderedJudge(lambda _first, _second: 1.0), source)
    assert (always_first.position.mean, always_first.flips.reversed.mean) == (1.0, 1.0)
    assert (always_first.agreement.mean, always_first.decided.num_pairs) == (0.5, 0)
    assert "It prefers the response shown first: 100.0%" in findings(always_first)[1]
    fair = measured(OrderedJudge(lambda first, _second: float("good" in first)), source)
    assert (fair.position.mean, fair.flips.changed.mean, fair.agreement.mean) == (0.5, 0.0, 1.0)
    assert len(findings(fair)) == 1


def test_a_judge_of_its_own_responses_is_found(tmp_path: Path) -> None:
    """People prefer either model half of the time; the judge prefers what it wrote."""
    rows = [
        {"instruction": f"Q {n}", "output_1": "mine", "output_2": "his!", "generator_1": "GPT-4",
         "generator_2": "other", "annotator": "ann", "preference": 1 + n % 2}
        for n in range(40)
    ]  # fmt: skip
    source = file_of(tmp_path / "pairs.jsonl", rows)
    found = measured(OrderedJudge(lambda first, _second: float(first == "mine"), "gpt-4"), source)
    assert (found.own.judge, found.own.people, found.own.num_pairs) == (1.0, 0.5, 40)
    assert found.own.difference.low > 0.3
    assert findings(found)[1:] == [
        f"It prefers its own responses more than people do: 100.0%, people 50.0%: +50.0 points"
        f" ({100 * found.own.difference.low:+.1f} to {100 * found.own.difference.high:+.1f})."
    ]
    another = measured(OrderedJudge(lambda first, _second: float(first == "mine"), "llama"), source)
    assert (another.own.num_pairs, math.isnan(another.own.difference.mean)) == (0, True)


def test_rankings_become_pairs_by_hand(tmp_path: Path) -> None:
    ranks = [[[1, 2, 3], [1, 3, 2]], [[2, 1, 2], [2, 1, 3]], [[1, 1, 2], [3, 2, 1]]]
    rows = [
        {"task_id": f"t{t}", "prompt": [{"role": "user", "content": f"bird {t}"}], "ranks": ranks, "labeler": labeler,
         "responses": [f"{t}a", f"{t}b", f"{t}c"]}
        for t, of_task in enumerate(ranks) for labeler, ranks in zip(("ann", "bob"), of_task, strict=True)
    ]  # fmt: skip
    scores = {"0a": 3.0, "0b": 2.0, "0c": 0.5, "1a": 0.0, "1b": 1.0, "1c": 1.0, "2a": 5.0, "2b": 1.0, "2c": 3.0}
    found = measured(scoring(scores.__getitem__), file_of(tmp_path / "rankings.jsonl", rows))
    leads = [1, 2.5, 1.5, 1, 2.5, -1.5, 1, 0, 1, 0, -1, 2, -2, -4, -2, 2]
    right = sum(lead > 0 for lead in leads) + 0.5 * sum(lead == 0 for lead in leads)
    assert (found.agreement.mean, found.agreement.num_pairs) == (pytest.approx(right / 16), 16)
    assert found.decided.mean == pytest.approx((right - 1) / 14)
    # Ann and Bob order 2 of 3 pairs of t0 alike, 2 of 2 of t1, and none of 2 of t2.
    assert (found.num_tied, found.people.mean) == (2, pytest.approx(4 / 7))
    assert found.ceiling.mean == pytest.approx((1 + math.sqrt(1 / 7)) / 2)
    tied = file_of(tmp_path / "tied.jsonl", [{**rows[0], "ranks": [1, 1, 1]}])
    with pytest.raises(ValueError, match="people preferred no response to another"):
        measured(scoring(len), tied)
    with pytest.raises(ValueError, match="no known format"):
        measured(scoring(len), file_of(tmp_path / "odd.jsonl", [{"text": "a"}]))


def test_people_among_themselves_files_and_categories(tmp_path: Path) -> None:
    ranked: Rows = [
        {"task_id": f"t{t}", "prompt": [{"role": "user", "content": f"bird {t}"}], "ranks": ranks, "labeler": labeler,
         "responses": ["aaa", "aa", "a"]}
        for t in range(6) for labeler, ranks in (("ann", [1, 2, 3]), ("bob", [1, 3, 2]), ("cy", [1, 1, 2]))
    ]  # fmt: skip
    bench: Rows = [
        {"prompt": f"Q {n}", "chosen": "aa", "rejected": "a" * (1 + 2 * (n % 2)), "subset": "abc"[n % 3], "id": n}
        for n in range(6)
    ]
    files = (file_of(tmp_path / "ranked.jsonl", ranked), file_of(tmp_path / "bench.jsonl", bench))
    found = measured(scoring(len), *files)
    # Untied pairs: ann and bob agree on 2 of 3, ann and cy on 2 of 2, bob and cy on 1 of 2.
    assert found.people.mean == pytest.approx(5 / 7)
    assert found.num_tied == 6
    shares = {name: (share.mean, share.num_pairs) for name, share in found.by_group.items()}
    assert shares == {"ranked": (pytest.approx(7 / 8), 48), **{f"bench: {s}": (0.5, 2) for s in "abc"}}
    assert [name for name, _, _ in figure_rows(found)][8:12] == ["bench: a", "bench: b", "bench: c", "ranked"]
    assert measured(scoring(len), *files, max_tasks=6).agreement.num_pairs == 3 * 8 + 3
    assert {*measured(scoring(len), files[1]).by_group} == {"a", "b", "c"}


def test_a_pair_that_fails_is_left_out_and_many_are_refused(tmp_path: Path) -> None:
    rows = llmbar(*[("good", "bad")] * 19, ("fails", "bad"))
    source = file_of(tmp_path / "pairs.jsonl", rows)

    def score(_conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        return [Scored(math.nan, "no score") if text == "fails" else Scored(float(len(text))) for text in responses]

    found = measured(replace(scoring(len), score=score), source)
    assert (found.num_failed, found.agreement.mean, found.agreement.num_pairs) == (1, 1.0, 19)
    assert ("left out or unusual", "", "1 task without a verdict") in figure_rows(found)
    with pytest.raises(ValueError, match="failed on 1 of 2 verdicts"):
        measured(replace(scoring(len), score=score), file_of(tmp_path / "few.jsonl", rows[18:]))


def test_a_reward_model_is_also_calibrated(place: Path, tmp_path: Path, heed_main: Call, tokenizer: Tokenizer) -> None:
    rows: Rows = [
        {"prompt": f"bird {i}", "chosen": f"fox {i}", "rejected": f"the dog {i * 7}", "subset": "ab"[i % 2], "id": i}
        for i in range(12)
    ]
    source, folder = (
        file_of(tmp_path / "bench.jsonl", [*rows, {**rows[0], "id": 99, "chosen": "fox " * 100}]),
        place / "q",
    )
    code, said = heed_main("judge-quality", str(place / "models/reward"), source, "--out", str(folder))
    assert code == 0, said
    assert "overconfidence" in said
    assert "1 task without a verdict" in said
    found = json.loads((folder / "quality.json").read_text())
    judge = RewardModel.load(place / "models/reward")
    tasks = read_labelled([source]).tasks
    right = []
    for row in rows:
        task = tasks[f"bench/rewardbench/{row['subset']}/{row['id']}"]
        chosen, rejected = judge.score_sequences(
            [encode_response(tokenizer, task.prompt, str(row[side])) for side in ("chosen", "rejected")]
        )
        right.append(chosen > rejected)
    assert found["agreement"]["mean"] == pytest.approx(np.mean(right))
    assert "reward" in (folder / "report.html").read_text()


def test_figures_enter_the_comparisons_of_the_same_judge_only(
    place: Path, heed_main: Call, compare: Callable[..., list[str]], settings_of: Callable[[Path], dict[str, Any]]
) -> None:
    source = file_of(place / "pairs.jsonl", differing(60))
    assert heed_main("judge-quality", f"strict={place / 'judges.py'}:length", source, "--out", str(place / "q"))[0] == 0
    policies = (str(place / "models/one/model"), str(place / "saved.jsonl"))
    given = compare(place, *policies, judges=(f"{place / 'judges.py'}:length",))
    code, said = heed_main(*given, "--judge-quality", str(place / "q"))
    assert code == 0, said
    assert "strict agrees with people in" in said
    assert "longer response more than people do" in said
    assert "How good the judges are" in (place / "out/report.html").read_text()
    (entry,) = settings_of(place / "out")["judges"]
    assert entry["quality"]["key"] == judge_key(entry)
    assert heed_main("judge", str(place / "out"), f"{place / 'judges.py'}:picky", "--max-failed-share", "1")[0] == 0
    assert "quality" in settings_of(place / "out")["judges"][0]  # stays with the judge that it is about
    for other in (f"{place / 'judges.py'}:picky", str(place / "models/reward")):
        more = ("--max-failed-share", "1", "--judge-quality", str(place / "q"))
        code, said = heed_main(*compare(place, *policies, judges=(other,), out=f"out{len(other)}", more=more))
        assert code == 2
        assert "it holds figures of the judge" in " ".join(said.split())
    (place / "judges.py").write_text("def length(prompts, responses):\n    return [-len(text) for text in responses]\n")
    code, said = heed_main(
        "judge", str(place / "out"), f"{place / 'judges.py'}:length", "--judge-quality", str(place / "q")
    )
    assert code == 2  # the file has changed, so it is another judge


def test_people_are_no_judge_to_measure(place: Path, heed_main: Call) -> None:
    source = file_of(place / "pairs.jsonl", differing(3))
    code, said = heed_main("judge-quality", f"people:{place / 'labels.sqlite'}", source, "--out", str(place / "q"))
    assert (code, "a judge to compare with people was expected" in " ".join(said.split())) == (2, True)
