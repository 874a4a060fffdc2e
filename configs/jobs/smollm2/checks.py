"""Rewards that a program can check: how far a response follows the instruction at the end of its prompt.

The job smollm2.toml trains on prompts.jsonl with `reward`, which gives partial credit for coming close: at first the
model never follows some of the instructions, and it could not learn from zeros alone. `followed` gives no partial
credit; it judges heldout.jsonl (the same kinds of instruction, other topics) and new-kinds.jsonl (kinds that training
never sees).
"""

import re
from collections.abc import Callable, Mapping, Sequence

MIN_WORDS = 4  # a response with fewer words is no answer, whatever the instruction says
# Words of the prompts that are not about their topic.
TASK_WORDS = {
    "describe", "tell", "something", "about", "write", "short", "text", "what", "people", "like", "explain", "child",
    "the", "and", "for",
}  # fmt: skip
STEM = 4  # so many letters of a topic's word must begin a word of the response

Prompts = Sequence[Sequence[Mapping[str, str]]]


def reward(prompts: Prompts, responses: Sequence[str]) -> list[float]:
    """Returns 1.0 for each response that follows its instruction, and up to 0.5 for coming close; higher is better."""
    degrees = (degree(prompt[-1]["content"], text) for prompt, text in zip(prompts, responses, strict=True))
    return [found if found == 1.0 else found / 2 for found in degrees]


def followed(prompts: Prompts, responses: Sequence[str]) -> list[float]:
    """Returns 1.0 for each response that follows its prompt's instruction, else 0.0."""
    pairs = zip(prompts, responses, strict=True)
    return [float(degree(prompt[-1]["content"], response) == 1.0) for prompt, response in pairs]


def degree(prompt: str, response: str) -> float:
    """Returns how far the response follows the prompt's instruction, 0 to 1; 1 only if it follows it exactly and
    mentions the topic: "This is a creative idea." obeys most instructions, and a policy finds that out.

    Raises: ValueError for a prompt that contains none of the instructions in KINDS.
    """
    text = response.strip()
    for pattern, measure in KINDS.items():
        if match := re.search(pattern, prompt):
            if len(_words(text)) < MIN_WORDS:
                return 0.0
            return measure(text, *match.groups()) / (1 if _is_about(text, prompt[: match.start()]) else 2)
    raise ValueError(f"prompt {prompt!r} has none of the instructions that checks.py knows")


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text)


def _is_about(text: str, task: str) -> bool:
    """Whether the text has a word of the task's topic, by its first letters."""
    topic = {word[:STEM] for word in _words(task.lower()) if len(word) > 2 and word not in TASK_WORDS}
    return any(word.startswith(tuple(topic)) for word in _words(text.lower()))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _whole(text: str, found: float) -> float:
    """Returns `found`, or half of it for a text that stops in the middle of a sentence."""
    return found if re.search(r"[.!?][\"')]*$", text) else found / 2


def _at_most(count: int, most: int) -> float:
    return 1.0 if count <= most else most / count


def _exactly(count: int, wanted: int) -> float:
    return min(count, wanted) / max(count, wanted, 1)


def _items(text: str, starts: Sequence[str]) -> float:
    """Returns how far the text is a list whose lines begin with these patterns, and nothing else."""
    lines = _lines(text)
    good = sum(bool(re.match(rf"{start}\S", line)) for line, start in zip(lines, starts, strict=False))
    return good / max(len(lines), len(starts))


def _sentences(text: str, wanted: str) -> float:
    return _whole(text, _exactly(len(re.findall(r"[.!?]+[\"')]*(?=\s|$)", text)), int(wanted)))


def _in_case(text: str, is_wrong: Callable[[str], bool]) -> float:
    words = _words(text)
    return _whole(text, 1 - sum(map(is_wrong, words)) / len(words))


def _has_upper(word: str) -> bool:
    return word != word.lower()


def _has_lower(word: str) -> bool:
    return word != word.upper()


def _count(text: str, word: str) -> int:
    return [found.lower() for found in _words(text)].count(word.lower())


def _question(text: str) -> float:
    marks = re.findall(r"[.!?]+", text)
    return 1.0 if marks == ["?"] and text.endswith("?") else 0.5 * text.endswith("?")


# The pattern of each instruction in a prompt, and how to measure a response, given what the pattern captured.
KINDS: Mapping[str, Callable[..., float]] = {
    # in prompts.jsonl and heldout.jsonl
    r"Do not use any commas\.": lambda text: _whole(text, 1 / (1 + text.count(","))),
    r"Use at most (\d+) words\.": lambda text, most: _whole(text, _at_most(len(_words(text)), int(most))),
    r"Answer in exactly (\d+) sentences?\.": _sentences,
    r"Write everything in lowercase letters\.": lambda text: _in_case(text, _has_upper),
    r"Answer with a numbered list of exactly (\d+) items\.": lambda text, number: _items(
        text, [rf"{place}[.)] " for place in range(1, int(number) + 1)]
    ),
    r"Answer with exactly (\d+) bullet points\.": lambda text, number: _items(text, [r"[-*•] "] * int(number)),
    r"Begin with the word \"(\w+)\"\.": lambda text, word: _whole(text, float(text.startswith(word))),
    r"Use the word \"(\w+)\"\.": lambda text, word: _whole(text, float(_count(text, word) > 0)),
    # in new-kinds.jsonl
    r"Do not use the word \"(\w+)\"\.": lambda text, word: _whole(text, 1 / (1 + _count(text, word))),
    r"Use exactly (\d+) commas?\.": lambda text, number: _whole(text, _exactly(text.count(","), int(number))),
    r"End with an exclamation mark\.": lambda text: 1.0 if text.endswith("!") else 0.5 * ("!" in text),
    r"Write everything in capital letters\.": lambda text: _in_case(text, _has_lower),
    r"Answer with a single question\.": _question,
}
