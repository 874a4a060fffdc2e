"""The steps that sample text: more rows at once, and the workload of a peer's benchmark."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.counts import decoded_bytes, training_flops
from benchmarks.gpu.quarter.context import QWEN, Context, Drawn, shape
from benchmarks.gpu.quarter.profiles import note_profile
from benchmarks.gpu.rows import Generation
from benchmarks.speed.own import NO_END
from lm.config import ModelConfig
from lm.decoding import FixedSteps, StepKind
from lm.generation import Partial, generate, generate_in_rounds
from lm.model import LanguageModel
from lm.samplers.engine import SentWeights, held_tensors, take
from lm.sampling import Choice
from lm.source import load

PROFILED_TOKENS = 65
ROWS = (128, 256, 512)


class Sampling:
    """A model with random bf16 weights, and its prompts: all of one length. Nothing ends early."""

    def __init__(self, ctx: Context, sizes: Generation) -> None:
        self.ctx, self.sizes = ctx, sizes
        source = Drawn(partial(LanguageModel, sizes.model), ctx.device)
        self.model = load(source, ctx.device, torch.bfloat16).eval()
        drawn = np.random.default_rng(0).integers(3, sizes.model.vocab_size, (sizes.batch, sizes.prompt_tokens))
        self.prompts: list[list[int]] = drawn.tolist()

    def seconds(self, response_tokens: int, steps: StepKind | FixedSteps, seed: int = 0) -> float:
        """Returns how long it takes to sample so many tokens for each prompt."""
        started = self.ctx.now()
        found = generate(
            self.model,
            self.prompts,
            max_new_tokens=response_tokens,
            end_ids=NO_END,
            choice=Choice(),
            seeds=range(seed, seed + self.sizes.batch),
            max_rows=self.sizes.batch,
            steps=steps,
        )
        assert {len(response) for response in found.responses} == {response_tokens}
        return self.ctx.now() - started


def decode(ctx: Context, model: ModelConfig, rows: int, response_tokens: int, prefix: str) -> None:
    """Notes milliseconds per token and the share of the memory's bandwidth, with steps that are kept between calls.

    `first_seconds` includes recording the step.
    """
    sizes = Generation(model, 4, 8, 12) if ctx.tiny else Generation(model, rows, 256, response_tokens)
    ctx.release_memory()
    sampling = Sampling(ctx, sizes)
    sampling.seconds(2, "eager")
    reading = sampling.seconds(1, "eager")
    flops = sizes.batch * sizes.prompt_tokens * training_flops(model, sizes.prompt_tokens) / 3
    # A mixture counts the tokens of each expert on the CPU, which no recording may do.
    kept = None if model.num_experts else FixedSteps(sampling.model)
    first = sampling.seconds(sizes.response_tokens, kept or "eager")
    taken = sampling.seconds(sizes.response_tokens, kept or "eager", 1000) - reading
    num_steps, rate = sizes.response_tokens - 1, decoded_bytes(sizes) / taken
    figures = {
        "prompt_tflops": flops / reading / 1e12,
        "first_seconds": first,
        "ms_per_token": 1000 * taken / num_steps,
        "tokens_per_second": sizes.batch * num_steps / taken,
        "bandwidth_share": rate / ctx.hardware.bytes_per_second,
        "recordings": kept.num_recordings if kept else 0,
        "peak_gib": ctx.peak_gib(),
    }
    ctx.note(**{f"{prefix}{figure}": value for figure, value in figures.items()})
    profiled = 6 if ctx.tiny else PROFILED_TOKENS
    note_profile(ctx, lambda: sampling.seconds(profiled, kept or "eager", 2000), f"{prefix}decode")
    if kept:
        kept.forget()


def rows(ctx: Context) -> None:
    """Samples from the 0.5B model with 128, 256 and 512 rows at once."""
    for number in ROWS:
        with ctx.attempt(f"rows{number}"):
            decode(ctx, shape(QWEN, tiny=ctx.tiny), number, 256, f"rows{number}_")


def continuous(ctx: Context) -> None:
    """Samples in rounds, with new weights after every third, as PPO's placement `continuous`; and all in one call.

    The weights that come are those that are there, so both draw the same tokens where rounding lets them.
    """
    sizes = Generation(shape(QWEN, tiny=ctx.tiny), *((4, 8, 12) if ctx.tiny else (128, 256, 144)))
    ctx.release_memory()
    sampling, most = Sampling(ctx, sizes), sizes.response_tokens
    model, steps = sampling.model, FixedSteps(sampling.model)
    whole = generate(
        model, sampling.prompts, max_new_tokens=most, end_ids=NO_END, choice=Choice(), seeds=range(sizes.batch),
        max_rows=sizes.batch, steps=steps,
    ).responses  # fmt: skip
    rows = [Partial(number, prompt, number) for number, prompt in enumerate(sampling.prompts)]
    num_updates, started = 0, ctx.now()
    while len(rows[0].tokens) < most:
        entering: list[Sequence[Partial]] = [[], [], rows]

        def next_round(_: Sequence[Partial], entering: list[Sequence[Partial]] = entering) -> Sequence[Partial] | None:
            return entering.pop() if entering else None

        generate_in_rounds(
            model, next_round, num_steps=2 if ctx.tiny else 16, num_rows=sizes.batch,
            num_columns=sizes.prompt_tokens + most, max_new_tokens=most, end_ids=NO_END, choice=Choice(), steps=steps,
        )  # fmt: skip
        take(model, [SentWeights.of({name: tensor.clone() for name, tensor in held_tensors(model).items()})])
        num_updates += 1
    seconds = ctx.now() - started
    assert {len(row.tokens) for row in rows} == {most}
    equal = [np.equal(row.tokens, response).mean() for row, response in zip(rows, whole, strict=True)]
    rate = sizes.batch * most / seconds
    ctx.note(tokens_per_second=rate, updates=num_updates, equal_share=float(np.mean(equal)), peak_gib=ctx.peak_gib())
    steps.forget()


def workload(ctx: Context) -> tuple[list[list[int]], list[int]]:
    """Returns prompts, and the tokens to sample for each: nano-vllm's bench.py draws 256 of both between 100 and 1,024.

    (github.com/GeeeekExplorer/nano-vllm)
    """
    number, least, most = (6, 3, 12) if ctx.tiny else (256, 100, 1024)
    drawn = np.random.default_rng(0)
    lengths, responses = (drawn.integers(least, most + 1, number).tolist() for _ in range(2))
    return [drawn.integers(3, 400 if ctx.tiny else 10_000, length).tolist() for length in lengths], responses


def sample_workload(ctx: Context) -> None:
    """Notes Heed's tokens per second on the workload, with the prompts' pass, in a second call."""
    prompts, responses = workload(ctx)
    model = load(
        Drawn(partial(LanguageModel, shape(QWEN, tiny=ctx.tiny)), ctx.device), ctx.device, torch.bfloat16
    ).eval()
    kept, seconds = FixedSteps(model), 0.0
    for call in range(2):
        started = ctx.now()
        found = generate(
            model,
            prompts,
            max_new_tokens=responses,
            end_ids=NO_END,
            choice=Choice(),
            seeds=range(call * len(prompts), (call + 1) * len(prompts)),
            max_rows=len(prompts),
            steps=kept,
        )
        seconds = ctx.now() - started
        assert [len(response) for response in found.responses] == responses
    ctx.note(heed_workload_tokens_per_second=sum(responses) / seconds, heed_workload_seconds=seconds)
    kept.forget()
