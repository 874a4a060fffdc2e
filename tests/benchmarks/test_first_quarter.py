"""benchmarks/gpu/first_quarter at tiny sizes on a CPU: each step has figures, and no step takes the others with it.

tests/fake_cuda has the code that only a GPU runs.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.first_quarter import commands
from benchmarks.gpu.first_quarter import run as program
from benchmarks.gpu.first_quarter.commands import JOB, SMOLLM2_JOB, TINY_SMOLLM2
from benchmarks.gpu.first_quarter.context import Context
from benchmarks.gpu.first_quarter.kernels import kind_of
from benchmarks.gpu.first_quarter.run import COMMANDS, LIMITS, PLANS
from benchmarks.gpu.first_quarter.steps import STEPS
from benchmarks.gpu.first_quarter.strip_ray import strip
from heed.jobs.job_file import load_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu" / "first_quarter"
# Figures of each step, all positive.
FIGURES = {
    "environment": (),
    "kernels": (),
    "sft_05b": ("packed_tokens_per_second", "packed_mfu", "plain_tokens_per_second", "packed_planned_gib_zero0"),
    "generation_05b": ("kept_ms_per_token", "kept_bandwidth_share", "eager_tokens_per_second", "prompt_tflops"),
    "ppo_05b": ("planned_gib_fast_zero0",),
    "attention": (),
    "checkpoint": ("gpt2_checkpoint_gib", "gpt2_load_tensors", "gpt2_step_while_writing"),
}
LONG_FIGURES = {
    "peers": ("train_tokens_per_second", "generate_tokens_per_second"),
    "sft_13b": ("packed_tokens_per_second", "packed_first_step_seconds"),
    "generation_13b": ("kept_tokens_per_second",),
    "sft_8b": ("zero1_tokens_per_second",),
    "generation_8b": ("kept_tokens_per_second",),
    "compiled": ("plain_tokens_per_second", "packed_tokens_per_second"),
    "zero": (*(f"zero{stage}_tokens_per_second" for stage in range(4)), "broadcast_to_itself_seconds"),
    "ppo_modes": (),
    "tests": ("tests", "skipped"),
    "rows": (),
    "chain": (),
}


def measured(command: list[str], out: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """The results of a run in a process of its own, and what it printed."""
    # An engine of another test has named this process's rank, and a port that it holds.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT", "PYTHONPATH")}
    kept |= {"OUT": str(out), "FIRST_QUARTER_SITE": str(out / "site"), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "results.json").read_text()), done.stdout


def rehearsed(figures: dict[str, tuple[str, ...]], out: Path) -> dict[str, Any]:
    """The steps of a rehearsal, all of which are well and have these figures."""
    options = ["--device", "cpu", "--tiny", "--slow", "9", "--seconds", "900"]
    found, printed = measured([str(FOLDER / "run.py"), ",".join(figures), *options], out)
    steps: dict[str, Any] = found["steps"]
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(figures, "ok"), printed
    assert [key for step in steps.values() for key in step if key.endswith("_failed")] == []
    # Some figures are differences of two times, which other work on the machine can turn round.
    missing = [(name, key) for name, keys in figures.items() for key in keys if not abs(steps[name].get(key, 0)) > 0]
    assert missing == []
    return steps


def test_a_rehearsal_measures(tmp_path: Path) -> None:
    steps = rehearsed(FIGURES, tmp_path)
    assert steps["environment"]["packages"]["torch"].startswith("2.")
    assert steps["checkpoint"]["gpt2_load_wrong"] == 0
    for iteration in (steps["ppo_05b"][f"iteration_{number}"] for number in range(3)):
        phases = [iteration[f"{name}_seconds"] for name in ("sampling", "scoring", "policy_updates", "value_updates")]
        assert min(phases) > 0
        assert sum(phases) < iteration["seconds"]
        assert 0 < iteration["response_tokens"] <= 8
        assert iteration["response_tokens_per_second"] > 0
    losses = steps["sft_05b"]["plain_losses"]
    assert losses[0] == pytest.approx(6.24, abs=1.5)  # ln 512: random weights know nothing


@pytest.mark.nightly
def test_a_rehearsal_of_what_takes_long_measures(tmp_path: Path) -> None:
    steps = rehearsed(LONG_FIGURES, tmp_path)
    assert (steps["zero"]["zero1_load_wrong"], steps["zero"]["zero3_load_wrong"]) == (0, 0)
    assert steps["zero"]["zero3_losses"] == pytest.approx(steps["zero"]["zero0_losses"], abs=0.1)
    assert {key for key in steps["ppo_modes"] if key.endswith("iteration_0")} == {
        f"{mode}_iteration_0" for mode in ("balanced", "small_zero0", "small_zero3", "fast_zero1")
    }
    assert steps["tests"]["failed"] == {}
    assert {"pretrain", "sft", "reward", "ppo", "compare"} <= set(steps["chain"])
    assert steps["chain"]["ppo"]["stage_seconds"] > 0
    assert len(steps["chain"]["ppo"]["all"]) == steps["chain"]["ppo"]["steps"] > 0
    assert (tmp_path / "chain_report.json").exists()
    assert "-m heed run" in (tmp_path / "log.txt").read_text()


# Steps that go wrong in every way, between two that are well.
BROKEN = """
import os, time
from benchmarks.gpu.first_quarter import run, steps

def write(context):
    context.note(tokens_per_second=float("inf"), losses=[1.23456789])
    with context.attempt("part"):
        raise ValueError("of a part")

def fail(context):
    context.note(found=1.0)
    raise RuntimeError("of a step")

def hang(context):
    context.note(before=2)
    time.sleep(600)

steps.STEPS |= {"environment": write, "attention": fail, "zero": hang, "checkpoint": write}
steps.STEPS["peers"] = lambda context: os.abort()
run.LIMITS |= {"zero": (1, 1), "compiled": (2000, 2000)}
run.main(["environment,attention,zero,peers,compiled,checkpoint", "--device", "cpu", "--tiny", "--seconds", "900"])
"""


def test_a_step_that_goes_wrong_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    found, printed = measured(["-c", BROKEN], tmp_path)
    steps = found["steps"]
    assert steps["environment"]["status"] == steps["checkpoint"]["status"] == "ok"
    assert steps["environment"]["tokens_per_second"] == "inf"
    assert steps["environment"]["losses"] == [1.2346]
    assert steps["environment"]["part_failed"] == "ValueError: of a part"
    assert steps["attention"]["status"].startswith("failed: ")
    assert steps["attention"]["status"].endswith("RuntimeError: of a step\n")
    assert steps["attention"]["found"] == 1.0
    assert steps["zero"]["status"] == "not finished within 1 s"
    assert steps["zero"]["before"] == 2
    assert 1 <= steps["zero"]["wall_seconds"] < 60
    assert steps["peers"]["status"] == "died of signal 6"
    assert list(steps["compiled"]) == ["not_started"]
    assert re.fullmatch(r"8\d\d s are left", steps["compiled"]["not_started"])
    assert "compiled: not started, 8" in printed
    assert list(steps) == ["environment", "attention", "zero", "peers", "compiled", "checkpoint"]


def test_a_command_that_goes_wrong_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    step = commands.CommandStep(0.01, "cpu", True, tmp_path)
    assert step.run("heed", ["--help"]) == "not finished within 0 s"
    status = commands.CommandStep(60, "cpu", True, tmp_path).run("timeit", ["-n", "x"])
    assert status.startswith("ended with 1: ")
    assert status.endswith("ValueError: invalid literal for int() with base 10: 'x'")
    assert "-m timeit" in (tmp_path / "log.txt").read_text()
    monkeypatch.setattr(commands, "run_rows", lambda _: 1 / 0)
    options = program.Options(("rows",), inf, "cpu", True, 1.0, tmp_path)
    found = program.run_step("rows", options)
    assert found["status"].endswith("ZeroDivisionError: division by zero\n")


def test_without_time_no_step_is_started(tmp_path: Path) -> None:
    options = program.Options(("environment",), 0, "cpu", True, 1.0, tmp_path)
    assert list(program.run_step("environment", options)) == ["not_started"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["sft", "--device", "cpu", "--tiny"],
            "no step is named sft; first, second, third, again, or some of environment, ",
        ),
        (["first", "--device", "cpu"], "--device cpu needs --tiny"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "ROOT", ROOT)
    with pytest.raises(SystemExit):
        program.parse(arguments)
    assert said in capsys.readouterr().err


def test_it_is_started_in_the_root(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "first"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} is not the root of Heed's tree" in done.stderr


def test_plans_and_limits_name_the_steps_that_there_are() -> None:
    assert set(LIMITS) == {*STEPS, *COMMANDS}
    assert all(name in LIMITS for plan in PLANS.values() for name in plan.split(","))
    assert {*FIGURES, *LONG_FIGURES, "smollm2"} == set(LIMITS)
    assert all(estimate < limit for estimate, limit in LIMITS.values())
    assert sum(LIMITS[name][0] for name in PLANS["first"].split(",")) < 430
    readme = (FOLDER / "README.md").read_text()
    for name, (estimate, limit) in LIMITS.items():
        assert re.search(rf"^\| {name} \| {estimate} \| {limit} \|", readme, re.MULTILINE), name


def test_the_job_of_the_chain_is_one_of_heeds() -> None:
    assert load_job(JOB).name == "first-chain"
    settings = {**TINY_SMOLLM2, "sft.init_from": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # a shape that Heed knows
    job = load_job(SMOLLM2_JOB, [f"{key}={value}" for key, value in settings.items()], opens_models=False)
    assert job.name == "first-smollm2"


def test_a_published_model_is_joined_from_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(commands, "CARRIED", tmp_path)
    asked = list[Sequence[str]]()

    def run(_step: commands.CommandStep, module: str, arguments: Sequence[str]) -> str:
        asked.append([module, *arguments])
        return "ok"

    monkeypatch.setattr(commands.CommandStep, "run", run)
    step = commands.CommandStep(60, "cpu", False, tmp_path)
    (tmp_path / "smollm2-0").write_bytes(b"GGUF, ")
    assert commands.run_smollm2(step) == f"skipped: {tmp_path.name}/smollm2-1 not carried"
    (tmp_path / "smollm2-1").write_bytes(b"whole")
    assert commands.run_smollm2(step) == "ok"
    assert (tmp_path / "smollm2.gguf").read_bytes() == b"GGUF, whole"
    (command,) = asked
    assert command[:3] == ["heed", "run", str(SMOLLM2_JOB)]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("flash_fwd_kernel", "attention"),
        ("fmha_cutlassF_bf16_aligned", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "product"),
        ("multi_tensor_apply_kernel", "optimizer"),
        ("elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<...>::lambda>", "elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "copy, fill, cast"),
        ("vectorized_elementwise_kernel", "elementwise"),
    ],
)
def test_kernels_have_a_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_figures_are_on_disk_at_once(tmp_path: Path) -> None:
    import torch

    context = Context("a", torch.device("cpu"), True, tmp_path / "a.json")
    context.note(first=1)
    context.note(second={"part": float("nan")})
    found = json.loads(context.path.read_text())
    assert (found["first"], found["second"]) == (1, {"part": "nan"})


# --- what is carried to the machine ----------------------------------------------------------------------------------


def make_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16
            archive.writestr(info, content)
    return path


def test_unused_parts_of_ray_are_left_out(tmp_path: Path) -> None:
    kept = {"ray/core/src/ray/raylet/raylet": "program", "ray/_raylet.so": "library"}
    unused = {"ray/jars/ray.jar": "jar", "ray/data/read.py": "import", "ray/types.pyi": "types"}
    names = [*kept, *unused, "ray-1.dist-info/RECORD"]
    wheel = make_wheel(
        tmp_path / "ray-1-py3-none-any.whl",
        {**kept, **unused, "ray-1.dist-info/RECORD": "".join(f'"{name}",sha256=x,1\n' for name in names)},
    )
    (tmp_path / "to").mkdir()
    with zipfile.ZipFile(strip(wheel, tmp_path / "to")) as found:
        assert set(found.namelist()) == {*kept, "ray-1.dist-info/RECORD"}
        assert {name: found.read(name).decode() for name in kept} == kept
        assert found.getinfo("ray/_raylet.so").external_attr == 0o755 << 16
        record = found.read("ray-1.dist-info/RECORD").decode().splitlines()
    assert [line.split(",")[0] for line in record] == [*kept, "ray-1.dist-info/RECORD"]


WHEEL = {
    "pydantic/__init__.py": "VERSION = 'carried'",
    "pydantic-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: pydantic\nVersion: 1\n",
    "pydantic-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "pydantic-1.dist-info/RECORD": "",
}


@pytest.mark.parametrize("is_sound", [True, False], ids=["pip", "unzipped"])
def test_wheels_that_were_carried_are_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sound: bool
) -> None:
    (tmp_path / "whl").mkdir()
    files = {name: content for name, content in WHEEL.items() if is_sound or "dist-info" not in name}
    make_wheel(tmp_path / "whl" / "pydantic-1-py3-none-any.whl", files)
    monkeypatch.setattr(program, "CARRIED", tmp_path)
    monkeypatch.setattr(program, "NEEDED", ("sys", "no_such_package"))
    monkeypatch.setattr(program, "ROOT", ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("FIRST_QUARTER_SITE", str(tmp_path / "site"))
    found = program.install()
    assert found["how"] == "installed by pip" if is_sound else found["how"].startswith("unzipped, since pip failed: ")
    assert found["wheels"] == 1
    assert (tmp_path / "site" / "pydantic" / "__init__.py").read_text() == "VERSION = 'carried'"
    assert sys.path[:2] == [str(tmp_path / "site"), str(ROOT)]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), str(ROOT), "before"]
    assert program.install()["how"] == "already installed"
    monkeypatch.setattr(program, "NEEDED", ("sys",))
    assert program.install()["how"] == "nothing is missing"


def test_the_scripts_run_from_where_they_are_copied(tmp_path: Path) -> None:
    """As `.first_quarter/src/run.py`, without anything beside it."""
    copy = tmp_path / "src" / "run.py"
    copy.parent.mkdir()
    copy.write_text((FOLDER / "run.py").read_text())
    options = ["--device", "cpu", "--tiny", "--slow", "9", "--seconds", "900"]
    found, _ = measured([str(copy), "environment", *options], tmp_path / "out")
    assert found["steps"]["environment"]["status"] == "ok"
