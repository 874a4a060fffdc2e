"""The translation job at the smallest size, as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sacrebleu

from benchmarks.translation import main
from tests.heed.jobs.conftest import ROOT, HeedCommand

SIZES = {
    "world.num_translations": 150, "world.num_translations_heldout": 9, "sft.num_epochs": 2, "workers": 2,
    "model.hidden_size": 32, "model.intermediate_size": 64, "model.num_hidden_layers": 1,
    "model.num_encoder_layers": 1,
}  # fmt: skip


@pytest.mark.long
def test_it_translates_its_heldout_sentences(
    heed: Callable[..., HeedCommand], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]
    job = str(ROOT / "research" / "jobs" / "translation.toml")
    command = heed("run", job, *overrides, "--runs", str(tmp_path))
    assert command.wait() == 0, command.output
    folder = tmp_path / "translation"
    assert "world" in json.loads((folder / "world" / "lineage.json").read_text())["data"]  # its file's hash
    pairs = [json.loads(line) for line in (folder / "world" / "data" / "translations_heldout.jsonl").open()]
    main(folder / "sft" / "model", folder / "world" / "data" / "translations_heldout.jsonl", 2, 63, tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").open()]
    assert [(row["source"], row["reference"]) for row in rows] == [(p["prompt"], p["completion"]) for p in pairs]
    references = [[row["reference"] for row in rows]]
    bleu = sacrebleu.corpus_bleu([row["greedy"] for row in rows], references).score
    said = capsys.readouterr().out
    assert f"greedy          {bleu:.2f} (" in said
    assert "9 sentences; " in said
    assert "tok:13a" in said
