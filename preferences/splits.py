"""Held-out comparisons, split by prompt: no prompt is ever on both sides.

A prompt's side depends only on its own text, the share and the seed, not on the rest of the data, so a batch collected
later never moves a prompt to the other side.
"""

import hashlib
import json
from collections.abc import Sequence

from preferences.records import Message, Ranking


def is_heldout(prompt: Sequence[Message], share: float, seed: int) -> bool:
    """Whether the prompt is held out. Over many prompts, `share` (0 to 1) of them are.

    Prompts that differ only in letter case or spacing fall on the same side.

    Raises: ValueError for a share outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"heldout share is {share}; a number from 0 to 1 was expected")
    turns = [[message.role, " ".join(message.content.split()).casefold()] for message in prompt]
    digest = hashlib.sha256(json.dumps(["heldout", seed, turns]).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split_rankings(rankings: Sequence[Ranking], heldout_share: float, seed: int) -> tuple[list[Ranking], list[Ranking]]:
    """Returns (train, heldout), each in the order given."""
    train: list[Ranking] = []
    heldout: list[Ranking] = []
    for ranking in rankings:
        (heldout if is_heldout(ranking.prompt, heldout_share, seed) else train).append(ranking)
    return train, heldout
