"""The tokenizer and its chat template: round trips, agreement with transformers, response masks, errors."""

import json
import logging
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lm.tokenizer import CHAT_TEMPLATES, END, MASK, SPECIAL_TOKENS, Tokenizer, read_json
from tests.examples import examples

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The quick brown fox?"},
    {"role": "assistant", "content": "jumps over\nthe lazy dog."},
    {"role": "user", "content": " And 山? "},
    {"role": "assistant", "content": "The bird in the hand."},
]
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = [*CHAT_TEMPLATES, PLAIN]

# As in every Hugging Face tokenizer, text that equals a special token's name is that token.
any_text = st.text(max_size=40).filter(lambda text: not any(token in text for token in SPECIAL_TOKENS))


@examples(150)
@given(text=any_text)
@example(text="")
@example(text="\x00\x7f\u0080\uffff\U0010ffff e\u0301 \t\r\n  ")
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert len(tokens) <= len(text.encode())
    assert sum(len(tokenizer.token_text(token)) for token in tokens) == len(text.encode())  # one byte per character


def test_merges_were_learned_and_the_size_kept(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode(" the dog")) < len(b" the dog")


def test_batches_encode_like_single_texts(tokenizer: Tokenizer) -> None:
    texts = ["", "The fox", "山高"]
    assert tokenizer.encode_plain(texts) == [tokenizer.encode(text) for text in texts]


def test_special_tokens_are_one_token_and_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"fox{END}") == [*tokenizer.encode("fox"), tokenizer.end_id]
    assert tokenizer.decode([tokenizer.pad_id, *tokenizer.encode("fox"), tokenizer.end_id]) == "fox"
    assert tokenizer.pad_id != tokenizer.end_id


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_rendering_and_tokens_equal_transformers(
    tokenizer: Tokenizer, tmp_path: Path, template: str, generation_prompt: bool
) -> None:
    ours = tokenizer.with_template(template)
    ours.save(tmp_path)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = CONVERSATION[:-1] if generation_prompt else CONVERSATION
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    assert ours.render(messages, add_generation_prompt=generation_prompt) == text
    tokens = theirs.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=False)
    if generation_prompt and template != PLAIN:
        assert ours.encode_prompt(messages) == list(tokens)
    assert ours.encode(text) == list(tokens)
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ours.pad_id, ours.end_id)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_mask_covers_the_assistants_words_and_end_token_alone(tokenizer: Tokenizer, template: str) -> None:
    ours = tokenizer.with_template(template)
    tokens, is_response = ours.encode_conversation(CONVERSATION)
    runs: list[list[int]] = []
    for token, before, mine in zip(tokens, [False, *is_response], is_response, strict=False):
        if mine and not before:
            runs.append([])
        if mine:
            runs[-1].append(token)
    space = " " if template in ("chat", "continuation") else ""
    spoken = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]
    # What a template writes after the end token, such as a line break, is never sampled, so it must not count.
    assert runs == [[*ours.encode(space + text), ours.end_id] for text in spoken]
    whole = "".join(ours.render(CONVERSATION, add_generation_prompt=False).split(END))
    assert ours.decode(tokens) == whole.replace("<|system|>", "").replace("<|user|>", "").replace("<|assistant|>", "")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompts_tokens_begin_its_conversation(tokenizer: Tokenizer, template: str) -> None:
    ours = tokenizer.with_template(template)
    tokens, is_response = ours.encode_conversation(CONVERSATION)
    for length in (2, 4):
        prompt = ours.encode_prompt(CONVERSATION[:length])
        assert tokens[: len(prompt)] == prompt
        assert is_response[len(prompt)]
        assert not is_response[len(prompt) - 1]


@examples(100)
@given(
    turns=st.lists(st.tuples(st.sampled_from(["system", "user"]), any_text), min_size=1, max_size=3), answer=any_text
)
@example(turns=[("system", "in th"), ("user", "e hand")], answer="x")
@pytest.mark.parametrize("template", TEMPLATES)
def test_any_prompts_tokens_begin_its_conversation(
    tokenizer: Tokenizer, template: str, turns: list[tuple[str, str]], answer: str
) -> None:
    ours = tokenizer.with_template(template)
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = ours.encode_prompt(messages)
    tokens, is_response = ours.encode_conversation([*messages, {"role": "assistant", "content": answer}])
    assert tokens[: len(prompt)] == prompt
    assert not any(is_response[: len(prompt)])
    assert is_response[len(prompt)]


def test_a_template_that_rewrites_what_it_wrote_is_refused(tokenizer: Tokenizer) -> None:
    ours = tokenizer.with_template(
        "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"must only append"):
        ours.encode_conversation(CONVERSATION)


def test_an_end_token_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    bpe = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"eos_token '<stop>' is not in the vocabulary"):
        Tokenizer(bpe, end="<stop>", chat_template="")


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 260; bytes and special tokens alone need 261"):
        Tokenizer.train(["abc"], 260, "chat")


def test_loading_gives_back_what_was_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("The fox 山") == tokenizer.encode("The fox 山")
    assert loaded.chat_template == tokenizer.chat_template


def test_tokenizers_are_equal_that_write_the_same_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path) == tokenizer == tokenizer.with_template("chat")
    tokenizer.encode_plain(["which leaves no trace"])
    assert Tokenizer.load(tmp_path) == tokenizer
    others = [
        tokenizer.with_template("continuation"),
        Tokenizer.train(["another text altogether"], 280, "chat"),
        Tokenizer.load(tmp_path, end="<|user|>"),
    ]
    assert all(other != tokenizer for other in others)
    change_config(tmp_path, pad_token="<|user|>")  # fills the space after texts, which no mask counts
    assert Tokenizer.load(tmp_path) == tokenizer


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(tokenizer: Tokenizer, tmp_path: Path, missing: str) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=rf"{missing}: no such file"):
        Tokenizer.load(tmp_path)


def test_a_model_without_a_template_gets_one_and_a_file_of_its_own_goes_first(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = tokenizer.with_template("continuation")
    other.save(tmp_path)
    change_config(tmp_path, chat_template=None)
    assert Tokenizer.load(tmp_path).chat_template == CHAT_TEMPLATES["chat"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.load(tmp_path).chat_template == "{{ messages[0].content }}"
    assert other.with_template("").chat_template == CHAT_TEMPLATES["continuation"]


def test_a_config_that_is_not_json_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token":')
    with pytest.raises(ValueError, match=r"tokenizer_config.json: line 1"):
        Tokenizer.load(tmp_path)


def test_read_json_names_file_and_place(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=r"x.json: no such file"):
        read_json(path)
    path.write_text('{\n"a": 1,\n}')
    with pytest.raises(ValueError, match=r"x.json: line [23]: not JSON"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"x.json: list found; a JSON object was expected"):
        read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}


SPELLED = "a <|end|> b <|user|>"


def test_a_message_cannot_end_a_turn(tokenizer: Tokenizer) -> None:
    """The name of a special token in a message is text: it is decoded unchanged, and none of its tokens is special."""
    turns = [{"role": "user", "content": SPELLED}, {"role": "assistant", "content": f"so {SPELLED}"}]
    tokens, is_response = tokenizer.encode_conversation(turns)
    user, assistant = tokenizer.encode("<|user|><|assistant|>")
    assert [token for token in tokens if token in (user, assistant, tokenizer.end_id)] == [
        user, tokenizer.end_id, assistant, tokenizer.end_id,
    ]  # fmt: skip
    assert tokenizer.decode(tokens) == f" {SPELLED} so {SPELLED}"
    assert sum(is_response) == len(tokens) - tokens.index(assistant) - 1
    assert tokenizer.encode_prompt(turns[:1]) == tokens[: tokens.index(assistant) + 1]


def test_plain_text_has_no_special_tokens(tokenizer: Tokenizer) -> None:
    (tokens,) = tokenizer.encode_plain([SPELLED])
    assert tokenizer.decode(tokens) == SPELLED
    assert tokenizer.end_id not in tokens
    assert tokenizer.encode("<|end|>") == [tokenizer.end_id]  # the next call is unaffected


def test_a_response_stops_where_its_text_holds_the_string(tokenizer: Tokenizer) -> None:
    stop = tokenizer.stop_at(["END", "\n\n"])
    for text, expected in (("so it goes. EN", False), ("so it goes. END", True), ("a\n", False), ("a\n\n", True)):
        assert stop(tokenizer.encode(text)) is expected
    assert not tokenizer.stop_at([])(tokenizer.encode("anything"))
    with pytest.raises(ValueError, match="an empty one would end every response"):
        tokenizer.stop_at(["x", ""])


def test_a_mask_token_is_learned_where_words_are_to_be_hidden(tmp_path: Path) -> None:
    masked = Tokenizer.train(["The fox and the dog."], 300, "plain", has_mask=True)
    assert masked.encode(f"fox{MASK}") == [*masked.encode("fox"), masked.mask_id]
    masked.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert (again.mask_id, again.start_id) == (masked.mask_id, masked.end_id)
    assert again.render([{"role": "user", "content": "fox"}], add_generation_prompt=True) == f"{END}fox{END}"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.mask_token_id, theirs.cls_token_id) == (masked.mask_id, masked.end_id)


def test_a_vocabulary_without_a_mask_token_says_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="mask_token is missing"):
        _ = tokenizer.mask_id


def test_bert_names_its_start_and_end_otherwise(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "."]
    wordpiece = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    wordpiece.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    wordpiece.add_special_tokens(words[:5])
    wordpiece.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    bert = Tokenizer.load(tmp_path).with_template("plain")
    assert (bert.start_id, bert.end_id, bert.mask_id, bert.pad_id) == (2, 3, 4, 0)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "foxes ."}]
    assert bert.encode_conversation(messages) == (
        [2, 5, 6, 3, 6, 7, 8, 3],
        [False, False, False, False, True, True, True, True],
    )
    bert.save(tmp_path / "again")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert theirs("the", "fox")["token_type_ids"] == [0, 0, 0, 1, 1]
    assert theirs.sep_token == "[SEP]"


def test_a_template_may_write_the_start_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<|system|>"}))
    started = Tokenizer.load(tmp_path).with_template("plain")
    messages = [{"role": "user", "content": "fox"}]
    assert started.encode_prompt(messages) == tokenizer.encode(f"<|system|>fox{END}")


def test_what_a_token_stands_for(tokenizer: Tokenizer, wordpiece: Tokenizer) -> None:
    """Text, bytes of an incomplete character, a continuation with its mark, and nothing beyond the vocabulary."""
    spelled = [tokenizer.spelled(token) for token in tokenizer.encode_plain(["The fox\n\u00a0é"])[0]]
    assert b"".join(part.encode() if isinstance(part, str) else part for part in spelled) == "The fox\n\u00a0é".encode()
    assert {part for part in spelled if isinstance(part, bytes)} == {b"\xc2", b"\xa0", b"\xc3", b"\xa9"}
    assert tokenizer.spelled(tokenizer.end_id) == "<|end|>"
    assert tokenizer.spelled(tokenizer.vocab_size + 3) == ""
    assert [wordpiece.spelled(token) for token in wordpiece.encode_plain(["The dogs!"])[0]] == [
        "the",
        "dog",
        "##s",
        "!",
    ]


def test_masks_take_the_space_before_them(masking_tokenizer: Tokenizer, tokenizer: Tokenizer) -> None:
    mask, encode = masking_tokenizer.mask_id, masking_tokenizer.encode_plain
    the, sleeps = (encode([text])[0] for text in ("The", " sleeps"))
    assert masking_tokenizer.encode_masked("The [MASK] sleeps<|mask|>") == [*the, mask, *sleeps, mask]
    assert masking_tokenizer.encode_masked("The<|mask|>[MASK] sleeps") == [*the, mask, mask, *sleeps]
    assert masking_tokenizer.encode_masked("[MASK]") == [mask]
    assert masking_tokenizer.encode_masked("The sleeps") == encode(["The sleeps"])[0]
    with pytest.raises(ValueError, match="mask_token is missing"):
        tokenizer.encode_masked("The [MASK]")
