"""Samples a policy on prompts, on one worker or on all workers of a stage, and measures the samples: KL to a reference,
a reward model's score.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from files.hashes import derive_seed
from lm.config import Precision
from lm.generation import generate
from lm.hub import on_this_machine
from lm.model import LanguageModel
from lm.samplers.heed_engine import HeedSampler
from lm.sampling import Choice
from lm.sequence_logprobs import sequence_logprobs
from lm.source import load_for_inference
from lm.tensor_parallel import Rendezvous, Team
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, read_config
from reward.external import ExternalReward, Scored, score_in_parts
from reward.scoring import RewardModel
from training.data import NO_FIELDS, Prompt, RowFields

if TYPE_CHECKING:
    from stages.run import StageRun

BATCH = 128


@dataclass(frozen=True)
class StageScore:
    """The score that a stage learns to give, or trains its policy to raise: what its `STAGE.score` returns.

    Without `external`, a reward model gives it: the stage's own, or that of the policy's parent "reward". Prompts keep
    `row_fields()` for it. `objectives` are those of a reward model that no stage weighs, and `parts` the names that a
    row's `scored_by` chooses among. With `samples_world`, the policy is trained on prompts of the job's world only.
    """

    name: str = "reward model"
    external: ExternalReward | None = None
    objective_weights: Mapping[str, float] = field(default_factory=dict)
    row_fields: Callable[[], RowFields] = lambda: NO_FIELDS  # may load the user's function
    objectives: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    samples_world: bool = False


@dataclass(frozen=True)
class SamplingSpec:
    """What to sample. `reference` and `reward` are model directories to measure against; "" skips that measurement.

    `objective_weights` apply to a reward model with several objectives. `external_reward` scores instead of a reward
    model. `template_of` names a directory whose chat template replaces the policy's own, and `chat_template` replaces
    that, too. With `meeting`, workers form teams there, each of which computes one policy; only a team's first worker
    scores its samples.
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
    chat_template: str = ""
    meeting: Rendezvous | None = None

    def on_this_machine(self) -> Self:
        """Returns these settings with model names replaced by this machine's folders."""
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


class Sampler:
    """Keeps a policy, and the models that measure its samples, in memory from one list of prompts to the next.

    Each model is loaded when first needed.
    """

    def __init__(self, spec: SamplingSpec) -> None:
        assert spec.meeting is None or not spec.reference, "a part's logits are not compared with a reference's"
        self.spec = spec.on_this_machine()
        self._team = Team.join(spec.meeting) if spec.meeting is not None else None

    def sample(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Draws `num_samples` responses per prompt, prompt by prompt.

        Each sample has its own seed, derived from prompt and index, so splitting the work among workers does not change
        it. Raises: ValueError for a prompt that leaves no room for the response.
        """
        if not prompts:
            return []
        spec, tokenizer = self.spec, self._tokenizer
        wanted = [(prompt, index) for prompt in prompts for index in range(spec.num_samples)]
        tokens = tokenizer.encode_prompts([prompt.messages for prompt in prompts])
        encoded = {prompt.prompt_id: own for prompt, own in zip(prompts, tokens, strict=True)}
        # Sorting prompts by length minimises padding.
        order = sorted(range(len(wanted)), key=lambda place: len(encoded[wanted[place][0].prompt_id]))
        chosen = [wanted[place] for place in order]
        queries = [encoded[prompt.prompt_id] for prompt, _ in chosen]
        sampled = generate(
            self._policy,
            queries,
            max_new_tokens=spec.max_new_tokens,
            end_ids=tokenizer.end_ids,
            choice=Choice(spec.temperature),
            seeds=[derive_seed(spec.seed, "sample", prompt.prompt_id, index) for prompt, index in chosen],
            max_rows=BATCH,
        )
        responses = sampled.responses
        ratios = self._log_ratios(queries, responses)
        scores = self._scores([prompt for prompt, _ in chosen], queries, responses)
        samples = {
            place: Sample(
                prompt_id=wanted[place][0].prompt_id,
                index=wanted[place][1],
                response=tokenizer.decode(responses[row]).strip(),
                num_tokens=len(responses[row]),
                finished=sampled.finished[row],
                log_ratio=ratios[row],
                score=scores[row].score,
                failure=scores[row].failure,
            )
            for row, place in enumerate(order)
        }
        return [samples[place] for place in range(len(wanted))]

    def close(self) -> None:
        """Release the models."""
        for name in ("_policy", "_reference", "_reward_model"):
            self.__dict__.pop(name, None)
        if self.spec.external_reward is not None:
            self.spec.external_reward.close()
        torch.cuda.empty_cache()  # leaves memory for other processes and libraries; does nothing without a GPU

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        folder = Path(self.spec.template_of) if self.spec.template_of else self.spec.policy
        return Tokenizer.load(folder).with_template(self.spec.chat_template)

    @cached_property
    def _policy(self) -> LanguageModel:
        return self._load(self.spec.policy)

    @cached_property
    def _reference(self) -> LanguageModel:
        return self._load(Path(self.spec.reference))

    @cached_property
    def _reward_model(self) -> RewardModel:
        return RewardModel.load(Path(self.spec.reward), self.spec.objective_weights)

    def _load(self, folder: Path) -> LanguageModel:
        if self._team is not None:
            return HeedSampler.load(folder, self.spec.precision, team=self._team).policy
        dtype = torch.bfloat16 if self.spec.precision == "bf16" else torch.float32
        return load_for_inference(ModelFolder(folder, LanguageModel), dtype)

    def _log_ratios(self, queries: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[float]:
        if not self.spec.reference:
            return [math.nan] * len(responses)
        ours, theirs = (
            sequence_logprobs(model, queries, responses, self.spec.temperature)
            for model in (self._policy, self._reference)
        )
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    def _scores(
        self, prompts: Sequence[Prompt], queries: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> list[Scored]:
        if self._team is not None and self._team.rank > 0:
            return [Scored(math.nan)] * len(responses)
        external, conversations = self.spec.external_reward, [prompt.messages for prompt in prompts]
        if external is not None:
            texts = [self._tokenizer.decode(response).strip() for response in responses]
            return score_in_parts(external, conversations, texts, BATCH, [prompt.row for prompt in prompts])
        if not self.spec.reward:
            return [Scored(math.nan)] * len(responses)
        scores = self._reward_model.score(self._tokenizer, conversations, queries, responses)
        room = self._reward_model.network.config.max_position_embeddings
        return [Scored(s, f"the reward model reads {room} tokens" if math.isnan(s) else "") for s in scores]


def length_that_fits(policies: Sequence[Path], prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Returns `max_new_tokens`, or fewer if the longest prompt leaves less room in a policy's context.

    It is never below 1: a prompt that leaves no room at all is refused when it is sampled.
    """
    rooms = []
    for policy in policies:
        tokenizer, context = Tokenizer.load(policy), read_config(policy, "language")[0].max_position_embeddings
        longest = max(map(len, tokenizer.encode_prompts([prompt.messages for prompt in prompts])), default=0)
        rooms.append(context - longest)
    return max(1, min(max_new_tokens, *rooms))


def sample_policy(spec: SamplingSpec, prompts: Sequence[Prompt]) -> list[Sample]:
    """Samples one list of prompts, as `Sampler.sample` does."""
    return Sampler(spec).sample(prompts)


def sample_everywhere(
    run: "StageRun", phase: str, spec: SamplingSpec, prompts: Sequence[Prompt], *, shown: str = "", team_size: int = 1
) -> list[Sample]:
    """Runs `sample_policy` on all workers, each of which loads the policy once, or its part in a team of `team_size`
    workers. The result does not depend on their number. The console shows progress under the name `shown`, or if it is
    empty, under that of the phase.
    """
    from stages.data import sample_in_parts  # imports Ray, which sampling in this process does without

    if team_size > 1:
        meeting = Rendezvous(*run.workers().free_address(), team_size, run.engine.collective_timeout_seconds)
        spec = replace(spec, meeting=meeting)
    rows = sample_in_parts(run, phase, Sampler, spec, prompts, shown=shown, team_size=team_size)
    return [Sample(**row) for row in rows]
