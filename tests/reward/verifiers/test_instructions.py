"""The kinds of checkable instructions: answers that follow and that break each."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.verifiers import instructions
from reward.verifiers.checks import Check
from tests.examples import examples

ENGLISH = "The house on the hill is old and nobody has lived there for many years"
GERMAN = "Das Haus auf dem Hügel ist alt und niemand hat dort seit vielen Jahren gewohnt"

# kind, arguments, responses that follow, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["sea", "blue sky"]},
        ["The Sea under a blue sky", "SEASIDE and BLUE SKY"],
        ["The sea", "blue  sky over the sea"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        ["Sun, sun", "sunny SUNday sun"],
        ["sun", "son and sunn"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "less than"},
        ["sun", "moon"],
        ["Sun, sun", "sunny SUNday"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "c++"]},
        ["Catalogue", "concatenate dogs"],
        ["A Cat.", "the (cat)"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        ["Quiet queen", "qq"],
        ["queen", "no such letter"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 3, "let_relation": "less than"},
        ["Oh!", "Oh!!"],
        ["Oh!!!", "a! b! c! d!"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        [GERMAN, "Guten Tag, wie geht es Ihnen heute? Mir geht es sehr gut."],
        [ENGLISH, "12 + 34 = 46", "La maison est sur la colline et personne ne l'habite"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", 'He said "No." Then he left. (Really.) End'],
        ["One. Two.", "Dr. Smith of the U.S. Army met J. Doe. They talked... quietly"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two.", "a heading\n\nand 3.5 lines at example.com and so on. Two"],
        ["One. Two! Three?", "1. First\n2. Second"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n\n***\n\ntwo", "***\none\n***\ntwo\n***"],
        ["one\n\ntwo", "one\n***\n\n***\ntwo", "one *** two *** three"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        ["one two three four", "don't stop now"],
        ["one two three", "... , one!"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        ["one two three", "state_of"],
        ["one two three four", "a-b-c-d"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "President"},
        ["one\n\nPresident of all", "one\n\n\n\n\"president's day"],
        ["President one\n\ntwo", "one\n\npresident\n\nthree", "one\npresident", "one\n\n(president"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] of [address]", "[a][b][c]", "[[a] and [b]]"],
        ["[name]", "[name\n] and [address]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Yours\n\nP.S. I forgot", "yours, p. s. later"],
        ["Yours\nPS I forgot", "P.S later"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Yours\n\nP.P.S. I forgot", "p. p. s later"],
        ["P.S. I forgot", "PPS"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "text\n - one\n\n\n-two\ntext * text"],
        ["* one", "* one\n- two\n* three", "** one\n** two"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Hm. My answer is maybe. So it is."],
        ["My answer is yes", "yes", "my answer is no."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and **two**", "*one* *two*\n*three*"],
        ["*one*", "**one**", "* one\n* two", "** ** and * *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION 22"],
        ["SECTION 1\na", "Section 1\nSection 2", "SECTION A SECTION B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n3\n```"],
        ["{'a': 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    (
        "detectable_format:title",
        {},
        ["<<poem of joy>>\nJoy", "text <<a>> text"],
        ["<poem>", "<<>>", "<<poem\nof joy>>", "<< >>"],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******one******two******"],
        ["one", "one******one", "one******two******three", "one************two"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem. "},
        ["Write a poem.\nRoses", " write A poem. Roses"],
        ["Roses", "Here: Write a poem. Roses", "Write a poem"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Is there more?"},
        ["Text. Is there more?", '"Text. is there MORE?" \n'],
        ["Is there more? No", "Is there more"],
    ),
    ("startend:quotation", {}, ['"Text"', ' "one" and "two"\n'], ['"', "“Text”", 'Text "a"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I am a STATE-OF-THE-ART man", "I'M"],
        ["NASA", "Nasa Esa 12 34"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["NASA", "Nasa Esa"],
        ["NASA and ESA", "A.M. or P.M."],
    ),
    ("change_case:english_capital", {}, [f"{ENGLISH}.".upper(), ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "12 34"]),
    ("change_case:english_lowercase", {}, [ENGLISH.lower(), f"{ENGLISH}!".lower()], [ENGLISH, GERMAN.lower(), "12 34"]),
    ("punctuation:no_comma", {}, ["One two", "One; two"], ["One, two", ","]),
]


@pytest.mark.parametrize(("kind", "arguments", "following", "breaking"), CASES)
def test_each_kind_tells_what_follows_from_what_does_not(
    kind: str, arguments: dict[str, Any], following: list[str], breaking: list[str]
) -> None:
    check = Check.of("here", kind, arguments)
    assert [response for response in following if not check.passes(response)] == []
    assert [response for response in breaking if check.passes(response)] == []


def test_every_kind_has_its_cases() -> None:
    assert len(instructions.KINDS) == 25
    assert {kind for kind, *_ in CASES} == instructions.KINDS.keys()
    assert min(len(responses) for _, _, *both in CASES for responses in both) >= 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no end", 1),
        ("One. Two", 2),
        ("Mr. Smith met Mrs. Doe at 5 p.m. in Dec. last year.", 1),
        ("Wait... what? Yes... It is.", 3),
        ("**Bold.** Then _this._ And 'that.' End.", 4),
        ("What?! No!! See example.com/a.b?c=d now.", 3),
        ("Heading\n\n- item\n- item", 1),
        ("1. One\n2. Two", 3),  # "1.", "One 2." and "Two"
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert instructions.count_sentences(text) == count


def test_the_language_of_a_short_text_does_not_change_between_calls() -> None:
    found = {instructions.detected_language(text) for text in ["the end"] * 30}
    assert len(found) == 1


@examples(100)
@given(st.text())
def test_no_response_raises(response: str) -> None:
    for kind, arguments, *_ in CASES:
        assert Check(kind, arguments).passes(response) in (True, False)


@pytest.mark.timeout(60)  # a pattern that backtracks would take hours
@pytest.mark.parametrize("piece", ["<<", "*", "a", "[", " ", "\n", "A.", "***", "-", '"', "P.", "1. ", "```"])
def test_long_responses_are_checked_in_seconds(piece: str) -> None:
    for kind, arguments, *_ in CASES:
        Check(kind, arguments).passes(f"x{piece * 20_000}x")
