"""Planned times against what others published, on the same GPUs. docs/plan.md has the table, which this keeps true."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from heed.jobs.estimate import GPUS, Hardware, StagePlan
from heed.jobs.job_file import load_job
from heed.jobs.plan import Setting, make_plan

ROOT = Path(__file__).parents[3]
PPO, PRETRAIN = "hh-8b-long-8gpus", "gpt2-pretrain-8gpus"
# NVIDIA's A800 is an A100 with 400 GB/s of NVLink, both directions, instead of 600.
A800 = replace(GPUS["a100"], name="a800", link_bytes_per_second=200e9)


def llama2(hidden_size: int, layers: int, heads: int, kv_heads: int, mlp: int) -> dict[str, object]:
    return {
        "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_size": hidden_size, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp,
        "tie_word_embeddings": False,
    }  # fmt: skip


def qwen3(hidden_size: int, layers: int, heads: int, mlp: int, *, is_tied: bool) -> dict[str, object]:
    return {
        "vocab_size": 151936, "max_position_embeddings": 4096, "hidden_size": hidden_size, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": mlp,
        "qk_norm": True, "tie_word_embeddings": is_tied,
    }  # fmt: skip


@dataclass(frozen=True)
class Published:
    """`figure` is in seconds per iteration of PPO, or in tokens per second of a stage that trains."""

    what: str
    figure: float
    gpu: Hardware
    job: str
    stage: str
    model: Mapping[str, object] | str
    overrides: tuple[str, ...]

    @property
    def planned(self) -> float:
        stage = self._plan()
        return (
            stage.seconds_per_step if self.stage == "ppo" else stage.batch["tokens per step"] / stage.seconds_per_step
        )

    @property
    def ratio(self) -> float:
        """Planned time over published time: below 1, Heed is planned to be faster."""
        return self.planned / self.figure if self.stage == "ppo" else self.figure / self.planned

    def _plan(self) -> StagePlan:
        model = f"model={_toml(self.model)}"
        job = load_job(
            ROOT / "configs" / "jobs" / "cluster" / f"{self.job}.toml", (model, *self.overrides), opens_models=False
        )
        plan = make_plan(job, Setting(self.gpu, self.gpu.usual_share, assumed_rows=100_000))
        return next(stage for stage in plan.stages if stage.name == self.stage)

    def row(self) -> str:
        unit = "s" if self.stage == "ppo" else "tokens/s"
        return f"| {self.what} | {self.figure:,.0f} {unit} | {_rounded(self.planned)} {unit} | {self.ratio:.2f} |"


def _rounded(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.0f}"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def ppo(what: str, seconds: float, workers: int, model: Mapping[str, object]) -> Published:
    sizes = ("ppo.rollout_batch_size=1024", "engine.checkpoint_activations=true", "ppo.memory=small")
    return Published(what, seconds, A800, PPO, "ppo", model, (f"workers={workers}", *sizes))


def llama3(what: str, tokens: float, *overrides: str) -> Published:
    batch = ("pretrain.seq_len=4096", "engine.checkpoint_activations=true", *overrides)
    return Published(what, tokens, GPUS["h200"], PRETRAIN, "pretrain", "meta-llama/Meta-Llama-3-8B", batch)


def lora(what: str, tokens: float, model: Mapping[str, object]) -> Published:
    settings = ("workers=1", "engine.zero_stage=0", "sft.lora={rank=16}", "sft.batch={batch_size=2,micro_batch_size=2}")
    return Published(what, tokens, GPUS["h100"], PPO, "sft", model, settings)


# Sources: OpenRLHF's README of v0.5 to v0.8 (its settings are those of its example: 1,024 prompts of up to 1,024 tokens
# with answers of up to 1,024, one epoch, minibatches of 128); KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md;
# Surogate, docs/reference/benchmarks.md.
TABLE = [
    ppo("OpenRLHF, PPO of 7B, 16 A800", 471.11, 16, llama2(4096, 32, 32, 32, 11008)),
    ppo("OpenRLHF, PPO of 70B, 32 A800", 4488.53, 32, llama2(8192, 80, 64, 8, 28672)),
    llama3(
        "KempnerForge, pretraining of 8B, one H200", 10_471, "workers=1", "engine.zero_stage=1",
        "pretrain.batch={batch_size=8,micro_batch_size=4}",
    ),
    llama3(
        "KempnerForge, the same on four H200", 38_983, "workers=4", "engine.zero_stage=3",
        "pretrain.batch={batch_size=32,micro_batch_size=4}",
    ),
    lora("Surogate, LoRA of Qwen3 0.6B, one H100", 53_900, qwen3(1024, 28, 16, 3072, is_tied=True)),
    lora("Surogate, LoRA of Qwen3 1.7B", 32_800, qwen3(2048, 28, 16, 6144, is_tied=True)),
    lora("Surogate, LoRA of Qwen3 4B", 15_900, qwen3(2560, 36, 32, 9728, is_tied=True)),
    lora("Surogate, LoRA of Qwen3 8B", 10_200, qwen3(4096, 36, 32, 12288, is_tied=False)),
]  # fmt: skip


@pytest.mark.parametrize("published", TABLE, ids=lambda published: published.what)
def test_the_table_in_the_docs_has_what_is_planned(published: Published) -> None:
    assert published.row() in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8"), published.row()


if __name__ == "__main__":  # prints the table's rows
    for one in TABLE:
        print(one.row())
