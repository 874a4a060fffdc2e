"""Wraps a policy as a model of EleutherAI's lm-evaluation-harness, so that any of its tasks runs on it.

The harness is an extra: `pip install '.[harness]'`. Written against `lm_eval.api.model.LM` of 0.4.13.
Shape letters: C positions, V vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from evaluation.evaluate.models import before_stop
from evaluation.measures.kl import Policy
from evaluation.measures.language_modelling import text_logprobs
from files.hashes import derive_seed
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice, token_logprobs
from lm.sequence_logprobs import logits_function, position_chunks, predicting_states
from lm.transfer import batches_by_length
from reward.sampling import BATCH

log = logging.getLogger(__name__)

MAX_NEW_TOKENS = 256  # unless the task or the context size allows fewer, as in the harness' own models
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

    def __init__(self, folder: Path, *, chat: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.policy, self.chat, self.seed = Policy.load(folder), chat, seed
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
        if len(context) > room:
            if not self.num_shortened:
                log.warning(
                    "a context of %d tokens was cut to its last %d; further ones are only counted", len(context), room
                )
            self.num_shortened += 1
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
class TaskResult:
    """One metric of one task. `error` is the harness' own standard error over documents; NaN if it reports none."""

    task: str
    metric: str
    value: float
    error: float
    num_documents: int


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    num_shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    seed: int = 0,
) -> list[TaskResult]:
    """Runs tasks of the harness by name, or, with `include`, tasks from a folder of your own task files.

    Raises: ValueError for an unknown task.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Indexing the harness' thousands of task files takes most of a minute.
    manager = TaskManager(include_path=str(include) if include else None, include_defaults=include is None)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        raise ValueError(f"tasks {list(tasks)}: {unknown} not found in {include or 'lm_eval (`lm-eval ls tasks`)'}")
    model = HeedLM(folder, chat=chat, seed=seed)
    evaluated = simple_evaluate(
        model=model,
        tasks=list(tasks),
        num_fewshot=num_shots,
        limit=limit,
        task_manager=manager,
        apply_chat_template=chat,
        bootstrap_iters=1_000,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    assert evaluated is not None, "only rank 0 gets results, and this is the only rank"
    return _results(evaluated)


def _results(evaluated: Mapping[str, Any]) -> list[TaskResult]:
    """Reads metrics, which the harness names "acc,none" (metric, filter), and standard errors, "acc_stderr,none"."""
    rows = []
    for task, metrics in evaluated["results"].items():
        num_documents = int(evaluated.get("n-samples", {}).get(task, {}).get("effective", 0))
        for name, value in metrics.items():
            metric, comma, kept_by = name.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{kept_by}")
                error_value = float(error) if isinstance(error, int | float) else float("nan")
                rows.append(TaskResult(task, metric, float(value), error_value, num_documents))
    return rows
