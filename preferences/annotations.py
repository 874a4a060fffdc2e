"""What labelers say beyond ranks, ratings and flags: criteria, ratings of earlier turns, and edits.

A judgment stores them in one JSON column, which holds only what there is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

MAX_CRITERIA = 20
MAX_TURN_RATINGS = 2_000  # of one answer: those of all turns by all criteria
MAX_EDIT_CHARACTERS = 20_000
MAX_NAME_CHARACTERS = 100  # of a criterion


@dataclass(frozen=True)
class CriterionRatings:
    """One rating per response by one criterion; higher is better. For a yes-or-no criterion, 1 is yes and 0 is no."""

    name: str
    ratings: tuple[float, ...]


@dataclass(frozen=True)
class TurnRating:
    """A rating, by one criterion, of one of the assistant's turns before the responses.

    `turn` is the turn's place in the task's prompt, from 0, which is the same for every labeler.
    """

    turn: int
    name: str
    rating: float


@dataclass(frozen=True)
class Annotations:
    """Annotations. Those of responses are in the order shown in an answer, and in canonical order in a judgment."""

    criteria: tuple[CriterionRatings, ...] = ()
    edits: tuple[str, ...] = ()  # the labeler's better version of each response, "" = none; () = no edits at all
    turns: tuple[TurnRating, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.criteria or self.turns or self.edits)

    def canonical(self, order: Sequence[int]) -> "Annotations":
        """Converts from the order shown, in which response i of the store is at the position of i in `order`."""
        return Annotations(
            tuple(replace(one, ratings=_moved(order, one.ratings)) for one in self.criteria),
            _moved(order, self.edits),
            tuple(sorted(self.turns, key=lambda one: (one.turn, one.name))),
        )

    def as_shown(self, order: Sequence[int]) -> "Annotations":
        """The inverse of `canonical`."""
        back = tuple(order.index(index) for index in range(len(order)))
        return self.canonical(back)

    def as_dict(self) -> dict[str, Any]:
        """Converts to JSON's types, without what is empty."""
        fields = {
            "criteria": [{"name": one.name, "ratings": list(one.ratings)} for one in self.criteria],
            "turns": [asdict(one) for one in self.turns],
            "edits": list(self.edits),
        }
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Annotations":
        """Reads what `as_dict` made."""
        return cls(
            tuple(CriterionRatings(one["name"], tuple(one["ratings"])) for one in stored.get("criteria", ())),
            tuple(stored.get("edits", ())),
            tuple(TurnRating(**one) for one in stored.get("turns", ())),
        )

    def ratings_by(self, criterion: str) -> tuple[float, ...]:
        """Returns the ratings by a criterion, or () if there are none."""
        return next((one.ratings for one in self.criteria if one.name == criterion), ())

    def turn_ratings_by(self, criterion: str) -> dict[int, float]:
        """Returns the ratings of earlier turns by a criterion, by the turns' places in the prompt."""
        return {one.turn: one.rating for one in self.turns if one.name == criterion}

    def by(self, criterion: str) -> "Annotations":
        """Returns the ratings by one criterion alone, of responses and of turns."""
        return Annotations(
            tuple(one for one in self.criteria if one.name == criterion),
            turns=tuple(one for one in self.turns if one.name == criterion),
        )

    @property
    def texts(self) -> list[tuple[str, str]]:
        """All texts in it, each with the name of its field, to be checked before they are stored."""
        names = [("criteria", one.name) for one in self.criteria] + [("turns", one.name) for one in self.turns]
        return [*names, *(("edits", edit) for edit in self.edits)]


NO_ANNOTATIONS = Annotations()


def _moved(order: Sequence[int], entries: Sequence[Any]) -> tuple[Any, ...]:
    back = dict(zip(order, entries, strict=True)) if entries else {}
    return tuple(back[index] for index in range(len(back)))


def require_annotations(where: str, found: Annotations, num_responses: int, *, turns: Sequence[int]) -> None:
    """Checks annotations, in any order of the responses. `turns` are the places of the assistant's turns in the prompt.

    Raises: ValueError, beginning with `where` and naming the field.
    """
    names = [one.name for one in found.criteria]
    if len(set(names)) != len(names) or len(names) > MAX_CRITERIA:
        raise ValueError(f"{where}: criteria is {names!r}; at most {MAX_CRITERIA} different names were expected")
    for one in found.criteria:
        if len(one.ratings) != num_responses:
            raise ValueError(
                f"{where}: criteria: {one.name!r} has {len(one.ratings)} ratings for {num_responses} responses"
            )
        if not all(type(rating) in (int, float) and math.isfinite(rating) for rating in one.ratings):
            raise ValueError(f"{where}: criteria: {one.name!r} is {one.ratings!r}; finite numbers were expected")
    _require_turns(where, found.turns, turns)
    for name in (*names, *(one.name for one in found.turns)):
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise ValueError(
                f"{where}: {name!r} names a criterion; 1 to {MAX_NAME_CHARACTERS} characters were expected"
            )
    if found.edits and len(found.edits) != num_responses:
        raise ValueError(f"{where}: edits has {len(found.edits)} entries for {num_responses} responses")
    if not all(isinstance(edit, str) and len(edit) <= MAX_EDIT_CHARACTERS for edit in found.edits):
        raise ValueError(f"{where}: edits: texts of at most {MAX_EDIT_CHARACTERS:,} characters were expected")


def _require_turns(where: str, found: Sequence[TurnRating], turns: Sequence[int]) -> None:
    for one in found:
        if type(one.turn) is not int or one.turn not in turns:
            places = ", ".join(map(str, turns)) or "it has none"
            expected = f"the place of one of the assistant's turns in the prompt ({places})"
            raise ValueError(f"{where}: turns: turn {one.turn!r} is rated; {expected} was expected")
        if type(one.rating) not in (int, float) or not math.isfinite(one.rating):
            raise ValueError(f"{where}: turns: turn {one.turn} is rated {one.rating!r}; a finite number was expected")
    if len({(one.turn, one.name) for one in found}) < len(found) or len(found) > MAX_TURN_RATINGS:
        raise ValueError(
            f"{where}: turns has {len(found)} ratings; one per turn and criterion, and at most {MAX_TURN_RATINGS:,},"
            " were expected"
        )
