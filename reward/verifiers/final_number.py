r"""Reads the number that an answer ends with, such as that of a solved word problem.

The number is looked for in this order, each time in the last place of its kind:

    #### 18                            the format of GSM8K's solutions
    \boxed{18}                         LaTeX
    the answer is 18; Answer: 18       up to the end of the sentence
    the last sentence with a number

What is found there must be one number; a calculation counts by what follows its last "=". Several different numbers are
ambiguous, and an answer without a number has none: both are failures, never a guess.

Units, currencies, percent signs and Markdown are left out ("50%" is 50). Thousands separators, fractions (also
\frac{1}{2} and 1 1/2), negative numbers and "million" are understood.
"""

import re
from fractions import Fraction

SHOWN_CHARACTERS = 60
_TIMES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus sign belongs to the number unless it stands between two terms, as in 5-3.
_NUMBER = re.compile(
    rf"(?P<minus>(?<![\w)\]%.])-\s?)?(?:[$€£¥]\s?)?(?P<minus_inside>-(?=\d|\.\d))?(?P<whole>{_DIGITS})"
    rf"(?:\s+(?P<mixed>\d+)\s?/\s?(?P<of>\d+)|\s?/\s?(?P<by>{_DIGITS}))?(?![\d])"
    r"(?:\s+(?P<times>hundred|thousand|million|billion)\b)?",
    re.IGNORECASE,
)
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
    """Returns the numbers of a text, after its last "=" if it has one and a number follows."""
    after = place.rpartition("=")[2]
    found = [_value(number) for number in _NUMBER.finditer(after)]
    return found or [_value(number) for number in _NUMBER.finditer(place)]


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
    value *= _TIMES.get((number["times"] or "").lower(), 1)
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
