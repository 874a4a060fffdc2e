"""The 25 kinds of checkable instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), each a function.

A function returns whether a response follows the instruction; the keywords are the instruction's arguments, under the
names that the published rows use. The verdicts are those of the published script, which docs/evaluate.md compares
them with, so definitions keep its quirks unless the docstring says otherwise.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

import regex  # unlike re, it takes vowel signs, as of Hindi, for parts of words
from pydantic import AfterValidator, Field

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Relation = Literal["at least", "less than"]

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

# Whitespace, quotation marks, brackets and punctuation separate words; single . / - and * do not.
WORD_SEPARATORS = re.compile(r"[\s\"'`‘’“”„«»()\[\]{}<>,:;!?@#$%&…]+|--+")

OPENING, CLOSING = "\"'“‘([{*_", "\"'”’)]}*_"
ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "rev", "gen", "sen", "rep", "gov", "lt", "col", "maj", "sgt"),
    *("capt", "messrs", "inc", "ltd", "co", "corp", "bros", "ave", "vs"),
    *("jan", "feb", "aug", "sept", "oct", "nov", "dec"),
}
LETTERS_WITH_PERIODS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")  # "J", "U.S", "p.m", before the last period


def _holds(number: int, relation: Relation, threshold: int) -> bool:
    return number >= threshold if relation == "at least" else number < threshold


# ------------------------------------------------------------------------------------------------------------- keywords


def existence(response: str, *, keywords: Texts) -> bool:
    """Whether every keyword occurs, ignoring case, also inside longer words."""
    return all(keyword.lower() in response.lower() for keyword in keywords)


def frequency(response: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """Whether a keyword occurs that often, ignoring case, also inside longer words."""
    return _holds(response.lower().count(keyword.lower()), relation, frequency)


def forbidden_words(response: str, *, forbidden_words: Texts) -> bool:
    """Whether none of the words occurs as a whole word, ignoring case."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(
    response: str,
    *,
    letter: Annotated[str, Field(min_length=1, max_length=1)],
    let_frequency: Count,
    let_relation: Relation,
) -> bool:
    """Whether a character occurs that often, ignoring case.

    Two published rows name "!" and "#". The published script replaces them by a random letter; here they are counted.
    """
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


# ------------------------------------------------------------------------------------------------------------- language


@cache
def _detector_factory() -> Any:
    """Returns langdetect's detector with a seed, without which its verdict on a short text changes between calls."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


def detected_language(text: str) -> str:
    """Returns the ISO 639-1 code of the text's most probable language; "" if it contains no letters to judge by."""
    from langdetect import LangDetectException

    detector = _detector_factory().create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:  # raised for a text of digits and punctuation only
        return ""


def _known_language(code: str) -> str:
    known = sorted(_detector_factory().get_lang_list())
    if code not in known:
        raise ValueError(f"one of {', '.join(known)} was expected")
    return code


def response_language(response: str, *, language: Annotated[str, AfterValidator(_known_language)]) -> bool:
    """Whether the response's most probable language is the given one.

    A response without letters is in no language; the published script takes it for one that follows the instruction.
    """
    return detected_language(response) == language


# -------------------------------------------------------------------------------------------------- length constraints


def count_sentences(text: str) -> int:
    """Counts sentences. One ends at . ! or ? before whitespace, with any closing quotes and brackets between.

    A period ends none after an abbreviation ("Dr."), an initial or letters with periods ("U.S."), and dots that follow
    each other end none before a small letter. Line breaks alone end none; a list's "1." counts as one. The published
    script uses NLTK's Punkt, a model that was trained on newspapers.
    """
    words = text.split()
    return bool(words) + sum(map(_ends_sentence, words, words[1:]))


def _ends_sentence(word: str, following: str) -> bool:
    marked = word.rstrip(CLOSING)
    bare = marked.rstrip(".!?")
    marks = marked[len(bare) :]
    if marks == ".":
        bare = bare.lstrip(OPENING).lower()
        return bare not in ABBREVIATIONS and not LETTERS_WITH_PERIODS.fullmatch(bare)
    return "!" in marks or "?" in marks or (marks != "" and not following[0].islower())


def number_sentences(response: str, *, num_sentences: Count, relation: Relation) -> bool:
    return _holds(count_sentences(response), relation, num_sentences)


def number_words(response: str, *, num_words: Count, relation: Relation) -> bool:
    """Whether there are that many words: runs of letters, their marks, digits and underscores ("don't" is two)."""
    return _holds(len(regex.findall(r"\w+", response)), relation, num_words)


def number_paragraphs(response: str, *, num_paragraphs: Count) -> bool:
    """Whether there are exactly that many paragraphs between `***`, none of them empty except before the first and
    after the last `***`.
    """
    paragraphs = _parts(response, "***")
    return all(paragraphs) and len(paragraphs) == num_paragraphs


def _parts(response: str, separator: str) -> list[str]:
    """Returns the texts between separators, without empty ones before the first and after the last."""
    parts = [part.strip() for part in response.split(separator)]
    return [part for index, part in enumerate(parts) if part or 0 < index < len(parts) - 1]


def nth_paragraph_first_word(response: str, *, num_paragraphs: Count, nth_paragraph: Count, first_word: Text) -> bool:
    """Whether there are exactly that many paragraphs between blank lines, and the nth (from 1) begins with the word.

    Case, quotation marks before the word and punctuation after it are ignored.
    """
    paragraphs = [part.strip() for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    beginning = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", beginning)[0].lower() == first_word.lower()


# -------------------------------------------------------------------------------------------------- detectable content


def number_placeholders(response: str, *, num_placeholders: Count) -> bool:
    """Whether there are at least that many placeholders in square brackets, such as [address]."""
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def postscript(response: str, *, postscript_marker: Text) -> bool:
    """Whether the marker ("P.S." or "P.P.S") occurs, ignoring case, perhaps with spaces after its periods."""
    pattern = re.escape(postscript_marker).replace(r"\.", r"\.\s?").removesuffix(r"\s?")
    return re.search(pattern, response, re.IGNORECASE) is not None


# --------------------------------------------------------------------------------------------------- detectable format


def number_bullet_lists(response: str, *, num_bullets: Count) -> bool:
    """Whether exactly that many lines are bullet points: they begin with `-`, or with `*` but not `**`."""
    lines = [line.lstrip() for line in response.splitlines()]
    return sum(line.startswith(("-", "*")) and not line.startswith("**") for line in lines) == num_bullets


def constrained_response(response: str) -> bool:
    """Whether the response contains "My answer is yes.", "My answer is no." or "My answer is maybe."."""
    return any(answer in response for answer in CONSTRAINED_RESPONSES)


def number_highlighted_sections(response: str, *, num_highlights: Count) -> bool:
    """Whether at least that many passages of a line are highlighted, as *this* or **this**.

    The two forms are searched for separately, so that bold text in a bullet point of `*` counts twice.
    """
    single, double = re.findall(r"\*([^\n*]*)\*", response), re.findall(r"\*\*([^\n*]*)\*\*", response)
    return sum(bool(passage.strip()) for passage in single + double) >= num_highlights


def multiple_sections(response: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """Whether at least that many sections begin, each with the word, in this case, and a number, as in "SECTION 1"."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", response)) >= num_sections


def without_fence(response: str) -> str:
    """Returns a response without the ``` or ```json lines of Markdown around all of it."""
    return re.sub(r"^```(?:json|JSON|Json)?|```$", "", response.strip()).strip()


def json_format(response: str) -> bool:
    """Whether the whole response is JSON, perhaps in a code block of Markdown."""
    try:
        json.loads(without_fence(response))
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """Whether a line contains a title in double angular brackets, such as <<poem of joy>>."""
    inner = [line.partition("<<")[2].rpartition(">>")[0] for line in response.split("\n")]
    return any(text.strip("<> \t") for text in inner)


# --------------------------------------------------------------------------------------- combinations, starts and ends


def two_responses(response: str) -> bool:
    """Whether there are exactly two different responses, separated by ******.

    Empty text is allowed before the first and after the last separator only.
    """
    answers = _parts(response, "******")
    return all(answers) and len(answers) == len(set(answers)) == 2


def repeat_prompt(response: str, *, prompt_to_repeat: Text) -> bool:
    """Whether the response begins with the request, ignoring case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, *, end_phrase: Text) -> bool:
    """Whether the response ends with the phrase, ignoring case and quotation marks around the response."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(response: str) -> bool:
    """Whether the whole response is in double quotation marks (")."""
    return re.fullmatch(r'\s*".*"\s*', response, re.DOTALL) is not None


# ------------------------------------------------------------------------------------------------ case and punctuation


def capital_word_frequency(response: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Whether that many words are in capital letters. An apostrophe separates words, so "I'M" is two.

    The published script splits words by NLTK's tokenizer, whose rules for contractions differ from this one.
    """
    num_capital = sum(word.isupper() for word in WORD_SEPARATORS.split(response))
    return _holds(num_capital, capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """Whether the response is English without small letters."""
    return response.isupper() and detected_language(response) == "en"


def english_lowercase(response: str) -> bool:
    """Whether the response is English without capital letters."""
    return response.islower() and detected_language(response) == "en"


def no_comma(response: str) -> bool:
    return "," not in response


KINDS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
