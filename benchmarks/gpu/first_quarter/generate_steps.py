"""The steps that sample text, and `peers`: Transformers' own model of the same shape, trained and sampled."""

from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.counts import decoded_bytes, training_flops
from benchmarks.gpu.first_quarter.context import LLAMA8, LLAMA13, QWEN, Context, Drawn, Fields, shape
from benchmarks.gpu.first_quarter.kernels import note_profile
from benchmarks.gpu.rows import Generation
from benchmarks.speed.own import NO_END
from lm.config import ModelConfig
from lm.decoding import FixedSteps, StepKind
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.source import load

PROFILED_TOKENS = 65
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


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


def decode(ctx: Context, fields: Fields, response_tokens: int, *, compared: tuple[StepKind, ...] = ()) -> None:
    """Notes milliseconds per token and the share of the memory's bandwidth, with steps that are kept between calls.

    PPO samples that way. `compared` are other kinds of steps, and `first_seconds` includes recording a kept step.
    """
    model = shape(fields, tiny=ctx.tiny)
    sizes = Generation(model, 4, 8, 12) if ctx.tiny else Generation(model, 128, 256, response_tokens)
    ctx.release_memory()
    sampling = Sampling(ctx, sizes)
    sampling.seconds(2, "eager")
    reading = sampling.seconds(1, "eager")
    flops = sizes.batch * sizes.prompt_tokens * training_flops(model, sizes.prompt_tokens) / 3
    ctx.note(prompt_seconds=reading, prompt_tflops=flops / reading / 1e12)
    kept = FixedSteps(sampling.model)
    with ctx.attempt("kept"):
        _measure(sampling, "kept", kept, reading)
        ctx.note(recordings=kept.num_recordings)
        profiled = 6 if ctx.tiny else PROFILED_TOKENS
        note_profile(ctx, lambda: sampling.seconds(profiled, kept, 2000), "decode")
    kept.forget()
    for kind in compared:
        with ctx.attempt(kind):
            _measure(sampling, kind, kind, reading)
    ctx.note(peak_gib=ctx.peak_gib())


def _measure(sampling: Sampling, name: str, steps: StepKind | FixedSteps, reading: float) -> None:
    """Notes figures of a kind of steps. `reading` is the seconds of one-token responses: the prompts' pass alone."""
    ctx, sizes = sampling.ctx, sampling.sizes
    first = sampling.seconds(sizes.response_tokens, steps)
    taken = sampling.seconds(sizes.response_tokens, steps, 1000) - reading
    num_steps, rate = sizes.response_tokens - 1, decoded_bytes(sizes) / taken
    figures = {
        "first_seconds": first,
        "ms_per_token": 1000 * taken / num_steps,
        "tokens_per_second": sizes.batch * num_steps / taken,
        "bytes_per_second": rate,
        "bandwidth_share": rate / ctx.hardware.bytes_per_second,
    }
    ctx.note(**{f"{name}_{figure}": value for figure, value in figures.items()})


def generation_05b(ctx: Context) -> None:
    decode(ctx, QWEN, 256, compared=("fixed", "eager"))


def generation_13b(ctx: Context) -> None:
    decode(ctx, LLAMA13, 192)


def generation_8b(ctx: Context) -> None:
    decode(ctx, LLAMA8, 128)


def peers(ctx: Context) -> None:
    """Transformers' Qwen2 of the same shape: training steps under autocast with fused AdamW, and `generate`."""
    config = shape(QWEN, tiny=ctx.tiny)
    model = _transformers_model(config, ctx.device)
    with ctx.attempt("train"):
        _train_peer(ctx, model, config)
    with ctx.attempt("generate"):
        _sample_peer(ctx, model.to(torch.bfloat16).eval(), config)


def _transformers_model(config: ModelConfig, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    with device:
        return Qwen2ForCausalLM(Qwen2Config(**fields | {"attn_implementation": "sdpa"}))


def _train_peer(ctx: Context, model: Any, config: ModelConfig) -> None:
    micro_batch, num_micro_batches, seq_len = (2, 2, 32) if ctx.tiny else (16, 4, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, (micro_batch, seq_len), device=ctx.device)

    def step() -> None:
        for _ in range(num_micro_batches):
            with torch.autocast(ctx.device.type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / num_micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ctx.release_memory()
    step()
    taken = []
    for _ in range(3):
        started = ctx.now()
        step()
        taken.append(ctx.now() - started)
    rate = micro_batch * num_micro_batches * seq_len / median(taken)
    ctx.note(
        train_tokens_per_second=rate,
        train_mfu=rate * training_flops(config, seq_len) / ctx.hardware.flops,
        train_peak_gib=ctx.peak_gib(),
    )
    note_profile(ctx, step, "train")


def _sample_peer(ctx: Context, model: Any, config: ModelConfig) -> None:
    rows, prompt_tokens, response_tokens = (2, 8, 4) if ctx.tiny else (128, 256, 64)
    prompt = torch.randint(0, config.vocab_size, (rows, prompt_tokens), device=ctx.device)
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
    seconds = 0.0
    for number in (2, response_tokens):  # the first only warms up
        started = ctx.now()
        with torch.inference_mode():
            model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=number,
                max_new_tokens=number,
                **options,
            )
        seconds = ctx.now() - started
    ctx.note(generate_tokens_per_second=rows * response_tokens / seconds, generate_seconds=seconds)
