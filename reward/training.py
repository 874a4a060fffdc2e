"""Training the reward model: the SFT model (or another decoder, or an encoder) with a scalar head per objective,
trained on rankings of K responses.

Held-out rankings are on prompts that training never saw. After training, the bias is shifted so that demonstrations
score 0 on average under every head: preferences determine scores only up to a constant. All ranks score the held-out
responses with the model that was trained, in the precision of training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from files.atomic import write_json
from files.records import record_of
from lm.adapters import save_trained
from lm.encoder import EncoderModel, MaskedLanguageModel, SequenceClassifier
from lm.lora import adapted
from lm.model import SCORE, LanguageModel, ScalarModel
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, purpose_of
from reward.comparisons import Comparison
from reward.config import RewardConfig
from reward.heldout import FinalScores, final_scores
from reward.learner import AuxiliaryParameters, LearnerSource, network_weights, spread_of_ratings, starting_log_nu
from reward.metrics import joined_metrics, labeler_metrics, objective_metrics, rating_metrics
from reward.objective import RankingObjective
from reward.prepared import WARNINGS, PreparedRankings, Split, weights_of_labelers
from reward.results import RewardResults
from reward.scoring import RewardNetwork, network_folder, shifted
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.seeds import derive_seed
from training.tokens import read_overlong

HELDOUT_SCORES = "heldout_scores.json"  # {task_id: scores of its responses, in the order of the rankings file}


def network_source(
    folder: Path, dropout: float, seed: int, labels: Sequence[str] = (SCORE,)
) -> ModelSource[RewardNetwork]:
    """A reward model to train further, or the trunk of a language model or an encoder with heads drawn from `seed`.

    Raises: ValueError for a directory of anything else, and for a reward model with other labels.
    """
    purpose = purpose_of(folder)
    if purpose == "language":
        return WithNewHead(folder, LanguageModel, lambda shape: ScalarModel(shape, dropout, labels), seed)
    if purpose in ("masked", "body"):
        kind = MaskedLanguageModel if purpose == "masked" else EncoderModel
        return WithNewHead(folder, kind, lambda shape: SequenceClassifier(shape, labels, dropout), seed)
    trained = network_folder(folder, dropout)
    found = on_meta(trained.build).labels
    if found != tuple(labels):
        raise ValueError(
            f"{folder / 'config.json'}: id2label names {', '.join(found)}; {', '.join(labels)} was expected, the"
            " objectives that are to be learned, in their order (score: the only one)"
        )
    return trained


def train(context: StageContext, config: RewardConfig, start: Path, data: PreparedRankings) -> None:
    """Train on this rank; rank 0 writes `model/`, `heldout_scores.json` and `results.json`.

    Raises: ValueError for rankings that have no ratings although `rating_coef` counts them.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    source = network_source(start, config.dropout, derive_seed(context.seed, "reward", "head"), config.labels)
    shape = on_meta(source.build).config
    split = data.split
    trained_on = data.comparisons(split.train, weights_of_labelers(split, config))
    unseen = data.comparisons(split.heldout)  # all labelers weigh the same in measurements
    auxiliary = auxiliary_parameters(config, split, trained_on)
    network = adapted(source, config.lora, derive_seed(context.seed, "reward", "lora"))
    engine = build_engine(context, LearnerSource(network, auxiliary), config)
    objectives = [
        RankingObjective(
            part,
            shape.kind,
            objectives=split.objectives,
            rating_coef=config.rating_coef,
            rating_std=auxiliary.rating_std,
        )
        for part in (trained_on, unseen)
    ]
    num_steps = max(1, round(config.num_epochs * len(trained_on) / config.batch.batch_size))
    loop_config = LoopConfig.of("reward", context.seed, num_steps, config)
    TrainingLoop(engine, loop_config, objectives[0], objectives[1], context.folder).run()
    scores = final_scores(engine, tokenizer, config, trained_on, unseen)
    weights, others = engine.weights_for_file(), dict[str, Tensor]()
    if engine.is_main:
        # Auxiliary parameters are not part of the model; they go to the results.
        plain, trained = on_meta(source.build), engine.module.network
        shifted_weights = shifted(plain, network_weights(weights, others), scores.shift)
        save_trained(context.folder, plain, trained, shifted_weights, tokenizer, config.lora, start)
        learned = [auxiliary.learned(others, shape.hidden_size, place) for place in range(len(split.objectives))]
        write_results(context, config, split, scores, learned, data)
        write_json(context.folder / WARNINGS, list(data.warnings))
    engine.barrier()
    engine.close()


def auxiliary_parameters(config: RewardConfig, split: Split, comparisons: Sequence[Comparison]) -> AuxiliaryParameters:
    """Initial values of the auxiliary parameters that the configured losses need, from the training comparisons.

    Raises: ValueError if ratings are to be learned and there are none, or none that differ.
    """
    places = range(len(split.objectives))
    spread = tuple(spread_of_ratings(comparisons, place) for place in places) if config.rating_coef else ()
    if config.rating_coef and not any(spread):
        raise ValueError(
            f"reward.rating_coef is {config.rating_coef}, but no ranking of {config.rankings.source} has ratings that"
            " tell its responses apart; a field 'ratings' with a number a response was expected"
        )
    log_nu = (starting_log_nu(comparisons, place) for place in places)
    return AuxiliaryParameters(tuple(log_nu) if config.ties == "davidson" else (), spread)


def write_results(
    context: StageContext,
    config: RewardConfig,
    split: Split,
    scores: FinalScores,
    learned: Sequence[Mapping[str, float]],
    data: PreparedRankings,
) -> None:
    """Measure the model by its scores of the rankings; `learned` has the auxiliary values of each head."""
    write_json(context.folder / HELDOUT_SCORES, scores.heldout)
    known = {**scores.trained_on, **scores.heldout}
    weights, metrics = weights_of_labelers(split, config), dict[str, dict[str, Any]]()
    for place, objective in enumerate(split.objectives):
        train, heldout = split.of(objective)
        found = objective_metrics(train, heldout, known, score_shift=scores.shift[place], seed=context.seed)
        found["ties"] = {"kind": config.ties, **found["ties"]}
        found["labelers"] = labeler_metrics(train, {n: w for (of, n), w in weights.items() if of == objective})
        if "nu" in learned[place]:
            found["ties"]["learned_nu"] = learned[place]["nu"]
        if "rating_scale" in learned[place]:
            found["ratings"] = rating_metrics(heldout, scores.heldout, learned[place]["rating_scale"])
        metrics[objective] = found
    several = len(metrics) > 1
    results = joined_metrics(metrics, split.heldout, scores.heldout) if several else next(iter(metrics.values()))
    measured = record_of(results, RewardResults, "results.json")
    context.write_results(replace(measured, overlong=read_overlong(data.folder) or None, sources=data.sources))
