"""Policies of a comparison as data, and where their responses come from: models sampled here, models behind an
endpoint, and files of saved outputs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from evaluation.inputs import by_id, conversation_key, id_of
from evaluation.verdicts import Response
from files.conversations import turns_of
from files.fields import any_text, name_field, names, number_field, shown, text_field, whole_field
from files.hashes import derive_seed, file_hash, folder_hash
from files.rows import read_source
from lm.config import Precision
from lm.hub import model_directory, model_hash
from lm.model import LanguageModel
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, read_config
from reward.endpoint import Asker, OnProgress
from reward.sampling import Sample, SamplingSpec, sample_policy
from stages.reports.text import PolicyStyle, in_capital, styles_of
from training.data import Prompt

SEEDS = 2**31  # servers accept seeds below this
SHOWN_IDS = 5

# Of files of saved outputs:
SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
RESPONSE_FIELDS = ("response", "output", "completion", "text")
WRITER_FIELDS = ("policy", "generator")
ASKING_FIELDS = ("messages", "prompt", "instruction")


# Kinds of the policies of a run:
PRETRAINED = "pretrained"
INITIAL = "initial"  # training starts from it
TRAINED = "trained"  # from the initial policy
BEST_OF_N = "best of n"  # chooses among another policy's samples


@dataclass(frozen=True)
class Policy:
    """What a comparison knows about a policy; compare.json holds it.

    `kind` is one of those above, or in `heed compare` where the responses come from. `trainer` is the stage that
    trained it, and `chat_template` the template it was trained in ("" = its model's own); `raises_score` says whether
    that stage raises the score that best-of-n chooses by. `seen` holds, by stage, the ids of the compared prompts that
    it was trained on; it is not complete unless `is_seen_known`. A policy of kind "best of n" chooses among `n` samples
    of the policy `of`.
    """

    name: str
    kind: str = ""
    title: str = ""  # what reports call it; "" = by its name
    trainer: str = ""
    raises_score: bool = False
    chat_template: str = ""
    seen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_seen_known: bool = True
    n: int = 0
    of: str = ""


def policy_styles(policies: Sequence[Policy]) -> dict[str, PolicyStyle]:
    """Returns how pages show each policy, in order."""
    titles = {one.name: in_capital(one.title) for one in policies if one.title}
    return styles_of([one.name for one in policies], titles)


@dataclass(frozen=True)
class Sampling:
    """How policies are sampled. Seeds are derived from policy, prompt and sample, so no two responses share one.

    `reference` is the model directory to measure KL against; if it is "", no KL is measured.
    """

    num_samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    precision: Precision
    reference: str = ""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1 or not self.temperature >= 0 or self.seed < 0:
            raise ValueError(
                f"num_samples is {self.num_samples}, max_new_tokens {self.max_new_tokens},"
                f" temperature {self.temperature}, seed {self.seed}; at least 1, 1, 0 and 0 were expected"
            )


class ResponseSource(Protocol):
    """Where a policy's responses to the prompts come from. Implementations validate their inputs in the constructor."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, Any]:
        """Returns everything that its responses depend on, as JSON: equal descriptions mean equal responses."""

    def respond(self, on_progress: OnProgress) -> list[Response]:
        """Returns its responses to all prompts, prompt by prompt, at least one per prompt."""


def response_of(policy: str, sample: Sample) -> Response:
    """Returns a sample as a response of the policy; its score, if it has one, is the proxy score."""
    return Response(
        policy=policy,
        prompt_id=sample.prompt_id,
        index=sample.index,
        text=sample.response,
        num_tokens=sample.num_tokens,
        finished=sample.finished,
        log_ratio=sample.log_ratio,
        proxy_score=sample.score,
    )


@dataclass(frozen=True)
class LocalPolicy:
    """A model directory or hub model, sampled in this process.

    `reference` is the model to measure its KL against; "" if none is set or its tokens differ from the policy's.

    `room_tokens` is the number of tokens of the context that remain after the longest prompt.
    """

    name: str
    spec: str
    folder: Path
    sha256: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    reference: str
    room_tokens: int

    @classmethod
    def open(cls, name: str, spec: str, prompts: Sequence[Prompt], sampling: Sampling) -> "LocalPolicy":
        """Raises: ValueError for a folder that holds no decoder, and for a prompt that leaves no room for the response;
        the message names the prompt.
        """
        folder = model_directory(spec)
        ModelFolder(folder, LanguageModel).check()
        config, _, _ = read_config(folder, "language")
        tokenizer, context, longest = Tokenizer.load(folder), config.max_position_embeddings, 0
        for prompt in prompts:
            num_tokens = len(tokenizer.encode_prompt(prompt.messages))
            longest = max(longest, num_tokens)
            if num_tokens >= context:
                raise ValueError(
                    f"policy {name!r}: prompt {prompt.prompt_id!r} has {num_tokens} tokens, which leave no room for a"
                    f" response in its context of {context}"
                )
        reference = model_directory(sampling.reference) if sampling.reference else None
        is_measured = reference is not None and Tokenizer.load(reference) == tokenizer
        measured = str(reference) if is_measured else ""
        return cls(name, spec, folder, model_hash(spec), prompts, sampling, measured, context - longest)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "model",
            "spec": self.spec,
            "sha256": self.sha256,
            "sampling": asdict(self.sampling),
            "reference_sha256": folder_hash(Path(self.reference)) if self.reference else "",
        }

    def respond(self, on_progress: OnProgress) -> list[Response]:
        spec = SamplingSpec(
            policy=self.folder,
            num_samples=self.sampling.num_samples,
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            seed=derive_seed(self.sampling.seed, "compare", self.name),
            precision=self.sampling.precision,
            reference=self.reference,
        )
        samples = sample_policy(spec, self.prompts)
        on_progress(len(samples), len(samples))
        return [response_of(self.name, sample) for sample in samples]


@dataclass(frozen=True)
class RemotePolicy:
    """A model behind an OpenAI-compatible endpoint, with one request and its own seed per sample.

    Answers are cached, so reruns agree even if a server ignores seeds.
    """

    name: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    asker: Asker

    def describe(self) -> dict[str, Any]:
        endpoint = self.asker.endpoint
        sampling = {
            name: value for name, value in asdict(self.sampling).items() if name not in ("precision", "reference")
        }
        return {
            "name": self.name,
            "kind": "endpoint",
            "spec": f"{endpoint.url}#{endpoint.model}",
            "sampling": sampling,
        }

    def respond(self, on_progress: OnProgress) -> list[Response]:
        """Raises: ValueError if any request failed. The answers received are stored for the next run."""
        wanted = [(prompt, index) for prompt in self.prompts for index in range(self.sampling.num_samples)]
        answers = self.asker.ask_all([self._request(prompt, index) for prompt, index in wanted], on_progress)
        failed = [(prompt, answer) for (prompt, _), answer in zip(wanted, answers, strict=True) if answer.failure]
        if failed:
            raise ValueError(
                f"policy {self.name!r}: {len(failed)} of {len(wanted)} requests failed, the first on prompt"
                f" {failed[0][0].prompt_id!r}: {failed[0][1].failure}. The answers received are stored: run it again"
            )
        return [
            Response(self.name, prompt.prompt_id, index, answer.text.strip(), answer.num_tokens, answer.finished)
            for (prompt, index), answer in zip(wanted, answers, strict=True)
        ]

    def _request(self, prompt: Prompt, index: int) -> dict[str, Any]:
        named = derive_seed(self.sampling.seed, "compare", self.name, prompt.prompt_id, index)
        return {
            "messages": [dict(message) for message in prompt.messages],
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": named % SEEDS,
        }


def is_saved(spec: str) -> bool:
    """Returns whether a spec is FILE or FILE#WRITER."""
    return spec.partition("#")[0].endswith(SUFFIXES)


def saved_rows(who: str, name: str, spec: str, writer_fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, row) of FILE, or for FILE#WRITER of the rows that WRITER wrote, without absent fields.

    The first of `writer_fields` that a row has names its writer. Raises: ValueError for a missing file, for rows by
    several writers if none was chosen, and if there is none by WRITER.
    """
    file, _, writer = spec.partition("#")
    if not Path(file).is_file():
        raise ValueError(f"{who}: {file}: no such file")
    writers: dict[str, str] = {}
    for where, row in read_source(file):
        wrote = next(filter(None, (name_field(where, row, field) for field in writer_fields)), "")
        writers.setdefault(wrote, where)
        if not writer and len(writers) > 1:
            both = " and ".join(repr(known) for known in writers)
            raise ValueError(f"{where}: the file has rows by {both}; choose one with {name}={file}#WRITER")
        if wrote == writer or not writer:
            # Parquet stores every field in every row.
            yield where, {field: value for field, value in row.items() if value is not None}
    if writer and writer not in writers:
        fields = " or ".join(writer_fields)
        raise ValueError(f"{file}: no row's {fields} is {writer!r}; found {sorted(writers)[:SHOWN_IDS]}")


@dataclass(frozen=True)
class SavedPolicy:
    """A file of saved outputs: Heed's own rows, AlpacaEval's model_outputs, or a comparison's responses.

    `num_unused` counts the rows that answer no prompt of the comparison.
    """

    name: str
    spec: str
    sha256: str
    responses: Sequence[Response]
    num_unused: int

    @classmethod
    def open(cls, name: str, spec: str, prompts: Sequence[Prompt], *, allow_empty: bool) -> "SavedPolicy":
        """Reads FILE, or for FILE#WRITER the rows whose `policy` or `generator` is WRITER.

        A row names its prompt by `prompt_id` or by its text (`prompt`, `messages`, `instruction`), and holds the
        response as `response`, `output`, `completion` or `text`; `index` numbers several responses to one prompt.
        Raises: ValueError naming file and line of a row that is malformed, empty, repeated or contradicts the prompts;
        naming prompts without a response; for rows by several writers when none was chosen.
        """
        file = spec.partition("#")[0]
        rows = _SavedRows(name, prompts, allow_empty=allow_empty)
        for where, row in saved_rows(f"policy {name!r}", name, spec, WRITER_FIELDS):
            rows.add(where, row)
        return cls(name, spec, file_hash(Path(file)), rows.in_order(file), rows.num_unused)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "saved",
            "spec": self.spec,
            "sha256": self.sha256,
            "num_unused": self.num_unused,
        }

    def respond(self, on_progress: OnProgress) -> list[Response]:
        on_progress(len(self.responses), len(self.responses))
        return list(self.responses)


class _SavedRows:
    """Collects responses by prompt and index, row by row."""

    def __init__(self, policy: str, prompts: Sequence[Prompt], *, allow_empty: bool) -> None:
        self.num_unused = 0
        self._policy, self._prompts, self._allow_empty = policy, prompts, allow_empty
        self._by_id = by_id(prompts)
        self._by_asked = {conversation_key(prompt.messages): prompt for prompt in prompts}
        self._responses: dict[tuple[str, int], Response] = {}

    def add(self, where: str, row: Mapping[str, Any]) -> None:
        prompt = self._prompt(where, row)
        if prompt is None:
            self.num_unused += 1
            return
        index = whole_field(where, row, "index", 0, 2**31) if "index" in row else 0
        known = self._responses.get((prompt.prompt_id, index))
        if known is not None:
            raise ValueError(
                f"{where}: prompt {prompt.prompt_id!r} is already answered in {known.where}; number several responses"
                " with the field 'index'"
            )
        field = next((name for name in RESPONSE_FIELDS if name in row), RESPONSE_FIELDS[0])
        text = (any_text if self._allow_empty else text_field)(where, row, field)
        self._responses[prompt.prompt_id, index] = Response(
            policy=self._policy,
            prompt_id=prompt.prompt_id,
            index=index,
            text=text,
            num_tokens=whole_field(where, row, "num_tokens", 0, 2**31) if "num_tokens" in row else None,
            finished=_flag(where, row, "finished"),
            log_ratio=_measured(where, row, "log_ratio"),
            proxy_score=_measured(where, row, "proxy_score"),
            where=where,
        )

    def _prompt(self, where: str, row: Mapping[str, Any]) -> Prompt | None:
        """Returns the prompt that the row answers; None if it is not in the comparison."""
        key = conversation_key(turns_of(where, row, "prompt")) if any(name in row for name in ASKING_FIELDS) else None
        if "prompt_id" not in row:
            if key is None:
                wanted = ", ".join(("prompt_id", *ASKING_FIELDS))
                raise ValueError(f"{where}: the row names no prompt; one of {wanted} was expected, found {names(row)}")
            return self._by_asked.get(key)
        prompt = self._by_id.get(id_of(where, row))
        if prompt is not None and key is not None and key != conversation_key(prompt.messages):
            raise ValueError(f"{where}: prompt_id {prompt.prompt_id!r} belongs to a prompt other than the row's own")
        return prompt

    def in_order(self, file: str) -> list[Response]:
        """Returns responses prompt by prompt. Raises: ValueError naming prompts without a response."""
        by_prompt: dict[str, list[Response]] = {prompt.prompt_id: [] for prompt in self._prompts}
        for key in sorted(self._responses, key=lambda key: key[1]):
            by_prompt[key[0]].append(self._responses[key])
        missing = [prompt_id for prompt_id, rows in by_prompt.items() if not rows]
        if missing:
            more = f" and {len(missing) - SHOWN_IDS} more" if len(missing) > SHOWN_IDS else ""
            raise ValueError(
                f"policy {self._policy!r}: {file} has no response to {len(missing)} of {len(by_prompt)} prompts:"
                f" {', '.join(map(repr, missing[:SHOWN_IDS]))}{more}; {self.num_unused} other rows are unused"
            )
        return [response for rows in by_prompt.values() for response in rows]


def _flag(where: str, row: Mapping[str, Any], field: str) -> bool | None:
    value = row.get(field)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: field {field!r} is {shown(value)}; true or false was expected")
    return value


def _measured(where: str, row: Mapping[str, Any], field: str) -> float:
    """Returns the field's number; NaN if it is absent, or NaN already, which is how Parquet stores an absent one."""
    value = row.get(field)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return float("nan")
    return number_field(where, row, field)
