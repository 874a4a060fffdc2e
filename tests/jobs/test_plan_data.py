"""`heed plan` reads the data that is there: lengths decide on memory and time, and only missing data is bounded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from heed.cli import app
from jobs.job_file import load_job
from jobs.plan import Plan, Setting, make_plan
from lm.tokenizer import Tokenizer
from planning.hardware import GIB, Hardware
from sft.demonstrations import encoded_all
from stages.planner import RANK
from training.packing import best_fit
from training.passes import pass_tokens, split_passes

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
reward_function = "r.py:score"
prompts = { source = "prompts.jsonl" }
num_iterations = 20
rollout_batch_size = 48
samples_per_prompt = 4
advantage = "group_mean"
advantage_scale = "group"
token_weight = "per_response"
kl_in = "loss"
minibatch = { batch_size = 24, micro_batch_size = 12 }
max_new_tokens = 48
policy_optimizer = { learning_rate = 3e-4 }
lora = { rank = 16, alpha = 32 }
"""
PAIRS = """
rankings = { source = "pairs.jsonl" }
on_overlong = "skip"
batch = { batch_size = 8, micro_batch_size = 4 }
optimizer = { learning_rate = 1e-4 }
"""


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model's shape and vocabulary, and no weights."""
    tokenizer.save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_135M))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def test_prompts_are_as_long_as_they_are(folder: Path, tokenizer: Tokenizer) -> None:
    bounded = plan_of(folder, GRPO).stages[0]
    assert bounded.peak > 16 * GIB
    (said,) = (line for line in bounded.assumptions if line.startswith("bound: "))
    assert said == (
        "bound: 8,192 tokens per prompt and response, the model's context, for prompts.jsonl, which is not here"
    )
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60] * 39 + [100]))
    plan = plan_of(folder, GRPO)
    (stage,) = plan.stages
    assert plan.fits
    assert stage.peak < 4 * GIB
    assert stage.seconds_per_step < bounded.seconds_per_step / 50
    assert stage.batch["tokens per iteration"] == 48 * (61 + 48), "the mean decides on time"
    assert "prompts.jsonl: 40 prompts of 61 tokens on average, 100 at most" in stage.assumptions
    assert not any(line.startswith("bound: ") for line in stage.assumptions)
    longer = plan_of(folder, GRPO, "ppo.max_new_tokens=8140").stages[0]
    assert longer.batch["tokens per iteration"] == 48 * CONTEXT, "52 tokens are left for a prompt"


def test_without_a_vocabulary_lengths_are_bounded(folder: Path, tokenizer: Tokenizer) -> None:
    write(folder / "prompts.jsonl", prompts_of(tokenizer, [60]))
    (folder / "model" / "tokenizer.json").unlink()
    said = plan_of(folder, GRPO).stages[0].assumptions
    assert any("for prompts.jsonl, without its vocabulary" in line for line in said)
    elsewhere = 'model = "gpt3-125m"\n' + GRPO.replace('"model"', '"nobody/nothing"')
    said = plan_of(folder, elsewhere).stages[0].assumptions
    assert any("for prompts.jsonl, without its vocabulary" in line for line in said)


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
    backward = plan.stages[0].memory[RANK].phases["policy backward"]["logits, or a block's backward"]
    assert most_logits > 4 * new_tokens * VOCABULARY, "else there would be nothing to notice"
    assert backward >= 2 * width * most_logits


def test_rows_of_sft_are_counted_as_they_are_packed(folder: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "ab " * (1 + index % 7), "completion": "cd " * (1 + index % 50)} for index in range(400)]
    write(folder / "demos.jsonl", rows)
    sft = """
    name = "sft"
    [sft]
    init_from = "model"
    demonstrations = [{ source = "demos.jsonl" }]
    seq_len = 512
    batch = { batch_size = 2, micro_batch_size = 2 }
    optimizer = { learning_rate = 1e-4 }
    """
    stage = plan_of(folder, sft).stages[0]
    turns = [
        ("", [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}])
        for row in rows
    ]
    lengths = [len(tokens) for tokens, _ in encoded_all(tokenizer, turns)]
    trained = [length for number, length in enumerate(lengths) if number % 20]
    assert stage.num_steps == pytest.approx(len(best_fit(trained, 512)) / 2, abs=1)
    assert f"demos.jsonl: 400 conversations of {np.mean(lengths):,.0f} tokens on average, {max(lengths)} at most" in (
        stage.assumptions
    )


@pytest.mark.parametrize("section", ["reward", "dpo"])
def test_comparisons_are_as_long_as_they_are(folder: Path, section: str) -> None:
    job = f'name = "pairs"\n[{section}]\ninit_from = "model"\n{PAIRS}'
    bounded = plan_of(folder, job).stages[0]
    assert any(line.startswith("bound: 8,192 tokens per prompt and response") for line in bounded.assumptions)
    assert bounded.peak > 16 * GIB
    pairs = [{"prompt": f"Say {index}.", "chosen": "yes", "rejected": "no " * (1 + index % 9)} for index in range(50)]
    write(folder / "pairs.jsonl", pairs)
    plan = plan_of(folder, job, f"{section}.batch.micro_batch_size=8")
    (stage,) = plan.stages
    assert plan.fits
    (said,) = (line for line in stage.assumptions if line.startswith("pairs.jsonl: "))
    assert "pairs.jsonl: 100 prompts with a response of " in said
    assert stage.batch["tokens per step"] < 8 * 2 * 60
    if section == "dpo":
        logits = stage.memory[RANK].phases["backward"]["logits, or a block's backward"]
        of_all_tokens = plan.layout.compute_bytes * 2 * 16 * int(said.split()[-3]) * VOCABULARY
        assert logits < of_all_tokens, "prompts have no logits"


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

    assert planned("h100").startswith("grpo: fits on h100: ppo needs most, ")
    refused = planned("l40s", "ppo.minibatch.micro_batch_size=24", "ppo.max_new_tokens=8100")
    assert refused.startswith("grpo: does not fit on l40s: ppo needs most, ")
    assert refused.index("fits with") < refused.index("memory of a rank"), "what to change comes next"
