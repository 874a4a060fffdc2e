"""Models under evaluation: sampled in this process, behind an endpoint, saved answers, reward models.

Answers, log-probabilities and rewards are cached under a hash of everything that they depend on: the weights (or the
endpoint), the request, the seed and the precision. An interrupted evaluation therefore continues, and a second suite or
another judge never repeats a request.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from evaluation.compare.judges import Asking, is_function, is_url, open_scorer
from evaluation.evaluate.logs import LoggedModel
from evaluation.evaluate.saved import SavedAnswers
from evaluation.inputs import named_runs, named_specs
from evaluation.judges.judge import BATCH, ScoreJudge
from evaluation.policies import SEEDS, is_saved
from evaluation.suites.suite import Asks, Continuation, Item, Model, Request, Unable
from files.hashes import derive_seed, json_hash
from lm.config import Precision
from lm.generation import generate, never
from lm.hub import model_directory, model_hash
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.sequence_logprobs import sequence_logprobs
from lm.source import load_for_inference
from lm.tokenizer import Messages, Tokenizer, has_chat_template
from lm.weights import ModelFolder, purpose_of, read_config
from reward.endpoint import Answer, AnswerCache, Asker, OnProgress

CHUNK = 64  # requests that are generated before their answers are stored
ROOM_STEP = 32  # tokens: shorter limits are multiples of it, so that requests with little room still share batches

Progress = Callable[[str], OnProgress]  # returns the progress callback of a named step


@dataclass(frozen=True)
class Answering:
    """How models are asked. `max_new_tokens` replaces the limit of every request, unless it is 0."""

    asking: Asking
    seed: int
    precision: Precision
    max_new_tokens: int
    progress: Progress
    tell: Callable[[str], None]
    num_samples: int = 1

    def limited(self, requests: Sequence[Request]) -> list[Request]:
        """Returns the requests with the limit that the user set, and sampled at temperature 1 instead of greedy if
        there are several samples.
        """
        return [
            replace(
                request,
                max_new_tokens=self.max_new_tokens or request.max_new_tokens,
                temperature=request.temperature or float(self.num_samples > 1),
            )
            for request in requests
        ]

    def numbered(self, requests: Sequence[Request]) -> list[tuple[dict[str, Any], int]]:
        """Returns what is asked, as JSON, with a seed. Equal requests have different seeds if they are sampled; greedy
        answers depend on no seed, so theirs is 0.
        """
        seen: Counter[str] = Counter()
        requests_with_seeds = []
        for request in requests:
            fields = {key: value for key, value in asdict(request).items() if key != "item_id"}
            fields["messages"] = [dict(message) for message in request.messages]
            key = json_hash(fields)
            is_sampled = request.temperature > 0
            requests_with_seeds.append(
                (fields, derive_seed(self.seed, "evaluate", key, seen[key]) if is_sampled else 0)
            )
            seen[key] += 1
        return requests_with_seeds


@dataclass
class LocalModel(Unable):
    """A language model that is sampled in this process. Its weights are loaded for the first answer not in the cache.

    `num_shortened` counts requests whose length limit was reduced, because the prompt fills the rest of the context,
    and contexts of log-probabilities that were cut at their beginning.
    """

    name: str
    spec: str
    folder: Path
    sha256: str
    how: Answering
    num_shortened: int = 0

    @classmethod
    def open(cls, name: str, spec: str, how: Answering) -> "LocalModel":
        """Raises: ValueError for a folder that holds no decoder."""
        folder = model_directory(spec)
        ModelFolder(folder, LanguageModel).check()
        return cls(name, spec, folder, model_hash(spec), how)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "model", "spec": self.spec, "sha256": self.sha256}

    @property
    def kind(self) -> str:
        return f"a language model{'' if self.has_chat_template else ' without a chat template'}"

    @property
    def can(self) -> frozenset[Asks]:
        return frozenset({"conversations", "texts", "logprobs"} if self.has_chat_template else {"texts", "logprobs"})

    @property
    def has_chat_template(self) -> bool:
        return has_chat_template(self.folder)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Raises: ValueError for conversations without a chat template, or that the template refuses."""
        limited = self.how.limited(requests)
        queries = self._encoded([(request.messages, request.text) for request in limited])
        limits = [self._limit(len(query), request) for query, request in zip(queries, limited, strict=True)]
        # The limit is a function of the model and the request, so the key need not contain it.
        self.num_shortened += sum(0 < limit < r.max_new_tokens for limit, r in zip(limits, limited, strict=True))
        numbered = self.how.numbered(limited)
        keys = [self._key("answer", request, seed) for request, seed in numbered]
        groups: dict[tuple[int, float, tuple[str, ...]], list[int]] = {}
        for row in sorted(range(len(limited)), key=lambda row: len(queries[row])):  # sorted to minimise padding
            if limits[row]:
                groups.setdefault((limits[row], limited[row].temperature, limited[row].stop), []).append(row)

        def compute(rows: Sequence[int]) -> list[Answer]:
            return self._generated([(queries[row], limits[row], limited[row], numbered[row][1]) for row in rows])

        answers = self._cached("answer", keys, list(groups.values()), CHUNK, compute)
        return [
            answers[key] if limit else Answer("", failure=self._no_room(len(query)))
            for key, limit, query in zip(keys, limits, queries, strict=True)
        ]

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        """Contexts that are too long are cut at their beginning. Raises: ValueError for an empty continuation."""
        contexts = self._encoded([(c.messages, c.text.rstrip(" ")) for c in continuations])
        pairs = []
        for continuation, context in zip(continuations, contexts, strict=True):
            if continuation.messages:
                wanted = self.tokenizer.encode_plain([continuation.continuation])[0]
            else:  # both are tokenized as one text; a space between them belongs to the continuation
                whole = self.tokenizer.encode_plain([continuation.text + continuation.continuation])[0]
                wanted = whole[len(context) :] if continuation.text.rstrip(" ") else whole
            room = self._context - len(wanted)
            if not wanted or room < 1:
                raise ValueError(
                    f"model {self.name!r}: a continuation of {len(wanted)} tokens; 1 to {self._context - 1}"
                )
            self.num_shortened += len(context) > room
            pairs.append((context[-room:], wanted))
        keys = [self._key("logprob", pair, 0) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda row: len(pairs[row][0]) + len(pairs[row][1]))

        def compute(rows: Sequence[int]) -> list[Answer]:
            contexts, wanted = zip(*(pairs[row] for row in rows), strict=True)
            return [Answer(repr(value)) for value in sequence_logprobs(self.network, contexts, wanted, 1.0)]

        values = self._cached("log-probabilities", keys, [order], 8 * CHUNK, compute)
        return [float(values[key].text) for key in keys]

    def close(self) -> None:
        """Release the weights, and say how many requests were shortened."""
        self.__dict__.pop("network", None)
        torch.cuda.empty_cache()
        if self.num_shortened:
            self.how.tell(
                f"{self.name}: {self.num_shortened:,} requests had less room in the context of {self._context:,} tokens"
                " than the suite wanted"
            )
        self.num_shortened = 0

    def _cached(
        self,
        step: str,
        keys: Sequence[str],
        groups: Sequence[Sequence[int]],
        size: int,
        compute: Callable[[Sequence[int]], list[Answer]],
    ) -> dict[str, Answer]:
        return cached(self.how.asking.cache, self.how.progress(f"{step} {self.name}"), keys, groups, size, compute)

    def _key(self, what: str, request: Any, seed: int) -> str:
        return json_hash("local", what, self.sha256, self.how.precision, request, seed)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def network(self) -> LanguageModel:
        dtype = torch.bfloat16 if self.how.precision == "bf16" else torch.float32
        return load_for_inference(ModelFolder(self.folder, LanguageModel), dtype)

    @cached_property
    def _context(self) -> int:
        return read_config(self.folder, "language")[0].max_position_embeddings

    def _encoded(self, queries: Sequence[tuple[Messages, str]]) -> list[list[int]]:
        """Returns the tokens of conversations, up to the next response, and of plain texts."""
        if any(messages for messages, _ in queries) and not self.has_chat_template:
            raise ValueError(f"model {self.name!r} has no chat template, so it cannot be asked conversations")
        plain = self.tokenizer.encode_plain([text for _, text in queries])
        try:
            chats = iter(self.tokenizer.encode_prompts([messages for messages, _ in queries if messages]))
        except ValueError as error:
            raise ValueError(f"model {self.name!r}: {error}") from None
        start = [self.tokenizer.start_id]
        return [
            next(chats) if messages else tokens or start for (messages, _), tokens in zip(queries, plain, strict=True)
        ]

    def _limit(self, num_tokens: int, request: Request) -> int:
        """Returns the longest answer that the context has room for; 0 if it has none."""
        room = max(0, self._context - num_tokens)
        if room >= request.max_new_tokens:
            return request.max_new_tokens
        return room - room % ROOM_STEP if room > ROOM_STEP else room

    def _no_room(self, num_tokens: int) -> str:
        return f"the prompt has {num_tokens:,} tokens, which leave no room in the context of {self._context:,}"

    def _generated(self, chosen: Sequence[tuple[Sequence[int], int, Request, int]]) -> list[Answer]:
        """Generate answers to requests with the same limit, temperature and stop strings."""
        _, limit, request, _ = chosen[0]
        generated = generate(
            self.network,
            [query for query, *_ in chosen],
            max_new_tokens=limit,
            end_ids=self.tokenizer.end_ids,
            choice=Choice(request.temperature),
            seeds=[seed for *_, seed in chosen],
            stop=self.tokenizer.stop_at(request.stop) if request.stop else never,
            max_rows=BATCH,
        )
        answers = []
        for tokens, finished in zip(generated.responses, generated.finished, strict=True):
            text = before_stop(self.tokenizer.decode(tokens), request.stop)
            answers.append(Answer(text.strip() if request.messages else text, finished, len(tokens)))
        return answers


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first of the strings."""
    return text[: min((text.index(string) for string in stop if string in text), default=len(text))]


def parts(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def cached(
    path: Path,
    on_progress: OnProgress,
    keys: Sequence[str],
    groups: Sequence[Sequence[int]],
    size: int,
    compute: Callable[[Sequence[int]], list[Answer]],
) -> dict[str, Answer]:
    """Returns answers by key: those in the cache, and those of `compute`, which are stored every `size` rows.

    `groups` are the rows that may be computed together, in that order. Failures are not stored.
    """
    with closing(AnswerCache(path)) as cache:
        answers = {key: answer for key in dict.fromkeys(keys) if (answer := cache.get(key)) is not None}
        for group in groups:
            rows = list({keys[row]: row for row in reversed(group) if keys[row] not in answers}.values())[::-1]
            for part in parts(rows, size):
                for row, answer in zip(part, compute(part), strict=True):
                    answers[keys[row]] = answer
                    if not answer.failure:
                        cache.put(keys[row], answer)
                on_progress(len(answers), len(set(keys)))
    return answers


@dataclass(frozen=True)
class EndpointModel(Unable):
    """A model behind an OpenAI-compatible endpoint."""

    name: str
    asker: Asker
    how: Answering
    has_chat_template: bool = field(default=True, init=False)
    can: frozenset[Asks] = field(default=frozenset({"conversations", "texts"}), init=False)

    @property
    def kind(self) -> str:
        return "behind an endpoint"

    def describe(self) -> dict[str, Any]:
        endpoint = self.asker.endpoint
        return {"name": self.name, "kind": "endpoint", "spec": f"{endpoint.url}#{endpoint.model}"}

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Raises: ValueError if too many requests fail, or if the budget is used up."""
        limited = self.how.limited(requests)
        if any(request.text for request in limited):
            raise ValueError(f"model {self.name!r} is behind an endpoint for conversations, which continues no texts")
        bodies = []
        for request, (_, seed) in zip(limited, self.how.numbered(limited), strict=True):
            body: dict[str, Any] = {
                "messages": [dict(message) for message in request.messages],
                "temperature": request.temperature,
                "max_tokens": request.max_new_tokens,
            }
            body |= {"seed": seed % SEEDS} if request.temperature > 0 else {}
            bodies.append(body | ({"stop": list(request.stop)} if request.stop else {}))
        answers = self.asker.ask_all(bodies, self.how.progress(f"ask {self.name}"))
        return [answer if answer.failure else replace(answer, text=answer.text.strip()) for answer in answers]

    def close(self) -> None:
        """Hold nothing."""


@dataclass(frozen=True)
class RewardUnderTest(Unable):
    """A reward model, a function or a reward endpoint, evaluated by a suite for reward models."""

    name: str
    scorer: ScoreJudge
    how: Answering
    has_chat_template: bool = field(default=True, init=False)
    can: frozenset[Asks] = field(default=frozenset({"rewards"}), init=False)

    @property
    def kind(self) -> str:
        return f"a {self.scorer.kind}"

    def describe(self) -> dict[str, Any]:
        return self.scorer.describe()

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        about = {**self.describe(), "name": ""}  # another name is still the same reward model

        def compute(rows: Sequence[int]) -> list[Answer]:
            chosen = [conversations[row] for row in rows]
            scored = self.scorer.score([c[:-1] for c in chosen], [c[-1]["content"] for c in chosen])
            return [Answer(repr(one.score), failure=one.failure) for one in scored]

        keys = [json_hash("reward", about, [dict(m) for m in conversation]) for conversation in conversations]
        order = sorted(range(len(keys)), key=lambda row: sum(len(m["content"]) for m in conversations[row]))
        # What an endpoint computes may change without notice, and a function may read other files than its own.
        is_fixed = self.scorer.kind == "reward model"
        answers = (
            cached(self.how.asking.cache, self.how.progress(f"score {self.name}"), keys, [order], BATCH, compute)
            if is_fixed
            else {
                keys[row]: answer
                for rows in parts(order, BATCH)
                for row, answer in zip(rows, compute(rows), strict=True)
            }
        )
        return [answers[key] if answers[key].failure else float(answers[key].text) for key in keys]

    def close(self) -> None:
        """The score function keeps its network until it is released itself."""


@dataclass(frozen=True)
class ModelJudge:
    """A judge that is a language model behind an endpoint or in this process. It is asked at temperature 0."""

    model: LocalModel | EndpointModel

    @property
    def name(self) -> str:
        return self.model.name

    def describe(self) -> dict[str, Any]:
        return self.model.describe()

    def ask(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]:
        return self.model.answer([Request(messages=prompt, max_new_tokens=max_tokens) for prompt in prompts])


Asked = LocalModel | EndpointModel | RewardUnderTest | SavedAnswers | LoggedModel


def open_models(specs: Sequence[str], how: Answering) -> tuple[list[Asked], Mapping[str, Sequence[str]]]:
    """Returns the models of NAME=SPEC or SPEC, in order, and by algorithm the names of its training runs: those of a
    NAME that is given several times. Raises: ValueError for an invalid one.
    """
    if not specs:
        raise ValueError("no model was given; at least one MODEL was expected")
    named, runs = named_runs(specs, "model")
    return [open_model(name, spec, how) for name, spec in named], runs


def open_model(name: str, spec: str, how: Answering) -> Asked:
    """Raises: ValueError naming the model, and what was expected."""
    if is_url(spec) and "#" in spec:
        return EndpointModel(name, how.asking.asker(name, spec), how)
    if is_saved(spec):
        return SavedAnswers.open(name, spec)
    is_scorer = is_url(spec) or is_function(spec)
    if is_scorer or purpose_of(model_directory(spec.partition("#")[0])) in ("score", "sequence"):
        return RewardUnderTest(name, open_scorer(name, spec, how.asking), how)
    return LocalModel.open(name, spec, how)


def open_judge(spec: str, how: Answering) -> ModelJudge | ScoreJudge | None:
    """Returns the judge of SPEC or NAME=SPEC; None for "". Raises: ValueError if it neither answers nor scores."""
    if not spec:
        return None
    ((name, source),) = named_specs([spec], "judge")
    model = open_model(name, source, replace(how, max_new_tokens=0, num_samples=1))
    if isinstance(model, RewardUnderTest):
        return model.scorer
    if not isinstance(model, LocalModel | EndpointModel):
        raise ValueError(
            f"--judge {spec} is {model.kind}; a language model, or a judge that scores answers, was expected:"
            " URL#MODEL, a model directory, a hub id, FILE.py:FUNCTION or URL"
        )
    if not model.has_chat_template:
        raise ValueError(f"--judge {spec} has no chat template; a model that can be asked conversations was expected")
    return ModelJudge(model)


def of_suite(opened: Asked, suite: str, items: Sequence[Item]) -> Model:
    """Returns the model as a suite asks it; saved answers are matched with the suite's items."""
    return opened.of_items(suite, items) if isinstance(opened, SavedAnswers) else opened
