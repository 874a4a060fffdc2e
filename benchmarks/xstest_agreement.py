"""How well do a rule on how answers begin, and GPT-4 as a judge, agree with people on what is a refusal?

`python -m benchmarks.xstest_agreement FOLDER` prints the table of research/findings/xstest.md from the folder with
XSTest's prompts (`evaluation.suites.xstest`) and the authors' completions (https://github.com/paul-rottger/xstest):
MODEL_gpteval.csv has two people's classes and GPT-4's, MODEL_streval.csv those of the rule.
tests/benchmarks/test_published_outputs.py checks the docs.

Accuracy is the share of completions that get the same class as people's final one: refused, in full or partly, or not.
Alpha is Krippendorff's, for the same two classes. Cohen's kappa differs from it in what agreement by chance is: alpha
computes it from the classes of both raters together, kappa from each rater's own. Intervals are over contrast pairs.

Shape letters: R rows (completions), V classes.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.suites.suite import Row
from evaluation.suites.xstest import CLASSES, COMPLIANCE, SUITE, class_by_rule, id_of
from files.rows import read_source
from preferences.statistics.agreement import Alpha, alpha_of_units, share_of_tasks
from preferences.statistics.estimates import Share

RATERS = ("the rule", "GPT-4", "the two people, with each other")


@dataclass(frozen=True)
class Completion:
    """A published completion with the classes that it was given.

    `by_gpt4` is GPT-4's reply, which is none of CLASSES if GPT-4 refused to classify.
    """

    item_id: str
    answer: str
    by_person_1: str
    by_person_2: str
    by_people: str  # final: of both, or adjudicated
    by_gpt4: str
    by_rule: str


def completions_of(folder: Path) -> dict[str, list[Completion]]:
    """Reads the published completions by model."""
    by_model = {}
    for path in sorted(folder.glob("*_gpteval.csv*")):
        prefix, _, ending = path.name.rpartition("_gpteval")
        other = path.with_name(f"{prefix}_streval{ending}")
        by_rule = {id_of(where, row): row for where, row in read_source(str(other))}
        rows = [(id_of(where, row), row) for where, row in read_source(str(path))]
        by_model[prefix.removeprefix("xstest_v2_completions_")] = [_completion(one, row, by_rule) for one, row in rows]
    return by_model


def _completion(item_id: str, row: Row, by_rule: Mapping[str, Row]) -> Completion:
    assert row["completion"] == by_rule[item_id]["completion"], f"the two files differ in {item_id}"
    return Completion(
        item_id=item_id,
        answer=row["completion"],
        by_person_1=row["annotation_1"],
        by_person_2=row["annotation_2"],
        by_people=row["final_label"],
        by_gpt4=row["gpt4_label"],
        by_rule=by_rule[item_id]["strmatch_label"],
    )


def refusals(completion: Completion, rater: str) -> tuple[bool, bool] | None:
    """Returns whether the rater and people call it a refusal; None if the rater gave no class."""
    classes = {
        "the rule": (class_by_rule(completion.answer), completion.by_people),
        "GPT-4": (completion.by_gpt4, completion.by_people),
        "the two people, with each other": (completion.by_person_1, completion.by_person_2),
    }[rater]
    if not set(classes) <= set(CLASSES):
        return None
    return classes[0] != COMPLIANCE, classes[1] != COMPLIANCE


def kappa(classes: Sequence[tuple[bool, bool]]) -> float:
    """Returns Cohen's kappa, (p_o - p_e) / (1 - p_e), where p_e is the product of both raters' shares, over classes."""
    pair_R2 = np.array(classes)
    share_2 = pair_R2.mean(axis=0)
    by_chance = float(share_2.prod() + (1 - share_2).prod())
    return (float((pair_R2[:, 0] == pair_R2[:, 1]).mean()) - by_chance) / (1 - by_chance)


def agreement(classes: Sequence[tuple[bool, bool]], clusters: Sequence[str]) -> tuple[Share, Alpha]:
    """Returns accuracy and alpha. Rows of one cluster are not independent."""
    _, cluster_R = np.unique(np.array(clusters), return_inverse=True)
    pair_R2 = np.array(classes)
    num_refused_R = pair_R2.sum(axis=1)
    same_R, one_R = (num_refused_R != 1).astype(np.float64), np.ones(len(classes))
    counts_RV = np.stack([2 - num_refused_R, num_refused_R], axis=1).astype(np.float64)
    # One comparison of two classes per row.
    accuracy = share_of_tasks(same_R, one_R, cluster_R, np.full(len(classes), 2))
    return accuracy, alpha_of_units(counts_RV, np.arange(len(classes)), cluster_R)


def table(folder: str) -> str:
    items = {item.item_id: item for item in SUITE.read(folder)}
    lines = [
        "| completions of | rater | without a class | accuracy (95%) | alpha (95%) | kappa | refusals: rater, people |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, completions in completions_of(Path(folder)).items():
        for rater in RATERS:
            found = [(one, both) for one in completions if (both := refusals(one, rater))]
            classes = [both for _, both in found]
            clusters = [items[one.item_id].cluster or one.item_id for one, _ in found]
            accuracy, alpha = agreement(classes, clusters)
            counts = ", ".join(str(sum(column)) for column in zip(*classes, strict=True))
            shown = (
                _shown(accuracy.mean, accuracy.low, accuracy.high),
                _shown(alpha.value, alpha.low, alpha.high),
                _short(kappa(classes)),
            )
            missing = len(completions) - len(found)
            lines.append(f"| {model} | {rater} | {missing} | {' | '.join(shown)} | {counts} |")
    return "\n".join(lines) + "\n"


def _shown(mean: float, low: float, high: float) -> str:
    return f"{_short(mean)} ({_short(low)} to {_short(high)})"


def _short(number: float) -> str:
    return f"{round(number, 3) + 0.0:.3f}".replace("0.", ".", 1)


if __name__ == "__main__":
    print(table(sys.argv[1]))
    rows = [one for found in completions_of(Path(sys.argv[1])).values() for one in found]
    same = sum(class_by_rule(one.answer) == one.by_rule for one in rows)
    print(f"Heed's rule gives the published class of {same} of {len(rows)} completions.")
