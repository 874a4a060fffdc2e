"""Log-probabilities of given tokens. Shape letters: C positions, V vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor


def token_logprobs(logits_CV: Tensor, tokens_C: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`, [C] nats, in fp32; leading dimensions are free.

    The temperature is that of sampling: log-probs of another temperature belong to another policy.
    """
    V = logits_CV.shape[-1]
    scaled_CV = logits_CV.float() if temperature == 1.0 else logits_CV.float() / temperature
    return -F.cross_entropy(scaled_CV.reshape(-1, V), tokens_C.reshape(-1), reduction="none").view(tokens_C.shape)


def entropy(logits_CV: Tensor, temperature: float = 1.0) -> Tensor:
    """-Σ p log p of softmax(logits / temperature), [C] nats."""
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    return -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
