"""Supervised fine-tuning: the pretrained model continues training on demonstrations, each a conversation.

The loss counts the assistant's tokens only, the end token among them. Conversations are packed into rows; none sees
another, so packing changes the speed and nothing else.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from lm.model import LanguageModel
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from training.config import InitConfig, TrainingConfig
from training.data import DataConfig, read_conversations
from training.loop import LoopConfig, TrainingLoop
from training.objectives import PackedObjective
from training.packing import PackedRows, pack
from training.stage import StageContext, build_engine


class SFTConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts packed rows of `row_tokens` tokens."""

    demonstrations: tuple[DataConfig, ...] = Field(min_length=1)
    heldout: tuple[DataConfig, ...] = Field(min_length=1)
    chat_template: str  # "chat", "continuation", a Jinja template, or "" for the model's own
    row_tokens: int = Field(ge=2)
    num_epochs: float = Field(gt=0)


def run(context: StageContext, config: SFTConfig, pretrained: Path) -> None:
    """Train on this rank; rank 0 writes `model/` and `results.json`.

    Errors: ValueError naming file, line and field for rows that are not demonstrations or do not fit a row.
    """
    tokenizer = Tokenizer.load(pretrained, end=config.end_token, pad=config.pad_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    rows = pack_conversations(tokenizer, config.demonstrations, config.row_tokens)
    heldout = pack_conversations(tokenizer, config.heldout, config.row_tokens)
    num_steps = max(1, round(config.num_epochs * len(rows) / config.batch.batch_size))
    engine = build_engine(context, ModelFolder(pretrained, LanguageModel, config.dropout), config)
    loop_config = LoopConfig.of("sft", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, PackedObjective(rows), PackedObjective(heldout), context.folder)
    before = loop.evaluate()
    figures = loop.run()
    weights = engine.full_weights()
    if engine.is_main:
        save_model(context.model_folder, engine.module, weights, tokenizer)
        context.write_results(
            {
                "heldout_loss": figures["loss"],
                "heldout_loss_before": before["loss"],
                "num_steps": num_steps,
                "num_rows": len(rows),
                "packing_efficiency": float((rows.segments > 0).mean()),
            }
        )
    engine.barrier()
    engine.close()


def pack_conversations(tokenizer: Tokenizer, sources: Sequence[DataConfig], row_tokens: int) -> PackedRows:
    """All conversations of the sources, packed; assistant tokens count."""
    sequences = []
    for where, messages in read_conversations(sources):
        tokens, is_response = tokenizer.encode_conversation(messages)
        if len(tokens) > row_tokens:
            raise ValueError(f"{where}: the conversation has {len(tokens)} tokens; at most {row_tokens} fit a row")
        sequences.append((tokens, is_response))
    if not sequences:
        raise ValueError(f"{', '.join(data.source for data in sources)}: no demonstrations; at least one was expected")
    return pack(sequences, row_tokens, tokenizer.pad_id)
