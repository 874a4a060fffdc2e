"""Scripted labelers, who see the gold score through noise, position bias and taste.

    utility = gold + shared taste + own taste + opinion + position bias + noise

Shared taste (all labelers slightly prefer longer and more cheerful answers) is what a reward model learns from their
labels in addition to the gold score, and so what a policy can over-optimise. Own taste, opinion and noise make two
labelers disagree. Only noise makes a labeler disagree with themselves on a repeated task; an opinion about a response
stays the same. A lazy labeler answers some tasks unread, in under a second: in the order shown, or at random. So
everything that label statistics estimate (docs/labels-quality.md) is known here by construction.

All randomness is a hash of (seed, labeler, task, response) and does not depend on the order of calls, so a resumed run
gets the same labels.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from preferences.records import Answer, ShownTask

GoldScorer = Callable[[Sequence[str], Sequence[str]], list[float]]


@dataclass(frozen=True)
class LabelerConfig:
    """How scripted labelers judge. All weights are in units of the gold score, whose range is 0 to 1."""

    noise: float = 0.22  # standard deviation of the noise on each response
    position_bias: float = 0.04  # bonus of the response shown first over the last
    shared_length: float = 0.2  # all labelers' bonus for a response of `length_words`
    shared_cheer: float = 0.08  # all labelers' bonus for each exclamation mark, up to three
    own_taste: float = 0.05  # standard deviation of the weights between labelers
    opinion: float = 0.0  # standard deviation of a labeler's lasting opinion of each response
    lazy_first: float = 0.0  # fraction of tasks ranked in the order shown, without reading
    lazy_random: float = 0.0  # fraction of tasks ranked at random, without reading
    tie_threshold: float = 0.02  # utilities closer than this are a tie
    # Whether labelers also rate each response from 1 to 7: in proportion to its utility from 0 to 1, or, if they have
    # not read the task, from 7 down to 1 in the order of their ranks.
    rates: bool = False
    length_words: int = 40  # length that earns the whole length bonus

    def __post_init__(self) -> None:
        assert self.lazy_first + self.lazy_random <= 1, f"fractions of all tasks, not {self}"


@dataclass(frozen=True)
class Taste:
    """What a labeler likes in addition to the gold score. The weights are in its units."""

    length: float  # for a response of length_words, in proportion up to twice that
    cheer: float  # for each exclamation mark, up to three
    favourite: str
    favourite_weight: float

    def utility(self, response: str, length_words: int) -> float:
        words = response.split()
        liked = self.favourite in (word.strip(".,!?") for word in words)
        length = min(len(words) / length_words, 2.0)
        return self.length * length + self.cheer * min(response.count("!"), 3) + self.favourite_weight * liked


def uniform(*key: object) -> float:
    """Returns a number in (0, 1) that is a pure function of the key and uniform over keys."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2.0**64


def draw_taste(config: LabelerConfig, seed: int, name: str, favourites: Sequence[str]) -> Taste:
    """Draws the shared taste plus the labeler's own, from (seed, name)."""
    rng = random.Random(f"taste/{seed}/{name}")
    return Taste(
        length=config.shared_length + rng.gauss(0.0, config.own_taste),
        cheer=config.shared_cheer + rng.gauss(0.0, config.own_taste),
        favourite=rng.choice(favourites),
        favourite_weight=abs(rng.gauss(0.0, config.own_taste)),
    )


class ScriptedLabeler:
    """A labeler with known noise. Implements preferences.records.Labeler."""

    def __init__(self, name: str, gold: GoldScorer, config: LabelerConfig, taste: Taste, seed: int) -> None:
        self._name = name
        self._gold = gold
        self._config = config
        self._taste = taste
        self._seed = seed

    @property
    def name(self) -> str:
        return self._name

    def utilities(self, shown: ShownTask) -> list[float]:
        """Returns the labeler's utility of each response, in the order shown; higher is better."""
        prompt = next(message.content for message in reversed(shown.prompt) if message.role == "user")
        gold = self._gold([prompt] * len(shown.responses), shown.responses)
        last = max(1, len(shown.responses) - 1)
        return [
            score
            + self._taste.utility(response, self._config.length_words)
            + self._config.position_bias * (1.0 - position / last)
            + self._normal(self._config.opinion, "opinion", response)
            + self._normal(self._config.noise, "noise", shown.task_id, response)
            for position, (score, response) in enumerate(zip(gold, shown.responses, strict=True))
        ]

    def judge(self, shown: ShownTask) -> Answer:
        """Ranks by utility, or unread. A response within the tie threshold of the next better one shares its rank."""
        mood = uniform("mood", self._seed, self._name, shown.task_id)
        if mood < self._config.lazy_first + self._config.lazy_random:
            return self._answer_unread(shown, in_order=mood < self._config.lazy_first)
        utilities = self.utilities(shown)
        order = sorted(range(len(utilities)), key=lambda i: -utilities[i])
        ranks = [1] * len(utilities)
        for better, worse in itertools.pairwise(order):
            tied = utilities[better] - utilities[worse] < self._config.tie_threshold
            ranks[worse] = ranks[better] + (not tied)
        ratings = tuple(min(7.0, max(1.0, 1.0 + round(6 * utility))) for utility in utilities)
        return Answer(tuple(ranks), self._milliseconds(shown), ratings if self._config.rates else ())

    def _answer_unread(self, shown: ShownTask, *, in_order: bool) -> Answer:
        ranks = list(range(1, len(shown.responses) + 1))
        if not in_order:
            random.Random(f"unread/{self._seed}/{self._name}/{shown.task_id}").shuffle(ranks)
        milliseconds = 300 + 600 * uniform("unread", self._seed, self._name, shown.task_id)
        step = 6 / max(1, len(ranks) - 1)
        ratings = tuple(float(round(7 - step * (rank - 1))) for rank in ranks)
        return Answer(tuple(ranks), round(milliseconds), ratings if self._config.rates else ())

    def _normal(self, deviation: float, purpose: str, *key: object) -> float:
        """Draws from N(0, deviation²), as a pure function of the labeler, the purpose and the key."""
        return deviation * NormalDist().inv_cdf(uniform(purpose, self._seed, self._name, *key))

    def _milliseconds(self, shown: ShownTask) -> int:
        """Models reading at about 240 words per minute and 1.5 seconds to decide, times the labeler's mood."""
        num_words = sum(len(text.split()) for text in (*shown.responses, *(m.content for m in shown.prompt)))
        mood = 0.7 + 0.6 * uniform("pace", self._seed, self._name, shown.task_id)
        return round(mood * (1500 + 250 * num_words))


def draw_labelers(
    gold: GoldScorer, config: LabelerConfig, num_labelers: int, seed: int, favourites: Sequence[str]
) -> list[ScriptedLabeler]:
    """Draws labelers named labeler-1, labeler-2, ..., each with its own taste and a favourite word of `favourites`."""
    names = [f"labeler-{number}" for number in range(1, num_labelers + 1)]
    return [ScriptedLabeler(name, gold, config, draw_taste(config, seed, name, favourites), seed) for name in names]
