"""The reward model's training objective: the losses of rankings and ratings, summed over comparisons.

Shape letters: N sequences of all comparisons, B comparisons, K responses per comparison, J verdicts of all comparisons,
O objectives.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lm.layers import sequence_keys
from lm.transfer import spread, upload
from reward.comparisons import Comparison
from reward.learner import RewardLearner
from reward.loss import davidson_loss, ranking_loss, rating_loss
from reward.scoring import PackedInputs
from training.config import BatchConfig
from training.packing import IntArray, pass_tokens, split_passes

MAX_RESPONSES = 1 << 20  # to one prompt; sequence numbers of consecutive comparisons are this far apart


class ComparisonObjective:
    """Base of the objectives over comparisons. Batches count comparisons, and a pass holds whole comparisons."""

    comparisons: Sequence[Comparison]

    def __len__(self) -> int:
        return len(self.comparisons)

    def count(self, rows: IntArray) -> int:
        return len(rows)

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
    """The loss summed over comparisons; a comparison's loss is the weighted mean over its labelers. Batches count
    comparisons.

    A comparison reads and trains only the head of its own objective. All comparisons weigh the same, so the shared
    trunk gets gradient from each objective in proportion to its comparisons. With several `objectives`, accuracy is
    also reported for each by name. Ratings, in units of `rating_std` (`reward.learner.AuxiliaryParameters`), have the
    weight `rating_coef`; 0 leaves them out.
    """

    def __init__(
        self,
        comparisons: Sequence[Comparison],
        kind: str,
        *,
        objectives: Sequence[str] = (),
        rating_coef: float = 0.0,
        rating_std: Sequence[float] = (),
    ) -> None:
        self.comparisons, self.kind, self.objectives = comparisons, kind, objectives if len(objectives) > 1 else ()
        self.rating_coef, self.rating_std = rating_coef, [std or 1.0 for std in rating_std]

    def loss(
        self, model: RewardLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen = [self.comparisons[row] for row in rows]
        packed = PackedInputs.of([s for c in chosen for s in c.sequences], self.kind, device)
        # A sequence's number depends only on its comparison's row and its place there, not on the rest of the batch.
        numbers_N = [
            row * MAX_RESPONSES + k for row, c in zip(rows, chosen, strict=True) for k in range(len(c.sequences))
        ]
        keys_BT = sequence_keys(seed, np.array(numbers_N)[packed.sequence_BT], device)
        scores, log_nu_O, scale_O = model(*packed.read, sequence_keys_BT=keys_BT)
        scores_NO = packed.in_order(scores)
        objective_N = torch.tensor([[c.objective] for c in chosen for _ in c.sequences])
        scores_N = scores_NO.gather(1, upload(objective_N, device)).squeeze(1)
        lengths = torch.tensor([len(c.sequences) for c in chosen])
        real_BK = torch.arange(int(lengths.max())) < lengths[:, None]
        # Scores are flat, comparison after comparison, which is the order of the real entries of the padded [B, K].
        scores_BK = spread(scores_N, real_BK)
        weighted = [
            (row, verdict, verdict.weight / len(c.verdicts)) for row, c in enumerate(chosen) for verdict in c.verdicts
        ]
        rows_J, verdicts_J, shares_J = zip(*weighted, strict=True)
        share_J = upload(torch.tensor(shares_J), device)
        scores_JK, K = scores_BK[upload(torch.tensor(rows_J), device)], real_BK.shape[1]
        ranks_JK = upload(torch.tensor([[*v.ranks, *[0] * (K - len(v.ranks))] for v in verdicts_J]), device)
        objective_J = upload(torch.tensor([chosen[row].objective for row in rows_J]), device)
        if len(log_nu_O):
            loss_J, accuracy_J = davidson_loss(scores_JK, ranks_JK, log_nu_O[objective_J])
        else:
            loss_J, accuracy_J = ranking_loss(scores_JK, ranks_JK)
        metrics = {"accuracy": (share_J * accuracy_J).sum()}
        for place, name in enumerate(self.objectives):
            own_J = share_J * (objective_J == place)
            metrics[f"accuracy/{name}"] = torch.stack([(own_J * accuracy_J).sum(), own_J.sum()])
        loss = (share_J * loss_J).sum()
        if self.rating_coef:
            ratings_JK = torch.tensor([[*v.ratings, *[torch.nan] * (K - len(v.ratings))] for v in verdicts_J])
            scale_J = scale_O.expand(len(verdicts_J), -1).gather(1, objective_J[:, None]).squeeze(1)
            std_J1 = upload(torch.tensor(self.rating_std), device)[objective_J, None]
            error_J = rating_loss(scores_JK, upload(ratings_JK, device) / std_J1, scale_J)
            metrics["rating_loss"] = (share_J * error_J).sum()
            loss = loss + self.rating_coef * metrics["rating_loss"]
        return loss, {name: metric.detach() for name, metric in metrics.items()}
