"""What pretraining leaves in results.json."""

from dataclasses import dataclass

from training.data import SourceRows


@dataclass(frozen=True)
class PretrainResults:
    """Losses in nats per token; `heldout_accuracy` of hidden words (masked models), the bits of decoders."""

    heldout_loss: float
    num_parameters: int
    vocab_size: int
    train_tokens: int
    trained_tokens: int
    heldout_accuracy: float | None = None
    heldout_bits_per_byte: float | None = None
    sources: tuple[SourceRows, ...] = ()  # of the texts, if rows are unusual
