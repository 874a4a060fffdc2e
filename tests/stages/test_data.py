"""A run's texts are tokenized once, by the driver, before any rank has a place; ranks train without the texts."""

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import training.data
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import _prepare_stages, _prepare_world, check_data
from heed.jobs.recovery import Workers
from heed.jobs.run import Run
from lm.tokenizer import Tokenizer
from pretrain.stage import STAGE, tokenize, train
from stages.data import TOKENS, Fitting, fitting_prompts
from tests.rows import jsonl
from training.config import EngineConfig
from training.data import DataConfig, Overlong, read_prompts, untold
from training.engine import StageContext
from training.tokens import CHUNK_TEXTS, read_array

DEBUG = Path(__file__).parents[2] / "configs" / "jobs" / "debug.toml"


def prepared(folder: Path, *overrides: str) -> Run:
    """A run up to its preflight; its workers are not to be started."""
    job = load_job(DEBUG, ["pretrain.num_steps=2", *overrides])
    run = Run(job, folder, job.open_world(), Workers((1,), folder, job.cluster))
    _prepare_world(run)
    _prepare_stages(run)
    return run


def names(folder: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in (folder / TOKENS).iterdir()}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run after its preflight, for tests that leave it as it is."""
    run = prepared(tmp_path_factory.mktemp("run"))
    check_data(run)
    return run


def test_ranks_train_without_the_texts(checked: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checked.folder, folder)
    prompts = {f"{stage}-prompts" for stage in ("collect", "ppo", "compare")}
    assert names(folder) == {"pretrain-heldout", "pretrain-texts", "sft-demonstrations", "sft-heldout", *prompts}
    run = prepared(folder).of(STAGE.name)
    config = run.resolve(run.job.section(STAGE))  # type: ignore[type-var]
    assert config is not None
    data = tokenize(run, config)
    shutil.rmtree(folder / "world")
    context = StageContext(run.folder, 3, 1, EngineConfig(precision="fp32", trackers=()))
    run.folder.mkdir()
    train(context, config, run.model, folder / "tokenizer" / "data", data)
    results = json.loads((run.folder / "results.json").read_text())
    assert 0 < results["train_tokens"] <= len(read_array(data.training, "tokens"))


def test_texts_are_tokenized_once(checked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in (checked.folder / TOKENS).rglob("*")}

    def again(*_: object) -> None:
        raise AssertionError("these texts have their tokens")

    monkeypatch.setattr(Tokenizer, "encode_plain", again)
    monkeypatch.setattr(Tokenizer, "encode_conversations", again)
    monkeypatch.setattr(Tokenizer, "encode_prompts", again)
    # The few demonstrations that fix a reward model's zero are read each time.
    monkeypatch.setattr("reward.stage.calibration_sequences", lambda *_: [])
    check_data(checked)
    assert {path: path.stat().st_mtime_ns for path in (checked.folder / TOKENS).rglob("*")} == before


def test_other_settings_replace_the_tokens_that_depend_on_them(checked: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checked.folder, folder)
    before = {path.name for path in (folder / TOKENS).iterdir()}
    check_data(prepared(folder, "sft.chat_template=continuation"))
    after = {path.name for path in (folder / TOKENS).iterdir()}
    assert names(folder) == names(checked.folder)
    assert {name for name in before & after if name.startswith("pretrain-")} == {
        name for name in before if name.startswith("pretrain-")
    }
    assert not any(name.startswith("sft-") for name in before & after)


def test_a_mistake_in_later_data_shows_before_the_pretraining_texts_are_tokenized(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "Why?"}\n')
    run = prepared(tmp_path / "run", f"sft.demonstrations=[{{ source = '{bad}' }}]")
    with pytest.raises(ValueError, match=r"bad\.jsonl: line 1"):
        check_data(run)
    assert "pretrain-texts" not in names(run.folder)


def write_prompts(path: Path, texts: Iterable[str]) -> DataConfig:
    path.write_text(jsonl({"prompt": text} for text in texts))
    return DataConfig(source=str(path))


def fit(run: Run, data: DataConfig, tell: Callable[[str], None] = untold, **changes: Any) -> Fitting:
    """Returns the prompts as PPO's preflight and PPO itself read them."""
    stage = run.of("ppo")
    settings: dict[str, Any] = {"max_new_tokens": 100, "on_overlong": "refuse"} | changes
    return fitting_prompts(stage, stage.tokenizer_of("sft"), data, tell=tell, **settings)


def test_each_prompt_is_read_and_encoded_once(checked: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 2 * CHUNK_TEXTS + 5
    data = write_prompts(tmp_path / "p.jsonl", (f"word {row}" for row in range(number)))
    read, encoded = list[str](), list[object]()
    of_source, encode = training.data.read_source, Tokenizer.encode_prompts

    def noted(*args: Any, **options: Any) -> Iterator[Any]:
        for where, row in of_source(*args, **options):
            read.append(where)
            yield where, row

    def counted(self: Tokenizer, prompts: Any) -> Any:
        encoded.extend(prompts)
        return encode(self, prompts)

    monkeypatch.setattr(training.data, "read_source", noted)
    monkeypatch.setattr(Tokenizer, "encode_prompts", counted)
    lines = list[str]()
    fit(checked, data, lines.append)  # the preflight
    fitting = fit(checked, data)  # the stage
    assert (len(read), len(encoded), lines) == (number, number, [f"{data.source}: {number:,} prompts, prompt"])
    monkeypatch.undo()
    tokenizer, rows = checked.of("ppo").tokenizer_of("sft"), [0, CHUNK_TEXTS, number - 1]
    assert [fitting.prompts[row] for row in rows] == [read_prompts(data)[row] for row in rows]
    assert [fitting.tokens[row] for row in rows] == [
        tokenizer.encode_prompt([{"role": "user", "content": f"word {row}"}]) for row in rows
    ]
    assert [prompt.prompt_id for prompt in fitting.prompts[-2:]] == [str(number - 2), str(number - 1)]
    with pytest.raises(IndexError):
        fitting.tokens[number]


def test_prompts_that_are_too_long_are_refused_skipped_or_shortened(checked: Run, tmp_path: Path) -> None:
    path, long = tmp_path / "p.jsonl", "word " * 200
    turns = [("user", long), ("assistant", "yes"), ("user", "why")]
    rows = [{"prompt": "short"}, {"prompt": long}, {"prompt": [{"role": r, "content": text} for r, text in turns]}]
    path.write_text(jsonl(rows))
    data, lines = DataConfig(source=str(path)), list[str]()
    with pytest.raises(ValueError, match=r"p\.jsonl: line 2: prompt '1' has \d+ tokens; at most 60 leave room"):
        fit(checked, data)
    skipped = fit(checked, data, lines.append, on_overlong="skip")
    assert ([prompt.prompt_id for prompt in skipped.prompts], skipped.overlong) == (["0"], Overlong(3, 0, 2))
    assert lines[1].startswith(f"{path}: 2 of 3 too long: 2 skipped")
    shortened = fit(checked, data, on_overlong="truncate")
    assert ([prompt.prompt_id for prompt in shortened.prompts], shortened.overlong) == (["0", "2"], Overlong(3, 1, 1))
    assert shortened.prompts[1].messages == ({"role": "user", "content": "why"},)
    with pytest.raises(ValueError, match="every prompt is too long; at most 1 tokens were expected"):
        fit(checked, data, max_new_tokens=159, on_overlong="skip")


def test_memory_of_prompts_grows_by_little_per_prompt(checked: Run, tmp_path: Path) -> None:
    """As Python objects, a prompt and its tokens take more than a thousand bytes.

    The peak holds one chunk's garbage or two, as the collector happens to run, so its bound is wide.
    """

    def memory(number: int) -> tuple[int, int]:
        data = write_prompts(tmp_path / f"{number}.jsonl", (f"{row} is one of many numbers" for row in range(number)))
        gc.collect()
        tracemalloc.start()
        fitting = fit(checked, data)
        assert len(fitting.tokens) == number
        highest = tracemalloc.get_traced_memory()[1]
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return highest, kept

    (few_highest, few_kept), (many_highest, many_kept) = memory(4_000), memory(8_000)
    assert (many_kept - few_kept) / 4_000 < 100
    assert (many_highest - few_highest) / 4_000 < 1_000
