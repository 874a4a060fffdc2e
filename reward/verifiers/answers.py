r"""Reads the answer of a response: the number that it ends with, or the option that it chooses. A response that leaves
it open is a failure, never a guess.

The number, such as that of a solved word problem, is looked for in this order, each time in the last place of its kind:

    #### 18                            the format of GSM8K's solutions
    \boxed{18}                         LaTeX
    the answer is 18; Answer: 18       up to the end of the sentence
    the last sentence with a number

What is found there must be one number; a calculation counts by what follows its last "=". Several different numbers are
ambiguous, and an answer without a number has none: both are failures, never a guess.

Units, currencies, percent signs and Markdown are left out ("50%" is 50). Thousands separators, fractions (also
\frac{1}{2} and 1 1/2), negative numbers, "million", 1e-05 and 2 × 10^5 are understood. A number that is only denied or
a bound ("not 5", "more than 5", "x > 5") is none.
"""

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from reward.external import Scored

SHOWN_CHARACTERS = 60
_TIMES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus sign belongs to the number unless it stands between two terms, as in 5-3.
_NUMBER = re.compile(
    rf"(?P<minus>(?<![\w)\]%.])-\s?)?(?:[$€£¥]\s?)?(?P<minus_inside>-(?=\d|\.\d))?(?P<whole>{_DIGITS})"
    rf"(?:\s+(?P<mixed>\d+)\s?/\s?(?P<of>\d+)|\s?/\s?(?P<by>{_DIGITS})"
    r"|(?:e|\s?(?:×|x|\\times|\\cdot)\s?10\s?\^\s*)(?P<power>[-+]?\d{1,3}))?(?![\d])"
    r"(?P<times>(?:\s+(?:hundred|thousand|million|billion|trillion)\b)*)",
    re.IGNORECASE,
)
# What stands before a number that the answer does not give, but denies or takes for a bound.
_OTHER_THAN = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|except)\b|n['’]t\b"
    r"|\b(?:more|less|greater|fewer|higher|lower|larger|bigger|smaller) than\b"
    r"|[≠≥≤]|[^\S\n][<>](?=[^\S\n])|!=|>=|<=|\\n?[gl]eq?\b|\\neq?\b|\\[gl]t\b)"
    r"(?:[\s(:]|\b(?:be|equal|to|exactly|just|only|the|an?|necessarily|really|is|it)\b)*$",
    re.IGNORECASE,
)
_BEFORE_CHARACTERS = 60  # in which that is looked for
_MARKED = re.compile(r"####([^\n]*)")
_SAID = re.compile(r"\banswer(?:\s+is|\s*:|\s*=)\s*:?(?P<rest>(?:[^\n.]|\.(?=\d))*)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<!\d)\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[!?](?=\s|$)|\n")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")


def final_number(answer: str) -> Fraction:
    """Returns the number that an answer ends with. Raises: ValueError saying why there is none, or not one."""
    for place in _places(answer):
        if numbers := _numbers(place):
            return _the_only(numbers, place)
    raise ValueError(f"no number in {_shown(answer)}")


def _places(answer: str) -> list[str]:
    """Returns the texts in which the number may be, the first one that has a number deciding."""
    marked = _MARKED.findall(answer)
    boxed = _boxed(answer)
    plain = _plain(answer)
    said = [found["rest"] for found in _SAID.finditer(plain)]
    sentences = [sentence for sentence in _SENTENCE.split(plain) if _NUMBER.search(sentence)]
    return [_plain(text) for kind in (marked, boxed) for text in kind[-1:]] + said[-1:] + sentences[-1:]


def _boxed(answer: str) -> list[str]:
    r"""Returns the contents of every \boxed{...}, which may contain braces."""
    found = []
    for opening in re.finditer(r"\\boxed\s*\{", answer):
        depth, place = 1, opening.end()
        while place < len(answer) and depth:
            depth += {"{": 1, "}": -1}.get(answer[place], 0)
            place += 1
        found.append(answer[opening.end() : place - 1 if not depth else place])
    return found


def _plain(text: str) -> str:
    """Returns a text without LaTeX and Markdown around its numbers."""
    text = text.replace("−", "-").replace("–", "-").replace("\u00a0", " ").replace("\u202f", " ")
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ",", text)
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", ",", text)
    for pattern, by in ((_FRACTION, r"(\1)/(\2)"), (_TEXT, r" \1 ")):
        while (changed := pattern.sub(by, text)) != text:
            text = changed
    text = re.sub(r"\((-?[\d.,]+)\)\s*/\s*\((-?[\d.,]+)\)", r"\1/\2", text)
    return re.sub(
        r"\\[()\[\]$%! ,;]|\\(?:left|right)\b|[*`{}]|\$(?=\s|$)", lambda m: "$" if m[0] == r"\$" else " ", text
    )


def _numbers(place: str) -> list[Fraction]:
    """Returns the numbers that a text gives, after its last "=" if it has one and a number follows."""
    last = place.rfind("=") + 1
    found = list(_NUMBER.finditer(place, last)) or list(_NUMBER.finditer(place))
    return [
        _value(number)
        for number in found
        if not _OTHER_THAN.search(place[max(0, number.start() - _BEFORE_CHARACTERS) : number.start()])
    ]


def _value(number: re.Match[str]) -> Fraction:
    """Returns the value of a match. Raises: ValueError for a division by zero."""
    value = _decimal(number["whole"])
    for over, under in ((number["mixed"], number["of"]), (None, number["by"])):
        if under and not _decimal(under):
            raise ValueError(f"{number[0]!r} divides by zero")
        if over:
            value += _decimal(over) / _decimal(under)
        elif under:
            value /= _decimal(under)
    value *= Fraction(10) ** int(number["power"] or 0)
    for word in number["times"].lower().split():
        value *= _TIMES[word]
    return -value if number["minus"] or number["minus_inside"] else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _the_only(numbers: list[Fraction], place: str) -> Fraction:
    different = list(dict.fromkeys(numbers))
    if len(different) > 1:
        raise ValueError(f"ambiguous: {', '.join(map(_digits, different[:4]))} in {_shown(place)}")
    return different[0]


def _digits(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number)
    return str(float(number)) if abs(number) < 10**300 else "a number with more than 300 digits"


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"...{text[-SHOWN_CHARACTERS:]}")


# --- choices ---------------------------------------------------------------------------------------------------------

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
_DENIAL_CHARACTERS = 100  # before a mention, in which a denial is looked for


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
    before = text[max(0, start - _DENIAL_CHARACTERS) : start]
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
