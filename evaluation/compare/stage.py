"""The compare stage: compares policies of the run on held-out prompts, by a judge that training never saw.

It knows no trainer: it asks stages through their contract what they trained, on which prompts, to raise which score.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from evaluation.compare.folder import CompareConfig
from evaluation.compare.judges import (
    described_as_reward,
    described_by_data,
    function_judge,
    gold_judge,
    people_judge,
    reward_judge,
    reward_model_judge,
    without_password,
)
from evaluation.compare.report.stage import REPORTER
from evaluation.compare.sampled import Drawn, Sampled, compare_sampled
from evaluation.inputs import can_show, clusters_of, named_specs, with_clusters
from evaluation.judges.judge import ScoreJudge
from evaluation.judges.people import PeopleJudge
from evaluation.policies import INITIAL, PRETRAINED, TRAINED, Policy
from files.hashes import derive_seed, file_hash
from files.records import record_of
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from reward.external import ExternalReward, NoReward, RewardFunction
from reward.sampling import Sample, SamplingSpec, StageScore, sample_everywhere
from reward.sources import unmet_scorers, with_scored_by
from stages.contract import POLICIES, Parent, Stage
from stages.data import OnAccess, fitting_prompts
from stages.lineage import data_of
from stages.plan import Planner, Sampling
from stages.reports.text import DEFAULT_NAMES, INITIAL_POLICY
from stages.run import JobView, StageRun
from training.data import NO_FIELDS, DataConfig, Prompt, RowFields, stream_prompts
from training.metrics import read_metrics

# The stage's parents, and what the comparison calls the policies that they leave.
PRETRAIN, SFT, REWARD = "pretrain", "sft", "reward"
NAMES = {PRETRAIN: "pretrained", SFT: "sft"}
SAMPLES = "samples.jsonl"  # in a stage's folder: responses kept for reading
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
    def title(self) -> str:
        """What reports call it: by the stage that trains it, if a stage of this job does."""
        title = "" if self.run.job.substitute(self.run.name, self.parent) else _title(self.run.job, self.parent)
        return title or INITIAL_POLICY

    def model(self) -> Path:
        return self.run.start(self.parent)


@dataclass(frozen=True)
class Proxy:
    """A reward model's directory, or an external reward. If both are empty, there is no proxy."""

    model: str = ""
    objective_weights: Mapping[str, float] = field(default_factory=dict)
    external: ExternalReward | None = None

    @property
    def exists(self) -> bool:
        return bool(self.model) or self.external is not None


def run_compare(run: StageRun, config: CompareConfig) -> None:
    """Sample every policy on held-out prompts, measure, judge."""
    start = start_of(run)
    tokenizer, initial, proxy = start.tokenizer, start.model(), proxy_of(run)
    fitting = fitting_prompts(
        run, tokenizer, config.prompts, config.max_new_tokens, config.on_overlong, keeps=_row_fields(run.job, config)
    )
    prompts = with_clusters(fitting.prompts, config.prompts, config.cluster_by)
    config = config.sized(len(prompts))

    def samples_of(policy: Policy) -> list[Sample]:
        # The pretrained model has seen no chat template, so it is prompted with the initial policy's.
        is_pool = policy.kind == INITIAL and proxy.exists
        spec = SamplingSpec(
            policy=initial if policy.kind == INITIAL else run.model_of(policy.trainer),
            num_samples=max(config.best_of, config.num_samples) if is_pool else config.num_samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(run.seed, "compare", PRETRAIN if policy.kind == PRETRAINED else policy.name),
            precision=run.engine.resolved_precision(),
            reference=str(initial),
            reward=proxy.model,
            objective_weights=proxy.objective_weights,
            external_reward=proxy.external,
            template_of=str(initial),
            chat_template=start.chat_template,
        )
        return sample_everywhere(run, PRETRAIN if policy.kind == PRETRAINED else policy.name, spec, prompts)

    policies = policies_in(run, prompts)
    raising = next((policy for policy in policies if policy.raises_score), None)
    metrics = read_metrics(run.folder_of(raising.trainer) / "metrics.jsonl") if raising is not None else []
    scorer = scorer_in(run.job)
    sampled = Sampled(
        prompts=prompts,
        policies=[(policy, samples_of(policy)) for policy in policies],
        has_pool=proxy.exists,
        seed=run.seed,
        drawn=() if raising is None else _drawn(run, config, raising.trainer),
        scorer=DEFAULT_NAMES.scorer if scorer is None else scorer[1].name,
    )

    def progress(step: str) -> Callable[[int, int], None]:
        return lambda done, total: run.show(done, total, step)

    training = [(line["kl_nats"], line["score"]) for line in metrics if {"kl_nats", "score"} <= line.keys()]
    run.write_results(
        replace(
            compare_sampled(run.folder, config, sampled, judge_of(run, config), progress),
            training_kl_nats=tuple(kl for kl, _ in training),
            training_scores=tuple(score for _, score in training),
            overlong=fitting.overlong or None,
            sources=fitting.sources,
        )
    )


def _title(job: JobView, name: str) -> str:
    """Returns what reports call the model of a stage, with its round if there are several; "" if its name is enough."""
    stage = job.stage(name)
    section = job.section(stage)
    title = stage.title(section) if stage.title and section is not None else ""
    rounds = [other for other in job.stage_names if _first_round(job, other) == _first_round(job, name)]
    return f"{title}, round {stage.round}" if title and len(rounds) > 1 else title


def policies_of(job: JobView) -> tuple[str, ...]:
    """The stages of the job whose policies are compared, in order."""
    return tuple(name for name in job.stage_names if job.stage(name).policy_from)


def start_of(run: StageRun) -> PolicyStart:
    """Returns the model that the policies start from: the initial policy, and the reference of every KL."""
    name = policies_of(run.job)[0]
    return PolicyStart(run.at(name), run.job.stage(name).policy_from)


def policies_in(run: StageRun, prompts: Sequence[Prompt]) -> list[Policy]:
    """Returns what is compared: the pretrained model if the job has one, the initial policy, and every trained one."""
    seen, job, scorer = seen_by_stage(run, prompts), run.job, scorer_in(run.job)
    policies = [Policy(NAMES[PRETRAIN], PRETRAINED, PRETRAINED, trainer=PRETRAIN)] if PRETRAIN in run.parents else []
    policies.append(Policy(NAMES[SFT], INITIAL, start_of(run).title))
    for name in policies_of(job):
        trainers = _trainers(job, name)
        policies.append(
            Policy(
                name,
                TRAINED,
                _title(job, name),
                trainer=name,
                raises_score=scorer is not None and _first_round(job, name) == scorer[0],
                chat_template=PolicyStart(run.at(name), job.stage(name).policy_from).chat_template,
                seen={stage: seen[stage] for stage in trainers if stage in seen},
                is_seen_known=all(stage in seen for stage in trainers),
            )
        )
    return policies


def _trainers(job: JobView, name: str) -> list[str]:
    """Returns the stages that trained a stage's policy one after the other, from the initial policy on."""
    before = job.stage(name).policy_from
    return [*(_trainers(job, before) if before in policies_of(job) else ()), name]


def _first_round(job: JobView, name: str) -> str:
    return job.stage(name).repeats or name


def seen_by_stage(run: StageRun, prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    """Returns, by stage that trains a policy, the ids of the prompts that it trains on too: those with the same
    messages, whatever their ids. A stage that does not say what it trains on is left out.
    """
    by_messages: dict[str, list[str]] = {}
    for prompt in prompts:
        by_messages.setdefault(json.dumps(prompt.messages), []).append(prompt.prompt_id)
    seen: dict[str, list[str]] = {}
    for name in policies_of(run.job):
        if (first := _first_round(run.job, name)) in seen:  # later rounds have the same prompts
            seen[name] = seen[first]
        elif (sources := _trained_on(run.job, name)) is not None:
            streamed = chain.from_iterable(
                stream_prompts(run.resolve(source)) for source in sources
            )  # may be many more
            trained = {messages for _, prompt in streamed if (messages := json.dumps(prompt.messages)) in by_messages}
            seen[name] = [
                prompt_id for messages, ids in by_messages.items() if messages in trained for prompt_id in ids
            ]
    return seen


def _trained_on(job: JobView, name: str) -> tuple[DataConfig, ...] | None:
    """Returns the sources of the prompts that a stage trains its policy on; None if it does not say."""
    stage = job.stage(name)
    section = job.section(stage)
    return None if stage.trained_prompts is None or section is None else stage.trained_prompts(section)


def scorer_in(job: JobView) -> tuple[str, StageScore] | None:
    """Returns the last stage that learns a score, or trains its policy to raise one, and the score."""
    for name in reversed(job.stage_names):
        stage = job.stage(name)
        section = job.section(stage)
        if stage.round == 1 and stage.score is not None and section is not None:
            score = stage.score(section)
            assert isinstance(score, StageScore), f"[{name}] scores by a {type(score).__name__}"
            return name, score
    return None


def proxy_of(run: StageRun) -> Proxy:
    """Returns what scores the samples in addition to the judge, and chooses best-of-n: the score that a policy is
    trained to raise, or without such a policy the job's reward model, if it has one.
    """
    if (scorer := scorer_in(run.job)) is None:
        return Proxy()
    name, score = scorer
    if name not in policies_of(run.job):
        return Proxy(str(run.model_of(name)) if name in run.parents else "")
    if isinstance(score.external, NoReward):
        return Proxy()
    external = score.external and score.external.prepared(run.folder_of(name))
    model = "" if external else str(run.at(name).start(REWARD))
    return Proxy(model, score.objective_weights, external)


def _row_fields(job: JobView, config: CompareConfig) -> RowFields:
    """Returns the fields that prompts keep for the reward that a policy is trained by, which scores the samples too."""
    scorer = scorer_in(job)
    is_raised = scorer is not None and scorer[0] in policies_of(job)
    return with_scored_by(scorer[1].row_fields(), config.scored_by) if scorer and is_raised else NO_FIELDS


def judge_of(run: StageRun, config: CompareConfig) -> ScoreJudge | PeopleJudge:
    """Open the judge. Raises: ValueError for a function, a model or a store that cannot be opened."""
    if config.judge_people:
        num_policies = (
            len(policies_of(run.job)) + 2 + (PRETRAIN in run.parents)
        )  # the initial policy and best-of-n are two more
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
        folder = model_directory(spec.partition("#")[0]).resolve()
        if model and Path(model).resolve() == folder and _is_climbed(run.job):
            return described_as_reward(judge, "is also the reward")
        return described_by_data(judge, data_of(folder.parent), _data_by_policy(run))
    if config.judge_reward:
        proxy = proxy_of(run)
        reward = proxy.external or Path(proxy.model)
        is_climbed = _is_climbed(run.job)
        judge = reward_judge("reward", reward, proxy.objective_weights, is_climbed=is_climbed)
        return judge if is_climbed else described_by_data(judge, _data(run, REWARD), _data_by_policy(run))
    return gold_judge(run.world.judge_names[0], "gold:../job.toml", run.world)


def _data_by_policy(run: StageRun) -> dict[str, set[str]]:
    """Returns the hashes of what each policy learned from, by its title: its own stage and all before it, with the
    reward models that they raise.
    """
    data: dict[str, set[str]] = {}

    def with_parents(name: str) -> set[str]:
        if name not in data:
            data[name] = _data(run, name).union(*map(with_parents, set(run.job.parents(name)) & {*run.job.stage_names}))
        return data[name]

    return {_title(run.job, name) or name: with_parents(name) for name in policies_of(run.job)}


def _data(run: StageRun, name: str) -> set[str]:
    """Returns the hashes of the files that a stage learns from, without those of which it reads only the prompts."""
    section, prompts = run.job.section(run.job.stage(name)), _trained_on(run.job, name) or ()
    hashes = {} if section is None else run.source_hashes(section.model_dump())
    return {value for source, value in hashes.items() if source not in {data.source for data in prompts}}


def _is_climbed(job: JobView) -> bool:
    """Returns whether a policy is trained to raise what `proxy_of` returns."""
    policies, scorer = policies_of(job), scorer_in(job)
    return scorer is not None and (scorer[0] in policies or any(scorer[0] in job.parents(name) for name in policies))


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
    scorer, score = scorer_in(job) or ("", StageScore())
    if scorer not in policies and len(score.objectives) > 1:
        raise ValueError(
            f"compare: [{scorer}] scores {', '.join(score.objectives)}, and without [ppo] nothing weighs them; a reward"
            " model of one objective was expected"
        )
    judges = [field for field in JUDGES if getattr(config, field)]
    if len(judges) > 1:
        raise ValueError(f"compare.{judges[0]} is given and so is compare.{judges[1]}; one judge was expected")
    if not (judges or job.has_world):
        named = ", ".join(f"compare.{field}" for field in JUDGES)
        raise ValueError(f"compare has no judge: {named} or a [world] was expected")
    if problem := unmet_scorers("compare.scored_by", config.scored_by, score.parts):
        raise ValueError(problem)
    if config.judge_reward and (not scorer or isinstance(score.external, NoReward)):
        raise ValueError("compare.judge_reward: the job has no reward; [reward], [ppo] or another judge was expected")
    if without_password(config.judge_people) != config.judge_people:
        raise ValueError(
            "compare.judge_people has a password, which would be written into the run's folder; a URL without one was"
            " expected (PostgreSQL reads it from PGPASSWORD or ~/.pgpass)"
        )


def _drawn(run: StageRun, config: CompareConfig, stage: str) -> list[Drawn]:
    """Returns the training responses that a stage kept; empty if the judge is people or the reward itself, or if it is
    a world's and the prompts are not, because a world's judge scores only answers to its own prompts.
    """
    is_gold = not (config.judge_from or config.judge_function)
    scorer = scorer_in(run.job)
    if config.judge_people or config.judge_reward or (is_gold and not (scorer and scorer[1].samples_world)):
        return []
    path = run.folder_of(stage) / SAMPLES
    return [record_of(line, Drawn, str(path)) for line in read_metrics(path) if line.get("kind") == "drawn"]


def preflight(run: StageRun, config: CompareConfig) -> None:
    """Check that the judge exists, unless the run trains it, and that every prompt leaves room for its responses."""
    if not config.judge_reward:
        judge_of(run, config)
    tokenizer = start_of(run).tokenizer
    _require_one_template(run, tokenizer)
    limits = config.max_new_tokens, config.on_overlong
    fitting = fitting_prompts(run, tokenizer, config.prompts, *limits, run.tell, _row_fields(run.job, config))
    prompts = with_clusters(fitting.prompts, config.prompts, config.cluster_by)
    num_clusters = len(set(clusters_of(prompts).values()))
    shows = can_show(len(prompts), config.sized(len(prompts)).num_samples, num_clusters)
    run.tell(f"{config.prompts.source}: for [compare], {shows}")
    scorer = scorer_in(run.job)
    if scorer is not None and scorer[1].external is not None:  # it scores these samples too
        scorer[1].external.check(OnAccess(len(fitting.prompts), lambda row: fitting.prompts[row].row))
    for stage, prompt_ids in seen_by_stage(run, fitting.prompts).items():
        if prompt_ids and run.job.stage(stage).round == 1:
            names = ", ".join(source.source for source in _trained_on(run.job, stage) or ())
            run.tell(
                f"{config.prompts.source}: {len(prompt_ids):,} of {len(fitting.prompts):,} prompts of [compare] are"
                f" also among those of [{stage}] ({names}), so they are not held out"
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


def plan(planner: Planner, config: CompareConfig) -> Sampling:
    config = config.sized(planner.sizes.num_rows(config.prompts))
    pool = max(config.best_of, config.num_samples)
    others = len(policies_of(planner.job)) + (PRETRAIN in planner.job.stage_names)
    per_prompt = pool + config.num_samples * others
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: start_of(run).tokenizer
    )
    return Sampling(
        planner.model,
        planner.sizes.num_rows(config.prompts),
        per_prompt,
        config.max_new_tokens,
        lengths,
        at_once=pool,
        measured_by=("reference", "reward model"),
    )


STAGE = Stage(
    name="compare",
    config=CompareConfig,
    run=run_compare,
    parents=(
        Parent(PRETRAIN, is_read=lambda _, stages: PRETRAIN in stages),
        Parent(SFT, is_read=lambda _, stages: SFT in stages),
        Parent(REWARD, is_read=lambda _, stages: REWARD in stages),
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
