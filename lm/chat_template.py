"""Chat templates, which turn conversations into text. They are Jinja, as in published models."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lm.chat_encoding import Names, Rendered, Turn, marked_throughout

SHOWN_CHARACTERS = 200  # of a rendering, in an error message
THINKING = "enable_thinking"  # the variable by which templates (Qwen3, GLM-4.5, Nemotron 3) turn thoughts off
NON_THINKING = f"{{% set {THINKING} = false %}}"

# Each message has a `role` and `content`. As in OpenAI's API, an assistant's may have `tool_calls`, next to which
# `content` may be None, and a message of the role `tool` has the result of a call. The first message may have `tools`:
# see `with_tools`.
Messages = Sequence[Mapping[str, Any]]

_WORD = re.compile(r"[\w.-]+")
_OPENED = re.compile(r"(<\w+>)(\s*)\Z")  # the end of a prompt that opens thoughts
_EMPTY = re.compile(r"(<\|channel>thought\n<channel\|>|<\|START_THINKING\|><\|END_THINKING\|>)\Z")  # of one with none

CHAT_TEMPLATES = {
    # Every turn opens with its role's token and closes with the end token. The space makes a turn's first word the same
    # token as in running text, so a response can begin with a word copied from its prompt. Tools are in the system's
    # turn, their results in a user's, and calls are written as Hermes and Qwen write them.
    "chat": (
        "{% set system = messages[0].content if tools and messages[0].role == 'system' else '' %}"
        "{% if tools %}<|system|> {{ system + '\n\n' if system }}Call functions with "
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
        "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ eos_token }}{% endif %}"
        "{% for message in messages %}{% if not (system and loop.first) %}"
        "{% if message.role == 'tool' %}<|user|> <tool_response>{{ message.content }}</tool_response>{{ eos_token }}"
        "{% else %}<|{{ message.role }}|> {{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        """{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}"""
        "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{{ eos_token }}"
        "{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # The response continues the prompt's sentence; roles are not written.
    "continuation": (
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %} {% endif %}{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    # The start token, then the texts, each closed by the end token: what BERT and BART read.
    "plain": "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}",
}


class ChatTemplate:
    """A template over a vocabulary's special tokens; `tokens` are the variables that it may write, by name."""

    def __init__(self, text: str, names: Names, tokens: Mapping[str, str]) -> None:
        self.text, self._names, self._tokens = text, names, tokens
        self._known_shapes = set[object]()  # of conversations with tools, of which the template leaves nothing out

    @cached_property
    def _template(self) -> jinja2.Template:
        # Templates of published models use these in addition to plain Jinja.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _FixedDate()}
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.text)

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Returns the conversation as the template writes it, with marks around special tokens' names in messages.

        Raises: ValueError for a conversation that the template refuses, whose tools, calls or results it leaves out, or
            if it is unclear whether the template or a message wrote a special token's name.
        """
        variables = _variables(messages)
        marked = self._changed(variables, self._names.marked)
        text = self._rendered(marked, add_generation_prompt)
        read = self._names.read(text) if marked != variables else None
        plain = text if read is None else read.text
        if read is not None and plain != self._rendered(variables, add_generation_prompt):
            raise ValueError(
                "chat_template searches messages for special tokens' names, which are plain text there; a template that"
                " copies messages unchanged was expected"
            )
        if not all(content.strip() in plain for content in _texts(variables)):
            self._check_rewritten(variables, text, add_generation_prompt)
        if _has_tools(variables):
            self._check_has_place(variables)
        return text

    def _changed(self, variables: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
        """Returns the variables with changed texts: those of messages, and all of calls and tools except plain words.

        Templates compare some of these words, such as roles and the types of parameters.
        """

        def changed(value: Any, *, is_text: bool, has_texts: bool) -> Any:
            if isinstance(value, str):
                is_word = not is_text and _WORD.fullmatch(value) and not self._names.are_in(value)
                return value if is_word else change(value)
            if isinstance(value, list):
                return [changed(item, is_text=is_text, has_texts=has_texts) for item in value]
            if not isinstance(value, Mapping):
                return value
            return {
                changed(key, is_text=False, has_texts=has_texts): changed(
                    item, is_text=is_text or (has_texts and key in ("content", "arguments")), has_texts=has_texts
                )
                for key, item in value.items()
            }

        return {name: changed(value, is_text=False, has_texts=name == "messages") for name, value in variables.items()}

    def _check_rewritten(self, variables: Mapping[str, Any], text: str, add_generation_prompt: bool) -> None:
        """Check that the template's changes to a message do not make a special token's name.

        Raises: ValueError if the rendering has other special tokens than with every character of the messages marked.
        """
        marked = self._changed(variables, marked_throughout)
        whatever = self._names.read(self._rendered(marked, add_generation_prompt))
        if self._ids_of(whatever) != self._ids_of(self._names.read(text)):
            raise ValueError("chat_template makes the name of a special token out of a message's text")

    def _check_has_place(self, variables: Mapping[str, Any]) -> None:
        """Check that the template writes all of a conversation with tools, except what it drops of answers.

        It is rendered with words that appear nowhere else. What a template writes depends on the conversation's shape,
        so each shape is checked once. Raises: ValueError naming what is left out.
        """
        probe, wanted = _probe(variables)
        shape = repr((probe["messages"], len(variables["tools"] or ())))
        if shape in self._known_shapes:
            return
        text = self._rendered(probe, add_generation_prompt=False)
        if missing := next((place for word, place in wanted.items() if word not in text), ""):
            raise ValueError(
                f"chat_template leaves out {missing}; a template that writes tools, their calls and results was"
                ' expected, such as "chat" or the one that the model was published with'
            )
        self._known_shapes.add(shape)

    @staticmethod
    def _ids_of(rendered: Rendered) -> list[int]:
        return [special.token_id for special in rendered.specials]

    def _rendered(self, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                **variables, documents=None, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except Exception as error:  # a template is code, which may also raise TypeError and others
            # In one line, and without the template: published templates have dozens of lines.
            raise ValueError(f"chat_template refuses the conversation: {' '.join(str(error).split())}") from None

    def renderings(self, messages: Messages) -> Iterator[tuple[str, list[Turn]]]:
        """Yields the rendering of the conversation, and the places of its responses. A response that the template
        writes differently once messages follow (gpt-oss's end, Qwen3's thoughts) has its place in a further rendering,
        of the conversation up to it: each is in one of them, as a policy samples it.

        Raises: ValueError if the rendering of a response does not extend that of what comes before it.
        """
        beginnings = list(self.beginnings(messages))
        missing = set(range(len(beginnings)))
        ends_in_response = bool(messages) and messages[-1]["role"] == "assistant"
        text = beginnings[-1].whole if ends_in_response else self.render(messages, add_generation_prompt=False)
        while True:
            turns = {place: turn for place, one in enumerate(beginnings) if (turn := one.turn_in(text)) is not None}
            if missing and max(missing) not in turns and text == beginnings[max(missing)].whole:
                before = beginnings[max(missing)].before
                raise ValueError(
                    f"chat_template: the rendering {_end(text)} does not start with {_end(before)};"
                    f" a template must only append when a message is added{self._hint(before)}"
                )
            # One that had its place before has none here, but where it starts a policy's prompt ended.
            yield text, [turn if place in missing else Turn(turn.start, turn.start) for place, turn in turns.items()]
            missing -= turns.keys()
            if not missing:
                return
            text = beginnings[max(missing)].whole

    def _hint(self, before: str) -> str:
        if THINKING in self.text and not self.text.startswith(NON_THINKING):
            return ' (chat_template = "non-thinking" trains without thoughts)'
        return " (the prompt opens thoughts, which the message lacks)" if _OPENED.search(before) else ""

    def closing_token(self) -> int | None:
        """Returns the special token that the template writes after an assistant's answer; None if it writes none there.

        Raises: ValueError for a template that refuses a question and an answer, with and without a system message.
        """
        answer = "This is a short answer."
        turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
        try:
            text = self.render(turns, add_generation_prompt=False)
        except ValueError:
            text = self.render([{"role": "system", "content": "Be brief."}, *turns], add_generation_prompt=False)
        rendered = self._names.read(text)
        start = rendered.text.rfind(answer)
        closing = (special for special in rendered.specials if special.name_start >= start + len(answer))
        first = next(closing, None) if start >= 0 else None
        return None if first is None else first.token_id

    def render_reply(self, messages: Messages) -> tuple[str, Turn]:
        """Returns a rendering in which others answer an assistant's turn and the next turn begins, and where that first
        turn is in it.

        Raises: ValueError for a template that refuses the messages, or does not append them to the turn that they
            answer.
        """
        answer = "This is a short answer."
        question: list[Mapping[str, str]] = [{"role": "user", "content": "A question?"}]
        turn = {"role": "assistant", "content": answer}
        if self.closing_token() is None:
            raise ValueError(
                "chat_template writes no special token after an assistant's turn; a template that closes turns was"
                " expected, since a conversation continues after one"
            )
        try:
            befores = [self.render(question, add_generation_prompt=prompt) for prompt in (True, False)]
        except ValueError:
            question.insert(0, {"role": "system", "content": "Be brief."})
            befores = [self.render(question, add_generation_prompt=prompt) for prompt in (True, False)]
        text = self.render([*question, turn, *messages], add_generation_prompt=True)
        appended = self._names.read(text).text.partition(answer)[2]
        contents = [message["content"].strip() for message in messages]
        # A prompt may open thoughts that are not written of earlier turns, whose tokens are kept as sampled.
        if not text.startswith(tuple(befores)) or not all(
            content in appended or _escaped(content) in appended for content in contents
        ):
            raise ValueError(
                f"chat_template: the rendering {_end(text)} does not append messages to {_end(befores[0])}; a template"
                " must only append when a message is added"
            )
        return text, Turn(text.index(answer), len(text))

    def beginnings(self, messages: Messages) -> Iterator["Beginning"]:
        """Yields, for each response, the rendering before it and the rendering up to the next message."""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
                content = self._names.marked(message.get("content") or "")
                before = self.render(messages[:index], add_generation_prompt=True)
                whole = self.render(messages[: index + 1], add_generation_prompt=False)
                yield Beginning(before, with_thoughts(before, whole, content), [content.strip(), *names])


def with_thoughts(before: str, whole: str, content: str) -> str:
    """Returns `whole` with the response's thoughts, if the template leaves them out although the prompt opens them.

    DeepSeek-R1's prompt ends with "<think>\n", and it writes of "<think>\nHm.\n</think>\n\nYes." only "Yes." and an
    end. Whoever samples continues the prompt, so the rendering is the prompt, the content after what the prompt opens,
    and that end. Gemma 4's and Command R7B's prompts end with empty thoughts, which are not written of a response.
    """
    if whole.startswith(before):
        return whole
    if (empty := _EMPTY.search(before)) and whole.startswith(before[: empty.start()]):
        return before + whole[empty.start() :]
    opened = _OPENED.search(before)
    if opened is None or not whole.startswith(before[: opened.start()]):
        return whole
    given = content.removeprefix(opened[1]).removeprefix(opened[2]) if content.startswith(opened[1]) else content
    thoughts, closing, answer = given.partition(opened[1].replace("<", "</"))
    place = whole.find(answer.strip(), opened.start())
    if not closing or place < 0:
        return whole
    end = whole[place + len(answer.strip()) :]
    return f"{before}{thoughts}{closing}{answer.rstrip()}{end}"


class Beginning(NamedTuple):
    """The renderings of a conversation before a response (up to where it starts) and with it as the last message."""

    before: str
    whole: str
    texts: Sequence[str]  # of the response: what it says, and the names of the tools that it calls

    def turn_in(self, text: str) -> Turn | None:
        """Returns the response's place in the whole conversation's rendering; None if the rendering changes before the
        response's end.

        Templates may write something before a response only while it is the last, such as Qwen3's empty thoughts.
        """
        start = len(self.before)
        if not (text.startswith(self.before) and self.whole.startswith(self.before)):
            return None
        response = self.whole[start:]
        first_text = next((place for part in self.texts if part and (place := response.find(part)) >= 0), 0)
        for dropped in range(first_text + 1):
            kept = response[dropped:]
            if text.startswith(kept, start) and (not dropped or all(part in kept for part in self.texts)):
                return Turn(start, start + len(kept))
        return None


def with_tools(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns the conversation with more functions that the assistant may call. Their JSON schemas, as in OpenAI's API,
    are kept in the first message, from which templates get them.
    """
    if not tools:
        return messages
    return [{**messages[0], "tools": [*(messages[0].get("tools") or ()), *tools]}, *messages[1:]]


def _variables(messages: Messages) -> dict[str, Any]:
    """Returns `messages` and `tools` as published templates expect them: the arguments of calls are objects.

    Raises: ValueError for arguments that are neither an object nor its JSON text.
    """
    tools = messages[0].get("tools") if messages else None
    given = [
        {key: value for key, value in message.items() if key not in ("tools", "tool_calls")} for message in messages
    ]
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            given[place]["content"] = message.get("content") or ""  # GLM's would write None as a word
            calls = enumerate(message["tool_calls"])
            given[place]["tool_calls"] = [_call(f"messages[{place}].tool_calls[{n}]", call) for n, call in calls]
    functions = [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools or ()
    ]
    return {"messages": given, "tools": functions or None}


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.function.arguments is not a JSON object")
    return {**call, "function": {**call["function"], "arguments": dict(arguments)}}


def _has_tools(variables: Mapping[str, Any]) -> bool:
    return bool(variables["tools"]) or any("tool_calls" in m or m["role"] == "tool" for m in variables["messages"])


def _texts(variables: Mapping[str, Any]) -> Iterator[str]:
    """Yields the texts that special tokens could be made of: those of messages, and of calls and tools if there are
    any.
    """
    for message in variables["messages"]:
        yield message["content"] or ""
        if "tool_calls" in message:
            yield from _strings(message["tool_calls"])
    yield from _strings(variables["tools"])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _probe(variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a conversation of the same shape, and what each word in it that must be written stands for."""
    wanted, messages = dict[str, str](), list[dict[str, Any]]()
    for place, message in enumerate(variables["messages"]):
        where, calls = f"messages[{place}]", message.get("tool_calls") or ()
        probe = {**message, "content": message["content"] and f"probe{place}text"}
        if message["content"] and (calls or message["role"] != "assistant"):
            wanted[probe["content"]] = f"{where}.content" + (", which stands next to tool_calls" if calls else "")
        if calls:
            probe["tool_calls"] = list[Any]()
        for number, call in enumerate(calls):
            word = f"probe{place}call{number}x"
            function = {"name": f"{word}name", "arguments": {f"{word}key": f"{word}value"}}
            probe["tool_calls"].append({**call, "function": function})
            wanted |= dict.fromkeys((f"{word}name", f"{word}key", f"{word}value"), f"{where}.tool_calls[{number}]")
        messages.append(probe)
    tools = [
        {**tool, "function": {**tool["function"], "name": f"probetool{number}x"}}
        for number, tool in enumerate(variables["tools"] or ())
    ]
    wanted |= {tool["function"]["name"]: f"tools[{number}]" for number, tool in enumerate(tools)}
    return {"messages": messages, "tools": tools or None}, wanted


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, with which published templates mark the assistant's text; the text is written unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _FixedDate(jinja2.Undefined):
    """`strftime_now`, with which some templates (gpt-oss) write today's date: here always the same one, since a
    conversation must have the same tokens on every day. It counts as not defined, so that other templates (Llama 3.1)
    write a date of their own.
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name)  # as of a function, which Jinja asks for its marks

    def __call__(self, form: str) -> str:  # type: ignore[override]
        return date(2025, 8, 5).strftime(form)  # gpt-oss came out then


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as published templates expect it; Jinja's own filter would escape HTML's special characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _escaped(text: str) -> str:
    """Returns a text as JSON writes it, which some templates do with a tool's results."""
    return _to_json(text)[1:-1]


def _end(text: str) -> str:
    """Returns the end of a rendering, for an error message."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"...{text[-SHOWN_CHARACTERS:]!r}"


def _refuse(message: str) -> None:
    """Templates call this for a conversation that they refuse."""
    raise jinja2.TemplateError(message)
