"""The reward "judge": a language model grades each response by the criteria of a rubric (docs/verifiers.md).

    score = Σ_c w_c g_c / Σ_c w_c,    g = Σ_k k p(k) / Σ_k p(k)

over the criteria c with weights w, where a grade g is the expectation over the scale's grades k (each from 0 to 1) by
the judge's probabilities p of their tokens. An endpoint that gives no log-probabilities has the grade that it wrote.
The same judge scores comparisons in `heed judge --rubric`.
"""

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from files.hashes import json_hash
from files.rows import Row
from lm.hub import model_directory, on_this_machine
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.sequence_logprobs import next_token_logprobs
from lm.source import load_for_inference
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder, read_config
from reward.endpoint import OVER_BUDGET, Answer, Asker, Endpoint, read_reply
from reward.external import MAX_WAIT, MAX_WAIT_SECONDS, ExternalReward, Scored
from reward.rubric import TOTAL, Rubric, as_share

CACHE = "judgments.sqlite"  # of an endpoint's answers, in the folder of the stage
# A local judge that gives the grades' tokens less probability than this does not answer with a grade.
LEAST_MASS = 0.5
TOP_LOGPROBS = 20  # the most that OpenAI's API gives

# Kinds of failure, which the log counts.
UNREADABLE, TOO_LONG, ENDPOINT, BUDGET = "unreadable", "too_long", "endpoint", "budget"


@dataclass(frozen=True)
class Question:
    """What the judge is asked: a response, by one criterion of the rubric."""

    criterion: str
    text: str


class JudgeReward(ExternalReward):
    """A language model that grades responses by the criteria of a rubric; the score is the weighted mean, 0 to 1."""

    model_config = ConfigDict(title="Reward judge")
    source_key: ClassVar[str] = "model"
    noun: ClassVar[str] = "judge"

    kind: Literal["judge"] = Field(default="judge", description="The kind of this table.")
    model: str = Field(
        pattern=r"\S",
        description="The judge: a model directory, .gguf file or hub id, or URL#MODEL of an OpenAI-compatible endpoint"
        " (its key comes from HEED_API_KEY).",
    )
    rubric: Rubric = Field(description="The criteria: a TOML file, or a table with its keys.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Probability that a criterion is left out of a response's score (rubric dropout); one always"
        " stays. Prompt and response decide which, so a resumed run leaves out the same.",
    )
    cache: str = Field(
        default="", description="File of an endpoint's answers; empty = judgments.sqlite in the stage's folder."
    )
    budget: int = Field(
        default=0,
        ge=0,
        description="Requests that may be sent to an endpoint, counted in its cache; 0 = no limit. Beyond it,"
        " responses have no score, which stops the run.",
    )
    max_tokens: int = Field(
        default=16, ge=1, description="Longest answer of an endpoint, in tokens; more for one that reasons first."
    )
    top_logprobs: int = Field(
        default=TOP_LOGPROBS,
        ge=0,
        le=TOP_LOGPROBS,
        description="Log-probabilities to ask an endpoint for, per token; 0 for one that refuses to give any.",
    )
    timeout_seconds: float = Field(
        default=60.0, gt=0, description="Time limit of each whole answer of an endpoint, in seconds."
    )
    max_wait_seconds: float = Field(default=MAX_WAIT_SECONDS, ge=0, description=MAX_WAIT)
    parallel: int = Field(default=8, ge=1, description="How many requests each rank sends at once.")

    @field_validator("rubric", mode="before")
    @classmethod
    def _read_rubric(cls, value: Any) -> Any:
        """The written job has the criteria themselves, so a changed file is a changed job."""
        return Rubric.read(Path(value)) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        if self.is_remote:
            _ = self._endpoint
        return self

    @property
    def is_remote(self) -> bool:
        """Whether the judge is behind an endpoint."""
        return self.model.startswith(("http://", "https://"))

    @property
    def waits(self) -> bool:
        return self.is_remote

    @property
    def objective_weights(self) -> Mapping[str, float]:
        """The columns of the scores: the whole score, and the criteria's grades, which are only logged."""
        return {TOTAL: 1.0, **dict.fromkeys(self.rubric.criteria, 0.0)}

    @property
    def num_questions(self) -> float:
        """How many questions the judge is asked about a response, on average."""
        weighted = sum(weight > 0 for weight in self.rubric.weights.values())
        return len(self.rubric.criteria) - self.dropout * weighted + self.dropout**weighted  # one stays

    @property
    def leaves_parts_out(self) -> bool:
        return self.dropout > 0

    @property
    def short_name(self) -> str:
        return f"judge {self.model.partition('#')[2] if self.is_remote else Path(self.model).name}"

    def prepared(self, folder: Path) -> Self:
        if self.is_remote:
            return self if self.cache else self.model_copy(update={"cache": str(folder / CACHE)})
        return self.model_copy(update={"model": str(model_directory(self.model))})  # all ranks use the same commit

    def check(self, rows: Iterable[Row]) -> None:  # noqa: ARG002  # the rubric is the same for all rows
        """Raises: ValueError for a local judge that is no language model, or whose vocabulary lacks grades."""
        if not self.is_remote:
            folder = model_directory(self.model)
            try:
                read_config(folder, "language")
                grade_tokens(Tokenizer.load(folder), self.rubric)
            except ValueError as error:
                raise ValueError(f"the judge {self.model}: {error}") from None

    def score(
        self,
        conversations: Sequence[Messages],
        responses: Sequence[str],
        rows: Sequence[Row] = (),  # noqa: ARG002  # a judge reads texts only
    ) -> list[Scored]:
        return self.columns(conversations, responses, len(responses))[0]

    def columns(
        self,
        conversations: Sequence[Messages],
        responses: Sequence[str],
        size: int,  # noqa: ARG002  # the judge splits its questions itself
        rows: Sequence[Row] = (),  # noqa: ARG002
    ) -> list[list[Scored]]:
        """Returns the whole scores, then the grades by criterion; one that was left out is NaN without a failure."""
        asked = [self.criteria_of(*each) for each in zip(conversations, responses, strict=True)]
        questions = [
            Question(name, self.rubric.question(name, messages, response))
            for messages, response, names in zip(conversations, responses, asked, strict=True)
            for name in names
        ]
        grades = iter(self._grades(questions))
        by_response = [{name: next(grades) for name in names} for names in asked]
        totals = [self._total(graded) for graded in by_response]
        return [totals, *([of.get(name, LEFT_OUT) for of in by_response] for name in self.rubric.criteria)]

    def criteria_of(self, messages: Messages, response: str) -> list[str]:
        """Returns the criteria that a response is graded by: all, or with dropout a random subset, which is a function
        of the texts. A criterion with weight 0 is always graded.
        """
        if not self.dropout:
            return list(self.rubric.criteria)
        drawn = random.Random(json_hash(list(messages), response))
        weighted = [name for name, weight in self.rubric.weights.items() if weight]
        kept = {name for name in weighted if drawn.random() >= self.dropout} or {drawn.choice(weighted)}
        return [name for name, weight in self.rubric.weights.items() if not weight or name in kept]

    def _total(self, graded: Mapping[str, Scored]) -> Scored:
        counted = {name: self.rubric.weights[name] for name in graded if self.rubric.weights[name]}
        failed = next((name for name in counted if graded[name].failure), "")
        if failed:
            return Scored(math.nan, f"{failed}: {graded[failed].failure}", graded[failed].failure_kind)
        return Scored(sum(w * graded[name].score for name, w in counted.items()) / sum(counted.values()))

    def _grades(self, questions: Sequence[Question]) -> list[Scored]:
        if self.is_remote:
            return self._remote_grades(questions)
        return _loaded(self.model).grades(questions, self.rubric)

    def close(self) -> None:
        _loaded.cache_clear()

    @property
    def _endpoint(self) -> Endpoint:
        limits = {"timeout_seconds": self.timeout_seconds, "max_wait_seconds": self.max_wait_seconds}
        return Endpoint.of(self.model, "judge", **limits)

    def _remote_grades(self, questions: Sequence[Question]) -> list[Scored]:
        requests = [self._request(question) for question in questions]
        asker = Asker(self._endpoint, Path(self.cache or ":memory:"), self.parallel, max_failed_share=1.0)
        answers = asker.ask_within(requests, self.budget or math.inf, lambda _done, _total: note_progress())
        return [self._read(*each) for each in zip(questions, answers, strict=True)]

    def _request(self, question: Question) -> dict[str, Any]:
        messages = [{"role": "user", "content": question.text}]
        request = {"messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        return {**request, "logprobs": True, "top_logprobs": self.top_logprobs} if self.top_logprobs else request

    def _read(self, question: Question, answer: Answer) -> Scored:
        """Returns the expected grade if the answer has log-probabilities at the grade's place, else the grade."""
        if answer.failure:
            return Scored(math.nan, answer.failure, BUDGET if answer is OVER_BUDGET else ENDPOINT)
        scale = self.rubric.scale_of(question.criterion)
        grade, failure = read_reply(answer, partial(self.rubric.read_grade, question.criterion), self.max_tokens)
        if failure:
            return Scored(math.nan, failure, UNREADABLE)
        places = [top for token, top in answer.tokens if token.strip() == str(int(grade))]
        mass = dict.fromkeys(scale, 0.0)
        for token, logprob in places[-1].items() if places else ():
            if token.strip() in map(str, scale):
                mass[int(token)] += math.exp(logprob)
        total = sum(mass.values())
        return Scored(as_share(sum(k * p for k, p in mass.items()) / total if total else grade, scale))


LEFT_OUT = Scored(math.nan)  # of a criterion that rubric dropout left out


@dataclass(frozen=True)
class GradeTokens:
    """How a judge writes the grades of a criterion: the tokens with which each answer begins, such as a space that its
    chat template puts there, and then one token per grade.
    """

    before: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str, scale: Sequence[int]) -> Self:
        """Raises: ValueError naming a grade that is not a token of its own."""
        answers = [_written(tokenizer, str(grade)) for grade in scale]
        alike = itertools.takewhile(lambda place: len(set(place)) == 1, zip(*answers, strict=False))
        before = tuple(place[0] for place in alike)
        ends = [answer[len(before) :] for answer in answers]
        for grade, end in zip(scale, ends, strict=True):
            if len(end) != 1:
                raise ValueError(
                    f"criteria.{name}: this judge's vocabulary has no token for the grade {grade} (it writes"
                    f" {[tokenizer.token_text(token) for token in (*before, *end)]}); a token for each grade was"
                    " expected, such as for 1 to 5"
                )
        return cls(before, tuple(token for (token,) in ends))


def grade_tokens(tokenizer: Tokenizer, rubric: Rubric) -> dict[str, GradeTokens]:
    """Returns the tokens of each criterion's grades. Raises: ValueError as `GradeTokens.of`."""
    return {name: GradeTokens.of(tokenizer, name, rubric.scale_of(name)) for name in rubric.criteria}


def _written(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Returns the tokens of an answer as the chat template writes it, without those that end it."""
    turns: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    tokens, in_response = tokenizer.encode_conversation(turns)
    written = (token for token, counts in zip(tokens, in_response, strict=True) if counts)
    return [token for token in written if token not in tokenizer.end_ids]


@dataclass(frozen=True)
class LocalJudge:
    """A judge on this process's device."""

    model: LanguageModel
    tokenizer: Tokenizer

    def grades(self, questions: Sequence[Question], rubric: Rubric) -> list[Scored]:
        """Returns the expected grade of each question, from the probabilities of its grades' tokens."""
        tokens_of = grade_tokens(self.tokenizer, rubric)
        prompts = self.tokenizer.encode_prompts([[{"role": "user", "content": each.text}] for each in questions])
        pairs = zip(prompts, questions, strict=True)
        queries = [[*prompt, *tokens_of[each.criterion].before] for prompt, each in pairs]
        room = self.model.config.max_position_embeddings
        found = [Scored(math.nan, f"{len(query)} tokens; the judge reads at most {room}", TOO_LONG)
                 for query in queries]  # fmt: skip
        # Sorting by length minimises padding.
        fitting = sorted(
            (row for row, query in enumerate(queries) if len(query) <= room), key=lambda r: len(queries[r])
        )
        wanted = [tokens_of[questions[row].criterion].tokens for row in fitting]
        logprobs = next_token_logprobs(self.model, [queries[row] for row in fitting], wanted)
        for row, values in zip(fitting, logprobs, strict=True):
            found[row] = _expected(values, rubric.scale_of(questions[row].criterion))
        return found


@lru_cache(maxsize=2)  # several judges in a sum
def _loaded(name: str) -> LocalJudge:
    """Load a judge, once per process. `name` may be a folder that `model_directory` made on another machine."""
    folder = model_directory(str(on_this_machine(Path(name))))
    return LocalJudge(load_for_inference(ModelFolder(folder, LanguageModel)), Tokenizer.load(folder))


def _expected(logprobs: Sequence[float], scale: Sequence[int]) -> Scored:
    """Returns the expected grade by the log-probabilities of the grades' tokens, in nats."""
    masses = [math.exp(value) for value in logprobs]
    total = sum(masses)
    if not total >= LEAST_MASS:
        return Scored(
            math.nan,
            f"the grades have a probability of {total:.2f} together; the judge does not answer with a grade",
            UNREADABLE,
        )
    return Scored(as_share(sum(k * p for k, p in zip(scale, masses, strict=True)) / total, scale))
