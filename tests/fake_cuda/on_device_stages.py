"""Every stage on the fake device, whole: training, scoring, sampling, sync and checkpoint. Run by test_fake_cuda.py.

A device that does not fit is an error anywhere in them. Steps have a stated number of host syncs.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.speed.own import ppo_config
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel
from lm.source import RandomInit
from lm.tokenizer import Tokenizer
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.learner import Learner
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.rollout import PolicyBatch, ValueBatch
from pretrain.stage import PretrainConfig
from pretrain.stage import train as pretrain
from reward.comparisons import Comparison, Verdict
from reward.config import RewardConfig
from reward.objective import AuxiliaryParameters, LearnerSource, RankingObjective
from reward.sampling import SamplingSpec, sample_policy
from sft.stage import SFTConfig
from sft.stage import train as fine_tune
from tests.fake_cuda import kernels
from tests.models import load_language_model
from tests.token_files import pretrain_tokens, sft_tokens, train_reward
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import Prompt
from training.engine import Engine, StageContext
from training.loop import LoopConfig, Objective, TrainingLoop
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import pack

ENGINE = EngineConfig(precision="bf16", trackers=())
OPTIMIZER = {"learning_rate": 1e-3, "schedule": "constant"}
TRAINING: dict[str, Any] = {
    "optimizer": OPTIMIZER,
    "batch": {"batch_size": 4, "micro_batch_size": 2},
    "save_every_steps": 2,
    "evaluate_every_steps": 2,
}
TEXTS = ("the fox and the dog sleep", "a bird in the hand is worth two", "the dog sleeps on the bush")
SHAPE = ModelConfig(
    vocab_size=300, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48,
)  # fmt: skip


RECORDED = ENGINE.model_copy(update={"record_micro_batches": True})


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"source": str(path)}


def talk(number: int) -> list[dict[str, str]]:
    answer = {"role": "assistant", "content": TEXTS[number % 3]}
    return [{"role": "user", "content": f"{TEXTS[(number + 1) % 3]} {number}"}, answer]


def context(folder: Path, engine: EngineConfig = ENGINE) -> StageContext:
    folder.mkdir()
    return StageContext(folder, seed=0, num_workers=1, engine=engine)


def results(stage: StageContext) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage.folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with pretrain/, sft/ and reward/, trained on the fake device."""
    before = torch.cuda.memory_allocated()
    folder = tmp_path_factory.mktemp("run")
    Tokenizer.train([*TEXTS] * 3, 300, "chat").save(folder / "tokenizer")
    texts = write(folder / "texts.jsonl", [{"text": TEXTS[number % 3] * 4} for number in range(40)])
    talks = write(folder / "talks.jsonl", [{"messages": talk(number)} for number in range(16)])
    setup: dict[str, Any] = {"texts": [texts], "heldout": [texts], "seq_len": 16, "num_steps": 4, **TRAINING}
    config = PretrainConfig.model_validate(setup)
    stage = context(folder / "pretrain")
    data = pretrain_tokens(stage.folder, config, folder / "tokenizer")
    pretrain(stage, config, SHAPE, folder / "tokenizer", data)
    setup = {"demonstrations": [talks], "heldout": [talks], "seq_len": 60, "num_epochs": 1, "dropout": 0.1, **TRAINING}
    sft, start = SFTConfig.model_validate(setup), folder / "pretrain" / "model"
    stage = context(folder / "sft")
    fine_tune(stage, sft, start, sft_tokens(stage.folder, sft, start))
    rankings = [
        {"task_id": f"t{number}", "prompt": talk(number)[:1], "responses": list(TEXTS), "ranks": [1, 2, 3],
         "labeler": "ann"} for number in range(16)
    ]  # fmt: skip
    setup = {
        "rankings": write(folder / "rankings.jsonl", rankings), "demonstrations": [talks], "num_epochs": 1,
        "heldout_share": 0.25, **TRAINING,
    }  # fmt: skip
    train_reward(context(folder / "reward"), RewardConfig.model_validate(setup), folder / "sft" / "model")
    yield folder
    assert torch.cuda.memory_allocated() - before < 2**20, "a stage left tensors on the device"


def test_stages_train(run: Path) -> None:
    for stage in ("pretrain", "sft"):
        assert math.isfinite(json.loads((run / stage / "results.json").read_text())["heldout_loss"])
        assert load_language_model(run / stage / "model").config.vocab_size == 300
    assert (run / "reward" / "heldout_scores.json").is_file()
    assert (run / "reward" / "model" / "model.safetensors").is_file()


def test_policies_are_sampled_and_scored(run: Path) -> None:
    spec = SamplingSpec(
        run / "sft" / "model", 2, 8, 1.0, seed=0, precision="bf16", reference=str(run / "pretrain" / "model"),
        reward=str(run / "reward" / "model"),
    )  # fmt: skip
    prompts = [Prompt(prompt_id=str(n), messages=tuple(talk(n)[:1]), kind="") for n in range(3)]
    samples = sample_policy(spec, prompts)
    assert len(samples) == 6
    assert all(math.isfinite(sample.score) and math.isfinite(sample.log_ratio) for sample in samples)


# --- PPO -------------------------------------------------------------------------------------------------------------

ROLLOUT, MINIBATCH, MICRO_BATCH, RESPONSE = 8, 4, 2, 8


def ppo(run: Path, engine: EngineConfig = ENGINE, **changes: Any) -> tuple[Roles, PPOController]:
    models = InitialModels(run / "sft" / "model", run / "reward" / "model", ScoreScale(0.0, 1.0), None)
    batch = BatchConfig(batch_size=MINIBATCH, micro_batch_size=MICRO_BATCH)
    config = PPOConfig.model_validate({**ppo_config(3, ROLLOUT, batch, RESPONSE).model_dump(), **changes})
    roles = Roles.in_process(config, engine, models)
    prompts = [Tokenizer.load(models.sft).encode_prompt(talk(number)[:1]) for number in range(ROLLOUT)]
    return roles, PPOController(config, roles, prompts, models.scale, num_pretraining_rows=0, seed=0)


def weights_after(run: Path, folder: Path, memory: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    roles, controller = ppo(run, memory=memory)
    metrics = [controller.step(iteration) for iteration in range(2)]
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    roles.learners.export_policy(folder)
    roles.close()
    return dict(load_language_model(folder / "model").state_dict())


@pytest.mark.nightly  # in CI, tests/gpu/test_ppo_memory.py compares the modes' metrics
def test_every_memory_mode_of_ppo_has_the_same_bits(run: Path, tmp_path: Path) -> None:
    """Two iterations each: what is offloaded, dropped or gathered comes back as it was."""
    found = {memory: weights_after(run, tmp_path / memory, memory) for memory in ("fast", "balanced", "small")}
    for memory in ("balanced", "small"):
        assert all(torch.equal(found[memory][name], tensor) for name, tensor in found["fast"].items()), memory


def test_ppo_resumes_from_its_checkpoint(run: Path, tmp_path: Path) -> None:
    roles, controller = ppo(run)
    controller.step(0)
    evidence = controller.evidence
    roles.learners.save(tmp_path, 1, {}, {})
    roles.learners.finish_saving()
    expected = controller.step(1)
    roles.close()
    resumed, continued = ppo(run)
    resumed.load(tmp_path / "step-000001")
    continued.evidence = evidence
    assert continued.step(1) == expected
    resumed.close()


# --- what a step does ------------------------------------------------------------------------------------------------


def comparisons(number: int) -> list[Comparison]:
    rows = np.random.default_rng(0).integers(3, 300, (number, 3, 12)).tolist()
    return [
        Comparison(str(n), tuple(tuple(row[: 6 + 2 * k]) for k, row in enumerate(three)), (Verdict((1, 2, 3)),))
        for n, three in enumerate(rows)
    ]


def stream() -> Objective[Any]:
    return CausalLMObjective(np.random.default_rng(0).integers(3, 300, (8, 17), np.int32))


def packed() -> Objective[Any]:
    rows = np.random.default_rng(0).integers(3, 300, (24, 9)).tolist()
    return PackedObjective(
        pack([(row[: 3 + n % 6], [k > 0 for k in range(3 + n % 6)]) for n, row in enumerate(rows)], 16, 0)
    )


def rankings() -> Objective[Any]:
    return RankingObjective(comparisons(8), "decoder")


LANGUAGE = RandomInit(partial(LanguageModel, SHAPE), seed=0)
REWARD = LearnerSource(RandomInit(lambda: ScalarModel(SHAPE), seed=0), AuxiliaryParameters())


@pytest.mark.parametrize(
    ("objective", "syncs", "num_kernels", "engine_config"),
    [
        (stream, 1, 600, ENGINE), (packed, 1, 630, ENGINE), (rankings, 2, 720, ENGINE), (stream, 1, 35, RECORDED),
        (packed, 1, 45, RECORDED),
    ],
)  # fmt: skip
def test_a_training_step_waits_for_the_device_once(
    objective: Any, syncs: int, num_kernels: int, engine_config: EngineConfig, tmp_path: Path
) -> None:
    """The step reads its loss and gradient norm; a reward model's also its accuracy. Micro-batches wait for nothing.

    At most so many kernels for two layers and two micro-batches: each costs the CPU about 5 us. Recorded micro-batches
    are a launch each, after copies of their inputs; clip, AdamW and zeroing take as many with any number of layers.
    """
    source: Any = REWARD if objective is rankings else LANGUAGE
    engine: Engine[Any] = Engine(source, OptimizerConfig(**OPTIMIZER), engine_config, world_size=1, micro_batch=2)
    config = LoopConfig("test", 0, 4, BatchConfig(batch_size=4, micro_batch_size=2), 100, 100)
    loop = TrainingLoop(engine, config, objective(), objective(), tmp_path)
    loop._step(0)
    with kernels.counted() as counts:
        loop._step(0)
    if engine_config is RECORDED:
        assert counts.kernels["graph"] == 2
    engine.close()
    assert counts.num_syncs == syncs, counts.syncs
    assert counts.uploads.total() == 0, counts.uploads
    assert counts.num_kernels <= num_kernels, counts.kernels


def test_phases_of_ppo_wait_for_the_device_a_stated_number_of_times(run: Path) -> None:
    """Scoring passes wait once, for their results; the test of draws once, in few kernels; an update twice, for its
    gradient norm and its metrics.
    """
    roles, controller = ppo(run)
    rows = list(range(ROLLOUT))
    rollout = roles.generators.start_sampling(rows, [controller.prompts[row] for row in rows], rows)()
    ones_BR, mask_BR, whole = torch.ones(ROLLOUT, RESPONSE), rollout.response_mask_BR, [torch.arange(ROLLOUT)]
    policy = PolicyBatch(rollout, ones_BR, ones_BR, mask_BR, int(mask_BR.sum()), torch.empty(0, dtype=torch.int64), 0)
    value = ValueBatch(rollout, ones_BR, ones_BR, mask_BR, int(mask_BR.sum()))
    phases: dict[str, tuple[int, Callable[[], object]]] = {
        "scores": (1, lambda: roles.scorers.start_scores(rollout)()),
        "reference log-probs": (1, lambda: roles.scorers.start_reference_logprobs(rollout, whole)()),
        "log-probs": (1, lambda: roles.learners.start_policy_logprobs(rollout, whole, tests_draws=True)()),
        "test of draws": (1, roles.learners.take_evidence),
        "values": (1, lambda: roles.learners.start_values(rollout, whole)()),
        "policy update": (2, lambda: roles.learners.update(Learner.update_policy, policy, 1e-4, 0)),
        "value update": (2, lambda: roles.learners.update(Learner.update_value, value, 1e-4, 0)),
    }
    for name, (syncs, work) in phases.items():
        with kernels.counted() as counts:
            work()
        assert counts.num_syncs == syncs, (name, counts.syncs)
        assert counts.uploads.total() == 0, (name, counts.uploads)
        assert name != "test of draws" or 0 < counts.num_kernels <= 150, counts.kernels
    roles.close()


def test_recorded_updates_of_ppo_are_launched_at_once(run: Path) -> None:
    """Policy and value function: metrics of plain updates, and after the first one a launch per micro-batch."""
    found, metrics = dict[str, Any](), list[dict[str, float]]()
    for engine in (ENGINE, RECORDED):
        roles, controller = ppo(run, engine)
        rows = list(range(ROLLOUT))
        rollout = roles.generators.start_sampling(rows, [controller.prompts[row] for row in rows], rows)()
        mask_BR = rollout.response_mask_BR
        advantages_BR = torch.linspace(-1, 1, ROLLOUT)[:, None].expand(-1, RESPONSE).contiguous()
        whole, nothing = [torch.arange(ROLLOUT)], torch.empty(0, dtype=torch.int64)
        logprobs_BR = roles.learners.start_policy_logprobs(rollout, whole)()
        policy = PolicyBatch(rollout, logprobs_BR, advantages_BR, mask_BR.float(), int(mask_BR.sum()), nothing, 0)
        value = ValueBatch(rollout, 0 * advantages_BR, advantages_BR, mask_BR, int(mask_BR.sum()))
        updates = ((Learner.update_policy, policy), (Learner.update_value, value))
        metrics.append({})
        for method, batch in updates:
            for number in range(2):
                update: Any = roles.learners.update
                with kernels.counted() as counts:
                    measured = update(method, batch, 1e-4, number)
                metrics[-1] |= {f"{name} {number}": value for name, value in measured.items()}
                found[f"{method.__name__} {number} {engine is RECORDED}"] = counts
        roles.close()
    assert metrics[1] == pytest.approx(metrics[0], rel=0.02, abs=0.01)
    for name in ("update_policy", "update_value"):
        plain, recorded = found[f"{name} 1 False"], found[f"{name} 1 True"]
        num_passes = ROLLOUT // MICRO_BATCH
        assert recorded.kernels["graph"] == num_passes
        assert recorded.num_kernels <= 12 * num_passes + 40 < plain.num_kernels / 8
        assert (recorded.num_syncs, recorded.uploads.total()) == (2, 0), recorded.syncs
