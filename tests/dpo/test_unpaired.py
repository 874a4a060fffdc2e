"""KTO: loss and baseline against plain loops, what it learns from labels, ratings and flags, what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpo.config import DPOConfig
from dpo.losses import LOSSES, KTOConfig, labels_of
from dpo.objective import PreferenceObjective, mismatched
from dpo.policy import PolicyLearner, PolicySource
from lm.adapters import adapted
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.weights import ModelFolder
from preferences.formats.native import ranking_row
from preferences.formats.pairs import read_unpaired
from preferences.formats.parts import Report
from preferences.formats.registry import sniff
from preferences.records import Message, Ranking
from reward.comparisons import Comparison, Verdict
from reward.config import RankingsConfig, RewardConfig
from reward.prepared import Split, read_rankings
from tests.dpo.test_dpo_stage import config_for, context_of, results_of
from tests.rows import jsonl
from tests.token_files import train_dpo, train_reward
from training.config import BatchConfig
from training.engine import build_engine
from training.metrics import read_metrics

CPU = torch.device("cpu")
BETA, UNDESIRABLE_WEIGHT = 0.3, 1.5
KTO = KTOConfig(desirable_above=4, undesirable_flags=("harmful",), undesirable_weight=UNDESIRABLE_WEIGHT)
CONFIG = DPOConfig.model_validate({"rankings": {"source": "x"}, "loss": "kto", "beta": BETA, "kto": KTO})
COMPARISONS = [
    Comparison("a", ((5, 6, 7, 8, 1),), (Verdict((1,), (7.0,)),), response_tokens=(3,)),
    # One labeler rates both, another only flags the second.
    Comparison(
        "b", ((9, 4, 1), (9, 7, 7, 1)), (Verdict((1, 2), (5.0, 2.0)), Verdict((1, 2), (), 1.0, ((), ("harmful",)))),
        response_tokens=(2, 3),
    ),
    Comparison("c", ((4, 4, 2, 1),), (Verdict((1,), (1.0,), 0.5),), response_tokens=(2,)),
]  # fmt: skip
REFERENCE = [np.array(values, dtype=np.float32) for values in ([-9.0], [-4.0, -11.0], [-6.5])]
# And each response's share, over its labels. In b, the second response has two.
LABELS = [[(1, 1.0)], [(1, 1.0), (-1, 1.0)], [(-1, 0.5)]]


@pytest.fixture(scope="module")
def policy(tiny_config: ModelConfig) -> PolicyLearner:
    model = LanguageModel(tiny_config)
    init_weights(model, 5)
    return PolicyLearner(model, None).eval()


def logprob_of(policy: PolicyLearner, tokens: tuple[int, ...], num: int) -> torch.Tensor:
    logprobs_TV = F.log_softmax(policy.network(torch.tensor(list(map(int, tokens)))[None])[0], dim=-1)
    begin = len(tokens) - num
    return torch.stack([logprobs_TV[t - 1, tokens[t]] for t in range(begin, len(tokens))]).sum()


def test_the_loss_and_its_gradient_are_the_equations(policy: PolicyLearner) -> None:
    objective = PreferenceObjective(COMPARISONS, REFERENCE, CONFIG)
    objective.baseline.value = 0.8
    expected = torch.zeros(())
    right = total = 0.0
    for comparison, reference, labels in zip(COMPARISONS, REFERENCE, LABELS, strict=True):
        responses = zip(comparison.sequences, comparison.response_tokens, reference, labels, strict=True)
        for tokens, num, before, (label, share) in responses:
            ratio = logprob_of(policy, tokens, num) - before
            lead = BETA * (ratio - 0.8)
            weight = 1.0 if label > 0 else UNDESIRABLE_WEIGHT
            expected = expected + share * weight * (1 - torch.sigmoid(label * lead))
            right, total = right + share * (label * float(lead.detach()) > 0), total + share
    found, metrics = objective.loss(policy, np.arange(3), CPU)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert metrics["accuracy"].tolist() == pytest.approx([right, total])
    parameters = list(policy.parameters())
    for own, by_hand in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(own, by_hand, atol=1e-6, rtol=1e-4)
    parts = sum(float(objective.loss(policy, np.array([row]), CPU)[0].detach()) for row in range(3))
    assert parts == pytest.approx(float(found.detach()), rel=1e-5)  # however a batch is split


def test_every_labelled_response_weighs_the_same_as_in_trl(policy: PolicyLearner) -> None:
    """TRL 1.16's KTOTrainer, by hand: one row per labelled response, whose losses have the mean over all rows. Here two
    prompts have two labelled responses and one has one; a further response has no label.
    """
    rated = [((8, 5, 7, 1), (8, 6, 1)), ((4, 4, 2, 1),), ((9, 4, 1), (9, 7, 7, 1), (9, 5, 1))]
    verdicts = [
        Verdict((1, 2), (7.0, 1.0)),
        Verdict((1,), (1.0,)),
        Verdict((1, 2, 3), (), 1.0, (("harmful",), ("harmful",), ())),
    ]
    comparisons = [
        Comparison(str(n), sequences, (verdict,), response_tokens=(2,) * len(sequences))
        for n, (sequences, verdict) in enumerate(zip(rated, verdicts, strict=True))
    ]
    reference = [np.full(len(sequences), -9.0, dtype=np.float32) for sequences in rated]
    objective = PreferenceObjective(comparisons, reference, CONFIG)
    objective.baseline.value = 0.4
    rows = np.arange(3)
    loss = objective.loss(policy, rows, CPU)[0] / objective.count(rows)
    examples = [
        (rated[0][0], True),
        (rated[0][1], False),
        (rated[1][0], False),
        (rated[2][0], False),
        (rated[2][1], False),
    ]
    ratios = {tokens: logprob_of(policy, tokens, 2) + 9.0 for tokens, _ in examples}
    chosen = [1 - torch.sigmoid(BETA * (ratios[tokens] - 0.4)) for tokens, label in examples if label]
    rejected = [1 - torch.sigmoid(BETA * (0.4 - ratios[tokens])) for tokens, label in examples if not label]
    theirs = torch.stack([*chosen, *(UNDESIRABLE_WEIGHT * one for one in rejected)]).mean()
    assert float(loss.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    parameters = list(policy.parameters())
    for own, by_hand in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(theirs, parameters), strict=True
    ):
        torch.testing.assert_close(own, by_hand, atol=1e-6, rtol=1e-4)


def test_the_baseline_is_the_batchs_mean_log_ratio_of_other_responses(tmp_path: Path, model_folder: Path) -> None:
    """And never below 0."""
    engine = build_engine(
        context_of(tmp_path), PolicySource(adapted(ModelFolder(model_folder, LanguageModel), None, 0)), CONFIG
    )
    others = mismatched(COMPARISONS, 1, 96)
    logprobs = [float(logprob_of(engine.module, of.sequences[0], of.response_tokens[0]).detach()) for of in others]
    for shift, rows in ((2.0, [0, 1, 2]), (0.5, [2, 0]), (-1.0, [0, 1, 2])):
        before = [np.array([logprob - shift * (row + 1)], dtype=np.float32) for row, logprob in enumerate(logprobs)]
        objective = PreferenceObjective(COMPARISONS, REFERENCE, CONFIG, others, before)
        objective.prepare(engine, np.array(rows), BatchConfig(batch_size=4, micro_batch_size=1))
        expected = max(0.0, sum(shift * (row + 1) for row in rows) / len(rows))
        assert objective.baseline.value == pytest.approx(expected, abs=1e-4)
    engine.close()


def test_prompts_get_the_responses_of_others() -> None:
    others = mismatched(COMPARISONS, 1, 96)
    assert sorted(tuple(of.sequences[0][-of.response_tokens[0] :]) for of in others) == [(2, 1), (4, 1), (7, 8, 1)]
    for own, other in zip(COMPARISONS, others, strict=True):
        num_prompt = len(own.sequences[0]) - own.response_tokens[0]
        assert tuple(other.sequences[0][:num_prompt]) == own.sequences[0][:num_prompt]
        assert tuple(other.sequences[0]) != own.sequences[0]
    (cut,) = (of for of in mismatched(COMPARISONS, 1, 3) if of.task_id == "a")
    assert (len(cut.sequences[0]), cut.response_tokens) == (3, (1,))


def test_other_responses_are_to_other_prompts() -> None:
    """Even if a prompt has many responses with labels of their own."""
    prompts = [1] * 8 + [2] * 5 + [3, 4, 5]
    of_prompt = [
        Comparison(str(row), (np.array((prompt, 9, 100 * prompt + row)),), (Verdict((1,), (1.0,)),), 0, (1,))
        for row, prompt in enumerate(prompts)
    ]
    for seed in range(20):
        others = mismatched(of_prompt, seed, 96)
        assert sorted(of.sequences[0][-1] for of in others) == sorted(own.sequences[0][-1] for own in of_prompt)
        for own, other in zip(of_prompt, others, strict=True):
            assert tuple(other.sequences[0][:2]) == tuple(own.sequences[0][:2])
            assert other.sequences[0][2] // 100 != own.sequences[0][0]
    (sequence,) = others[0].sequences
    assert isinstance(sequence, np.ndarray)  # a tuple of numbers would take nine times the memory
    assert sequence.dtype == np.int32


@pytest.mark.parametrize(
    ("ratings", "flags", "labels"),
    [
        ((5.0, 4.0), (), (1, -1)),
        ((), (), (0, 0)),
        ((), (("harmful",), ()), (-1, 0)),
        ((7.0, 6.0), (("rude", "harmful"), ("rude",)), (-1, 1)),
    ],
)
def test_ratings_and_flags_are_labels(
    ratings: tuple[float, ...], flags: tuple[tuple[str, ...], ...], labels: tuple[int, ...]
) -> None:
    verdict = Verdict((1, 2), ratings, 1.0, flags)
    assert labels_of(verdict, KTO) == labels
    assert LOSSES["kto"].weight(Comparison("t", ((1,), (2,)), (verdict,)), CONFIG) == sum(map(abs, labels))
    kept = LOSSES["kto"].select([Comparison("t", ((1,), (2,)), (verdict,))], CONFIG)
    assert bool(kept) == any(labels)


def write_labels(path: Path, num_rows: int = 48) -> None:
    """Single responses of TRL's unpaired type: those with exclamation marks are desirable."""
    rows = [
        {"prompt": f"Where is dog {i}?", "completion": "Far" + "!" * (2 * (i % 2)), "label": bool(i % 2)}
        for i in range(num_rows)
    ]
    path.write_text(jsonl(rows))


def test_it_learns_from_labels_of_single_responses(tmp_path: Path, model_folder: Path) -> None:
    write_labels(tmp_path / "rankings.jsonl")
    config = config_for(tmp_path, loss="kto", num_epochs=8.0)
    train_dpo(context_of(tmp_path / "run"), config, model_folder)
    lines, results = read_metrics(tmp_path / "run" / "metrics.jsonl"), results_of(tmp_path / "run")
    assert lines[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert lines[0]["baseline"] == pytest.approx(0.0, abs=1e-4)
    assert lines[-1]["loss"] < 0.4
    assert lines[-1]["chosen_reward"] > lines[-1]["rejected_reward"] + 0.5
    found = results["unpaired"]
    assert found["heldout_accuracy"]["mean"] > 0.9
    assert found["train_desirable"] + found["train_undesirable"] == results["train_comparisons"]
    assert min(found["heldout_desirable"], found["heldout_undesirable"]) > 0
    assert results["heldout_accuracy"]["mean"] is None  # no pairs


def test_a_killed_run_ends_like_an_untouched_one(tmp_path: Path, model_folder: Path) -> None:
    write_labels(tmp_path / "rankings.jsonl", 24)
    config = config_for(tmp_path, loss="kto", save_every_steps=3, num_epochs=2.0)
    train_dpo(context_of(tmp_path / "whole"), config, model_folder)
    run, first = tmp_path / "again", sorted((tmp_path / "whole" / "checkpoints").iterdir())[0]
    (run / "checkpoints").mkdir(parents=True)
    first.rename(run / "checkpoints" / first.name)
    train_dpo(context_of(run), config, model_folder)
    whole, again = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "again"))
    assert whole == again
    assert results_of(tmp_path / "whole")["unpaired"] == results_of(run)["unpaired"]


def rated_rows(ratings: list[float]) -> list[dict[str, Any]]:
    prompt = [{"role": "user", "content": "Where?"}]
    return [
        {"task_id": f"t{i}", "prompt": [{**prompt[0], "content": f"Where is {i}?"}], "responses": ["Far", "Far!!"],
         "ranks": [2, 1], "labeler": "ann", "ratings": ratings, "flags": [["harmful"], []]}
        for i in range(12)
    ]  # fmt: skip


def test_labels_of_one_kind_are_refused_before_training(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "rankings.jsonl").write_text(jsonl(rated_rows([5.0, 6.0])))
    with pytest.raises(
        ValueError,
        match=r"\d+ responses to learn from in .*rankings.jsonl, \d+ are desirable and 0 undesirable; .*"
        r" Ratings are 5 to 6, flags harmful; dpo.kto.desirable_above is 0.5, and dpo.kto.undesirable_flags \[\]",
    ):
        train_dpo(context_of(tmp_path / "run"), config_for(tmp_path, loss="kto"), model_folder)
    flagged = config_for(tmp_path, loss="kto", kto={"undesirable_flags": ["harmful"]}, num_epochs=1.0)
    train_dpo(context_of(tmp_path / "flags"), flagged, model_folder)
    found = results_of(tmp_path / "flags")["unpaired"]
    assert found["train_desirable"] == found["train_undesirable"] > 0


def split_of(*prompts: str) -> Split:
    """A ranking of each prompt, whose responses are rated 5 and 0."""
    rated = Ranking("", (), ("", ""), (1, 2), "ann", ratings=(5.0, 0.0), flags=(("rude",), ()))
    judged = [replace(rated, task_id=f"t{i}", prompt=(Message("user", q),)) for i, q in enumerate(prompts)]
    return Split(("overall",), judged, judged)


def test_responses_to_one_prompt_have_no_baseline() -> None:
    config = DPOConfig.model_validate({"rankings": {"source": "labels.jsonl"}, "loss": "kto"})
    LOSSES["kto"].check_data(split_of("Q", "Q", "P"), config)
    with pytest.raises(
        ValueError, match=r"1 of the training prompts of labels.jsonl have .*; at least two were expected"
    ):
        LOSSES["kto"].check_data(split_of("Q", "Q"), config)
    with pytest.raises(ValueError, match=r"0 of the held-out prompts of labels.jsonl have"):
        LOSSES["kto"].check_data(replace(split_of("Q", "P"), heldout=[]), config)


def test_flags_that_no_response_has_are_reported() -> None:
    flags = KTOConfig(undesirable_flags=("rude", "harmfull"))
    config = DPOConfig.model_validate({"rankings": {"source": "x"}, "loss": "kto", "kto": flags})
    split = split_of("Q", "P")
    split = replace(split, train=[replace(ranking, flags=()) for ranking in split.train])
    assert LOSSES["kto"].check_data(split, config) == ["no response of x has a flag 'harmfull'"]


def test_single_responses_are_refused_where_they_teach_nothing(tmp_path: Path, model_folder: Path) -> None:
    write_labels(tmp_path / "rankings.jsonl")
    with pytest.raises(ValueError, match=r"rankings.jsonl: line 1: a single response, which ranks nothing; .* \"kto\""):
        train_dpo(context_of(tmp_path / "run"), config_for(tmp_path), model_folder)
    reward = RewardConfig.model_validate(
        {"rankings": {"source": str(tmp_path / "rankings.jsonl")}, "batch": {"batch_size": 4, "micro_batch_size": 4},
         "optimizer": {"learning_rate": 0.01}, "save_every_steps": 9, "evaluate_every_steps": 9}
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"line 1: a single response, which ranks nothing"):
        train_reward(context_of(tmp_path / "run"), reward, model_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "yes"}, r"field 'label' is 'yes'; true or false was expected"),
        (
            {"completion": [{"role": "user", "content": "Hm"}]},
            r"field 'completion' has 1 turns; one of the assistant",
        ),
        ({"prompt": ""}, "field 'prompt' is empty"),
    ],
)
def test_malformed_labels_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    row = {"prompt": "Where?", "completion": "Far", "label": True, **changes}
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"labels.jsonl: line 1: {message}"):
        read_rankings(RankingsConfig(source=str(path)))


def test_trls_unpaired_rows_are_recognised() -> None:
    form, _ = sniff(iter([("line 1", {"prompt": "Q", "completion": "A", "label": False})]), "file")
    assert form.name == "trl_unpaired"
    answer = [{"role": "assistant", "content": "A"}]
    row = {"prompt": [{"role": "user", "content": "Q"}], "completion": answer, "label": 0}
    (found,) = read_unpaired("line 1", row, Report(), "")
    assert (found.task.responses, found.votes[0].ratings) == (("A",), (0.0,))


def test_unusual_labels_are_reported() -> None:
    """As in rows of other formats."""
    twice = [{"role": "user", "content": "Q"}, {"role": "user", "content": "R"}]
    report = Report()
    for row in ({"prompt": "Q", "completion": "", "label": True}, {"prompt": twice, "completion": "A", "label": True}):
        assert len(list(read_unpaired("line 1", row, report, ""))) == 1
    assert set(report.counts()) == {"empty reply", "same speaker twice"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kto": {"desirable_above": 3.0}}, r'kto is set, but loss is "sigmoid"'),
        ({"loss": "kto", "ties": "davidson"}, r'ties "davidson" with loss "kto"'),
        ({"loss": "kto", "sft_coef": 0.5}, r'sft_coef 0.5 with loss "kto"'),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPOConfig.model_validate({"rankings": {"source": "x"}, **changes})
    written = DPOConfig.model_validate({"rankings": {"source": "x"}}).model_dump()  # as in a run's job.toml
    assert DPOConfig.model_validate(written).loss == "sigmoid"


def test_flags_of_rankings_survive_a_file(tmp_path: Path) -> None:
    plain = Ranking("t0", (Message("user", "Q"),), ("A", "B"), (1, 2), "ann")
    flagged = replace(plain, task_id="t1", flags=(("rude",), ()))
    assert "flags" not in ranking_row(plain)
    path = tmp_path / "rankings.jsonl"
    path.write_text(jsonl(ranking_row(ranking) for ranking in (plain, flagged)))
    assert read_rankings(RankingsConfig(source=str(path))) == [plain, flagged]
