"""Two gloo ranks match one rank's losses, gradient norms and weights at ZeRO 0, 1, 2 and 3, and resume bit for bit. One
rank resumes what two have saved, and two what one has saved, and the results agree up to rounding.

This file is also the ranks' program: `python test_two_ranks.py FOLDER`. All ZeRO stages run in one launch, because
starting DeepSpeed takes most of the time.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig, Precision
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.models import full_weights
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import PackedObjective
from training.packing import pack

CONFIG = ModelConfig(
    vocab_size=32,
    max_position_embeddings=24,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
)
# A large eps, because with tiny gradients Adam makes any rounding difference as large as the learning rate.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.02, schedule="linear", warmup_steps=1, weight_decay=0.1, eps=1e-4, max_grad_norm=0.3
)
NUM_STEPS = 3
BOTH = ("optimizer", "parameters")
BF16 = (1, 3)  # there the fp32 weights are separate from those of a pass
Case = tuple[int, int | None, tuple[str, ...]]
# ZeRO stages, the number of trained last layers, and what is offloaded.
CASES: list[Case] = [
    (0, None, ()), (0, 1, ()), (1, None, ()), (1, 1, ()), (2, None, ("optimizer",)), (3, None, ()), (3, 1, BOTH)
]  # fmt: skip


def name_of(zero_stage: int, trained_layers: int | None, offload: tuple[str, ...]) -> str:
    return f"zero-{zero_stage}-last-{trained_layers or 'all'}" + "-offload" * bool(offload)


def objective(seed: int, num_sequences: int) -> PackedObjective:
    """Packed rows with very different numbers of counted tokens."""
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
    precision: Precision = "fp32",
) -> dict[str, Any]:
    source = RandomInit(lambda: LanguageModel(CONFIG), seed=3)
    engine_config = EngineConfig(precision=precision, zero_stage=zero_stage, offload=offload, trackers=())
    optimizer = OPTIMIZER.model_copy(update={"trained_layers": trained_layers})
    engine = Engine(source, optimizer, engine_config, world_size=world_size, micro_batch=micro_batch)
    batch = BatchConfig(batch_size=4, micro_batch_size=micro_batch)
    loop_config = LoopConfig("test", 5, NUM_STEPS, batch, save_every_steps=2, evaluate_every_steps=2)
    # With 3 held-out rows, the last rank runs out of rows and repeats one that must not count.
    heldout = objective(9, 4)
    loop = TrainingLoop(engine, loop_config, objective(8, 12), heldout, folder)
    heldout_loss = loop.run()["loss"]
    weights = {name: weight.clone() for name, weight in full_weights(engine).items()}
    for_a_file = dict(engine.weights_for_file())
    if engine.is_main:
        assert for_a_file.keys() == weights.keys()
        assert all(torch.equal(for_a_file[name], weight) for name, weight in weights.items())
    else:
        assert not for_a_file
    engine.close()
    return {"heldout_loss": heldout_loss, "weights": weights, "num_heldout": len(heldout)}


def rank_program(folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case, precision, must_resume in program(world_size):
        found = train(folder / name, *case, world_size, 1, precision)
        torch.save(found, folder / f"{name}-rank-{rank}.pt")
        if must_resume:
            # This run finds the checkpoint of step 2 and repeats step 3, as after a kill.
            assert (folder / name / "checkpoints" / "step-000002" / "manifest.json").is_file()
            torch.distributed.barrier()
            if rank == 0:
                shutil.rmtree(folder / name / "checkpoints" / "step-000003")
            torch.distributed.barrier()
            again = train(folder / name, *case, world_size, 1, precision)
            torch.save(again, folder / f"{name}-rank-{rank}-again.pt")
    torch.distributed.destroy_process_group()


def program(world_size: int) -> list[tuple[str, Case, Precision, bool]]:
    """Runs by name, and whether they run twice; sorted by ZeRO stage, since Accelerate cannot switch back from
    DeepSpeed."""
    if world_size == 1:
        return [(f"two-to-one-{zero}", (zero, None, ()), "fp32", False) for zero in (1, 2, 3)]
    ours: list[tuple[str, Case, Precision, bool]] = [(name_of(*case), case, "fp32", True) for case in CASES]
    ours += [(f"one-to-two-{zero}", (zero, None, ()), "fp32", False) for zero in range(4)]
    ours += [(f"bf16-{zero}", (zero, None, ()), "bf16", True) for zero in BF16]
    return sorted(ours, key=lambda run: run[1][0])


OneRank = dict[int | None, tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """By number of trained layers: the folder and the results."""
    folder = tmp_path_factory.mktemp("one_rank")
    return {n: (folder / str(n), train(folder / str(n), 0, n, (), world_size=1, micro_batch=4)) for n in (None, 1)}


def copy_without_last(run: Path, folder: Path) -> None:
    """Copies all checkpoints of a run except the last, so that one step remains."""
    shutil.copytree(run / "checkpoints", folder / "checkpoints", ignore=shutil.ignore_patterns("step-000003"))


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None], one_rank: OneRank
) -> Path:
    """The folder of all runs with two ranks, some of which resume from the one-rank run's checkpoint."""
    folder = tmp_path_factory.mktemp("two_ranks")
    for zero in range(4):
        copy_without_last(one_rank[None][0], folder / f"one-to-two-{zero}")
    start_two_ranks(__file__, folder)
    return folder


@pytest.fixture(scope="module")
def two_to_one(
    tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None], two_ranks: Path
) -> dict[str, dict[str, Any]]:
    """Results of one rank that resumes from checkpoints of two, by the ZeRO stages of both."""
    folder = tmp_path_factory.mktemp("two_to_one")
    saved = {zero: two_ranks / name_of(zero, None, ("optimizer",) if zero == 2 else ()) for zero in range(4)}
    for zero in (1, 2, 3):
        copy_without_last(saved[zero], folder / f"two-to-one-{zero}")
    start_two_ranks(__file__, folder, num_ranks=1)
    found = {f"{zero} to {zero}": torch.load(folder / f"two-to-one-{zero}-rank-0.pt") for zero in (1, 2, 3)}
    for zero in (0, 3):  # only ZeRO 0 in this process, because Accelerate could not switch back from another stage
        copy_without_last(saved[zero], folder / f"two-to-one-{zero}-0")
        found[f"{zero} to 0"] = train(folder / f"two-to-one-{zero}-0", 0, None, (), world_size=1, micro_batch=2)
        assert len(curve(folder / f"two-to-one-{zero}-0")) == 1, "two of three steps were not taken from the checkpoint"
    return found


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
        assert_close(results["weights"], alone["weights"])


@pytest.mark.parametrize("name", [*(name_of(*case) for case in CASES), *(f"bf16-{zero}" for zero in BF16)])
def test_two_ranks_resume_bit_for_bit(two_ranks: Path, name: str) -> None:
    for rank in range(2):
        first, again = (
            torch.load(two_ranks / f"{name}-rank-{rank}{suffix}.pt")["weights"] for suffix in ("", "-again")
        )
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("zero_stage", range(4))
def test_two_ranks_go_on_from_what_one_saved(two_ranks: Path, one_rank: OneRank, zero_stage: int) -> None:
    name = f"one-to-two-{zero_stage}"
    assert len(curve(two_ranks / name)) == 1, "two of three steps were not taken from the checkpoint"
    for rank in range(2):
        assert_close(torch.load(two_ranks / f"{name}-rank-{rank}.pt")["weights"], one_rank[None][1]["weights"])


@pytest.mark.parametrize("stages", ["0 to 0", "1 to 1", "2 to 2", "3 to 3", "3 to 0"])
def test_one_rank_goes_on_from_what_two_saved(
    two_to_one: dict[str, dict[str, Any]], one_rank: OneRank, stages: str
) -> None:
    assert_close(two_to_one[stages]["weights"], one_rank[None][1]["weights"])


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, atol=2e-6, rtol=1e-5, msg=key)


def test_the_heldout_rows_do_not_divide_by_the_ranks(one_rank: OneRank) -> None:
    assert one_rank[None][1]["num_heldout"] % 2 == 1


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
