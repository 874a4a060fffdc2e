"""Compares the memory of a stage's process with the estimate of `heed plan`: `python -m benchmarks.speed memory`.

It runs pretraining (a few steps and a checkpoint) and colocated PPO (an iteration and a checkpoint) on one CPU rank at
ZeRO 0, each in a separate process, and measures the peak growth of the process's private memory: once with an allocator
that returns freed memory immediately, which shows what is actually held, and once with the workers' allocator, which
keeps pages. docs/plan.md has other ZeRO stages, for training only.
"""

import json
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed.own import OneRow
from benchmarks.speed.process import peak_growth, run
from benchmarks.speed.table import taken_on
from benchmarks.speed.work import Sizes, write_work
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.memory import Memory
from heed.jobs.plan import RANK, Setting, make_plan
from heed.jobs.times import GIB, Hardware
from lm.model import LanguageModel
from lm.weights import ModelFolder
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.stage import STAGE as PPO
from pretrain.stage import STAGE as PRETRAIN
from sft.stage import STAGE as SFT
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.objectives import CausalLMObjective

# The demo's job with a model large enough to outweigh the libraries' memory: 29M parameters.
SHAPE = (
    "model.vocab_size=8192", "model.max_position_embeddings=256", "model.hidden_size=512",
    "model.num_hidden_layers=8", "model.num_attention_heads=8",
    "model.num_key_value_heads=8", "model.intermediate_size=2048",
)  # fmt: skip
ALONE = ("workers=1", "ppo.ptx=none", "ppo.num_epochs=1", "ppo.ema.decay=0.9")
# Small batches: the plan's estimate for activations is an upper bound, so they should be a small part of the total.
BATCHES = (
    "pretrain.batch={batch_size=8, micro_batch_size=4}", "pretrain.seq_len=128", "sft.seq_len=128",
    "ppo.rollout_batch_size=16", "ppo.minibatch={batch_size=16, micro_batch_size=4}", "ppo.max_new_tokens=64",
)  # fmt: skip
STEPS = 3
CASES = ("pretrain fp32", "pretrain bf16", "ppo fp32", "ppo bf16")
ALLOCATORS = {"gives back": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "131072"}, "workers'": {}}


def job_of(precision: str, overrides: Sequence[str]) -> JobConfig:
    return load_job(None, (*SHAPE, *ALONE, *BATCHES, f"engine.precision={precision}", *overrides))


def planned(job: JobConfig, stage: str) -> Memory:
    """Returns the planned memory of a stage. Of the hardware, it only matters that there is no GPU."""
    hardware = Hardware("cpu", GIB, 1e12, 1e10, 0.0, is_gpu=False)
    plan = make_plan(job, Setting(hardware, share_of_peak=0.4, assumed_rows=1000))
    return next(found.memory[RANK] for found in plan.stages if found.name == stage)


def write_parents(job: JobConfig, folder: Path) -> None:
    """Writes models and data with the job's shape and lengths; weights are random."""
    assert job.model is not None
    ppo, sft = job.section_of(PPO), job.section_of(SFT)
    response, rows = ppo.max_new_tokens, ppo.rollout_batch_size
    write_work(folder, job.model, Sizes(sft.seq_len - response, response, sft.seq_len, rows, 1, 1))


def pretrain(job: JobConfig, folder: Path) -> None:
    """Runs steps of the stage's loop, with a checkpoint before the last step."""
    import numpy as np

    config, shape = job.section_of(PRETRAIN), job.model
    assert shape is not None
    micro = config.batch.micro_batch_size
    source = ModelFolder(folder / "policy", LanguageModel)
    engine = Engine(source, config.optimizer, job.engine, world_size=1, micro_batch=micro)
    rows_BT = np.random.default_rng(0).integers(8, shape.vocab_size, (64, config.seq_len), dtype=np.int32)
    objective = CausalLMObjective(rows_BT)
    loop = LoopConfig("memory", 0, STEPS, config.batch, save_every_steps=STEPS - 1, evaluate_every_steps=STEPS + 1)
    TrainingLoop(engine, loop, objective, OneRow(objective), folder / "run").run()
    engine.close()


def ppo(job: JobConfig, folder: Path) -> None:
    """Runs one worker with all roles: an iteration, a checkpoint, and another iteration while that is written."""
    config = job.section_of(PPO)
    models = InitialModels(folder / "policy", folder / "reward", ScoreScale(0.0, 1.0), None)
    roles = Roles.in_process(config, job.engine, models)
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=0, seed=0)
    for iteration in range(2):
        controller.step(iteration)
        if iteration == 0:
            roles.learners.save(folder / "checkpoints", 1, {}, {})
    roles.learners.finish_saving()
    roles.close()


STAGES: dict[str, Callable[[JobConfig, Path], None]] = {"pretrain": pretrain, "ppo": ppo}


def measure_case(case: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns bytes: the plan's parts and peak, the growth of this process, and its peak resident set size."""
    stage, precision = case.split()
    job = job_of(precision, overrides)
    small = job_of(precision, [*overrides, "model.hidden_size=16", "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
                               "model.num_key_value_heads=2", "model.intermediate_size=16",
                               "model.vocab_size=300"])  # fmt: skip
    for warming in (small, job):  # the first run absorbs the memory that libraries allocate on first use
        with tempfile.TemporaryDirectory() as folder:
            write_parents(warming, Path(folder))
            _, grown = peak_growth(partial(STAGES[stage], warming, Path(folder)))
    memory = planned(job, stage)
    return {
        "held": dict(memory.held),
        "peak_phase": memory.peak_phase,
        "planned": memory.peak,
        "grown": grown,
        "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Measures each case with each allocator, each in its own process.

    Raises: RuntimeError with the last line of a process that failed.
    """
    found: dict[str, Any] = {}
    for case in CASES:
        found[case] = {name: [] for name in ALLOCATORS}
        for _ in range(rounds):
            for name, variables in ALLOCATORS.items():
                ran = run([sys.executable, "-m", "benchmarks.speed.memory", "case", case], 1, variables)
                if "failed" in ran:
                    raise RuntimeError(f"{case}, {name}: {ran['failed']}")
                found[case][name].append(ran)
    return {"cases": found}


def markdown(found: Mapping[str, Any]) -> str:
    """Returns the table, in MiB; medians over rounds."""
    lines = [
        *taken_on(found, found["rounds"]),
        "",
        "| stage | peak in | planned, MiB | grown, MiB | | grown with the workers' allocator | whole process |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, runs in found["cases"].items():
        strict, kept = runs["gives back"], runs["workers'"]
        plan, grown = strict[0]["planned"], median(run["grown"] for run in strict)
        cells = [
            case, strict[0]["peak_phase"], _mib(plan), _mib(grown), f"{plan / grown - 1:+.0%}",
            _mib(median(run["grown"] for run in kept)), _mib(median(run["resident"] for run in kept)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    first = next((runs["gives back"][0] for case, runs in found["cases"].items() if case == "ppo bf16"), None)
    if first:
        parts = ", ".join(f"{name} {_mib(size)}" for name, size in first["held"].items())
        lines += ["", f"What PPO in bf16 holds throughout, as planned, in MiB: {parts}."]
    return "\n".join(lines)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


if __name__ == "__main__":
    result = measure_case(sys.argv[2]) if sys.argv[1] == "case" else measure(int(sys.argv[2]))
    print("\n" + json.dumps(result), flush=True)
