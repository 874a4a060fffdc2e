"""Measuring a reward model against what the world knows: the labelers' noiseless truth, and people's own order."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from files.records import read_record
from lm.tokenizer import Messages
from preferences.records import Ranking
from preferences.statistics.agreement import accuracy_against
from preferences.statistics.estimates import Floats, Share
from preferences.statistics.intervals import share_interval
from reward.comparisons import encode_scored, read_judgments
from reward.config import RewardConfig
from reward.prepared import split_of
from reward.results import RewardResults
from reward.scoring import RewardModel
from reward.training import HELDOUT_SCORES
from stages.run import StageRun
from stages.world import label_truth


def measure_reward_model(run: StageRun, config: RewardConfig) -> RewardResults:
    """The results of the finished stage, with what the world knows: `gold_accuracy`, the share of held-out pairs
    ordered as a noiseless labeler would, and `human_pairs_accuracy` where it has pairs that people ordered.
    """
    folder, world = run.folder, run.world
    scores = json.loads((folder / HELDOUT_SCORES).read_text(encoding="utf-8"))
    split = split_of(read_judgments(config.rankings).rankings, config, run.seed)
    heldout = [ranking for ranking in split.heldout if ranking.task_id in scores]  # the others were too long
    truth = label_truth(heldout, world)
    unique = {ranking.task_id: ranking for ranking in heldout}
    by_truth = [Ranking(task, r.prompt, r.responses, _ranks_of(truth[task]), "noiseless") for task, r in unique.items()]
    results = replace(
        read_record(folder / "results.json", RewardResults), gold_accuracy=accuracy_against(by_truth, scores)
    )
    pairs = world.judged_pairs()
    if pairs:
        workers = run.workers()
        bounds = [len(pairs) * rank // workers.num_workers for rank in range(workers.num_workers + 1)]
        shares = [(folder / "model", pairs[start:end]) for start, end in pairwise(bounds)]
        right = np.concatenate(workers.run_split(f"{run.name}: pairs", right_pairs, shares))
        found = share_interval(right)
        share = Share(found.mean, found.low, found.high, num_pairs=len(pairs), num_tasks=len(pairs))
        results = replace(results, human_pairs_accuracy=share)
    return results


def right_pairs(folder: Path, pairs: Sequence[tuple[Messages, Messages]]) -> Floats:
    """1 for each pair (better, worse) that the reward model in `folder` orders so, ½ for a tie, else 0."""
    if not pairs:
        return np.empty(0)
    judge = RewardModel.load(folder)
    better, worse = (
        np.array(judge.score_sequences([encode_scored(judge.tokenizer, pair[side]) for pair in pairs]))
        for side in (0, 1)
    )
    return (better > worse) + 0.5 * (better == worse)


def _ranks_of(scores: list[float]) -> tuple[int, ...]:
    """Rank 1 is the highest score; equal scores tie."""
    return tuple(1 + sum(other > score for other in scores) for score in scores)
