"""The compare stage: compares policies of the run on held-out prompts, by a judge that training never saw."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from dpo.report import title_of
from dpo.stage import STAGE as DPO
from evaluation.compare.folder import CompareConfig
from evaluation.compare.judges import (
    described_as_reward,
    function_judge,
    gold_judge,
    people_judge,
    reward_judge,
    reward_model_judge,
    without_password,
)
from evaluation.compare.report.stage import REPORTER
from evaluation.compare.sampled import Sampled, compare_sampled
from evaluation.inputs import named_specs, with_clusters
from evaluation.judges.judge import ScoreJudge
from evaluation.judges.people import PeopleJudge
from files.hashes import derive_seed, file_hash
from files.records import record_of
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from ppo.config import PPOConfig
from ppo.prompts import unmet_scorers, with_scored_by
from ppo.report import names_of
from ppo.rollout_log import SAMPLES, TrainingSample
from ppo.stage import STAGE as PPO
from reward.external import ExternalReward, NoReward, RewardFunction
from reward.sampling import Sample, SamplingSpec, sample_everywhere
from reward.stage import STAGE as REWARD
from reward.steps import StepsConfig
from sft.rejection import STAGE as REJECTION
from stages.contract import POLICIES, Parent, Stage
from stages.data import OnAccess, fitting_prompts
from stages.planner import Planner, StagePlan
from stages.reports.text import DEFAULT_NAMES
from stages.run import JobView, StageRun
from training.data import NO_FIELDS, DataConfig, Prompt, RowFields, stream_prompts
from training.metrics import read_metrics

SFT = "sft"
JUDGES = ("judge_function", "judge_from", "judge_people", "judge_reward")


@dataclass(frozen=True)
class PolicyStart:
    """The model that a stage's policy starts from."""

    run: StageRun  # of the stage
    parent: str

    @property
    def tokenizer(self) -> Tokenizer:
        return self.run.tokenizer_of(self.parent).with_template(self.chat_template)

    @property
    def chat_template(self) -> str:
        """The template that the stage trains in; "" if it is the model's own."""
        section = self.run.job.section(self.run.job.stage(self.run.name))
        return str(getattr(section, "chat_template", ""))

    @property
    def is_sft(self) -> bool:
        """Whether this job's SFT trains the model."""
        return self.parent == SFT and not self.run.job.substitute(self.run.name, self.parent)

    def model(self) -> Path:
        return self.run.start(self.parent)


@dataclass(frozen=True)
class Proxy:
    """A reward model's directory, or an external reward. If both are empty, there is no proxy."""

    model: str = ""
    objective_weights: Mapping[str, float] = field(default_factory=dict)
    external: ExternalReward | None = None
    steps: StepsConfig | None = None  # for a model that scores steps

    @property
    def exists(self) -> bool:
        return bool(self.model) or self.external is not None


def run_compare(run: StageRun, config: CompareConfig) -> None:
    """Sample every policy on held-out prompts, measure, judge."""
    start, ppo_config = start_of(run), run.job.section(PPO)
    tokenizer, initial, proxy = start.tokenizer, start.model(), proxy_of(run)
    fitting = fitting_prompts(
        run, tokenizer, config.prompts, config.max_new_tokens, config.on_overlong, keeps=_row_fields(run.job, config)
    )
    prompts = with_clusters(fitting.prompts, config.prompts, config.cluster_by)

    def samples_of(name: str, num_samples: int) -> list[Sample]:
        # The pretrained model has seen no chat template, so it is prompted with SFT's.
        spec = SamplingSpec(
            policy=initial if name == "sft" else run.model_of(name),
            num_samples=num_samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(run.seed, "compare", name),
            precision=run.engine.resolved_precision(),
            reference=str(initial),
            reward=proxy.model,
            objective_weights=proxy.objective_weights,
            steps=proxy.steps,
            external_reward=proxy.external,
            template_of=str(initial),
            chat_template=start.chat_template,
        )
        return sample_everywhere(run, name, spec, prompts)

    pool = samples_of("sft", max(config.best_of, config.num_samples) if proxy.exists else config.num_samples)
    pretrained = {"pretrained": samples_of("pretrain", config.num_samples)} if "pretrain" in run.parents else {}
    metrics = read_metrics(run.folder_of(PPO.name) / "metrics.jsonl") if ppo_config is not None else []
    sampled = Sampled(
        prompts=prompts,
        policies={
            **pretrained,
            "sft": pool,
            **{name: samples_of(name, config.num_samples) for name in policies_of(run.job)},
        },
        pool="sft" if proxy.exists else "",
        training=[(line["kl_nats"], line["score"]) for line in metrics if {"kl_nats", "score"} <= line.keys()],
        seed=run.seed,
        drawn=() if ppo_config is None else _drawn(run, config, ppo_config),
        names=replace(names_of(ppo_config, starts_from_sft=start.is_sft), preference_loss=_preference_loss(run.job)),
    )

    def progress(step: str) -> Callable[[int, int], None]:
        return lambda done, total: run.show(done, total, step)

    results = compare_sampled(run.folder, config, sampled, judge_of(run, config), progress)
    run.write_results(
        replace(
            results,
            num_seen=max((_num_seen(run, prompts, sources) for sources in _trained_on(run.job).values()), default=0),
            overlong=fitting.overlong or None,
            sources=fitting.sources,
            names=sampled.names,
        )
    )


def _preference_loss(job: JobView) -> str:
    """Returns the title of what [dpo] minimises."""
    dpo = job.section(DPO)
    return DEFAULT_NAMES.preference_loss if dpo is None else title_of(dpo.loss)


def policies_of(job: JobView) -> tuple[str, ...]:
    """The stages of the job whose policies are compared, in order."""
    return tuple(name for name in job.stage_names if job.stage(name).policy_from)


def start_of(run: StageRun) -> PolicyStart:
    """Returns the model that the policies start from: "sft" in the comparison, and the reference of every KL."""
    name = policies_of(run.job)[0]
    return PolicyStart(run.at(name), run.job.stage(name).policy_from)


def proxy_of(run: StageRun) -> Proxy:
    """Returns what scores the samples in addition to the judge, and chooses best-of-n: the reward that PPO is trained
    on, or without PPO the job's reward model, if it has one.
    """
    ppo = run.job.section(PPO)
    if ppo is None:
        return Proxy(str(run.model_of(REWARD.name)) if REWARD.name in run.parents else "")
    if isinstance(ppo.reward, NoReward):
        return Proxy()
    model = "" if ppo.external_reward else str(run.at(PPO.name).start(REWARD.name))
    external = ppo.external_reward
    steps = None if external else ppo.steps
    return Proxy(model, ppo.reward.objective_weights, external and external.prepared(run.folder_of(PPO.name)), steps)


def _row_fields(job: JobView, config: CompareConfig) -> RowFields:
    """Returns the fields that prompts keep for PPO's reward, which scores the samples too."""
    ppo = job.section(PPO)
    return NO_FIELDS if ppo is None else with_scored_by(ppo.row_fields, config.scored_by)


def judge_of(run: StageRun, config: CompareConfig) -> ScoreJudge | PeopleJudge:
    """Open the judge. Raises: ValueError for a function, a model or a store that cannot be opened."""
    if config.judge_people:
        num_policies = len(policies_of(run.job)) + 2 + ("pretrain" in run.parents)  # SFT and best-of-n are two more
        batch = run.run_folder.name
        return people_judge(
            "people",
            config.judge_people,
            num_policies,
            run.open_labels,
            batch=batch,
            num_labelers=config.num_labelers,
            seed=run.seed,
        )
    if config.judge_function:
        ((name, spec),) = named_specs([config.judge_function], "judge")
        judge, proxy = function_judge(name, spec), proxy_of(run)
        parts = proxy.external.parts.items() if proxy.external else ()
        trained_on = [part for part_name, part in parts if proxy.objective_weights.get(part_name, 1.0)]
        files = [part.file for part in trained_on if isinstance(part, RewardFunction)]
        if judge.details["sha256"] in map(file_hash, files):
            return described_as_reward(judge, "comes from the same file as the reward")
        return judge
    if config.judge_from:
        ((name, spec),) = named_specs([config.judge_from], "judge")
        judge, model = reward_model_judge(name, spec), proxy_of(run).model
        is_reward = bool(model) and Path(model).resolve() == model_directory(spec.partition("#")[0]).resolve()
        return described_as_reward(judge, "is also the reward") if is_reward and _is_climbed(run.job) else judge
    if config.judge_reward:
        proxy = proxy_of(run)
        reward = proxy.external or Path(proxy.model)
        is_climbed = _is_climbed(run.job)
        return reward_judge("reward", reward, proxy.objective_weights, proxy.steps, is_climbed=is_climbed)
    return gold_judge(run.world.judge_names[0], "gold:../job.toml", run.world)


def _is_climbed(job: JobView) -> bool:
    """Returns whether a policy is trained to raise what `proxy_of` returns."""
    policies = policies_of(job)
    return PPO.name in policies or any(REWARD.name in job.parents(name) for name in policies)


def check(config: CompareConfig, job: JobView) -> None:
    """Check that there are policies to compare, that they start from one model, and that exactly one judge is set."""
    policies = policies_of(job)
    if not policies:
        raise ValueError("compare needs a policy: a stage that trains one, such as [ppo] or [dpo], was expected")
    firsts = [name for name in policies if job.stage(name).round == 1]
    starts = {name: job.substitute(name, job.stage(name).policy_from) for name in firsts}
    if len(set(starts.values())) > 1:
        named = " and ".join(f"{name} from {start or job.stage(name).policy_from}" for name, start in starts.items())
        raise ValueError(f"compare: {named} start; policies that start from one model were expected")
    reward = job.section(REWARD)
    if reward is not None and PPO.name not in policies and len(reward.labels) > 1:
        raise ValueError(
            f"compare: [reward] scores {', '.join(reward.labels)}, and without [ppo] nothing weighs them; a reward"
            " model of one objective was expected"
        )
    judges = [field for field in JUDGES if getattr(config, field)]
    if len(judges) > 1:
        raise ValueError(f"compare.{judges[0]} is given and so is compare.{judges[1]}; one judge was expected")
    if not (judges or job.has_world):
        named = ", ".join(f"compare.{field}" for field in JUDGES)
        raise ValueError(f"compare has no judge: {named} or a [world] was expected")
    ppo = job.section(PPO)
    if problem := unmet_scorers("compare.scored_by", config.scored_by, () if ppo is None else ppo.reward_sources):
        raise ValueError(problem)
    has_reward = reward is not None if ppo is None else not isinstance(ppo.reward, NoReward)
    if config.judge_reward and not has_reward:
        raise ValueError("compare.judge_reward: the job has no reward; [reward], [ppo] or another judge was expected")
    if without_password(config.judge_people) != config.judge_people:
        raise ValueError(
            "compare.judge_people has a password, which would be written into the run's folder; a URL without one was"
            " expected (PostgreSQL reads it from PGPASSWORD or ~/.pgpass)"
        )


def _drawn(run: StageRun, config: CompareConfig, ppo: PPOConfig) -> list[TrainingSample]:
    """Returns the training responses that PPO kept; empty if the judge is people or the reward itself, or if it is a
    world's and the prompts are not, because a world's judge scores only answers to its own prompts.
    """
    is_gold = not (config.judge_from or config.judge_function)
    if config.judge_people or config.judge_reward or (is_gold and not ppo.samples_world):
        return []
    path = run.folder_of(PPO.name) / SAMPLES
    samples = [record_of(line, TrainingSample, str(path)) for line in read_metrics(path)]
    return [sample for sample in samples if sample.kind == "drawn"]


def preflight(run: StageRun, config: CompareConfig) -> None:
    """Check that the judge exists, unless the run trains it, and that every prompt leaves room for its responses."""
    if not config.judge_reward:
        judge_of(run, config)
    tokenizer = start_of(run).tokenizer
    _require_one_template(run, tokenizer)
    limits = config.max_new_tokens, config.on_overlong
    fitting = fitting_prompts(run, tokenizer, config.prompts, *limits, run.tell, _row_fields(run.job, config))
    with_clusters(fitting.prompts, config.prompts, config.cluster_by)
    ppo = run.job.section(PPO)
    if ppo is not None and ppo.external_reward is not None:  # it scores these samples too
        ppo.external_reward.check(OnAccess(len(fitting.prompts), lambda row: fitting.prompts[row].row))
    for stage, sources in _trained_on(run.job).items():
        if num_seen := _num_seen(run, fitting.prompts, sources):
            names = ", ".join(source.source for source in sources)
            run.tell(
                f"{config.prompts.source}: {num_seen:,} of {len(fitting.prompts):,} prompts of [compare] are also among"
                f" those of [{stage}] ({names}), so they are not held out"
            )


def _require_one_template(run: StageRun, tokenizer: Tokenizer) -> None:
    """Raises: ValueError if a policy is trained in another chat template than the first one's, in which all answer."""
    first, *others = (name for name in policies_of(run.job) if run.job.stage(name).round == 1)
    for name in others:
        own = PolicyStart(run.at(name), run.job.stage(name).policy_from).tokenizer
        if own.chat_template != tokenizer.chat_template:
            raise ValueError(
                f"compare: [{name}] is trained in another chat template than [{first}]; the same `chat_template` was"
                " expected, since all policies are compared in one"
            )


def _trained_on(job: JobView) -> dict[str, tuple[DataConfig, ...]]:
    """Returns the sources of prompts that the job's policies are trained on, by stage. Rankings' prompts are not
    included, so [dpo] is not checked.
    """
    ppo, rejection = job.section(PPO), job.section(REJECTION)
    of_ppo = {} if ppo is None else {PPO.name: ppo.prompt_sources}
    return of_ppo if rejection is None else {**of_ppo, REJECTION.name: (rejection.prompts,)}


def _num_seen(run: StageRun, prompts: Sequence[Prompt], trained_on: Sequence[DataConfig]) -> int:
    """Returns how many prompts have the same messages as a prompt in `trained_on`, whatever their ids."""
    compared = Counter(json.dumps(prompt.messages) for prompt in prompts)
    streamed = chain.from_iterable(stream_prompts(run.resolve(source)) for source in trained_on)  # may be many more
    trained = (json.dumps(prompt.messages) for _, prompt in streamed)
    return sum(compared[messages] for messages in {messages for messages in trained if messages in compared})


def plan(planner: Planner, config: CompareConfig) -> StagePlan:
    pool = max(config.best_of, config.num_samples)
    others = len(policies_of(planner.job)) + ("pretrain" in planner.job.stage_names)
    per_prompt = pool + config.num_samples * others
    # Reward models of this stage are bf16 on a GPU, otherwise fp32 (`lm.source`).
    measured_by = {"reference": planner.layout.compute_bytes, "reward model": 2 if planner.layout.is_gpu else 4}
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: start_of(run).tokenizer
    )
    return planner.sampling(
        planner.sizes.num_rows(config.prompts),
        per_prompt,
        config.max_new_tokens,
        lengths,
        at_once=pool,
        measured_by=measured_by,
    )


STAGE = Stage(
    name="compare",
    config=CompareConfig,
    run=run_compare,
    parents=(
        Parent("pretrain", is_read=lambda _, stages: "pretrain" in stages),
        Parent("sft", is_read=lambda _, stages: "sft" in stages),
        Parent("reward", is_read=lambda _, stages: "reward" in stages),
        Parent(POLICIES),
    ),
    optional_sections=("world",),
    model_fields=("judge_from",),
    function_fields=("judge_function",),
    check=check,
    output="results.json",
    context_tokens=lambda config: {"max_new_tokens": config.max_new_tokens + 1},
    preflight=preflight,
    plan=plan,
    report=REPORTER,
)
