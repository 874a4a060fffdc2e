"""The command line in this process: a mistake is one line and exit code 2, before anything is trained."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import local_ray
from files.hashes import derive_seed
from heed.cli import main
from heed.jobs.recovery import Workers
from heed.jobs.registry import BUILT_IN
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.generation import generate
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.sampling import Choice
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.models import load_language_model, load_scalar_model

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "configs" / "jobs" / "debug.toml")


@pytest.fixture
def start_job(refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`heed run` of the debug job with overrides that it must refuse before any training.

    Ray and ranks, which start while data is checked, are left out; `tests/heed/jobs/test_begun_workers.py` has a
    mistake in the data with them.
    """
    monkeypatch.setattr(local_ray, "begin", lambda: None)
    monkeypatch.setattr(Workers, "begin", lambda _workers: None)

    def call(*overrides: str) -> str:
        line = refused("run", DEBUG, "--runs", str(tmp_path), *[p for o in overrides for p in ("--set", o)])
        assert not (tmp_path / "debug" / "pretrain").exists()
        return line

    return call


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_long_message_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / ("deep " * 30) / "job.toml"
    assert refused("run", str(path)) == f"error: {path}: no such file"


@pytest.mark.parametrize("command", [("serve", "--new"), ("invite", "ann")])
def test_a_missing_configuration_of_labeling_is_one_line(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        refused("label", *command, "--store", "x.sqlite", "--config", "nothere.toml")
        == "error: nothere.toml: no such file"
    )


def test_an_error_of_the_system_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "label.toml").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["heed", "label", "invite", "ann", "--store", "x.sqlite", "--config", "label.toml"]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: Is a directory (EISDIR): label.toml\n"


def test_markup_in_a_message_is_shown_as_it_is(refused: Callable[..., str]) -> None:
    assert "[bold]x[/bold]" in refused("run", "[bold]x[/bold].toml")


@pytest.mark.parametrize("arguments", [("--from", "pert"), ("--only", "pert")])
def test_an_unknown_stage(refused: Callable[..., str], arguments: tuple[str, str]) -> None:
    line = refused("run", DEBUG, *arguments)
    stages = ", ".join(name for name in BUILT_IN.names if name not in ("classify", "rejection"))
    assert f"{arguments[0]} 'pert': one of {stages} was expected" in line
    line = refused("run", DEBUG, arguments[0], "rejection")
    assert f"{arguments[0]} 'rejection': the job has no [rejection]; one of {stages} was expected" in line


def test_an_unknown_key(start_job: Callable[..., str]) -> None:
    assert start_job("ppo.kl.coeff=1").endswith("`coeff`: unknown key in [ppo.kl]; did you mean `coef`?")


@pytest.mark.parametrize("command", ["run", "loop"])
def test_a_mistake_in_a_new_job_is_found_before_ray_starts(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    begun: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(local_ray, "begin", lambda: begun.append("Ray"))
    arguments = (command, DEBUG, "--runs", str(tmp_path), "--set", "ppo.kl.coeff=1")
    assert "did you mean `coef`?" in refused(*arguments)
    assert not begun
    # Of a job that has begun before, Ray starts while the command imports.
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "status.json").write_text('{"state": "failed"}')
    refused(*arguments)
    assert begun == ["Ray"]


def test_a_plan_takes_the_number_of_workers_that_a_run_takes(refused: Callable[..., str]) -> None:
    assert "pretrain.batch with workers = 3:" in refused("plan", DEBUG, "--workers", "3")


def test_more_workers_than_cores_are_refused_before_batches_are(refused: Callable[..., str], tmp_path: Path) -> None:
    for command in ("run", "loop"):
        line = refused(command, DEBUG, "--runs", str(tmp_path), "--workers", "640")
        assert "workers is 640; this machine has" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), "No such command 'trian'. Did you mean 'run'?"),
        (("evalute", "m"), "No such command 'evalute'. Did you mean 'evaluate'?"),
        (("evaluate", "m", "--benchmark", "gsm8k"), "No such option: --benchmark. Did you mean --suite?"),
        (
            ("run", "job.toml", "--kl_coef=1"),
            "No such option: --kl_coef. --set sets the job's keys: in [ppo], Heed calls",
        ),
        (("run", "job.toml", "--worker", "2"), "No such option: --worker (Possible options: --workers)"),
    ],
)
def test_an_unknown_command_or_option_has_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["heed", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_more_workers_than_cores(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused(
        "run", DEBUG, "--runs", str(tmp_path), "--workers", "64",
        "--set", "pretrain.batch.batch_size=512", "--set", "sft.batch.batch_size=256",
        "--set", "reward.batch.batch_size=256", "--set", "dpo.batch.batch_size=256",
        "--set", "ppo.rollout_batch_size=256", "--set", "ppo.minibatch.batch_size=256", "--set", "ppo.ptx.rows=64",
    )  # fmt: skip
    assert "workers is 64; this machine has" in line


@pytest.mark.parametrize("stage", ["collect", "ppo", "compare"])
def test_a_prompt_without_room_for_its_response(start_job: Callable[..., str], tmp_path: Path, stage: str) -> None:
    rows = [asked("short"), {"prompt_id": "the-long-one", **asked("word " * 400)}]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    line = start_job(f"{stage}.prompts.source={path}")
    assert f"{path}: line 2: prompt 'the-long-one' has " in line
    assert f"at most 144 leave room in model.max_position_embeddings for {stage}.max_new_tokens = 16" in line
    assert f'({stage}.on_overlong = "skip" or "truncate"' in line


@pytest.mark.parametrize(
    ("key", "rows", "message"),
    [
        ("ppo.prompts", [asked("a"), '{"messages": [}'], "line 2: not JSON"),
        ("ppo.prompts", [asked("a"), [1]], "line 2: list found; a JSON object was expected"),
        ("ppo.prompts", [asked("a"), {"text": "b"}], "line 2: field 'messages' is missing"),
        ("compare.prompts", [{"prompt_id": 1, **asked("a")}, {"prompt_id": 1, **asked("b")}], "line 2: prompt_id '1'"),
        (
            "collect.prompts",
            [{"messages": [{"role": "user", "content": "  "}]}],
            "line 1: field 'messages[0].content' is empty",
        ),
        ("collect.prompts", [{"messages": [{"role": "robot", "content": "a"}]}], "line 1: field 'messages[0].role'"),
        ("sft.demonstrations", [asked("a")], "line 1: field 'messages[0].role' is 'user'; the last turn must be"),
        ("sft.heldout", [{"prompt": "a", "completion": 3}], "line 1: field 'completion' is int; a text or a list"),
        ("sft.demonstrations", [{"prompt": "a", "completion": "b " * 400}], "line 1: the conversation has"),
        ("pretrain.texts", [{"text": "fine"}, {"txt": "a"}], "line 2: field 'text' is missing; found ['txt']"),
        ("pretrain.heldout", [{"text": 5}], "line 1: field 'text' is int"),
        ("ppo.prompts", [], "no prompts; at least one was expected"),
    ],
)
def test_a_malformed_row_is_refused_before_any_training(
    start_job: Callable[..., str], tmp_path: Path, key: str, rows: list[Any], message: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    many = key.startswith(("sft", "pretrain"))
    line = start_job(f'{key}=[{{source="{path}"}}]' if many else f"{key}.source={path}")
    assert path in line
    assert message in line


def test_a_missing_data_file(start_job: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "absent.jsonl"
    assert f"{path}: no such file" in start_job(f"ppo.prompts.source={path}")


def test_a_template_that_shows_no_response(start_job: Callable[..., str]) -> None:
    # A slip in the name of a template makes it a template of its own, one that never shows a message.
    assert "line 1: chat_template 'chta' leaves out the assistant's responses" in start_job("sft.chat_template=chta")


@pytest.mark.parametrize("template", ["{% for", "{{ messages[9].content }}"])
def test_a_template_that_is_none(start_job: Callable[..., str], template: str) -> None:
    assert "chat_template" in start_job(f"sft.chat_template={template}")


def test_job_files_that_cannot_be_read(refused: Callable[..., str], tmp_path: Path) -> None:
    assert f"{tmp_path}: a file was expected, not a folder" in refused("run", str(tmp_path))
    path = tmp_path / "job.toml"
    path.write_bytes(b'note = "x"\nname = "\xff"')
    assert f"{path}:2: UTF-8 was expected, not the byte 0xff" in refused("run", str(path))


def test_a_report_of_no_run(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no such file; a run directory with the job in job.toml was expected" in refused("report", str(tmp_path))


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    tokenizer = Tokenizer.train(["a tiny model says tiny things"], 270, "chat")
    model = LanguageModel(
        ModelConfig(
            vocab_size=270,
            max_position_embeddings=40,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=8,
        )
    )
    init_weights(model, 0)
    save_model(tmp_path / "model", model, model.state_dict(), tokenizer)
    return tmp_path / "model"


@pytest.fixture
def talk(chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Types something at `heed chat`, which takes some options; returns what it says."""

    def call(typed: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["heed", "chat", str(chat_model), "--max-new-tokens", "5", *options])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        return capsys.readouterr().out

    return call


def test_chat_answers_every_line(talk: Callable[..., str]) -> None:
    def lines(typed: str) -> list[str]:
        return talk(typed, "--temperature", "0").split("\n")[:-1]

    once, longer = lines("a tiny model\n"), lines("a tiny model\nsays\n\na tiny model\n")
    assert len(once) == 1
    assert len(longer) == 3
    # An empty line starts over, so the third answer is the first again; greedy answers do not vary.
    assert longer[0] == longer[2] == once[0]
    # More than the context holds, in one turn and in many: the chat continues.
    assert "the model reads at most 39" in lines("word " * 60 + "\n")[0]
    assert len(lines("tiny things\n" * 12)) == 12


def test_chat_chooses_tokens_as_complete_does(
    talk: Callable[..., str], refused: Callable[..., str], chat_model: Path
) -> None:
    greedy = talk("a tiny model\n", "--greedy")
    assert greedy == talk("a tiny model\n", "--temperature", "0") == talk("a tiny model\n", "--top-k", "1")
    assert greedy == talk("a tiny model\n", "--top-p", "0.0001") != talk("a tiny model\n", "--temperature", "9")
    asked = ("chat", str(chat_model))
    assert "--greedy with --top-p: one way to choose tokens was expected" in refused(
        *asked, "--greedy", "--top-p", "0.9"
    )
    assert "--best-of 3 with --greedy: samples that differ" in refused(
        *asked, "--greedy", "--best-of", "3", "--judge", str(chat_model)
    )


@pytest.fixture
def judge(tmp_path: Path, chat_model: Path) -> Path:
    """A reward model whose context is shorter than the policy's."""
    model = ScalarModel(
        ModelConfig(
            vocab_size=270, max_position_embeddings=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=8, positions="learned",
        )
    )  # fmt: skip
    init_weights(model, 1)
    save_model(tmp_path / "judge", model, model.state_dict(), Tokenizer.load(chat_model))
    return tmp_path / "judge"


@torch.no_grad()
def test_chat_gives_the_answer_that_the_judge_prefers(talk: Callable[..., str], chat_model: Path, judge: Path) -> None:
    tokenizer, policy, reward = Tokenizer.load(chat_model), load_language_model(chat_model), load_scalar_model(judge)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "a tiny model"}])
    scored = []
    for sample in range(6):
        seed = derive_seed(3, "chat", 1, "a tiny model\n", sample)
        (response,) = generate(
            policy.eval(), [prompt], max_new_tokens=5, end_ids=[tokenizer.end_id], choice=Choice(1.5), seeds=[seed]
        ).responses
        ending = [] if response[-1] == tokenizer.end_id else [tokenizer.end_id]
        score = float(reward.eval()(torch.tensor([[*prompt, *response, *ending]]))[0, -1])
        scored.append((score, tokenizer.decode(response).strip()))
    assert scored.index(max(scored)) > 0  # the judge's favourite is not the first that comes
    options = ("--temperature", "1.5", "--seed", "3", "--best-of", "6", "--judge", str(judge))
    assert talk("a tiny model\n", *options) == max(scored)[1] + "\n"
    # The judge's context of 30 tokens must hold the end token too.
    assert "the model reads at most 28" in talk("word " * 60 + "\n", *options)
    assert talk("tiny things\n" * 12, *options)


def test_chat_weighs_the_judges_objectives(
    talk: Callable[..., str], refused: Callable[..., str], chat_model: Path, judge: Path, tmp_path: Path
) -> None:
    """Of a head and its opposite the weights make either the judge."""
    plain = load_scalar_model(judge)
    several = ScalarModel(plain.config, labels=("liked", "disliked"))
    rows = torch.cat([plain.score.weight, -plain.score.weight]).detach()
    several.load_state_dict({**plain.state_dict(), "score.weight": rows, "bias": torch.zeros(2)})
    save_model(tmp_path / "several", several, several.state_dict(), Tokenizer.load(judge))
    options = ("--temperature", "1.5", "--seed", "3", "--best-of", "6", "--judge")
    either = ("--judge", str(tmp_path / "several"), "--weight", "liked=1")
    assert talk("a tiny model\n", *options, str(judge)) == talk(
        "a tiny model\n", *options[:-1], *either, "--weight", "disliked=0.5"
    )
    assert talk("a tiny model\n", *options, str(judge)) != talk(
        "a tiny model\n", *options[:-1], *either, "--weight", "disliked=3"
    )
    said = refused("chat", str(chat_model), "--best-of", "4", *either)
    assert "several: this reward model has the objectives liked, disliked, but weights are set for liked;" in said
    assert "--weight applies to the objectives of --judge" in refused("chat", str(chat_model), "--weight", "liked=1")


def test_chat_refuses_a_judge_that_cannot_judge(refused: Callable[..., str], chat_model: Path, judge: Path) -> None:
    both = "expected either several responses and a reward model to choose among them, or neither"
    assert f"--best-of is 4, --judge ''; {both}" in refused("chat", str(chat_model), "--best-of", "4")
    assert f"--best-of is 1, --judge '{judge}'; {both}" in refused("chat", str(chat_model), "--judge", str(judge))
    assert str(chat_model) in refused("chat", str(chat_model), "--best-of", "4", "--judge", str(chat_model))


def test_a_judge_may_have_other_tokens(talk: Callable[..., str], judge: Path) -> None:
    Tokenizer.train(["another text"], 265, "chat").save(judge)
    assert talk("a tiny\n", "--best-of", "4", "--judge", str(judge))


def test_chat_with_an_encoder_decoder(chat_model: Path, talk: Callable[..., str]) -> None:
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=270, max_position_embeddings=40, hidden_size=8, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=8,
    )  # fmt: skip
    model, tokenizer = load(RandomInit(lambda: EncoderDecoder(config), 3)), Tokenizer.load(chat_model)
    save_model(chat_model, model, model.state_dict(), tokenizer)
    source = tokenizer.encode_prompt([{"role": "user", "content": "a tiny model"}])
    (response,) = generate(
        model.eval(), [[tokenizer.end_id]], max_new_tokens=5, end_ids=[tokenizer.end_id], choice=Choice(0), seeds=[0],
        sources=[source],
    ).responses  # fmt: skip
    assert talk("a tiny model\n", "--temperature", "0") == tokenizer.decode(response).strip() + "\n"


def test_chat_needs_a_model_directory(refused: Callable[..., str], chat_model: Path) -> None:
    (chat_model / "model.safetensors").unlink()
    assert f"{chat_model / 'model.safetensors'}: no such file" in refused("chat", str(chat_model))
    shutil.rmtree(chat_model)
    assert f"{chat_model}: no such folder" in refused("chat", str(chat_model))
