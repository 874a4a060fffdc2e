"""A stage's process compared with its plan, at a tiny size."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.speed.environments import ROOT
from benchmarks.speed.memory import job_of, markdown, planned

pytestmark = pytest.mark.long

TINY = ("model.vocab_size=2048", "model.hidden_size=128", "model.num_hidden_layers=2", "model.num_attention_heads=2",
"model.num_key_value_heads=2",
        "model.intermediate_size=256", "pretrain.seq_len=32", "sft.seq_len=32",
        "ppo.max_new_tokens=8")  # fmt: skip


def measured(case: str) -> dict[str, Any]:
    """In a process of its own: this one may hold, free, all that the stage will ask for."""
    code = (
        "import json\nfrom benchmarks.speed.memory import measure_case\n"
        f"print(json.dumps(measure_case({case!r}, {TINY!r})))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["pretrain fp32", pytest.param("ppo bf16", marks=pytest.mark.nightly)])
def test_a_stage_is_run_and_planned(case: str) -> None:
    """How close they are is seen at a size that outweighs the libraries; here both are of the same order."""
    found = measured(case)
    stage, precision = case.split()
    assert found["planned"] == planned(job_of(precision, TINY), stage).peak
    assert found["planned"] / 4 < found["grown"] < 4 * found["planned"]
    assert found["resident"] > found["grown"]


def test_the_table_by_hand() -> None:
    machine = {"cpu": "a CPU", "cores": 2, "amx_bf16": True, "python": "3.11", "torch": "2.13.0"}
    ran = {"held": {"reference": 3 * 2**20}, "peak_phase": "sync", "planned": 90 * 2**20, "resident": 500 * 2**20}
    found: dict[str, Any] = {
        "machine": machine, "threads": 1, "seconds": "seconds", "rounds": 1,
        "cases": {
            "ppo bf16": {"gives back": [ran | {"grown": 100 * 2**20}], "workers'": [ran | {"grown": 120 * 2**20}]}
        },
    }  # fmt: skip
    text = markdown(found)
    assert "| ppo bf16 | sync | 90 | 100 | -10% | 120 | 500 |" in text
    assert "in MiB: reference 3." in text
