"""`heed label sample`: responses of policies become tasks that labelers can be given."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from preferences.store import LabelStore
from reward import collect
from tests.models import load_scalar_model
from tests.rows import jsonl

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, tiny_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    """Two policies, a reward model and six prompts."""
    for seed, name in enumerate(("one", "two")):
        model = LanguageModel(tiny_config)
        init_weights(model, seed=seed)
        save_model(tmp_path / name, model, model.state_dict(), tokenizer)
    judge = ScalarModel(tiny_config)
    init_weights(judge, seed=5)
    save_model(tmp_path / "judge", judge, judge.state_dict(), tokenizer)
    rows = [{"prompt_id": f"p{n}", "messages": [{"role": "user", "content": f"The fox {n}?"}]} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text(jsonl(rows))
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    given = ["sample", str(folder / "one"), str(folder / "two"), "--prompts", str(folder / "prompts.jsonl")]
    return [*given, "--store", str(folder / "labels.sqlite"), "--batch", "b", "--max-new-tokens", "6", *more]


def test_samples_of_two_policies_are_put_before_labelers(folder: Path, heed_label: Call) -> None:
    for _ in range(2):  # the same again changes nothing
        code, said, _ = heed_label(*arguments(folder, "--responses", "3", "--samples", "2", "--labelers", "2"))
        assert (code, said.split(";")[0]) == (0, "6 tasks of 6 prompts, selected by uniform")
    with LabelStore(folder / "labels.sqlite") as store:
        stored = store.tasks("b")
        lease = store.lease("ann", seconds=60, batch="b")
    assert [one.num_labelers for one in stored] == [2] * 6
    assert {source for one in stored for source in one.task.sources} == {str(folder / "one"), str(folder / "two")}
    assert all(len(set(one.task.responses)) == 3 for one in stored)
    assert all(one.task.details["propensity"] == pytest.approx(1 / 4) for one in stored)  # 3 of 4 different ones
    assert lease is not None
    assert lease.shown.prompt[0].content == "The fox 0?"


def test_single_responses_are_rated_alone(folder: Path, heed_label: Call) -> None:
    code, said, _ = heed_label(*arguments(folder, "--responses", "1", "--samples", "1", "--batch", "alone"))
    assert (code, said.split(";")[0]) == (0, "6 tasks of 6 prompts, selected by uniform")
    with LabelStore(folder / "labels.sqlite") as store:
        tasks = [one.task for one in store.tasks("alone")]
    assert [(len(task.responses), task.details["propensity"]) for task in tasks] == [(1, 0.5)] * 6


def test_reward_models_choose_what_they_are_unsure_of(
    folder: Path, heed_label: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "EVALUATION_SHARE", 0.5)
    judged = ("--judge", str(folder / "judge"), "--responses", "2", "--samples", "3")
    code, said, _ = heed_label(*arguments(folder, *judged, "--choose", "near-tie"))
    assert (code, "selected by near-tie" in said) == (0, True)
    with LabelStore(folder / "labels.sqlite") as store:
        details = [one.task.details for one in store.tasks("b")]
    assert {(detail["slice"], detail["method"]) for detail in details} == {
        ("evaluation", "uniform"), ("training", "near-tie"),
    }  # fmt: skip
    unsure = {round(detail["propensity"], 6) for detail in details if detail["method"] == "near-tie"}
    assert len(unsure) > 1
    code, said, _ = heed_label(*arguments(folder, *judged, "--batch", "c"))
    assert (code, "selected by large-gap" in said) == (0, True)  # by default


def test_a_judge_of_several_objectives_is_given_their_weights(
    folder: Path, heed_label: Call, tiny_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    """Its first head is the plain judge's; alone it chooses what that judge would choose."""
    several = ScalarModel(tiny_config, labels=("kind", "brief"))
    several.load_state_dict(
        {**load_scalar_model(folder / "judge").state_dict(), "score.weight": torch.ones(2, 16), "bias": torch.ones(2)}
    )
    with torch.no_grad():
        several.score.weight[0] = load_scalar_model(folder / "judge").score.weight[0]
    save_model(folder / "several", several, several.state_dict(), tokenizer)
    chosen = []
    for judge, weights in (("judge", ()), ("several", ("--weight", "kind=1", "--weight", "brief=0"))):
        given = ("--judge", str(folder / judge), *weights, "--responses", "2", "--samples", "3")
        assert heed_label(*arguments(folder, *given, "--store", str(folder / f"{judge}.sqlite")))[0] == 0
        with LabelStore(folder / f"{judge}.sqlite") as store:
            chosen.append([one.task.responses for one in store.tasks("b")])
    assert chosen[0] == chosen[1]
    for weights, words in (
        ((), "several: this reward model has the objectives kind, brief, but weights are set for none"),
        (("--weight", "kind=1"), "weights are set for kind; a weight for each of kind, brief was expected"),
        (("--weight", "kind"), "--weight 'kind': NAME=NUMBER was expected, each name once"),
        (("--weight", "kind=1", "--weight", "kind=2"), "--weight 'kind=2': NAME=NUMBER was expected, each name once"),
        (("--weight", "kind=inf"), "--weight 'kind=inf': NAME=NUMBER was expected"),
    ):
        code, _, err = heed_label(*arguments(folder, "--judge", str(folder / "several"), *weights))
        assert (code, words in " ".join(err.split())) == (2, True), err
    code, _, err = heed_label(*arguments(folder, "--weight", "kind=1"))
    assert (code, "--weight sets the weight of a --judge's objective, but no --judge is given" in err) == (2, True)


def test_refusals(folder: Path, heed_label: Call) -> None:
    for more, words in (
        (("--responses", "9", "--samples", "1"), "no prompt has 9 different responses"),
        (("--responses", "0"), "--responses 0: 1 to 9 were expected"),
        (("--responses", "1", "--judge", str(folder / "judge")), "--responses 1: single responses are drawn uniformly"),
        (("--judge", str(folder / "one")), "one"),
    ):
        code, _, err = heed_label(*arguments(folder, *more))
        assert (code, words in err) == (2, True), (more, err)
        assert "Traceback" not in err
    with LabelStore(folder / "labels.sqlite") as store:
        assert store.batches() == []


def test_prompts_that_are_left_out_are_counted(
    folder: Path, heed_label: Call, tiny_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    """Two policies that differ only in how they read "5" say the same to all prompts but one."""
    model = LanguageModel(tiny_config.model_copy(update={"tie_word_embeddings": False}))
    init_weights(model, seed=0)
    a, b, five = (tokenizer.encode(text)[0] for text in "ab5")
    with torch.no_grad():  # they say "a" or "b", whichever has all the probability
        model.head.weight[a] *= 1000
        model.head.weight[b] = -model.head.weight[a]
    save_model(folder / "one", model, model.state_dict(), tokenizer)
    with torch.no_grad():
        model.decoder.embedding.weight[five] *= -1
    save_model(folder / "two", model, model.state_dict(), tokenizer)
    code, said, err = heed_label(*arguments(folder, "--responses", "2", "--samples", "1"))
    assert code == 0, err
    assert said.startswith("1 task of 1 prompt,"), said
    assert "5 of 6 prompts are left out: the policies gave fewer than 2 different responses" in said
