"""`ppo.memory` on a GPU: the same results in every mode, and in each phase the bytes that the mode leaves there."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from tests.gpu.models import prompts, shape
from tests.ppo.phases import PHASES
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig

MODES = ("fast", "balanced", "small")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    folder, config = tmp_path_factory.mktemp("models"), shape(vocab_size=512)
    tokenizer = Tokenizer.train(["a cat sat on a mat and saw one red bird"] * 9, config.vocab_size, "chat")
    for name, model in {"sft": LanguageModel(config), "reward": ScalarModel(config)}.items():
        init_weights(model, 1)
        save_model(folder / name, model, model.state_dict(), tokenizer)
    return InitialModels(folder / "sft", folder / "reward", ScoreScale(0.0, 1.0), None)


def config_of(memory: str) -> PPOConfig:
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", eps=1e-3)
    values: dict[str, Any] = {
        "prompts": DataConfig(source="unread.jsonl"),
        "num_iterations": 2,
        "rollout_batch_size": 8,
        "minibatch": BatchConfig(batch_size=8, micro_batch_size=4),
        "max_new_tokens": 6,
        "policy_optimizer": optimizer,
        "advantage": {"value_optimizer": optimizer},
        "memory": memory,
    }
    return PPOConfig(**values)


def peaks_of(roles: Roles) -> dict[str, int]:
    """The most bytes that each phase allocates on the GPU, from now on."""
    peaks: dict[str, int] = {}

    def measured(phase: str, method: Callable[..., Any], *args: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = method(*args)
        peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        return found

    for role in (roles.learners, roles.generators, roles.scorers):
        kept = role.ranks.kept  # type: ignore[attr-defined]
        for name, phase in PHASES.items():
            if hasattr(kept, name):
                setattr(kept, name, partial(measured, phase, getattr(kept, name)))
    return peaks


def test_every_mode_gives_the_same_and_leaves_what_it_says(models: InitialModels) -> None:
    metrics, peaks, sizes = {}, {}, {}
    for memory in MODES:
        gc.collect()
        before = torch.cuda.memory_allocated()
        roles = Roles.in_process(config_of(memory), EngineConfig(precision="bf16", trackers=()), models)
        found = peaks_of(roles)
        controller = PPOController(
            config_of(memory), roles, prompts(8, 40), models.scale, num_pretraining_rows=0, seed=5
        )
        metrics[memory] = [controller.step(iteration) for iteration in range(2)]
        peaks[memory], sizes[memory] = {phase: peak - before for phase, peak in found.items()}, bytes_of(roles)
        roles.close()
        del roles, controller, found
    for memory in ("balanced", "small"):
        for ours, fast in zip(metrics[memory], metrics["fast"], strict=True):
            assert ours == pytest.approx(fast, rel=0.02, abs=0.02)  # a GPU may add in another order each time
    generator, frozen, moments = sizes["fast"]
    saved = {m: {phase: peaks["fast"][phase] - peak for phase, peak in peaks[m].items()} for m in ("balanced", "small")}
    for memory, away in {"balanced": 0, "small": moments}.items():
        least = {"sample": frozen + away, "measure": generator + frozen + away, "learn": generator + frozen}
        for phase, size in least.items():
            assert saved[memory][phase] > 0.95 * size, (memory, phase)
    # One of two frozen models, alike in size, is there to score, or in "small" its largest parts.
    assert saved["balanced"]["score"] > 0.95 * (generator + frozen / 2)
    assert saved["small"]["score"] > saved["balanced"]["score"] + 0.95 * moments


def bytes_of(roles: Roles) -> tuple[int, int, int]:
    """Of the generator, of both frozen models, and of the moments of both trained ones."""
    learner, generator, scorer = (
        role.ranks.kept
        for role in (roles.learners, roles.generators, roles.scorers)  # type: ignore[attr-defined]
    )
    trained = [p for engine in (learner.policy, learner.value) for p in engine.module.parameters()]
    frozen = [*scorer.reference.module.parameters(), *scorer.network.module.parameters()]
    sampling = generator.sampler.policy.parameters()
    return sum(p.nbytes for p in sampling), sum(p.nbytes for p in frozen), 8 * sum(p.numel() for p in trained)
