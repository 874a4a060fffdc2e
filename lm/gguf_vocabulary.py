"""Converts the vocabulary in a GGUF file's metadata to the tokenizer files of a model directory, and back.

The file has the tokens and their merges or scores, but only the name of the rule that cuts text into words
(`tokenizer.ggml.pre`), which llama.cpp implements. Two kinds are read and written: byte-level BPE ("gpt2") and
SentencePiece's BPE ("llama").
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.tokenization_utils_base import generate_merges

from lm.tokenizer import Tokenizer as OurTokenizer

Metadata = Mapping[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = map(int, gguf.TokenType)
SPACE = "▁"  # SentencePiece's

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED % (f'{_ENDINGS}?', f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_CASED_REST}"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _words_and_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _words()])


# How text is cut before merges apply, by llama.cpp's names; an exported file gets the first name that fits.
_CUTS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de"), _words),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _words_and_digits),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), lambda: _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), lambda: _split(_QWEN2)),
    "tekken": lambda: _split(_TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), lambda: _split(_GPT4O)),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")  # a word that is a token is not cut
_COMPOSES = ("qwen2", "deepseek-r1-qwen", "megrez")  # Qwen normalises to NFC
# Any two of these rules cut these texts differently somewhere.
_PROBES = (
    "Hello world, it's 12345 o'clock; IT'S 3.14 and we'LL see.",
    "  two  spaces\t\ttabs\n\n\nlines \r\n end  ",
    "snake_case camelCase XMLHttpRequest http://a.b/c?d=e#f //comment\n/* x */",
    "naïve café Ünïcode Ελληνικά 漢字かな ไทย हिन्दी 😀👍🏽 1²³ ½ ٣٤٥",
)
_DECOMPOSED = "cafe\u0301"
_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask"}
_OTHER_ENDS = ("eot", "eom")  # the end of a turn, and of a message that awaits a tool's result
# Control tokens at which llama.cpp also ends a response, by name; from `special_eog_ids` in its src/llama-vocab.cpp.
# Left out: the tokens of fill-in-the-middle, and names that only architectures use that Heed does not read.
_NAMED_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>",
)  # fmt: skip


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """Returns the tokenizer files of a model directory: their texts by file name.

    Raises: ValueError naming a key of the metadata that is missing or has an unknown value.
    """
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list):
        raise ValueError("tokenizer.ggml.tokens is missing; a file with its vocabulary was expected")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; 'gpt2' or 'llama' was expected")
    vocabulary = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
    vocabulary.add_tokens(_added(metadata, tokens))
    names = dict[str, str]()
    for field, key in _TOKENS.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number >= len(tokens):
            raise ValueError(f"tokenizer.ggml.{key}_token_id is {number}; the file has {len(tokens)} tokens")
        names |= {} if number is None else {field: tokens[number]}
    adds_start = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in names
    if adds_start:
        start = names["bos_token"]
        vocabulary.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokens.index(start))]
        )
    template = metadata.get("tokenizer.chat_template")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": vocabulary.to_str(), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    ends = end_ids(metadata)
    if len(ends) > 1:
        files["generation_config.json"] = json.dumps({"eos_token_id": ends}, indent=2) + "\n"
    return files


def end_ids(metadata: Metadata) -> list[int]:
    """Returns the tokens that end a response: the main one first, then those with a key, then those with a name."""
    numbers = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", *_OTHER_ENDS))
    keyed = [number for number in numbers if number is not None]
    kinds, tokens = metadata.get("tokenizer.ggml.token_type", ()), metadata["tokenizer.ggml.tokens"]
    control = {tokens[number]: number for number, kind in enumerate(kinds) if kind == CONTROL}
    return list(dict.fromkeys([*keyed, *(control[name] for name in _NAMED_ENDS if name in control)]))


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre", "missing")
    if cut not in _CUTS:
        raise ValueError(f"tokenizer.ggml.pre is {cut!r}; one of {', '.join(_CUTS)} was expected")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    try:
        bpe = models.BPE(_numbers(metadata, tokens), merges, ignore_merges=cut in _WHOLE_WORDS)
    except Exception as error:  # the library raises nothing more specific for a merge whose parts are not tokens
        raise ValueError(f"tokenizer.ggml.merges: {error}") from None
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer, tokenizer.decoder = _CUTS[cut](), decoders.ByteLevel()
    if cut in _COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    numbers = _numbers(metadata, tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ValueError("tokenizer.ggml.scores is missing; a SentencePiece vocabulary merges tokens by their scores")
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    if UNKNOWN not in kinds:
        raise ValueError("tokenizer.ggml.token_type names no unknown token; one was expected")
    plain = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, USER_DEFINED)}
    by_token = {token: score for token, score in zip(tokens, scores, strict=True) if token in plain}
    merges = generate_merges({token: number for token, number in numbers.items() if token in plain}, by_token)
    unknown = tokens[list(kinds).index(UNKNOWN)]
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if has_space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if has_space else [])])
    return tokenizer


def _numbers(metadata: Metadata, tokens: Sequence[str]) -> dict[str, int]:
    """Returns the number of each token, except those that only pad the embedding."""
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    return {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if not (kind == UNUSED and token == _filler(number))
    }


def _filler(number: int) -> str:
    return f"[PAD{number}]"


def _added(metadata: Metadata, tokens: Sequence[str]) -> list[AddedToken]:
    """Returns tokens that are matched whole before text is cut; with SentencePiece also the unknown token."""
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    whole = (CONTROL, USER_DEFINED, UNKNOWN)
    return [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in whole
    ]


def vocabulary_metadata(tokenizer: OurTokenizer, num_embeddings: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, with a token for each of a model's embeddings.

    Raises: ValueError for a vocabulary of another kind, or whose rule for cutting text llama.cpp does not know.
    """
    backend = tokenizer.vocabulary
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE":
        raise ValueError(f"the vocabulary is {model['type']}; BPE, which llama.cpp merges as Heed does, was expected")
    numbers = backend.get_vocab(with_added_tokens=True)
    if max(numbers.values()) >= num_embeddings:
        raise ValueError(f"the vocabulary has {max(numbers.values()) + 1} tokens, the model {num_embeddings}")
    tokens = [_filler(number) for number in range(num_embeddings)]
    kinds = [UNUSED] * num_embeddings
    for token, number in numbers.items():
        tokens[number], kinds[number] = token, NORMAL
    for number, added in backend.get_added_tokens_decoder().items():
        kinds[number] = CONTROL if added.special else USER_DEFINED
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    fields: dict[str, Any] = {"tokens": tokens, "token_type": kinds}
    if is_byte_level:
        fields |= {"model": "gpt2", "pre": _cut_of(backend), "merges": merges, "add_space_prefix": False}
    else:
        fields |= {"model": "llama", "pre": "default", **_sentencepiece_metadata(backend, model, tokens, kinds)}
    fields |= _token_metadata(tokenizer, backend)
    metadata = {
        **{f"tokenizer.ggml.{key}": value for key, value in fields.items()},
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    _expect_same_tokens(backend, metadata)
    return metadata


def _expect_same_tokens(backend: Tokenizer, metadata: Metadata) -> None:
    """Check that a vocabulary and its metadata give the same tokens. Raises: ValueError if some text differs."""
    again = Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    # `_cut_of` has compared normalisers. Qwen's composes characters; llama.cpp does not, and that is accepted.
    probes = _PROBES if metadata["tokenizer.ggml.model"] == "gpt2" else (*_PROBES, _DECOMPOSED)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    texts = [*probes, *(token + probe for token in added for probe in probes)]
    ours, theirs = (one.encode_batch(texts, add_special_tokens=False) for one in (backend, again))
    pairs = [(text, one.tokens, other.tokens) for text, one, other in zip(texts, ours, theirs, strict=True)]
    # If merges differ anywhere, they differ in some token's own text: merges inside a token depend on nothing else.
    models = backend.model, again.model
    for token in (token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL):
        one, other = ([part.value for part in model.tokenize(token)] for model in models)
        pairs.append((token, one, other))
    for text, one, other in pairs:
        if one != other:
            place = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            raise ValueError(
                f"in {text!r}, the vocabulary has the tokens {one[place : place + 4]} where llama.cpp would have"
                f" {other[place : place + 4]}; a vocabulary that llama.cpp reads in the same way was expected"
            )


def _token_metadata(tokenizer: OurTokenizer, backend: Tokenizer) -> dict[str, Any]:
    # Only three ends have keys; llama.cpp also ends a response at tokens that it knows by name, so others need none.
    others = [number for number in tokenizer.end_ids if number != tokenizer.end_id]
    fields: dict[str, Any] = {f"{key}_token_id": number for key, number in zip(_OTHER_ENDS, others, strict=False)}
    fields["eos_token_id"] = tokenizer.end_id
    if tokenizer.pad:
        fields["padding_token_id"] = tokenizer.pad_id
    first = backend.encode("a").ids[:1]
    fields["add_bos_token"] = bool(tokenizer.start) and first == [tokenizer.start_id]
    if tokenizer.start:
        fields["bos_token_id"] = tokenizer.start_id
    if tokenizer.mask:
        fields["mask_token_id"] = tokenizer.mask_id
    return fields


def _cut_of(backend: Tokenizer) -> str:
    """Returns llama.cpp's name for the rule by which a byte-level vocabulary cuts text."""
    if not isinstance(backend.normalizer, normalizers.NFC | None):
        raise ValueError(f"the vocabulary normalises text by {type(backend.normalizer).__name__}; llama.cpp does not")

    def cut(rule: pre_tokenizers.PreTokenizer) -> list[list[str]]:
        return [[word for word, _ in rule.pre_tokenize_str(text)] for text in _PROBES]

    found = None if backend.pre_tokenizer is None else cut(backend.pre_tokenizer)
    name = next((name for name, rule in _CUTS.items() if cut(rule()) == found), None)
    if name is None:
        raise ValueError("the vocabulary cuts text into words by a rule that llama.cpp has no name for")
    return name


def _sentencepiece_metadata(
    backend: Tokenizer, model: Mapping[str, Any], tokens: Sequence[str], kinds: list[int]
) -> dict[str, Any]:
    """Returns scores, which are lower for later merges; marks the bytes and the unknown token in `kinds`."""
    if not model["byte_fallback"] or SPACE not in "".join(tokens):
        raise ValueError("the vocabulary is neither byte-level BPE nor SentencePiece's with bytes; one was expected")
    ranks = dict[str, int]()
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    for number, token in enumerate(tokens):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[number] = BYTE
        elif token == model["unk_token"]:
            kinds[number] = UNKNOWN
    last = len(model["merges"])
    scores = [
        -float(ranks.get(token, last)) if kind == NORMAL else 0.0 for token, kind in zip(tokens, kinds, strict=True)
    ]
    first = backend.encode("a", add_special_tokens=False).tokens[0]
    has_unknown = {"unknown_token_id": tokens.index(model["unk_token"])} if model["unk_token"] else {}
    return {"scores": scores, "add_space_prefix": first.startswith(SPACE), **has_unknown}
