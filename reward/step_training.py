"""Training of a reward model that scores steps: the probability that a step is right, at the step's last token.

The loss is the binary cross-entropy of each labelled step (arXiv 2305.20050; Math-Shepherd, arXiv 2312.08935, eq. 2),
with -log σ(s) for a right step and -log(1 - σ(s)) for a wrong one. Held-out problems are ones that training never saw.

Shape letters: N labelled steps, C problems, M resamples.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from files.atomic import write_json
from files.hashes import derive_seed
from lm.adapters import save_trained
from lm.layers import sequence_keys
from lm.lora import adapted
from lm.model import SCORE, LanguageModel, ScalarModel
from lm.progress import note_progress
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer, read_json
from lm.transfer import MAX_TOKENS, upload
from lm.weights import CONFIG, ModelFolder, WithNewHead, purpose_of
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints
from preferences.statistics.intervals import NUM_RESAMPLES, clustered_mean, percentiles, share_interval
from reward.config import RewardConfig
from reward.report import StepBin, StepResults
from reward.scoring import STEP_SEPARATOR, PackedInputs, scores_of
from reward.step_labels import ARRAYS, LABELS, RIGHT, UNLABELLED, WRONG, Labels, StepLabels, step_parts
from stages.data import token_folder
from stages.plan import Planner, Training
from stages.run import StageRun
from training.config import BatchConfig
from training.data import untold
from training.engine import Engine, StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.packing import IntArray, pass_tokens, split_passes
from training.tokens import read_overlong, read_sources

NUM_BINS = 10


class StepObjective:
    """The binary cross-entropy of labelled steps, summed over the responses' steps. Lower is better."""

    def __init__(self, data: StepLabels, rows: Sequence[int]) -> None:
        self.data, self.rows = data, np.array(rows, dtype=np.int64)
        self._labels = [data.labels(row) for row in rows]
        self._num_labels = np.array([sum(label in LABELS for label in labels) for labels in self._labels])

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, rows: IntArray) -> int:
        return int(self._num_labels[rows].sum())

    def num_tokens(self, rows: IntArray) -> int:
        return int(self.data.sequences.lengths_of(self.rows[rows]).sum())

    def rank_passes(
        self, rows: IntArray, batch: BatchConfig, num_ranks: int, *, with_gradients: bool
    ) -> list[list[IntArray]]:
        """Split responses among ranks and passes by their tokens."""
        units = [[length] for length in self.data.sequences.lengths_of(self.rows[rows]).tolist()]
        ranks = split_passes(units, num_ranks, pass_tokens(batch, units, with_gradients=with_gradients))
        return [[rows[places] for places in passes] for passes in ranks]

    def loss(
        self, model: ScalarModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        packed = PackedInputs.at_steps([self.data.steps(int(self.rows[row])) for row in rows], "decoder", device)
        keys_BT = sequence_keys(seed, self.rows[rows][packed.sequence_BT], device)
        scores_N = packed.in_order(scores_of(model, packed.read, keys_BT))[:, 0]
        labels_N = torch.tensor([label for row in rows for label in self._labels[row]])
        known_N = upload((labels_N == RIGHT) | (labels_N == WRONG), device)
        labels_N = upload(labels_N.float(), device)
        losses_N = F.binary_cross_entropy_with_logits(scores_N, labels_N.clamp(0, 1), reduction="none")
        right_N = ((scores_N >= 0) == (labels_N > 0)) & known_N
        return torch.where(known_N, losses_N, 0.0).sum(), {"accuracy": right_N.sum().detach()}


def step_network_source(folder: Path, dropout: float, seed: int) -> ModelSource[ScalarModel]:
    """Returns a source of a reward model to train further, or of a language model's trunk with a new head.

    Raises: ValueError for anything else; an encoder gives one score per text.
    """
    purpose = purpose_of(folder)
    if purpose == "language":
        return WithNewHead(folder, LanguageModel, lambda shape: ScalarModel(shape, dropout), seed)
    if purpose == "score" and on_meta((source := ModelFolder(folder, ScalarModel, dropout)).build).labels == (SCORE,):
        return source
    raise ValueError(
        f"reward.step_labels: {folder} is neither a decoder nor a reward model with one objective, as expected"
    )


def tokenize_steps(
    run: StageRun, config: RewardConfig, tokenizer: Tokenizer, start: Path | None, tell: Callable[[str], None] = untold
) -> StepLabels:
    """Returns the labelled steps and their tokens, after reading and writing them if necessary. `start` is None for a
    model of the policy's shape.

    Raises: ValueError as `step_parts`, and if one side of the split is empty.
    """
    data, templated = config.step_labels, tokenizer.with_template(config.chat_template)
    assert data is not None, "the stage learns from rankings"
    shape = run.model if start is None else on_meta(step_network_source(start, 0.0, 0).build).config
    max_tokens = shape.max_position_embeddings
    parts = partial(
        step_parts, templated, data, max_tokens, config.on_overlong, config.heldout_share, run.seed, tell=tell
    )
    settings = {
        "max_tokens": max_tokens,
        "on_overlong": config.on_overlong,
        "heldout_share": str(config.heldout_share),
        "split": "by opening",
        "seed": run.seed,
    }
    found = StepLabels(token_folder(run, "steps", templated, (data,), ARRAYS, parts, **settings))
    sizes = {name: len(found.rows(heldout=held)) for name, held in (("for training", False), ("held out", True))}
    if not all(sizes.values()):
        counts = " and ".join(f"{size} {name}" for name, size in sizes.items())
        raise ValueError(
            f"reward.heldout_share {config.heldout_share} splits the responses of {data.source} into {counts}; both"
            " need at least one"
        )
    if overlong := read_overlong(found.folder):
        tell(f"{data.source}: {overlong} (the model reads {max_tokens} tokens)")
    return found


def train_steps(context: StageContext, config: RewardConfig, start: Path, data: StepLabels) -> None:
    """Train on this rank; rank 0 writes `model/` and `results.json`."""
    assert config.step_labels is not None, "the stage learns from rankings"
    tokenizer = Tokenizer.load(start, end=config.end_token).with_template(config.chat_template)
    source = step_network_source(start, config.dropout, derive_seed(context.seed, "reward", "head"))
    trained_on, unseen = (data.rows(heldout=held) for held in (False, True))
    network = adapted(source, config.lora, derive_seed(context.seed, "reward", "lora"))
    engine = build_engine(context, network, config)
    num_steps = max(1, round(config.num_epochs * len(trained_on) / config.batch.batch_size))
    objectives = StepObjective(data, trained_on), StepObjective(data, unseen)
    TrainingLoop(engine, LoopConfig.of("reward", context.seed, num_steps, config), *objectives, context.folder).run()
    chances = chances_on_all_ranks(engine, data, unseen)
    weights = engine.weights_for_file()
    if engine.is_main:
        save_trained(context.folder, on_meta(source.build), engine.module, weights, tokenizer, config.lora, start)
        path = context.folder / "model" / CONFIG
        write_json(path, {**read_json(path), STEP_SEPARATOR: config.step_labels.separator})
        problems = np.unique([data.problems[row] for row in unseen], return_inverse=True)[1]
        context.write_results(
            StepResults(
                step_separator=config.step_labels.separator,
                train_responses=len(trained_on),
                train_steps=objectives[0].count(np.arange(len(trained_on))),
                overlong=read_overlong(data.folder) or None,
                sources=read_sources(data.folder),
                **step_metrics(chances, [data.labels(row) for row in unseen], problems, context.seed),
            )
        )
    engine.barrier()
    engine.close()


@torch.no_grad()
def chances_on_all_ranks(engine: Engine[ScalarModel], data: StepLabels, rows: Sequence[int]) -> list[list[float]]:
    """Returns the probability that each step of these responses is right, on every rank. A collective call."""
    engine.model.eval()
    steps = [data.steps(row) for row in rows]
    sizes = [len(of.ends) for of in steps]
    starts = np.cumsum([0, *sizes])
    scores = torch.zeros(int(starts[-1]), device=engine.device)
    shares = split_passes([[len(of.tokens)] for of in steps], engine.data_parallel_size, MAX_TOKENS)
    with engine.cache_weight_casts():
        # ZeRO-3 gathers weights in every pass, so a pass without responses reads the first and discards the result.
        for mine in shares[engine.data_rank]:
            note_progress()
            packed = PackedInputs.at_steps([steps[place] for place in mine or [0]], "decoder", engine.device)
            found = packed.in_order(scores_of(engine.model, packed.read))[:, 0].to(scores)
            for place, own in zip(mine, found.split([sizes[place] for place in mine or [0]]), strict=False):
                scores[int(starts[place]) : int(starts[place + 1])] = own
    return [list(of.tolist()) for of in engine.sum_over_shares(scores).cpu().sigmoid().split(sizes)]


def step_metrics(
    chances: Sequence[Sequence[float]], labels: Sequence[Labels], problems: Ints, seed: int
) -> dict[str, Any]:
    """Returns the fields of `StepResults` that compare chances with labels, with 95% intervals over problems."""
    pairs = [(c, label, int(p)) for of, own, p in zip(chances, labels, problems, strict=True)
             for c, label in zip(of, own, strict=True) if label in LABELS]  # fmt: skip
    chance_N, right_N = (np.array([pair[column] for pair in pairs], dtype=np.float64) for column in (0, 1))
    problem_N = np.array([pair[2] for pair in pairs], dtype=np.int64)
    likelihood_N = np.log(np.clip(np.where(right_N == 1, chance_N, 1 - chance_N), 1e-12, 1.0))
    bins = step_bins(chance_N, right_N)
    return {
        "heldout_responses": len(labels),
        "heldout_steps": len(pairs),
        "heldout_problems": len(np.unique(problems)),
        "right_share": float(right_N.mean()),
        "step_accuracy": share_interval(((chance_N >= 0.5) == (right_N == 1)).astype(np.float64), problem_N),
        "auc": area_under_curve(chance_N, right_N, problem_N, seed),
        "log_loss": clustered_mean(-likelihood_N, problem_N),
        "overconfidence": clustered_mean(chance_N - right_N, problem_N),
        "calibration_error": sum(b.num_steps * abs(b.mean_chance - b.right_share) for b in bins) / len(pairs),
        "bins": bins,
        **first_errors(chances, labels, problems),
    }


def step_bins(chance_N: Floats, right_N: Floats) -> tuple[StepBin, ...]:
    """Returns up to NUM_BINS bins of equally many steps by rising chance, to compare chances with shares."""
    order = np.argsort(chance_N, kind="stable")
    return tuple(
        StepBin(float(chance_N[part].mean()), float(right_N[part].mean()), len(part))
        for part in np.array_split(order, min(NUM_BINS, len(order)))
    )


def first_errors(chances: Sequence[Sequence[float]], labels: Sequence[Labels], problems: Ints) -> dict[str, Any]:
    """Returns how often the first step with a chance below ½ is the first wrong one, among responses with a wrong step;
    how often a random step is it; and how often no step is below ½, among those without. Responses with unlabelled
    steps before the first wrong one are left out, since it is not known where they go wrong.
    """
    found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    guessed = []
    for of, own, problem in zip(chances, labels, problems.tolist(), strict=True):
        wrong = own.index(WRONG) if WRONG in own else len(own)
        if UNLABELLED in own[:wrong]:
            continue
        below = next((place for place, chance in enumerate(of) if chance < 0.5), len(of))
        found[wrong < len(own)].append((float(below == wrong), problem))
        if wrong < len(own):
            guessed.append(1 / len(own))
    shares = {
        has_error: share_interval(np.array([v for v, _ in of]), np.array([p for _, p in of])) if of else UNKNOWN
        for has_error, of in found.items()
    }
    return {
        "first_error": shares[True],
        "first_error_by_chance": float(np.mean(guessed)) if guessed else float("nan"),
        "num_with_error": len(found[True]),
        "no_error": shares[False],
        "num_without_error": len(found[False]),
    }


def area_under_curve(chance_N: Floats, right_N: Floats, problem_N: Ints, seed: int) -> Interval:
    """Returns how often a right step has a higher chance than a wrong one, with ties as a half (the area under the ROC
    curve), with a percentile interval from resampling problems; unknown if all steps are right or all are wrong.
    """
    _, place_N, count_V = np.unique(chance_N, return_inverse=True, return_counts=True)
    _, cluster_N = np.unique(problem_N, return_inverse=True)

    def area(weight_N: Floats) -> float:
        right_V, wrong_V = (
            np.bincount(place_N, weight_N * (right_N == label), len(count_V)) for label in (RIGHT, WRONG)
        )
        total = right_V.sum() * wrong_V.sum()
        return float((right_V * (wrong_V.cumsum() - wrong_V / 2)).sum() / total) if total else float("nan")

    mean, num_clusters = area(np.ones(len(chance_N))), int(cluster_N.max()) + 1
    if np.isnan(mean) or num_clusters < 2:
        return Interval(mean, float("nan"), float("nan"))
    generator = np.random.default_rng(seed)
    drawn = (generator.integers(0, num_clusters, num_clusters) for _ in range(NUM_RESAMPLES))
    areas_M = np.array([area(np.bincount(of, minlength=num_clusters)[cluster_N].astype(np.float64)) for of in drawn])
    return Interval(mean, *percentiles(areas_M[~np.isnan(areas_M)], LEVEL))


def plan_steps(planner: Planner, config: RewardConfig) -> Training:
    """Plan the training: one pass reads whole responses, of at most the model's context."""
    assert config.step_labels is not None, "the stage learns from rankings"
    num_rows = planner.sizes.num_rows(config.step_labels)
    planner.sizes.assume("assumes one response per row of step labels")
    steps = max(1, round(config.num_epochs * num_rows * (1 - config.heldout_share) / config.batch.batch_size))
    lengths = planner.bound(config.step_labels, 0)
    shape = planner.shape(config.init_from)
    return Training("responses", config, shape, steps, lengths, has_logits=False, num_scores=1)
