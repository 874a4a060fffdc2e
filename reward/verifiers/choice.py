"""Reads which option of a multiple-choice question a response chooses. A response that leaves it open is a failure."""

import math
import re
from collections.abc import Sequence

from reward.external import Scored

LETTERS = "ABCDEFGHIJ"

# "A" and "I" before a small letter are most often words ("A good answer", "I think"), but not in "A because ...".
_CAPITAL = r"([A-J])\b(?!['’-]|(?<=[AI]) (?!(?:because|since|as|for|and|which)\b)[a-z])"
_STATED = rf"\b(?:[\s:=*]|is\b)*(?:option\s+)?(?:\(([A-Ja-j])\)|{_CAPITAL}|([a-j])(?=[).:*]*\s*$))"

# Most explicit first: the first of them that is found decides.
PATTERNS = (
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Ja-j])\)?\s*\}"),
    re.compile(rf"\b(?i:answer|(?:correct|right|best) (?:option|choice)){_STATED}", re.MULTILINE),
    re.compile(rf"\b(?i:option|choice){_STATED}", re.MULTILINE),
    re.compile(r"^[ \t*>#-]*\(?([A-Ja-j])(?:[).:*]+(?=\s|$)|\s*$)", re.MULTILINE),
    re.compile(r"\(([A-J])\)"),
)


def chosen(response: str, options: Sequence[str]) -> set[str]:
    """Returns the letters that a response chooses: one if it is clear, none or several if it is not.

    It looks for letters in `\\boxed{B}` and in statements such as "Answer: B", "the answer is (B)" or "option B"; then
    at the beginning of lines ("B", "B) text"), then in brackets. Without any, it looks for the texts of options, as
    whole words and ignoring case; an option that is part of another one found counts only once that one is removed.
    """
    allowed = LETTERS[: len(options)]
    for pattern in PATTERNS:
        letters = {next(filter(None, match.groups())).upper() for match in pattern.finditer(response)}
        if letters & set(allowed):
            return letters & set(allowed)
    return _by_text(response, dict(zip(allowed, options, strict=True)))


def _by_text(response: str, options: dict[str, str]) -> set[str]:
    rest, found = " ".join(response.split()).lower(), set()
    for letter, option in sorted(options.items(), key=lambda pair: -len(pair[1])):  # longest first
        text = re.sub(r"(?<=\w)\.$", "", " ".join(option.split()).lower())
        rest, count = re.subn(rf"(?<!\w){re.escape(text)}(?!\w)", "\n", rest)
        found |= {letter} if count else set()
    return found


def score_choice(response: str, options: Sequence[str], answer: str) -> Scored:
    """Returns 1 if the response chooses the option with the letter `answer`, 0 if another one, a failure if unclear.

    Raises: ValueError unless there are 2 to 10 options that differ, and `answer` is the letter of one.
    """
    texts = {option.strip().lower() for option in options} - {""}
    if not 2 <= len(options) <= len(LETTERS) or len(texts) < len(options):
        raise ValueError(f"options {list(options)}: 2 to {len(LETTERS)} different ones were expected")
    if answer not in tuple(LETTERS[: len(options)]):
        raise ValueError(f"answer {answer!r}: a letter from A to {LETTERS[len(options) - 1]} was expected")
    letters = chosen(response, options)
    if len(letters) != 1:
        found = f"options {', '.join(sorted(letters))} are chosen" if letters else "no option is chosen"
        return Scored(math.nan, f"{found}; one was expected")
    return Scored(float(letters == {answer}))
