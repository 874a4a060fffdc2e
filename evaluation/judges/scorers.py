"""Judges that score one response at a time: reward models, functions, endpoints, a world's gold scorer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from evaluation.endpoint import OnProgress
from evaluation.judges.judge import Pair
from evaluation.verdicts import Verdict
from lm.tokenizer import Messages, Tokenizer
from reward.comparisons import encode_scored
from reward.external import Scored
from reward.scoring import RewardModel, check_network, labels_of, weights_by_label

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
            found = self.score([wanted[key].messages for key in part], [text for _, text in part], *rows)
            scores |= zip(part, found, strict=True)
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
        sequences = [encode_scored(tokenizer, conversation) for conversation in whole]
        room = model().network.config.max_position_embeddings
        fitting = [row for row, tokens in enumerate(sequences) if model().fits(tokens)]
        found = [Scored(math.nan, f"{len(s)} tokens; the reward model reads at most {room}") for s in sequences]
        scores = model().score_sequences([sequences[row] for row in fitting])
        for row, value in zip(fitting, scores, strict=True):
            found[row] = Scored(value) if math.isfinite(value) else Scored(math.nan, f"the reward model gave {value}")
        return found

    return score
