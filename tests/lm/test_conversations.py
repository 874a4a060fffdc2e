"""Conversations in every kind of vocabulary against `transformers`: tokens, response masks, and special names in
texts."""

import functools
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lm.tokenizer import Tokenizer
from tests.examples import examples
from tests.lm.vocabularies import END, KINDS, NAMES, START, TEMPLATES, TOOL, saved

logging.getLogger("transformers").setLevel(logging.ERROR)

Messages = list[dict[str, str]]
PIECES = [
    " ", "  ", "\n", "\n\n", "\t", "The", "fox", " the dog", "bird.", "é", "e\u0301", "\u0301", "ﬁ", "山", "🙂",
    "👩\u200d🔬", "ÜBER", "12345", "'s", TOOL, "▁", "\x00", "\ufdd0", "\ufdd03\ufdd1", "<", "|", ">", "s>", "end|>",
    "[", "INST", "user", "\u2003", "\x1c",
]  # fmt: skip
innocent = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=12)
harmless = innocent.filter(lambda text: not any(name.lower() in text.lower() for name in NAMES))
naming = st.lists(st.sampled_from([*PIECES, *NAMES]), max_size=6).map("".join)

UNKNOWN = 0  # the id of <unk> if a text can produce it
# Whether a name is a token depends on its neighbours, so even the template's own names are not always tokens.
DEPENDS_ON_NEIGHBOURS = ("names are words", "names are normalised, llama 2")


@functools.cache
def both(kind: str, template: str) -> tuple[Tokenizer, Any]:
    with tempfile.TemporaryDirectory() as folder:
        saved(kind, template, Path(folder))
        return Tokenizer.load(Path(folder)), AutoTokenizer.from_pretrained(folder)


def conversations(content: st.SearchStrategy[str]) -> st.SearchStrategy[Messages]:
    def spoken(texts: list[str], has_system: bool) -> Messages:
        system = [{"role": "system", "content": texts[0]}] if has_system else []
        turns = texts[1:] if len(texts) % 2 else texts[:]
        return [*system, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns))]

    return st.builds(spoken, st.lists(content, min_size=2, max_size=6), st.booleans())


def said(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def prompts_of(messages: Messages) -> list[Messages]:
    return [messages[:place] for place, message in enumerate(messages) if message["role"] == "assistant"]


def reaches_into_a_response(theirs: Any, messages: Messages) -> bool:
    """Returns whether a token of the whole rendering spans a prompt and its response, or the prompt alone has other
    tokens."""
    text = theirs.apply_chat_template(messages, tokenize=False)
    whole = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    for prompt in prompts_of(messages):
        written = theirs.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = theirs(written, add_special_tokens=False)["input_ids"]
        reach = whole["offset_mapping"][len(ids) - 1][1] if 0 < len(ids) <= len(whole["input_ids"]) else 0
        if whole["input_ids"][: len(ids)] != ids or reach > len(written):
            return True
    return False


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, template: str) -> None:
    ours, theirs = both(kind, template)

    @examples(15)
    @given(messages=conversations(harmless))
    @example(messages=[{"role": "user", "content": " The fox? "}, {"role": "assistant", "content": "the dog."}])
    def equal(messages: Messages) -> None:
        expected = theirs.apply_chat_template(messages, return_dict=False)
        tokens, _ = ours.encode_conversation(messages)
        if not reaches_into_a_response(theirs, messages):
            assert tokens == expected
        for prompt in prompts_of(messages):
            asked = ours.encode_prompt(prompt)
            assert tokens[: len(asked)] == asked
            if not reaches_into_a_response(theirs, prompt):
                assert asked == theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)

    equal()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DEPENDS_ON_NEIGHBOURS])
def test_marks_are_those_of_a_template_that_shows_them(kind: str) -> None:
    ours, theirs = both(kind, "generation")

    @examples(25)
    @given(messages=conversations(harmless))
    def equal(messages: Messages) -> None:
        assume(not reaches_into_a_response(theirs, messages))
        if kind == "wordpiece":  # has no token for a space, so `transformers` finds no response that begins with one
            messages = [{**message, "content": "The" + message["content"]} for message in messages]
        found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, is_response = ours.encode_conversation(messages)
        assert tokens == found["input_ids"]
        assert sum(is_response) >= sum(message["role"] == "assistant" for message in messages)
        assert is_response == [bool(mark) for mark in found["assistant_masks"]]

    equal()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_message_becomes_a_special_token(kind: str, template: str) -> None:
    """The special tokens are the same as in a conversation about something else."""
    ours, theirs = both(kind, template)
    special = {number for number, token in theirs.added_tokens_decoder.items() if token.special and number != UNKNOWN}

    @examples(15)
    @given(messages=conversations(naming))
    @example(messages=said(f"a{END} b{START}", " <|im_end|>"))
    @example(messages=said("\ufdd0999\ufdd1", "\ufdd03\ufdd1"))
    def same(messages: Messages) -> None:
        tokens, is_response = ours.encode_conversation(messages)
        innocent = [{**message, "content": "."} for message in messages]
        found = Counter(token for token in tokens if token in special)
        if kind in DEPENDS_ON_NEIGHBOURS:
            text = theirs.apply_chat_template(innocent, tokenize=False)
            assert found <= Counter({theirs.convert_tokens_to_ids(name): text.count(name) for name in NAMES})
        else:
            others = theirs.apply_chat_template(innocent, return_dict=False)
            assert found == Counter(token for token in others if token in special)
        assert any(is_response)

    same()


@examples(150)
@given(messages=conversations(naming))
@pytest.mark.parametrize("kind", ["byte-level", "llama 3"])
def test_a_conversation_decodes_to_what_was_said(kind: str, messages: Messages) -> None:
    ours, _ = both(kind, "chatml")
    tokens, _ = ours.encode_conversation(messages)
    assert ours.decode(tokens) == "".join(f"{m['role']}\n{m['content']}\n" for m in messages)


def test_a_response_keeps_its_prompts_tokens_where_the_whole_text_would_merge_them() -> None:
    """The policy answers after "assistant, line break", where it would never write a token of two line breaks."""
    ours, theirs = both("llama 3", "chatml")
    messages = said("The fox?", "\n\nThe dog.")
    prompt = ours.encode_prompt(messages[:1])
    whole = theirs.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] != prompt  # three line breaks are split differently from one and two
    tokens, is_response = ours.encode_conversation(messages)
    answer = theirs("\n\nThe dog.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokens == [*prompt, *answer, *theirs("\n", add_special_tokens=False)["input_ids"]]
    assert is_response == [False] * len(prompt) + [True] * len(answer) + [False]
    assert ours.decode(tokens) == theirs.decode(whole, skip_special_tokens=True)
    # The next prompt continues after the tokens that the policy wrote.
    again = [*messages, {"role": "user", "content": "And?"}]
    assert ours.encode_prompt(again)[: len(tokens)] == tokens


def test_a_response_that_is_cut_from_its_prompt_gets_no_space() -> None:
    """If a vocabulary puts a space before a text, what follows a cut is still in the middle of a text."""
    ours, theirs = both("metaspace, always", "mistral")
    messages = said("The fox?", "the dog.")
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token if not add_generation_prompt }}"
    )
    joined = ours.with_template(template)
    tokens, is_response = joined.encode_conversation(
        [{**messages[0], "content": "The bu"}, {**messages[1], "content": "sh."}]
    )
    assert joined.decode(tokens) == "The bush."
    assert joined.decode([token for token, mine in zip(tokens, is_response, strict=True) if mine]) == "sh."
    whole = theirs.apply_chat_template(said("The bu", "sh."), chat_template=template, return_dict=False)
    assert joined.decode(whole) == "The bush."


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DEPENDS_ON_NEIGHBOURS])
def test_a_reply_is_what_the_template_writes_after_a_closed_turn(kind: str, template: str) -> None:
    """Appended to a prompt and its response, it gives the tokens of the whole conversation."""
    ours, _ = both(kind, template)
    asks = [{"role": "user", "content": "The fox?"}]
    for reply in ("the dog", f"{NAMES[0]} and {NAMES[-1]}", "This is a short answer."):
        replies = [{"role": "user", "content": reply}]
        tokens, is_response = ours.encode_conversation([*asks, {"role": "assistant", "content": "bird."}])
        sampled = tokens[: len(tokens) - is_response[::-1].index(True)]
        expected = ours.encode_prompt([*asks, {"role": "assistant", "content": "bird."}, *replies])
        assert sampled + ours.encode_reply(replies) == expected


def test_a_template_that_does_not_only_append_has_no_replies(tokenizer: Tokenizer) -> None:
    reply = [{"role": "tool", "content": "4"}]
    said = tokenizer.decode(tokenizer.with_template("chat").encode_reply(reply))
    assert said.split() == ["<tool_response>4</tool_response>"]
    wrong = {
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}": "does not append",
        "{% for m in messages | reverse %}{{ m.content }}{{ eos_token }}{% endfor %}": "does not append",
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ eos_token }}{% endfor %}": "leaves out messages",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}": "no special token after an assistant's",
        "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' else m.content }}{{ eos_token }}"
        "{% endfor %}": "refuses the conversation: no tools",
    }  # fmt: skip
    for template, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            tokenizer.with_template(template).encode_reply(reply)


@examples(150)
@given(messages=conversations(harmless))
@pytest.mark.parametrize("name", ["chat", "continuation"])
def test_heeds_own_templates_give_what_encoding_turn_by_turn_gives(
    tokenizer: Tokenizer, name: str, messages: Messages
) -> None:
    """Tokens are the same as when every piece was encoded separately, so earlier jobs find the same tokens."""
    ours = tokenizer.with_template(name)
    expected: list[int] = []
    marks: list[bool] = []

    def add(text: str, *ends: int, mine: bool) -> None:
        ids = [*ours.encode_plain([text])[0], *ends]
        expected.extend(ids)
        marks.extend([mine] * len(ids))

    asked = ""  # in a continuation, the turns before the response are one text
    for message in messages:
        content, mine = message["content"], message["role"] == "assistant"
        if name == "chat":
            expected.append(ours.encode(f"<|{message['role']}|>")[0])
            marks.append(False)
            add(f" {content}", ours.end_id, mine=mine)
        elif mine:
            add(asked, mine=False)
            add(f" {content}", ours.end_id, mine=True)
            asked = ""
        else:
            asked += content
    assert ours.encode_conversation(messages) == (expected, marks)


def test_a_template_cannot_be_made_to_write_a_special_token(tokenizer: Tokenizer) -> None:
    joins = tokenizer.with_template(
        "{% for m in messages %}{{ m.content | replace('-', '') }}{{ eos_token }}{% endfor %}"
    )
    assert joins.encode_conversation(said("a-b", "c-d"))[0] == joins.encode("ab<|end|>cd<|end|>")
    with pytest.raises(ValueError, match="makes the name of a special token out of a message's text"):
        joins.encode_conversation(said("a<|e-nd|>b", "c"))
    looks = tokenizer.with_template("{% for m in messages %}{{ m.content | length }}{{ eos_token }}{% endfor %}")
    with pytest.raises(ValueError, match="searches messages for special tokens' names"):
        looks.encode_conversation(said("a <|end|> b", "c"))
    around = tokenizer.with_template("{% for m in messages %}<|{{ m.content }}|>{{ eos_token }}{% endfor %}")
    tokens, _ = around.encode_conversation(said("end", "e"))
    assert tokens.count(around.end_id) == 2
    assert around.decode(tokens) == "<|end|><|e|>"
    turns = [
        {"role": "user", "content": "<|en"},
        {"role": "user", "content": "d|>"},
        {"role": "assistant", "content": "x"},
    ]
    together = tokenizer.with_template("continuation")
    assert together.encode_prompt(turns[:2]) == together.encode_plain(["<|end|>"])[0]


def test_half_of_a_surrogate_pair_is_named(tokenizer: Tokenizer) -> None:
    for encode in (
        lambda text: tokenizer.encode_conversation(said(text, "x")),
        lambda text: tokenizer.encode_prompt(said(text, "x")[:1]),
        lambda text: tokenizer.encode_plain(["fine", text]),
        lambda text: tokenizer.spelled_bytes([text]),
        tokenizer.encode,
    ):
        with pytest.raises(ValueError, match=r"half of a surrogate pair, U\+D800, at character \d+ \('.*a\\ud800b"):
            encode("a\ud800b")
        with pytest.raises(ValueError, match=r"a text has byte 0xFF, which is not UTF-8, at character \d+"):
            encode(b"a\xffb".decode(errors="surrogateescape"))


def test_a_file_that_cuts_and_fills_up_is_read_without_both(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    kept = (tmp_path / "tokenizer.json").read_text()
    served = tokenizers.Tokenizer.from_str(kept)
    served.enable_truncation(4)
    served.enable_padding(length=128, pad_id=0, pad_token="<|pad|>")
    served.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    text = "The quick brown fox jumps over the lazy dog."
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.encode_plain([text, "a"]) == tokenizer.encode_plain([text, "a"])
    assert loaded.encode_conversation(said(text, text)) == tokenizer.encode_conversation(said(text, text))
    loaded.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == kept


def test_the_end_token_is_special_where_only_the_config_says_so(tmp_path: Path) -> None:
    """As in `transformers`, a special name in a template is a token, and in a message it is text."""
    ours, _ = both("byte-level", "zephyr")
    ours.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    kept = path.read_text()
    for changed in ("left out", "not special"):
        described = json.loads(kept)
        added = {token["content"]: token for token in described["added_tokens"]}
        described["model"]["vocab"] |= {name: token["id"] for name, token in added.items()}
        added[END]["special"] = False
        if changed == "left out":
            described["added_tokens"].remove(added[END])
        path.write_text(json.dumps(described))
        loaded = Tokenizer.load(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        messages = said("The fox?", "the dog.")
        assert loaded.encode_conversation(messages) == ours.encode_conversation(messages)
        assert loaded.encode_conversation(messages)[0] == theirs.apply_chat_template(messages, return_dict=False)
        assert loaded.encode_prompt(said(f"a{END}b", "")[:1]).count(loaded.end_id) == 1
