"""Scores of whole texts: of a decoder the numbers at the last token, of an encoder those of the first, which sees all.

A reward model of several objectives has a head for each and gives several scores; where one is needed they are summed,
each times the weight that its objective was given.
Shape letters: B sequences, T tokens, O objectives.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from lm.encoder import SequenceClassifier
from lm.model import ScalarModel
from lm.padding import last_tokens, pad_right
from lm.progress import note_progress
from lm.source import ModelSource, load, on_meta
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder, purpose_of
from reward.comparisons import encode_scored

RewardNetwork = ScalarModel | SequenceClassifier


def network_folder(folder: Path, dropout: float = 0.0) -> ModelSource[RewardNetwork]:
    """The reward model of a directory, not read yet. Errors as for `lm.weights.purpose_of`."""
    if purpose_of(folder) == "sequence":
        return ModelFolder(folder, SequenceClassifier, dropout)
    return ModelFolder(folder, ScalarModel, dropout)


def load_network(folder: Path) -> RewardNetwork:
    """The reward model of a directory, in fp32. Errors as for `lm.weights.ModelFolder`."""
    return load(network_folder(folder))


def labels_of(folder: Path) -> tuple[str, ...]:
    """What the scores of a directory's reward model are called; its weights are not read. Errors as above."""
    return on_meta(network_folder(folder).build).labels


def sequence_scores(network: nn.Module, sequences: Sequence[Sequence[int]], kind: str) -> Tensor:
    """Scores [B, O]; higher is better. Gradients flow. `kind` is the network's: "decoder" or "encoder"."""
    return scores_of(network, read_by(sequences, kind, next(network.parameters()).device))


def read_by(sequences: Sequence[Sequence[int]], kind: str, device: torch.device) -> tuple[Tensor | None, ...]:
    """What a network of this kind is given of the sequences."""
    tokens_BT, segments_BT = pad_right(sequences, device)
    if kind == "encoder":
        return tokens_BT, segments_BT
    # With padding on the right and causal attention no real token sees padding, so no attention mask is needed.
    return tokens_BT, None, last_tokens(segments_BT)


def scores_of(network: nn.Module, read: Sequence[Tensor | None], sequence_keys_BT: Tensor | None = None) -> Tensor:
    """Scores [B, O] of what `read_by` gives; the sequences' keys [B, 1] are for dropout (`lm.dropout`)."""
    scores: Tensor = network(*read, sequence_keys_BT=sequence_keys_BT)
    return scores if scores.dim() == 2 else scores[:, None]


@torch.inference_mode()
def head_scores(network: RewardNetwork, sequences: Sequence[Sequence[int]], batch_size: int = 128) -> Tensor:
    """Scores [B, O] of any number of sequences, in order; sorted by length inside, so little is padded."""
    scores_BO = torch.zeros(len(sequences), len(network.labels))
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        note_progress()
        found = sequence_scores(network, [sequences[index] for index in chosen], network.config.kind)
        scores_BO[chosen] = found.to(scores_BO)
    return scores_BO


def shift_scores(network: RewardNetwork, by: Sequence[float]) -> None:
    """Add a constant to every score, of each head its own, which no preference depends on."""
    bias = network.classifier.bias if isinstance(network, SequenceClassifier) else network.bias
    bias.data += bias.new_tensor(by).reshape(bias.shape)


def weights_by_label(model: str, labels: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    """What each score of a reward model counts, in the order of its labels; 1 for one alone, which takes no weight.

    Errors: ValueError where several are not given one finite weight each, one of them at least other than 0.
    """
    several = tuple(labels) if len(labels) > 1 else ()
    if set(weights) != set(several):
        wanted = f"a weight for each of {', '.join(several)} was" if several else "no weights were"
        raise ValueError(
            f"{model}: a reward model of {'the objectives ' + ', '.join(several) if several else 'one objective'};"
            f" weights are given for {', '.join(weights) or 'none'}; {wanted} expected (ppo.objective_weights in a job,"
            " --weight or FOLDER#OBJECTIVE on the command line)"
        )
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name!r} is {weight}; a finite number was expected")
    if several and not any(weights.values()):
        raise ValueError(f"the weights of {', '.join(several)} are all 0; one at least that is not was expected")
    return {label: weights[label] for label in several} if several else {labels[0]: 1.0}


@dataclass(frozen=True)
class Judge:
    """A reward model with the vocabulary and the template that it reads, and what each of its scores counts."""

    network: RewardNetwork
    tokenizer: Tokenizer
    weights: Mapping[str, float]  # by label, in their order

    @classmethod
    def load(cls, folder: Path, weights: Mapping[str, float] | None = None) -> Self:
        """Errors: ValueError as for `weights_by_label`, and for a directory that holds no reward model."""
        checked = weights_by_label(str(folder), labels_of(folder), weights or {})
        return cls(load_network(folder).eval(), Tokenizer.load(folder), checked)

    def sequences(
        self,
        tokenizer: Tokenizer,
        conversations: Sequence[Messages],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """What the network reads of a policy's responses: the same tokens where it has the policy's vocabulary and
        template, else the same texts in its own. `conversations` and `prompts` are what was asked, as messages and as
        the policy's tokens.

        Reward models learn from whole texts, the end token behind them, so one that was cut off is scored with it too.
        """
        if self.tokenizer == tokenizer:
            return [self._closed(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        texts = [tokenizer.decode(response).strip() for response in responses]
        pairs = zip(conversations, texts, strict=True)
        turns = ([*messages, {"role": "assistant", "content": text}] for messages, text in pairs)
        return [list(encode_scored(self.tokenizer, conversation)) for conversation in turns]

    def score(
        self,
        tokenizer: Tokenizer,
        conversations: Sequence[Messages],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> list[float]:
        """Scores of a policy's responses, in order; higher is better. NaN for what does not fit the network's context.

        Arguments as for `sequences`.
        """
        sequences = self.sequences(tokenizer, conversations, prompts, responses)
        fitting = [row for row, tokens in enumerate(sequences) if self.fits(tokens)]
        scores = [math.nan] * len(sequences)
        for row, score in zip(fitting, self.score_sequences([sequences[row] for row in fitting]), strict=True):
            scores[row] = score
        return scores

    def score_sequences(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One score of each sequence, in order: the weighted sum of its objectives' scores."""
        weights_O = torch.tensor(list(self.weights.values()))
        scores: list[float] = (head_scores(self.network, sequences) * weights_O).sum(dim=1).tolist()
        return scores

    def _closed(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        """A prompt and its response with the end token behind it.

        In a policy's full context there is no place for one more. Where the network reads it all the same nothing
        changes; where it has no such position, the last token that was sampled makes room, since a text without its
        end is nothing that a reward model has seen.
        """
        end_id = self.tokenizer.end_id
        if end_id in response[-1:]:
            return [*prompt, *response]
        is_full = len(response) > 1 and len(prompt) + len(response) == self.room_tokens
        return [*prompt, *(response[:-1] if is_full else response), end_id]

    @property
    def room_tokens(self) -> int:
        """How many tokens it reads: a context, and behind it the end token of a text that fills the context. Positions
        that are looked up in a table end with the context.
        """
        config = self.network.config
        return config.max_position_embeddings + (config.positions != "learned")

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the network reads so many."""
        return len(tokens) <= self.room_tokens
