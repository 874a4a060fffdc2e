"""PPO as a stage: the scale of the scores, the placement of the roles, and the checks before a run.

`ppo.loop` is the training itself.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from shutil import rmtree
from statistics import mean, stdev

import torch
from torch import Tensor

from files.hashes import derive_seed
from files.records import read_record
from lm.hub import model_directory
from lm.samplers.vllm_engine import require_tried, require_vllm
from lm.tensor_parallel import largest_team, require_divisible
from lm.tokenizer import Tokenizer
from lm.weights import read_config
from ppo.config import PeopleSource, PPOConfig
from ppo.controller import GoldScores, prompt_order
from ppo.environments.environment import Environment
from ppo.loop import train
from ppo.placement import VLLM
from ppo.plan import plan, policy_tokenizer, reward_section
from ppo.prompts import PromptSource, first_distinct
from ppo.rank import InitialModels, ScoreScale, TokenStream
from ppo.report import REPORTER, names_of
from ppo.roles import Roles
from ppo.rollout import Rollout
from ppo.routes import require_routes
from ppo.shared_body import adapter_of, require_same_body, require_same_shape
from pretrain.stage import STAGE as PRETRAIN
from pretrain.stage import tokenize
from reward.external import ExternalReward, ModelReward, NoReward
from reward.judge import JudgeReward
from reward.report import RewardResults
from reward.sampling import SamplingSpec, StageScore, sample_everywhere
from reward.scoring import labels_of, weights_by_label
from reward.sources import REWARD_KEYS
from reward.verifiers.verifier import Verifier
from stages.contract import Parent, Stage
from stages.data import SAMPLES, Fitting, OnAccess, fitting_prompts, joined
from stages.run import JobView, StageRun
from training.data import Prompt, untold
from training.notices import say
from training.tokens import array_path

# What the console shows meanwhile.
MEASURES_SCALE = (
    "responses of the initial policy sampled, to measure the spread of its scores (docs/troubleshooting.md)"
)
SCALE_PROMPTS = 512  # prompts on which the score scale of an unknown reward model is measured


def was_measured(run: StageRun) -> bool:
    """Returns whether the reward stage has scored samples of PPO's initial policy, which [collect] sampled.

    Samples that a rule chose do not count: their scores differ from those of all samples.
    """
    if not ({"sft", "reward"} <= set(run.parents) and "collect" in run.at("reward").parents):
        return False
    return not run.job.stage(run.at("reward").own("collect")).chooses


def score_scale(
    run: StageRun, policy: Path, judge: Path | ExternalReward, prompts: Sequence[Prompt], config: PPOConfig
) -> ScoreScale:
    """Returns the mean and standard deviation of the scores of the initial policy's own samples: the unit of PPO's
    scores. A verifier's scores keep their own, 0 and 1, which also mean something if no sample is right yet.

    If [collect] sampled that policy, the reward stage has measured them. Otherwise they are measured here, on one
    sample per prompt: published rankings contain responses of other policies, whose scores may differ. The samples are
    kept until the stage is done, so a run that resumes has the same scale. If all have the same score, the standard
    deviation is taken to be 1: other responses may get another one.

    Raises:
        ValueError: a reward model whose scale matters gives every sample the same score, or too many samples fail.
    """
    if isinstance(judge, NoReward | Verifier) or config.environment is not None:  # conversations have no scores yet
        return ScoreScale(0.0, 1.0)
    if was_measured(run) and not config.reward.objective_weights:
        path = run.folder_of("reward") / "results.json"
        where, scale = str(path), _recorded_scale(path)
    else:
        where = run.job.substitute(run.name, run.own("reward")) if isinstance(judge, Path) else judge.short_name
        where, scale = where or str(judge), _measured_scale(run, policy, judge, prompts, config)
    if scale.std > 0:
        return scale
    if isinstance(judge, Path) and config.score_coef and config.advantage.scale != "group":
        raise ValueError(
            f"{where}: the scores of the initial policy's samples have a spread of {scale.std}; a reward that tells"
            " them apart was expected"
        )
    say(f"{where}: all samples of the initial policy score {scale.mean:g}; a score of 1 more counts as one unit")
    return replace(scale, std=1.0)


def _recorded_scale(results_file: Path) -> ScoreScale:
    """Returns the scale that the reward stage has measured on [collect]'s samples."""
    results = read_record(results_file, RewardResults)
    assert results.sample_score_mean is not None, "a reward model of a single objective has a mean score"
    assert results.sample_score_std is not None, "a reward model of a single objective has a spread of scores"
    return ScoreScale(results.sample_score_mean, results.sample_score_std)


def _measured_scale(
    run: StageRun, policy: Path, judge: Path | ExternalReward, prompts: Sequence[Prompt], config: PPOConfig
) -> ScoreScale:
    """Samples the initial policy once for each of the first `SCALE_PROMPTS` prompts, and returns the scores' scale.

    Raises:
        ValueError: too many samples fail.
    """
    spec = SamplingSpec(
        policy=policy,
        num_samples=1,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=derive_seed(run.seed, "ppo", "scale"),
        precision=run.engine.resolved_precision(),
        reward=str(judge) if isinstance(judge, Path) else "",
        objective_weights=config.reward.objective_weights,
        external_reward=None if isinstance(judge, Path) else judge,
        chat_template=config.chat_template,
    )
    # Workers that only learn may be of a number that their generators' teams do not divide.
    shape = read_config(policy, "language")[0]
    team_size = largest_team(shape, config.sampler.tensor_parallel_size, run.workers().num_workers)
    samples = sample_everywhere(run, "scale", spec, prompts[:SCALE_PROMPTS], shown=MEASURES_SCALE, team_size=team_size)
    scores = [sample.score for sample in samples if isfinite(sample.score)]
    num_failed = len(samples) - len(scores)
    if len(scores) < 2 or num_failed > config.max_failed_share * len(samples):
        rmtree(run.folder / SAMPLES / "scale")  # so that the next attempt scores again
        failures = [f" The first: {sample.failure}" for sample in samples if not isfinite(sample.score)]
        raise ValueError(
            f"{num_failed} of {len(samples)} samples of the initial policy have no finite score;"
            f" ppo.max_failed_share allows {config.max_failed_share:.0%}, and at least two scores are needed."
            + "".join(failures[:1])
        )
    return ScoreScale(mean(scores), stdev(scores))


def _scale_prompts(config: PPOConfig, fitting: Fitting, seed: int) -> Sequence[Prompt]:
    """Returns prompts to measure the score scale on, from the first on. With several sources, they are those that the
    first iterations draw.
    """
    if not fitting.sizes:
        return fitting.prompts
    rows = first_distinct(prompt_order(config, fitting.sizes, seed), SCALE_PROMPTS)
    return [fitting.prompts[row] for row in rows]


def prompts_of(
    stage: StageRun, config: PPOConfig, tokenizer: Tokenizer, tell: Callable[[str], None] = untold
) -> Fitting:
    """Returns the prompts of all sources with their tokens. For `tell` and what it raises, see `fitting_prompts`."""
    parts = [
        fitting_prompts(
            stage,
            tokenizer,
            source,
            config.max_new_tokens,
            config.on_overlong,
            tell,
            config.row_fields_of(source),
            config.tools,
            name=f"prompts-of-{source.title}" if isinstance(source, PromptSource) else "prompts",
        )
        for source in config.prompt_sources
    ]
    names = [source.title for source in config.named_sources]
    return joined(names, parts) if names else parts[0]


@dataclass(frozen=True)
class Placed:
    """PPO's roles on their ranks, and what they work on."""

    roles: Roles
    models: InitialModels
    fitting: Fitting


def placed(stage: StageRun, config: PPOConfig, scale: ScoreScale | None = None) -> Placed:
    """Measure the scale of the scores unless it is given, and place the roles on workers."""
    policy = stage.start("sft")
    tokenizer = Tokenizer.load(policy).with_template(config.chat_template)
    fitting = prompts_of(stage, config, tokenizer)
    prompts = fitting.prompts
    external = config.external_reward
    judge = stage.start("reward") if external is None else external.prepared(stage.folder)
    if config.shared_body and isinstance(judge, Path):
        require_same_body(policy, judge)
    stream = None
    if config.ptx_rows:
        pretraining = stage.job.section(PRETRAIN)
        assert pretraining is not None, "pretraining rows come from the pretraining stage, a parent of this one"
        tokens = tokenize(stage.at(PRETRAIN.name), stage.resolve(pretraining))
        stream = TokenStream(array_path(tokens.training, "tokens"), pretraining.seq_len)
    scale = scale or score_scale(stage, policy, judge, _scale_prompts(config, fitting, stage.seed), config)
    scale = replace(scale, coef=config.score_coef)
    adapter_seed = derive_seed(stage.seed, "ppo", "lora")
    teachers = tuple(model_directory(teacher.model) for teacher in config.teachers)
    models = InitialModels(policy, judge, scale, stream, adapter_seed, teachers, config.chat_template)
    learners = generators = scorers = stage.workers()
    python = generator_python(config)
    if not config.placement.roles_share_ranks:
        generators = stage.workers.extra_group("generators", config.placement.num_generators, python)
        scorers = stage.workers.extra_group("scorers", config.placement.num_scorers)
    elif python:  # another interpreter needs another process, next to each learner
        generators = stage.workers.extra_group("generators", learners.num_workers, python, on_workers=True)
    conversations = OnAccess(len(prompts), lambda row: prompts[row].messages)
    rows = OnAccess(len(prompts), lambda row: prompts[row].row) if config.row_fields.key else ()
    roles = Roles.on_groups(
        config, stage.engine, models, conversations, rows, learners=learners, generators=generators, scorers=scorers
    )
    return Placed(roles, models, fitting)


def run_ppo(stage: StageRun, config: PPOConfig) -> None:
    """Place the roles, and run all iterations."""
    ppo = placed(stage, config)
    gold = _gold_scores(stage, config, ppo)
    train(
        stage.context(),
        config,
        ppo.roles,
        ppo.models,
        ppo.fitting,
        enter=stage.enter,
        gold=gold,
        open_labels=stage.open_labels,
    )
    ppo.roles.close()


def _gold_scores(stage: StageRun, config: PPOConfig, ppo: Placed) -> GoldScores | None:
    """Returns the world's scorer of rollouts; None unless a judge scores responses to prompts of the job's world."""
    section, world = stage.job.section(STAGE), stage.opened_world
    is_of_world = section is not None and section.samples_world
    if world is None or not is_of_world or not isinstance(config.reward, JudgeReward):
        return None
    tokenizer, prompts = ppo.models.tokenizer, ppo.fitting.prompts

    def gold(rollout: Rollout) -> Tensor:
        asked = [str(prompts[row].messages[-1]["content"]) for row in rollout.prompt_rows_B.tolist()]
        texts = [tokenizer.decode(response).strip() for response in rollout.token_lists()[1]]
        return torch.tensor(world.gold_scores(asked, texts))

    return gold


def generator_python(config: PPOConfig) -> str:
    """Returns the Python interpreter of the generators; "" = this one.

    Raises: ValueError if it does not exist or has no vLLM.
    """
    return require_vllm(config.sampler.python) if isinstance(config.sampler, VLLM) else ""


def extra_ranks(config: PPOConfig) -> int:
    """Returns the number of ranks in addition to the job's workers: generators and scorers, if disaggregated."""
    return config.placement.num_generators + config.placement.num_scorers


def worker_teams(config: PPOConfig) -> dict[str, int]:
    """Returns the size of the teams in which colocated workers sample."""
    is_colocated = config.placement.roles_share_ranks
    return {"sampler.tensor_parallel_size": config.sampler.tensor_parallel_size} if is_colocated else {}


def check(config: PPOConfig, job: JobView) -> None:
    """Check that a team can share the policy, that the weights name the objectives of [reward], and that a shared body
    fits [reward] and [engine].
    """
    if job.model is not None:
        require_divisible(job.model, config.sampler.tensor_parallel_size, "ppo.sampler.tensor_parallel_size")
        require_routes(config, job.model)
        if isinstance(config.sampler, VLLM):
            require_tried("model", job.model)
    reward = reward_section(job)
    own_reward = reward is not None and "reward" in job.parents(STAGE.name)
    if reward is not None and own_reward:
        weights_by_label("[reward]", reward.labels, config.reward.objective_weights)
    if not config.shared_body:
        return
    if job.engine.sequence_parallel_size > 1:
        raise ValueError(
            f"ppo.lora.shared_body with engine.sequence_parallel_size {job.engine.sequence_parallel_size}: a shared"
            " body reads whole rows; 1 was expected"
        )
    if job.engine.zero_stage == 3:
        raise ValueError(
            "ppo.lora.shared_body with engine.zero_stage 3, which shards each role's body; 0 to 2 was expected"
        )
    if reward is None or not own_reward:
        return
    if reward.lora is None:
        raise ValueError("ppo.lora.shared_body: [reward] trains all weights of its model; reward.lora was expected")
    if reward.init_from != config.init_from:
        starts = [name or "the SFT stage's model" for name in (reward.init_from, config.init_from)]
        raise ValueError(
            f"ppo.lora.shared_body: [reward] starts from {starts[0]} and [ppo] from {starts[1]}; the same model was"
            " expected"
        )


def preflight(stage: StageRun, config: PPOConfig) -> None:
    """Check the objectives of a reward model that no stage trains, that every prompt leaves room for a response, that
    the reward can score it, the teachers, and that the generators' Python has vLLM if they need it.
    """
    generator_python(config)
    for number, teacher in enumerate(config.teachers):
        _check_teacher(stage, f"ppo.teachers.{number}.model", teacher.model, config)
    tokenizer = policy_tokenizer(stage, config)
    if config.environment is not None and isinstance(config.reward, ModelReward):
        _check_reads_conversations(stage, config.reward, tokenizer)
    if isinstance(config.reward, ModelReward) and config.reward.model:
        judge = stage.start("reward")
        weights_by_label(str(judge), labels_of(judge), config.reward.objective_weights)
        if config.shared_body and config.init_from:
            require_same_shape(stage.start("sft"), judge)
        elif config.shared_body:  # the policy is still to be trained
            adapter_of(judge)
    with _saying_whose_template(stage, config):
        fitting = prompts_of(stage, config, tokenizer, stage.tell)
        if config.environment is not None:
            _check_replies(tokenizer, config.environment)
    rows = OnAccess(len(fitting.prompts), lambda row: fitting.prompts[row].row)
    for source in (config.external_reward, None if config.alarm is None else config.alarm.source):
        if isinstance(source, PeopleSource):
            source.check(stage.open_labels)
        elif source is not None:
            source.check(rows)
    if config.environment is not None:
        config.environment.check(rows)


@contextmanager
def _saying_whose_template(stage: StageRun, config: PPOConfig) -> Iterator[None]:
    """Extend an error about the chat template: say where the template comes from and how to set another."""
    try:
        yield
    except ValueError as error:
        if "chat_template" not in str(error):
            raise
        if config.chat_template:
            raise ValueError(f"{error}. [ppo] uses the template ppo.chat_template") from None
        if not config.init_from:
            raise ValueError(
                f'{error}. [ppo] uses the template of [sft]: set sft.chat_template, such as to "chat"'
            ) from None
        raise ValueError(
            f"{error}. [ppo] uses the template of ppo.init_from, which is in {stage.start('sft')}. Start from a model"
            ' that was trained in such a template, or set ppo.chat_template, such as to "chat"'
        ) from None


def _check_reads_conversations(stage: StageRun, reward: ModelReward, tokenizer: Tokenizer) -> None:
    """Raises: ValueError if the reward model reads texts, since a conversation with an environment is not one."""
    if stage.tokenizer_of("reward") == tokenizer:
        return
    own = "ppo.environment: the tokenizer or chat template of [reward]"
    whose = f"ppo.reward.model: the tokenizer of {stage.start('reward')}" if reward.model else own
    raise ValueError(
        f"{whose} differs from the policy's; a reward model that reads conversations with ppo.environment as the policy"
        " does was expected"
    )


def _check_replies(tokenizer: Tokenizer, environment: Environment) -> None:
    """Check that the chat template can write replies of the roles that an environment's messages have. Raises:
    ValueError.
    """
    role = "tool" if environment.tools else "user"
    try:
        tokenizer.encode_reply([{"role": role, "content": "A reply."}])
    except ValueError as error:
        raise ValueError(f"ppo.environment: a reply of the role {role!r}: {error}") from None


def _check_teacher(stage: StageRun, field: str, name: str, config: PPOConfig) -> None:
    """Check that a teacher is a language model with the policy's tokenizer, and can read whatever the policy samples.

    Raises: ValueError naming field and folders.
    """
    try:
        folder = model_directory(name)
        shape = read_config(folder, "language")[0]
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if Tokenizer.load(folder).with_template(config.chat_template) != policy_tokenizer(stage, config):
        raise ValueError(
            f"{field}: the tokenizer of {name} differs from that of the policy, {stage.start('sft')}; a teacher that"
            " reads the same tokens was expected"
        )
    if shape.vocab_size < stage.model.vocab_size:  # published models pad the same vocabulary to different sizes
        raise ValueError(
            f"{field}: {name} has embeddings of {shape.vocab_size} tokens, and the policy, which may sample any of"
            f" its own, of {stage.model.vocab_size}; a teacher with at least as many was expected"
        )
    if shape.max_position_embeddings < stage.model.max_position_embeddings:
        raise ValueError(
            f"{field}: {name} reads at most {shape.max_position_embeddings} tokens, and the policy"
            f" {stage.model.max_position_embeddings}; a teacher that reads at least as many was expected"
        )


def score_of(config: PPOConfig) -> StageScore:
    """Returns the score that the policy is trained to raise."""
    return StageScore(
        name=names_of(config, starts_from_sft=False).scorer,
        external=config.external_reward,
        objective_weights=config.reward.objective_weights,
        row_fields=lambda: config.row_fields,
        parts=config.reward_sources,
        samples_world=config.samples_world,
    )


STAGE = Stage(
    name="ppo",
    config=PPOConfig,
    run=run_ppo,
    parents=(
        Parent("sft", substitutes=("init_from",)),
        Parent("reward", substitutes=REWARD_KEYS, is_read=lambda config, _: not isinstance(config.reward, NoReward)),
        Parent("pretrain", is_read=lambda config, _: config.ptx_rows > 0),
    ),
    policy_from="sft",
    tokenizer=policy_tokenizer,
    model_fields=("init_from", "reward.model", "reward.sources.*.model", "teachers.*.model", "alarm.source.model"),
    function_fields=(
        "reward.function",
        "reward.sources.*.function",
        "environment.class_name",
        "alarm.source.function",
    ),
    context_tokens=lambda config: {"max_new_tokens": config.max_new_tokens + 1},
    split_rows=lambda config: {"rollout_batch_size": config.sampled_batch_size, "ptx.rows": config.ptx_rows},
    worker_teams=worker_teams,
    extra_ranks=extra_ranks,
    check=check,
    preflight=preflight,
    layout_keys=frozenset(
        (
            "placement.kind",
            "placement.num_generators",
            "placement.num_scorers",
            "placement.weight_transport",
            "sampler.python",
            "sampler.tensor_parallel_size",
            "sampler.max_rows",
            "memory",
            "lora.sends",
            "reward.timeout_seconds",
            "reward.max_wait_seconds",
            "environment.max_wait_seconds",
            "reward.parallel",
            "reward.cache",
            "reward.budget",
        )
    ),
    plan=plan,
    title=lambda config: config.advantage.algorithm,
    trained_prompts=lambda config: config.prompt_sources,
    score=score_of,
    report=REPORTER,
)
