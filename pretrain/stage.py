"""Pretraining: learn a tokenizer from raw text, turn the text into one long stream of tokens, learn to predict them.

Documents are joined by the end token and cut into rows of equal length; a row may hold parts of several documents. A
decoder predicts each next token, an encoder the words hidden from it, and an encoder-decoder writes out a row that it
read with spans hidden.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from files.hashes import derive_seed, file_hash
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder, MaskedLanguageModel, NextSentenceModel
from lm.hub import model_directory
from lm.model import LanguageModel, count_parameters
from lm.source import ModelSource, RandomInit, on_meta
from lm.tokenizer import TOKENIZER_FILES, Tokenizer
from lm.weights import PRETRAINED, ModelFolder, WithNewHead, save_model
from pretrain.corruption import NUM_VIEWS, DenoisingObjective, HiddenWords, MaskedObjective, NextSentenceObjective
from stages.contract import Preparation, Stage
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
from stages.run import JobView, StageRun
from stages.sizes import Lengths
from training.config import InitConfig, TrainingConfig
from training.data import SourceRows, TextConfig, read_texts, untold
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, Objective, TrainingLoop
from training.objectives import CausalLMObjective
from training.packing import stream_rows
from training.tokens import Part, TokenFolders, array_path, chunks, read_sources, unusual_rows

TOKENIZER_TEXTS = 100_000  # on which the tokenizer is trained, from the first text on


class PretrainConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts rows of `seq_len` tokens.

    With `init_from`, pretraining continues from that model's weights, shape and vocabulary.
    """

    texts: tuple[TextConfig, ...] = Field(min_length=1, description="Texts to learn from.")
    heldout: tuple[TextConfig, ...] = Field(min_length=1, description="Texts to evaluate on.")
    seq_len: int = Field(ge=2, description="Tokens per row.")
    next_sentence: bool = Field(
        default=False,
        description="Encoders: also learn whether the second of two texts follows the first (BERT's next-sentence"
        " prediction, arXiv 1810.04805, section 3.1); needs model.type_vocab_size of at least 2.",
    )
    num_steps: int = Field(
        ge=0, description="Optimizer steps; 0 = keep the initial weights (those of `init_from`, or random ones)."
    )


def train(
    context: StageContext, config: PretrainConfig, model_config: ModelConfig, tokenizer_folder: Path, data: TokenFolders
) -> None:
    """Train on this rank; rank 0 writes `model/` and `results.json`.

    Raises: ValueError for text that does not fill a row, and for a tokenizer that does not fit.
    """
    tokenizer = Tokenizer.load(tokenizer_folder)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"model.vocab_size is {model_config.vocab_size}; at least {tokenizer.vocab_size}, the size of the tokenizer"
            f" in {tokenizer_folder}, was expected"
        )
    # An encoder's input begins with the start token; a pair of texts also has an end token after each.
    seq_len = config.seq_len - (3 if config.next_sentence else model_config.kind != "decoder")
    rows, heldout, heldout_bytes = (
        stream_rows(array_path(folder, name), seq_len)
        for folder, name in ((data.training, "tokens"), (data.heldout, "tokens"), (data.heldout, "num_bytes"))
    )
    source = model_source(context, config, model_config)
    engine = build_engine(context, source, config)
    training, unseen = (
        make_objective(
            model_config, rows_BT, tokenizer, derive_seed(context.seed, "pretrain", name), views, config.next_sentence
        )
        for rows_BT, name, views in ((rows, "words", NUM_VIEWS), (heldout, "heldout", 1))
    )
    loop_config = LoopConfig.of("pretrain", context.seed, config.num_steps, config)
    metrics = TrainingLoop(engine, loop_config, training, unseen, context.folder).run()
    weights = engine.weights_for_file()
    if engine.is_main:
        save_model(context.model_folder, engine.module, weights, tokenizer)
        is_decoder = model_config.kind == "decoder"  # other kinds see later tokens, so their loss is not that of a text
        results = PretrainResults(
            heldout_loss=metrics.get("masked_loss", metrics["loss"]),
            heldout_accuracy=metrics.get("accuracy"),
            heldout_next_sentence_accuracy=metrics.get("next_sentence_accuracy"),
            num_parameters=count_parameters([on_meta(source.build)]),
            vocab_size=tokenizer.vocab_size,
            train_tokens=int(rows.size),
            trained_tokens=config.num_steps * config.batch.batch_size * config.seq_len,
            heldout_bits_per_byte=bits_per_byte(metrics["loss"], heldout_bytes) if is_decoder else None,
            sources=read_sources(data.training, data.heldout),
        )
        context.write_results(results)
    engine.barrier()
    engine.close()


Pretrained = LanguageModel | MaskedLanguageModel | NextSentenceModel | EncoderDecoder


def model_source(context: StageContext, config: PretrainConfig, model_config: ModelConfig) -> ModelSource[Pretrained]:
    """Returns the model of `init_from`, or a new one. A head for the next sentence that `init_from` lacks is new."""
    kind = NextSentenceModel if config.next_sentence else PRETRAINED[model_config.kind]
    if config.init_from and config.next_sentence:
        seed, folder = derive_seed(context.seed, "pretrain", "head"), model_directory(config.init_from)
        return WithNewHead(folder, MaskedLanguageModel, lambda shape: NextSentenceModel(shape, config.dropout), seed)
    if config.init_from:
        return ModelFolder(model_directory(config.init_from), kind, config.dropout)
    seed = derive_seed(context.seed, "pretrain", "weights")
    return RandomInit(lambda: kind(model_config, config.dropout), seed)


def make_objective(
    model: ModelConfig,
    rows_BT: NDArray[np.int32],
    tokenizer: Tokenizer,
    seed: int,
    num_views: int,
    next_sentence: bool,
) -> Objective[Any]:
    """Build the objective for the model's kind. Raises: ValueError for a vocabulary without a mask token."""
    if model.kind == "decoder":
        return CausalLMObjective(rows_BT)
    words = HiddenWords.of(tokenizer, seed)
    if next_sentence:
        return NextSentenceObjective(rows_BT, words, num_views)
    if model.kind == "encoder":
        return MaskedObjective(rows_BT, words, num_views)
    return DenoisingObjective(rows_BT, words, num_views)


def prepare_tokenizer(config: PretrainConfig, model: ModelConfig, folder: Path) -> None:
    """Save the tokenizer of `init_from`, or train one on the first `TOKENIZER_TEXTS` texts."""
    if config.init_from:
        source = model_directory(config.init_from)
        Tokenizer.load(source, end=config.end_token).save(folder)
        return
    sample = itertools.islice(read_texts(config.texts), TOKENIZER_TEXTS)
    if model.kind == "decoder":
        Tokenizer.train(sample, model.vocab_size, "chat").save(folder)
    else:
        Tokenizer.train(sample, model.vocab_size, "plain", has_mask=True).save(folder)


def stream_parts(
    tokenizer: Tokenizer, sources: Sequence[TextConfig], first_row: int, *, tell: Callable[[str], None] = untold
) -> Iterator[Part]:
    """Yields the texts from `first_row` on as one stream of tokens, with an end token after each text."""
    counted = list[SourceRows]()
    for chunk in chunks(itertools.islice(read_texts(sources, tell, counted.append), first_row, None)):
        yield Part(len(chunk), {"tokens": _joined(tokenizer.encode_plain(chunk), tokenizer.end_id)})
    yield from unusual_rows(counted)


def heldout_parts(
    tokenizer: Tokenizer, sources: Sequence[TextConfig], first_row: int, *, tell: Callable[[str], None] = untold
) -> Iterator[Part]:
    """As `stream_parts`, with the number of bytes that each token stands for; an end token stands for 0."""
    counted = list[SourceRows]()
    for chunk in chunks(itertools.islice(read_texts(sources, tell, counted.append), first_row, None)):
        tokens = _joined(tokenizer.encode_plain(chunk), tokenizer.end_id)
        yield Part(len(chunk), {"tokens": tokens, "num_bytes": _joined(tokenizer.spelled_bytes(chunk), 0)})
    yield from unusual_rows(counted)


def _joined(texts: Sequence[Sequence[int]], end: int) -> NDArray[np.int32]:
    separator = np.array([end], dtype=np.int32)
    return np.concatenate([part for text in texts for part in (np.array(text, dtype=np.int32), separator)])


def tokenize(run: StageRun, config: PretrainConfig) -> TokenFolders:
    """Tokenize the texts, unless that is already done. Raises: ValueError naming file, line and field."""
    tokenizer = Tokenizer.load(_tokenizer_folder(run))
    heldout = token_folder(
        run, "heldout", tokenizer, config.heldout, ("tokens", "num_bytes"),
        partial(heldout_parts, tokenizer, config.heldout, tell=run.tell),
    )  # fmt: skip
    training = token_folder(
        run, "texts", tokenizer, config.texts, ("tokens",),
        partial(stream_parts, tokenizer, config.texts, tell=run.tell),
    )  # fmt: skip
    return TokenFolders(training, heldout)


def bits_per_byte(loss_nats: float, bytes_BT: NDArray[np.int32]) -> float:
    """Convert a loss in nats per token to bits per byte of the predicted tokens' text: comparable across tokenizers.

    `bytes_BT` holds the number of bytes of every token; each row's first token is not predicted.
    """
    predicted = bytes_BT[:, 1:]
    return loss_nats * predicted.size / (math.log(2) * int(predicted.sum()))


def run_pretrain(run: StageRun, config: PretrainConfig) -> None:
    """Train on all workers."""
    run.on_ranks(train, config, run.model, _tokenizer_folder(run), tokenize(run, config))


def _tokenizer_folder(run: StageRun) -> Path:
    return run.folder_of(TOKENIZER) / "data"


def tokenizer_inputs(run: StageRun, config: PretrainConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what the vocabulary depends on: settings, and the hashes of the files that are read."""
    if config.init_from:
        values: dict[str, Any] = {key: getattr(config, key) for key in ("init_from", "end_token")}
        # Weights in the same folder may be large; they are an input of pretraining, not of the vocabulary.
        folder = model_directory(config.init_from)
        files = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
        return values, {str(path): file_hash(path) for path in files}
    named = run.job.section(STAGE)
    assert named is not None
    texts = [text.model_dump() for text in named.texts]  # by name, not by path: a run folder may be moved
    values = {"texts": texts, "tokenizer_texts": TOKENIZER_TEXTS}
    return {**values, "vocab_size": run.model.vocab_size, "kind": run.model.kind}, run.source_hashes(texts)


def check(config: PretrainConfig, job: JobView) -> None:
    """Raises: ValueError for pairs of texts that the model cannot tell apart or that do not fit a row."""
    if not config.next_sentence or job.model is None:
        return
    if job.model.kind != "encoder":
        raise ValueError(f"pretrain.next_sentence with model.kind {job.model.kind!r}; an encoder was expected")
    if job.model.type_vocab_size < 2:
        raise ValueError(
            f"pretrain.next_sentence with model.type_vocab_size {job.model.type_vocab_size}; at least 2 was expected,"
            " since token types tell the two texts apart"
        )
    if config.seq_len < MIN_PAIR_TOKENS:
        raise ValueError(f"pretrain.seq_len is {config.seq_len}; next_sentence needs at least {MIN_PAIR_TOKENS}")


def preflight(run: StageRun, config: PretrainConfig) -> None:
    """Read and tokenize every text. Raises: ValueError naming file, line and field."""
    tokenize(run, config)


def plan(planner: Planner, config: PretrainConfig) -> Training:
    # A decoder predicts all tokens of a row but the first. For other models the start token takes one place of the row.
    tokens = config.seq_len - (planner.model.kind == "decoder")
    return Training("rows", config, planner.model, config.num_steps, Lengths.bound(tokens))


PANELS = (
    Panel("Loss", "nats per token", train_and_heldout("loss")),
    Panel("Next sentence", "pairs told right", train_and_heldout("next_sentence_accuracy"), is_share=True),
    *TRAINING_PANELS,
)


@dataclass(frozen=True)
class PretrainResults:
    """Losses in nats per token. `heldout_accuracy` is on hidden words (masked models only); bits per byte are given for
    decoders only. With next-sentence prediction, `heldout_loss` is that of the hidden words alone.
    """

    heldout_loss: float
    num_parameters: int
    vocab_size: int
    train_tokens: int
    trained_tokens: int
    heldout_accuracy: float | None = None
    heldout_next_sentence_accuracy: float | None = None  # of pairs of texts, half of which belong together
    heldout_bits_per_byte: float | None = None
    sources: tuple[SourceRows, ...] = ()  # of the texts, if rows are unusual


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, PANELS)
    results = stage.results(PretrainResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    facts = [
        ("Parameters", count(results.num_parameters)),
        ("Vocabulary", count(results.vocab_size)),
        ("Tokens of text", count(results.train_tokens)),
        ("Tokens trained on", count(results.trained_tokens)),
        ("Held-out loss", number(results.heldout_loss)),
    ]
    if results.heldout_accuracy is not None:
        facts.append(("Hidden words found", percent(results.heldout_accuracy)))
    if results.heldout_next_sentence_accuracy is not None:
        facts.append(("Next sentences told from random ones", percent(results.heldout_next_sentence_accuracy)))
    facts += [rows.fact for rows in results.sources]
    bits = results.heldout_bits_per_byte
    if bits is None:
        return StageReport((stage_block(stage, facts, figures),))
    facts.append(("Bits per byte", number(bits)))
    field, detail = "heldout_bits_per_byte", "pretraining, held-out text"
    return StageReport(
        (stage_block(stage, facts, figures),),
        headlines=(headline_of(stage, field, "Bits per byte", bits, number(bits), detail),),
        sentence=f"Pretraining reaches {number(bits)} bits per byte on held-out text.",
    )


REPORTER = StageReporter("Pretraining", "A tokenizer and a language model, from raw text.", report)


TOKENIZER = "tokenizer"
MIN_PAIR_TOKENS = 5  # two texts of one token with BERT's three marks

STAGE = Stage(
    name="pretrain",
    config=PretrainConfig,
    run=run_pretrain,
    sections=("model",),
    preparation=Preparation(
        TOKENIZER, tokenizer_inputs, lambda run, config, folder: prepare_tokenizer(config, run.model, folder)
    ),
    tokenizer=lambda run, _: Tokenizer.load(_tokenizer_folder(run)),
    model_kinds=("decoder", "encoder", "encoder-decoder"),
    context_tokens=lambda config: {"seq_len": config.seq_len},
    check=check,
    preflight=preflight,
    plan=plan,
    report=REPORTER,
)
