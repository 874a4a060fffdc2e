"""PPO's memory as `heed plan` bounds it, against the tensors of two CPU ranks in each phase.

This file is also the ranks' program: `python test_planned_memory.py FOLDER`. docs/plan.md has its figures; run with
`pytest tests/ppo/test_planned_memory.py -s` to see them.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch

from benchmarks.live_bytes import LiveBytes, environment
from heed.jobs.memory import Layout, Memory, Mode, PPOModels, PPOWork, count, forward_pass, ppo_memory
from lm.adapters import save_trained
from lm.config import ModelConfig, Precision
from lm.lora import LoRAConfig, WithAdapters
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.source import load, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, save_model
from ppo.algorithm import GAE
from ppo.config import EMAConfig, PPOConfig, PPOLoRAConfig
from ppo.generator import Generator
from ppo.learner import Learner
from ppo.rank import InitialModels, ScoreScale
from ppo.rollout import PolicyBatch, ValueBatch
from ppo.scorer import Asked, Scorer
from ppo.shared_body import SharedBodyLearner
from tests.tiers import in_ci, tried
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig

pytestmark = pytest.mark.long

CONFIG = ModelConfig(
    vocab_size=1024, max_position_embeddings=80, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=512,
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=1e-4, schedule="constant")
# The reward model reads one more token, EOS.
NUM_RANKS, ROWS, MICRO_BATCH, MICRO_BATCHES, PROMPT, RESPONSE = 2, 8, 4, 2, 16, 47
PASSES = (MICRO_BATCH,) * MICRO_BATCHES
AT_LEAST, AT_MOST = 0.97, 1.15  # of what is measured: a phase's bound, and the bound of the largest phase
Kind = Literal["full", "adapters", "shared body"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CASES: list[tuple[Mode, Any, Precision, Kind]] = [
    ("fast", 0, "fp32", "full"), ("balanced", 3, "fp32", "full"), ("small", 3, "bf16", "full"),
    ("fast", 0, "bf16", "adapters"), ("balanced", 2, "bf16", "shared body"),
]  # fmt: skip
OF_CI = [CASES[1], CASES[3]]
LORA = LoRAConfig(rank=8)
# With adapters most of the memory is the body, which has to be large compared with what matrix products use meanwhile.
SHAPES = {kind: CONFIG.model_copy(update={"vocab_size": 8192, "num_hidden_layers": 4}) for kind in KINDS}
SHAPES["full"] = CONFIG
MEGABYTE = 2**20


def ppo_config(memory: Mode, kind: Kind) -> PPOConfig:
    return PPOConfig(
        prompts=DataConfig(source="unread.jsonl"),
        num_iterations=1,
        rollout_batch_size=NUM_RANKS * ROWS,
        minibatch=BatchConfig(batch_size=NUM_RANKS * MICRO_BATCHES * MICRO_BATCH, micro_batch_size=MICRO_BATCH),
        max_new_tokens=RESPONSE,
        policy_optimizer=ADAMW,
        advantage=GAE(value_optimizer=ADAMW),
        memory=memory,
        ema=EMAConfig(decay=0.5),
        lora=None if kind == "full" else PPOLoRAConfig(rank=LORA.rank, shared_body=kind == "shared body"),
    )


def run(folder: Path, memory: Mode, zero_stage: Any, precision: Precision, kind: Kind) -> dict[str, int]:
    """Returns the bytes of this rank's tensors at the peak of each phase of a second iteration, after a checkpoint."""
    models = InitialModels(folder / kind / "sft", folder / kind / "model", ScoreScale(0.0, 1.0), None)
    config, engine = ppo_config(memory, kind), EngineConfig(precision=precision, zero_stage=zero_stage, trackers=())
    gc.collect()  # of the case before
    live = LiveBytes()
    before = live.now
    own_scorer = None if config.shared_body else Scorer(config, engine, models)
    kind_of_learner = SharedBodyLearner if config.shared_body else Learner
    generator, learner = Generator(config, engine, models), kind_of_learner(config, engine, models, NUM_RANKS)
    scorer, reference = own_scorer or learner, learner if config.lora else own_scorer
    prompts = np.random.default_rng(learner.policy.rank).integers(8, SHAPES[kind].vocab_size, (ROWS, PROMPT)).tolist()
    for iteration in range(2):
        gc.collect()  # cycles that Python has not looked at yet
        if memory == "small":
            learner.make_room()
        with live.phase("generate"):
            rollout = generator.generate(range(ROWS), prompts, range(ROWS))
        with live.phase("score by the reward model"):
            scorer.scores(rollout, Asked())
        if config.shared_body:
            with live.phase("measure"):
                learner.measure(rollout, PASSES)
        else:
            learner.policy_logprobs(rollout, PASSES)
            with live.phase("score by the reference"):
                reference.reference_logprobs(rollout, PASSES)
            learner.values(rollout, PASSES)
        part = rollout.rows(slice(0, MICRO_BATCHES * MICRO_BATCH))
        ones_BR = torch.ones(len(part), RESPONSE)
        mask_BR = part.response_mask_BR
        num_tokens = NUM_RANKS * int(mask_BR.sum())
        policy = PolicyBatch(part, ones_BR, ones_BR, mask_BR, num_tokens, torch.empty(0, dtype=torch.int64), 0, PASSES)
        value = ValueBatch(part, ones_BR, ones_BR, mask_BR, num_tokens, PASSES)
        for update in range(2):  # in the first one of "small", the value function's optimizer states are still away
            with live.phase("policy"):
                learner.update_policy(policy, 1e-4, 2 * iteration + update)
            with live.phase("value"):
                learner.update_value(value, 1e-4, 2 * iteration + update)
        with live.phase("sync"):
            generator.receive(learner.advance_and_send())
        if iteration == 0:
            learner.save(folder / "checkpoints", 1, {}, {})
            learner.finish_saving()
    learner.policy.barrier()
    learner.close()
    return {name: phase.peak - before for name, phase in live.phases.items()}


def rank_program(folder: Path) -> None:
    # Accelerate goes from plain ranks to DeepSpeed within a process, but not back.
    cases = [case for case in CASES if str(case) in json.loads(os.environ["TRIED"])]
    found = {str(case): run(folder, *case) for case in sorted(cases, key=lambda case: case[1])}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def planned(memory: Mode, zero_stage: Any, precision: Precision, kind: Kind) -> Memory:
    shape, lora = SHAPES[kind], None if kind == "full" else LORA
    layout = Layout(NUM_RANKS, zero_stage, is_bf16=precision == "bf16", is_gpu=False)
    policy, value = count(shape, ADAMW, lora=lora), count(shape, ADAMW, num_scores=1, lora=lora)
    reward = value if kind == "shared body" else count(shape, ADAMW, num_scores=1)
    of, scored = (forward_pass(layout, MICRO_BATCH, PROMPT + RESPONSE + end) for end in (0, 1))
    logits = MICRO_BATCH * RESPONSE * shape.vocab_size
    work = PPOWork(of, scored, logits, ROWS, PROMPT, RESPONSE, MICRO_BATCHES, memory, shares_body=kind == "shared body")
    return ppo_memory(PPOModels(policy, value, reward), layout, work)


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planned")
    tokenizer = Tokenizer.train(["a cat sat on a mat and saw one red bird"] * 9, 300, "chat")
    for kind, shape in SHAPES.items():
        sft = folder / kind / "sft"
        sft.parent.mkdir()
        policy = LanguageModel(shape)
        init_weights(policy, 1)
        save_model(sft, policy, policy.state_dict(), tokenizer)
        body = WithNewHead(sft, LanguageModel, ScalarModel, seed=2)
        reward = load(WithAdapters(body, LORA, 3))
        weights = [*reward.named_parameters(), *reward.named_buffers()]
        save_trained(folder / kind, on_meta(body.build), reward, weights, tokenizer, LORA, sft)
    start_two_ranks(__file__, folder, TRIED=json.dumps(tried(request, "case")), **environment(folder))
    found: dict[str, Any] = json.loads((folder / "rank-0.json").read_text())
    return found


@pytest.mark.parametrize("case", in_ci(CASES, OF_CI), ids=str)
def test_no_phase_takes_more_than_the_plan_says(ranks: dict[str, Any], case: tuple[Mode, Any, Precision, Kind]) -> None:
    memory, measured = planned(*case), ranks[str(case)]
    held = sum(memory.held.values())
    phases = {name: held + sum(parts.values()) for name, parts in memory.phases.items()}
    for name, found in measured.items():
        cells = f"{phases[name] / MEGABYTE:,.1f} | {found / MEGABYTE:,.1f} | {phases[name] / found - 1:+.1%}"
        print(f"\n| {case} | {name} | {cells} |", end="")
    for name, found in measured.items():
        assert phases[name] >= AT_LEAST * found, name
    assert memory.peak <= AT_MOST * max(measured.values())


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
