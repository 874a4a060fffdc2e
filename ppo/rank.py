"""What learners, generators and scorers share: the initial models and the scale of their scores, packed forward passes,
and the process group that broadcasts weights.

Shape letters: B responses, O objectives, R response tokens, L rows, T tokens of a row, C tokens of all responses,
V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig, exact_div
from lm.experts import Replay, no_route
from lm.hub import on_this_machine
from lm.layers import Fp32Linear
from lm.model import SCORE, LanguageModel, ScalarModel
from lm.progress import note_progress
from lm.samplers.draws import PARTS, TESTED, Draws
from lm.samplers.engine import SentWeights, digests_of
from lm.sampling import token_logprobs
from lm.sequence_parallel import SequenceGroup
from lm.source import ModelSource, on_meta
from lm.tensor_parallel import Rendezvous, Team, cut, process_group
from lm.tokenizer import Tokenizer
from lm.transfer import upload
from lm.weights import ModelFolder, WithNewHead, purpose_of
from ppo.config import PPOConfig
from ppo.rollout import Drawn, Rollout
from reward.external import ExternalReward
from reward.scoring import weights_by_label
from training.config import EngineConfig
from training.packing import bucket, packed_rows
from training.recording import Inputs, packed_inputs
from training.tokens import Sequences


@dataclass(frozen=True)
class ScoreScale:
    """Mean and standard deviation of the SFT policy's scores, which normalise rewards (arXiv 1909.08593, 2.1), and
    the weight of normalised scores (`ppo.score_coef`).
    """

    mean: float
    std: float
    coef: float = 1.0

    def apply(self, scores_B: Tensor) -> Tensor:
        return self.coef * (scores_B - self.mean) / self.std


@dataclass(frozen=True)
class TokenStream:
    """A file of tokens, cut into rows."""

    path: Path
    seq_len: int


@dataclass(frozen=True)
class InitialModels:
    """Where the models come from, and the pretraining stream if PPO-ptx mixes one in."""

    sft: Path
    reward: Path | ExternalReward
    scale: ScoreScale
    pretraining: TokenStream | None
    adapter_seed: int = 0  # draws new adapters, with `ppo.lora`
    teachers: tuple[Path, ...] = ()  # in the order of `ppo.teachers`
    chat_template: str = ""  # of the policy; "" = its own

    def on_this_machine(self) -> Self:
        """Returns the same models with their folders on this machine."""
        reward = on_this_machine(self.reward) if isinstance(self.reward, Path) else self.reward
        teachers = tuple(map(on_this_machine, self.teachers))
        return replace(self, sft=on_this_machine(self.sft), reward=reward, teachers=teachers)

    @property
    def reward_reads_texts(self) -> bool:
        """Whether the reward reads texts: it is not a model, or its tokenizer differs from the policy's."""
        return not isinstance(self.reward, Path) or Tokenizer.load(self.reward) != self.tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer, with the template that it is trained in."""
        return Tokenizer.load(self.sft).with_template(self.chat_template)


def value_source(
    policy: Path,
    reward: Path | ExternalReward,
    weights: Mapping[str, float],
    scale: ScoreScale,
    chat_template: str = "",
) -> ModelSource[ScalarModel]:
    """Returns the initial value function: the reward model, scaled to predict in the rewards' units. The heads of
    several objectives become one, which gives the weighted sum of their scores.

    A reward that is not a decoder with the policy's tokenizer cannot score a half-written response. Then
    the value function starts as the policy with a new head that predicts 0, the mean of the rewards.

    Raises:
        ValueError: the weights do not fit the reward model.
    """
    tokenizer = Tokenizer.load(policy).with_template(chat_template)
    is_same = isinstance(reward, Path) and Tokenizer.load(reward) == tokenizer
    if isinstance(reward, Path) and is_same and purpose_of(reward) == "score":
        return joined_heads(ModelFolder(reward, ScalarModel), reward, weights, scale)
    return JoinedHeads(WithNewHead(policy, LanguageModel, ScalarModel, seed=0), (0.0,), 0.0)


def joined_heads(
    source: ModelSource[ScalarModel], reward: Path, weights: Mapping[str, float], scale: ScoreScale
) -> "JoinedHeads":
    """Returns a model of the weighted sum of a reward model's scores, in the rewards' units. Raises: as
    `value_source`.
    """
    by_label = weights_by_label(str(reward), on_meta(source.build).labels, weights)
    factors = tuple(scale.coef * weight / scale.std for weight in by_label.values())
    return JoinedHeads(source, factors, -scale.coef * scale.mean / scale.std)


@dataclass(frozen=True)
class JoinedHeads:
    """A scalar model with a single head: Σ factor · score + shift over another model's heads, which is again linear."""

    source: ModelSource[ScalarModel]
    factors: tuple[float, ...]  # by head
    shift: float

    def build(self) -> ScalarModel:
        model = self.source.build()
        if len(model.labels) > 1:
            model.labels, model.bias = (SCORE,), torch.zeros(())
            model.score = Fp32Linear(model.config.hidden_size, 1, bias=False)
        return model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        factors_O = torch.tensor(self.factors)
        for name, tensor in self.source.tensors():
            if name == "score.weight":
                yield name, (factors_O[:, None] * tensor).sum(dim=0, keepdim=True)
            elif name == "bias":
                yield name, (factors_O * tensor).sum() + self.shift
            else:
                yield name, tensor


SENDER = 0  # the rank that broadcasts weights; all others receive


class Rank:
    """One rank of a role. It receives its own share of each batch; the counts in a batch are global."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels) -> None:
        self.config, self.engine_config, self.models = config, engine_config, models.on_this_machine()
        self.tokenizer = self.models.tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.num_workers = 1  # ranks that share this role's batches
        self.sequences: SequenceGroup | None = None  # ranks that split the tokens of this role's rows
        self.tested = list[tuple[Tensor, Draws]]()  # logits and tokens that `Learner.take_evidence` tests
        self.compute_dtype = torch.bfloat16 if engine_config.resolved_precision() == "bf16" else torch.float32

    @property
    def _autocast(self) -> bool:
        """Whether autocast rounds weights to bf16 at each use. It does for the learner without ZeRO; under ZeRO the
        learner's weights themselves are bf16. The frozen models round wherever the learner does, so that the KL from
        the reference starts at exactly 0.
        """
        return self.compute_dtype == torch.bfloat16 and self.engine_config.zero_stage == 0

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def _by_pass(self, measure: Callable[[Rollout], Tensor], rollout: Rollout, pass_sizes: Sequence[int]) -> Tensor:
        """Apply `measure` to each pass. Returns the results of all responses [B, R]."""
        return self._joined(map(measure, rollout.parts(pass_sizes)), pass_sizes)

    @staticmethod
    def _joined(outputs: Iterable[Tensor], pass_sizes: Sequence[int]) -> Tensor:
        """Join the passes' outputs to those of all responses [B, R], without the uncounted row of an empty pass."""
        return torch.cat([output.detach()[:size] for output, size in zip(outputs, pass_sizes, strict=True)]).cpu()

    def _logprobs(
        self, model: nn.Module, rollout: Rollout, drawn: Drawn | None = None, replays: list[Replay] | None = None
    ) -> Tensor:
        """Returns log π of the response tokens [B, R], at the sampling temperature. With `drawn`, some of them are
        tested for being draws from π. The pass replays the rollout's routes, and appends the replay to `replays`.
        """
        note_progress()
        packed = PackedRollout.of(rollout, self.device)
        read, temperature = (packed.tokens_LT, packed.segments_LT, packed.states_LT), self.config.temperature
        routes = packed.routes(rollout, self.sequences)
        replay = None if routes is None else Replay(routes)
        if replay is not None and replays is not None:
            replays.append(replay)
        if drawn is None:
            return packed.spread(model(*read, targets=packed.targets_C, temperature=temperature, routes=replay))
        logits_CV, targets_C = model(*read, routes=replay), packed.targets_C
        if self.sequences is None:
            logprobs_C = token_logprobs(logits_CV, targets_C, temperature)
        else:  # logits are those of this rank's slice of the rows
            logprobs_C = self.sequences.logprobs(logits_CV, targets_C, packed.states_LT, temperature)
        self._keep_draws(logits_CV, logprobs_C, packed, rollout, drawn)
        return packed.spread(logprobs_C)

    def _keep_draws(
        self, logits_CV: Tensor, logprobs_C: Tensor, packed: "PackedRollout", rollout: Rollout, drawn: Drawn
    ) -> None:
        """Keep every n-th token and its logits, to test them together once all passes are done. n depends only on
        sizes: if the choice depended on the responses, the chosen tokens would no longer be draws from the policy.
        """
        R, V = rollout.max_new_tokens, logits_CV.shape[1]
        every = -(-drawn.num_rows * R * V // (self.num_workers * TESTED[self.device.type]))
        own_C = torch.arange(len(packed.places_C)) if self.sequences is None else self.sequences.own(packed.states_LT)
        places_C = packed.places_C[own_C]
        rows_C, steps_C = places_C // R, places_C % R
        # A prime factor lets neighbouring rows test other places, and one row of many if n exceeds R.
        tested = ((7919 * drawn.rows_B[rows_C] + steps_C) % every == 0).nonzero()[:, 0]
        rows_C, steps_C, of_logits_C = rows_C[tested], steps_C[tested], upload(tested, self.device)
        on_device = upload(own_C[tested], self.device)
        texts_CT, columns = rollout.tokens_BT[rows_C], torch.arange(rollout.tokens_BT.shape[1])
        is_before_CT = columns < (rollout.prompt_tokens_B[rows_C] + steps_C)[:, None]
        weights_C = logprobs_C.detach()[on_device] - upload(rollout.behaviour_logprobs_BR[rows_C, steps_C], self.device)
        draws = Draws(
            packed.targets_C[on_device].long(),
            weights_C.exp(),
            upload(steps_C, self.device),
            upload(drawn.rows_B[rows_C] * PARTS // drawn.num_rows, self.device),
            upload(torch.where(is_before_CT, texts_CT, -1), self.device),
            upload(drawn.before_BR[rows_C, steps_C].long(), self.device),
        )
        self.tested.append((logits_CV.detach()[of_logits_C], draws))

    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def open_broadcast(self, host: str, port: int, rank: int, num_ranks: int) -> None:
        """Join the group that weights are broadcast in; a collective call of the sender and all receivers."""
        seconds, sampler, lora = self.engine_config.collective_timeout_seconds, self.config.sampler, self.config.lora
        takes_whole = sampler.has_own_process or (lora is not None and lora.sends == "adapter")
        self.broadcast = WeightBroadcast(
            host, port, rank, num_ranks, device=self.device, timeout_seconds=seconds,
            num_parts=1 if takes_whole else sampler.tensor_parallel_size,
        )  # fmt: skip

    def close(self) -> None:
        """Release memory."""


@dataclass(frozen=True)
class PackedRollout:
    """A model's inputs: tokens on the device, segments and states in CPU memory. States are True where the policy wrote
    the next token. `targets_C` are these tokens, row by row; `places_C` are their indices in a flat [B, R], in CPU
    memory. `order` numbers the responses as they are packed.
    """

    tokens_LT: Tensor
    segments_LT: Tensor
    states_LT: Tensor
    targets_C: Tensor
    places_C: Tensor
    num_responses: int
    max_new_tokens: int
    order: Tensor

    @classmethod
    def of(cls, rollout: Rollout, device: torch.device, *, uploads: bool = True) -> Self:
        """Pack a rollout for a model on `device`; without `uploads`, all tensors stay in CPU memory."""
        lengths_B, written_BR = rollout.num_tokens_B, rollout.written_BR
        places_BT = torch.arange(rollout.tokens_BT.shape[1]) - rollout.prompt_tokens_B[:, None]
        real_BT = places_BT < rollout.response_tokens_B[:, None]
        written_BT = written_BR.gather(1, places_BT.clamp(0, rollout.max_new_tokens - 1)) & (places_BT >= 0)
        counted = written_BT[real_BT]
        tokens, ends = rollout.tokens_BT[real_BT].to(torch.int32), lengths_B.cumsum(0)
        num_counted = rollout.num_written_B.to(torch.int32)
        sequences = Sequences(tokens.numpy(), counted.numpy(), ends.numpy(), num_counted.numpy())
        rows = packed_rows(sequences, device)
        counted_LT, tokens_LT = torch.from_numpy(rows.counted), torch.from_numpy(rows.tokens)
        order = torch.from_numpy(rows.numbers[rows.numbers >= 0])  # the responses, row by row
        R = rollout.max_new_tokens
        numbers_BR = torch.arange(len(rollout) * R).view(-1, R)[order]
        places_C = numbers_BR[written_BR[order]]
        assert len(places_C) == np.count_nonzero(rows.counted), "every prompt has a token that predicts the first one"
        device = device if uploads else torch.device("cpu")
        return cls(
            upload(tokens_LT, device),
            torch.from_numpy(rows.segments),
            F.pad(counted_LT, (0, 1))[:, 1:],  # a token is predicted from the one before it
            upload(tokens_LT[counted_LT], device),
            places_C,
            len(rollout),
            R,
            order,
        )

    def routes(self, rollout: Rollout, sequences: SequenceGroup | None = None) -> Tensor | None:
        """Returns the rollout's routes in its packed rows, or in this rank's slice of them, on the device; None if it
        has none. Padding has no route.
        """
        if not rollout.routes_BTLK.numel():
            return None
        lengths = rollout.num_tokens_B[self.order].tolist()
        of_rows = [rollout.routes_BTLK[row, :length] for row, length in zip(self.order.tolist(), lengths, strict=True)]
        nothing, shape = no_route(rollout.routes_BTLK), (*self.segments_LT.shape, *rollout.routes_BTLK.shape[2:])
        routes_LTLK = torch.full(shape, nothing, dtype=rollout.routes_BTLK.dtype)
        routes_LTLK[self.segments_LT > 0] = torch.cat(of_rows)
        own = routes_LTLK if sequences is None else sequences.slice_of(routes_LTLK, nothing)
        return upload(own, self.tokens_LT.device)

    def inputs(self, terms: Mapping[str, Tensor]) -> Inputs:
        """Returns what a recorded pass and its loss read, in few shapes; `terms` are [B, ...] by response, or numbers.

        Responses are padded to a `bucket` by rows of 0. What padded positions give goes to a place after all rows.
        """
        inputs = packed_inputs(self.tokens_LT, self.segments_LT, self.states_LT, self.targets_C)
        num_rows = bucket(self.num_responses)
        num_padding, after = len(inputs["places_C"]) - len(self.places_C), num_rows * self.max_new_tokens
        inputs["places_in_BR"] = F.pad(self.places_C, (0, num_padding), value=after)
        for name, values in terms.items():
            padding = values.new_zeros(num_rows - len(values), *values.shape[1:]) if values.dim() else None
            inputs[name] = values if padding is None else torch.cat([values, padding])
        return inputs

    def spread(self, flat_C: Tensor) -> Tensor:
        """Turn one number per predicted token, row by row, into [B, R]; 0 where the policy wrote none."""
        shape = self.num_responses, self.max_new_tokens
        places_C = upload(self.places_C, flat_C.device)
        return flat_C.new_zeros(shape).flatten().scatter(0, places_C, flat_C).view(shape)


def spread_inputs(flat_C: Tensor, inputs: Inputs, shape_BR: torch.Size) -> Tensor:
    """Computes `PackedRollout.spread` in a recorded pass."""
    places = flat_C.new_zeros(shape_BR.numel() + 1)  # the last is for padding
    return places.scatter(0, inputs["places_in_BR"], flat_C)[:-1].view(shape_BR)


class WeightBroadcast:
    """One rank's end of process groups that are separate from the one that the learners train in.

    All `num_ranks` ranks construct theirs at the same time, with the address of a port on the sender's machine, and
    make each call together, with tensors of the same names, shapes and types. With `num_parts`, each team of that many
    consecutive receivers shares a model, and each receives only its parts of the weights (`lm.tensor_parallel`).

    Raises:
        RuntimeError: a peer is gone or takes longer than `timeout_seconds`.
    """

    def __init__(
        self, host: str, port: int, rank: int, num_ranks: int, *, device: torch.device, timeout_seconds: float,
        num_parts: int = 1,
    ) -> None:  # fmt: skip
        self.rank, self.device, self.num_parts = rank, device, num_parts
        size = 1 + exact_div(num_ranks - 1, num_parts, "receivers over parts")
        meeting, receiver = Rendezvous(host, port, size, timeout_seconds), rank - 1
        parts = range(num_parts) if rank == SENDER else [receiver % num_parts]
        place = SENDER if rank == SENDER else 1 + receiver // num_parts
        self._groups = [process_group(meeting, place, size, device, f"part {part}") for part in parts]

    def send(self, weights: Mapping[str, Tensor], digests: Mapping[str, int], whole: ModelConfig | None = None) -> None:
        """Send some weights of a model of shape `whole` (needed with several parts), in one call per part. On a GPU
        this returns when the transfers are queued; later work on them waits for it.
        """
        assert self.rank == SENDER, f"rank {self.rank} sends; rank {SENDER} was expected"
        works, names = [], sorted(weights)  # sorted, since ZeRO's order differs
        for part, group in enumerate(self._groups):
            sent, numbers = [weights[name] for name in names], [digests[name] for name in names]
            if whole is not None and self.num_parts > 1:
                team = Team(None, part, self.num_parts)
                sent = [cut(whole, team, name, tensor) for name, tensor in zip(names, sent, strict=True)]
                numbers += digests_of(dict(zip(names, sent, strict=True))).values()
            flat = torch.cat([*map(_bytes_of, (torch.tensor(numbers, device=self.device), *sent))])
            works.append(group.broadcast(flat, SENDER))
        for work in works:
            work.wait()

    def receive(self, weights: Mapping[str, Tensor]) -> SentWeights:
        """Write the weights sent into `weights`, in place. Returns them with the sender's digests."""
        names, is_part = sorted(weights), self.num_parts > 1
        numbers = torch.empty((1 + is_part) * len(names), dtype=torch.int64, device=self.device)
        taken = [*map(_bytes_of, (numbers, *(weights[name] for name in names)))]
        flat = torch.empty(sum(map(len, taken)), dtype=torch.uint8, device=self.device)
        self._groups[0].broadcast(flat, SENDER).wait()
        for own, arrived in zip(taken, flat.split([*map(len, taken)]), strict=True):
            own.copy_(arrived)
        found = numbers.tolist()
        of_parts = dict(zip(names, found[len(names) :], strict=True)) if is_part else None
        return SentWeights(weights, dict(zip(names, found[: len(names)], strict=True)), of_parts)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the tensor's memory as bytes, which every backend sends, whatever their type."""
    return tensor.view(-1).view(torch.uint8)
