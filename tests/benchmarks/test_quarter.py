"""benchmarks/gpu/quarter at tiny sizes on a CPU: each step has figures, and no step takes the others with it.

tests/fake_cuda has the code that only a GPU runs.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.quarter import commands, prepare
from benchmarks.gpu.quarter import run as program
from benchmarks.gpu.quarter.context import Context
from benchmarks.gpu.quarter.profiles import kind_of
from benchmarks.gpu.quarter.run import COMMANDS, STEPS
from benchmarks.gpu.quarter.steps import RUN

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu" / "quarter"
# Figures of each step, all of which differ from 0. CI runs these, and the nightly tests all of them.
FIGURES = {
    "environment": (),
    "packed_attention": ("0.5B_plain_enqueued_us",),
    "rows": ("rows128_tokens_per_second", "rows512_bandwidth_share", "rows256_prompt_tflops"),
}
NIGHTLY_FIGURES = {
    "draws": ("tested_planned_gib_fast_zero0",),
    "sft_05b": (
        "packed_tokens_per_second", "rows_mfu", "compiled_rows_tokens_per_second",
        "recorded_packed_tokens_per_second", "compiled_recorded_rows_mfu",
    ),
    "zero1_8b": ("tokens8192_mfu", "tokens65536_tokens_per_second"),
    "whole_8b": ("adapters_tokens_per_second", "offloaded_tokens_per_second"),
    "kept_steps": ("kept_planned_gib_fast_zero0",),
    "two_ranks": ("zero1_apart", "zero3_tokens_per_second", "team_equal_share", "broadcast_seconds"),
    "mixtures": ("training_mfu", "sampling_tokens_per_second", "sinks_training_mfu", "sinks_sampling_ms_per_token"),
    "continuous": ("tokens_per_second", "equal_share", "updates"),
    "peers": ("train_tokens_per_second", "heed_workload_tokens_per_second"),
    "tests": ("tests", "skipped"),
    "table": (),
}  # fmt: skip


def measured(command: list[str], out: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """The results of a run in a process of its own, and what it printed."""
    # An engine of another test has named this process's rank, and a port that it holds.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT", "PYTHONPATH")}
    kept |= {"OUT": str(out), "QUARTER_SITE": str(out / "site"), "OMP_NUM_THREADS": "1", **environment}
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
    where = json.loads((tmp_path / "results.json").read_text())["measured_on"]
    assert where["torch"].startswith("2.")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", where["date"])


@pytest.mark.nightly
def test_a_rehearsal_of_what_takes_long_measures(tmp_path: Path) -> None:
    steps = rehearsed(NIGHTLY_FIGURES, tmp_path)
    for iteration in (steps["draws"][f"tested_iteration_{number}"] for number in range(3)):
        phases = [iteration[f"{name}_seconds"] for name in ("sampling", "scoring", "policy_updates", "value_updates")]
        assert min(phases) > 0
        assert sum(phases) < iteration["seconds"]
        assert 0 < iteration["response_tokens"] <= 8
        assert iteration["response_tokens_per_second"] > 0
    assert steps["sft_05b"]["rows_losses"][0] == pytest.approx(6.24, abs=1.5)  # ln 512: random weights know nothing
    ranks = steps["two_ranks"]
    assert max(value for key, value in ranks.items() if key.endswith("_apart")) < 0.005
    assert (ranks["team_equal_share"], ranks["team_ranks_agree"], ranks["broadcast_wrong"]) == (1, True, 0)
    assert steps["tests"]["failed"] == {}


# Steps that go wrong in every way, between two that are well.
BROKEN = """
import os, time
from benchmarks.gpu.quarter import run, steps

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

steps.RUN |= {"environment": write, "rows": fail, "draws": hang, "mixtures": write}
steps.RUN["peers"] = lambda context: os.abort()
run.STEPS |= {"draws": run.Known(1, 1, ""), "whole_8b": run.Known(2000, 2000, "")}
run.main(["environment,rows,draws,peers,whole_8b,mixtures", "--device", "cpu", "--tiny", "--seconds", "900"])
"""


def test_a_step_that_goes_wrong_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    found, printed = measured(["-c", BROKEN], tmp_path)
    steps = found["steps"]
    assert steps["environment"]["status"] == steps["mixtures"]["status"] == "ok"
    assert steps["environment"]["tokens_per_second"] == "inf"
    assert steps["environment"]["losses"] == [1.2346]
    assert steps["environment"]["part_failed"] == "ValueError: of a part"
    assert steps["rows"]["status"].startswith("failed: ")
    assert steps["rows"]["status"].endswith("RuntimeError: of a step\n")
    assert steps["rows"]["found"] == 1.0
    assert steps["draws"]["status"] == "not finished within 1 s"
    assert steps["draws"]["before"] == 2
    assert 1 <= steps["draws"]["wall_seconds"] < 60
    assert steps["peers"]["status"] == "died of signal 6"
    assert list(steps["whole_8b"]) == ["not_started"]
    assert re.fullmatch(r"8\d\d s are left", steps["whole_8b"]["not_started"])
    assert "whole_8b: not started, 8" in printed
    assert list(steps) == ["environment", "rows", "draws", "peers", "whole_8b", "mixtures"]


def test_a_command_that_goes_wrong_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    step = commands.CommandStep(0.01, "cpu", True, tmp_path)
    assert step.run("heed", ["--help"]) == "not finished within 0 s"
    status = commands.CommandStep(60, "cpu", True, tmp_path).run("timeit", ["-n", "x"])
    assert status.startswith("ended with 1: ")
    assert status.endswith("ValueError: invalid literal for int() with base 10: 'x'")
    assert "-m timeit" in (tmp_path / "log.txt").read_text()
    monkeypatch.setattr(commands, "run_table", lambda _: 1 / 0)
    options = program.Options(("table",), inf, "cpu", True, 1.0, tmp_path)
    found = program.run_step("table", options)
    assert found["status"].endswith("ZeroDivisionError: division by zero\n")


def test_without_time_no_step_is_started(tmp_path: Path) -> None:
    options = program.Options(("environment",), 0, "cpu", True, 1.0, tmp_path)
    assert list(program.run_step("environment", options)) == ["not_started"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sft", "--device", "cpu", "--tiny"], "no step is named sft; some of environment, draws, "),
        (["rows", "--device", "cpu"], "--device cpu needs --tiny"),
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
    command = [sys.executable, str(FOLDER / "run.py"), "rows"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} is not the root of Heed's tree" in done.stderr


def test_the_list_names_the_steps_that_there_are() -> None:
    assert set(STEPS) == {*RUN, *COMMANDS} == {*FIGURES, *NIGHTLY_FIGURES}
    assert all(step.known and step.estimate < step.limit for step in STEPS.values())
    readme = (FOLDER / "README.md").read_text()
    rows = [f"| {name} | {step.estimate} | {step.limit} |" for name, step in STEPS.items()]
    assert re.findall(r"^\| [a-z0-9_]+ \| \d+ \| \d+ \|", readme, re.MULTILINE) == rows


def test_a_command_takes_what_an_earlier_one_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTER_SITE", str(tmp_path / "site"))
    monkeypatch.setattr(program, "ROOT", ROOT)
    assert program.parse([]).steps == tuple(STEPS)
    for name in ("environment", "draws", "whole_8b"):
        program.note_begun(name)
    left = program.parse([]).steps
    assert left == tuple(name for name in STEPS if name not in ("draws", "whole_8b"))
    assert left[:2] == ("environment", "sft_05b")  # each command names its card
    assert program.parse(["draws"]).steps == ("draws",)
    assert program.parse(["--device", "cpu", "--tiny"]).steps == tuple(STEPS)


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


def test_the_tree_that_is_carried_is_small_and_has_what_steps_read() -> None:
    """The rest of 60 MiB is for wheels, which take about 8."""
    paths = prepare.carried(prepare.tracked())
    assert sum((ROOT / path).stat().st_size for path in paths) < 12 * 2**20
    for path in ("benchmarks/gpu/quarter/run.py", "tests/gpu/test_rows.py", "configs/models/Qwen/Qwen2.5-0.5B.toml"):
        assert path in paths
    imported = {
        name.replace(".", "/")
        for path in (ROOT / "tests" / "gpu").glob("*.py")
        for name in re.findall(r"^from (tests\.\S+) import", path.read_text(), re.MULTILINE)
    }
    assert imported <= {path.removesuffix(".py") for path in paths}
    assert not any(path.startswith(("research/", "docs/")) for path in paths)


def test_more_than_can_be_carried_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_bytes(bytes(30))
    assert prepare.require_small(tmp_path) == 30
    monkeypatch.setattr(prepare, "MOST_BYTES", 29)
    with pytest.raises(ValueError, match=r"has 0\.0 MiB; at most 0 were expected"):
        prepare.require_small(tmp_path)


def test_wheels_have_the_versions_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pins = [prepare.pinned(name, constraints) for name in (*prepare.PACKAGES, "deepspeed")]
    assert all(pin in constraints.splitlines() for pin in pins)
    with pytest.raises(ValueError, match=r"constraints\.txt has no version of no-such"):
        prepare.pinned("no-such", constraints)


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
    (tmp_path / "wheels").mkdir()
    files = {name: content for name, content in WHEEL.items() if is_sound or "dist-info" not in name}
    make_wheel(tmp_path / "wheels" / "pydantic-1-py3-none-any.whl", files)
    monkeypatch.setattr(program, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(program, "NEEDED", ("sys", "no_such_package"))
    monkeypatch.setattr(program, "ROOT", ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("QUARTER_SITE", str(tmp_path / "site"))
    found = program.install()
    assert found["how"] == "installed by pip" if is_sound else found["how"].startswith("unzipped, since pip failed: ")
    assert found["wheels"] == 1
    assert (tmp_path / "site" / "pydantic" / "__init__.py").read_text() == "VERSION = 'carried'"
    assert sys.path[:2] == [str(tmp_path / "site"), str(ROOT)]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), str(ROOT), "before"]
    assert program.install()["how"] == "already installed"
    monkeypatch.setattr(program, "NEEDED", ("sys",))
    assert program.install()["how"] == "nothing is missing"
