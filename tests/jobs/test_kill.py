"""Kill a run at any time: it resumes and ends with the files of the run nobody touched, bit for bit."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NumSteps = Callable[[Path], int]

# Where the run is killed, in order; each is reached after another restart.
KILLS: dict[str, Callable[[Path, NumSteps], bool]] = {
    "pretrain, two steps after a checkpoint": lambda folder, steps: steps(folder / "pretrain") >= 7,
    "collect, while labels arrive": lambda folder, _: (folder / "labels.sqlite").exists(),
    "reward": lambda folder, steps: steps(folder / "reward") >= 5,
    "ppo": lambda folder, steps: steps(folder / "ppo") >= 2,
}


def test_a_run_killed_in_every_stage_ends_as_the_run_nobody_touched(
    started_run: tuple[Any, Path],
    run_debug: Callable[..., Any],
    hashes: Callable[[Path], dict[str, str]],
    num_steps: NumSteps,
    tmp_path: Path,
    request: Any,
) -> None:
    assert started_run[0].process.poll() in (None, 0)  # the two runs share the machine for a while
    folder = tmp_path / "debug"
    commands = []
    for where, is_reached in KILLS.items():
        command = run_debug(tmp_path)
        commands.append(command)
        while not is_reached(folder, num_steps):
            assert command.process.poll() is None, f"ended before {where}:\n{command.output}"
            time.sleep(0.005)
        command.kill_everything()
    last = run_debug(tmp_path)
    assert last.wait() == 0, last.output
    untouched = request.getfixturevalue("finished_run")
    assert hashes(folder) == hashes(untouched)
    # The logs hold every step once, as if nothing had happened; each stage was continued, none begun anew.
    for stage in ("pretrain", "sft", "reward", "ppo"):
        logs = []
        for run in (folder, untouched):
            lines = [json.loads(line) for line in (run / stage / "metrics.jsonl").read_text().splitlines()]
            logs.append([{k: v for k, v in line.items() if "second" not in k} for line in lines])
        assert logs[0] == logs[1], stage
    assert not (folder / "replaced").exists()
    for command in [*commands, last]:
        assert command.wait_until_gone() == [], "processes of a killed run are left"
