"""IFEval (Zhou et al. 2023, arXiv 2311.07911): instructions whose following a program can check.

An item is one instruction. The instructions of one prompt share its answer, so they form a cluster. The prompt's key is
the id of its request and of its first instruction.
"""

from collections.abc import Sequence

from evaluation.suites.suite import Item, Measure, Model, Request, Row, Scored, Suite, Tools, id_field, read_by_id
from files.fields import list_field, objects_field, text_field
from reward.endpoint import Answer
from reward.verifiers.checks import Check

MAX_NEW_TOKENS = 1280  # as lm-evaluation-harness allows

MEASURES = tuple(
    Measure(name, description, is_share=True)
    for name, description in (
        ("prompt_strict", "Share of prompts whose answer follows every instruction."),
        ("instruction_strict", "Share of instructions that are followed."),
        (
            "prompt_loose",
            "Share of prompts whose answer follows every instruction, each in at least one of eight variants of the"
            " answer: with or without asterisks, first line and last line.",
        ),
        ("instruction_loose", "Share of instructions that are followed in at least one of these variants."),
    )
)


def read(source: str) -> list[Item]:
    """Reads rows with `key`, `prompt`, `instruction_id_list` and `kwargs`, one of each per instruction.

    Raises: ValueError naming file, line and field.
    """
    return [item for items in read_by_id(source, _row).values() for item in items]


def score(model: Model, items: Sequence[Item], _tools: Tools) -> list[Scored]:
    """Each prompt is asked once. Its two measures of the whole prompt are values of its first instruction."""
    prompts = {item.cluster: item for item in items}
    requests = [
        Request(messages=item.messages, max_new_tokens=MAX_NEW_TOKENS, item_id=key) for key, item in prompts.items()
    ]
    answers = dict(zip(prompts, model.answer(requests), strict=True))
    verdicts = {key: _verdicts(item.data["checks"], answers[key].text) for key, item in prompts.items()}
    return [_scored(item, answers[item.cluster], *verdicts[item.cluster]) for item in items]


def _row(where: str, row: Row) -> tuple[str, list[Item]]:
    """Returns a prompt's key and the items of its instructions."""
    key, prompt = id_field(where, row, "key"), text_field(where, row, "prompt")
    kinds, arguments = list_field(where, row, "instruction_id_list"), objects_field(where, row, "kwargs")
    if not kinds or len(kinds) != len(arguments):
        raise ValueError(
            f"{where}: {len(kinds)} of field 'instruction_id_list' and {len(arguments)} of field 'kwargs'; at least one"
            " instruction, and as many of both, were expected"
        )
    checks = [
        Check.of(where, text_field(where, {"instruction_id_list": kind}, "instruction_id_list"), kind_arguments)
        for kind, kind_arguments in zip(kinds, arguments, strict=True)
    ]
    messages = [{"role": "user", "content": prompt}]
    return key, [
        Item(
            f"{key}:{n}" if n > 1 else key,
            messages,
            group=check.kind,
            cluster=key,
            data={"checks": checks, "number": n},
            asked_id=key,
        )
        for n, check in enumerate(checks, start=1)
    ]


def variants(answer: str) -> list[str]:
    """Returns the eight variants of an answer for the loose measures: whole, without its first line, without its last
    line, without both, and each of these again without asterisks.
    """
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [text.replace("*", "") for text in cut]


def _verdicts(checks: Sequence[Check], answer: str) -> tuple[list[bool], list[bool]]:
    """Returns which instructions an answer follows, strictly and loosely."""
    loosely = [any(map(check.passes, variants(answer))) for check in checks]
    return [check.passes(answer) for check in checks], loosely


def _scored(item: Item, answer: Answer, strictly: Sequence[bool], loosely: Sequence[bool]) -> Scored:
    index = item.data["number"] - 1
    values = {"instruction_strict": float(strictly[index]), "instruction_loose": float(loosely[index])}
    if index == 0:
        values |= {"prompt_strict": float(all(strictly)), "prompt_loose": float(all(loosely))}
    if answer.failure:
        return Scored(item.item_id, {}, failures=dict.fromkeys(values, answer.failure))
    return Scored(item.item_id, values, answer.text)


SUITE = Suite(
    name="ifeval",
    title="IFEval: checkable instructions (Zhou et al. 2023, arXiv 2311.07911)",
    asks="conversations",
    measures=MEASURES,
    read=read,
    score=score,
    files="instruction_following_eval/data/input_data.jsonl of"
    " https://github.com/google-research/google-research (Apache 2.0, 207 kB)",
    source="google/IFEval",
)
