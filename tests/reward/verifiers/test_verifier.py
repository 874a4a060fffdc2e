"""The reward "verifier": what a row asks for, what is right, wrong or missing, and rows that cannot be verified."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reward.external import Scored, score_in_parts
from reward.verifiers import sandbox, verifier
from reward.verifiers.verifier import Verifier

ASKED = ({"role": "user", "content": "?"},)
MISSING = "missing"
NUMBER = {"answer": "She has 12 + 6 = 18 eggs.\n#### 18"}
CHOICE = {"choices": ["red", "blue"], "answer": "B"}
CHECKS = {
    "checks": [{"kind": "format:regex", "pattern": "^[a-z]+$"}, {"kind": "keywords:existence", "keywords": ["x"]}]
}
SCHEMA = {"checks": [{"kind": "format:json_schema", "schema": {"type": "array", "minItems": 2}}]}
TESTS = {"tests": ["assert double(2) == 4", "assert double(0) == 0"]}
SLOW = {"checks": [{"kind": "format:regex", "pattern": "^(a|aa|aaa)+$"}]}


def score(row: dict[str, Any], response: str, **settings: Any) -> Scored:
    reward = Verifier(**settings)
    (scored,) = reward.score([ASKED], [response], [reward.fields_of("rows.jsonl:1", row)])
    return scored


@pytest.mark.parametrize(
    ("row", "response", "expected"),
    [
        (NUMBER, "The answer is 18.", 1),
        (NUMBER, "The answer is 17.", 0),
        (NUMBER, "Either 17 or 18.", MISSING),
        (NUMBER, "", MISSING),
        ({"answer": 2.5}, "5/2", 1),
        ({"answer": -3}, "It is 3.", 0),
        (CHOICE, "Answer: B", 1),
        (CHOICE, "Answer: A", 0),
        (CHOICE, "Answer: A. No, answer: B.", MISSING),
        ({**CHOICE, "answer": 1}, "Answer: B", 1),  # MMLU's rows
        (CHECKS, "axe", 1),
        (CHECKS, "ape", 0),
        (CHECKS, "", 0),
        (SCHEMA, "[1, 2]", 1),
        (SCHEMA, "[1", 0),
        (TESTS, "```python\ndef double(x):\n    return 2 * x\n```", 1),
        (TESTS, "def double(x):\n    return x ** 2", 1),
        (TESTS, "def double(x):\n    return x + 2", 0),
        (TESTS, "I cannot.", 0),
        ({**NUMBER, **CHECKS}, "x", MISSING),  # it passes the checks
        ({**NUMBER, **CHECKS}, "18", 0),  # it fails the checks
        ({**NUMBER, **CHECKS}, "nothing?", 0),  # wrong by one, unclear by the other: wrong whatever the number is
    ],
)
def test_right_is_1_wrong_is_0_and_what_cannot_be_told_is_missing(
    row: dict[str, Any], response: str, expected: float | str
) -> None:
    scored = score(row, response, unclear="failed")
    if expected == MISSING:
        assert math.isnan(scored.score)
        assert scored.failure.startswith("unclear answer: ")
        assert 'unclear = "wrong"' in scored.failure, "the first failure is all that a stopped run shows"
    else:
        assert scored == Scored(float(expected))


def test_a_pattern_that_takes_too_long_is_missing() -> None:
    scored = score(SLOW, "a" * 100_000 + "b")
    assert math.isnan(scored.score)
    assert scored.failure == "a regular expression of the row took too long"


def test_unclear_answers_are_wrong_by_default_and_counted() -> None:
    assert score(NUMBER, "Either 17 or 18.") == Scored(0.0, failure_kind="unclear")
    assert score(CHOICE, "I do not know.") == Scored(0.0, failure_kind="unclear")
    assert score(NUMBER, "17") == Scored(0.0)
    assert math.isnan(score(SLOW, "a" * 100_000 + "b").score)  # not the response's doing


def test_a_sandbox_that_fails_leaves_the_score_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SCRIPT", Path("/nowhere/sandboxed.py"))
    scored = score(TESTS, "def double(x):\n    return 2 * x")
    assert math.isnan(scored.score)
    assert scored.failure.startswith("the sandbox did not start: ")


def test_an_attempt_to_forge_is_counted_whatever_else_is_wrong() -> None:
    short = ({"kind": "length_constraints:number_words", "num_words": 1, "relation": "less than"},)
    assert score(TESTS, "import os; os._exit(0)", checks=short) == Scored(0.0, failure_kind="forged")
    assert score({**TESTS, **NUMBER}, "import os; os._exit(0)") == Scored(0.0, failure_kind="forged")
    assert score(TESTS, "def double(x): return 3 * x", checks=short) == Scored(0.0)


def test_responses_are_scored_in_order_with_their_own_rows() -> None:
    reward = Verifier(cpu_seconds=2)
    rows = [{"tests": f"assert x == {number}"} for number in range(6)]
    scored = reward.score([ASKED] * 6, [f"x = {number}" if number % 2 else "x = 9" for number in range(6)], rows)
    assert [one.score for one in scored] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_code_runs_on_the_threads_of_its_rank_however_small_a_pass_is(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, all_at_once = [], [], threading.Barrier(num_threads)

    def passes(*_: Any) -> Scored:
        running.append(1)
        most.append(len(running))
        all_at_once.wait(60)
        time.sleep(0.1)  # for a thread too many, if there were one
        running.pop()
        return Scored(1.0)

    monkeypatch.setattr(verifier, "score_code", passes)
    monkeypatch.setattr("torch.get_num_threads", lambda: num_threads)
    scored = score_in_parts(Verifier(), [ASKED] * 6, ["x = 1"] * 6, 1, [{"tests": "assert x"}] * 6)
    assert scored == [Scored(1.0)] * 6
    assert max(most) == num_threads


@pytest.mark.parametrize(("answer", "response"), [(1e-05, "0.00001"), (1e16, "10,000,000,000,000,000"), (0.1, "1/10")])
def test_numbers_of_any_size_are_answers(answer: float, response: str) -> None:
    assert score({"answer": answer}, response) == Scored(1.0)


def test_a_schema_whose_pattern_takes_too_long_is_missing() -> None:
    row = {"checks": [{"kind": "format:json_schema", "schema": {"pattern": "^(a|a|b?a)*$"}}]}
    assert score(row, '"' + "a" * 40 + 'c"').failure == "a regular expression of the row took too long"


def test_one_kind_of_check_is_chosen_and_the_job_may_add_some() -> None:
    row = {**CHOICE, **CHECKS}
    assert score(row, "Answer: B", verifier="choice") == Scored(1.0)
    assert score(row, "axe", verifier="checks") == Scored(1.0)
    short = ({"kind": "length_constraints:number_words", "num_words": 2, "relation": "less than"},)
    assert score({}, "one", verifier="checks", checks=short) == Scored(1.0)
    assert score({}, "one two", checks=short) == Scored(0.0)
    assert score(CHOICE, "Answer: B", checks=short) == Scored(0.0)


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"prompt": "?"}, {}, "found ['prompt']; a field 'answer', 'checks' or 'tests' was expected"),
        ({"choices": ["a", "b"]}, {}, "a field 'answer', 'checks' or 'tests' was expected"),
        ({"prompt": "?"}, {"verifier": "checks"}, "field 'checks' was expected"),
        (TESTS, {"verifier": "number"}, "field 'answer' is missing"),
        ({"answer": "no idea"}, {}, "field 'answer': no number in 'no idea'; one number was expected"),
        ({"answer": [18]}, {}, "field 'answer' is [18]; a number, or a text with it, was expected"),
        ({**CHOICE, "answer": "C"}, {}, "fields 'choices' and 'answer': answer 'C': a letter from A to B"),
        ({**CHOICE, "choices": ["a", "a"]}, {}, "fields 'choices' and 'answer': options ['a', 'a']"),
        ({"checks": []}, {}, "field 'checks' is empty"),
        ({"checks": [{"kind": "rhymes"}]}, {}, "field 'checks[0]': check 'rhymes'; one of "),
        ({"checks": [{"kind": "format:regex", "pattern": "("}]}, {}, "argument 'pattern': '(' found: not a regular"),
        ({"tests": []}, {}, "field 'tests' is empty"),
        ({"tests": [""]}, {}, "field 'tests[0]' is empty"),
        ({"tests": ["assert f(1) =="]}, {}, "field 'tests[0]' is not Python: "),
        ({"tests": 3}, {}, "field 'tests' is int"),
    ],
)
def test_a_row_that_cannot_be_verified_is_named(row: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^rows\.jsonl:7: ") as caught:
        Verifier(**settings).fields_of("rows.jsonl:7", row)
    assert words in str(caught.value)


def test_checks_of_the_job_are_validated_when_it_is_read() -> None:
    with pytest.raises(ValueError, match=r"checks: field 'checks\[0\]': check 'rhymes'"):
        Verifier(checks=({"kind": "rhymes"},))


def test_prompts_keep_only_what_is_verified() -> None:
    assert Verifier().fields_of("here", {**NUMBER, "prompt": "?", "choices": None, "kind": "math"}) == NUMBER


def test_the_sandbox_is_checked_only_if_a_row_has_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("no sandbox here")

    monkeypatch.setattr(verifier, "check_sandbox", refuse)
    Verifier().check([NUMBER, CHOICE])
    Verifier(verifier="choice").check([{**CHOICE, **TESTS}])
    with pytest.raises(ValueError, match="no sandbox here"):
        Verifier().check([NUMBER, TESTS])
