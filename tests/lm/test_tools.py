"""Conversations with tools through chat templates, against `transformers`; and what is refused."""

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lm.chat_template import with_tools
from lm.tokenizer import Tokenizer
from tests.examples import examples
from tests.lm.tool_templates import TOOL_TEMPLATES

Message = dict[str, Any]
ASK: Message = {"role": "user", "content": "What is 12 times 3?"}
AGAIN: Message = {"role": "user", "content": "And 12 times 3 again?"}
ANSWER: Message = {"role": "assistant", "content": "It is 36."}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


FIRST, HOW = {"type": "number", "description": "The first."}, {"type": "object", "description": "How to."}
TOOLS = [tool("multiply", "Multiply two numbers.", a=FIRST, how=HOW), tool("stop", "End the conversation.")]


def call(arguments: Mapping[str, Any], name: str = "multiply", **more: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function, "id": "call00001"}], **more}


def result(content: str) -> Message:
    return {"role": "tool", "name": "multiply", "tool_call_id": "call00001", "content": content}


SYSTEM: Message = {"role": "system", "content": "Be brief."}
CALL = call({"a": 12, "how": {"exact": True, "as": 'a "ü" <b>\n'}})
TWO: Message = {"role": "assistant", "tool_calls": [*CALL["tool_calls"], *call({}, "stop")["tool_calls"]]}
CONVERSATIONS: dict[str, list[Message]] = {
    "no calls": [ASK, ANSWER],
    "a call": [ASK, CALL, result("36"), ANSWER],
    "two turns": [ASK, CALL, result("36"), CALL, result('{"x": 1}'), ANSWER, AGAIN, ANSWER],
    "a system": [SYSTEM, ASK, CALL, result("36"), ANSWER],
    "two calls": [ASK, TWO, result("36"), result("done"), ANSWER],
    "a text beside a call": [ASK, {**CALL, "content": "Let me see."}, result("36"), ANSWER],
    "thoughts": [ASK, {**CALL, "content": "<think>\nHm.\n</think>\n\nSo."}, result("36"), ANSWER],
}
# Conversations whose rendering changes when a message is added, so that earlier responses get sequences of their own.
REWRITTEN = {"Mistral": ("two turns",)}  # moves the tools to the last question
# Conversations of which a template leaves something out, or that it refuses.
BESIDE = r"leaves out messages\[1\].content, which stands next to tool_calls; a template that writes tools"
REFUSED = {
    ("Llama 3.1", "two calls"): "This model only supports single tool-calls at once!",
    ("Llama 3.1", "a text beside a call"): BESIDE,
    ("Llama 3.1", "thoughts"): BESIDE,
    ("Mistral", "a text beside a call"): BESIDE,
    ("Mistral", "thoughts"): BESIDE,
    ("Mistral", "a system"): r"leaves out messages\[0\].content;",  # is only written before a question
    ("Hermes", "a text beside a call"): BESIDE,
    ("Hermes", "thoughts"): BESIDE,
    # It writes a line break after a result unless it is the last message, which it is in a policy's prompt.
    **{("Hermes", label): "must only append" for label in ("a call", "two turns", "a system", "two calls")},
}


@functools.cache
def both(name: str) -> tuple[Tokenizer, Any]:
    with tempfile.TemporaryDirectory() as folder:
        TOOL_TEMPLATES[name].tokenizer().save(Path(folder))
        return Tokenizer.load(Path(folder)), AutoTokenizer.from_pretrained(folder)


def theirs_of(theirs: Any, messages: Sequence[Message], tools: Sequence[Any], **how: Any) -> Any:
    return theirs.apply_chat_template(
        messages, tools=tools or None, return_dict=False, date_string="26 Jul 2024", **how
    )


def cases() -> list[Any]:
    """Every template with every conversation that it writes in full, with tools and without."""
    return [
        pytest.param(name, label, tools, id=f"{name}, {label}, {len(tools)} tools")
        for name in TOOL_TEMPLATES
        for label in CONVERSATIONS
        if (name, label) not in REFUSED
        for tools in ([TOOLS] if name == "Hermes" else [TOOLS, []])
    ]


@pytest.mark.parametrize(("name", "label", "tools"), cases())
def test_tokens_are_those_of_transformers(name: str, label: str, tools: Sequence[Any]) -> None:
    ours, theirs = both(name)
    messages = CONVERSATIONS[label]
    for end, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = ours.encode_prompt(with_tools(messages[:end], tools))
            assert prompt == theirs_of(theirs, messages[:end], tools, add_generation_prompt=True)
    (sequences,) = ours.encode_responses([with_tools(messages, tools)])
    assert sequences[0] == ours.encode_conversation(with_tools(messages, tools))
    assert sequences[0][0] == theirs_of(theirs, messages, tools)
    assert (len(sequences) > 1) == (label in REWRITTEN.get(name, ()) and bool(tools))
    learned = "".join(
        ours.decode([token for token, mine in zip(tokens, is_response, strict=True) if mine])
        for tokens, is_response in sequences
    )
    assert "36" not in learned.replace("It is 36.", ""), "results are not learned"
    assert all(
        text in learned for m in messages if m["role"] == "assistant" and (text := m.get("content") or "").isalnum()
    )
    assert learned.count('"name": "multiply"') == sum(
        call["function"]["name"] == "multiply" for m in messages for call in m.get("tool_calls", ())
    )


@pytest.mark.parametrize("label", ["a call", "two calls"])
def test_a_template_that_searches_contents_writes_calls_without_one(label: str) -> None:
    searching = "{% for message in messages %}{% if '</think>' in message.content %}{% endif %}{% endfor %}"
    template = replace(TOOL_TEMPLATES["Qwen3"], text=searching + TOOL_TEMPLATES["Qwen3"].text)
    conversation = with_tools(CONVERSATIONS[label], TOOLS)
    assert template.tokenizer().encode_conversation(conversation) == both("Qwen3")[0].encode_conversation(conversation)


@pytest.mark.parametrize(("name", "label"), REFUSED)
def test_nothing_is_left_out_silently(name: str, label: str) -> None:
    ours, _ = both(name)
    with pytest.raises(ValueError, match=REFUSED[name, label]):
        ours.encode_responses([with_tools(CONVERSATIONS[label], TOOLS)])


def test_a_template_without_a_place_for_tools_says_what_it_leaves_out(tokenizer: Tokenizer) -> None:
    plain = tokenizer.with_template("plain")
    for messages, place in (
        (with_tools([ASK, ANSWER], TOOLS), r"tools\[0\]"),
        ([ASK, {**CALL, "content": "So."}, result("36"), ANSWER], r"messages\[1\].tool_calls\[0\]"),
    ):
        with pytest.raises(ValueError, match=rf"chat_template leaves out {place}; .* such as \"chat\" or the one"):
            plain.encode_conversation(messages)
    names_only = tokenizer.with_template(
        "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }}{{ eos_token }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"leaves out messages\[1\].tool_calls\[0\]"):
        names_only.encode_prompt([ASK, CALL, result("36")])
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls\[0\].function.arguments is not a JSON object"):
        tokenizer.encode_prompt([ASK, call("[1]"), result("36")])  # type: ignore[arg-type]


@pytest.mark.parametrize("label", CONVERSATIONS)
def test_heeds_own_template_writes_tools(tokenizer: Tokenizer, label: str) -> None:
    ours = tokenizer.with_template("chat")
    messages = CONVERSATIONS[label]
    tokens, is_response = ours.encode_conversation(with_tools(messages, TOOLS))
    turns = [message["role"] for message in messages]
    assert tokens.count(ours.end_id) == len(turns) + (turns[0] != "system")
    learned = "".join(ours.token_text(token) for token, mine in zip(tokens, is_response, strict=True) if mine)
    assert learned.count("<|end|>") == turns.count("assistant")
    assert learned.count("</tool_call>") == sum(len(message.get("tool_calls", ())) for message in messages)
    assert "tool_response" not in learned


def test_arguments_may_be_json_text() -> None:
    ours, _ = both("Qwen2.5")
    as_text = call(json.dumps(CALL["tool_calls"][0]["function"]["arguments"]), content="")  # type: ignore[arg-type]
    messages = [ASK, CALL, result("36"), ANSWER]
    assert ours.encode_conversation([ASK, as_text, *messages[2:]]) == ours.encode_conversation(messages)


NAMES = sorted({name for template in TOOL_TEMPLATES.values() for name in template.specials})
naming = st.lists(st.sampled_from([*NAMES, "a", '"', "\\", "\n", "<|", "im_end", "|>", "\ufdd0", " "]), max_size=5).map(
    "".join
)


@examples(20)
@given(texts=st.lists(naming, min_size=6, max_size=6))
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_no_argument_result_or_schema_becomes_a_special_token(name: str, texts: list[str]) -> None:
    ours, theirs = both(name)
    question, value, key, answer, said, described = (f"x{text}x" for text in texts)

    def conversation(question: str, value: str, key: str, answer: str, said: str) -> list[Message]:
        asked, answered = {**ASK, "content": question}, {**ANSWER, "content": said}
        return [asked, call({"a": value, key: [value]}), result(answer), answered][: 3 if name == "Hermes" else 4]

    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": described}}]  # type: ignore[dict-item]
    given = conversation(question, value, key, answer, said)
    tokens = ours.encode_prompt(with_tools(given, tools))
    special = {number for number, token in theirs.added_tokens_decoder.items() if token.special}
    innocent = conversation("q", "v", "k", "r", "s")
    others = theirs_of(theirs, innocent, TOOLS[:1], add_generation_prompt=True)
    assert Counter(t for t in tokens if t in special) == Counter(t for t in others if t in special)
    written = theirs_of(theirs, given, tools, add_generation_prompt=True, tokenize=False)
    assert theirs.decode(tokens, clean_up_tokenization_spaces=False) == written
