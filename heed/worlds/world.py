"""The playground world: data for every stage, a gold scorer, and labelers. The demo uses it.

InstructGPT's training labelers agreed with each other 72.6% +- 1.5% of the time (Ouyang et al. 2022, arXiv 2203.02155,
section 3.4). The default noise makes ours agree as often on samples of the demo's SFT policy. Careless demonstrations,
which need no trained model, differ more in quality: labelers agree on 75% of their pairs.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from files.atomic import write_jsonl
from heed.worlds.answers import write_answer
from heed.worlds.corpus import draw_rows, write_text
from heed.worlds.gold import gold_score, graded_rows, num_answers
from heed.worlds.grammar import CATEGORIES
from heed.worlds.instructions import (
    Request,
    checks_of,
    draw_brief,
    draw_decline,
    draw_help,
    draw_list,
    draw_question,
    draw_story,
    kind_of,
)
from heed.worlds.labelers import LabelerConfig, ScriptedLabeler, draw_labelers

Turns = list[dict[str, str]]  # messages of role and content
NamedRows = tuple[str, Iterable[dict[str, Any]]]  # a file's name without .jsonl, and its rows

DRAWS: dict[str, Callable[[random.Random], Request]] = {
    "story": draw_story,
    "question": draw_question,
    "list": draw_list,
    "brief": draw_brief,
    "decline": draw_decline,
    "help": draw_help,
}
KIND_WEIGHTS = {"story": 0.25, "question": 0.18, "list": 0.17, "brief": 0.16, "decline": 0.12, "help": 0.12}
VERIFIED_WEIGHTS = {"list": 1.0}  # a pattern can check a list, and a small policy can learn to write the right one
# With many more prompts, the kind with the fewest wordings would run out.
MAX_PROMPTS = 40_000
TEXT_WORDS = (30, 100)  # of the shortest and longest text to pretrain on
FLAW_RATE, SECOND_FLAW_RATE = 0.75, 0.25  # shares of demonstrations with a flaw, and of those with another
NUM_GRADED_HELDOUT = 180  # graded answers without noise
GRADE_NOISE = 0.2  # share of grades that are random
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
# As the environment `calculator` describes it (ppo/environments/tools.py).
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Returns the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as (3 + 4) * 2"}},
            "required": ["expression"],
        },
    },
}
_FAVOURITES = tuple(word for tag in ("animal", "food", "color", "place", "feeling") for word in CATEGORIES[tag])


class PlaygroundConfig(BaseModel):
    """Sizes of the playground's data, the flaws of its demonstrations, and its labelers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_pretrain_texts: int = Field(default=5_000, gt=0, description="Texts to pretrain on.")
    num_pretrain_heldout: int = Field(default=200, gt=0, description="Held-out texts.")
    num_demonstrations: int = Field(default=3_000, gt=0, description="Demonstrations for SFT.")
    num_demonstrations_heldout: int = Field(default=300, gt=0, description="Held-out demonstrations.")
    num_collect_prompts: int = Field(default=1_200, gt=0, description="Prompts of the collect stage.")
    num_ppo_prompts: int = Field(default=4_000, gt=0, description="Prompts of PPO.")
    num_compare_prompts: int = Field(default=300, gt=0, description="Prompts of the compare stage.")
    num_grammar: int = Field(default=0, ge=0, description="Sentences labelled for grammar, for [classify].")
    num_entities: int = Field(default=0, ge=0, description="Sentences with tagged entities, for [classify].")
    num_questions: int = Field(default=0, ge=0, description="Questions on texts, for [classify].")
    num_labelled_heldout: int = Field(
        default=500, gt=0, description="Held-out rows of each of these three that is not 0."
    )
    num_verified_prompts: int = Field(
        default=0, ge=0, description="Requests for lists, with `checks` of the answers, for a reward that verifies."
    )
    num_graded: int = Field(
        default=0, ge=0, description="Grades of answers by one criterion each (heed/worlds/gold.py), to train a judge."
    )
    num_calculations: int = Field(
        default=0, ge=0, description="Sums with their answers, and as many calls of a calculator to learn from."
    )
    num_labelers: int = Field(default=4, gt=0, description="Scripted labelers.")
    labelers_rate: bool = Field(default=False, description="Whether labelers also rate each response from 1 to 7.")

    def model_post_init(self, _context: Any) -> None:
        if self.num_prompts > MAX_PROMPTS:
            raise ValueError(
                "num_demonstrations, num_demonstrations_heldout, num_collect_prompts, num_ppo_prompts,"
                f" num_compare_prompts, num_verified_prompts and num_graded add up to {self.num_prompts}; expected at"
                f" most {MAX_PROMPTS} distinct prompts"
            )

    @property
    def num_prompts(self) -> int:
        num_demonstrations = self.num_demonstrations + self.num_demonstrations_heldout
        others = self.num_collect_prompts + self.num_compare_prompts + self.num_verified_prompts
        others += num_answers(self.num_graded) + num_answers(NUM_GRADED_HELDOUT) if self.num_graded else 0
        return num_demonstrations + self.num_ppo_prompts + others


class PlaygroundWorld:
    """Simple English, six kinds of instruction, careless demonstrations. Implements World."""

    config_type: ClassVar[type[BaseModel]] = PlaygroundConfig

    def __init__(self, config: PlaygroundConfig) -> None:
        self.config = config

    @property
    def judge_names(self) -> tuple[str, ...]:
        return ("gold",)

    def describe(self) -> str:
        return (
            "gold: does the response do what was asked, in this world's grammar, without repeats or rambling (0 to 1)"
        )

    def gold_scores(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [gold_score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    @property
    def pass_mark(self) -> float:
        return 0.99  # every imperfect response loses more than 0.01

    def label_truth(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return self.gold_scores(prompts, responses)

    def judged_pairs(self) -> list[tuple[Turns, Turns]]:
        return []

    def labelers(self, seed: int) -> list[ScriptedLabeler]:
        config = self.config
        return draw_labelers(
            self.gold_scores, LabelerConfig(rates=config.labelers_rate), config.num_labelers, seed, _FAVOURITES
        )

    def answer(self, request: Request, rng: random.Random) -> str:
        """Writes an answer like the demonstrations: perfect or flawed."""
        return write_answer(request, rng, FLAW_RATE, SECOND_FLAW_RATE)

    def write_data(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prompts: set[str] = set()  # no prompt is in two files
        files = (
            self._pretraining_files(seed),
            self._prompt_files(seed, prompts),
            self._labelled_files(seed),
            self._verified_files(seed, prompts),
            self._graded_files(seed, prompts),
            self._calculation_files(seed),
        )
        for name, rows in chain.from_iterable(files):
            write_jsonl(folder / f"{name}.jsonl", rows)

    def _pretraining_files(self, seed: int) -> Iterator[NamedRows]:
        config, seen = self.config, set[str]()
        for name, num_texts in (
            ("pretrain_heldout", config.num_pretrain_heldout),
            ("pretrain", config.num_pretrain_texts),
        ):
            yield name, self._texts(num_texts, random.Random(f"{seed}/{name}"), seen)

    def _prompt_files(self, seed: int, prompts: set[str]) -> Iterator[NamedRows]:
        """Yields the demonstrations, and the prompts of the other stages."""
        config = self.config
        for name, num_prompts in (
            ("demonstrations_heldout", config.num_demonstrations_heldout),
            ("compare_prompts", config.num_compare_prompts),
            ("collect_prompts", config.num_collect_prompts),
            ("demonstrations", config.num_demonstrations),
            ("ppo_prompts", config.num_ppo_prompts),
        ):
            rng = random.Random(f"{seed}/{name}")
            drawn = draw_prompts(num_prompts, rng, prompts)
            if name.startswith("demonstrations"):
                yield name, [{"messages": _messages(prompt, self.answer(request, rng))} for prompt, request in drawn]
            else:
                prefix = name.removesuffix("_prompts")
                yield (
                    name,
                    [
                        {"prompt_id": f"{prefix}-{i:05d}", "messages": _messages(prompt), "kind": kind_of(request)}
                        for i, (prompt, request) in enumerate(drawn)
                    ],
                )

    def _labelled_files(self, seed: int) -> Iterator[NamedRows]:
        """Yields the data of classification."""
        config = self.config
        sizes = {"grammar": config.num_grammar, "entities": config.num_entities, "questions": config.num_questions}
        for kind, num_rows in sizes.items():
            seen = set[str]()
            for name, size in ((f"{kind}_heldout", config.num_labelled_heldout), (kind, num_rows)):
                if num_rows:
                    yield name, draw_rows(kind, size, random.Random(f"{seed}/{name}"), seen)

    def _verified_files(self, seed: int, prompts: set[str]) -> Iterator[NamedRows]:
        """Yields prompts whose responses a program can check."""
        name, num_prompts = "verified_prompts", self.config.num_verified_prompts
        if num_prompts:
            drawn = draw_prompts(num_prompts, random.Random(f"{seed}/{name}"), prompts, VERIFIED_WEIGHTS)
            yield (
                name,
                [
                    {"messages": _messages(prompt), "kind": kind_of(request), "checks": checks_of(request)}
                    for prompt, request in drawn
                ],
            )

    def _graded_files(self, seed: int, prompts: set[str]) -> Iterator[NamedRows]:
        config = self.config
        if not config.num_graded:
            return
        for name, num_rows, noise in (
            ("graded_heldout", NUM_GRADED_HELDOUT, 0.0),
            ("graded", config.num_graded, GRADE_NOISE),
        ):
            rng = random.Random(f"{seed}/{name}")
            drawn = draw_prompts(num_answers(num_rows), rng, prompts)
            yield name, [row for each in drawn for row in graded_rows(*each, rng, noise)][:num_rows]

    def _calculation_files(self, seed: int) -> Iterator[NamedRows]:
        num_rows = self.config.num_calculations
        if num_rows:
            for name, draw in (("calculations", calculations), ("calculation_calls", calculator_calls)):
                yield name, draw(num_rows, random.Random(f"{seed}/{name}"))

    def _texts(self, num_texts: int, rng: random.Random, seen: set[str]) -> list[dict[str, Any]]:
        texts: list[str] = []
        while len(texts) < num_texts:
            text = write_text(rng, *TEXT_WORDS)
            if text not in seen:
                seen.add(text)
                texts.append(text)
        return [{"text": text} for text in texts]


def draw_prompts(
    num_prompts: int, rng: random.Random, seen: set[str], weights: Mapping[str, float] = KIND_WEIGHTS
) -> list[tuple[str, Request]]:
    """Draws distinct prompts, with their requests, that are not in `seen`, and adds them to it. `weights` are the
    kinds'.
    """
    drawn: list[tuple[str, Request]] = []
    while len(drawn) < num_prompts:
        kind = rng.choices(list(weights), weights=list(weights.values()))[0]
        request = DRAWS[kind](rng)
        prompt = request.word(rng)
        if prompt not in seen:
            seen.add(prompt)
            drawn.append((prompt, request))
    return drawn


def _messages(prompt: str, response: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}]
    if response is not None:
        messages.append({"role": "assistant", "content": response})
    return messages


# ---- sums in words, and demonstrations that call a calculator for them ----


def calculations(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns prompts with the answer that a verifier compares; sums may repeat, so each has an id."""
    return [{"prompt_id": f"sum-{place}", **_sum_asked(*_sum_of(rng))} for place in range(number)]


def calculator_calls(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns demonstrations whose response calls the tool `calculate`."""
    found = []
    for _ in range(number):
        first, operator, second = _sum_of(rng)
        arguments = json.dumps({"expression": f"{first} {operator} {second}"})
        call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
        messages = _sum_asked(first, operator, second)["messages"]
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        found.append({"messages": [*messages, answer], "tools": [CALCULATOR]})
    return found


def _sum_of(rng: random.Random) -> tuple[int, str, int]:
    return rng.randrange(1, 100), rng.choice(list(OPERATORS)), rng.randrange(1, 100)


def _sum_asked(first: int, operator: str, second: int) -> dict[str, Any]:
    answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
    question = f"What is {first} {OPERATORS[operator]} {second}?"
    return {"messages": [{"role": "user", "content": question}], "answer": answer}
