"""Muon: PyTorch's bits, with the work shared by ranks; an update agrees with a singular value decomposition.

This file is also the ranks' program: `python test_optimizers.py FOLDER`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training import optimizers
from training.optimizers import NUM_ITERATIONS, Muon, dtype_on, orthogonalised

# Five with gradients, so that of three ranks one has no matrix in the last turn; the third has none.
SHAPES = [(6, 4), (4, 12), (5, 5), (3, 4), (12, 4), (6, 6)]
FROZEN = 2
NUM_RANKS, NUM_STEPS = 3, 3
RATE, DECAY = 0.02, 0.1


def steps(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    """The matrices after some steps, whose gradients do not depend on the matrices."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(matrices)
    for _ in range(NUM_STEPS):
        for number, matrix in enumerate(matrices):
            matrix.grad = torch.randn(matrix.shape, generator=generator) if number != FROZEN else None
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


def of_pytorch(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")


def of_heed(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Muon(matrices, lr=RATE, weight_decay=DECAY)


def rank_program(folder: Path) -> None:
    dist.init_process_group("gloo")
    computed = []

    def counting(matrix: Tensor, dtype: torch.dtype) -> Tensor:
        computed.append(tuple(matrix.shape))
        return orthogonalised(matrix, dtype)

    optimizers.orthogonalised = counting
    matrices, slow_rank = steps(of_heed), 1
    setattr(optimizers, "cpu_multiplies_bf16", lambda: dist.get_rank() != slow_rank)  # noqa: B010 - it is not exported
    found = {"matrices": matrices, "computed": computed, "dtype": dtype_on(torch.device("cpu"))}
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    start_two_ranks(__file__, folder, NUM_RANKS)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


def test_ranks_have_the_bits_of_pytorchs_muon(ranks: list[dict[str, Any]]) -> None:
    expected = steps(of_pytorch)
    for found in ranks:
        assert all(torch.equal(*pair) for pair in zip(found["matrices"], expected, strict=True))


def test_each_matrix_is_orthogonalised_by_one_rank(ranks: list[dict[str, Any]]) -> None:
    assert [len(found["computed"]) for found in ranks] == [2 * NUM_STEPS, 2 * NUM_STEPS, NUM_STEPS]
    shapes = [shape for number, shape in enumerate(SHAPES) if number != FROZEN]
    assert sorted(shape for found in ranks for shape in found["computed"]) == sorted(NUM_STEPS * shapes)


def test_ranks_on_different_cpus_agree_on_a_type(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found["dtype"] for found in ranks] == [torch.float32] * NUM_RANKS
    for is_fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(optimizers, "cpu_multiplies_bf16", lambda answer=is_fast: answer)
        assert dtype_on(torch.device("cpu")) == expected


def test_one_process_alone_has_the_bits_of_pytorchs_muon() -> None:
    assert all(torch.equal(*pair) for pair in zip(steps(of_heed), steps(of_pytorch), strict=True))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_in_fp32_it_agrees_with_a_singular_value_decomposition(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(NUM_ITERATIONS):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    expected = (u * values @ v).float()
    torch.testing.assert_close(orthogonalised(matrix, torch.float32), expected, atol=1e-5, rtol=1e-5)
    assert (orthogonalised(matrix, torch.bfloat16) - expected).abs().max() > 1e-4  # so the type is what is asked for


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
