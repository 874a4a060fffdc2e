"""Runs what a GPU should measure next, within a time limit, and keeps what was measured even if a step is killed.

    python3 benchmarks/gpu/quarter/run.py --seconds 430                # in the root of the tree: what fits, in order
    python3 benchmarks/gpu/quarter/run.py --seconds 295                # again on the same machine: what did not fit
    python3 benchmarks/gpu/quarter/run.py --device cpu --tiny          # a rehearsal without a GPU

Each step is a process with a time limit, and starts only if its estimate is left. Steps are forked after the libraries
are imported, so that happens only once. A crash of a step's CUDA context ends only that step. `$OUT/results.json` is
written after each step, and `$OUT/parts` has the figures of the step that is running.

This file uses the standard library alone until the wheels are installed.
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
WHEELS = ROOT / "wheels"  # what prepare.py downloaded
NEEDED = ("pydantic", "hjson", "einops", "msgpack", "cpuinfo", "deepspeed")  # what the wheels contain, by import name
RESERVED_SECONDS = 3  # for writing and printing the results
QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class Known:
    """A step: its estimate and limit in seconds, and what is known or expected of its figures."""

    estimate: int
    limit: int
    known: str


# In order of value. A step whose question is answered leaves this list. Shares are of an H200's data sheet; "measured"
# is h200.json (27 November 2026, torch 2.11).
STEPS = {
    "environment": Known(4, 30, "measured: 4.15 TB/s of copies, 25 us per launch; names the card of every figure"),
    "draws": Known(
        75, 120, "measured: scoring takes 4.4 s per iteration, 1.9 to 3.3 of them in the test of draws by arithmetic; "
        "expected: under .3 s of test since larger parts are tested at once",
    ),
    "sft_05b": Known(
        110, 210, "measured: 31% packed, 38% whole rows; compiled 157,000 tokens/s; prime-rl 23.7% (0.6B, H100); "
        "expected: compiled 42%, recorded 41%, both 50%",
    ),
    "rows": Known(
        40, 80, "measured: 86,000 tokens/s at 128 rows (22% of the bandwidth); expected: 220,000 at 512"
    ),
    "zero1_8b": Known(
        35, 80, "measured: 36% at 8,192 tokens per step; expected: 57% at 65,536; KempnerForge 57.8%, torchtitan 33 to "
        "39% (8B, H100)",
    ),
    "whole_8b": Known(
        90, 150, "never run; KempnerForge 10,471 tokens/s on one H200, torchtitan 6,667 per H100 compiled"
    ),
    "packed_attention": Known(
        5, 40, "measured: .55 ms of CPU per call of varlen_attn; expected: under .1 ms by the C++ operator, same kernel"
    ),
    "kept_steps": Known(
        60, 110, "measured: 1.49 ms per token with steps kept between calls, 2.22 recorded in each; expected: sampling "
        "in PPO 25% shorter",
    ),
    "two_ranks": Known(
        90, 180, "never run on CUDA; expected: losses of one rank within .5%, the same tokens, the same weights"
    ),
    "mixtures": Known(
        70, 120, "never run; NeMo Automodel 277 TFLOP/s per H100 on Qwen3-30B-A3B; expected: less"
    ),
    "continuous": Known(
        15, 60, "never run on CUDA; expected: 80,000 tokens/s, a little less than `rows` at 128, and most tokens equal"
    ),
    "peers": Known(
        70, 140, "measured: Transformers trains 79,050 and samples 3,860 tokens/s; nano-vllm's workload on an A800: "
        "17,700 by vLLM 0.10.2, 24,100 by nano-vllm-triton, x2.35 by bandwidth",
    ),
    "tests": Known(65, 120, "measured: 53 of 54 passed; expected: all"),
    "table": Known(120, 200, "never run; the table of `python -m benchmarks.gpu`, with deterministic steps"),
}  # fmt: skip
COMMANDS = ("tests", "table", "two_ranks")  # the steps of commands.py; steps.py has the others
# For each step, figures are printed if their name has one of these endings.
SHOWN = (
    "mfu", "tokens_per_second", "bandwidth_share", "ms_per_token", "peak_gib", "busy_share", "failures", "tests",
    "enqueued_us", "apart", "_failed",
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
    results["measured_on"] = measured_on(options.device)
    for name in options.steps:
        found = results["steps"][name] = run_step(name, options)
        if options.device == "cuda" and "status" in found:
            note_begun(name)
        results["seconds"] = round(time.monotonic() - STARTED, 1)
        write_json(options.out / "results.json", results)
    print_summary(results)


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps",
        nargs="?",
        default="",
        help=f"by commas (default: all not begun here yet): {', '.join(STEPS)}",
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="total time, the installation included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same code at tiny, meaningless sizes")
    parser.add_argument("--slow", type=float, default=1.0, help="multiply each step's time limit, for a rehearsal")
    given = parser.parse_args(arguments)
    begun = begun_before() if given.device == "cuda" else []
    steps = tuple(given.steps.split(",") if given.steps else [name for name in STEPS if name not in begun])
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        parser.error(f"no step is named {', '.join(unknown)}; some of {', '.join(STEPS)} expected")
    if not (ROOT / "benchmarks" / "gpu" / "quarter").is_dir():
        parser.error(f"{ROOT} is not the root of Heed's tree; start this command there")
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: the steps are sized for a GPU")
    out = Path(os.environ.get("OUT", ROOT / ".quarter" / "out")).resolve()
    return Options(steps, given.seconds, given.device, given.tiny, given.slow, out)


# --- what this machine has --------------------------------------------------------------------------------------------


def site() -> Path:
    """The folder for the wheels: `quarter` in the machine's temporary folder, or $QUARTER_SITE."""
    return Path(os.environ.get("QUARTER_SITE") or Path(tempfile.gettempdir()) / "quarter")


def begun_before() -> list[str]:
    """The steps that earlier commands have begun on this machine, all but `environment`."""
    return [name for name in read_json(site().with_suffix(".begun")) if name != "environment"]


def note_begun(name: str) -> None:
    path = site().with_suffix(".begun")
    write_json(path, {**read_json(path), name: time.strftime("%Y-%m-%d %H:%M:%S")})


def measured_on(device: str) -> dict[str, str]:
    """Card, driver, torch and date, without which a figure says nothing."""
    found = {"card": "none", "driver": "none"}
    if device == "cuda":
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=False)
        found = dict(zip(found, done.stdout.strip().split("\n")[0].split(", "), strict=True))
    version = getattr(sys.modules.get("torch"), "__version__", "missing")
    return {**found, "torch": str(version), "date": time.strftime("%Y-%m-%d")}


# --- before the steps -------------------------------------------------------------------------------------------------


def set_environment(device: str) -> None:
    """Sets the variables that libraries read when imported, here and in the processes that steps start."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "PYTHONUNBUFFERED": "1",
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
    noted = ROOT / "commit.txt"
    return noted.read_text(encoding="utf-8").strip() if noted.exists() else "unknown"


def install() -> dict[str, Any]:
    """Installs the carried wheels into `site()` and puts it on the path, if this Python lacks something.

    A second run finds the folder.
    """
    wheels, started, folder = sorted(WHEELS.glob("*.whl")), time.monotonic(), site()
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not wheels or not lacking:
        how = f"no wheels, and {', '.join(lacking)} missing" if lacking else "nothing is missing"
    else:
        how = "already installed" if (folder / "pydantic").exists() else _install(wheels, folder)
    paths = [str(folder), str(ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"how": how, "wheels": len(wheels), "seconds": round(time.monotonic() - started, 1)}


def _install(wheels: Sequence[Path], folder: Path) -> str:
    flags = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", "-q", *flags, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return "installed by pip"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
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

        import benchmarks.gpu.quarter.steps  # noqa: F401
    except Exception:
        traceback.print_exc()
        found["import_failed"] = traceback.format_exc()[-800:]
    return found | {"import_seconds": round(time.monotonic() - started, 1)}


# --- a step -----------------------------------------------------------------------------------------------------------


def run_step(name: str, options: Options) -> dict[str, Any]:
    """Returns a step's figures and its `status`: "ok" or what went wrong.

    If less than its estimate is left, it is not started, and `not_started` says how much time was left.
    """
    step = STEPS[name]
    started = time.monotonic()
    left = options.seconds - (started - STARTED) - RESERVED_SECONDS
    if left < step.estimate:
        return {"not_started": f"{left:.0f} s are left"}
    allowed = min(step.limit * options.slow, left)
    print(f"== {name}: {left:.0f} s left, {allowed:.0f} allowed", flush=True)
    status = _run_command(name, allowed, options) if name in COMMANDS else _run_forked(name, allowed, options)
    seconds = round(time.monotonic() - started, 1)
    print(f"== {name}: {status} after {seconds} s", flush=True)
    return {**read_json(options.parts / f"{name}.json"), "status": status, "wall_seconds": seconds}


def _run_command(name: str, allowed: float, options: Options) -> str:
    try:
        from benchmarks.gpu.quarter.commands import CommandStep, run_table, run_tests, run_two_ranks

        run = {"tests": run_tests, "table": run_table, "two_ranks": run_two_ranks}[name]
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

    from benchmarks.gpu.quarter.context import Context
    from benchmarks.gpu.quarter.steps import RUN
    from training.internals import use_supported_segments

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = Context(name, device, options.tiny, options.parts / f"{name}.json")
    if unsupported := use_supported_segments():
        context.note(expandable_segments_failed=unsupported)
    RUN[name](context)


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
    print(", ".join(f"{name} {value}" for name, value in results["measured_on"].items()))
    for name, found in results["steps"].items():
        print(
            f"{name}: {found.get('status') or 'not started, ' + found['not_started']}, {found.get('wall_seconds', 0)} s"
        )
        figures = {key: value for key, value in found.items() if key.endswith(SHOWN) and not isinstance(value, dict)}
        print("   " + json.dumps(figures)[:700])
        for key in sorted(key for key in found if "iteration_" in key):
            print(f"   {key} " + json.dumps(found[key])[:500])
        if "status" in found:
            print(f"   known: {STEPS[name].known}")
        if name == "tests":
            print("   " + json.dumps(found.get("failed"))[:2500])


if __name__ == "__main__":
    main()
