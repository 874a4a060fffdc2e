"""Rows that cannot be used: Heed counts all of them in a source, names the first few, and refuses or skips them."""

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

OnInvalid = Literal["refuse", "skip"]
Row = TypeVar("Row")
Item = TypeVar("Item")

HINT = 'on_invalid = "skip" in a job\'s source, or --on-invalid skip of heed init, leaves such rows out'
SHOWN_ROWS, KEPT_ROWS = 5, 1000  # invalid rows named in an error, and remembered at most
COUNTED_ROWS = 1_000_000  # most rows read after the first refused one, to count the other invalid ones


class InvalidRows:
    """Counts the invalid rows of one source, and keeps the messages about the first KEPT_ROWS of them."""

    def __init__(self, source: str, on_invalid: OnInvalid = "refuse") -> None:
        self.source, self.on_invalid = source, on_invalid
        self.num_rows = self.num_invalid = 0
        self.messages: list[str] = []
        self._last_row = 0  # where counting stops once a row has been refused

    def add(self, error: ValueError) -> None:
        """Counts the row that `error` is about."""
        if not self.num_invalid and self.on_invalid == "refuse":
            self._last_row = self.num_rows + COUNTED_ROWS
        self.num_invalid += 1
        if len(self.messages) < KEPT_ROWS:
            self.messages.append(str(error))

    def add_unreadable(self, error: ValueError) -> None:
        """Counts a row that could not even be parsed, so `valid_rows` never sees it."""
        self.num_rows += 1
        self.add(error)

    def forget(self) -> None:
        """Resets the counts, after rows that are not going to be used."""
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
        """Raises: ValueError that names the first invalid rows, if they are refused or if no row is valid."""
        if not self.num_invalid or (self.on_invalid == "skip" and self.num_invalid < self.num_rows):
            return
        skips = f" ({HINT})" if self.on_invalid == "refuse" else ""
        if self.num_invalid == 1:
            raise ValueError(f"{self.first[0]}{skips}")
        if self.num_invalid == self.num_rows > SHOWN_ROWS:  # most often the same mistake in all of them
            raise ValueError(f"{self.first[0]} (and none of the {self.num_rows:,} rows is valid)")
        count = f"{self.num_invalid:,} of {'the first ' if self.has_counted_enough else ''}{self.num_rows:,} rows"
        more = self.num_invalid - len(self.first)
        lines = [f"{self.source}: {count} are invalid{skips}:", *self.first, *([f"and {more:,} more"] if more else [])]
        raise ValueError("\n  ".join(lines))


def valid_rows(
    rows: Iterator[tuple[str, Row]], read: Callable[[str, Row], Item], invalid: InvalidRows
) -> Iterator[tuple[str, Item]]:
    """Yields (where, `read(where, row)`) for every row for which `read` raises no ValueError.

    After a refused row it yields nothing more, but keeps reading to count the other invalid rows.

    Raises: ValueError as `InvalidRows.finish` does.
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
