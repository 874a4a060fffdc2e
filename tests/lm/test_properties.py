"""Properties that hold for every shape that the config allows, drawn by hypothesis."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from lm.config import ModelConfig, RopeScaling
from lm.encoder import EncoderDecoder, MaskedLanguageModel, SequenceClassifier, SpanPredictor, TokenClassifier
from lm.families import family_of
from lm.generation import Batch, generate
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import PURPOSES, load_model, save_model
from tests.examples import examples

CONTEXT = 24
EXAMPLES = examples(24, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
CLOSE = {"atol": 2e-4, "rtol": 1e-4}

SCALINGS = [
    None,
    RopeScaling(rope_type="linear", factor=3),
    RopeScaling(rope_type="llama3", factor=4, original_max_position_embeddings=10),
    RopeScaling(rope_type="yarn", factor=2, original_max_position_embeddings=12, beta_fast=16, beta_slow=2),
    RopeScaling(
        rope_type="yarn", factor=2, original_max_position_embeddings=5, attention_factor=1.3, llama_4_scaling_beta=0.5
    ),
]
CLASSIC: dict[str, Any] = {
    "mlp": "gelu", "mlp_bias": True, "attention_bias": "all", "qk_norm": False, "qk_norm_over": "head",
    "sliding_window": (0,),
    "positions": "learned", "rope_scaling": None, "query_pre_attn_scalar": 0, "rope_local_base_freq": 0,
    "partial_rotary_factor": 1, "norm": "layer", "scale_embedding": False,
}  # fmt: skip
NORMED_OUTPUTS = ["output", "sandwich"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "decoder": {**CLASSIC, "norm_place": "pre", "embedding_norm": False},
    "encoder": {**CLASSIC, "norm_place": "post", "embedding_norm": True, "type_vocab_size": 2},
    "encoder-decoder": {**CLASSIC, "norm_place": "post", "embedding_norm": True, "tie_word_embeddings": True},
}


@st.composite
def configs(draw: st.DrawFn, kind: str = "decoder", vocab_size: int = 11, published: bool = False) -> ModelConfig:
    """Draws any shape; with `published`, one that GPT-2, BERT or BART can have."""
    kv_heads, groups, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    positions = draw(st.sampled_from(["rotary", "learned", "sinusoidal"]))
    num_layers = draw(st.integers(1, 3))
    bands = st.lists(st.integers(0, CONTEXT), min_size=1, max_size=num_layers)
    values: dict[str, Any] = {
        "kind": kind,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
        "hidden_size": 2 * draw(st.integers(2, 8)),
        "num_hidden_layers": num_layers,
        "num_encoder_layers": draw(st.integers(1, 3)) if kind == "encoder-decoder" else 0,
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw(st.integers(1, 20)),
        "mlp": draw(st.sampled_from(["swiglu", "geglu", "relu2", "gelu", "gelu_tanh", "relu"])),
        "mlp_bias": draw(st.booleans()),
        "attention_bias": draw(st.sampled_from(["none", "qkv", "all"])),
        "qk_norm": (qk_norm := draw(st.booleans())),
        "qk_norm_over": draw(st.sampled_from(["head", "projection"])) if qk_norm else "head",
        "sliding_window": draw(bands) if kind == "decoder" else (0,),
        "positions": positions,
        "rope_scaling": draw(st.sampled_from(SCALINGS)) if positions == "rotary" else None,
        "query_pre_attn_scalar": draw(st.sampled_from([0, 5])),
        "norm": draw(st.sampled_from(["rms", "layer"])),
        "norm_place": draw(st.sampled_from(["pre", "post", *([] if kind == "encoder-decoder" else NORMED_OUTPUTS)])),
        "type_vocab_size": draw(st.integers(0, 3)) if kind == "encoder" else 0,
        "embedding_norm": draw(st.booleans()),
        "scale_embedding": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if positions == "rotary" and head_dim % 4 == 0:
        values["partial_rotary_factor"] = draw(st.sampled_from([0.5, 1]))
    if positions == "rotary" and any(values["sliding_window"]):
        values["rope_local_base_freq"] = draw(st.sampled_from([0, 70.0]))
    if positions == "rotary" and not published:
        values["layers_without_positions"] = draw(st.sampled_from([(), (0,), (num_layers - 1,)]))
        values["rope_interleave"] = not qk_norm and draw(st.booleans())
    if kind == "decoder" and not published:
        values |= {
            "attn_logit_softcapping": draw(st.sampled_from([0, 0, 1.5])),
            "final_logit_softcapping": draw(st.sampled_from([0, 2.0])),
            "logits_scaling": draw(st.sampled_from([1, 0.5])),
            "embedding_multiplier": draw(st.sampled_from([1, 1.5])),
            "residual_multiplier": draw(st.sampled_from([1, 0.5])),
        }
    if published:
        values |= {
            **PUBLISHED[kind],
            "num_key_value_heads": values["num_attention_heads"],
            "hidden_size": values["num_attention_heads"] * head_dim,
        }
    return ModelConfig.model_validate(values)


def random_model(config: ModelConfig, head: Any, **labels: Any) -> Any:
    """Moves every weight away from its default, and buffers too."""
    model = head(config, **labels)
    init_weights(model, 1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    for buffer in model.buffers():
        buffer.normal_(generator=generator)
    return model.eval()


tokens_of = st.lists(st.integers(0, 10), min_size=2, max_size=CONTEXT)
sources_of = st.lists(st.integers(0, 10), min_size=1, max_size=CONTEXT)
WRITERS = {"decoder": LanguageModel, "encoder-decoder": EncoderDecoder}


def draw_writer(data: st.DataObject, kind: str, num_rows: int) -> tuple[Any, list[list[int]] | None]:
    """Returns a model that generates, and what it reads for each row: None for a decoder-only model."""
    model = random_model(data.draw(configs(kind)), WRITERS[kind])
    if kind == "decoder":
        return model, None
    return model, data.draw(st.lists(sources_of, min_size=num_rows, max_size=num_rows))


def logits_alone(model: Any, tokens: list[int], source: list[int] | None) -> Tensor:
    """Returns [T, V], computed without a cache."""
    read = [] if source is None else [torch.tensor([source])]
    return model(*read, torch.tensor([tokens]))[0]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns tokens and segments, one sequence per row."""
    widest = max(map(len, rows))
    tokens = [[*row, *[0] * (widest - len(row))] for row in rows]
    segments = [[1] * len(row) + [0] * (widest - len(row)) for row in rows]
    return torch.tensor(tokens), torch.tensor(segments)


def packed(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns tokens and segments, with all sequences in one row and two tokens of padding."""
    tokens = [token for row in rows for token in row]
    segments = [index for index, row in enumerate(rows, start=1) for _ in row]
    return torch.tensor([[*tokens, 0, 0]]), torch.tensor([[*segments, 0, 0]])


@pytest.mark.parametrize("kind", WRITERS)
@EXAMPLES
@given(tokens=tokens_of, data=st.data())
@torch.no_grad()
def test_a_cache_changes_nothing(kind: str, tokens: list[int], data: st.DataObject) -> None:
    """Reads in two parts and then token by token, together with a longer and a shorter sequence."""
    model, sources = draw_writer(data, kind, 3)
    first = data.draw(st.integers(1, len(tokens) - 1))
    mates = [[7] * data.draw(st.integers(1, CONTEXT - len(tokens) + first)) for _ in range(2)]
    batch = Batch.start(model, [0, 1, 2], [mates[0], tokens[:first], mates[1]], len(tokens) - first, sources)
    for step, token in enumerate(tokens[first:], start=first):
        expected = logits_alone(model, tokens[:step], sources and sources[1])[-1]
        torch.testing.assert_close(batch.logits_BV[1], expected, **CLOSE)
        batch.feed(torch.tensor([3, token, 3]))


@pytest.mark.parametrize("kind", WRITERS)
@EXAMPLES
@given(prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), min_size=1, max_size=5), data=st.data())
@torch.no_grad()
def test_greedy_generation_takes_the_likeliest_token(kind: str, prompts: list[list[int]], data: st.DataObject) -> None:
    """With two rows at a time, sequences leave and enter; the logits of each response are recomputed separately."""
    model, sources = draw_writer(data, kind, len(prompts))
    num_new, end = CONTEXT - 9, data.draw(st.integers(0, 10))
    seeds = [0] * len(prompts)
    found = generate(
        model,
        prompts,
        max_new_tokens=num_new,
        end_ids=[end],
        choice=Choice(0),
        seeds=seeds,
        max_rows=2,
        sources=sources,
    )
    for row, (prompt, response) in enumerate(zip(prompts, found.responses, strict=True)):
        whole = logits_alone(model, prompt + response, sources and sources[row])
        logprobs = whole[len(prompt) - 1 : -1].log_softmax(dim=-1)
        chosen = logprobs[torch.arange(len(response)), response]
        torch.testing.assert_close(chosen, logprobs.max(dim=-1).values, **CLOSE)
        torch.testing.assert_close(chosen, torch.tensor(found.logprobs[row]), **CLOSE)
        assert end not in response[:-1]
        assert found.finished[row] == (response[-1] == end)
        assert found.finished[row] or len(response) == num_new


@pytest.mark.parametrize("kind", WRITERS)
@EXAMPLES
@given(tokens=tokens_of, data=st.data())
@torch.no_grad()
def test_no_token_changes_what_comes_before_it(kind: str, tokens: list[int], data: st.DataObject) -> None:
    model, sources = draw_writer(data, kind, 1)
    place = data.draw(st.integers(1, len(tokens) - 1))
    changed = [*tokens[:place], (tokens[place] + 1) % 11, *tokens[place + 1 :]]
    before, after = (logits_alone(model, row, sources and sources[0]) for row in (tokens, changed))
    assert torch.equal(before[:place], after[:place])
    assert not torch.equal(before[place], after[place])


@EXAMPLES
@given(config=configs(), rows=st.lists(tokens_of, min_size=2, max_size=4))
@torch.no_grad()
def test_a_decoder_reads_a_sequence_the_same_packed_padded_and_alone(
    config: ModelConfig, rows: list[list[int]]
) -> None:
    model = random_model(config, LanguageModel)
    alone = torch.cat([model(torch.tensor([row]))[0] for row in rows])
    torch.testing.assert_close(model(*packed(rows))[0, :-2], alone, **CLOSE)
    tokens, segments = padded(rows)
    torch.testing.assert_close(model(tokens)[segments > 0], alone, **CLOSE)


@EXAMPLES
@given(config=configs("encoder"), rows=st.lists(tokens_of, min_size=2, max_size=4))
@torch.no_grad()
def test_an_encoder_reads_a_sequence_the_same_packed_padded_and_alone(
    config: ModelConfig, rows: list[list[int]]
) -> None:
    model = random_model(config, MaskedLanguageModel)

    def logits(tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        return model(tokens, segments, token_types_BT=tokens % max(config.type_vocab_size, 1))

    alone = torch.cat([logits(torch.tensor([row]))[0] for row in rows])
    torch.testing.assert_close(logits(*packed(rows))[0, :-2], alone, **CLOSE)
    tokens, segments = padded(rows)
    torch.testing.assert_close(logits(tokens, segments)[segments > 0], alone, **CLOSE)


@EXAMPLES
@given(config=configs("encoder-decoder"), pairs=st.lists(st.tuples(sources_of, tokens_of), min_size=2, max_size=4))
@torch.no_grad()
def test_an_encoder_decoder_gives_a_pair_the_same_padded_and_alone(
    config: ModelConfig, pairs: list[tuple[list[int], list[int]]]
) -> None:
    model = random_model(config, EncoderDecoder)
    alone = torch.cat([logits_alone(model, target, source) for source, target in pairs])
    sources, source_segments = padded([source for source, _ in pairs])
    targets, target_segments = padded([target for _, target in pairs])
    together = model(sources, targets, source_segments)
    torch.testing.assert_close(together[target_segments > 0], alone, **CLOSE)
    torch.testing.assert_close(model(sources, targets, source_segments, target_segments > 0), alone, **CLOSE)


HEADS: list[tuple[str, Any, dict[str, Any]]] = [
    ("decoder", LanguageModel, {}),
    ("decoder", ScalarModel, {}),
    ("decoder", ScalarModel, {"labels": ("helpful", "harmless")}),
    ("encoder", MaskedLanguageModel, {}),
    ("encoder", SequenceClassifier, {"labels": ("good", "bad", "neither")}),
    ("encoder", TokenClassifier, {"labels": ("score",)}),
    ("encoder", SpanPredictor, {}),
    ("encoder-decoder", EncoderDecoder, {}),
]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(("kind", "head", "labels"), HEADS)
@EXAMPLES
@given(shards=st.booleans(), data=st.data())
@torch.no_grad()
def test_what_is_written_comes_back(
    tokenizer: Tokenizer,
    kind: str,
    head: Any,
    labels: dict[str, Any],
    published: bool,
    shards: bool,
    data: st.DataObject,
) -> None:
    config = data.draw(configs(kind, 288, published))
    assert family_of(config, PURPOSES[head]).model_type != "heed" or not published
    model = random_model(config, head, **labels)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), model, model.state_dict(), tokenizer, max_file_bytes=2_000 if shards else 10**9)
        assert len(list(Path(name).glob("*.safetensors"))) > 1 or not shards
        again = load_model(Path(name), head)
    assert again.config == model.config
    assert getattr(again, "labels", ()) == getattr(model, "labels", ())
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": (-1,)}, "negative entry"),
        ({"sliding_window": (0, 3, 4)}, "3 entries for 2 layers"),
        ({"sliding_window": ()}, "sliding_window"),
        ({"positions": "learned", "rope_scaling": SCALINGS[1]}, "but model.positions is 'learned'"),
        ({"positions": "sinusoidal", "hidden_size": 17, "head_dim": 4},
        "hidden_size is 17; sinusoidal positions need an even"),
        ({"head_dim": 5}, "head_dim is 5; rotary positions need an even number"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
    ],
)  # fmt: skip
def test_impossible_shapes_are_refused(tiny_config: ModelConfig, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate({**tiny_config.model_dump(exclude={"head_dim"}), **change})


def test_equal_shapes_are_equal_configs(tiny_config: ModelConfig) -> None:
    values = {**tiny_config.model_dump(), "num_hidden_layers": 4}
    one, other = (
        ModelConfig.model_validate({**values, "sliding_window": windows}) for windows in ((0, 8), (0, 8, 0, 8))
    )
    assert one == other
    assert ModelConfig.model_validate({**values, "sliding_window": (0, 8, 0)}) != one
