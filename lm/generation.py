"""Generation with a key-value cache: finished sequences leave, waiting ones enter, equal prompts are read once.

Shape letters: B running rows, N prompts, R response tokens.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.batch import Batch
from lm.decoding import Steps, cache_for, decoding_steps
from lm.encoder_decoder import EncoderDecoder
from lm.graphs import StepKind
from lm.model import LanguageModel
from lm.native.decoder import LEAVE_BELOW
from lm.prepacked import prepacked
from lm.progress import note_progress
from lm.sampling import Choice, draw_uniforms

# Reading tokens makes the CPU wait for a GPU, so it is done for several steps at once. Sequences that have ended idle
# for half of them on average.
STEPS_PER_READING = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class Generated:
    """Responses in the order of the prompts. A finished one ends with the end token or where `stop` said so; the others
    were cut off. `logprobs` are those of the response's tokens, in nats, under the model at the sampling temperature
    (greedy: 1), before top_k and top_p.
    """

    responses: list[list[int]]
    finished: list[bool]
    logprobs: list[list[float]]


Stop = Callable[[Sequence[int]], bool]  # whether a response ends with its last token


def never(_response: Sequence[int]) -> bool:
    return False


@torch.inference_mode()
def generate(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    choice: Choice,
    seeds: Sequence[int],
    stop: Stop = never,
    max_rows: int = 128,
    sources: Sequence[Sequence[int]] | None = None,
    steps: StepKind | Steps = "auto",
) -> Generated:
    """One response per prompt, at most `max_rows` at a time. Pass prompts sorted by length to minimise padding.

    For several samples of a prompt, repeat it: neighbours that enter together are read once. An encoder-decoder reads a
    source for each response, and its prompts are what its decoder begins with. Every sequence draws from its own seed,
    so a sample does not depend on its batch mates beyond rounding. `steps` is a kind of `lm.decoding`; "auto" is the
    fastest that the model and its device allow. `FixedSteps` that the caller keeps are not recorded again. A GPU runs
    fewer rows if its free memory does not hold `max_rows`. A response ends with the first of `end_ids` that it draws.
    Raises: ValueError for an empty prompt or one that leaves no room in the model's context; for sources that are
    missing, empty, longer than the context, or given to a model that reads none; for steps that it cannot take.
    """
    if not prompts or len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds; at least one prompt and a seed for each")
    check_room(model, prompts, max_new_tokens)
    check_sources(model, sources, len(prompts))
    taken = decoding_steps(model, steps) if isinstance(steps, str) else steps
    run = _Run(model, prompts, sources, max_new_tokens, end_ids, choice, seeds, stop, max_rows, taken)
    with prepacked(model, run.max_rows) if taken is None else nullcontext():
        while run.has_work():
            run.admit_waiting()
            note_progress()
            tokens_B = run.draw()
            if run.must_read():
                run.read()
                tokens_B = run.drop_finished(tokens_B)
            if run.batch.rows:
                run.feed(tokens_B)
    return run.result


class _Run:
    """The state of one `generate`: prompts that wait, the batch that runs, and the responses so far."""

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] | None,
        max_new_tokens: int,
        end_ids: Collection[int],
        choice: Choice,
        seeds: Sequence[int],
        stop: Stop,
        max_rows: int,
        steps: Steps | None,
    ) -> None:
        self.prompts, self.sources, self.steps = prompts, sources, steps
        self.max_new_tokens, self.end_ids, self.choice, self.stop = max_new_tokens, end_ids, choice, stop
        self.leave_below = LEAVE_BELOW if steps is None else steps.leave_below
        device = model.head.weight.device
        num_columns = max(map(len, prompts)) + max_new_tokens
        self.batch = Batch(model, cache_for(model, steps, min(max_rows, len(prompts)), num_columns))
        self.max_rows = min(max_rows, len(prompts), self.batch.cache.num_slots)
        self.uniforms_NR = torch.from_numpy(draw_uniforms(seeds, max_new_tokens)).to(device)
        self.result = Generated([[] for _ in prompts], [False] * len(prompts), [[] for _ in prompts])
        self.waiting = deque(range(len(prompts)))
        self.steps_per_reading = STEPS_PER_READING[device.type] if stop is never else 1
        self.unread: list[tuple[Tensor, Tensor]] = []  # tokens and log-probs of the steps since the last reading
        self._number_rows()

    def has_work(self) -> bool:
        return bool(self.batch.rows or self.waiting)

    def admit_waiting(self) -> None:
        """Reads prompts into the batch once enough rows are free."""
        num_running = len(self.batch.rows)
        if self.unread or not self.waiting or num_running > self.leave_below * self.max_rows:
            return
        rows = [self.waiting.popleft() for _ in range(min(self.max_rows - num_running, len(self.waiting)))]
        sources = None if self.sources is None else [self.sources[row] for row in rows]
        self.batch.admit(rows, [self.prompts[row] for row in rows], sources)
        self._number_rows()

    def _number_rows(self) -> None:
        """The sequences of the batch, and how many tokens each has drawn, on the device."""
        drawn = [len(self.result.responses[row]) for row in self.batch.rows]
        numbers = torch.tensor([self.batch.rows, drawn], dtype=torch.int64, device=self.uniforms_NR.device)
        self.rows_B, self.drawn_B = numbers.unbind()

    def draw(self) -> Tensor:
        """Draws the next token of every running sequence, [B]; a finished one's means nothing."""
        places_B = self.drawn_B.clamp(max=self.max_new_tokens - 1)
        tokens_B, logprobs_B = self.choice.draw(self.batch.logits_BV, self.uniforms_NR[self.rows_B, places_B])
        self.drawn_B = self.drawn_B + 1
        self.unread.append((tokens_B, logprobs_B))
        return tokens_B

    def must_read(self) -> bool:
        left = [
            self.max_new_tokens - len(self.result.responses[row]) for row in self.batch.rows if not self.is_over(row)
        ]
        return len(self.unread) >= min(self.steps_per_reading, max(left))

    def read(self) -> None:
        """Records the tokens of unfinished sequences. Raises: FloatingPointError if logits were not numbers."""
        tokens, logprobs = (torch.stack(parts).tolist() for parts in zip(*self.unread, strict=True))
        self.unread = []
        for step_tokens, step_logprobs in zip(tokens, logprobs, strict=True):
            for row, token, logprob in zip(self.batch.rows, step_tokens, step_logprobs, strict=True):
                if not self.is_over(row):
                    self._record(row, token, logprob)

    def _record(self, row: int, token: int, logprob: float) -> None:
        response = self.result.responses[row]
        if math.isnan(logprob):
            raise FloatingPointError(
                f"the logits of token {len(response)} of response {row} are not numbers: the model's weights or"
                " activations are infinite or NaN"
            )
        response.append(token)
        self.result.logprobs[row].append(logprob)
        self.result.finished[row] = token in self.end_ids or self.stop(response)

    def is_over(self, row: int) -> bool:
        return self.result.finished[row] or len(self.result.responses[row]) == self.max_new_tokens

    def drop_finished(self, tokens_B: Tensor) -> Tensor:
        """The tokens of the sequences that stay. Those in the last slots move to the slots of finished ones, which idle
        until enough of them can leave together.
        """
        rows = self.batch.rows
        stay = [slot for slot, row in enumerate(rows) if not self.is_over(row)]
        if len(stay) > self.leave_below * len(rows):
            return tokens_B
        movers = [slot for slot in stay if slot >= len(stay)]
        slots = [movers.pop() if self.is_over(rows[slot]) else slot for slot in range(len(stay))]
        self.batch.keep(slots)
        self._number_rows()
        return tokens_B[torch.tensor(slots, dtype=torch.int64, device=tokens_B.device)]

    def feed(self, tokens_B: Tensor) -> None:
        batch = self.batch
        unfinished = [length for row, length in zip(batch.rows, batch.lengths, strict=True) if not self.is_over(row)]
        # One that has ended since the last reading may idle past its last column.
        batch.feed(tokens_B, self.steps, min(max(unfinished) + 1, batch.cache.num_columns))


def prompts_and_sources(
    model: LanguageModel | EncoderDecoder, asked: Sequence[Sequence[int]], start_id: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """The prompts and sources for `generate` to answer: a decoder continues what is asked; an encoder-decoder reads it
    and begins after `start_id`, the end token, as in training.
    """
    tokens = [list(question) for question in asked]
    if isinstance(model, EncoderDecoder):
        return [[start_id] for _ in tokens], tokens
    return tokens, None


def check_room(model: LanguageModel | EncoderDecoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises: ValueError for a prompt that is empty or leaves no room for the response in the model's context."""
    room = model.config.max_position_embeddings - max_new_tokens
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= room:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; {f'1 to {room}' if room > 0 else 'none'} were expected:"
                f" the context of {model.config.max_position_embeddings} tokens less {max_new_tokens} for the response"
                " (max_new_tokens)"
            )


def check_sources(
    model: LanguageModel | EncoderDecoder, sources: Sequence[Sequence[int]] | None, num_prompts: int
) -> None:
    """Raises: ValueError unless an encoder-decoder has a source for every prompt, of 1 to `max_position_embeddings`
    tokens, and any other model none.
    """
    expected = num_prompts if isinstance(model, EncoderDecoder) else None
    if (None if sources is None else len(sources)) != expected:
        raise ValueError("an encoder-decoder needs a source for every prompt, and no other model reads any")
    for index, source in enumerate(sources or ()):
        if not 1 <= len(source) <= model.config.max_position_embeddings:
            raise ValueError(
                f"source {index} has {len(source)} tokens; 1 to {model.config.max_position_embeddings} were expected"
            )
