"""Runs a list of steps on one GPU within a time limit, and keeps what was measured even if a step or the run is killed.

    python3 benchmarks/gpu/first_quarter/run.py first --seconds 430       # in the root of Heed's tree
    python3 benchmarks/gpu/first_quarter/run.py second --seconds 295      # then, on the same machine
    python3 benchmarks/gpu/first_quarter/run.py first --device cpu --tiny # a rehearsal without a GPU

Each step is a process with a time limit, and starts only if enough time is left. Steps are forked after the libraries
are imported, so that happens only once. A crash of a step's CUDA context ends only that step. `$OUT/results.json` is
written after each step, and `$OUT/parts` has the figures of the step that is running.

This file uses the standard library alone until the wheels are installed. It also runs as a copy elsewhere.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
ROOT = Path.cwd()
CARRIED = ROOT / ".first_quarter"  # what prepare.sh made
NEEDED = (  # what the wheels contain, by import name
    "pydantic", "sqlalchemy", "alembic", "tomli_w", "tenacity", "hjson", "jsonschema", "attrs", "datasets", "einops",
    "msgpack", "cpuinfo", "requests", "httpx", "gguf", "ray", "deepspeed",
)  # fmt: skip
RESERVED_SECONDS = 3  # for writing and printing the results

# Seconds on an H200 as measured (`ppo_modes` and `rows`: estimated), and the limit.
LIMITS: dict[str, tuple[int, int]] = {
    "environment": (4, 30),
    "kernels": (12, 45),
    "tests": (65, 120),
    "sft_05b": (16, 60),
    "generation_05b": (19, 60),
    "ppo_05b": (47, 90),
    "chain": (159, 190),
    "sft_13b": (14, 45),
    "attention": (2, 40),
    "checkpoint": (18, 45),
    "peers": (17, 45),
    "compiled": (42, 110),
    "zero": (50, 100),
    "ppo_modes": (125, 180),
    "generation_13b": (9, 40),
    "sft_8b": (10, 45),
    "generation_8b": (12, 60),
    "smollm2": (118, 150),
    "rows": (120, 200),
}
COMMANDS = ("tests", "chain", "smollm2", "rows")  # the steps of commands.py; steps.py has the others
PLANS = {
    "first": "environment,kernels,tests,sft_05b,generation_05b,ppo_05b,chain,sft_13b,attention,checkpoint,peers",
    "second": "compiled,zero,ppo_modes,generation_13b,sft_8b,generation_8b,peers,checkpoint",
    "third": "smollm2",
    "again": "environment,tests,compiled,ppo_05b,ppo_modes,rows",
}
# For each step, figures are printed if their name has one of these endings.
SHOWN = (
    "mfu", "tokens_per_second", "bandwidth_share", "ms_per_token", "peak_gib", "step_busy_share", "failures", "tests",
    "_failed",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The command line, and where results go."""

    steps: tuple[str, ...]
    seconds: float  # in total, the installation included
    device: str
    tiny: bool
    slow: float  # multiplies every step's limit
    out: Path

    @property
    def parts(self) -> Path:
        """The folder with one file of figures per step."""
        return self.out / "parts"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    shutil.rmtree(options.parts, ignore_errors=True)
    options.parts.mkdir(parents=True)
    set_environment(options.device)
    results: dict[str, Any] = {"plan": ",".join(options.steps), "install": install(), "steps": {}}
    compile_kernels()
    results |= import_libraries()
    for name in options.steps:
        results["steps"][name] = run_step(name, options)
        results["seconds"] = round(time.monotonic() - STARTED, 1)
        write_json(options.out / "results.json", results)
    print_summary(results)


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help=f"{', '.join(PLANS)}, or steps separated by commas: {', '.join(LIMITS)}")
    parser.add_argument("--seconds", type=float, default=400.0, help="total time, the installation included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same code at tiny, meaningless sizes")
    parser.add_argument("--slow", type=float, default=1.0, help="multiply each step's time limit, for a rehearsal")
    given = parser.parse_args(arguments)
    steps = tuple(PLANS.get(given.plan, given.plan).split(","))
    unknown = [name for name in steps if name not in LIMITS]
    if unknown:
        parser.error(
            f"no step is named {', '.join(unknown)}; {', '.join(PLANS)}, or some of {', '.join(LIMITS)} expected"
        )
    if not (ROOT / "benchmarks" / "gpu" / "first_quarter").is_dir():
        parser.error(f"{ROOT} is not the root of Heed's tree; start this command there")
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: the steps are sized for a GPU")
    out = Path(os.environ.get("OUT", CARRIED / "out")).resolve()
    return Options(steps, given.seconds, given.device, given.tiny, given.slow, out)


# --- before the steps -------------------------------------------------------------------------------------------------


def set_environment(device: str) -> None:
    """Sets the variables that libraries read when imported, here and in the processes that steps start."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Checking for a GPU must not initialise CUDA, because forked processes could not use it afterwards.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    # A run's lineage takes the commit from git, but the tree may come without its history.
    os.environ.setdefault("HEED_CODE_VERSION", _commit())
    # Expandable segments avoid fragmentation by rows of different lengths. Heed sets this for Ray's workers, too.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if {*os.listdir("/sys/class/net")} <= {"lo"}:
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def _commit() -> str:
    noted = CARRIED / "src" / "commit.txt"
    return noted.read_text(encoding="utf-8").strip() if noted.exists() else "unknown"


def install() -> dict[str, Any]:
    """Installs the carried wheels into a separate folder on the path, if this Python lacks something.

    The folder is `site` in the machine's temporary folder, or $FIRST_QUARTER_SITE. A second run finds it.
    """
    wheels, started = sorted((CARRIED / "whl").glob("*.whl")), time.monotonic()
    site = Path(os.environ.get("FIRST_QUARTER_SITE") or Path(tempfile.gettempdir()) / "site")
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not wheels or not lacking:
        how = f"no wheels, and {', '.join(lacking)} missing" if lacking else "nothing is missing"
    else:
        how = "already installed" if (site / "pydantic").exists() else _install(wheels, site)
    paths = [str(site), str(ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"how": how, "wheels": len(wheels), "seconds": round(time.monotonic() - started, 1)}


def _install(wheels: Sequence[Path], site: Path) -> str:
    flags = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", "-q", *flags, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return "installed by pip"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for program in ("gcs/gcs_server", "raylet/raylet"):  # unzipping loses the permission to run them
        path = site / "ray" / "core" / "src" / "ray" / program
        if path.exists():
            path.chmod(0o755)
    return f"unzipped, since pip failed: {done.stderr[-300:]}"


def compile_kernels() -> None:
    """Starts compiling Heed's CPU kernels, which takes half a minute; comparisons with the CPU need them."""
    command = [sys.executable, "-c", "from lm.native.kernels import library; library()"]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def import_libraries() -> dict[str, Any]:
    """Imports what the steps need before they are forked. An error is a result too: Heed's commands may still run."""
    started, found = time.monotonic(), dict[str, Any]()
    try:
        import torch._dynamo  # noqa: F401  # attention over packed rows on a GPU needs it

        import benchmarks.gpu.first_quarter.steps  # noqa: F401
    except Exception:
        traceback.print_exc()
        found["import_failed"] = traceback.format_exc()[-800:]
    return found | {"import_seconds": round(time.monotonic() - started, 1)}


# --- a step -----------------------------------------------------------------------------------------------------------


def run_step(name: str, options: Options) -> dict[str, Any]:
    """Returns a step's figures and its `status`: "ok" or what went wrong.

    If less than half of its estimate is left, it is not started, and `not_started` says how much time was left.
    """
    estimate, limit = LIMITS[name]
    started = time.monotonic()
    left = options.seconds - (started - STARTED) - RESERVED_SECONDS
    if left < 0.5 * estimate:
        return {"not_started": f"{left:.0f} s are left"}
    allowed = min(limit * options.slow, left)
    print(f"== {name}: {left:.0f} s left, {allowed:.0f} allowed", flush=True)
    status = _run_command(name, allowed, options) if name in COMMANDS else _run_forked(name, allowed, options)
    seconds = round(time.monotonic() - started, 1)
    print(f"== {name}: {status} after {seconds} s", flush=True)
    return {**read_json(options.parts / f"{name}.json"), "status": status, "wall_seconds": seconds}


def _run_command(name: str, allowed: float, options: Options) -> str:
    try:
        from benchmarks.gpu.first_quarter.commands import CommandStep, run_chain, run_rows, run_smollm2, run_tests

        run = {"tests": run_tests, "chain": run_chain, "smollm2": run_smollm2, "rows": run_rows}[name]
        return run(CommandStep(allowed, options.device, options.tiny, options.out))
    except Exception:
        traceback.print_exc()
        return f"failed: {traceback.format_exc()[-700:]}"


def _run_forked(name: str, allowed: float, options: Options) -> str:
    error = options.parts / f"{name}.error"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            _measure(name, options)
            code = 0
        except BaseException:
            traceback.print_exc()
            error.write_text(traceback.format_exc()[-1500:], encoding="utf-8")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.setpgid(child, child)  # both processes do, since either may come first
    status = _wait(child, allowed)
    if status is None:
        return f"not finished within {allowed:.0f} s"
    if os.WIFSIGNALED(status):
        return f"died of signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return "ok" if not code else f"failed: {error.read_text(encoding='utf-8')[-700:] if error.exists() else code}"


def _wait(child: int, allowed: float) -> int | None:
    """Returns the child's exit status; None if it had to be killed, with all processes of its group."""
    end = time.monotonic() + allowed
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return status
            time.sleep(0.05)
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return None


def _measure(name: str, options: Options) -> None:
    """Runs a step in this process, which was forked for it."""
    import torch

    from benchmarks.gpu.first_quarter.context import Context
    from benchmarks.gpu.first_quarter.steps import STEPS
    from training.internals import use_supported_segments

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = Context(name, device, options.tiny, options.parts / f"{name}.json")
    if unsupported := use_supported_segments():
        context.note(expandable_segments_failed=unsupported)
    STEPS[name](context)


# --- results ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a file; {} if there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a file atomically, so that it is complete whenever this process is killed."""
    unfinished = path.with_suffix(".writing")
    unfinished.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    unfinished.replace(path)


def print_summary(results: dict[str, Any]) -> None:
    """Prints the main figures last, so that a log that keeps only its end still has them."""
    print(f"\n{results['install']} imports {results['import_seconds']} s, total {results['seconds']} s")
    for name, found in results["steps"].items():
        print(
            f"{name}: {found.get('status') or 'not started, ' + found['not_started']}, {found.get('wall_seconds', 0)} s"
        )
        figures = {key: value for key, value in found.items() if key.endswith(SHOWN) and not isinstance(value, dict)}
        print("   " + json.dumps(figures)[:700])
        for key in sorted(key for key in found if "iteration_" in key):
            print(f"   {key} " + json.dumps(found[key])[:500])
        if name in ("chain", "smollm2"):
            stages = {stage: part.get("stage_seconds") for stage, part in found.items() if isinstance(part, dict)}
            print("   " + json.dumps(stages))
        if name == "tests":
            print("   " + json.dumps(found.get("failed"))[:2500])


if __name__ == "__main__":
    main()
