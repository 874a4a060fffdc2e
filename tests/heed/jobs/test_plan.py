"""`heed plan`: numbers by hand, every shipped job, and jobs that do not fit."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from cluster.connection import connect, disconnect
from heed.cli import app
from heed.commands.models import read_shape
from heed.jobs.job_file import load_job
from heed.jobs.memory import (
    Layout,
    Memory,
    Mode,
    PPOModels,
    PPOWork,
    count,
    forward_pass,
    ppo_memory,
    scoring_phase,
    states,
    training_memory,
    training_phase,
)
from heed.jobs.pipeline import run_job
from heed.jobs.plan import Plan, Setting, make_plan
from heed.jobs.times import GIB, GPUS, hardware
from lm import layers
from lm.config import ModelConfig
from lm.inspection import forward_bytes
from tests.rows import jsonl
from training.config import OptimizerConfig

ROOT = Path(__file__).parents[3]
JOBS = ROOT / "configs" / "jobs"
CLUSTER_JOBS = sorted((JOBS / "cluster").glob("*.toml"))
ALL_JOBS = sorted(JOBS.glob("*.toml")) + CLUSTER_JOBS
ADAMW = OptimizerConfig(learning_rate=1e-3, schedule="constant")


def plan_of(path: Path, gpu: str = "h100", overrides: tuple[str, ...] = ()) -> Plan:
    job = load_job(path, overrides, opens_models=False)
    return make_plan(job, Setting(GPUS[gpu], share_of_peak=0.4, assumed_rows=100_000))


def stage_of(plan: Plan, name: str) -> Any:
    return next(stage for stage in plan.stages if stage.name == name)


@pytest.mark.parametrize("path", ALL_JOBS, ids=lambda path: path.stem)
def test_every_shipped_job_has_a_plan(path: Path) -> None:
    # The model of this one is a file that `make smollm2-model` downloads; its shape is known by its hub id too.
    overrides = ("ppo.init_from=HuggingFaceTB/SmolLM2-135M-Instruct",) if path.stem == "smollm2" else ()
    plan = plan_of(path, overrides=overrides)
    assert tuple(stage.name for stage in plan.stages) == plan.job.stage_names
    for stage in plan.stages:
        only_learns_a_vocabulary = (path.stem, stage.name) == ("translation", "pretrain")
        assert (stage.seconds == 0) == only_learns_a_vocabulary
        assert stage.peak > 0


@pytest.mark.parametrize("path", CLUSTER_JOBS, ids=lambda path: path.stem)
def test_a_cluster_job_fits_the_gpu_that_it_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.search(rf"heed plan configs/jobs/cluster/{path.name} --gpu (\w+)", text)
    assert named, "the job's head says how it is planned"
    plan = plan_of(path, named[1])
    assert plan.job.name == path.stem
    assert int(re.search(r"(\d+)gpus?$", path.stem)[1]) == plan.job.workers  # type: ignore[index]
    assert plan.excess == 0
    assert plan.fits


def test_what_a_gpus_libraries_take_is_counted() -> None:
    """GPT-3's tensors take 78.5 GiB of a GPU with 79: it does not fit, and the plan says what would help."""
    path = JOBS / "cluster" / "gpt3-175b-1024gpus.toml"
    plan = plan_of(path, "h100")
    (memory,) = plan.stages[0].memory.values()
    assert memory.held["CUDA, NCCL, cuBLAS"] == 2.5 * GIB
    assert 79 * GIB < plan.stages[0].peak < 81.5 * GIB
    ran = CliRunner().invoke(app, ["plan", str(path), "--gpu", "h100"])
    assert ran.exit_code == 1
    assert "does not fit" in ran.output
    assert "engine.checkpoint_activations=true" in ran.output
    assert plan_of(path, "h100", ("engine.checkpoint_activations=true",)).fits


def test_a_slower_network_takes_longer_and_the_command_takes_its_speed() -> None:
    path = JOBS / "cluster" / "hh-0.5b-32gpus.toml"
    seconds = []
    for gbit in ("400", "10"):
        ran = CliRunner().invoke(app, ["plan", str(path), "--gpu", "h100", "--network", gbit])
        assert ran.exit_code == 0, ran.output
        assert f"{gbit} Gbit/s between nodes" in " ".join(ran.output.split())
        slow = replace(GPUS["h100"], network_bytes_per_second=float(gbit) * 1e9 / 8)
        seconds.append(make_plan(load_job(path, opens_models=False), Setting(slow, 0.65, 100_000)).stages[0].seconds)
    assert seconds[1] > 2 * seconds[0]


def test_nodes_keep_a_copy_of_sharded_weights_which_the_plan_counts() -> None:
    """8B on four nodes of eight: an eighth of the bf16 weights more; on nodes that hold all ranks, none."""
    path = JOBS / "cluster" / "hh-8b-32gpus.toml"
    job = load_job(path, opens_models=False)
    few, all_in_one = (
        make_plan(job, Setting(GPUS["h100"], 0.65, 100_000, gpus_per_node=number)).stages[0].memory["rank"].held
        for number in (8, 32)
    )
    assert few.pop("weights of the node") == 2 * 8_030_261_248 // 8
    assert few == all_in_one


def test_a_gpu_samples_as_many_rows_as_fit() -> None:
    """2,048 responses of 0.2B parameters on one GPU: two waves of 1,024, or sixteen of 128, which read the weights as
    often. The cache of 128 rows is small enough to be kept."""
    path = JOBS / "cluster" / "hh-8b-8gpus.toml"
    wide = (
        "workers=1",
        "model=gpt3-125m",
        "ppo.rollout_batch_size=2048",
        "ppo.minibatch.batch_size=2048",
        "ppo.memory='fast'",
    )
    many, few = (
        stage_of(plan_of(path, overrides=(*wide, f"ppo.sampler={{max_rows={rows}}}")), "ppo") for rows in (0, 128)
    )
    assert [plan.memory["rank"].sampled_at_once for plan in (many, few)] == [1024, 128]
    assert many.seconds_per_step < 0.9 * few.seconds_per_step
    assert "key-value cache" in many.memory["rank"].phases["generate"]
    assert "key-value cache" in few.memory["rank"].held


def test_a_mixture_of_30b_fits_on_one_node() -> None:
    """Four generators share its experts, and optimizer states are in CPU memory: also on GPUs of 80 GB."""
    path = JOBS / "cluster" / "qwen3-30b-a3b-8gpus.toml"
    assert plan_of(path, "h100").fits
    assert not plan_of(path, "h100", ("engine.offload=[]",)).fits


def test_vllm_takes_its_part_of_a_gpu() -> None:
    """40% of a shared GPU, held while it samples and is sent weights; 90% of its own; more if the weights need it."""
    path, vllm = JOBS / "cluster" / "hh-8b-8gpus.toml", "ppo.sampler={kind='vllm'}"
    shared = stage_of(plan_of(path, overrides=(vllm,)), "ppo").memory["rank"].phases
    for phase in ("generate", "sync"):
        assert shared[phase]["vLLM"] == round(0.4 * 79 * GIB)
    assert "vLLM" not in shared["policy"]
    assert "key-value cache" not in shared["generate"]
    apart = ("ppo.placement={kind='disaggregated', num_generators=8, num_scorers=8}", vllm)
    held = stage_of(plan_of(path, overrides=apart), "ppo").memory["generator"].held
    assert held["vLLM"] == round(0.9 * 79 * GIB)
    tight = stage_of(plan_of(path, "l40s", (vllm, "model=gpt3-13b")), "ppo")
    assert tight.peak > GPUS["l40s"].memory_bytes


def test_ktos_baseline_takes_another_pass() -> None:
    """Each step first reads one response to another prompt per comparison: at most a third of forward and backward."""
    path = JOBS / "kto.toml"
    kto, sigmoid = (
        stage_of(plan_of(path, overrides=overrides), "dpo") for overrides in ((), ("dpo.loss=sigmoid", "dpo.kto=none"))
    )
    forward = kto.seconds_per_step - sigmoid.seconds_per_step
    assert kto.num_steps == sigmoid.num_steps
    assert 0.05 < forward / sigmoid.seconds_per_step < 0.34


def test_later_stages_are_planned_with_the_policys_new_blocks() -> None:
    """A policy that SFT shortens is shorter in all later stages; a longer reward model is PPO's value function too."""

    def peaks(*overrides: str) -> dict[str, int]:
        return {stage.name: stage.peak for stage in plan_of(JOBS / "debug.toml", overrides=overrides).stages}

    plain, short, long = peaks(), peaks("sft.dropped_layers=1"), peaks("reward.added_layers=4")
    trained = ("sft", "reward", "dpo", "ppo")
    assert short["pretrain"] == plain["pretrain"]
    assert all(short[name] < plain[name] for name in trained)
    assert [name for name in trained if long[name] != plain[name]] == ["reward", "ppo"]
    assert long["ppo"] > plain["ppo"]


def test_the_references_pass_is_counted_once() -> None:
    """A pass without gradients through all comparisons: about a third of an epoch, and SimPO has none."""
    path = JOBS / "dpo.toml"
    sigmoid, simpo = (
        stage_of(plan_of(path, overrides=("model=gpt3-13b", *more)), "dpo")
        for more in ((), ("dpo.loss=simpo", "dpo.beta=2"))
    )
    assert simpo.once_seconds == 0
    epoch = sigmoid.num_steps * sigmoid.seconds_per_step / load_job(path, opens_models=False).dpo.num_epochs
    assert 0.2 < sigmoid.once_seconds / epoch < 0.6
    assert sigmoid.seconds == sigmoid.num_steps * sigmoid.seconds_per_step + sigmoid.once_seconds


def test_batches_by_hand() -> None:
    plan = plan_of(JOBS / "demo.toml")
    assert stage_of(plan, "pretrain").batch == {
        "batch_size": 32, "micro_batch_size": 16, "ranks": 2, "micro-batches per rank and step": 1, "steps": 1100,
        "tokens per step": 32 * 96,
    }  # fmt: skip
    # 8,000 demonstrations twice in batches of 32; 90% of 5,000 tasks with four responses in batches of 16.
    assert stage_of(plan, "sft").num_steps == 500
    reward = stage_of(plan, "reward").batch
    assert (reward["steps"], reward["responses per comparison"], reward["tokens per step"]) == (281, 4, 16 * 4 * 128)
    ppo = stage_of(plan, "ppo").batch
    assert (ppo["micro-batches per rank and update"], ppo["updates per iteration"], ppo["updates"]) == (1, 4, 112)
    assert ppo["responses"] == 28 * 128
    assert stage_of(plan, "collect").batch["prompts"] == 5000
    # Best of 16 from one pool, four by PPO, four by the pretrained model.
    assert stage_of(plan, "compare").batch["responses per prompt"] == 24


def test_rows_of_local_files_are_counted(tmp_path: Path) -> None:
    rankings = tmp_path / "rankings.jsonl"
    prompt = [{"role": "user", "content": "Say."}]
    row = {"task_id": "1", "prompt": prompt, "responses": ["a", "b", "c"], "ranks": [1, 2, 3], "labeler": "x"}
    rows = [row | {"task_id": str(number)} for number in range(640)]
    rankings.write_text(jsonl(rows), encoding="utf-8")
    path = next(path for path in CLUSTER_JOBS if path.stem == "tldr-124m-1gpu")
    reward = stage_of(
        plan_of(path, overrides=(f"reward.rankings.source={rankings}", "reward.rankings.format=rankings")), "reward"
    )
    assert reward.num_steps == round(640 * 0.95 / 64)
    assert reward.batch["responses per comparison"] == 3
    assert not any("two responses" in assumption for assumption in reward.assumptions)
    # The plan says what it cannot count.
    assumed = stage_of(plan_of(path), "reward")
    assert any("trl-lib/tldr-preference has 100,000 rows" in said for said in assumed.assumptions)


def test_gpt3_has_its_published_size() -> None:
    config = read_shape(ROOT / "configs" / "models" / "gpt3-175b.toml")
    counts = count(config, ADAMW)
    assert counts.total == pytest.approx(175e9, rel=0.01)
    # 16 bytes per parameter over 1,024 ranks, and DeepSpeed's bucket of half a billion bf16 numbers.
    held, _ = states(counts, Layout(1024, 3, is_bf16=True, is_gpu=True))
    # The two norms and all biases of each layer and the last norm, which ZeRO-3 keeps whole.
    assert held.pop("small weights, whole") == 2 * (96 * (2 * 2 + 3 + 1 + 4 + 1) + 2) * 12288
    assert sum(held.values()) == pytest.approx(16 * counts.total / 1024 + 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"),
    # For four ranks in bf16: fp32 weights with casts, moments and DDP's buckets; bf16 weights, a quarter of masters and
    # moments; a quarter of everything.
    [(0, 4 + 2 + 8 + 4), (1, 2 + 12 / 4), (2, 2 + 12 / 4), (3, (2 + 2 + 12) / 4)],
)
def test_states_by_zero_stage(stage: int, bytes_per_parameter: float) -> None:
    counts = count(read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml"), ADAMW)
    held, _ = states(counts, Layout(4, stage, is_bf16=True, is_gpu=True))
    for part in ("reduce bucket", "small weights, whole"):
        held.pop(part, None)
    assert sum(held.values()) == pytest.approx(bytes_per_parameter * counts.total, rel=0.01)


@pytest.mark.parametrize("stage", range(4))
def test_checkpoints_are_written_from_a_copy_of_weights_and_moments(stage: int) -> None:
    counts = count(read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml"), ADAMW)
    held, _ = states(counts, Layout(4, stage, is_bf16=True, is_gpu=False))
    assert held["copy for checkpoints"] == 12 * counts.total // 4


def test_muon_keeps_one_moment_and_frozen_layers_none() -> None:
    config = read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml")
    layout = Layout(1, 0, is_bf16=True, is_gpu=True)
    muon = count(config, ADAMW.model_copy(update={"kind": "muon"}))
    matrices = 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert states(muon, layout)[0]["moments"] == 8 * muon.total - 4 * matrices
    last = count(config, ADAMW.model_copy(update={"trained_layers": 2}))
    block = 4 * 768**2 + 2 * 768 * 3072 + 9 * 768 + 3072 + 4 * 768  # matrices, their biases, two norms
    assert last.trained == pytest.approx(2 * block, rel=1e-3)
    of = forward_pass(layout, 8, 1024)
    few, all_of_them = (
        training_phase(counts, layout, of, 0, 1)["activations"] for counts in (last, count(config, ADAMW))
    )
    assert few < all_of_them / 3


def test_with_more_micro_batches_gradients_are_held_with_activations() -> None:
    config = read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml")
    counts = count(config, ADAMW)

    def growth(ranks: int) -> int:
        layout = Layout(ranks, 0, is_bf16=True, is_gpu=True)
        of = forward_pass(layout, 8, 1024)
        one, two = (training_memory(counts, layout, of, 10**8, number).peak for number in (1, 2))
        return two - one

    assert growth(ranks=1) == 4 * counts.total
    # DDP's buckets hold only the gradients of the last layer.
    assert growth(ranks=2) == growth(ranks=1)


def test_what_recorded_passes_write_to_is_held() -> None:
    """As much as a step takes at its peak, and an evaluation in addition."""
    counts = count(read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml"), ADAMW)
    plain, recorded = (Layout(1, 0, is_bf16=True, is_gpu=True, records=records) for records in (False, True))
    of = forward_pass(plain, 8, 1024)
    before, after = (training_memory(counts, layout, of, 10**8, 4) for layout in (plain, recorded))
    assert sum(after.held.values()) == before.peak
    assert after.peak == before.peak + sum(scoring_phase(counts, plain, of, 10**8).values())


def test_ranks_that_split_rows_keep_their_share_of_activations_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "CHUNK_LOGITS", 2**40)  # else no rank has more logits than a chunk
    config = read_shape(ROOT / "configs" / "models" / "meta-llama" / "Llama-3.1-8B.toml")
    counts, num_logits = count(config, ADAMW), 65536 * config.vocab_size

    def turn(by: int, *, recomputes: bool, num_logits: int = num_logits) -> list[int]:
        layout = Layout(8, 3, is_bf16=True, is_gpu=True, recomputes=recomputes, sequence_ranks=by)
        of = forward_pass(layout, 1, 65536, is_trained=True)
        return list(training_phase(counts, layout, of, num_logits, 8).values())[:2]

    for recomputes in (False, True):
        whole, split = turn(1, recomputes=recomputes), turn(8, recomputes=recomputes)
        assert split[0] == pytest.approx(whole[0] / 8, rel=0.05)
        assert split[1] < whole[1] / 7
    # All counted positions may be in one rank's slice.
    few = 8192 * config.vocab_size
    assert turn(8, recomputes=False, num_logits=few)[1] >= 2 * 2 * few
    # A frozen model reads whole rows.
    assert forward_pass(Layout(8, 3, is_bf16=True, is_gpu=True, sequence_ranks=8), 1, 65536).num_tokens == 65536


def test_what_is_offloaded_or_computed_again_is_not_held() -> None:
    config = read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml")
    counts = count(config, ADAMW)
    plain, moved = (
        Layout(8, 3, is_bf16=True, is_gpu=True, offload=offload) for offload in ((), ("optimizer", "parameters"))
    )
    gone = {"fp32 masters", "moments", "gradients", "weights"}
    (held, host), (kept, away) = states(counts, plain), states(counts, moved)
    assert set(held) - set(kept) == set(away) - set(host) == gone
    on_cpu = Layout(8, 3, is_bf16=True, is_gpu=False, offload=("optimizer",))
    # There is nowhere else to put it, and the buffers from which checkpoints are written are there too.
    assert set(states(counts, on_cpu)[0]) == set(held) | {"copy for checkpoints"}
    again = Layout(8, 3, is_bf16=True, is_gpu=True, recomputes=True)
    of = forward_pass(again, 8, 1024)
    few, many = (training_phase(counts, layout, of, 0, 1)["activations"] for layout in (again, plain))
    # Inputs of twelve blocks.
    least = 12 * 8 * 1024 * 768 * 2
    assert least < few < least + many / 20


def colocated(config: ModelConfig, layout: Layout, mode: Mode = "fast", *, has_values: bool = True) -> Memory:
    """A rank of PPO with small batches."""
    policy, value = count(config, ADAMW), count(config, ADAMW, num_scores=1)
    of = forward_pass(layout, 1, 64)
    work = PPOWork(of, of, 0, rollout_rows=1, prompt_tokens=32, response_tokens=32, num_micro_batches=1, mode=mode)
    return ppo_memory(PPOModels(policy, value if has_values else None, value), layout, work)


def test_without_a_value_function_a_learner_has_half_the_weights() -> None:
    config = read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml")
    layout = Layout(1, 0, is_bf16=True, is_gpu=True)
    with_values, without = colocated(config, layout), colocated(config, layout, has_values=False)
    gone = {name: size for name, size in with_values.held.items() if name not in without.held}
    assert gone
    assert all(name.startswith("value: ") for name in gone)
    assert {name: size for name, size in with_values.held.items() if name not in gone} == without.held
    assert set(with_values.phases) - set(without.phases) == {"values", "value"}


def test_a_colocated_worker_holds_every_role() -> None:
    """ZeRO-3 in bf16 on eight ranks: an eighth of two models' 16 bytes per parameter and of an fp32 average;
    reference, reward model and generator in bf16. Each mode of `ppo.memory` moves some of it off the device."""
    config = read_shape(ROOT / "configs" / "models" / "gpt3-13b.toml").model_copy(update={"tie_word_embeddings": False})
    layout = Layout(8, 3, is_bf16=True, is_gpu=True)
    policy, value = count(config, ADAMW), count(config, ADAMW, num_scores=1)
    memory = colocated(config, layout)
    P, V = policy.total, value.total
    assert config.vocab_size * config.hidden_size - config.hidden_size == P - V
    # Norms and biases, 13 hidden sizes per layer, are whole on every rank, and so is the weight of a score head.
    kept_whole = (
        2 * 2 * (40 * (10 * config.hidden_size + 3 * 40 * 128) + 2 * config.hidden_size) + 2 * config.hidden_size
    )
    learning = 16 * (P + V) / 8 + 2 * 500_000_000 * 2 + kept_whole
    assert sum(memory.held.values()) == pytest.approx(learning + 4 * P / 8 + 2 * P + 2 * P + 2 * V, rel=1e-6)
    balanced, small = (colocated(config, layout, mode) for mode in ("balanced", "small"))
    assert sum(balanced.held.values()) == pytest.approx(learning, rel=1e-6)
    assert balanced.phases["generate"]["generator"] == balanced.phases["sync"]["generator"] == 2 * P
    assert balanced.phases["score by the reference"]["reference"] == 2 * P
    assert sum(balanced.host.values()) - sum(memory.host.values()) == pytest.approx((4 + 2) * P / 8 + 2 * V / 8)
    assert sum(small.held.values()) == pytest.approx(learning - 12 * (P + V) / 8, rel=1e-6)
    assert small.phases["policy"]["value: moments"] == 8 * V // 8
    assert not {"policy: moments", "value: moments"} & set(small.phases["generate"])
    D, M, A = config.hidden_size, config.intermediate_size, 40 * 128
    block = 4 * D * A + 3 * A + D + 2 * D * M + M + D
    assert small.phases["score by the reference"]["one of its blocks"] == 2 * block
    # Embedding, head, positions, and the weights and biases of two norms per layer and a last one.
    outside = (2 * 50257 + 2048 + 4 * 40 + 2) * D
    assert small.phases["score by the reference"]["reference outside its blocks"] == 2 * outside


@pytest.mark.parametrize("memory", ["fast", "balanced", "small"])
def test_a_teacher_is_one_more_frozen_model_and_one_more_pass(memory: str) -> None:
    """A teacher of the policy's shape takes what the reference takes."""
    path, teacher = JOBS / "cluster" / "hh-8b-8gpus.toml", '{ model = "meta-llama/Meta-Llama-3-8B" }'
    alone, taught = (
        stage_of(plan_of(path, overrides=(f"ppo.memory={memory}", f"ppo.teachers={teachers}")), "ppo")
        for teachers in ("[]", f"[{teacher}]")
    )
    found = taught.memory["rank"]
    for parts in (found.held, found.host, found.phases["score by the teacher 1"]):
        sizes = {name: size for name, size in parts.items() if "teacher" in name}
        assert all(size == {**parts, **found.phases["score by the reference"]}[name.replace("teacher 1", "reference")]
                   for name, size in sizes.items())  # fmt: skip
    assert any("teacher 1" in name for name in {**found.held, **found.host})
    assert taught.seconds_per_step > alone.seconds_per_step


def test_rows_are_planned_as_wide_as_they_are_packed() -> None:
    """With its end token, a text of 2,049 tokens takes a row of 2,304; forward passes of 9,216 tokens hold four such
    rows."""
    for given, rows in (("forward_tokens=0", 1), ("forward_tokens=9216", 4)):
        plan = plan_of(JOBS / "cluster" / "hh-8b-long-8gpus.toml", overrides=(f"ppo.minibatch.{given}",))
        stage, model = stage_of(plan, "ppo"), plan.job.model
        assert stage.batch["micro-batches per rank and update"] == 128 // 8 // 2  # of two rows of 2,048
        phases = stage.memory["rank"].phases
        read = forward_bytes(model, forward_pass(plan.layout, rows, 2304))
        assert phases["values"]["a pass, or logits"] == read
        two_rows = training_phase(count(model, ADAMW), plan.layout, forward_pass(plan.layout, 2, 2048), 0, 1)
        assert phases["policy"]["activations"] == two_rows["activations"]


def test_under_autocast_frozen_models_keep_their_blocks_in_bf16() -> None:
    """A tied head is the embedding's table, which is read in fp32."""
    config = read_shape(ROOT / "configs" / "models" / "gpt3-125m.toml").model_copy(update={"tie_word_embeddings": True})
    layout = Layout(1, 0, is_bf16=True, is_gpu=True)
    policy, value = count(config, ADAMW), count(config, ADAMW, num_scores=1)
    held = colocated(config, layout).held
    blocks = 12 * (4 * 768**2 + 2 * 768 * 3072 + 4 * 768 + 3072 + 768)
    assert held["reference"] == 4 * policy.total - 2 * blocks
    assert held["reward model"] == 4 * value.total - 2 * blocks
    assert held["moving average"] == 4 * policy.total


def test_time_is_operations_over_a_share_of_the_peak() -> None:
    path = JOBS / "cluster" / "gpt3-175b-1024gpus.toml"
    plan = plan_of(path, "h200")
    stage = plan.stages[0]
    # Six operations per parameter and token, plus attention; 300 billion tokens.
    least = 6 * 175e9 * 2048 * 2047 / (1024 * 989e12 * 0.4)
    assert least < stage.seconds_per_step < 1.1 * least
    assert stage.num_steps * 2048 * 2048 == pytest.approx(300e9, rel=1e-4)
    free = make_plan(plan.job, replace(plan.setting, hardware=replace(GPUS["h200"], dollars_per_hour=0.0)))
    assert plan.dollars == pytest.approx(stage.seconds / 3600 * 1024 * 4.0)
    assert free.dollars == 0


def test_sampling_ahead_costs_the_longer_of_sampling_and_learning() -> None:
    def seconds(*overrides: str) -> float:
        return float(stage_of(plan_of(JOBS / "demo.toml", overrides=overrides), "ppo").seconds_per_step)

    both = seconds("ppo.placement={kind='disaggregated', num_generators=4}")
    stale = ("ppo.placement.kind=asynchronous", "ppo.placement.num_generators=4")
    longer, one = (seconds(*stale, f"ppo.placement.max_staleness={number}") for number in (1, 2))
    assert longer == one
    assert 0 < both - longer <= longer  # the shorter of the two is left out
    continued = ("ppo.placement.kind=continuous", "ppo.placement.num_generators=4")
    assert seconds(*continued) == pytest.approx(longer, rel=1e-3)  # of responses of equal length, none is in progress
    rows = [seconds(*continued, f"ppo.placement.num_rows={number}") for number in (8, 64)]
    assert rows[0] > rows[1]  # fewer at once take more steps
    slow = seconds("ppo.placement.kind=disaggregated", "ppo.placement.num_generators=1")
    assert slow > both  # fewer generators, more rows for each
    ahead = plan_of(JOBS / "demo.toml", overrides=(*stale, "ppo.placement.max_staleness=1"))
    hours = sum(stage.seconds for stage in ahead.stages) / 3600
    price = ahead.setting.hardware.dollars_per_hour
    assert ahead.dollars == pytest.approx(hours * (ahead.layout.ranks + 4 + 1) * price)


def test_hardware() -> None:
    with pytest.raises(ValueError, match=r"--gpu 'h900': one of cpu, b200, h200, h100, a100, l40s was expected"):
        hardware("h900", 1, "fp32")
    alone, shared = hardware("cpu", 1, "fp32"), hardware("cpu", 2, "fp32")
    assert alone.flops > 1e9
    assert shared.memory_bytes <= alone.memory_bytes
    assert GPUS["h100"].memory_bytes < 80 * GIB


def test_a_cpus_rate_is_that_of_the_layers_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own product in bf16 may be a tenth as fast, and no layer uses it then."""
    dtypes, now = set[torch.dtype](), itertools.count()

    def slow_linear(x: Tensor, weight: Tensor, _bias: None) -> None:
        dtypes.update((x.dtype, weight.dtype))
        next(now)  # takes a second, as a look at the clock does

    monkeypatch.setattr("heed.jobs.times.linear", slow_linear)
    monkeypatch.setattr("heed.jobs.times.time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert hardware("cpu", 2, "bf16").flops == 2 * 1024**3 / 2 / 2
    assert dtypes == {torch.bfloat16}


def test_the_command_prints_tables_and_says_what_does_not_fit() -> None:
    runner = CliRunner()
    path = str(JOBS / "cluster" / "hh-8b-8gpus.toml")
    fits = runner.invoke(app, ["plan", path, "--gpu", "h100"])
    assert fits.exit_code == 0, fits.output
    for words in ("8 workers on 1 node x 8 h100, ZeRO 3, bf16", "rollout_batch_size", "policy: moments", "dollars"):
        assert words in fits.output
    refused = runner.invoke(app, ["plan", path, "--gpu", "l40s"])
    assert refused.exit_code == 1
    assert "does not fit" in refused.output
    assert "fits with" in refused.output


def test_a_shape_that_is_written_out_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:

    def fetch(name: str) -> Path:
        raise ValueError(f"{name} would be fetched")

    monkeypatch.setattr("heed.jobs.models.model_directory", fetch)
    path = JOBS / "cluster" / "hh-0.5b-1gpu.toml"
    assert load_job(path, opens_models=False).model is not None
    with pytest.raises(ValueError, match=r"sft\.init_from: Qwen/Qwen2\.5-0\.5B would be fetched"):
        load_job(path)


def test_a_cluster_that_is_too_small_is_refused_before_anything_is_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    job = load_job(JOBS / "cluster" / "gpt3-175b-1024gpus.toml")
    assert job.pretrain is not None
    for data in (*job.pretrain.texts, *job.pretrain.heldout):
        Path(data.source).parent.mkdir(parents=True, exist_ok=True)
        Path(data.source).touch()
    connect(1)
    try:
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        says = r"^workers is 1024, and each needs 1 CPU on one node; .* nodes \(1 x \(\d+ CPU\)\) have room for \d+$"
        with pytest.raises(ValueError, match=says):
            run_job(job, tmp_path)
    finally:
        disconnect()
    assert not (tmp_path / "gpt3-175b-1024gpus" / "tokenizer").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_one_rank_is_planned_without_zero(workers: int) -> None:
    """As it runs, unless something is offloaded."""
    changes = (f"workers={workers}", "engine.zero_stage=2", "engine.precision=bf16")
    offloaded = (*changes, 'engine.offload=["optimizer"]')
    layouts = [plan_of(JOBS / "debug.toml", overrides=overrides).layout for overrides in (changes, offloaded)]
    assert [layout.zero_stage for layout in layouts] == [0 if workers == 1 else 2, 2]
    assert layouts[0].is_autocast == (workers == 1)
