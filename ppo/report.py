"""What the report of a run shows of PPO."""

from math import isfinite

from ppo.report_samples import followed_part, samples_section
from ppo.results import PPOResults
from ppo.samples import TrainingSample
from stages.reports.parts import Columns, Details, Headline, StageReport, StageReporter
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import Panel, Series, fields_under, metric_figures, stage_block
from stages.reports.text import count, label, number, styles_of


def _ppo(field: str) -> tuple[Series, ...]:
    return (Series(field, "PPO", "ppo"),)


PANELS = (
    Panel("Score", "from the reward model, higher is better", _ppo("score")),
    Panel("KL from SFT", "nats per response", _ppo("kl_nats")),
    Panel("Responses that end", "before the length limit", _ppo("eos_rate"), is_share=True),
    Panel("Response length", "tokens", _ppo("response_tokens")),
    Panel("Entropy", "nats per token, estimated", _ppo("entropy_estimate")),
    Panel("Informative groups", "prompts whose responses' rewards differ", _ppo("informative_share"), is_share=True),
)
# What says whether the updates are healthy, whatever they reach.
DIAGNOSTICS = (
    Panel("Clip fraction", "tokens whose ratio is clipped", _ppo("clip_share"), is_share=True),
    Panel("Approximate KL", "of an iteration's updates, nats per token", _ppo("approx_kl")),
    Panel("Explained variance", "of the returns by the values, 1 is best", _ppo("value_explained")),
    Panel(
        "Informative groups, sampled",
        "before the kept ones are chosen",
        _ppo("sampled_informative_share"),
        is_share=True,
    ),
    Panel("Groups of equal rewards", "per iteration; no gradient", _ppo("zero_variance_groups")),
    Panel("Policy loss", "", _ppo("policy_loss")),
    Panel("KL loss", "half the square of each response's log ratio", _ppo("kl_loss")),
    Panel("Value loss", "", _ppo("value_loss")),
    Panel(
        "Gradient norms",
        "before clipping",
        (Series("policy_gradient_norm", "policy", "ppo"), Series("value_gradient_norm", "values", "heldout")),
    ),
    Panel(
        "Learning rates",
        "",
        (Series("learning_rate", "policy", "ppo"), Series("value_learning_rate", "values", "heldout")),
    ),
    Panel("KL coefficient", "per nat", _ppo("kl_coef")),
    Panel("Sampler against learner", "difference of their log-probs, nats per token", _ppo("sampler_difference")),
    Panel(
        "Time per phase",
        "seconds per iteration",
        (
            Series("sampling_seconds", "sampling", "other-1"),
            Series("scoring_seconds", "scoring", "best-of-n"),
            Series("policy_updates_seconds", "policy", "ppo"),
            Series("value_updates_seconds", "values", "heldout"),
            Series("checkpoint_seconds", "checkpoints", "train"),
        ),
    ),
)


SAMPLERS = {
    "heed": "Heed; a run that resumes has the same samples, and `heed replay` shows each again",
    "vllm": "vLLM; a run that resumes may have other samples",
}


def report(stage: StageFolder) -> StageReport:
    objectives = [
        Panel(f"Score, {label(name)}", "from the head of this objective", _ppo(f"score/{name}"))
        for name in fields_under(stage, "score")
    ]
    figures = metric_figures(stage, (*PANELS, *objectives), "iteration")
    diagnostics = metric_figures(stage, DIAGNOSTICS, "iteration", "diagnostics")
    results, samples = stage.results(PPOResults), stage.samples_as(TrainingSample)
    facts: tuple[tuple[str, str], ...] = ()
    if results is not None:
        facts = (
            ("Iterations", count(results.num_iterations)),
            ("Final KL coefficient", number(results.final_kl_coef, 4)),
            ("Sampled by", SAMPLERS[results.generator]),
            *((("Prompts read", str(results.overlong)),) if results.overlong else ()),
            *(rows.fact for rows in results.sources),
        )
    parts = (
        stage_block(stage, facts, figures),
        *((Details("Diagnostics", (Columns(tuple(diagnostics), "grid"),)),) if diagnostics else ()),
        *followed_part(samples),
    )
    return StageReport(
        parts,
        sections=samples_section(samples),
        headlines=_headlines(stage) if results is not None else (),
        sentence=_sentence(stage),
        styles=tuple(styles_of(["ppo"]).values()) if samples else (),
    )


def _sentence(stage: StageFolder) -> str:
    """What a run without a comparison may say: a rise of the score that PPO trains on shows only that it trained."""
    scores = [line["score"] for line in stage.metrics if isinstance(line.get("score"), float)]
    if not scores:
        return ""
    return (
        f"In PPO the score went from {number(scores[0])} to {number(scores[-1])}. Whether the responses got better, or"
        " only better at pleasing this score (reward hacking), the figures do not say: nothing else has judged them."
        " Read the samples, or let another judge compare the policies."
    )


def _headlines(stage: StageFolder) -> tuple[Headline, ...]:
    """The KL of the last iteration, which gives way to the comparison's."""
    kl = stage.metrics[-1].get("kl_nats") if stage.metrics else None
    if not isinstance(kl, float) or not isfinite(kl):
        return ()
    file, field, detail = f"{stage.name}/metrics.jsonl", "kl_nats of the last line", "last iteration of training"
    return (Headline(f"{stage.name}.kl_nats", file, field, kl, "KL from SFT", f"{number(kl, 1)} nats", detail),)


REPORTER = StageReporter(
    "PPO", "The policy is trained to raise the reward model's score, held near SFT by a KL penalty.", report
)
