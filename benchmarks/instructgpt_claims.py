"""Which claims of InstructGPT's paper do its published samples bear out?

`python -m benchmarks.instructgpt_claims FOLDER` prints the tables of research/findings/instructgpt.md from the folder
with OpenAI's three files (https://github.com/openai/following-instructions-human-feedback), plain or as .gz;
tests/benchmarks/test_published_outputs.py checks the docs.

The claims and rules were fixed before any test was computed (the models' means had been seen):

- A claim is a number x per question: a weighted sum of means over models, all answering this question under one prompt
  type. Questions are independent, and all models answer the same ones, so the comparison is paired.
- "above 0" and "below 0" are tested by `GainTest` of x.
- "within b" is tested by the same test of x - b and x + b: inside, p is the larger of both; outside, the nearer one's.
- Holm's correction is over all claims. A claim is decided if its corrected p is below 5%: borne out if the mean of x is
  where the claim says, contradicted if it is on the other side. Any other claim is undecided.
- Intervals are at the level at which Holm's procedure tested the claim, so they exclude 0 exactly if x differs from 0.

Shape letters: P questions, M claims.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from classify.metrics import normalized, token_f1
from evaluation.statistics.significance import ALPHA, GainTest, holm, holm_level
from files.rows import read_source
from preferences.statistics.estimates import Floats, Interval

SIZES = ("xl", "6b", "175b")
NAMES = {
    "gpt": "GPT-3",
    "sft": "SFT",
    "ppo-noptx": "PPO",
    "ppo-ptx": "PPO-ptx",
    "xl": "1.3B",
    "6b": "6B",
    "175b": "175B",
}
QA, QA_AND_INSTRUCTION = "truthful_qa: QA prompt", "truthful_qa: QA + instruction"
BASIC, RESPECTFUL, BIASED = (f"real_toxicity: {kind} prompt" for kind in ("basic", "respectful", "biased"))
ZERO_SHOT, FEW_SHOT = "squadv2: zeroshot", "squadv2: fewshot"
BOTH = "truthful_and_informative"
NO_ANSWER = "Not in background."
ASKED = {"truthful_qa": "question", "real_toxicity": "context", "squadv2": "context"}  # the column, by data set


def _sizes(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}-{size}" for size in SIZES)


GPT, PPO, PPO_PTX = _sizes("gpt"), _sizes("ppo-noptx"), _sizes("ppo-ptx")

# (weight, models, group): the mean over the models of what they got on a question in a group of items.
Term = tuple[float, tuple[str, ...], str]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as a number per question, and where the paper says that its mean lies."""

    text: str
    section: str
    measure: str
    terms: tuple[Term, ...]
    expected: Literal["above", "below", "within"]
    bound: float = 0.0
    only_not_adversarial: bool = False

    @property
    def expectation(self) -> str:
        return f"within {self.bound:g}" if self.expected == "within" else f"{self.expected} 0"


def _difference(models: tuple[str, ...], group: str, others: tuple[str, ...] = GPT) -> tuple[Term, ...]:
    return ((1.0, models, group), (-1.0, others, group))


# InstructGPT is PPO-ptx, and "our PPO models" are PPO and PPO-ptx (section 3.5).
CLAIMS = (
    Claim(
        "PPO models are more often truthful and informative than GPT-3, without an instruction to be so",
        "4.2, figure 6", BOTH, _difference(PPO + PPO_PTX, QA), "above",
    ),
    Claim(
        "this also holds for questions that were not chosen against GPT-3",
        "4.2", BOTH, _difference(PPO + PPO_PTX, QA), "above", only_not_adversarial=True,
    ),
    Claim(
        "InstructGPT is truthful and informative about twice as often as GPT-3 (minus twice GPT-3's share)",
        "1", BOTH, ((1.0, PPO_PTX, QA), (-2.0, GPT, QA)), "within", 0.1,
    ),
    Claim(
        "the exception: PPO-ptx of 1.3B is slightly worse than GPT-3 of the same size",
        "4.2", BOTH, _difference(("ppo-ptx-xl",), QA, ("gpt-xl",)), "below",
    ),
    Claim(
        "told to say “I have no comment” when uncertain, PPO models are more often truthful than GPT-3",
        "4.2, figure 6", "truthful", _difference(PPO + PPO_PTX, QA_AND_INSTRUCTION), "above",
    ),
    Claim(
        "and they are then less often informative than without this instruction",
        "4.2, figure 6", "informative",
        ((1.0, PPO + PPO_PTX, QA_AND_INSTRUCTION), (-1.0, PPO + PPO_PTX, QA)), "below",
    ),
    Claim(
        "told to be respectful, InstructGPT is less toxic than GPT-3",
        "4.2, figure 7", "toxicity", _difference(PPO_PTX, RESPECTFUL), "below",
    ),
    Claim(
        "without this prompt, the advantage disappears",
        "4.2, figure 7", "toxicity", _difference(PPO_PTX, BASIC), "within", 0.05,
    ),
    Claim(
        "told to be offensive, InstructGPT is much more toxic than GPT-3",
        "4.2, figure 39", "toxicity", _difference(PPO_PTX, BIASED), "above",
    ),
    Claim(
        "alignment tax, few-shot: PPO has a lower F1 than GPT-3",
        "4.2, figure 29", "f1", _difference(PPO, FEW_SHOT), "below",
    ),
    Claim(
        "alignment tax, zero-shot: PPO has a lower F1 than GPT-3",
        "E.1, figure 28", "f1", _difference(PPO, ZERO_SHOT), "below",
    ),
    Claim(
        "the tax is larger few-shot than zero-shot",
        "E.1", "f1", (*_difference(GPT, FEW_SHOT, PPO), *_difference(PPO, ZERO_SHOT)), "above",
    ),
    Claim(
        "PPO-ptx mitigates it, few-shot: a higher F1 than PPO",
        "4.2, figure 29", "f1", _difference(PPO_PTX, FEW_SHOT, PPO), "above",
    ),
    Claim(
        "PPO-ptx mitigates it, zero-shot: a higher F1 than PPO",
        "E.1, figure 28", "f1", _difference(PPO_PTX, ZERO_SHOT, PPO), "above",
    ),
    Claim(
        "PPO-ptx still lags behind GPT-3, few-shot",
        "4.2, figure 29", "f1", _difference(PPO_PTX, FEW_SHOT), "below",
    ),
    Claim(
        "PPO-ptx still lags behind GPT-3, zero-shot",
        "E.1, figure 28", "f1", _difference(PPO_PTX, ZERO_SHOT), "below",
    ),
)  # fmt: skip

# By measure, model, group and question.
Values = Mapping[tuple[str, str, str], Mapping[str, float]]


@dataclass(frozen=True)
class Decided:
    claim: Claim
    num_questions: int
    found: Interval
    p: float  # corrected by Holm over all claims
    verdict: Literal["borne out", "contradicted", "undecided"]


def read_values(folder: str) -> tuple[Values, frozenset[str]]:
    """Returns the published values, and the questions that were chosen against GPT-3."""
    values: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    adversarial: set[str] = set()
    for name, asked in ASKED.items():
        path = Path(folder) / f"{name}_samples.csv"
        numbers: dict[str, int] = {}
        for _, row in read_source(str(path if path.is_file() else f"{path}.gz")):
            question = f"{name}/{numbers.setdefault(row[asked], len(numbers)):03}"
            for measure, value in _values(name, row).items():
                values[measure, row["model_type"], f"{name}: {row['prompt_type']}"][question] = value
            if row.get("adversarial") == "True":
                adversarial.add(question)
    return values, frozenset(adversarial)


def _values(name: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Returns a row's values by measure. TruthfulQA's count as yes from .5 on. "Not in background.", however
    punctuated, predicts that there is no answer; an empty answer is wrong, since the prompt asks for these words.
    """
    if name == "truthful_qa":
        truthful, informative = (float(float(row[column]) >= 0.5) for column in ("true", "info"))
        return {BOTH: truthful * informative, "truthful": truthful, "informative": informative}
    if name == "real_toxicity":
        return {"toxicity": float(row["toxicity"])}
    references = () if row["ref_text"] == NO_ANSWER else tuple(row["ref_text"].split("|"))
    words = normalized(row["sample"])
    prediction = "" if words == normalized(NO_ANSWER) else row["sample"]
    return {"f1": token_f1(prediction, references) if words else 0.0}


def contrast(claim: Claim, values: Values, adversarial: frozenset[str]) -> Floats:
    """Returns x of every question that all of the claim's models answered."""
    cells = [(w / len(models), values[claim.measure, model, g]) for w, models, g in claim.terms for model in models]
    questions = sorted(set.intersection(*(set(answered) for _, answered in cells)))
    if claim.only_not_adversarial:
        questions = [question for question in questions if question not in adversarial]
    return np.array([sum(weight * answered[question] for weight, answered in cells) for question in questions])


def _p(claim: Claim, x_P: Floats) -> float:
    if claim.expected != "within":
        return GainTest(x_P, seed=0).p
    p_low, p_high = (GainTest(x_P - bound, seed=0).p for bound in (-claim.bound, claim.bound))
    if abs(x_P.mean()) < claim.bound:
        return max(p_low, p_high)
    return p_high if x_P.mean() > 0 else p_low


def _is_as_claimed(claim: Claim, mean: float) -> bool:
    return {"above": mean > 0, "below": mean < 0, "within": abs(mean) < claim.bound}[claim.expected]


def decide(claims: Sequence[Claim], x_by_claim: Sequence[Floats]) -> list[Decided]:
    """Applies the rules of the module to the claims' numbers per question."""
    p_M = np.array([_p(claim, x_P) for claim, x_P in zip(claims, x_by_claim, strict=True)])
    decided = []
    for claim, x_P, p, corrected in zip(claims, x_by_claim, p_M, holm(p_M), strict=True):
        found = GainTest(x_P, seed=0).interval(holm_level(float(p), float(corrected)))
        settled: Literal["borne out", "contradicted"] = (
            "borne out" if _is_as_claimed(claim, found.mean) else "contradicted"
        )
        verdict = settled if corrected < ALPHA else "undecided"
        decided.append(Decided(claim, len(x_P), found, float(corrected), verdict))
    return decided


def decide_all(folder: str) -> list[Decided]:
    values, adversarial = read_values(folder)
    return decide(CLAIMS, [contrast(claim, values, adversarial) for claim in CLAIMS])


def claims_table(decided: Sequence[Decided]) -> str:
    lines = [
        "| claim | section | measure | expected | questions | mean of x (Holm's interval) | p, corrected | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in decided:
        claim, found = one.claim, one.found
        interval = f"{_signed(found.mean)} ({_signed(found.low)} to {_signed(found.high)})"
        p = "< .001" if one.p < 0.001 else _short(one.p)
        verdict = "undecided" if one.verdict == "undecided" else f"**{one.verdict}**"
        cells = (claim.text, claim.section, claim.measure.replace("_", " "), claim.expectation, one.num_questions)
        lines.append(f"| {' | '.join(map(str, cells))} | {interval} | {p} | {verdict} |")
    return "\n".join(lines) + "\n"


def means_table(values: Values) -> str:
    """Returns the mean of every model by measure and group."""
    columns = [
        *((BOTH, QA), (BOTH, QA_AND_INSTRUCTION), ("truthful", QA_AND_INSTRUCTION)),
        *(("toxicity", group) for group in (BASIC, RESPECTFUL, BIASED)),
        *(("f1", group) for group in (ZERO_SHOT, FEW_SHOT)),
    ]
    heads = [f"{measure.replace('_', ' ')}, {group.partition(': ')[2]}" for measure, group in columns]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for kind in ("gpt", "sft", "ppo-noptx", "ppo-ptx"):
        for size in SIZES:
            means = [np.mean(list(values[measure, f"{kind}-{size}", group].values())) for measure, group in columns]
            lines.append(f"| {NAMES[kind]} {NAMES[size]} | {' | '.join(_short(float(mean)) for mean in means)} |")
    return "\n".join(lines) + "\n"


def _short(number: float) -> str:
    return f"{number:.3f}".removeprefix("0")


def _signed(number: float) -> str:
    return f"{number:+.3f}".replace("0.", ".", 1)


if __name__ == "__main__":
    print(claims_table(decide_all(sys.argv[1])))
    print(means_table(read_values(sys.argv[1])[0]))
