"""The step `two_ranks`: two ranks that share one GPU, next to one rank. Shows that paths work, not how fast they are.

NCCL refuses two ranks on a device, so these use gloo, which copies a GPU's tensors through the CPU's memory. Each part
is a pair of processes of its own, so that one that hangs or crashes leaves the others alone.
"""

import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from benchmarks.gpu.quarter.context import OPTIMIZER, QWEN, Drawn, shape
from benchmarks.gpu.quarter.run import read_json, write_json
from benchmarks.speed.own import NO_END
from cluster.processes import free_port
from lm.config import ModelConfig
from lm.generation import generate
from lm.model import LanguageModel
from lm.samplers.engine import digests_of, held_tensors
from lm.sampling import Choice
from lm.source import load
from lm.tensor_parallel import LanguageModelPart, Team
from ppo.rank import WeightBroadcast
from training import distributed
from training.config import EngineConfig
from training.engine import Engine
from training.objectives import CausalLMObjective

ROWS, STEPS, LAYERS = 8, 3, 4
LIMIT_SECONDS = 60  # of a part, and of a collective
SENT = 3  # tensors


@dataclass(frozen=True)
class Rank:
    """One of a part's ranks."""

    number: int
    num_ranks: int
    port: int
    device: torch.device
    tiny: bool

    @property
    def model(self) -> ModelConfig:
        return shape(QWEN, tiny=self.tiny, num_hidden_layers=LAYERS)

    def group(self) -> Any:
        """A process group of both ranks over gloo."""
        limit = timedelta(seconds=LIMIT_SECONDS)
        store = dist.TCPStore("127.0.0.1", self.port, self.num_ranks, is_master=self.number == 0, timeout=limit)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(store, self.number, self.num_ranks, limit)


# --- the parts, each on every rank ------------------------------------------------------------------------------------


def train(rank: Rank, **options: Any) -> dict[str, Any]:
    """Trains on one batch, of which each rank has its share. Returns the losses, the norms and tokens per second."""
    config = EngineConfig.model_validate({"precision": "bf16", "trackers": [], **options})
    seq_len = 32 if rank.tiny else 512
    source = Drawn(functools.partial(LanguageModel, rank.model), rank.device)
    with mock.patch.object(distributed, "InitProcessGroupKwargs", over_gloo):
        engine: Engine[LanguageModel] = Engine(
            source, OPTIMIZER, config, world_size=rank.num_ranks, micro_batch=ROWS // rank.num_ranks
        )
    rows = np.random.default_rng(0).integers(0, rank.model.vocab_size, (ROWS, seq_len + 1), dtype=np.int32)
    objective = CausalLMObjective(rows)
    share = np.array_split(np.arange(ROWS), engine.data_parallel_size)[engine.data_rank]
    count, found = objective.count(np.arange(ROWS)), []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.set_learning_rate(OPTIMIZER.learning_rate)
        engine.accumulate([share], lambda part: (objective.loss(engine.model, part, engine.device)[0] / count, {}))
        found.append((*engine.step(), time.perf_counter() - started))
    engine.close()
    losses, norms, seconds = (list(figures) for figures in zip(*found, strict=True))
    return {"losses": losses, "norms": norms, "tokens_per_second": count / seconds[-1]}


def over_gloo(backend: str, timeout: timedelta) -> InitProcessGroupKwargs:
    del backend
    return InitProcessGroupKwargs(backend="gloo", timeout=timeout)


def sample(rank: Rank) -> dict[str, Any]:
    """Samples in fp32 from the whole model, or from this rank's part of it. Returns the tokens."""
    model = load(Drawn(functools.partial(LanguageModel, rank.model), rank.device), rank.device).eval()
    if rank.num_ranks > 1:
        team = Team(rank.group(), rank.number, rank.num_ranks)
        part = LanguageModelPart(model.config, team).to(rank.device).eval()
        part.load_state_dict({name: part.cut(name, held) for name, held in held_tensors(model).items()}, strict=False)
        part.tie()
        model = part
    prompts = np.random.default_rng(1).integers(3, rank.model.vocab_size, (4, 9)).tolist()
    found = generate(
        model, prompts, max_new_tokens=8 if rank.tiny else 48, end_ids=NO_END, choice=Choice(), seeds=range(4),
        max_rows=4, steps="eager",
    )  # fmt: skip
    return {"tokens": found.responses}


def broadcast(rank: Rank) -> dict[str, Any]:
    """Rank 0 sends weights as the learners send theirs to generators. Returns how many arrive with other bits."""
    generator = torch.Generator(rank.device).manual_seed(0)
    size = 2**10 if rank.tiny else 2**26
    weights = {
        f"w{number}": torch.randn(size, generator=generator, device=rank.device).bfloat16() for number in range(SENT)
    }
    with mock.patch("ppo.rank.process_group", return_value=rank.group()):
        group = WeightBroadcast(
            "127.0.0.1", rank.port, rank.number, rank.num_ranks, device=rank.device, timeout_seconds=LIMIT_SECONDS
        )
    started = time.perf_counter()
    if rank.number == 0:
        group.send(weights, digests_of(weights))
        return {"wrong": 0, "seconds": time.perf_counter() - started}
    received = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    group.receive(received)
    wrong = sum(not torch.equal(received[name], tensor) for name, tensor in weights.items())
    return {"wrong": wrong, "seconds": time.perf_counter() - started}


Part = Callable[[Rank], dict[str, Any]]
PARTS: dict[str, Part] = {
    "zero1": functools.partial(train, zero_stage=1),
    "zero2": functools.partial(train, zero_stage=2),
    "zero3": functools.partial(train, zero_stage=3),
    "sequence": functools.partial(train, sequence_parallel_size=2),
    "replicated": train,
    "team": sample,
    "broadcast": broadcast,
}


def one_rank(rank: Rank) -> dict[str, Any]:
    """What the parts are compared with."""
    return {**train(rank), **sample(rank)}


# --- the processes ----------------------------------------------------------------------------------------------------


def measure(device: str, tiny: bool, folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields figures of each part once it has ended: the share by which the largest of losses and norms differs from
    one rank's (`PART_apart`), equal tokens, wrong tensors; or `PART_failed`. This process must not have begun CUDA.
    """
    end = time.monotonic() + seconds
    (one,) = _run("one", one_rank, 1, (device, tiny, folder), end)
    yield {"one_failed": one["failed"]} if "failed" in one else {"one_losses": one["losses"]}
    for name, part in PARTS.items():
        ranks = _run(name, part, 2, (device, tiny, folder), end)
        failed = [found["failed"] for found in ranks if "failed" in found]
        if failed or "failed" in one:
            yield {f"{name}_failed": failed[0] if failed else "one rank failed"}
        else:
            yield {f"{name}_{figure}": value for figure, value in _compared(ranks, one).items()}


def _compared(ranks: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, Any]:
    if "wrong" in ranks[0]:
        return {"wrong": sum(found["wrong"] for found in ranks), "seconds": max(found["seconds"] for found in ranks)}
    if "tokens" in ranks[0]:
        equal = [np.equal(found["tokens"], one["tokens"]).mean() for found in ranks]
        return {"equal_share": float(min(equal)), "ranks_agree": ranks[0]["tokens"] == ranks[1]["tokens"]}
    apart = [
        abs(ours / theirs - 1)
        for found in ranks
        for figure in ("losses", "norms")
        for ours, theirs in zip(found[figure], one[figure], strict=True)
    ]
    return {"apart": max(apart), "tokens_per_second": ranks[0]["tokens_per_second"]}


def _run(
    name: str, part: Part, num_ranks: int, where: tuple[str, bool, Path], end: float
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns what each rank of a part found; `failed` says what went wrong."""
    device, tiny, folder = where
    port, paths = free_port(), [folder / f"{name}-{number}.json" for number in range(num_ranks)]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_program, args=(part, number, num_ranks, port, device, tiny, path))
        for number, path in enumerate(paths)
    ]
    for process in ranks:
        process.start()
    last = min(end, time.monotonic() + LIMIT_SECONDS)
    for process in ranks:
        process.join(max(0.0, last - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    codes = [process.exitcode for process in ranks]
    return [read_json(path) or {"failed": f"not finished; exit codes {codes}"} for path in paths]


def _program(part: Part, number: int, num_ranks: int, port: int, device: str, tiny: bool, path: Path) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK="0", WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        if device == "cuda":
            torch.cuda.set_device(0)
        found = part(Rank(number, num_ranks, port, torch.device(device), tiny))
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
    write_json(path, found)
    os._exit(0)
