"""Peaks of memory on the fake device, whose allocator counts as CUDA's does, against the bounds of `heed plan`: PPO,
training steps, generation. Run by test_fake_cuda.py; `-s` prints docs/plan.md's figures.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch

from heed.jobs.memory import (
    Layout,
    Mode,
    PPOModels,
    PPOWork,
    count,
    forward_pass,
    ppo_memory,
    sampling_phase,
    training_memory,
)
from lm import layers
from lm.adapters import save_trained
from lm.config import ModelConfig, Precision
from lm.decoding import FixedSteps
from lm.generation import generate
from lm.lora import LoRAConfig, WithAdapters
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.sampling import Choice
from lm.source import RandomInit, load, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, save_model
from ppo import kept_passes
from ppo.algorithm import GAE
from ppo.config import EMAConfig, PPOConfig, PPOLoRAConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from tests.tiers import in_ci
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import Engine
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import bucket, pack

SHAPE = ModelConfig(
    vocab_size=1024, max_position_embeddings=80, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=256,
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=1e-4, schedule="constant")
# The reward model reads one token more, the end: both kinds of PPO's rows are 64 wide.
ROWS, MICRO_BATCH, MICRO_BATCHES, PROMPT, RESPONSE = 8, 4, 2, 16, 47
AT_LEAST, AT_MOST = 0.95, 1.35  # of what is measured: a phase's bound, and the bound of the largest phase
MEGABYTE = 2**20
PHASES = {  # by the method that is called
    "generate": "generate", "scores": "score by the reward model", "reference_logprobs": "score by the reference",
    "update_policy": "policy", "update_value": "value", "receive": "sync", "measure": "measure",
}  # fmt: skip
CUDA = torch.device("cuda")


def layout(precision: Precision) -> Layout:
    return Layout(1, 0, is_bf16=precision == "bf16", is_gpu=True)


@contextmanager
def peak(found: dict[str, int], name: str) -> Iterator[None]:
    """The most bytes that are allocated meanwhile, in `found`."""
    torch.cuda.reset_peak_memory_stats()
    yield
    found[name] = max(found.get(name, 0), torch.cuda.max_memory_allocated())


def compare(kind: str, planned: dict[str, int], measured: dict[str, int]) -> None:
    for name, found in measured.items():
        cells = f"{planned[name] / MEGABYTE:,.2f} | {found / MEGABYTE:,.2f} | {planned[name] / found - 1:+.1%}"
        print(f"\n| {kind} | {name} | {cells} |", end="")
    for name, found in measured.items():
        assert planned[name] >= AT_LEAST * found, name
    assert max(planned.values()) <= AT_MOST * max(measured.values())


LORA = LoRAConfig(rank=8)
Kind = Literal["full", "adapters", "shared body"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train(["a cat sat on a mat and saw one red bird"] * 9, 300, "chat")
    policy = LanguageModel(SHAPE)
    init_weights(policy, 1)
    save_model(folder / "sft", policy, policy.state_dict(), tokenizer)
    body = WithNewHead(folder / "sft", LanguageModel, ScalarModel, seed=2)
    reward = load(WithAdapters(body, LORA, 3))
    weights = [*reward.named_parameters(), *reward.named_buffers()]
    save_trained(folder, on_meta(body.build), reward, weights, tokenizer, LORA, folder / "sft")
    return InitialModels(folder / "sft", folder / "model", ScoreScale(0.0, 1.0), None)


# --- PPO -------------------------------------------------------------------------------------------------------------


def ppo_config(memory: Mode, kind: Kind) -> PPOConfig:
    return PPOConfig(
        prompts=DataConfig(source="unread.jsonl"),
        num_iterations=2,
        rollout_batch_size=ROWS,
        minibatch=BatchConfig(batch_size=MICRO_BATCHES * MICRO_BATCH, micro_batch_size=MICRO_BATCH),
        num_epochs=2,
        max_new_tokens=RESPONSE,
        policy_optimizer=ADAMW,
        advantage=GAE(value_optimizer=ADAMW),
        memory=memory,
        ema=EMAConfig(decay=0.5),
        lora=None if kind == "full" else PPOLoRAConfig(rank=LORA.rank, shared_body=kind == "shared body"),
    )


def watch(roles: Roles, found: dict[str, int]) -> None:
    """Measure each phase from now on."""

    def measured(phase: str, method: Callable[..., Any], *args: Any) -> Any:
        with peak(found, phase):
            return method(*args)

    for role in (roles.learners, roles.generators, roles.scorers):
        kept = role.ranks.kept  # type: ignore[attr-defined]
        for name, phase in PHASES.items():
            if hasattr(kept, name):
                setattr(kept, name, partial(measured, phase, getattr(kept, name)))


PRECISIONS: list[Precision] = ["bf16", "fp32"]
CASES: list[tuple[Mode, Precision, Kind]] = [
    ("fast", "bf16", "full"), ("small", "fp32", "full"), ("balanced", "bf16", "adapters"),
    ("small", "bf16", "shared body"), ("balanced", "bf16", "full"),
]  # fmt: skip
OF_CI = [CASES[1]]


@pytest.mark.parametrize("case", in_ci(CASES, OF_CI), ids=str)
def test_phases_of_ppo_peak_below_the_plan(
    case: tuple[Mode, Precision, Kind], models: InitialModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two iterations on one rank, once there are moments. What a phase needs of the CPU's memory is not
    on the device. Kept passes take what else is free.
    """
    mode, precision, kind = case
    monkeypatch.setattr(kept_passes, "USABLE", 0.0)
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine, config = EngineConfig(precision=precision, trackers=()), ppo_config(mode, kind)
    roles = Roles.in_process(config, engine, models)
    prompts = np.random.default_rng(1).integers(8, SHAPE.vocab_size, (ROWS, PROMPT)).tolist()
    controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=0, seed=0)
    controller.step(0)
    found: dict[str, int] = {}
    watch(roles, found)
    controller.step(1)
    roles.close()
    policy, value = count(SHAPE, ADAMW, lora=config.lora), count(SHAPE, ADAMW, num_scores=1, lora=config.lora)
    reward = value if config.shared_body else count(SHAPE, ADAMW, num_scores=1)
    of = forward_pass(layout(precision), MICRO_BATCH, bucket(PROMPT + RESPONSE))
    logits = MICRO_BATCH * RESPONSE * SHAPE.vocab_size
    work = PPOWork(of, of, logits, ROWS, PROMPT, RESPONSE, MICRO_BATCHES, mode, shares_body=config.shared_body)
    memory = ppo_memory(PPOModels(policy, value, reward), layout(precision), work)
    held = sum(memory.held.values())
    planned = {name: held + sum(parts.values()) for name, parts in memory.phases.items()}
    compare(f"PPO {kind} {mode} {precision}", planned, {name: size - before for name, size in found.items()})


@pytest.mark.parametrize("precision", in_ci(PRECISIONS, ["bf16"]))
def test_passes_are_kept_where_memory_is_free_and_no_bit_changes(
    precision: Precision, models: InitialModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second iteration of a process on, within the bytes that were reserved for them."""

    def run(usable: float) -> tuple[list[dict[str, float]], list[tuple[str, int, int, int]]]:
        monkeypatch.setattr(kept_passes, "USABLE", usable)
        config = ppo_config("fast", "full").model_copy(update={"num_iterations": 3})
        roles = Roles.in_process(config, EngineConfig(precision=precision, trackers=()), models)
        prompts = np.random.default_rng(1).integers(8, SHAPE.vocab_size, (ROWS, PROMPT)).tolist()
        controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=0, seed=0)
        learner, held = roles.learners.ranks.kept, list[tuple[str, int, int, int]]()  # type: ignore[attr-defined]
        kept = learner.kept
        reserve, put = kept.reserve, kept.put

        def reserved(*arguments: Any) -> int:
            found: int = reserve(*arguments)
            held.append((arguments[0], torch.cuda.memory_allocated(), kept._bytes.get(arguments[0], 0), found))
            return found

        def noted(model: str, parts: Any, outputs: Any) -> None:
            name, before, num_bytes, num_kept = held.pop()
            tested = sum(logits.nbytes for logits, _ in learner.tested) if model == "policy" else 0
            held.append((name, torch.cuda.memory_allocated() - before - tested, num_bytes, num_kept))
            put(model, parts, outputs)

        kept.reserve, kept.put = reserved, noted
        metrics = [controller.step(iteration) for iteration in range(3)]
        roles.close()
        return metrics, held

    usable = kept_passes.USABLE
    (expected, none), (metrics, held) = run(0.0), run(usable)
    assert metrics == expected
    assert [num_kept for *_, num_kept in none] == [0] * 6
    assert [(name, num_kept) for name, *_, num_kept in held[2:]] == [("policy", 2), ("value", 2)] * 2
    for _, taken, num_bytes, _ in held[2:]:
        rounded = 2 * count(SHAPE, ADAMW).total if precision == "bf16" else 0
        assert num_bytes + rounded >= AT_LEAST * taken
        assert num_bytes <= AT_MOST * taken


# --- training, generation, measuring ---------------------------------------------------------------------------------


STEPS: list[tuple[Precision, bool, str]] = [
    ("bf16", False, "whole"),
    ("bf16", True, "packed"),
    ("fp32", False, "packed"),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_training_steps_peak_below_the_plan(step: tuple[Precision, bool, str]) -> None:
    check_training_steps(SHAPE, *step)


def test_a_step_with_chunks_of_logits_peaks_below_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and their gradient would take twice the rest; eight chunks of them do not."""
    monkeypatch.setattr(layers, "CHUNK_LOGITS", 2**18)
    check_training_steps(SHAPE.model_copy(update={"vocab_size": 8192}), "bf16", False, "whole")


def check_training_steps(shape: ModelConfig, precision: Precision, recomputes: bool, rows: str) -> None:
    gc.collect()
    before, seq_len = torch.cuda.memory_allocated(), shape.max_position_embeddings - 1
    drawn = np.random.default_rng(0).integers(3, shape.vocab_size, (MICRO_BATCH, seq_len + 1)).astype(np.int32)
    parts = [part for row in drawn.tolist() for part in (row[:30], row[30:seq_len])]
    objective: Any = CausalLMObjective(drawn)
    if rows == "packed":
        objective = PackedObjective(pack([(part, [True] * len(part)) for part in parts], seq_len, 0))
    config = EngineConfig(precision=precision, checkpoint_activations=recomputes, trackers=())
    engine: Engine[LanguageModel] = Engine(
        RandomInit(lambda: LanguageModel(shape), seed=0), ADAMW, config, world_size=1, micro_batch=MICRO_BATCH
    )
    found: dict[str, int] = {}
    for _ in range(2):
        with peak(found, "step"):
            engine.accumulate(
                [np.arange(MICRO_BATCH)] * MICRO_BATCHES,
                lambda chosen: (objective.loss(engine.model, chosen, engine.device)[0] / 1000, {}),
            )
            engine.step()
    engine.close()
    plan = Layout(1, 0, is_bf16=precision == "bf16", is_gpu=True, recomputes=recomputes)
    of = forward_pass(plan, MICRO_BATCH, seq_len)
    num_logits = MICRO_BATCH * seq_len * shape.vocab_size
    memory = training_memory(count(shape, ADAMW), plan, of, num_logits, MICRO_BATCHES)
    kind = f"{rows} rows {precision}{', recomputed' * recomputes}"
    compare(kind, {"step": memory.peak}, {"step": found["step"] - before})


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_generation_peaks_below_the_plan(precision: Precision) -> None:
    model = LanguageModel(SHAPE)
    init_weights(model, 1)
    model.to(CUDA, torch.bfloat16 if precision == "bf16" else torch.float32)
    prompts = np.random.default_rng(1).integers(8, SHAPE.vocab_size, (ROWS, PROMPT)).tolist()
    before, found = torch.cuda.memory_allocated(), dict[str, int]()
    with peak(found, "generate"):
        generate(
            model, prompts, max_new_tokens=RESPONSE, end_ids=(), choice=Choice(), seeds=range(ROWS),
            steps=FixedSteps(model),
        )  # fmt: skip
    phase = sampling_phase(SHAPE, layout(precision), count(SHAPE, ADAMW).total, ROWS, PROMPT, RESPONSE)
    held = sum(p.nbytes for p in model.parameters())
    compare(
        f"generation {precision}",
        {"generate": held + sum(phase.values())},
        {"generate": held + found["generate"] - before},
    )
