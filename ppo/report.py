"""What the report of a run shows of PPO."""

from math import isfinite

from ppo.results import PPOResults
from reports.curves import Panel, Series, fields_under, metric_figures, stage_block
from reports.parts import Headline, StageReport, StageReporter
from reports.stage_folder import StageFolder
from reports.text import count, label, number


def _ppo(field: str) -> tuple[Series, ...]:
    return (Series(field, "PPO", "ppo"),)


PANELS = (
    Panel("Score", "from the reward model, higher is better", _ppo("score")),
    Panel("KL from SFT", "nats per response", _ppo("kl_nats")),
    Panel("Responses that end", "before the length limit", _ppo("eos_rate"), is_share=True),
    Panel("Response length", "tokens", _ppo("response_tokens")),
    Panel("Entropy", "nats per token, estimated", _ppo("entropy_estimate")),
)


def report(stage: StageFolder) -> StageReport:
    objectives = [
        Panel(f"Score, {label(name)}", "from the head of this objective", _ppo(f"score/{name}"))
        for name in fields_under(stage, "score")
    ]
    figures = metric_figures(stage, (*PANELS, *objectives), "iteration")
    results = stage.results(PPOResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    facts = (
        ("Iterations", count(results.num_iterations)),
        ("Final KL coefficient", number(results.final_kl_coef, 4)),
    )
    return StageReport((stage_block(stage, facts, figures),), headlines=_headlines(stage))


def _headlines(stage: StageFolder) -> tuple[Headline, ...]:
    """The KL of the last iteration, which gives way to the comparison's."""
    kl = stage.metrics[-1].get("kl_nats") if stage.metrics else None
    if not isinstance(kl, float) or not isfinite(kl):
        return ()
    file, field, detail = f"{stage.name}/metrics.jsonl", "kl_nats of the last line", "last iteration of training"
    return (Headline(f"{stage.name}.kl_nats", file, field, kl, "KL from SFT", f"{number(kl, 1)} nats", detail),)


REPORTER = StageReporter("PPO", "The policy climbs the reward model's score, held near SFT by a KL penalty.", report)
