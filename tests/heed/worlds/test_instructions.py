"""Prompts are parsed back from their wording, and unspoilt answers to them are perfect."""

import random

import pytest

from heed.worlds.answers import FLAWS, SECOND_FLAWS, Draft, perfect_answer, render
from heed.worlds.gold import gold_score
from heed.worlds.grammar import CATEGORIES, TAG_OF, parse_sentence
from heed.worlds.instructions import draw_question, kind_of, questions_on, read_prompt
from heed.worlds.world import DRAWS, KIND_WEIGHTS


@pytest.mark.parametrize("kind", DRAWS)
def test_prompts_are_read_back(kind: str) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        request = DRAWS[kind](rng)
        prompt = request.word(rng)
        assert kind_of(request) == kind
        assert 7 <= len(prompt.split()) <= 35, prompt
        assert read_prompt(prompt) == request


def test_every_question_on_the_facts_is_answered_by_one_of_them() -> None:
    kinds = set()
    for seed in range(200):
        request = draw_question(random.Random(seed))
        asked = questions_on(request.facts)
        assert request in asked
        assert len({question.question for question in asked}) == len(asked)
        for question in asked:
            words = {word for tag in TAG_OF.values() for word in parse_sentence(question.answer).slots.get(tag, ())}
            facts = [parse_sentence(fact) for fact in question.facts]
            assert any(words <= {word for row in fact.slots.values() for word in row} for fact in facts)
        kinds.add(len({parse_sentence(fact).skeleton for fact in request.facts}))
    assert kinds == {2, 3}  # with and without a second fact of the kind asked about


@pytest.mark.parametrize("kind", DRAWS)
def test_perfect_answers_score_one(kind: str) -> None:
    for seed in range(500):
        rng = random.Random(seed)
        request = DRAWS[kind](rng)
        prompt, response = request.word(rng), render(request, perfect_answer(request, rng))
        assert gold_score(prompt, response) == pytest.approx(1.0, abs=1e-9), (prompt, response)
        assert 3 <= len(response.split()) <= 75


@pytest.mark.parametrize("kind", FLAWS)
def test_flaws_cost_score(kind: str) -> None:
    """Each flaw of each kind clearly lowers the mean score; none raises it."""
    for flaw in (*FLAWS[kind], *SECOND_FLAWS):
        scores = []
        for seed in range(100):
            rng = random.Random(seed)
            request = DRAWS[kind](rng)
            prompt = request.word(rng)
            scores.append(gold_score(prompt, render(request, flaw(Draft(request, perfect_answer(request, rng), rng)))))
        assert all(0.0 <= score <= 1.0 for score in scores)
        assert sum(scores) / len(scores) < 0.9, flaw.__name__


def test_kinds_have_weights_and_flaws() -> None:
    assert set(DRAWS) == set(KIND_WEIGHTS) == set(FLAWS)
    assert sum(KIND_WEIGHTS.values()) == pytest.approx(1.0)


def test_foreign_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="What is the capital of France"):
        read_prompt("What is the capital of France?")


@pytest.mark.parametrize(
    ("sentence", "groups"),
    [
        ("Mia found a red kite.", {"middle"}),
        ("She found a red kite.", {"middle"}),
        ("she found a red kite.", set()),
        ("Mia found a red kite", set()),
        ("Mia found a kite red.", set()),
        ("mia found a red kite.", set()),
        ("First, bring the soap.", {"step"}),
        ("Soap, bring the first.", set()),
        ("What a lovely day!", {"cheer"}),
        ("What a lovely day.", set()),
    ],
)
def test_grammar(sentence: str, groups: set[str]) -> None:
    assert parse_sentence(sentence).groups == groups


def test_words_after_a_need_no_an() -> None:
    for tag in ("animal", "thing", "color", "size"):
        assert not [word for word in CATEGORIES[tag] if word[0] in "aeiou"]
