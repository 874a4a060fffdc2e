"""Measures one row, or the ceilings, with the code that Heed's stages run. The last line that it prints is JSON."""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from benchmarks.gpu import ceiling
from benchmarks.gpu.counts import decoded_bytes, planned_bytes, training_flops
from benchmarks.gpu.device import describe, now, peak_bytes
from benchmarks.gpu.rows import ROWS, TINY_ROWS, Generation, Iteration, Pretraining, Row
from benchmarks.speed.own import ENGINE, NO_END, OPTIMIZER, OneRow, Timed, ppo_config
from benchmarks.speed.protocol import Clock, Task
from cluster.remote import Closeable, Local
from lm.decoding import StepKind
from lm.generation import generate
from lm.model import LanguageModel, ScalarModel
from lm.samplers.engine import max_difference
from lm.sampling import Choice
from lm.source import ModelSource, RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.controller import PPOController
from ppo.generator import Generator, Generators
from ppo.learner import Learner, Learners
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Direct, Roles
from ppo.rollout import Asked
from ppo.scorer import Scorer, Scorers
from training.config import BatchConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.objectives import CausalLMObjective

Role = TypeVar("Role", bound=Closeable)

COPIED_BYTES, TINY_COPIED_BYTES = 2**32, 2**22
SEED_0 = partial(RandomInit[nn.Module], seed=0)
FIRST_WORD = 300  # tokens below are bytes and special tokens, which no drawn prompt contains
CEILINGS = "ceilings"  # instead of a row's name
# The phase of an iteration that each method of PPO's roles belongs to.
PHASES: dict[Callable[..., object], str] = {
    Generator.generate: "sampling",
    Scorer.scores: "scoring",
    Learner.policy_logprobs: "scoring",
    Scorer.reference_logprobs: "scoring",
    Learner.values: "scoring",
    Learner.update_policy: "learning",
    Learner.update_value: "learning",
    Learner.advance_and_send: "weights",
    Generator.receive: "weights",
}


class DeviceClock(Clock):
    """A clock whose steps end when the device has finished them."""

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__(task)
        self.device = device

    def tick(self, amount: float) -> None:
        now(self.device)
        super().tick(amount)


def measure_pretraining(row: Row, sizes: Pretraining, device: torch.device, folder: Path) -> dict[str, float]:
    """Times steps of the stages' own loop; the last one is started but not timed."""
    rows = sizes.micro_batch * sizes.num_micro_batches
    task = Task("train", str(folder), rows, sizes.micro_batch, sizes.seq_len, 0, row.warmup_steps, row.timed_steps)
    clock = DeviceClock(task, device)
    tokens = np.random.default_rng(0).integers(0, sizes.model.vocab_size, (4 * rows, sizes.seq_len + 1), np.int32)
    objective = CausalLMObjective(tokens)
    source = RandomInit(partial(LanguageModel, sizes.model), seed=0)
    engine_config = ENGINE.model_copy(update=dict.fromkeys(sizes.options, True))
    engine: Engine[Any] = Engine(source, OPTIMIZER, engine_config, world_size=1, micro_batch=sizes.micro_batch)
    batch = BatchConfig(batch_size=rows, micro_batch_size=sizes.micro_batch)
    never = task.num_steps + 1
    config = LoopConfig("gpu", 0, task.num_steps + 1, batch, save_every_steps=never, evaluate_every_steps=never)
    TrainingLoop(engine, config, Timed(objective, clock, objective.num_tokens), OneRow(objective), folder).run()
    result = clock.result("heed")
    rate = float(result["work"]) / float(result["seconds"])
    engine.close()
    flops = rate * training_flops(sizes.model, sizes.seq_len)
    return {"tokens_per_second": rate, "flops_per_second": flops}


def measure_generation(row: Row, sizes: Generation, device: torch.device, _folder: Path) -> dict[str, float]:
    """Times whole responses, and the steps after the prompts' pass, by subtracting the time of one-token responses."""
    model = load(RandomInit(partial(LanguageModel, sizes.model), seed=0)).to(device, torch.bfloat16).eval()
    prompts = draw_prompts(sizes.batch, sizes.prompt_tokens, sizes.model.vocab_size)

    def seconds(response_tokens: int, steps: StepKind) -> float:
        taken = []
        for number in range(row.warmup_steps + row.timed_steps):
            started = now(device)
            sampled = generate(
                model,
                prompts,
                max_new_tokens=response_tokens,
                end_ids=NO_END,
                choice=Choice(),
                seeds=range(number * sizes.batch, (number + 1) * sizes.batch),
                max_rows=sizes.batch,
                steps=steps,
            )
            taken.append(now(device) - started)
            assert {len(response) for response in sampled.responses} == {response_tokens}
        return median(taken[row.warmup_steps :])

    reading = seconds(1, "eager")
    fixed, eager = (seconds(sizes.response_tokens, kind) for kind in ("fixed", "eager"))
    tokens = sizes.batch * sizes.response_tokens
    return {
        "tokens_per_second": tokens / fixed,
        "eager_tokens_per_second": tokens / eager,
        "decoding_seconds": fixed - reading,
        "eager_decoding_seconds": eager - reading,
        "decoded_bytes": decoded_bytes(sizes),
    }


class Phased(Local[Role]):
    """A role in this process whose calls are timed by phase."""

    def __init__(self, kept: Role, device: torch.device, seconds: defaultdict[str, float]) -> None:
        super().__init__(kept)
        self.device, self.seconds = device, seconds

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = now(self.device)
        result = super().run(method, *args, **kwargs)
        if method in PHASES:
            self.seconds[PHASES[method]] += now(self.device) - started
        return result


def measure_iteration(row: Row, sizes: Iteration, device: torch.device, folder: Path) -> dict[str, float]:
    """Returns the mean of the timed iterations of one rank with all roles."""
    write_models(folder, sizes)
    models = InitialModels(folder / "policy", folder / "reward", ScoreScale(0.0, 1.0), None)
    num_iterations = row.warmup_steps + row.timed_steps
    minibatch = BatchConfig(batch_size=sizes.minibatch, micro_batch_size=sizes.micro_batch)
    config = ppo_config(num_iterations, sizes.rollout, minibatch, sizes.response_tokens)
    seconds: defaultdict[str, float] = defaultdict(float)
    scorer = Phased(Scorer(config, ENGINE, models), device, seconds)
    generator = Phased(Generator(config, ENGINE, models), device, seconds)
    learner = Phased(Learner(config, ENGINE, models, num_workers=1), device, seconds)
    roles = Roles(
        config,
        Learners(learner, minibatch),
        Generators(generator),
        Scorers(scorer, Asked(), minibatch, scorer),
        Direct(learner, generator),
    )
    prompts = draw_prompts(sizes.rollout, sizes.prompt_tokens, sizes.model.vocab_size)
    most = max_difference("bf16", sizes.model.num_hidden_layers)
    controller = PPOController(
        config, roles, prompts, models.scale, num_pretraining_rows=0, seed=0, max_difference=most
    )
    tokens, started = 0.0, now(device)
    for iteration in range(num_iterations):
        if iteration == row.warmup_steps:
            seconds.clear()
            tokens, started = 0.0, now(device)
        tokens += controller.step(iteration)["response_tokens"] * sizes.rollout
    whole = (now(device) - started) / row.timed_steps
    roles.close()
    phases = {name: seconds[name] / row.timed_steps for name in dict.fromkeys(PHASES.values())}
    named = {f"{name}_seconds": mean for name, mean in phases.items()}
    rest = whole - sum(phases.values())
    rate = tokens / row.timed_steps / whole
    return {"seconds": whole, **named, "rest_seconds": rest, "response_tokens_per_second": rate}


def draw_prompts(number: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Returns prompts of equal length, all different."""
    drawn: list[list[int]] = np.random.default_rng(0).integers(FIRST_WORD, vocab_size, (number, num_tokens)).tolist()
    return drawn


def write_models(
    folder: Path,
    sizes: Iteration,
    draw: Callable[[Callable[[], nn.Module]], ModelSource[nn.Module]] = SEED_0,
) -> None:
    """Writes `policy/` and `reward/`: random weights, and a byte vocabulary that no text is ever encoded with."""
    tokenizer = Tokenizer.train(["a"], 256 + 8, "chat")
    kinds: tuple[tuple[str, Callable[[], nn.Module]], ...] = (
        ("policy", partial(LanguageModel, sizes.model)),
        ("reward", partial(ScalarModel, sizes.critic)),
    )
    for name, build in kinds:
        model: Any = load(draw(build))
        save_model(folder / name, model, model.state_dict(), tokenizer)


def measure(row: Row, device: torch.device) -> dict[str, float]:
    """Returns a row's results, with the peak memory, measured and planned."""
    sizes = row.sizes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if isinstance(sizes, Pretraining):
            found = measure_pretraining(row, sizes, device, folder)
        elif isinstance(sizes, Generation):
            found = measure_generation(row, sizes, device, folder)
        else:
            found = measure_iteration(row, sizes, device, folder)
    return {**found, "peak_bytes": peak_bytes(device), "planned_bytes": planned_bytes(sizes)}


def main(arguments: Sequence[str]) -> None:
    """Arguments: a row's name or "ceilings", the device, and "tiny" or "full"."""
    name, device, size = arguments[0], torch.device(arguments[1]), arguments[2]
    rows = TINY_ROWS if size == "tiny" else ROWS
    if name == CEILINGS:
        copied = TINY_COPIED_BYTES if size == "tiny" else COPIED_BYTES
        found: dict[str, Any] = {"machine": describe(device), "rates": ceiling.rates(rows, device, copied)}
    else:
        found = measure(next(row for row in rows if row.name == name), device)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
