"""`heed replay`: samples a response again, bit for bit. Either one of PPO, and shows what PPO made of it
(docs/samplers.md), or both answers of a task of the arena (docs/arena.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from heed.arena.policies import ArenaPolicy, ArenaSampling, LocalSpeaker, Messages
from stages.progress import console, results_console

if TYPE_CHECKING:
    from ppo.replay import Replayed
    from preferences.records import Task

COLUMNS = ("logprob", "kl", "teacher", "reward", "value", "advantage", "ratio", "ratio_after", "weight")


def replay(
    run: Annotated[
        str, typer.Argument(help="The folder of a run, such as runs/demo; with --task, a label store: path or URL.")
    ],
    iteration: Annotated[
        int | None, typer.Option(min=1, help="Iteration that learned from the response, counted from 1.")
    ] = None,
    response: Annotated[
        int | None, typer.Option(min=0, help="Which of the iteration's responses, counted from 0.")
    ] = None,
    stage: Annotated[str, typer.Option(help="The PPO stage; ppo_2 in the second of a job's rounds.")] = "ppo",
    task: Annotated[
        str, typer.Option(help="A task of the arena, by the id that the lead's pages show: sample its answers again.")
    ] = "",
    policy: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER: where a policy of the task is now; may repeat.")
    ] = None,
) -> None:
    """Sample a response of PPO again, compare it with the record bit for bit, and show every token's score, KL,
    advantage, ratio and weight, and the chain back to the labels. With --task, sample both answers of a task of the
    arena again.

    Exit code 1: it is another response than the recorded one, or nothing could be sampled again.
    """
    if task:
        if iteration is not None or response is not None:
            raise ValueError("--task with --iteration or --response: a task, or a response of PPO, was expected")
        _replay_task(run, task, policy or [])
        return
    if iteration is None or response is None:
        missing = "--iteration" if iteration is None else "--response"
        raise ValueError(f"{missing} is missing; --iteration and --response, or --task for the arena, were expected")
    if policy:
        raise ValueError("--policy is for answers of the arena; --task was expected with it")
    _replay_response(Path(run), stage, iteration, response)


def _replay_task(store: str, task: str, policies: Sequence[str]) -> None:
    from evaluation.inputs import named_specs
    from preferences.database import require_store
    from preferences.store import LabelStore

    require_store(store)
    for spec in policies:
        if "=" not in spec:
            raise ValueError(f"--policy {spec}: NAME=FOLDER was expected")
    with LabelStore(store) as opened:
        found = opened.task(task)
    with console.status("sampling"):
        answers = replay_task(found, dict(named_specs(policies, "policy")))
    out = results_console()
    for answer in answers:
        if answer.why_not:
            out.print(Text.assemble((f"{answer.policy}: ", "bold"), f"not sampled again: {answer.why_not}"))
            continue
        out.print(Text.assemble((f"{answer.policy}: ", "bold"), answer.text))
        _compare("tokens", answer.tokens_sha256, answer.recorded_sha256)
        for difference in answer.differences:
            out.print(Text(f"  {difference}"))
    if not any(answer.is_same for answer in answers) or any(not (a.why_not or a.is_same) for a in answers):
        raise typer.Exit(1)


@dataclass(frozen=True)
class ReplayedAnswer:
    """An answer, sampled again: `text` and `tokens_sha256` next to the recorded ones; or why it was not."""

    policy: str
    recorded: str
    recorded_sha256: str
    text: str = ""
    tokens_sha256: str = ""
    why_not: str = ""
    differences: Sequence[str] = ()  # of this machine from the recorded one

    @property
    def is_same(self) -> bool:
        return self.text == self.recorded and self.tokens_sha256 == self.recorded_sha256


def replay_task(task: "Task", moved: Mapping[str, str]) -> list[ReplayedAnswer]:
    """Samples both answers of a task of the arena again. `moved` says where a policy's model is now, by name.

    Raises: ValueError for a task that the arena did not make, an unknown name, and a model with other files.
    """
    records = task.details.get("sampled")
    if task.details.get("from") != "arena" or not isinstance(records, list):
        raise ValueError(f"task {task.task_id!r} does not come from the arena, so its answers cannot be sampled again")
    names = [str(record["name"]) for record in records]
    for name in moved:
        if name not in names:
            raise ValueError(f"--policy {name}=...: one of {' and '.join(names)} was expected")
    from preferences.records import Message

    asked = [one.fields for one in task.prompt]
    contexts = task.details.get("contexts", [asked, asked])
    answers = task.details.get("answers", task.responses)
    return [
        _replay(record, [Message(*fields).turn for fields in context], answer, moved)
        for record, context, answer in zip(records, contexts, answers, strict=True)
    ]


def _replay(record: Mapping[str, Any], messages: Messages, answer: str, moved: Mapping[str, str]) -> ReplayedAnswer:
    name = str(record["name"])
    if record["kind"] == "endpoint":
        why = f"{record['spec']} is an endpoint: it gives no digest of its weights, and may ignore seeds"
        return ReplayedAnswer(name, answer, "", why_not=why)
    policy = ArenaPolicy(name, "model", moved.get(name, record["spec"]), record["sha256"])
    sampling = ArenaSampling(*(record[field] for field in ("temperature", "max_new_tokens", "seed")))
    speaker = LocalSpeaker.load(policy, sampling, record["threads"])
    answering = speaker.answer(messages, record["seed"])
    while True:
        try:
            next(answering)
        except StopIteration as ended:
            written = ended.value
            break
    before, now = _machine(record), _machine(written.record)
    differences = [
        f"{field}: {before.get(field, 'nothing')} was recorded, this is {now.get(field, 'nothing')}"
        for field in {**before, **now}
        if before.get(field) != now.get(field)
    ]
    return ReplayedAnswer(
        name, answer, record["tokens_sha256"], written.text, written.record["tokens_sha256"], differences=differences
    )


def _machine(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an answer's bits depend on besides its inputs: device, dtype, threads, and versions by name."""
    return {field: record[field] for field in ("device", "dtype", "threads")} | dict(record["versions"])


def _replay_response(run: Path, stage: str, iteration: int, response: int) -> None:
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
