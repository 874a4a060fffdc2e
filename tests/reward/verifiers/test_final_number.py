"""The number that an answer ends with: the formats in use, and answers that have no number or several."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from reward.verifiers.answers import final_number

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "grade-school-math"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("So 9 * 2 = 18.\n#### 18", "18"),
        ("#### 5\nWait.\n#### 1,234", "1234"),
        ("#### -12", "-12"),
        ("The answer is $18.", "18"),
        ("The answer is **18** dollars, from 3 lots of 6.", "18"),
        ("The answer is 2. Wait, the answer is 3.", "3"),
        ("The final answer is 12.50 dollars.", "12.5"),
        ("Answer: 3/4", "3/4"),
        ("The answer is 18 dollars (or $18.00).", "18"),
        ("The answer is (-3).", "-3"),
        ("The answer is −5 degrees.", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("answer: 50%", "50"),
        (r"\boxed{50\%}", "50"),
        (r"So it is \boxed{\frac{1}{2}}.", "1/2"),
        (r"$\boxed{-\frac{3}{4}}$", "-3/4"),
        (r"\[ \boxed{\$1{,}200} \]", "1200"),
        (r"\boxed{1\,000}", "1000"),
        (r"\boxed{18 \text{ dollars}}", "18"),
        (r"$\dfrac{7}{2}$", "7/2"),
        ("He gets 1 1/2 cups.", "3/2"),
        ("It costs $1.5 million", "1500000"),
        ("She earns $10,000 per year.", "10000"),
        ("She has 3 + 4 = 7 apples.", "7"),
        ("First 3 apples. Then 4. In total there are 7 apples.", "7"),
        ("x = .5", "1/2"),
        ("The answer is 5 apples and 3 pears", None),
        ("3-4 days", None),
        ("20 people/5 cars", None),
        ("She left at 3:30", None),
        ("A: 12,34", "12.34"),
        ("It is 1.234,56", None),
        ("1/0", None),
        ("0^-1", None),
        (r"\boxed{0^{-1}}", None),
        ("no idea", None),
        ("The answer is not 5.", None),
        ("It isn't 5", None),
        ("neither 5 nor 6", None),
        ("#### not 5", None),
        (r"\boxed{\neq 5}", None),
        ("x != 5", None),
        ("x ≥ 5", None),
        ("x > 5", None),
        ("The answer is more than 5.", None),
        ("Answer: fewer than 5", None),
        ("The answer is not 5 but 6.", "6"),
        ("So it is 6, not 5.", "6"),
        ("She needs at least 5 buses.", None),
        ("<answer>5</answer>", "5"),
        ("<answer> 5 </answer>", "5"),
        ("48/2 = <<48/2=24>>24 clips", "24"),
        ("He has 5 more than Tom.", "5"),
        ("5 hundred thousand", "500000"),
        ("It costs 2 Million dollars", "2000000"),
        ("1e-05", "1/100000"),
        ("1.5E+3", "1500"),
        ("x = -2e3", "-2000"),
        ("1e99999999", None),
        (r"\boxed{1.2 \times 10^{5}}", "120000"),
        ("3 × 10^-2", "3/100"),
        ("", None),
        ("The answer is 20 cm^2.", "20"),
        ("The answer is 20 cm².", "20"),
        ("The area is 20 m^{2}", "20"),
        ("10^5", "100000"),
        ("10⁵", "100000"),
        ("2^{-1}", "1/2"),
        ("10^5^2", None),
        ("x^3", None),
        ("x^{-3}", None),
        ("3^x", None),
        ("x3", None),
        ("x_3", None),
        ("f(3)", None),
        ("The answer is 3x", None),
        ("Answer: three", "3"),
        ("The answer is twenty-five apples.", "25"),
        ("Answer: three or four", None),
        ("Answer: not three", None),
        ("Answer: at least three", None),
        ("1 234 567", "1234567"),
        ("12 345", None),
        ("25 dollars and 0 cents", "25"),
        ("25 dollars and 50 cents", "25.5"),
        ("25 dollars and 3 apples", None),
        ("30 minutes (half an hour, or 0.5 hours)", "30"),
        ("30 minutes (or 40 minutes)", None),
        ("5 apples (or 6)", None),
        ("2,5", "2.5"),
        ("2, 5", None),
        ("1,2,3", None),
        ("at least 18", None),
        ("at most 18", None),
        ("The answer is at least 18. That took 3 steps.", None),
        ("no more than 18", None),
        ("18 or more", None),
        ("18+", None),
        ("18 <= x", None),
        ("18 < x", None),
        (r"18 \leq x", None),
        ("Therefore, the value of f(0) is 5.", "5"),
        ("The age gap is 23 years, with one person being 37 and the other 14.", "23"),
        ("The gap is 23 or 24 years.", None),
        ("The ratio is 3:2", None),
        ("So it takes 450/375 = 1.2 minutes for each of the 3 pages", "1.2"),
        ("x = 5 or 6", None),
        ("x = 5 ± 1", None),
        ("There are **3** shops that sold less than 5.", "3"),
    ],
)
def test_answers(answer: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"ambiguous: |no number in |divides by zero"):
            final_number(answer)
    else:
        assert final_number(answer) == Fraction(expected)


def test_the_first_marker_that_has_a_number_decides() -> None:
    assert final_number(r"The answer is 3. \boxed{4}" + "\n#### 5\nThat is 6.") == 5
    assert final_number(r"The answer is 3. \boxed{4} That is 6.") == 4
    assert final_number("The answer is 3. That took 6 steps.") == 3
    assert final_number("#### none\nThe answer is 3.") == 3


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K's files are not on this machine")
def test_all_solutions_of_gsm8k() -> None:
    solutions = [json.loads(line)["answer"] for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").open()]
    references = [Fraction(solution.rpartition("####")[2].strip().replace(",", "")) for solution in solutions]
    assert len(references) == 8_792
    assert [final_number(solution) for solution in solutions] == references
    assert [final_number(f"The answer is ${reference}.") for reference in references] == references


def test_numbers_beyond_a_float_are_ambiguous_too() -> None:
    for digits in ("1" * 400 + ".5 or 3", "7" * 400 + "/3 and 4"):
        with pytest.raises(ValueError, match=r"ambiguous: .*more than 300 digits"):
            final_number(digits)
