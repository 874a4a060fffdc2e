"""Account names: which are allowed, and which look alike. Names appear on pages and in data files."""

import unicodedata
from functools import lru_cache

MAX_NAME_CHARACTERS = 64
# Characters that print nothing, although Unicode does not classify them as control or format characters.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)


def is_name(name: str) -> bool:
    """Whether an account may have this name."""
    is_printable = all(unicodedata.category(letter)[0] != "C" and letter not in _INVISIBLE for letter in name)
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name == name.strip() and is_printable


def require_name(name: str) -> None:
    """Raises: ValueError for a name that no account may have."""
    if not is_name(name):
        raise ValueError(
            f"name is {name!a}; 1 to {MAX_NAME_CHARACTERS} printable characters without space around them were expected"
        )


def look_alike(one: str, other: str) -> bool:
    """Whether people may mistake one name for the other: "Ann" and "ann", or "ann" with a Cyrillic "а"."""
    return not _appearances(one).isdisjoint(_appearances(other))


@lru_cache(maxsize=10_000)
def _appearances(name: str) -> frozenset[str]:
    """Returns what the name may be read as, ignoring case.

    A capital I looks like a small l, but a small i does not, so the skeleton is taken with and without case folding.
    """
    sound = " ".join(unicodedata.normalize("NFKC", name).split())
    return frozenset({_skeleton(sound.casefold()), _skeleton(sound).casefold()})


def _skeleton(text: str) -> str:
    """Replaces each character with the prototype of the characters that look like it (Unicode TR 39, section 4)."""
    prototypes = _prototypes()
    parts = [prototypes.get(letter, letter) for letter in unicodedata.normalize("NFD", text)]
    return unicodedata.normalize("NFD", "".join(parts))


@lru_cache(maxsize=1)
def _prototypes() -> dict[str, str]:
    """Maps each character that looks like others to the prototype (one or several characters) of them all.

    The library lists pairs in both directions. A prototype's list has every character that looks like it; every other
    character lists only its prototype. In a pair that lists only each other, either could be the prototype: the longer
    one is, else the smaller one.
    """
    from confusable_homoglyphs.confusables import confusables_data  # a megabyte of JSON

    found: dict[str, str] = {}
    for letter, others in confusables_data.items():
        if len(letter) != 1 or len(others) != 1:
            continue
        (other,) = (entry["c"] for entry in others)
        is_pair = len(confusables_data.get(other, ())) == 1
        found[letter] = min((letter, other), key=lambda text: (-len(text), text)) if is_pair else other
    return found
