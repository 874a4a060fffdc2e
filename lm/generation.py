"""Generation with a key-value cache: finished sequences leave, waiting ones enter, equal prompts are read once.

Shape letters: B running rows or sequences, N prompts (in `_read_packed`, tokens of all prompts), R response tokens,
U unique prompts, P prompt tokens, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from lm import decoding
from lm.attention import attention_mask
from lm.cache import CrossAttentionCache, KVCache, PromptWriter
from lm.decoding import StepKind, Steps, cache_for, decode, decoding_steps, prepacked
from lm.encoder import EncoderDecoder
from lm.model import LanguageModel
from lm.native.decoder import LEAVE_BELOW
from lm.progress import note_progress
from lm.sampling import Choice, draw_uniforms
from lm.transfer import pad_left, pad_right

# Reading tokens makes the CPU wait for a GPU, so the tokens of several steps are read at once. A finished sequence
# idles for half of these steps on average.
STEPS_PER_READING = {"cpu": 1, "cuda": 8}
SAMPLED_AT_ONCE = {"cpu": 128, "cuda": 1024}  # rows that run at once by default; a GPU runs fewer if these do not fit


@dataclass(frozen=True)
class Generated:
    """Responses in the order of the prompts. A finished response ends with an end token or where `stop` returned True;
    the others were cut off. `logprobs` are those of the response's tokens, in nats, under the model at the sampling
    temperature (greedy: 1), before top_k and top_p. `routes` [tokens, L, K] of a mixture are the experts of all tokens
    of prompt and response but the last, which no pass has read; layers without experts have no routes.
    """

    responses: list[list[int]]
    finished: list[bool]
    logprobs: list[list[float]]
    routes: list[Tensor] = field(default_factory=list)


Limits = int | Sequence[int]  # of the tokens of a response: one number for all prompts, or one for each
Stop = Callable[[Sequence[int]], bool]  # returns whether a response ends with its last token


def never(_response: Sequence[int]) -> bool:
    return False


@torch.inference_mode()
def generate(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: Limits,
    end_ids: Collection[int],
    choice: Choice,
    seeds: Sequence[int],
    stop: Stop = never,
    max_rows: int = 0,
    sources: Sequence[Sequence[int]] | None = None,
    steps: StepKind | Steps = "auto",
) -> Generated:
    """Generate one response per prompt, at most `max_rows` at a time (0 = `SAMPLED_AT_ONCE` of the device).

    Pass prompts sorted by length to minimise padding. For several samples of a prompt, repeat it: neighbours that enter
    together are read once. An encoder-decoder reads one source per response, and its decoder begins with the prompt.
    Each sequence draws from its own seed, so apart from rounding, a sample does not depend on the rest of its batch.
    `steps` is a kind from `lm.decoding`; "auto" is the fastest that the model and its device support. Pass `FixedSteps`
    to reuse their recordings across calls. A GPU runs fewer rows if `max_rows` do not fit in its free memory. A
    response ends with the first of `end_ids` that it draws.
    Raises: ValueError for an empty prompt or one that leaves no room in the model's context; for sources that are
    missing, empty, longer than the context, or passed to a model that reads none; for steps that the model cannot take.
    """
    if not prompts or len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds; prompts with a seed for each were expected")
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    check_room(model, prompts, limits)
    check_sources(model, sources, len(prompts))
    taken = decoding_steps(model, steps) if isinstance(steps, str) else steps
    # `rows_that_fit` does not count what an encoder-decoder keeps of its sources.
    max_rows = max_rows or SAMPLED_AT_ONCE[model.head.weight.device.type if sources is None else "cpu"]
    num_columns = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    run = _Run(model, min(max_rows, len(prompts)), num_columns, max(limits), end_ids, choice, stop, taken)
    run.add(prompts, sources, limits, seeds)
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


@torch.inference_mode()
def stream(
    model: LanguageModel | EncoderDecoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    choice: Choice,
    seed: int,
    source: Sequence[int] | None = None,
    steps: Steps | None = None,
) -> Iterator[int]:
    """Yield the tokens of one response as they are drawn, including an end token.

    Several streams may take turns on one model. Each has a cache of its own and computes alone, so its tokens depend on
    the arguments only, to the last bit, and not on what else runs: a batch would round differently with every size.
    Raises: as `generate`.
    """
    sources = None if source is None else [source]
    check_room(model, [prompt], [max_new_tokens])
    check_sources(model, sources, 1)
    num_columns = len(prompt) + max_new_tokens
    run = _Run(model, 1, num_columns, max_new_tokens, end_ids, choice, lambda _: False, steps)
    run.add([prompt], sources, [max_new_tokens], [seed])
    while run.has_work():
        run.admit_waiting()
        tokens_B = run.draw()
        run.read()
        yield run.result.responses[0][-1]
        tokens_B = run.drop_finished(tokens_B)
        if run.batch.rows:
            run.feed(tokens_B)


@dataclass
class Partial:
    """A response that is sampled in parts, of which `generate_in_rounds` appends tokens. `number` is the caller's."""

    number: int
    prompt: Sequence[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, each under the weights that drew it
    is_finished: bool = False
    # Of a mixture [tokens, L, K]: the experts of all tokens with the prompt's but the last, each as the weights chose
    # them that drew the next token.
    routes: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)

    def add_routes(self, routes: Tensor) -> None:
        """Add those of the tokens that had none; `routes` are of all tokens, with the present weights."""
        new = routes[len(self.routes) :]
        self.routes = torch.cat([self.routes, new]) if len(self.routes) else new


# Gets the responses that ended in the last round, and returns those that enter before the next one; None = stop.
NextRound = Callable[[Sequence[Partial]], Sequence[Partial] | None]


@torch.inference_mode()
def generate_in_rounds(
    model: LanguageModel,
    next_round: NextRound,
    *,
    num_steps: int,
    num_rows: int,
    num_columns: int,
    max_new_tokens: int,
    end_ids: Collection[int],
    choice: Choice,
    steps: StepKind | Steps = "auto",
    records_routes: bool = True,
) -> None:
    """Sample responses a round at a time: `num_steps` tokens of each. Responses that enter may have tokens already,
    perhaps of other weights; these are read again, and drawing continues where it stopped.

    `num_rows` responses run at once, at most, and have at most `num_columns` tokens with their prompts.
    Raises: ValueError if a GPU has no memory for so many rows.
    """
    taken = decoding_steps(model, steps) if isinstance(steps, str) else steps
    run = _Run(model, num_rows, num_columns, max_new_tokens, end_ids, choice, never, taken)
    if run.max_rows < num_rows:
        raise ValueError(
            f"{num_rows} responses of {num_columns} tokens are to be in progress at once, but the GPU has memory for"
            f" {run.max_rows}; fewer (ppo.placement.num_rows) or more generators were expected"
        )
    partials, ended = list[Partial](), list[Partial]()
    with prepacked(model, num_rows) if taken is None else nullcontext():
        while (entering := next_round(ended)) is not None:
            partials += entering
            run.add_partials(entering)
            rows = run.advance(num_steps)
            ended = [partials[row] for row in rows]
            for row, partial in zip(rows, ended, strict=True):
                partial.is_finished = partial.tokens[-1] in end_ids
                if run.result.routes and records_routes:
                    partial.add_routes(run.result.routes[row])
    for slot, row in enumerate(run.batch.rows if run.result.routes and records_routes else ()):
        partials[row].add_routes(run.batch.routes(slot, len(partials[row].prompt) + len(partials[row].tokens) - 1))


class _Run:
    """The state of one `generate` call: waiting prompts, the running batch, and the responses so far."""

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        max_rows: int,
        num_columns: int,
        max_new_tokens: int,
        end_ids: Collection[int],
        choice: Choice,
        stop: Stop,
        steps: Steps | None,
    ) -> None:
        self.steps, self.max_new_tokens = steps, max_new_tokens
        self.end_ids, self.choice, self.stop = end_ids, choice, stop
        self.leave_below = LEAVE_BELOW if steps is None else steps.leave_below
        device = model.head.weight.device
        self.batch = Batch(model, cache_for(model, steps, max_rows, num_columns))
        self.max_rows = min(max_rows, self.batch.cache.num_slots)
        self.prompts, self.sources, self.limits = list[Sequence[int]](), list[Sequence[int]](), list[int]()
        self.num_read = list[int]()  # tokens before the response
        self.uniforms_NR = torch.empty(0, max_new_tokens, device=device)
        self.result, self.waiting = Generated([], [], []), deque[int]()
        self.steps_per_reading = STEPS_PER_READING[device.type] if stop is never else 1
        self.unread: list[tuple[Tensor, Tensor]] = []  # tokens and log-probs of the steps since the last reading
        self._number_rows()

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] | None,
        limits: Sequence[int],
        seeds: Sequence[int],
    ) -> None:
        """Lets prompts wait for rows."""
        self.waiting += range(len(self.prompts), len(self.prompts) + len(prompts))
        self.prompts += prompts
        self.num_read += map(len, prompts)
        self.sources += sources or ()
        self.limits += limits
        uniforms_NR = torch.from_numpy(draw_uniforms(seeds, self.max_new_tokens))
        self.uniforms_NR = torch.cat([self.uniforms_NR, uniforms_NR.to(self.uniforms_NR.device)])
        self.result.responses.extend([] for _ in prompts)
        self.result.finished.extend(False for _ in prompts)
        self.result.logprobs.extend([] for _ in prompts)
        if self.batch.model.config.num_experts:
            self.result.routes.extend(torch.empty(0) for _ in prompts)

    def add_partials(self, partials: Sequence[Partial]) -> None:
        """Reads responses so far into the batch."""
        first = len(self.prompts)
        prompts, seeds = [[*partial.prompt, *partial.tokens] for partial in partials], [one.seed for one in partials]
        self.add(prompts, None, [self.max_new_tokens] * len(partials), seeds)
        self.num_read[first:] = [len(partial.prompt) for partial in partials]
        self.result.responses[first:] = [partial.tokens for partial in partials]
        self.result.logprobs[first:] = [partial.logprobs for partial in partials]
        self._admit(len(partials))

    def advance(self, num_steps: int) -> list[int]:
        """Draws so many tokens of every sequence. Returns the sequences that have ended, in order."""
        rows = sorted(self.batch.rows)
        for step in range(1, num_steps + 1):
            if not self.batch.rows:
                break
            note_progress()
            tokens_B = self.draw()
            if step == num_steps or self.must_read():
                self.read()
                tokens_B = self.drop_finished(tokens_B, leave_below=1.0 if step == num_steps else self.leave_below)
            if self.batch.rows:
                self.feed(tokens_B)
        return [row for row in rows if self.is_over(row)]

    def has_work(self) -> bool:
        return bool(self.batch.rows or self.waiting)

    def admit_waiting(self) -> None:
        """Reads prompts into the batch once enough rows are free."""
        num_running = len(self.batch.rows)
        if not self.unread and self.waiting and num_running <= self.leave_below * self.max_rows:
            self._admit(min(self.max_rows - num_running, len(self.waiting)))

    def _admit(self, number: int) -> None:
        if number:
            rows = [self.waiting.popleft() for _ in range(number)]
            sources = [self.sources[row] for row in rows] if self.sources else None
            self.batch.admit(rows, [self.prompts[row] for row in rows], sources)
            self._number_rows()

    def _number_rows(self) -> None:
        """Copies to the device which sequences the batch has, and how many tokens each has drawn."""
        drawn = [len(self.result.responses[row]) for row in self.batch.rows]
        numbers = torch.tensor([self.batch.rows, drawn], dtype=torch.int64, device=self.uniforms_NR.device)
        self.rows_B, self.drawn_B = numbers.unbind()

    def draw(self) -> Tensor:
        """Draws the next token of every running sequence, [B]; ignore those of finished sequences."""
        places_B = self.drawn_B.clamp(max=self.max_new_tokens - 1)
        tokens_B, logprobs_B = self.choice.draw(self.batch.logits_BV, self.uniforms_NR[self.rows_B, places_B])
        self.drawn_B = self.drawn_B + 1
        self.unread.append((tokens_B, logprobs_B))
        return tokens_B

    def must_read(self) -> bool:
        left = [self.limits[row] - len(self.result.responses[row]) for row in self.batch.rows if not self.is_over(row)]
        return len(self.unread) >= min(self.steps_per_reading, max(left))

    def read(self) -> None:
        """Records the tokens of unfinished sequences. Raises: FloatingPointError if logits were NaN."""
        tokens, logprobs = (torch.stack(parts).tolist() for parts in zip(*self.unread, strict=True))
        self.unread = []
        for step_tokens, step_logprobs in zip(tokens, logprobs, strict=True):
            drawn = zip(self.batch.rows, step_tokens, step_logprobs, strict=True)
            for slot, (row, token, logprob) in enumerate(drawn):
                if not self.is_over(row):
                    self._record(row, token, logprob)
                    if self.result.routes and self.is_over(row):  # later steps may overwrite the routes
                        num_read = self.num_read[row] + len(self.result.responses[row]) - 1
                        self.result.routes[row] = self.batch.routes(slot, num_read)

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
        return self.result.finished[row] or len(self.result.responses[row]) == self.limits[row]

    def drop_finished(self, tokens_B: Tensor, leave_below: float | None = None) -> Tensor:
        """Drops finished sequences once enough of them can leave together, and returns the tokens of the others.

        Sequences in the last slots move to the slots of those that leave.
        """
        rows = self.batch.rows
        stay = [slot for slot, row in enumerate(rows) if not self.is_over(row)]
        if len(stay) > (leave_below or self.leave_below) * len(rows):
            return tokens_B
        movers = [slot for slot in stay if slot >= len(stay)]
        slots = [movers.pop() if self.is_over(rows[slot]) else slot for slot in range(len(stay))]
        self.batch.keep(slots)
        self._number_rows()
        return tokens_B[torch.tensor(slots, dtype=torch.int64, device=tokens_B.device)]

    def feed(self, tokens_B: Tensor) -> None:
        batch = self.batch
        unfinished = [length for row, length in zip(batch.rows, batch.lengths, strict=True) if not self.is_over(row)]
        # A sequence that has ended since the last reading may idle past its last column.
        batch.feed(tokens_B, self.steps, min(max(unfinished) + 1, batch.cache.num_columns))


def prompts_and_sources(
    model: LanguageModel | EncoderDecoder, asked: Sequence[Sequence[int]], start_id: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Returns the prompts and sources with which `generate` answers the texts in `asked`.

    A decoder continues the text; an encoder-decoder reads it and begins after `start_id`, as in training.
    """
    tokens = [list(question) for question in asked]
    if isinstance(model, EncoderDecoder):
        return [[start_id] for _ in tokens], tokens
    return tokens, None


def check_room(model: LanguageModel | EncoderDecoder, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    """Raises: ValueError for a prompt that is empty or leaves no room in the model's context for as many tokens as its
    limit.
    """
    for index, (prompt, max_new_tokens) in enumerate(zip(prompts, limits, strict=True)):
        room = model.config.max_position_embeddings - max_new_tokens
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


class Batch:
    """Sequences in the first slots of one cache, and their state; `logits_BV` are the logits of each one's next token.

    `rows` are the caller's numbers for the sequences. `columns_B` counts each sequence's tokens in the cache; `lengths`
    has the same counts as a list.
    """

    def __init__(self, model: LanguageModel | EncoderDecoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.columns_B = torch.empty(0, dtype=torch.int64, device=cache.keys.device)
        self.logits_BV = cache.keys.new_empty(0, model.config.vocab_size)
        self.cross_cache: CrossAttentionCache | None = None

    @classmethod
    def start(
        cls,
        model: LanguageModel | EncoderDecoder,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        num_new: int,
        sources: Sequence[Sequence[int]] | None = None,
        *,
        num_slots: int = 0,
    ) -> Self:
        """Read the prompts into a new cache, with columns for `num_new` more tokens and at least `num_slots` slots."""
        num_columns = max(map(len, prompts)) + num_new
        num_slots = max(num_slots, len(prompts))
        batch = cls(model, KVCache.empty(model.config, num_slots, num_columns, like=model.head.weight))
        batch.admit(rows, prompts, sources)
        return batch

    def admit(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Read the prompts into the next slots."""
        pairs = list(zip(map(tuple, prompts), map(tuple, sources or [()] * len(prompts)), strict=True))
        # Samples of one prompt share keys and values, so these are computed once and then copied.
        slots: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for slot, pair in enumerate(pairs, start=len(self.rows)):
            slots.setdefault(pair, slot)
        cross_cache = None
        if isinstance(self.model, EncoderDecoder):
            cross_cache = self.model.read(*pad_right([source for _, source in slots], self.columns_B.device))
        unique = [prompt for prompt, _ in slots]
        logits_UV = read_prompts(self.model, self.cache, unique, list(slots.values()), cross_cache)
        place = {pair: number for number, pair in enumerate(slots)}
        places = [place[pair] for pair in pairs]
        copies = [(slots[pair], slot) for slot, pair in enumerate(pairs, start=len(self.rows)) if slots[pair] != slot]
        if copies:
            self.cache.copy_slots(copies, max(map(len, unique)))
        if cross_cache is not None:
            cross_cache = cross_cache.keep(places)
            self.cross_cache = cross_cache if self.cross_cache is None else self.cross_cache.join(cross_cache)
        self.rows += rows
        self.lengths += map(len, prompts)
        self.columns_B = torch.tensor(self.lengths, device=self.columns_B.device)
        self.logits_BV = torch.cat([self.logits_BV, logits_UV[torch.tensor(places, device=logits_UV.device)]])

    def feed(self, tokens_B: Tensor, steps: Steps | None = None, num_columns: int = 0) -> None:
        """Append one token to every sequence and compute the next logits.

        With `num_columns`, sequences that then have more tokens have ended, and their logits mean nothing.
        """
        num_columns = num_columns or max(self.lengths) + 1
        if steps is None:
            self.logits_BV = decode(self.model, tokens_B, self.columns_B, self.cache, num_columns, self.cross_cache)
        else:
            self.logits_BV = steps.next_logits(tokens_B, self.columns_B, self.cache, num_columns)
        self.columns_B = self.columns_B + 1
        self.lengths = [length + 1 for length in self.lengths]

    def routes(self, slot: int, num_tokens: int) -> Tensor:
        """Returns a copy in CPU memory of the experts of a sequence's first tokens, [tokens, L, K]."""
        assert self.cache.routes is not None, "only a mixture has routes"
        return self.cache.routes[:, slot, :num_tokens].cpu().transpose(0, 1).clone()

    def keep(self, slots: Sequence[int]) -> None:
        """Keep only the sequences in these slots, in this order (a forking beam appears twice)."""
        moved = [(source, target) for target, source in enumerate(slots) if source != target]
        if moved:
            num_columns = min(max(self.lengths[source] for source, _ in moved), self.cache.num_columns)
            self.cache.copy_slots(moved, num_columns)
        self.rows, self.lengths = [self.rows[slot] for slot in slots], [self.lengths[slot] for slot in slots]
        slots_B = torch.tensor(slots, dtype=torch.int64, device=self.columns_B.device)
        self.columns_B, self.logits_BV = self.columns_B[slots_B], self.logits_BV[slots_B]
        if self.cross_cache is not None:
            self.cross_cache = self.cross_cache.keep(slots) if slots else None


def read_prompts(
    model: LanguageModel | EncoderDecoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    cross_cache: CrossAttentionCache | None,
) -> Tensor:
    """Read each prompt's keys and values into its slot, and return the logits [U, V] after it."""
    if not reads_packed(model):
        return _read_padded(model, cache, prompts, slots, cross_cache)
    has_states = bool(cache.states)  # of linear layers, which have that at the end of a row
    parts = _packable(prompts, pads=has_states)
    if has_states:
        return torch.cat([_read_padded(model, cache, prompts[part], slots[part], cross_cache) for part in parts])
    return torch.cat([_read_packed(model, cache, prompts[part], slots[part]) for part in parts])


def reads_packed(model: LanguageModel | EncoderDecoder) -> bool:
    """Whether prompts are read some thousand tokens at a time, packed into one row if no layer is linear, instead of
    all at once, padded.

    They are padded on a CPU, where packing makes matrix products no faster, and if each sequence attends to a source.
    """
    return model.head.weight.is_cuda and isinstance(model, LanguageModel)


def _packable(prompts: Sequence[Sequence[int]], *, pads: bool) -> Iterator[slice]:
    """Yields neighbours with at most `PROMPT_TOKENS` tokens in total, with padding if it `pads`; a longer prompt comes
    alone.
    """
    start, total, longest = 0, 0, 0
    for place, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        total = (place + 1 - start) * longest if pads else total + len(prompt)
        if place > start and total > decoding.PROMPT_TOKENS:
            yield slice(start, place)
            start, total, longest = place, len(prompt), len(prompt)
    yield slice(start, len(prompts))


def _read_packed(
    model: LanguageModel | EncoderDecoder, cache: KVCache, prompts: Sequence[Sequence[int]], slots: Sequence[int]
) -> Tensor:
    device = cache.keys.device
    lengths_U = torch.tensor([len(prompt) for prompt in prompts])
    tokens_1N = torch.tensor([[token for prompt in prompts for token in prompt]]).to(device)
    ends_U = lengths_U.cumsum(0)
    columns_N = torch.arange(tokens_1N.shape[1]) - (ends_U - lengths_U).repeat_interleave(lengths_U)
    segments_1N = torch.arange(1, len(prompts) + 1).repeat_interleave(lengths_U)[None]
    slots_N = torch.tensor(slots).repeat_interleave(lengths_U)
    places_N = torch.arange(tokens_1N.shape[1], device=device)
    columns_N, slots_N, last_U = (x.to(device) for x in (columns_N, slots_N, ends_U - 1))
    writer = PromptWriter(cache, places_N, slots_N, columns_N)
    hidden_1ND = model.decoder(tokens_1N, columns_N[None], model.decoder.mask_of(segments_1N, device), writer)
    return model.head(hidden_1ND[0, last_U])


def _read_padded(
    model: LanguageModel | EncoderDecoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    cross_cache: CrossAttentionCache | None,
) -> Tensor:
    """Reads all prompts at once, padded on the left."""
    tokens_BP, first_real_B = pad_left(prompts, cache.keys.device)
    places_P = torch.arange(tokens_BP.shape[1], device=tokens_BP.device)
    positions_BP = (places_P - first_real_B[:, None]).clamp(min=0)
    real_BP = places_P >= first_real_B[:, None]
    segments_BP = real_BP.long()
    is_on_gpu = tokens_BP.is_cuda  # where attention takes such rows without a mask of P x P, in bf16
    mask = model.decoder.mask_of(segments_BP.cpu(), tokens_BP.device) if is_on_gpu else attention_mask(segments_BP)
    slots_B = torch.tensor(slots, device=tokens_BP.device)
    slots_BP = slots_B[:, None].expand(tokens_BP.shape)
    writer = PromptWriter(cache, real_BP.flatten().nonzero()[:, 0], slots_BP[real_BP], positions_BP[real_BP], slots_B)
    hidden_BPD = model.decoder(tokens_BP, positions_BP, mask, writer, cross_cache)
    return model.head(hidden_BPD[:, -1])
