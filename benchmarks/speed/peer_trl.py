"""Measures TRL's PPOTrainer, RewardTrainer and SFTTrainer.

Gradient checkpointing, which TRL turns on by default, is off: it would cost time, and memory is not short here.
"""

from itertools import combinations
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.speed.protocol import Clock, Measure, Task, main

LIBRARY = f"TRL {trl.__version__}"


class Ticks(TrainerCallback):
    """Ticks the clock at the end of each step. On average over the data, all steps do the same amount of work."""

    def __init__(self, clock: Clock, amount: float) -> None:
        self.clock, self.amount = clock, amount

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.tick(self.amount)


def arguments(task: Task) -> dict[str, Any]:
    """The arguments that all trainers share."""
    return {
        "output_dir": str(task.path / f"trl-{task.kind}"),
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": False,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def language_model(task: Task, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(task.path / "policy", dtype=dtype)


def scalar_model(task: Task, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(task.path / "reward", dtype=dtype, num_labels=1)


def measure_sft(task: Task, clock: Clock) -> str:
    conversations = task.read("conversations")
    dataset = Dataset.from_list(
        [
            {"input_ids": tokens, "completion_mask": [int(place >= start) for place in range(len(tokens))]}
            for tokens, start in conversations
        ]
    )
    trainer = trl.SFTTrainer(
        model=language_model(task),
        args=trl.SFTConfig(
            **arguments(task),
            max_steps=task.num_steps,
            per_device_train_batch_size=task.batch,
            max_length=task.seq_len,
            packing=True,
            completion_only_loss=True,
        ),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(task.path / "policy"),
    )
    tokens_a_row = sum(len(tokens) for tokens, _ in conversations) / len(trainer.train_dataset)
    trainer.add_callback(Ticks(clock, tokens_a_row * task.batch))
    trainer.train()
    return LIBRARY


def measure_reward(task: Task, clock: Clock) -> str:
    """Turns comparisons of K responses into their K(K - 1)/2 pairs; a step has all pairs of its comparisons."""
    comparisons = task.read("comparisons")
    pairs = [
        {"chosen_ids": better, "rejected_ids": worse}
        for sequences in comparisons
        for better, worse in combinations(sequences, 2)
    ]
    pairs_a_comparison = len(pairs) // len(comparisons)
    trainer = trl.RewardTrainer(
        model=scalar_model(task),
        args=trl.RewardConfig(
            **arguments(task),
            max_steps=task.num_steps,
            per_device_train_batch_size=task.batch * pairs_a_comparison,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(task.path / "policy"),
        callbacks=[Ticks(clock, task.batch)],
    )
    trainer.train()
    return LIBRARY


def measure_ppo(task: Task, clock: Clock) -> str:
    """All four models are in bf16, including weights: fp32 weights would sample in fp32, which is slower."""
    dtype = torch.bfloat16
    trainer = PPOTrainer(
        args=PPOConfig(
            **arguments(task),
            total_episodes=task.num_steps * task.batch,
            per_device_train_batch_size=task.micro_batch,
            gradient_accumulation_steps=task.batch // task.micro_batch,
            num_ppo_epochs=1,
            num_mini_batches=1,
            response_length=task.response_tokens,
            temperature=1.0,
            local_rollout_forward_batch_size=task.batch,
            num_sample_generations=0,
        ),
        processing_class=AutoTokenizer.from_pretrained(task.path / "policy"),
        model=language_model(task, dtype),
        ref_model=language_model(task, dtype),
        reward_model=scalar_model(task, dtype),
        value_model=scalar_model(task, dtype),
        train_dataset=Dataset.from_dict({"input_ids": task.read("prompts")}),
        callbacks=[Ticks(clock, task.batch * task.response_tokens)],
    )
    trainer.train()
    return LIBRARY


KINDS: dict[str, Measure] = {"sft": measure_sft, "reward": measure_reward, "ppo": measure_ppo}

if __name__ == "__main__":
    main(KINDS)
