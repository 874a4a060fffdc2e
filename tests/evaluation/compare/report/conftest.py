"""Folders of comparisons with a known truth: verdicts drawn from strengths that the tests choose."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.compare.report.page import write_comparison_report
from evaluation.verdicts import Response, Verdict, write_rows

CATEGORIES = ("story", "question", "list")
ASKED = {
    "story": "Please write a short story that uses the words kite, fox and hill.",
    "question": "Mia has a red kite. Tom likes tea. What does Tom like?",
    "list": "Name four animals that can swim.",
}
SAID = {
    "story": "Anna had a red kite. She took the kite to the hill and met a fox. The fox was kind.",
    "question": "Tom likes tea.",
    "list": "A duck, a fish, a dog and a frog.",
}


def write_folder(
    folder: Path,
    policies: Mapping[str, float],
    judges: Mapping[str, Sequence[str]],
    *,
    num_prompts: int,
    ties: float = 0.15,
    failing: Mapping[str, float] | None = None,
    first_bonus: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Path:
    """Makes a comparison of `policies` (strengths in log-odds) by `judges` (the labelers of each), all pairs on all
    prompts.

    A verdict is a tie with probability `ties`; otherwise a win by Bradley-Terry on the strengths, with `first_bonus`
    added to the response shown first. A share `failing` of each judge's verdicts fails. A judge with a labeler of the
    same name judges both orders.
    """
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    prompts, responses, verdicts = [], [], []
    for number in range(num_prompts):
        category, prompt_id = CATEGORIES[number % 3], f"p-{number:04d}"
        turns = [{"role": "user", "content": f"{ASKED[category]} ({number})"}]
        prompts.append({"prompt_id": prompt_id, "messages": turns, "category": category})
        texts = {name: _text(category, name, place, number) for place, name in enumerate(policies)}
        responses += [
            Response(name, prompt_id, 0, text, len(text.split()), True, 0.4 * place + 0.01 * number)
            for place, (name, text) in enumerate(texts.items())
        ]
        for judge, labelers in judges.items():
            for labeler in labelers:
                verdicts += _verdicts(
                    generator, policies, texts, prompt_id, category, judge, labeler, ties,
                    (failing or {}).get(judge, 0.0), (first_bonus or {}).get(judge, 0.0),
                )  # fmt: skip
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    settings = {
        "policies": [{"name": name, "source": f"runs/demo/{name}/model"} for name in policies],
        "prompts": {"source": "held-out.jsonl", "sha256": "5f" * 32, "num_prompts": num_prompts},
        "sampling": {"num_samples": 1, "temperature": 1.0, "max_new_tokens": 128},
        "judges": [{"name": name, "kind": "people" if len(named) > 1 else "gold"} for name, named in judges.items()],
        "seed": seed,
        "versions": {"heed": "0.1.0", "numpy": "2.4.6"},
    }
    (folder / "compare.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_rows(folder / "responses.parquet", responses)
    write_rows(folder / "verdicts.parquet", verdicts)
    return folder


def _text(category: str, name: str, place: int, number: int) -> str:
    return f"{SAID[category]} {'They played all day. ' * ((place + number * (place + 1)) % 4)}({name})"


def _verdicts(
    generator: np.random.Generator,
    policies: Mapping[str, float],
    texts: Mapping[str, str],
    prompt_id: str,
    category: str,
    judge: str,
    labeler: str,
    ties: float,
    failing: float,
    first_bonus: float,
) -> list[Verdict]:
    names, found = list(policies), []
    for place, policy_a in enumerate(names):
        for policy_b in names[place + 1 :]:
            orders = ("a", "b") if judge == labeler else (str(generator.choice(["a", "b"])),)
            for first in orders:
                bonus = first_bonus if first == "a" else -first_bonus
                odds = policies[policy_a] - policies[policy_b] + bonus
                won = float(generator.random() < 1 / (1 + math.exp(-odds)))
                won = 0.5 if generator.random() < ties else won
                failure = "no verdict in 60 s" if generator.random() < failing else ""
                found.append(
                    Verdict(
                        prompt_id,
                        policy_a,
                        policy_b,
                        0,
                        0,
                        judge,
                        labeler,
                        math.nan if failure else won,
                        first=first,
                        length_a=len(texts[policy_a]),
                        length_b=len(texts[policy_b]),
                        category=category,
                        failure=failure,
                    )
                )
    return found


@pytest.fixture(scope="session")
def two_policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One judge, two policies (the second is better), 120 prompts. Read only."""
    folder = write_folder(
        tmp_path_factory.mktemp("two") / "ppo-sft", {"sft": 0.0, "ppo": 1.3}, {"gold": ["gold"]}, num_prompts=120
    )
    write_comparison_report(folder)
    return folder


@pytest.fixture(scope="session")
def four_policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four policies, judged by a judge that sometimes fails and prefers what it sees first, and by three people. Read
    only."""
    folder = write_folder(
        tmp_path_factory.mktemp("four") / "four",
        {"pretrained": -2.0, "sft": 0.0, "best_of_16": 0.9, "ppo": 1.0},
        {"gpt": ["gpt"], "people": ["ada", "bo", "cleo"]},
        num_prompts=60,
        failing={"gpt": 0.015},
        first_bonus={"gpt": 0.6},
        seed=3,
    )
    write_comparison_report(folder)
    return folder


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes another folder that the test may spoil."""

    def make(**changes: Any) -> Path:
        options: dict[str, Any] = {
            "policies": {"sft": 0.0, "ppo": 1.3}, "judges": {"gold": ["gold"]}, "num_prompts": 12, **changes
        }  # fmt: skip
        return write_folder(tmp_path / "made", options.pop("policies"), options.pop("judges"), **options)

    return make
