"""Scores of whole texts: of a decoder the number at the last token, of an encoder that of the first, which sees all.

Shape letters: B sequences, T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from lm.encoder import SequenceClassifier
from lm.model import ScalarModel
from lm.padding import last_tokens, pad_right
from lm.tokenizer import Messages, Tokenizer
from lm.weights import load_model, purpose_of
from reward.comparisons import encode_scored

RewardNetwork = ScalarModel | SequenceClassifier


def load_network(folder: Path) -> RewardNetwork:
    """The reward model of a directory, in fp32. Errors as for `lm.weights.load_model`."""
    if purpose_of(folder) == "sequence":
        return load_model(folder, SequenceClassifier)
    return load_model(folder, ScalarModel)


def sequence_scores(network: nn.Module, sequences: Sequence[Sequence[int]], kind: str) -> Tensor:
    """Scores [B]; higher is better. Gradients flow. `kind` is the network's: "decoder" or "encoder"."""
    return scores_of(network, read_by(sequences, kind, next(network.parameters()).device), kind)


def read_by(sequences: Sequence[Sequence[int]], kind: str, device: torch.device) -> tuple[Tensor | None, ...]:
    """What a network of this kind is given of the sequences."""
    tokens_BT, segments_BT = pad_right(sequences, device)
    if kind == "encoder":
        return tokens_BT, segments_BT
    # With padding on the right and causal attention no real token sees padding, so no attention mask is needed.
    return tokens_BT, None, last_tokens(segments_BT)


def scores_of(network: nn.Module, read: Sequence[Tensor | None], kind: str) -> Tensor:
    """Scores [B] of what `read_by` gives."""
    scores = network(*read)
    return scores.squeeze(-1) if kind == "encoder" else scores


@torch.inference_mode()
def score_sequences(network: RewardNetwork, sequences: Sequence[Sequence[int]], batch_size: int = 128) -> list[float]:
    """Scores of any number of sequences, in order; sorted by length inside, so little is padded."""
    scores = [0.0] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        found = sequence_scores(network, [sequences[index] for index in chosen], network.config.kind)
        for index, score in zip(chosen, found.tolist(), strict=True):
            scores[index] = score
    return scores


def shift_scores(network: RewardNetwork, by: float) -> None:
    """Add a constant to every score, which no preference depends on."""
    bias = network.classifier.bias if isinstance(network, SequenceClassifier) else network.bias
    bias.data += by


@dataclass(frozen=True)
class Judge:
    """A reward model with the vocabulary and the template that it reads."""

    network: RewardNetwork
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(load_network(folder).eval(), Tokenizer.load(folder))

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
            end_id = tokenizer.end_id
            return [
                [*prompt, *response, *([] if end_id in response[-1:] else [end_id])]
                for prompt, response in zip(prompts, responses, strict=True)
            ]
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
        for row, score in zip(fitting, score_sequences(self.network, [sequences[row] for row in fitting]), strict=True):
            scores[row] = score
        return scores

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the network's context holds so many."""
        return len(tokens) <= self.network.config.context_tokens
