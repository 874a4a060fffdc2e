"""Generation against a naive twin that recomputes everything for each token of each sequence separately."""

import bisect
import copy
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm import decoding, generation
from lm.decoding import StepKind
from lm.generation import Generated, Limits, Partial, generate, generate_in_rounds, stream
from lm.inspection import cache_bytes_per_token
from lm.model import LanguageModel
from lm.native import operators
from lm.sampling import Choice, token_logprobs
from tests.lm.conftest import DECODERS, small_decoder
from tests.tiers import in_ci

END = 3


def kept(weights: list[float], top_k: int, top_p: float) -> list[float]:
    """Returns the probabilities that top_k and top_p keep; the others become 0."""
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]
    whole, before, stays = sum(weights[token] for token in ranked), 0.0, set()
    for token in ranked:
        if before < top_p * whole:
            stays.add(token)
        before += weights[token]
    return [weight if token in stays else 0.0 for token, weight in enumerate(weights)]


@functools.cache
@torch.no_grad()
def naive(
    model: LanguageModel, prompt: tuple[int, ...], max_new_tokens: int, choice: Choice, seed: int
) -> tuple[list[int], bool]:
    """One sequence without cache or padding: inverts the cumulative distribution at the seed's uniform draws."""
    uniforms = np.random.Generator(np.random.Philox(key=seed)).random(max_new_tokens, dtype=np.float32)
    tokens = list(prompt)
    for uniform in uniforms:
        logits = model(torch.tensor([tokens]))[0, -1].double()
        if choice.temperature == 0:
            token = max(range(len(logits)), key=lambda i: float(logits[i]))
        else:
            weights = kept(((logits - logits.max()) / choice.temperature).exp().tolist(), choice.top_k, choice.top_p)
            token = bisect.bisect_right(list(itertools.accumulate(weights)), float(uniform) * sum(weights))
        tokens.append(token)
        if token == END:
            return tokens[len(prompt) :], True
    return tokens[len(prompt) :], False


PROMPTS = [[5], [1, 2, 4, 6, 7], [9, 9], [0, 11, 10], [3, 3, 8], [7, 1, 0, 2, 5, 5, 6, 4]]
SEEDS = [101, 7, 7, 2**62, 55, 9]


def sample(
    model: LanguageModel, prompts: Sequence[Sequence[int]] = PROMPTS, seeds: Sequence[int] = SEEDS,
    max_new_tokens: Limits = 14, choice: Choice = Choice(), max_rows: int = 128, end_ids: Sequence[int] = (END,),  # noqa: B008 - frozen
    stop: Callable[[Sequence[int]], bool] = lambda _: False,
) -> Generated:  # fmt: skip
    return generate(
        model, prompts, max_new_tokens=max_new_tokens, end_ids=end_ids, choice=choice, seeds=seeds, max_rows=max_rows,
        stop=stop,
    )  # fmt: skip


CHOICES = [Choice(), Choice(0.7), Choice(0), Choice(1.3, top_k=4), Choice(1, top_p=0.6), Choice(2, top_k=6, top_p=0.8)]


@pytest.mark.parametrize("choice", in_ci(CHOICES, [CHOICES[0], CHOICES[2], CHOICES[5]]), ids=str)
def test_generation_equals_its_naive_twin(decoder: LanguageModel, choice: Choice) -> None:
    found = sample(decoder, choice=choice)
    expected = [naive(decoder, tuple(p), 14, choice, s) for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert found.responses == [response for response, _ in expected]
    assert found.finished == [finished for _, finished in expected]


@pytest.mark.parametrize("max_rows", in_ci([1, 2, 3, 5], [3]))
def test_waiting_sequences_enter_and_get_what_they_would_alone(decoder: LanguageModel, max_rows: int) -> None:
    prompts, seeds = PROMPTS * 3, range(40, 58)
    found = sample(decoder, prompts, seeds, max_rows=max_rows)
    expected = [naive(decoder, tuple(p), 14, Choice(), s) for p, s in zip(prompts, seeds, strict=True)]
    assert found.responses == [response for response, _ in expected]
    assert found.finished == [finished for _, finished in expected]
    # The point of this test: sequences end at different steps, and not all of them end before the limit.
    assert len({len(response) for response in found.responses}) > 2
    assert any(found.finished)


@pytest.mark.parametrize("steps", ["eager", "fixed"])
@pytest.mark.parametrize("num_steps", [1, 3, 20])
def test_responses_sampled_in_rounds_are_those_sampled_whole(
    llama: LanguageModel, steps: StepKind, num_steps: int
) -> None:
    """Three rows, which others enter as they become free; halfway, all are read again into a new cache."""
    prompts, seeds = PROMPTS * 2, range(40, 52)
    whole = sample(llama, prompts, seeds)
    waiting = [Partial(*numbered) for numbered in zip(range(12), prompts, seeds, strict=True)]
    partials, running, ended, stops = [*waiting], list[Partial](), list[Partial](), [5, 12]

    def next_round(found: Sequence[Partial]) -> Sequence[Partial] | None:
        for partial in found:
            running.remove(partial)
        ended.extend(found)
        if len(ended) >= stops[0]:
            return None
        entering = [waiting.pop(0) for _ in range(min(3 - len(running), len(waiting)))]
        running.extend(entering)
        again, resumed[:] = [*resumed], []
        return [*again, *entering]

    while stops:
        resumed = [*running]
        generate_in_rounds(
            llama, next_round, num_steps=num_steps, num_rows=3, num_columns=8 + 14, max_new_tokens=14, end_ids=(END,),
            choice=Choice(), steps=steps,
        )  # fmt: skip
        stops.pop(0)
    assert [partial.tokens for partial in partials] == whole.responses
    assert [partial.is_finished for partial in partials] == whole.finished
    for partial, logprobs in zip(partials, whole.logprobs, strict=True):
        assert partial.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert not running


def test_each_prompt_may_have_a_limit_of_its_own(decoder: LanguageModel) -> None:
    """A response with a lower limit is the beginning of what it would be, and the context need only hold that."""
    limits, whole = [1, 3, 14, 5, 2, 14], sample(decoder)
    found = sample(decoder, max_new_tokens=limits)
    for row, limit in enumerate(limits):
        assert found.responses[row] == whole.responses[row][:limit]
        assert found.finished[row] == (END in whole.responses[row][:limit])
    room = decoder.config.max_position_embeddings
    longest = [[5] * (room - 2), [7]]
    found = sample(decoder, longest, [1, 2], max_new_tokens=[2, 14], end_ids=())
    assert [len(response) for response in found.responses] == [2, 14]
    with pytest.raises(ValueError, match=f"prompt 0 has {room - 2} tokens; 1 to {room - 14} were expected"):
        sample(decoder, longest, [1, 2], max_new_tokens=14)


def test_streams_that_take_turns_give_what_each_prompt_gets_alone(decoder: LanguageModel) -> None:
    streams = [
        stream(decoder, prompt, max_new_tokens=14, end_ids=[END], choice=Choice(), seed=seed)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    found = [list(tokens) for tokens in itertools.zip_longest(*streams)]  # a token of each in turn
    responses = [[token for token in column if token is not None] for column in zip(*found, strict=True)]
    alone = [sample(decoder, [prompt], [seed]).responses[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert responses == alone
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        next(stream(decoder, [], max_new_tokens=1, end_ids=[END], choice=Choice(), seed=0))


@pytest.mark.parametrize("max_rows", in_ci([4, 128], [4]))
@pytest.mark.parametrize("places", [[0, 0, 0, 1, 1, 1, 5, 5, 5, 2], [1, 5, 1, 2, 5, 1, 1, 5, 0, 1]], ids=str)
def test_samples_of_one_prompt_are_what_each_would_be_alone(
    decoder: LanguageModel, places: list[int], max_rows: int
) -> None:
    prompts, seeds = [PROMPTS[place] for place in places], range(70, 80)
    found = sample(decoder, prompts, seeds, max_rows=max_rows)
    expected = [naive(decoder, tuple(p), 14, Choice(), s) for p, s in zip(prompts, seeds, strict=True)]
    assert found.responses == [response for response, _ in expected]
    assert len({tuple(response) for response in found.responses}) > len(set(places))  # samples of one prompt differ


@pytest.mark.parametrize("steps", ["eager", "fixed"])
@pytest.mark.parametrize("max_rows", in_ci([3, 128], [3]))
def test_what_is_done_for_gpus_gives_the_same_samples(
    decoder: LanguageModel, steps: StepKind, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are read every few steps, while ended sequences idle; prompts are read one row and one part at a time."""
    expected = sample(decoder, PROMPTS * 3, range(18), max_rows=max_rows)
    monkeypatch.setitem(generation.STEPS_PER_READING, "cpu", 5)
    monkeypatch.setattr(generation, "reads_packed", lambda _: True)
    monkeypatch.setattr(decoding, "PROMPT_TOKENS", 8)
    read: list[int] = []
    hook = decoder.decoder.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    found = generate(
        decoder, PROMPTS * 3, max_new_tokens=14, end_ids=[END], choice=Choice(), seeds=range(18), max_rows=max_rows,
        steps=steps,
    )  # fmt: skip
    hook.remove()
    assert found.responses == expected.responses
    assert found.finished == expected.finished
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert max(read) == 8
    assert len(read) >= 3


def test_a_model_of_nan_ends_generation(llama: LanguageModel) -> None:
    broken = copy.deepcopy(llama)
    torch.nn.init.constant_(broken.head.weight, torch.nan)
    with pytest.raises(FloatingPointError, match="logits of token 0 of response 0 are not numbers"):
        sample(broken)


def rows_read(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """Counts the rows of more than one token that a stack of blocks reads while `run` runs."""
    counts: list[int] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0]) * (inputs[0].shape[1] > 1)))
    run()
    hook.remove()
    return sum(counts)


def test_equal_prompts_that_enter_together_are_read_once(llama: LanguageModel) -> None:
    prompts = [prompt for prompt in PROMPTS[1:] for _ in range(4)]
    read = lambda max_rows: rows_read(llama.decoder, lambda: sample(llama, prompts, range(20), max_rows=max_rows))  # noqa: E731
    assert read(128) == 5
    assert read(4) < 20  # waiting samples of a prompt enter in several groups, and each group reads the prompt
    assert read(1) == 20


@torch.no_grad()
@pytest.mark.parametrize("choice", [Choice(), Choice(0.7, top_k=3), Choice(0)], ids=str)
def test_logprobs_equal_those_of_a_fresh_pass(decoder: LanguageModel, choice: Choice) -> None:
    found = sample(decoder, choice=choice, max_rows=3)
    for prompt, response, logprobs in zip(PROMPTS, found.responses, found.logprobs, strict=True):
        logits = decoder(torch.tensor([[*prompt, *response]]))[0, len(prompt) - 1 : -1]
        expected = token_logprobs(logits, torch.tensor(response), choice.temperature or 1.0)
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_sample_does_not_depend_on_its_batch_mates(decoder: LanguageModel) -> None:
    together = sample(decoder)
    for index, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        assert sample(decoder, [prompt], [seed]).responses[0] == together.responses[index]
    order = [4, 0, 5, 2]
    some = sample(decoder, [PROMPTS[i] for i in order], [SEEDS[i] for i in order])
    assert some.responses == [together.responses[i] for i in order]


@pytest.mark.parametrize("choice", [Choice(1.5), Choice(1.5, top_k=5), Choice(1.5, top_p=0.7)], ids=str)
def test_samples_follow_the_distribution(llama: LanguageModel, choice: Choice) -> None:
    num_samples = 4000
    with torch.no_grad():
        weights = torch.softmax(llama(torch.tensor([[5, 8]]))[0, -1] / choice.temperature, dim=-1).tolist()
    left = kept(weights, choice.top_k, choice.top_p)
    found = sample(llama, [[5, 8]] * num_samples, range(num_samples), max_new_tokens=1, choice=choice, max_rows=4000)
    counts = np.bincount([response[0] for response in found.responses], minlength=12)
    for token, probability in enumerate(weight / sum(left) for weight in left):
        deviation = (probability * (1 - probability) / num_samples) ** 0.5
        assert abs(counts[token] / num_samples - probability) <= 5 * deviation, token


def test_a_stop_ends_a_response_behind_the_token_that_brings_it(llama: LanguageModel) -> None:
    free = sample(llama, end_ids=())
    found = sample(llama, end_ids=(), stop=lambda response: sum(response) >= 20)
    for whole, response, finished in zip(free.responses, found.responses, found.finished, strict=True):
        first = next((n for n in range(1, 15) if sum(whole[:n]) >= 20), None)
        assert response == whole[:first]
        assert finished == (first is not None)
    assert any(found.finished)


def test_generation_under_bf16_autocast_runs(llama: LanguageModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sample(llama, max_new_tokens=6)
    assert all(0 < len(response) <= 6 for response in found.responses)


def test_the_first_draw_never_takes_what_has_no_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    for uniform in (0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))):
        assert Choice().draw(logits, torch.full((2,), uniform))[0].tolist() == [1, 0]


@pytest.mark.parametrize("choice", [Choice(1, top_k=3), Choice(1, top_p=0.5), Choice(1)], ids=str)
def test_no_rounding_of_a_parallel_scan_draws_what_has_no_probability(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, running sums are rounded in varying order, so one may be less than the sum before it."""
    generator = torch.Generator().manual_seed(3)
    cumsum = torch.Tensor.cumsum

    def rounded(self: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.is_floating_point():
            return cumsum(self, dim)
        noise = torch.empty(self.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        return cumsum(self.double(), dim).mul(1 + 1e-6 * noise).to(self.dtype)

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded)
    monkeypatch.setattr(operators, "library", lambda: None)  # the CPU's kernel has no parallel scan
    logits = torch.randn(1, 300, generator=generator)
    logits[0, ::2] = -torch.inf
    logits[0, 100:] = -torch.inf
    uniforms = torch.cat([torch.rand(20_000, generator=generator), torch.tensor([0.0, 1 - 2**-24])])
    tokens, logprobs = choice.draw(logits.expand(len(uniforms), -1), uniforms)
    assert torch.isfinite(logprobs).all()
    likely = logits.softmax(dim=-1)[0]
    assert (likely[tokens] > 0).all()
    assert torch.equal(logprobs, likely.log()[tokens])
    exact = choice._left(likely[None].double())[0]
    shares = torch.bincount(tokens, minlength=300) / len(tokens)
    torch.testing.assert_close(shares, (exact / exact.sum()).float(), atol=0.02, rtol=0)


def test_logits_that_are_not_numbers_draw_a_token_of_the_vocabulary() -> None:
    logits = torch.full((2, 5), torch.nan)
    for choice in (Choice(1, top_k=3), Choice(1, top_p=0.5)):
        tokens, logprobs = choice.draw(logits, torch.tensor([0.0, 0.99]))
        assert ((tokens >= 0) & (tokens < 5)).all()
        assert torch.isnan(logprobs).all()


def test_prompts_without_room_are_refused(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 has 31 tokens; 1 to 30 were expected"):
        sample(llama, [[1], [1] * 31], [0, 1], max_new_tokens=10)
    with pytest.raises(ValueError, match=r"prompt 0 has 0 tokens"):
        sample(llama, [[]], [0], max_new_tokens=10)
    full = sample(llama, [[1] * 30], [0], max_new_tokens=10, end_ids=())
    assert len(full.responses[0]) == 10
    assert not full.finished[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1}, "temperature is -1; 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0; more than 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_impossible_choices_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Choice(**values)  # type: ignore[arg-type]


class LiveBytes(TorchDispatchMode):
    """Returns the peak bytes of tensors that were created during a call."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                size = tensor.untyped_storage().nbytes()
                self._seen.add(key)
                self.now += size
                weakref.finalize(tensor.untyped_storage(), self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return results

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("steps", ["eager", "fixed"])
def test_the_cache_is_allocated_once_and_holds_prompts_and_responses(
    steps: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows leave and enter continually, and only their tokens take memory that grows with the cache."""
    monkeypatch.setattr(operators, "library", lambda: None)
    monkeypatch.setattr(decoding, "COLUMNS", 4)
    config = DECODERS["llama"].model_copy(update={"num_hidden_layers": 16, "head_dim": 32, "num_key_value_heads": 4})
    model = small_decoder(config)
    rng, longest, num_new, max_rows = random.Random(0), 16, 24, 16
    prompts = [[rng.randrange(4, 12) for _ in range(rng.randrange(2, longest + 1))] for _ in range(3 * max_rows)]
    with LiveBytes() as live:
        found = generate(
            model, prompts, max_new_tokens=num_new, end_ids=[3], choice=Choice(), seeds=range(len(prompts)),
            max_rows=max_rows, steps=steps,
        )  # fmt: skip
    assert len({len(response) for response in found.responses}) > 10
    cache = cache_bytes_per_token(config, 4) * max_rows * (longest + num_new)
    assert cache < live.peak < 1.15 * cache, live.peak / cache
