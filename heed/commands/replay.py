"""`heed replay`: samples a response of PPO again, bit for bit, and shows what PPO made of it (docs/samplers.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from stages.progress import console, results_console

if TYPE_CHECKING:
    from heed.jobs.replay import Replayed

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
