"""How often do verifiers refuse a right answer, or pass a wrong one?

`python -m benchmarks.verifier_rates FOLDER` prints the table of docs/verifiers.md. FOLDER holds clones of the
repositories below, with answers that people or models wrote, and labels of others:

| repository | answers | label |
|---|---|---|
| lupantech/MathVista | of language models to questions with options or a number | what GPT-4 found them to answer |
| openai/grade-school-math | of GPT-3 to GSM8K's questions | `is_correct` |
| ZubinGou/math-evaluation-harness | worked solutions of MATH's test split | answers that people checked, in
  MARIO-Math-Reasoning/MARIO_EVAL |
| huggingface/Math-Verify | pairs in its tests | whether they are equal |

Each answer is checked once against what it was found to answer, and once against another answer: the right one of its
question if the model was wrong, else a neighbor's. A right answer that does not score 1 is a false refusal, and a wrong
one that does is a false pass. Intervals are of 95% (Clopper and Pearson), as if all answers were independent.

Questions are divided in halves by a hash: verifiers were changed after looking at the first half (`--half
development`, `--show 20` prints failures), and the table is of the other one.
"""

import argparse
import ast
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from scipy.stats import binomtest

from reward.verifiers.answers import LETTERS
from reward.verifiers.verifier import Verifier

Half = Literal["development", "held-out"]
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
# The model continues with questions of its own, or lists options that its question does not have.
_RUNS_ON = re.compile(r"Choices:|Question:|Hint:|(?:^|\n)\(?[K-Z]\)|</s>")
_NO_ANSWER = re.compile(r"n/?a|none|cannot|not |no |unknown|incomplete", re.IGNORECASE)


@dataclass(frozen=True)
class Labeled:
    """A response with the row that it is checked by. `is_right` is what others say."""

    kind: Literal["choice", "number", "math"]
    source: str
    question: str
    response: str
    row: dict[str, Any]
    is_right: bool

    @property
    def half(self) -> Half:
        return get_args(Half)[hashlib.sha256(self.question.encode()).digest()[0] % 2]


def mathvista(folder: Path) -> Iterator[Labeled]:
    for path in sorted(folder.glob("MathVista/results/*/output_*.json")):
        if not re.search(r"guess|template|_code", path.name):  # not written by a model, or programs
            for row in json.loads(path.read_text()).values():
                yield from (_of_choice if row["choices"] else _of_number)(row)


def _of_choice(row: dict[str, Any]) -> Iterator[Labeled]:
    options, said, response = row["choices"], str(row.get("extraction", "")).strip(), str(row["response"])
    are_letters = any(re.fullmatch(r"\(?[A-Za-z]\)?", option) for option in options)
    if are_letters or not 2 <= len(set(options)) == len(options) <= len(LETTERS) or _RUNS_ON.search(response):
        return
    letters = LETTERS[: len(options)]
    if re.search(rf"^\(?[{LETTERS[len(options) :]}K]\)", response, re.MULTILINE):
        return  # it lists options that there are not
    expected = letters[options.index(row["answer"])]

    def labeled(answer: str, is_right: bool) -> Labeled:
        return Labeled(
            "choice",
            "MathVista",
            row["question"],
            response,
            {"choices": options, "answer": answer},
            is_right,
        )

    if said in tuple(letters):
        if _stands(said, options, response):
            yield labeled(said, True)
            yield labeled(expected if expected != said else letters[(letters.index(said) + 1) % len(letters)], False)
    elif _NO_ANSWER.match(said):
        yield labeled(expected, False)


def _stands(letter: str, options: list[str], response: str) -> bool:
    """Returns whether a response has a letter, or its option's text, and no other option's text next to the letter.

    Otherwise GPT-4 concluded what is meant, or decided between two.
    """
    text = options[LETTERS.index(letter)]
    others = "|".join(re.escape(option) for option in options if option.lower() != text.lower())
    if re.search(rf"(?<!\w){letter}\W{{1,3}}(?:{others})(?!\w)", response, re.IGNORECASE):
        return False
    return bool(re.search(rf"(?<![A-Za-z]){letter}(?![A-Za-z])|(?<!\w)(?i:{re.escape(text)})(?!\w)", response))


def _of_number(row: dict[str, Any]) -> Iterator[Labeled]:
    response, said = str(row["response"]), str(row.get("extraction", "")).strip()
    expected = row["answer"]
    if row["answer_type"] not in ("integer", "float") or _RUNS_ON.search(response):
        return

    def labeled(answer: str, is_right: bool) -> Labeled:
        return Labeled("number", "MathVista", row["question"], response, {"answer": answer}, is_right)

    # A number that GPT-4 rounded or computed is not what the response says.
    if _NUMBER.fullmatch(said) and re.search(rf"(?<![\d.,]){re.escape(said)}(?![\d]|[.,]\d)", response):
        number = float(said.replace(",", ""))
        yield labeled(said, True)
        yield labeled(expected if float(expected) != number else str(number + 1), False)
    elif _NO_ANSWER.match(said):
        yield labeled(expected, False)


def gsm8k(folder: Path) -> Iterator[Labeled]:
    for line in (folder / "grade-school-math/grade_school_math/data/example_model_solutions.jsonl").open():
        row = json.loads(line)
        expected = row["ground_truth"].rpartition("A:")[2].strip()
        neighbor = str(float(expected.replace(",", "")) + 1)
        for solution in (one for one in row.values() if isinstance(one, dict)):
            response, is_right = solution["solution"], solution["is_correct"]
            marker = response.rpartition("\nA:")
            for text in (response, marker[0] if marker[1] and is_right else ""):  # also without its last line
                if text:
                    yield Labeled("number", "GSM8K", row["question"], text, {"answer": expected}, is_right)
                    if is_right:
                        yield Labeled("number", "GSM8K", row["question"], text, {"answer": neighbor}, False)


def competition(folder: Path) -> Iterator[Labeled]:
    annotated = json.loads((folder / "MARIO_EVAL/data/math_testset_annotation.json").read_text())
    answers = {row["question"]: row["answer"] for row in annotated if isinstance(row["answer"], str)}
    rows = [json.loads(line) for line in (folder / "math-evaluation-harness/data/math/test.jsonl").open()]
    rows = [row for row in rows if row["problem"] in answers]
    for row, following in zip(rows, rows[1:] + rows[:1], strict=True):
        question, answer, other = row["problem"], answers[row["problem"]], answers[following["problem"]]
        for kind in ("math", "number") if _NUMBER.fullmatch(answer) else ("math",):
            yield Labeled(kind, "MATH", question, row["solution"], {"answer": answer}, True)
            if _plain(answer) != _plain(other) and (kind == "math" or _NUMBER.fullmatch(other)):
                yield Labeled(kind, "MATH", question, row["solution"], {"answer": other}, False)


def _plain(answer: str) -> str:
    return re.sub(r"d?frac|circ|[{} \\^%$]", "", answer)


def math_verify(folder: Path) -> Iterator[Labeled]:
    """Reads (gold, prediction, expected) from the tables of the tests that compare with the usual settings."""
    for path in sorted(folder.glob("Math-Verify/tests/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple) and len(node.elts) == 3:
                try:
                    gold, prediction, expected = ast.literal_eval(node)
                except ValueError:
                    continue
                if isinstance(gold, str) and isinstance(prediction, str) and expected in (0, 1):
                    yield Labeled(
                        "math", "Math-Verify", gold + prediction, prediction, {"answer": gold}, bool(expected)
                    )


SOURCES: tuple[Callable[[Path], Iterator[Labeled]], ...] = (mathvista, gsm8k, competition, math_verify)


def table(folder: Path, half: Half, num_shown: int, kinds: tuple[str, ...]) -> str:
    lines = ["| verifier | source | right, of them refused (95%) | wrong, of them passed (95%) |", "|---|---|---|---|"]
    for source in SOURCES:
        found = [one for one in source(folder) if one.half == half and one.kind in kinds]
        for kind in dict.fromkeys(one.kind for one in found):
            cells = []
            for is_right in (True, False):
                items = [one for one in found if (one.kind, one.is_right) == (kind, is_right)]
                failed = [one for one in items if _failed(one)]
                cells.append(_rate(len(failed), len(items)))
                step = max(1, len(failed) // num_shown) if num_shown else 0
                for one in failed[::step] if step else ():
                    print(f"--- {'refused' if is_right else 'passed'} {kind} {one.row}\n{one.response[-400:]}")
            lines.append(f"| `{kind}` | {found[0].source} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _failed(one: Labeled) -> bool:
    verifier = Verifier(verifier=one.kind, unclear="failed")
    try:
        (scored,) = verifier.score([()], [one.response], [one.row])
    except ValueError:  # the row's answer cannot be read
        return one.is_right
    return (scored.score == 1) != one.is_right


def _rate(failed: int, count: int) -> str:
    if not count:
        return "none"
    interval = binomtest(failed, count).proportion_ci(method="exact")
    return f"{count:,}: {failed / count:.2%} ({interval.low:.2%} to {interval.high:.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=get_args(Half), default="held-out")
    parser.add_argument("--show", type=int, default=0, help="failures per kind and label to print")
    parser.add_argument("--kinds", nargs="+", default=("choice", "number", "math"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    print(table(arguments.folder, arguments.half, arguments.show, tuple(arguments.kinds)))
    print(f"{time.perf_counter() - started:.0f} seconds")


if __name__ == "__main__":
    main()
