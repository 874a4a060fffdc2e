"""The conversations whose mean score becomes 0."""

from collections.abc import Sequence
from itertools import islice

from lm.tokenizer import Tokenizer
from reward.comparisons import Comparison, encode_scored
from reward.config import RewardConfig
from training.data import read_conversations
from training.tokens import encode_rows


def calibration_sequences(config: RewardConfig, tokenizer: Tokenizer, max_tokens: int) -> list[tuple[int, ...]]:
    """Tokens of the first `num_calibration` demonstrations, of those that are too long what `on_overlong` leaves.

    Raises: ValueError naming file and line of a row that is no demonstration or, if it is refused, too long.
    """
    found = []
    for where, messages in islice(read_conversations(config.demonstrations), config.num_calibration):
        (tokens,) = encode_rows(lambda of: [encode_scored(tokenizer, one) for one in of], [(where, messages)])
        if len(tokens) > max_tokens and config.on_overlong == "refuse":
            raise ValueError(
                f"{where}: the conversation has {len(tokens)} tokens; the reward model reads {max_tokens}"
                ' (reward.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        if len(tokens) <= max_tokens or config.on_overlong == "truncate":
            found.append(tokens[:max_tokens])
    return found


def best_responses(comparisons: Sequence[Comparison], limit: int) -> list[Sequence[int]]:
    """The sequences that the first labeler of each of the first `limit` comparisons ranks best."""
    return [
        comparison.sequences[comparison.verdicts[0].ranks.index(min(comparison.verdicts[0].ranks))]
        for comparison in comparisons[:limit]
    ]
