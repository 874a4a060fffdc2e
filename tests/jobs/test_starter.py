"""`heed init`: the sections of a new job, and the messages about the rest. The tutorial's test runs such a job."""

import json
from pathlib import Path

import pytest

from jobs.job_file import load_job
from jobs.starter import Starter, batch_for


def write(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_stages_follow_from_what_there_is(tmp_path: Path, model_folder: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "q"})
    pairs = write(tmp_path / "pairs.jsonl", *({"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)))
    (tmp_path / "r.py").write_text("def score(prompts, responses):\n    return [0.0] * len(responses)\n")
    cases = [
        (Starter(str(model_folder), prompts=prompts, reward_function=f"{tmp_path}/r.py:score"), ("ppo",), 1),
        (Starter(str(model_folder), preferences=pairs), ("dpo",), 2),
        (Starter(str(model_folder), preferences=pairs, prompts=prompts), ("reward", "ppo"), 1),
        (Starter(str(model_folder), demonstrations=write(tmp_path / "t.jsonl", {"text": "a"})), ("sft",), 2),
    ]
    for number, (starter, stages, num_missing) in enumerate(cases):
        path = tmp_path / f"job{number}.toml"
        starter.write(path)
        job = load_job(path)
        assert job.stage_names == stages
        assert len(starter.missing) == num_missing, starter.missing
        assert all(f"# missing: {line}" in path.read_text() for line in starter.missing)
        (section,) = {"sft", "reward", "dpo", "ppo"} & {stages[0]}
        assert getattr(job, section).init_from == str(model_folder)


def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "job.toml"
    demos = write(tmp_path / "d.jsonl", {"prompt": "q", "answer": "a"})
    for starter, words in (
        (Starter(str(model_folder)), "--demonstrations or --preferences was expected"),
        (Starter(str(model_folder), demonstrations=demos), r"d\.jsonl: line 1: field 'completion' is missing"),
        (Starter("no/such-model", demonstrations=demos), "no/such-model"),
        (Starter(str(model_folder), demonstrations=demos, format="csv"), "--format is 'csv'; one of auto, messages,"),
    ):
        with pytest.raises(ValueError, match=words):
            starter.write(path)
        assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"job\.toml is there already"):
        Starter(str(model_folder), demonstrations=demos).write(path)
    assert path.read_text() == "mine"


def test_format_and_invalid_rows_are_those_of_the_sources(tmp_path: Path, model_folder: Path) -> None:
    odd = {"prompt": "q", "messages": [{"role": "user", "content": "another"}, {"role": "assistant", "content": "a"}]}
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (odd, {"messages": []}, odd)))
    pairs = write(tmp_path / "pairs.jsonl", *({"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)))
    starter = Starter(str(model_folder), preferences=pairs, prompts=str(path), on_invalid="skip")
    with pytest.raises(ValueError, match="3 of 3 rows are invalid"):
        starter.write(tmp_path / "job.toml")
    starter = Starter(str(model_folder), preferences=pairs, prompts=str(path), format="messages", on_invalid="skip")
    said = starter.write(tmp_path / "job.toml")
    assert (
        f"{path}: of 3 rows, 1 x invalid (skipped), 2 x ends with an answer (not read), 1 x seen before (kept)" in said
    )
    assert f"{path}: line 2: field 'messages' is list; a non-empty list was expected" in said
    job = load_job(tmp_path / "job.toml")
    assert (job.ppo.prompts.format, job.ppo.prompts.on_invalid) == ("messages", "skip")
    assert (job.reward.rankings.format, job.reward.rankings.on_invalid) == ("auto", "skip")


def test_a_batch_leaves_ten_steps_in_an_epoch() -> None:
    assert [batch_for(rows) for rows in (1, 19, 20, 200, 100_000)] == [1, 1, 2, 16, 64]
