"""What rejection sampling leaves in results.json."""

from dataclasses import dataclass

from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class Chosen:
    """What was sampled and kept. Scores are the reward model's: means over the samples that have one, and over those
    that were kept.

    Samples that cannot be kept are counted once, by the first reason that applies: truncated, empty, failed. Among the
    kept prompts, `num_identical` have nothing to choose from, as their usable samples are one text; `num_tied` have
    different texts with the best score, of which the first sample is kept.
    """

    num_prompts: int
    num_samples: int  # per prompt
    num_kept: int  # prompts with a sample to learn from
    num_truncated: int  # samples that reached max_new_tokens
    num_empty: int  # samples without text
    num_failed: int  # samples without a score
    num_identical: int
    num_tied: int
    sample_score: float
    kept_score: float


@dataclass(frozen=True)
class Trained:
    """Losses of kept responses that were held out, nats per response token."""

    num_steps: int
    heldout_loss_before: float
    heldout_loss: float


@dataclass(frozen=True)
class RejectionResults:
    """What was sampled and kept, and what was learned from it."""

    chosen: Chosen
    trained: Trained
    overlong: Overlong | None = None  # of the prompts, for max_new_tokens
    overlong_kept: Overlong | None = None  # of the kept responses with their prompts, for seq_len
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
