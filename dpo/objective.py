"""The DPO stage's settings and training objective: losses of direct preference optimisation, from log-ratios to a fixed
reference or, for SimPO, from log-probs alone; and the policy in training, with the log-probs of whole responses, which
are packed with their prompts into few rows. All settings but the rankings have a default; docs/dpo.md says where each
default comes from.

A response's log-ratio is log π(y|x) - log π_ref(y|x) in nats: a sum over its tokens, including the end token. β times
it is the response's implicit reward (arXiv 2305.18290, eq. 5), up to a constant per prompt that cancels in differences.

Shape letters: N responses of all comparisons, B comparisons (in the losses: judgments), K responses per comparison
(padded to the largest), J verdicts of all comparisons, P pairs of responses. Ranks count from 1 = best; 0 = padding.
In the policy: R response tokens, L rows, T tokens of a row, C tokens of all responses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn

from lm.layers import sequence_keys
from lm.model import LanguageModel
from lm.source import ModelSource
from lm.transfer import spread, upload
from reward.comparisons import Comparison
from reward.config import ComparisonsConfig
from reward.objective import (
    MAX_RESPONSES,
    NETWORK,
    ComparisonObjective,
    accuracy_of,
    davidson_loss,
    mean_over_pairs,
    pairs_of,
    ranking_loss,
)
from training.config import BatchConfig, Config, OptimizerConfig
from training.packing import IntArray, packed_rows
from training.tokens import Sequences

Loss = Literal["sigmoid", "ipo", "length_normalised", "ipo_length_normalised", "simpo", "kto"]
# Defaults of losses whose log-probs are per token, and so smaller than sums.
DEFAULTS = {
    "length_normalised": {"beta": 5.0},  # Tülu 3's (arXiv 2411.15124)
    "simpo": {"beta": 2.5, "margin": 1.375},  # for Llama 3 8B Instruct in SimPO's own repository
}

OPTIMIZER = {"learning_rate": 1e-6, "schedule": "linear", "warmup_steps": 20}
LORA_LEARNING_RATE = 1e-5  # ten times as much (`lm.lora.LoRAConfig`)


class KTOConfig(Config):
    """What `loss = "kto"` makes of ratings and flags, and how it weighs the two kinds of responses."""

    model_config = ConfigDict(title="KTO")

    desirable_above: float = Field(
        default=0.5,
        description="Responses rated above this are desirable, all other rated ones undesirable. The default suits"
        " labels of true and false, which are ratings of 1 and 0.",
    )
    undesirable_flags: tuple[str, ...] = Field(
        default=(), description="Flags of the labeling page that make a response undesirable, whatever its rating."
    )
    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of the loss of desirable responses.")
    undesirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="Weight of the loss of undesirable responses. The paper advises that the number of desirable"
        " responses times their weight be 1 to 4/3 times that of the undesirable ones.",
    )


class DPOConfig(ComparisonsConfig):
    """`init_from` names the policy to start from, which is also the reference."""

    section = "dpo"
    objectives_key = "dpo.objective"

    objective: str = Field(
        default="", description="Objective to learn if the rankings have several; empty = the only one."
    )
    loss: Loss = Field(
        default="sigmoid",
        description="`sigmoid` is DPO (arXiv 2305.18290, eq. 7); `ipo` its squared form (arXiv 2310.12036, eq. 17);"
        " `length_normalised` and `ipo_length_normalised` are these with log-probabilities per token (Tülu 3, arXiv"
        " 2411.15124; TRL's IPO); `simpo` has log-probabilities per token, a margin and no reference (arXiv 2405.14734,"
        " eq. 6); `kto` learns from labels of single responses (arXiv 2402.01306).",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="Weight of the KL from the reference: smaller lets the policy move further. The default with"
        f" `length_normalised` is {DEFAULTS['length_normalised']['beta']:g}, and with `simpo`, where it scales"
        f" log-probabilities, {DEFAULTS['simpo']['beta']:g}.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        description="Lead that the better response's implicit reward should have, for `simpo` alone; its default there"
        f" is {DEFAULTS['simpo']['margin']:g}.",
    )
    kto: KTOConfig = Field(default=KTOConfig(), description="How `kto` reads labels; for that loss alone.")
    sft_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the SFT loss of the best responses, nats per token (arXiv 2404.19733); 0 = none.",
    )
    batch: BatchConfig = Field(
        default=BatchConfig(batch_size=64, micro_batch_tokens=8192),
        description="Batch sizes, in comparisons; by default 64, in passes of 8,192 tokens.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig.model_validate(OPTIMIZER),
        description="Optimizer and learning rate; by default 1e-6 (with `lora`"
        f" {LORA_LEARNING_RATE:g}) after 20 steps of warm-up, falling linearly.",
    )

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {**DEFAULTS.get(str(values.get("loss")), {}), **values}
        if values.get("lora") is not None:
            values = {"optimizer": {**OPTIMIZER, "learning_rate": LORA_LEARNING_RATE}, **values}
        return values

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.margin and self.loss != "simpo":
            raise ValueError(f'margin is {self.margin:g} with loss "{self.loss}"; only "simpo" has a margin')
        if self.kto != KTOConfig() and self.loss != "kto":
            raise ValueError(f'kto is set, but loss is "{self.loss}"; loss = "kto" was expected')
        if self.loss == "kto" and (self.ties == "davidson" or self.sft_coef):
            setting = 'ties "davidson"' if self.ties == "davidson" else f"sft_coef {self.sft_coef:g}"
            raise ValueError(f'{setting} with loss "kto", which learns from single responses; its default was expected')
        if self.margin and self.ties == "davidson":
            raise ValueError('ties is "davidson", which has no margins; ties = "soft" or margin = 0 was expected')
        if self.loss.startswith("ipo") and self.ties == "davidson":
            raise ValueError(
                f'ties is "davidson" with loss "{self.loss}", which has no probabilities; ties = "soft" was expected'
            )
        return self

    @property
    def least_responses(self) -> int:
        """A label of a single response is enough for KTO; other losses need pairs."""
        return 1 if self.loss == "kto" else super().least_responses

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model that it starts from."""
        return self.loss != "simpo"

    @property
    def named_objectives(self) -> tuple[str, ...]:
        return (self.objective,) if self.objective else ()


class PolicyLearner(nn.Module):
    """Log-probs and log ν from one forward pass, so that every backend gathers what it shards.

    log ν = start + hidden_size · θ, where θ starts at 0, as in a reward model's training (`reward.objective`).
    """

    def __init__(self, network: LanguageModel, starting_log_nu: float | None) -> None:
        super().__init__()
        self.network, self.starting_log_nu = network, starting_log_nu
        self.nu = nn.Parameter(torch.zeros(1)) if starting_log_nu is not None else None

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the policy's config says so (`lm.source.load`)."""
        self.network.tie()

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor,
        selected_BT: Tensor,
        sequence_keys_BT: Tensor | None,
        targets_C: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the targets' log-probs [C], nats, at the positions where `selected_BT` is True, and log ν, None if it
        is not learned.
        """
        logprobs_C = self.network(tokens_BT, segments_BT, selected_BT, sequence_keys_BT, targets_C)
        if self.nu is None or self.starting_log_nu is None:
            return logprobs_C, None
        return logprobs_C, self.starting_log_nu + self.network.config.hidden_size * self.nu.float()


@dataclass(frozen=True)
class PolicySource:
    """A source of a `PolicyLearner`, from a source of its network."""

    network: ModelSource[LanguageModel]
    starting_log_nu: float | None = None

    def build(self) -> PolicyLearner:
        return PolicyLearner(self.network.build(), self.starting_log_nu)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.starting_log_nu is not None:
            yield "nu", torch.zeros(1)
        for name, tensor in self.network.tensors():
            yield NETWORK + name, tensor


@dataclass(frozen=True)
class PackedResponses:
    """A policy's inputs. `targets_C` are the responses' tokens, row by row; `places_C` are their indices in a flat
    [N, R].

    `predicts_LT` is True where the next token is a response's. It and the segments stay in CPU memory, where counting
    does not wait for a GPU. `tokens_N` counts each response's tokens.
    """

    tokens_LT: Tensor
    segments_LT: Tensor
    predicts_LT: Tensor
    sequence_LT: IntArray
    targets_C: Tensor
    places_C: Tensor
    tokens_N: Tensor
    num_columns: int

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], response_tokens: Sequence[int], device: torch.device) -> Self:
        """Pack sequences. Each is a prompt with its response, which is the last `response_tokens` of it."""
        held = Sequences.of(
            (tokens, [False] * (len(tokens) - num) + [True] * num)
            for tokens, num in zip(sequences, response_tokens, strict=True)
        )
        rows = packed_rows(held, device)
        sequence_LT, counted_LT = rows.sequence_of_tokens(), rows.counted
        owners_C = sequence_LT[counted_LT]
        tokens_N = held.num_counted.astype(np.int64)
        # A row holds a response's tokens in order, one response after another.
        starts = np.flatnonzero(np.diff(owners_C, prepend=-1))
        number_in_response_C = np.arange(len(owners_C)) - np.repeat(starts, np.diff(starts, append=len(owners_C)))
        num_columns = max(1, int(tokens_N.max(initial=0)))  # R
        return cls(
            upload(torch.from_numpy(rows.tokens[:, :-1].copy()), device),
            torch.from_numpy(rows.segments[:, :-1]),
            torch.from_numpy(counted_LT[:, 1:]),
            sequence_LT[:, :-1],
            upload(torch.from_numpy(rows.tokens[counted_LT]), device),
            upload(torch.from_numpy(owners_C * num_columns + number_in_response_C), device),
            upload(torch.from_numpy(tokens_N), device),
            num_columns,
        )

    def keys(self, seed: int, numbers_N: IntArray) -> Tensor:
        """Returns dropout keys [L, T], derived from each response's number in the data set."""
        return sequence_keys(seed, numbers_N[self.sequence_LT], self.tokens_LT.device)

    def logprobs(self, model: PolicyLearner, keys_LT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns log π(response | prompt), [N] nats, summed over its tokens in fp32; and log ν, None if not learned.

        Log-probs are first arranged as [N, R], so a response's sum adds in the same order wherever it was packed.
        """
        logprobs_C, log_nu = model(self.tokens_LT, self.segments_LT, self.predicts_LT, keys_LT, self.targets_C)
        N, R = len(self.tokens_N), self.num_columns
        return logprobs_C.new_zeros(N * R).scatter(0, self.places_C, logprobs_C).view(N, R).sum(dim=1), log_nu


Floats = NDArray[np.float32]


def ipo_loss(log_ratios_BK: Tensor, ranks_BK: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns loss and accuracy per comparison, both [B] (arXiv 2310.12036, eq. 17, with its τ = β).

    loss = 1/C(K,2) · Σ_{i<j} (Δ_ij - t_ij)², where Δ is the difference of log-ratios, and t is 1/(2β) if i is better,
    -1/(2β) if j is, and 0 for a tie (a preference with probability ½). A pair's gradient in DPO never vanishes; here it
    does at a difference of 1/(2β) nats. As in the paper, a log-ratio is a sum over the response.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(log_ratios_BK, ranks_BK)
    loss_BP = (difference_BP - ahead_BP / (2 * beta)) ** 2
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def preference_loss(
    loss: str,
    log_ratios_BK: Tensor,
    tokens_BK: Tensor,
    ranks_BK: Tensor,
    beta: float,
    log_nu: Tensor | None,
    margin: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns loss and accuracy per comparison, both [B]; lower loss is better.

    "sigmoid" is -log σ(β Δ) per pair (DPO's eq. 7), computed by `ranking_loss`: the mean over the C(K,2) pairs, with a
    tie as half a win for each side. "length_normalised" is the same with log-ratios per token (Tülu 3, arXiv
    2411.15124), and "ipo_length_normalised" is `ipo_loss` with these. "simpo" is -log σ(β Δ - margin), where Δ is the
    difference of log-probs per token, so its `log_ratios_BK` are to a reference of 0 (arXiv 2405.14734, eq. 6). With
    `log_nu`, a tie is a separate outcome (`davidson_loss`). `tokens_BK` counts response tokens.

    Raises: ValueError if there is no loss of this name.
    """
    if loss in ("ipo", "ipo_length_normalised"):
        return ipo_loss(implicit_rewards(loss, log_ratios_BK, tokens_BK, 1.0), ranks_BK, beta)
    if loss not in ("sigmoid", "length_normalised", "simpo"):
        raise ValueError(f"loss {loss!r}; sigmoid, ipo, length_normalised, ipo_length_normalised or simpo was expected")
    scores_BK = implicit_rewards(loss, log_ratios_BK, tokens_BK, beta)
    if log_nu is not None:
        return davidson_loss(scores_BK, ranks_BK, log_nu.expand(len(ranks_BK)))
    return ranking_loss(scores_BK, ranks_BK, margin)


def implicit_rewards(loss: str, log_ratios: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """Returns β times the log-ratio, or the log-ratio per token if the loss is length-normalised; higher is better."""
    is_per_token = loss.endswith("length_normalised") or loss == "simpo"
    return beta * (log_ratios / tokens.clamp(min=1) if is_per_token else log_ratios)


def sft_loss(logprobs_BK: Tensor, tokens_BK: Tensor, ranks_BK: Tensor) -> Tensor:
    """Returns -log π per token of each comparison's best response, [B] nats; the mean over those that tie for best."""
    real_BK = ranks_BK > 0
    best_B1 = ranks_BK.masked_fill(~real_BK, torch.iinfo(ranks_BK.dtype).max).min(dim=1, keepdim=True).values
    is_best_BK = real_BK & (ranks_BK == best_B1)
    per_token_BK = torch.where(is_best_BK, logprobs_BK / tokens_BK.clamp(min=1), 0.0)
    return -per_token_BK.sum(dim=1) / is_best_BK.sum(dim=1)


@dataclass(frozen=True)
class UntiedPairs:
    """The untied pairs of each comparison [B, P], for averages over their better and their worse responses."""

    first_P: Tensor
    second_P: Tensor
    ahead_BP: Tensor  # 1 = the first is better, -1 = the second is, 0 = a tie or padding

    @classmethod
    def of(cls, ranks_BK: Tensor) -> "UntiedPairs":
        K = ranks_BK.shape[1]
        first_P, second_P = torch.triu_indices(K, K, offset=1, device=ranks_BK.device)
        _, ahead_BP, real_BP = pairs_of(ranks_BK, ranks_BK)
        return cls(first_P, second_P, torch.where(real_BP, ahead_BP, 0))

    @property
    def exist_B(self) -> Tensor:
        """1 where a comparison has an untied pair, else 0."""
        return (self.ahead_BP != 0).any(dim=1).float()

    def means(self, values_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean value of the better response over a comparison's untied pairs, and that of the worse, both
        [B]; 0 if there is no untied pair.
        """
        first_BP, second_BP = values_BK[:, self.first_P], values_BK[:, self.second_P]
        num_B = (self.ahead_BP != 0).sum(dim=1).clamp(min=1)
        better_BP = torch.where(self.ahead_BP > 0, first_BP, second_BP) * (self.ahead_BP != 0)
        worse_BP = torch.where(self.ahead_BP > 0, second_BP, first_BP) * (self.ahead_BP != 0)
        return better_BP.sum(dim=1) / num_B, worse_BP.sum(dim=1) / num_B


def packed_comparisons(comparisons: Sequence[Comparison], device: torch.device) -> PackedResponses:
    """Pack all responses of the comparisons, in order."""
    return PackedResponses.of(
        [sequence for comparison in comparisons for sequence in comparison.sequences],
        [num for comparison in comparisons for num in comparison.response_tokens],
        device,
    )


@dataclass(frozen=True)
class PreferenceObjective(ComparisonObjective):
    """A loss of `preference_loss`, and the SFT term.

    Each response takes one forward pass, however many pairs and labelers it has. `reference` has log π_ref of each
    comparison's responses, in nats; it is None for a loss without a reference.
    """

    comparisons: Sequence[Comparison]
    reference: Sequence[Floats] | None
    config: DPOConfig

    def loss(
        self, model: PolicyLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen, config = [self.comparisons[row] for row in rows], self.config
        packed = packed_comparisons(chosen, device)
        logprobs_N, log_nu = packed.logprobs(model, packed.keys(seed, numbers_of(rows, chosen)))
        reference_N = self._reference(rows, device)
        lengths = torch.tensor([_num(c) for c in chosen])
        real_BK = torch.arange(int(lengths.max())) < lengths[:, None]
        logprobs_BK, log_ratios_BK, tokens_BK = (
            spread(values_N, real_BK) for values_N in (logprobs_N, logprobs_N - reference_N, packed.tokens_N)
        )
        weighted = [
            (row, verdict, verdict.weight / len(c.verdicts)) for row, c in enumerate(chosen) for verdict in c.verdicts
        ]
        rows_J, verdicts_J, shares_J = zip(*weighted, strict=True)
        share_J, K = upload(torch.tensor(shares_J), device), real_BK.shape[1]
        places_J = upload(torch.tensor(rows_J), device)
        logprobs_JK, log_ratios_JK, tokens_JK = (of_BK[places_J] for of_BK in (logprobs_BK, log_ratios_BK, tokens_BK))
        ranks_JK = upload(torch.tensor([[*v.ranks, *[0] * (K - len(v.ranks))] for v in verdicts_J]), device)
        loss_J, accuracy_J = preference_loss(
            config.loss, log_ratios_JK, tokens_JK, ranks_JK, config.beta, log_nu, config.margin
        )
        loss, metrics = (share_J * loss_J).sum(), {"accuracy": (share_J * accuracy_J).sum()}
        if config.sft_coef:
            metrics["sft_loss"] = (share_J * sft_loss(logprobs_JK, tokens_JK, ranks_JK)).sum()
            loss = loss + config.sft_coef * metrics["sft_loss"]
        pairs = UntiedPairs.of(ranks_JK)
        rewards_JK = implicit_rewards(config.loss, log_ratios_JK, tokens_JK, config.beta)
        weight_J = share_J * pairs.exist_B
        for name, values_JK in (("logprob", logprobs_JK), ("reward", rewards_JK)):
            for side, mean_J in zip(("chosen", "rejected"), pairs.means(values_JK), strict=True):
                metrics[f"{side}_{name}"] = torch.stack([(weight_J * mean_J).sum(), weight_J.sum()])
        metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        metrics["margin"][1] = weight_J.sum()
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def _reference(self, rows: IntArray, device: torch.device) -> Tensor | float:
        """Returns log π_ref of the rows' responses [N], or 0."""
        if self.reference is None:
            return 0.0
        return upload(torch.from_numpy(np.concatenate([self.reference[row] for row in rows])), device)


def numbers_of(rows: IntArray, comparisons: Sequence[Comparison]) -> IntArray:
    """Returns the number of each response [N], from its comparison's row and its place there alone."""
    pairs = zip(rows, comparisons, strict=True)
    return np.array([row * MAX_RESPONSES + k for row, comparison in pairs for k in range(_num(comparison))])


def _num(comparison: Comparison) -> int:
    return len(comparison.sequences)
