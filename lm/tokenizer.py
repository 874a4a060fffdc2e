"""Vocabularies and chat templates: text to tokens and back."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BPE

from lm.names import Names, Rendered, marked_throughout
from lm.sections import Conversation, Section, SectionEncoder, Turn, encode_texts

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]

CHAT_TEMPLATES = {
    # Every turn opens with its role's token and closes with the end token. After the space the first word is the token
    # that it is in running text, so a response may begin with a word that is copied from its prompt.
    "chat": (
        "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # The response continues the prompt's sentence; there are no roles to see.
    "continuation": (
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %} {% endif %}{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    # Texts alone, each closed by the end token, behind the start token: what BERT and BART read.
    "plain": "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}",
}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Messages = Sequence[Mapping[str, str]]


class Tokenizer:
    """A vocabulary with a padding token, an end token and a chat template; what is learned here is byte-level BPE.

    `start` and `mask` are "" where the vocabulary has none: a start token opens what an encoder reads (the end token
    stands in for it), a mask token hides a word from it.
    Errors: ValueError where padding and end are the same token (training would never learn to stop) or missing.
    """

    def __init__(self, bpe: BPE, *, pad: str, end: str, chat_template: str, start: str = "", mask: str = "") -> None:
        self._bpe = bpe
        self.pad, self.end, self.start, self.mask, self.chat_template = pad, end, start, mask, chat_template
        self.pad_id, self.end_id = self._id(pad, "pad_token"), self._id(end, "eos_token")
        self.start_id = self._id(start, "bos_token") if start else self.end_id
        if self.pad_id == self.end_id:
            raise ValueError(
                f"tokenizer: pad_token and eos_token are both {pad!r} (id {self.pad_id}); they must differ,"
                " or the end of a response is masked as padding and never learned"
            )

    def _id(self, token: str, field: str) -> int:
        token_id = self._bpe.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer: {field} {token!r} is not in the vocabulary")
        return int(token_id)

    @property
    def mask_id(self) -> int:
        """Errors: ValueError for a vocabulary without a mask token."""
        if not self.mask:
            raise ValueError(
                "tokenizer: mask_token is missing; a vocabulary with one was expected, to hide words by it"
            )
        return self._id(self.mask, "mask_token")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, chat_template: str, *, has_mask: bool = False) -> Self:
        """Learn the merges of a byte-level BPE from `texts`; `chat_template` is a name of CHAT_TEMPLATES or Jinja."""
        specials = [*SPECIAL_TOKENS, *([MASK] if has_mask else [])]
        smallest = 256 + len(specials)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size is {vocab_size}; bytes and special tokens alone need {smallest}")
        bpe = BPE(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        template = CHAT_TEMPLATES.get(chat_template, chat_template)
        # What learns by hidden words also learns that a text starts behind an end.
        start, mask = (END, MASK) if has_mask else ("", "")
        return cls(bpe, pad=PAD, end=END, chat_template=template, start=start, mask=mask)

    @classmethod
    def load(cls, folder: Path, *, end: str = "", pad: str = "") -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and, where there is one, `chat_template.jinja`.

        `end` and `pad` stand in for the tokens that the config names, or does not name. A model without a chat
        template gets the one called "chat". Errors: ValueError naming the file and field.
        """
        vocabulary_path, config_path, template_path = (folder / name for name in TOKENIZER_FILES)
        for path in (vocabulary_path, config_path):
            if not path.is_file():
                raise ValueError(f"{path}: no such file; a model directory with a tokenizer was expected")
        config = read_json(config_path)
        names = {field: _content(config.get(field)) for field in _TOKEN_FIELDS}
        names["pad_token"], names["eos_token"] = pad or names["pad_token"], end or names["eos_token"]
        # BERT's separator ends a text, and the token of its classifier starts one.
        names["eos_token"] = names["eos_token"] or names["sep_token"]
        for field in ("pad_token", "eos_token"):
            if not isinstance(names[field], str):
                raise ValueError(f"{config_path}: {field} is {names[field]!r}; a token of the vocabulary was expected")
        template = config.get("chat_template") or CHAT_TEMPLATES["chat"]
        if template_path.is_file():
            template = template_path.read_text(encoding="utf-8")
        if not isinstance(template, str):
            raise ValueError(f"{config_path}: chat_template is {type(template).__name__}; a string was expected")
        bpe = BPE.from_file(str(vocabulary_path))
        # Some files were saved as they last served: cutting texts off, or filling them up.
        bpe.no_truncation()
        bpe.no_padding()
        _make_special(bpe, [name for name in names.values() if isinstance(name, str)])
        start, mask = names["cls_token"] or names["bos_token"] or "", names["mask_token"] or ""
        tokens = {"pad": names["pad_token"], "end": names["eos_token"], "start": start, "mask": mask}
        return cls(bpe, **tokens, chat_template=template)

    def save(self, folder: Path) -> None:
        """Write the Hugging Face layout; `transformers` reads it as PreTrainedTokenizerFast."""
        folder.mkdir(exist_ok=True)
        self._bpe.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": self.pad,
            "eos_token": self.end,
            **({"bos_token": self.start} if self.start else {}),
            **({"mask_token": self.mask, "cls_token": self.start or self.end} if self.mask else {}),
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def __eq__(self, other: object) -> bool:
        """Whether both write every conversation as the same tokens."""
        return isinstance(other, Tokenizer) and self._written() == other._written()

    def _written(self) -> tuple[str, ...]:
        return self._bpe.to_str(), self.pad, self.end, self.start, self.chat_template

    @property
    def vocab_size(self) -> int:
        return int(self._bpe.get_vocab_size())

    def with_template(self, chat_template: str) -> "Tokenizer":
        """The same vocabulary under another template: a name of CHAT_TEMPLATES, Jinja text, or "" for its own."""
        template = CHAT_TEMPLATES.get(chat_template, chat_template) or self.chat_template
        tokens = {"pad": self.pad, "end": self.end, "start": self.start, "mask": self.mask}
        return Tokenizer(self._bpe, **tokens, chat_template=template)

    def encode(self, text: str) -> list[int]:
        """Tokens of text as a template writes it: a special token's name is that token."""
        return list(encode_texts(self._bpe, [text], finds_names=True)[0].ids)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of people's text, on all the library's threads: a special token's name is spelled out."""
        return [encoding.ids for encoding in self._encode_plain(texts)]

    def spelled_bytes(self, texts: Sequence[str]) -> list[list[int]]:
        """For each token of `encode_plain` the bytes of the text that it stands for; together they are the whole text.

        What a vocabulary leaves out (WordPiece its spaces) counts with the next token, at the end with the last. An
        unknown token stands for what it replaces.
        """
        encodings = self._encode_plain(texts)
        return [self._spelled_bytes(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _encode_plain(self, texts: Sequence[str]) -> list[Encoding]:
        return encode_texts(self._bpe, texts, finds_names=False)

    def _spelled_bytes(self, text: str, encoding: Encoding) -> list[int]:
        # A byte-level token may end inside a character, where offsets are silent, but its name has a character a byte.
        # Only of a text that was normalised, or had a space put before it, do these not add up to the text.
        names = [len(name) for name in encoding.tokens]
        if isinstance(self._bpe.decoder, decoders.ByteLevel) and sum(names) == len(text.encode()):
            return names
        bytes_before = list(itertools.accumulate((len(character.encode()) for character in text), initial=0))
        ends = [0]
        for (_, stop), tokens in itertools.groupby(encoding.offsets):
            # Tokens with the same offsets spell one character byte by byte, as SentencePiece does with a rare one.
            num_tokens, num_bytes = len(list(tokens)), max(0, bytes_before[stop] - ends[-1])
            ends += [ends[-1] + num_bytes * place // num_tokens for place in range(1, num_tokens + 1)]
        ends[-1] = bytes_before[-1]
        return [after - before for before, after in itertools.pairwise(ends)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._bpe.decode(list(tokens), skip_special_tokens=True))

    def stop_at(self, strings: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        """Whether the text of a response holds one of the strings, asked after each token; for `lm.generation`.

        The token that completes a string may go on behind it, so cut the text where the string begins.
        Errors: ValueError for an empty string, which every text holds.
        """
        if not all(strings):
            raise ValueError(f"stop strings are {list(strings)}; an empty one would end every response at once")
        longest = max((len(string.encode()) for string in strings), default=0)

        def holds(response: Sequence[int]) -> bool:
            tail = self.decode(response[-longest:])  # a token is a byte at least
            return any(string in tail for string in strings)

        return holds

    def token_text(self, token: int) -> str:
        return str(self._bpe.id_to_token(token))

    @cached_property
    def _template(self) -> jinja2.Template:
        # Templates of published models use these beside plain Jinja.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.chat_template)

    @cached_property
    def _names(self) -> Names:
        return Names(self._bpe)

    @cached_property
    def _sections(self) -> SectionEncoder:
        return SectionEncoder(self._bpe)

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """The conversation as the template writes it, with marks around people's text that names a special token.

        Errors: ValueError for a conversation that the template refuses, and where it cannot be told whether the
        template or a message wrote a special token's name.
        """
        contents = [message["content"] for message in messages]
        marked = [self._names.marked(content) for content in contents]
        text = self._rendered(messages, marked, add_generation_prompt)
        read = self._names.read(text) if marked != contents else None
        plain = text if read is None else read.text
        if read is not None and plain != self._rendered(messages, contents, add_generation_prompt):
            raise ValueError(
                f"chat_template {self.chat_template!r} looks into messages for names of special tokens, which are"
                " text there; a template that writes messages as they are was expected"
            )
        if not all(content.strip() in plain for content in contents):
            self._check_rewritten(messages, text, add_generation_prompt)
        return text

    def _check_rewritten(self, messages: Messages, text: str, add_generation_prompt: bool) -> None:
        """What a template changes in a message must not become a special token's name.

        Errors: ValueError where the special tokens are not those that it writes whatever the messages say.
        """
        marked = [marked_throughout(message["content"]) for message in messages]
        whatever = self._names.read(self._rendered(messages, marked, add_generation_prompt))
        if self._ids_of(whatever) != self._ids_of(self._names.read(text)):
            raise ValueError(
                f"chat_template {self.chat_template!r} makes the name of a special token out of a message's text"
            )

    @staticmethod
    def _ids_of(rendered: Rendered) -> list[int]:
        return [special.token_id for special in rendered.specials]

    def _rendered(self, messages: Messages, contents: Sequence[str], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[{**message, "content": text} for message, text in zip(messages, contents, strict=True)],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.start,
                eos_token=self.end,
                pad_token=self.pad,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template {self.chat_template!r}: {error}") from None

    def marked(self, content: str) -> str:
        """A message's text as `render` writes it, for `encode_rendered`: special tokens' names in it stay text."""
        return self._names.marked(content)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of what `render` gives: special where the template wrote them, spelled out in messages."""
        return self._encode_all([(text, [])])[0][0]

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Tokens up to where the assistant's next response begins."""
        text = self.render(messages, add_generation_prompt=True)
        # A template may show earlier turns otherwise than it did when they were the last.
        turns = [turn for before, whole in self._beginnings(messages) if (turn := _turn(text, before, whole))]
        return self._encode_all([(text, turns)])[0][0]

    def encode_conversation(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """`encode_conversations` of one."""
        return self.encode_conversations([messages])[0]

    def encode_conversations(self, conversations: Sequence[Messages]) -> list[tuple[list[int], list[bool]]]:
        """Tokens of each, and of each token whether an assistant's response has it, up to and with its end token.

        They are the tokens of the whole rendering, and a prompt's tokens are always a prefix of them (`lm.sections`
        says how both can be). Many conversations at a time are encoded on all the library's threads.
        Errors: ValueError for a template whose rendering of a conversation does not extend that of its beginning.
        """
        return self._encode_all([self._with_turns(messages) for messages in conversations])

    def _with_turns(self, messages: Messages) -> tuple[str, list[Turn]]:
        beginnings = list(self._beginnings(messages))
        if messages and messages[-1]["role"] == "assistant":
            text = beginnings[-1][1]
        else:
            text = self.render(messages, add_generation_prompt=False)
        turns: list[Turn] = []
        for before, whole in beginnings:
            turn = _turn(text, before, whole)
            if turn is None:
                wrong = before if not text.startswith(before) else whole
                raise ValueError(
                    f"chat_template: the rendering {text!r} does not start with {wrong!r};"
                    " a template must only append when a message is added"
                )
            turns.append(turn)
        return text, turns

    def _beginnings(self, messages: Messages) -> Iterator[tuple[str, str]]:
        """What the template writes before each response, and up to where the next message begins."""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:index], add_generation_prompt=True)
                yield before, self.render(messages[: index + 1], add_generation_prompt=False)

    def _encode_all(self, marked: Sequence[tuple[str, Sequence[Turn]]]) -> list[tuple[list[int], list[bool]]]:
        """Tokens and marks of renderings whose turns are given in their characters, on all the library's threads."""
        folded = self._names.is_folded
        conversations = [self._cut(text, turns, finds_names=folded) for text, turns in marked]
        known = self._sections.encode(section for of_one in conversations for section in of_one.sections())

        def encoded(section: Section) -> Encoding:
            if section not in known:
                known.update(self._sections.encode([section]))
            return known[section]

        if folded:
            names_people = [of_one.names_people(encoded, self._names.is_special) for of_one in conversations]
            for place, (text, turns) in enumerate(marked):
                if names_people[place]:
                    conversations[place] = self._cut(text, turns, finds_names=False)
        return [conversation.tokens(encoded) for conversation in conversations]

    def _cut(self, text: str, turns: Sequence[Turn], *, finds_names: bool) -> Conversation:
        read = self._names.read(text, finds_late=not finds_names)
        places = [Turn(read.at(turn.start), read.at(turn.stop)) for turn in turns] if read.regions else turns
        return Conversation(read, places, self.end_id, finds_names=finds_names)


def _turn(text: str, before: str, whole: str) -> Turn | None:
    """Where a response stands in the text; None where the text does not start with what came up to it."""
    if not (text.startswith(whole) and whole.startswith(before)):
        return None
    return Turn(len(before), len(whole))


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which published templates show what the assistant says; its text is written as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as published templates mean it: Jinja's own would escape what HTML gives a meaning to."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _make_special(bpe: BPE, names: Iterable[str]) -> None:
    """What a config names as the padding token, the end token, ..., is special even where tokenizer.json says nothing.

    A name that the vocabulary does not have stays out: an id of its own would have no place in the model.
    """
    added = {token.content: token for token in bpe.get_added_tokens_decoder().values()}
    for name in names:
        token = added.get(name)
        if bpe.token_to_id(name) is None or (token is not None and token.special):
            continue
        flags = {"lstrip", "rstrip", "single_word", "normalized"} if token is not None else set()
        bpe.add_special_tokens([AddedToken(name, special=True, **{flag: getattr(token, flag) for flag in flags})])


_TOKEN_FIELDS = ("pad_token", "eos_token", "sep_token", "bos_token", "cls_token", "mask_token")


def _content(token: Any) -> Any:
    """A token's text; older files wrap it."""
    return token.get("content") if isinstance(token, dict) else token


def _refuse(message: str) -> None:
    """What a template calls for a conversation that it does not write."""
    raise jinja2.TemplateError(message)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Errors: ValueError naming the file and the place."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__} found; a JSON object was expected")
    return value
