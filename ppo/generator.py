"""Sampling from a copy of the policy: `Generators` on all ranks, `Generator` on one."""

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from cluster.remote import Handle, Pending
from lm.lora import LoRAConfig, add_adapters, interleaved, is_adapter, merged
from lm.model import LanguageModel
from lm.samplers.engine import SamplingEngine, SentWeights, chunks, require_same, whole_digest
from lm.samplers.heed_engine import KEPT_SHARE, HeedSampler
from lm.source import on_meta
from lm.tensor_parallel import Rendezvous, Team
from lm.weights import ModelFolder, read_config
from ppo.config import PPOConfig
from ppo.environments.conversations import Conversations
from ppo.environments.environment import Environment
from ppo.environments.sessions import Rules, Sessions
from ppo.placement import Continuous
from ppo.rank import InitialModels, Rank
from ppo.rollout import Asked, Rollout, equal_slices, sample_seed
from ppo.rounds import Exchange, GroupPrompt, Part, Rounds, Supply, Unfinished, Work, joined, still_needed
from training.config import EngineConfig
from training.notices import RunError, say

NOTHING_ASKED = Asked()


class Generators:
    """The generators of all ranks. The controller passes whole batches, which are split among the ranks, or among teams
    of `team_size` consecutive ranks that compute one policy together (`lm.tensor_parallel`).
    """

    def __init__(self, ranks: Handle["Generator"], team_size: int = 1, asked: Asked = NOTHING_ASKED) -> None:
        """`asked` are the job's prompts; an environment converses about them."""
        self.ranks, self.team_size, self.asked = ranks, team_size, asked
        if team_size > 1:
            self._report_spread(ranks.call_all(Generator.host))
        # Waits until the weights last sent have arrived. All ranks start with the SFT policy's.
        self.weights_arrived: Pending[object] = lambda: None
        self._left: list[Unfinished] = []  # by team, in placement `continuous`; see `_open`
        self._work: list[Work] = []

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, again: bool = False
    ) -> Pending[Rollout]:
        """Start sampling one response to each prompt, each from its own seed, with the last weights sent before this
        call.

        `rows` are the prompts' row numbers in the job's prompts. If generators are other processes, this returns at
        once, and rollouts are sampled in the order of calls. That the weights arrived is checked before a rollout is
        returned. Pass `again` if the next call samples with the same weights.
        """
        weights_arrived = self.weights_arrived
        slices = equal_slices(len(prompts), self.ranks.num_ranks // self.team_size)
        shares = [
            (rows[s], prompts[s], seeds[s], again, self.asked.of(rows[s]))
            for s in slices
            for _ in range(self.team_size)
        ]
        parts = self.ranks.start_split(Generator.generate, shares)

        @cache
        def collect() -> Rollout:
            weights_arrived()
            found = self._one_per_team(parts())
            if not self._left:  # in placement `continuous`, a later batch settles these too
                self.ranks.settle(parts)
            return Rollout.join(found)

        return collect

    def open_rounds(self, supply: Supply, seed: int) -> None:
        """Prepare placement `continuous`. `seed` is the run's."""
        self._supply, self._seed, self._num_openings = supply, seed, 0
        self._open(Unfinished(supply.schedule(), []))

    def _open(self, begun: Unfinished) -> None:
        """Begin with these responses. What each generator has after the last batch that was collected is kept."""
        self._left = begun.shares(self.ranks.num_ranks // self.team_size)
        rows = {one.number // begun.schedule.group_size: one.prompt_row for one in begun.responses}
        self._prompts = still_needed({group: self._supply.prompt(row) for group, row in rows.items()}, begun.schedule)
        self._num_openings += 1
        self.ranks.call_split(Generator.open_rounds, self._openings())

    def _openings(self) -> list[tuple[int, int, Unfinished, Mapping[int, GroupPrompt]]]:
        """Returns the arguments by rank with which a generator continues from what it has left."""
        return [
            (self._seed, self._num_openings, left, self._prompts) for left in self._left for _ in range(self.team_size)
        ]

    @property
    def num_dropped(self) -> int:
        """How many responses have been dropped."""
        return self._left[0].schedule.num_dropped

    @property
    def round_metrics(self) -> dict[str, float]:
        """The responses dropped so far, and the conversations that wait for an answer or a row, after the last batch
        that was collected.
        """
        found = {"dropped_responses": float(self.num_dropped)}
        if self._supply.config.environment is not None:
            found["waiting_conversations"] = float(self._left[0].schedule.num_waiting)
        return found

    def take_work(self) -> dict[str, float]:
        """Returns what the generators did, with placement `continuous`, for the batches collected since the last call:
        a resumed run does not repeat it.
        """
        work, self._work = self._work, []
        if not (possible := sum(one.num_possible for one in work)):
            return {}
        return {
            "rows_in_use": sum(one.num_drawn for one in work) / possible,
            "reread_tokens": float(sum(one.num_reread for one in work)),
            "generators_waited_seconds": sum(one.waited_seconds for one in work)
            * self.team_size
            / self.ranks.num_ranks,
        }

    def start_batch(self, version: int) -> Pending[Rollout]:
        """Start sampling with the last weights sent until a further batch has ended, and no more. `version` is the
        iteration that started with these weights. See `start_sampling`.
        """
        weights_arrived, num_collected = self.weights_arrived, self._left[0].schedule.num_batches
        prompts = self._supply.of_next_batch(self.num_dropped)
        parts = self.ranks.start_all(Generator.sample_batch, version, prompts, num_collected)

        @cache
        def collect() -> Rollout:
            weights_arrived()
            found = parts()[:: self.team_size]
            num_before, schedule = self._left[0].schedule.num_batches, found[0].left.schedule
            assert schedule.num_batches == num_before + 1, (
                f"batch {schedule.num_batches} is collected after {num_before}"
            )
            self._left = [part.left for part in found]
            self._work += [part.work for part in found]
            self._prompts = still_needed(self._prompts | prompts, schedule)
            self.ranks.settle(parts)
            self.ranks.start_from(Generator.open_rounds, self._openings())
            return joined(found)

        return collect

    def unfinished(self) -> bytes:
        """Returns the responses that no iteration has learned from, for a checkpoint: as they were after the last batch
        that was collected.
        """
        responses = [one for left in self._left for one in left.responses]
        return Unfinished(self._left[0].schedule, responses).as_bytes(self._supply.config.max_new_tokens)

    def restore(self, data: bytes) -> None:
        """Continue with the responses of a checkpoint, without those that failed if they are too many."""
        config = self._supply.config
        found = Unfinished.from_bytes(data).without_failures(config.max_failed_share * config.sampled_batch_size)
        self._supply.num_passed, self._supply.num_batches = found.schedule.next_group, found.schedule.num_batches
        self._open(found)

    def mend(self) -> None:
        """Replace lost generators, if they can be, so that they catch up while learners learn."""
        self.ranks.mend()

    def first_failure(self) -> str:
        """Returns why a conversation without a score has none, one of the last that failed; "" if all have one."""
        return next(filter(None, self.ranks.call_all(Generator.first_failure)), "")

    def _one_per_team(self, parts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollout of each team, whose ranks must all have the same. Raises: RunError if they do not."""
        for rank, own in enumerate(parts):
            first = rank - rank % self.team_size
            leader = parts[first]
            if not (
                torch.equal(own.tokens_BT, leader.tokens_BT) and torch.equal(own.sampled_by_BR, leader.sampled_by_BR)
            ):
                raise RunError(
                    f"ppo: generator rank {rank} sampled other tokens, or with other weights, than rank {first}, with"
                    " which it computes one policy (ppo.sampler.tensor_parallel_size); this is a defect of Heed"
                )
        return list(parts[:: self.team_size])

    def _report_spread(self, hosts: Sequence[str]) -> None:
        """Say which teams are on several machines, where each token waits for the network."""
        for first in range(0, len(hosts), self.team_size):
            names = sorted(set(hosts[first : first + self.team_size]))
            if len(names) > 1:
                say(
                    f"ppo: ranks {first} to {first + self.team_size - 1} compute one policy together, but are on"
                    f" {' and '.join(names)}; sampling waits for their network in every layer"
                )


class Generator(Rank):
    """Holds a sampler, and turns its samples into rollouts."""

    def __init__(
        self,
        config: PPOConfig,
        engine_config: EngineConfig,
        models: InitialModels,
        meeting: Rendezvous | None = None,
        everyone: Rendezvous | None = None,
    ) -> None:
        """`meeting` is where ranks that compute one policy together form teams; all ranks construct theirs then.
        `everyone` is where those that sample in rounds read which responses have ended.
        """
        super().__init__(config, engine_config, models)
        self.everyone = everyone
        precision = engine_config.resolved_precision()
        on_own_device = not config.placement.roles_share_ranks
        end_ids = self.tokenizer.end_ids  # with `chat_template`, another token may close a turn than the folder says
        self.sampler: SamplingEngine
        if config.sampler.has_own_process:
            from lm.samplers.vllm_engine import VLLMSampler

            self.sampler = VLLMSampler(
                self.models.sft,
                precision,
                end_ids=end_ids,
                on_own_device=on_own_device,
                tensor_parallel_size=config.sampler.tensor_parallel_size,
                max_rows=config.sampler.max_rows,
            )
        else:
            team = Team.join(meeting) if meeting is not None else None
            self.sampler = HeedSampler.load(
                self.models.sft,
                precision,
                end_ids=end_ids,
                kept_share=1.0 if on_own_device else KEPT_SHARE if config.memory == "fast" else 0.0,
                max_rows=config.sampler.max_rows,
                team=team,
            )
        sends_adapter = config.lora is not None and config.lora.sends == "adapter"
        self.merging = Merging(self, config.lora) if config.lora is not None and sends_adapter else None
        # A colocated sampler gets new weights before it samples again, so it can release the old ones in between.
        self._sleeps = config.memory != "fast" and config.placement.roles_share_ranks
        self._failure = ""
        self._rounds: Rounds
        self._sessions: Sessions | None = None  # of conversations that are sampled in rounds
        self._exchange, self._idle_since = Exchange(), math.inf
        if config.environment is not None:
            config.environment.load()

    def generate(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        again: bool = False,
        asked: Asked = NOTHING_ASKED,
    ) -> Rollout:
        if self.config.environment is not None:
            sampled = self._converse(rows, prompts, seeds, asked, self.config.environment)
        else:
            sampled = self._respond(rows, prompts, seeds)
        if self._sleeps and not again:
            self.sampler.sleep()
        return sampled.sampled_with(self._digest())

    def _digest(self) -> int:
        """Returns the learner's digest of the weights that it sent last."""
        received = self.merging.digests if self.merging is not None else {}
        return whole_digest(received or self.sampler.digests)

    # Placement `continuous`.

    def open_rounds(self, seed: int, opening: int, begun: Unfinished, prompts: Mapping[int, GroupPrompt]) -> None:
        """Begin with the responses that this generator has, and the prompts that have been passed to it. `seed` is the
        run's, and `opening` the number of such calls.
        """
        config, team_size = self.config, self.config.sampler.tensor_parallel_size
        placement, batch, limit = config.placement, config.sampled_batch_size, config.max_new_tokens
        if self.everyone is not None:
            generator, num_generators = int(os.environ["RANK"]) // team_size, placement.num_generators // team_size
            self._exchange = Exchange(opening, generator, num_generators, self.everyone)
        assert isinstance(placement, Continuous), f"placement {placement.kind!r}; continuous was expected"
        if self._sessions is not None:
            self._sessions.close()
        if config.environment is not None:
            rules = Rules(config.environment, self.tokenizer, limit, self._context_tokens - limit)
            self._sessions = Sessions(rules, (1 + config.answer_rounds) * config.rows_in_progress)
        self._rounds = Rounds(
            begun,
            prompts,
            lambda number: sample_seed(seed, *divmod(number, batch)),
            self._exchange,
            self._sessions,
            round_tokens=placement.round_tokens,
            max_new_tokens=limit,
            max_prompt_tokens=self._context_tokens - limit if config.lengthens_prompts else 0,
            temperature=config.temperature,
            pad_id=self.tokenizer.pad_id,
            records_routes=config.router_replay is not False,
        )

    def sample_batch(self, version: int, prompts: Mapping[int, GroupPrompt], num_collected: int) -> Part:
        """Sample until the next batch is there (`Rounds.sample`). Results of the first batches have been collected."""
        assert isinstance(self.sampler, HeedSampler), "vLLM samples whole responses"
        self._exchange.forget(num_collected)
        waited = max(0.0, time.monotonic() - self._idle_since)
        part = self._rounds.sample(self.sampler, version, self._digest(), prompts)
        self._idle_since = time.monotonic()
        return part._replace(work=part.work._replace(waited_seconds=waited))

    # Placements whose rollouts are sampled whole.

    def _respond(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Rollout:
        limit, temperature = self.config.max_new_tokens, self.config.temperature
        found = self.sampler.sample(prompts, seeds, max_new_tokens=limit, temperature=temperature)
        return Rollout.of(
            rows,
            prompts,
            found.responses,
            found.finished,
            found.logprobs,
            max_new_tokens=limit,
            pad_id=self.tokenizer.pad_id,
            routes=self._replayed(found.routes),
        )

    def _converse(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        asked: Asked,
        environment: Environment,
    ) -> Rollout:
        limit = self.config.max_new_tokens
        sampled = Conversations(
            environment,
            self.tokenizer,
            self.sampler,
            max_new_tokens=limit,
            max_prompt_tokens=self._context_tokens - limit,
            temperature=self.config.temperature,
        ).sample(prompts, asked.conversations, asked.rows, seeds)
        self._failure = sampled.failure
        of_prompts = sampled.conversations
        return Rollout.of(
            rows,
            [conversation.prompt for conversation in of_prompts],
            [conversation.tokens for conversation in of_prompts],
            [conversation.is_finished for conversation in of_prompts],
            [conversation.logprobs for conversation in of_prompts],
            max_new_tokens=limit,
            pad_id=self.tokenizer.pad_id,
            dialogues=[conversation.dialogue for conversation in of_prompts],
            environment_seconds=sampled.seconds,
            routes=self._replayed([conversation.routes for conversation in of_prompts]),
        )

    def _replayed(self, routes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the routes that learners replay: those of a mixture, unless `router_replay` is false."""
        return () if self.config.router_replay is False or not any(map(len, routes)) else routes

    @cached_property
    def _context_tokens(self) -> int:
        return read_config(self.models.sft, "language")[0].max_position_embeddings

    def first_failure(self) -> str:
        return self._failure if self._sessions is None else self._sessions.failure

    def host(self) -> str:
        return socket.gethostname()

    def receive(self, sent: Iterable[SentWeights]) -> None:
        """Receive the learner's weights. Comparing digests of both sides proves that they arrived."""
        self.sampler.wake()
        self.sampler.receive(sent if self.merging is None else self.merging.merged(sent))

    def receive_broadcast(self) -> None:
        """As `receive`, from the first learner's broadcast."""
        self.sampler.wake()
        self.receive(map(self.broadcast.receive, (self.merging or self.sampler).slots()))

    def close(self) -> None:
        if self._sessions is not None:
            self._sessions.close()
        self.sampler.close()


class Merging:
    """Makes whole weights of an adapter: adds it to the initial policy, which is read again from its directory.

    The frozen weights are rounded to compute precision, as the learner holds them, and the sum is in fp32, so the
    merged weights have the same bits as if the learner had merged them. `digests` are those of the adapter.
    """

    def __init__(self, rank: Rank, lora: LoRAConfig) -> None:
        self._frozen, self._dtype, self._device = (
            ModelFolder(rank.models.sft, LanguageModel),
            rank.compute_dtype,
            rank.device,
        )
        self._model = add_adapters(on_meta(self._frozen.build), lora)
        self.digests: Mapping[str, int] = {}

    def slots(self) -> Iterator[Mapping[str, Tensor]]:
        """Yields memory for the tensors of the adapter, in fp32, chunk by chunk."""
        held = ((name, parameter) for name, parameter in self._model.named_parameters() if is_adapter(name))
        return chunks((name, torch.empty(parameter.shape, device=self._device)) for name, parameter in held)

    def merged(self, sent: Iterable[SentWeights]) -> Iterator[SentWeights]:
        """Yields the policy's weights once the whole adapter has arrived."""
        adapter, digests = dict[str, Tensor](), dict[str, int]()
        for chunk in sent:
            own = {name: tensor.to(self._device) for name, tensor in chunk.weights.items()}
            require_same(chunk.digests, own)
            adapter |= own
            digests |= chunk.digests
        assert adapter.keys() == set[str]().union(*self.slots()), "the adapter has not arrived whole"
        self.digests = digests
        frozen = ((name, tensor.to(self._device, self._dtype)) for name, tensor in self._frozen.tensors())
        whole = merged(self._model, interleaved(self._model, frozen, iter(adapter.items())))
        yield from map(SentWeights.of, chunks((name, tensor.to(self._dtype)) for name, tensor in whole))
