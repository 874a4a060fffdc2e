"""Logits to predictions, a classifier's source, and a classifier of a directory that reads texts.

Shape letters: K labels, L tokens of an example, F tokens of all examples.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import Tensor

from classify.config import OUTSIDE, QUESTION_MARKS, ClassifyConfig, Task
from classify.examples import Examples, best_windows, context_windows, encode_words, marked
from classify.metrics import entities
from classify.objective import Classifier
from files.records import read_record
from lm.config import ModelConfig
from lm.encoder import EncoderModel, MaskedLanguageModel, SequenceClassifier, SpanPredictor, TokenClassifier, best_span
from lm.source import load_for_inference, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import CONFIG, Model, ModelFolder, WithNewHead, purpose_of

HEADS: dict[str, type[Classifier]] = {"sequence": SequenceClassifier, "token": TokenClassifier, "span": SpanPredictor}
STARTS: dict[str, type[Model]] = {"masked": MaskedLanguageModel, "body": EncoderModel, **HEADS}
NEW_HEADS = ("classifier.", "ends.")  # beginnings of the names of their weights
SETTINGS = "classify.json"  # in a model's folder: the settings of its job that say how it reads


def classifier_source(
    folder: Path, config: ClassifyConfig, labels: Sequence[str], seed: int
) -> WithNewHead[Classifier]:
    """Returns an encoder's blocks, without the last or with new ones if the config says so, under the task's head. The
    head is that of the directory if it has one with the same labels; else it is drawn from `seed`.

    Raises: ValueError naming the file for a model that is no encoder, or that has too few blocks or positions.
    """
    purpose = purpose_of(folder)
    if purpose not in STARTS:
        raise ValueError(f"{folder / CONFIG}: a model for the purpose {purpose!r}; an encoder was expected")
    old = on_meta(ModelFolder(folder, STARTS[purpose]).build)
    try:
        shape = config.reshaped(old.config)
    except ValueError as error:
        raise ValueError(f"{folder}: classify.{error}") from None
    if config.seq_len > shape.max_position_embeddings:
        raise ValueError(
            f"classify.seq_len is {config.seq_len}; {folder} reads at most {shape.max_position_embeddings}"
        )
    is_same = purpose == config.task and tuple(getattr(old, "labels", ())) == tuple(labels)

    def head(shape: ModelConfig) -> Classifier:
        if config.task == "span":
            return SpanPredictor(shape, config.dropout)
        kind = SequenceClassifier if config.task == "sequence" else TokenClassifier
        return kind(shape, labels, config.dropout)

    def is_new(name: str) -> bool:
        return not is_same and name.startswith(NEW_HEADS)

    return WithNewHead(
        folder, STARTS[purpose], head, seed, is_new, dropped=config.dropped_layers, added=config.added_layers
    )


def predictions(
    config: ClassifyConfig, labels: Sequence[str], logits: Tensor, examples: Examples
) -> list[dict[str, Any]]:
    """Returns what the model says of each held-out row, next to the row's label, tags or answers.

    `logits` are those of `classify.objective.logits_on_all_ranks`.
    """
    golds = examples.golds()
    if config.task == "sequence":
        return [
            {
                "label": gold["label"],
                "predicted": labels[int(of_row.argmax())],
                "probabilities": label_probabilities(of_row),
            }
            for gold, of_row in zip(golds, logits, strict=True)
        ]
    starts = [0, *examples.ends[:-1].tolist()]
    parts = [logits[start:end] for start, end in zip(starts, examples.ends.tolist(), strict=True)]
    if config.task == "token":
        return [
            {"words": gold["words"], "tags": gold["tags"], "predicted": tags_of(gold, part, labels)}
            for gold, part in zip(golds, parts, strict=True)
        ]
    rows, firsts = list[dict[str, Any]](), [n for n, gold in enumerate(golds) if gold["window"] == 0]
    for first, end in zip(firsts, [*firsts[1:], len(golds)], strict=True):
        text, score = best_answer(golds[first:end], parts[first:end], config.max_answer_tokens)
        kept = {name: golds[first][name] for name in ("id", "answers", "context")}
        rows.append({**kept, "predicted": text if score > config.no_answer_margin else "", "margin": score})
    return rows


def label_probabilities(logits_K: Tensor) -> list[float]:
    probabilities: list[float] = logits_K.double().softmax(dim=-1).tolist()
    return probabilities


def tags_of(gold: Mapping[str, Any], logits_LK: Tensor, labels: Sequence[str]) -> list[str]:
    """Returns a tag per word; a word that the model has not read counts as outside."""
    tags = [OUTSIDE] * len(gold["words"])
    for word, place in gold["read"]:
        tags[word] = labels[int(logits_LK[place].argmax())]
    return tags


def best_answer(windows: Sequence[Mapping[str, Any]], parts: Sequence[Tensor], max_tokens: int) -> tuple[str, float]:
    """Returns the best answer in any window of a text, and by how much its score exceeds that of no answer, in nats.

    A span's score is the logit of its first token plus that of its last. The score of no answer takes the window's
    first token for both, in the window where this is lowest. A token may begin a span only in the window that shows
    most around it (BERT).
    """
    best_text, best, none = "", -torch.inf, torch.inf
    for window, logits_L2 in zip(windows, parts, strict=True):
        none = min(none, float(logits_L2[0].sum()))
        places = window["places"]
        if not places:
            continue
        first_1T, last_1T = logits_L2[window["before"] : window["before"] + len(places)].T[:, None]
        begins_1T = torch.tensor([[bool(is_best) for _, _, is_best in places]])
        allowed_1T = torch.ones_like(begins_1T)
        ((first, last),) = best_span(first_1T.masked_fill(~begins_1T, -torch.inf), last_1T, allowed_1T, max_tokens)
        score = float(first_1T[0, first] + last_1T[0, last])
        if begins_1T.any() and score > best:
            best, best_text = score, window["context"][places[first][0] : places[last][1]]
    return best_text, best - none


WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Reading:
    """The settings of a classifier's job that say how it reads texts; see the fields of `ClassifyConfig`."""

    seq_len: int
    max_question_tokens: int
    doc_stride: int = 128
    max_answer_tokens: int = 30
    no_answer_margin: float = 0.0

    @classmethod
    def of(cls, config: ClassifyConfig) -> Self:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @classmethod
    def read(cls, folder: Path, shape: ModelConfig) -> Self:
        """Returns the settings in a model's directory; BERT's if no job of Heed's has written it."""
        path, most = folder / SETTINGS, shape.max_position_embeddings
        return read_record(path, cls) if path.is_file() else cls(most, most - QUESTION_MARKS - 1)


@dataclass(frozen=True)
class TextClassifier:
    """A classifier of a directory, which reads texts as its job read them."""

    network: Classifier
    tokenizer: Tokenizer
    task: Task
    reading: Reading

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises: ValueError naming the file for a directory with anything but a classifier."""
        purpose = purpose_of(folder)
        if purpose not in HEADS:
            raise ValueError(
                f"{folder / CONFIG}: a model for the purpose {purpose!r}; a classifier of texts, words or spans, as"
                " [classify] trains one, was expected"
            )
        task: Task = next(task for task in get_args(Task) if task == purpose)
        network = load_for_inference(ModelFolder(folder, HEADS[purpose]))
        return cls(network, Tokenizer.load(folder), task, Reading.read(folder, network.config))

    def probabilities(self, text: str, second: str = "") -> dict[str, float]:
        """Returns the probability of each label of a text, or of a pair; a single label is a score. Likeliest first."""
        logits_K = self._logits([*self.tokenizer.encode_plain([text, second] if second else [text])])[0]
        labels: tuple[str, ...] = getattr(self.network, "labels", ())
        if len(labels) == 1:
            return {labels[0]: float(logits_K)}
        probability_of = dict(zip(labels, label_probabilities(logits_K), strict=True))
        return dict(sorted(probability_of.items(), key=lambda item: -item[1]))

    def entities(self, text: str) -> list[tuple[str, str]]:
        """Returns (type, text) of each entity, in order. Words and marks are read one by one, as in CoNLL's data."""
        matches = [*WORDS.finditer(text)]
        tokens, firsts = encode_words(self.tokenizer, [match[0] for match in matches])
        logits_LK = self._logits([tokens])[0]
        gold = {"words": matches, "read": [(word, place + 1) for word, place in enumerate(firsts) if place >= 0]}
        tags = tags_of(gold, logits_LK, getattr(self.network, "labels", ()))
        spans = sorted(entities(tags), key=lambda entity: entity[1])
        places = [match.span() for match in matches]
        return [(kind, text[places[first][0] : places[last][1]]) for kind, first, last in spans]

    def answer(self, question: str, context: str) -> tuple[str, float]:
        """Returns the best answer, and by how much its score exceeds that of no answer, in nats.

        It is the model's answer if that exceeds `reading.no_answer_margin`; else the text has none.
        """
        reading = self.reading
        (question_tokens, _), (tokens, places) = self.tokenizer.encode_with_places([question, context])
        if len(question_tokens) > reading.max_question_tokens:
            raise ValueError(
                f"the question has {len(question_tokens)} tokens; the model reads at most {reading.max_question_tokens}"
                " (classify.max_question_tokens of its job)"
            )
        windows = context_windows(
            len(tokens), reading.seq_len - len(question_tokens) - QUESTION_MARKS, reading.doc_stride
        )
        best, before = best_windows(windows, len(tokens)), len(question_tokens) + QUESTION_MARKS - 1
        golds = [
            {"context": context, "before": before, "places": [[*places[t], best[t] == n] for t in window]}
            for n, window in enumerate(windows)
        ]
        parts = [self._logits([question_tokens, tokens[window.start : window.stop]])[0] for window in windows]
        return best_answer(golds, parts, reading.max_answer_tokens)

    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        tokens, types = marked(self.tokenizer, texts)
        most = self.reading.seq_len
        if len(tokens) > most:
            raise ValueError(
                f"the text has {len(tokens)} tokens with its marks; the model reads at most {most} (classify.seq_len of"
                " its job)"
            )
        device = next(self.network.parameters()).device
        types_1T = torch.tensor([types], device=device) if self.network.config.type_vocab_size > 1 else None
        logits = self.network(torch.tensor([tokens], device=device), None, types_1T)
        return (torch.stack(logits, dim=-1) if isinstance(logits, tuple) else logits).float().cpu()
