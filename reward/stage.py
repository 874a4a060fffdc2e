"""The reward model as a stage: training on each rank, metrics, checks before a run, and its plan.

The SFT model (or another decoder, or an encoder) gets a scalar head per objective and is trained on rankings of K
responses. Held-out rankings are on prompts that training never saw. After training, the bias is shifted so that
demonstrations score 0 on average under every head: preferences determine scores only up to a constant. All ranks score
the held-out responses with the trained model, in training precision.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from files.atomic import write_json
from files.hashes import derive_seed
from files.records import read_record, record_of
from lm.adapters import adapted, save_trained
from lm.config import ModelConfig
from lm.encoder import EncoderModel, MaskedLanguageModel, SequenceClassifier
from lm.model import SCORE, LanguageModel, ScalarModel
from lm.source import ModelSource, on_meta
from lm.tokenizer import Messages, Tokenizer
from lm.weights import WithNewHead, purpose_of
from preferences.records import Ranking
from preferences.statistics.agreement import accuracy_against
from preferences.statistics.estimates import Floats, Share
from preferences.statistics.intervals import share_interval
from reward.comparisons import Comparison, encode_scored
from reward.config import RewardConfig
from reward.metrics import (
    FinalScores,
    calibration_sequences,
    final_scores,
    joined_metrics,
    labeler_metrics,
    objective_metrics,
    rating_metrics,
)
from reward.objective import (
    AuxiliaryParameters,
    LearnerSource,
    RankingObjective,
    network_weights,
    spread_of_ratings,
    starting_log_nu,
)
from reward.prepared import (
    WARNINGS,
    PreparedRankings,
    Split,
    check_objectives,
    comparison_lengths,
    comparison_steps,
    read_judgments,
    report_rankings,
    split_of,
    tokenize,
    weights_of_labelers,
)
from reward.report import REPORTER, RewardResults
from reward.sampling import StageScore
from reward.scoring import RewardModel, RewardNetwork, network_folder, shifted
from stages.contract import Parent, Stage
from stages.plan import Planner, Training
from stages.run import JobView, StageRun
from stages.world import label_truth
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.tokens import read_overlong

HELDOUT_SCORES = "heldout_scores.json"  # {task_id: scores of its responses, in the order of the rankings file}


def run_reward(run: StageRun, config: RewardConfig) -> None:
    """Train on all workers. If a world's labelers gave the rankings, also measure the model against the world."""
    start = run.start("sft")
    tokenizer = Tokenizer.load(start, end=config.end_token)
    run.on_ranks(train, config, start, tokenize(run, config, tokenizer, _most_tokens(start, config)))
    if "collect" in run.parents and run.opened_world is not None:  # so the world knows the criterion of its labelers
        run.write_results(measure_reward_model(run, config))


def network_source(
    folder: Path, dropout: float, seed: int, labels: Sequence[str] = (SCORE,), *, dropped: int = 0, added: int = 0
) -> ModelSource[RewardNetwork]:
    """Returns a source of a reward model to train further, or of a language model's or encoder's trunk with heads drawn
    from `seed`. The last `dropped` blocks are left out, and `added` new ones are drawn.

    Raises: ValueError for a directory with anything else, and for a reward model with other labels.
    """
    purpose = purpose_of(folder)

    def scalar(shape: ModelConfig) -> ScalarModel:
        return ScalarModel(shape, dropout, labels)

    def classifier(shape: ModelConfig) -> SequenceClassifier:
        return SequenceClassifier(shape, labels, dropout)

    if purpose == "language":
        return WithNewHead(folder, LanguageModel, scalar, seed, dropped=dropped, added=added)
    if purpose in ("masked", "body"):
        kind = MaskedLanguageModel if purpose == "masked" else EncoderModel
        return WithNewHead(folder, kind, classifier, seed, dropped=dropped, added=added)
    trained = network_folder(folder, dropout)
    present_labels = on_meta(trained.build).labels
    if present_labels != tuple(labels):
        raise ValueError(
            f"{folder / 'config.json'}: id2label names {', '.join(present_labels)}; {', '.join(labels)} was expected"
            " (the objectives to learn, in order; a single one is called score)"
        )
    if dropped or added:  # its head is kept, but not its zero, which training sets again
        if purpose == "sequence":
            return WithNewHead(folder, SequenceClassifier, classifier, seed, dropped=dropped, added=added)
        return WithNewHead(folder, ScalarModel, scalar, seed, dropped=dropped, added=added)
    return trained


def _source(start: Path, config: RewardConfig, seed: int) -> ModelSource[RewardNetwork]:
    """Returns the model that training starts from. Raises: ValueError as `network_source`, and if no block is left."""
    blocks = {"dropped": config.dropped_layers, "added": config.added_layers}
    source = network_source(start, config.dropout, seed, config.labels, **blocks)
    try:
        on_meta(source.build)
    except ValueError as error:
        raise ValueError(f"{start}: reward.{error}") from None
    return source


def train(context: StageContext, config: RewardConfig, start: Path, data: PreparedRankings) -> None:
    """Train on this rank; rank 0 writes `model/`, `heldout_scores.json` and `results.json`.

    Raises: ValueError if `rating_coef` or `margin_coef` is set and the rankings have no ratings.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    source = _source(start, config, derive_seed(context.seed, "reward", "head"))
    shape = on_meta(source.build).config
    split = data.split
    trained_on = data.comparisons(split.train, weights_of_labelers(split, config))
    unseen = data.comparisons(split.heldout)  # all labelers weigh the same in measurements
    rating_std = ratings_spread(config, split, trained_on)
    auxiliary = auxiliary_parameters(config, split, trained_on, rating_std)
    network = adapted(source, config.lora, derive_seed(context.seed, "reward", "lora"))
    engine = build_engine(context, LearnerSource(network, auxiliary), config)
    objectives = [
        RankingObjective(
            part,
            shape.kind,
            objectives=split.objectives,
            rating_coef=config.rating_coef,
            margin_coef=config.margin_coef,
            rating_std=rating_std,
        )
        for part in (trained_on, unseen)
    ]
    num_steps = max(1, round(config.num_epochs * len(trained_on) / config.batch.batch_size))
    loop_config = LoopConfig.of("reward", context.seed, num_steps, config)
    TrainingLoop(engine, loop_config, objectives[0], objectives[1], context.folder).run()
    scores = final_scores(engine, tokenizer, config, trained_on, unseen)
    weights, others = engine.weights_for_file(), dict[str, Tensor]()
    if engine.is_main:
        # Auxiliary parameters are not part of the model; they are written to the results.
        plain, trained = on_meta(source.build), engine.module.network
        shifted_weights = shifted(plain, network_weights(weights, others), scores.shift)
        save_trained(context.folder, plain, trained, shifted_weights, tokenizer, config.lora, start)
        learned = [auxiliary.learned(others, shape.hidden_size, place) for place in range(len(split.objectives))]
        write_results(context, config, split, scores, learned, data)
        write_json(context.folder / WARNINGS, data.warnings)
    engine.barrier()
    engine.close()


def ratings_spread(config: RewardConfig, split: Split, comparisons: Sequence[Comparison]) -> tuple[float, ...]:
    """Returns the spread of each objective's ratings, the unit in which they enter the loss; () if they do not.

    Raises: ValueError if ratings are to be learned and there are none, or none that differ.
    """
    used = next((name for name in ("rating_coef", "margin_coef") if getattr(config, name)), "")
    if not used:
        return ()
    spread = tuple(spread_of_ratings(comparisons, place) for place in range(len(split.objectives)))
    if not any(spread):
        raise ValueError(
            f"reward.{used} is {getattr(config, used)}, but no ranking of {config.rankings.source} has ratings that"
            " differ between its responses; a field 'ratings' with one number per response was expected"
        )
    return spread


def auxiliary_parameters(
    config: RewardConfig, split: Split, comparisons: Sequence[Comparison], rating_std: tuple[float, ...]
) -> AuxiliaryParameters:
    """Returns initial values for the auxiliary parameters of the configured losses, from the training comparisons."""
    log_nu = (starting_log_nu(comparisons, place) for place in range(len(split.objectives)))
    return AuxiliaryParameters(
        tuple(log_nu) if config.ties == "davidson" else (), rating_std if config.rating_coef else ()
    )


def write_results(
    context: StageContext,
    config: RewardConfig,
    split: Split,
    scores: FinalScores,
    learned: Sequence[Mapping[str, float]],
    data: PreparedRankings,
) -> None:
    """Evaluate the model's scores on the rankings; `learned` has each head's auxiliary parameters."""
    write_json(context.folder / HELDOUT_SCORES, scores.heldout)
    known = {**scores.trained_on, **scores.heldout}
    weights, metrics = weights_of_labelers(split, config), dict[str, dict[str, Any]]()
    for place, objective in enumerate(split.objectives):
        train, heldout = split.of(objective)
        objective_results = objective_metrics(train, heldout, known, score_shift=scores.shift[place], seed=context.seed)
        objective_results["ties"] = {"kind": config.ties, **objective_results["ties"]}
        objective_results["labelers"] = labeler_metrics(
            train, {n: w for (of, n), w in weights.items() if of == objective}
        )
        if "nu" in learned[place]:
            objective_results["ties"]["learned_nu"] = learned[place]["nu"]
        if "rating_scale" in learned[place]:
            objective_results["ratings"] = rating_metrics(heldout, scores.heldout, learned[place]["rating_scale"])
        metrics[objective] = objective_results
    several = len(metrics) > 1
    results = joined_metrics(metrics, split.heldout, scores.heldout) if several else next(iter(metrics.values()))
    measured = record_of(results, RewardResults, "results.json")
    context.write_results(replace(measured, overlong=read_overlong(data.folder) or None, sources=data.sources))


def measure_reward_model(run: StageRun, config: RewardConfig) -> RewardResults:
    """Returns the finished stage's results, plus what the world knows: `gold_accuracy`, the share of held-out pairs
    ordered as a noiseless labeler would, and `human_pairs_accuracy` if the world has pairs that people ordered.
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
        accuracy = share_interval(right)
        share = Share(accuracy.mean, accuracy.low, accuracy.high, num_pairs=len(pairs), num_tasks=len(pairs))
        results = replace(results, human_pairs_accuracy=share)
    return results


def right_pairs(folder: Path, pairs: Sequence[tuple[Messages, Messages]]) -> Floats:
    """Returns 1 for each pair (better, worse) that the reward model in `folder` orders so, ½ for a tie, else 0."""
    if not pairs:
        return np.empty(0)
    judge = RewardModel.load(folder)
    better, worse = (
        np.array(judge.score_sequences([encode_scored(judge.tokenizer, pair[side]) for pair in pairs]))
        for side in (0, 1)
    )
    return (better > worse) + 0.5 * (better == worse)


def _ranks_of(scores: list[float]) -> tuple[int, ...]:
    """Returns ranks by score: 1 is the highest, and equal scores tie."""
    return tuple(1 + sum(other > score for other in scores) for score in scores)


def check(config: RewardConfig, _job: JobView) -> None:
    """Check the named objectives: a world's labelers give only one overall judgment."""
    check_objectives(config)


def preflight(run: StageRun, config: RewardConfig) -> None:
    """Check that every row of the rankings has its format, that each objective has some, and that every conversation
    fits the model; report unusual rows and what is not learned. Rankings that have yet to be collected are not read.
    """
    tokenizer = run.tokenizer_of("sft", config.end_token)
    # A job with only a reward model has no policy.
    most_tokens = _most_tokens(run.start("sft"), config) if config.init_from else run.model.max_position_embeddings
    calibration_sequences(config, tokenizer.with_template(config.chat_template), most_tokens)
    if "collect" not in run.parents:
        prepared = tokenize(run, config, tokenizer, most_tokens, run.tell)
        report_rankings(run, config, prepared, most_tokens)


def _most_tokens(start: Path, config: RewardConfig) -> int:
    """Returns the context, in tokens, of a reward model that starts from this directory."""
    return on_meta(_source(start, config, seed=0).build).config.max_position_embeddings


def plan(planner: Planner, config: RewardConfig) -> Training:
    steps, num_responses = comparison_steps(planner, config)
    context = planner.shape(config.init_from).max_position_embeddings
    lengths = comparison_lengths(planner, config, lambda run: run.tokenizer_of("sft", config.end_token), context)
    return Training(
        "comparisons",
        config,
        config.reshaped(planner.shape(config.init_from)),
        steps,
        lengths,
        has_logits=False,
        rows_per_unit=num_responses,
        num_scores=len(config.labels),
    )


STAGE = Stage(
    name="reward",
    config=RewardConfig,
    run=run_reward,
    # A reward model's shape may differ from the policy's.
    parents=(Parent("sft", substitutes=("init_from",), own_shape=True),),
    tokenizer=lambda run, config: run.tokenizer_of("sft", config.end_token).with_template(config.chat_template),
    check=check,
    preflight=preflight,
    plan=plan,
    score=lambda config: StageScore(objectives=config.labels),
    report=REPORTER,
)
