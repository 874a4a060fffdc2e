"""DPO's losses by hand, and a response's log-probability against a loop over its tokens."""

import math

import pytest
import torch
import torch.nn.functional as F

from dpo.config import DPOConfig
from dpo.losses import LOSSES, PairSettings, PreferenceLoss, RankingLoss, UntiedPairs, sft_loss
from dpo.objective import refuse_wrong_reference
from dpo.policy import PackedResponses, PolicyLearner
from dpo.report import title_of
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights

CPU = torch.device("cpu")
BETA = 0.1


def ranking_loss_of(name: str) -> RankingLoss:
    loss = LOSSES[name]
    assert isinstance(loss, RankingLoss)
    return loss


def loss_and_gradient(loss: str, difference: float, tokens: int = 4, **options: float) -> tuple[float, float]:
    """The loss of one pair, the first of which is better, and its derivative by the first log-ratio."""
    ratios = torch.tensor([[difference / 2, -difference / 2]], requires_grad=True)
    tokens_12, ranks_12 = torch.tensor([[tokens, tokens]]), torch.tensor([[1, 2]])
    beta, log_nu = options.get("beta", BETA), options.get("log_nu")
    nu = None if log_nu is None else torch.tensor([log_nu])
    settings = PairSettings(beta, options.get("margin", 0.0), nu)
    found, _ = ranking_loss_of(loss).per_comparison(ratios, tokens_12, ranks_12, settings)
    (gradient,) = torch.autograd.grad(found.sum(), ratios)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-7)  # what one gains the other loses
    return float(found.detach()), float(gradient[0, 0])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# -log σ(βΔ) and -β σ(-βΔ); (Δ - 1/(2β))² and 2 (Δ - 1/(2β)), with β = 0.1; the last with 4 tokens and β = 5.
@pytest.mark.parametrize(
    ("loss", "difference", "beta", "value", "gradient"),
    [
        ("sigmoid", 0.0, 0.1, math.log(2), -0.05),
        ("sigmoid", 6.0, 0.1, 0.4375, -0.0354),
        ("ipo", 0.0, 0.1, 25.0, -10.0),
        ("ipo", 6.0, 0.1, 1.0, 2.0),
        ("ipo_length_normalised", 6.0, 0.1, (6 / 4 - 5) ** 2, 2 * (6 / 4 - 5) / 4),
        ("length_normalised", 0.0, 5.0, math.log(2), -5 / 8),
        ("length_normalised", 6.0, 5.0, -math.log(sigmoid(7.5)), -5 / 4 * sigmoid(-7.5)),
    ],
)
def test_a_pair_by_hand(loss: str, difference: float, beta: float, value: float, gradient: float) -> None:
    found = loss_and_gradient(loss, difference, beta=beta)
    assert found == pytest.approx((value, gradient), abs=6e-5)


def test_simpo_by_hand() -> None:
    """-log σ(β Δ - margin) with Δ per token, here 6 / 4 nats; a tie has no margin."""
    beta, margin = 2.0, 1.0
    found = loss_and_gradient("simpo", 6.0, beta=beta, margin=margin)
    lead = beta * 6 / 4 - margin
    assert found == pytest.approx((-math.log(sigmoid(lead)), -beta / 4 * sigmoid(-lead)), abs=6e-5)
    logprobs_12, tokens_12, tie_12 = torch.tensor([[-6.0, -3.0]]), torch.tensor([[3, 3]]), torch.tensor([[1, 1]])
    simpo = ranking_loss_of("simpo").per_comparison
    tied, accuracy = simpo(logprobs_12, tokens_12, tie_12, PairSettings(beta, margin))
    assert float(tied) == pytest.approx(-(math.log(sigmoid(2)) + math.log(sigmoid(-2))) / 2)
    close, right = simpo(logprobs_12, tokens_12, torch.tensor([[2, 1]]), PairSettings(beta, 3.0))
    assert float(close) == pytest.approx(-math.log(sigmoid(2.0 - 3.0)))
    assert (float(accuracy), float(right)) == (0.5, 1.0)  # the better response leads, if by less than the margin


def test_a_tie_by_hand() -> None:
    """Half a win for each; for IPO a target of 0; for Davidson an outcome with odds ν against a win of an equal."""
    ratios_12, tokens_12, tie_12 = torch.tensor([[6.0, 0.0]]), torch.tensor([[3, 3]]), torch.tensor([[1, 1]])
    by_sigmoid, by_ipo = ranking_loss_of("sigmoid").per_comparison, ranking_loss_of("ipo").per_comparison
    soft, _ = by_sigmoid(ratios_12, tokens_12, tie_12, PairSettings(BETA))
    assert float(soft) == pytest.approx(-(math.log(sigmoid(0.6)) + math.log(sigmoid(-0.6))) / 2)
    squared, _ = by_ipo(ratios_12, tokens_12, tie_12, PairSettings(BETA))
    assert float(squared) == pytest.approx(36.0)
    settings = PairSettings(BETA, log_nu=torch.tensor([math.log(0.5)]))
    davidson, _ = by_sigmoid(ratios_12, tokens_12, tie_12, settings)
    assert float(davidson) == pytest.approx(-math.log(0.5 / (0.5 + math.exp(0.3) + math.exp(-0.3))))
    assert loss_and_gradient("sigmoid", 0.0, log_nu=math.log(0.5))[0] == pytest.approx(math.log(2.5))


def test_a_ranking_of_k_is_the_mean_of_its_pairs() -> None:
    """Three responses of different lengths, two of them tied, next to a comparison of two."""
    ratios_2K, tokens_2K = torch.tensor([[3.0, -1.0, 0.5], [2.0, 4.0, 9.0]]), torch.tensor([[2, 5, 3], [4, 4, 0]])
    ranks_2K = torch.tensor([[1, 2, 2], [2, 1, 0]])
    for loss in ("sigmoid", "ipo", "length_normalised", "ipo_length_normalised"):
        found, _ = ranking_loss_of(loss).per_comparison(ratios_2K, tokens_2K, ranks_2K, PairSettings(BETA))
        values = LOSSES[loss].implicit_rewards(ratios_2K, tokens_2K, BETA).tolist()
        assert values[0][0] == pytest.approx(BETA * 3 / (2 if "length_normalised" in loss else 1))

        def pair(i: float, j: float, chance: float, of: str = loss) -> float:
            if of.startswith("ipo"):
                return ((i - j) / BETA - (2 * chance - 1) / (2 * BETA)) ** 2
            return -chance * math.log(sigmoid(i - j)) - (1 - chance) * math.log(sigmoid(j - i))

        a, b, c = values[0]
        expected = [(pair(a, b, 1) + pair(a, c, 1) + pair(b, c, 0.5)) / 3, pair(values[1][0], values[1][1], 0)]
        assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_means_of_both_sides_leave_out_ties_and_padding() -> None:
    pairs = UntiedPairs.of(torch.tensor([[2, 1, 2], [1, 1, 0], [1, 2, 0]]))
    values_BK = torch.tensor([[1.0, 5.0, 3.0], [7.0, 8.0, 99.0], [2.0, 4.0, 99.0]])
    better_B, worse_B = pairs.means(values_BK)
    assert (better_B.tolist(), worse_B.tolist()) == ([5.0, 0.0, 2.0], [2.0, 0.0, 4.0])
    assert pairs.exist_B.tolist() == [1.0, 0.0, 1.0]


def test_the_sft_loss_is_of_the_best_responses_per_token() -> None:
    logprobs_BK, tokens_BK = torch.tensor([[-6.0, -4.0, -9.0]]), torch.tensor([[3, 4, 3]])
    assert float(sft_loss(logprobs_BK, tokens_BK, torch.tensor([[1, 1, 2]]))) == pytest.approx((2 + 1) / 2)
    assert float(sft_loss(logprobs_BK, tokens_BK, torch.tensor([[3, 2, 1]]))) == pytest.approx(3.0)
    assert float(sft_loss(logprobs_BK, tokens_BK, torch.tensor([[2, 1, 0]]))) == pytest.approx(1.0)


def test_another_name_of_a_loss_is_refused() -> None:
    *names, last = map(repr, LOSSES)
    with pytest.raises(ValueError, match=f"{', '.join(names)} or {last}"):
        DPOConfig.model_validate({"rankings": {"source": "x.jsonl"}, "loss": "sigmoid_norm"})
    with pytest.raises(ValueError, match=r'margin is 1 with loss "sigmoid"; only "simpo" has a margin'):
        DPOConfig.model_validate({"rankings": {"source": "x.jsonl"}, "margin": 1.0})
    with pytest.raises(ValueError, match=r'ties is "davidson", which has no margins'):
        DPOConfig.model_validate({"rankings": {"source": "x.jsonl"}, "loss": "simpo", "ties": "davidson"})
    with pytest.raises(ValueError, match=r'ties is "davidson" with loss "ipo", which has no probabilities'):
        DPOConfig.model_validate({"rankings": {"source": "x.jsonl"}, "loss": "ipo", "ties": "davidson"})


def test_beta_depends_on_the_loss_unless_it_is_given() -> None:
    rankings = {"rankings": {"source": "x.jsonl"}}
    assert DPOConfig.model_validate(rankings).beta == 0.1
    assert DPOConfig.model_validate({**rankings, "loss": "length_normalised"}).beta == 5
    assert DPOConfig.model_validate({**rankings, "loss": "length_normalised", "beta": 2.0}).beta == 2
    simpo = DPOConfig.model_validate({**rankings, "loss": "simpo"})
    assert (simpo.beta, simpo.margin, simpo.preference_loss.has_reference) == (2.5, 1.375, False)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_run_records_can_be_read_again(loss: str) -> None:
    """`heed replay`, `heed study` and `heed run RUN/job.toml` read the job with all defaults."""
    config = DPOConfig.model_validate({"rankings": {"source": "x"}, "loss": loss})
    assert DPOConfig.model_validate(config.model_dump(mode="json", exclude_none=True)) == config


RANKING_LOSSES = [loss for loss in LOSSES.values() if isinstance(loss, RankingLoss)]


@pytest.mark.parametrize("loss", RANKING_LOSSES, ids=lambda loss: loss.name)
def test_neither_order_nor_padding_changes_a_loss(loss: RankingLoss) -> None:
    ratios_1K, tokens_1K = torch.tensor([[1.5, -0.5, 0.25, math.nan]]), torch.tensor([[4, 2, 3, 0]])
    ranks_1K, settings = torch.tensor([[2, 1, 2, 0]]), PairSettings(BETA)
    expected = loss.per_comparison(ratios_1K[:, :3], tokens_1K[:, :3], ranks_1K[:, :3], settings)
    assert 0 <= float(expected[1]) <= 1
    for order in ([0, 1, 2, 3], [2, 0, 1], [3, 1, 2, 0]):
        found = loss.per_comparison(ratios_1K[:, order], tokens_1K[:, order], ranks_1K[:, order], settings)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_a_loss_says_what_it_is(loss: PreferenceLoss) -> None:
    """In the reference, under the name that a job gives, and in reports."""
    assert f"`{loss.name}` {loss.description}" in str(DPOConfig.model_fields["loss"].description)
    assert title_of(loss.name) == loss.title
    assert set(loss.defaults) <= set(DPOConfig.model_fields)


SEQUENCES = [([5, 6, 7, 8, 1], 3), ([9, 1], 1), ([4, 4, 4, 4, 4, 2, 3, 1], 2), ([5, 6, 7, 8, 1], 3), ([7, 7, 7], 0)]


@pytest.fixture(scope="module")
def policy(tiny_config: ModelConfig) -> PolicyLearner:
    model = LanguageModel(tiny_config)
    init_weights(model, 5)
    return PolicyLearner(model, None).eval()


def test_a_responses_log_probability_is_that_of_its_tokens_and_its_end(policy: PolicyLearner) -> None:
    """Packed, and each alone: the end token counts; prompts, padding and neighbours do not."""
    sequences, response_tokens = zip(*SEQUENCES, strict=True)
    packed = PackedResponses.of(sequences, response_tokens, CPU)
    found_N, _ = packed.logprobs(policy)
    expected = []
    for tokens, num in SEQUENCES:
        logprobs_TV = F.log_softmax(policy.network(torch.tensor([tokens]))[0].detach(), dim=-1)
        begin = len(tokens) - num
        expected.append(sum(float(logprobs_TV[t - 1, tokens[t]]) for t in range(begin, len(tokens))))
    assert found_N.tolist() == pytest.approx(expected, abs=1e-4)
    assert packed.tokens_N.tolist() == [3, 1, 2, 3, 0]
    assert found_N.dtype == torch.float32
    assert len(packed.tokens_LT) < len(SEQUENCES)  # several share a row


def test_equal_responses_pull_nothing(policy: PolicyLearner) -> None:
    """Whatever labelers say of them: the gradients of both are the same, and cancel."""
    packed = PackedResponses.of([SEQUENCES[0][0]] * 2, [3, 3], CPU)
    logprobs_N, _ = packed.logprobs(policy)
    loss_B, accuracy_B = ranking_loss_of("sigmoid").per_comparison(
        (logprobs_N + 2.0)[None], packed.tokens_N[None], torch.tensor([[1, 2]]), PairSettings(BETA)
    )
    gradients = torch.autograd.grad(loss_B.sum(), list(policy.parameters()))
    assert float(loss_B.detach()) == pytest.approx(math.log(2))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-7
    assert accuracy_B.tolist() == [0.0]  # a reward that cannot tell them apart is not right


def test_a_wrong_reference_stops_the_run() -> None:
    tokens_N = torch.tensor([4, 100, 25])
    refuse_wrong_reference(torch.tensor([1e-5, -2e-5, 0.0]), tokens_N, BETA, "fp32")
    refuse_wrong_reference(torch.tensor([0.02, -0.2, 0.01]), tokens_N, BETA, "bf16")
    for wrong in (torch.tensor([0.0, 0.0, 0.5]), torch.tensor([0.0, math.nan, 0.0])):
        with pytest.raises(ValueError, match=r"would start near .* log 2 = 0.6931 was expected"):
            refuse_wrong_reference(wrong, tokens_N, BETA, "bf16")
