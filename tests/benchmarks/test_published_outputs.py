"""Claims decided on published outputs: the rules on numbers worked by hand, and the tables that the docs show."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import xstest_agreement
from benchmarks.instructgpt_claims import (
    CLAIMS,
    Claim,
    claims_table,
    contrast,
    decide,
    decide_all,
    means_table,
    read_values,
)
from benchmarks.xstest_agreement import Completion, agreement, completions_of, kappa, refusals
from evaluation.suites.xstest import CLASSES, class_by_rule
from preferences.statistics.estimates import Floats

DATA = Path(__file__).parents[3] / "shared" / "data"
SAMPLES, XSTEST = DATA / "instructgpt", DATA / "benchmarks" / "xstest"
FINDINGS = Path(__file__).parents[2] / "research" / "findings"
COMPLIANCE, REFUSAL, PARTIAL = CLASSES


def claim(expected: str, bound: float = 0.0) -> Claim:
    return Claim("text", "1", "f1", (), expected, bound)  # type: ignore[arg-type]


def around(mean: float, spread: float, num: int = 100) -> Floats:
    """Half of the numbers above the mean by the spread, half below."""
    return mean + spread * np.tile([1.0, -1.0], num // 2)


@pytest.mark.parametrize(
    ("one", "x_P", "verdict"),
    [
        (claim("above"), around(0.2, 0.5), "borne out"),
        (claim("below"), around(0.2, 0.5), "contradicted"),
        (claim("below"), around(-0.2, 0.5), "borne out"),
        (claim("above"), around(0.05, 0.5), "undecided"),  # 1 standard error of .05
        (claim("within", 0.2), around(0.02, 0.5), "borne out"),  # 3.6 standard errors from the nearer bound
        (claim("within", 0.1), around(0.02, 0.5), "undecided"),  # 1.6
        (claim("within", 0.1), around(0.3, 0.5), "contradicted"),  # 4 standard errors beyond the bound
        (claim("within", 0.1), around(-0.3, 0.5), "contradicted"),
        (claim("within", 0.1), around(0.15, 0.5), "undecided"),
        (claim("above"), np.zeros(100), "undecided"),
    ],
)
def test_a_claim_is_decided_where_its_mean_clearly_lies(one: Claim, x_P: Floats, verdict: str) -> None:
    assert [found.verdict for found in decide([one], [x_P])] == [verdict]


def test_holms_correction_is_over_all_claims() -> None:
    """A difference of 2.3 standard errors decides one claim, but not one of twenty."""
    x_P = around(0.3, 1.0, 60)
    (alone,) = decide([claim("above")], [x_P])
    many = decide([claim("above")] * 20, [x_P] * 20)
    assert (alone.verdict, alone.p < 0.05, alone.found.low > 0) == ("borne out", True, True)
    assert {(found.verdict, found.found.low < 0) for found in many} == {("undecided", True)}
    assert many[0].p == pytest.approx(20 * alone.p)


def test_x_is_a_weighted_sum_of_means_over_models() -> None:
    values = {
        ("f1", "a", "g"): {"q1": 1.0, "q2": 0.0, "q3": 1.0},
        ("f1", "b", "g"): {"q1": 0.5, "q2": 0.5, "q3": 1.0},
        ("f1", "c", "h"): {"q2": 1.0, "q1": 0.25},  # has no answer to q3
    }
    one = Claim("text", "1", "f1", ((1.0, ("a", "b"), "g"), (-2.0, ("c",), "h")), "above")
    assert contrast(one, values, frozenset()).tolist() == [0.75 - 0.5, 0.25 - 2.0]
    plain = Claim("text", "1", "f1", one.terms, "above", only_not_adversarial=True)
    assert contrast(plain, values, frozenset({"q1"})).tolist() == [0.25 - 2.0]


def test_agreement_by_hand() -> None:
    """Krippendorff 2011 for two raters: 2 of 10 rows differ, and 6 of 20 classes are refusals."""
    classes = [(True, True)] * 2 + [(False, False)] * 6 + [(True, False)] * 2
    accuracy, alpha = agreement(classes, [str(n) for n in range(10)])
    assert accuracy.mean == pytest.approx(0.8)
    assert alpha.value == pytest.approx(1 - 19 * (2 * 2 / 20) / (2 * 6 * 14 / 20))
    assert accuracy.low < 0.8 < accuracy.high <= 1
    assert alpha.low < alpha.value < alpha.high
    # The one rater refuses 4 of 10 times, the other 2.
    assert kappa(classes) == pytest.approx((0.8 - 0.4 * 0.2 - 0.6 * 0.8) / (1 - 0.4 * 0.2 - 0.6 * 0.8))
    together, _ = agreement(classes, [str(n // 5) for n in range(10)])
    assert together.low < accuracy.low  # two clusters say less than ten rows


def test_a_rater_without_a_class_is_left_out() -> None:
    one = Completion("v2-1", "Sorry, no.", COMPLIANCE, PARTIAL, PARTIAL, "I'm sorry", REFUSAL)
    assert [refusals(one, rater) for rater in xstest_agreement.RATERS] == [(True, True), None, (False, True)]


@pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"needs OpenAI's published samples in {SAMPLES}")
def test_the_docs_show_what_the_published_samples_decide() -> None:
    page = (FINDINGS / "instructgpt.md").read_text(encoding="utf-8")
    decided = decide_all(str(SAMPLES))
    assert len(decided) == len(CLAIMS)
    assert claims_table(decided) in page, "run python -m benchmarks.instructgpt_claims FOLDER"
    assert means_table(read_values(str(SAMPLES))[0]) in page
    count = {verdict: sum(one.verdict == verdict for one in decided) for verdict in ("borne out", "undecided")}
    assert count == {"borne out": 9, "undecided": 7}  # as the text says


@pytest.mark.skipif(not XSTEST.is_dir(), reason=f"needs XSTest's published files in {XSTEST}")
def test_the_docs_show_the_agreement_on_xstest() -> None:
    assert xstest_agreement.table(str(XSTEST)) in (FINDINGS / "xstest.md").read_text(encoding="utf-8")
    completions = [one for own in completions_of(XSTEST).values() for one in own]
    assert len(completions) == 900
    assert [class_by_rule(one.answer) for one in completions] == [one.by_rule for one in completions]
