"""The findings of `heed study lora`: adapters against full tuning, and one body with four roles against four models.

All arms read the same rankings (`algorithm_arms.py`). The smallest effects that matter were fixed before any run.
"""

from evaluation.measures.curves import Curve, mean_lead
from heed.studies.algorithm_arms import arms_of
from heed.studies.algorithms import pooled
from heed.studies.contrasts import best_difference, ratio_difference
from heed.studies.findings import NO_SHIFT, Finding, Measures
from heed.studies.verdicts import Contrast, Rule

SOURCE = 'Schulman et al. 2025, "LoRA Without Regret" (thinkingmachines.ai/blog/lora)'
SAME_ACCURACY = Rule("within", 0.02, "of accuracy")


TITLES = {"ppo": "PPO", "lora": "PPO by adapters", "shared": "PPO on a shared body"}


def _against_ppo(of: Measures, name: str) -> list[Contrast]:
    one, other = pooled(of, name), pooled(of, "ppo")
    title = f"{TITLES[name]} minus PPO"
    return [
        Contrast(f"{title}: gold at equal KL", NO_SHIFT, mean_lead("kl", one, other, seed=of.seed)),
        Contrast(f"{title}: gold of the best policy", NO_SHIFT, best_difference(one, other, seed=of.seed)),
    ]


def _accuracy(of: Measures) -> list[Contrast]:
    (right, compared), (full, _) = of.right_pairs("reward-lora"), of.right_pairs("reward-full")
    lead = ratio_difference(right, full, compared, seed=of.seed)
    return [Contrast("reward model by adapters minus full: accuracy", SAME_ACCURACY, lead)]


def _finding(name: str, title: str, source: str, arm: str) -> Finding:
    def curves(of: Measures) -> dict[str, Curve]:
        return {TITLES[one]: pooled(of, one) for one in (arm, "ppo")}

    return Finding(name, title, source, (*arms_of(arm), *arms_of("ppo")), lambda of: _against_ppo(of, arm), curves)


LORA_FINDINGS = (
    Finding(
        "lora-reward",
        "A reward model of adapters is as accurate as a fully tuned one",
        SOURCE,
        ("reward-lora", "reward-full"),
        _accuracy,
        lambda of: {name: of.best_of_n(name) for name in ("reward-lora", "reward-full")},
    ),
    _finding("lora-ppo", "PPO by adapters against PPO of all weights", SOURCE, "lora"),
    _finding("shared-body", "PPO on one shared body against PPO with four models", "Heed", "shared"),
)
