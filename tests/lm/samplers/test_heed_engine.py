"""Heed's sampler: how many rows it samples at once, and when it keeps its recorded steps."""

from pathlib import Path

import pytest

from lm import decoding
from lm.decoding import FixedSteps
from lm.samplers import heed_engine
from lm.samplers.heed_engine import HeedSampler

PROMPTS = [[5, 6, 7], [6, 5], [9, 8, 7, 6], [5], [7, 7]]


def test_rows_wait_until_there_is_room(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows at once change no token."""
    asked = list[int]()
    original = decoding.rows_that_fit
    monkeypatch.setattr(decoding, "rows_that_fit", lambda *of: (asked.append(of[1]), original(*of))[1])
    found = [
        HeedSampler.load(untied, "fp32", max_rows=rows).sample(PROMPTS, range(5), max_new_tokens=6, temperature=1.0)
        for rows in (2, 0)
    ]
    assert asked == [2, 5]
    assert found[0].responses == found[1].responses


@pytest.mark.parametrize(("share", "is_kept"), [(1.0, True), (1e-9, False)])
def test_steps_are_kept_where_their_cache_is_small(
    untied: Path, monkeypatch: pytest.MonkeyPatch, share: float, is_kept: bool
) -> None:
    monkeypatch.setattr(decoding, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(heed_engine, "_memory_of", lambda _: 1 << 30)
    sampler = HeedSampler.load(untied, "fp32", kept_share=share)
    assert isinstance(sampler.steps, FixedSteps)
    recorded = []
    for _ in range(2):
        sampler.sample(PROMPTS, range(5), max_new_tokens=6, temperature=1.0)
        recorded.append(sampler.steps.num_recordings)
    assert (recorded[1] == recorded[0]) == is_kept
    assert (sampler.steps.num_bytes > 0) == is_kept
