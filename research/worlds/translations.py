"""English sentences about counted things, with their French translations: a small parallel corpus.

French differs from English in what a translator has to learn: adjectives follow their noun, and agree with it in gender
and number; "one" agrees with the noun's gender; and numbers from 70 to 99 are counted in twenties.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from files.atomic import write_jsonl
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld

MAX_NUMBER = 999_999

_EN_ONES = (
    *("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_EN_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_FR_ONES = (
    *("", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze", "treize"),
    *("quatorze", "quinze", "seize", "dix-sept", "dix-huit", "dix-neuf"),
)
_FR_TENS = ("", "", "vingt", "trente", "quarante", "cinquante", "soixante", "soixante", "quatre-vingt", "quatre-vingt")


@dataclass(frozen=True)
class _Noun:
    english: str
    french: str
    is_feminine: bool


_NOUNS = tuple(
    _Noun(*row)
    for row in (
        ("apple", "pomme", True),
        ("book", "livre", False),
        ("box", "boîte", True),
        ("car", "voiture", True),
        ("cat", "chat", False),
        ("chair", "chaise", True),
        ("flower", "fleur", True),
        ("pencil", "crayon", False),
        ("shirt", "chemise", True),
        ("dog", "chien", False),
    )
)
# English, French masculine and feminine.
_COLORS = (
    *(("red", "rouge", "rouge"), ("yellow", "jaune", "jaune"), ("black", "noir", "noire"), ("blue", "bleu", "bleue")),
    *(("green", "vert", "verte"), ("white", "blanc", "blanche"), ("gray", "gris", "grise")),
)
_VERBS = (("sees", "voit"), ("wants", "veut"), ("sells", "vend"), ("buys", "achète"), ("counts", "compte"))
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Hugo", "Julia", "Leo", "Nina", "Paul")


class TranslationsConfig(PlaygroundConfig):
    """Sizes of the parallel corpus, and of the playground's own data, which a job that translates does not read."""

    num_translations: int = Field(gt=0, le=100_000, description="English sentences with French translations.")
    num_translations_heldout: int = Field(default=500, gt=0, description="Held-out translations.")


class TranslationsWorld(PlaygroundWorld):
    """The playground, which also writes translations: {"prompt": English, "completion": French}."""

    config_type: ClassVar[type[BaseModel]] = TranslationsConfig

    def __init__(self, config: TranslationsConfig) -> None:
        super().__init__(config)
        self.sizes = {
            "translations_heldout": config.num_translations_heldout,
            "translations": config.num_translations,
        }

    def write_data(self, folder: Path, seed: int) -> None:
        super().write_data(folder, seed)
        sentences = set[str]()
        for name, num_pairs in self.sizes.items():
            pairs = draw_pairs(num_pairs, random.Random(f"{seed}/{name}"), sentences)
            write_jsonl(
                folder / f"{name}.jsonl", [{"prompt": english, "completion": french} for english, french in pairs]
            )


def english_number(number: int) -> str:
    """Write a number from 1 to 999,999 in words, with "and" before the tens. Raises: ValueError for any other."""
    thousands, rest = _halves(number)
    if not thousands:
        return _english_below_1000(rest)
    joint = " and " if 0 < rest < 100 else " "
    return f"{_english_below_1000(thousands)} thousand{joint}{_english_below_1000(rest)}".rstrip()


def _english_below_1000(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    tens = _EN_ONES[rest] if rest < 20 else f"{_EN_TENS[rest // 10]}-{_EN_ONES[rest % 10]}".rstrip("-")
    if not hundreds:
        return tens
    return f"{_EN_ONES[hundreds]} hundred" + (f" and {tens}" if tens else "")


def french_number(number: int, *, is_feminine: bool = False) -> str:
    """Write a number from 1 to 999,999 in words, in the spelling before 1990: hyphens below 100, except around "et".

    A final "un" agrees with a feminine noun. "cent" and "vingt" get an s in the plural if nothing follows them.
    Raises: ValueError for any other number.
    """
    thousands, rest = _halves(number)
    words = [] if thousands < 2 else [_french_below_1000(thousands, is_last=False)]
    words += ["mille"] if thousands else []
    words += [_french_below_1000(rest, is_last=True)] if rest else []
    text = " ".join(words)
    return f"{text}e" if is_feminine and text.endswith("un") else text


def _french_below_1000(number: int, *, is_last: bool) -> str:
    hundreds, rest = divmod(number, 100)
    tens = _french_below_100(rest, is_last=is_last)
    if not hundreds:
        return tens
    plural = "s" if hundreds > 1 and not rest and is_last else ""
    return f"{_FR_ONES[hundreds]} cent{plural} {tens}".removeprefix("un ").rstrip()


def _french_below_100(number: int, *, is_last: bool) -> str:
    if number < 20:
        return _FR_ONES[number]
    tens, ones = divmod(number, 10)
    ones += 10 * (tens in (7, 9))  # soixante-dix, quatre-vingt-dix
    if number == 80:
        return "quatre-vingts" if is_last else "quatre-vingt"
    joint = " et " if ones in (1, 11) and tens < 8 else "-"
    return f"{_FR_TENS[tens]}{joint}{_FR_ONES[ones]}".rstrip("-")


def _halves(number: int) -> tuple[int, int]:
    if not 1 <= number <= MAX_NUMBER:
        raise ValueError(f"number is {number}; 1 to {MAX_NUMBER:,} was expected")
    return divmod(number, 1000)


def draw_pairs(num_pairs: int, rng: random.Random, seen: set[str]) -> list[tuple[str, str]]:
    """Draws distinct sentences that are not in `seen`, with their translations, and adds them to it."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < num_pairs:
        english, french = _draw_pair(rng)
        if english not in seen:
            seen.add(english)
            pairs.append((english, french))
    return pairs


def _draw_pair(rng: random.Random) -> tuple[str, str]:
    """Draws a sentence whose number has one to six digits, each length equally often."""
    num_digits = rng.randint(1, len(str(MAX_NUMBER)))
    number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
    name, (sees, voit), noun = rng.choice(_NAMES), rng.choice(_VERBS), rng.choice(_NOUNS)
    color, masculine, feminine = rng.choice(_COLORS)
    couleur = feminine if noun.is_feminine else masculine
    one = number == 1
    things = noun.english if one else f"{noun.english}{'es' if noun.english.endswith('x') else 's'}"
    choses = f"{noun.french} {couleur}" if one else f"{noun.french}s {couleur}{'' if couleur.endswith('s') else 's'}"
    return (
        f"{name} {sees} {english_number(number)} {color} {things}.",
        f"{name} {voit} {french_number(number, is_feminine=noun.is_feminine)} {choses}.",
    )
