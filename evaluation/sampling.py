"""Samples a policy on prompts, and measures the samples: KL to a reference, a reward model's score.

Shape letters: B samples, T tokens, C response tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from lm.generation import generate
from lm.hub import on_this_machine
from lm.logprobs import token_logprobs
from lm.model import LanguageModel
from lm.padding import pad_right
from lm.progress import note_progress
from lm.sampling import Choice
from lm.tokenizer import Messages, Tokenizer
from lm.weights import load_language_model
from reward.external import ExternalReward, Scored
from reward.scoring import RewardModel
from training.config import Precision
from training.data import Prompt
from training.seeds import derive_seed

BATCH = 128


@dataclass(frozen=True)
class SamplingSpec:
    """What to sample. `reference` and `reward` are model directories to measure against; "" skips that measurement.

    `objective_weights` apply to a reward model with several objectives. `elsewhere` scores instead of a reward model.
    `template_of` names a directory whose chat template replaces the policy's own.
    """

    policy: Path
    num_samples: int
    max_new_tokens: int
    temperature: float
    seed: int
    precision: Precision
    reference: str = ""
    reward: str = ""
    objective_weights: Mapping[str, float] = field(default_factory=dict)
    external_reward: ExternalReward | None = None
    template_of: str = ""

    def on_this_machine(self) -> Self:
        """The same models in this machine's folders."""
        reference, reward, template_of = (
            str(on_this_machine(Path(name))) if name else "" for name in (self.reference, self.reward, self.template_of)
        )
        policy = on_this_machine(self.policy)
        return replace(self, policy=policy, reference=reference, reward=reward, template_of=template_of)


@dataclass(frozen=True)
class Sample:
    """One response. `log_ratio` is log π - log π_ref of the whole response, nats.

    `score` is the reward model's (higher is better), NaN if not requested or failed; `failure` then says why.
    """

    prompt_id: str
    index: int
    response: str
    num_tokens: int
    finished: bool
    log_ratio: float
    score: float
    failure: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def sample_policy(spec: SamplingSpec, prompts: Sequence[Prompt]) -> list[Sample]:
    """Draws `num_samples` responses per prompt, prompt by prompt.

    Each sample has its own seed, derived from prompt and index, so splitting the work among workers does not change it.
    Raises: ValueError for a prompt that leaves no room for the response.
    """
    if not prompts:
        return []
    spec = spec.on_this_machine()
    tokenizer = Tokenizer.load(Path(spec.template_of) if spec.template_of else spec.policy)
    dtype = torch.bfloat16 if spec.precision == "bf16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_language_model(spec.policy).to(device, dtype).eval()
    wanted = [(prompt, index) for prompt in prompts for index in range(spec.num_samples)]
    encoded = {prompt.prompt_id: tokenizer.encode_prompt(prompt.messages) for prompt in prompts}
    # Sorting prompts by length minimises padding.
    order = sorted(range(len(wanted)), key=lambda place: len(encoded[wanted[place][0].prompt_id]))
    chosen = [wanted[place] for place in order]
    queries = [encoded[prompt.prompt_id] for prompt, _ in chosen]
    sampled = generate(
        model,
        queries,
        max_new_tokens=spec.max_new_tokens,
        end_id=tokenizer.end_id,
        choice=Choice(spec.temperature),
        seeds=[derive_seed(spec.seed, "sample", prompt.prompt_id, index) for prompt, index in chosen],
        max_rows=BATCH,
    )
    responses = sampled.responses
    ratios = _log_ratios(spec, model, queries, responses)
    scores = _scores(spec, tokenizer, [prompt.messages for prompt, _ in chosen], queries, responses)
    samples: list[Sample | None] = [None] * len(wanted)
    for row, place in enumerate(order):
        prompt, index = wanted[place]
        samples[place] = Sample(
            prompt_id=prompt.prompt_id,
            index=index,
            response=tokenizer.decode(responses[row]).strip(),
            num_tokens=len(responses[row]),
            finished=sampled.finished[row],
            log_ratio=ratios[row],
            score=scores[row].score,
            failure=scores[row].failure,
        )
    return [sample for sample in samples if sample is not None]


def _log_ratios(
    spec: SamplingSpec,
    policy: LanguageModel,
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> list[float]:
    if not spec.reference:
        return [float("nan")] * len(responses)
    weight = policy.head.weight
    reference = load_language_model(Path(spec.reference)).to(weight.device, weight.dtype).eval()
    ours = sequence_logprobs(policy, queries, responses, spec.temperature)
    theirs = sequence_logprobs(reference, queries, responses, spec.temperature)
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def _scores(
    spec: SamplingSpec,
    tokenizer: Tokenizer,
    conversations: Sequence[Messages],
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> list[Scored]:
    if spec.external_reward is not None:
        texts = [tokenizer.decode(response).strip() for response in responses]
        parts = [slice(start, start + BATCH) for start in range(0, len(texts), BATCH)]
        return [scored for part in parts for scored in spec.external_reward.score(conversations[part], texts[part])]
    if not spec.reward:
        return [Scored(float("nan"))] * len(responses)
    judge = RewardModel.load(Path(spec.reward), spec.objective_weights)
    scores = judge.score(tokenizer, conversations, queries, responses)
    room = judge.network.config.max_position_embeddings
    return [Scored(s, f"the reward model reads {room} tokens" if math.isnan(s) else "") for s in scores]


@torch.inference_mode()
def sequence_logprobs(
    model: LanguageModel,
    queries: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
) -> list[float]:
    """Returns log π(response | query) per pair, nats, at the sampling temperature."""
    totals: list[float] = []
    device = model.head.weight.device
    for start in range(0, len(queries), BATCH):
        note_progress()
        pairs = list(zip(queries[start : start + BATCH], responses[start : start + BATCH], strict=True))
        tokens_BT, _ = pad_right([[*query, *response] for query, response in pairs], device)
        states_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        for row, (query, response) in enumerate(pairs):
            states_BT[row, len(query) - 1 : len(query) + len(response) - 1] = True
        logits_CV = model(tokens_BT, None, states_BT)
        targets_C = tokens_BT[:, 1:][states_BT[:, :-1]]
        flat_C = token_logprobs(logits_CV, targets_C, temperature)
        per_sample = flat_C.split([len(response) for _, response in pairs])
        totals += [float(part.sum()) for part in per_sample]
    return totals
