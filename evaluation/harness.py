"""Runs tasks of EleutherAI's lm-evaluation-harness on models in this process, for `heed evaluate --suite harness:TASK`.

The harness is an extra: `pip install '.[harness]'`. Written against `lm_eval.api.model.LM` of 0.4.13. Its tracker
writes a model's answers next to the cache of answers, and `evaluation.evaluate.logs` reads them as any other log.
Shape letters: C positions, V vocabulary.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from evaluation.evaluate.logs import LoggedModel, Sample, read_harness
from evaluation.evaluate.models import Answering, LocalModel, before_stop, open_models
from evaluation.measures.kl import Policy
from evaluation.measures.language_modelling import text_logprobs
from files.atomic import atomic_folder
from files.hashes import derive_seed, json_hash
from files.rows import hub_reason, require_hub
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice, token_logprobs
from lm.sequence_logprobs import logits_function, position_chunks, predicting_states
from lm.transfer import batches_by_length
from reward.sampling import BATCH
from stages.lineage import path_hash

MAX_NEW_TOKENS = 256  # unless the task or the context size allows fewer, as in the harness' own models
BUILT_IN = ("json", "csv", "parquet", "text", "arrow")  # `dataset_path` of tasks that name their files
_SPEC = re.compile(r"harness:(?P<name>[^:]+)(?::(?P<shots>\d+))?(?P<chat>:chat)?")
GENERATION_KWARGS = ("do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p")

Pair = tuple[list[int], list[int]]  # context, continuation


@dataclass(frozen=True)
class Settings:
    """The generation settings of one request."""

    until: tuple[str, ...]
    max_new_tokens: int
    choice: Choice


class HeedLM(LM):  # type: ignore[misc] # LM is Any to mypy, which need not find the extra
    """A model directory as a model of the harness, which asks it for log-likelihoods and for greedy or sampled text.

    With `chat`, strings are rendered by the model's chat template, and its special tokens are encoded as such. Without
    it, names of special tokens in a task's texts are encoded as plain text. Contexts that are too long are cut at the
    beginning, as in the harness' own models, and are counted in `num_shortened`.
    """

    def __init__(self, policy: Policy, *, chat: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.policy, self.chat, self.seed = policy, chat, seed
        self.num_shortened = 0

    @property
    def max_position_embeddings(self) -> int:
        return self.policy.model.config.max_position_embeddings

    def encode(self, text: str) -> list[int]:
        tokenizer = self.policy.tokenizer
        return tokenizer.encode_rendered(text) if self.chat else tokenizer.encode_plain([text])[0]

    def _people(self, text: str) -> str:
        """Marks text that a task adds to a rendered conversation, so that names of special tokens in it stay text."""
        return self.policy.tokenizer.marked(text) if self.chat else text

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Returns log p(continuation | context), nats, and whether each of its tokens is the most likely one.

        Raises: ValueError for an empty continuation, or one that is longer than the context.
        """
        pairs = [self._fitted(*self.encode_pair(*request.args), where=str(request.args)) for request in requests]
        return score_pairs(self.policy.model, pairs)

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Tokenizes both as one text; a space between them belongs to the continuation.

        With an empty context, the continuation follows the token that begins texts.
        """
        kept = context.rstrip(" ")
        whole = self.encode(context + self._people(continuation))
        before = self.encode(kept)
        if not before:
            return [self.policy.tokenizer.start_id], whole
        return whole[: len(before)], whole[len(before) :]

    def _fitted(self, context: list[int], continuation: list[int], where: str) -> Pair:
        room = self.max_position_embeddings - len(continuation)
        if not continuation or room < 1:
            raise ValueError(
                f"{where[:200]}: the continuation has {len(continuation)} tokens;"
                f" 1 to {self.max_position_embeddings - 1} were expected"
            )
        return self._shortened(context, room), continuation

    def _shortened(self, context: list[int], room: int) -> list[int]:
        self.num_shortened += len(context) > room
        return context[-room:]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Returns log p of whole texts, nats, after the token that begins texts (`text_logprobs`)."""
        texts = [request.args[0] for request in requests]
        return text_logprobs(self.policy.model, self.policy.tokenizer, texts)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Continues each context up to the first string of `until` or the end token. Raises: as `_settings` does."""
        texts = [""] * len(requests)
        groups: dict[Settings, list[int]] = {}
        for row, request in enumerate(requests):
            groups.setdefault(self._settings(request.args[1]), []).append(row)
        for settings, rows in groups.items():
            room = self.max_position_embeddings - settings.max_new_tokens
            queries = {row: self._shortened(self.encode(requests[row].args[0]), room) for row in rows}
            rows.sort(key=lambda row: len(queries[row]))
            generated = generate(
                self.policy.model,
                [queries[row] or [self.policy.tokenizer.start_id] for row in rows],
                max_new_tokens=settings.max_new_tokens,
                end_ids=self.policy.tokenizer.end_ids,
                choice=settings.choice,
                seeds=[derive_seed(self.seed, "harness", row) for row in rows],
                stop=self.policy.tokenizer.stop_at(settings.until),
                max_rows=BATCH,
            )
            for row, response in zip(rows, generated.responses, strict=True):
                texts[row] = before_stop(self.policy.tokenizer.decode(response), settings.until)
        return texts

    def _settings(self, wanted: Mapping[str, Any]) -> Settings:
        """Raises: ValueError for an unknown argument, or for more new tokens than the context leaves."""
        unknown = sorted(wanted.keys() - set(GENERATION_KWARGS))
        if unknown:
            raise ValueError(
                f"generation_kwargs {', '.join(unknown)}: one of {', '.join(GENERATION_KWARGS)} was expected"
            )
        until = wanted.get("until") or ()
        longest = int(wanted.get("max_gen_toks", min(MAX_NEW_TOKENS, self.max_position_embeddings // 2)))
        if not 1 <= longest < self.max_position_embeddings:
            raise ValueError(f"max_gen_toks is {longest}; 1 to {self.max_position_embeddings - 1} were expected")
        temperature = float(wanted.get("temperature", 0.0))
        # A task that sets no temperature but asks for sampling wants the model's own distribution.
        sampled = temperature or 1.0 if wanted.get("do_sample", temperature > 0) else 0.0
        choice = Choice(sampled, int(wanted.get("top_k", 0)), float(wanted.get("top_p", 1.0)))
        return Settings((until,) if isinstance(until, str) else tuple(until), longest, choice)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders the conversation up to where the assistant's response begins; without `add_generation_prompt`, up to
        the end of the last message, which the response continues.
        """
        tokenizer = self.policy.tokenizer
        if add_generation_prompt:
            return tokenizer.render(chat_history, add_generation_prompt=True)
        return tokenizer.render(chat_history[:-1], add_generation_prompt=True) + self._people(
            chat_history[-1]["content"]
        )

    @property
    def tokenizer_name(self) -> str:
        return str(self.policy.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.policy.tokenizer.chat_template if chat_template else ""


@torch.inference_mode()
def score_pairs(model: LanguageModel, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Returns per (context, continuation) the continuation's log p in nats, and whether greedy decoding gives it.

    Vocabulary logits are held for one chunk of positions at a time.
    """
    scores = [(0.0, True)] * len(pairs)
    logits = logits_function(model)
    for rows in batches_by_length([[*context, *continuation] for context, continuation in pairs]):
        states_CD = predicting_states(model, [pairs[row] for row in rows])
        tokens_C = torch.tensor([token for row in rows for token in pairs[row][1]], device=states_CD.device)
        logprobs, greedy = [], []
        for part in position_chunks(states_CD, model.config.vocab_size):
            logits_CV = logits(states_CD[part])
            logprobs.append(token_logprobs(logits_CV, tokens_C[part]))
            greedy.append(logits_CV.argmax(dim=-1) == tokens_C[part])
        lengths = [len(pairs[row][1]) for row in rows]
        parts = zip(rows, torch.cat(logprobs).split(lengths), torch.cat(greedy).split(lengths), strict=True)
        for row, logprob_C, greedy_C in parts:
            scores[row] = float(logprob_C.double().sum()), bool(greedy_C.all())
    return scores


@dataclass(frozen=True)
class HarnessTask:
    """harness:TASK[:SHOTS][:chat]: a task, group or tag, with the task's own number of solved examples unless `shots`
    says another, and rendered by the chat template if `chat`. `include` is the folder of task files that holds it; ""
    means that the harness does.
    """

    spec: str
    name: str
    shots: int | None
    chat: bool
    include: str

    @classmethod
    def of(cls, spec: str, include: str) -> "HarnessTask":
        """Raises: ValueError for another spec, and if `include` is no folder."""
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ValueError(f"--suite {spec}: harness:TASK, harness:TASK:SHOTS or harness:TASK:chat was expected")
        if include and not Path(include).is_dir():
            raise ValueError(f"--data {spec}={include}: no such folder; one with the task's YAML file was expected")
        return cls(spec, match["name"], int(match["shots"]) if match["shots"] else None, bool(match["chat"]), include)


def open_tasks(
    specs: Sequence[str], tasks: Sequence[HarnessTask], max_items: int, how: Answering
) -> tuple[list[LoggedModel], Mapping[str, Sequence[str]]]:
    """Asks models what the tasks ask, unless the answers are stored, and returns their logs, and by algorithm the names
    of its runs. `max_items` 0 means all.

    Raises: ValueError for an unknown task, one whose data cannot be had, and a model that is not sampled here.
    """
    models, runs = open_models(specs, how)
    logs = []
    for model in models:
        if not isinstance(model, LocalModel):
            raise ValueError(f"model {model.name!r} is {model.kind}; {tasks[0].spec} needs a language model's folder")
        samples: dict[str, dict[str, list[Sample]]] = {}
        lower = frozenset[str]()
        for task in tasks:
            found, found_lower = read_harness(model.name, _log(task, model, max_items, how))
            if twice := samples.keys() & found.keys():
                raise ValueError(f"--suite {task.spec}: {min(twice)} is already evaluated; each task once was expected")
            samples |= found
            lower |= found_lower
        model.close()
        source = ", ".join(f"{task.spec} of {task.include or 'lm_eval ' + version('lm_eval')}" for task in tasks)
        logs.append(LoggedModel(model.name, model.spec, "lm-evaluation-harness", samples, lower, source, model.folder))
    return logs, runs


def _log(task: HarnessTask, model: LocalModel, max_items: int, how: Answering) -> Path:
    """Returns the folder with the log of one model on one task, written now unless it is there."""
    if task.chat and not model.has_chat_template:
        raise ValueError(f"model {model.name!r} has no chat template, which {task.spec} needs")
    about = (asdict(task), version("lm_eval"), path_hash(task.include) if task.include else "")
    settings = (model.sha256, how.seed, how.precision, how.max_new_tokens, max_items)
    folder = how.asking.cache.with_name("harness") / json_hash("harness", *about, *settings)
    if not folder.exists():
        how.tell(f"{model.name}: {task.spec}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as aside:
            _run(task, model, max_items, how, aside)
    return folder


@cache
def _manager(include: str) -> TaskManager:
    """Indexing the harness' thousands of task files takes most of a minute, so it is done once."""
    return TaskManager(include_path=include or None, include_defaults=not include)


def _run(task: HarnessTask, model: LocalModel, max_items: int, how: Answering, folder: Path) -> None:
    loaded = _load(task)
    tracker = EvaluationTracker(output_path=str(folder))
    adapter = HeedLM(Policy(model.folder, model.network, model.tokenizer), chat=task.chat, seed=how.seed)
    groups = [group for group in loaded["groups"].values() if group.name == task.name]
    evaluated = simple_evaluate(
        model=adapter,
        tasks=groups or list(loaded["tasks"].values()),
        num_fewshot=task.shots,
        samples=_spread(loaded["tasks"], max_items, together=bool(groups)) if max_items else None,
        task_manager=_manager(task.include),
        apply_chat_template=task.chat,
        gen_kwargs={"max_gen_toks": how.max_new_tokens} if how.max_new_tokens else None,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
        random_seed=how.seed,
        numpy_random_seed=how.seed,
        torch_random_seed=how.seed,
        fewshot_random_seed=how.seed,
    )
    assert evaluated is not None, "only rank 0 gets results, and this is the only rank"
    samples = evaluated.pop("samples")
    tracker.save_results_aggregated(results=evaluated, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    num_written = len(list(folder.rglob("samples_*.jsonl")))
    if num_written < len(samples):  # the tracker only warns
        raise ValueError(f"{task.spec}: lm_eval wrote the logs of {num_written} of {len(samples)} tasks to {folder}")
    if adapter.num_shortened:
        how.tell(f"{model.name}: {adapter.num_shortened:,} contexts of {task.spec} lost their beginning")


def _load(task: HarnessTask) -> Any:
    """Returns what the harness loads of a task: "tasks" and "groups" by name."""
    manager = _manager(task.include)
    if task.name not in manager.task_index:
        raise ValueError(
            f"--suite {task.spec}: not found in {task.include or 'lm_eval (`lm-eval ls tasks` lists them)'}"
        )
    sources = list(dict.fromkeys(_sources(manager, task.name)))
    where = f"--suite {task.spec}: its data, {', '.join(sources)}"
    for source in sources:
        require_hub(source, where)
    try:
        return manager.load([task.name])
    except Exception as error:  # the hub's clients raise many kinds of errors, which mean the same to the user
        raise ValueError(f"{where}: {hub_reason(error)}") from error


def _sources(manager: TaskManager, name: str) -> Iterator[str]:
    """Yields the hub ids that a task, or the tasks of a group or a tag, read."""
    entry = manager.task_index.get(name)
    if entry is None:
        return
    config = entry.cfg or {}
    if (source := config.get("dataset_path", BUILT_IN[0])) not in BUILT_IN:
        yield str(source)
    parts = config.get("task", []) if "group" in config else [] if config else sorted(entry.tags)
    for part in parts if isinstance(parts, list) else [parts]:
        yield from _sources(manager, part if isinstance(part, str) else str(part.get("task")))


def _spread(tasks: Mapping[str, Any], max_items: int, *, together: bool) -> dict[str, list[int]]:
    """Returns `max_items` documents, evenly spread over each task, or over all `together`, at least one of each."""
    sizes = {name: len(task.eval_docs) for name, task in tasks.items()}
    share = max_items / sum(sizes.values())
    nums = {name: min(size, max(1, round(share * size)) if together else max_items) for name, size in sizes.items()}
    return {name: [place * sizes[name] // num for place in range(num)] for name, num in nums.items()}
