"""Two gloo ranks match one rank's losses, gradient norms and weights at ZeRO 0, 1, 2 and 3, and resume bit for bit.

This file is also the ranks' program: `python test_two_ranks.py FOLDER`. All stages of ZeRO run in one launch, since
starting DeepSpeed is what takes long.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import Fresh
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import PackedObjective
from training.packing import pack

CONFIG = ModelConfig(
    vocab_size=32, context_tokens=24, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24
)
# A wide eps, since Adam makes any difference of rounding in a tiny gradient as large as the learning rate.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.02, schedule="linear", warmup_steps=1, weight_decay=0.1, eps=1e-4, max_grad_norm=0.3
)
NUM_STEPS = 3
BOTH = ("optimizer", "parameters")
Case = tuple[int, int | None, tuple[str, ...]]
# ZeRO stages, how many of the last layers are trained, and what is offloaded.
CASES: list[Case] = [
    (0, None, ()), (0, 1, ()), (1, None, ()), (1, 1, ()), (2, None, ("optimizer",)), (3, None, ()), (3, 1, BOTH)
]  # fmt: skip


def name_of(zero_stage: int, trained_layers: int | None, offload: tuple[str, ...]) -> str:
    return f"zero-{zero_stage}-last-{trained_layers or 'all'}" + "-offload" * bool(offload)


def objective(seed: int, num_sequences: int) -> PackedObjective:
    """Packed rows whose numbers of counted tokens differ widely."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 13, num_sequences)
    sequences = [
        (generator.integers(0, 32, length).tolist(), [t >= generator.integers(0, length) for t in range(length)])
        for length in lengths
    ]
    return PackedObjective(pack(sequences, 14, pad_id=0))


def train(
    folder: Path,
    zero_stage: int,
    trained_layers: int | None,
    offload: tuple[str, ...],
    world_size: int,
    micro_batch: int,
) -> dict[str, Any]:
    source = Fresh(lambda: LanguageModel(CONFIG), seed=3)
    engine_config = EngineConfig(precision="fp32", zero_stage=zero_stage, offload=offload, trackers=())
    optimizer = OPTIMIZER.model_copy(update={"trained_layers": trained_layers})
    engine = Engine(source, optimizer, engine_config, world_size=world_size, micro_batch=micro_batch)
    batch = BatchConfig(batch_size=4, micro_batch_size=micro_batch)
    loop_config = LoopConfig("test", 5, NUM_STEPS, batch, save_every_steps=2, evaluate_every_steps=2)
    # With 3 held-out rows the last rank runs out of rows and repeats one that must not count.
    heldout = objective(9, 4)
    loop = TrainingLoop(engine, loop_config, objective(8, 12), heldout, folder)
    heldout_loss = loop.run()["loss"]
    weights = {name: weight.clone() for name, weight in engine.full_weights().items()}
    for_a_file = engine.full_weights(on_main_alone=True)
    if engine.is_main or not zero_stage:
        assert for_a_file.keys() == weights.keys()
        assert all(torch.equal(for_a_file[name], weight) for name, weight in weights.items())
    else:
        assert not for_a_file
    engine.close()
    return {"heldout_loss": heldout_loss, "weights": weights, "num_heldout": len(heldout)}


def rank_program(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    for case in CASES:
        name = name_of(*case)
        torch.save(train(folder / name, *case, world_size=2, micro_batch=1), folder / f"{name}-rank-{rank}.pt")
        # This run finds the checkpoint of step 2 and does step 3 again, as after a kill.
        assert (folder / name / "checkpoints" / "step-000002" / "manifest.json").is_file()
        again = train(folder / name, *case, world_size=2, micro_batch=1)
        torch.save(again, folder / f"{name}-rank-{rank}-again.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    start_two_ranks(__file__, folder)
    return folder


OneRank = dict[int | None, tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """By how many layers are trained: the folder and the results."""
    folder = tmp_path_factory.mktemp("one_rank")
    return {n: (folder / str(n), train(folder / str(n), 0, n, (), world_size=1, micro_batch=4)) for n in (None, 1)}


def curve(folder: Path) -> list[list[float]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [[line["loss"], line["gradient_norm"], line["learning_rate"]] for line in lines]


@pytest.mark.parametrize("case", CASES, ids=lambda case: name_of(*case))
def test_two_ranks_match_one(two_ranks: Path, one_rank: OneRank, case: Case) -> None:
    alone_folder, alone = one_rank[case[1]]
    name = name_of(*case)
    expected, found = curve(alone_folder), curve(two_ranks / name)
    assert len(found) == len(expected) == NUM_STEPS
    assert max(norm for _, norm, _ in expected) > OPTIMIZER.max_grad_norm, "the clip must be at work"
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    for rank in range(2):
        results = torch.load(two_ranks / f"{name}-rank-{rank}.pt")
        assert results["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-5)
        assert results["weights"].keys() == alone["weights"].keys()
        for key, weight in alone["weights"].items():
            torch.testing.assert_close(results["weights"][key], weight, atol=2e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize("case", CASES, ids=lambda case: name_of(*case))
def test_two_ranks_resume_bit_for_bit(two_ranks: Path, case: Case) -> None:
    for rank in range(2):
        first, again = (
            torch.load(two_ranks / f"{name_of(*case)}-rank-{rank}{suffix}.pt")["weights"] for suffix in ("", "-again")
        )
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_heldout_rows_do_not_divide_by_the_ranks(one_rank: OneRank) -> None:
    assert one_rank[None][1]["num_heldout"] % 2 == 1


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
