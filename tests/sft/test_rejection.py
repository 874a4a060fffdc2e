"""Rejection sampling: which samples are kept, and the counts of all others."""

import math

import pytest

from heed.jobs.registry import BUILT_IN
from reward.sampling import Sample
from sft.rejection import STAGE, RejectionConfig, best_responses, count_chosen


def sample(prompt_id: str, index: int, score: float, *, finished: bool = True, text: str = "answer") -> Sample:
    return Sample(prompt_id, index, text, 3, finished, math.nan, score)


def test_the_best_sample_that_ends_is_kept_and_the_rest_is_counted() -> None:
    """The first of equals; one that was cut, or has no text or score, never; a prompt of only such ones is left out."""
    samples = [
        sample("a", 0, 1.0, text="one"), sample("a", 1, 3.0, text="two"), sample("a", 2, 3.0, text="three"),
        sample("a", 3, 9.0, finished=False),
        sample("b", 0, math.nan), sample("b", 1, -2.0), sample("b", 2, -2.0), sample("b", 3, 5.0, text=""),
        sample("c", 0, 5.0, finished=False), sample("c", 1, math.nan), sample("c", 2, 4.0, text=""),
        sample("c", 3, math.nan, finished=False, text=""),
    ]  # fmt: skip
    best = best_responses(samples)
    assert {name: found.index for name, found in best.items()} == {"a": 1, "b": 1}
    found = count_chosen(samples, best, num_prompts=3, num_samples=4)
    assert (found.num_prompts, found.num_samples, found.num_kept) == (3, 4, 2)
    assert (found.num_truncated, found.num_empty, found.num_failed) == (3, 2, 2)
    assert (found.num_identical, found.num_tied) == (1, 1)  # b's samples are one text; a's two best are not
    assert found.kept_score == (3.0 - 2.0) / 2
    assert found.sample_score == pytest.approx((1 + 3 + 3 + 9 - 2 - 2 + 5 + 5 + 4) / 9)


def test_it_comes_after_the_reward_model_and_is_a_policy_to_compare() -> None:
    assert BUILT_IN.names.index("reward") < BUILT_IN.names.index(STAGE.name) < BUILT_IN.names.index("compare")
    assert STAGE.policy_from == "sft"
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        RejectionConfig.model_validate({"num_samples": 1})
