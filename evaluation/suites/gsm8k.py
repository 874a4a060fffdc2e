"""GSM8K: 1,319 grade-school maths problems whose answer is one number (Cobbe et al. 2021, arXiv 2110.14168).

A model with a chat template gets the question and the instruction to end with "####" and the number. A model without
one continues plain text after eight solved problems, the first of train.jsonl if the data are a folder that has it
(chain of thought as in Wei et al. 2022, arXiv 2201.11903), or after none.

`strict_match` and `flexible_extract` are those of EleutherAI's lm-evaluation-harness (gsm8k.yaml), on these prompts.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path

from evaluation.suites.suite import Item, Measure, Model, Request, Row, Scored, Suite, Tools, failed, read_items
from files.fields import text_field
from files.rows import read_source
from reward.verifiers.answers import final_number

INSTRUCTION = 'Solve the problem step by step. On the last line, write "####" and then the answer, as a number only.'
NUM_SHOTS = 8
MAX_NEW_TOKENS = 512
STOP = ("\nQuestion:",)  # where a base model would make up another problem
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # annotations of the training data, such as <<48/2=24>>

# Of the harness.
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))

MEASURES = tuple(
    Measure(name, description, is_share=True)
    for name, description in (
        ("accuracy", "Share of answers whose final number is right; one without a readable number is wrong."),
        ("accuracy_if_read", "The same share among the answers from which one final number can be read."),
        ("strict_match", "lm-evaluation-harness: exact match of the number after '####'."),
        ("flexible_extract", "lm-evaluation-harness: exact match of the last number in the answer."),
    )
)


def read(source: str) -> list[Item]:
    """Reads rows of {"question", "answer"} whose answer ends with "#### N": a file, a hub id, or a folder with
    test.jsonl and perhaps train.jsonl. Raises: ValueError naming file, line and field.
    """
    folder = Path(source)
    test, train = folder / "test.jsonl", folder / "train.jsonl"
    shots = read_source(str(train), max_rows=NUM_SHOTS) if train.is_file() else ()
    solved = [_read(where, row) for where, row in shots]
    examples = "".join(f"Question: {question}\nAnswer: {solution}\n\n" for question, solution, _ in solved)
    numbers = count()

    def item(where: str, row: Row) -> Item:
        question, _, reference = _read(where, row)
        data = {"reference": reference, "solved_before": examples}
        return Item(str(next(numbers)), ({"role": "user", "content": question},), data=data)

    return read_items(str(test) if test.is_file() else source, item, split="test", subset="main")


def score(model: Model, items: Sequence[Item], _tools: Tools) -> list[Scored]:
    answers = model.answer([request_of(item, is_chat=model.has_chat_template) for item in items])
    return [
        failed(item, answer.failure, MEASURES) if answer.failure else scored(item, answer.text)
        for item, answer in zip(items, answers, strict=True)
    ]


def _read(where: str, row: Row) -> tuple[str, str, str]:
    """Returns a row's question, its solution without the calculator's annotations, and the number that it ends with."""
    question, solution = (text_field(where, row, field) for field in ("question", "answer"))
    reference = solution.rpartition("####")[2].strip().replace(",", "")
    try:
        Fraction(reference)
    except ValueError:
        raise ValueError(f"{where}: field 'answer' ends with {reference!r}; '#### N' was expected") from None
    return question.strip(), _CALCULATOR.sub("", solution).strip(), reference


def request_of(item: Item, *, is_chat: bool) -> Request:
    """Returns how the item is asked: as a conversation, or as plain text after solved problems."""
    question = item.messages[-1]["content"]
    if is_chat:
        messages = ({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},)
        return Request(messages=messages, max_new_tokens=MAX_NEW_TOKENS, item_id=item.item_id)
    text = f"{item.data['solved_before']}Question: {question}\nAnswer:"
    return Request(text=text, max_new_tokens=MAX_NEW_TOKENS, stop=STOP, item_id=item.item_id)


def scored(item: Item, answer: str) -> Scored:
    """Returns what an answer is worth. If no single number can be read, `accuracy_if_read` has failed."""
    reference = str(item.data["reference"])
    values = {
        "strict_match": float(_harness_equal(_first(_STRICT, answer), reference)),
        "flexible_extract": float(_harness_equal(_last(_FLEXIBLE, answer), reference)),
    }
    try:
        is_right = float(final_number(answer) == Fraction(reference))
    except ValueError as error:
        return Scored(item.item_id, {"accuracy": 0.0, **values}, answer, {"accuracy_if_read": str(error)})
    return Scored(item.item_id, {"accuracy": is_right, "accuracy_if_read": is_right, **values}, answer)


def _first(pattern: re.Pattern[str], answer: str) -> str:
    match = pattern.search(answer)
    return match[1] if match else ""


def _last(pattern: re.Pattern[str], answer: str) -> str:
    numbers = [match[1] or match[2] for match in pattern.finditer(answer)]
    return numbers[-1].strip() if numbers else ""


def _harness_equal(extracted: str, reference: str) -> bool:
    for pattern in _IGNORED:
        extracted, reference = pattern.sub("", extracted), pattern.sub("", reference)
    return bool(extracted) and extracted.lower() == reference.lower()


SUITE = Suite(
    name="gsm8k",
    title="GSM8K, grade-school maths problems (Cobbe et al. 2021)",
    asks="texts",
    measures=MEASURES,
    read=read,
    score=score,
    files="grade_school_math/data/test.jsonl of https://github.com/openai/grade-school-math (MIT, 750 kB)",
    source="openai/gsm8k",
)
