"""Reads which option of a multiple-choice question a response chooses. A response that leaves it open is a failure."""

import math
import re
from collections.abc import Iterator, Sequence

from reward.external import Scored

LETTERS = "ABCDEFGHIJ"

# "A" and "I" before a small letter are most often words ("A good answer", "I think"), but not in "A because ...".
_CAPITAL = r"([A-J])\b(?!['’-]\w|(?<=[AI]) (?!(?:because|since|as|for|and|or|which)\b)[a-z])"
_OPEN, _CLOSE = r"(\[{*`'\"“‘", r")\]}*`'\"”’"
_STATED = (
    rf"\b(?:[\s:={_OPEN}]|(?:is|would be|should be|must be)\b)*(?:(?:the\s+)?(?:option|choice|letter)[\s{_OPEN}]+)?"
    rf"(?:(?<=\()([A-Ja-j])(?=\))|{_CAPITAL}|([a-j])(?=[.:{_CLOSE}]*\s*$))"
)

# Most explicit first: the first of them that finds a choice decides.
PATTERNS = (
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Ja-j])\)?\s*\}"),
    re.compile(
        r"\b(?i:answer|(?:correct|right|best) (?:option|choice)|(?:choos|pick|select)(?:e|ing)?|go(?:ing)? with)"
        rf"{_STATED}",
        re.MULTILINE,
    ),
    re.compile(
        rf"(?<![\w'’-])([A-J])[{_CLOSE}]*\s+(?:is|would be|should be|must be)\s+"
        r"(?:(?:the|my|clearly|definitely|probably|obviously|most|likely)\s+)*(?:correct|right|best|answer)\b"
    ),
    re.compile(rf"\b(?i:option|choice){_STATED}", re.MULTILINE),
    re.compile(rf"^[ \t>#{_OPEN}-]*([A-Ja-j])(?:[.:{_CLOSE}]+(?=\s|$)|\s*$)", re.MULTILINE),
    re.compile(r"\(([A-J])\)"),
)

# A mention that is denied is no choice: "not (B)", "I do not think that it is B", "neither A nor B", "B is wrong". What
# may stand between denial and mention is only what links them, so "the one that is not a fish is (B)" chooses B.
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|except|wrong|incorrect|false"
    r"|(?:eliminat|exclud|rul)(?:e|es|ed|ing)(?: out)?)"
    rf"|n['’]t)(?:[\s:={_OPEN}]|\b(?:be|is|are|was|it|it['’]s|the|an?|options?|choices?|answers?|letter|think|believe|say"
    r"|that|correct|right|best|as|choose|pick|select|going|go|with|either)\b)*"
    rf"(?:\b[A-J]\b[{_CLOSE}]*[\s,]*(?:(?:or|nor|and)\b\s*)?(?:option\s+)?[{_OPEN}]*){{0,9}}$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    rf"[{_CLOSE}]*[^\S\n]+(?:(?:is|was|does|can|could|would|should)(?:\s+(?:not|never)\b|n['’]t)|cannot\b"
    r"|(?:is|was)\s+(?:\w+ly\s+|also\s+)?(?:wrong|incorrect|false|impossible|unlikely|out|eliminated|excluded|ruled)\b)"
    rf"|(?:[^\S\n]|[,/&{_OPEN}{_CLOSE}]|\b(?:and|or|options?|[A-J])\b){{0,60}}\b(?:are|were|can|could)\s+"
    r"(?:\w+ly\s+|also\s+|both\s+|all\s+)?(?:not|wrong|incorrect|false|impossible|unlikely|out|eliminated|excluded|ruled)\b",
    re.IGNORECASE,
)
# What follows a choice that is none: "B or C", "(B) and (C)", "B/C".
_ANOTHER = re.compile(
    rf"[.{_CLOSE}]*\s*(?:[,/|&]|\(?\b(?i:or|and|vs)\b)[\s,]*(?:(?:or|and|maybe|perhaps|possibly|else|even|also|option|choice)\s+)*"
    rf"[{_OPEN}]*{_CAPITAL}"
)
_BEFORE_CHARACTERS = 100  # in which a denial is looked for


def chosen(response: str, options: Sequence[str]) -> set[str]:
    """Returns the letters that a response chooses: one if it is clear, none or several if it is not.

    It looks for letters in `\\boxed{B}` and in statements such as "Answer: B", "the answer is (B)", "I choose B", "B is
    correct" or "option B"; then at the beginning of lines ("B", "B) text"), then in brackets. Without any, it looks for
    the texts of options, as whole words and ignoring case; an option that is part of another one found counts only once
    that one is removed. Whatever the response denies ("not (B)", "B is wrong") is not chosen.
    """
    allowed = LETTERS[: len(options)]
    for pattern in PATTERNS:
        letters = {letter for match in pattern.finditer(response) for letter in _letters(match)}
        if letters & set(allowed):
            return letters & set(allowed)
    return _by_text(response, dict(zip(allowed, options, strict=True)))


def _letters(match: re.Match[str]) -> Iterator[str]:
    """Yields the letter of a statement, and others that it leaves open ("B or C"), unless they are denied."""
    another: re.Match[str] | None = match
    while another:
        place = another.start(another.lastindex or 0)
        if not _is_denied(another.string, min(place, match.start()), place + 1):
            yield another.string[place].upper()
        another = _ANOTHER.match(another.string, place + 1)


def _is_denied(text: str, start: int, end: int) -> bool:
    """Returns whether a text denies what it mentions from `start` to `end`."""
    before = text[max(0, start - _BEFORE_CHARACTERS) : start]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text, end))


def _by_text(response: str, options: dict[str, str]) -> set[str]:
    rest, found = " ".join(response.split()).lower(), set()
    for letter, option in sorted(options.items(), key=lambda pair: -len(pair[1])):  # longest first
        text = re.sub(r"(?<=\w)\.$", "", " ".join(option.split()).lower())
        whole = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
        if any(not _is_denied(rest, *match.span()) for match in whole.finditer(rest)):
            found.add(letter)
        rest = whole.sub("\n", rest)
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
