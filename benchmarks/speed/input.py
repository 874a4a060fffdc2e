"""Measures the input pipeline: `python -m benchmarks.speed input`.

First, the conversion of files to what training reads (the demo's pretraining texts to a stream on disk, and its
demonstrations to packed rows), compared with the `tokenizers` library's own `encode_batch` of the same texts in memory.
Second, the share of a step that the training loop spends between steps on choosing rows and making tensors of them.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import nn

from benchmarks.speed.table import spread, taken_on
from heed.jobs.job_file import load_job
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from lm.encoder import EncoderDecoder, MaskedLanguageModel
from lm.model import LanguageModel
from lm.source import RandomInit
from lm.tokenizer import Tokenizer
from lm.transfer import pad_right
from pretrain.corruption import DenoisingObjective, HiddenWords, MaskedObjective
from pretrain.stage import stream_parts
from sft.demonstrations import Limit, demonstration_parts
from training.config import EngineConfig, OptimizerConfig
from training.data import DataConfig, TextConfig, read_conversations, read_texts
from training.engine import Engine
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import IntArray, Packed, Sampler, stream_rows
from training.tokens import CHECKED_SEQUENCES, Sequences, write_arrays

WAIT_AIM, RATE_AIM = 0.02, 1.0
VOCAB_SIZES = (800, 8192)  # the demo's, and a more common size
NUM_STEPS = 20  # per round
BATCH_SIZE = 16
ADAMW = OptimizerConfig(learning_rate=1e-4, schedule="constant")
CPU = torch.device("cpu")

Clock = Callable[[], float]


def timed(work: Callable[[], Any], clock: Clock) -> float:
    begun = clock()
    work()
    return clock() - begun


def repeat(work: Callable[[int], None], num_steps: int) -> None:
    for step in range(num_steps):
        work(step)


def write_world(folder: Path, num_texts: int) -> tuple[TextConfig, DataConfig]:
    """Writes texts and demonstrations in the playground's English; returns their configs."""
    world = PlaygroundConfig(num_pretrain_texts=num_texts, num_demonstrations=num_texts)
    PlaygroundWorld(world).write_data(folder, seed=0)
    return TextConfig(source=str(folder / "pretrain.jsonl")), DataConfig(source=str(folder / "demonstrations.jsonl"))


# --- from files to rows ---------------------------------------------------------------------------------------------


def conversions(
    folder: Path, texts: TextConfig, demonstrations: DataConfig, tokenizer: Tokenizer, seq_len: int
) -> Iterator[tuple[str, Callable[[], int], Callable[[], int]]]:
    """Yields (name, Heed's conversion, the library's encoding alone). Both functions return their number of tokens."""
    tokenizer.save(folder / "tokenizer")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

    def encode(held: list[str]) -> int:
        return sum(len(encoding) for encoding in library.encode_batch(held, add_special_tokens=False))

    def to_stream() -> int:
        shutil.rmtree(folder / "stream", ignore_errors=True)
        write_arrays(folder / "stream", ("tokens",), partial(stream_parts, tokenizer, (texts,)))
        return int(stream_rows(folder / "stream" / "tokens.bin", seq_len).size)

    def to_rows() -> int:
        shutil.rmtree(folder / "rows", ignore_errors=True)
        parts = partial(demonstration_parts, tokenizer, (demonstrations,), Limit(False, seq_len))
        write_arrays(folder / "rows", CHECKED_SEQUENCES, parts)
        packed = Packed(Sequences.read(folder / "rows"), seq_len, tokenizer.pad_id)
        return packed.num_tokens(np.arange(len(packed)))

    held_texts = list(read_texts((texts,)))
    held_turns = [turn["content"] for _, turns in read_conversations((demonstrations,)) for turn in turns]
    yield "texts to a stream", to_stream, lambda: encode(held_texts)
    yield "demonstrations to packed rows", to_rows, lambda: encode(held_turns)


def convert(folder: Path, num_texts: int, vocab_sizes: tuple[int, ...], rounds: int, clock: Clock) -> dict[str, Any]:
    """Returns tokens and seconds per row and round; the two functions alternate."""
    texts, demonstrations = write_world(folder, num_texts)
    found: dict[str, Any] = {}
    for vocab_size in vocab_sizes:
        tokenizer = Tokenizer.train(read_texts((texts,)), vocab_size, "chat")
        for name, ours, alone in conversions(folder, texts, demonstrations, tokenizer, seq_len=512):
            tokens, library_tokens = ours(), alone()  # they also warm up
            runs = [{"heed": timed(ours, clock), "library": timed(alone, clock)} for _ in range(rounds)]
            row = {"tokens": tokens, "library_tokens": library_tokens, "runs": runs}
            found[f"{name}, vocabulary of {vocab_size:,}"] = row
    return found


# --- waiting for data -----------------------------------------------------------------------------------------------


def fetchers() -> Iterator[tuple[str, Any, RandomInit[Any], Callable[[IntArray], Any]]]:
    """Yields per kind of training its objective, its model at the demo's size, and how rows become tensors."""
    job = load_job(None)
    shape = job.model
    assert shape is not None
    rng = np.random.default_rng(0)
    rows_BT = rng.integers(8, shape.vocab_size, (5000, 97), dtype=np.int32)
    words = HiddenWords(1, 1, 5, (0, 1), shape.vocab_size, seed=0)
    encoder = shape.model_copy(update={"kind": "encoder"})
    both = shape.model_copy(update={"kind": "encoder-decoder", "num_encoder_layers": shape.num_hidden_layers})

    def fresh(build: Callable[[], nn.Module]) -> RandomInit[Any]:
        return RandomInit(build, seed=0)

    stream = CausalLMObjective(rows_BT)
    yield "pretraining", stream, fresh(lambda: LanguageModel(shape)), lambda rows: stream.inputs(rows, 0)
    all_rows = rows_BT.tolist()
    thirds = ((row[at : at + 33], [at > 0] * len(row[at : at + 33])) for row in all_rows for at in (0, 33, 66))
    packed = PackedObjective(Packed(Sequences.of(thirds), 97, pad_id=0))
    yield "SFT", packed, fresh(lambda: LanguageModel(shape)), lambda rows: packed.batch(rows, CPU)
    masked = MaskedObjective(rows_BT, words)
    yield "masked words", masked, fresh(lambda: MaskedLanguageModel(encoder)), lambda rows: masked.batch(rows, CPU)
    denoising = DenoisingObjective(rows_BT, words)

    def padded(rows: IntArray) -> None:
        for side in denoising.batch(rows):
            pad_right(side, CPU)

    yield "denoising", denoising, fresh(lambda: EncoderDecoder(both)), padded


def wait(rounds: int, num_steps: int, clock: Clock) -> dict[str, Any]:
    """Returns seconds per step, by row and round: of fetching alone, and of the whole step including fetching."""
    found: dict[str, Any] = {}
    for name, objective, source, fetch in fetchers():
        engine = Engine(source, ADAMW, EngineConfig(trackers=()), world_size=1, micro_batch=BATCH_SIZE)
        order = Sampler(len(objective), BATCH_SIZE, seed=0)

        def fetch_step(step: int, objective: Any = objective, fetch: Any = fetch, order: Sampler = order) -> None:
            rows = order.batch(step)
            objective.count(rows)
            fetch(rows)
            objective.num_tokens(rows)

        def whole_step(step: int, objective: Any = objective, engine: Any = engine, order: Any = order) -> None:
            rows = order.batch(step)
            count = objective.count(rows)
            engine.accumulate([rows], lambda rows: (objective.loss(engine.model, rows, engine.device)[0] / count, {}))
            engine.step()
            objective.num_tokens(rows)

        whole_step(0)
        found[name] = [
            {
                part: timed(partial(repeat, work, num_steps), clock) / num_steps
                for part, work in (("fetch", fetch_step), ("step", whole_step))
            }
            for _ in range(rounds)
        ]
        engine.close()
    return found


def measure(seconds: str, rounds: int) -> dict[str, Any]:
    clock = time.process_time if seconds == "cpu_seconds" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        converted = convert(Path(folder), 10_000, VOCAB_SIZES, rounds, clock)
    return {"convert": converted, "wait": wait(rounds, NUM_STEPS, clock)}


def markdown(found: Mapping[str, Any]) -> str:
    """Formats the tables. Rates are medians over rounds; ratios are of adjacent runs, as median (lowest to highest)."""
    lines = [
        *taken_on(found, found["rounds"]),
        "",
        f"| from files | Heed, tokens per second | `encode_batch` alone | Heed / alone, aim {RATE_AIM} |",
        "|---|---|---|---|",
    ]
    for name, row in found["convert"].items():
        rates = [(row["tokens"] / run["heed"], row["library_tokens"] / run["library"]) for run in row["runs"]]
        ours, alone = (median(side) for side in zip(*rates, strict=True))
        ratios = [heed / library for heed, library in rates]
        lines.append(f"| {name} | {ours:,.0f} | {alone:,.0f} | {spread(ratios, '.2f')} |")
    lines += [
        "",
        f"| the demo's size, {BATCH_SIZE} rows of 97 | step, ms | its data, ms | share, aim below {WAIT_AIM:.0%} |",
        "|---|---|---|---|",
    ]
    for name, runs in found["wait"].items():
        step, fetch = (1000 * median(run[part] for run in runs) for part in ("step", "fetch"))
        shares = [run["fetch"] / run["step"] for run in runs]
        lines.append(f"| {name} | {step:.1f} | {fetch:.2f} | {spread(shares, '.2%')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n" + json.dumps(measure(sys.argv[1], int(sys.argv[2]))), flush=True)
