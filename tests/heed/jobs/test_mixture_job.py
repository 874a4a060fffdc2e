"""A mixture of experts in every stage of a job, on two ranks under ZeRO-3."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.weights import CONFIG
from training.metrics import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

WEIGHTS = "model.safetensors"
DEBUG_JOB = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
JOB = """
base = "{base}"
name = "mixture"
workers = 2
without = ["model", "compare", "dpo", {without}]
[engine]
zero_stage = 3
[model]
vocab_size = 512
max_position_embeddings = 160
hidden_size = 32
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 64
qk_norm = true
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 24
norm_topk_prob = true
mlp_only_layers = [0]
[ppo]
num_iterations = 4
save_every_iterations = 1
{ppo}
"""
GROUPS = 'advantage = { kind = "group_mean", samples_per_prompt = 4 }'
ADAPTERS = """
lora = { rank = 2, targets = "experts" }
[sft]
lora = { rank = 2, targets = "experts" }
[reward]
lora = { rank = 2, targets = "experts" }
"""
ALGORITHMS = {
    "PPO": ("", ""),
    "PPO with adapters": ("", ADAPTERS),
    "GRPO": ('"ppo.advantage"', GROUPS),
    "GRPO with adapters": ('"ppo.advantage"', GROUPS + ADAPTERS),
}


def job_of(folder: Path, algorithm: str) -> Path:
    job = folder / "mixture.toml"
    without, ppo = ALGORITHMS[algorithm]
    job.write_text(JOB.format(base=DEBUG_JOB, without=without, ppo=ppo), encoding="utf-8")
    return job


def check_whole(run: Path) -> None:
    for stage in ("sft", "reward", "ppo"):
        assert json.loads((run / stage / "model" / CONFIG).read_text())["model_type"] == "qwen3_moe", stage
    for line in read_metrics(run / "ppo" / "metrics.jsonl"):
        assert 0 <= line["routes_changed"] <= line["routes_changed_worst_layer"] < 0.5


def test_every_stage_trains_a_mixture(heed: Callable[..., Any], tmp_path: Path) -> None:
    whole = heed(
        "run", str(job_of(tmp_path, "GRPO with adapters")), "--runs", str(tmp_path), "--set", "ppo.num_iterations=2"
    )
    assert whole.wait(500) == 0, whole.output
    check_whole(tmp_path / "mixture")


@pytest.mark.nightly  # in CI, test_kill.py kills each kind of stage, and test_splits.py has this mixture's updates
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_killed_job_of_a_mixture_ends_with_the_same_bits(
    algorithm: str,
    heed: Callable[..., Any],
    num_steps: Callable[[Path], int],
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, algorithm)
    whole = heed("run", str(job), "--runs", str(tmp_path / "whole"))
    assert whole.wait(500) == 0, whole.output
    check_whole(tmp_path / "whole" / "mixture")
    killed = heed("run", str(job), "--runs", str(tmp_path / "killed"))
    while num_steps(tmp_path / "killed" / "mixture" / "ppo") < 2:
        assert killed.process.poll() is None, killed.output
        time.sleep(0.01)
    killed.kill_everything()
    again = heed("run", str(job), "--runs", str(tmp_path / "killed"))
    assert again.wait(500) == 0, again.output
    for stage in ("sft", "reward", "ppo"):
        models = [tmp_path / name / "mixture" / stage / "model" for name in ("killed", "whole")]
        assert models[0].joinpath(WEIGHTS).read_bytes() == models[1].joinpath(WEIGHTS).read_bytes(), stage
    metrics, again_metrics = (
        read_metrics(tmp_path / name / "mixture" / "ppo" / "metrics.jsonl") for name in ("whole", "killed")
    )
    for line, other in zip(metrics, again_metrics, strict=True):
        assert (line["routes_changed"], line["sampler_difference"]) == (
            other["routes_changed"],
            other["sampler_difference"],
        )
