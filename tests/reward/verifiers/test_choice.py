"""Which option a response chooses."""

import math

import pytest

from reward.verifiers.answers import score_choice

OPTIONS = ["blue", "light blue", "green", "a red house"]
TEN = [f"option number {number}" for number in range(10)]


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" b \n", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("**B)** light blue", "B"),
        ("B) light blue", "B"),
        ("C: because leaves are green", "C"),
        ("Answer: B", "B"),
        ("Answer: b", "B"),
        ("answer: (d).", "D"),
        ("**Answer:** C", "C"),
        ("Answer:\nC", "C"),
        ("The answer is (A), since the sky is blue.", "A"),
        ("The answer is A because the sky is.", "A"),
        ("The correct answer is **D**", "D"),
        ("Option A and option B are wrong, so the answer is C.", "C"),
        ("I would choose option B here.", "B"),
        ("Some steps first.\nThen more.\n\\boxed{D}", "D"),
        ("\\boxed{\\text{C}}", "C"),
        ("It is clearly (C), as seen.", "C"),
        ("It is green.", "C"),
        ("The sky is light  blue.", "B"),
        ("I think that a good answer is a red house.", "D"),
        ("`B`", "B"),
        ("[B]", "B"),
        ("'B'", "B"),
        ('"B"', "B"),
        ("“B”.", "B"),
        ("Answer: [B]", "B"),
        ("Answer: `b`", "B"),
        ("The answer is option 'B'.", "B"),
        ("B is correct.", "B"),
        ("(B) is the correct answer", "B"),
        ("A is wrong, B is correct.", "B"),
        ("Option A is wrong and B is correct.", "B"),
        ("I considered option A, but B is the right answer.", "B"),
        ("I would go with B.", "B"),
        ("Let us choose (C).", "C"),
        ("It is not (A), it is (B).", "B"),
        ("It is not (A) but (B).", "B"),
        ("It's (D), not (A).", "D"),
        ("(A), (C) and (D) are wrong; (B)", "B"),
        ("Answer: B\n\n(A) is wrong.", "B"),
        ("Answer: B, not C", "B"),
        ("Answer: B, since C is wrong", "B"),
        ("The one that is not a fish is (B).", "B"),
        ("The sky is not green but blue.", "A"),
        ("Answer: B, I think", "B"),
        ("It must be B", "B"),
        ("<answer>B</answer>", "B"),
        ("The answer's B", "B"),
        ("Answer：B", "B"),  # a full-width colon
        ("答案是B", "B"),
        ("所以，对应选项是D。", "D"),
        ("Answer — B", "B"),
        ("Not A, C or D. So B.", "B"),
        ("After eliminating A, C and D, B remains.", "B"),
        ("B is the only one that fits", "B"),
        ("A because it is hot", "A"),
        ("(C) It rises.\nTherefore, it is B (light blue).", "B"),
        ("**Answer: \\text{B}**", "B"),
        ("The solution is B: light blue", "B"),
        ("Green. A lake may be blue.", "C"),
    ],
)
def test_a_clear_choice_is_read(response: str, letter: str) -> None:
    assert score_choice(response, OPTIONS, letter).score == 1
    wrong = "A" if letter != "A" else "B"
    assert score_choice(response, OPTIONS, wrong).score == 0


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no option is chosen"),
        ("I do not know.", "no option is chosen"),
        ("A dog is not among them.", "no option is chosen"),
        ("The answer is not B.", "no option is chosen"),
        ("greenish", "no option is chosen"),
        ("J", "no option is chosen"),  # there are four
        ("A) blue\nB) light blue", "options A, B are chosen"),
        ("The answer is A. No: the answer is C.", "options A, C are chosen"),
        ("Either (A) or (D)", "options A, D are chosen"),
        ("blue or green", "options A, C are chosen"),
        ("light blue or blue", "options A, B are chosen"),
        ("not (A)", "no option is chosen"),
        ("It isn't (A).", "no option is chosen"),
        ("I do not think that it is (A).", "no option is chosen"),
        ("It cannot be (A)", "no option is chosen"),
        ("Neither (A) nor (B)", "no option is chosen"),
        ("It is not (A), (B) or (C).", "no option is chosen"),
        ("Rule out (A).", "no option is chosen"),
        ("(A) is wrong.", "no option is chosen"),
        ("(A) and (B) are wrong.", "no option is chosen"),
        ("Answer A is incorrect.", "no option is chosen"),
        ("The wrong answer is A.", "no option is chosen"),
        ("Not \\boxed{A}", "no option is chosen"),
        ("The sky is not blue.", "no option is chosen"),
        ("Green is wrong.", "no option is chosen"),
        ("Answer: A or B", "options A, B are chosen"),
        ("Answer: A/B", "options A, B are chosen"),
        ("Answer: A, B, or maybe C", "options A, B, C are chosen"),
        ("The answer is (A) (or (B)).", "options A, B are chosen"),
        ("Answer: **A** and **B**", "options A, B are chosen"),
        ("Answer: A. Or D?", "options A, D are chosen"),
        ("It must not be B", "no option is chosen"),
        ("The answer isn't B", "no option is chosen"),
        ("答案不是B", "no option is chosen"),
        ("选项B不正确", "no option is chosen"),
        ("<answer>A or B</answer>", "options A, B are chosen"),
        ("So, not B.", "no option is chosen"),
        ("B remains unclear", "no option is chosen"),
        ("B is the only one that is wrong", "no option is chosen"),
        ("A cold lake is deep", "no option is chosen"),
        ("None of the options A, B, C, D is correct.", "no option is chosen"),
        ("Is A = 5?", "no option is chosen"),
        ("A: green", "options A, C are chosen"),  # the letter of one, the text of another
        ("The answer is (B) a red house.", "options B, D are chosen"),
        ("It may be blue. It may be green. I cannot say.", "no option is chosen"),
        ("It is blue. But leaves are green.", "options A, C are chosen"),
    ],
)
def test_an_unclear_one_is_a_failure_and_never_zero(response: str, reason: str) -> None:
    scored = score_choice(response, OPTIONS, "A")
    assert math.isnan(scored.score)
    assert scored.failure == f"{reason}; one was expected"


def test_ten_options_have_letters_a_to_j() -> None:
    assert [score_choice(f"({letter})", TEN, letter).score for letter in "ABCDEFGHIJ"] == [1.0] * 10
    assert score_choice("Answer: I", TEN, "I").score == 1
    assert math.isnan(score_choice("Answer: I think none", TEN, "I").score)


@pytest.mark.timeout(20)  # a pattern that backtracks would take hours
def test_long_responses_are_read_in_seconds() -> None:
    for response in (
        "(" * 50_000,
        "* " * 50_000,
        "answer " * 20_000,
        "is " * 30_000,
        "A" * 50_000,
        "\n" * 50_000,
        "(A)(B)" * 10_000,
    ):
        assert math.isnan(score_choice(response, OPTIONS, "A").score)


def test_yes_and_no_within_a_sentence_are_no_answers() -> None:
    assert score_choice("No, it is not.", ["yes", "no"], "B").score == 1
    assert score_choice('The answer is "No."', ["yes", "no"], "B").score == 1
    assert math.isnan(score_choice("There is no information.", ["yes", "no"], "B").score)
    assert math.isnan(score_choice("This is not a yes or no question.", ["yes", "no"], "A").score)


def test_a_number_is_an_option_only_where_a_calculation_ends() -> None:
    assert score_choice("So it is 90 - 20 = 70 degrees.", ["20", "70"], "B").score == 1
    assert math.isnan(score_choice("It is 20. Or 90 - 20 = 65.", ["20", "70"], "A").score)


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="2 to 10 different ones were expected"):
        score_choice("A", ["one"], "A")
    with pytest.raises(ValueError, match="2 to 10 different ones were expected"):
        score_choice("A", ["one", "One "], "A")
    with pytest.raises(ValueError, match="2 to 10 different ones were expected"):
        score_choice("A", ["one", " "], "A")
    with pytest.raises(ValueError, match="answer 'E': a letter from A to D was expected"):
        score_choice("A", OPTIONS, "E")
    with pytest.raises(ValueError, match="answer 'AB': a letter from A to D was expected"):
        score_choice("A", OPTIONS, "AB")
