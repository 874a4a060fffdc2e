"""Turns a rendered conversation into tokens: special tokens that the template wrote, and the text between them.

A template may trim, move or drop message text, so the rendering itself must show where that text ends up: anything that
could be mistaken for a special token is put between two marks before the template sees it, and the marks move with it.
The marks are Unicode noncharacters; messages that contain them get them escaped, so no message can forge a mark.

The text between two special tokens is a section, encoded as a whole. The `tokenizers` library splits text at special
tokens' names in the same way, so the result equals encoding the whole rendering, except that names in message text are
spelled out. A response keeps its prompt's tokens: if a token of the whole section would span the prompt's end and the
response's beginning, the section is cut there, since a policy that answers the prompt could never write that token.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer, models

_OPEN, _CLOSE, _ESCAPE = MARKS = "\ufdd0\ufdd1\ufdd2"
_MARK = re.compile(f"[{MARKS}]")
_ESCAPED = re.compile(f"{_ESCAPE}([0-2])")
_REGION = f"{_OPEN}[^{_OPEN}{_CLOSE}]*{_CLOSE}"
# White space that the `tokenizers` library strips: Unicode's property, without four control characters that
# Python adds.
_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@dataclass(frozen=True)
class Special:
    """A special token that the template wrote: characters `start` to `end` of the text, including white space that the
    token absorbs; its name begins at `name_start`.
    """

    start: int
    name_start: int
    end: int
    token_id: int


@dataclass(frozen=True)
class Rendered:
    """A rendering without its marks."""

    text: str
    specials: list[Special]
    regions: list[tuple[int, int]]  # message characters that were between marks
    _marked: list[int]  # positions of removed marks in the marked text, in order

    def at(self, marked_position: int) -> int:
        """Converts a position in the marked text to one in the text without marks."""
        return marked_position - bisect_right(self._marked, marked_position - 1)


class Names:
    """The names of a vocabulary's added tokens, and the search for them.

    `is_folded`: the vocabulary matches some special tokens after normalising the text, so text that does not
    spell a name may become one.
    """

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._tokens = vocabulary.get_added_tokens_decoder()
        self._added = {token.content: (number, token) for number, token in self._tokens.items()}
        self._normalizer = vocabulary.normalizer
        self._special = [name for name, (_, token) in self._added.items() if token.special]
        late = [name for name in self._special if self._added[name][1].normalized]
        self.is_folded = bool(late) and self._normalizer is not None
        self._late = set(late) if self.is_folded else set()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._tokens and self._tokens[token_id].special

    @cached_property
    def _fragments(self) -> tuple[set[str], set[str], str, int]:
        """Proper prefixes of special tokens' names, proper suffixes, all names as one text, and the longest length."""
        heads = {name[:length] for name in self._special for length in range(1, len(name))}
        tails = {name[length:] for name in self._special for length in range(1, len(name))}
        return heads, tails, "\n".join(self._special), max(map(len, self._special), default=0)

    @cached_property
    def _people(self) -> re.Pattern[str]:
        # Every alternative begins with a literal character, so that the search skips most of a text quickly.
        return re.compile("|".join([*map(re.escape, _longest_first(self._special)), *MARKS]))

    @cached_property
    def _folded(self) -> list[str]:
        """The names matched in normalised text, without the space that a normaliser may put before them."""
        assert self._normalizer is not None
        return [self._normalizer.normalize_str(name).strip("▁ ") for name in self._late]

    @cached_property
    def _all(self) -> re.Pattern[str]:
        return self._search(set())

    @cached_property
    def _early(self) -> re.Pattern[str]:
        return self._search(self._late)

    def _search(self, left_out: set[str]) -> re.Pattern[str]:
        # Other added tokens are matched too, so that a special name inside one is not.
        names = [name for name in self._added if name not in left_out]
        return re.compile("|".join([_REGION, *(_pattern(self._added[name][1]) for name in _longest_first(names))]))

    def are_in(self, text: str) -> bool:
        """Whether the text contains a special token's name, or a mark."""
        return self._people.search(text) is not None

    def marked(self, content: str) -> str:
        """Puts marks around special tokens' names in a message, and around edges that might become part of one."""
        spans = [match.span() for match in self._people.finditer(content)]
        if kept := content.strip():
            start = content.find(kept)
            spans += [(start + first, start + last) for first, last in self._risky_edges(kept)]
            if self.is_folded and self._folds(content):
                spans.append((start, start + len(kept)))
        return _with_regions(content, spans) if spans else content

    def _risky_edges(self, kept: str) -> Iterator[tuple[int, int]]:
        """Yields spans at the beginning and end of a text that may complete a name together with adjacent text."""
        heads, tails, names, longest = self._fragments
        if len(kept) < longest and kept in names:
            yield 0, len(kept)
        lengths = range(min(len(kept), longest), 0, -1)
        yield from ((0, length) for length in lengths if kept[:length] in tails)
        yield from ((len(kept) - length, len(kept)) for length in lengths if kept[-length:] in heads)

    def _folds(self, content: str) -> bool:
        assert self._normalizer is not None
        normalised = self._normalizer.normalize_str(content)
        return any(name in normalised for name in self._folded)

    def read(self, marked: str, *, finds_late: bool = True) -> Rendered:
        """Removes the marks from a rendering, and finds the special tokens outside message text.

        Without `finds_late`, tokens that the library matches in normalised text are left to the library.
        """
        pattern = self._all if finds_late else self._early
        parts: list[str] = []
        specials: list[Special] = []
        regions: list[tuple[int, int]] = []
        taken_out: list[int] = []
        done = 0
        for match in pattern.finditer(marked):
            start = match.start() - len(taken_out)
            if not match.group().startswith(_OPEN):
                special = self._special_at(match, start)
                specials += [] if special is None else [special]
                continue
            inner = match.group()[1:-1]
            people = _ESCAPED.sub(lambda match: MARKS[int(match[1])], inner)
            parts += [marked[done : match.start()], people]
            regions.append((start, start + len(people)))
            escapes = [match.start() + 1 + escape.start() for escape in _ESCAPED.finditer(inner)]
            taken_out += [match.start(), *escapes, match.end() - 1]
            done = match.end()
        text = "".join([*parts, marked[done:]]) if parts else marked
        return Rendered(text, [special for special in specials if self._may_stand(special, text)], regions, taken_out)

    def _special_at(self, match: re.Match[str], start: int) -> Special | None:
        """Returns the special token that matched, at `start` of the text without marks; None for other tokens."""
        found = match.group()
        # If the match includes white space, the token is the longest name that fits.
        name = found if found in self._added else next(n for n in self._longest_first if n.strip() == found.strip())
        number, token = self._added[name]
        return Special(start, start + found.index(name), start + len(found), number) if token.special else None

    def _may_stand(self, special: Special, text: str) -> bool:
        """Whether the name is not inside a word, or is allowed to be."""
        token = self._tokens[special.token_id]
        stop = special.name_start + len(token.content)
        neighbours = text[max(0, special.name_start - 1) : special.name_start] + text[stop : stop + 1]
        return not (token.single_word and any(map(_is_word, neighbours)))

    @cached_property
    def _longest_first(self) -> list[str]:
        return _longest_first(list(self._added))


def marked_throughout(content: str) -> str:
    """Puts marks around each character of a message, except white space."""
    spans = [(place, place + 1) for place, character in enumerate(content) if not character.isspace()]
    return _with_regions(content, spans)


def _with_regions(content: str, spans: Sequence[tuple[int, int]]) -> str:
    parts: list[str] = []
    done = 0
    for start, stop in sorted(spans):
        begin = max(start, done)
        if begin < stop:
            inner = _MARK.sub(lambda mark: f"{_ESCAPE}{MARKS.index(mark[0])}", content[begin:stop])
            parts += [content[done:begin], _OPEN, inner, _CLOSE]
            done = stop
    return "".join([*parts, content[done:]])


def _longest_first(names: Sequence[str]) -> list[str]:
    return sorted(names, key=len, reverse=True)


@cache
def _is_word(character: str) -> bool:
    """Whether the library takes a name next to this character as part of a word; its Unicode tables are its own."""
    asked = Tokenizer(models.BPE())
    asked.add_tokens([AddedToken("a", single_word=True)])
    return not asked.encode(f"{character}a").ids


def _pattern(token: AddedToken) -> str:
    """Returns the pattern of text that the library matches as the token."""
    before, after = (f"[{_SPACE}]*" if takes_in else "" for takes_in in (token.lstrip, token.rstrip))
    return before + re.escape(token.content) + after


# "first": the section begins the text. "later": it follows a special token. "continued": it begins in the middle of a
# section, so nothing may be put before it.
Place = Literal["first", "later", "continued"]


class Section(NamedTuple):
    """Text to encode. With `finds_names` the library looks for special tokens' names in it, which is needed for the
    names that it matches in normalised text.
    """

    text: str
    place: Place
    finds_names: bool


@dataclass(frozen=True)
class Turn:
    """Where a response begins in the text, and where the template's text around it ends; an empty one only cuts."""

    start: int
    stop: int


class Conversation:
    """A rendering cut into sections, and its turns, which say where responses are."""

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
        """Yields the sections that `tokens` needs, unless a token spans a prompt's end and its response's beginning."""
        for start, stop in self._between_specials():
            if start < stop:
                yield self._section(start, stop, _place(start))
                for turn in self._turns:
                    if start < turn.start < stop:
                        yield self._section(start, turn.start, _place(start))

    def names_people(self, encoded: Callable[[Section], Encoding], is_special: Callable[[int], bool]) -> bool:
        """Whether the library finds a special token's name in message text when it encodes these sections."""
        if not self._regions:
            return False
        spans = (span for token, *span in self._written(encoded).in_sections() if is_special(token))
        return any(start < last and first < stop for start, stop in spans for first, last in self._regions)

    def tokens(self, encoded: Callable[[Section], Encoding]) -> tuple[list[int], list[bool]]:
        """Returns the tokens, and per token whether it belongs to a response, including its end token."""
        written = self._written(encoded)
        is_response = [False] * len(written.tokens)
        for turn in (turn for turn in self._turns if turn.start < turn.stop):
            first = written.begins[turn.start] if turn.start in written.begins else written.before(turn.start)
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
        """Returns the end of the response's tokens: after its end token, or else where the template's text ends."""
        for special in self._specials:
            if special.token_id in self._end_ids and turn.start <= special.name_start < turn.stop:
                return written.before(special.start) + 1
        stop = written.before(turn.stop)
        ends = (place for place in range(first, stop) if written.tokens[place] in self._end_ids)
        return next((place + 1 for place in ends), stop)


class _Written:
    """Tokens and the characters that they stand for; `begins` counts those before a response inside a section."""

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
        """Yields each token of the sections, with the start and end of its characters."""
        for begin, (_, encoding) in zip(self._starts, self._firsts, strict=True):
            if encoding is not None:
                for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                    yield token, begin + start, begin + stop

    def before(self, position: int) -> int:
        """Returns the number of tokens that begin before the character."""
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
    """Leaves white space that a special token would absorb to the response, if one begins there."""
    start = next((turn.start for turn in turns if special.start < turn.start <= special.name_start), special.start)
    return special if start == special.start else replace(special, start=start)


def _keeps(whole: Encoding, prompt: Encoding, length: int) -> bool:
    """Whether the whole begins with the prompt's tokens, none of which extends beyond its `length` characters."""
    num_tokens = len(prompt)
    if whole.ids[:num_tokens] != prompt.ids:
        return False
    characters = whole.token_to_chars(num_tokens - 1) if num_tokens else None
    return characters is None or bool(characters[1] <= length)


class SectionEncoder:
    """Encodes sections with a vocabulary, many at once on all the library's threads."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._vocabulary = vocabulary

    def encode(self, sections: Iterable[Section]) -> dict[Section, Encoding]:
        """Encode each distinct section once. Raises: ValueError for text that is not valid Unicode."""
        encodings: dict[Section, Encoding] = {}
        by_way: dict[tuple[Place, bool], list[Section]] = {}
        for section in dict.fromkeys(sections):
            by_way.setdefault((section.place, section.finds_names), []).append(section)
        for (place, finds_names), several in by_way.items():
            texts = [section.text for section in several]
            encodings.update(zip(several, encode_texts(self._for(place), texts, finds_names=finds_names), strict=True))
        return encodings

    def _for(self, place: Place) -> Tokenizer:
        return {"first": self._vocabulary, "later": self._later, "continued": self._continued}[place]

    @cached_property
    def _later(self) -> Tokenizer:
        return _rebuilt(self._vocabulary, everywhere=False)

    @cached_property
    def _continued(self) -> Tokenizer:
        return _rebuilt(self._vocabulary, everywhere=True)


def encode_texts(vocabulary: Tokenizer, texts: Sequence[str], *, finds_names: bool) -> list[Encoding]:
    """Returns the library's encodings. With `finds_names`, special tokens' names become tokens; else they remain text.

    Raises: ValueError for text that is not valid Unicode.
    """
    vocabulary.encode_special_tokens = not finds_names
    try:
        return vocabulary.encode_batch(list(texts), add_special_tokens=False)
    except TypeError:  # the library raises it for a string that UTF-8 cannot encode
        for text in texts:
            require_unicode(text)
        raise
    finally:
        vocabulary.encode_special_tokens = False


def require_unicode(text: str) -> None:
    """Raises: ValueError for a string with half of a surrogate pair, or a byte that was not UTF-8."""
    place = next((place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if place is not None:
        code = ord(text[place])
        is_byte = 0xDC80 <= code <= 0xDCFF  # how Python reads a byte of standard input that is not UTF-8
        what = (
            f"byte 0x{code - 0xDC00:02X}, which is not UTF-8,"
            if is_byte
            else f"half of a surrogate pair, U+{code:04X},"
        )
        raise ValueError(
            f"a text has {what} at character {place}"
            f" ({text[max(0, place - 20) : place + 20]!a}); Unicode text was expected"
        )


def _rebuilt(vocabulary: Tokenizer, *, everywhere: bool) -> Tokenizer:
    """Returns the vocabulary for text that follows other text. With `everywhere`, it puts no space before a section
    either.
    """
    steps = {"normalizer": vocabulary.normalizer, "pre_tokenizer": vocabulary.pre_tokenizer}
    described = {name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()}
    changed = {name: _without_prefix(step, everywhere=everywhere) for name, step in described.items()}
    if changed == described:
        return vocabulary
    return Tokenizer.from_str(json.dumps({**json.loads(vocabulary.to_str()), **changed}))


def _without_prefix(step: Mapping[str, Any] | None, *, everywhere: bool) -> dict[str, Any] | None:
    """Returns the normaliser or pre-tokenizer, changed to put no space before a text."""
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
