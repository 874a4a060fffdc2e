"""What the training loop minimises: the losses of rankings and of ratings, over comparisons.

Shape letters: N sequences of all comparisons, B comparisons, K responses of one, J verdicts of all comparisons.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reward.comparisons import Comparison
from reward.learner import RewardLearner
from reward.loss import davidson_loss, ranking_loss, rating_loss
from reward.scoring import read_by
from training.packing import IntArray


class RankingObjective:
    """The loss over comparisons, each the weighted mean over its labelers; a comparison is the unit that is counted.

    `ratings` (of `beside.rating_std` in `reward.learner`) enter with the weight `rating_coef`; 0 leaves them out.
    """

    def __init__(
        self, comparisons: Sequence[Comparison], kind: str, *, rating_coef: float = 0.0, rating_std: float = 1.0
    ) -> None:
        self.comparisons, self.kind, self.rating_coef, self.rating_std = comparisons, kind, rating_coef, rating_std

    def __len__(self) -> int:
        return len(self.comparisons)

    def count(self, rows: IntArray) -> int:
        return len(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return sum(len(sequence) for row in rows for sequence in self.comparisons[row].sequences)

    def loss(self, model: RewardLearner, rows: IntArray, device: torch.device) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen = [self.comparisons[row] for row in rows]
        scores_N, log_nu, scale = model(*read_by([s for c in chosen for s in c.sequences], self.kind, device))
        lengths = torch.tensor([len(c.sequences) for c in chosen], device=device)
        real_BK = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        # Scores come flat, comparison after comparison: exactly the order of the real places of the padded table.
        scores_BK = scores_N.new_zeros(real_BK.shape).masked_scatter(real_BK, scores_N)
        judged = [
            (row, verdict, verdict.weight / len(c.verdicts)) for row, c in enumerate(chosen) for verdict in c.verdicts
        ]
        rows_J, verdicts_J, shares_J = zip(*judged, strict=True)
        share_J = torch.tensor(shares_J, device=device)
        scores_JK, K = scores_BK[list(rows_J)], real_BK.shape[1]
        ranks_JK = torch.tensor([[*v.ranks, *[0] * (K - len(v.ranks))] for v in verdicts_J], device=device)
        if len(log_nu):
            log_nu_J = log_nu[[verdict.objective for verdict in verdicts_J]]
            loss_J, accuracy_J = davidson_loss(scores_JK, ranks_JK, log_nu_J)
        else:
            loss_J, accuracy_J = ranking_loss(scores_JK, ranks_JK)
        figures = {"accuracy": (share_J * accuracy_J).sum()}
        loss = (share_J * loss_J).sum()
        if self.rating_coef:
            ratings_JK = torch.tensor([[*v.ratings, *[torch.nan] * (K - len(v.ratings))] for v in verdicts_J])
            error_J = rating_loss(scores_JK, ratings_JK.to(device) / self.rating_std, scale.expand(len(verdicts_J)))
            figures["rating_loss"] = (share_J * error_J).sum()
            loss = loss + self.rating_coef * figures["rating_loss"]
        return loss, {name: figure.detach() for name, figure in figures.items()}
