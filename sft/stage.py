"""Supervised fine-tuning: the pretrained model continues training on demonstrations, each a conversation.

The loss counts only the assistant's tokens, end tokens included. Conversations are packed into rows and do not attend
to each other, so packing only changes the speed. An encoder-decoder reads everything before the last response and
writes that response (sequence to sequence); its pairs are not packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from files.hashes import derive_seed
from lm.adapters import adapted, save_trained
from lm.encoder import EncoderDecoder
from lm.model import LanguageModel
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, purpose_of
from sft.demonstrations import Limit, Rows, demonstration_lengths, demonstration_parts, split_pair
from stages.contract import Parent, Stage
from stages.data import token_folder
from stages.plan import Planner, Training
from stages.reports.parts import StageReport, StageReporter
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    TRAINING_PANELS,
    Panel,
    headline_of,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, number, percent
from stages.run import StageRun
from stages.sizes import Lengths
from training.config import LayersConfig
from training.data import DataConfig, OnOverlong, Overlong, SourceRows, overlong_field, untold
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, Objective, TrainingLoop
from training.objectives import PackedObjective, PairsObjective
from training.packing import Packed, best_fit
from training.tokens import CHECKED_SEQUENCES, Sequences, TokenFolders, read_overlong, read_sources


class SFTConfig(LayersConfig):
    """`batch.batch_size` counts packed rows of `seq_len` tokens; for an encoder-decoder it counts conversations."""

    leaves_policy = True

    demonstrations: tuple[DataConfig, ...] = Field(min_length=1, description="Conversations to learn from.")
    heldout: tuple[DataConfig, ...] = Field(
        default=(), description="Conversations to evaluate on; empty = `heldout_share` of the demonstrations."
    )
    heldout_share: float = Field(
        default=0.05, gt=0, le=0.5, description="Fraction of the demonstrations that is held out if `heldout` is empty."
    )
    chat_template: str = Field(
        default="",
        description="Chat template: `chat`, `continuation`, `plain`, a Jinja template, or `non-thinking`, the initial"
        " model's own with thoughts turned off; empty = its own.",
    )
    seq_len: int = Field(
        ge=2, description="Tokens per packed row; for an encoder-decoder, the limit of source and response, each."
    )
    on_overlong: OnOverlong = overlong_field()
    num_epochs: float = Field(default=1.0, gt=0, description="Passes over the demonstrations.")


def train(context: StageContext, config: SFTConfig, start: Path, data: TokenFolders) -> None:
    """Train on this rank; rank 0 writes `model/` and `results.json`. Raises: ValueError if there is no data."""
    tokenizer = Tokenizer.load(start, end=config.end_token)
    tokenizer = tokenizer.with_template(config.chat_template)
    source = policy_source(start, config, derive_seed(context.seed, "sft", "blocks"))
    plain = on_meta(source.build)
    training, heldout = (
        make_objective(plain.config.kind == "encoder-decoder", tokenizer, sources, folder, config.seq_len)
        for sources, folder in (
            (config.demonstrations, data.training),
            (config.heldout or config.demonstrations, data.heldout),
        )
    )
    num_steps = max(1, round(config.num_epochs * len(training) / config.batch.batch_size))
    engine = build_engine(context, adapted(source, config.lora, derive_seed(context.seed, "sft", "lora")), config)
    loop_config = LoopConfig.of("sft", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, heldout, context.folder)
    before = loop.evaluate()
    metrics = loop.run()
    weights = engine.weights_for_file()
    if engine.is_main:
        save_trained(context.folder, plain, engine.module, weights, tokenizer, config.lora, start)
    if engine.is_main:
        context.write_results(
            SFTResults(
                heldout_loss=metrics["loss"],
                heldout_loss_before=before["loss"],
                num_steps=num_steps,
                num_rows=len(training),
                packing_efficiency=packing_efficiency(training, config.seq_len),
                overlong=read_overlong(data.training) or None,
                sources=read_sources(data.training, data.heldout),
            )
        )
    engine.barrier()
    engine.close()


def policy_source(start: Path, config: SFTConfig, seed: int) -> ModelSource[LanguageModel | EncoderDecoder]:
    """Returns a directory's model, without its last blocks or with new ones if the config says so."""
    kind: type[LanguageModel | EncoderDecoder] = EncoderDecoder if purpose_of(start) == "translate" else LanguageModel
    return WithNewHead(
        start,
        kind,
        lambda shape: kind(shape, config.dropout),
        seed,
        dropped=config.dropped_layers,
        added=config.added_layers,
    )


def make_objective(
    has_source: bool, tokenizer: Tokenizer, sources: Sequence[DataConfig], folder: Path, seq_len: int
) -> Objective[Any]:
    """Build the objective over the conversations in `folder`: packed rows, or pairs of source and target.

    Raises: ValueError if there are none.
    """
    sequences = Sequences.read(folder)
    if not len(sequences):
        raise ValueError(f"{', '.join(data.source for data in sources)}: no demonstrations; at least one was expected")
    if has_source:
        return PairsObjective(Pairs(sequences), tokenizer.target_start_id)
    return PackedObjective(Packed(sequences, seq_len, tokenizer.pad_id))


class Pairs(Sequence[tuple[Sequence[int], Sequence[int]]]):
    """Sequences as pairs of source and target, which are split on access."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        tokens, is_response = self.sequences[index]
        return split_pair(tokens.tolist(), is_response.tolist())


def tokenize(run: StageRun, config: SFTConfig, tokenizer: Tokenizer) -> TokenFolders:
    """Tokenize the conversations, unless that is already done. Raises: ValueError as for `encode_demonstrations`."""
    has_source = run.model.kind == "encoder-decoder"

    every = 0 if config.heldout else round(1 / config.heldout_share)

    def folder(name: str, sources: Sequence[DataConfig], rows: Rows) -> Path:
        limit = Limit(has_source, config.seq_len, config.on_overlong)
        tell = untold if every and rows.is_heldout else run.tell  # once per source
        parts = partial(demonstration_parts, tokenizer, sources, limit, rows=rows, tell=tell)
        settings = vars(limit) | {"rows": f"{rows}"}
        return token_folder(run, name, tokenizer, sources, CHECKED_SEQUENCES, parts, **settings)

    return TokenFolders(
        folder("demonstrations", config.demonstrations, Rows(every)),
        folder("heldout", config.heldout or config.demonstrations, Rows(every, is_heldout=True)),
    )


def packing_efficiency(objective: Objective[Any], seq_len: int) -> float:
    """Returns the fraction of the positions in rows that hold a token."""
    if not isinstance(objective, PackedObjective):
        return 1.0
    return objective.num_tokens(np.arange(len(objective))) / (len(objective) * seq_len)


def run_sft(run: StageRun, config: SFTConfig) -> None:
    """Train on all workers."""
    start = run.start("pretrain")
    # Load the tokenizer of the model as it is now, which may differ from when the run started.
    tokenizer = Tokenizer.load(start, end=config.end_token).with_template(config.chat_template)
    run.on_ranks(train, config, start, tokenize(run, config, tokenizer))


def load_tokenizer(run: StageRun, config: SFTConfig) -> Tokenizer:
    """Returns the tokenizer that the model will have. It is known before the parent stage has run."""
    return run.tokenizer_of("pretrain", config.end_token).with_template(config.chat_template)


def preflight(run: StageRun, config: SFTConfig) -> None:
    """Read and tokenize every demonstration. Raises: ValueError naming file, line and field."""
    folders = tokenize(run, config, load_tokenizer(run, config))
    for name, folder in (("demonstrations", folders.training), ("heldout", folders.heldout)):
        if overlong := read_overlong(folder):
            run.tell(f"sft, {name}: {overlong} (sft.seq_len is {config.seq_len})")


def plan(planner: Planner, config: SFTConfig) -> Training:
    is_decoder = planner.model.kind == "decoder"
    rows = _num_packed_rows(planner, config) if is_decoder else None
    if rows is None:
        rows = sum(planner.sizes.num_rows(data) for data in config.demonstrations)
        if is_decoder:
            planner.sizes.assume("upper bound: one conversation per row; packing puts several in a row")
    return Training(
        "rows",
        config,
        config.reshaped(planner.model),
        max(1, round(config.num_epochs * rows / config.batch.batch_size)),
        Lengths.bound(config.seq_len - is_decoder),
    )


def _num_packed_rows(planner: Planner, config: SFTConfig) -> float | None:
    """Returns the number of rows that the demonstrations are packed into; None if they cannot be read."""
    limit = Limit(has_source=False, seq_len=config.seq_len, on_overlong=config.on_overlong)
    lengths = planner.measured(
        config.demonstrations,
        "conversations",
        lambda run: load_tokenizer(run, config),
        lambda tokenizer: demonstration_lengths(tokenizer, config.demonstrations, limit),
    )
    if lengths is None:
        return None
    trained = lengths.num_rows * (1.0 if config.heldout else 1 - config.heldout_share)
    return trained * len(best_fit(lengths.spread, config.seq_len)) / max(1, len(lengths.spread))


SFT_PANELS = (Panel("Loss", "nats per response token", train_and_heldout("loss")), *TRAINING_PANELS)


@dataclass(frozen=True)
class SFTResults:
    """Losses in nats per response token, before and after training. `packing_efficiency` is the share of positions
    that are not padding.
    """

    heldout_loss: float
    heldout_loss_before: float
    num_steps: int
    num_rows: int
    packing_efficiency: float
    overlong: Overlong | None = None  # of the demonstrations
    sources: tuple[SourceRows, ...] = ()  # of the demonstrations, if rows are unusual


def sft_report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, SFT_PANELS)
    results = stage.results(SFTResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    loss, before = results.heldout_loss, number(results.heldout_loss_before)
    facts = [
        ("Packed rows", count(results.num_rows)),
        ("Steps", count(results.num_steps)),
        ("Held-out loss before", before),
        ("Held-out loss after", number(loss)),
        ("Packing efficiency", percent(results.packing_efficiency)),
    ]
    if results.overlong:
        facts.append(("Demonstrations", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    detail = f"nats per token, {before} before"
    return StageReport(
        (stage_block(stage, facts, figures),),
        headlines=(headline_of(stage, "heldout_loss", "SFT held-out loss", loss, number(loss), detail),),
        sentence=f"SFT reaches a held-out loss of {number(loss)} nats per token.",
    )


SFT_REPORTER = StageReporter(
    "Supervised fine-tuning",
    "Demonstrations teach the model to follow instructions; the loss is on responses only.",
    sft_report,
)


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
    title=lambda _: "SFT",
    report=SFT_REPORTER,
    conversation_tokens=lambda config: config.seq_len,
)
