"""The tools of built-in environments: what they return, and what they refuse. The game, against its rules."""

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.guessing_game import Game, GuessingGame
from heed.worlds.world import CALCULATOR
from lm.tool_calls import read_tool_calls
from ppo.environments import tools
from ppo.environments.environment import Environment, Episode, Reply
from ppo.environments.tools import Calculator, Index, Retrieval, ToolError, calculated


def replies(environment: Environment, *texts: str) -> list[Reply]:
    episode = environment.open([{"role": "user", "content": "?"}], {}, 1)
    return [asyncio.run(episode.reply(read_tool_calls(text))) for text in texts]


def contents(reply: Reply) -> list[str]:
    assert {message["role"] for message in reply.messages} == {"tool"}
    return [message["content"] for message in reply.messages]


def test_the_playgrounds_demonstrations_offer_the_same_calculator() -> None:
    assert [*Calculator().tools] == [CALCULATOR]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 4 * 2", "11"), ("(3 + 4) * 2", "14"), ("-7 // 2", "-4"), ("7 % 3", "1"), ("1 / 4", "0.25"),
        ("2 ** 10", "1024"), ("2 ** -1", "0.5"), ("0.1 + 0.2", "0.3"), (" 12 \n", "12"), ("1e3", "1000"), ("+5", "5"),
        ("6 / 2", "3"), ("2 ** 0.5", "1.41421356237"), ("1 / 3", "0.333333333333"),
    ],
)  # fmt: skip
def test_arithmetic(expression: str, value: str) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "3 +", "x", "__import__('os').getcwd()", "(1).__class__", "[1][0]", "'a' * 3", "True + 1", "1 if 1 else 2",
        "1 < 2", "3j", "1; 2", "lambda: 1", "1 and 2", "1 << 99", "f'{1}'", "a := 1", "(" * 150 + "1" + ")" * 40,
        "1\x00", "1 / 0", "0 ** -1", "9 ** 9 ** 9", "9 ** 9999999", "(-8) ** 0.5", "1e308 * 10", "7 % 0", "9" * 201,
        "10 ** 300 * 10 ** 300 / 3", "2 ** 1000 * 2 ** 1000", "-" * 199 + "x", "(2 ** 1000) ** 0.5 ** -99",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_refused_at_once(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolError):
        calculated(expression)
    assert time.process_time() - started < 1.0


def test_a_conversation_with_the_calculator() -> None:
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>'
    first, second, third = replies(Calculator(), f"I ask. {call}{call}", call.replace("6 * 7", "6 / 0"), "It is 42.")
    assert contents(first) == ["42", "42"]
    assert contents(second) == ["Error: division by zero"]
    assert third == Reply(is_over=True)
    assert Calculator().tools[0]["function"]["name"] == "calculate"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "search", "arguments": {"expression": "1"}}', "there is no tool 'search'; calculate was expected"),
        ('{"name": "calculate", "arguments": {"sum": "1"}}', "calculate has one argument, expression"),
        ('{"name": "calculate", "arguments": {"expression": "1", "b": 2}}', "calculate has one argument, expression"),
        ('{"name": "calculate", "arguments": {"expression": 1}}', "calculate has one argument, expression"),
        ('{"name": "calculate", "arguments": [1]}', "Error: "),
        ("not json", "Error: "),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(call: str, words: str) -> None:
    (reply,) = replies(Calculator(), f"<tool_call>{call}</tool_call>")
    assert words in contents(reply)[0]
    assert not reply.is_over


def test_no_more_than_some_calls_of_a_turn_are_run() -> None:
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "1"}}</tool_call>'
    (reply,) = replies(Calculator(), call * 20)
    assert contents(reply) == ["1"] * 16 + ["Error: a turn has at most 16 calls"] * 4


PASSAGES = ["the cat sat on the mat", "the dog saw a cat and a second cat", "birds fly over green hills", ""]


def naive_scores(query: Sequence[str], passages: Sequence[str]) -> list[float]:
    """BM25 as a loop over all words and passages."""
    words = [passage.split() for passage in passages]
    mean = sum(map(len, words)) / len(words)
    scores = [0.0] * len(passages)
    for word in query:
        n = sum(word in own for own in words)
        for place, own in enumerate(words):
            f = own.count(word)
            scores[place] += (
                math.log(1 + (len(words) - n + 0.5) / (n + 0.5)) * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * len(own) / mean))
            )
    return scores


@pytest.mark.parametrize("query", ["cat", "The CAT, the mat!", "cat dog hills", "the", "whale", "cat cat hills"])
def test_a_search_ranks_as_a_loop_over_passages_does(query: str) -> None:
    words = [word.strip(",!").lower() for word in query.split()]
    scores = naive_scores(list(dict.fromkeys(words)), PASSAGES)
    best = sorted((place for place, score in enumerate(scores) if score), key=lambda place: (-scores[place], place))
    assert Index(PASSAGES).search(query, 2) == [PASSAGES[place] for place in best[:2]]


def test_a_folder_of_texts_is_searched_by_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("The cat sat.\n\nThe dog barked loudly at the moon.\n \nBirds fly.")
    (tmp_path / "deep" / "b.md").write_text("A cat and a cat.")
    (tmp_path / "c.bin").write_bytes(b"cat\xff")
    monkeypatch.setattr(tools, "NUM_PASSAGES", 2)
    monkeypatch.setattr(tools, "PASSAGE_CHARACTERS", 10)
    library = Retrieval(folder=str(tmp_path))
    library.check([])
    call = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'
    found, nothing = replies(library, call % "cat", call % "whale")
    assert contents(found) == ["A cat and \n\nThe cat sa"]
    assert contents(nothing) == ["Nothing was found."]
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        with pytest.raises(ValueError, match=r"ppo\.environment\.folder '.*' has no texts"):
            Retrieval(folder=str(tmp_path / folder)).check([])


def test_the_game_follows_its_rules() -> None:
    def played(number: int, *texts: str) -> list[Reply]:
        game = Game(number)
        return [asyncio.run(game.reply(read_tool_calls(text))) for text in texts]

    assert played(4, "it is 4") == [Reply(reward=1.0, is_over=True)]
    higher, right = played(4, "2", "4.")
    assert [higher.messages[0]["content"], higher.reward, higher.is_over] == ["higher", 0.0, False]
    assert right == Reply(reward=0.5, is_over=True)
    assert played(4, "9")[0].messages[0]["content"] == "lower"
    assert played(4, "no idea") == [Reply(is_over=True)]
    drawn = [number_of(GuessingGame().open([], {}, seed)) for seed in range(200)]
    assert set(drawn) == set(range(1, 10))
    assert drawn == [number_of(GuessingGame().open([], {}, seed)) for seed in range(200)]


def number_of(episode: Episode) -> int:
    assert isinstance(episode, Game)
    return episode.number
