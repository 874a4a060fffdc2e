"""Measures transformers' `generate`, and a training step of its model with PyTorch's AdamW."""

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.speed.protocol import Clock, Measure, Task, main

LIBRARY = f"transformers {transformers.__version__}"


def measure_generation(task: Task, clock: Clock) -> str:
    model = AutoModelForCausalLM.from_pretrained(task.path / "policy", dtype=torch.bfloat16).eval()
    prompts = torch.tensor(task.read("prompts")[: task.batch])
    for _ in range(task.num_steps):
        sampled = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=task.response_tokens,
            eos_token_id=None,  # so that all responses have the same length
            pad_token_id=0,
        )
        clock.tick(sampled.numel() - prompts.numel())
    return LIBRARY


def measure_training(task: Task, clock: Clock) -> str:
    model = AutoModelForCausalLM.from_pretrained(task.path / "policy", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rows = torch.tensor(task.read("rows"))
    for step in range(task.num_steps):
        places = torch.arange(step * task.batch, (step + 1) * task.batch) % len(rows)
        tokens, targets = rows[places, :-1], rows[places, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(tokens.numel())
    return LIBRARY


KINDS: dict[str, Measure] = {"generate": measure_generation, "train": measure_training}

if __name__ == "__main__":
    main(KINDS)
