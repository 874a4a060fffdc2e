"""KL(policy || reference) over whole responses, in nats, by three estimators.

With x a prompt, y a response sampled from the policy (cut off at a limit of tokens, so this is the KL between both
policies with that limit) and r_t = π_ref(y_t | x, y_<t) / π(y_t | x, y_<t):

    k1    Σ_t -log r_t                              unclamped: may be negative for a single response
    k3    Σ_t (r_t - 1 - log r_t)                   never negative (Schulman 2020, "Approximating KL Divergence")
    full  Σ_t Σ_v π(v | x, y_<t) log π(v)/π_ref(v)  each term is k1's mean given the prefix, which removes the noise of
                                                    the sampled token (Rao-Blackwell; arXiv 2504.10637)

The mean of each over responses is an unbiased estimate of the KL. Responses are drawn as tokens, since text alone does
not say how it was tokenized.

Shape letters: N responses, C response tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from files.hashes import derive_seed
from lm.generation import generate
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.sampling import Choice
from lm.sequence_logprobs import logits_function, position_chunks, predicting_states
from lm.source import load_for_inference
from lm.tokenizer import Messages, Tokenizer
from lm.transfer import batches_by_length
from lm.weights import ModelFolder
from preferences.statistics.estimates import Floats, Interval
from preferences.statistics.intervals import clustered_mean
from reward.sampling import BATCH
from training.data import Prompt


@dataclass(frozen=True)
class Policy:
    """A policy with its vocabulary, ready to sample."""

    folder: Path
    model: LanguageModel
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(folder, load_for_inference(ModelFolder(folder, LanguageModel)), Tokenizer.load(folder))


@dataclass(frozen=True)
class Drawn:
    """Responses, prompt by prompt, `num_samples` each. Tokens include EOS if the response has one."""

    conversations: list[Messages]
    queries: list[list[int]]
    responses: list[list[int]]
    texts: list[str]
    finished: list[bool]
    temperature: float
    num_samples: int


def draw(
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Drawn:
    """Draws responses; each sample's seed is derived from prompt and index, as in `reward.sampling`.

    Raises: ValueError for no prompts, temperature 0 (a greedy policy has no KL), and a prompt that leaves no room.
    """
    if not prompts:
        raise ValueError("prompts is empty; at least one was expected")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; above 0 was expected: a greedy policy's KL is infinite")
    tokenizer = policy.tokenizer
    wanted = [(prompt, index) for prompt in prompts for index in range(num_samples)]
    tokens = tokenizer.encode_prompts([prompt.messages for prompt in prompts])
    encoded = {prompt.prompt_id: prompt_tokens for prompt, prompt_tokens in zip(prompts, tokens, strict=True)}
    # Sorting prompts by length minimises padding.
    order = sorted(range(len(wanted)), key=lambda place: len(encoded[wanted[place][0].prompt_id]))
    generated = generate(
        policy.model,
        [encoded[wanted[place][0].prompt_id] for place in order],
        max_new_tokens=max_new_tokens,
        end_ids=tokenizer.end_ids,
        choice=Choice(temperature),
        seeds=[derive_seed(seed, "sample", wanted[place][0].prompt_id, wanted[place][1]) for place in order],
        max_rows=BATCH,
    )
    row_of = {place: row for row, place in enumerate(order)}
    responses = [generated.responses[row_of[place]] for place in range(len(wanted))]
    return Drawn(
        conversations=[prompt.messages for prompt, _ in wanted],
        queries=[encoded[prompt.prompt_id] for prompt, _ in wanted],
        responses=responses,
        texts=[tokenizer.decode(response).strip() for response in responses],
        finished=[generated.finished[row_of[place]] for place in range(len(wanted))],
        temperature=temperature,
        num_samples=num_samples,
    )


@dataclass(frozen=True)
class ResponseKLs:
    """Each response's [N] estimate of the KL, nats; their means over responses are unbiased."""

    k1_N: Floats
    k3_N: Floats
    full_N: Floats


@dataclass(frozen=True)
class KL:
    """KL(policy || reference) per response, in nats, by three estimators, with 95% intervals over prompts.

    Report `full`. `k1` is what PPO penalises, and noisier. A `k3` far from both means that a few rare tokens dominate,
    and that none of the three can be trusted yet.
    """

    full: Interval
    k1: Interval
    k3: Interval
    num_prompts: int
    num_responses: int


def measure_kl(policy: Policy, reference: Policy, drawn: Drawn) -> KL:
    """Estimates the KL from responses the policy drew. Raises: as `response_kls` does, and if vocabularies differ."""
    require_same_vocabulary(policy, reference)
    kls = response_kls(policy.model, reference.model, drawn.queries, drawn.responses, drawn.temperature)
    return summarise_kl(kls, np.arange(len(drawn.responses)) // drawn.num_samples)


def summarise_kl(kls: ResponseKLs, prompt_N: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> KL:
    """Returns means with Student's interval over prompts; responses to one prompt are not independent."""
    prompt_N = np.asarray(prompt_N, dtype=np.int64)
    return KL(
        full=clustered_mean(kls.full_N, prompt_N),
        k1=clustered_mean(kls.k1_N, prompt_N),
        k3=clustered_mean(kls.k3_N, prompt_N),
        num_prompts=len(np.unique(prompt_N)),
        num_responses=len(prompt_N),
    )


def largest_shift(*kl_nats: float) -> float:
    """Returns how far from ½ the win rate of two policies can be, from each one's KL(policy || reference) in nats.

        |P(a beats b) - ½| <= TV(a, b) <= TV(a, r) + TV(b, r) <= √(KL_a/2) + √(KL_b/2)   (Pinsker 1964)

    Any judge prefers a's response to b's half of the time if both are drawn from one policy, so the first difference is
    at most the total variation. The bound holds for means over prompts too, because the square root is concave. Unknown
    (NaN) if one KL is.
    """
    return float(np.sqrt(np.maximum(kl_nats, 0.0) / 2).sum())


def require_same_vocabulary(policy: Policy, reference: Policy) -> None:
    """Raises: ValueError if the two tokenizers differ, because log-ratios are then meaningless."""
    if policy.tokenizer.with_template("plain") != reference.tokenizer.with_template("plain"):
        raise ValueError(
            f"{policy.folder} and {reference.folder} have different vocabularies; a KL needs policies over"
            " the same tokens"
        )


@torch.inference_mode()
def response_kls(
    policy: LanguageModel,
    reference: LanguageModel,
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
) -> ResponseKLs:
    """Returns three estimates per response, which `policy` drew at `temperature`; both models use that temperature.

    Vocabulary logits are held for one chunk of positions at a time. Raises: ValueError for models whose vocabularies
    differ in size, and for an empty response.
    """
    if policy.config.vocab_size != reference.config.vocab_size:
        raise ValueError(
            f"the policy has {policy.config.vocab_size} tokens, the reference {reference.config.vocab_size};"
            " the same vocabulary was expected"
        )
    for row, response in enumerate(responses):
        if not response:
            raise ValueError(f"responses[{row}] is empty; at least the end token was expected")
    ours, theirs = logits_function(policy), logits_function(reference)
    sums = np.zeros((len(queries), 3))
    for rows in batches_by_length([[*query, *response] for query, response in zip(queries, responses, strict=True)]):
        note_progress()
        tokens_C = torch.tensor([token for row in rows for token in responses[row]], device=policy.head.weight.device)
        pairs = [(queries[row], responses[row]) for row in rows]
        hidden = [predicting_states(model, pairs) for model in (policy, reference)]
        kls = torch.cat(
            [
                _position_kls(ours(hidden[0][part]), theirs(hidden[1][part]), tokens_C[part], temperature)
                for part in position_chunks(hidden[0], policy.config.vocab_size)
            ]
        )
        per_response = kls.split([len(responses[row]) for row in rows])
        sums[rows] = torch.stack([part.sum(dim=0) for part in per_response]).double().cpu().numpy()
    return ResponseKLs(k1_N=sums[:, 0], k3_N=sums[:, 1], full_N=sums[:, 2])


def _position_kls(ours_CV: Tensor, theirs_CV: Tensor, tokens_C: Tensor, temperature: float) -> Tensor:
    """Returns k1, k3 and full per position, [C, 3], from both models' logits."""
    ours_CV, theirs_CV = (torch.log_softmax(logits.float() / temperature, dim=-1) for logits in (ours_CV, theirs_CV))
    log_ratio_C = (theirs_CV - ours_CV).gather(1, tokens_C[:, None])[:, 0]
    full_C = (ours_CV.exp() * (ours_CV - theirs_CV)).sum(dim=1)
    return torch.stack([-log_ratio_C, torch.expm1(log_ratio_C) - log_ratio_C, full_C], dim=1)
