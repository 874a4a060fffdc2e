"""The step `peers`: what needs torch and Transformers alone, on a model of the same shape, next to Heed's own."""

from statistics import median
from typing import Any

import torch

from benchmarks.gpu.counts import training_flops
from benchmarks.gpu.quarter.context import QWEN, Context, shape
from benchmarks.gpu.quarter.profiles import note_profile
from benchmarks.gpu.quarter.sampling_steps import sample_workload, workload
from lm.config import ModelConfig

SHARED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def peers(ctx: Context) -> None:
    """Transformers' Qwen2 trains, plainly and compiled as a whole, and samples a workload by continuous batching."""
    config = shape(QWEN, tiny=ctx.tiny)
    model = transformers_model(config, ctx.device)
    with ctx.attempt("train"):
        _train(ctx, model, model, config, "train_")
    if ctx.on_gpu:
        with ctx.attempt("compiled"):
            _train(ctx, model, torch.compile(model), config, "compiled_")
    del model
    ctx.release_memory()
    with ctx.attempt("heed_workload"):
        sample_workload(ctx)
    ctx.release_memory()
    with ctx.attempt("workload"):
        _sample_workload(ctx, transformers_model(config, ctx.device).to(torch.bfloat16).eval())


def transformers_model(config: ModelConfig, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    with device:
        return Qwen2ForCausalLM(Qwen2Config(**fields | {"attn_implementation": "sdpa"}))


def _train(ctx: Context, model: Any, run: Any, config: ModelConfig, prefix: str) -> None:
    """Trains under autocast with fused AdamW. `run` is the model as it is called, compiled or not."""
    micro_batch, num_micro_batches, seq_len = (2, 2, 32) if ctx.tiny else (16, 4, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, (micro_batch, seq_len), device=ctx.device)

    def step() -> None:
        for _ in range(num_micro_batches):
            with torch.autocast(ctx.device.type, torch.bfloat16):
                loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss / num_micro_batches
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
    figures = {
        "tokens_per_second": rate,
        "mfu": rate * training_flops(config, seq_len) / ctx.hardware.flops,
        "peak_gib": ctx.peak_gib(),
    }
    ctx.note(**{f"{prefix}{name}": value for name, value in figures.items()})
    note_profile(ctx, step, prefix.removesuffix("_"))


def _sample_workload(ctx: Context, model: Any) -> None:
    """Samples by `generate_batch`. Its requests have one limit, the workload's mean, so that as much is sampled."""
    from transformers import GenerationConfig

    prompts, responses = workload(ctx)
    number = sum(responses) // len(responses)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=number, min_new_tokens=number, eos_token_id=-1, pad_token_id=0
    )
    started = ctx.now()
    found = model.generate_batch(prompts, generation_config=config)
    seconds = ctx.now() - started
    sampled = sum(len(output.generated_tokens) for output in found.values())
    ctx.note(workload_tokens_per_second=sampled / seconds, workload_tokens=sampled)
