"""Two judges that know nothing of quality, whose agreement with people docs/comparing.md reports."""

from collections.abc import Sequence

from lm.tokenizer import Messages


def length(_prompts: Sequence[Messages], responses: Sequence[str]) -> list[int]:
    """Returns characters."""
    return [len(response) for response in responses]


def overlap(prompts: Sequence[Messages], responses: Sequence[str]) -> list[float]:
    """Returns the share of the last turn's distinct words, without punctuation and case, that the response has."""
    asked, found = [_words(prompt[-1]["content"]) for prompt in prompts], map(_words, responses)
    return [len(words & own) / max(len(words), 1) for words, own in zip(asked, found, strict=True)]


def _words(text: str) -> set[str]:
    return {word.strip(".,!?;:\"'()").lower() for word in text.split()}
