"""Rows that cannot be used: all of a source are counted, the first few are named, and they are refused or skipped."""

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

OnInvalid = Literal["refuse", "skip"]
Row = TypeVar("Row")
Item = TypeVar("Item")

HINT = 'on_invalid = "skip" in a job\'s source, or --on-invalid skip of heed init, leaves such rows out'
SHOWN_ROWS, KEPT_ROWS = 5, 1000  # of the invalid ones: in an error, and in all
COUNTED_ROWS = 1_000_000  # read at most after the first row that is refused, to count the others


class InvalidRows:
    """The invalid rows of one source: how many there are, and the messages about the first KEPT_ROWS."""

    def __init__(self, source: str, on_invalid: OnInvalid = "refuse") -> None:
        self.source, self.on_invalid = source, on_invalid
        self.num_rows = self.num_invalid = 0
        self.messages: list[str] = []
        self._last_row = 0  # at which counting stops, after a row that is refused

    def add(self, error: ValueError) -> None:
        """Counts a row that `error` is about."""
        if not self.num_invalid and self.on_invalid == "refuse":
            self._last_row = self.num_rows + COUNTED_ROWS
        self.num_invalid += 1
        if len(self.messages) < KEPT_ROWS:
            self.messages.append(str(error))

    def add_unreadable(self, error: ValueError) -> None:
        """Counts a row that could not even be parsed, and so is not among those that are read."""
        self.num_rows += 1
        self.add(error)

    def forget(self) -> None:
        """Starts to count again, after rows that are not to be used."""
        self.num_rows = self.num_invalid = 0
        self.messages.clear()

    @property
    def first(self) -> list[str]:
        return self.messages[:SHOWN_ROWS]

    @property
    def are_refused(self) -> bool:
        return bool(self.num_invalid) and self.on_invalid == "refuse"

    @property
    def has_counted_enough(self) -> bool:
        return self.are_refused and self.num_rows >= self._last_row

    def finish(self) -> None:
        """Raises: ValueError that names the first invalid rows, if they are refused or the source has no others."""
        if not self.num_invalid or (self.on_invalid == "skip" and self.num_invalid < self.num_rows):
            return
        skips = f" ({HINT})" if self.on_invalid == "refuse" else ""
        if self.num_invalid == 1:
            raise ValueError(f"{self.first[0]}{skips}")
        if self.num_invalid == self.num_rows > SHOWN_ROWS:  # the same mistake in all, most often
            raise ValueError(f"{self.first[0]} (and none of the {self.num_rows:,} rows is valid)")
        count = f"{self.num_invalid:,} of {'the first ' if self.has_counted_enough else ''}{self.num_rows:,} rows"
        more = self.num_invalid - len(self.first)
        lines = [f"{self.source}: {count} are invalid{skips}:", *self.first, *([f"and {more:,} more"] if more else [])]
        raise ValueError("\n  ".join(lines))


def valid_rows(
    rows: Iterator[tuple[str, Row]], read: Callable[[str, Row], Item], invalid: InvalidRows
) -> Iterator[tuple[str, Item]]:
    """Yields (where, `read(where, row)`) of every row for which it raises no ValueError.

    After a row that is refused it yields nothing more, and reads on to count the others that are invalid.

    Raises: ValueError as `InvalidRows.finish`.
    """
    for where, row in rows:
        invalid.num_rows += 1
        try:
            item = read(where, row)
        except ValueError as error:  # a mistake in the file, with its line
            invalid.add(error)
        else:
            if not invalid.are_refused:
                yield where, item
        if invalid.has_counted_enough:
            break
    invalid.finish()
