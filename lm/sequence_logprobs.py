"""Log-probabilities of given responses, with the vocabulary's logits in memory for one chunk of positions at a time.

Shape letters: B of a batch, T tokens, C response tokens of a batch, R tokens of a response, D model, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.encoder import EncoderDecoder
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.sampling import LOGITS_AT_ONCE, token_logprobs
from lm.transfer import batches_of, pad_right


def sequence_logprobs(
    model: LanguageModel,
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
) -> list[float]:
    """Returns log π(response | query) per pair, nats, at the sampling temperature."""
    per_response = response_logprobs(model, queries, responses, temperature)
    return torch.stack([logprobs_R.sum() for logprobs_R in per_response]).tolist() if per_response else []


@torch.inference_mode()
def response_logprobs(
    model: LanguageModel,
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
) -> list[Tensor]:
    """Returns the log-probability of each response's tokens, [R] nats per pair, at the sampling temperature."""
    logprobs: list[Tensor] = []
    logits, pairs = logits_function(model), list(zip(queries, responses, strict=True))
    for batch in batches_of([len(query) + len(response) for query, response in pairs]):
        note_progress()
        chosen = [pairs[row] for row in batch]
        states_CD = predicting_states(model, chosen)
        tokens_C = torch.tensor([token for _, response in chosen for token in response], device=states_CD.device)
        logprobs_C = torch.cat(
            [
                token_logprobs(logits(states_CD[part]), tokens_C[part].long(), temperature)
                for part in position_chunks(states_CD, model.config.vocab_size)
            ]
        )
        logprobs += logprobs_C.split([len(response) for _, response in chosen])
    return logprobs


@torch.inference_mode()
def next_token_logprobs(
    model: LanguageModel, queries: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Returns the log-probabilities of some tokens as the next after each query, in nats. Pass queries sorted by length
    to minimise padding.
    """
    logprobs: list[list[float]] = []
    logits = logits_function(model)
    for batch in batches_of([len(query) for query in queries]):
        note_progress()
        chosen = [queries[row] for row in batch]
        tokens_BT, _ = pad_right(chosen, model.head.weight.device)
        last_B = torch.tensor([len(query) - 1 for query in chosen], device=tokens_BT.device)
        states_BD = model.decoder.hidden(tokens_BT, None)[torch.arange(len(chosen), device=tokens_BT.device), last_B]
        for part in position_chunks(states_BD, model.config.vocab_size):
            logprobs_BV = logits(states_BD[part]).float().log_softmax(dim=-1).cpu()
            logprobs += [logprobs_BV[place, tokens[row]].tolist() for place, row in enumerate(batch[part])]
    return logprobs


@torch.inference_mode()
def output_logprobs(model: EncoderDecoder, source: Sequence[int], output: Sequence[int], start_id: int) -> Tensor:
    """Returns the log-probability of each token that an encoder-decoder writes for a source, [R] nats."""
    device = model.head.weight.device
    sources_1S, targets_1R = (torch.tensor([tokens], device=device) for tokens in (source, [start_id, *output[:-1]]))
    return token_logprobs(model(sources_1S, targets_1R)[0], torch.tensor(output, device=device))


def predicting_states(model: LanguageModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Returns the hidden states [C, D] that predict each response's tokens."""
    tokens_BT, _ = pad_right([[*query, *response] for query, response in pairs], model.head.weight.device)
    predicts_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
    for row, (query, response) in enumerate(pairs):
        predicts_BT[row, len(query) - 1 : len(query) + len(response) - 1] = True
    return model.decoder.hidden(tokens_BT, None)[predicts_BT.to(tokens_BT.device)]


def position_chunks(states_CD: Tensor, vocab_size: int) -> list[slice]:
    """Returns slices of positions whose logits fit in memory at once; one empty slice for no positions."""
    size = max(1, LOGITS_AT_ONCE[states_CD.device.type] // vocab_size)
    return [slice(start, start + size) for start in range(0, max(1, len(states_CD)), size)]


def logits_function(model: LanguageModel) -> Callable[[Tensor], Tensor]:
    """Returns the map from hidden states [C, D] to logits [C, V].

    On a GPU the product is in fp32 whatever the model's dtype: bf16 logits between 16 and 32 are 0.125 apart, and that
    rounding alone would give two close policies a KL.
    """
    weight = model.head.weight
    if weight.device.type == "cpu":
        return model.head
    weight_VD = weight.float()
    return lambda states_CD: F.linear(states_CD.float(), weight_VD)
