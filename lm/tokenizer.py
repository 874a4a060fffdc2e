"""Vocabularies and chat templates: text to tokens and back."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jinja2.sandbox
from tokenizers import Encoding, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BPE

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

# Unicode's noncharacters, which are never exchanged, around the number of a special token that a message names.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_GUARDED = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


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
        start, mask = names["cls_token"] or names["bos_token"] or "", names["mask_token"] or ""
        tokens = {"pad": names["pad_token"], "end": names["eos_token"], "start": start, "mask": mask}
        return cls(bpe, **tokens, chat_template=template)

    def save(self, folder: Path) -> None:
        """Write the Hugging Face layout; `transformers` reads it as PreTrainedTokenizerFast."""
        folder.mkdir(parents=True, exist_ok=True)
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
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

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
        self._bpe.encode_special_tokens = True
        try:
            return self._bpe.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._bpe.encode_special_tokens = False

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
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(self.chat_template)

    @cached_property
    def _specials(self) -> list[str]:
        """Names of the special tokens, the longest first."""
        names = [token.content for token in self._bpe.get_added_tokens_decoder().values() if token.special]
        return sorted(names, key=len, reverse=True)

    def _guarded(self, content: str) -> str:
        """A message's text in which the names of special tokens stand between two characters that no text has."""
        for index, name in enumerate(self._specials):
            content = content.replace(name, f"{_OPEN}{index}{_CLOSE}")
        return content

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of what `render` gives: special where the template wrote them, spelled out in messages."""
        return self._encode_all([text])[0]

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_rendered` of each, on all the library's threads."""
        split = [_GUARDED.split(text) for text in texts]  # every other piece is a special token's number
        written = [piece for pieces in split for piece in pieces[::2]]
        encoded = (encoding.ids for encoding in self._bpe.encode_batch(written, add_special_tokens=False))
        result = []
        for pieces in split:
            tokens = list(next(encoded))
            for number in pieces[1::2]:
                tokens += self._spelled_specials[int(number)]
                tokens += next(encoded)
            result.append(tokens)
        return result

    @cached_property
    def _spelled_specials(self) -> list[list[int]]:
        return self.encode_plain(self._specials)

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """The conversation as the template writes it; names of special tokens inside messages are guarded."""
        try:
            return self._template.render(
                messages=[{**message, "content": self._guarded(message["content"])} for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.start,
                eos_token=self.end,
                pad_token=self.pad,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template {self.chat_template!r}: {error}") from None

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Tokens up to where the assistant's next response begins."""
        pieces = self._pieces(messages, opens=True)
        return list(itertools.chain.from_iterable(self._encode_all([piece.text for piece in pieces])))

    def encode_conversation(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """`encode_conversations` of one."""
        return self.encode_conversations([messages])[0]

    def encode_conversations(self, conversations: Sequence[Messages]) -> list[tuple[list[int], list[bool]]]:
        """Tokens of each, and of each token whether an assistant's response has it, up to and with its end token.

        A conversation is encoded piece by piece, so a prompt's tokens are always a prefix of the whole; many at a time
        are encoded on all the library's threads.
        Errors: ValueError for a template whose rendering of a conversation does not extend that of its beginning.
        """
        pieces = [self._pieces(messages, opens=False) for messages in conversations]
        encoded = iter(self._encode_all([piece.text for of_one in pieces for piece in of_one]))
        return [self._joined(of_one, [next(encoded) for _ in of_one]) for of_one in pieces]

    def _pieces(self, messages: Messages, *, opens: bool) -> list["_Piece"]:
        """What the template writes, cut before and behind every response; `opens` asks for the next response."""
        pieces: list[_Piece] = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                pieces.append(_added(self.render(messages[:index], add_generation_prompt=True), _written(pieces)))
                whole = self.render(messages[: index + 1], add_generation_prompt=False)
                pieces.append(_added(whole, _written(pieces), speaks=True))
        if opens or not pieces or messages[-1]["role"] != "assistant":
            pieces.append(_added(self.render(messages, add_generation_prompt=opens), _written(pieces)))
        return pieces

    def _joined(self, pieces: Sequence["_Piece"], encoded: Sequence[list[int]]) -> tuple[list[int], list[bool]]:
        tokens: list[int] = []
        is_response: list[bool] = []
        for piece, ids in zip(pieces, encoded, strict=True):
            # What a template writes after the end token, a line break say, is never sampled and must not count.
            end = ids.index(self.end_id) + 1 if piece.speaks and self.end_id in ids else len(ids)
            tokens += ids
            is_response += [piece.speaks] * end + [False] * (len(ids) - end)
        return tokens, is_response


@dataclass(frozen=True)
class _Piece:
    """Text that a template added to what it had written, `before` it; whether that is an assistant's response."""

    before: str
    text: str
    speaks: bool


def _written(pieces: Sequence[_Piece]) -> str:
    return pieces[-1].before + pieces[-1].text if pieces else ""


def _added(whole: str, before: str, *, speaks: bool = False) -> _Piece:
    if not whole.startswith(before):
        raise ValueError(
            f"chat_template: the rendering {whole!r} does not start with {before!r};"
            " a template must only append when a message is added"
        )
    return _Piece(before, whole[len(before) :], speaks)


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
