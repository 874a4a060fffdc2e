"""The reward model: the SFT model (or another decoder, or an encoder) with a scalar head, trained on rankings of K
responses.

Held-out rankings are of prompts that training never saw. Afterwards the bias is shifted so that demonstrations score
0 on average, which fixes the one freedom that preferences leave open.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from lm.encoder import MaskedLanguageModel, SequenceClassifier
from lm.model import LanguageModel, ScalarModel
from lm.source import ModelSource, skeleton
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, NewHead, purpose_of, save_model
from preferences.records import Ranking
from preferences.splits import split_rankings
from preferences.statistics.agreement import accuracy_against
from preferences.statistics.reliability import labeler_reliability, labeler_weights
from reward.comparisons import Comparison, RankingsConfig, encode_rankings, encode_scored, read_judgments
from reward.learner import Beside, LearnerSource, Ties, network_weights, spread_of_ratings, starting_log_nu
from reward.objective import RankingObjective
from reward.scoring import RewardNetwork, load_network, score_sequences, shift_scores
from reward.ties import tie_figures
from training.config import InitConfig, TrainingConfig
from training.data import DataConfig, read_conversations
from training.loop import LoopConfig, TrainingLoop
from training.seeds import derive_seed
from training.stage import StageContext, build_engine, write_json

ODDITIES = "oddities.json"  # what was odd about rows of the rankings, and what was done
HELDOUT_SCORES = "heldout_scores.json"  # {task_id: scores of its responses, in the order of the rankings file}


class RewardConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts comparisons: one prompt's K responses and all rankings that labelers gave them.

    `init_from` may name a language model, a reward model, or an encoder; `chat_template` is for those that have none.
    `ties` = "soft" takes a tie for half a win, "davidson" for an outcome with a chance of its own (`reward.loss`). With
    `rating_coef` above 0 scores also learn the ratings that rankings carry: their loss's weight beside the rankings'.
    `labeler_weights` = "reliability" weighs each labeler's rankings by how often the others bear them out
    (`preferences.statistics.reliability`, from training rankings alone). A model learns one objective; `objective`
    names it where the rankings are of several.
    """

    chat_template: str = ""  # "plain", a Jinja template, ..., or "" for the model's own
    rankings: RankingsConfig
    demonstrations: tuple[DataConfig, ...] = Field(min_length=1)
    objective: str = ""  # "" = the only one there is
    heldout_share: float = Field(gt=0, lt=1)
    num_epochs: float = Field(gt=0)
    ties: Ties = "soft"
    rating_coef: float = Field(default=0.0, ge=0)
    labeler_weights: Literal["equal", "reliability"] = "equal"
    # Demonstrations whose mean score becomes 0, and comparisons that a tie's chance is measured on.
    num_calibration: int = Field(default=512, ge=1)


def network_source(folder: Path, dropout: float, seed: int) -> ModelSource[RewardNetwork]:
    """A reward model to train further, or the body of a language model or an encoder with a head drawn from `seed`.

    Errors: ValueError for a directory of anything else.
    """
    purpose = purpose_of(folder)
    if purpose == "score":
        return ModelFolder(folder, ScalarModel, dropout)
    if purpose == "language":
        return NewHead(folder, LanguageModel, lambda shape: ScalarModel(shape, dropout), seed)
    if purpose == "masked":
        return NewHead(folder, MaskedLanguageModel, lambda shape: SequenceClassifier(shape, 1, dropout), seed)
    classifier = ModelFolder(folder, SequenceClassifier, dropout)
    num_labels = skeleton(classifier.build).num_labels
    if num_labels != 1:
        raise ValueError(f"{folder / 'config.json'}: num_labels is {num_labels}; 1, a score, was expected")
    return classifier


def run(context: StageContext, config: RewardConfig, start: Path) -> None:
    """Train on this rank; rank 0 writes `model/`, `heldout_scores.json` and `results.json`.

    Errors: ValueError naming file, line and field for rankings that cannot be used.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    source = network_source(start, config.dropout, derive_seed(context.seed, "reward", "head"))
    shape = skeleton(source.build).config
    found = read_judgments(config.rankings)
    train, heldout = split_rankings(of_objective(found.rankings, config), config.heldout_share, context.seed)
    if not train or not heldout:
        raise ValueError(
            f"reward.heldout_share {config.heldout_share} splits the rankings of {config.rankings.source} into"
            f" {len(train)} for training and {len(heldout)} held out; both need at least one"
        )
    weights = weights_of_labelers(train, config)
    comparisons = [
        encode_rankings(tokenizer, train, shape.context_tokens, weights),
        encode_rankings(tokenizer, heldout, shape.context_tokens),  # measured alike, however training weighs
    ]
    beside = learned_beside(config, comparisons[0])
    engine = build_engine(context, LearnerSource(source, beside), config)
    objectives = [
        RankingObjective(part, shape.kind, rating_coef=config.rating_coef, rating_std=beside.rating_std or 1.0)
        for part in comparisons
    ]
    num_steps = max(1, round(config.num_epochs * len(comparisons[0]) / config.batch.batch_size))
    loop_config = LoopConfig.of("reward", context.seed, num_steps, config)
    TrainingLoop(engine, loop_config, objectives[0], objectives[1], context.folder).run()
    tensors = engine.full_weights(on_main_alone=True)
    if engine.is_main:
        # What was learned beside the score is no part of the model: it goes to the results.
        save_model(context.model_folder, skeleton(source.build), network_weights(tensors), tokenizer)
        learned = beside.learned(tensors, shape.width)
        finish(context, config, tokenizer, (train, heldout), comparisons, learned)
        write_json(context.folder / ODDITIES, [vars(oddity) for oddity in found.report.oddities])
    engine.barrier()
    engine.close()


def rankings_of(config: RewardConfig) -> list[Ranking]:
    """The rankings to train and to measure on. Errors: as for `read_judgments` and `of_objective`."""
    return of_objective(read_judgments(config.rankings).rankings, config)


def of_objective(rankings: Sequence[Ranking], config: RewardConfig) -> list[Ranking]:
    """Those of the objective that is to be learned. Errors: ValueError for one that is not there, or several and none
    named.
    """
    found = sorted({ranking.objective for ranking in rankings})
    if config.objective not in (found if config.objective or len(found) > 1 else [""]):
        raise ValueError(
            f"reward.objective is {config.objective!r}, and the rankings of {config.rankings.source} are of"
            f" {', '.join(found)}; one of them was expected, since a reward model learns one objective"
        )
    return [ranking for ranking in rankings if ranking.objective == (config.objective or found[0])]


def learned_beside(config: RewardConfig, comparisons: Sequence[Comparison]) -> Beside:
    """What the losses that `config` asks for learn beside the scores, as far as training comparisons tell its start.

    Errors: ValueError where ratings are to teach and there are none, or none that differ.
    """
    spread = spread_of_ratings(comparisons) if config.rating_coef else 0.0
    if config.rating_coef and not spread:
        raise ValueError(
            f"reward.rating_coef is {config.rating_coef}, but no ranking of {config.rankings.source} has ratings that"
            " tell its responses apart; a field 'ratings' with a number a response was expected"
        )
    return Beside((starting_log_nu(comparisons, 0),) if config.ties == "davidson" else (), spread)


def finish(
    context: StageContext,
    config: RewardConfig,
    tokenizer: Tokenizer,
    rankings: tuple[Sequence[Ranking], Sequence[Ranking]],
    comparisons: Sequence[Sequence[Comparison]],
    learned: Mapping[str, float],
) -> None:
    """Shift the bias of the written model, then measure it on the held-out rankings as it will be used.

    `rankings` and `comparisons` are those trained on and those held out; `learned` what training left beside the score.
    """
    model = load_network(context.model_folder).eval()
    mean = demonstration_mean(model, tokenizer, config)
    shift_scores(model, -mean)
    save_model(context.model_folder, model, model.state_dict(), tokenizer)
    train, heldout = rankings
    trained_on, unseen = comparisons
    by_task = task_scores(model, unseen)
    write_json(context.folder / HELDOUT_SCORES, by_task)
    accuracy = accuracy_against(heldout, by_task)
    samples = torch.tensor([score for scores in by_task.values() for score in scores])
    fitted = task_scores(model, trained_on[: config.num_calibration])
    known = [ranking for ranking in train if ranking.task_id in fitted]
    results: dict[str, Any] = {
        "heldout_accuracy": accuracy.mean,
        "heldout_pairs": accuracy.num_pairs,
        "heldout_comparisons": len(unseen),
        "train_comparisons": len(trained_on),
        "train_rankings": sum(len(c.verdicts) for c in trained_on),
        "score_shift": -mean,
        # The units of PPO's rewards: scores of the SFT policy's samples, of prompts that training never saw.
        "sample_score_mean": float(samples.mean()),
        "sample_score_std": float(samples.std()),
        "ties": {"kind": config.ties, **tie_figures(known, heldout, {**fitted, **by_task}, seed=context.seed)},
    }
    results["labelers"] = labeler_figures(train, config)
    if "nu" in learned:
        results["ties"]["learned_nu"] = learned["nu"]
    if "rating_scale" in learned:
        results["ratings"] = rating_figures(heldout, by_task, learned["rating_scale"])
    context.write_results(results)


def weights_of_labelers(train: Sequence[Ranking], config: RewardConfig) -> dict[str, float]:
    """What each labeler's rankings weigh; those that are not named weigh 1."""
    return labeler_weights(train, labeler_reliability(train)) if config.labeler_weights == "reliability" else {}


def labeler_figures(train: Sequence[Ranking], config: RewardConfig) -> dict[str, dict[str, float | int | None]]:
    """Of every labeler: how often it is right, as far as the others tell (None where no one judged what it judged), and
    what its rankings weighed.
    """
    weights = weights_of_labelers(train, config)
    return {
        name: {
            "accuracy": found.accuracy if found.num_pairs else None,
            "num_pairs": found.num_pairs,
            "weight": weights.get(name, 1.0),
        }
        for name, found in labeler_reliability(train).items()
    }


def task_scores(model: RewardNetwork, comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
    """Scores of each task's responses, in their order."""
    scores = iter(score_sequences(model, [sequence for c in comparisons for sequence in c.sequences]))
    return {c.task_id: [next(scores) for _ in c.sequences] for c in comparisons}


def rating_figures(
    rankings: Sequence[Ranking], scores: Mapping[str, Sequence[float]], scale: float
) -> dict[str, float | int | None]:
    """`explained`: the share of the ratings' variance within judgments that `scale` · score explains (1 is best, and
    below 0 is worse than nothing), None where no judgment has ratings that differ.
    """
    rated = [ranking for ranking in rankings if ranking.ratings]
    pairs = [(np.array(ranking.ratings), np.array(scores[ranking.task_id])) for ranking in rated]
    total = sum(float(((ratings - ratings.mean()) ** 2).sum()) for ratings, _ in pairs)
    left = sum(float(((ratings - ratings.mean() - scale * (s - s.mean())) ** 2).sum()) for ratings, s in pairs)
    explained = 1 - left / total if total else None
    return {"ratings_per_score": scale, "heldout_explained": explained, "heldout_judgments": len(rated)}


def demonstration_mean(model: RewardNetwork, tokenizer: Tokenizer, config: RewardConfig) -> float:
    """Mean score of the first `num_calibration` demonstrations."""
    conversations = [messages for _, messages in read_conversations(config.demonstrations)][: config.num_calibration]
    sequences = [encode_scored(tokenizer, messages) for messages in conversations]
    scores = score_sequences(model, sequences)
    return sum(scores) / len(scores)
