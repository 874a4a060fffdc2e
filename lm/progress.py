"""A count of the pieces of work that this process has done.

A watcher outside a rank uses this count to tell slow work from stuck work. Each loop over batches, tokens, rows or
files adds to it. The size of a piece does not matter, only that the next one comes.
"""

_num_pieces = 0


def note_progress() -> None:
    """Count one more piece of work. It costs nothing, so any loop that a rank runs may call it."""
    global _num_pieces
    _num_pieces += 1


def progress_noted() -> int:
    """Returns how many pieces this process has counted so far."""
    return _num_pieces
