"""From files to rows and batches, compared with the library alone."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from benchmarks.speed import input as measured
from lm.tokenizer import Tokenizer
from training.data import read_conversations, read_texts


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_heed_and_the_library_read_the_same_texts(tmp_path: Path) -> None:
    texts, demonstrations = measured.write_world(tmp_path, 30)
    tokenizer = Tokenizer.train(read_texts((texts,)), 300, "chat")
    found = {
        name: (ours(), alone())
        for name, ours, alone in measured.conversions(tmp_path, texts, demonstrations, tokenizer, 512)
    }
    stream, alone = found["texts to a stream"]
    assert stream == (alone + len(list(read_texts((texts,))))) // 512 * 512  # an end each; the last row is not full
    turns = sum(len(messages) for _, messages in read_conversations((demonstrations,)))
    packed, alone = found["demonstrations to packed rows"]
    assert alone < packed <= alone + 3 * turns  # a role and an end each, and the space before a turn


def test_a_step_waits_less_than_it_takes() -> None:
    for name, runs in measured.wait(1, 1, time.process_time).items():
        assert 0 < runs[0]["fetch"] < 0.5 * runs[0]["step"], name


def test_the_tables_by_hand() -> None:
    machine = {"cpu": "a CPU", "cores": 2, "amx_bf16": True, "python": "3.11", "torch": "2.13.0"}
    runs = [{"heed": 2.0, "library": 1.0}, {"heed": 4.0, "library": 2.0}, {"heed": 1.0, "library": 1.0}]
    found: dict[str, Any] = {
        "machine": machine, "threads": 2, "seconds": "seconds", "rounds": 3,
        "convert": {"texts": {"tokens": 1000, "library_tokens": 1000, "runs": runs}},
        "wait": {"SFT": [{"fetch": 0.001, "step": 0.1}, {"fetch": 0.003, "step": 0.1}, {"fetch": 0.002, "step": 0.1}]},
    }  # fmt: skip
    lines = measured.markdown(found).splitlines()
    assert "| texts | 500 | 1,000 | 0.50 (0.50 to 1.00) |" in lines
    assert "| SFT | 100.0 | 2.00 | 2.00% (1.00% to 3.00%) |" in lines
