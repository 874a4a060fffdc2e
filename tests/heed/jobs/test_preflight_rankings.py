"""Rankings in a published format are read and measured, and their warnings printed, before any training starts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import check_data
from heed.jobs.run import Run
from training.notices import speaking_through

GOOD = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}


def check(tmp_path: Path, model_folder: Path, *rows: Any, settings: str = "", source: str = "") -> None:
    """The preflight of a job that only trains a reward model."""
    path = tmp_path / "pairs.jsonl"
    others = [GOOD | {"prompt": f"Why {number}?"} for number in range(8)]  # of which some are held out
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in (*rows, *others)))
    (tmp_path / "job.toml").write_text(
        f"""
        name = "pairs"
        seed = 0
        workers = 1
        [engine]
        precision = "fp32"
        [reward]
        init_from = "{model_folder}"
        rankings = {{ source = "{path}"{source} }}
        {settings}
        heldout_share = 0.5
        num_epochs = 1
        batch = {{ batch_size = 2, micro_batch_size = 1 }}
        optimizer = {{ learning_rate = 1e-3, schedule = "constant" }}
        save_every_steps = 10
        evaluate_every_steps = 10
        """
    )
    job = load_job(tmp_path / "job.toml")
    (tmp_path / "run").mkdir(exist_ok=True)
    check_data(Run(job, tmp_path / "run", None, None))  # type: ignore[arg-type]  # no worker is asked


def test_oddities_are_counted(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []
    with speaking_through(heard.append):
        check(tmp_path, model_folder, GOOD, GOOD, GOOD | {"chosen": ""}, GOOD | {"chosen": "No."})
    assert heard == [
        f"{tmp_path}/pairs.jsonl: 10 pairs, TRL's preferences, conversational or texts",
        f"{tmp_path}/pairs.jsonl: of 12 rows, 1 x row seen twice (counted once), 1 x empty reply (kept as is), 1 x"
        " identical responses (left out)",
    ]
    said = " ".join(capsys.readouterr().err.split())
    assert "pairs.jsonl: these rows are listed in reward/warnings.json" in said
    with speaking_through(heard.append):
        check(tmp_path, model_folder, GOOD)
    assert capsys.readouterr().err == ""
    assert heard[2:] == [f"{tmp_path}/pairs.jsonl: 9 pairs, TRL's preferences, conversational or texts"]


def test_invalid_rows_are_refused_with_their_number_or_skipped(tmp_path: Path, model_folder: Path) -> None:
    bad = ["{", {"prompt": "Why?", "chosen": None, "rejected": "No."}, {"prompt": "Why?", "chosen": "So."}]
    with pytest.raises(ValueError, match=r"pairs\.jsonl: 3 of 12 rows are invalid .*on_invalid") as refused:
        check(tmp_path, model_folder, GOOD, *bad)
    for line, words in ((2, "not JSON"), (3, "field 'chosen' is null; a string"), (4, "field 'rejected' is missing")):
        assert re.search(rf"pairs\.jsonl: line {line}: {words}", str(refused.value))
    heard: list[str] = []
    with speaking_through(heard.append):
        check(tmp_path, model_folder, *bad, GOOD, source=', on_invalid = "skip"')
    path = f"{tmp_path}/pairs.jsonl"
    assert heard[:2] == [
        f"{path}: 9 pairs, TRL's preferences, conversational or texts",
        f"{path}: of 12 rows, 3 x invalid (skipped)",
    ]
    assert [line.split(": ")[1] for line in heard[2:]] == ["line 1", "line 2", "line 3"]


def test_a_row_that_the_chat_template_refuses_is_named(tmp_path: Path, model_folder: Path) -> None:
    strict = (
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ raise_exception('No system\\nturns') }}{% endif %}"
        "<|{{ message.role }}|> {{ message.content }}{{ eos_token }}{% endfor %}"
    )
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        check(tmp_path, model_folder, GOOD, sides | {"prompt": prompt}, settings=f'chat_template = """{strict}"""')
    words = "chat_template refuses the conversation: No system turns"
    assert str(refused.value) == f"{tmp_path}/pairs.jsonl: line 2: {words}"


def test_what_is_too_long_is_refused_skipped_or_cut(tmp_path: Path, model_folder: Path) -> None:
    long = [GOOD | {"chosen": "x" * 200}, GOOD | {"prompt": "y" * 200}]
    with pytest.raises(ValueError, match=r"pairs\.jsonl: line 1: prompt and response have .*reward.on_overlong"):
        check(tmp_path, model_folder, *long)
    for choice, done in (("skip", "2 skipped"), ("truncate", "1 truncated, 1 skipped")):
        heard: list[str] = []
        with speaking_through(heard.append):
            check(tmp_path, model_folder, *long, settings=f'on_overlong = "{choice}"')
        assert heard[1] == f"{tmp_path}/pairs.jsonl: 2 of 10 too long: {done} (the model reads 96 tokens)"


def test_demonstrations_of_the_reward_are_read_before_it_trains(tmp_path: Path, model_folder: Path) -> None:
    demos = tmp_path / "demos.jsonl"
    settings = f'demonstrations = [{{ source = "{demos}" }}]'
    for row, words in (
        (
            {"prompt": "a", "completion": "b" * 200},
            r"demos\.jsonl: line 1: the conversation has \d+ tokens; the reward model reads at most 96",
        ),
        ({"text": "a"}, r"demos\.jsonl: line 1: field 'text' holds a plain text"),
    ):
        demos.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=words):
            check(tmp_path, model_folder, GOOD, settings=settings)


def test_rows_that_cannot_be_used_are_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"pairs\.jsonl: line 2: field 'rejected' is missing"):
        check(tmp_path, model_folder, GOOD, {"prompt": "Why?", "chosen": "So."})
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl: line 2: prompt and response have \d+ tokens; .* context is 96"
    ):
        check(tmp_path, model_folder, GOOD, GOOD | {"chosen": "x" * 200})
