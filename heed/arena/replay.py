"""Samples an answer of the arena again, from the task that a verdict made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heed.arena.policies import ArenaPolicy, ArenaSampling, LocalSpeaker, Messages
from preferences.records import Message, Task


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


def replay_task(task: Task, moved: Mapping[str, str]) -> list[ReplayedAnswer]:
    """Samples both answers of a task again. `moved` says where a policy's model is now, by name.

    Raises: ValueError for a task that the arena did not make, an unknown name, and a model with other files.
    """
    records = task.details.get("sampled")
    if task.details.get("from") != "arena" or not isinstance(records, list):
        raise ValueError(f"task {task.task_id!r} does not come from the arena, so its answers cannot be sampled again")
    names = [str(record["name"]) for record in records]
    for name in moved:
        if name not in names:
            raise ValueError(f"--policy {name}=...: one of {' and '.join(names)} was expected")
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
    sampling = ArenaSampling(*(record[field] for field in ("temperature", "top_k", "top_p", "max_new_tokens", "seed")))
    speaker = LocalSpeaker.load(policy, sampling, record["threads"])
    answering = speaker.answer(messages, record["seed"])
    while True:
        try:
            next(answering)
        except StopIteration as ended:
            written = ended.value
            break
    differences = [
        f"{field}: {record[field]} was recorded, this is {written.record[field]}"
        for field in ("device", "dtype", "threads", "versions")
        if record[field] != written.record[field]
    ]
    return ReplayedAnswer(
        name, answer, record["tokens_sha256"], written.text, written.record["tokens_sha256"], differences=differences
    )
