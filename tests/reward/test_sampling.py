"""Sampling a tiny policy: seeds, splits, and log-probabilities against a forward pass per token."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lm import sequence_logprobs as logprobs
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.sampling import LOGITS_AT_ONCE
from lm.sequence_logprobs import sequence_logprobs
from lm.tokenizer import Tokenizer
from lm.transfer import batches_of
from lm.weights import save_model
from reward.sampling import Sample, SamplingSpec, length_that_fits, sample_policy
from tests.models import load_language_model, load_scalar_model
from training.data import Prompt

WORDS = ["one", "red", "bird", "saw", "two", "green", "hills", "and", "sang"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes `policy`, `other` and `reward` model directories with random weights."""
    root = tmp_path_factory.mktemp("models")
    config = ModelConfig(
        vocab_size=280,
        max_position_embeddings=48,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 280, "chat")
    for seed, name in enumerate(("policy", "other")):
        model = LanguageModel(config)
        init_weights(model, seed)
        # All states lean in one direction, and so does the end token: about half the responses end.
        with torch.no_grad():
            model.decoder.embedding.weight[:, 0] = 0.5
            model.decoder.embedding.weight[tokenizer.end_id, 0] = 2.0
        save_model(root / name, model, model.state_dict(), tokenizer)
    reward = ScalarModel(config)
    init_weights(reward, 9)
    save_model(root / "reward", reward, reward.state_dict(), tokenizer)
    return root


@pytest.fixture(scope="module")
def spec(folder: Path) -> Callable[..., SamplingSpec]:
    base = SamplingSpec(folder / "policy", 3, 8, 0.8, 5, "fp32", str(folder / "other"), str(folder / "reward"))
    return lambda **changes: replace(base, **changes)


PROMPTS = [
    Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": " ".join(WORDS[: 1 + i])},), kind="")
    for i in range(8)
]


def same(ours: list[Sample], theirs: list[Sample]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt_id, a.index, a.response, a.num_tokens, a.finished) == (
            b.prompt_id, b.index, b.response, b.num_tokens, b.finished
        )  # fmt: skip
        assert a.log_ratio == pytest.approx(b.log_ratio, abs=1e-4)
        assert a.score == pytest.approx(b.score, abs=1e-4)


def test_samples_lie_prompt_after_prompt(spec: Callable[..., SamplingSpec]) -> None:
    found = sample_policy(spec(), PROMPTS)
    assert [(s.prompt_id, s.index) for s in found] == [(p.prompt_id, i) for p in PROMPTS for i in range(3)]
    assert len({s.response for s in found}) > 12
    assert {s.finished for s in found} == {True, False}
    assert all(s.num_tokens == 8 for s in found if not s.finished)
    assert all("<|" not in s.response for s in found)
    assert sample_policy(spec(), []) == []


def test_sampling_is_deterministic_and_independent_of_the_split(spec: Callable[..., SamplingSpec]) -> None:
    whole = sample_policy(spec(), PROMPTS)
    assert sample_policy(spec(), PROMPTS) == whole
    for cut in (1, 3, 7):
        same(sample_policy(spec(), PROMPTS[:cut]) + sample_policy(spec(), PROMPTS[cut:]), whole)
    reversed_order = {(s.prompt_id, s.index): s for s in sample_policy(spec(), PROMPTS[::-1])}
    same([reversed_order[s.prompt_id, s.index] for s in whole], whole)
    assert [s.response for s in sample_policy(spec(seed=6), PROMPTS)] != [s.response for s in whole]
    # More samples per prompt do not change the first ones.
    more = [s for s in sample_policy(spec(num_samples=5), PROMPTS) if s.index < 3]
    same(more, whole)


def test_log_ratio_is_zero_where_the_policy_is_the_reference(spec: Callable[..., SamplingSpec], folder: Path) -> None:
    found = sample_policy(spec(reference=str(folder / "policy")), PROMPTS)
    assert [s.log_ratio for s in found] == [0.0] * len(found)
    assert all(s.log_ratio != 0 for s in sample_policy(spec(), PROMPTS))


def test_log_ratio_and_score_against_forward_passes(spec: Callable[..., SamplingSpec], folder: Path) -> None:
    tokenizer = Tokenizer.load(folder / "policy")
    policy, other = load_language_model(folder / "policy"), load_language_model(folder / "other")
    reward = load_scalar_model(folder / "reward")
    # Greedy, so that the tokens are known: the most likely one at each step.
    for sample in sample_policy(spec(temperature=0.0, num_samples=1, reference=""), PROMPTS):
        prompt = tokenizer.encode_prompt(PROMPTS[int(sample.prompt_id[1:])].messages)
        tokens = list(prompt)
        with torch.no_grad():
            while len(tokens) < len(prompt) + 8 and (len(tokens) == len(prompt) or tokens[-1] != tokenizer.end_id):
                tokens.append(int(policy(torch.tensor([tokens]))[0, -1].argmax()))
            closed = tokens if tokens[-1] == tokenizer.end_id else [*tokens, tokenizer.end_id]
            score = float(reward(torch.tensor([closed]))[0, -1])
        assert sample.num_tokens == len(tokens) - len(prompt)
        assert sample.response == tokenizer.decode(tokens[len(prompt) :]).strip()
        assert sample.score == pytest.approx(score, abs=1e-4)
    # Ratios use the sampling temperature: they are recomputed for single tokens, which decode exactly.
    queries, responses = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]]
    ours = sequence_logprobs(policy, queries, responses, 0.8)
    theirs = sequence_logprobs(other, queries, responses, 0.8)
    for row in range(2):
        expected = [loop_logprob(model, queries[row], responses[row], 0.8) for model in (policy, other)]
        assert ours[row] - theirs[row] == pytest.approx(expected[0] - expected[1], abs=1e-4)


def loop_logprob(model: LanguageModel, query: list[int], response: list[int], temperature: float) -> float:
    """Σ log p with one forward pass per token and an explicit softmax."""
    total = 0.0
    for place, token in enumerate(response):
        with torch.no_grad():
            logits = model(torch.tensor([query + response[:place]]))[0, -1].double() / temperature
        total += float(logits[token]) - math.log(sum(math.exp(x) for x in logits.tolist()))
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_sequence_logprobs_against_a_loop(folder: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "batches_of", partial(batches_of, max_rows=3))  # several chunks, the last one short
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 600)  # two positions
    model = load_language_model(folder / "policy")
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(5, 280, (n,), generator=generator).tolist()  # noqa: E731
    queries, responses = [draw(1 + i) for i in range(7)], [draw(1 + (3 * i) % 5) for i in range(7)]
    found = sequence_logprobs(model, queries, responses, temperature)
    expected = [loop_logprob(model, q, r, temperature) for q, r in zip(queries, responses, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_what_is_not_asked_for_is_not_a_number(spec: Callable[..., SamplingSpec]) -> None:
    found = sample_policy(spec(reference="", reward=""), PROMPTS[:2])
    assert all(math.isnan(s.log_ratio) and math.isnan(s.score) for s in found)


def test_a_prompt_without_room_is_refused(spec: Callable[..., SamplingSpec]) -> None:
    with pytest.raises(ValueError, match="1 to 8 were expected: the context of 48 tokens less 40"):
        sample_policy(spec(max_new_tokens=40), PROMPTS)


def test_a_length_is_reduced_to_what_the_longest_prompt_leaves(folder: Path, spec: Callable[..., SamplingSpec]) -> None:
    policy = folder / "policy"
    longest = max(len(Tokenizer.load(policy).encode_prompt(prompt.messages)) for prompt in PROMPTS)
    assert length_that_fits([policy, folder / "other"], PROMPTS, 8) == 8
    length = length_that_fits([policy, folder / "other"], PROMPTS, 256)
    assert length == 48 - longest
    assert len(sample_policy(spec(max_new_tokens=length), PROMPTS)) == 3 * len(PROMPTS)
    with pytest.raises(ValueError, match=r"none were expected: .* less 256 for the response \(max_new_tokens\)"):
        sample_policy(spec(max_new_tokens=256), PROMPTS)
