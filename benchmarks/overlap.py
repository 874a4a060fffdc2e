"""Times the same PPO run on-policy and sampled one iteration ahead: `python -m benchmarks.overlap [PAIRS]`.

It also times the scorer's and the learner's passes over a rollout: at the same time, and one after another. There is
one learner, one generator and one scorer, each on one thread, with models of 2M random weights. Runs of both kinds
alternate, because a machine's speed may vary.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import ray
import torch
from torch import Tensor

from cluster.connection import disconnect
from cluster.group import WorkerGroup
from cluster.remote import Pending
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.algorithm import GAE, KLConfig
from ppo.config import Asynchronous, Disaggregated, PPOConfig
from ppo.controller import PPOController
from ppo.initial_models import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.rollout import Rollout
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig

SHAPE = ModelConfig(
    vocab_size=512,
    max_position_embeddings=128,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=48,
    intermediate_size=768,
)
PROMPTS = [[5 + number % 7] * 16 for number in range(64)]
NUM_ITERATIONS = 6
PASS_ROUNDS = 9
RANKS = ("learner", "generator", "scorer")


def main() -> None:
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    runs: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        models = make_parents(Path(folder))
        groups = [WorkerGroup(1) for _ in RANKS]
        for group in groups:
            group.run("threads", torch.set_num_threads, 1)
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
            for max_staleness, seconds in runs.items():
                seconds.append(timed_run(groups, models, max_staleness))
        disconnect()
    on_policy, ahead = (median(seconds) / NUM_ITERATIONS for seconds in runs.values())
    print(f"{on_policy:.2f} s per iteration on-policy, {ahead:.2f} s ahead: {ahead / on_policy:.2f}")


def timed_run(groups: list[WorkerGroup], models: InitialModels, max_staleness: int) -> float:
    """Returns the seconds of all iterations; prints how long the learner waited and each rank's CPU seconds."""
    config = ppo_config(max_staleness)
    learners, generators, scorers = groups
    roles = Roles.on_groups(
        config, EngineConfig(trackers=()), models, [], learners=learners, generators=generators, scorers=scorers
    )
    controller = PPOController(config, roles, PROMPTS, models.scale, num_pretraining_rows=0, seed=0)
    before = [group.run("clock", time.process_time)[0] for group in groups]
    begun, waited = time.monotonic(), 0.0
    for iteration in range(NUM_ITERATIONS):
        asked = time.monotonic()
        controller.start_sampling(iteration)
        controller.in_flight[iteration]()
        waited += time.monotonic() - asked
        controller.step(iteration)
    seconds = time.monotonic() - begun
    computed = [group.run("clock", time.process_time)[0] - start for group, start in zip(groups, before, strict=True)]
    ranks = ", ".join(f"{name} {used:.1f}" for name, used in zip(RANKS, computed, strict=True))
    print(
        f"max_staleness {max_staleness}: {seconds:.1f} s, {waited:.1f} waited for rollouts; CPU seconds: {ranks}",
        flush=True,
    )
    in_turn, together = timed_passes(roles, controller)
    print(f"passes in turn {in_turn:.2f} s, together {together:.2f} s: {together / in_turn:.2f}", flush=True)
    roles.close()
    return seconds


def timed_passes(roles: Roles, controller: PPOController) -> tuple[float, float]:
    """Returns median seconds of a rollout's scores, log-probs, reference log-probs and values, in turn and together."""
    rows = list(range(len(PROMPTS)))
    rollout = roles.generators.start_sampling(rows, controller.prompts, rows)()
    whole = [torch.arange(len(rollout))]
    starts: tuple[Callable[[Rollout], Pending[Tensor]], ...] = (
        roles.scorers.start_scores,
        lambda rollout: roles.learners.start_policy_logprobs(rollout, whole),
        lambda rollout: roles.scorers.start_reference_logprobs(rollout, whole),
        lambda rollout: roles.learners.start_values(rollout, whole),
    )
    in_turn, together = list[float](), list[float]()
    for _ in range(PASS_ROUNDS):
        begun = time.monotonic()
        for start in starts:
            start(rollout)()
        in_turn.append(time.monotonic() - begun)
        begun = time.monotonic()
        for wait in [start(rollout) for start in starts]:
            wait()
        together.append(time.monotonic() - begun)
    return median(in_turn), median(together)


def ppo_config(max_staleness: int) -> PPOConfig:
    optimizer = OptimizerConfig(learning_rate=1e-4, schedule="constant")
    return PPOConfig(
        placement=Asynchronous(max_staleness=max_staleness) if max_staleness else Disaggregated(),
        prompts=DataConfig(source="unread"),
        num_iterations=NUM_ITERATIONS,
        rollout_batch_size=len(PROMPTS),
        num_epochs=1,
        minibatch=BatchConfig(batch_size=32, micro_batch_size=32),
        max_new_tokens=96,
        policy_optimizer=optimizer,
        advantage=GAE(value_optimizer=optimizer),
        kl=KLConfig(coef=0.1),
        save_every_iterations=NUM_ITERATIONS,
    )


def make_parents(folder: Path) -> InitialModels:
    """Writes an SFT policy and a reward model with random weights."""
    tokenizer = Tokenizer.train(["one red bird saw the cat on the mat"] * 9, SHAPE.vocab_size, "chat")
    for name, model in (("sft", LanguageModel(SHAPE)), ("reward", ScalarModel(SHAPE))):
        init_weights(model, 0)
        save_model(folder / name, model, model.state_dict(), tokenizer)
    return InitialModels(folder / "sft", folder / "reward", ScoreScale(0.0, 1.0), None)


if __name__ == "__main__":
    main()
