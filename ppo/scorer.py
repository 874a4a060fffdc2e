"""Scoring with the frozen models: the reward model, the reference and the teachers. `Scorers` are on all ranks,
`Scorer` on one.

A frozen model's weights are on the device all the time, or only while they are used (`ppo.memory`). In the second case
each rank keeps a share of the weights in CPU memory, pinned if there is a GPU. The ranks gather either all weights for
all passes of a call, or one layer at a time within each pass.

Shape letters: B responses, O objectives, R response tokens, M teachers.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster.remote import Handle, Pending
from lm.attention import Attention
from lm.experts import Mixture
from lm.layers import MLP, align_heads, round_products
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.source import PartialSource, load, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from ppo.config import PPOConfig
from ppo.rank import InitialModels, Rank
from ppo.rollout import Asked, Rollout, joined, shares_by_update, shares_of, start_on_groups
from reward.external import ExternalReward
from reward.scoring import (
    PackedInputs,
    RewardModel,
    RewardNetwork,
    labels_of,
    network_folder,
    scores_of,
    weights_by_label,
)
from training.config import BatchConfig, EngineConfig
from training.internals import host_bytes
from training.packing import pass_tokens, split_passes

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyModule_co = TypeVar("AnyModule_co", bound=nn.Module, covariant=True)

ALIGNMENT = 256  # bytes; each weight starts at a multiple of it, as a separately allocated tensor would
TEXTS_PER_CALL = 16  # for a reward that reads texts, if `micro_batch_size` is not set


class Scorers:
    """The scorers of all ranks. The controller passes whole rollouts, which are split among the ranks.

    `asked` are the job's prompts; it may be empty if the reward reads tokens, not texts.
    `reference` are the ranks that compute the reference's log-probs: the scorers or, with adapters, the learners, in
    groups of `sequence_parallel_size` ranks. `waits` says whether scoring only waits for a server.
    """

    def __init__(
        self,
        ranks: Handle["Scorer"],
        asked: Asked,
        batch: BatchConfig,
        reference: Handle[Any],
        sequence_parallel_size: int = 1,
        *,
        waits: bool = False,
    ) -> None:
        self.ranks, self.asked, self.batch, self.reference, self.waits = ranks, asked, batch, reference, waits
        self.num_reference_shares = reference.num_ranks // sequence_parallel_size

    def start_scores(self, rollout: Rollout) -> Pending[Tensor]:
        """Start scoring the responses [B, O]; higher is better. NaN = scoring failed: mask and count it.

        Objectives are in the order of the config's `objective_weights`; O = 1 if that is empty.
        """
        shares = shares_of(rollout.num_tokens_B, self.ranks.num_ranks, self.batch, with_gradients=False)
        arguments = [(part, self.asked.of(part.prompt_rows_B.tolist())) for part in rollout.shares(shares)]
        if not self.waits:
            return joined(self.ranks.start_split(Scorer.scores, arguments), shares)
        begun = self.ranks.start_split(Scorer.begin_scores, arguments)  # the ranks compute while a server answers

        def collect() -> list[Tensor]:
            begun()
            return self.ranks.call_all(Scorer.begun_scores)

        return joined(cache(collect), shares)

    def first_failure(self) -> str:
        """Returns why the first response without a score in the last call has none; "" if all have one."""
        return next(filter(None, self.ranks.call_all(Scorer.first_failure)), "")

    def failure_kinds(self) -> Counter[str]:
        """Returns how many responses of the last call failed, by kind of failure, where the reward has kinds."""
        return sum(self.ranks.call_all(Scorer.failure_kinds), Counter[str]())

    def start_reference_logprobs(self, rollout: Rollout, minibatches: Sequence[Tensor]) -> Pending[Tensor]:
        """Start computing log π_ref of each response token [B, R], nats, at the sampling temperature; 0 at padding.

        The reference replays the policy's routes: the KL is then that of weights, and 0 while these are equal.
        Responses are packed as for the policy (`Learners.start_policy_logprobs`), so with as many scorers as shares
        of the learners the KL starts at exactly 0.
        """
        shares = shares_by_update(rollout.num_tokens_B, self.num_reference_shares, self.batch, minibatches)
        arguments = [(part, share.pass_sizes) for part, share in zip(rollout.shares(shares), shares, strict=True)]
        return joined(start_on_groups(self.reference, Scorer.reference_logprobs, arguments), shares)

    def start_teacher_logprobs(self, rollout: Rollout, minibatches: Sequence[Tensor]) -> Pending[Tensor]:
        """Start computing log π_T of each response token for each teacher [B, M, R], as the reference's."""
        shares = shares_by_update(rollout.num_tokens_B, self.ranks.num_ranks, self.batch, minibatches)
        arguments = [(part, share.pass_sizes) for part, share in zip(rollout.shares(shares), shares, strict=True)]
        return joined(self.ranks.start_split(Scorer.teacher_logprobs, arguments), shares)


class Scorer(Rank):
    """Holds the frozen models: the reference policy, the teachers, and the reward model or what is in its place."""

    def __init__(
        self,
        config: PPOConfig,
        engine_config: EngineConfig,
        models: InitialModels,
        network: "FrozenModel[RewardNetwork] | None" = None,
    ) -> None:
        """`network` is the reward model if another role already holds it."""
        super().__init__(config, engine_config, models)
        # With adapters, the reference is the learner's policy with its adapters switched off.
        self.reference = self._fixed(ModelFolder(self.models.sft, LanguageModel)) if config.lora is None else None
        self.teachers = [self._fixed(ModelFolder(teacher, LanguageModel)) for teacher in self.models.teachers]
        reward = self.models.reward
        self.judge: RewardModel | ExternalReward
        if isinstance(reward, Path):
            weights = weights_by_label(str(reward), labels_of(reward), config.reward.objective_weights)
            self.network = network or self._fixed(network_folder(reward))
            self.judge = RewardModel(self.network.module, Tokenizer.load(reward), weights)
        else:
            self.judge = reward
        self._failure, self._failure_kinds = "", Counter[str]()

    def _fixed(self, source: PartialSource[AnyModule]) -> "FrozenModel[AnyModule]":
        if self.config.memory == "fast":
            whole = (torch.device("cpu"), torch.float32)  # weights that autocast would round are rounded on the CPU
            device, dtype = whole if self._autocast else (self.device, self.compute_dtype)
            model = load(source, device, dtype).eval().requires_grad_(False)
            self._set_types(model)
            return HeldModel(model.to(self.device))
        limit = self.engine_config.collective_timeout_seconds
        return ShardedModel(source, self._set_types, self.device, limit, by_layer=self.config.memory == "small")

    def _set_types(self, model: nn.Module) -> None:
        """Set the weights' dtypes so that passes round as the learner's do."""
        for parameter in model.parameters():  # a score's bias, a buffer, stays in fp32
            parameter.data = parameter.data.to(torch.float32 if self._autocast else self.compute_dtype)
        if self._autocast:
            round_products(model)
        align_heads(model, self.device)

    @torch.no_grad()
    def scores(self, rollout: Rollout, asked: Asked) -> Tensor:
        """Returns scores [B, O] (`Scorers.start_scores`). `asked` are the responses' prompts, if the reward reads
        texts.
        """
        prompts, responses = rollout.token_lists()
        if isinstance(self.judge, RewardModel):
            encoded = self.judge.encoded(self.tokenizer, asked.conversations, prompts, responses)
            heads = [self.judge.network.labels.index(name) for name in self.config.reward.objective_weights] or [0]
            return self._network_scores(self.judge, encoded)[:, heads]
        if self.config.environment is not None:  # what answers the prompt is the last turn
            responses = [rollout.turns(row)[-1][1] for row in range(len(rollout))]
        texts = [self.tokenizer.decode(response).strip() for response in responses]
        size = self.config.minibatch.micro_batch_size or TEXTS_PER_CALL
        columns = self.judge.columns(asked.conversations, texts, size, asked.rows)
        has_weight = [weight != 0 for weight in self.config.reward.objective_weights.values()] or [True]
        counted = [*itertools.compress(columns, has_weight)]
        self._failure = next((one.failure for scored in counted for one in scored if one.failure), "")
        failed = [[one for one in of if one.failure_kind] for of in zip(*counted, strict=True)]
        self._failure_kinds = Counter(of_response[0].failure_kind for of_response in failed if of_response)
        return torch.tensor([[result.score for result in scored] for scored in columns]).T

    def begin_scores(self, rollout: Rollout, asked: Asked) -> None:
        """Start `scores` in a thread, so that this rank computes while a server answers."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._begun = pool.submit(self.scores, rollout, asked)
        pool.shutdown(wait=False)

    def begun_scores(self) -> Tensor:
        """Wait for the scores that `begin_scores` started."""
        return self._begun.result()

    def first_failure(self) -> str:
        return self._failure

    def failure_kinds(self) -> Counter[str]:
        return self._failure_kinds

    def close(self) -> None:
        if isinstance(self.judge, ExternalReward):
            self.judge.close()

    def _network_scores(self, judge: RewardModel, read: Sequence[Sequence[int]]) -> Tensor:
        """Returns the scores [B, O] of sequences; NaN for one that is too long."""
        network, batch = judge.network, self.config.minibatch
        fitting = [row for row, tokens in enumerate(read) if judge.fits(tokens)]
        self._failure = next(filter(None, map(judge.why_unread, read)), "")
        # The reward model may have another tokenizer than the policy, so its token counts are known only here.
        units = [[len(read[row])] for row in fitting] or [[2]]
        (passes,) = split_passes(units, 1, pass_tokens(batch, units, with_gradients=False))
        order, score_parts = list[int](), list[Tensor]()
        with self.network.in_use(), self._precision():
            # Every rank runs the same number of passes, since ranks may gather shared weights in each.
            for number in range(self.network.most_passes(len(passes))):
                note_progress()
                rows = [fitting[place] for place in passes[number]] if fitting and number < len(passes) else []
                sequences = [read[row] for row in rows] or [[judge.tokenizer.end_id] * 2]
                packed = PackedInputs.of(sequences, network.config.kind, self.device)
                order += rows
                score_parts.append(packed.in_order(scores_of(network, packed.read)).float()[: len(rows)])
        scores_BO = torch.full((len(read), len(network.labels)), math.nan)
        scores_BO[order] = torch.cat(score_parts).cpu()  # waits for a GPU once
        return scores_BO

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout, pass_sizes: Sequence[int]) -> Tensor:
        assert self.reference is not None, "the learner is the reference of a policy with adapters"
        return self._frozen_logprobs(self.reference, rollout, pass_sizes)

    @torch.no_grad()
    def teacher_logprobs(self, rollout: Rollout, pass_sizes: Sequence[int]) -> Tensor:
        """Returns log π_T [B, M, R], nats."""
        routed = rollout.without_routes  # a teacher has routers of its own
        return torch.stack([self._frozen_logprobs(model, routed, pass_sizes) for model in self.teachers], dim=1)

    def _frozen_logprobs(
        self, model: "FrozenModel[LanguageModel]", rollout: Rollout, pass_sizes: Sequence[int]
    ) -> Tensor:
        with model.in_use(), self._precision():
            return self._by_pass(partial(self._logprobs, model.module), rollout, pass_sizes)


class FrozenModel(Protocol[AnyModule_co]):
    @property
    def module(self) -> AnyModule_co:
        """The model. Outside of `in_use`, its weights may be on the meta device."""
        ...

    def in_use(self) -> AbstractContextManager[object]:
        """A context to run passes in. If weights are sharded, all ranks must enter it together and run the same number
        of passes.
        """
        ...

    def most_passes(self, num_passes: int) -> int:
        """Returns how many passes a rank must run if it needs `num_passes`. Call it inside `in_use`."""
        ...


@dataclass(frozen=True)
class HeldModel(Generic[AnyModule]):
    """A model whose weights stay on the device."""

    module: AnyModule

    def in_use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def most_passes(self, num_passes: int) -> int:
        return num_passes


class ShardedModel(Generic[AnyModule]):
    """A model whose weights are sharded over the ranks' CPU memory. RANK and WORLD_SIZE identify the ranks.

    Each rank reads, tensor by tensor, only the rows that overlap its share: together the ranks read the model once, and
    none ever holds all of it in CPU memory. `set_types` sets the dtypes of the weights while the model is on the meta
    device. With `by_layer`, attention and MLP of each block are on the device only while they compute; otherwise all
    weights are there while in use.
    """

    def __init__(
        self,
        source: PartialSource[AnyModule],
        set_types: Callable[[nn.Module], object],
        device: torch.device,
        timeout_seconds: float,
        *,
        by_layer: bool,
    ) -> None:
        self.module = on_meta(source.build).eval().requires_grad_(False)
        set_types(self.module)
        self._timeout_seconds = timeout_seconds
        kinds = Attention | MLP | Mixture
        layers = {name: m for name, m in self.module.named_modules() if by_layer and isinstance(m, kinds)}
        self._rest, *self._layers = _bundles(self.module, ["", *layers], device)
        for layer, bundle in zip(layers.values(), self._layers, strict=True):
            layer.register_forward_pre_hook(lambda _module, _args, bundle=bundle: bundle.bring())
            layer.register_forward_hook(lambda _module, _args, _out, bundle=bundle: bundle.drop(), always_call=True)
        by_name = {name: bundle for bundle in self.bundles for name in bundle.weights}
        own = {name: rows for name, bundle in by_name.items() if (rows := bundle.own_rows(name))}
        for name, tensor in source.tensors(own):
            note_progress()
            by_name[name].keep(name, tensor, own.pop(name))
        assert not own, f"the source of a {type(self.module).__name__} has no {sorted(own)}"

    @property
    def bundles(self) -> list["_Bundle"]:
        return [self._rest, *self._layers]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        if self._rest.num_ranks > 1 and not dist.is_initialized():  # on ranks that train nothing
            backend = "nccl" if self._rest.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self._timeout_seconds))
        self._rest.bring()
        try:
            yield
        finally:
            self._rest.drop()

    def most_passes(self, num_passes: int) -> int:
        """Returns the most that any rank needs, since layers are gathered in every pass."""
        if self._rest.num_ranks == 1:
            return num_passes
        most = torch.tensor(num_passes, device=self._rest.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)


@dataclass(frozen=True)
class _Weight:
    """A weight's placeholder without values, its offset in the bundle in bytes, and the attributes that refer to it."""

    placeholder: Tensor
    start: int
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # several for a tied weight

    @property
    def row_bytes(self) -> int:
        return self.placeholder.nbytes // (len(self.placeholder) if self.placeholder.dim() else 1)

    def put(self, tensor: Tensor) -> None:
        for module, attribute in self.places:
            setattr(module, attribute, tensor)


class _Bundle:
    """Weights that are gathered and released together. `share` holds this rank's part of their bytes."""

    def __init__(self, weights: Mapping[str, _Weight], num_bytes: int, device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.rank, self.num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        size = _rounded_up(-(-num_bytes // self.num_ranks))
        self.share = host_bytes(size, pinned=device.type == "cuda")

    def own_rows(self, name: str) -> range:
        """Returns the rows of a weight that overlap this rank's share."""
        weight, own = self.weights[name], self._own_bytes(name)
        size = weight.row_bytes
        return range((own.start - weight.start) // size, -(-(own.stop - weight.start) // size)) if own else range(0)

    def keep(self, name: str, tensor: Tensor, rows: range) -> None:
        """Copy this rank's part of a weight into its share; `tensor` holds the given rows of the weight."""
        weight, own, first = self.weights[name], self._own_bytes(name), self.rank * len(self.share)
        data = tensor.to(weight.placeholder.dtype).contiguous().reshape(-1).view(torch.uint8)
        start = weight.start + rows.start * weight.row_bytes
        self.share[own.start - first : own.stop - first] = data[own.start - start : own.stop - start]

    def _own_bytes(self, name: str) -> range:
        """Returns the bytes of the bundle that belong to both this weight and this rank's share."""
        weight, first = self.weights[name], self.rank * len(self.share)
        end = min(weight.start + weight.placeholder.nbytes, first + len(self.share))
        return range(max(weight.start, first), end)

    def bring(self) -> None:
        """Gather the weights on the device; a collective call."""
        whole = self.share.to(self.device, non_blocking=True, copy=self.num_ranks == 1)
        if self.num_ranks > 1:
            part, whole = whole, torch.empty(len(whole) * self.num_ranks, dtype=torch.uint8, device=self.device)
            dist.all_gather_into_tensor(whole, part)
        for weight in self.weights.values():
            shape, dtype = weight.placeholder.shape, weight.placeholder.dtype
            tensor = whole[weight.start : weight.start + weight.placeholder.nbytes].view(dtype).view(shape)
            is_parameter = isinstance(weight.placeholder, nn.Parameter)
            weight.put(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)

    def drop(self) -> None:
        for weight in self.weights.values():
            weight.put(weight.placeholder)


def _bundles(model: nn.Module, prefixes: list[str], device: torch.device) -> list[_Bundle]:
    """Returns one bundle per prefix of weight names. A weight belongs to the longest prefix that matches its name; ""
    matches all names.
    """
    weights: list[dict[str, _Weight]] = [{} for _ in prefixes]
    sizes = [0] * len(prefixes)
    known: dict[int, _Weight] = {}
    for module_name, module in model.named_modules():
        for attribute, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{module_name}.{attribute}" if module_name else attribute
            if id(tensor) not in known:
                fitting = (i for i, prefix in enumerate(prefixes) if not prefix or name.startswith(f"{prefix}."))
                at = max(fitting, key=lambda i: len(prefixes[i]))
                known[id(tensor)] = weights[at][name] = _Weight(tensor, sizes[at])
                sizes[at] += _rounded_up(tensor.nbytes)
            known[id(tensor)].places.append((module, attribute))
    return [_Bundle(bundle_weights, size, device) for bundle_weights, size in zip(weights, sizes, strict=True)]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
