"""Pretraining: learn a tokenizer from raw text, turn the text into one long stream of tokens, predict each next one.

Documents are joined by the end token and cut into rows of equal length; a row may hold parts of several documents.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lm.config import ModelConfig
from lm.hub import model_directory
from lm.model import LanguageModel, count_parameters
from lm.source import Fresh, ModelSource, skeleton
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from training.config import InitConfig, TrainingConfig
from training.data import DataConfig, read_texts
from training.loop import LoopConfig, TrainingLoop
from training.objectives import StreamObjective
from training.packing import chunks, stream_rows, write_token_stream
from training.seeds import derive_seed
from training.stage import StageContext, build_engine


class PretrainConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts rows of `row_tokens` tokens.

    Pretraining goes on from the weights, shape and vocabulary of `init_from`; with `num_steps` 0 they are taken as they
    are. Without it, `num_steps` 0 leaves a random model to the next stage, as translation learns from nothing.
    """

    texts: tuple[DataConfig, ...] = Field(min_length=1)
    heldout: tuple[DataConfig, ...] = Field(min_length=1)
    tokenizer_texts: int = Field(default=100_000, ge=1)  # the first so many texts teach the tokenizer
    row_tokens: int = Field(ge=2)
    num_steps: int = Field(ge=0)


def run(context: StageContext, config: PretrainConfig, model_config: ModelConfig, tokenizer_folder: Path) -> None:
    """Train on this rank; rank 0 writes `model/` and `results.json`.

    Errors: ValueError for text that cannot be read or does not fill a row, and for a tokenizer that does not fit.
    """
    tokenizer = Tokenizer.load(tokenizer_folder)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"model.vocab_size is {model_config.vocab_size}; the tokenizer in {tokenizer_folder} has"
            f" {tokenizer.vocab_size} tokens"
        )
    source = model_source(context, config, model_config)
    engine = build_engine(context, source, config)
    if engine.is_main:
        write_streams(context.folder / "data", config, tokenizer)
    engine.barrier()
    rows = stream_rows(context.folder / "data" / "train.bin", config.row_tokens)
    heldout, heldout_bytes = (
        stream_rows(context.folder / "data" / f"{name}.bin", config.row_tokens) for name in ("heldout", "heldout_bytes")
    )
    loop_config = LoopConfig.of("pretrain", context.seed, config.num_steps, config)
    loop = TrainingLoop(engine, loop_config, StreamObjective(rows), StreamObjective(heldout), context.folder)
    figures = loop.run()
    weights = engine.full_weights()
    if engine.is_main:
        save_model(context.model_folder, engine.module, weights, tokenizer)
        context.write_results(
            {
                "heldout_loss": figures["loss"],
                "heldout_bits_per_byte": bits_per_byte(figures["loss"], heldout_bytes),
                "num_parameters": count_parameters([skeleton(source.build)]),
                "vocab_size": tokenizer.vocab_size,
                "train_tokens": int(rows.size),
                "trained_tokens": config.num_steps * config.batch.batch_size * config.row_tokens,
            }
        )
    engine.barrier()
    engine.close()


def model_source(
    context: StageContext, config: PretrainConfig, model_config: ModelConfig
) -> ModelSource[LanguageModel]:
    """The model of `init_from`, or a fresh one."""
    if config.init_from:
        return ModelFolder(model_directory(config.init_from), LanguageModel, config.dropout)
    seed = derive_seed(context.seed, "pretrain", "weights")
    return Fresh(lambda: LanguageModel(model_config, config.dropout), seed)


def prepare_tokenizer(config: PretrainConfig, model: ModelConfig, folder: Path) -> None:
    """The vocabulary of `init_from`, or one learned from the first `tokenizer_texts` texts."""
    if config.init_from:
        source = model_directory(config.init_from)
        Tokenizer.load(source, end=config.end_token, pad=config.pad_token).save(folder)
        return
    sample = itertools.islice(read_texts(config.texts), config.tokenizer_texts)
    Tokenizer.train(sample, model.vocab_size, "chat", has_mask=model.kind != "decoder").save(folder)


def write_streams(folder: Path, config: PretrainConfig, tokenizer: Tokenizer) -> None:
    """The texts as token streams, written once; a resumed run finds them there."""
    if (folder / "ready").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, sources in (("train", config.texts), ("heldout", config.heldout)):
        texts = _by_chunks(tokenizer.encode_plain, read_texts(sources))
        write_token_stream(texts, tokenizer.end_id, folder / f"{name}.bin")
    # In step with heldout.bin; an end token spells nothing.
    spelled = _by_chunks(tokenizer.spelled_bytes, read_texts(config.heldout))
    write_token_stream(spelled, 0, folder / "heldout_bytes.bin")
    (folder / "ready").touch()


def _by_chunks(encode: Callable[[Sequence[str]], list[list[int]]], texts: Iterator[str]) -> Iterator[list[int]]:
    for chunk in chunks(texts):
        yield from encode(chunk)


def bits_per_byte(loss_nats: float, bytes_BT: NDArray[np.int32]) -> float:
    """Loss a token (nats) over the bytes that the predicted tokens stand for, in bits: comparable across tokenizers.

    `bytes_BT` holds those of every token; each row's first is not predicted.
    """
    predicted = bytes_BT[:, 1:]
    return loss_nats * predicted.size / (math.log(2) * int(predicted.sum()))
