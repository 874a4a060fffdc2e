"""Scores by the model in training: every rank scores its share of the sequences on its own device.

Shape letters: B sequences, O objectives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lm.padding import MAX_ROWS, batches_by_length
from lm.progress import note_progress
from lm.tokenizer import Tokenizer
from reward.comparisons import Comparison, encode_scored
from reward.config import RewardConfig
from reward.learner import RewardLearner
from reward.scoring import read_by, sequences_of, task_scores
from training.data import read_conversations
from training.engine import Engine


@dataclass(frozen=True)
class FinalScores:
    """What the trained model, shifted, says of all held-out tasks and of some that it was trained on, by task."""

    shift: list[float]  # by head: what makes demonstrations score 0 on average
    heldout: dict[str, list[float]]
    trained_on: dict[str, list[float]]


def final_scores(
    engine: Engine[RewardLearner],
    tokenizer: Tokenizer,
    config: RewardConfig,
    trained_on: Sequence[Comparison],
    heldout: Sequence[Comparison],
) -> FinalScores:
    """Score the first `num_calibration` demonstrations, all held-out comparisons, and of each objective the first
    `num_calibration` that were trained on; a collective call.
    """
    conversations = islice(read_conversations(config.demonstrations), config.num_calibration)
    demonstrations = [encode_scored(tokenizer, messages) for _, messages in conversations]
    scores_BO = scores_on_all_ranks(engine, demonstrations)
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
    """Scores [B, O] of the sequences, in order, on every rank's CPU; a collective call.

    Batches of like length are dealt to the ranks in turn, so a round takes all ranks about as long.
    """
    engine.model.eval()
    network = engine.module.network
    batches = batches_by_length(sequences, min(MAX_ROWS, math.ceil(len(sequences) / engine.world_size)))
    scores_BO = torch.zeros(len(sequences), len(network.labels), device=engine.device)
    with engine.cache_weight_casts():
        # ZeRO-3 gathers weights in every pass, so all ranks run the same number of passes: a rank without a batch
        # repeats the last one and does not count it.
        for first in range(0, len(batches), engine.world_size):
            note_progress()
            place = first + engine.rank
            batch = batches[min(place, len(batches) - 1)]
            read = read_by([sequences[row] for row in batch], network.config.kind, engine.device)
            found_BO, _, _ = engine.model(*read)
            if place < len(batches):
                scores_BO[batch] = found_BO.to(scores_BO)
    return engine.sum_over_ranks(scores_BO).cpu()
