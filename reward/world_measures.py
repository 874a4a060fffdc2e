"""Measuring a reward model against what the world knows: the labelers' noiseless truth, and people's own order."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from files.records import read_record
from intervals.estimates import Share
from intervals.score import share_interval
from preferences.records import Ranking
from preferences.statistics.agreement import accuracy_against
from reward.comparisons import encode_scored, read_judgments
from reward.config import RewardConfig
from reward.results import RewardResults
from reward.scoring import RewardModel
from reward.training import HELDOUT_SCORES, split_of
from stages.world import World, label_truth


def measure_reward_model(folder: Path, config: RewardConfig, world: World, seed: int) -> RewardResults:
    """The results of the finished stage in `folder`, with what the world knows: `gold_accuracy`, the share of held-out
    pairs ordered as a noiseless labeler would, and `human_pairs_accuracy` where it has pairs that people ordered.
    """
    heldout = split_of(read_judgments(config.rankings).rankings, config, seed).heldout
    scores = json.loads((folder / HELDOUT_SCORES).read_text(encoding="utf-8"))
    truth = label_truth(heldout, world)
    unique = {ranking.task_id: ranking for ranking in heldout}
    by_truth = [Ranking(task, r.prompt, r.responses, _ranks_of(truth[task]), "noiseless") for task, r in unique.items()]
    results = replace(
        read_record(folder / "results.json", RewardResults), gold_accuracy=accuracy_against(by_truth, scores)
    )
    pairs = world.judged_pairs()
    if pairs:
        judge = RewardModel.load(folder / "model")
        sides = [[encode_scored(judge.tokenizer, pair[side]) for pair in pairs] for side in (0, 1)]
        better, worse = (judge.score_sequences(side) for side in sides)
        right = np.array([float(b > w) + 0.5 * (b == w) for b, w in zip(better, worse, strict=True)])
        found = share_interval(right)
        share = Share(found.mean, found.low, found.high, num_pairs=len(pairs), num_tasks=len(pairs))
        results = replace(results, human_pairs_accuracy=share)
    return results


def _ranks_of(scores: list[float]) -> tuple[int, ...]:
    """Rank 1 is the highest score; equal scores tie."""
    return tuple(1 + sum(other > score for other in scores) for score in scores)
