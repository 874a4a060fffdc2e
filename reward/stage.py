"""The reward model: the SFT model (or another decoder, or an encoder) with a scalar head, trained on rankings of K
responses.

Held-out rankings are of prompts that training never saw. Afterwards the bias is shifted so that demonstrations score
0 on average, which fixes the one freedom that preferences leave open.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from lm.encoder import MaskedLanguageModel, SequenceClassifier
from lm.model import LanguageModel, ScalarModel
from lm.source import ModelSource, skeleton
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, NewHead, purpose_of, save_model
from preferences.agreement import accuracy_against
from preferences.records import Ranking
from preferences.splits import split_rankings
from reward.comparisons import Comparison, RankingsConfig, encode_rankings, encode_scored, read_judgments
from reward.loss import ranking_loss
from reward.scoring import RewardNetwork, load_network, score_sequences, sequence_scores, shift_scores
from training.config import InitConfig, TrainingConfig
from training.data import DataConfig, read_conversations
from training.loop import LoopConfig, TrainingLoop
from training.packing import IntArray
from training.seeds import derive_seed
from training.stage import StageContext, build_engine, write_json

ODDITIES = "oddities.json"  # what was odd about rows of the rankings, and what was done
HELDOUT_SCORES = "heldout_scores.json"  # {task_id: scores of its responses, in the order of the rankings file}


class RewardConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts comparisons: one prompt's K responses and all rankings that labelers gave them.

    `init_from` may name a language model, a reward model, or an encoder; `chat_template` is for those that have none.
    """

    chat_template: str = ""  # "plain", a Jinja template, ..., or "" for the model's own
    rankings: RankingsConfig
    demonstrations: tuple[DataConfig, ...] = Field(min_length=1)
    heldout_share: float = Field(gt=0, lt=1)
    num_epochs: float = Field(gt=0)
    num_calibration: int = Field(default=512, ge=1)  # demonstrations whose mean score becomes 0


class RankingObjective:
    """The ranking loss over comparisons, each the mean over its labelers; a comparison is the unit that is counted."""

    def __init__(self, comparisons: Sequence[Comparison], kind: str) -> None:
        self.comparisons, self.kind = comparisons, kind

    def __len__(self) -> int:
        return len(self.comparisons)

    def count(self, rows: IntArray) -> int:
        return len(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return sum(len(sequence) for row in rows for sequence in self.comparisons[row].sequences)

    def loss(self, model: RewardNetwork, rows: IntArray, device: torch.device) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen = [self.comparisons[row] for row in rows]
        scores = sequence_scores(model, [sequence for c in chosen for sequence in c.sequences], self.kind)
        lengths = torch.tensor([len(c.sequences) for c in chosen], device=device)
        real_BK = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        # Scores come flat, comparison after comparison: exactly the order of the real places of the padded table.
        scores_BK = scores.new_zeros(real_BK.shape).masked_scatter(real_BK, scores)
        judged = [(row, ranks, 1 / len(c.judgments)) for row, c in enumerate(chosen) for ranks in c.judgments]
        rows_J, ranks_J, shares_J = zip(*judged, strict=True)
        padded_JK = [[*ranks, *[0] * (real_BK.shape[1] - len(ranks))] for ranks in ranks_J]
        loss_J, accuracy_J = ranking_loss(scores_BK[list(rows_J)], torch.tensor(padded_JK, device=device))
        share_J = torch.tensor(shares_J, device=device)
        return (share_J * loss_J).sum(), {"accuracy": (share_J * accuracy_J).sum()}


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
    train, heldout = split_rankings(found.rankings, config.heldout_share, context.seed)
    if not train or not heldout:
        raise ValueError(
            f"reward.heldout_share {config.heldout_share} splits the rankings of {config.rankings.source} into"
            f" {len(train)} for training and {len(heldout)} held out; both need at least one"
        )
    comparisons = [encode_rankings(tokenizer, part, shape.context_tokens) for part in (train, heldout)]
    engine = build_engine(context, source, config)
    objectives = [RankingObjective(part, shape.kind) for part in comparisons]
    num_steps = max(1, round(config.num_epochs * len(comparisons[0]) / config.batch.batch_size))
    loop_config = LoopConfig.of("reward", context.seed, num_steps, config)
    TrainingLoop(engine, loop_config, objectives[0], objectives[1], context.folder).run()
    weights = engine.full_weights(on_main_alone=True)
    if engine.is_main:
        save_model(context.model_folder, engine.module, weights, tokenizer)
        finish(context, config, tokenizer, heldout, comparisons)
        write_json(context.folder / ODDITIES, [vars(oddity) for oddity in found.report.oddities])
    engine.barrier()
    engine.close()


def finish(
    context: StageContext,
    config: RewardConfig,
    tokenizer: Tokenizer,
    heldout: Sequence[Ranking],
    comparisons: Sequence[Sequence[Comparison]],
) -> None:
    """Shift the bias of the written model, then measure it on the held-out rankings as it will be used.

    `comparisons` are those trained on and those held out.
    """
    model = load_network(context.model_folder).eval()
    mean = demonstration_mean(model, tokenizer, config)
    shift_scores(model, -mean)
    save_model(context.model_folder, model, model.state_dict(), tokenizer)
    trained_on, unseen = comparisons
    scores = score_sequences(model, [sequence for c in unseen for sequence in c.sequences])
    remaining = iter(scores)
    by_task = {c.task_id: [next(remaining) for _ in c.sequences] for c in unseen}
    write_json(context.folder / HELDOUT_SCORES, by_task)
    accuracy = accuracy_against(heldout, by_task)
    samples = torch.tensor(scores)
    context.write_results(
        {
            "heldout_accuracy": accuracy.mean,
            "heldout_pairs": accuracy.num_pairs,
            "heldout_comparisons": len(unseen),
            "train_comparisons": len(trained_on),
            "train_rankings": sum(len(c.judgments) for c in trained_on),
            "score_shift": -mean,
            # The units of PPO's rewards: scores of the SFT policy's samples, of prompts that training never saw.
            "sample_score_mean": float(samples.mean()),
            "sample_score_std": float(samples.std()),
        }
    )


def demonstration_mean(model: RewardNetwork, tokenizer: Tokenizer, config: RewardConfig) -> float:
    """Mean score of the first `num_calibration` demonstrations."""
    conversations = [messages for _, messages in read_conversations(config.demonstrations)][: config.num_calibration]
    sequences = [encode_scored(tokenizer, messages) for messages in conversations]
    scores = score_sequences(model, sequences)
    return sum(scores) / len(scores)
