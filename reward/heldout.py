"""Scores held-out rankings with the model in training, and the conversations whose mean score becomes 0. Every rank
scores its share of the sequences on its own device.

Shape letters: B sequences, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lm.padding import MAX_TOKENS
from lm.progress import note_progress
from lm.tokenizer import Tokenizer
from reward.comparisons import Comparison, encode_scored
from reward.config import RewardConfig
from reward.learner import RewardLearner
from reward.scoring import PackedInputs, sequences_of, task_scores
from training.data import read_conversations
from training.engine import Engine
from training.packing import split_passes
from training.tokens import encode_rows


@dataclass(frozen=True)
class FinalScores:
    """The shifted model's scores of all held-out tasks and of some that it was trained on, by task."""

    shift: list[float]  # by head: the constant that makes demonstrations score 0 on average
    heldout: dict[str, list[float]]
    trained_on: dict[str, list[float]]


def final_scores(
    engine: Engine[RewardLearner],
    tokenizer: Tokenizer,
    config: RewardConfig,
    trained_on: Sequence[Comparison],
    heldout: Sequence[Comparison],
) -> FinalScores:
    """Score the first `num_calibration` demonstrations (or best responses, without demonstrations), all held-out
    comparisons, and the first `num_calibration` training comparisons of each objective. A collective call.
    """
    context = engine.module.network.config.max_position_embeddings
    if config.demonstrations:
        best: Sequence[Sequence[int]] = calibration_sequences(config, tokenizer, context)
    else:
        best = best_responses(trained_on, config.num_calibration)
    scores_BO = scores_on_all_ranks(engine, best)
    shift = [-sum(of_head) / len(of_head) for of_head in scores_BO.T.tolist()]

    def shifted_scores(comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
        return task_scores(scores_on_all_ranks(engine, sequences_of(comparisons)) + torch.tensor(shift), comparisons)

    known: dict[str, list[float]] = {}
    for place in range(len(shift)):
        own = (comparison for comparison in trained_on if comparison.objective == place)
        known |= shifted_scores(list(islice(own, config.num_calibration)))
    return FinalScores(shift, shifted_scores(heldout), known)


@torch.no_grad()
def scores_on_all_ranks(engine: Engine[RewardLearner], sequences: Sequence[Sequence[int]]) -> Tensor:
    """Returns scores [B, O] of the sequences, in order, on every rank's CPU. A collective call."""
    engine.model.eval()
    network = engine.module.network
    scores_BO = torch.zeros(len(sequences), len(network.labels), device=engine.device)
    passes = split_passes([[len(sequence)] for sequence in sequences], engine.world_size, MAX_TOKENS)[engine.rank]
    with engine.cache_weight_casts():
        # ZeRO-3 gathers weights in every pass, so all ranks run the same number of passes. A pass without sequences
        # reads the first one and discards the result.
        for rows in passes if sequences else ():
            note_progress()
            packed = PackedInputs.of([sequences[row] for row in rows or [0]], network.config.kind, engine.device)
            found_BO, _, _ = engine.model(*packed.read)
            if rows:
                scores_BO[rows] = packed.in_order(found_BO).to(scores_BO)
    return engine.sum_over_ranks(scores_BO).cpu()


def calibration_sequences(config: RewardConfig, tokenizer: Tokenizer, max_tokens: int) -> list[tuple[int, ...]]:
    """Returns the tokens of the first `num_calibration` demonstrations; `on_overlong` treats those that are too long.

    Raises: ValueError naming file and line of a row that is not a demonstration, or that is too long with "refuse".
    """
    found = []
    for where, messages in islice(read_conversations(config.demonstrations), config.num_calibration):
        (tokens,) = encode_rows(lambda of: [encode_scored(tokenizer, one) for one in of], [(where, messages)])
        if len(tokens) > max_tokens and config.on_overlong == "refuse":
            raise ValueError(
                f"{where}: the conversation has {len(tokens)} tokens; the reward model reads at most {max_tokens}"
                ' (reward.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        if len(tokens) <= max_tokens or config.on_overlong == "truncate":
            found.append(tokens[:max_tokens])
    return found


def best_responses(comparisons: Sequence[Comparison], limit: int) -> list[Sequence[int]]:
    """Returns the sequence that the first labeler ranks best, for each of the first `limit` comparisons."""
    return [
        comparison.sequences[comparison.verdicts[0].ranks.index(min(comparison.verdicts[0].ranks))]
        for comparison in comparisons[:limit]
    ]
