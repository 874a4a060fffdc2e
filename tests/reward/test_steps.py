"""Steps of responses: where they end, what their scores amount to, and functions and endpoints that score them."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from lm.tokenizer import Tokenizer
from reward.external import RewardFunction, ScoringFunction
from reward.sources import RewardSum
from reward.steps import StepsConfig, split_text, step_ends

ASKED = [{"role": "user", "content": "q"}]
SCORES = (0.9, 0.4, 0.8)


@pytest.mark.parametrize(
    ("form", "total", "paid"),
    [
        ("sum", 2.1, [0.9, 0.4, 0.8]),
        ("min", 0.4, [0.9, -0.5, 0.0]),
        ("product", 0.288, [0.9, 0.36 - 0.9, 0.288 - 0.36]),
        ("last", 0.8, [0.9, -0.5, 0.4]),
    ],
)
def test_steps_are_paid_the_change_that_they_make(form: str, total: float, paid: Sequence[float]) -> None:
    steps = StepsConfig.model_validate({"form": form})
    assert steps.total(SCORES) == pytest.approx(total)
    assert steps.paid(SCORES) == pytest.approx(paid)
    assert sum(steps.paid(SCORES)) == pytest.approx(steps.total(SCORES))


@pytest.mark.parametrize(
    ("text", "separator", "steps"),
    [
        ("a\nb\nc", "\n", ["a", "b", "c"]),
        ("a\n\nb\n", "\n", ["a", "b"]),  # blank pieces are no steps
        ("\n\na\n\nb\nc", "\n\n", ["a", "b\nc"]),
        ("", "\n", [""]),
        ("\n", "\n", ["\n"]),
    ],
)
def test_a_text_is_split_at_separators(text: str, separator: str, steps: list[str]) -> None:
    assert split_text(text, separator) == steps


def by_all_prefixes(tokenizer: Tokenizer, response: Sequence[int], separator: str) -> list[int]:
    """A slow twin: the first token at which the text so far has as many finished steps."""
    num_steps = len(split_text(tokenizer.decode(response), separator))

    def finished(place: int) -> int:
        pieces = tokenizer.decode(response[: place + 1]).split(separator)[:-1]
        return sum(bool(piece.strip()) for piece in pieces)

    inner = [next(at for at in range(len(response)) if finished(at) >= number) for number in range(1, num_steps)]
    return [*inner, len(response) - 1]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "é", " then "])
@pytest.mark.parametrize(
    "text", ["one\ntwo\n\nthree é four then five", "\n\nx", "", "a\nb\n", "café\n\né\nthen then x"]
)
def test_a_steps_last_token_completes_its_separator(text: str, separator: str) -> None:
    texts = ["one two three four then five\n\n", "x\n\nthen one\n", "then then é two\n\nfive"]
    for vocab_size in (261, 290):
        tokenizer = Tokenizer.train(texts, vocab_size, "chat")
        response = [*tokenizer.encode(text), tokenizer.end_id]
        found = step_ends(tokenizer, response, separator)
        assert found == by_all_prefixes(tokenizer, response, separator)
        assert len(found) == len(split_text(text, separator))
        assert found[-1] == len(response) - 1


FUNCTIONS = """
def lengths(prompts, responses):
    return [[float(len(step)) for step in steps] for steps in responses]

def partly(prompts, responses):
    return [[1.0, None] if len(steps) == 2 else [0.5] * len(steps) for steps in responses]

def whole(prompts, responses):
    return [1.0 for steps in responses]

def short(prompts, responses):
    return [[1.0] for steps in responses]
"""


@pytest.fixture
def function(tmp_path: Path) -> ScoringFunction:
    (tmp_path / "f.py").write_text(FUNCTIONS)

    def build(name: str, **steps: str) -> RewardFunction:
        return RewardFunction(function=f"{tmp_path}/f.py:{name}", steps=StepsConfig.model_validate(steps))

    return build


def test_a_function_scores_the_steps_of_each_response(function: ScoringFunction) -> None:
    first, second = function("lengths", form="sum").score([ASKED] * 2, ["ab\nc", "abcd"])
    assert (first.score, first.paid) == (3.0, (2.0, 1.0))
    assert (second.score, second.paid) == (4.0, (4.0,))
    (by_other,) = function("lengths", form="min", separator="b").score([ASKED], ["ab\ncb"])
    assert (by_other.score, by_other.paid) == (1.0, (1.0, 0.0))


def test_a_failed_step_fails_the_response_and_no_other(function: ScoringFunction) -> None:
    first, second = function("partly").score([ASKED] * 2, ["a\nb", "a\nb\nc"])
    assert math.isnan(first.score)
    assert not first.paid
    assert "partly returned [1.0, None]; a list of 2 finite numbers, one for each step of the" in first.failure
    assert (second.score, second.failure) == (0.5, "")


@pytest.mark.parametrize("name", ["whole", "short"])
def test_other_numbers_of_scores_are_failures(function: ScoringFunction, name: str) -> None:
    (scored,) = function(name).score([ASKED], ["a\nb"])
    assert math.isnan(scored.score)
    assert "a list of 2 finite numbers, one for each step of the response" in scored.failure


def test_a_sum_refuses_sources_that_score_steps() -> None:
    sources = {"a": {"kind": "function", "function": "f.py:a", "steps": {}}}
    with pytest.raises(ValueError, match=r"sources.a.steps: .* without `steps` was expected"):
        RewardSum.model_validate({"sources": sources, "objective_weights": {"a": 1.0}})
