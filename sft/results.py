"""What supervised fine-tuning leaves in results.json."""

from dataclasses import dataclass

from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class SFTResults:
    """Losses in nats per response token, before and after training; `packing_efficiency` is the share of no padding."""

    heldout_loss: float
    heldout_loss_before: float
    num_steps: int
    num_rows: int
    packing_efficiency: float
    overlong: Overlong | None = None  # of the demonstrations
    sources: tuple[SourceRows, ...] = ()  # of the demonstrations, if rows are unusual
