"""The translation job at the smallest size, as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sacrebleu

from tests.heed.jobs.conftest import ROOT, HeedCommand

SIZES = {
    "world.num_translations": 150, "world.num_translations_heldout": 9, "sft.num_epochs": 2, "workers": 2,
    "model.hidden_size": 32, "model.intermediate_size": 64, "model.num_hidden_layers": 1,
    "model.num_encoder_layers": 1, "sft.translation_beams": 2,
}  # fmt: skip


def test_it_translates_its_heldout_sentences(heed: Callable[..., HeedCommand], tmp_path: Path) -> None:
    overrides = [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]
    job = str(ROOT / "research" / "jobs" / "translation.toml")
    command = heed("run", job, *overrides, "--runs", str(tmp_path))
    assert command.wait() == 0, command.output
    folder = tmp_path / "translation"
    assert "world" in json.loads((folder / "world" / "lineage.json").read_text())["data"]  # its file's hash
    pairs = [json.loads(line) for line in (folder / "world" / "data" / "translations_heldout.jsonl").open()]
    rows = [json.loads(line) for line in (folder / "sft" / "translations.jsonl").open()]
    assert [(row["source"], row["reference"]) for row in rows] == [(p["prompt"], p["completion"]) for p in pairs]
    found = json.loads((folder / "sft" / "results.json").read_text())["translation"]
    assert (found["num_sentences"], found["num_beams"]) == (9, 2)
    for decoding in ("greedy", "beam"):
        texts, references = [row[decoding] for row in rows], [[row["reference"] for row in rows]]
        assert found[decoding]["bleu"]["mean"] == pytest.approx(sacrebleu.corpus_bleu(texts, references).score)
        assert found[decoding]["chrf"]["mean"] == pytest.approx(sacrebleu.corpus_chrf(texts, references).score)
    page = (folder / "report.html").read_text()
    assert "beams − greedy" in page
    assert "tok:13a" in page
