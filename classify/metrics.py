"""How well predictions agree with held-out labels, with 95% intervals.

    sequence   accuracy, and macro F1: the mean of the labels' F1
    token      precision, recall and F1 of entities, as CoNLL's `conlleval` counts: an entity is right if its type and
               both its ends are (Tjong Kim Sang & De Meulder 2003, arXiv cs/0306050)
    span       exact match and F1 of answers as SQuAD 2.0's own script counts (Rajpurkar et al. 2018, arXiv 1806.03822):
               without case, punctuation and articles; the best over the answers that people gave; and for a question
               without an answer 1 if none is predicted, else 0

Shape letters: N texts, sentences or questions; K labels.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from classify.config import OUTSIDE
from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import NUM_RESAMPLES, clustered_mean, percentiles, resampled_sums, share_interval


@dataclass(frozen=True)
class LabelScore:
    """Precision, recall and F1 of one label, or of one type of entity; `num_gold` are in the held-out data."""

    precision: float
    recall: float
    f1: float
    num_gold: int


Metrics = tuple[dict[str, Interval], dict[str, LabelScore]]  # by name, and by label


def sequence_metrics(predicted: Sequence[str], gold: Sequence[str], seed: int) -> Metrics:
    """Returns accuracy and macro F1 over the labels that occur, as gold or predicted; and each label's scores."""
    labels = sorted({*predicted, *gold})
    counts_NK3 = np.zeros((len(gold), len(labels), 3))
    for row, (found, right) in enumerate(zip(predicted, gold, strict=True)):
        counts_NK3[row, labels.index(found), 1] += 1
        counts_NK3[row, labels.index(right), 2] += 1
        counts_NK3[row, labels.index(right), 0] += found == right
    accuracy = share_interval(counts_NK3[:, :, 0].sum(axis=1))
    macro = _resampled(counts_NK3, lambda sums_K3: f1_of(sums_K3).mean(axis=-1), seed)
    return {"accuracy": accuracy, "macro_f1": macro}, _by_label(labels, counts_NK3)


def token_metrics(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], seed: int) -> Metrics:
    """Returns precision, recall and F1 of all entities, resampling sentences; and the scores of each type."""
    predicted_spans, gold_spans = ([entities(tags) for tags in sentences] for sentences in (predicted, gold))
    kinds = sorted({kind for spans in (*predicted_spans, *gold_spans) for kind, _, _ in spans})
    counts_NK3 = np.zeros((len(gold), len(kinds), 3))
    for row, parts in enumerate(zip(predicted_spans, gold_spans, strict=True)):
        for column, some in enumerate((parts[0] & parts[1], *parts)):
            for kind, _, _ in some:
                counts_NK3[row, kinds.index(kind), column] += 1
    measures: dict[str, Callable[[Floats], Floats]] = {
        "f1": f1_of,
        "precision": lambda sums_3: _ratio(sums_3[..., 0], sums_3[..., 1]),
        "recall": lambda sums_3: _ratio(sums_3[..., 0], sums_3[..., 2]),
    }
    micro_N3 = counts_NK3.sum(axis=1)
    return {name: _resampled(micro_N3, measure, seed) for name, measure in measures.items()}, _by_label(
        kinds, counts_NK3
    )


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Returns (type, first word, last word) of each entity. As in `conlleval`, I- after another type opens one too."""
    spans, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        mark, _, here = tag.partition("-")
        if kind and (mark != "I" or here != kind):
            spans.add((kind, start, place - 1))
            kind = ""
        if here and not kind:
            start, kind = place, here
    return spans


def span_metrics(predicted: Sequence[str], answers: Sequence[Sequence[str]], contexts: Sequence[str]) -> Metrics:
    """Returns exact match and F1 over all questions, and over those with and without an answer. A prediction of "" says
    that there is none. Questions about one text are a cluster in the intervals.
    """
    matches = zip(predicted, answers, strict=True)
    pairs = [(exact_match(text, golds), token_f1(text, golds)) for text, golds in matches]
    scores_NM = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    numbers = {text: number for number, text in enumerate(dict.fromkeys(contexts))}
    cluster_N = np.array([numbers[text] for text in contexts], dtype=np.int64)
    has_answer_N = np.array([any(map(normalized, golds)) for golds in answers], dtype=np.bool_)
    metrics = dict[str, Interval]()
    everything = np.ones_like(has_answer_N)
    for prefix, chosen_N in (("", everything), ("answerable_", has_answer_N), ("unanswerable_", ~has_answer_N)):
        for column, name in enumerate(("exact_match", "f1")):
            if chosen_N.any() and (prefix != "unanswerable_" or column):  # without an answer, both are the same
                mean = clustered_mean(scores_NM[chosen_N, column], cluster_N[chosen_N])
                metrics[prefix + name] = Interval(mean.mean, *np.clip([mean.low, mean.high], 0, 1).tolist())
    return metrics, {}


def f1_of(counts_3: Floats) -> Floats:
    """Returns 2·right / (predicted + gold) of counts [..., 3]; 0 where there is neither."""
    return _ratio(2 * counts_3[..., 0], counts_3[..., 1] + counts_3[..., 2])


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    ratio: Floats = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
    return ratio


def _resampled(counts_N: Floats, measure: Callable[[Floats], Floats], seed: int) -> Interval:
    """Returns a measure of the counts' sum over N rows, with the percentile interval over resamples of the rows."""
    flat_NS = counts_N.reshape(len(counts_N), -1)
    resampled = resampled_sums(flat_NS, seed=seed, num_resamples=NUM_RESAMPLES).reshape(-1, *counts_N.shape[1:])
    return Interval(float(measure(counts_N.sum(axis=0))), *percentiles(measure(resampled), LEVEL))


def _by_label(labels: Sequence[str], counts_NK3: Floats) -> dict[str, LabelScore]:
    sums_K3 = counts_NK3.sum(axis=0)
    precision, recall, f1 = _ratio(sums_K3[:, 0], sums_K3[:, 1]), _ratio(sums_K3[:, 0], sums_K3[:, 2]), f1_of(sums_K3)
    return {
        label: LabelScore(float(precision[k]), float(recall[k]), float(f1[k]), int(sums_K3[k, 2]))
        for k, label in enumerate(labels)
    }


def metrics_of(task: str, predictions: Sequence[Mapping[str, object]], seed: int) -> Metrics:
    """Returns the metrics of predictions as `classify.predict.predictions` gives them."""
    columns: dict[str, list] = {name: [row[name] for row in predictions] for name in predictions[0]}  # type: ignore[type-arg]
    if task == "sequence":
        return sequence_metrics(columns["predicted"], columns["label"], seed)
    if task == "token":
        return token_metrics(columns["predicted"], columns["tags"], seed)
    return span_metrics(columns["predicted"], columns["answers"], columns["context"])


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lowers the text and removes ASCII punctuation, articles and extra spaces, in this order."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Returns 1 if the prediction equals a reference after normalising, and else 0."""
    return float(normalized(prediction) in _answers(references))


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Returns the harmonic mean of precision and recall of words, each counted as often as it occurs."""
    return max(_f1(normalized(prediction).split(), reference.split()) for reference in _answers(references))


def _answers(references: Sequence[str]) -> list[str]:
    """Returns the normalised references that are not empty; [""] if there are none."""
    return [text for text in map(normalized, references) if text] or [""]


def _f1(predicted: Sequence[str], reference: Sequence[str]) -> float:
    if not predicted or not reference:
        return float(not predicted and not reference)
    num_shared = (Counter(predicted) & Counter(reference)).total()
    return 2 * num_shared / (len(predicted) + len(reference))
