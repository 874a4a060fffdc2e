"""What `heed plan` advises for a job that does not fit, and how it counts a node's memory."""

import shlex
from pathlib import Path

import pytest
from rich.markup import escape
from typer.testing import CliRunner

from heed.cli import app
from heed.jobs.job_file import load_job
from heed.jobs.plan import RANK, Plan, Setting, advice, changes_that_fit, make_plan
from heed.jobs.times import GIB, GPUS
from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model

FAST = "ppo.memory=fast"
CLUSTER = Path(__file__).parents[3] / "configs" / "jobs" / "cluster"


def plan_of(name: str, gpu: str, *overrides: str) -> Plan:
    setting = Setting(GPUS[gpu], share_of_peak=0.4, assumed_rows=100_000)
    return make_plan(load_job(CLUSTER / f"{name}.toml", overrides, opens_models=False), setting)


def peak(plan: Plan, stage: str) -> int:
    return next(found.peak for found in plan.stages if found.name == stage)


def test_the_changes_make_it_fit_and_none_is_needless() -> None:
    name, gpu = "hh-8b-8gpus", "l40s"
    whole = ("engine.zero_stage=1", "workers=4")
    plan = plan_of(name, gpu, *whole)
    assert not plan.fits
    found = changes_that_fit(CLUSTER / f"{name}.toml", whole, plan)
    assert found is not None
    changes, fitting = found
    assert fitting.fits
    assert plan_of(name, gpu, *whole, *changes).excess == 0
    for change in changes:
        assert plan_of(name, gpu, *whole, *(other for other in changes if other != change)).excess > 0
    lines = advice(CLUSTER / f"{name}.toml", whole, plan)
    assert f"--set {escape(shlex.quote(changes[0]))}" in lines[0]
    assert lines[1] == "[bold]fits as it is[/] on h200 (--gpu h200)"


def test_a_policy_too_large_for_a_gpu_is_sampled_by_a_team() -> None:
    name, alone = "hh-70b-64gpus", ("ppo.sampler.tensor_parallel_size=1",)
    plan, shared = plan_of(name, "h100", *alone), plan_of(name, "h100")
    assert [stage.name for stage in plan.stages if stage.peak > GPUS["h100"].memory_bytes] == ["ppo"]
    found = changes_that_fit(CLUSTER / f"{name}.toml", alone, plan)
    assert found is not None
    (change,) = found[0]
    assert change.startswith("ppo.sampler.tensor_parallel_size=")
    # 70.6 GB are 131.5 GiB in bf16. Of these the embedding, 1.96 GiB, is whole on every rank, and norms are negligible.
    weights = {size: held_by(found_plan, "generator") / GIB for size, found_plan in ((1, plan), (4, shared))}
    assert weights[4] == pytest.approx((weights[1] - 1.957) / 4 + 1.957, abs=0.01)


def held_by(plan: Plan, part: str) -> int:
    (memory,) = next(stage.memory for stage in plan.stages if stage.name == "ppo").values()
    return memory.phases["generate"][part]


def test_smaller_micro_batches_come_before_anything_that_costs_more_time() -> None:
    name = "hh-0.5b-1gpu"
    overrides = ("sft.batch.micro_batch_size=128",)
    plan = plan_of(name, "h100", *overrides)
    assert [stage.name for stage in plan.stages if stage.peak > GPUS["h100"].memory_bytes] == ["sft"]
    found = changes_that_fit(CLUSTER / f"{name}.toml", overrides, plan)
    assert found is not None
    (change,) = found[0]
    assert change.startswith("sft.batch.micro_batch_size=")


def test_a_job_that_fits_needs_no_advice() -> None:
    name = "hh-8b-8gpus"
    assert advice(CLUSTER / f"{name}.toml", (), plan_of(name, "h100")) == []


def test_generation_runs_the_rows_that_a_gpu_has_memory_for() -> None:
    """On the smallest GPU that holds an 8B generator, sampling never exceeds the memory; a larger GPU runs all rows."""
    caches = []
    for gpu in ("l40s", "h200"):
        plan = plan_of("hh-8b-long-8gpus", gpu, "ppo.placement.kind=disaggregated", "ppo.placement.num_generators=2")
        stage = next(found for found in plan.stages if found.name == "ppo")
        generator = stage.memory["generator"]
        assert generator.peak < GPUS[gpu].memory_bytes
        caches.append(generator.phases["generate"]["key-value cache"])
    # 128 rows of 2,048 tokens: 32 layers of 8 heads of 128 dimensions, keys and values, in bf16.
    assert caches[1] == 128 * 2048 * 32 * 2 * 8 * 128 * 2
    assert caches[0] < caches[1]


def test_a_reward_model_with_another_shape_is_counted_with_it() -> None:
    """Its own training, the value function initialised from it, and the reward model of PPO."""
    as_policy = plan_of("hh-8b-8gpus", "b200", FAST)
    smaller = plan_of("hh-8b-8gpus", "b200", FAST, "reward.init_from=Qwen/Qwen2.5-0.5B")
    assert peak(smaller, "sft") == peak(as_policy, "sft")
    assert peak(smaller, "reward") < peak(as_policy, "reward") / 4
    large, small = (next(s for s in plan.stages if s.name == "ppo").memory[RANK].held for plan in (as_policy, smaller))
    for part in ("reward model", "value: moments", "value: weights"):
        assert small[part] < large[part] / 10
    assert small["reference"] == large["reference"]


def test_the_shape_of_a_model_directory_is_read(tmp_path: Path) -> None:
    shape = ModelConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=2048,
    )  # fmt: skip
    model = ScalarModel(shape, labels=["score"])
    init_weights(model, seed=0)
    save_model(tmp_path / "judge", model, model.state_dict(), Tokenizer.train(["a b c"] * 9, 300, "chat"))
    plan = plan_of("hh-8b-8gpus", "b200", FAST, f"reward.init_from={tmp_path / 'judge'}")
    ppo = next(stage for stage in plan.stages if stage.name == "ppo")
    assert ppo.memory[RANK].held["reward model"] < 100_000
    assert not any("policy's shape" in said for said in ppo.assumptions)


def test_ranks_of_one_role_are_counted_each() -> None:
    apart = (FAST, "ppo.placement.kind=disaggregated", "ppo.placement.num_generators=8", "ppo.placement.num_scorers=8")
    ppo = next(stage for stage in plan_of("hh-8b-8gpus", "h200", *apart).stages if stage.name == "ppo")
    assert set(ppo.memory) == {"learner", "generator", "scorer"}
    colocated = next(stage for stage in plan_of("hh-8b-8gpus", "h200", FAST).stages if stage.name == "ppo").memory[RANK]
    parts = [name for memory in ppo.memory.values() for name in memory.held]
    own = [*2 * ["CUDA, NCCL, cuBLAS"]]  # each kind has GPUs of its own
    assert sorted(parts) == sorted([*(name for name in colocated.held if name != "key-value cache"), *own])
    assert ppo.peak < colocated.peak


def test_the_memory_of_a_node_is_counted() -> None:
    plan = plan_of("hh-8b-8gpus", "b200")
    P = 8_030_261_248
    # Eight ranks' share of fp32 weights and two moments; a file that rank 0 saves, and two copies of the next tensor.
    assert plan.node_bytes(plan.stages[0]) == pytest.approx(12 * P + 5e9 + 2 * 4 * 128_256 * 4096, rel=1e-6)
    ran = CliRunner().invoke(app, ["plan", str(CLUSTER / "hh-8b-8gpus.toml"), "--gpu", "b200"])
    assert ran.exit_code == 0, ran.output
    assert "CPU memory of a node" in ran.output
