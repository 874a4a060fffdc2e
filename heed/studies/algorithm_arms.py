"""The arms of `heed study algorithms` and `heed study lora`: one set of labels, one reward model, three runs of each.

    ppo, rloo, grpo, dr-grpo -1, -2, -3   as docs/algorithms.md has them, without a KL penalty, at a third of the job's
                                          learning rate, at that rate, and at three times it
    dpo, ipo -1, -2, -3                   on the rankings of `reward-full`, with beta .3, .1 and .03
    rejection-1, -2, -3                   best of 4, 16 and 64 samples by `reward-full`; as many samples as PPO's
    lora-1, -2, -3                        as ppo, by adapters, at ten times its learning rates
    shared-1, -2, -3                      as lora, on one body with the reward model `reward-lora`
    reward-lora                           as `reward-full`, by adapters on the base's SFT model, at three times its rate

Each algorithm has the same budget: three values of the setting that moves it along KL, chosen before any run. An
algorithm's curve has the policies of all three, so none is picked by its result.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heed.jobs.job import JobConfig
from heed.studies.arms import Arm, cut_file
from heed.studies.arms import arms_of as other_arms
from ppo.stage import STAGE as PPO
from reward.stage import STAGE as REWARD
from sft.stage import STAGE as SFT

RUNS = (1, 2, 3)
RATES = (1 / 3, 1.0, 3.0)  # of the job's own learning rates
BETAS = (0.3, 0.1, 0.03)
BEST_OF = (4, 16, 64)
GROUP = 4  # responses per prompt, of the algorithms without a value function
KEPT_POLICIES = 6  # of each run of a policy gradient
MIN_PROMPTS = 16  # of rejection sampling; only the debug job has so few samples
PREFERENCE_RATE = 0.2  # of the reward model's learning rate, which trains a new head: DPO's and IPO's

_GROUPS = {"ppo.samples_per_prompt": GROUP, "ppo.value_optimizer": None}
POLICY_GRADIENTS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {},
    "rloo": {
        **_GROUPS, "ppo.advantage": "leave_one_out", "ppo.advantage_scale": "none", "ppo.token_weight": "constant",
    },
    "grpo": {
        **_GROUPS, "ppo.advantage": "group_mean", "ppo.advantage_scale": "group", "ppo.token_weight": "per_response",
    },
    "dr-grpo": {
        **_GROUPS, "ppo.advantage": "group_mean", "ppo.advantage_scale": "none", "ppo.token_weight": "constant",
    },
}  # fmt: skip
LORA: Mapping[str, Any] = {"rank": 16, "alpha": 32}
LORA_RATE = 10.0  # of full tuning's learning rates, as Schulman et al. 2025 advise (`lm.lora.LoRAConfig`)
LORA_REWARD_RATE = 3.0  # likewise of the reward model, whose new head learns at the same rate; 10 was too high
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}


def arms_of(name: str) -> tuple[str, ...]:
    """The arms of an algorithm."""
    return tuple(f"{name}-{number}" for number in RUNS)


def algorithm_arms(job: JobConfig, folder: Path) -> list[Arm]:
    """Every arm, from a job with [sft], [reward] and [ppo]; `folder` is the seed's."""
    arms = []
    for number, rate, beta, best_of in zip(RUNS, RATES, BETAS, BEST_OF, strict=True):
        arms += [policy_gradient(f"{name}-{number}", job, folder, rate, own) for name, own in POLICY_GRADIENTS.items()]
        arms += [_preferences(f"{name}-{number}", job, folder, loss, beta) for name, loss in LOSSES.items()]
        arms.append(_rejection(f"rejection-{number}", job, folder, best_of))
    return arms


def lora_arms(job: JobConfig, folder: Path) -> list[Arm]:
    """The arms of `heed study lora`; arguments as for `algorithm_arms`."""
    reward = job.section_of(REWARD)
    changes = {
        "reward.init_from": str(folder / "base" / "sft" / "model"),
        "reward.rankings.source": str(cut_file(folder, 1)),
        "reward.lora": LORA,
        "reward.optimizer.learning_rate": LORA_REWARD_RATE * reward.optimizer.learning_rate,
    }
    arms = [Arm("reward-lora", ("reward",), ("base",), changes)]
    for number, rate in zip(RUNS, RATES, strict=True):
        own = {"ppo.lora": LORA}
        shared = {**own, "ppo.shared_body": True}
        arms.append(policy_gradient(f"lora-{number}", job, folder, LORA_RATE * rate, own))
        arms.append(policy_gradient(f"shared-{number}", job, folder, LORA_RATE * rate, shared, judge="reward-lora"))
    return arms


def every_arm(job: JobConfig, folder: Path) -> dict[str, Arm]:
    """The arms of all findings by name, each after those that it reads. Raises: as `heed.studies.arms.arms_of` does."""
    known = other_arms(job, folder)
    return known | {arm.name: arm for arm in (*algorithm_arms(job, folder), *lora_arms(job, folder))}


def _starts(stage: str, folder: Path, judge: str) -> dict[str, str]:
    return {
        f"{stage}.init_from": str(folder / "base" / "sft" / "model"),
        f"{stage}.reward_from": str(folder / judge / "reward" / "model"),
    }


def policy_gradient(
    name: str, job: JobConfig, folder: Path, rate: float, own: Mapping[str, Any], judge: str = "reward-full"
) -> Arm:
    """PPO without a KL penalty, at a multiple of the job's learning rates, with changes of its `own`."""
    ppo = job.section_of(PPO)
    changes: dict[str, Any] = {
        **_starts("ppo", folder, judge),
        "ppo.kl_coef": 0.0,
        "ppo.kl_control": "fixed",
        "ppo.ptx_coef": 0.0,
        "ppo.ptx_rows": 0,
        "ppo.keep_policies_every": max(1, ppo.num_iterations // KEPT_POLICIES),
        "ppo.policy_optimizer.learning_rate": rate * ppo.policy_optimizer.learning_rate,
    }
    if ppo.value_optimizer is not None:
        changes["ppo.value_optimizer.learning_rate"] = rate * ppo.value_optimizer.learning_rate
    changes |= own
    if changes.get("ppo.value_optimizer", "") is None:
        changes.pop("ppo.value_optimizer.learning_rate", None)
    return Arm(name, ("ppo",), ("base", judge), changes)


def _preferences(name: str, job: JobConfig, folder: Path, loss: str, beta: float) -> Arm:
    """DPO and IPO: the batches and epochs of the reward model, which learns from the same rankings."""
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
    """As many samples as a policy gradient's; the batches, rate and epochs of SFT."""
    ppo, sft = job.section_of(PPO), job.section_of(SFT)
    num_prompts = max(MIN_PROMPTS, ppo.num_iterations * ppo.rollout_batch_size // best_of)
    section = {
        "init_from": str(folder / "base" / "sft" / "model"),
        "reward_from": str(folder / "reward-full" / "reward" / "model"),
        "prompts": {**ppo.prompts.model_dump(mode="json", exclude_defaults=True), "max_rows": num_prompts},
        "num_samples": best_of,
        "max_new_tokens": ppo.max_new_tokens,
        "seq_len": sft.seq_len,
        "num_epochs": sft.num_epochs,
        "batch": sft.batch.model_dump(mode="json", exclude_defaults=True),
        "optimizer": sft.optimizer.model_dump(mode="json", exclude_defaults=True),
    }
    return Arm(name, ("rejection",), ("base", "reward-full"), {"rejection": section})
