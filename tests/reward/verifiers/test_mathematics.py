"""Whether a response states the mathematical answer of its row."""

import math
import os
import signal

import pytest

from reward.external import Scored
from reward.verifiers import mathematics
from reward.verifiers.verifier import Verifier

ASKED = ({"role": "user", "content": "?"},)


def score(answer: str | float, response: str) -> Scored:
    reward = Verifier(verifier="math", unclear="failed")
    (scored,) = reward.score([ASKED], [response], [reward.fields_of("rows.jsonl:1", {"answer": answer})])
    return scored


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        (r"\frac{1}{2}", r"So it is \boxed{0.5}, not 3."),
        (r"\frac34", "The answer is 3/4."),
        (18, "9 + 9\n#### 18"),
        ("18", r"\boxed{18 \text{ apples}}"),
        ("x^2+2x+1", r"**Answer:** $(x+1)^2$"),
        ("y=2x", r"\boxed{y = x + x}"),
        (r"\{1, 2\}", r"\boxed{2, 1}"),
        ("(1, 2]", r"\boxed{(1, 2]}"),
        ("x>5", r"\boxed{(5, \infty)}"),
        (r"\sqrt{8}", r"It is $2\sqrt{2}$"),
        (r"\$6", r"\boxed{6}"),
        (r"x \neq 5", r"\boxed{x \ne 5}"),
        ("1, 2", "The answer is $x=1$ or $x=2$."),
        (r"\text{Monday}", r"\boxed{\text{Monday}}"),
    ],
)
def test_equal_answers_are_right(answer: str | float, response: str) -> None:
    assert score(answer, response) == Scored(1.0)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
        ("18", "The answer is at least 18."),
        ("18", "The answer is not 18."),
        ("18", r"\boxed{17 \text{ or } 18}"),
        ("18", r"\boxed{18 \leq x}"),
        ("5", r"\boxed{\neq 5}"),
        ("5", r"\boxed{\pm 5}"),
        ("3", r"\boxed{x^3}"),
        ("x^2+2x+1", r"\boxed{(x+1)^3}"),
        ("(1, 2]", r"\boxed{(1, 2)}"),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        ("18", r"18 is near, but it is \boxed{17}"),
        (r"\text{Monday}", r"\boxed{\text{Tuesday}}"),
    ],
)
def test_other_answers_are_wrong(answer: str, response: str) -> None:
    assert score(answer, response) == Scored(0.0)


@pytest.mark.parametrize("response", ["It is 5\nor so", r"\boxed{}", ""])
def test_a_response_that_states_nothing_has_no_score(response: str) -> None:
    assert score("5", response).failure.startswith("unclear answer: ")


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_one_is_compared() -> None:
    assert score("9", r"\boxed{9^{9^{9^9}}}") == Scored(0.0)
    assert score("9", r"\boxed{3^2}") == Scored(1.0)


def test_a_process_that_ended_is_started_again() -> None:
    assert score("9", "9") == Scored(1.0)
    mathematics._started[0].kill()
    mathematics._started[0].communicate()
    assert score("9", "9") == Scored(1.0)


def test_a_process_that_does_not_answer_leaves_the_score_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert score("9", "9") == Scored(1.0)
    monkeypatch.setattr(mathematics, "CLOCK_SECONDS", 0.0)
    os.kill(mathematics._started[0].pid, signal.SIGSTOP)
    assert math.isnan(score("9", "9").score)


def test_an_answer_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: field 'answer'"):
        score([18], "18")  # type: ignore[arg-type]
