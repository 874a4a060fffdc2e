"""Chat templates, which turn conversations into text. They are Jinja, as in published models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lm.chat_encoding import Names, Rendered, Turn, marked_throughout

SHOWN_CHARACTERS = 200  # of a rendering, in an error message

Messages = Sequence[Mapping[str, str]]

CHAT_TEMPLATES = {
    # Every turn opens with its role's token and closes with the end token. The space makes a turn's first word the same
    # token as in running text, so a response can begin with a word copied from its prompt.
    "chat": (
        "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}{{ eos_token }}{% endfor %}"
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

    @cached_property
    def _template(self) -> jinja2.Template:
        # Templates of published models use these in addition to plain Jinja.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.text)

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Returns the conversation as the template writes it, with marks around special tokens' names in messages.

        Raises: ValueError for a conversation that the template refuses, or if it is unclear whether the template or a
        message wrote a special token's name.
        """
        contents = [message["content"] for message in messages]
        marked = [self._names.marked(content) for content in contents]
        text = self._rendered(messages, marked, add_generation_prompt)
        read = self._names.read(text) if marked != contents else None
        plain = text if read is None else read.text
        if read is not None and plain != self._rendered(messages, contents, add_generation_prompt):
            raise ValueError(
                "chat_template searches messages for special tokens' names, which are plain text there; a template that"
                " copies messages unchanged was expected"
            )
        if not all(content.strip() in plain for content in contents):
            self._check_rewritten(messages, text, add_generation_prompt)
        return text

    def _check_rewritten(self, messages: Messages, text: str, add_generation_prompt: bool) -> None:
        """Check that the template's changes to a message do not make a special token's name.

        Raises: ValueError if the rendering has other special tokens than with every character of the messages marked.
        """
        marked = [marked_throughout(message["content"]) for message in messages]
        whatever = self._names.read(self._rendered(messages, marked, add_generation_prompt))
        if self._ids_of(whatever) != self._ids_of(self._names.read(text)):
            raise ValueError("chat_template makes the name of a special token out of a message's text")

    @staticmethod
    def _ids_of(rendered: Rendered) -> list[int]:
        return [special.token_id for special in rendered.specials]

    def _rendered(self, messages: Messages, contents: Sequence[str], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[{**message, "content": text} for message, text in zip(messages, contents, strict=True)],
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # a template is code, which may also raise TypeError and others
            # In one line, and without the template: published templates have dozens of lines.
            raise ValueError(f"chat_template refuses the conversation: {' '.join(str(error).split())}") from None

    def render_with_turns(self, messages: Messages) -> tuple[str, list[Turn]]:
        """Returns the rendering, and the place of each response in it.

        Raises: ValueError if the rendering of a conversation does not extend the rendering of its beginning.
        """
        beginnings = list(self.beginnings(messages))
        if messages and messages[-1]["role"] == "assistant":
            text = beginnings[-1][1]
        else:
            text = self.render(messages, add_generation_prompt=False)
        turns: list[Turn] = []
        for before, whole in beginnings:
            turn = turn_of(text, before, whole)
            if turn is None:
                wrong = before if not text.startswith(before) else whole
                raise ValueError(
                    f"chat_template: the rendering {_end(text)} does not start with {_end(wrong)};"
                    " a template must only append when a message is added"
                )
            turns.append(turn)
        return text, turns

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
            before = self.render(question, add_generation_prompt=True)
        except ValueError:
            question.insert(0, {"role": "system", "content": "Be brief."})
            before = self.render(question, add_generation_prompt=True)
        text = self.render([*question, turn, *messages], add_generation_prompt=True)
        appended = self._names.read(text).text.partition(answer)[2]
        contents = [message["content"].strip() for message in messages]
        if not text.startswith(before) or not all(own in appended or _escaped(own) in appended for own in contents):
            raise ValueError(
                f"chat_template: the rendering {_end(text)} does not append messages to {_end(before)}; a template must"
                " only append when a message is added"
            )
        return text, Turn(len(before), len(text))

    def beginnings(self, messages: Messages) -> Iterator[tuple[str, str]]:
        """Yields, for each response, the rendering before it and the rendering up to the next message."""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:index], add_generation_prompt=True)
                yield before, self.render(messages[: index + 1], add_generation_prompt=False)


def turn_of(text: str, before: str, whole: str) -> Turn | None:
    """Returns the response's place in the text; None unless the text begins with `whole` and `whole` with `before`."""
    if not (text.startswith(whole) and whole.startswith(before)):
        return None
    return Turn(len(before), len(whole))


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, with which published templates mark the assistant's text; the text is written unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Writes JSON as published templates expect it; Jinja's own filter would escape HTML's special characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _escaped(text: str) -> str:
    """Returns a text as JSON writes it, which some templates do with a tool's results."""
    return _to_json(text)[1:-1]


def _end(text: str) -> str:
    """Returns the end of a rendering, for an error message."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"...{text[-SHOWN_CHARACTERS:]!r}"


def _refuse(message: str) -> None:
    """Templates call this for a conversation that they refuse."""
    raise jinja2.TemplateError(message)
