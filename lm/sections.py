"""From a rendered conversation to tokens: the text between two special tokens is a section, encoded as a whole.

The `tokenizers` library splits text at special tokens' names in the same way, so the result equals encoding the whole
rendering, except that names in message text are spelled out. A response keeps its prompt's tokens: if a token of the
whole section would span the prompt's end and the response's beginning, the section is cut there, since a policy that
answers the prompt could never write that token.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tokenizers import Encoding, Tokenizer

from lm.names import Rendered, Special

# "first": the section begins the text. "later": it follows a special token. "continued": it begins in the middle of a
# section, so nothing may be put before it.
Place = Literal["first", "later", "continued"]


class Section(NamedTuple):
    """Text to encode; with `finds_names` the library looks for special tokens' names in it, as it must for those that
    it matches in normalised text.
    """

    text: str
    place: Place
    finds_names: bool


@dataclass(frozen=True)
class Turn:
    """Where a response begins in the text, and where the template's text around it ends."""

    start: int
    stop: int


class SectionEncoder:
    """Encodes sections with a vocabulary, many at once on all the library's threads."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._vocabulary = vocabulary

    def encode(self, sections: Iterable[Section]) -> dict[Section, Encoding]:
        """Encode each distinct section once. Raises: ValueError for text that is not valid Unicode."""
        found: dict[Section, Encoding] = {}
        by_way: dict[tuple[Place, bool], list[Section]] = {}
        for section in dict.fromkeys(sections):
            by_way.setdefault((section.place, section.finds_names), []).append(section)
        for (place, finds_names), several in by_way.items():
            texts = [section.text for section in several]
            found.update(zip(several, encode_texts(self._for(place), texts, finds_names=finds_names), strict=True))
        return found

    def _for(self, place: Place) -> Tokenizer:
        return {"first": self._vocabulary, "later": self._later, "continued": self._continued}[place]

    @cached_property
    def _later(self) -> Tokenizer:
        return _rebuilt(self._vocabulary, everywhere=False)

    @cached_property
    def _continued(self) -> Tokenizer:
        return _rebuilt(self._vocabulary, everywhere=True)


def encode_texts(vocabulary: Tokenizer, texts: Sequence[str], *, finds_names: bool) -> list[Encoding]:
    """The library's encodings; special tokens' names become those tokens, or are spelled out.

    Raises: ValueError for text that is not valid Unicode.
    """
    vocabulary.encode_special_tokens = not finds_names
    try:
        return vocabulary.encode_batch(list(texts), add_special_tokens=False)
    except TypeError:  # the library's answer to a string without a UTF-8 form
        for text in texts:
            require_unicode(text)
        raise
    finally:
        vocabulary.encode_special_tokens = False


def require_unicode(text: str) -> None:
    """Raises: ValueError for a string with half of a surrogate pair, which UTF-8 cannot encode."""
    place = next((place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if place is not None:
        raise ValueError(
            f"a text has half of a surrogate pair, U+{ord(text[place]):04X}, at character {place}"
            f" ({text[max(0, place - 20) : place + 20]!a}); Unicode text was expected"
        )


def _rebuilt(vocabulary: Tokenizer, *, everywhere: bool) -> Tokenizer:
    """The vocabulary for text that follows other text; with `everywhere`, not even at a section's beginning is a space
    put before it.
    """
    steps = {"normalizer": vocabulary.normalizer, "pre_tokenizer": vocabulary.pre_tokenizer}
    described = {name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()}
    changed = {name: _without_prefix(step, everywhere=everywhere) for name, step in described.items()}
    if changed == described:
        return vocabulary
    return Tokenizer.from_str(json.dumps({**json.loads(vocabulary.to_str()), **changed}))


def _without_prefix(step: Mapping[str, Any] | None, *, everywhere: bool) -> dict[str, Any] | None:
    """The normaliser or pre-tokenizer, changed to put no space before a text."""
    if step is None or (everywhere and step["type"] == "Prepend"):
        return None
    changed = dict(step)
    for inner in ("normalizers", "pretokenizers"):
        if inner in step:
            kept = (_without_prefix(part, everywhere=everywhere) for part in step[inner])
            changed[inner] = [part for part in kept if part is not None]
    if step["type"] == "Metaspace" and (everywhere or step["prepend_scheme"] == "first"):
        changed["prepend_scheme"] = "never"
    if step["type"] == "ByteLevel" and everywhere:
        changed["add_prefix_space"] = False
    return changed


class Conversation:
    """A rendering cut into sections, and its turns, whose responses are marked."""

    def __init__(
        self, rendered: Rendered, turns: Sequence[Turn], end_ids: Collection[int], *, finds_names: bool
    ) -> None:
        self._text, self._turns, self._end_ids, self._finds_names = rendered.text, turns, end_ids, finds_names
        self._regions = rendered.regions
        self._specials = [_clipped(special, turns) for special in rendered.specials]

    def _between_specials(self) -> list[tuple[int, int]]:
        begins = [0, *(special.end for special in self._specials)]
        ends = [*(special.start for special in self._specials), len(self._text)]
        return list(zip(begins, ends, strict=True))

    def _section(self, start: int, stop: int, place: Place) -> Section:
        return Section(self._text[start:stop], place, self._finds_names)

    def sections(self) -> Iterator[Section]:
        """The sections that `tokens` needs, unless a token spans a prompt's end and its response's beginning."""
        for start, stop in self._between_specials():
            if start < stop:
                yield self._section(start, stop, _place(start))
                for turn in self._turns:
                    if start < turn.start < stop:
                        yield self._section(start, turn.start, _place(start))

    def names_people(self, encoded: Callable[[Section], Encoding], is_special: Callable[[int], bool]) -> bool:
        """Whether the library, which looks for names in these sections, matches one in message text."""
        if not self._regions:
            return False
        found = (span for token, *span in self._written(encoded).in_sections() if is_special(token))
        return any(start < last and first < stop for start, stop in found for first, last in self._regions)

    def tokens(self, encoded: Callable[[Section], Encoding]) -> tuple[list[int], list[bool]]:
        """Tokens, and per token whether it belongs to a response, its end token included."""
        written = self._written(encoded)
        is_response = [False] * len(written.tokens)
        for turn in self._turns:
            first = written.begins.get(turn.start, -1)
            first = written.before(turn.start) if first < 0 else first
            stop = self._stop(turn, first, written)
            is_response[first:stop] = [True] * (stop - first)
        return written.tokens, is_response

    def _written(self, encoded: Callable[[Section], Encoding]) -> "_Written":
        written = _Written()
        for (start, stop), special in zip(self._between_specials(), [*self._specials, None], strict=True):
            if start < stop:
                self._write_section(start, stop, encoded, written)
            if special is not None:
                written.add(special.start, [special.token_id], None)
        written.add(len(self._text), [], None)
        return written

    def _write_section(
        self, start: int, stop: int, encoded: Callable[[Section], Encoding], written: "_Written"
    ) -> None:
        place = _place(start)
        whole = encoded(self._section(start, stop, place))
        for cut in (turn.start for turn in self._turns):
            if not start < cut < stop:
                continue
            prompt = encoded(self._section(start, cut, place))
            if not _keeps(whole, prompt, cut - start):
                written.add(start, prompt.ids, prompt)
                start, place = cut, "continued"
                whole = encoded(self._section(start, stop, place))
            written.begins[cut] = len(written.tokens) + (len(prompt) if start < cut else 0)
        written.add(start, whole.ids, whole)

    def _stop(self, turn: Turn, first: int, written: "_Written") -> int:
        """The end of the response's tokens: after its end token, or else where the template's text around it ends."""
        for special in self._specials:
            if special.token_id in self._end_ids and turn.start <= special.name_start < turn.stop:
                return written.before(special.start) + 1
        stop = written.before(turn.stop)
        ends = (place for place in range(first, stop) if written.tokens[place] in self._end_ids)
        return next((place + 1 for place in ends), stop)


class _Written:
    """Tokens and the characters that they stand for; `begins` counts the tokens before a response inside a section."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.begins: dict[int, int] = {}
        self._starts: list[int] = []
        self._firsts: list[tuple[int, Encoding | None]] = []

    def add(self, start: int, ids: Sequence[int], encoding: Encoding | None) -> None:
        """Add the tokens of the text from character `start`; without an encoding, a special token."""
        self._starts.append(start)
        self._firsts.append((len(self.tokens), encoding))
        self.tokens += ids

    def in_sections(self) -> Iterator[tuple[int, int, int]]:
        """Each token of the sections, with the start and end of its characters."""
        for begin, (_, encoding) in zip(self._starts, self._firsts, strict=True):
            if encoding is not None:
                for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                    yield token, begin + start, begin + stop

    def before(self, position: int) -> int:
        """The number of tokens that begin before the character."""
        place = bisect_left(self._starts, position)
        if not place:
            return 0
        if place < len(self._starts) and self._starts[place] == position:
            return self._firsts[place][0]
        first, encoding = self._firsts[place - 1]
        if encoding is None:
            return first + 1
        return first + sum(start < position - self._starts[place - 1] for start, _ in encoding.offsets)


def _place(start: int) -> Place:
    return "later" if start else "first"


def _clipped(special: Special, turns: Sequence[Turn]) -> Special:
    """White space that a special token absorbs belongs to the response, if one begins there."""
    start = next((turn.start for turn in turns if special.start < turn.start <= special.name_start), special.start)
    return replace(special, start=start)


def _keeps(whole: Encoding, prompt: Encoding, length: int) -> bool:
    """Whether the whole begins with the prompt's tokens, none of which extends beyond its `length` characters."""
    num_tokens = len(prompt)
    if whole.ids[:num_tokens] != prompt.ids:
        return False
    characters = whole.token_to_chars(num_tokens - 1) if num_tokens else None
    return characters is None or bool(characters[1] <= length)
