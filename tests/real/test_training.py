"""A run from a published model: SFT, a reward model and GRPO with LoRA; resumed and replayed to the last bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from files.hashes import file_hash
from heed.jobs.replay import replay_response
from lm.gguf_files import export_gguf
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from tests.heed.jobs.conftest import HeedCommand
from tests.models import load_language_model

pytestmark = pytest.mark.long

JOB = """
name = "real"

[engine]
precision = "fp32"

[cluster]
cpu_threads = 2

[sft]
init_from = "{model}"
demonstrations = [{{ source = "demos.jsonl" }}]
seq_len = 64
num_epochs = 1
batch = {{ batch_size = 4, micro_batch_size = 4 }}
optimizer = {{ learning_rate = 1e-3 }}
lora = {{ rank = 4 }}

[reward]
rankings = {{ source = "pairs.jsonl" }}
heldout_share = 0.25
batch = {{ batch_size = 4, micro_batch_size = 4 }}
optimizer = {{ learning_rate = 1e-3 }}
lora = {{ rank = 4 }}

[ppo]
prompts = {{ source = "prompts.jsonl" }}
advantage = {{ kind = "group_mean", samples_per_prompt = 2, scale = "group" }}
loss = {{ token_weight = "per_response" }}
kl = {{ kind = "loss" }}
num_iterations = 2
rollout_batch_size = 4
num_epochs = 1
minibatch = {{ batch_size = 4, micro_batch_size = 4 }}
max_new_tokens = 8
policy_optimizer = {{ learning_rate = 1e-3 }}
save_every_iterations = 1
lora = {{ rank = 4 }}
"""


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def run(
    short_smollm2: Path, heed: Callable[..., HeedCommand], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The job and its run folder, finished. The model comes as a GGUF file."""
    folder = tmp_path_factory.mktemp("real")
    model = folder / "short.gguf"
    export_gguf(short_smollm2, model, "f32")
    names = ["Ann", "Bob", "Eve", "Ida", "Leo", "Mia", "Sam", "Tom"]
    rows = {
        "demos": [{"messages": turns(f"Greet {name}.", f"Hello, {name}!")} for name in names],
        "pairs": [
            {"prompt": turns(f"Greet {name}."), "chosen": answer(f"Hello, {name}!"), "rejected": answer("No.")}
            for name in names
        ],
        "prompts": [{"prompt": turns(f"Greet {name}.")} for name in names],
    }
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    text = JOB.format(model=model)
    for name in rows:
        text = text.replace(f'"{name}.jsonl"', f'"{folder / name}.jsonl"')
    job = folder / "job.toml"
    job.write_text(text)
    command = heed("run", str(job), "--runs", str(folder / "runs"))
    assert command.wait(500.0) == 0, command.output
    return job, folder / "runs" / "real"


def test_every_stage_learns_from_the_file_and_records_it(run: tuple[Path, Path]) -> None:
    job, folder = run
    model = job.parent / "short.gguf"
    lineage = json.loads((folder / "sft" / "lineage.json").read_text())
    assert lineage["data"][str(model)] == file_hash(model)
    start = Tokenizer.load(model_directory(str(model)))
    for stage in ("sft", "reward", "ppo"):
        tokenizer = Tokenizer.load(folder / stage / "model")
        assert tokenizer.end_ids == start.end_ids
        assert tokenizer.chat_template == start.chat_template
        metrics = [json.loads(line) for line in (folder / stage / "metrics.jsonl").read_text().splitlines()]
        assert metrics


def test_the_merged_policy_is_read_by_transformers_and_written_for_llama_cpp(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = run[1] / "ppo" / "model"
    tokens_BT = torch.tensor([Tokenizer.load(folder).encode_prompt(turns("Greet Ann."))])
    export_gguf(folder, tmp_path / "policy.gguf", "f32")
    with torch.no_grad():
        ours_BTV = load_language_model(folder).eval()(tokens_BT)
        merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens_BT).logits
        written = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="policy.gguf", dtype=torch.float32)
        torch.testing.assert_close(merged, ours_BTV, atol=4e-4, rtol=0)
        torch.testing.assert_close(written.eval()(tokens_BT).logits, ours_BTV, atol=4e-4, rtol=0)
    start = load_language_model(model_directory(str(run[0].parent / "short.gguf")))
    before, after = start.state_dict(), load_language_model(folder).state_dict()
    name = "decoder.blocks.0.attention.qkv.weight"
    assert not torch.equal(before[name], after[name])


@pytest.mark.nightly
def test_a_response_is_replayed_to_the_last_bit(run: tuple[Path, Path]) -> None:
    found, _ = replay_response(run[1], "ppo", 2, 1)
    assert found.is_same
    assert found.score == found.recorded_score


@pytest.mark.nightly
def test_a_run_cut_after_an_iteration_ends_with_the_same_bits(
    run: tuple[Path, Path], heed: Callable[..., HeedCommand], tmp_path: Path
) -> None:
    """The folder as a kill after the first iteration leaves it: a checkpoint, and no results."""
    job, folder = run
    copy = shutil.copytree(folder, tmp_path / "runs" / "real")
    stage = copy / "ppo"
    for name in ("lineage.json", "results.json"):
        (stage / name).unlink()
    for name in ("model", "adapter", "checkpoints/step-000002"):
        shutil.rmtree(stage / name, ignore_errors=True)
    assert (stage / "checkpoints" / "step-000001").is_dir(), list((stage / "checkpoints").iterdir())
    command = heed("run", str(job), "--runs", str(tmp_path / "runs"))
    assert command.wait(500.0) == 0, command.output
    assert "ppo: resumes from " in command.output
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert file_hash(stage / name) == file_hash(folder / "ppo" / name)
