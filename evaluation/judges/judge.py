"""The interface of judges, which pairs of responses they judge, and judges that score one response at a time: reward
models, functions, endpoints, a world's gold scorer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from evaluation.verdicts import Response, Side, Verdict
from lm.tokenizer import Messages, Tokenizer
from reward.comparisons import encode_scored
from reward.endpoint import OnProgress
from reward.external import Scored
from reward.scoring import RewardModel, check_network, labels_of, weights_by_label
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
    by_prompt: dict[tuple[str, str], list[Response]] = {}
    for policy, rows in responses.items():
        for response in rows:
            by_prompt.setdefault((policy, response.prompt_id), []).append(response)
    pairs: list[Pair] = []
    for prompt in prompts:
        for first, second in combinations(responses, 2):
            ours, theirs = by_prompt.get((first, prompt.prompt_id)), by_prompt.get((second, prompt.prompt_id))
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


# Maps conversations and responses to one score or failure per response.
Score = Callable[..., Sequence[Scored]]  # (conversations, responses), or with `ScoreJudge.reads_rows` a third: rows

BATCH = 128  # responses per call
MAX_PAIRS = 64  # per prompt and two policies; comparing a response with more others needs no further scoring


@dataclass(frozen=True)
class ScoreJudge:
    """Prefers the response with the higher score; equal scores tie. `details` are added to what `describe` returns.

    With `reads_rows`, `score` gets the prompts' rows too.
    """

    name: str
    kind: str
    spec: str
    score: Score
    details: Mapping[str, Any] = field(default_factory=dict)
    reads_rows: bool = False

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "spec": self.spec, **self.details}

    def judge(self, pairs: Sequence[Pair], on_progress: OnProgress) -> list[Verdict]:
        """Scores each text once per prompt, however many pairs and policies it appears in."""
        scores = self._scores(pairs, on_progress)
        return [self._verdict(pair, scores) for pair in pairs]

    def _scores(self, pairs: Sequence[Pair], on_progress: OnProgress) -> dict[tuple[str, str], Scored]:
        wanted = {(pair.prompt.prompt_id, side.text): pair.prompt for pair in pairs for side in (pair.a, pair.b)}
        keys, scores = list(wanted), dict[tuple[str, str], Scored]()
        for start in range(0, len(keys), BATCH):
            part = keys[start : start + BATCH]
            rows = [[wanted[key].row for key in part]] if self.reads_rows else []
            scored = self.score([wanted[key].messages for key in part], [text for _, text in part], *rows)
            scores |= zip(part, scored, strict=True)
            on_progress(len(scores), len(keys))
        return scores

    def _verdict(self, pair: Pair, scores: Mapping[tuple[str, str], Scored]) -> Verdict:
        a, b = (scores[pair.prompt.prompt_id, side.text] for side in (pair.a, pair.b))
        failed = next((f"{side.policy}: {s.failure}" for side, s in ((pair.a, a), (pair.b, b)) if s.failure), "")
        preference_a = 0.5 if a.score == b.score else float(a.score > b.score)
        return pair.verdict(self.name, preference_a, scores=(a.score, b.score), failure=failed)


def reward_model_score(folder: Path, weights: Mapping[str, float]) -> Score:
    """Returns a scoring function that uses the reward model in a directory, with its vocabulary and chat template.
    `weights` apply to its objectives, if it has several.

    Raises: ValueError for a directory without a reward model, and for weights that do not fit it.
    """
    weights_by_label(str(folder), labels_of(folder), weights)
    check_network(folder)
    tokenizer = Tokenizer.load(folder)

    @cache  # loaded when first used: policies are sampled before, and need the memory
    def model() -> RewardModel:
        return RewardModel.load(folder, weights)

    def score(conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        turns = zip(conversations, responses, strict=True)
        whole = [[*messages, {"role": "assistant", "content": response}] for messages, response in turns]
        encoded = [encode_scored(tokenizer, conversation) for conversation in whole]
        room = model().network.config.max_position_embeddings
        fitting = [row for row, tokens in enumerate(encoded) if model().fits(tokens)]
        scored = [
            Scored(math.nan, f"{len(tokens)} tokens; the reward model reads at most {room}") for tokens in encoded
        ]
        scores = model().score_sequences([encoded[row] for row in fitting])
        for row, value in zip(fitting, scores, strict=True):
            scored[row] = Scored(value) if math.isfinite(value) else Scored(math.nan, f"the reward model gave {value}")
        return scored

    return score
