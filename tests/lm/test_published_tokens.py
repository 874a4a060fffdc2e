"""No published model is refused for its special tokens, and a response ends at each token that ends one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

from lm.generation import generate
from lm.model import ScalarModel
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from reward.scoring import RewardModel
from tests.lm.published_tokens import CHATML, PUBLISHED, Published
from tests.models import load_language_model

TURNS = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Good day"}]


def vocabulary(specials: tuple[str, ...]) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in specials])
    return bpe


def write(folder: Path, published: Published) -> tokenizers.Tokenizer:
    """The tokenizer's and the model's files, as published, around a byte-level vocabulary."""
    bpe = vocabulary(published.specials)
    bpe.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {**published.tokens}
    if published.template is not None:
        config["chat_template"] = published.template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = transformers.LlamaConfig(
        vocab_size=bpe.get_vocab_size(), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=24, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(model).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if published.generation:
        ends = [bpe.token_to_id(name) for name in published.generation]
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ends if len(ends) > 1 else ends[0], "do_sample": True})
        )
    fields = {**json.loads((folder / "config.json").read_text())}
    fields |= {key: [bpe.token_to_id(name) for name in names] for key, names in published.config.items()}
    (folder / "config.json").write_text(json.dumps(fields))
    return bpe


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_loads_and_ends_where_its_files_say(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    bpe = write(tmp_path, published)
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_text(number) for number in tokenizer.end_ids] == list(published.stops)
    assert tokenizer.turn_end_id == bpe.token_to_id(published.closes or published.stops[0])

    tokens, is_response = tokenizer.encode_conversation(TURNS)
    response = [token for token, counted in zip(tokens, is_response, strict=True) if counted]
    assert response[-1] == tokenizer.turn_end_id, "the end of the response is learned"
    assert tokenizer.decode(response).strip().endswith("Good day")
    assert tokens[: len(tokenizer.encode_prompt(TURNS[:1]))] == tokenizer.encode_prompt(TURNS[:1])

    text = tokenizer.render(TURNS, add_generation_prompt=False)
    assert tokens == bpe.encode(text, add_special_tokens=False).ids, "as the published files encode it"

    if published.template is not None and not published.system:
        with_system = [{"role": "system", "content": "Be brief."}, *TURNS]
        if "raise_exception" in str(published.template):
            with pytest.raises(ValueError, match="chat_template"):
                tokenizer.encode_conversation(with_system)


def test_a_response_under_glms_template_ends_at_the_next_role_and_learns_no_end(tmp_path: Path) -> None:
    roles = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
    template = (
        "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokens = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    glm = Published(("<|endoftext|>", "[gMASK]", "<sop>", *roles), tokens, ends, template=template, generation=ends)
    bpe = write(tmp_path, glm)
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_text(number) for number in tokenizer.end_ids] == list(ends)
    conversation = [*TURNS, *TURNS]
    found, is_response = tokenizer.encode_conversation(conversation)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found == theirs.apply_chat_template(conversation, return_dict=False)
    learned = [token for token, counted in zip(found, is_response, strict=True) if counted]
    assert bpe.decode(learned, skip_special_tokens=False) == "Good dayGood day"


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-0.5B", "openai-community/gpt2"])
def test_what_heed_writes_has_the_same_ends_for_heed_and_transformers(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    bpe = write(source, published)
    tokenizer = Tokenizer.load(source)
    model = load_language_model(source)
    save_model(copy, model, model.state_dict(), tokenizer)
    again = Tokenizer.load(copy)
    assert (again.end_ids, again.pad, again == tokenizer) == (tokenizer.end_ids, tokenizer.pad, True)
    theirs = transformers.GenerationConfig.from_pretrained(copy).eos_token_id if len(again.end_ids) > 1 else None
    one = transformers.AutoConfig.from_pretrained(copy).eos_token_id
    assert (theirs or one) == (list(again.end_ids) if len(again.end_ids) > 1 else again.end_id)
    padded = published.tokens.get("pad_token")
    assert transformers.AutoTokenizer.from_pretrained(copy).pad_token == padded
    assert transformers.AutoConfig.from_pretrained(copy).pad_token_id == (bpe.token_to_id(padded) if padded else None)


@pytest.mark.parametrize(
    ("start", "ends"), [("<|endoftext|>", ["<|im_end|>"]), ("<|im_start|>", ["<|im_end|>", "<|endoftext|>"])]
)
def test_transformers_reads_the_tokens_of_the_source_from_a_written_folder(
    tmp_path: Path, start: str, ends: list[str]
) -> None:
    """The start token, whose number may be 0, and as many end tokens as the source's generation_config.json names."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    published = replace(PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"], generation=tuple(ends))
    bpe = write(source, published)
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token_id": bpe.token_to_id(start)}))
    model, tokenizer = load_language_model(source), Tokenizer.load(source)
    save_model(copy, model, model.state_dict(), tokenizer)
    expected = [bpe.token_to_id(name) for name in ends]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(copy)
    found = loaded.generation_config.eos_token_id
    assert sorted(found if isinstance(found, list) else [found]) == sorted(expected)
    assert loaded.generation_config.bos_token_id == loaded.config.bos_token_id == bpe.token_to_id(start)
    assert (copy / "generation_config.json").is_file()

    # What is generated ends at the first of these tokens, wherever the model draws one.
    torch.manual_seed(0)
    rows = loaded.generate(torch.arange(40)[:, None], do_sample=True, max_new_tokens=60, pad_token_id=0)[:, 1:].tolist()
    stopped = [row for row in rows if set(row) & set(expected)]
    assert stopped
    for row in stopped:
        first = next(place for place, token in enumerate(row) if token in expected)
        assert set(row[first + 1 :]) <= {0}
    again = Tokenizer.load(copy)
    assert (again.bos_id, again.end_ids) == (tokenizer.bos_id, tokenizer.end_ids)


def test_the_written_start_token_may_have_number_0(tmp_path: Path) -> None:
    """GPT-2's kind of vocabulary, with one token that starts and ends a text, and that token first."""
    bpe = tokenizers.Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2}, []))
    bpe.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(bpe, end="<s>", start="<s>", chat_template="{{ messages[0].content }}")
    tokenizer.save(tmp_path)
    assert transformers.GenerationConfig.from_pretrained(tmp_path).bos_token_id == 0
    assert Tokenizer.load(tmp_path).bos_id == 0


def test_a_response_stops_at_each_end_token(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"])
    tokenizer, model = Tokenizer.load(tmp_path), load_language_model(tmp_path).eval()
    prompts = [[number] for number in range(40)]
    common: dict[str, Any] = {"max_new_tokens": 60, "choice": Choice(), "seeds": range(40)}
    free = generate(model, prompts, end_ids=(), **common).responses
    found = generate(model, prompts, end_ids=tokenizer.end_ids, **common)
    ends = set(tokenizer.end_ids)
    for unbounded, response, finished in zip(free, found.responses, found.finished, strict=True):
        first = next((place for place, token in enumerate(unbounded) if token in ends), None)
        assert finished == (first is not None)
        assert response == (unbounded if first is None else unbounded[: first + 1])
    assert (
        len({response[-1] for response, finished in zip(found.responses, found.finished, strict=True) if finished}) > 1
    )


@pytest.mark.parametrize(
    "name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen2.5-0.5B"]
)
def test_transformers_reads_a_score_where_heed_does_although_texts_end_with_the_padding(
    tmp_path: Path, name: str
) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    write(source, PUBLISHED[name])
    tokenizer, base = Tokenizer.load(source), load_language_model(source)
    assert tokenizer.pad_id in tokenizer.end_ids
    torch.manual_seed(1)
    ours = ScalarModel(base.config).eval()
    torch.nn.init.normal_(ours.score.weight)
    save_model(copy, ours, ours.state_dict(), tokenizer)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(copy).eval()
    padding = transformers.AutoTokenizer.from_pretrained(copy).pad_token_id
    rows = [[*tokenizer.encode_plain([text])[0], tokenizer.turn_end_id] for text in ("Yes", "A longer text")]
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        found = theirs(padded, attention_mask=mask).logits[:, 0]
        expected = torch.stack([ours(torch.tensor([row])).flatten()[-1] for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_language_model_keeps_the_padding_that_it_came_with(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED["openai-community/gpt2"])
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.pad, tokenizer.pad_id) == ("", tokenizer.end_id)
    assert tokenizer.with_distinct_pad().pad == "", "GPT-2 has no other special token"


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "tokenizer_config.json",
            {"eos_token": None},
            r"eos_token is missing, and neither .* name the token .* end_token",
        ),
        ("tokenizer_config.json", {"eos_token": 5}, r"eos_token is 5; a token of the vocabulary was expected"),
        (
            "generation_config.json",
            {"eos_token_id": "x"},
            r"generation_config.json: eos_token_id is \['x'\]; a token's",
        ),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag", "template": ""}]}, r'names rag; "default" was'),
    ],
)
def test_what_cannot_be_read_names_file_and_field(
    tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    write(tmp_path, PUBLISHED["EleutherAI/pythia-1b"])
    path = tmp_path / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**before, **fields}))
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_a_letter_is_no_end_token(tmp_path: Path) -> None:
    """transformers writes `eos_token_id` 2 into a config made without one; token 2 of this vocabulary is a letter."""
    write(tmp_path, PUBLISHED["EleutherAI/pythia-1b"])
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 2
    tokenizer = Tokenizer.load(tmp_path)
    assert 2 not in tokenizer.end_ids


def changed(folder: Path, file: str, **fields: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
            "needs a system",
        ),
        (CHATML.replace("assistant\n' }}", "assistant\n<think>\n\n</think>\n\n' }}"), "opens with thoughts"),
        ("{{ messages[0].content | length }}" + CHATML, "counts"),
    ],
)
def test_the_token_that_closes_a_turn_is_found_in_unusual_templates(tmp_path: Path, template: str, why: str) -> None:
    write(tmp_path, PUBLISHED["Qwen/Qwen2.5-0.5B"])
    changed(tmp_path, "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.token_text(tokenizer.turn_end_id) == "<|im_end|>", why


def test_a_template_that_breaks_is_an_error_of_its_own_and_ends_are_those_of_texts(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED["Qwen/Qwen2.5-0.5B"])
    changed(tmp_path, "tokenizer_config.json", chat_template="{{ messages[0].content + 1 }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.end_ids == (tokenizer.end_id,)
    with pytest.raises(ValueError, match="chat_template refuses the conversation"):
        tokenizer.encode_prompt(TURNS[:1])


def test_a_saved_copy_equals_its_source_under_every_template(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED["Qwen/Qwen2.5-0.5B"])
    tokenizer, copy = Tokenizer.load(tmp_path), tmp_path / "copy"
    tokenizer.save(copy)
    again = Tokenizer.load(copy)
    assert again.with_template("plain") == tokenizer.with_template("plain")
    assert again.sha256 == tokenizer.sha256


def test_a_reward_model_reads_every_end_as_the_one_it_was_trained_on(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"])
    tokenizer = Tokenizer.load(tmp_path)
    first, second = tokenizer.end_ids
    config = load_language_model(tmp_path).config
    judge = RewardModel(ScalarModel(config).eval(), tokenizer, {"score": 1.0})
    for response in ([5, 6, first], [5, 6, second], [5, 6]):
        (read,) = judge.encoded(tokenizer, [TURNS[:1]], [[7, 8]], [response])
        assert [*read] == [7, 8, 5, 6, first]


def test_the_tokenizer_of_an_adapter_takes_the_ends_of_its_model(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    write(model, PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"])
    for name in ("tokenizer.json", "tokenizer_config.json"):  # all that PEFT saves of a tokenizer
        (adapter / name).write_bytes((model / name).read_bytes())
    whole = Tokenizer.load(model).end_ids
    assert len(Tokenizer.load(adapter).end_ids) < len(whole)
    assert Tokenizer.load(adapter, model_folder=model).end_ids == whole
