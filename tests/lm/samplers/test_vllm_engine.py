"""What vLLM is asked for, without vLLM: its engine is replaced by one that draws from PyTorch's generator, as vLLM does
for requests without a seed. tests/engines has the tests with vLLM.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm.samplers.vllm_engine import VLLMSampler


def generate(prompts: Sequence[Any], parameters: Sequence[Any], *, use_tqdm: bool) -> list[Any]:
    """As many tokens as are asked for, each row of them from the process's generator."""
    assert not use_tqdm
    assert [asked.seed for asked in parameters] == [None] * len(prompts)  # vLLM would draw these rows one by one
    found = []
    for asked in parameters:
        tokens = torch.randint(10, 1000, (asked.max_tokens,)).tolist()
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)]))
    return found


@pytest.fixture
def sampler() -> VLLMSampler:
    found: Any = VLLMSampler.__new__(VLLMSampler)
    found.end_ids = (0,)
    found._engine = SimpleNamespace(generate=generate)
    found._vllm = SimpleNamespace(
        TokensPrompt=dict, SamplingParams=lambda **fields: SimpleNamespace(**{"seed": None, **fields})
    )
    return found  # type: ignore[no-any-return]


def test_a_batch_has_one_seed_made_of_all(sampler: VLLMSampler) -> None:
    """The same seeds give the same tokens, whatever was drawn before; if one differs, all rows do."""

    def drawn(*seeds: int) -> list[list[int]]:
        return sampler.sample([[5], [6]], seeds, max_new_tokens=[8, 9], temperature=0.7).responses

    first = drawn(1, 2)
    assert [len(row) for row in first] == [8, 9]
    assert drawn(1, 2) == first
    for others in (drawn(1, 3), drawn(2, 1), drawn(12, 0)):
        assert not {tuple(row) for row in others} & {tuple(row) for row in first}
