"""Supervised fine-tuning: the pretrained model continues training on demonstrations, each a conversation.

The loss counts only the assistant's tokens, end tokens included. Conversations are packed into rows and do not attend
to each other, so packing only changes the speed. An encoder-decoder reads everything before the last response and
writes that response (sequence to sequence); its pairs are not packed.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from lm.encoder_decoder import EncoderDecoder
from lm.model import LanguageModel
from lm.source import ModelSource
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder, purpose_of, save_model
from sft.report import REPORTER
from sft.results import SFTResults
from stages.contract import Parent, Stage
from stages.planner import Planner, StagePlan
from stages.run import StageRun
from stages.tokens import token_folder
from training.config import InitConfig, TrainingConfig
from training.data import DataConfig, read_conversations
from training.loop import LoopConfig, Objective, TrainingLoop
from training.objectives import PackedObjective, PairsObjective
from training.packing import Packed
from training.stage import StageContext, build_engine
from training.tokens import SEQUENCES, Part, Sequences, TokenFolders, chunks, sequence_arrays


class SFTConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts packed rows of `seq_len` tokens; for an encoder-decoder it counts conversations."""

    demonstrations: tuple[DataConfig, ...] = Field(min_length=1, description="Conversations to learn from.")
    heldout: tuple[DataConfig, ...] = Field(min_length=1, description="Conversations to evaluate on.")
    chat_template: str = Field(
        default="",
        description="`chat`, `continuation`, `plain`, or a Jinja template; empty = the initial model's own.",
    )
    seq_len: int = Field(
        ge=2, description="Tokens per packed row; for an encoder-decoder the limit of source and of response each."
    )
    num_epochs: float = Field(default=1.0, gt=0, description="Passes over the demonstrations.")


def train(context: StageContext, config: SFTConfig, start: Path, data: TokenFolders) -> None:
    """Train on this rank; rank 0 writes `model/` and `results.json`. Raises: ValueError where there is no data."""
    tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    kind = EncoderDecoder if purpose_of(start) == "translate" else LanguageModel
    source: ModelSource[LanguageModel | EncoderDecoder] = ModelFolder(start, kind, config.dropout)
    training, heldout = (
        make_objective(kind is EncoderDecoder, tokenizer, sources, folder, config.seq_len)
        for sources, folder in ((config.demonstrations, data.training), (config.heldout, data.heldout))
    )
    num_steps = max(1, round(config.num_epochs * len(training) / config.batch.batch_size))
    engine = build_engine(context, source, config)
    loop_config = LoopConfig.of("sft", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, heldout, context.folder)
    before = loop.evaluate()
    metrics = loop.run()
    weights = engine.weights_for_file()
    if engine.is_main:
        save_model(context.model_folder, engine.module, weights, tokenizer)
        context.write_results(
            SFTResults(
                heldout_loss=metrics["loss"],
                heldout_loss_before=before["loss"],
                num_steps=num_steps,
                num_rows=len(training),
                packing_efficiency=packing_efficiency(training, config.seq_len),
            )
        )
    engine.barrier()
    engine.close()


def make_objective(
    has_source: bool, tokenizer: Tokenizer, sources: Sequence[DataConfig], folder: Path, seq_len: int
) -> Objective[Any]:
    """The conversations whose tokens are in `folder`: packed rows, or pairs of source and target.

    Raises: ValueError if there are none.
    """
    sequences = Sequences.read(folder)
    if not len(sequences):
        raise ValueError(f"{', '.join(data.source for data in sources)}: no demonstrations; at least one was expected")
    if has_source:
        return PairsObjective(Pairs(sequences), tokenizer.end_id)
    return PackedObjective(Packed(sequences, seq_len, tokenizer.pad_id))


class Pairs(Sequence[tuple[Sequence[int], Sequence[int]]]):
    """Sequences as pairs of source and target, split where they are asked for."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        tokens, is_response = self.sequences[index]
        return split_pair(tokens.tolist(), is_response.tolist())


def tokenize(run: StageRun, config: SFTConfig, tokenizer: Tokenizer) -> TokenFolders:
    """Tokenize the conversations, unless that is done. Raises: ValueError as for `encode_demonstrations`."""
    has_source = run.model.kind == "encoder-decoder"

    def folder(name: str, sources: Sequence[DataConfig]) -> Path:
        parts = partial(demonstration_parts, has_source, tokenizer, sources, config.seq_len)
        settings = {"has_source": has_source, "seq_len": config.seq_len}
        return token_folder(run, name, tokenizer, sources, SEQUENCES, parts, **settings)

    return TokenFolders(folder("demonstrations", config.demonstrations), folder("heldout", config.heldout))


def demonstration_parts(
    has_source: bool, tokenizer: Tokenizer, sources: Sequence[DataConfig], seq_len: int, first_row: int
) -> Iterator[Part]:
    """The conversations from a row on. Raises: ValueError as for `encode_demonstrations`."""
    for chunk in chunks(itertools.islice(read_conversations(sources), first_row, None)):
        yield Part(len(chunk), sequence_arrays(encode_demonstrations(has_source, tokenizer, chunk, seq_len)))


def encode_demonstrations(
    has_source: bool, tokenizer: Tokenizer, conversations: Sequence[tuple[str, Messages]], seq_len: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokens of each (where, messages), and which of them are the assistant's.

    Raises: ValueError naming file and line of a conversation that has no response or is too long or, with
    `has_source`, has nothing before its last response.
    """
    encoded = tokenizer.encode_conversations([messages for _, messages in conversations])
    for (where, _), (tokens, is_response) in zip(conversations, encoded, strict=True):
        if not any(is_response):
            raise ValueError(f"{where}: sft.chat_template {tokenizer.chat_template!r} shows no assistant's response")
        parts = split_pair(tokens, is_response) if has_source else (tokens,)
        if not parts[0]:
            raise ValueError(f"{where}: nothing comes before the response; a source to read was expected")
        if max(map(len, parts)) > seq_len:
            what, lengths = "source and target have" if has_source else "the conversation has", map(len, parts)
            raise ValueError(f"{where}: {what} {' and '.join(map(str, lengths))} tokens; sft.seq_len allows {seq_len}")
        yield tokens, is_response


def split_pair(tokens: Sequence[int], is_response: Sequence[bool]) -> tuple[Sequence[int], Sequence[int]]:
    """What comes before the last response, and that response with its end token."""
    end = len(tokens) - is_response[::-1].index(True)
    length = next((back for back in range(end) if not is_response[end - 1 - back]), end)
    return tokens[: end - length], tokens[end - length : end]


def packing_efficiency(objective: Objective[Any], seq_len: int) -> float:
    """Fraction of the positions in rows that hold a token."""
    if not isinstance(objective, PackedObjective):
        return 1.0
    return objective.num_tokens(np.arange(len(objective))) / (len(objective) * seq_len)


def run_sft(run: StageRun, config: SFTConfig) -> None:
    """Train on all workers."""
    start = run.start("pretrain")
    # The tokenizer of the model as it is now: it need not be the one that the run began with.
    tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token).with_template(config.chat_template)
    run.on_ranks(train, config, start, tokenize(run, config, tokenizer))


def load_tokenizer(run: StageRun, config: SFTConfig) -> Tokenizer:
    """The tokenizer that the model will have; its vocabulary is there before the parent is."""
    if config.init_from:
        loaded = Tokenizer.load(run.start("pretrain"), end=config.end_token, pad=config.pad_token)
    else:
        loaded = run.tokenizer_of("pretrain")
    return loaded.with_template(config.chat_template)


def preflight(run: StageRun, config: SFTConfig) -> None:
    """Read and tokenize every demonstration. Raises: ValueError naming file, line and field."""
    tokenize(run, config, load_tokenizer(run, config))


def plan(planner: Planner, config: SFTConfig) -> StagePlan:
    rows = sum(planner.sizes.num_rows(data) for data in config.demonstrations)
    is_decoder = planner.model.kind == "decoder"
    tokens = config.seq_len - is_decoder
    if is_decoder:
        planner.sizes.assume("at most: packing puts several conversations in a row, and not every token counts")
    steps = max(1, round(config.num_epochs * rows / config.batch.batch_size))
    logits = config.batch.micro_batch_size * tokens * planner.model.vocab_size
    return planner.training("rows", config, steps, tokens, logits)


STAGE = Stage(
    name="sft",
    config=SFTConfig,
    run=run_sft,
    parents=(Parent("pretrain", substitutes=("init_from",)),),
    tokenizer=load_tokenizer,
    model_kinds=("decoder", "encoder-decoder"),
    context_tokens=lambda config: {"seq_len": config.seq_len},
    preflight=preflight,
    plan=plan,
    report=REPORTER,
    conversation_tokens=lambda config: config.seq_len,
)
