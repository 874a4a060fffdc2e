"""Numbers in words in both languages, and the sentences around them."""

import json
import random
from pathlib import Path

import pytest

from heed.worlds.world import PlaygroundConfig
from research.worlds.translations import (
    TranslationsConfig,
    TranslationsWorld,
    draw_pairs,
    english_number,
    french_number,
)

# As the num2words package 0.5.14 writes them (its English without commas): all numbers below 12,000 and 60,000 others
# were compared once, and all were equal.
NUMBERS = {
    1: ("one", "un"),
    16: ("sixteen", "seize"),
    17: ("seventeen", "dix-sept"),
    20: ("twenty", "vingt"),
    21: ("twenty-one", "vingt et un"),
    61: ("sixty-one", "soixante et un"),
    70: ("seventy", "soixante-dix"),
    71: ("seventy-one", "soixante et onze"),
    77: ("seventy-seven", "soixante-dix-sept"),
    80: ("eighty", "quatre-vingts"),
    81: ("eighty-one", "quatre-vingt-un"),
    91: ("ninety-one", "quatre-vingt-onze"),
    99: ("ninety-nine", "quatre-vingt-dix-neuf"),
    100: ("one hundred", "cent"),
    101: ("one hundred and one", "cent un"),
    200: ("two hundred", "deux cents"),
    271: ("two hundred and seventy-one", "deux cent soixante et onze"),
    1000: ("one thousand", "mille"),
    1001: ("one thousand and one", "mille un"),
    1100: ("one thousand one hundred", "mille cent"),
    2080: ("two thousand and eighty", "deux mille quatre-vingts"),
    80_000: ("eighty thousand", "quatre-vingt mille"),
    200_300: ("two hundred thousand three hundred", "deux cent mille trois cents"),
    281_021: ("two hundred and eighty-one thousand and twenty-one", "deux cent quatre-vingt-un mille vingt et un"),
    999_999: (
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        "neuf cent quatre-vingt-dix-neuf mille neuf cent quatre-vingt-dix-neuf",
    ),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_in_words(number: int) -> None:
    assert (english_number(number), french_number(number)) == NUMBERS[number]


@pytest.mark.parametrize(
    ("number", "feminine"),
    [
        (1, "une"),
        (21, "vingt et une"),
        (81, "quatre-vingt-une"),
        (71, "soixante et onze"),
        (21_000, "vingt et un mille"),
    ],
)
def test_only_a_final_un_agrees_with_the_noun(number: int, feminine: str) -> None:
    assert french_number(number, is_feminine=True) == feminine


@pytest.mark.parametrize("number", [0, -1, 1_000_000])
def test_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="999,999 was expected"):
        english_number(number)


def test_nouns_and_adjectives_agree() -> None:
    pairs = draw_pairs(20_000, random.Random(3), set())
    found = {(en.split(" ", 2)[2], fr.split(" ", 2)[2]) for en, fr in pairs}
    assert ("one red box.", "une boîte rouge.") in found
    assert ("one black cat.", "un chat noir.") in found
    assert ("two black cats.", "deux chats noirs.") in found
    assert ("four white boxes.", "quatre boîtes blanches.") in found
    assert ("nine gray books.", "neuf livres gris.") in found


def test_the_world_writes_heldout_sentences_that_training_lacks(tmp_path: Path) -> None:
    sizes = {name: 1 for name in PlaygroundConfig.model_fields if name.startswith("num_") and name != "num_labelers"}
    config = TranslationsConfig.model_validate({**sizes, "num_translations": 300, "num_translations_heldout": 40})
    TranslationsWorld(config).write_data(tmp_path, seed=5)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("translations", "translations_heldout")
    )
    assert (len(train), len(heldout)) == (300, 40)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
