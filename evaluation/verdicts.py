"""The data of comparisons: policies' responses, and judges' verdicts on pairs of them.

Both are stored as rows of Parquet files, so that every number of a report can be traced to its rows and another judge
can judge the same responses. Shape letters: V verdicts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from files.atomic import atomic_file
from files.parquet import read_parquet

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Side = Literal["a", "b", ""]
Clusters = Mapping[str, str]  # from a prompt's id to one prompt of its cluster; a prompt not in it is its own cluster
NO_CLUSTERS: Clusters = {}


@dataclass(frozen=True)
class Response:
    """One response of a policy to a prompt. `index` counts a policy's samples of the prompt from 0.

    `num_tokens` and `finished` (it ended with EOS) are None if the source does not say. `log_ratio`, log π - log π_ref
    of the whole response in nats, is NaN if no reference was measured; `proxy_score`, by the reward model that a policy
    was trained on, is NaN if that model did not score it. `where` names the file and line it was read from; it is "" if
    the response was sampled here.
    """

    policy: str
    prompt_id: str
    index: int
    text: str
    num_tokens: int | None = None
    finished: bool | None = None
    log_ratio: float = math.nan
    proxy_score: float = math.nan
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict of a judge, or of one of its labelers, on two policies' responses to one prompt.

    `preference_a` is 1 if a is better, 0 if b is, ½ for a tie, a value in between if the judge is uncertain, and NaN if
    it failed; `failure` then says why. Which of the two policies is called a has no meaning. `first` says whose
    response was shown first; it is "" if that is unknown or irrelevant (a reward model reads one response at a time).
    `labeler` is the person, or the judge's name if the judge is a single scorer. `score_a` and `score_b` are NaN if a
    judge gives no scores. `where` names the file and line of an external verdict.
    """

    prompt_id: str
    policy_a: str
    policy_b: str
    index_a: int
    index_b: int
    judge: str
    labeler: str
    preference_a: float
    first: Side = ""
    score_a: float = math.nan
    score_b: float = math.nan
    length_a: int = 0  # characters
    length_b: int = 0
    category: str = ""
    failure: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        place = f"{self.where}: " if self.where else ""
        if self.policy_a == self.policy_b:
            raise ValueError(f"{place}prompt {self.prompt_id!r}: policy {self.policy_a!r} is compared with itself")
        if math.isnan(self.preference_a) != bool(self.failure):
            raise ValueError(
                f"{place}prompt {self.prompt_id!r}: preference_a is {self.preference_a}, failure {self.failure!r};"
                " preference_a must be NaN exactly when there is a failure"
            )
        if not math.isnan(self.preference_a) and not 0 <= self.preference_a <= 1:
            raise ValueError(
                f"{place}prompt {self.prompt_id!r}: preference_a is {self.preference_a}; 0 to 1, or NaN for a failure,"
                " was expected"
            )


@dataclass(frozen=True)
class Comparisons:
    """The verdicts that did not fail, as columns [V] for statistics.

    `a_V` and `b_V` index `policies`; `prompt_V`, `labeler_V` and `category_V` index the lists of those names.
    `cluster_V` numbers clusters of prompts that are not independent; without clusters it is `prompt_V`.
    `won_V` is `preference_a`. `first_V` is 1 if a was shown first, -1 if b was, 0 if unknown. `longer_V`
    is a's length minus b's, in characters.
    """

    policies: tuple[str, ...]
    prompts: tuple[str, ...]
    labelers: tuple[str, ...]
    categories: tuple[str, ...]
    a_V: Ints
    b_V: Ints
    prompt_V: Ints
    cluster_V: Ints
    labeler_V: Ints
    category_V: Ints
    won_V: Floats
    first_V: Ints
    longer_V: Floats

    def __len__(self) -> int:
        return len(self.won_V)

    def between(self, a: int, b: int) -> "Comparisons":
        """Returns the verdicts between policies a and b only, oriented so that `won_V` is a's."""
        turned_V = (self.a_V == b) & (self.b_V == a)
        kept_V = ((self.a_V == a) & (self.b_V == b)) | turned_V
        pair, sign_V = self.where(kept_V), np.where(turned_V, -1, 1)[kept_V]
        return replace(
            pair,
            a_V=np.full(len(sign_V), a),
            b_V=np.full(len(sign_V), b),
            won_V=np.where(sign_V > 0, pair.won_V, 1 - pair.won_V),
            first_V=sign_V * pair.first_V,
            longer_V=sign_V * pair.longer_V,
        )

    def where(self, kept_V: npt.NDArray[np.bool_]) -> "Comparisons":
        """Returns the verdicts marked True; the lists of names stay unchanged."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_V")}
        return replace(self, **{name: column[kept_V] for name, column in columns.items()})


def comparisons_of(
    verdicts: Sequence[Verdict], policies: Sequence[str] = (), clusters: Clusters = NO_CLUSTERS
) -> Comparisons:
    """Turns the verdicts that did not fail into columns, in order; the caller counts the failed ones.

    `policies` gives the order of policies; if empty, they are sorted by name.
    Raises: ValueError for a verdict on a policy that is not among `policies`.
    """
    standing = [verdict for verdict in verdicts if not verdict.failure]
    named = sorted({name for verdict in verdicts for name in (verdict.policy_a, verdict.policy_b)})
    for name in named:
        if policies and name not in policies:
            raise ValueError(f"a verdict names policy {name!r}; {', '.join(policies)} were expected")
    names = tuple(policies) or tuple(named)
    prompts, prompt_V = _places(verdict.prompt_id for verdict in standing)
    labelers, labeler_V = _places(verdict.labeler for verdict in standing)
    categories, category_V = _places(verdict.category for verdict in standing)
    place = {name: number for number, name in enumerate(names)}
    return Comparisons(
        policies=names,
        prompts=prompts,
        labelers=labelers,
        categories=categories,
        a_V=np.array([place[verdict.policy_a] for verdict in standing], dtype=np.int64),
        b_V=np.array([place[verdict.policy_b] for verdict in standing], dtype=np.int64),
        prompt_V=prompt_V,
        cluster_V=_places(clusters.get(verdict.prompt_id, verdict.prompt_id) for verdict in standing)[1],
        labeler_V=labeler_V,
        category_V=category_V,
        won_V=np.array([verdict.preference_a for verdict in standing], dtype=np.float64),
        first_V=np.array([{"a": 1, "b": -1, "": 0}[verdict.first] for verdict in standing], dtype=np.int64),
        longer_V=np.array([verdict.length_a - verdict.length_b for verdict in standing], dtype=np.float64),
    )


def places_of(prompts: Sequence[str], clusters: Clusters) -> Ints:
    """Returns the number of each prompt's cluster, in order of appearance."""
    return _places(clusters.get(prompt, prompt) for prompt in prompts)[1]


def _places(names: Iterable[str]) -> tuple[tuple[str, ...], Ints]:
    """Returns the distinct names in order of appearance, and each name's position among them."""
    place: dict[str, int] = {}
    places = [place.setdefault(name, len(place)) for name in names]
    return tuple(place), np.array(places, dtype=np.int64)


def write_rows(path: Path, rows: Sequence[Verdict] | Sequence[Response]) -> None:
    """Writes rows as Parquet, atomically. The same rows give the same bytes.

    Raises: ValueError if there are no rows.
    """
    import pyarrow
    from pyarrow import parquet

    if not rows:
        raise ValueError(f"{path}: no rows to write")
    names = [field.name for field in fields(rows[0])]
    table = pyarrow.table({name: [getattr(row, name) for row in rows] for name in names})
    with atomic_file(path) as temporary:
        parquet.write_table(table, temporary)


def read_verdicts(path: Path) -> list[Verdict]:
    """Reads the rows of a `verdicts.parquet`. Raises: ValueError naming file, row and problem."""
    return [_verdict(f"{path}: row {number}", row) for number, row in enumerate(_rows(path, Verdict), start=1)]


def _verdict(where: str, row: dict[str, Any]) -> Verdict:
    try:
        return Verdict(**row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_responses(path: Path) -> list[Response]:
    """Reads the rows of a `responses.parquet`. Raises: ValueError naming file and problem."""
    return [Response(**row) for row in _rows(path, Response)]


def _rows(path: Path, kind: type[Verdict] | type[Response]) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    rows = [row for _, row in read_parquet(path)]
    expected = [field.name for field in fields(kind)]
    if rows and list(rows[0]) != expected:
        raise ValueError(f"{path}: found columns {', '.join(rows[0])}; expected {', '.join(expected)}")
    return rows
