"""Tests exact coverages against written-out sums, and checks the tables of them in the docs."""

import math

import pytest

from benchmarks.exact_coverage import (
    BEGIN,
    PAGE,
    TABLES,
    bootstrapped,
    exact_coverage,
    ours,
    plain_wilson,
    students,
    wilson_of_effective_prompts,
    with_tables,
)
from preferences.statistics.estimates import Floats


def test_the_docs_show_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run python -m benchmarks.exact_coverage"
    assert all(page.count(BEGIN.format(name)) == 1 for name in TABLES)


@pytest.mark.parametrize(("num", "rate", "expected"), [(20, 0.95, 0.9245), (20, 0.9, 0.9568), (100, 0.05, 0.9659)])
def test_wilsons_interval_covers_what_its_equation_says(num: int, rate: float, expected: float) -> None:
    """It contains p where (k/n - p)² <= z² p(1 - p)/n (Wilson 1927), so its coverage is a sum of binomial terms."""
    z = 1.959964
    inside = [k for k in range(num + 1) if (k / num - rate) ** 2 <= z**2 * rate * (1 - rate) / num]
    covers = sum(math.comb(num, k) * rate**k * (1 - rate) ** (num - k) for k in inside)
    assert covers == pytest.approx(expected, abs=5e-5)
    assert exact_coverage(plain_wilson, num, rate, 0.0, rate).share == pytest.approx(covers, abs=2e-5)


def test_ties_by_hand() -> None:
    """An interval of only the mean covers if the mean is the truth. With two prompts: a win and a loss, or two ties."""

    def mean_alone(x_P: Floats) -> tuple[float, float]:
        return float(x_P.mean()), float(x_P.mean())

    found = exact_coverage(mean_alone, 2, 0.3, 0.2, 0.5)
    assert found == pytest.approx((2 * 0.3 * 0.5 + 0.2**2, 0.0))


def test_simpler_intervals_cover_too_seldom() -> None:
    for interval in (students, wilson_of_effective_prompts, bootstrapped):
        assert exact_coverage(interval, 20, 0.95, 0.0, 0.95).share < 0.65
    assert exact_coverage(ours, 20, 0.95, 0.0, 0.95).share > 0.92
