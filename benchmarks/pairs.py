"""Compares all pairs of a prompt as one batch element with pairs shuffled as separate examples (InstructGPT, 3.5).

    make demo
    python -m benchmarks.pairs runs/demo --responses 4 --prompts 2000

Both train the same reward model from the same SFT policy on the same pairs, with equally many pairs and the same
learning rate in every step, so equally many steps per epoch. They differ in which pairs share a step: all pairs of a
prompt, so each completion is read once per epoch, or any pairs, so a completion appears in K - 1 steps.
research/findings/pairs-of-a-prompt.md has the table that this prints.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from files.hashes import derive_seed
from heed.jobs.job_file import load_job
from lm.dropout import sequence_keys
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from preferences.rankings import split_rankings
from preferences.records import Ranking, dense_ranks
from preferences.statistics.agreement import accuracy_against
from reward.comparisons import Comparison, LabelerWeights, comparison_of, encode_tasks, rankings_by_task
from reward.config import RankingsConfig
from reward.objective import AuxiliaryParameters, LearnerSource, RankingObjective, RewardLearner
from reward.prepared import read_rankings
from reward.scoring import head_scores, read_by, sequences_of, task_scores
from reward.stage import network_source
from stages.world import World, label_truth
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, Objective, TrainingLoop
from training.metrics import read_metrics
from training.packing import IntArray

SEQUENCES_AT_ONCE = 96
HELDOUT_SHARE = 0.25
KINDS = ("prompt", "shuffled")


class ShuffledPairs:
    """Every pair of every task as a separate example, which reads both its completions; the same loss per pair.

    If several labelers judged a pair, its target is their mean. A cross-entropy is linear in its target, so that gives
    the mean of their losses, as in `RankingObjective`.
    """

    def __init__(self, comparisons: Sequence[Comparison], kind: str) -> None:
        self.kind = kind
        self.pairs = [
            (
                c.sequences[i],
                c.sequences[j],
                mean(_chance(verdict.ranks[i], verdict.ranks[j]) for verdict in c.verdicts),
            )
            for c in comparisons
            for i, j in combinations(range(len(c.sequences)), 2)
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def count(self, rows: IntArray) -> int:
        return len(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return sum(len(sequence) for row in rows for sequence in self.pairs[row][:2])

    def loss(
        self, model: RewardLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        first, second, targets = zip(*(self.pairs[row] for row in rows), strict=True)
        keys = sequence_keys(seed, np.concatenate([2 * rows, 2 * rows + 1])[:, None], device)
        scores, _, _ = model(*read_by([*first, *second], self.kind, device), sequence_keys_BT=keys)
        difference = (scores[: len(rows)] - scores[len(rows) :]).squeeze(1)
        target = torch.tensor(targets, device=device)
        return F.binary_cross_entropy_with_logits(difference, target, reduction="sum"), {}


def _chance(rank: int, other_rank: int) -> float:
    """The probability that the first wins, according to a labeler: 1, ½ for a tie, 0."""
    return 0.5 if rank == other_rank else float(rank < other_rank)


@dataclass(frozen=True)
class Study:
    """What all runs share."""

    policy: Path
    rankings: Sequence[Ranking]
    world: World
    given: argparse.Namespace  # the command's options


def encode_rankings(
    tokenizer: Tokenizer,
    rankings: Sequence[Ranking],
    max_tokens: int,
    *,
    objectives: Sequence[str] = (),
    weights: LabelerWeights | None = None,
) -> list[Comparison]:
    """Returns one comparison per task, in order of first appearance. Each response is encoded once for all labelers.

    `objectives` are the model's, in order; () if there is only one. `weights` are the weights of labelers' rankings.

    Raises: ValueError naming the task whose conversation is longer than `max_tokens`, or whose rankings are not all of
    the same prompt and responses.
    """
    tasks = ((f"task {task[0].task_id!r}", task) for task in rankings_by_task(rankings))
    return [
        comparison_of(sequences, task, objectives, weights or {})
        for _, task, sequences in encode_tasks(tokenizer, tasks, max_tokens, "reward")
    ]


def train(study: Study, kind: str, seed: int, folder: Path) -> dict[str, float]:
    """Trains one reward model; returns its metrics on held-out prompts."""
    tokenizer = Tokenizer.load(study.policy)
    seen, unseen = split_rankings(study.rankings, HELDOUT_SHARE, seed)
    source = network_source(study.policy, 0.0, derive_seed(seed, "reward", "head"))
    shape = on_meta(source.build).config
    trained_on, heldout = (encode_rankings(tokenizer, part, shape.max_position_embeddings) for part in (seen, unseen))
    num_pairs = math.comb(len(trained_on[0].sequences), 2)
    if kind == "prompt":
        objective: Objective[RewardLearner] = RankingObjective(trained_on, shape.kind)
        batch = batch_of(study.given.prompts_a_step, len(trained_on[0].sequences))
    else:
        objective = ShuffledPairs(trained_on, shape.kind)
        batch = batch_of(study.given.prompts_a_step * num_pairs, 2)
    optimizer = OptimizerConfig(
        learning_rate=study.given.learning_rate, schedule="linear", warmup_steps=5, weight_decay=0.01
    )
    engine = Engine(
        LearnerSource(source, AuxiliaryParameters()),
        optimizer,
        EngineConfig(trackers=()),
        world_size=1,
        micro_batch=batch.micro_batch_size,
    )
    steps_an_epoch = len(trained_on) // study.given.prompts_a_step
    config = LoopConfig(
        "reward", seed, study.given.epochs * steps_an_epoch, batch, save_every_steps=10**9, evaluate_every_steps=10**9
    )
    ended = TrainingLoop(engine, config, objective, RankingObjective(heldout, shape.kind), folder).run()
    network = engine.module.network.eval()
    scores = task_scores(head_scores(network, sequences_of(heldout)), heldout)
    engine.close()
    truth = label_truth(unseen, study.world)
    noiseless = [replace(ranking, ranks=_ranks_of(truth[ranking.task_id])) for ranking in unseen]
    last = read_metrics(folder / "metrics.jsonl")[-10:]
    accuracy = accuracy_against(unseen, scores)
    return {
        "heldout_accuracy": accuracy.mean,
        "low": accuracy.low,  # 95%, over prompts
        "high": accuracy.high,
        "noiseless_accuracy": accuracy_against(noiseless, scores).mean,
        "heldout_loss": ended["loss"],
        "last_training_loss": mean(line["loss"] for line in last),
        "prompts": len(trained_on),
        "heldout_prompts": len(heldout),
    }


def batch_of(num_examples: int, num_sequences: int) -> BatchConfig:
    """A step's examples in batches of equally many sequences, as many as fit at once."""
    fitting = range(1, SEQUENCES_AT_ONCE // num_sequences + 1)
    return BatchConfig(
        batch_size=num_examples, micro_batch_size=max(size for size in fitting if num_examples % size == 0)
    )


def _ranks_of(scores: Sequence[float]) -> tuple[int, ...]:
    return tuple(1 + sum(other > score for other in scores) for score in scores)


def first_responses(rankings: Sequence[Ranking], num_responses: int) -> list[Ranking]:
    """Returns rankings of the first K responses to each prompt."""
    return [
        replace(
            ranking,
            responses=ranking.responses[:num_responses],
            ranks=dense_ranks(ranking.ranks[:num_responses]),
        )
        for ranking in rankings
    ]


def row(num_responses: int, num_epochs: int, kind: str, found: Sequence[Mapping[str, float]]) -> str:
    """Returns a row of the table: each seed's held-out accuracy, and means over seeds with standard deviations."""
    cells = [f"{num_responses}", f"{num_epochs}", kind]
    cells.append(", ".join(f"{figures['heldout_accuracy']:.3f}" for figures in found))
    for name in ("heldout_accuracy", "noiseless_accuracy", "heldout_loss", "last_training_loss"):
        values = [figures[name] for figures in found]
        cells.append(f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}")
    return "| " + " | ".join(cells) + " |"


HEADER = """\
| K | epochs | one by | held-out accuracy by seed | mean | noiseless labeler | held-out loss | last steps' loss |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run that has collected rankings")
    parser.add_argument("--responses", type=int, action="append", required=True, help="K; may repeat")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=0, help="number of tasks to use; 0 uses all")
    parser.add_argument("--prompts-a-step", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--out", type=Path, help="write every run's metrics to this file, as JSON")
    given = parser.parse_args()
    world = load_job(given.run / "job.toml").open_world()
    if world is None:
        raise ValueError(f"{given.run / 'job.toml'}: the job has no world; one with known labelers was expected")
    rankings = read_rankings(RankingsConfig(source=str(given.run / "collect" / "rankings.jsonl")))
    tasks = list(dict.fromkeys(ranking.task_id for ranking in rankings))
    kept = set(tasks[: given.prompts or len(tasks)])
    rankings = [ranking for ranking in rankings if ranking.task_id in kept]
    everything: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    for num_responses in given.responses:
        chosen = first_responses(rankings, num_responses)
        study = Study(given.run / "sft" / "model", chosen, world, given)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for seed in range(given.seeds):
            for kind in KINDS:
                with tempfile.TemporaryDirectory() as folder:
                    found[kind].append(train(study, kind, seed, Path(folder)))
                setting = {"K": num_responses, "epochs": given.epochs, "kind": kind, "seed": seed}
                everything.append({**setting, **found[kind][-1]})
                if given.out:
                    given.out.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
        for kind in KINDS:
            print(row(num_responses, given.epochs, kind, found[kind]), flush=True)


if __name__ == "__main__":
    main()
