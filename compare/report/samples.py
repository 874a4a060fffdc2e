"""The sample browser: prompts with their responses side by side and every verdict on them.

All of it is HTML that reads without JavaScript; the page's script hides what a filter leaves out, and shows a page at a
time. A report holds at most MAX_PROMPTS prompts and MAX_CHARACTERS of their texts, taken evenly from all in the order
of prompts.jsonl; it says how many of how many, and the files have the rest.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from compare.report.folder import ComparedPrompt, ComparisonFolder
from evaluation.verdicts import Response, Verdict
from reports.text import Policy, number, percent

MAX_PROMPTS = 1_000
MAX_CHARACTERS = 6_000_000
UNFOLDED_CHARACTERS = 1_200  # of one text; the rest is folded away
TEXT_CHARACTERS = 20_000  # of one text; the rest is in the files


@dataclass(frozen=True)
class Folded:
    """A text: what is shown at once, what is folded behind it, and how many characters are in the files alone."""

    text: str
    rest: str
    num_left: int


@dataclass(frozen=True)
class ShownResponse:
    """One response of a policy."""

    index: int
    text: Folded
    about: str


@dataclass(frozen=True)
class ShownVerdict:
    """One verdict in words."""

    judge: str
    labeler: str
    kind: str  # won, tied, failed
    winner: Policy | None
    detail: str


@dataclass(frozen=True)
class Chip:
    """What one judge says of a pair, or which policy it prefers among several, in the sample's summary line."""

    judge: str
    kind: str  # won, tied, failed
    winner: Policy | None


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with everything said of it. `outcomes` is what the filters read: "a-b:judge:outcome" by place."""

    anchor: str
    prompt_id: str
    category: str
    category_place: int
    start: str
    messages: tuple[tuple[str, Folded], ...]
    responses: tuple[tuple[Policy, tuple[ShownResponse, ...]], ...]
    verdicts: tuple[ShownVerdict, ...]
    chips: tuple[Chip, ...]
    outcomes: str
    disagree: bool


@dataclass(frozen=True)
class Samples:
    """The prompts that the page holds, and the choices of its filters."""

    prompts: tuple[ShownPrompt, ...]
    num_prompts: int
    policies: tuple[Policy, ...]
    pairs: tuple[tuple[int, int], ...]
    judges: tuple[str, ...]
    categories: tuple[str, ...]

    @property
    def is_cut(self) -> bool:
        """Whether there are prompts that the page leaves out."""
        return len(self.prompts) < self.num_prompts


def anchor_of(prompt_id: str) -> str:
    """The fragment that leads to a prompt, as in `report.html#prompt-p7`."""
    return f"prompt-{quote(prompt_id, safe='', errors='replace')}"


def samples_of(
    folder: ComparisonFolder,
    looks: dict[str, Policy],
    *,
    max_prompts: int = MAX_PROMPTS,
    max_characters: int = MAX_CHARACTERS,
) -> Samples:
    """The sample browser's contents, from the folder alone."""
    responses, verdicts = defaultdict(list), defaultdict(list)
    for response in folder.responses:
        responses[response.prompt_id].append(response)
    for verdict in folder.verdicts:
        verdicts[verdict.prompt_id].append(verdict)
    categories = sorted({prompt.category for prompt in folder.prompts})
    place = {name: number_of for number_of, name in enumerate(folder.policies)}
    sizes = [_characters(prompt, responses[prompt.prompt_id]) for prompt in folder.prompts]
    chosen = [folder.prompts[index] for index in evenly(sizes, max_prompts, max_characters)]
    shown = tuple(
        _shown(prompt, responses[prompt.prompt_id], verdicts[prompt.prompt_id], folder, looks, categories)
        for prompt in chosen
    )
    pairs = {tuple(sorted((place[v.policy_a], place[v.policy_b]))) for v in folder.verdicts}
    return Samples(
        prompts=shown,
        num_prompts=len(folder.prompts),
        policies=tuple(looks[name] for name in folder.policies),
        pairs=tuple(sorted((first, second) for first, second in pairs)),
        judges=folder.judges,
        categories=tuple(categories),
    )


def _characters(prompt: ComparedPrompt, responses: Sequence[Response]) -> int:
    texts = [text for _, text in prompt.messages] + [response.text for response in responses]
    return sum(min(len(text), TEXT_CHARACTERS) for text in texts)


def evenly(sizes: Sequence[int], max_prompts: int, max_characters: int) -> list[int]:
    """Places of as many prompts as fit both bounds, evenly spread over all; at least one."""
    num = min(len(sizes), max_prompts)
    while True:
        places = [place * len(sizes) // num for place in range(num)]
        total = sum(sizes[place] for place in places)
        if total <= max_characters or num == 1:
            return places
        num = max(1, min(num - 1, num * max_characters // total))


def folded(text: str) -> Folded:
    """A text as the page holds it; words are not cut in two where that can be helped."""
    text = text
    kept = text[:TEXT_CHARACTERS]
    if len(kept) <= UNFOLDED_CHARACTERS:
        return Folded(kept, "", 0)
    cut = max(kept.rfind(" ", 0, UNFOLDED_CHARACTERS), kept.rfind("\n", 0, UNFOLDED_CHARACTERS))
    cut = cut if cut > UNFOLDED_CHARACTERS // 2 else UNFOLDED_CHARACTERS
    return Folded(kept[:cut], kept[cut:], len(text) - len(kept))


def _shown(
    prompt: ComparedPrompt,
    responses: Sequence[Response],
    verdicts: Sequence[Verdict],
    folder: ComparisonFolder,
    looks: dict[str, Policy],
    categories: Sequence[str],
) -> ShownPrompt:
    place = {name: number_of for number_of, name in enumerate(folder.policies)}
    by_policy = []
    for name in folder.policies:
        own = sorted((row for row in responses if row.policy == name), key=lambda row: row.index)
        by_policy.append((looks[name], tuple(ShownResponse(row.index, folded(row.text), _about(row)) for row in own)))
    chips, outcomes = _outcomes(verdicts, folder, looks, place)
    last_user = next((text for role, text in reversed(prompt.messages) if role == "user"), prompt.messages[-1][1])
    return ShownPrompt(
        anchor=anchor_of(prompt.prompt_id),
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        category_place=categories.index(prompt.category),
        start=" ".join(last_user[:400].split())[:140],
        messages=tuple((role, folded(text)) for role, text in prompt.messages),
        responses=tuple(by_policy),
        verdicts=tuple(
            _verdict(row, looks) for row in sorted(verdicts, key=lambda row: _order(row, folder.judges, place))
        ),
        chips=chips,
        outcomes=outcomes,
        disagree=verdicts_disagree(verdicts),
    )


def _about(row: Response) -> str:
    parts = [] if row.num_tokens is None else [f"{number(row.num_tokens)} tokens"]
    parts += ["did not end by itself"] if row.finished is False else []
    parts += [f"log ratio {number(float(row.log_ratio), 1)} nats"] if not math.isnan(row.log_ratio) else []
    return ", ".join(parts)


def _order(row: Verdict, judges: Sequence[str], place: dict[str, int]) -> tuple[object, ...]:
    pair = sorted((place[row.policy_a], place[row.policy_b]))
    return (*pair, judges.index(row.judge), row.labeler, row.index_a, row.index_b, row.first)


def _verdict(row: Verdict, looks: dict[str, Policy]) -> ShownVerdict:
    a, b = looks[row.policy_a], looks[row.policy_b]
    share = row.preference_a
    winner, kind = None, "failed"
    if not row.failure:
        kind = "tied" if share == 0.5 else "won"
        winner = None if share == 0.5 else (a if share > 0.5 else b)
    parts = [f"{a.title} and {b.title}"] if len(looks) > 2 else []
    parts += [f"responses {row.index_a + 1} and {row.index_b + 1}"] if row.index_a or row.index_b else []
    parts += [f"{(a if row.first == 'a' else b).title} shown first"] if row.first else []
    parts += [row.failure] if row.failure else []
    parts += [f"{percent(max(share, 1 - share))} sure"] if not row.failure and share not in (0, 0.5, 1) else []
    if not (math.isnan(row.score_a) or math.isnan(row.score_b)):
        parts.append(f"scores {number(float(row.score_a))} and {number(float(row.score_b))}")
    return ShownVerdict(row.judge, row.labeler, kind, winner, "; ".join(parts))


def _outcomes(
    verdicts: Sequence[Verdict], folder: ComparisonFolder, looks: dict[str, Policy], place: dict[str, int]
) -> tuple[tuple[Chip, ...], str]:
    """Chips and filter words: what each judge's verdicts on each pair come to, by their mean."""
    shares: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    words, failed = [], set()
    for row in verdicts:
        a, b, judge = place[row.policy_a], place[row.policy_b], folder.judges.index(row.judge)
        key = (min(a, b), max(a, b), judge)
        if row.failure:
            words.append(f"{key[0]}-{key[1]}:{judge}:failed")
            failed.add(judge)
        else:
            shares[key].append(row.preference_a if a < b else 1 - row.preference_a)
    won: dict[int, list[int | None]] = defaultdict(list)
    for (a, b, judge), values in sorted(shares.items()):
        mean = math.fsum(values) / len(values)
        winner = None if abs(mean - 0.5) < 1e-9 else (a if mean > 0.5 else b)
        won[judge].append(winner)
        words.append(f"{a}-{b}:{judge}:{'tie' if winner is None else winner}")
    chips = [_chip(folder.judges[judge], won.get(judge, []), folder, looks) for judge in sorted(set(won) | failed)]
    return tuple(chips), " ".join(sorted(set(words)))


def _chip(judge: str, winners: Sequence[int | None], folder: ComparisonFolder, looks: dict[str, Policy]) -> Chip:
    """The winner of most pairs; a tie where none has more than the next."""
    if not winners:
        return Chip(judge, "failed", None)
    counts = sorted(((winners.count(place), place) for place in set(winners) if place is not None), reverse=True)
    if not counts or (len(counts) > 1 and counts[0][0] == counts[1][0]):
        return Chip(judge, "tied", None)
    return Chip(judge, "won", looks[folder.policies[counts[0][1]]])


def verdicts_disagree(verdicts: Sequence[Verdict]) -> bool:
    """Whether two verdicts on the same two responses prefer different ones, be it of two judges, labelers or orders."""
    preferred: dict[tuple[tuple[str, int], ...], set[tuple[str, int]]] = defaultdict(set)
    for row in verdicts:
        if not row.failure and row.preference_a != 0.5:
            a, b = (row.policy_a, row.index_a), (row.policy_b, row.index_b)
            preferred[tuple(sorted((a, b)))].add(a if row.preference_a > 0.5 else b)
    return any(len(found) > 1 for found in preferred.values())
