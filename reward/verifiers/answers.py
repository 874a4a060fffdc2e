r"""Reads the answer of a response: the number that it ends with, or the option that it chooses. A response that leaves
it open is a failure, never a guess.

The number, such as that of a solved word problem, is looked for in this order, each time in the last place of its kind:

    #### 18                            the format of GSM8K's solutions
    \boxed{18}                         LaTeX
    the answer is 18; Answer: 18       up to the end of the sentence
    the last sentence with a number

What is found there must be one number: the first after "the answer is", or else after the last "=" or "is" that a
number follows, with those that "or", "and", a comma or an operator links to it; without such a place, all numbers.
Several different ones are ambiguous, and an answer without a number has none: both are failures, never a guess.

Units and their exponents, currencies, percent signs and Markdown are left out ("50%" is 50). Thousands separators,
decimal commas ("2,5"), fractions (also \frac{1}{2} and 1 1/2), negative numbers, "three", "million", 1e-05, 10^5 and
2 × 10^5 are understood. A number that is only denied or a bound ("not 5", "at least 5", "x > 5") is none.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from fractions import Fraction

from reward.external import Scored

SHOWN_CHARACTERS = 60
_TIMES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ONE_TO_19 = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ONES = {"zero": 0} | {word: number for number, word in enumerate(_ONE_TO_19.split(), 1)}
_TENS = {word: 10 * number for number, word in enumerate(_TENS_WORDS.split(), 2)}
_WORD = re.compile(
    rf"\b(?:({'|'.join(_TENS)})(?:[- ]({'|'.join([*_ONES][1:10])}))?|({'|'.join(_ONES)}))\b", re.IGNORECASE
)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3}){2,}(?!\d)|\d+,\d{1,2}(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
# A minus sign belongs to the number unless it stands between two terms, as in 5-3. What follows a letter, "^" or "f("
# is part of a name, an exponent or an argument.
_NUMBER = re.compile(
    rf"(?<![A-Za-z_^\d])(?<!\^-)(?<![A-Za-z]\()(?P<minus>(?<![\w)\]%.])-\s?)?(?:[$€£¥]\s?)?"
    rf"(?P<minus_inside>-(?=\d|\.\d))?(?P<whole>{_DIGITS})"
    rf"(?:\s+(?P<mixed>\d+)\s?/\s?(?P<of>\d+)|\s?/\s?(?P<by>{_DIGITS})|\s?\^\s*(?P<exponent>-?\d{{1,2}})"
    r"|(?:e|\s?(?:×|x|\\times|\\cdot)\s?10\s?\^\s*)(?P<power>[-+]?\d{1,3}))?(?!\d|\s?\^|e[-+]?\d|[xyzn]\b)"
    r"(?P<times>(?:\s+(?:hundred|thousand|million|billion|trillion)\b)*)",
    re.IGNORECASE,
)
# What stands before a number that the answer does not give, but denies or takes for a bound; and after it.
_OTHER_THAN = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|except|at (?:least|most)|up to|(?:mini|maxi)mum of)\b|n['’]t\b"
    r"|\b(?:more|less|greater|fewer|higher|lower|larger|bigger|smaller) than\b"
    r"|[≠≥≤]|[^\S\n][<>](?=[^\S\n])|!=|>=|<=|\\n?[gl]eq?\b|\\neq?\b|\\[gl]t\b)"
    r"(?:[\s(:]|\b(?:be|equal|to|exactly|just|only|the|an?|necessarily|really|is|it)\b)*$",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"\s*(?:[≠≥≤]|!=|>=|<=|[<>]\s*-?(?:\d|[a-z]\b)|\\n?[gl](?:eq?|t)\b"
    r"|\+(?=\s*(?:$|[a-z.,]))|(?:[a-z]+\s+)?or (?:more|less|fewer|greater|higher|lower|above|below|over|under)\b)",
    re.IGNORECASE,
)
_BEFORE_CHARACTERS = 60  # in which that is looked for
_EQUALS = re.compile(r"(?:=|≈|\\approx)\s*$")
_IS = re.compile(
    r"(?:=|≈|\\approx|\b(?:is|are|was|were|be|equals)\b)"
    r"(?:[\s:(]|\b(?:about|approximately|around|only|just|exactly|equal|to|therefore|then|thus|now|also|still)\b)*$",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"[^\d\n]{0,30}?(?:(?:[,;:/&+*×·±–-]|\\pm)\s*|(?:\bto\b|\b(?:or|and|nor|but)\b\s*(?:[a-z]+\s+){0,2})[\s(]*)"
)
_MARKED = re.compile(r"####([^\n]*)")
_SAID = re.compile(r"\banswer(?:\s+is|['’]s|\s*:|\s*=)\s*:?(?P<rest>(?:[^\n.]|\.(?=\d))*)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<!\d)\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[!?](?=\s|$)|\n")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_UNIT = (
    r"(?:hours?|minutes?|seconds?|days?|weeks?|months?|years?|cents?|dollars?|[cmk]?m|k?g|ml|liters?|inch(?:es)?|feet"
    r"|yards?|miles?)\b"
)
# In this order: what a text has for what is read.
_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"[−–]", "-"),
        (r"(?<=\d)(?:\{,\}|\\,|[\u00a0\u202f\u2009])(?=\d{3})", ","),
        (r"\^\s*\{([^{}]*)\}", r"^\1"),
        (r"(?<=\w)\*\*(?=\d)", "^"),
        (r"\((-?[\d.,]+)\)\s*/\s*\((-?[\d.,]+)\)", r"\1/\2"),
        (r"(\\[A-Za-z]+)(?=\d)", r"\1 "),
        (r"\\\$", "$"),
        (r"\\[()\[\]%! ,;]|\\(?:left|right)\b|[*`{}]|\$(?=\s|$)", " "),
        (r"(\d) dollars and (\d\d) cents", r"\1.\2 dollars"),
        (r"\band (?:0|zero|no) [a-z]+", ""),
        (rf"(\d\s?({_UNIT}))\s*\((?=[^()]*\d\s?{_UNIT})(?![^()]*\d\s?\2)[^()]*\)", r"\1"),  # in another unit
    )
)


def final_number(answer: str) -> Fraction:
    """Returns the number that an answer ends with. Raises: ValueError saying why there is none, or not one."""
    for place, is_stated in _places(answer):
        if numbers := _numbers(place, is_stated):
            return _the_only(numbers, place)
    raise ValueError(f"no number in {_shown(answer)}")


def stated(answer: str) -> str:
    """Returns what an answer states to be the result, as it is written: of its last marker, or of its only line.

    Raises: ValueError if it has no marker and several lines.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    said = [found[1] for found in re.finditer(r"(?i)\banswer(?: is|\s*:)\s*:?([^\n]*?)\.?[ *]*(?:\n|$)", answer)]
    formulas = re.findall(r"\$([^$]+)\$(?!\d)", answer) if len(lines) == 1 else []
    for found in (_MARKED.findall(answer), _boxed(answer), said, formulas, lines if len(lines) == 1 else []):
        if found:
            return re.sub(r"(?<!\\)\$", " ", str(found[-1])).strip(" *")
    raise ValueError(f'no \\boxed{{}}, "####" or "the answer is" in {_shown(answer)}')


def _places(answer: str) -> list[tuple[str, bool]]:
    """Returns the texts in which the number may be, the first one that has a number deciding, and whether each is
    stated to be the answer.
    """
    plain = _plain(answer)
    said = [found["rest"] for found in _SAID.finditer(plain)]
    sentences = [sentence for sentence in _SENTENCE.split(plain) if _NUMBER.search(sentence)]
    stated = [_plain(text) for kind in (_MARKED.findall(answer), _boxed(answer)) for text in kind[-1:]] + said[-1:]
    return [(text if _NUMBER.search(text) else _WORD.sub(_digits_of, text), True) for text in stated] + [
        (text, False) for text in sentences[-1:]
    ]


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
    text = re.sub("[⁻⁰¹²³⁴-⁹]+", lambda found: "^" + unicodedata.normalize("NFKC", found[0]).replace("−", "-"), text)
    for pattern, by in ((_FRACTION, r"(\1)/(\2)"), (_TEXT, r" \1 ")):
        while (changed := pattern.sub(by, text)) != text:
            text = changed
    for pattern, by in _PLAIN:
        text = pattern.sub(by, text)
    return text


def _digits_of(word: re.Match[str]) -> str:
    tens, ones, one = (part and part.lower() for part in word.groups())
    return str(_TENS.get(tens, 0) + _ONES.get(ones or one, 0))


def _numbers(place: str, is_stated: bool) -> list[Fraction]:
    """Returns the numbers that a text gives. Raises: ValueError if it denies or bounds all that it states."""
    mentioned = list(_NUMBER.finditer(place))
    found = [number for number in mentioned if not _is_other(number)]
    if mentioned and not found:
        raise ValueError(f"no number in {_shown(place)} but what it denies, or bounds")
    before = _EQUALS if is_stated else _IS
    starts = [index for index, number in enumerate(found) if before.search(place, 0, number.start())]
    if is_stated or starts:
        found = found[starts[-1] if starts else 0 :]
        found = found[
            : next((index for index in range(1, len(found)) if not _are_linked(*found[index - 1 : index + 1])), None)
        ]
    return [_value(number) for number in found]


def _is_other(number: re.Match[str]) -> bool:
    """Returns whether a number is denied, or a bound."""
    text, start = number.string, number.start()
    return bool(_OTHER_THAN.search(text, max(0, start - _BEFORE_CHARACTERS), start) or _BOUND.match(text, number.end()))


def _are_linked(one: re.Match[str], following: re.Match[str]) -> bool:
    return _LINK.fullmatch(one.string, one.end(), following.start()) is not None


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
    exponent = int(number["exponent"] or 1)
    if not value and exponent < 0:
        raise ValueError(f"{number[0]!r} divides by zero")
    value = value**exponent * Fraction(10) ** int(number["power"] or 0)
    for word in number["times"].lower().split():
        value *= _TIMES[word]
    return -value if number["minus"] or number["minus_inside"] else value


def _decimal(digits: str) -> Fraction:
    digits = re.sub(r"^(\d+),(\d{1,2})$", r"\1.\2", digits)
    return Fraction(re.sub("[, ]", "", digits))


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
_OPEN, _CLOSE = r"(\[{`'\"“‘", r")\]}`'\"”’"
_IS_IT = r"(?:is|be|would be|should be|must be|remains)"
_STATED = (
    rf"(?:['’]s)?\b(?:[\s:=–—{_OPEN}-]|{_IS_IT}\b)*(?:(?:the\s+)?(?:option|choice|letter)[\s:{_OPEN}]+)?"
    rf"(?:(?<=\()([A-Ja-j])(?=\))|{_CAPITAL}|([a-j])(?=[.:{_CLOSE}]*\s*$))"
)
_RIGHT = r"(?:correct|right|best|answer)"

# Most explicit first: the first of them that finds a choice decides.
PATTERNS = (
    re.compile(r"\\boxed\{\s*\(?([A-Ja-j])\)?\s*\}"),
    re.compile(
        r"\b(?i:answer|solution(?= is|:)|(?:correct|right|best) (?:option|choice)(?: letter)?"
        r"|(?:choos|pick|select)(?:e|ing)?"
        rf"|go(?:ing)? with){_STATED}",
        re.MULTILINE,
    ),
    re.compile(
        rf"(?<![\w'’-])([A-J])[{_CLOSE}]*\s+(?:{_IS_IT}\s+"
        rf"(?:(?:the|my|clearly|definitely|probably|obviously|most|likely)\s+)*(?:{_RIGHT}\b"
        r"|only (?:\w+ )?(?:that|which) (?:fits|works|matches|makes sense|is (?:correct|right|true|left)|remains)\b)"
        r"|(?:remains|fits)(?=[.,;!]|\s*$))"
    ),
    re.compile(
        rf"\b(?i:{_IS_IT}|it['’]s|so|thus|hence|therefore|leaves)[\s:,]+"
        r"(?:\(([A-J])\)|([A-J])(?=[.;!]*\s*$|[.;!,](?:\s|$)|\s\())"
    ),
    re.compile(rf"\b(?i:option|choice){_STATED}", re.MULTILINE),
    re.compile(rf"^[ \t>#{_OPEN}-]*([A-Ja-j])(?:[.:{_CLOSE}]+(?=\s|$)|\s*$|\s+(?:because|since)\b|\s\()", re.MULTILINE),
    re.compile(r"\(([A-J])\)"),
)

# A mention that is denied is no choice: "not (B)", "I do not think that it is B", "neither A nor B", "B is wrong". What
# may stand between denial and mention is only what links them, so "the one that is not a fish is (B)" chooses B.
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|none|cannot|may|might|could|except|wrong|incorrect|false"
    r"|(?:eliminat|exclud|rul)(?:e|es|ed|ing)(?: out)?)"
    rf"|n['’]t)(?:[\s:={_OPEN}]|\b(?:be|is|are|was|it|it['’]s|the|an?|options?|choices?|answers?|letter|think|believe|say"
    r"|that|correct|right|best|as|choose|pick|select|going|go|with|either|of|these|given)\b)*"
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
# In this order: what a response has for what is read. The last one ends a list of what is excluded.
_SIMPLER: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\*+|\u200b|\\(?:text|textbf|mathrm|mathbf)\b|</?(?:b|strong|s)>", ""),
        (r"(\\boxed\{)\s*\{([^{}]*)\}\s*\}", r"\1\2}"),
        (r"<answer>([^<]*)</answer>", r"\nAnswer: \1\n"),
        (r"不正确|不对|错误", " is wrong "),
        (r"是?正确(?:答案|的)?", " is correct "),
        (r"(?:答案|选项|选择|回答|应选(?!项)|故选|选)(?:[是为]|应为|选项|:)*\s*", " answer is "),
        (r"(?<=[A-J])(?=[\u3400-\u9fff])", " "),
        (r"[,;]?\s(?=\(?[A-J]\)? (?:remains|is left|is the only)\b)", ". "),
    )
)


def chosen(response: str, options: Sequence[str]) -> set[str]:
    """Returns the letters that a response chooses: one if it is clear, none or several if it is not.

    It looks for letters in `\\boxed{B}` and in statements such as "Answer: B", "the answer is (B)", "I choose B", "B is
    correct" or "option B"; then at the beginning of lines ("B", "B) text"), after "it is" or "so", and in brackets; a
    letter before the text of another option leaves it open. Without any, it looks for the texts of options in the first
    and the last sentence, as whole words and ignoring case; an option that is part of another one found counts only
    once that one is removed. Whatever the response denies ("not (B)", "B is wrong") is not chosen.
    """
    response = _simpler(response)
    allowed = dict(zip(LETTERS, map(_simpler, options), strict=False))
    for statement in PATTERNS:
        letters = {one for match in statement.finditer(response) for one in _letters(match, allowed)}
        if letters & set(allowed):
            return letters & set(allowed)
    sentences = [one for one in _SENTENCE.split(response) if one.strip()]
    are_numbers = any(character.isdigit() for option in options for character in option)
    read = [sentences[-1].rpartition("=")[2]] if sentences and are_numbers else {*sentences[:1], *sentences[-1:]}
    return {letter for sentence in read for letter in _by_text(sentence, allowed)}


def _simpler(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    for pattern, by in _SIMPLER:
        text = pattern.sub(by, text)
    return text


def _letters(match: re.Match[str], options: dict[str, str]) -> Iterator[str]:
    """Yields the letter of a statement, and others that it leaves open ("B or C"), unless they are denied."""
    another: re.Match[str] | None = match
    while another:
        place = another.start(another.lastindex or 0)
        if not _is_denied(another.string, min(place, match.start()), place + 1):
            yield (letter := another.string[place].upper())
            line = another.string[place + 1 :].partition("\n")[0].strip(f" .:,-={_OPEN}{_CLOSE}").lower()
            if line != options.get(letter, "").lower():
                yield from (other for other, text in options.items() if line == text.lower())
        another = _ANOTHER.match(another.string, place + 1)


def _is_denied(text: str, start: int, end: int) -> bool:
    """Returns whether a text denies what it mentions from `start` to `end`."""
    before = text[max(0, start - _DENIAL_CHARACTERS) : start]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text, end))


def _by_text(sentence: str, options: dict[str, str]) -> set[str]:
    rest, found = " ".join(sentence.split()).lower(), set()
    for letter, option in sorted(options.items(), key=lambda pair: -len(pair[1])):  # longest first
        text = re.sub(r"(?<=\w)\.$", "", " ".join(option.split()).lower())
        # Within a sentence, these are no answers: "no information", "a yes or no question".
        before, after = (r"(?:^|[:,] |\bis )[\"'(“]*", "| [a-z]") if text in ("yes", "no") else (r"(?<!\w)", "")
        whole = re.compile(rf"{before}{re.escape(text)}(?!\w{after})")
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
