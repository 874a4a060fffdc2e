"""Defines the interface of judges, and which pairs of responses they judge."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

from evaluation.verdicts import Response, Side, Verdict
from reward.endpoint import OnProgress
from training.data import Prompt

SAME_TEXT = 0.5  # responses with identical text are tied without asking a judge


@dataclass(frozen=True)
class Pair:
    """Two policies' responses to one prompt."""

    prompt: Prompt
    a: Response
    b: Response

    @property
    def is_same(self) -> bool:
        return self.a.text == self.b.text

    def verdict(
        self,
        judge: str,
        preference_a: float,
        *,
        labeler: str = "",
        first: Side = "",
        scores: tuple[float, float] = (math.nan, math.nan),
        failure: str = "",
    ) -> Verdict:
        """Returns a judge's verdict on this pair; the labeler defaults to the judge."""
        return Verdict(
            prompt_id=self.prompt.prompt_id,
            policy_a=self.a.policy,
            policy_b=self.b.policy,
            index_a=self.a.index,
            index_b=self.b.index,
            judge=judge,
            labeler=labeler or judge,
            preference_a=math.nan if failure else preference_a,
            first=first,
            score_a=scores[0],
            score_b=scores[1],
            length_a=len(self.a.text),
            length_b=len(self.b.text),
            category=self.prompt.kind,
            failure=failure,
        )


class Judge(Protocol):
    """Judges pairs of responses. Implementations validate their inputs in the constructor."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, Any]:
        """Returns what its verdicts depend on, as JSON; never a password or a key."""

    def judge(self, pairs: Sequence[Pair], on_progress: OnProgress) -> list[Verdict]:
        """Returns verdicts on the pairs, in their order. A pair that it cannot judge gives a verdict with a failure."""


def pairs_of(
    prompts: Sequence[Prompt], responses: Mapping[str, Sequence[Response]], *, max_pairs: int = 0
) -> list[Pair]:
    """Returns the pairs to judge: for each prompt, the responses of every two policies, sample by sample. `responses`
    is keyed by policy, and its order is the order of the policies.

    The i-th sample of one policy is compared with the i-th of the other. If one has fewer samples, they are reused in
    turn, so that every response is judged and the number of verdicts grows with the samples, not with their square.
    With `max_pairs`, the i-th is also compared with the (i+1)-th, (i+2)-th, ..., in as many whole rounds as fit into
    `max_pairs` pairs per prompt and two policies; if `max_pairs` is large enough, every two samples are compared once.
    Two policies are compared on the prompts that both have answered.
    """
    found: dict[tuple[str, str], list[Response]] = {}
    for policy, own in responses.items():
        for response in own:
            found.setdefault((policy, response.prompt_id), []).append(response)
    pairs: list[Pair] = []
    for prompt in prompts:
        for first, second in combinations(responses, 2):
            ours, theirs = found.get((first, prompt.prompt_id)), found.get((second, prompt.prompt_id))
            if ours and theirs:
                pairs += [Pair(prompt, ours[i], theirs[j]) for i, j in _meetings(len(ours), len(theirs), max_pairs)]
    return pairs


def _meetings(num_ours: int, num_theirs: int, max_pairs: int) -> list[tuple[int, int]]:
    """Returns the indices of samples to compare, round by round: each round pairs every sample of the longer side with
    one that it has not been paired with yet.
    """
    longer, shorter = max(num_ours, num_theirs), min(num_ours, num_theirs)
    num_rounds = min(shorter, max(1, max_pairs // longer))
    rounds = [(i, (i + shift) % shorter) for shift in range(num_rounds) for i in range(longer)]
    return rounds if num_ours >= num_theirs else [(j, i) for i, j in rounds]


def refuse_too_many_failures(verdicts: Sequence[Verdict], max_failed_share: float) -> None:
    """Raises: ValueError with the first cause if more than this share of a judge's verdicts failed."""
    failed = [verdict for verdict in verdicts if verdict.failure]
    if len(failed) > max_failed_share * len(verdicts):
        first = failed[0]
        raise ValueError(
            f"judge {first.judge!r} failed on {len(failed)} of {len(verdicts)} verdicts, more than"
            f" {max_failed_share:.0%} (--max-failed-share). The first failure, on prompt {first.prompt_id!r}:"
            f" {first.failure}"
        )
