"""Metrics of a trained reward model: its scores of held-out rankings, and how well they predict the labelers' verdicts.

Every rank scores its share of the sequences on its own device. The best responses, or demonstrations, are scored too:
their mean score becomes 0.

With several objectives, each head is measured on the rankings of its own objective. Wins, ties and losses are predicted
by Davidson's model (1970) with ν fitted to the scores afterwards. That measure does not depend on how training treated
ties, so reward models trained either way can be compared.

Shape letters: P pairs of responses, B sequences, O objectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lm.progress import note_progress
from lm.tokenizer import Tokenizer
from lm.transfer import MAX_TOKENS
from preferences.records import Ranking
from preferences.statistics.agreement import accuracy_against, labeler_reliability
from preferences.statistics.intervals import bootstrap_ratio
from reward.comparisons import Comparison, encode_scored
from reward.config import RewardConfig
from reward.objective import RewardLearner
from reward.scoring import PackedInputs, sequences_of, task_scores
from training.data import read_conversations
from training.engine import Engine
from training.packing import split_passes
from training.tokens import encode_rows

TaskScores = Mapping[str, Sequence[float]]  # by task, the scores of its responses in order
Floats = npt.NDArray[np.float64]
LEVEL, NUM_RESAMPLES = 0.95, 2_000
# Demonstrations that set the score's zero, and comparisons that fit the probability of a tie.
NUM_CALIBRATION = 512


def objective_metrics(
    train: Sequence[Ranking], heldout: Sequence[Ranking], scores: TaskScores, *, score_shift: float, seed: int
) -> dict[str, Any]:
    """Returns metrics of one objective: accuracy on held-out pairs, the distribution of their scores, and ties.

    `scores` covers all held-out tasks, and the tasks of `train` that the probability of a tie is fitted on.
    """
    accuracy = accuracy_against(heldout, scores)
    unseen = dict.fromkeys(ranking.task_id for ranking in heldout)
    samples = torch.tensor([score for task_id in unseen for score in scores[task_id]])
    known = [ranking for ranking in train if ranking.task_id in scores]
    return {
        "heldout_accuracy": asdict(accuracy),
        "heldout_comparisons": len(unseen),
        "train_comparisons": len({ranking.task_id for ranking in train}),
        "train_rankings": len(train),
        "score_shift": score_shift,
        # The units of PPO's rewards: scores of the SFT policy's samples on prompts that training never saw.
        "sample_score_mean": float(samples.mean()),
        "sample_score_std": float(samples.std()),
        "ties": tie_metrics(known, heldout, scores, seed=seed),
    }


def joined_metrics(
    by_objective: Mapping[str, Mapping[str, Any]], heldout: Sequence[Ranking], scores: TaskScores
) -> dict[str, Any]:
    """Returns metrics of several heads together, and each head's metrics by objective.

    Scores of different heads have no common unit, so their means are not averaged.
    """
    accuracy = accuracy_against(heldout, scores)
    counts = ("heldout_comparisons", "train_comparisons", "train_rankings")
    return {
        "heldout_accuracy": asdict(accuracy),
        **{name: sum(metrics[name] for metrics in by_objective.values()) for name in counts},
        "objectives": dict(by_objective),
    }


def labeler_metrics(train: Sequence[Ranking], weights: Mapping[str, float]) -> dict[str, dict[str, float | int | None]]:
    """Returns for each labeler how often other labelers agree (None if nobody else judged the same tasks), and the
    weight of its rankings, which is 1 unless `weights` has one.
    """
    return {
        name: {
            "accuracy": reliability.accuracy if reliability.num_pairs else None,
            "num_pairs": reliability.num_pairs,
            "weight": weights.get(name, 1.0),
        }
        for name, reliability in labeler_reliability(train).items()
    }


def rating_metrics(rankings: Sequence[Ranking], scores: TaskScores, scale: float) -> dict[str, float | int | None]:
    """Returns `explained`, the share of the ratings' variance within judgments that `scale` · score explains: 1 is
    best, below 0 is worse than predicting the mean; None if no judgment has ratings that differ.
    """
    rated = [ranking for ranking in rankings if ranking.ratings]
    pairs = [(np.array(ranking.ratings), np.array(scores[ranking.task_id])) for ranking in rated]
    total = sum(float(((ratings - ratings.mean()) ** 2).sum()) for ratings, _ in pairs)
    left = sum(float(((ratings - ratings.mean() - scale * (s - s.mean())) ** 2).sum()) for ratings, s in pairs)
    explained = 1 - left / total if total else None
    return {"ratings_per_score": scale, "heldout_explained": explained, "heldout_judgments": len(rated)}


def tie_metrics(
    train: Sequence[Ranking], heldout: Sequence[Ranking], scores: TaskScores, *, seed: int
) -> dict[str, float | None]:
    """Returns ν fitted to the pairs of `train`, and the mean log-likelihood of the held-out pairs under it (nats per
    pair, with a 95% interval over tasks; higher is better). `scores` covers the tasks of both.
    """
    differences, ahead, _ = outcomes(train, scores)
    log_nu = fit_log_nu(differences, ahead == 0)
    differences, ahead, tasks = outcomes(heldout, scores)
    half = differences / 2
    likelihood = np.where(ahead == 0, log_nu, half * ahead) - _log_normaliser(half, log_nu)
    names, place = np.unique(tasks, return_inverse=True)
    mean, low, high = bootstrap_ratio(
        np.bincount(place, likelihood, len(names)).astype(np.float64),
        np.bincount(place, minlength=len(names)).astype(np.float64),
        seed=seed,
        num_resamples=NUM_RESAMPLES,
        level=LEVEL,
    )
    return {
        "nu": float(np.exp(log_nu)),
        "heldout_log_likelihood": mean,
        # A single task gives no interval.
        "low": None if np.isnan(low) else low,
        "high": None if np.isnan(high) else high,
        "heldout_tie_share": float((ahead == 0).mean()),
    }


def fit_log_nu(differences_P: Floats, tied_P: npt.NDArray[np.bool_]) -> float:
    """Returns the maximum-likelihood log ν of these pairs, at which the expected number of ties is the observed one.

    Half a tie and half an untied pair are added to the observations, so the value is finite.
    """
    num_pairs = len(differences_P)
    wanted = (tied_P.sum() + 0.5) * num_pairs / (num_pairs + 1)
    low, high = -40.0, 40.0
    while high - low > 1e-9:  # the expected number of ties rises with ν
        middle = (low + high) / 2
        low, high = (middle, high) if _tie_chances(differences_P, middle).sum() < wanted else (low, middle)
    return (low + high) / 2


def _tie_chances(differences_P: Floats, log_nu: float) -> Floats:
    half_P = differences_P / 2
    chances_P: Floats = np.exp(log_nu - _log_normaliser(half_P, log_nu))
    return chances_P


def _log_normaliser(half_P: Floats, log_nu: float) -> Floats:
    """log(e^(d/2) + ν + e^(-d/2))."""
    normaliser_P: Floats = np.logaddexp(np.logaddexp(half_P, -half_P), log_nu)
    return normaliser_P


def outcomes(rankings: Sequence[Ranking], scores: TaskScores) -> tuple[Floats, Floats, list[str]]:
    """Returns for every pair of every ranking: the score difference; 1 if the first is better, 0 for a tie, -1 if the
    second is; and the task.
    """
    differences, ahead, tasks = [], [], []
    for ranking in rankings:
        of_task = scores[ranking.task_id]
        for i, j in combinations(range(len(ranking.ranks)), 2):
            differences.append(of_task[i] - of_task[j])
            ahead.append(float(np.sign(ranking.ranks[j] - ranking.ranks[i])))
            tasks.append(ranking.task_id)
    return np.array(differences), np.array(ahead), tasks


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
    """Score the first `NUM_CALIBRATION` demonstrations (or best responses, without demonstrations), all held-out
    comparisons, and the first `NUM_CALIBRATION` training comparisons of each objective. A collective call.
    """
    context = engine.module.network.config.max_position_embeddings
    if config.demonstrations:
        best: Sequence[Sequence[int]] = calibration_sequences(config, tokenizer, context)
    else:
        best = best_responses(trained_on, NUM_CALIBRATION)
    scores_BO = scores_on_all_ranks(engine, best)
    shift = [-sum(of_head) / len(of_head) for of_head in scores_BO.T.tolist()]

    def shifted_scores(comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
        return task_scores(scores_on_all_ranks(engine, sequences_of(comparisons)) + torch.tensor(shift), comparisons)

    known: dict[str, list[float]] = {}
    for place in range(len(shift)):
        own = (comparison for comparison in trained_on if comparison.objective == place)
        known |= shifted_scores(list(islice(own, NUM_CALIBRATION)))
    return FinalScores(shift, shifted_scores(heldout), known)


@torch.no_grad()
def scores_on_all_ranks(engine: Engine[RewardLearner], sequences: Sequence[Sequence[int]]) -> Tensor:
    """Returns scores [B, O] of the sequences, in order, on every rank's CPU. A collective call."""
    engine.model.eval()
    network = engine.module.network
    scores_BO = torch.zeros(len(sequences), len(network.labels), device=engine.device)
    shares = split_passes([[len(sequence)] for sequence in sequences], engine.data_parallel_size, MAX_TOKENS)
    with engine.cache_weight_casts():
        # ZeRO-3 gathers weights in every pass, so all ranks run the same number of passes. A pass without sequences
        # reads the first one and discards the result.
        for rows in shares[engine.data_rank] if sequences else ():
            note_progress()
            packed = PackedInputs.of([sequences[row] for row in rows or [0]], network.config.kind, engine.device)
            found_BO, _, _ = engine.model(*packed.read)
            if rows:
                scores_BO[rows] = packed.in_order(found_BO).to(scores_BO)
    return engine.sum_over_shares(scores_BO).cpu()


def calibration_sequences(config: RewardConfig, tokenizer: Tokenizer, max_tokens: int) -> list[tuple[int, ...]]:
    """Returns the tokens of the first `NUM_CALIBRATION` demonstrations; `on_overlong` treats those that are too long.

    Raises: ValueError naming file and line of a row that is not a demonstration, or that is too long with "refuse";
            or if none is left.
    """
    found = []
    for where, messages in islice(read_conversations(config.demonstrations), NUM_CALIBRATION):
        (tokens,) = encode_rows(lambda of: [encode_scored(tokenizer, one) for one in of], [(where, messages)])
        if len(tokens) > max_tokens and config.on_overlong == "refuse":
            raise ValueError(
                f"{where}: the conversation has {len(tokens)} tokens; the reward model reads at most {max_tokens}"
                ' (reward.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        if len(tokens) <= max_tokens or config.on_overlong == "truncate":
            found.append(tokens if len(tokens) <= max_tokens else (*tokens[: max_tokens - 1], tokens[-1]))
    if not found and config.demonstrations:
        raise ValueError(
            f"reward.demonstrations: none of the first {NUM_CALIBRATION} conversations fits; at least one was expected"
        )
    return found


def best_responses(comparisons: Sequence[Comparison], limit: int) -> list[Sequence[int]]:
    """Returns the sequence that the first labeler ranks best, for each of the first `limit` comparisons."""
    return [
        comparison.sequences[comparison.verdicts[0].ranks.index(min(comparison.verdicts[0].ranks))]
        for comparison in comparisons[:limit]
    ]
