"""KL estimators against the sum over all responses and against each other; their intervals against planted KLs."""

import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measures_coverage import kl_coverage
from evaluation.measures import kl
from evaluation.measures.kl import Policy, draw, largest_shift, measure_kl, response_kls, summarise_kl
from lm.config import ModelConfig
from lm.generation import generate
from lm.model import LanguageModel, init_weights
from lm.sampling import LOGITS_AT_ONCE, Choice
from lm.sequence_logprobs import sequence_logprobs
from lm.tokenizer import Tokenizer
from lm.transfer import batches_by_length
from lm.weights import save_model
from reward.sampling import SamplingSpec, sample_policy
from training.data import Prompt

END, QUERY, LONGEST, HEAT = 0, [3, 1], 3, 0.7


def small_model(seed: int) -> LanguageModel:
    """A vocabulary of eight tokens, so that all 400 responses of up to three tokens can be enumerated."""
    config = ModelConfig(
        vocab_size=8,
        max_position_embeddings=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    model = LanguageModel(config)
    init_weights(model, seed)
    return model.eval()


@pytest.fixture(scope="module")
def pair() -> tuple[LanguageModel, LanguageModel]:
    return small_model(1), small_model(2)


def all_responses() -> list[list[int]]:
    """Returns every response of at most three tokens: those that end with the end token, and those that were cut
    off."""
    words = [token for token in range(8) if token != END]
    ended = [[*part, END] for length in range(LONGEST) for part in itertools.product(words, repeat=length)]
    return [*ended, *map(list, itertools.product(words, repeat=LONGEST))]


def exact_kl(pair: tuple[LanguageModel, LanguageModel], query: list[int]) -> float:
    """Returns the KL as the sum over every response."""
    responses = all_responses()
    ours, theirs = (np.array(sequence_logprobs(model, [query] * len(responses), responses, HEAT)) for model in pair)
    assert np.exp(ours).sum() == pytest.approx(1.0, abs=1e-5)  # no response is left out
    return float((np.exp(ours) * (ours - theirs)).sum())


def test_all_three_estimators_have_the_exact_mean(pair: tuple[LanguageModel, LanguageModel]) -> None:
    """The expectation over all responses, weighted by probability, is exactly the KL."""
    responses = all_responses()
    chance = np.exp(sequence_logprobs(pair[0], [QUERY] * len(responses), responses, HEAT))
    found = response_kls(*pair, [QUERY] * len(responses), responses, HEAT)
    exact = exact_kl(pair, QUERY)
    assert exact > 0.1
    for values in (found.k1_N, found.k3_N, found.full_N):
        assert float(chance @ values) == pytest.approx(exact, abs=1e-5)
    assert found.k1_N.min() < 0  # nothing is clamped
    assert found.k3_N.min() >= 0
    assert found.full_N.min() >= 0
    spread = [float(chance @ (values - exact) ** 2) for values in (found.full_N, found.k1_N)]
    assert spread[0] < spread[1]


def test_chunks_change_nothing(pair: tuple[LanguageModel, LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    responses = [[1, 2, 3], [4, END], [END], [2, 2]]
    queries = [[1], [2, 3, 4], [1, 1], [3]]
    whole = response_kls(*pair, queries, responses, 1.0)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 11)  # two positions
    monkeypatch.setattr(kl, "batches_by_length", partial(batches_by_length, max_rows=3))
    parts = response_kls(*pair, queries, responses, 1.0)
    for name in ("k1_N", "k3_N", "full_N"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6)
    ours, theirs = (sequence_logprobs(model, queries, responses, 1.0) for model in pair)
    np.testing.assert_allclose(whole.k1_N, np.subtract(ours, theirs), atol=1e-5)


def test_samples_estimate_the_exact_kl(pair: tuple[LanguageModel, LanguageModel]) -> None:
    queries = [[token, other] for token in range(1, 8, 2) for other in range(1, 8, 2)]
    rows = [query for query in queries for _ in range(50)]
    drawn = generate(
        pair[0], rows, max_new_tokens=LONGEST, end_ids=[END], choice=Choice(HEAT), seeds=list(range(len(rows)))
    )
    found = summarise_kl(response_kls(*pair, rows, drawn.responses, HEAT), np.arange(len(rows)) // 50)
    exact = np.mean([exact_kl(pair, query) for query in queries])
    # These are all prompts there are, so only the samples' noise is left; the interval over prompts includes it.
    for estimate in (found.full, found.k1, found.k3):
        assert estimate.low < exact < estimate.high
    assert abs(found.full.mean - exact) < abs(found.k1.high - found.k1.low) / 2
    assert (found.num_prompts, found.num_responses) == (16, 800)


def test_a_policy_is_no_distance_from_itself(pair: tuple[LanguageModel, LanguageModel]) -> None:
    found = response_kls(pair[0], pair[0], [QUERY] * 3, [[1, 2], [END], [4, 4, 4]], 1.0)
    assert np.abs(np.stack([found.k1_N, found.k3_N, found.full_N])).max() == 0


def test_intervals_are_over_prompts() -> None:
    """Fifty copies of a response are one piece of evidence."""
    once = np.array([0.5, 1.0, 2.0, 4.0])
    many = np.repeat(once, 50)
    alone, repeated = (
        summarise_kl(kl.ResponseKLs(values, values, values), prompts)
        for values, prompts in ((once, np.arange(4)), (many, np.arange(200) // 50))
    )
    assert repeated.k1.low == pytest.approx(alone.k1.low)
    half = 3.182446 * float(np.std(once, ddof=1)) / 2  # Student's t with 3 degrees of freedom
    assert alone.k1.high == pytest.approx(once.mean() + half, rel=1e-5)


def test_intervals_hold_planted_kls() -> None:
    for what, covered in kl_coverage(num_worlds=1_000, num_prompts=30, num_samples=3, seed=0).items():
        assert 0.92 <= covered.share <= 0.97, (what, covered)


def test_a_policy_of_a_folder_is_drawn_and_measured(
    tmp_path: Path, model_folder: Path, tokenizer: Tokenizer, tiny_config: ModelConfig
) -> None:
    other = LanguageModel(tiny_config)
    init_weights(other, seed=8)
    save_model(tmp_path, other, other.state_dict(), tokenizer)
    prompts = [Prompt(prompt_id=str(i), messages=({"role": "user", "content": "fox " * i},), kind="") for i in (3, 1)]
    policy, reference = Policy.load(model_folder), Policy.load(tmp_path)
    how = {"num_samples": 3, "max_new_tokens": 5, "temperature": 1.0, "seed": 4}
    drawn = draw(policy, prompts, **how)
    spec = SamplingSpec(policy=model_folder, precision="fp32", reference=str(tmp_path), **how)
    sampled = sample_policy(spec, prompts)
    assert drawn.texts == [sample.response for sample in sampled]
    assert drawn.finished == [sample.finished for sample in sampled]
    found = measure_kl(policy, reference, drawn)
    assert found.k1.mean == pytest.approx(np.mean([sample.log_ratio for sample in sampled]), abs=1e-4)
    assert (found.num_prompts, found.num_responses) == (2, 6)
    assert not math.isnan(found.full.low)


def test_refusals(pair: tuple[LanguageModel, LanguageModel], model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"responses\[1\] is empty"):
        response_kls(*pair, [[1], [1]], [[1], []], 1.0)
    policy = Policy.load(model_folder)
    prompt = Prompt(prompt_id="a", messages=({"role": "user", "content": "b"},), kind="")
    with pytest.raises(ValueError, match="temperature is 0"):
        draw(policy, [prompt], num_samples=1, max_new_tokens=2, temperature=0.0, seed=0)
    with pytest.raises(ValueError, match="8 tokens, the reference 288"):
        response_kls(pair[0], policy.model, [[1]], [[1]], 1.0)
    stranger = Tokenizer.train(["quite other words"], 270, "chat")
    with pytest.raises(ValueError, match="different vocabularies"):
        kl.require_same_vocabulary(policy, Policy(tmp_path, policy.model, stranger))


def test_no_judge_sees_more_than_the_kl_allows() -> None:
    """By enumeration: for random policies and judges, the win rate is within the bound, which is not vacuous."""
    generator = np.random.default_rng(5)
    limits = []
    for concentration in (0.3, 3.0, 300.0):
        for _ in range(50):
            p, q = generator.dirichlet([concentration] * 4, size=2)
            judge = np.triu(generator.integers(0, 2, (4, 4)), 1).astype(float)
            judge += np.tril(1 - judge.T, -1) + np.eye(4) / 2  # who is shown first does not matter
            limits.append(largest_shift(float((p * np.log(p / q)).sum()), 0.0))
            assert abs(p @ judge @ q - 0.5) <= limits[-1]
    assert min(limits) < 0.05
    assert largest_shift(0.5, 0.5) == pytest.approx(1.0)
    assert largest_shift(-0.1) == 0, "an estimate may be below 0"
    assert math.isnan(largest_shift(0.1, math.nan))
