"""The reviews world's judges: a classifier fitted to human labels, and scripted labelers that follow it with noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heed.worlds.reviews_text import LabeledText, draw
from preferences.records import Answer, ShownTask

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

MILLISECONDS_PER_WORD = 252  # silent reading of English, 238 words a minute (Brysbaert 2019)
INVERSE_REGULARIZATION = 10.0


class SentimentClassifier:
    """A classifier of sentiment fitted to human labels: logistic regression on TF-IDF of words and word pairs.

    It is deterministic (liblinear's primal solver uses no randomness) and picklable.
    """

    def __init__(self, labeled: Sequence[LabeledText]) -> None:
        if len({text.positive for text in labeled}) != 2:
            raise ValueError(f"{len(labeled)} labeled texts of one sentiment; a classifier needs both")
        from sklearn.feature_extraction.text import TfidfVectorizer  # takes half a second, and only this world needs it
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        self._pipeline: Pipeline = make_pipeline(
            TfidfVectorizer(ngram_range=(1, 2)),
            LogisticRegression(C=INVERSE_REGULARIZATION, solver="liblinear", random_state=0),
        )
        self._pipeline.fit([text.text for text in labeled], [text.positive for text in labeled])

    def log_odds(self, texts: Sequence[str]) -> list[float]:
        """Returns log p(positive) - log p(negative) of each text, in nats. Positive texts are above 0."""
        if not texts:
            return []
        return [float(value) for value in self._pipeline.decision_function(list(texts))]


@dataclass(frozen=True)
class ReviewLabeler:
    """A scripted labeler: a classifier's log-odds of the whole sentence, plus noise of its own.

    The noise is Gumbel with scale `noise`, so a response whose log-odds are higher by d wins with probability
    sigmoid(d / noise), as in Bradley and Terry (1952). `noise = 0` gives the classifier itself. The noise is a hash of
    (seed, name, task, response), so an answer depends neither on earlier tasks nor on the order of the responses.
    `position_bias` is added to the response shown first.
    """

    name: str
    classifier: SentimentClassifier
    seed: int
    noise: float  # nats
    tie_threshold: float  # nats
    position_bias: float  # nats

    def judge(self, shown: ShownTask) -> Answer:
        """Ranks from 1 (most positive); responses within `tie_threshold` of the best of their group are tied."""
        prompt = shown.prompt[-1].content
        log_odds = self.classifier.log_odds([join(prompt, response) for response in shown.responses])
        utilities = [
            value + self.noise * self._gumbel(shown.task_id, response) + (self.position_bias if place == 0 else 0.0)
            for place, (value, response) in enumerate(zip(log_odds, shown.responses, strict=True))
        ]
        num_words = len(prompt.split()) + sum(len(response.split()) for response in shown.responses)
        return Answer(_ranks(utilities, self.tie_threshold), MILLISECONDS_PER_WORD * num_words)

    def _gumbel(self, task_id: str, response: str) -> float:
        uniform = (draw("labeler", self.seed, self.name, task_id, response) + 0.5) / 2**64  # in (0, 1)
        # The highest draws would round to 1.0 in double precision, for which the Gumbel value is infinite.
        return -math.log(-math.log(min(uniform, 1 - 2**-53)))


def join(prompt: str, response: str) -> str:
    """Joins prompt and response into the sentence that the judges read."""
    return f"{prompt} {response}".strip()


def _ranks(utilities: Sequence[float], tie_threshold: float) -> tuple[int, ...]:
    ranks = [0] * len(utilities)
    rank, best_of_group = 0, math.inf
    for index in sorted(range(len(utilities)), key=lambda index: -utilities[index]):
        if rank == 0 or best_of_group - utilities[index] > tie_threshold:
            rank += 1
            best_of_group = utilities[index]
        ranks[index] = rank
    return tuple(ranks)
