"""Heed's own measurements, each through the code that its stages run."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.protocol import Clock, Measure, Task, main
from lm.generation import generate
from lm.model import LanguageModel, ScalarModel
from lm.sampling import Choice
from lm.source import ModelSource
from lm.weights import ModelFolder, load_model
from ppo.algorithm import GAE, KLConfig
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from reward.comparisons import Comparison, Verdict
from reward.objective import AuxiliaryParameters, LearnerSource, RankingObjective
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import Engine
from training.loop import LoopConfig, Objective, TrainingLoop
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import IntArray, pack

LIBRARY = "heed"
ENGINE = EngineConfig(precision="bf16", trackers=())
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, schedule="constant")
NO_END: tuple[int, ...] = ()  # no token ends a response, so that all have the same length


def measure_generation(task: Task, clock: Clock) -> str:
    model = load_model(task.path / "policy", LanguageModel).to(torch.bfloat16).eval()
    prompts = task.read("prompts")[: task.batch]
    for step in range(task.num_steps):
        seeds = range(step * task.batch, (step + 1) * task.batch)
        sampled = generate(
            model,
            prompts,
            max_new_tokens=task.response_tokens,
            end_ids=NO_END,
            choice=Choice(),
            seeds=seeds,
            max_rows=task.batch,
        )
        clock.tick(sum(map(len, sampled.responses)))
    return LIBRARY


@dataclass
class Timed:
    """An objective that ticks the clock at every step: the loop calls `count` once per step, at its beginning."""

    objective: Objective[Any]
    clock: Clock
    amount: Callable[[IntArray], float]
    running: float | None = None

    def __len__(self) -> int:
        return len(self.objective)

    def count(self, rows: IntArray) -> float:
        if self.running is not None:
            self.clock.tick(self.running)
        self.running = self.amount(rows)
        return self.objective.count(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return self.objective.num_tokens(rows)

    def loss(
        self, model: Any, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective.loss(model, rows, device, seed)


def train(
    task: Task, clock: Clock, source: ModelSource[Any], objective: Objective[Any], amount: Callable[[IntArray], float]
) -> str:
    """Runs steps of the stages' own loop, with its log; the last one is started but not timed."""
    engine: Engine[Any] = Engine(source, OPTIMIZER, ENGINE, world_size=1, micro_batch=task.batch)
    batch = BatchConfig(batch_size=task.batch, micro_batch_size=task.batch)
    never = task.num_steps + 1
    config = LoopConfig("speed", 0, task.num_steps + 1, batch, save_every_steps=never, evaluate_every_steps=never)
    timed = Timed(objective, clock, amount)
    folder = tempfile.mkdtemp(prefix=f"run-{task.kind}-", dir=task.path)  # another round must not resume this one
    TrainingLoop(engine, config, timed, OneRow(objective), Path(folder)).run()
    engine.close()
    return LIBRARY


@dataclass(frozen=True)
class OneRow:
    """The first row of an objective. It shortens the loop's final evaluation, which is not measured."""

    objective: Objective[Any]

    def __len__(self) -> int:
        return 1

    def count(self, rows: IntArray) -> float:
        return self.objective.count(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return self.objective.num_tokens(rows)

    def loss(
        self, model: Any, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective.loss(model, rows, device, seed)


def measure_training(task: Task, clock: Clock) -> str:
    objective = CausalLMObjective(np.array(task.read("rows"), dtype=np.int32))
    return train(task, clock, ModelFolder(task.path / "policy", LanguageModel), objective, objective.num_tokens)


def measure_sft(task: Task, clock: Clock) -> str:
    sequences = [(tokens, responses(tokens, start)) for tokens, start in task.read("conversations")]
    objective = PackedObjective(pack(sequences, task.seq_len, pad_id=0))
    return train(task, clock, ModelFolder(task.path / "policy", LanguageModel), objective, objective.num_tokens)


def responses(tokens: Sequence[int], start: int) -> list[bool]:
    return [place >= start for place in range(len(tokens))]


def measure_reward(task: Task, clock: Clock) -> str:
    comparisons = [
        Comparison(str(number), tuple(map(tuple, sequences)), (Verdict(tuple(range(1, len(sequences) + 1))),))
        for number, sequences in enumerate(task.read("comparisons"))
    ]
    source = LearnerSource(ModelFolder(task.path / "reward", ScalarModel), AuxiliaryParameters())
    return train(task, clock, source, RankingObjective(comparisons, "decoder"), len)


def ppo_config(num_iterations: int, rollout_batch_size: int, minibatch: BatchConfig, response_tokens: int) -> PPOConfig:
    """One epoch with a KL penalty and no other extras, without checkpoints; the prompts are passed in."""
    return PPOConfig(
        prompts=DataConfig(source="unread"),
        num_iterations=num_iterations,
        rollout_batch_size=rollout_batch_size,
        num_epochs=1,
        minibatch=minibatch,
        max_new_tokens=response_tokens,
        policy_optimizer=OPTIMIZER,
        advantage=GAE(value_optimizer=OPTIMIZER),
        kl=KLConfig(coef=0.05),
        save_every_iterations=num_iterations,
    )


def measure_ppo(task: Task, clock: Clock) -> str:
    """Runs iterations of one worker with all roles in this process: policy, value function, reference, reward model."""
    models = InitialModels(task.path / "policy", task.path / "reward", ScoreScale(0.0, 1.0), None)
    batch = BatchConfig(batch_size=task.batch, micro_batch_size=task.micro_batch)
    config = ppo_config(task.num_steps, task.batch, batch, task.response_tokens)
    roles = Roles.in_process(config, ENGINE, models)
    controller = PPOController(config, roles, task.read("prompts"), models.scale, num_pretraining_rows=0, seed=0)
    for iteration in range(task.num_steps):
        metrics = controller.step(iteration)
        clock.tick(metrics["response_tokens"] * task.batch)
    roles.close()
    return LIBRARY


KINDS: dict[str, Measure] = {
    "generate": measure_generation,
    "train": measure_training,
    "sft": measure_sft,
    "reward": measure_reward,
    "ppo": measure_ppo,
}

if __name__ == "__main__":
    main(KINDS)
