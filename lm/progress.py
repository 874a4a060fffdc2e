"""A count of the pieces of work that this process has done.

Whoever watches a rank from outside tells work that takes long from work that is stuck by this count. Each loop over
batches, tokens, rows or files adds to it; how large a piece is does not matter, only that the next one comes.
"""

_num_pieces = 0


def note_progress() -> None:
    """Count one more piece of work. It costs nothing, so it may stand in any loop that a rank runs."""
    global _num_pieces
    _num_pieces += 1


def progress_noted() -> int:
    """How many pieces this process has counted so far."""
    return _num_pieces
