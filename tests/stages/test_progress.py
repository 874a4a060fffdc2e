"""What commands print."""

import time
from pathlib import Path

import pytest
from rich.table import Table

from stages.progress import POLL_SECONDS, StageProgress, follow, in_words, results_console
from tests.rows import jsonl


def test_a_table_in_a_pipe_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"FuseChat-Llama-3.1-8B-Instruct-tuned-on-ultrafeedback-armorm-{index}" for index in range(5)]
    table = Table(*(f"column {index}" for index in range(5)), box=None)
    table.add_row(*names)
    results_console().print(table)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["column", "0", "column", "1", "column", "2", "column", "3", "column", "4"]
    assert row.split() == names


def test_no_line_repeats_the_last_while_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stages.progress.LINE_EVERY_SECONDS", 0.0)
    progress = StageProgress("reward")
    for done in (10, 10, 10, 11):
        progress.update(done, 27, "loss 0.678")
    assert capsys.readouterr().err.splitlines() == ["reward: 10/27 loss 0.678", "reward: 11/27 loss 0.678"]


def test_steps_that_were_lost_are_not_shown(tmp_path: Path) -> None:
    """A resumed stage cuts its metrics to the step of its checkpoint, minutes after it has started."""
    metrics = tmp_path / "metrics.jsonl"

    def lines(steps: int) -> str:
        return jsonl({"step": step + 1, "num_steps": 283, "tokens_per_second": 1.0} for step in range(steps))

    metrics.write_text(lines(60))
    with follow("reward", tmp_path) as progress:
        time.sleep(3 * POLL_SECONDS)
        assert (progress.done, progress.total) == (0, 0)
        metrics.write_text(lines(40))
        end = time.monotonic() + 20
        while progress.done == 0 and time.monotonic() < end:
            time.sleep(0.1)
        assert (progress.done, progress.total) == (40, 283)


def test_failures_are_counted_by_kind_where_there_are_any() -> None:
    line = {"step": 1, "score": 0.25, "failures/unclear": 9.0, "failures/budget": 0.0, "tokens_per_second": 37.0}
    assert in_words(line) == "score 0.25  failures/unclear 9  37 tokens/s"
