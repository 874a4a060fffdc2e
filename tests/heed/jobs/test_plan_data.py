"""`heed plan` reads the data that is there: lengths decide on memory and time, and only missing data is bounded."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from heed.cli import app
from heed.jobs.job_file import load_job
from heed.jobs.plan import RANK, Plan, Setting, make_plan
from heed.jobs.times import GIB, Hardware
from lm.config import ModelConfig
from lm.gguf_files import export_gguf
from lm.model import LanguageModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from sft.demonstrations import encoded_all
from tests.hub_server import NAME, serve
from tests.rows import jsonl
from training.packing import best_fit, pass_tokens, split_passes

LAPTOP = Hardware("cpu", 16 * GIB, 5e11, 4e10, 0.0, is_gpu=False)
VOCABULARY, CONTEXT = 49152, 8192
LLAMA_135M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GRPO = """
name = "grpo"
[ppo]
init_from = "model"
reward = { kind = "function", function = "r.py:score" }
prompts = { source = "prompts.jsonl" }
num_iterations = 20
rollout_batch_size = 48
advantage = { kind = "group_mean", samples_per_prompt = 4, scale = "group" }
loss = { token_weight = "per_response" }
kl = { kind = "loss" }
minibatch = { batch_size = 24, micro_batch_size = 12 }
max_new_tokens = 48
policy_optimizer = { learning_rate = 3e-4 }
lora = { rank = 16, alpha = 32 }
"""
SFT = """
name = "sft"
[sft]
init_from = "model"
demonstrations = [{ source = "demos.jsonl" }]
seq_len = 512
batch = { batch_size = 2, micro_batch_size = 2 }
optimizer = { learning_rate = 1e-4 }
"""
PAIRS = """
rankings = { source = "pairs.jsonl" }
on_overlong = "skip"
batch = { batch_size = 8, micro_batch_size = 4 }
optimizer = { learning_rate = 1e-4 }
"""
REWARD = f'name = "pairs"\n[reward]\ninit_from = "model"\n{PAIRS}'


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model's shape and vocabulary, and no weights."""
    tokenizer.save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_135M))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(jsonl(rows))


def plan_of(folder: Path, text: str, *overrides: str) -> Plan:
    (folder / "job.toml").write_text(text)
    job = load_job(folder / "job.toml", overrides, opens_models=False)
    return make_plan(job, Setting(LAPTOP, share_of_peak=0.4, assumed_rows=100_000))


def prompts_of(tokenizer: Tokenizer, lengths: list[int]) -> list[dict[str, str]]:
    """Prompts of exactly so many tokens each."""
    fixed = len(tokenizer.encode_prompt([{"role": "user", "content": "~"}])) - 1
    found = [{"prompt": "~" * (length - fixed)} for length in lengths]
    encoded = tokenizer.encode_prompts([[{"role": "user", "content": row["prompt"]}] for row in found])
    assert [len(tokens) for tokens in encoded] == lengths
    return found


def test_a_gguf_is_planned_without_its_weights(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published file takes minutes to dequantise, and six times its space."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ModelConfig(
        vocab_size=300, max_position_embeddings=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = load(RandomInit(lambda: LanguageModel(config), 1))
    save_model(tmp_path / "model", model, dict(model.state_dict()), tokenizer)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    write(tmp_path / "prompts.jsonl", prompts_of(tokenizer, [60] * 39 + [100]))
    write(tmp_path / "demos.jsonl", [{"prompt": "What?", "completion": "It."}] * 4)
    write(tmp_path / "pairs.jsonl", [{"prompt": "What?", "chosen": "It.", "rejected": "No."}] * 8)
    for text in (GRPO, SFT.replace("512", "128"), REWARD):
        expected = plan_of(tmp_path, text)
        found = plan_of(tmp_path, text.replace('"model"', '"model.gguf"'))
        assert found.job.model == expected.job.model
        assert not any("assumes at most " in line for line in found.stages[0].assumptions)
        assert found.stages == expected.stages
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


def test_prompts_are_as_long_as_they_are(folder: Path, tokenizer: Tokenizer) -> None:
    bounded = plan_of(folder, GRPO).stages[0]
    assert bounded.peak > 16 * GIB
    (said,) = (line for line in bounded.assumptions if line.startswith("assumes at most "))
    assert said == (
        "assumes at most 8,192 tokens per prompt and response (the model's context) for prompts.jsonl"
        " (not on this machine)"
    )
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60] * 39 + [100]))
    plan = plan_of(folder, GRPO)
    (stage,) = plan.stages
    assert plan.fits
    assert stage.peak < 4 * GIB
    assert stage.seconds_per_step < bounded.seconds_per_step / 50
    assert stage.batch["tokens per iteration"] == 48 * (61 + 48), "the mean decides on time"
    assert "prompts.jsonl: 40 prompts of 61 tokens on average, 100 at most" in stage.assumptions
    assert not any(line.startswith("assumes at most ") for line in stage.assumptions)


def test_prompts_of_several_sources_count_by_their_shares(folder: Path, tokenizer: Tokenizer) -> None:
    """By their weights, or by their rows if they have none."""
    write(folder / "short.jsonl", prompts_of(tokenizer, [60] * 30))
    write(folder / "long.jsonl", prompts_of(tokenizer, [100] * 10))
    one = '{ source = "prompts.jsonl" }'
    for weights, mean in ((("", ""), 70), ((", weight = 1", ", weight = 3"), 90)):
        both = "".join(f'{{ source = "{n}.jsonl"{w} }}, ' for n, w in zip(("short", "long"), weights, strict=True))
        (stage,) = plan_of(folder, GRPO.replace(one, f"[{both}]")).stages
        assert stage.batch["tokens per iteration"] == 48 * (mean + 48)
        assert "short.jsonl: 30 prompts of 60 tokens on average, 60 at most" in stage.assumptions
        assert "long.jsonl: 10 prompts of 100 tokens on average, 100 at most" in stage.assumptions


LONG = "~ " * CONTEXT  # more tokens than any model here reads
LONG_ROWS: dict[str, tuple[str, str, dict[str, str], str]] = {
    "ppo": (GRPO, "prompts", {"prompt": LONG}, "prompt '2' has "),
    "sft": (SFT, "demos", {"prompt": "q", "completion": LONG}, "the conversation has "),
    "reward": (
        REWARD.replace('on_overlong = "skip"\n', ""),
        "pairs",
        {"prompt": "q", "chosen": LONG, "rejected": "no"},
        "prompt and response have ",
    ),
}


@pytest.mark.parametrize(("section", "of"), LONG_ROWS.items(), ids=LONG_ROWS)
def test_a_row_that_is_too_long_is_refused_or_left_out_as_in_the_run(
    folder: Path, section: str, of: tuple[str, str, dict[str, str], str]
) -> None:
    job, name, long, message = of
    write(
        folder / f"{name}.jsonl",
        [*({key: f"{text[:2]}{number}" for key, text in long.items()} for number in "12"), long],
    )
    with pytest.raises(ValueError, match=rf"^{name}\.jsonl: line 3: {message}.*{section}\.on_overlong = "):
        plan_of(folder, job)
    (stage,) = plan_of(folder, job, f"{section}.on_overlong=skip").stages
    said = next(line for line in stage.assumptions if line.startswith(f"{name}.jsonl: "))
    assert said.endswith(" too long: 1 skipped")
    longest = int(said.partition(" at most")[0].split()[-1])
    assert longest < 40


def test_without_a_vocabulary_lengths_are_bounded(folder: Path, tokenizer: Tokenizer) -> None:
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60]))
    (folder / "model" / "tokenizer.json").unlink()
    said = plan_of(folder, GRPO).stages[0].assumptions
    assert any("for prompts.jsonl (no vocabulary" in line for line in said)
    elsewhere = 'model = "gpt3-125m"\n' + GRPO.replace('"model"', '"nobody/nothing"')
    said = plan_of(folder, elsewhere).stages[0].assumptions
    assert any("for prompts.jsonl (not read: a model" in line for line in said)


def test_a_judge_that_is_not_here_leaves_the_data_of_other_stages_measured(folder: Path, tokenizer: Tokenizer) -> None:
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60]))
    judged = f"""{GRPO}
[compare]
prompts = {{ source = "prompts.jsonl" }}
judge_from = "nobody/nothing"
max_new_tokens = 8
"""
    trained, compared = plan_of(folder, judged).stages
    assert "prompts.jsonl: 1 prompts of 60 tokens on average, 60 at most" in trained.assumptions
    assert any("for prompts.jsonl (not read: a model" in line for line in compared.assumptions)


def test_logits_of_the_fullest_pass_are_counted(folder: Path, tokenizer: Tokenizer) -> None:
    """A pass of the longest prompt's width holds more responses to short prompts, each with logits."""
    lengths, new_tokens = [400] + [12] * 23, 48
    write(folder / "prompts.jsonl", prompts_of(tokenizer, lengths))
    plan = plan_of(folder, GRPO, "ppo.minibatch.micro_batch_size=4")
    batch = load_job(folder / "job.toml", ["ppo.minibatch.micro_batch_size=4"], opens_models=False).ppo.minibatch
    units = [[length + new_tokens] for length in lengths]
    ((*passes,),) = split_passes(units, 1, pass_tokens(batch, units, with_gradients=True))
    most_logits = max(len(found) for found in passes) * new_tokens * VOCABULARY
    width = plan.layout.compute_bytes
    backward = plan.stages[0].memory[RANK].phases["policy"]["logits, or a block's backward"]
    assert most_logits > 4 * new_tokens * VOCABULARY, "else there would be nothing to notice"
    assert backward >= 2 * width * most_logits


def test_rows_of_sft_are_counted_as_they_are_packed(folder: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "ab " * (1 + index % 7), "completion": "cd " * (1 + index % 50)} for index in range(400)]
    write(folder / "demos.jsonl", rows)
    stage = plan_of(folder, SFT).stages[0]
    turns = [
        ("", [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}])
        for row in rows
    ]
    lengths = [len(tokens) for sequences in encoded_all(tokenizer, turns) for tokens, _ in sequences]
    trained = [length for number, length in enumerate(lengths) if number % 20]
    assert stage.num_steps == pytest.approx(len(best_fit(trained, 512)) / 2, abs=1)
    assert f"demos.jsonl: 400 conversations of {np.mean(lengths):,.0f} tokens on average, {max(lengths)} at most" in (
        stage.assumptions
    )


@pytest.mark.parametrize("section", ["reward", "dpo"])
def test_comparisons_are_as_long_as_they_are(folder: Path, section: str) -> None:
    job = f'name = "pairs"\n[{section}]\ninit_from = "model"\n{PAIRS}'
    bounded = plan_of(folder, job).stages[0]
    assert any(line.startswith("assumes at most 8,192 tokens per prompt and response") for line in bounded.assumptions)
    assert bounded.peak > 16 * GIB
    pairs = [{"prompt": f"Say {index}.", "chosen": "yes", "rejected": "no " * (1 + index % 9)} for index in range(50)]
    write(folder / "pairs.jsonl", pairs)
    # On a CPU that multiplies bf16, gradients would outweigh the logits.
    plan = plan_of(folder, job, f"{section}.batch.micro_batch_size=8", "engine.precision=fp32")
    (stage,) = plan.stages
    assert plan.fits
    (said,) = (line for line in stage.assumptions if line.startswith("pairs.jsonl: "))
    assert "pairs.jsonl: 100 prompts with a response of " in said
    assert stage.batch["tokens per step"] < 8 * 2 * 60
    if section == "dpo":
        logits = stage.memory[RANK].phases["train"]["logits, or a block's backward"]
        of_all_tokens = plan.layout.compute_bytes * 2 * 16 * int(said.split()[-3]) * VOCABULARY
        assert logits < of_all_tokens, "prompts have no logits"


def test_a_reward_model_alone_takes_the_shape_of_a_hub_model(
    folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = REWARD.replace('"model"', f'"{NAME}"')
    with serve(model_folder) as hub:
        hub.reach(monkeypatch, folder / "cache")
        (stage,) = plan_of(folder, job).stages
        here = plan_of(folder, REWARD.replace('"model"', f'"{model_folder}"')).stages[0]
        assert stage.memory == here.memory
        with pytest.raises(ValueError, match=r"^reward\.init_from: 'nobody/nothing' is neither a local folder nor a"):
            plan_of(folder, REWARD.replace('"model"', '"nobody/nothing"'))


BAD_ROWS = {"an unreadable line": "not JSON\n", "a row of another form": "{}\n"}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize(
    ("job", "row", "line"),
    [
        (GRPO, {"prompt": "Say 1."}, "d.jsonl: 9 prompts of "),
        (SFT, {"prompt": "Say 1.", "completion": "1"}, "d.jsonl: 9 conversations of "),
        (REWARD, {"chosen": "Say 1. 1", "rejected": "Say 1. no"}, "d.jsonl: 18 prompts with a response of "),
    ],
    ids=["prompts", "demonstrations", "pairs"],
)
def test_invalid_rows_are_refused_or_skipped_as_the_source_says(
    folder: Path, job: str, row: dict[str, str], line: str, bad: str
) -> None:
    write(
        folder / "d.jsonl",
        [{name: text.replace("1", str(number)) for name, text in row.items()} for number in range(9)],
    )
    with (folder / "d.jsonl").open("a") as file:
        file.write(bad * 2)
    for name in ("demos", "pairs", "prompts"):
        job = job.replace(f"{name}.jsonl", "d.jsonl")
    (stage,) = plan_of(folder, job.replace('"d.jsonl"', '"d.jsonl", on_invalid = "skip"')).stages
    assert any(said.startswith(line) for said in stage.assumptions), stage.assumptions
    with pytest.raises(
        ValueError, match=r'^d\.jsonl: 2 of 11 rows are invalid \(on_invalid = "skip" in (.*\n)+  d\.jsonl: line 11'
    ):
        plan_of(folder, job)


def test_rows_are_counted_without_those_that_cannot_be_parsed(folder: Path) -> None:
    """Where there is no vocabulary, so that nothing but rows is counted."""
    (folder / "model" / "tokenizer.json").unlink()
    write(folder / "demos.jsonl", [{"prompt": "q", "completion": "a"}] * 40)
    with (folder / "demos.jsonl").open("a") as file:
        file.write("not JSON\n" * 2)
    (stage,) = plan_of(folder, SFT.replace('"demos.jsonl"', '"demos.jsonl", on_invalid = "skip"')).stages
    assert stage.num_steps == 40 / 2
    with pytest.raises(ValueError, match=r"^demos\.jsonl: 2 of 42 rows are invalid \(on_invalid"):
        plan_of(folder, SFT)


def test_a_conversation_that_the_template_refuses_is_named(folder: Path) -> None:
    """With file and line, as the run would."""
    write(folder / "pairs.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    template = "chat_template = \"{{ raise_exception('no') }}\"\n"
    with pytest.raises(ValueError, match=r"^pairs\.jsonl: line 1: .*no"):
        plan_of(folder, REWARD + template)


def test_data_is_read_once_for_all_plans_of_a_job(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice plans a job that does not fit again and again."""
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60] * 8))
    (folder / "job.toml").write_text(GRPO)
    read: list[object] = []
    real = Tokenizer.encode_prompts

    def counted(self: Tokenizer, prompts: Any) -> Any:
        read.append(prompts)
        return real(self, prompts)

    monkeypatch.setattr(Tokenizer, "encode_prompts", counted)
    ran = CliRunner().invoke(
        app, ["plan", "job.toml", "--set", "ppo.max_new_tokens=6000", "--set", "ppo.minibatch.micro_batch_size=24"]
    )
    assert ran.exit_code in (0, 1), ran.output
    assert len(read) == 1


def test_the_verdict_comes_first(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "job.toml").write_text(GRPO)
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60] * 8))

    def planned(gpu: str, *overrides: str) -> str:
        options = [part for override in overrides for part in ("--set", override)]
        return CliRunner().invoke(app, ["plan", "job.toml", "--gpu", gpu, *options]).output

    fits = planned("h100")
    assert fits.startswith("grpo: fits on h100: ppo needs most, ")
    assert not re.search(r"e[+-]\d|\d\.\d+ ms| 0\.0 of ", fits), "small numbers are written out"
    refused = planned("l40s", "ppo.minibatch.micro_batch_size=24", "ppo.max_new_tokens=8100")
    assert refused.startswith("grpo: does not fit on l40s: ppo needs most, ")
    assert refused.index("fits with") < refused.index("memory of a rank"), "what to change comes next"
