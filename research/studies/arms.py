"""The arms of `python -m research.study`: ordinary jobs, each derived from research/jobs/study.toml by a few changes.

Arms of one seed share as much as possible: the base pretrains, fine-tunes and collects once, and the others start from
its models and comparisons. An arm differs only in what its entry here names. The arms of the first five findings:

    base           pretraining, SFT, comparisons with several labelers per task
    small-base     a language model with a quarter of the layers and half the hidden size, for a small reward model
    reward-full    every task, one labeler per task
    reward-few     a sixth of the tasks, one labeler per task, twice the epochs
    reward-small   as reward-full, on the small base
    reward-2, -4   half the tasks with two labelers each, a quarter with four: equally many judgments and updates
    ppo-full, -few, -small    PPO against each of these reward models, without a KL penalty
    ppo-kl-low, -kl-high      as ppo-full, with a KL penalty
    ppo-ptx        as ppo-kl-low, with gradients of pretraining mixed in

The arms of `research.study algorithms` and `research.study lora` share one set of labels and one reward model:

    ppo, rloo, grpo, dr-grpo -1, -2, -3   as in docs/algorithms.md, without a KL penalty, at a third of the job's
                                          learning rate, at that rate, and at three times it
    dpo, ipo -1, -2, -3                   on the rankings of `reward-full`, with beta .3, .1 and .03
    rejection-1, -2, -3                   best of 4, 16 and 64 samples by `reward-full`; as many samples as PPO
    random-1, -2, -3                      the same samples; a random one is kept in place of the best
    lora-1, -2, -3                        as ppo, with adapters, at ten times its learning rates
    shared-1, -2, -3                      as lora, on one body with the reward model `reward-lora`
    reward-lora                           as `reward-full`, with adapters on the base's SFT model, at three times its
                                          rate

The arms of `research.study judge` are against a language model that grades by a rubric (heed/worlds/gold.py):

    judge          SFT of the base's pretrained model on graded answers
    ppo-judge      PPO against it, without a KL penalty
    ppo-dropout    the same, and half of the criteria are left out at random

Each algorithm has the same budget: three values of the setting that moves it along KL, chosen before any run. An
algorithm's curve includes the policies of all three, so none is selected by its result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.worlds.gold import RUBRIC
from lm.model import ScalarModel
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from ppo.config import PPOConfig
from ppo.stage import STAGE as PPO
from preferences.records import Ranking
from reward.collect import write_rankings
from reward.config import RankingsConfig
from reward.prepared import read_rankings
from reward.stage import STAGE as REWARD
from sft.stage import STAGE as SFT

KL_COEFS = {"kl-low": 0.02, "kl-high": 0.1}
LABELERS_PER_TASK = (1, 2, 4)
STAGES = ("pretrain", "sft", "collect", "reward", "ppo", "compare")  # the arms' stages, and where policies are measured
FEW_SHARE = 1 / 6
FEW_EPOCHS = 2  # relative to the other arms, so that few comparisons still train the head

RUNS = (1, 2, 3)  # of each algorithm; the next three constants have a value for each run
RATES = (1 / 3, 1.0, 3.0)  # multiples of the job's own learning rates
BETAS = (0.3, 0.1, 0.03)
BEST_OF = (4, 16, 64)
GROUP = 4  # responses per prompt, of the algorithms without a value function
KEPT_POLICIES = 6  # of each run of a policy gradient
MIN_PROMPTS = 16  # of rejection sampling; only the debug job has so few samples
PREFERENCE_RATE = 0.2  # DPO's and IPO's learning rate, relative to the reward model's, which trains a new head

POLICY_GRADIENTS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {},
    "rloo": {
        "ppo.advantage": {"kind": "leave_one_out", "samples_per_prompt": GROUP, "scale": "none"},
        "ppo.loss.token_weight": "constant",
    },
    "grpo": {
        "ppo.advantage": {"kind": "group_mean", "samples_per_prompt": GROUP, "scale": "group"},
        "ppo.loss.token_weight": "per_response",
    },
    "dr-grpo": {
        "ppo.advantage": {"kind": "group_mean", "samples_per_prompt": GROUP, "scale": "none"},
        "ppo.loss.token_weight": "constant",
    },
}
LORA: Mapping[str, Any] = {"rank": 16, "alpha": 32}
LORA_RATE = 10.0  # times full tuning's learning rates, as Schulman et al. 2025 advise (`lm.lora.LoRAConfig`)
LORA_REWARD_RATE = 3.0  # the same for the reward model, whose new head learns at the same rate; 10 was too high
# Every response of an iteration is checked, so that a finding can ask what fewer checks would have shown.
ALARM: Mapping[str, Any] = {
    "source": {"kind": "function", "function": "heed.worlds.rewards:gold"},
    "initial_checks": 1024,
    "checks_per_iteration": 10_000,
    "action": "warn",
}
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}
RUBRIC_DROPOUT = 0.5
JUDGE = "judge"  # the arm with the judge


@dataclass(frozen=True)
class Arm:
    """The study's job with only these stages and with `changes` by dotted key (None removes the key).

    `after` lists the arms that it reads; the last of them has the reward model that scores a policy's samples.
    """

    name: str
    stages: tuple[str, ...]
    after: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


def every_arm(job: JobConfig, folder: Path) -> dict[str, Arm]:
    """Returns the arms of all findings by name, each after those that it reads. Raises: as `basic_arms` does."""
    known = basic_arms(job, folder)
    controls = [
        _random(f"random-{number}", job, folder, best_of) for number, best_of in zip(RUNS, BEST_OF, strict=True)
    ]
    alarm = _ppo("alarm", folder, {"ppo.alarm": ALARM})
    adapted = lora_arms(job, folder)
    others = (*algorithm_arms(job, folder), *controls, *adapted, *judge_arms(folder), alarm)
    return known | {arm.name: arm for arm in others}


def basic_arms(job: JobConfig, folder: Path) -> dict[str, Arm]:
    """Returns the arms of the first five findings by name, each after those that it reads; `folder` is the seed's.

    Raises: ValueError for a job that lacks a section.
    """
    model, reward, ppo = job.model, job.section(REWARD), job.section(PPO)
    missing = [name for name in STAGES if name not in job.stage_names]
    if model is None or reward is None or ppo is None or job.world is None or missing:
        needed = ", ".join(f"[{name}]" for name in ("world", "model", *STAGES))
        raise ValueError(f"job {job.name!r}: a study needs {needed}")
    epochs = reward.num_epochs
    small = {
        "model.num_hidden_layers": max(1, model.num_hidden_layers // 4),
        "model.hidden_size": model.hidden_size // 2,
        "model.num_attention_heads": max(1, model.num_attention_heads // 2),
        "model.num_key_value_heads": max(1, model.num_key_value_heads // 2),
        "model.intermediate_size": model.intermediate_size // 2,
    }
    shared = {"collect.overlap_share": 1.0, "collect.overlap_labelers": max(LABELERS_PER_TASK)}
    arms = [
        Arm("base", ("pretrain", "sft", "collect"), changes=shared),
        Arm("small-base", ("pretrain", "sft"), ("base",), small),
        _reward("full", folder, 1, epochs),
        _reward("few", folder, "few", FEW_EPOCHS * epochs),
        _reward("small", folder, 1, epochs, start="small-base"),
        *(_reward(str(count), folder, count, count * epochs) for count in LABELERS_PER_TASK[1:]),
        _ppo("full", folder),
        _ppo("few", folder, judge="reward-few"),
        _ppo("small", folder, judge="reward-small"),
        *(_ppo(name, folder, {"ppo.kl.coef": coef}) for name, coef in KL_COEFS.items()),
        _ptx(folder, ppo),
    ]
    return {arm.name: arm for arm in arms}


def _reward(name: str, folder: Path, cut: int | str, epochs: float, start: str = "base") -> Arm:
    changes = {
        "reward.init_from": str(folder / start / "sft" / "model"),
        "reward.rankings.source": str(cut_file(folder, cut)),
        "reward.num_epochs": epochs,
    }
    return Arm(f"reward-{name}", ("reward",), ("base",) if start == "base" else ("base", start), changes)


def _ppo(name: str, folder: Path, changes: Mapping[str, Any] | None = None, judge: str = "reward-full") -> Arm:
    """Returns a PPO arm that keeps every policy: the first ones lie near SFT, where gold rises fastest along KL."""
    every = {"ppo.keep_policies_every": 1}
    return Arm(f"ppo-{name}", ("ppo",), ("base", judge), {**_plain_ppo(folder, judge), **every, **(changes or {})})


def _plain_ppo(folder: Path, judge: str) -> dict[str, Any]:
    """PPO against an arm's reward model, without a KL penalty and without gradients of pretraining."""
    return {
        "ppo.init_from": str(folder / "base" / "sft" / "model"),
        "ppo.reward.model": str(folder / judge / "reward" / "model"),
        "ppo.kl.coef": 0.0,
        "ppo.kl.target": None,
        "ppo.ptx": None,
    }


def _ptx(folder: Path, ppo: PPOConfig) -> Arm:
    """Returns the PPO-ptx arm. It includes the pretraining stage, whose text PPO-ptx reads, with the base's model."""
    changes = {
        "pretrain.init_from": str(folder / "base" / "pretrain" / "model"),
        "pretrain.num_steps": 0,
        "ppo.kl.coef": KL_COEFS["kl-low"],
        "ppo.ptx": ppo.ptx and ppo.ptx.model_dump(),
    }
    return replace(_ppo("ptx", folder, changes), stages=("pretrain", "ppo"))


def arm_names(algorithm: str) -> tuple[str, ...]:
    """The names of an algorithm's arms."""
    return tuple(f"{algorithm}-{number}" for number in RUNS)


def algorithm_arms(job: JobConfig, folder: Path) -> list[Arm]:
    """Returns the arms that compare algorithms, from a job with [sft], [reward] and [ppo]; `folder` is the seed's."""
    arms = []
    for number, rate, beta, best_of in zip(RUNS, RATES, BETAS, BEST_OF, strict=True):
        arms += [
            policy_gradient(f"{name}-{number}", job, folder, rate, settings)
            for name, settings in POLICY_GRADIENTS.items()
        ]
        arms += [_preferences(f"{name}-{number}", job, folder, loss, beta) for name, loss in LOSSES.items()]
        arms.append(_rejection(f"rejection-{number}", job, folder, best_of))
    return arms


def lora_arms(job: JobConfig, folder: Path) -> list[Arm]:
    """Returns the arms of `research.study lora`; arguments as for `algorithm_arms`."""
    reward = job.section_of(REWARD)
    changes = {
        "reward.init_from": str(folder / "base" / "sft" / "model"),
        "reward.rankings.source": str(cut_file(folder, 1)),
        "reward.lora": LORA,
        "reward.optimizer.learning_rate": LORA_REWARD_RATE * reward.optimizer.learning_rate,
    }
    arms = [Arm("reward-lora", ("reward",), ("base",), changes)]
    for number, rate in zip(RUNS, RATES, strict=True):
        adapters = {"ppo.lora": LORA}
        shared = {"ppo.lora": {**LORA, "shared_body": True}}
        arms.append(policy_gradient(f"lora-{number}", job, folder, LORA_RATE * rate, adapters))
        arms.append(policy_gradient(f"shared-{number}", job, folder, LORA_RATE * rate, shared, judge="reward-lora"))
    return arms


def judge_arms(folder: Path) -> list[Arm]:
    """Returns the arms of `research.study judge`; `folder` is the seed's."""
    data, judge = folder / "base" / "world" / "data", folder / JUDGE / "sft" / "model"
    grading = {
        "sft.init_from": str(folder / "base" / "pretrain" / "model"),
        "sft.demonstrations": [{"source": str(data / "graded.jsonl")}],
        "sft.heldout": [{"source": str(data / "graded_heldout.jsonl")}],
    }
    arms = [Arm(JUDGE, ("sft",), ("base",), grading)]
    for name, dropout in (("judge", 0.0), ("dropout", RUBRIC_DROPOUT)):
        changes = {
            "ppo.init_from": str(folder / "base" / "sft" / "model"),
            "ppo.reward": {"kind": "judge", "model": str(judge), "rubric": RUBRIC, "dropout": dropout},
            "ppo.kl.coef": 0.0,
            "ppo.kl.target": None,
            "ppo.ptx": None,
        }
        arms.append(Arm(f"ppo-{name}", ("ppo",), ("base", JUDGE), changes))
    return arms


def policy_gradient(
    name: str, job: JobConfig, folder: Path, rate: float, settings: Mapping[str, Any], judge: str = "reward-full"
) -> Arm:
    """Returns a PPO arm without a KL penalty, at `rate` times the job's learning rates, plus its `own` changes."""
    ppo = job.section_of(PPO)
    changes: dict[str, Any] = {
        **_plain_ppo(folder, judge),
        "ppo.keep_policies_every": max(1, ppo.num_iterations // KEPT_POLICIES),
        "ppo.policy_optimizer.learning_rate": rate * ppo.policy_optimizer.learning_rate,
    }
    if ppo.value_optimizer is not None:
        changes["ppo.advantage.value_optimizer.learning_rate"] = rate * ppo.value_optimizer.learning_rate
    changes |= settings  # after the rates: another `ppo.advantage` replaces the table that has the value function's
    return Arm(name, ("ppo",), ("base", judge), changes)


def _preferences(name: str, job: JobConfig, folder: Path, loss: str, beta: float) -> Arm:
    """Returns a DPO or IPO arm with the batches and epochs of the reward model, which learns from the same rankings."""
    reward = job.section_of(REWARD)
    optimizer = reward.optimizer.model_dump(mode="json", exclude_defaults=True)
    section = {
        "init_from": str(folder / "base" / "sft" / "model"),
        "rankings": {"source": str(cut_file(folder, 1))},
        "heldout_share": reward.heldout_share,
        "num_epochs": reward.num_epochs,
        "loss": loss,
        "beta": beta,
        "batch": reward.batch.model_dump(mode="json", exclude_defaults=True),
        "optimizer": {**optimizer, "learning_rate": PREFERENCE_RATE * reward.optimizer.learning_rate},
    }
    return Arm(name, ("dpo",), ("base", "reward-full"), {"dpo": section})


def _rejection(name: str, job: JobConfig, folder: Path, best_of: int) -> Arm:
    """Returns a rejection arm: as many samples as a policy gradient's; the batches, rate and epochs of SFT."""
    ppo, sft = job.section_of(PPO), job.section_of(SFT)
    num_prompts = max(MIN_PROMPTS, ppo.num_iterations * ppo.rollout_batch_size // best_of)
    (prompts,) = ppo.prompt_sources
    section = {
        "init_from": str(folder / "base" / "sft" / "model"),
        "reward_from": str(folder / "reward-full" / "reward" / "model"),
        "prompts": {**prompts.model_dump(mode="json", exclude_defaults=True), "max_rows": num_prompts},
        "num_samples": best_of,
        "max_new_tokens": ppo.max_new_tokens,
        "seq_len": sft.seq_len,
        "num_epochs": sft.num_epochs,
        "batch": sft.batch.model_dump(mode="json", exclude_defaults=True),
        "optimizer": sft.optimizer.model_dump(mode="json", exclude_defaults=True),
    }
    return Arm(name, ("rejection",), ("base", "reward-full"), {"rejection": section})


def _random(name: str, job: JobConfig, folder: Path, best_of: int) -> Arm:
    """Returns the control of a rejection arm: the same samples, of which the reward model `indifferent` chooses."""
    chosen = _rejection(name, job, folder, best_of)
    return replace(
        chosen, changes={"rejection": {**chosen.changes["rejection"], "reward_from": str(indifferent(folder))}}
    )


def with_those_before(arms: Mapping[str, Arm], wanted: Sequence[str]) -> list[Arm]:
    """Returns the wanted arms and those that they depend on, in an order in which they can run."""
    needed = set(wanted)
    for arm in reversed(list(arms.values())):  # each arm comes after those that it reads
        if arm.name in needed:
            needed |= set(arm.after)
    return [arm for arm in arms.values() if arm.name in needed]


def arm_job(job: JobConfig, arm: Arm, folder: Path) -> JobConfig:
    """Returns the arm as a job, and writes it to jobs/NAME.toml in the seed's `folder`.

    Only the base has the world; the other arms read the files that it wrote.
    """
    values = job.model_dump(mode="json", exclude_none=True)
    kept = ("name", "note", "seed", "workers", "min_workers", "engine", *arm.stages)
    if arm.name == "base":
        kept = (*kept, "world")
    if "pretrain" in arm.stages and "pretrain.init_from" not in arm.changes:
        kept = (*kept, "model")
    made = {key: values[key] for key in kept if key in values}
    for key, value in arm.changes.items():
        *parents, leaf = key.split(".")
        place = made
        for parent in parents:
            place = place[parent]
        if value is None:
            place.pop(leaf, None)
        else:
            place[leaf] = value
    made["name"] = arm.name
    if arm.name != "base":
        made = _from_files(made, folder / "base" / "world" / "data")
    path = folder / "jobs" / f"{arm.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(made), encoding="utf-8")
    return load_job(path)


def _from_files(value: Any, data: Path) -> Any:
    """Returns a dumped config with each "world:NAME" replaced by the file of that name."""
    if isinstance(value, dict):
        return {key: _from_files(item, data) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_files(item, data) for item in value]
    if isinstance(value, str) and value.startswith("world:"):
        return str(data / f"{value.removeprefix('world:')}.jsonl")
    return value


def cut_file(folder: Path, cut: int | str) -> Path:
    """Returns the file of comparisons for a reward-model arm: a number of labelers per task, or "few"."""
    return folder / "rankings" / (f"{cut}-a-task.jsonl" if isinstance(cut, int) else f"{cut}.jsonl")


def indifferent(folder: Path) -> Path:
    """Returns the folder of a reward model that gives every response the same score.

    Of samples with equal scores rejection sampling keeps the first, which is a random one.
    """
    return folder / "indifferent"


def write_indifferent(folder: Path) -> None:
    """Writes that model: `reward-full` with a head of zeros."""
    judge = folder / "reward-full" / "reward" / "model"
    model = load(ModelFolder(judge, ScalarModel))
    weights = model.state_dict()
    weights["score.weight"].zero_()
    save_model(indifferent(folder), model, weights, Tokenizer.load(judge))


def collected(folder: Path) -> list[Ranking]:
    """Returns all comparisons of the seed's base."""
    return read_rankings(RankingsConfig(source=str(folder / "base" / "collect" / "rankings.jsonl")))


def write_cuts(folder: Path) -> None:
    """Writes the comparisons of every reward-model arm, all subsets of the base's."""
    rankings = collected(folder)
    cut_file(folder, 1).parent.mkdir(exist_ok=True)
    for count in LABELERS_PER_TASK:
        write_rankings(cut_file(folder, count), cut_rankings(rankings, count, 1 / count))
    write_rankings(cut_file(folder, "few"), cut_rankings(rankings, 1, FEW_SHARE))


def cut_rankings(rankings: Sequence[Ranking], labelers_per_task: int, share: float) -> list[Ranking]:
    """Returns the first `share` of the tasks with this many labelers each, who take turns so all judge equally often.

    Raises: ValueError for a task that fewer labelers have judged.
    """
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    chosen: list[Ranking] = []
    for number, (task, judged) in enumerate(list(by_task.items())[: max(1, int(share * len(by_task)))]):
        if len(judged) < labelers_per_task:
            raise ValueError(f"task {task!r} has {len(judged)} labelers; {labelers_per_task} were expected")
        turn = number % len(judged)
        chosen += [*judged[turn:], *judged[:turn]][:labelers_per_task]
    return chosen
