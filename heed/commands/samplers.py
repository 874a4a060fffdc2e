"""Commands about sampling (docs/samplers.md): `heed replay` samples a response of PPO again, bit for bit, and shows
what PPO made of it; `heed verify-sampler` tests whether a sampling engine holds the policy that it is sent.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stages.progress import console, results_console

if TYPE_CHECKING:
    from heed.jobs.replay import Replayed
    from lm.samplers.verify import Check


COLUMNS = ("logprob", "kl", "teacher", "reward", "value", "advantage", "ratio", "ratio_after", "weight")


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/demo.")],
    iteration: Annotated[int, typer.Option(min=1, help="Iteration that learned from the response, counted from 1.")],
    response: Annotated[int, typer.Option(min=0, help="Which of the iteration's responses, counted from 0.")],
    stage: Annotated[str, typer.Option(help="The PPO stage; ppo_2 in the second of a job's rounds.")] = "ppo",
) -> None:
    """Sample a response of PPO again, compare it with the record bit for bit, and show every token's score, KL,
    advantage, ratio and weight, and the chain back to the labels.

    Exit code 1: it is another response than the recorded one.
    """
    from files.conversations import spoken
    from heed.jobs.replay import replay_response

    with console.status("starting") as status:
        found, chain = replay_response(
            run, stage, iteration, response,
            lambda done, total: status.update(f"iteration {iteration - total + done} of {iteration}"),
        )  # fmt: skip
    out = results_console()
    for message in found.prompt.messages:
        out.print(Text.assemble((f"{message['role']}: ", "bold"), spoken(message)))
    out.print(Text.assemble(("response: ", "bold"), found.response))
    out.print()
    out.print(_table(found))
    out.print()
    _compare("weights", found.sampled_by, found.recorded_sampled_by)
    _compare("response", found.digest, found.recorded_digest)
    _compare("score", repr(found.score), repr(found.recorded_score))
    out.print(Text.assemble(("computed again: ", "bold"), f"iterations {found.from_iteration} to {iteration}", "\n"))
    out.print(Text("made from", style="bold"))
    for link in chain:
        sha256 = f" (SHA-256 {link.sha256[:16]}...)" if link.sha256 else ""
        out.print(Text.assemble("  ", (link.name, "bold"), f": {link.what}{sha256}"))
    if not found.is_same:
        raise typer.Exit(1)


def _table(found: "Replayed") -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("token", *COLUMNS):
        table.add_column(column.replace("_", " "), justify="left" if column == "token" else "right", no_wrap=True)
    for token in found.tokens:
        numbers = (f"{getattr(token, column):.4g}" if token.is_written else "" for column in COLUMNS)
        table.add_row(Text(repr(token.text), style="" if token.is_written else "dim"), *numbers)
    return table


def _compare(what: str, found: str, recorded: str) -> None:
    verdict = ("the same bits as recorded", "green") if found == recorded else (f"recorded was {recorded}", "bold red")
    results_console().print(Text.assemble((f"{what}: ", "bold"), found, ", ", verdict))


# ---- heed verify-sampler ----


class PrecisionName(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


def verify_sampler(
    engine: Annotated[
        str, typer.Argument(help="heed, vllm, or FILE.py:FUNCTION that makes a sampler of a model directory.")
    ],
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/sft/model.")],
    precision: Annotated[PrecisionName, typer.Option(help="Precision of the engine and of the true policy.")] = (
        PrecisionName.fp32
    ),
    python: Annotated[
        str, typer.Option(help="Interpreter that has the engine (default: this one; for vllm, that of `make vllm`).")
    ] = "",
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Processes that sample together, each with a share of the weights.")
    ] = 1,
    draws: Annotated[
        int, typer.Option(min=1, help="Responses to test for being draws; smaller faults need more of them.")
    ] = 512,
) -> None:
    """Test whether a sampling engine holds the policy that it is sent, and name the fault if it does not.

    Exit code 1: it does not.
    """
    from heed.commands.options import model_folder, refuse_run_folder
    from lm.hub import is_gguf, refuse_adapter
    from lm.samplers.verify import VLLM
    from lm.samplers.vllm_engine import require_vllm

    refuse_adapter(model)
    model = model_folder(model) if is_gguf(str(model)) else model
    refuse_run_folder(model)
    if not (model / "config.json").is_file():
        raise ValueError(f"{model}: a model directory with a config.json was expected")
    if engine == VLLM:
        python = require_vllm(python, option="--python")
    found, passed = results_console(), True
    with console.status("loading the engine") as status:
        for check in _checks(engine, model, precision.value, python, tensor_parallel_size, draws):
            mark = ("ok    ", "green") if check.passed else ("FAILED", "bold red")
            found.print(Text.assemble(mark, " ", (check.name, "bold"), ": ", check.found))
            status.update(f"after: {check.name}")
            passed = passed and check.passed
    if not passed:
        found.print("the engine does not hold the policy that it is sent", style="bold red")
        raise typer.Exit(1)
    found.print("the engine holds the policy that it is sent", style="green")


def _checks(engine: str, model: Path, precision: str, python: str, team_size: int, num_draws: int) -> "Iterator[Check]":
    """Yields the checks as they finish. They are made by a team of processes, all of which run the same test.

    Raises: ValueError for the user's mistakes; RunError if the process ends before all checks are done.
    """
    from cluster.processes import free_port
    from lm.samplers.verify import DONE, MISTAKE, Check
    from training.notices import RunError

    reading, writing = os.pipe()
    command = [python or sys.executable, "-P", "-m", "lm.samplers.verify", engine, str(model), precision]
    # The test runs thousands of small products: threads that spin between them take three times the CPU time.
    environment = os.environ | {"GOMP_SPINCOUNT": "0"}
    by_rank: list[dict[str, str]] = [{}]
    if team_size > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(team_size), **address}
        by_rank = [{"RANK": str(rank), **device} for rank, device in enumerate(_own_devices(team_size))]
    last: dict[str, Any] = {}
    with ExitStack() as ending, tempfile.TemporaryFile("w+") as said:  # a pipe that nobody reads would fill up
        for rank in reversed(range(team_size)):
            pipe = writing if rank == 0 else ending.enter_context(open(os.devnull, "w")).fileno()
            process = subprocess.Popen(
                [*command, str(team_size), str(num_draws), str(pipe)],
                stdout=said,
                stderr=said,
                text=True,
                pass_fds=(pipe,),
                env=environment | by_rank[rank],
            )
            ending.callback(process.wait)
            ending.callback(process.kill)  # the others wait for one that has failed
        os.close(writing)
        with os.fdopen(reading) as lines:
            for line in lines:
                last = json.loads(line)
                if not {DONE, MISTAKE} & last.keys():
                    yield Check(**last)
        code = process.wait()
        said.seek(0)
        output = said.read().strip().splitlines()
    if MISTAKE in last:
        raise ValueError(last[MISTAKE])
    if DONE not in last:
        why = output[-1] if output else "it wrote nothing"
        raise RunError(f"{engine} ended with exit code {code} before the test did: {why}")


def _own_devices(team_size: int) -> list[dict[str, str]]:
    """Returns by rank the variable that shows it a GPU of its own; nothing on a machine without GPUs.

    Raises: ValueError for too few GPUs.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        return [{}] * team_size
    if count < team_size:
        raise ValueError(
            f"--tensor-parallel-size is {team_size}; at most {count} was expected, as many as there are GPUs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in visible.split(",")[:team_size]]
