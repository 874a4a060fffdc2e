"""Metrics of a trained reward model: scores of held-out rankings, and how well they predict what labelers said.

With several objectives, each head is measured on the rankings of its own objective.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from preferences.records import Ranking
from preferences.statistics.agreement import accuracy_against
from preferences.statistics.reliability import labeler_reliability
from reward.ties import tie_metrics

TaskScores = Mapping[str, Sequence[float]]  # of each task's responses, in their order


def objective_metrics(
    train: Sequence[Ranking], heldout: Sequence[Ranking], scores: TaskScores, *, score_shift: float, seed: int
) -> dict[str, Any]:
    """Metrics of one objective: accuracy on held-out pairs, the distribution of their scores, and ties.

    `scores` has all held-out tasks, and the tasks of `train` that a tie's probability is fitted on.
    """
    accuracy = accuracy_against(heldout, scores)
    unseen = dict.fromkeys(ranking.task_id for ranking in heldout)
    samples = torch.tensor([score for task_id in unseen for score in scores[task_id]])
    known = [ranking for ranking in train if ranking.task_id in scores]
    return {
        "heldout_accuracy": accuracy.mean,
        "heldout_pairs": accuracy.num_pairs,
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
    """Metrics of several heads together, and each head's own by objective.

    Scores of different heads have no common unit, so their means are not averaged.
    """
    accuracy = accuracy_against(heldout, scores)
    counts = ("heldout_comparisons", "train_comparisons", "train_rankings")
    return {
        "heldout_accuracy": accuracy.mean,
        "heldout_pairs": accuracy.num_pairs,
        **{name: sum(metrics[name] for metrics in by_objective.values()) for name in counts},
        "objectives": dict(by_objective),
    }


def labeler_metrics(train: Sequence[Ranking], weights: Mapping[str, float]) -> dict[str, dict[str, float | int | None]]:
    """For each labeler: how often other labelers agree (None if nobody else judged the same tasks), and the weight of
    its rankings, 1 unless `weights` names it.
    """
    return {
        name: {
            "accuracy": found.accuracy if found.num_pairs else None,
            "num_pairs": found.num_pairs,
            "weight": weights.get(name, 1.0),
        }
        for name, found in labeler_reliability(train).items()
    }


def rating_metrics(rankings: Sequence[Ranking], scores: TaskScores, scale: float) -> dict[str, float | int | None]:
    """`explained`: the share of the ratings' variance within judgments that `scale` · score explains (1 is best, and
    below 0 is worse than nothing), None where no judgment has ratings that differ.
    """
    rated = [ranking for ranking in rankings if ranking.ratings]
    pairs = [(np.array(ranking.ratings), np.array(scores[ranking.task_id])) for ranking in rated]
    total = sum(float(((ratings - ratings.mean()) ** 2).sum()) for ratings, _ in pairs)
    left = sum(float(((ratings - ratings.mean() - scale * (s - s.mean())) ** 2).sum()) for ratings, s in pairs)
    explained = 1 - left / total if total else None
    return {"ratings_per_score": scale, "heldout_explained": explained, "heldout_judgments": len(rated)}
