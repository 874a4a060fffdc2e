"""Vocabularies and chat templates: text to tokens and back."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BPE

from lm.chat_encoding import Conversation, Names, Section, SectionEncoder, Turn, encode_texts
from lm.chat_template import CHAT_TEMPLATES as CHAT_TEMPLATES  # also for users of this module
from lm.chat_template import NON_THINKING, THINKING, ChatTemplate
from lm.chat_template import Messages as Messages
from lm.tool_calls import CALL_TOKENS, AssistantMessage, read_tool_calls

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
ANY_MASK = "[MASK]"  # how a text names a hidden word, whatever the vocabulary's mask token is called
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]

GENERATION_CONFIG = "generation_config.json"
_BERT_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", GENERATION_CONFIG)


# How byte-level vocabularies write bytes: a printable one as its character in Latin-1, the others from U+0100 on, in
# order, as in `bytes_to_unicode` of GPT-2's encoder.py.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
_OWN_FIELDS = ("pad", "end", "start", "mask", "chat_template", "other_ends", "model_start", "target_start")


class Tokenizer:
    """A vocabulary with an end token and a chat template; `train` learns byte-level BPE.

    `pad`, `start` and `mask` are "" if the vocabulary has none. Masks come from lengths, so any token may fill the
    space after a text, even the end token. The start token opens an encoder's input (the end token stands in if there
    is none); the mask token hides a word from an encoder. `end` ends a text. A response may also end with the token
    that closes an assistant's turn in the chat template, or with one of `other_ends`: see `end_ids`. `model_start` is
    the start token that the model's own files name by number; Heed only hands it on. `target_start` is the token after
    which an encoder-decoder writes (T5: padding), or "" for the end token (BART).
    Raises: ValueError for a token that the vocabulary lacks.
    """

    def __init__(
        self,
        bpe: BPE,
        *,
        end: str,
        chat_template: str,
        pad: str = "",
        start: str = "",
        mask: str = "",
        other_ends: Sequence[str] = (),
        model_start: str = "",
        target_start: str = "",
    ) -> None:
        self._bpe = bpe
        self.pad, self.end, self.start, self.mask, self.chat_template = pad, end, start, mask, chat_template
        self.other_ends, self.model_start, self.target_start = tuple(other_ends), model_start, target_start
        self.end_id = self._id(end, "eos_token")
        self.pad_id = self._id(pad, "pad_token") if pad else self.end_id
        self.start_id = self._id(start, "bos_token") if start else self.end_id
        self.target_start_id = self._id(target_start, "decoder_start_token_id") if target_start else self.end_id

    def _id(self, token: str, field: str) -> int:
        token_id = self._bpe.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer: {field} {token!r} is not in the vocabulary")
        return int(token_id)

    @property
    def mask_id(self) -> int:
        """Raises: ValueError for a vocabulary without a mask token."""
        if not self.mask:
            raise ValueError(
                "tokenizer: mask_token is missing; a vocabulary with one was expected, to hide words by it"
            )
        return self._id(self.mask, "mask_token")

    @cached_property
    def turn_end_id(self) -> int:
        """The token that closes an assistant's turn in the chat template: `end_id` unless the template writes another.

        Qwen2.5's base model, for example, ends texts with `<|endoftext|>` but turns with `<|im_end|>`.
        """
        try:
            closing = self._template.closing_token()
        except ValueError:  # a template that refuses conversations is reported with the first real one
            closing = None
        return self.end_id if closing is None else closing

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Every token that ends a response: `turn_end_id` first, then `end_id` and the model's other end tokens."""
        others = (self._id(token, "eos_token_id") for token in self.other_ends)
        return tuple(dict.fromkeys([self.turn_end_id, self.end_id, *others]))

    @property
    def bos_id(self) -> int | None:
        """The `bos_token_id` of the model's files: the one they had, or else the start token, if there is one."""
        name = self.model_start or ("" if self.mask else self.start)
        return self._id(name, "bos_token_id") if name else None

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
        # A model that learns from masked words also learns that a text starts after an end token.
        start, mask = (END, MASK) if has_mask else ("", "")
        return cls(bpe, pad=PAD, end=END, chat_template=template, start=start, mask=mask)

    @classmethod
    def load(cls, folder: Path, *, end: str = "", model_folder: Path | None = None) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and, if they exist, `chat_template.jinja` and
        `generation_config.json` or `config.json`, whose `eos_token_id` may be a list of several end tokens.

        `end` overrides or supplies the config's end token. A model without a chat template gets the one called "chat".
        An adapter's folder has no such config: `model_folder` is the model's.
        Raises: ValueError naming the file and field.
        """
        vocabulary_path, config_path, template_path, _ = (folder / name for name in TOKENIZER_FILES)
        for path in (vocabulary_path, config_path):
            if not path.is_file():
                raise ValueError(f"{path}: no such file; a model directory with a tokenizer was expected")
        config = read_json(config_path)
        names = {field: _content(config.get(field)) for field in _TOKEN_FIELDS}
        for field, name in names.items():
            if name is not None and not isinstance(name, str):
                raise ValueError(f"{config_path}: {field} is {name!r}; a token of the vocabulary was expected")
        bpe = BPE.from_file(str(vocabulary_path))
        # Some files were saved with truncation or padding switched on.
        bpe.no_truncation()
        bpe.no_padding()
        ends = _model_tokens(folder, bpe, "eos_token_id")
        if not ends and model_folder is not None:
            ends = _model_tokens(model_folder, bpe, "eos_token_id")
        # In BERT, the separator ends a text and the classifier's token starts one.
        names["eos_token"] = end or names["eos_token"] or names["sep_token"] or next(iter(ends), None)
        if names["eos_token"] is None:
            raise ValueError(
                f"{config_path}: eos_token is missing, and neither {GENERATION_CONFIG} nor config.json has an"
                " eos_token_id; name the token that ends a text with end_token"
            )
        template = _named_template(config.get("chat_template"), config_path) or CHAT_TEMPLATES["chat"]
        if template_path.is_file():
            template = template_path.read_text(encoding="utf-8")
        _make_special(bpe, [name for name in [*names.values(), *ends] if name is not None])
        return cls(
            bpe,
            end=names["eos_token"],
            # Some files name a padding token that was never added to the vocabulary; none is needed.
            pad=names["pad_token"] if names["pad_token"] and bpe.token_to_id(names["pad_token"]) is not None else "",
            start=names["cls_token"] or names["bos_token"] or "",
            mask=names["mask_token"] or "",
            chat_template=template,
            other_ends=[token for token in ends if token != names["eos_token"]],
            model_start=next(iter(_model_tokens(folder, bpe, "bos_token_id")), ""),
            target_start=next(iter(_model_tokens(folder, bpe, "decoder_start_token_id")), ""),
        )

    def save(self, folder: Path) -> None:
        """Write the Hugging Face layout; `transformers` reads it as PreTrainedTokenizerFast."""
        folder.mkdir(exist_ok=True)
        self._bpe.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **({"pad_token": self.pad} if self.pad else {}),
            "eos_token": self.end,
            **({"bos_token": self.start} if self.start else {}),
            **({"mask_token": self.mask, "cls_token": self.start or self.end} if self.mask else {}),
            **({"sep_token": self.end, "model_input_names": list(_BERT_INPUTS)} if self._marks_second_text else {}),
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        path = folder / GENERATION_CONFIG
        path.write_text(json.dumps(self.generation_config(), indent=2) + "\n", encoding="utf-8")

    @property
    def _marks_second_text(self) -> bool:
        """Whether the vocabulary gives the second of two texts another type than the first, as BERT's does."""
        marks_texts = bool(self.mask) and self._bpe.post_processor is not None
        return marks_texts and self._bpe.encode("a", "b").type_ids[-1] == 1

    def generation_config(self) -> dict[str, Any]:
        """Returns what transformers and vLLM read before they sample: the start token, every end token, padding."""
        return {
            **({} if self.bos_id is None else {"bos_token_id": self.bos_id}),
            "eos_token_id": list(self.end_ids) if len(self.end_ids) > 1 else self.end_id,
            **({"pad_token_id": self.pad_id} if self.pad else {}),
            **({"decoder_start_token_id": self.target_start_id} if self.target_start else {}),
        }

    def __eq__(self, other: object) -> bool:
        """Whether both turn every conversation into the same tokens."""
        if not isinstance(other, Tokenizer) or self._own_part() != other._own_part():
            return False
        return self._bpe is other._bpe or self._vocabulary_hash == other._vocabulary_hash

    def _own_part(self) -> tuple[str, ...]:
        """What `==` compares in addition to the vocabulary."""
        target_start = () if self.target_start in ("", self.end) else (self.target_start,)
        return self.end, self.start, self.chat_template, *target_start

    @cached_property
    def _vocabulary_hash(self) -> bytes:
        """A hash of the vocabulary; cached because it serializes several MB, and scorers compare every iteration."""
        return hashlib.sha256(self._bpe.to_str().encode()).digest()

    @property
    def sha256(self) -> str:
        """A hash of everything that `==` compares."""
        return hashlib.sha256(json.dumps([self._bpe.to_str(), *self._own_part()]).encode()).hexdigest()

    @property
    def vocabulary(self) -> BPE:
        """The `tokenizers` object, for code that writes it in another format."""
        return self._bpe

    @property
    def vocab_size(self) -> int:
        return int(self._bpe.get_vocab_size())

    def with_template(self, chat_template: str) -> "Tokenizer":
        """Returns this vocabulary with another template: a name of CHAT_TEMPLATES, Jinja text, "" for its own, or
        "non-thinking" for its own with thoughts turned off.

        Raises: ValueError for "non-thinking" if its own has no such switch.
        """
        if chat_template == "non-thinking":
            if THINKING not in self.chat_template:
                raise ValueError(
                    f'chat_template = "non-thinking": the model\'s own chat template has no {THINKING}; "" (its'
                    ' own as it is), "chat" or a Jinja template was expected'
                )
            chat_template = NON_THINKING + self.chat_template.removeprefix(NON_THINKING)
        template = CHAT_TEMPLATES.get(chat_template, chat_template) or self.chat_template
        return self._changed(chat_template=template)

    def with_distinct_pad(self) -> "Tokenizer":
        """Returns this tokenizer with a padding token that ends no response, or without one if the vocabulary has none.

        transformers reads a reward model's score at the last token that is not padding. If the end token were padding,
        that would be one token too early.
        """
        if self.pad and self.pad_id not in self.end_ids:
            return self
        taken, added = {*self.end_ids, self.start_id}, sorted(self._bpe.get_added_tokens_decoder().items())
        spare = (token.content for number, token in added if token.special and number not in taken)
        return self._changed(pad=next(spare, ""))

    def _changed(self, **changes: Any) -> "Tokenizer":
        fields = {name: getattr(self, name) for name in _OWN_FIELDS}
        return Tokenizer(self._bpe, **{**fields, **changes})

    def encode(self, text: str) -> list[int]:
        """Encodes text from a template: a special token's name becomes that token."""
        return list(encode_texts(self._bpe, [text], finds_names=True)[0].ids)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes user text, on all the library's threads: a special token's name is spelled out as text."""
        return [encoding.ids for encoding in self._encode_plain(texts)]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """As `encode_plain`, with the characters (start, end) of the text that each token spells, without white space
        around them.
        """
        encoded = []
        for text, encoding in zip(texts, self._encode_plain(texts), strict=True):
            spelled = [(text[start:end], end) for start, end in encoding.offsets]
            places = [(end - len(part.lstrip()), end - len(part) + len(part.rstrip())) for part, end in spelled]
            encoded.append((list(encoding.ids), [(min(start, end), end) for start, end in places]))
        return encoded

    def spelled_bytes(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns how many bytes of text each token of `encode_plain` stands for; they sum to the text's bytes.

        Text that a vocabulary drops (WordPiece drops spaces) counts with the next token, or at the end with the last
        one. An unknown token stands for the text that it replaces.
        """
        encodings = self._encode_plain(texts)
        return [self._spelled_bytes(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _encode_plain(self, texts: Sequence[str]) -> list[Encoding]:
        return encode_texts(self._bpe, texts, finds_names=False)

    def _spelled_bytes(self, text: str, encoding: Encoding) -> list[int]:
        # A byte-level token may end inside a character, which offsets cannot express, but its name has a character per
        # byte. These do not add up to the text only if it was normalised or a space was put before it.
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
        """Decodes tokens to text, without special tokens."""
        return str(self._bpe.decode(list(tokens), skip_special_tokens=True))

    def assistant_message(self, tokens: Sequence[int]) -> AssistantMessage:
        """Returns a turn of the assistant with the calls of tools in it. Its text has the special tokens that open
        calls, and no others. Never raises.
        """
        parts, done = list[str](), 0
        for place, token in enumerate(tokens):
            if token in self._call_ids:
                parts += [self.decode(tokens[done:place]), self.token_text(token)]
                done = place + 1
        return read_tool_calls("".join([*parts, self.decode(tokens[done:])]), self.chat_template)

    @cached_property
    def _call_ids(self) -> set[int]:
        numbers = (self._bpe.token_to_id(name) for name in CALL_TOKENS)
        return {number for number in numbers if number is not None and self.is_special(number)}

    def stop_at(self, strings: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        """Returns a stop condition for `lm.generation`: whether a response's text contains one of the strings.

        The token that completes a string may contain more text, so cut the text where the string begins.
        Raises: ValueError for an empty string, which every text contains.
        """
        if not all(strings):
            raise ValueError(f"stop strings are {list(strings)}; an empty one would end every response at once")
        longest = max((len(string.encode()) for string in strings), default=0)

        def holds(response: Sequence[int]) -> bool:
            tail = self.decode(response[-longest:])  # a token has at least one byte
            return any(string in tail for string in strings)

        return holds

    def token_text(self, token: int) -> str:
        return str(self._bpe.id_to_token(token))

    def spelled(self, token: int) -> str | bytes:
        """Returns the text that a token stands for, or its bytes if it holds only a part of a character.

        WordPiece's continuations keep their `##`, special tokens are their names, and a number beyond the vocabulary
        (models may have more rows than it has tokens) is "".
        """
        name = str(self._bpe.id_to_token(token) or "")
        single = re.fullmatch("<0x([0-9A-F]{2})>", name)  # how SentencePiece names bytes
        if single:
            raw = bytes.fromhex(single[1])
        elif isinstance(self._bpe.decoder, decoders.ByteLevel) and _BYTES.keys() >= set(name):
            raw = bytes(_BYTES[character] for character in name)
        else:
            return name.replace("▁", " ")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def is_special(self, token: int) -> bool:
        return self._names.is_special(token)

    def encode_masked(self, text: str) -> list[int]:
        """Encodes user text in which `[MASK]`, or the mask token's own name, stands for a hidden word.

        A space before a mask belongs to the hidden word, as in a vocabulary whose words begin with their space.
        Raises: ValueError for a mask if the vocabulary has no mask token.
        """
        *before, last = self.split_at_masks(text)
        first, *others = self.encode_plain([*(part.removesuffix(" ") for part in before), last])
        return first + [token for part in others for token in (self.mask_id, *part)]

    def split_at_masks(self, text: str) -> list[str]:
        """Returns the text before, between and after masks."""
        return (text.replace(self.mask, ANY_MASK) if self.mask else text).split(ANY_MASK)

    @cached_property
    def _names(self) -> Names:
        return Names(self._bpe)

    @cached_property
    def _template(self) -> ChatTemplate:
        tokens = {"bos_token": self.start, "eos_token": self.end, "pad_token": self.pad}
        return ChatTemplate(self.chat_template, self._names, tokens)

    @cached_property
    def _sections(self) -> SectionEncoder:
        return SectionEncoder(self._bpe)

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Returns the conversation as `ChatTemplate.render` writes it."""
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def marked(self, content: str) -> str:
        """Returns a message's text as `render` writes it, for `encode_rendered`: special tokens' names remain text."""
        return self._names.marked(content)

    def encode_rendered(self, text: str) -> list[int]:
        """Encodes a `render` result. Special tokens' names become tokens in the template's text, not in messages."""
        return self._encode_all([(text, [])])[0][0]

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Returns the tokens up to the start of the assistant's next response."""
        return self.encode_prompts([messages])[0]

    def encode_prompts(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Applies `encode_prompt` to each, on all the library's threads."""
        return [tokens for tokens, _ in self._encode_all([*map(self._rendered_prompt, prompts)])]

    def _rendered_prompt(self, messages: Messages) -> tuple[str, list[Turn]]:
        text = self.render(messages, add_generation_prompt=True)
        # A template may render an earlier turn differently from when it was the last one.
        turns = (beginning.turn_in(text) for beginning in self._template.beginnings(messages))
        return text, [turn for turn in turns if turn is not None]

    def encode_reply(self, messages: Messages) -> list[int]:
        """Returns the tokens that follow an assistant's turn when others answer it: all that the template writes after
        the token that closes the turn, up to the start of the next turn.

        They are appended to what a policy sampled, which is neither rendered nor tokenized again.
        Raises: ValueError for a template that refuses the messages, or does not only append.
        """
        text, turn = self._template.render_reply(messages)
        ((tokens, is_response),) = self._encode_all([(text, [turn])])
        return tokens[len(is_response) - is_response[::-1].index(True) :]

    def encode_conversation(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Applies `encode_conversations` to a single conversation."""
        return self.encode_conversations([messages])[0]

    def encode_conversations(self, conversations: Sequence[Messages]) -> list[tuple[list[int], list[bool]]]:
        """Returns each conversation's tokens, and per token whether it belongs to a response, including its end token.

        They are the tokens of the whole rendering, and a prompt's tokens are always a prefix of them;
        `lm.chat_encoding` explains how. Many conversations at once are encoded on all the library's threads. A response
        that the template writes differently once messages follow is not marked.
        Raises: ValueError for a template whose rendering of the last response does not extend that of its prompt.
        """
        return self._encode_all([next(self._template.renderings(messages)) for messages in conversations])

    def encode_responses(self, conversations: Sequence[Messages]) -> list[list[tuple[list[int], list[bool]]]]:
        """As `encode_conversations`, with further sequences for the responses that are not marked in a conversation's
        first, so that each is marked once, after the tokens that a policy would see before it.
        """
        renderings = [list(self._template.renderings(messages)) for messages in conversations]
        encoded = iter(self._encode_all([one for of_one in renderings for one in of_one]))
        return [[next(encoded) for _ in of_one] for of_one in renderings]

    def _encode_all(self, marked: Sequence[tuple[str, Sequence[Turn]]]) -> list[tuple[list[int], list[bool]]]:
        """Returns tokens and response marks of renderings with turns (in characters), on all the library's threads."""
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
        return Conversation(read, places, self.end_ids, finds_names=finds_names)


def _make_special(bpe: BPE, names: Iterable[str]) -> None:
    """Makes tokens special that the config names (padding, end, ...), even if tokenizer.json does not.

    A name that the vocabulary lacks is not added: the model has no embedding for a new id.
    """
    added = {token.content: token for token in bpe.get_added_tokens_decoder().values()}
    for name in names:
        token = added.get(name)
        if bpe.token_to_id(name) is None or (token is not None and token.special):
            continue
        flags = {"lstrip", "rstrip", "single_word", "normalized"} if token is not None else set()
        bpe.add_special_tokens([AddedToken(name, special=True, **{flag: getattr(token, flag) for flag in flags})])


def _model_tokens(folder: Path, bpe: BPE, field: str) -> list[str]:
    """Returns the tokens that the model's files name by number in a field, in order. Raises: ValueError naming file and
    field.

    A number counts only if it is one of the vocabulary's added tokens: transformers writes `eos_token_id` 2 and
    `bos_token_id` 1 into every config.json that was made without one, and token 2 may be a letter.
    """
    added = bpe.get_added_tokens_decoder()
    for path in (folder / GENERATION_CONFIG, folder / "config.json"):
        numbers = read_json(path).get(field) if path.is_file() else None
        if numbers is None:
            continue
        numbers = numbers if isinstance(numbers, list) else [numbers]
        if not all(type(number) is int for number in numbers):
            raise ValueError(f"{path}: {field} is {numbers}; a token's number, or a list of them, was expected")
        return [added[number].content for number in numbers if number in added]
    return []


def has_chat_template(folder: Path) -> bool:
    """Whether a model's files have a chat template. For those without one, `Tokenizer.load` supplies it."""
    path = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or bool(
        _named_template(read_json(path).get("chat_template"), path)
    )


def _named_template(template: Any, path: Path) -> str:
    """Returns the chat template; of several named ones, "default". Raises: ValueError naming file and field."""
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in template:
            raise ValueError(f'{path}: chat_template names {", ".join(map(str, template))}; "default" was expected')
        template = template["default"]
    if not isinstance(template, str | None):
        raise ValueError(f"{path}: chat_template is {type(template).__name__}; a string was expected")
    return template or ""


_TOKEN_FIELDS = ("pad_token", "eos_token", "sep_token", "bos_token", "cls_token", "mask_token")


def _content(token: Any) -> Any:
    """Returns a token's text; older files wrap it in an object."""
    return token.get("content") if isinstance(token, dict) else token


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises: ValueError naming the file and the place."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__} found; a JSON object was expected")
    return value
