"""Prompts from several sources: their shares, order and rows, which sources of a sum score them, and their metrics."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.loop import _scored_by
from ppo.prompts import Mixture, NamedSources, PromptSource, before_repeat, first_distinct, order_of
from ppo.rank import InitialModels, ScoreScale
from ppo.rollout_log import followed_rows
from reward.sources import RewardSum
from stages.data import Fitting, joined
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig
from training.data import Overlong, Prompt
from training.packing import Sampler

TWO = [{"source": "data/math.jsonl.gz", "weight": 3}, {"source": "org/chat", "weight": 1}]


# --- which prompts an iteration draws --------------------------------------------------------------------------------


def test_an_iteration_has_exactly_its_shares_if_they_are_whole_numbers() -> None:
    mixture = Mixture((5, 100), (3, 1), batch_size=8, seed=1)
    for step in range(20):
        assert Counter(row < 5 for row in mixture.batch(step).tolist()) == {True: 6, False: 2}


@given(
    weights=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.0, 2.5, 1 / 3]), min_size=1, max_size=5),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_the_number_drawn_from_a_source_is_never_off_by_a_whole_prompt(
    weights: list[float], batch_size: int, seed: int
) -> None:
    sizes = [3 + place for place in range(len(weights))]
    mixture, drawn = Mixture(sizes, weights, batch_size, seed), np.zeros(len(weights), dtype=int)
    ends, total = np.cumsum(sizes), sum(map(Fraction, map(str, weights)))
    for step in range(12):
        rows = mixture.batch(step)
        assert len(rows) == batch_size
        own = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(weights))
        drawn += own
        for now, so_far, weight in zip(own.tolist(), drawn.tolist(), weights, strict=True):
            share = Fraction(str(weight)) / total * batch_size
            assert abs(so_far - share * (step + 1)) < 1
            assert now == share or share.denominator > 1


def test_a_resumed_run_draws_the_same_prompts() -> None:
    whole = Mixture((7, 11, 4), (0.5, 0.3, 0.2), batch_size=6, seed=3)
    batches = [whole.batch(step).tolist() for step in range(9)]
    assert Mixture((7, 11, 4), (0.5, 0.3, 0.2), batch_size=6, seed=3).batch(8).tolist() == batches[8]
    assert Mixture((7, 11, 4), (5, 3, 2), batch_size=6, seed=3).batch(8).tolist() == batches[8]
    assert Mixture((7, 11, 4), (0.5, 0.3, 0.2), batch_size=6, seed=4).batch(8).tolist() != batches[8]


def test_every_source_has_its_own_epochs() -> None:
    mixture = Mixture((4, 6), (1, 1), batch_size=4, seed=0)
    drawn = [row for step in range(6) for row in mixture.batch(step).tolist()]
    assert sorted(row for row in drawn if row < 4) == sorted([0, 1, 2, 3] * 3)
    assert sorted(row for row in drawn if row >= 4) == sorted([4, 5, 6, 7, 8, 9] * 2)


def test_without_weights_the_sources_are_one_list() -> None:
    order, plain = order_of((3, 5), (), 4, 9), Sampler(8, 4, 9)
    assert [order.batch(step).tolist() for step in range(5)] == [plain.batch(step).tolist() for step in range(5)]


def test_small_choices_keep_the_shares() -> None:
    order = order_of((3, 90), (1, 1), 1, 5)
    distinct, unrepeated = first_distinct(order, 20), before_repeat(order, 20)
    assert len(set(distinct)) == len(distinct) <= 20
    assert Counter(row < 3 for row in unrepeated)[True] == 3
    assert len(unrepeated) in (6, 7)
    followed = followed_rows((3, 90), (1, 1), 4, 5)
    assert len(followed) == 8
    assert sum(row < 3 for row in followed) >= 3
    assert followed_rows((93,), (), 4, 5) == followed_rows((3, 90), (), 4, 5)


# --- their rows and ids ----------------------------------------------------------------------------------------------


def fitting(*prompts: Prompt) -> Fitting:
    return Fitting(prompts, [[len(prompt.prompt_id)] for prompt in prompts], Overlong(len(prompts), 1, 0))


def test_ids_begin_with_the_source_and_groups_are_sources_unless_rows_say_otherwise() -> None:
    turns = ({"role": "user", "content": "hi"},)
    first = fitting(*(Prompt(prompt_id=str(n), messages=turns, kind="", row={"answer": n}) for n in range(2)))
    second = fitting(Prompt(prompt_id="0", messages=turns, kind="poems"))
    both = joined(["math", "chat"], [first, second])
    assert [prompt.prompt_id for prompt in both.prompts] == ["math/0", "math/1", "chat/0"]
    assert [prompt.kind for prompt in both.prompts] == ["math", "math", "poems"]
    assert both.prompts[1].row == {"answer": 1}
    assert (list(both.tokens), both.sizes, both.overlong) == ([[1], [1], [1]], (2, 1), Overlong(3, 2, 0))
    assert both.overlong_by_source == {"math": Overlong(2, 1, 0), "chat": Overlong(1, 1, 0)}


def test_sources_are_called_after_their_files(ppo_config: Callable[..., PPOConfig]) -> None:
    assert [source.title for source in ppo_config(prompts=TWO).named_sources] == ["math", "chat"]
    assert PromptSource(source="world:ppo_prompts").title == "ppo_prompts"
    assert PromptSource(source="a b.jsonl").title == "a-b"
    assert ppo_config(prompts={"source": "math.jsonl"}).named_sources == ()


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "prompts is an empty list"),
        ([*TWO, {"source": "math.json", "weight": 1}], "prompts.0 and prompts.2 are both called 'math'; different"),
        ([TWO[0], {"source": "b"}], "prompts.1 has no `weight`, but others have"),
        ([{**TWO[0], "scored_by": ["right"]}], "prompts.0.scored_by has 'right'; names in the `sources` of a reward"),
    ],
)
def test_what_sources_need(ppo_config: Callable[..., PPOConfig], prompts: list[dict[str, object]], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ppo_config(prompts=prompts)


# --- which sources of a sum score them -------------------------------------------------------------------------------

REWARDS = """
def length(prompts, responses):
    assert all(prompt[-1]["content"].startswith("chat") for prompt in prompts), "this source scores chats only"
    return [float(len(text)) for text in responses]
"""


@pytest.fixture
def reward(tmp_path: Path) -> RewardSum:
    (tmp_path / "rewards.py").write_text(REWARDS)
    sources = {
        "right": {"kind": "verifier", "verifier": "number"},
        "long": {"kind": "function", "function": f"{tmp_path}/rewards.py:length"},
    }
    return RewardSum.model_validate({"sources": sources, "objective_weights": {"right": 2.0, "long": 0.5}})


MATH, CHAT = {"scored_by": ["right"], "answer": 4}, {"scored_by": ["long"]}


def test_a_row_is_scored_by_the_sources_that_it_names(reward: RewardSum) -> None:
    asked = [[{"role": "user", "content": content}] for content in ("math", "chat", "math")]
    responses, rows = ["It is 4", "hello", "5"], [MATH, CHAT, MATH]
    assert [one.score for one in reward.score(asked, responses, rows)] == [2.0, 2.5, 0.0]
    right, long = ([one.score for one in column] for column in reward.columns(asked, responses, 1, rows))
    assert [right[0], right[2], long[1]] == [1.0, 0.0, 5.0]
    assert all(map(math.isnan, (right[1], long[0], long[2])))
    assert reward.score([], [], []) == []


def test_rows_are_checked_by_the_sources_that_score_them(
    reward: RewardSum, ppo_config: Callable[..., PPOConfig]
) -> None:
    config = ppo_config(
        prompts=[{"source": "m.jsonl", "scored_by": ["right"]}, {"source": "c.jsonl", "scored_by": ["long"]}],
        reward=reward.model_dump(),
    )
    math_fields, chat_fields = map(config.row_fields_of, config.prompt_sources)
    assert math_fields.of("m.jsonl: line 1", {"answer": 4, "extra": 1}) == MATH
    assert chat_fields.of("c.jsonl: line 1", {"extra": 1}) == CHAT
    assert chat_fields.of("c.jsonl: line 2", {"answer": 4, "scored_by": ["right"]}) == MATH  # the row's own
    assert len({math_fields.key, chat_fields.key, config.row_fields.key}) == 3
    with pytest.raises(ValueError, match=r"^m.jsonl: line 2: field 'answer' is missing"):
        math_fields.of("m.jsonl: line 2", {"extra": 1})
    for wrong in (["wrong"], [["right"]], [{"right": 1}], "right", []):
        with pytest.raises(
            ValueError,
            match=r"^c.jsonl: line 3: field 'scored_by' is .*sources of the reward was expected: right, long",
        ):
            chat_fields.of("c.jsonl: line 3", {"scored_by": wrong})
    unweighted = RewardSum.model_validate({**reward.model_dump(), "objective_weights": {"right": 2.0, "long": 0.0}})
    with pytest.raises(ValueError, match=r"^c.jsonl: line 1: field 'scored_by' is .*whose objective_weights are all 0"):
        unweighted.fields_of("c.jsonl: line 1", CHAT)


def test_metrics_by_source_and_by_objective(
    reward: RewardSum, models: InitialModels, ppo_config: Callable[..., PPOConfig]
) -> None:
    """Real ranks: six prompts with an answer, which no response of so small a policy gives, and ten chats."""
    config = ppo_config(
        ptx=None,
        missing_eos_penalty=0.0,
        prompts=[{"source": "math.jsonl", "weight": 1}, {"source": "chat.jsonl", "weight": 3}],
        reward=reward.model_dump(),
        advantage={"kind": "group_mean", "samples_per_prompt": 2},
    )
    own = replace(models, reward=reward, scale=ScoreScale(0.0, 1.0), pretraining=None)
    kinds, rows = ["math"] * 6 + ["chat"] * 10, [MATH | {"answer": 987654}] * 6 + [CHAT] * 10
    asked = [[{"role": "user", "content": f"{kind} {number}"}] for number, kind in enumerate(kinds)]
    worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), own, asked, rows)
    tokens = [worker.tokenizer.encode_prompt(turns) for turns in asked]
    prompts = [
        Prompt(prompt_id=str(place), messages=tuple(asked[place]), kind="", row=row) for place, row in enumerate(rows)
    ]
    controller = PPOController(
        config,
        worker.roles,
        tokens,
        own.scale,
        num_pretraining_rows=0,
        seed=5,
        sources=NamedSources(["math", "chat"], [6, 10]),
        scored_by=_scored_by(config, Fitting(prompts, tokens, sizes=(6, 10))),
    )
    metrics = controller.step(0)
    assert controller.batch is not None
    is_math = controller.batch.rollout.prompt_rows_B < 6
    assert int(is_math.sum()) == 4  # a quarter of 8 prompts, two responses each
    assert torch.isfinite(controller.batch.scores_B).all()
    assert (metrics["source_share/math"], metrics["source_share/chat"]) == (0.25, 0.75)
    assert (metrics["failed/right"], metrics["failed/long"], metrics["failed_scores"]) == (0.0, 0.0, 0.0)
    assert metrics["score/right"] == metrics["source_score/math"] == 0.0
    assert metrics["source_informative_share/math"] == 0.0
    chats = controller.batch.scores_B[~is_math]
    assert metrics["source_score/chat"] == pytest.approx(float(chats.mean()))
    assert metrics["score/long"] == pytest.approx(2 * metrics["source_score/chat"])
    assert metrics["score"] == pytest.approx(0.75 * metrics["source_score/chat"])
    mean = sum(share * metrics[f"source_tokens/{name}"] for name, share in (("math", 0.25), ("chat", 0.75)))
    assert metrics["response_tokens"] == pytest.approx(mean)
    worker.close()
