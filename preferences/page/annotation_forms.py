"""Criteria, ratings of earlier turns, marked passages and edits in a task's form: reads them, and fills in a stored
answer's.

A passage is given by quoting it, which works by hand, by the keyboard and without JavaScript. Browsers copy the text
that they show, without Markdown's punctuation and with other white space, so letters and digits alone are compared.
"""

import re
from collections.abc import Iterator, Sequence
from unicodedata import category
from urllib.parse import quote_plus

from preferences.annotations import MAX_EDIT_CHARACTERS, MAX_SPANS, Annotations, CriterionRatings, Span, TurnRating
from preferences.page.config import LabelingConfig
from preferences.page.fields import LETTERS, Fields, read_each
from preferences.page.security import MAX_BODY_BYTES
from preferences.records import ShownTask, assistant_turns

NUM_BLANK_SPANS = 2  # rows for passages below those that are filled in
_EDGE = re.compile(r"^\s+|\s+$")


def read_annotations(fields: Fields, shown: ShownTask, config: LabelingConfig, wrong: list[str]) -> Annotations:
    """Returns what the form says, in the order shown, and adds a sentence to `wrong` for each mistake."""
    responses, criteria = shown.responses, []
    for number, criterion in enumerate(config.criteria):
        allowed = list(criterion.choices)
        low, high = min(allowed), max(allowed)
        ratings = read_each(fields, f"criterion_{number}", len(responses), low, high, wrong, noun=criterion.name)
        criteria.append(CriterionRatings(criterion.name, tuple(ratings)))
    spans = tuple(
        span
        for place, response in enumerate(responses)
        for span in (_spans(fields, place, response, config.span_labels, wrong) if config.span_labels else ())
    )
    edits = _edits(fields, responses, wrong) if config.asks_edits else ()
    turns = tuple(_turns(fields, assistant_turns(shown.prompt), config, wrong))
    return Annotations(tuple(criteria), tuple(dict.fromkeys(spans)), edits, turns)


def _turns(fields: Fields, turns: Sequence[int], config: LabelingConfig, wrong: list[str]) -> Iterator[TurnRating]:
    """Yields the ratings of the assistant's turns from the fields turn_CRITERION_TURN, all of which are expected."""
    for number, criterion in enumerate(config.criteria):
        if not criterion.each_turn:
            continue
        given = {turn: fields.number(f"turn_{number}_{turn}") for turn in turns}
        missing = [str(turn + 1) for turn, rating in given.items() if rating is None]
        if missing:
            named = f"Turn {missing[0]} has" if len(missing) == 1 else f"Turns {', '.join(missing)} have"
            wrong.append(f"{named} no {criterion.name}.")
        for turn, rating in given.items():
            if rating is not None and rating not in criterion.choices:
                expected = f"{min(criterion.choices)} to {max(criterion.choices)}"
                wrong.append(f"The {criterion.name} of turn {turn + 1} is {rating}; it must be {expected}.")
            yield TurnRating(turn, criterion.name, rating or 0)


def _edits(fields: Fields, responses: Sequence[str], wrong: list[str]) -> tuple[str, ...]:
    """Returns each response's edit; "" for one that was left as it is or emptied."""
    edits = []
    for place, response in enumerate(responses):
        edit = plain_lines(fields.text(f"edit_{place}"))
        if is_same_text(edit, response):
            edits.append("")
            continue
        if len(edit) > MAX_EDIT_CHARACTERS:
            found = f"{len(edit):,} characters; at most {MAX_EDIT_CHARACTERS:,} are allowed"
            wrong.append(f"Your version of response {LETTERS[place]} has {found}.")
        edits.append(edit.strip("\n"))
    return tuple(edits) if any(edits) else ()


def plain_lines(text: str) -> str:
    """Returns the text with \\n as its only line break. Browsers send \\r\\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_same_text(edit: str, response: str) -> bool:
    """Whether an edit changes nothing: it is empty, or differs only in white space at its ends."""
    return not edit.strip() or plain_lines(edit).strip() == plain_lines(response).strip()


def max_edit(responses: Sequence[str]) -> int:
    """Returns how many characters a response may have to be edited on the page: 0 if a form could not hold them all."""
    num_bytes = sum(len(quote_plus(response)) for response in responses)
    return MAX_EDIT_CHARACTERS if num_bytes <= MAX_BODY_BYTES // 2 else 0


def _spans(fields: Fields, place: int, response: str, labels: Sequence[str], wrong: list[str]) -> Iterator[Span]:
    letter = LETTERS[place]
    for number in range(MAX_SPANS):
        quote = _EDGE.sub("", fields.text(f"span_quote_{place}_{number}"))
        label, nth = fields.text(f"span_label_{place}_{number}"), fields.text(f"span_nth_{place}_{number}").strip()
        if not quote:
            continue
        short = quote if len(quote) <= 40 else f"{quote[:40]}…"
        if label not in labels:
            wrong.append(f"The passage “{short}” of response {letter} has no label.")
            continue
        found = occurrences(response, plain_lines(quote))
        if not found:
            wrong.append(f"“{short}” is not in response {letter}. Copy the passage from the response.")
        elif len(found) > 1 and not nth:
            wrong.append(f"“{short}” occurs {len(found)} times in response {letter}. Say which, or quote more of it.")
        elif nth and not (nth.isascii() and nth.isdigit() and 1 <= int(nth[:9]) <= len(found)):
            wrong.append(f"“{short}” occurs {len(found)} times in response {letter}, so there is no number {nth[:9]}.")
        else:
            start, end = found[int(nth or 1) - 1]
            yield Span(place, start, end, label)


def occurrences(text: str, quote: str) -> list[tuple[int, int]]:
    """Returns where the quote occurs in the text, as (start, end) in characters, whatever the punctuation and spaces.

    A quote without letters and digits is looked up exactly.
    """
    letters, places = _letters(quote), [index for index, character in enumerate(text) if character.isalnum()]
    if not letters:
        return [(start, start + len(quote)) for start in _starts(text, quote)] if quote else []
    whole = "".join(text[index] for index in places)
    found = []
    for start in _starts(whole, letters):
        first, last = places[start], places[start + len(letters) - 1] + 1
        while last < len(text) and category(text[last]).startswith("M"):  # accents and vowel signs of the last letter
            last += 1
        # Punctuation at the quote's ends belongs to the passage if it is there.
        exact = text.find(quote, max(0, first - len(quote)), last + len(quote))
        is_around = 0 <= exact <= first and exact + len(quote) >= last
        found.append((exact, exact + len(quote)) if is_around else (first, last))
    return found


def _letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum())


def _starts(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield start
        start = text.find(part, start + 1)


def annotation_fields(found: Annotations, responses: Sequence[str], config: LabelingConfig) -> dict[str, str]:
    """Returns the fields of stored annotations, in the order shown, so that they can be changed."""
    values: dict[str, str] = {}
    for number, criterion in enumerate(config.criteria):
        for place, rating in enumerate(found.ratings_by(criterion.name)):
            values[f"criterion_{number}_{place}"] = f"{rating:.0f}"
        for turn, rating in found.turn_ratings_by(criterion.name).items():
            values[f"turn_{number}_{turn}"] = f"{rating:.0f}"
    for place, edit in enumerate(found.edits):
        values[f"edit_{place}"] = edit or responses[place]
    used = [0] * len(responses)
    for span in found.spans:
        place, number = span.response, used[span.response]
        used[place] += 1
        response = responses[place]
        quote = response[span.start : span.end]
        places = occurrences(response, plain_lines(quote))
        nth = places.index((span.start, span.end)) + 1 if (span.start, span.end) in places else 1
        values[f"span_quote_{place}_{number}"] = quote
        values[f"span_label_{place}_{number}"] = span.label
        values[f"span_nth_{place}_{number}"] = str(nth) if len(places) > 1 else ""
    return values


def num_span_rows(fields: Fields, place: int) -> int:
    """Returns how many rows for passages a response's form shows: up to the last filled one, and a few blank ones."""
    filled = [number for number in range(MAX_SPANS) if fields.text(f"span_quote_{place}_{number}").strip()]
    return min(MAX_SPANS, (filled[-1] + 1 if filled else 0) + NUM_BLANK_SPANS)
