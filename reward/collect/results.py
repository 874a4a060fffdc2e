"""What collecting preferences leaves in results.json."""

from dataclasses import dataclass

from preferences.statistics.estimates import Share
from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class CollectResults:
    """`agreement` is of pairs of labelers, `gold_accuracy` of labelers with what they would say without noise.

    `num_identical` prompts were left out: all responses to them were the same text.
    """

    num_prompts: int
    num_identical: int
    responses_per_prompt: int
    num_judgments: int
    tie_share: float
    agreement: Share
    gold_accuracy: Share
    labelers: tuple[str, ...]
    overlong: Overlong | None = None  # of the prompts
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
