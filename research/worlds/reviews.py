"""The reviews world: real text, and judgments derived from human labels.

A policy continues the first words of a sentence from a film review, and should make it favourable. Pretraining reads
whole film reviews and, for variety, some other texts. SFT continues review sentences. The labelers follow a classifier
fitted to the human labels of one half of a set of snippets, with noise, and the final judge is a classifier fitted to
the other half. A slice of the snippets that nothing else sees is written as pairs whose order comes from human labels.

A limitation: the snippets of both halves are in the SFT data (their text, never their labels), so the judge was fitted
to sentences that the policy imitates. Only the unseen pairs are free of that.

Every choice of which sentence goes where hashes a seed with the text's words. So it depends neither on a file's order
nor on a generator's state, and two texts that differ only in case or punctuation always land on the same side.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from files.atomic import write_jsonl
from files.rows import is_file_name, read_source
from heed.worlds.world import Turns
from preferences.records import Answer, Labeler, ShownTask

SENTIMENTS = ("positive", "negative")
SPLIT_SEED = 0  # the halves and the unseen pairs are the same in every run
SHINGLE_WORDS = 8  # the least words of a sentence that no stage may see, so that a match in a text is no coincidence

# Some snippets are Windows-1252 that was read as Latin-1, which turned the quotes and dashes into control characters.
_CONTROLS = {
    code: bytes([code]).decode("cp1252", errors="replace").translate(str.maketrans("‘’“”–—", "''\"\"--"))
    for code in range(0x80, 0xA0)
}
_ARTICLES = frozenset({"a", "an", "the"})

_SENTENCE_END = re.compile(r"\n|(?<=[.!?])\s+(?=[A-Z\"'])")

T = TypeVar("T")


@dataclass(frozen=True)
class LabeledText:
    """A sentence or a review, and whether people called it positive."""

    text: str
    positive: bool

    @property
    def sentiment(self) -> str:
        return SENTIMENTS[0] if self.positive else SENTIMENTS[1]


@dataclass(frozen=True)
class SentenceSplit:
    """The human-labeled sentences: for fitting the labelers, for fitting the judge, and those that no stage sees."""

    labeler: tuple[LabeledText, ...]
    judge: tuple[LabeledText, ...]
    unseen: tuple[LabeledText, ...]


def words_of(text: str) -> tuple[str, ...]:
    """Returns lower-case runs of letters and digits, without articles. Two texts with equal words count as the same."""
    return tuple(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in _ARTICLES)


def draw(*parts: object) -> int:
    """Returns a number in [0, 2^64) from a hash of `parts`: this module's only source of randomness."""
    # JSON quotes and separates the parts, so that ("a", "bc") and ("ab", "c") differ.
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def shuffled(items: Iterable[T], key: Callable[[T], str], *seed: object) -> list[T]:
    """Returns `items` in an order that depends only on `seed` and each item's key."""
    return sorted(items, key=lambda item: (draw(*seed, key(item)), key(item)))


def require_source(source: Path | None, field: str) -> None:
    """Raise ValueError if `source`, the value of the config field `field`, looks like a file but does not exist."""
    if source is not None and is_file_name(str(source)) and not source.is_file():
        raise ValueError(f"{field} = {str(source)!r}: no such file (looked for {source.absolute()})")


def read_labeled(source: Path, field: str) -> list[LabeledText]:
    """Reads texts with labels. `field` is the config field that names the source.

    Raises: ValueError naming the field, the source and the row.
    """
    return [LabeledText(_text_of(row, where), _is_positive(row, where)) for where, row in _read_rows(source, field)]


def _is_positive(row: dict[str, Any], where: str) -> bool:
    """Reads `label`, as on the hub, or `sentiment`."""
    if "label" in row:
        if row["label"] not in (0, 1):
            raise ValueError(f"{where}: label is {row['label']!r}; expected 1 (positive) or 0 (negative)")
        return bool(row["label"])
    sentiment = row.get("sentiment")
    if sentiment not in SENTIMENTS:
        raise ValueError(f"{where}: sentiment is {sentiment!r}; expected 'positive' or 'negative'")
    return bool(sentiment == SENTIMENTS[0])


def _read_rows(source: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for where, row in read_source(str(source)):
            yield f"{field}: {where}", row
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _text_of(row: dict[str, Any], where: str) -> str:
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: text is {text!r:.60}; expected a string that is not empty")
    return text.replace("<br />", "\n").translate(_CONTROLS)  # IMDb's reviews are pieces of web pages


def split_sentences(
    sentences: Sequence[LabeledText], num_unseen_per_label: int, length_words: tuple[int, int]
) -> SentenceSplit:
    """Splits into two halves and a slice that no stage sees. Equal texts (see `words_of`) are on the same side.

    The unseen slice has `num_unseen_per_label` positive and equally many negative sentences with a length within
    `length_words` (both ends included). Texts that people labeled both ways are dropped.
    """
    by_words: dict[tuple[str, ...], LabeledText] = {}
    labels: dict[tuple[str, ...], set[bool]] = {}
    for sentence in sorted(sentences, key=lambda sentence: sentence.text):
        words = words_of(sentence.text)
        by_words.setdefault(words, sentence)
        labels.setdefault(words, set()).add(sentence.positive)
    unique = [by_words[words] for words, given in labels.items() if len(given) == 1 and words]
    ordered = shuffled(unique, _key, "split", SPLIT_SEED)
    unseen: list[LabeledText] = []
    for positive in (True, False):
        fit = [s for s in ordered if s.positive == positive and _can_be_unseen(s.text, length_words)]
        if len(fit) < num_unseen_per_label:
            raise ValueError(
                f"num_human_pairs is {num_unseen_per_label}; the source `sentences` has only {len(fit)} "
                f"{SENTIMENTS[not positive]} ones of {length_words[0]} to {length_words[1]} words"
            )
        unseen += fit[:num_unseen_per_label]
    hidden = {sentence.text for sentence in unseen}
    rest = [sentence for sentence in ordered if sentence.text not in hidden]
    halves: tuple[list[LabeledText], list[LabeledText]] = ([], [])
    for sentence in rest:
        halves[draw("half", SPLIT_SEED, _key(sentence)) % 2].append(sentence)
    return SentenceSplit(tuple(halves[0]), tuple(halves[1]), tuple(unseen))


def _key(sentence: LabeledText) -> str:
    return " ".join(words_of(sentence.text))


def _can_be_unseen(text: str, length_words: tuple[int, int]) -> bool:
    return _has_length(text, length_words) and len(words_of(text)) >= SHINGLE_WORDS


def _has_length(text: str, length_words: tuple[int, int]) -> bool:
    return length_words[0] <= len(text.split()) <= length_words[1]


class Finder:
    """Finds whether a text contains one of the given sentences, ignoring case, punctuation and line breaks."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._by_shingle: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for sentence in sentences:
            words = words_of(sentence)
            if len(words) < SHINGLE_WORDS:
                raise ValueError(
                    f"sentence {sentence!r} has {len(words)} words; at least {SHINGLE_WORDS} were expected"
                )
            self._by_shingle.setdefault(words[:SHINGLE_WORDS], []).append(words)

    def occurs_in(self, text: str) -> bool:
        """Whether any of the sentences is in `text`, as a run of the same words."""
        words = words_of(text)
        return any(
            words[start : start + len(sentence)] == sentence
            for start in range(len(words) - SHINGLE_WORDS + 1)
            for sentence in self._by_shingle.get(words[start : start + SHINGLE_WORDS], ())
        )


def sentences_of(reviews: Iterable[LabeledText], length_words: tuple[int, int]) -> list[LabeledText]:
    """Returns the reviews' sentences that are worth continuing, with the review's label.

    A sentence ends with its line, or before a capital letter. It keeps those with a length within `length_words` that
    start with a letter and end like a sentence. One that occurs twice is a reviewer's boilerplate and is dropped.
    """
    found: dict[tuple[str, ...], LabeledText] = {}
    times: Counter[tuple[str, ...]] = Counter()
    for review in reviews:
        for line in _SENTENCE_END.split(review.text):
            text = " ".join(line.split())
            words = words_of(text)
            times[words] += 1
            if _has_length(text, length_words) and text[0].isalpha() and text[-1] in ".!?":
                found[words] = LabeledText(text, review.positive)
    return [sentence for words, sentence in found.items() if times[words] == 1]


def cut(sentence: str, num_words: int) -> tuple[str, str]:
    """Splits a sentence into its first `num_words` words and the rest, without a space at the seam.

    Raises: ValueError if no word is left for the rest.
    """
    words = sentence.split()
    if not 1 <= num_words < len(words):
        raise ValueError(f"num_words is {num_words}; expected 1 to {len(words) - 1} for {sentence!r}")
    return " ".join(words[:num_words]), " ".join(words[num_words:])


if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

Count = Annotated[int, Field(ge=1)]
WordRange = tuple[Count, Count]  # both ends included
MILLISECONDS_PER_WORD = 252  # silent reading of English, 238 words a minute (Brysbaert 2019)
INVERSE_REGULARIZATION = 10.0
TIE_NATS = 0.02  # utilities closer than this are a tie


class ReviewsConfig(BaseModel):
    """The reviews world's texts, which are hub ids or files (JSONL or Parquet, also .gz), and how much of them is used.

    Labels are `label`, 1 for positive and 0 for negative, or `sentiment`, "positive" or "negative".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sentences: Path = Field(
        description="Hub id or file of labeled sentences or snippets, with the fields `text` and `label`."
    )
    reviews: Path = Field(description="Hub id or file of labeled reviews, with the fields `text` and `label`.")
    num_collect_prompts: Count = Field(default=6000, description="Prompts of the collect stage.")
    num_ppo_prompts: Count = Field(default=3000, description="Prompts of PPO.")
    num_compare_prompts: Count = Field(default=400, description="Prompts of the compare stage.")
    num_human_pairs: Count = Field(default=500, description="Pairs with human labels that reward models are tested on.")
    max_demonstrations: Count = Field(default=30_000, description="Maximum number of demonstrations for SFT.")
    max_pretrain_texts: Count = Field(default=2000, description="Maximum number of reviews to pretrain on.")
    heldout_share: float = Field(default=0.05, gt=0, lt=1, description="Fraction of the reviews that is held out.")
    sentence_words: WordRange = Field(
        default=(8, 28),
        description="Shortest and longest sentence, in words; 28 words are about 40 tokens of a byte BPE of 4,096.",
    )
    prompt_words: WordRange = Field(default=(3, 5), description="Shortest and longest prompt, in words.")
    num_labelers: Count = Field(default=3, description="Scripted labelers.")
    labeler_noise: float = Field(
        default=0.6, ge=0, description="Labelers' noise in nats; at 0.6 two labelers agree on .73 of the continuations."
    )

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        for name in ("sentence_words", "prompt_words"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} is [{low}, {high}]; expected the smaller number first")
        if self.prompt_words[1] >= self.sentence_words[0]:
            raise ValueError(
                f"prompt_words[1] is {self.prompt_words[1]}; expected less than the shortest sentence,"
                f" sentence_words[0] = {self.sentence_words[0]}, so that words are left for a response"
            )
        return self


class SentimentClassifier:
    """A classifier of sentiment fitted to human labels: logistic regression on TF-IDF of words and word pairs.

    It is deterministic (liblinear's primal solver uses no randomness) and picklable.
    """

    def __init__(self, labeled: Sequence[LabeledText]) -> None:
        if len({text.positive for text in labeled}) != 2:
            raise ValueError(
                f"{len(labeled)} labeled texts without both sentiments; a classifier needs positive and negative ones"
            )
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
    """

    name: str
    classifier: SentimentClassifier
    seed: int
    noise: float  # nats
    tie_threshold: float  # nats

    def judge(self, shown: ShownTask) -> Answer:
        """Ranks from 1 (most positive); responses within `tie_threshold` of the best of their group are tied."""
        prompt = shown.prompt[-1].content
        log_odds = self.classifier.log_odds([join(prompt, response) for response in shown.responses])
        utilities = [
            value + self.noise * self._gumbel(shown.task_id, response)
            for value, response in zip(log_odds, shown.responses, strict=True)
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


class ReviewsWorld:
    """Text, prompts, labelers and a judge from film reviews. Files are read when first needed and then cached."""

    config_type: ClassVar[type[BaseModel]] = ReviewsConfig

    def __init__(self, config: ReviewsConfig) -> None:
        for field in ("sentences", "reviews"):
            require_source(getattr(config, field), field)
        self.config = config

    @property
    def judge_names(self) -> tuple[str, ...]:
        return ("judge",)

    def describe(self) -> str:
        """Returns a sentence on what the gold scorer measures."""
        return (
            "judge: how favourable the whole sentence is, by a classifier fitted to human labels that neither the"
            " labelers nor the reward model saw (log-odds in nats; above 0 is positive)"
        )

    @cached_property
    def split(self) -> SentenceSplit:
        """The labeled snippets: the labelers', the judge's, and those that no stage sees."""
        config = self.config
        labeled = read_labeled(config.sentences, "sentences")
        return split_sentences(labeled, config.num_human_pairs, config.sentence_words)

    @cached_property
    def _labeler_classifier(self) -> SentimentClassifier:
        return SentimentClassifier(self.split.labeler)

    @cached_property
    def _judge_classifier(self) -> SentimentClassifier:
        return SentimentClassifier(self.split.judge)

    def gold_scores(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Returns the judge's log-odds that each whole sentence is positive, in nats. Higher is better."""
        return self._judge_classifier.log_odds(_sentences(prompts, responses))

    def label_truth(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Returns the log-odds that the labelers follow, without their noise, in nats. Higher is better."""
        return self._labeler_classifier.log_odds(_sentences(prompts, responses))

    @property
    def pass_mark(self) -> float:
        """Log-odds above 0: the judge calls the sentence positive."""
        return 0.0

    def labelers(self, seed: int) -> list[Labeler]:
        """Returns scripted labelers reviewer-1, reviewer-2, ..., with the same opinion and independent noise."""
        config = self.config
        return [
            ReviewLabeler(
                name=f"reviewer-{number}",
                classifier=self._labeler_classifier,
                seed=seed,
                noise=config.labeler_noise,
                tie_threshold=TIE_NATS,
            )
            for number in range(1, config.num_labelers + 1)
        ]

    def write_data(self, folder: Path, seed: int) -> None:
        """Writes every stage's files into `folder`: the same bytes for the same files, config and seed.

        - pretrain, pretrain_heldout: whole reviews.
        - demonstrations, demonstrations_heldout: a sentence's first words and their continuation.
        - collect_prompts, ppo_prompts, compare_prompts: distinct first words of sentences that are not among the
          demonstrations.
        - demonstrations_heldout and compare_prompts come from held-out reviews, from lines in no training text.
        - human_pairs: {"positive", "negative"}, sentences that people labeled and that are in no other file.
        """
        config = self.config
        folder.mkdir(parents=True, exist_ok=True)
        train_reviews, heldout_reviews = self._reviews(seed)
        sentences = sentences_of(train_reviews, config.sentence_words)
        seen = {words_of(line) for review in train_reviews for line in review.text.splitlines()}
        seen |= {words_of(snippet.text) for snippet in self.split.labeler + self.split.judge}
        heldout = [s for s in sentences_of(heldout_reviews, config.sentence_words) if words_of(s.text) not in seen]

        taken: set[tuple[str, ...]] = set()
        compare, heldout = self._prompts("compare", heldout, config.num_compare_prompts, taken, seed)
        collect, sentences = self._prompts("collect", sentences, config.num_collect_prompts, taken, seed)
        ppo, sentences = self._prompts("ppo", sentences, config.num_ppo_prompts, taken, seed)
        for name, prompts in (("collect", collect), ("ppo", ppo), ("compare", compare)):
            write_jsonl(folder / f"{name}_prompts.jsonl", prompts)

        demonstrations = self._snippets() + sentences
        demonstrations = shuffled(demonstrations, _text, "demonstrations", seed)[: config.max_demonstrations]
        write_jsonl(folder / "demonstrations.jsonl", (self._demonstration(s, seed) for s in demonstrations))
        write_jsonl(folder / "demonstrations_heldout.jsonl", (self._demonstration(s, seed) for s in heldout))

        texts = [review.text for review in train_reviews[: config.max_pretrain_texts]]
        write_jsonl(folder / "pretrain.jsonl", ({"text": text} for text in shuffled(texts, str, "pretrain", seed)))
        write_jsonl(folder / "pretrain_heldout.jsonl", ({"text": review.text} for review in heldout_reviews))
        write_jsonl(folder / "human_pairs.jsonl", self.human_pairs())

    def human_pairs(self) -> list[dict[str, str]]:
        """Returns pairs of snippets that people labeled positive and negative, from the slice that no stage sees."""
        sides = [[s.text for s in self.split.unseen if s.positive == positive] for positive in (True, False)]
        return [{"positive": up, "negative": down} for up, down in zip(*sides, strict=True)]

    def judged_pairs(self) -> list[tuple[Turns, Turns]]:
        """Returns `human_pairs` as conversations, cut where a prompt of this world would end."""
        return [(self._turns(pair["positive"]), self._turns(pair["negative"])) for pair in self.human_pairs()]

    def _turns(self, sentence: str) -> Turns:
        prompt, response = cut(sentence, self.config.prompt_words[1])
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]

    @cached_property
    def _unseen(self) -> Finder:
        return Finder(snippet.text for snippet in self.split.unseen)

    def _reviews(self, seed: int) -> tuple[list[LabeledText], list[LabeledText]]:
        """Returns training and held-out reviews, each text once, without those that quote an unseen snippet."""
        unique = {words_of(review.text): review for review in read_labeled(self.config.reviews, "reviews")}
        reviews = [review for review in unique.values() if not self._unseen.occurs_in(review.text)]
        reviews = shuffled(reviews, _text, "reviews", seed)
        num_heldout = round(self.config.heldout_share * len(reviews))
        if not 0 < num_heldout < len(reviews):
            raise ValueError(
                f"heldout_share is {self.config.heldout_share}, which holds out {num_heldout} of {len(reviews)}"
                " reviews; expected at least one on either side"
            )
        return reviews[num_heldout:], reviews[:num_heldout]

    def _snippets(self) -> list[LabeledText]:
        """Returns the snippets of both halves with a length within `sentence_words`."""
        low, high = self.config.sentence_words
        return [s for s in self.split.labeler + self.split.judge if low <= len(s.text.split()) <= high]

    def _cut(self, sentence: LabeledText, seed: int) -> tuple[str, str]:
        low, high = self.config.prompt_words
        return cut(sentence.text, low + draw("cut", seed, sentence.text) % (high - low + 1))

    def _demonstration(self, sentence: LabeledText, seed: int) -> Mapping[str, object]:
        prompt, response = self._cut(sentence, seed)
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}

    def _prompts(
        self, name: str, sentences: Sequence[LabeledText], num_prompts: int, taken: set[tuple[str, ...]], seed: int
    ) -> tuple[list[dict[str, object]], list[LabeledText]]:
        """Returns `num_prompts` rows whose first words are not in `taken`, and the remaining sentences.

        It adds the rows' first words to `taken`. A row's kind is the sentiment of its review, so that metrics can be
        split by it.
        """
        rows: list[dict[str, object]] = []
        rest: list[LabeledText] = []
        for sentence in shuffled(sentences, _text, name, seed):
            prompt, _ = self._cut(sentence, seed)
            if len(rows) == num_prompts or words_of(prompt) in taken:
                rest.append(sentence)
                continue
            taken.add(words_of(prompt))
            rows.append(
                {
                    "prompt_id": f"{name}-{len(rows) + 1:05d}",
                    "messages": [{"role": "user", "content": prompt}],
                    "kind": f"{sentence.sentiment}_review",
                }
            )
        if len(rows) < num_prompts:
            raise ValueError(
                f"num_{name}_prompts is {num_prompts}; the reviews hold only {len(rows)} sentences of"
                f" {self.config.sentence_words[0]} to {self.config.sentence_words[1]} words with unused openings"
            )
        return rows, rest


def _text(labeled: LabeledText) -> str:
    return labeled.text


def _sentences(prompts: Sequence[str], responses: Sequence[str]) -> list[str]:
    if len(prompts) != len(responses):
        raise ValueError(f"prompts has {len(prompts)} entries; expected {len(responses)}, one for each response")
    return [join(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
