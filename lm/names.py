"""Names of special tokens in a rendered conversation: which ones the template wrote, and which are message text.

A template may trim, move or drop message text, so the rendering itself must show where that text ends up: anything that
could be mistaken for a special token is put between two marks before the template sees it, and the marks move with it.
The marks are Unicode noncharacters; messages that contain them get them escaped, so no message can forge a mark.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from tokenizers import AddedToken, Tokenizer, models

_OPEN, _CLOSE, _ESCAPE = MARKS = "\ufdd0\ufdd1\ufdd2"
_MARK = re.compile(f"[{MARKS}]")
_ESCAPED = re.compile(f"{_ESCAPE}([0-2])")
_REGION = f"{_OPEN}[^{_OPEN}{_CLOSE}]*{_CLOSE}"
# White space that the `tokenizers` library strips: Unicode's property, without four control characters of Python's.
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
        """The position in the text without marks of a position in the marked text."""
        return marked_position - bisect_right(self._marked, marked_position - 1)


class Names:
    """The names of a vocabulary's added tokens, and the search for them.

    `is_folded`: the vocabulary matches some special tokens after normalising the text, so that text which does not
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

    def marked(self, content: str) -> str:
        """A message's text, with marks around special tokens' names, and around edges that might become part of one."""
        spans = [match.span() for match in self._people.finditer(content)]
        kept = content.strip()
        if kept:
            start = content.find(kept)
            spans += [(start + first, start + last) for first, last in self._risky_edges(kept)]
            if self.is_folded and self._folds(content):
                spans.append((start, start + len(kept)))
        return _with_regions(content, spans) if spans else content

    def _risky_edges(self, kept: str) -> Iterator[tuple[int, int]]:
        """Spans at the beginning and end of a text that may complete a name together with adjacent text."""
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
        """A rendering whose messages were marked: its text, and the special tokens outside message text.

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
            people = _ESCAPED.sub(lambda found: MARKS[int(found[1])], inner)
            parts += [marked[done : match.start()], people]
            regions.append((start, start + len(people)))
            escapes = [match.start() + 1 + found.start() for found in _ESCAPED.finditer(inner)]
            taken_out += [match.start(), *escapes, match.end() - 1]
            done = match.end()
        text = "".join([*parts, marked[done:]]) if parts else marked
        return Rendered(text, [special for special in specials if self._may_stand(special, text)], regions, taken_out)

    def _special_at(self, match: re.Match[str], start: int) -> Special | None:
        """The special token that matched, at character `start` of the text without marks."""
        found = match.group()
        # With white space around it, it is the longest name that fits.
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
    """A message's text with marks around each character."""
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
    """Whether a name next to this character is inside a word, by the library, whose Unicode tables are not Python's."""
    asked = Tokenizer(models.BPE())
    asked.add_tokens([AddedToken("a", single_word=True)])
    return not asked.encode(f"{character}a").ids


def _pattern(token: AddedToken) -> str:
    """The pattern of text that the library matches as the token."""
    before, after = (f"[{_SPACE}]*" if takes_in else "" for takes_in in (token.lstrip, token.rstrip))
    return before + re.escape(token.content) + after
