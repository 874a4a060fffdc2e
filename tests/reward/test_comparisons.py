"""Reading and tokenizing rankings."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs import encode_rankings
from lm.tokenizer import Tokenizer
from preferences.records import Message
from reward.collect import write_rankings
from reward.comparisons import Verdict, encode_response
from reward.config import RankingsConfig
from reward.prepared import read_rankings
from tests.rows import jsonl

GOOD: dict[str, Any] = {
    "task_id": "t1",
    "prompt": [{"role": "user", "content": "Where is the fox?"}],
    "responses": ["In the bush.", "Far.", ""],
    "ranks": [4, 1, 4],
    "labeler": "ann",
}


def write(folder: Path, *rows: dict[str, Any]) -> RankingsConfig:
    path = folder / "rankings.jsonl"
    path.write_text(jsonl(rows))
    return RankingsConfig(source=str(path))


def test_a_ranking_is_read_with_dense_ranks(tmp_path: Path) -> None:
    (ranking,) = read_rankings(write(tmp_path, GOOD))
    assert ranking.task_id == "t1"
    assert ranking.prompt == (Message("user", "Where is the fox?"),)
    assert ranking.responses == ("In the bush.", "Far.", "")
    assert ranking.ranks == (2, 1, 2)
    assert ranking.labeler == "ann"
    assert (ranking.objective, ranking.ratings) == ("overall", ())


def test_ratings_and_an_objective_are_read_as_collecting_writes_them(tmp_path: Path) -> None:
    rated = {**GOOD, "task_id": "t2", "ratings": [3, 6.5, 3], "objective": "helpful"}
    plain, other = read_rankings(write(tmp_path, GOOD, rated))
    assert other.ratings == (3.0, 6.5, 3.0)
    assert other.objective == "helpful"
    write_rankings(tmp_path / "again.jsonl", [plain, other])
    assert read_rankings(RankingsConfig(source=str(tmp_path / "again.jsonl"))) == [plain, other]
    with pytest.raises(ValueError, match=r"line 2: task 't1': objective 'helpful' differs from 'overall' in .*line 1;"):
        read_rankings(write(tmp_path, GOOD, {**rated, "task_id": "t1"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"responses": [], "ranks": []}, "field 'responses' has 0 entries; a list of 1 to 9 was expected"),
        ({"responses": ["x"] * 10, "ranks": [1] * 10}, "field 'responses' has 10 entries"),
        ({"responses": "two"}, "field 'responses' has str; a list"),
        ({"responses": None}, "field 'responses' has null"),
        ({"responses": ["a", 3, "c"]}, "field 'responses': strings were expected"),
        ({"ranks": [1, 2]}, "field 'ranks' has 2 entries for 3 responses"),
        ({"ranks": [0, 1, 2]}, r"field 'ranks' is \[0, 1, 2\]; a list of whole numbers from 1"),
        ({"ranks": [1, 2.0, 3]}, "field 'ranks' is"),
        ({"ranks": ["1", "2", "3"]}, "field 'ranks' is"),
        ({"ranks": [True, 2, 3]}, "field 'ranks' is"),
        ({"ranks": None}, "field 'ranks' is None"),
        ({"task_id": ""}, "field 'task_id' is empty"),
        ({"task_id": 7}, "field 'task_id' is int"),
        ({"labeler": None}, "field 'labeler' is null"),
        ({"objective": ""}, "field 'objective' is empty"),
        ({"objective": 3}, "field 'objective' is int"),
        ({"ratings": [1, 2]}, "field 'ratings' has 2 entries for 3 responses"),
        ({"ratings": [1, "2", 3]}, r"field 'ratings\[1\]' is '2'; a number was expected"),
        ({"ratings": [1, float("nan"), 3]}, r"field 'ratings\[1\]' is nan; a number was expected"),
        ({"prompt": "Where?"}, "field 'prompt' is str"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}]},
            r"field 'prompt\[0\].role' is 'assistant'; .* the user's",
        ),
    ],
)
def test_a_bad_ranking_is_named_by_file_line_and_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"rankings\.jsonl: line 2: {words}"):
        read_rankings(write(tmp_path, GOOD, {**GOOD, **change}))


def test_no_rankings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rankings\.jsonl: no rankings; at least one was expected"):
        read_rankings(write(tmp_path))
    task = {name: GOOD[name] for name in ("task_id", "prompt", "responses")}
    with pytest.raises(ValueError, match=r"rankings\.jsonl: 2 tasks, but none has a judgment; at least one ranking"):
        read_rankings(write(tmp_path, task, {**task, "task_id": "t2"}))


def test_sequences_are_prompt_response_and_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (comparison,) = encode_rankings(tokenizer, read_rankings(write(tmp_path, GOOD)), max_tokens=96)
    for sequence, response in zip(comparison.sequences, GOOD["responses"], strict=True):
        assert list(sequence) == tokenizer.encode(f"<|user|> Where is the fox?<|end|><|assistant|> {response}<|end|>")
        assert sequence[-1] == tokenizer.end_id
    assert comparison.verdicts == (Verdict((2, 1, 2)),)


def test_the_rankings_of_one_task_are_one_comparison(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [GOOD, {**GOOD, "task_id": "t2"}, {**GOOD, "labeler": "bo", "ranks": [1, 2, 3]}]
    first, second = encode_rankings(tokenizer, read_rankings(write(tmp_path, *rows)), max_tokens=96)
    assert (first.task_id, first.verdicts) == ("t1", (Verdict((2, 1, 2)), Verdict((1, 2, 3))))
    assert (second.task_id, second.verdicts) == ("t2", (Verdict((2, 1, 2)),))
    assert first.sequences == second.sequences


@pytest.mark.parametrize(
    ("field", "value"),
    [("responses", ["In the bush.", "Near.", ""]), ("prompt", [{"role": "user", "content": "Where is the dog?"}])],
)
def test_rankings_of_one_task_that_differ_in_it_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, field: str, value: Any
) -> None:
    other = {**GOOD, "labeler": "bo", field: value}
    with pytest.raises(ValueError, match=rf"jsonl: line 2: task 't1': field '{field}' differs from that in .* line 1;"):
        read_rankings(write(tmp_path, GOOD, other))
    rankings = [*read_rankings(write(tmp_path, GOOD)), *read_rankings(write(tmp_path, other))]
    with pytest.raises(ValueError, match=f"task 't1': field '{field}' differs between the rankings of 'ann' and 'bo'"):
        encode_rankings(tokenizer, rankings, max_tokens=96)


def test_the_last_token_is_the_end_token_under_any_template(tokenizer: Tokenizer) -> None:
    """PPO's samples end with the end token, so that is where the reward model must have learned to score."""
    chatml = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    sequence = encode_response(tokenizer.with_template(chatml), [Message("user", "q")], "a")
    assert sequence[-1] == tokenizer.end_id


def test_a_conversation_longer_than_the_context_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rankings = read_rankings(write(tmp_path, {**GOOD, "responses": ["a", "x" * 90, "b"]}))
    with pytest.raises(ValueError, match=r"task 't1': prompt and response have 1\d\d tokens; .* context is 96"):
        encode_rankings(tokenizer, rankings, max_tokens=96)
