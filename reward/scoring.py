"""Scores of whole texts: a decoder gives its score at the last token, an encoder at the first, which attends to all.

A reward model with several objectives has a head, and so a score, for each. Where a single score is needed, it is their
weighted sum.

Shape letters: B sequences, T tokens, O objectives.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from lm.encoder import SequenceClassifier
from lm.model import ScalarModel
from lm.progress import note_progress
from lm.source import PartialSource, load_for_inference, on_meta
from lm.tokenizer import Messages, Tokenizer
from lm.transfer import MAX_TOKENS, last_tokens, pad_right, upload
from lm.weights import ModelFolder, purpose_of
from reward.comparisons import Comparison, encode_scored
from training.packing import IntArray, packed_rows, split_passes
from training.tokens import Sequences

RewardNetwork = ScalarModel | SequenceClassifier


def network_folder(folder: Path, dropout: float = 0.0) -> PartialSource[RewardNetwork]:
    """Returns a source of the reward model in a directory, without reading weights. Raises as for
    `lm.weights.purpose_of`.
    """
    if purpose_of(folder) == "sequence":
        return ModelFolder(folder, SequenceClassifier, dropout)
    return ModelFolder(folder, ScalarModel, dropout)


def check_network(folder: Path) -> None:
    """Check that a directory has a loadable reward model, without reading its weights. Raises ValueError as loading it
    would.
    """
    is_encoder = purpose_of(folder) == "sequence"
    (ModelFolder(folder, SequenceClassifier) if is_encoder else ModelFolder(folder, ScalarModel)).check()


def labels_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of the scores of a directory's reward model, without reading its weights. Raises as above."""
    return on_meta(network_folder(folder).build).labels


def read_by(sequences: Sequence[Sequence[int]], kind: str, device: torch.device) -> tuple[Tensor | None, ...]:
    """Returns a network's inputs for the sequences, one per row; `kind` is the network's."""
    return _inputs(*pad_right(sequences, torch.device("cpu")), kind, device)


def _inputs(tokens_BT: Tensor, segments_BT: Tensor, kind: str, device: torch.device) -> tuple[Tensor | None, ...]:
    """Returns a network's inputs for rows in CPU memory. Masks stay there, where counting does not wait for a GPU."""
    inputs = upload(tokens_BT, device), segments_BT
    return inputs if kind == "encoder" else (*inputs, last_tokens(segments_BT))


@dataclass(frozen=True)
class PackedInputs:
    """Sequences packed into few rows: the network's inputs, the index of each sequence's score in its output, and the
    number of the sequence that each token [B, T] belongs to, arbitrary at padding.
    """

    read: tuple[Tensor | None, ...]
    places_N: Tensor
    sequence_BT: IntArray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], kind: str, device: torch.device) -> Self:
        rows = packed_rows(Sequences.of((tokens, [False] * len(tokens)) for tokens in sequences), device)
        read = _inputs(torch.from_numpy(rows.tokens), torch.from_numpy(rows.segments), kind, device)
        places_N = torch.from_numpy(rows.numbers[rows.numbers >= 0]).argsort()
        return cls(read, upload(places_N, device), rows.sequence_of_tokens())

    def in_order(self, scores_NO: Tensor) -> Tensor:
        """Bring the network's scores of these inputs into the order of the sequences."""
        return scores_NO.index_select(0, self.places_N)


def scores_of(network: nn.Module, read: Sequence[Tensor | None], sequence_keys_BT: Tensor | None = None) -> Tensor:
    """Returns scores [sequences, O] for inputs from `read_by` or `PackedInputs`; keys [B, 1] or [B, T] are for dropout
    (`lm.layers`).
    """
    scores: Tensor = network(*read, sequence_keys_BT=sequence_keys_BT)
    return scores if scores.dim() == 2 else scores[:, None]


@torch.inference_mode()
def head_scores(network: RewardNetwork, sequences: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> Tensor:
    """Returns scores [B, O] of any number of sequences, in order, using passes of at most `max_tokens` tokens."""
    device = next(network.parameters()).device
    scores_BO = torch.zeros(len(sequences), len(network.labels))
    (passes,) = split_passes([[len(sequence)] for sequence in sequences], 1, max_tokens)
    for rows in filter(None, passes):
        note_progress()
        packed = PackedInputs.of([sequences[row] for row in rows], network.config.kind, device)
        scores_BO[rows] = packed.in_order(scores_of(network, packed.read)).to(scores_BO)
    return scores_BO


def sequences_of(comparisons: Sequence[Comparison]) -> list[Sequence[int]]:
    """Returns every response of every comparison, in the order in which `task_scores` expects their scores."""
    return [sequence for comparison in comparisons for sequence in comparison.sequences]


def task_scores(scores_BO: Tensor, comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
    """Returns the scores of each task's responses, in order, from the head of the task's objective. `scores_BO` are the
    scores of `sequences_of`.
    """
    rows = iter(scores_BO)
    return {c.task_id: [float(next(rows)[c.objective]) for _ in c.sequences] for c in comparisons}


def shifted(
    network: RewardNetwork, weights: Iterable[tuple[str, Tensor]], by: Sequence[float]
) -> Iterator[tuple[str, Tensor]]:
    """Yields a network's weights with a constant per head added to every score; no preference depends on it."""
    bias = "classifier.bias" if isinstance(network, SequenceClassifier) else "bias"
    for name, tensor in weights:
        yield name, tensor + tensor.new_tensor(by).reshape(tensor.shape) if name == bias else tensor
        del tensor  # before the next one is gathered


def weights_by_label(model: str, labels: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the weight of each of a reward model's scores, in the order of its labels; a single score has weight 1.

    Raises: ValueError unless several scores have one finite weight each, not all 0, and a single score has none.
    """
    several = tuple(labels) if len(labels) > 1 else ()
    if set(weights) != set(several):
        wanted = f"a weight for each of {', '.join(several)} was" if several else "no weights were"
        raise ValueError(
            f"{model}: this reward model has {'the objectives ' + ', '.join(several) if several else 'one objective'},"
            f" but weights are set for {', '.join(weights) or 'none'}; {wanted} expected (objective_weights of"
            " [ppo.reward] or [rejection] in a job, --weight or FOLDER#OBJECTIVE on the command line)"
        )
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name!r} is {weight}; a finite number was expected")
    if several and not any(weights.values()):
        raise ValueError(f"the weights of {', '.join(several)} are all 0; at least one other than 0 was expected")
    return {label: weights[label] for label in several} if several else {labels[0]: 1.0}


@dataclass(frozen=True)
class RewardModel:
    """A reward model with its tokenizer and chat template, and the weight of each of its scores."""

    network: RewardNetwork
    tokenizer: Tokenizer
    weights: Mapping[str, float]  # by label, in their order

    @classmethod
    def load(cls, folder: Path, weights: Mapping[str, float] | None = None) -> Self:
        """Load a reward model from a directory to the device that `lm.source` chooses.

        Raises: ValueError as for `weights_by_label`, and for a directory that holds no reward model.
        """
        checked = weights_by_label(str(folder), labels_of(folder), weights or {})
        return cls(load_for_inference(network_folder(folder)), Tokenizer.load(folder), checked)

    def encoded(
        self,
        tokenizer: Tokenizer,
        conversations: Sequence[Messages],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Returns the tokens that the network reads for a policy's responses: the policy's, if tokenizer and template
        are the same, otherwise the same texts in its own. `conversations` and `prompts` are the prompts as messages and
        as the policy's tokens.

        Reward models learn from whole texts that end with the end token, so a truncated response gets one, too.
        """
        if self.tokenizer == tokenizer:
            return [self._closed(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        texts = [tokenizer.decode(response).strip() for response in responses]
        pairs = zip(conversations, texts, strict=True)
        turns = ([*messages, {"role": "assistant", "content": text}] for messages, text in pairs)
        return [encode_scored(self.tokenizer, conversation) for conversation in turns]

    def score(
        self,
        tokenizer: Tokenizer,
        conversations: Sequence[Messages],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> list[float]:
        """Returns scores of a policy's responses, in order; higher is better. NaN if one exceeds the network's context.

        Arguments as for `encoded`.
        """
        encoded = self.encoded(tokenizer, conversations, prompts, responses)
        fitting = [row for row, of in enumerate(encoded) if self.fits(of)]
        scores = [math.nan] * len(encoded)
        for row, score in zip(fitting, self.score_sequences([encoded[row] for row in fitting]), strict=True):
            scores[row] = score
        return scores

    def score_sequences(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Returns one score per sequence, in order: the weighted sum of its objectives' scores."""
        weights_O = torch.tensor(list(self.weights.values()))
        scores: list[float] = (head_scores(self.network, sequences) * weights_O).sum(dim=1).tolist()
        return scores

    def _closed(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        """Join a prompt and its response, followed by the token that closes a turn: the network has seen no other end.

        A response that fills the policy's context leaves no position for that token. If the network has none either,
        the token replaces the last sampled one, since a reward model has never seen a text without its end.
        """
        if response and response[-1] in self.tokenizer.end_ids:
            return [*prompt, *response[:-1], self.tokenizer.turn_end_id]
        is_full = len(response) > 1 and len(prompt) + len(response) == self.room_tokens
        return [*prompt, *(response[:-1] if is_full else response), self.tokenizer.turn_end_id]

    @property
    def room_tokens(self) -> int:
        """The most tokens that the network reads: its context, plus one for the end token of a text that fills the
        context, unless positions are learned, which end with the context.
        """
        config = self.network.config
        return config.max_position_embeddings + (config.positions != "learned")

    def fits(self, tokens: Sequence[int]) -> bool:
        """Returns whether the network can read these tokens."""
        return not self.why_unread(tokens)

    def why_unread(self, tokens: Sequence[int]) -> str:
        """Returns why the network cannot read these tokens; "" if it can. A policy with the same tokenizer may have
        more rows of embeddings, from which it may sample numbers that are no token.
        """
        if len(tokens) > self.room_tokens:
            return f"it has {len(tokens)} tokens; the reward model reads at most {self.room_tokens}"
        highest, known = max(tokens, default=0), self.network.config.vocab_size
        return f"it has the token {highest}; the reward model knows those below {known}" if highest >= known else ""
