"""The losses of `[dpo]`, in the table `LOSSES`. Each is one object: its equation, its defaults, the data that it learns
from, the settings that it refuses, and the words that reports use. Config, objective, stage and report read the table,
so a new loss is a class and a line of it. docs/dpo.md compares the losses.

A response's log-ratio is log π(y|x) - log π_ref(y|x) in nats: a sum over its tokens, including the end token. β times
it is the response's implicit reward (arXiv 2305.18290, eq. 5), up to a constant per prompt that cancels in differences.

Shape letters: N responses of all comparisons, B comparisons (in the equations: judgments), K responses per comparison
(padded to the largest), J judgments of all comparisons, P pairs of responses. Ranks count from 1 = best; 0 = padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor

from lm.transfer import upload
from preferences.records import MIN_RESPONSES, Ranking
from preferences.statistics.estimates import Interval
from preferences.statistics.intervals import clustered_mean
from reward.comparisons import Comparison, Verdict
from reward.objective import Judgments, accuracy_of, davidson_loss, mean_over_pairs, pairs_of, ranking_loss
from reward.prepared import Split
from training.config import Config

if TYPE_CHECKING:
    from dpo.config import DPOConfig

Floats = NDArray[np.float32]
Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class PolicyBatch:
    """Comparisons, and the policy's log-probs of their responses, in order.

    `log_ratios_N` are to the reference, or the log-probs themselves with a loss that has none. `log_nu` is the log-odds
    of a tie, None if ties have no probability of their own. `baseline` is `KTO`'s z₀, nats.
    """

    comparisons: Sequence[Comparison]
    logprobs_N: Tensor  # nats, summed over a response's tokens
    log_ratios_N: Tensor  # nats
    tokens_N: Tensor  # of each response
    log_nu: Tensor | None = None
    baseline: float = 0.0


class PreferenceLoss(ABC):
    """A loss of `[dpo]`. Instances have no state: what a job sets is in its config."""

    name: ClassVar[str]
    description: ClassVar[str]  # in the reference, after the name: what it is, and its source
    title: ClassVar[str] = "DPO"  # what reports call a policy that was trained with it
    summary: ClassVar[str]  # how such a policy learns, in reports
    defaults: ClassVar[Mapping[str, float]] = {}  # of keys of [dpo]; the config's own for all others
    has_reference: ClassVar[bool] = True  # whether it compares the policy with the model that it starts from
    has_margin: ClassVar[bool] = False  # whether it reads `dpo.margin`
    is_unpaired: ClassVar[bool] = False  # learns from labels of single responses (`dpo.kto`), against a baseline

    @property
    def min_responses(self) -> int:
        """How many responses a task must have to be learned from."""
        return 1 if self.is_unpaired else MIN_RESPONSES

    @abstractmethod
    def refuse(self, config: "DPOConfig") -> None:
        """Raises: ValueError for a setting that has no meaning with this loss."""

    @abstractmethod
    def of_batch(self, batch: PolicyBatch, config: "DPOConfig") -> tuple[Tensor, Metrics]:
        """Returns the loss, lower is better, and metrics: sums over the batch, each judgment times its share.

        A metric with its own denominator is a (sum, count) pair.
        """

    def weight(self, comparison: Comparison, _config: "DPOConfig") -> float:
        """Returns how much a comparison counts in the batch's mean."""
        return comparison.weight

    def implicit_rewards(self, log_ratios: Tensor, _tokens: Tensor, beta: float) -> Tensor:
        """Returns β times the log-ratios, which may have any shape; higher is better."""
        return beta * log_ratios

    def check_data(self, _split: Split, _config: "DPOConfig") -> list[str]:
        """Returns warnings. Raises: ValueError if the loss cannot learn from these rankings, or be measured on them."""
        return []

    def select(self, comparisons: Sequence[Comparison], _config: "DPOConfig") -> Sequence[Comparison]:
        """Returns the comparisons, and their verdicts, that the loss learns from."""
        return comparisons

    def label_results(
        self, _learned: Sequence[Comparison], _heldout: "HeldoutLabels", _config: "DPOConfig"
    ) -> "LabelResults | None":
        """Returns results that only labels of single responses have."""
        return None


# --- losses of pairs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairSettings:
    """What the equation of a pair depends on. `log_nu` is the log-odds of a tie between equals, None = half a win."""

    beta: float
    margin: float = 0.0
    log_nu: Tensor | None = None


class RankingLoss(PreferenceLoss):
    """A loss of rankings: the mean over a comparison's C(K,2) pairs. Subclasses give the equation of a pair."""

    summary = (
        "The policy learns from rankings directly: the better response becomes more likely than the worse, relative to"
        " the model that it starts from."
    )
    is_per_token: ClassVar[bool] = False  # whether log-ratios are divided by the response's tokens
    has_probabilities: ClassVar[bool] = False  # of a pair's outcomes, so that a tie can be one (ties = "davidson")

    @abstractmethod
    def equation(self, log_ratios_BK: Tensor, ranks_BK: Tensor, settings: PairSettings) -> tuple[Tensor, Tensor]:
        """Returns loss and accuracy per comparison, both [B]. The log-ratios are per token if `is_per_token`."""

    def per_comparison(
        self, log_ratios_BK: Tensor, tokens_BK: Tensor, ranks_BK: Tensor, settings: PairSettings
    ) -> tuple[Tensor, Tensor]:
        """Returns loss and accuracy per comparison, both [B], from log-ratios in nats and numbers of tokens."""
        return self.equation(self._scaled(log_ratios_BK, tokens_BK), ranks_BK, settings)

    def implicit_rewards(self, log_ratios: Tensor, tokens: Tensor, beta: float) -> Tensor:
        """Returns β times the log-ratio, or the log-ratio per token, of any shape; higher is better."""
        return beta * self._scaled(log_ratios, tokens)

    def _scaled(self, log_ratios: Tensor, tokens: Tensor) -> Tensor:
        return log_ratios / tokens.clamp(min=1) if self.is_per_token else log_ratios

    def refuse(self, config: "DPOConfig") -> None:
        if config.margin and config.ties == "davidson":
            raise ValueError('ties is "davidson", which has no margins; ties = "soft" or margin = 0 was expected')
        if not self.has_probabilities and config.ties == "davidson":
            raise ValueError(
                f'ties is "davidson" with loss "{self.name}", which has no probabilities; ties = "soft" was expected'
            )

    def of_batch(self, batch: PolicyBatch, config: "DPOConfig") -> tuple[Tensor, Metrics]:
        """The loss of all rankings, with the SFT term."""
        judgments = Judgments.of(batch.comparisons, batch.logprobs_N.device)
        share_J, ranks_JK = judgments.share_J, judgments.ranks_JK
        logprobs_JK, log_ratios_JK, tokens_JK = map(
            judgments.spread, (batch.logprobs_N, batch.log_ratios_N, batch.tokens_N)
        )
        settings = PairSettings(config.beta, config.margin, batch.log_nu)
        loss_J, accuracy_J = self.per_comparison(log_ratios_JK, tokens_JK, ranks_JK, settings)
        loss, metrics = (share_J * loss_J).sum(), {"accuracy": (share_J * accuracy_J).sum()}
        if config.sft_coef:
            metrics["sft_loss"] = (share_J * sft_loss(logprobs_JK, tokens_JK, ranks_JK)).sum()
            loss = loss + config.sft_coef * metrics["sft_loss"]
        pairs = UntiedPairs.of(ranks_JK)
        rewards_JK = self.implicit_rewards(log_ratios_JK, tokens_JK, config.beta)
        weight_J = share_J * pairs.exist_B
        for name, values_JK in (("logprob", logprobs_JK), ("reward", rewards_JK)):
            for side, mean_J in zip(("chosen", "rejected"), pairs.means(values_JK), strict=True):
                metrics[f"{side}_{name}"] = torch.stack([(weight_J * mean_J).sum(), weight_J.sum()])
        metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        metrics["margin"][1] = weight_J.sum()
        return loss, metrics


class Sigmoid(RankingLoss):
    """-log σ(β Δ - margin) per pair (DPO's eq. 7, where the margin is 0), by `ranking_loss`: a tie is half a win for
    each side. With ν, a tie is a separate outcome (`davidson_loss`).
    """

    name = "sigmoid"
    description = "is DPO (arXiv 2305.18290, eq. 7)"
    has_probabilities = True

    def equation(self, log_ratios_BK: Tensor, ranks_BK: Tensor, settings: PairSettings) -> tuple[Tensor, Tensor]:
        scores_BK = settings.beta * log_ratios_BK
        if settings.log_nu is not None:
            return davidson_loss(scores_BK, ranks_BK, settings.log_nu.expand(len(ranks_BK)))
        return ranking_loss(scores_BK, ranks_BK, settings.margin)


class LengthNormalised(Sigmoid):
    """`Sigmoid` with log-ratios per token, which are smaller than sums, so β is larger; its default is Tülu 3's."""

    name = "length_normalised"
    description = "is `sigmoid` with log-ratios per token (Tülu 3, arXiv 2411.15124)"
    defaults: ClassVar[Mapping[str, float]] = {"beta": 5.0}
    is_per_token = True


class SimPO(Sigmoid):
    """`Sigmoid` with a margin, where Δ is the difference of log-probs per token: the reference is 0 (arXiv 2405.14734,
    eq. 6). The defaults are those for Llama 3 8B Instruct in SimPO's own repository.
    """

    name = "simpo"
    description = (
        "has log-probabilities per token, which `beta` scales, a margin and no reference (arXiv 2405.14734, eq. 6)"
    )
    title = "SimPO"
    defaults: ClassVar[Mapping[str, float]] = {"beta": 2.5, "margin": 1.375}
    is_per_token = True
    has_reference = False
    has_margin = True


class IPO(RankingLoss):
    """(Δ_ij - t_ij)² per pair (arXiv 2310.12036, eq. 17, with its τ = β). Δ is the difference of log-ratios. t is
    1/(2β) if i is better, -1/(2β) if j is, and 0 for a tie (a preference with probability ½).

    A pair's gradient in DPO never vanishes; here it does at a difference of 1/(2β) nats. As in the paper, a log-ratio
    is a sum over the response.
    """

    name = "ipo"
    description = "its squared form (arXiv 2310.12036, eq. 17)"
    title = "IPO"

    def equation(self, log_ratios_BK: Tensor, ranks_BK: Tensor, settings: PairSettings) -> tuple[Tensor, Tensor]:
        difference_BP, ahead_BP, real_BP = pairs_of(log_ratios_BK, ranks_BK)
        loss_BP = (difference_BP - ahead_BP / (2 * settings.beta)) ** 2
        return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


class LengthNormalisedIPO(IPO):
    name = "ipo_length_normalised"
    description = "is `ipo` with log-ratios per token, as TRL has it"
    is_per_token = True


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


# --- labels of single responses --------------------------------------------------------------------------------------


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
        " responses times their weight be 1 to 4/3 times that of the undesirable ones; a response whose labelers"
        " disagree counts in part for both.",
    )


def labels_of(judged: Verdict | Ranking, config: KTOConfig) -> tuple[int, ...]:
    """Returns 1 for each desirable response and -1 for each undesirable one; 0 if neither a rating nor a flag decides.

    A flag of `undesirable_flags` decides before the rating does.
    """
    num = len(judged.ranks)
    is_flagged = [any(flag in config.undesirable_flags for flag in flags) for flags in judged.flags or [()] * num]
    by_rating = [1 if rating > config.desirable_above else -1 for rating in judged.ratings] or [0] * num
    return tuple(-1 if flagged else label for flagged, label in zip(is_flagged, by_rating, strict=True))


@dataclass(frozen=True)
class HeldoutLabels:
    """Held-out comparisons, each response's log-ratio after training, the prompt of each task, and z₀; nats."""

    comparisons: Sequence[Comparison]
    log_ratios: Sequence[Floats]
    prompts: Mapping[str, object]
    baseline: float


@dataclass(frozen=True)
class LabelResults:
    """Results of KTO: how much its loss counts desirable and undesirable responses (their numbers, if labelers agree
    and weigh 1), how many held-out labels it was measured on, the share of these on the right side of the baseline,
    with an interval over prompts, and the baseline at the end, in nats.
    """

    train_desirable: float
    train_undesirable: float
    heldout_desirable: int
    heldout_undesirable: int
    heldout_accuracy: Interval
    baseline: float


class KTO(PreferenceLoss):
    """Learns from labels of single responses, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306).

    With the log-ratio r and the baseline z₀ = max(0, KL(π ‖ π_ref)), both in nats, the loss of a response is

        w_D · (1 - σ(β (r - z₀)))   if it is desirable,
        w_U · (1 - σ(β (z₀ - r)))   if it is undesirable.

    z₀ is estimated before each step (`PreferenceObjective.prepare`). All labelled responses weigh the same, however
    many their prompt has; a response's loss is the mean over its labels, each times its labeler's weight.
    """

    name = "kto"
    description = "learns from labels of single responses (arXiv 2402.01306)"
    title = "KTO"
    summary = "The policy learns from labels of single responses: desirable ones become more likely, others less."
    is_unpaired = True

    def refuse(self, config: "DPOConfig") -> None:
        if config.ties == "davidson" or config.sft_coef:
            setting = 'ties "davidson"' if config.ties == "davidson" else f"sft_coef {config.sft_coef:g}"
            raise ValueError(
                f'{setting} with loss "{self.name}", which learns from single responses; its default was expected'
            )

    def of_batch(self, batch: PolicyBatch, config: "DPOConfig") -> tuple[Tensor, Metrics]:
        shares = [share for comparison in batch.comparisons for share in self._shares(comparison, config.kto)]
        desirable_N, undesirable_N = (
            upload(torch.tensor(of_side), batch.logprobs_N.device) for of_side in zip(*shares, strict=True)
        )
        lead_N = config.beta * (batch.log_ratios_N - batch.baseline)
        share_N = desirable_N + undesirable_N
        kto = config.kto
        loss = (kto.desirable_weight * desirable_N * (1 - lead_N.sigmoid())).sum()
        loss = loss + (kto.undesirable_weight * undesirable_N * (1 - (-lead_N).sigmoid())).sum()
        right_N = torch.where(lead_N > 0, desirable_N, undesirable_N * (lead_N < 0))
        metrics = {
            "accuracy": torch.stack([right_N.sum(), share_N.sum()]),
            "baseline": torch.stack([batch.baseline * share_N.sum(), share_N.sum()]),
        }
        for side, own_N in (("chosen", desirable_N), ("rejected", undesirable_N)):
            metrics[f"{side}_logprob"] = torch.stack([(own_N * batch.logprobs_N).sum(), own_N.sum()])
            metrics[f"{side}_reward"] = torch.stack([(own_N * config.beta * batch.log_ratios_N).sum(), own_N.sum()])
        return loss, metrics

    def weight(self, comparison: Comparison, config: "DPOConfig") -> float:
        """Returns the number of its labelled responses, if all labelers have the weight 1."""
        return sum(map(sum, self._shares(comparison, config.kto)))

    def _shares(self, comparison: Comparison, config: KTOConfig) -> list[tuple[float, float]]:
        """Returns how much each response counts as a desirable and as an undesirable one, [K]."""
        labels_JK = np.array([labels_of(verdict, config) for verdict in comparison.verdicts])
        weights_J1 = np.array([[verdict.weight] for verdict in comparison.verdicts])
        num_K = np.maximum(1, np.abs(labels_JK).sum(axis=0))
        desirable_K, undesirable_K = ((weights_J1 * (labels_JK == label)).sum(axis=0) / num_K for label in (1, -1))
        return list(zip(desirable_K.tolist(), undesirable_K.tolist(), strict=True))

    def check_data(self, split: Split, config: "DPOConfig") -> list[str]:
        """Warns of flags that no response has.

        Raises: ValueError unless some responses to learn from are desirable and some undesirable, and labelled
        responses to at least two prompts are learned from and held out: the baseline needs responses to other prompts.
        """
        labels = [label for ranking in split.train for label in labels_of(ranking, config.kto)]
        if not {1, -1} <= set(labels):
            ratings = [rating for ranking in split.train for rating in ranking.ratings]
            given = sorted({flag for ranking in split.train for flags in ranking.flags for flag in flags})
            raise ValueError(
                f'dpo.loss "{self.name}": of {len(labels):,} responses to learn from in {config.rankings.source},'
                f" {labels.count(1):,} are desirable and {labels.count(-1):,} undesirable; both kinds were expected."
                f" Ratings are {f'{min(ratings):g} to {max(ratings):g}' if ratings else 'missing'}, flags"
                f" {', '.join(given) or 'missing'}; dpo.kto.desirable_above is {config.kto.desirable_above:g}, and"
                f" dpo.kto.undesirable_flags {list(config.kto.undesirable_flags)}"
            )
        for name, part in (("training", split.train), ("held-out", split.heldout)):
            num_prompts = len({ranking.prompt for ranking in part if any(labels_of(ranking, config.kto))})
            if num_prompts < 2:
                raise ValueError(
                    f'dpo.loss "{self.name}": {num_prompts} of the {name} prompts of {config.rankings.source} have a'
                    " response with a rating, or with a flag of dpo.kto.undesirable_flags; at least two were expected,"
                    " since the baseline needs responses to other prompts"
                )
        flags = {flag for part in (split.train, split.heldout) for r in part for given in r.flags for flag in given}
        absent = [repr(flag) for flag in config.kto.undesirable_flags if flag not in flags]
        return [f"no response of {config.rankings.source} has a flag {' or '.join(absent)}"] if absent else []

    def select(self, comparisons: Sequence[Comparison], config: "DPOConfig") -> Sequence[Comparison]:
        """Returns the comparisons with the verdicts that label a response; those without any are left out."""
        kept = []
        for comparison in comparisons:
            verdicts = tuple(verdict for verdict in comparison.verdicts if any(labels_of(verdict, config.kto)))
            if verdicts:
                kept.append(replace(comparison, verdicts=verdicts))
        return kept

    def label_results(
        self, learned: Sequence[Comparison], heldout: HeldoutLabels, config: "DPOConfig"
    ) -> LabelResults | None:
        shares = [share for comparison in learned for share in self._shares(comparison, config.kto)]
        desirable, undesirable = map(sum, zip(*shares, strict=True))
        numbers: dict[object, int] = {}
        labels, leads, clusters = list[int](), list[float](), list[int]()
        for comparison, log_ratios in zip(heldout.comparisons, heldout.log_ratios, strict=True):
            cluster = numbers.setdefault(heldout.prompts[comparison.task_id], len(numbers))
            for verdict in comparison.verdicts:
                for label, ratio in zip(labels_of(verdict, config.kto), log_ratios.tolist(), strict=True):
                    if label:
                        labels.append(label)
                        leads.append(ratio - heldout.baseline)
                        clusters.append(cluster)
        is_right = np.sign(leads) == labels
        return LabelResults(
            desirable,
            undesirable,
            labels.count(1),
            labels.count(-1),
            clustered_mean(is_right.astype(np.float64), np.array(clusters)),
            heldout.baseline,
        )


DEFAULT = Sigmoid()
LOSSES: Mapping[str, PreferenceLoss] = {
    loss.name: loss
    for loss in (
        DEFAULT,
        IPO(),
        LengthNormalised(),
        LengthNormalisedIPO(),
        SimPO(),
        KTO(),
    )
}
