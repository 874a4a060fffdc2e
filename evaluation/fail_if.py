"""`--fail-if "b worse than a in acc by .02"`: whether a report shows that a model got worse, as CI's exit code."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evaluation.evaluate.folder import EvaluationReport, SuiteReport
from evaluation.evaluate.report import difference_text, is_share, primary
from evaluation.statistics.results import SAME, Conclusion, Summary, turned_share
from files.records import record_of
from preferences.statistics.estimates import UNKNOWN, Interval
from stages.reports.text import percent, share_ends

NOT_WORSE, WORSE, UNDECIDED = 0, 1, 2  # exit codes
_WORSE_THAN = re.compile(r"(?P<new>\S+) worse than (?P<old>\S+)(?: in (?P<measure>\S+))?(?: by (?P<margin>\d*\.?\d+))?")
_SAID = {WORSE: "shown to be", UNDECIDED: "not shown to be, nor shown not to be,", NOT_WORSE: "shown not to be"}


@dataclass(frozen=True)
class Gate:
    """`new` must not be worse than `old` by more than `margin` (.02 is 2 points) in `measure`: a suite's, or the win
    rate by a judge of this name; "" is the first.
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
            expected = '"B worse than A", or "B worse than A in MEASURE by .02"'
            raise ValueError(f"--fail-if {text!r}: {expected}, was expected")
        for name in (match["new"], match["old"]):
            if name not in names:
                called = ", ".join(names)
                raise ValueError(f"--fail-if {text!r}: no model is called {name!r}; one of {called} was expected")
        if match["new"] == match["old"]:
            raise ValueError(f"--fail-if {text!r}: two different models were expected")
        return cls(match["new"], match["old"], float(match["margin"] or 0), match["measure"] or "")

    def check(self, where: str, what: str, is_share: Mapping[str, bool]) -> None:
        """`is_share` says of each measure of `where` whether it is a share; messages call it `what`.

        Raises: ValueError unless this gate's measure is one of them, and for a margin of 100 points or more in a share.
        """
        measure = self.measure or next(iter(is_share))
        if measure not in is_share:
            names = ", ".join(is_share)
            raise ValueError(f"--fail-if: {where} has no {what} {measure!r}; one of {names} was expected")
        if self.margin >= 1 and is_share[measure]:
            raise ValueError(
                f'--fail-if "{self.new} worse than {self.old} by {self.margin:g}": {what} {measure} of {where} is a'
                " share, from 0 to 1; .02, which is 2 points, was expected"
            )

    def of_evaluation(self, report: EvaluationReport) -> tuple[int, str]:
        """Returns the exit code, and a sentence per suite: worse in one suite is worse, else undecided in one is."""
        found = [self._of_suite(suite) for suite in report.suites]
        codes = {code for code, _ in found}
        code = next((code for code in (WORSE, UNDECIDED) if code in codes), NOT_WORSE)
        return code, "\n".join(sentence for _, sentence in found)

    def of_comparison(self, report: Mapping[str, Any]) -> tuple[int, str]:
        """Returns the exit code, and a sentence, from report.json. The measure is a judge's win rate."""
        summary = record_of(report["summary"], Summary, "report.json: summary")
        judge = next((one for one in summary.judges if self.measure in (one.judge, "")), None)
        if judge is None:  # people who have not judged yet
            return self._judged(f"judge {self.measure}", None, "", "")
        rows = [(pair.algorithm_a, pair.algorithm_b, pair.win_rate, pair.conclusion) for pair in judge.algorithms]
        rows += [
            (pair.policy_a, pair.policy_b, Interval(rate.mean, rate.low, rate.high), pair.conclusion)
            for pair in judge.pairs
            for rate in (pair.win_rate,)
        ]
        rows += [(one.policy_a, one.policy_b, UNKNOWN, one.conclusion) for one in summary.withheld]
        row = next((row for row in rows if {self.new, self.old} == {*row[:2]}), None)
        if row is None:
            return self._judged(f"judge {judge.judge}", None, "", "")
        first, _, rate, shown = row
        shown, rate = (shown, rate) if first == self.new else (shown.turned, turned_share(rate))
        text = f"{percent(rate.mean, 1)}, {share_ends(rate.low, rate.high, 1)}"
        return self._judged(f"judge {judge.judge}", shown, f"win rate ({text})", f"{100 * self.margin:g} points")

    def _of_suite(self, suite: SuiteReport) -> tuple[int, str]:
        every = (suite.statistics.algorithms, suite.statistics.differences)
        rows = [row for of_kind in every for row in primary(of_kind, suite, self.measure or suite.measures[0].name)]
        row = next((row for row in rows if {row.a, row.b} == {self.new, self.old}), None)
        if row is None:
            same = any({self.new, self.old} == {*pair} for pair in suite.statistics.same_answers)
            return self._judged(suite.suite, Conclusion("none", reason=f"{SAME} answers") if same else None, "", "")
        shown, difference = (row.conclusion, row.difference)
        if row.a != self.new:
            shown, difference = shown.turned, -difference
        gain = difference_text(difference, row.measure, suite)
        margin = f"{100 * self.margin:g} points" if is_share(row.measure, suite) else f"{self.margin:g}"
        return self._judged(suite.suite, shown, f"{row.measure} ({gain})", margin)

    def _judged(self, where: str, shown: Conclusion | None, what: str, margin: str) -> tuple[int, str]:
        """Returns the exit code that a conclusion on new and old gives, and the sentence; `what` has the figures."""
        if shown is not None and shown.reason.startswith(SAME):
            return NOT_WORSE, f"{where}: {self.new} is not worse than {self.old}: {shown.reason}."
        is_known = shown is not None and (shown.low < shown.high or shown.shown != "")  # equal ends: no spread
        if shown is None or not is_known:
            why = shown.reason if shown and shown.reason else "no interval"
            return UNDECIDED, f"{where}: undecided whether {self.new} is worse than {self.old}: {why}."
        # An end at 0 is where the test stopped, not where the interval ends.
        is_not_worse = shown.low >= -self.margin if self.margin else shown.low > 0
        code = NOT_WORSE if is_not_worse else WORSE if shown.high < -self.margin else UNDECIDED
        by = f" by more than {margin}" if self.margin else ""
        caution = "" if code == UNDECIDED else shown.caution
        return (
            code,
            f"{where}: {self.new} is {_SAID[code]} worse than {self.old}{by} in {what}. {caution}".rstrip(),
        )


@contextmanager
def undecided_if_it_fails(gate: Gate | None, what: str) -> Iterator[None]:
    """Turns an error, whose exit code 1 would say "worse", into a ValueError, whose code is 2; only with a gate."""
    try:
        yield
    except (OSError, RuntimeError, ArithmeticError) as error:
        if gate is None:
            raise
        raise ValueError(f"--fail-if: undecided, since the {what} failed: {error}") from error
