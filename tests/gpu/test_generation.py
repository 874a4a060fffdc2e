"""Generation on a GPU: recorded steps are the eager ones, the CPU's tokens come out, and twice the same."""

from functools import partial
from typing import Any

import pytest
import torch

from lm.decoding import FixedSteps, StepKind
from lm.generation import Generated, generate
from lm.inspection import cache_bytes_per_token
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.source import RandomInit, load
from tests.gpu.models import SHAPES, pair, prompts, shape, tokens

NO_END: tuple[int, ...] = ()
NUM_PROMPTS, NUM_NEW = 12, 20


def sampled(model: LanguageModel, choice: Choice, steps: StepKind, **options: Any) -> Generated:
    return generate(
        model,
        prompts(NUM_PROMPTS, 30),
        max_new_tokens=NUM_NEW,
        choice=choice,
        seeds=range(NUM_PROMPTS),
        steps=steps,
        **{"end_ids": NO_END, "max_rows": 6, **options},
    )


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_the_cpus(name: str) -> None:
    """In fp32 without TF32, so that only close calls differ, and after one nothing is alike."""
    ours, theirs = pair(SHAPES[name])
    expected = sampled(ours, Choice(0.0), "eager").responses
    for steps in ("eager", "fixed"):
        found = sampled(theirs, Choice(0.0), steps).responses
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        assert same >= 0.9 * NUM_PROMPTS, f"{steps}: {same} of {NUM_PROMPTS} responses are the CPU's"


@pytest.mark.parametrize("end_ids", [NO_END, (7,)], ids=["no end", "ragged"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_twice_the_same_bits(name: str, end_ids: tuple[int, ...]) -> None:
    _, model = pair(SHAPES[name], torch.bfloat16)
    first, second = (sampled(model, Choice(), "auto", end_ids=end_ids) for _ in range(2))
    assert first == second
    assert all(0 < len(response) <= NUM_NEW for response in first.responses)


def test_recorded_steps_are_the_eager_ones() -> None:
    """In bf16: kernels for other shapes may round otherwise, so most tokens agree until the first close call."""
    _, model = pair(SHAPES["llama"], torch.bfloat16)
    eager, fixed = (sampled(model, Choice(), steps) for steps in ("eager", "fixed"))
    agreeing = [
        next((place for place, (a, b) in enumerate(zip(*pair_, strict=True)) if a != b), NUM_NEW)
        for pair_ in zip(eager.responses, fixed.responses, strict=True)
    ]
    assert sum(agreeing) / len(agreeing) > 0.5 * NUM_NEW
    for row, length in enumerate(agreeing):
        apart = torch.tensor(eager.logprobs[row][:length]) - torch.tensor(fixed.logprobs[row][:length])
        assert length == 0 or float(apart.abs().max()) < 0.1


def test_what_generation_took_is_given_back() -> None:
    _, model = pair(SHAPES["llama"], torch.bfloat16)
    sampled(model, Choice(), "auto")  # workspaces stay
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    sampled(model, Choice(), "auto")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**16


def test_steps_that_are_kept_are_recorded_once() -> None:
    """Rows leave and enter all the time; the second call records nothing, also with other weights in the same place."""
    model = load(RandomInit(partial(LanguageModel, shape(vocab_size=8)), seed=0)).to("cuda", torch.bfloat16)
    asked = [[place % 8 for place in row] for row in prompts(16, 30)]
    steps, recorded = FixedSteps(model), []
    for number in range(2):
        with torch.no_grad():
            model.head.weight.mul_(1.01)
        options: dict[str, Any] = {"max_new_tokens": 40, "end_ids": [7], "choice": Choice(), "max_rows": 8}
        seeds = range(16 * number, 16 * number + 16)
        found = generate(model, asked, seeds=seeds, steps=steps, **options)
        assert len({len(response) for response in found.responses}) > 2
        assert found == generate(model, asked, seeds=seeds, steps="fixed", **options)
        recorded.append(steps.num_recordings)
    assert recorded[0] == recorded[1] <= 2  # 8 rows with up to 64 columns, and with all


@pytest.mark.parametrize("steps", [pytest.param("eager", marks=pytest.mark.nightly), "fixed"])
def test_memory_is_that_of_one_cache(steps: StepKind) -> None:
    """A shape whose cache is far larger than its weights, logits and prompts; two lots of rows."""
    config = shape(num_hidden_layers=16, num_key_value_heads=4, head_dim=128, max_position_embeddings=640, vocab_size=8)
    model = load(RandomInit(partial(LanguageModel, config), seed=0)).to("cuda", torch.bfloat16)
    asked = [row[: 1 + place % 16] for place, row in enumerate((tokens(16, 16) % 8).tolist())]
    options: dict[str, Any] = {"max_new_tokens": 112, "end_ids": [7], "choice": Choice(), "max_rows": 8, "steps": steps}
    generate(model, asked, seeds=range(16), **options)  # cuBLAS keeps 32 MiB per stream on Hopper, as much as the cache
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    generate(model, asked, seeds=range(16), **options)
    cache = cache_bytes_per_token(config) * 8 * 128
    assert cache <= torch.cuda.max_memory_allocated() - before < 1.1 * cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_of_linear_layers_are_read_together_as_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 without a mask [B, P, P] in the layers with attention."""
    linear = shape(
        layer_types=("linear_attention", "full_attention"), linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, attn_output_gate=True,
    )  # fmt: skip
    _, model = pair(linear, dtype)
    asked = prompts(4, 30)
    together = partial(generate, model, max_new_tokens=1, end_ids=NO_END, choice=Choice(0.0), steps="eager")
    alone = [together([prompt], seeds=[0]).logprobs[0][0] for prompt in asked]  # one row has no padding, and no mask
    if dtype == torch.bfloat16:
        monkeypatch.delattr("lm.model.attention_mask")
        monkeypatch.delattr("lm.generation.attention_mask")
    found = [row[0] for row in together(asked, seeds=range(len(asked))).logprobs]
    assert found == pytest.approx(alone, abs=1e-5 if dtype == torch.float32 else 0.05)
