"""`--fail-if "b worse than a in acc by .02"`: whether an evaluation shows that a model got worse, as CI's exit code."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.evaluate.folder import EvaluationReport, SuiteReport
from evaluation.evaluate.report import difference_text, is_share, primary

NOT_WORSE, WORSE, UNDECIDED = 0, 1, 2  # exit codes
_WORSE_THAN = re.compile(r"(?P<new>\S+) worse than (?P<old>\S+)(?: in (?P<measure>\S+))?(?: by (?P<margin>\d*\.?\d+))?")


@dataclass(frozen=True)
class Gate:
    """`new` must not be worse than `old` in `measure` ("" is the first) by more than `margin`, in its unit (.02 is 2
    points).
    """

    new: str
    old: str
    margin: float
    measure: str = ""

    @classmethod
    def of(cls, text: str, names: Sequence[str]) -> "Gate":
        """Raises: ValueError for another text, and for a name that is none of the models or algorithms."""
        match = _WORSE_THAN.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f'--fail-if {text!r}: "B worse than A", or "B worse than A in MEASURE by .02", was expected'
            )
        for name in (match["new"], match["old"]):
            if name not in names:
                raise ValueError(
                    f"--fail-if {text!r}: no model is called {name!r}; one of {', '.join(names)} was expected"
                )
        if match["new"] == match["old"]:
            raise ValueError(f"--fail-if {text!r}: two different models were expected")
        return cls(match["new"], match["old"], float(match["margin"] or 0), match["measure"] or "")

    def outcome(self, report: EvaluationReport) -> tuple[int, str]:
        """Returns the exit code, and a sentence per suite: worse in one suite is worse, else undecided in one is."""
        found = [self._of_suite(suite) for suite in report.suites]
        codes = {code for code, _ in found}
        code = next((code for code in (WORSE, UNDECIDED) if code in codes), NOT_WORSE)
        return code, "\n".join(sentence for _, sentence in found)

    def _of_suite(self, suite: SuiteReport) -> tuple[int, str]:
        if self.measure and self.measure not in (names := [measure.name for measure in suite.measures]):
            raise ValueError(
                f"--fail-if: {suite.suite} has no measure {self.measure!r}; one of {', '.join(names)} was expected"
            )
        every = (suite.statistics.algorithms, suite.statistics.differences)
        rows = [row for of_kind in every for row in primary(of_kind, suite, self.measure)]
        row = next((row for row in rows if {row.a, row.b} == {self.new, self.old}), None)
        shown = None if row is None else row.conclusion if row.a == self.new else row.conclusion.turned
        if row is None and any({self.new, self.old} == {*pair} for pair in suite.statistics.same_answers):
            return NOT_WORSE, f"{suite.suite}: {self.new} is not worse than {self.old}: they gave the same answers."
        is_known = shown is not None and (shown.low < shown.high or shown.shown != "")  # equal ends: no spread
        if row is None or shown is None or not is_known:
            why = shown.reason if shown and shown.reason else "no interval"
            return UNDECIDED, f"{suite.suite}: undecided whether {self.new} is worse than {self.old}: {why}."
        # An end at 0 is where the test stopped, not where the interval ends.
        is_not_worse = shown.low >= -self.margin if self.margin else shown.low > 0
        code = NOT_WORSE if is_not_worse else WORSE if shown.high < -self.margin else UNDECIDED
        by = f" by more than {self._margin(row.measure, suite)}" if self.margin else ""
        said = {NOT_WORSE: "shown not to be", WORSE: "shown to be", UNDECIDED: "not shown to be, nor shown not to be,"}[
            code
        ]
        gain = difference_text(row.difference if row.a == self.new else -row.difference, row.measure, suite)
        return code, f"{suite.suite}: {self.new} is {said} worse than {self.old}{by} in {row.measure} ({gain})."

    def _margin(self, measure: str, suite: SuiteReport) -> str:
        """Raises: ValueError for a margin of 100 points or more."""
        if not is_share(measure, suite):
            return f"{self.margin:g}"
        if self.margin >= 1:
            raise ValueError(
                f'--fail-if "{self.new} worse than {self.old} by {self.margin:g}": {measure} of {suite.suite} is a'
                " share, from 0 to 1; .02, which is 2 points, was expected"
            )
        return f"{100 * self.margin:g} points"
