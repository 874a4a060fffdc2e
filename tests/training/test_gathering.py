"""Weights gathered one tensor at a time from two ranks, at every ZeRO stage, and the average of their shards.

This file is also the ranks' program: `python test_gathering.py FOLDER`.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.live_bytes import LiveBytes, environment
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from ppo.learner import MovingAverage
from tests.models import full_weights
from tests.tiers import in_ci, tried
from training import distributed
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine

pytestmark = pytest.mark.long

CONFIG = ModelConfig(
    vocab_size=129, max_position_embeddings=8, hidden_size=64, num_hidden_layers=12, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=127,
)  # fmt: skip
NUM_RANKS = 2
FILE_BYTES = 200_000  # the weights have 1.8 million
CASES = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]
OF_CI = [(0, "fp32"), (2, "fp32"), (3, "bf16")]


class CountedSource(RandomInit[LanguageModel]):
    """Counts the tensors that are read from it, and the bytes that their reader holds at each."""

    num_read = 0
    num_bytes = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        live = LiveBytes()
        before = live.now
        for pair in super().tensors():
            CountedSource.num_read += 1
            yield pair
            del pair
            CountedSource.num_bytes = live.now - before


def start_engine(zero_stage: int, precision: str, trained_layers: int | None = None) -> Engine[LanguageModel]:
    config = EngineConfig.model_validate({"precision": precision, "zero_stage": zero_stage, "trackers": ()})
    optimizer = OptimizerConfig(learning_rate=0.01, schedule="constant", trained_layers=trained_layers)
    source = CountedSource(lambda: LanguageModel(CONFIG), seed=3)
    return Engine(source, optimizer, config, world_size=NUM_RANKS, micro_batch=1)


def step(engine: Engine[LanguageModel]) -> None:
    rows = torch.tensor([[1, 2, 3 + engine.rank]])
    engine.accumulate([rows], lambda row: (engine.model(row).float().square().mean(), {}))
    engine.step()


def check_weights_are_the_rounded_masters(engine: Engine[LanguageModel], dtype: torch.dtype) -> None:
    expected = {name: tensor.to(dtype) for name, tensor in full_weights(engine).items()}
    found = {name: tensor.clone() for name, tensor in engine.weights(dtype)}
    assert list(found) == [name for name, _ in engine.module.named_parameters()]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    on_main = {name: tensor.clone() for name, tensor in engine.weights(dtype, on_main_alone=True)}
    assert on_main.keys() == (found.keys() if engine.is_main else set())
    assert all(torch.equal(tensor, found[name]) for name, tensor in on_main.items())


def check_files_and_average(engine: Engine[LanguageModel]) -> None:
    everywhere = {name: tensor.clone() for name, tensor in full_weights(engine).items()}
    average = MovingAverage(engine, 0.75)
    step(engine)
    average.advance()
    later, averaged = full_weights(engine), dict(average.weights_for_file())
    assert averaged.keys() == (everywhere.keys() if engine.is_main else set())
    for name, tensor in averaged.items():
        assert torch.equal(tensor, everywhere[name].lerp(later[name], 0.25)), name
    on_main = dict(engine.weights_for_file())
    assert on_main.keys() == averaged.keys()
    assert all(torch.equal(tensor, later[name]) for name, tensor in on_main.items())


def peak_of_streaming(engine: Engine[LanguageModel], dtype: torch.dtype, live: LiveBytes) -> int:
    """Returns the peak bytes of tensors beyond the engine's own."""
    with live.phase("weights"):
        for _ in engine.weights(dtype):
            pass
    return live.phases["weights"].growth


def peak_of_saving(engine: Engine[LanguageModel], folder: Path, live: LiveBytes) -> int:
    """Returns the peak bytes of tensors beyond the engine's own while rank 0 writes the model in several files."""
    tokenizer = Tokenizer.train(["words"], 270, "chat")
    with live.phase("save"):
        weights = engine.weights_for_file()
        if engine.is_main:
            save_model(folder, engine.module, weights, tokenizer, FILE_BYTES)
        engine.barrier()
    expected = full_weights(engine)
    if engine.is_main:
        assert len([*folder.glob("model-*-of-*.safetensors")]) > 5
        saved = dict(ModelFolder(folder, LanguageModel).tensors())
        assert saved.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())
    return live.phases["save"].growth


def rank_program(folder: Path) -> None:
    live = LiveBytes()
    distributed.BUCKET_BYTES = 10_000  # smaller than the largest tensors, as in large models
    found: dict[str, Any] = {}
    for stage, precision in (case for case in CASES if str(case) in json.loads(os.environ["TRIED"])):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        engine = start_engine(stage, precision)
        loaded = CountedSource.num_bytes
        try:
            step(engine)
            check_weights_are_the_rounded_masters(engine, dtype)
            check_files_and_average(engine)
            average = MovingAverage(engine, 0.75)
            held = sum(shard.length for shard in average.shards.values())
            growth = peak_of_streaming(engine, dtype, live) / dtype.itemsize
            saved = peak_of_saving(engine, folder / f"{stage}-{precision}", live)
            found[f"{stage}-{precision}"] = {
                "error": "", "loaded": loaded, "held": held, "growth": growth, "saved": saved,
            }  # fmt: skip
        except Exception:
            found[f"{stage}-{precision}"] = {"error": traceback.format_exc()}
        engine.close()
        partly = start_engine(stage, precision, trained_layers=1)
        CountedSource.num_read = 0
        try:
            step(partly)
            check_weights_are_the_rounded_masters(partly, dtype)
            CountedSource.num_read = 0
            for _ in partly.weights(dtype):
                pass
            found[f"{stage}-{precision}-partly"] = {"error": "", "num_read": CountedSource.num_read}
        except Exception:
            found[f"{stage}-{precision}-partly"] = {"error": traceback.format_exc()}
        partly.close()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gathering")
    start_two_ranks(__file__, folder, TRIED=json.dumps(tried(request, "case")), **environment(folder))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("case", in_ci(CASES, OF_CI), ids=str)
def test_gathered_weights_and_averages_of_shards(ranks: list[dict[str, Any]], case: tuple[int, str]) -> None:
    stage, precision = case
    sizes = [parameter.numel() for parameter in LanguageModel(CONFIG).parameters()]
    for rank in ranks:
        found = rank[f"{stage}-{precision}"]
        assert not found["error"], found["error"]
        # No second copy of the model: at most the last bucket, the next one, and what gloo has received of the next
        # ones, which depends on how far the other rank is ahead.
        assert found["loaded"] < (2.2 if stage in (1, 2) and precision == "bf16" else 4.2) * sum(sizes)
        assert found["growth"] <= 8 * max(sizes) < 0.4 * sum(sizes)
        assert found["saved"] <= FILE_BYTES + 4 * 3 * max(sizes) < 0.4 * 4 * sum(sizes)
    assert sum(rank[f"{stage}-{precision}"]["held"] for rank in ranks) == sum(sizes)


@pytest.mark.parametrize("case", in_ci(CASES, OF_CI), ids=str)
def test_frozen_weights_are_not_read_again(ranks: list[dict[str, Any]], case: tuple[int, str]) -> None:
    for rank in ranks:
        found = rank["-".join(map(str, [*case, "partly"]))]
        assert not found["error"], found["error"]
        assert found["num_read"] == 0


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
