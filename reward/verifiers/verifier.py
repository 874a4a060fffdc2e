"""The reward "verifier": programs check a response by fields of its prompt's row (docs/verifiers.md).

A response scores 1 if it passes everything that its row asks for, and 0 if it does not, or if it has no clear answer.
If it cannot be told which, the score is missing, with a reason.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from files.fields import is_number, list_field, names, present, shown, text_field
from files.rows import Row
from lm.progress import note_progress
from lm.tokenizer import Messages
from reward.external import ExternalReward, Scored
from reward.verifiers.answers import LETTERS, final_number, score_choice, stated
from reward.verifiers.mathematics import is_equal
from reward.verifiers.sandbox import FORGED, Limits, check_sandbox, close_sandboxes, code_in, score_code

Check = Callable[[str], Scored]  # scores a response: 1, 0 or a failure
Kind = Literal["number", "choice", "math", "checks", "tests"]
UNCLEAR = "unclear"  # the kind of failure of a response without a number or a choice, or with several
FIELDS = ("answer", "choices", "checks", "tests")  # of a row
CODE_BYTES = 512 * 2**20  # address space of a response's code and its tests


class Verifier(ExternalReward):
    """Programs that check a response by the fields of its prompt's row: 1 if it passes all checks, 0 if it does not."""

    model_config = ConfigDict(title="Reward verifier")
    source_key: ClassVar[str] = "verifier"
    noun: ClassVar[str] = "verifier"
    takes_any_number: ClassVar[bool] = True
    objective_weights: ClassVar[Mapping[str, float]] = {}

    kind: Literal["verifier"] = Field(default="verifier", description="The kind of this table.")
    verifier: Literal["row", "number", "choice", "math", "checks", "tests"] = Field(
        default="row",
        description="What is checked: the final `number`, against the row's `answer`; the `choice` among the row's"
        " `choices`, against the letter in `answer`; `math`: the expression, set or equation that the response states,"
        " against the row's `answer` in LaTeX; the row's `checks`; its unit `tests` of Python code. `row` = all"
        " that the row has fields for; an `answer` without `choices` is then a number.",
    )
    checks: tuple[dict[str, Any], ...] = Field(
        default=(),
        description='Checks of every response, in addition to those of its row: tables such as { kind = "format:regex",'
        ' pattern = "^Answer: [A-D]$" } (docs/verifiers.md has the kinds).',
    )
    unclear: Literal["failed", "wrong"] = Field(
        default="wrong",
        description="What a response is without a number or a choice, or with several: `wrong` = it scores 0, and is"
        " counted in the metric `failures/unclear`; `failed` = it has no score and is left out of the update.",
    )
    cpu_seconds: int = Field(
        default=5,
        ge=1,
        le=600,
        description="Computing time of a response's code, and of its tests as much again; one that needs more is wrong."
        " One that takes six times as long by the clock has no score, since the machine may have been busy.",
    )

    @model_validator(mode="after")
    def _check_checks(self) -> Self:
        self._own_checks("checks")
        return self

    @property
    def source(self) -> str:
        return f"of {'each row' if self.verifier == 'row' else self.verifier}"

    @property
    def short_name(self) -> str:
        return f"the {self.noun}"

    @property
    def reads_rows(self) -> bool:
        return True

    def fields_of(self, where: str, row: Row) -> Row:
        self._checks_of(where, row)
        return {name: row[name] for name in FIELDS if row.get(name) is not None}

    def check(self, rows: Iterable[Row]) -> None:
        """Raises: ValueError if a row has tests, and this machine cannot limit what they do."""
        if any("tests" in self._kinds(row) for row in rows):
            check_sandbox()

    def score(
        self,
        conversations: Sequence[Messages],  # noqa: ARG002  # the rows say what is asked
        responses: Sequence[str],
        rows: Sequence[Row] = (),
    ) -> list[Scored]:
        def score(row: Row, response: str) -> Scored:
            note_progress()
            return _all_of(check(response) for check in self._checks_of("the prompt's row", row))

        if not any("tests" in self._kinds(row) for row in rows):
            return [score(row, response) for row, response in zip(rows, responses, strict=True)]
        import torch  # only here: `heed` reads jobs without it

        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="tests") as pool:
            return list(pool.map(score, rows, responses))

    def close(self) -> None:
        close_sandboxes()

    def _kinds(self, row: Row) -> list[Kind]:
        """Returns what the row's fields ask for."""
        if self.verifier != "row":
            return [self.verifier] if self.verifier != "checks" or row.get("checks") is not None else []
        kinds: list[Kind] = []
        if row.get("answer") is not None:
            kinds.append("number" if row.get("choices") is None else "choice")
        return kinds + [kind for kind in ("checks", "tests") if row.get(kind) is not None]

    def _checks_of(self, where: str, row: Row) -> list[Check]:
        """Returns what checks the responses to a prompt. Raises: ValueError naming a missing or wrong field."""
        kinds = self._kinds(row)
        if not kinds and not self.checks:
            wanted = "field 'checks'" if self.verifier == "checks" else "a field 'answer', 'checks' or 'tests'"
            raise ValueError(f"{where}: found {names(row)}; {wanted} was expected, which says what to verify")
        read = {
            "number": self._number,
            "choice": self._choice,
            "math": self._math,
            "checks": _row_checks,
            "tests": self._tests,
        }
        return self._own_checks("ppo.reward.checks") + [check for kind in kinds for check in read[kind](where, row)]

    def _own_checks(self, where: str) -> list[Check]:
        return _row_checks(where, {"checks": self.checks}) if self.checks else []

    def _number(self, where: str, row: Row) -> list[Check]:
        answer = present(where, row, "answer")
        if not (is_number(answer) or isinstance(answer, str)):
            raise ValueError(f"{where}: field 'answer' is {shown(answer)}; a number, or a text with it, was expected")
        try:
            expected = final_number(answer) if isinstance(answer, str) else Fraction(str(answer))
        except ValueError as error:
            raise ValueError(f"{where}: field 'answer': {error}; one number was expected") from None

        def check(response: str) -> Scored:
            try:
                return Scored(float(final_number(response) == expected))
            except ValueError as error:
                return self._unclear(str(error))

        return [check]

    def _choice(self, where: str, row: Row) -> list[Check]:
        options = [str(option) for option in list_field(where, row, "choices")]
        answer = present(where, row, "answer")
        if type(answer) is int and 0 <= answer < len(LETTERS):  # as in MMLU's rows
            answer = LETTERS[answer]
        try:
            score_choice("", options, answer)
        except ValueError as error:
            raise ValueError(f"{where}: fields 'choices' and 'answer': {error}") from None

        def check(response: str) -> Scored:
            scored = score_choice(response, options, answer)
            return self._unclear(scored.failure) if scored.failure else scored

        return [check]

    def _math(self, where: str, row: Row) -> list[Check]:
        answer = present(where, row, "answer")
        expected = str(answer) if is_number(answer) else text_field(where, row, "answer")

        def check(response: str) -> Scored:
            try:
                return Scored(float(is_equal(stated(response), expected)))
            except ValueError as error:
                return self._unclear(str(error))
            except TimeoutError as error:
                return Scored(math.nan, str(error))

        return [check]

    def _unclear(self, why: str) -> Scored:
        if self.unclear == "wrong":
            return Scored(0.0, failure_kind=UNCLEAR)
        return Scored(math.nan, f'unclear answer: {why} (unclear = "wrong" would score it 0)', UNCLEAR)

    def _tests(self, where: str, row: Row) -> list[Check]:
        value = present(where, row, "tests")
        tests = [value] if isinstance(value, str) else list_field(where, row, "tests")
        tests = [text_field(where, {f"tests[{place}]": test}, f"tests[{place}]") for place, test in enumerate(tests)]
        if not tests:
            raise ValueError(f"{where}: field 'tests' is empty; at least one test was expected")
        for place, test in enumerate(tests):
            try:
                compile(test, f"tests[{place}]", "exec")
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"{where}: field 'tests[{place}]' is not Python: {error}") from None

        limits = Limits(self.cpu_seconds, 6.0 * self.cpu_seconds, CODE_BYTES)

        def check(response: str) -> Scored:
            return score_code(code_in(response), tests, limits)

        return [check]


def _row_checks(where: str, row: Mapping[str, Any]) -> list[Check]:
    from reward.verifiers.checks import read_checks  # imports jsonschema, which other rewards do without

    def verify(response: str) -> Scored:
        try:
            return Scored(float(all(one.passes(response) for one in checks)))
        except TimeoutError:
            return Scored(math.nan, "a regular expression of the row took too long")

    checks = read_checks(where, row)
    if not checks:
        raise ValueError(f"{where}: field 'checks' is empty; at least one check was expected")
    return [verify]


def _all_of(parts: Iterable[Scored]) -> Scored:
    """Combines the checks of a response. If one found it wrong, returns that 0, even if others failed: that of an
    attempt to forge, or else the first. Otherwise returns the first failure, or 1 if there is none.
    """
    scored = [*parts]
    wrong = sorted((one for one in scored if one.score == 0), key=lambda one: one.failure_kind != FORGED)
    if wrong:
        return wrong[0]
    return next((one for one in scored if one.failure), Scored(1.0))
