"""`research.study distillation`: a student of half its teacher's size, taught on-policy or by SFT on its samples.

The arms are in `research.studies.arms`. Every method has three learning rates. Of its three last policies one half of
the prompts chooses the one with the most gold, which the other half scores, and vice versa; so the choice favours
nobody. The claims and the smallest effects that matter were fixed before any student was trained.

Shape letters: K policies of an arm, P prompts.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.measures.kl import Policy, draw
from files.atomic import write_text
from files.hashes import derive_seed
from heed.jobs.job import JobConfig
from ppo.stage import STAGE as PPO
from preferences.statistics.estimates import UNKNOWN, Floats, Interval
from preferences.statistics.intervals import percentiles, resampled_sums
from research.over_optimisation.curves import expanded_level
from research.studies.arms import SAMPLES_PER_PROMPT, STUDENT, TEACHER, arm_names, teacher_samples
from research.studies.findings import GOLD, NATS, Finding, Measures
from research.studies.verdicts import NUM_RESAMPLES, Contrast, Rule, bootstrap_mean
from stages.lineage import LINEAGE
from stages.progress import console
from stages.reports.plots import draw as draw_chart
from stages.reports.plots import tone
from training.data import DataConfig, Prompt, read_prompts

TITLES = {
    "token": "on-policy, token",
    "reward-kind": "on-policy, reward",
    "samples": "SFT on one sample per prompt",
    "more-samples": f"SFT on {SAMPLES_PER_PROMPT} samples per prompt",
    "samples-token": "SFT on samples, then token",
}
TONES = ("ppo", "other-1", "sft", "other-2", "other-3")
SHARE = Rule("above", 0.05, "of the teacher's lead")
HALF = 0.5  # of the teacher's lead


def write_teacher_samples(folder: Path, job: JobConfig) -> None:
    """Samples the seed's teacher on as many prompts of PPO as an on-policy arm has responses, and writes the files of
    `teacher_samples`, unless this teacher was sampled already. Responses that do not end are left out.

    Raises: ValueError if a file would have fewer than two responses.
    """
    ppo = job.section_of(PPO)
    made_from = json.loads((folder / TEACHER / PPO.name / LINEAGE).read_text(encoding="utf-8"))["fingerprint"]
    record = sampling_record(folder)
    if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["teacher"] == made_from:
        return
    prompts = world_prompts(folder, ppo.only_source)[: ppo.num_iterations * ppo.rollout_batch_size]
    console.print(f"[dim]{folder.name}: sampling the teacher on {len(prompts)} prompts")
    started = time.monotonic()
    drawn = draw(
        Policy.load(folder / TEACHER / PPO.name / "model"),
        prompts,
        num_samples=SAMPLES_PER_PROMPT,
        max_new_tokens=ppo.max_new_tokens,
        temperature=ppo.temperature,
        seed=derive_seed(job.seed, "teacher-samples"),
    )
    seconds = time.monotonic() - started
    record.parent.mkdir(exist_ok=True)
    costs: dict[str, tuple[int, int, float]] = {}
    for name, num_prompts, num_samples in (
        ("one", len(prompts), 1),
        ("half", len(prompts) // 2, 1),
        ("more", len(prompts), SAMPLES_PER_PROMPT),
    ):
        rows = [prompt * SAMPLES_PER_PROMPT + sample for prompt in range(num_prompts) for sample in range(num_samples)]
        kept = [row for row in rows if drawn.finished[row] and drawn.texts[row]]
        if len(kept) < 2:
            raise ValueError(
                f"{folder}: {len(kept)} of the teacher's {len(rows)} responses end within ppo.max_new_tokens ="
                f" {ppo.max_new_tokens}; at least two were expected, to train on and to hold out"
            )
        lines = [
            {"messages": [*drawn.conversations[row], {"role": "assistant", "content": drawn.texts[row]}]}
            for row in kept
        ]
        write_text(teacher_samples(folder, name), "".join(json.dumps(line) + "\n" for line in lines))
        sampled, left = (sum(len(drawn.responses[row]) for row in sampled_rows) for sampled_rows in (rows, kept))
        costs[name] = (sampled, left, seconds * len(rows) / len(drawn.responses))
    write_text(record, json.dumps({"teacher": made_from, "costs": costs}) + "\n")


def world_prompts(folder: Path, config: DataConfig) -> list[Prompt]:
    """Returns prompts of the seed's world, given as "world:NAME"."""
    path = folder / "base" / "world" / "data" / f"{config.source.removeprefix('world:')}.jsonl"
    return read_prompts(config.model_copy(update={"source": str(path)}))


def sampling_record(folder: Path) -> Path:
    """Returns the file that says which teacher was sampled, and what each file of samples cost."""
    return folder / "teacher-samples" / "samples.json"


def sampling_costs(folder: Path, name: str) -> tuple[float, float, float]:
    """Returns the tokens sampled for a file of samples, the tokens kept in it, and the seconds."""
    sampled, kept, seconds = json.loads(sampling_record(folder).read_text(encoding="utf-8"))["costs"][name]
    return sampled, kept, seconds


@dataclass(frozen=True)
class Chosen:
    """A method's policy that the other half of the prompts chose, by prompt: gold, KL to the teacher in nats, and
    response length in tokens, [P] each.
    """

    gold_P: Floats
    kl_P: Floats
    tokens_P: Floats


def chosen(measures: Measures, method: str) -> Chosen:
    """Returns the chosen policy among the last ones of a method's three runs."""
    runs = [measures.distilled(arm) for arm in arm_names(method)]
    gold_KP, kl_KP, tokens_KP = (
        np.stack([getattr(run, name)[-1] for run in runs]) for name in ("gold_KP", "kl_KP", "tokens_KP")
    )
    place_P = np.arange(gold_KP.shape[1])
    even = place_P % 2 == 0
    best_P = np.where(even, gold_KP[:, ~even].mean(axis=1).argmax(), gold_KP[:, even].mean(axis=1).argmax())
    return Chosen(gold_KP[best_P, place_P], kl_KP[best_P, place_P], tokens_KP[best_P, place_P])


def _share(measures: Measures, gold_P: Floats) -> Interval:
    """Returns the share of the teacher's lead over the student's start that a policy has, with a bootstrap interval."""
    start_P, teacher_P = (measures.distilled(arm).gold_KP[-1] for arm in (STUDENT, TEACHER))
    gains_P2 = np.stack([gold_P - start_P, teacher_P - start_P], axis=1)
    gain_S, lead_S = resampled_sums(gains_P2, seed=measures.seed, num_resamples=NUM_RESAMPLES).T
    if lead_S.min() <= 0:  # as in the debug job, where nothing is learned
        return UNKNOWN
    gain, lead = gains_P2.mean(axis=0)
    return Interval(float(gain / lead), *percentiles(gain_S / lead_S, expanded_level(len(start_P))))


def _distillation(measures: Measures) -> list[Contrast]:
    best = {method: chosen(measures, method) for method in TITLES}
    contrasts = [
        Contrast(
            f"{TITLES[one]} minus {TITLES[other]}: gold",
            GOLD,
            bootstrap_mean(best[one].gold_P - best[other].gold_P, seed=measures.seed),
        )
        for one, other in (
            ("token", "samples"),
            ("samples-token", "samples"),
            ("samples-token", "more-samples"),
            ("token", "reward-kind"),
            ("more-samples", "samples"),
        )
    ]
    nearer_P = best["samples"].kl_P - best["samples-token"].kl_P
    name = f"{TITLES['samples-token']}, ends closer to the teacher than {TITLES['samples']}: reverse KL"
    contrasts.append(Contrast(name, NATS, bootstrap_mean(nearer_P, seed=measures.seed)))
    for method in ("token", "samples", "samples-token"):
        share = _share(measures, best[method].gold_P)
        beyond = Interval(share.mean - HALF, share.low - HALF, share.high - HALF)
        contrasts.append(Contrast(f"{TITLES[method]}: share of the teacher's lead, minus one half", SHARE, beyond))
    return contrasts


def cost_table(seeds: Sequence[Measures]) -> str:
    """Formats each method's gold, share, KL, length and costs, means over seeds, as a table.

    Costs are those of one run, a mean over learning rates. Tokens are response tokens in thousands.
    """
    head = [
        "policy", "gold", "share of the teacher's lead", "KL to the teacher, nats", "response tokens",
        "k tokens trained on", "k sampled by the student", "k sampled by the teacher", "k scored by the teacher",
        "seconds",
    ]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for arm, title in ((TEACHER, "teacher"), (STUDENT, "student's start")):
        distilled = [measures.distilled(arm) for measures in seeds]
        means = [
            np.mean([getattr(each, name)[-1].mean() for each in distilled])
            for name in ("gold_KP", "kl_KP", "tokens_KP")
        ]
        rows.append(
            [
                title,
                f"{means[0]:.3f}",
                "1" if arm == TEACHER else "0",
                *(f"{mean:.1f}" for mean in means[1:]),
                *[""] * 5,
            ]
        )
    for method, title in TITLES.items():
        best = [chosen(measures, method) for measures in seeds]
        gold, kl, tokens = (
            float(np.mean([getattr(each, name).mean() for each in best])) for name in ("gold_P", "kl_P", "tokens_P")
        )
        share = np.mean([_share(measures, each.gold_P).mean for measures, each in zip(seeds, best, strict=True)])
        costs = np.mean(
            [measures.distilled(arm).costs_K5[-1] for measures in seeds for arm in arm_names(method)], axis=0
        )
        rows.append(
            [title, f"{gold:.3f}", f"{share:.2f}" if share == share else "–", f"{kl:.1f}", f"{tokens:.1f}"]
            + [f"{cost / 1000:.0f}" for cost in costs[:4]]
            + [f"{costs[4]:.0f}"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def figure(seeds: Sequence[Measures]) -> str:
    """Draws the gold of every policy against the root of its KL to the teacher, with lines for teachers and starts."""

    def paint(axes: Any) -> None:
        for measures in seeds:
            first = measures is seeds[0]
            for (method, title), colour in zip(TITLES.items(), TONES, strict=True):
                for arm in arm_names(method):
                    run = measures.distilled(arm)
                    axes.plot(
                        np.sqrt(run.kl_KP.mean(axis=1)),
                        run.gold_KP.mean(axis=1),
                        marker="o",
                        markersize=3,
                        linewidth=0.8,
                        color=tone(colour),
                        label=title if first and arm.endswith("-1") else None,
                    )
            for arm, style in ((TEACHER, "-"), (STUDENT, ":")):
                gold = float(measures.distilled(arm).gold_KP[-1].mean())
                title = "teacher" if arm == TEACHER else "student's start"
                axes.axhline(gold, color=tone("muted"), linewidth=0.8, linestyle=style, label=title if first else None)
        axes.set_xlabel("√KL to the teacher, √nats per response", loc="right")
        axes.set_ylabel("gold score")
        axes.legend(frameon=False, fontsize=8, loc="best")

    return draw_chart(
        paint, width=640, height=420, margins=(64, 16, 44, 12), name="distillation",
        label="Gold score of students against their KL to the teacher, by method; one line per run, seeds together.",
    )  # fmt: skip


DISTILLATION = Finding(
    "distillation",
    "A student learns more from its teacher's log-probs of its own samples than from the teacher's samples",
    'Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543; Thinking Machines 2025, "On-Policy'
    ' Distillation"',
    (TEACHER, STUDENT, *(arm for method in TITLES for arm in arm_names(method))),
    _distillation,
    lambda _of: {},
    figure=figure,
    table=cost_table,
)
