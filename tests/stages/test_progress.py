"""What commands print."""

import pytest
from rich.table import Table

from stages.progress import results_console


def test_a_table_in_a_pipe_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"FuseChat-Llama-3.1-8B-Instruct-tuned-on-ultrafeedback-armorm-{index}" for index in range(5)]
    table = Table(*(f"column {index}" for index in range(5)), box=None)
    table.add_row(*names)
    results_console().print(table)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["column", "0", "column", "1", "column", "2", "column", "3", "column", "4"]
    assert row.split() == names
