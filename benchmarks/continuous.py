"""Measures what waiting for the longest response costs: PPO's placements by turns, on the same work.

Run `python -m benchmarks.continuous [--learning N]` in the root of the repository. A tenth of the prompts get responses
that are ten times as long. One rank samples and another learns, in processes of one thread each; each placement runs
twice, in turn, and the first iterations, which begin with short responses, are left out. `--learning` is the number of
passes that an iteration's updates make over its responses.
"""

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.group import WorkerGroup
from cluster.local_ray import lean_nodes
from cluster.worker import HeedFirst
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from training.config import EngineConfig

ENGINE = EngineConfig(precision="fp32", trackers=())
SHORT, LONG, LIMIT = 32, 320, 960  # mean lengths of both kinds, and the longest, in tokens
BATCH, NUM_ITERATIONS, LEFT_OUT, NUM_TURNS = 32, 14, 5, 2
PLACEMENTS: dict[str, dict[str, Any]] = {
    "disaggregated": {"kind": "disaggregated"},
    "asynchronous": {"kind": "asynchronous", "max_staleness": 1},
    "continuous": {"kind": "continuous", "max_staleness": 1},
}


def write_models(folder: Path) -> tuple[InitialModels, list[list[int]]]:
    """Write a policy and a reward model, and return them with the prompts.

    The policy's tokens are of two kinds, and each is followed by one of its own kind, or with probability 1 / SHORT or
    1 / LONG by the end: so a prompt's last token decides how long its response is. Blocks add nothing to the residual
    stream, but they compute all the same.
    """
    tokenizer = Tokenizer.train(["a few words for a tokenizer of bytes"], 300, "chat")
    config = ModelConfig(
        vocab_size=300, max_position_embeddings=1024, hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    policy, reward = LanguageModel(config), ScalarModel(config)
    init_weights(policy, 1)
    init_weights(reward, 2)
    short, long = range(100, 180), range(180, 260)
    kind_V = torch.zeros(config.vocab_size)
    kind_V[list(short)], kind_V[list(long)] = 1.0, -1.0
    sure = 20.0  # logit of a token of the same kind
    ends = [sure + math.log(len(kind) / (mean - 1)) for kind, mean in ((short, SHORT), (long, LONG))]
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                weight.zero_()
        policy.decoder.embedding.weight.zero_()
        policy.decoder.embedding.weight[:, 0], policy.decoder.embedding.weight[:, 1] = kind_V, 1.0
        policy.head.weight.zero_()
        scale = math.sqrt(config.hidden_size / 2)  # of both numbers after the norm
        policy.head.weight[:, 0] = sure / scale * kind_V
        end = policy.head.weight[tokenizer.end_id]
        end[0], end[1] = (ends[0] - ends[1]) / 2 / scale, (ends[0] + ends[1]) / 2 / scale
    save_model(folder / "sft", policy, policy.state_dict(), tokenizer)
    save_model(folder / "reward", reward, reward.state_dict(), tokenizer)
    prompts = [[short[row % 80], (long if row % 10 == 9 else short)[row % 80]] for row in range(BATCH * 10)]
    return InitialModels(folder / "sft", folder / "reward", ScoreScale(0.0, 1.0), None), prompts


def seconds_of(
    placement: str, models: InitialModels, prompts: list[list[int]], num_epochs: int
) -> tuple[float, dict[str, float]]:
    """Returns the seconds of an iteration, and its mean metrics."""
    optimizer = {"learning_rate": 1e-9}  # so that lengths stay
    config = PPOConfig.model_validate(
        {
            "prompts": {"source": "unread.jsonl"}, "num_iterations": NUM_ITERATIONS, "rollout_batch_size": BATCH,
            "num_epochs": num_epochs, "minibatch": {"batch_size": BATCH, "micro_batch_size": 8},
            "max_new_tokens": LIMIT, "policy_optimizer": optimizer, "save_every_iterations": NUM_ITERATIONS,
            "advantage": {"kind": "leave_one_out", "samples_per_prompt": 2}, "placement": PLACEMENTS[placement],
        }
    )  # fmt: skip
    limits = ClusterConfig(cpu_threads=1)
    with WorkerGroup(1, limits) as learners, WorkerGroup(1, limits) as generators:
        roles = Roles.on_groups(config, ENGINE, models, [], learners=learners, generators=generators, scorers=learners)
        controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=1, seed=3)
        metrics = list[dict[str, float]]()
        for iteration in range(NUM_ITERATIONS - 1):  # in the last one, generators have no more to do
            if iteration == LEFT_OUT:
                started = time.monotonic()
            metrics.append(controller.step(iteration) | dict(controller.phases.take()))
        seconds = (time.monotonic() - started) / (NUM_ITERATIONS - 1 - LEFT_OUT)
        roles.close()
    counted = metrics[LEFT_OUT:]
    return seconds, {name: sum(line.get(name, 0.0) for line in counted) / len(counted) for name in counted[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learning", type=int, default=1)
    num_epochs = parser.parse_args().learning
    with lean_nodes():
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, job_config=HeedFirst())
    found: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    with tempfile.TemporaryDirectory() as folder:
        models, prompts = write_models(Path(folder))
        for _ in range(NUM_TURNS):
            for placement, times in found.items():
                seconds, means = seconds_of(placement, models, prompts, num_epochs)
                times.append(seconds)
                print(
                    f"{placement}: {seconds:.2f} s per iteration; waits {means['sampling_seconds']:.2f} s for responses"
                    f" of {means['response_tokens']:.0f} tokens; age of tokens {means.get('token_age', 0):.2f}",
                    flush=True,
                )
    disconnect()
    whole = sum(found["disaggregated"])
    for placement, times in found.items():
        print(f"{placement}: {sum(times) / whole:.2f} of disaggregated")


if __name__ == "__main__":
    main()
