"""A reward model in training, with the few extra parameters that its losses learn in addition to the scores, and its
objective: the losses of rankings and ratings, summed over comparisons.

Shape letters: N sequences of all comparisons, B comparisons, K responses per comparison, J verdicts of all comparisons,
O objectives. In the losses: B judgments of a comparison, P pairs of responses. Ranks count from 1 = best; 0 = padding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.dropout import sequence_keys
from lm.source import ModelSource
from lm.transfer import spread, upload
from reward.comparisons import Comparison, Verdict
from reward.scoring import PackedInputs, RewardNetwork, scores_of
from training.config import BatchConfig
from training.packing import IntArray, pass_tokens, split_passes

Ties = Literal["soft", "davidson"]
NETWORK = "network."  # before the names of the reward model's own weights


@dataclass(frozen=True)
class AuxiliaryParameters:
    """Initial values per objective of what is learned in addition to the scores: log ν, and the scale of ratings.

    `log_nu` is () if ties are soft labels; `rating_std` is () if ratings are not learned, and 0 for an objective
    without ratings. Ratings enter the loss in units of `rating_std`, their spread around each verdict's mean, so the
    loss's weight means the same on any rating scale.
    """

    log_nu: tuple[float, ...] = ()
    rating_std: tuple[float, ...] = ()

    def learned(self, weights: Mapping[str, Tensor], hidden_size: int, objective: int) -> dict[str, float]:
        """Returns the learned values of one objective: ν, and how many rating points a unit of score is worth."""
        found = {}
        if self.log_nu:
            found["nu"] = math.exp(self.log_nu[objective] + hidden_size * float(weights["nu"][objective]))
        if self.rating_std and self.rating_std[objective]:
            found["rating_scale"] = self.rating_std[objective] * math.exp(
                hidden_size * float(weights["rating"][objective])
            )
        return found


class RewardLearner(nn.Module):
    """Scores, log ν and the scale of ratings from one forward pass, so that every backend gathers what it shards.

    An auxiliary parameter θ starts at 0 and is scaled by the hidden size: log ν = start + hidden_size · θ. So AdamW
    moves it as fast as the head moves a score, which is a sum over the hidden size.
    """

    def __init__(self, network: RewardNetwork, auxiliary: AuxiliaryParameters) -> None:
        super().__init__()
        self.network, self.auxiliary, self.gain = network, auxiliary, network.config.hidden_size
        self.nu = nn.Parameter(torch.zeros(len(auxiliary.log_nu))) if auxiliary.log_nu else None
        self.rating = nn.Parameter(torch.zeros(len(auxiliary.rating_std))) if auxiliary.rating_std else None

    def forward(self, *read: Tensor | None, sequence_keys_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scores [sequences, objectives]; and log ν and the scale of ratings, [objectives] or empty if not
        learned.
        """
        scores = scores_of(self.network, read, sequence_keys_BT)
        log_nu = scale = scores.new_zeros(0)
        if self.nu is not None:
            log_nu = scores.new_tensor(self.auxiliary.log_nu) + self.gain * self.nu.float()
        if self.rating is not None:
            scale = (self.gain * self.rating.float()).exp()
        return scores, log_nu, scale


@dataclass(frozen=True)
class LearnerSource:
    """The source of a `RewardLearner`, built on its network's source."""

    network: ModelSource[RewardNetwork]
    auxiliary: AuxiliaryParameters

    def build(self) -> RewardLearner:
        return RewardLearner(self.network.build(), self.auxiliary)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.auxiliary.log_nu:
            yield "nu", torch.zeros(len(self.auxiliary.log_nu))
        if self.auxiliary.rating_std:
            yield "rating", torch.zeros(len(self.auxiliary.rating_std))
        for name, tensor in self.network.tensors():
            yield NETWORK + name, tensor


def network_weights(weights: Iterable[tuple[str, Tensor]], others: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the reward model's weights among a learner's, under the model's own names; the rest goes into `others`."""
    for name, tensor in weights:
        if name.startswith(NETWORK):
            yield name.removeprefix(NETWORK), tensor
        else:
            others[name] = tensor
        del tensor  # before the next one is gathered


def starting_log_nu(comparisons: Sequence[Comparison], objective: int) -> float:
    """Returns the log ν at which responses of equal score tie as often as this objective's did: P(tie) = ν / (2 + ν).

    Half a pair is added to the ties and half to the other pairs, so the value is always finite.
    """
    ties, pairs = 0.5, 1.0
    for verdict in (v for c in comparisons for v in c.verdicts if c.objective == objective):
        ties += sum(math.comb(verdict.ranks.count(rank), 2) for rank in set(verdict.ranks))
        pairs += math.comb(len(verdict.ranks), 2)
    return math.log(2 * ties / (pairs - ties))


def spread_of_ratings(comparisons: Sequence[Comparison], objective: int) -> float:
    """Returns the root mean square distance of an objective's ratings from their verdict's mean; 0 without ratings."""
    rated = [v.ratings for c in comparisons for v in c.verdicts if v.ratings and c.objective == objective]
    squares = [(rating - sum(ratings) / len(ratings)) ** 2 for ratings in rated for rating in ratings]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def ranking_loss(scores_BK: Tensor, ranks_BK: Tensor, margin_BP: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns loss and accuracy per comparison, both [B]; a tie counts as half a win.

    loss = 1/C(K,2) · Σ_{i<j} BCE(σ(s_i - s_j), P(i beats j)), with P = 1, ½ (a tie) or 0. For a strict order this is
    InstructGPT's -1/C(K,2) · Σ log σ(s_w - s_l) (arXiv 2203.02155, eq. 1): all pairs of one prompt are one batch
    element, and each completion takes one forward pass. A margin m makes it -log σ(s_w - s_l - m); ties have none.
    accuracy = share of the untied pairs that the scores order as the ranks do; ½ if all are tied.
    A comparison of one response has no pairs, and a loss of 0.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(scores_BK, ranks_BK)
    target_BP = ((ahead_BP + 1) / 2).to(difference_BP.dtype)
    lead_BP = difference_BP - margin_BP * ahead_BP
    loss_BP = F.binary_cross_entropy_with_logits(lead_BP, target_BP, reduction="none")
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def davidson_loss(scores_BK: Tensor, ranks_BK: Tensor, log_nu_B: Tensor) -> tuple[Tensor, Tensor]:
    """As `ranking_loss`, but with a tie as a separate outcome (Davidson 1970, eq. 2.3).

    P(i beats j) = π_i / Z, P(tie) = ν √(π_i π_j) / Z, with π = e^s and Z = π_i + π_j + ν √(π_i π_j): a softmax over
    (d/2, log ν, -d/2) where d = s_i - s_j. ν is learned: for equal responses, it is the odds of a tie against a win of
    one of them. ν = 0 gives the Bradley-Terry model. Counting a tie as half a win for each side corresponds to the
    likelihood of a tie at ν = 1 without Z: it also pulls tied responses together, but does not model how often they
    tie.
    loss = -1/C(K,2) · Σ_{i<j} log P(observed outcome), nats.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(scores_BK, ranks_BK)
    loss_BP = -davidson_log_likelihood(difference_BP, ahead_BP, log_nu_B[:, None])
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def davidson_log_likelihood(difference_P: Tensor, ahead_P: Tensor, log_nu: Tensor) -> Tensor:
    """Returns log P of each pair's outcome, nats. `ahead_P`: 1 = the first is better, 0 = a tie, -1 = the second is."""
    half_P = difference_P / 2
    tie_P = log_nu.expand_as(half_P)
    normaliser_P = torch.stack([half_P, tie_P, -half_P]).logsumexp(dim=0)
    return torch.where(ahead_P == 0, tie_P, half_P * ahead_P) - normaliser_P


def rating_loss(scores_BK: Tensor, ratings_BK: Tensor, scale_B: Tensor) -> Tensor:
    """Returns ½ mean_k (r̃_k - a · s̃_k)² [B]; r̃ and s̃ are ratings and scores minus their mean over the comparison's
    responses.

    r̃ does not change if a labeler rates everything a point higher, or if every response to a prompt is good. So offsets
    of labelers and prompts cancel, as they do in the ranking loss, and need not be learned. Only a scale is learned:
    a = `scale_B`, in rating points per unit of score. Ratings are NaN at padding; a judgment with only NaN has no
    ratings and a loss of 0.
    """
    real_BK = ratings_BK.isfinite()
    num_B = real_BK.sum(dim=1).clamp(min=1)
    error_BK = _centred(ratings_BK, real_BK) - scale_B[:, None] * _centred(scores_BK, real_BK)
    return 0.5 * (error_BK**2).sum(dim=1) / num_B


def rating_margins(ratings_BK: Tensor, ranks_BK: Tensor) -> Tensor:
    """Returns by how much the ratings of each pair's better response exceed the other's, [B, P], for columns i < j.

    It is 0 for a pair without ratings, and where ratings contradict ranks.
    """
    K = ratings_BK.shape[1]
    first, second = torch.triu_indices(K, K, offset=1, device=ratings_BK.device)
    ahead_BP = (ranks_BK[:, second] - ranks_BK[:, first]).sign()
    return (ahead_BP * (ratings_BK[:, first] - ratings_BK[:, second])).nan_to_num(0.0).clamp(min=0)


def _centred(values_BK: Tensor, real_BK: Tensor) -> Tensor:
    """Subtract from each row the mean over its real entries; 0 elsewhere."""
    held_BK = torch.where(real_BK, values_BK, 0.0)
    mean_B1 = held_BK.sum(dim=1, keepdim=True) / real_BK.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(real_BK, held_BK - mean_B1, 0.0)


def pairs_of(scores_BK: Tensor, ranks_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three [B, P] for the pairs of columns i < j: s_i - s_j; 1 if i is better, 0 for a tie, -1 if j is; and a
    mask, True = neither is padding.
    """
    K = scores_BK.shape[1]
    first, second = torch.triu_indices(K, K, offset=1, device=scores_BK.device)
    real_BP = (ranks_BK[:, first] > 0) & (ranks_BK[:, second] > 0)
    # Padding, even if it is NaN, must not reach the sums or the gradient.
    difference_BP = torch.where(real_BP, scores_BK[:, first] - scores_BK[:, second], 0.0)
    ahead_BP = (ranks_BK[:, second] - ranks_BK[:, first]).sign()
    return difference_BP, ahead_BP, real_BP


def mean_over_pairs(loss_BP: Tensor, real_BP: Tensor) -> Tensor:
    """Returns the mean over each comparison's pairs [B]; 0 if it has none."""
    return (loss_BP * real_BP).sum(dim=1) / real_BP.sum(dim=1).clamp(min=1)


def accuracy_of(difference_BP: Tensor, ahead_BP: Tensor, real_BP: Tensor) -> Tensor:
    untied_BP = real_BP & (ahead_BP != 0)
    right_BP = untied_BP & (difference_BP.sign() == ahead_BP)
    num_untied_B = untied_BP.sum(dim=1)
    return torch.where(num_untied_B > 0, right_BP.sum(dim=1) / num_untied_B.clamp(min=1), 0.5)


MAX_RESPONSES = 1 << 20  # to one prompt; sequence numbers of consecutive comparisons are this far apart


def response_numbers(rows: IntArray, comparisons: Sequence[Comparison]) -> IntArray:
    """Returns the number of each response [N], which depends only on its comparison's row and its place there."""
    pairs = zip(rows, comparisons, strict=True)
    return np.array([row * MAX_RESPONSES + k for row, comparison in pairs for k in range(len(comparison.sequences))])


@dataclass(frozen=True)
class Judgments:
    """The J verdicts on a batch's comparisons, in order. K is the largest number of responses; ranks are 0 beyond."""

    rows: Sequence[int]  # of each verdict's comparison in the batch
    verdicts: Sequence[Verdict]
    share_J: Tensor  # a verdict's weight divided by the number of verdicts on the same comparison
    ranks_JK: Tensor
    _rows_J: Tensor
    _real_BK: Tensor  # True = not padding; in CPU memory

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], device: torch.device) -> "Judgments":
        lengths = torch.tensor([len(c.sequences) for c in comparisons])
        K = int(lengths.max())
        judged = [(row, verdict) for row, c in enumerate(comparisons) for verdict in c.verdicts]
        rows, verdicts = zip(*judged, strict=True)
        shares = [verdict.weight / len(comparisons[row].verdicts) for row, verdict in judged]
        ranks = [[*verdict.ranks, *[0] * (K - len(verdict.ranks))] for verdict in verdicts]
        share_J, ranks_JK, rows_J = (upload(torch.tensor(values), device) for values in (shares, ranks, rows))
        return cls(rows, verdicts, share_J, ranks_JK, rows_J, torch.arange(K) < lengths[:, None])

    def spread(self, values_N: Tensor) -> Tensor:
        """Returns one value per response [N] as [J, K], for each verdict those of its comparison; 0 beyond."""
        return spread(values_N, self._real_BK)[self._rows_J]


class ComparisonObjective:
    """Base class of the objectives over comparisons. A pass holds whole comparisons.

    Losses and metrics are sums over verdicts, each multiplied by its share: its weight divided by the number of
    verdicts on the same comparison. The training loop divides them by `count` of the whole batch, over all ranks and
    micro-batches, which is the sum of these shares. So they are weighted means, the same on any number of ranks.
    """

    comparisons: Sequence[Comparison]

    def __len__(self) -> int:
        return len(self.comparisons)

    def count(self, rows: IntArray) -> float:
        """The sum of the comparisons' weights; it is their number if all labelers have the same weight."""
        return sum(self.comparisons[row].weight for row in rows)

    def num_tokens(self, rows: IntArray) -> int:
        return sum(len(sequence) for row in rows for sequence in self.comparisons[row].sequences)

    def rank_passes(
        self, rows: IntArray, batch: BatchConfig, num_ranks: int, *, with_gradients: bool
    ) -> list[list[IntArray]]:
        """Split comparisons among ranks and passes by the number of tokens of their responses."""
        units = [[len(sequence) for sequence in self.comparisons[row].sequences] for row in rows]
        ranks = split_passes(units, num_ranks, pass_tokens(batch, units, with_gradients=with_gradients))
        return [[rows[places] for places in passes] for passes in ranks]


class RankingObjective(ComparisonObjective):
    """The loss of rankings, and of ratings if they are learned.

    A comparison reads and trains only the head of its own objective. If all labelers weigh the same, so do all
    comparisons, and the shared trunk gets gradient from each objective in proportion to its comparisons. With several
    `objectives`, accuracy is also reported for each by name. Ratings, in units of `rating_std`
    (`reward.objective.AuxiliaryParameters`), have the weight `rating_coef`; 0 leaves them out. The better response of a
    pair must score higher by `margin_coef` times the difference of its ratings, in the same units (Llama 2, arXiv
    2307.09288, eq. 2).
    """

    def __init__(
        self,
        comparisons: Sequence[Comparison],
        kind: str,
        *,
        objectives: Sequence[str] = (),
        rating_coef: float = 0.0,
        margin_coef: float = 0.0,
        rating_std: Sequence[float] = (),
    ) -> None:
        self.comparisons, self.kind, self.objectives = comparisons, kind, objectives if len(objectives) > 1 else ()
        self.rating_coef, self.margin_coef = rating_coef, margin_coef
        self.rating_std = [std or 1.0 for std in rating_std]

    def loss(
        self, model: RewardLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen = [self.comparisons[row] for row in rows]
        packed = PackedInputs.of([s for c in chosen for s in c.sequences], self.kind, device)
        keys_BT = sequence_keys(seed, response_numbers(rows, chosen)[packed.sequence_BT], device)
        scores, log_nu_O, scale_O = model(*packed.read, sequence_keys_BT=keys_BT)
        scores_NO = packed.in_order(scores)
        objective_N = torch.tensor([[c.objective] for c in chosen for _ in c.sequences])
        scores_N = scores_NO.gather(1, upload(objective_N, device)).squeeze(1)
        judgments = Judgments.of(chosen, device)
        share_J, ranks_JK, scores_JK = judgments.share_J, judgments.ranks_JK, judgments.spread(scores_N)
        objective_J = upload(torch.tensor([chosen[row].objective for row in judgments.rows]), device)
        ratings_JK: Tensor | None = None
        if self.rating_coef or self.margin_coef:
            K = ranks_JK.shape[1]
            ratings = torch.tensor([[*v.ratings, *[torch.nan] * (K - len(v.ratings))] for v in judgments.verdicts])
            std_J1 = upload(torch.tensor(self.rating_std), device)[objective_J, None]
            ratings_JK = upload(ratings, device) / std_J1
        if len(log_nu_O):
            loss_J, accuracy_J = davidson_loss(scores_JK, ranks_JK, log_nu_O[objective_J])
        else:
            margin = 0.0 if ratings_JK is None else self.margin_coef * rating_margins(ratings_JK, ranks_JK)
            loss_J, accuracy_J = ranking_loss(scores_JK, ranks_JK, margin)
        metrics = {"accuracy": (share_J * accuracy_J).sum()}
        for place, name in enumerate(self.objectives):
            own_J = share_J * (objective_J == place)
            metrics[f"accuracy/{name}"] = torch.stack([(own_J * accuracy_J).sum(), own_J.sum()])
        loss = (share_J * loss_J).sum()
        if self.rating_coef and ratings_JK is not None:
            scale_J = scale_O.expand(len(objective_J), -1).gather(1, objective_J[:, None]).squeeze(1)
            error_J = rating_loss(scores_JK, ratings_JK, scale_J)
            metrics["rating_loss"] = (share_J * error_J).sum()
            loss = loss + self.rating_coef * metrics["rating_loss"]
        return loss, {name: metric.detach() for name, metric in metrics.items()}
