"""Small vocabularies of every kind that published models use, with chat templates written like theirs."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lm.tokenizer import Tokenizer as Ours

TEXTS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "A bird in the hand is worth two in the bush, and the bush is far.",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein. 山高月小。",
    "user\nThe fox and the dog and the bird went over the bush.\nassistant\nsystem\n\nBe brief.",
)
PAD, START, END = "<pad>", "<s>", "</s>"
NAMES = (
    PAD, START, END, "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]",
)  # fmt: skip
TOOL = "<tool>"  # added, but not special
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
    "{% for message in loop_messages %}{% set content = system + message['content'] if loop.index0 == 0 else"
    " message['content'] %}{% if message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
LLAMA_3_CHAT = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML, "generation": GENERATION, "llama 2": LLAMA_2, "llama 3": LLAMA_3_CHAT, "zephyr": ZEPHYR,
    "mistral": MISTRAL,
}  # fmt: skip
ENDS = {"chatml": "<|im_end|>", "generation": "<|im_end|>", "llama 3": "<|eot_id|>"}


_SPACES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def byte_level(**how: object) -> Tokenizer:
    """GPT-2's kind; `normalizer` and `split` come before the bytes."""
    bpe = Tokenizer(models.BPE())
    if "normalizer" in how:
        bpe.normalizer = how["normalizer"]
    split = how.get("split")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=bool(how.get("prefix")), use_regex=split is None)
    bpe.pre_tokenizer = bytes_alone if split is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(str(split)), "isolated"), bytes_alone]
    )  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    _train(
        bpe,
        trainers.BpeTrainer(vocab_size=360, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    return bpe


def metaspace(scheme: str) -> Tokenizer:
    """SentencePiece's BPE in newer files: rare characters are bytes."""
    bpe = _bytes_for_rare(pre_tokenizers.Metaspace(prepend_scheme=scheme))
    bpe.decoder = _SPACES
    return bpe


def llama_2() -> Tokenizer:
    """SentencePiece's BPE in older files: the normaliser writes spaces, and nothing is split."""
    bpe = _bytes_for_rare(pre_tokenizers.Metaspace(prepend_scheme="always"))
    bpe.pre_tokenizer = None
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = _SPACES
    return bpe


def _bytes_for_rare(splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.pre_tokenizer = splits
    # Bytes are ordinary tokens of the vocabulary, so they are trained as such and are not special.
    _train(
        bpe, trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=["<unk>"], initial_alphabet=["▁"])
    )
    described = json.loads(bpe.to_str())
    vocabulary = described["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    return Tokenizer.from_str(json.dumps(described))


def unigram() -> Tokenizer:
    vocabulary = Tokenizer(models.Unigram())
    vocabulary.normalizer = normalizers.NFKC()
    vocabulary.pre_tokenizer = pre_tokenizers.Metaspace()
    vocabulary.decoder = decoders.Metaspace()
    _train(
        vocabulary,
        trainers.UnigramTrainer(vocab_size=120, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"),
    )
    return vocabulary


def wordpiece() -> Tokenizer:
    vocabulary = Tokenizer(models.WordPiece(unk_token="<unk>"))
    vocabulary.normalizer = normalizers.BertNormalizer()
    vocabulary.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    vocabulary.decoder = decoders.WordPiece()
    _train(vocabulary, trainers.WordPieceTrainer(vocab_size=160, show_progress=False, special_tokens=["<unk>"]))
    return vocabulary


def _train(vocabulary: Tokenizer, trainer: trainers.Trainer) -> None:
    vocabulary.train_from_iterator(TEXTS, trainer)


def _named(vocabulary: Tokenizer, **flags: bool) -> Tokenizer:
    vocabulary.add_special_tokens([AddedToken(name, special=True, **{"normalized": False, **flags}) for name in NAMES])
    vocabulary.add_tokens([AddedToken(TOOL, special=False, normalized=False)])
    return vocabulary


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: _named(byte_level()),
    "byte-level, prefix": lambda: _named(byte_level(prefix=True)),
    "llama 3": lambda: _named(byte_level(split=LLAMA_3)),
    "qwen 2": lambda: _named(byte_level(split=QWEN_2, normalizer=normalizers.NFC())),
    "lower case": lambda: _named(byte_level(normalizer=normalizers.Lowercase())),
    "metaspace, first": lambda: _named(metaspace("first")),
    "metaspace, always": lambda: _named(metaspace("always")),
    "metaspace, never": lambda: _named(metaspace("never")),
    "llama 2": lambda: _named(llama_2()),
    "unigram": lambda: _named(unigram()),
    "wordpiece": lambda: _named(wordpiece()),
    "spaces behind names are taken in": lambda: _named(metaspace("first"), rstrip=True),
    "spaces before names are taken in": lambda: _named(byte_level(), lstrip=True),
    "names are words": lambda: _named(byte_level(), single_word=True),
    "names are normalised, llama 2": lambda: _named(llama_2(), normalized=True),
    "names are normalised, lower case": lambda: _named(byte_level(normalizer=normalizers.Lowercase()), normalized=True),
    "names are normalised, as they are": lambda: _named(byte_level(), normalized=True),
}


def ours(kind: str, template: str) -> Ours:
    return Ours(KINDS[kind](), pad=PAD, end=ENDS.get(template, END), start=START, chat_template=TEMPLATES[template])


def saved(kind: str, template: str, folder: Path) -> Path:
    ours(kind, template).save(folder)
    return folder
