"""No split of a batch changes its loss or its gradients, in any stage: not micro-batches, ranks, ZeRO stages, packing,
offload, recomputed activations or sequence parallelism.

Expected is a plain PyTorch loop over single sequences, without padding, followed by SGD. This file is also the ranks'
program, `python test_splits.py FOLDER SPLIT...`: one process imports everything and forks the groups of 1, 2 and 4
ranks, since starting is what takes long.
"""

import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classify.examples import BEGINS, ENDS, Examples
from classify.objective import ClassifyObjective
from cluster.processes import free_port
from dpo.config import DPOConfig
from dpo.losses import KTOConfig
from dpo.objective import PreferenceObjective, mismatched
from dpo.policy import PolicySource
from lm.config import ModelConfig
from lm.encoder import (
    EncoderDecoder,
    MaskedLanguageModel,
    NextSentenceModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from lm.lora import UP, LoRAConfig, WithAdapters
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.source import ModelSource, RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from ppo.algorithm import GAE, GroupMean, KLConfig, ResponseLoss, TokenLoss, token_weights
from ppo.config import EMAConfig, PPOConfig, PTXConfig
from ppo.generator import Generator
from ppo.kept_passes import Repeated
from ppo.learner import Learner
from ppo.rank import InitialModels, ScoreScale, TokenStream
from ppo.rollout import Asked, Drawn, PolicyBatch, ResponseKL, Rollout, ValueBatch, shares_by_update, shares_of
from ppo.scorer import Scorer
from pretrain.corruption import DenoisingObjective, HiddenWords, MaskedObjective, NextSentenceObjective
from reward.comparisons import Comparison, Verdict
from reward.objective import AuxiliaryParameters, LearnerSource, RankingObjective
from tests.models import full_weights
from tests.tiers import in_ci, tried
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import Engine
from training.loop import LoopConfig, Objective, TrainingLoop
from training.metrics import read_metrics
from training.objectives import CausalLMObjective, PackedObjective, PairsObjective
from training.packing import PackedRows, pack

# One program computes all splits, in two minutes, or in several on a busy machine.
LIMIT_SECONDS = 1_100
pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_SECONDS + 100)]

NUM_ROWS, NUM_STEPS, VOCABULARY = 8, 2, 300
SHAPE = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
DECODER = ModelConfig(num_hidden_layers=2, **SHAPE)
ENCODER = ModelConfig(kind="encoder", num_hidden_layers=2, mlp="gelu", positions="learned", **SHAPE)
# More ranks than key-value heads may split a sequence: each has a query head of its own.
GROUPED = ModelConfig(num_hidden_layers=2, attention_sinks=True, **{**SHAPE, "num_attention_heads": 4})
# A rank has tokens for some of the experts only. Keys and values come from a latent vector. What else mixtures may have
# is in it, too.
MIXTURE = ModelConfig(
    num_hidden_layers=2, num_experts=9, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, n_group=3,
    topk_group=2, kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5,
    shared_expert_intermediate_size=8, shared_expert_gate=True, sliding_window=(4, 0), attn_logit_softcapping=2.0,
    final_logit_softcapping=9.0, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=0.5, **SHAPE,
)  # fmt: skip
LINEAR = ModelConfig(
    num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=3, linear_conv_kernel_dim=4,
    attn_output_gate=True, qk_norm=True, partial_rotary_factor=0.5, **SHAPE,
)  # fmt: skip
TYPED = ENCODER.model_copy(update={"type_vocab_size": 2})
BOTH = ModelConfig(kind="encoder-decoder", num_hidden_layers=1, num_encoder_layers=1, mlp="gelu", **SHAPE)
PAD, END, MASK = 0, 1, 2


def sgd(max_grad_norm: float) -> OptimizerConfig:
    """AdamW that is SGD of rate 1: without momentum, its eps as large as its rate and far larger than any gradient. So
    differences of weights are differences of gradients.
    """
    return OptimizerConfig(
        learning_rate=1e6, eps=1e6, betas=(0.0, 0.95), schedule="constant", max_grad_norm=max_grad_norm
    )


# --- the stages: what each learns from, and its loss by a loop over single sequences ----------------------------------

drawn = np.random.default_rng(4)


def tokens(length: int) -> list[int]:
    return drawn.integers(3, VOCABULARY, length).tolist()


STREAM = np.array([tokens(9) for _ in range(NUM_ROWS)], dtype=np.int32)
WORDS = HiddenWords(END, END, MASK, (END, PAD), VOCABULARY, seed=5)
TEXT = np.array([tokens(14) for _ in range(NUM_ROWS)], dtype=np.int32)
TEXT[1:4] = END  # three rows hide nothing: a rank has no word to count
TEXT[5, 1:] = END  # and one has a single one
# Of 16 conversations two fit a row; some have nothing that counts.
CONVERSATIONS = [
    (tokens(length), [t >= prompt for t in range(length)])
    for length, prompt in zip(
        [10, 2, 9, 3, 8, 4, 7, 5] * 2, [9, 2, 1, 3, 3, 2, 7, 1, 10, 1, 9, 1, 8, 4, 7, 2], strict=True
    )
]
PACKED = pack(CONVERSATIONS, 12, PAD)
ALONE = [pack([conversation], 12, PAD) for conversation in CONVERSATIONS]
PARTS = ([getattr(rows, part) for rows in ALONE] for part in ("tokens", "segments", "counted"))
UNPACKED = PackedRows(*(np.concatenate(part) for part in PARTS), np.arange(len(CONVERSATIONS))[:, None])
PAIRS = [(tokens(source), tokens(target)) for source, target in zip(range(1, 9), [6, 1, 9, 2, 2, 7, 3, 1], strict=True)]
OBJECTIVES = ("helpful", "harmless")
COMPARISONS = [  # two of eight are of the second objective
    Comparison(str(row), tuple(tuple(tokens(3 + (5 * row + k) % 11)) for k in range(K)), verdicts, objective)
    for row, (K, objective, verdicts) in enumerate(
        [
            (2, 0, (Verdict((1, 2), (5.0, 2.0), weight=1.5),)),
            (4, 1, (Verdict((1, 2, 2, 3)), Verdict((4, 1, 2, 3), (1.0, 7.0, 6.0, 2.5)))),
            (3, 0, (Verdict((1, 1, 1)),)),
            (2, 0, (Verdict((2, 1)), Verdict((1, 2), (4.0, 4.0)), Verdict((1, 1), weight=0.25))),
        ]
        * 2
    )
]
LOG_NU, RATING_STD, RATING_COEF = (-0.7, 0.4), (1.7, 0.9), 0.6
PREFERENCES = [
    replace(c, objective=0, response_tokens=tuple(len(sequence) // 2 for sequence in c.sequences)) for c in COMPARISONS
]
BETA, SFT_COEF = 0.3, 0.2
REFERENCE = [drawn.normal(-30, 4, len(c.sequences)).astype(np.float32) for c in PREFERENCES]


# Examples of classification, of different lengths. Some sentences have one tagged word, one has none.
LENGTHS = [5, 11, 3, 8, 12, 4, 9, 6]
SEQUENCE_TARGETS = [[row % 3, *[-1] * (length - 1)] for row, length in enumerate(LENGTHS)]
TOKEN_TARGETS = [
    [(t + row) % 3 if 0 < t < length - 1 and (t * row) % 4 == 1 else -1 for t in range(length)]
    for row, length in enumerate(LENGTHS)
]
SPANS = [(0, 0), (4, 9), (1, 1), (0, 0), (7, 10), (2, 3), (3, 3), (1, 4)]
SPAN_TARGETS = [
    [BEGINS * (t == first) + ENDS * (t == last) for t in range(length)]
    for length, (first, last) in zip(LENGTHS, SPANS, strict=True)
]
LABELS = ("a", "b", "c")


def examples_of(targets: list[list[int]]) -> Examples:
    generator = np.random.default_rng(8)  # of its own, so that the other stages keep their data
    return Examples(
        generator.integers(3, VOCABULARY, sum(LENGTHS)).astype(np.int32),
        np.concatenate([np.arange(length) >= length // 2 for length in LENGTHS]).astype(np.uint8),
        np.concatenate([np.array(of_row, dtype=np.int32) for of_row in targets]),
        np.cumsum(LENGTHS, dtype=np.int64),
        Path("unread"),
    )


def classify_sum(model: nn.Module, targets: list[list[int]]) -> Tensor:
    """Text by text: -log p of the labelled tokens, or half of that of a span's ends."""
    losses, examples = [], examples_of(targets)
    for of_row, end in zip(targets, examples.ends.tolist(), strict=True):
        part = slice(end - len(of_row), end)
        ids, types = (
            torch.from_numpy(of[part].astype(np.int64))[None] for of in (examples.tokens, examples.token_types)
        )
        found = model(ids, None, types)
        if isinstance(model, SpanPredictor):
            first, last = (next(t for t, target in enumerate(of_row) if target & bit) for bit in (BEGINS, ENDS))
            losses.append(-(F.log_softmax(found[0][0], dim=0)[first] + F.log_softmax(found[1][0], dim=0)[last]) / 2)
            continue
        for t, target in enumerate(of_row):
            if target >= 0:
                losses.append(
                    -F.log_softmax(found[0] if isinstance(model, SequenceClassifier) else found[0, t], 0)[target]
                )
    return sum_of(losses)


NEXT = NextSentenceObjective(TEXT, WORDS, num_views=1)


def next_sentence_sum(model: nn.Module) -> Tensor:
    """Pair by pair: the masked words', and twice the pair's, since two of 14 words are masked where all can be."""
    losses = []
    for number, (pair_T, is_random) in enumerate(zip(*NEXT.pairs(np.arange(NUM_ROWS)), strict=True)):
        hidden_T, chosen_T = WORDS.mask(pair_T, WORDS.generator(np.int64(number)))
        ids = torch.tensor([[END, *hidden_T[:7], END, *hidden_T[7:], END]])
        chosen = torch.tensor([[False, *chosen_T[:7], False, *chosen_T[7:], False]])
        logits_CV, next_12 = model(ids, None, chosen, torch.tensor([[0] * 9 + [1] * 8]))
        losses.append(next_tokens_loss(logits_CV, torch.from_numpy(pair_T)[chosen_T]))
        losses.append(-2 * F.log_softmax(next_12[0], dim=0)[int(is_random)])
    return sum_of(losses)


def stream_sum(model: nn.Module) -> Tensor:
    return sum_of(next_tokens_loss(model(row[None, :-1])[0], row[1:]) for row in torch.from_numpy(STREAM).long())


def masked_sum(model: nn.Module) -> Tensor:
    losses = []
    for number, row_T in enumerate(TEXT.astype(np.int64)):
        hidden_T, chosen_T = WORDS.mask(row_T, WORDS.generator(np.int64(number)))
        logits_TV = model(torch.tensor([[END, *hidden_T]]))[0, 1:]
        losses.append(next_tokens_loss(logits_TV[chosen_T], torch.from_numpy(row_T)[chosen_T]))
    return sum_of(losses)


def pair_sum(model: nn.Module, source: list[int], target: list[int]) -> Tensor:
    return next_tokens_loss(model(torch.tensor([source]), torch.tensor([[END, *target[:-1]]]))[0], torch.tensor(target))


def denoising_sum(model: nn.Module) -> Tensor:
    texts = enumerate(TEXT.astype(np.int64))
    pairs = [([END, *WORDS.infill(row, WORDS.generator(np.int64(number)))], row.tolist()) for number, row in texts]
    return sum_of(pair_sum(model, *pair) for pair in pairs)


def conversations_sum(model: nn.Module) -> Tensor:
    losses = []
    for ids, counted in CONVERSATIONS:
        mask_T = torch.tensor(counted[1:])
        losses.append(next_tokens_loss(model(torch.tensor([ids]))[0, :-1][mask_T], torch.tensor(ids[1:])[mask_T]))
    return sum_of(losses)


def ranking_sum(score: Callable[[Tensor], Tensor]) -> Tensor:
    """Pair by pair: -log σ(better - worse), its mean over both orders for a tie; a mean over pairs and labelers."""
    losses = []
    for comparison in COMPARISONS:
        scores = [score(torch.tensor([sequence])) for sequence in comparison.sequences]
        pairs = list(itertools.combinations(range(len(scores)), 2))
        for verdict, (i, j) in itertools.product(comparison.verdicts, pairs):
            ranks = verdict.ranks
            ahead = F.logsigmoid(scores[i] - scores[j]), F.logsigmoid(scores[j] - scores[i])
            gain = sum_of(ahead) / 2 if ranks[i] == ranks[j] else ahead[ranks[i] > ranks[j]]
            losses.append(-gain * verdict.weight / len(pairs) / len(comparison.verdicts))
    return sum_of(losses)


def davidson_sum(learner: nn.Module) -> Tensor:
    """Davidson's chances, written out, and the squared error of the ratings; each objective has its own of all."""
    losses = []
    for comparison in COMPARISONS:
        head = comparison.objective
        nu = (LOG_NU[head] + 16 * learner.nu[head]).exp()  # type: ignore[index, operator]
        scale = (16 * learner.rating[head]).exp()  # type: ignore[index, operator]
        score = decoder_score(learner.network)  # type: ignore[arg-type]
        scores = [score(torch.tensor([sequence]))[head] for sequence in comparison.sequences]
        for verdict in comparison.verdicts:
            share, K = verdict.weight / len(comparison.verdicts), len(scores)
            for i, j in itertools.combinations(range(K), 2):
                worth = scores[i].exp(), scores[j].exp(), nu * ((scores[i] + scores[j]) / 2).exp()
                won = 2 if verdict.ranks[i] == verdict.ranks[j] else int(verdict.ranks[i] > verdict.ranks[j])
                losses.append(-share * (worth[won] / sum_of(worth)).log() / (K * (K - 1) / 2))
            for k, rating in enumerate(verdict.ratings):
                above = (rating - sum(verdict.ratings) / K) / RATING_STD[head]
                losses.append(RATING_COEF * share * (above - scale * (scores[k] - sum_of(scores) / K)) ** 2 / 2 / K)
    return sum_of(losses)


def preference_sum(learner: nn.Module) -> Tensor:
    """Davidson's chances of implicit rewards, and the SFT loss per token of the best responses."""
    losses, nu = [], (LOG_NU[0] + 16 * learner.nu[0]).exp()  # type: ignore[index, operator]
    for comparison, reference in zip(PREFERENCES, REFERENCE, strict=True):
        logprobs = []
        for sequence, num in zip(comparison.sequences, comparison.response_tokens, strict=True):
            logits_TV, ids = learner.network(torch.tensor([sequence]))[0], torch.tensor(sequence)  # type: ignore[operator]
            logprobs.append(-next_tokens_loss(logits_TV[-num - 1 : -1], ids[-num:]))
        K, rewards = len(logprobs), [BETA * (own - float(ref)) for own, ref in zip(logprobs, reference, strict=True)]
        for verdict in comparison.verdicts:
            share = verdict.weight / len(comparison.verdicts)
            for i, j in itertools.combinations(range(K), 2):
                half = (rewards[i] - rewards[j]) / 2
                worth = half.exp(), (-half).exp(), nu
                won = 2 if verdict.ranks[i] == verdict.ranks[j] else int(verdict.ranks[i] > verdict.ranks[j])
                losses.append(-share * (worth[won] / sum_of(worth)).log() / (K * (K - 1) / 2))
            best = [k for k in range(K) if verdict.ranks[k] == 1]
            per_token = [logprobs[k] / comparison.response_tokens[k] for k in best]
            losses.append(-SFT_COEF * share * sum_of(per_token) / len(best))
    return sum_of(losses)


def next_tokens_loss(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    return F.cross_entropy(logits_CV, targets_C, reduction="sum")


def sum_of(losses: Any) -> Tensor:
    return torch.stack(list(losses)).sum()


@dataclass(frozen=True)
class Case:
    """A stage's model and data, and the mean loss that it is to minimise."""

    source: ModelSource[Any]
    objective: Objective[Any]
    mean: Callable[[Any], Tensor]
    max_grad_norm: float = 0.5  # below the gradient's, so that the clip is at work


def decoder_score(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens_1T: model(tokens_1T)[0, -1]


def encoder_score(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens_1T: model(tokens_1T)[0, 0]


class Adapted(WithAdapters[Any]):
    """Adapters that have learned something: where B is 0, A has no gradient."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(7)
        for name, tensor in super().tensors():
            yield name, torch.randn(tensor.shape, generator=generator) / 4 if name.endswith(UP) else tensor


NUM_COUNTED = sum(sum(counted[1:]) for _, counted in CONVERSATIONS)
NUM_HIDDEN = 4 * 2 + 1  # 15% of 14 words are 2
SUM_OF_WEIGHTS = 2 * (1.5 + 1 + 1 + (1 + 1 + 0.25) / 3)  # of the comparisons, each the mean of its labelers'
LANGUAGE = RandomInit(lambda: LanguageModel(DECODER), 1)
TRANSLATE = RandomInit(lambda: EncoderDecoder(BOTH), 3)
CASES = {
    "stream": Case(LANGUAGE, CausalLMObjective(STREAM), lambda model: stream_sum(model) / (NUM_ROWS * 8)),
    "masked": Case(
        RandomInit(lambda: MaskedLanguageModel(ENCODER), 2),
        MaskedObjective(TEXT, WORDS, num_views=1),
        lambda model: masked_sum(model) / NUM_HIDDEN,
    ),
    "denoising": Case(
        TRANSLATE, DenoisingObjective(TEXT, WORDS, num_views=1), lambda model: denoising_sum(model) / (NUM_ROWS * 14)
    ),
    "packed": Case(LANGUAGE, PackedObjective(PACKED), lambda model: conversations_sum(model) / NUM_COUNTED),
    "unpacked": Case(LANGUAGE, PackedObjective(UNPACKED), lambda model: conversations_sum(model) / NUM_COUNTED),
    "lora": Case(
        Adapted(LANGUAGE, LoRAConfig(rank=2, alpha=6.0), 6),
        PackedObjective(PACKED),
        lambda model: conversations_sum(model) / NUM_COUNTED,
        max_grad_norm=0.2,
    ),
    "grouped": Case(
        RandomInit(lambda: LanguageModel(GROUPED), 1),
        PackedObjective(PACKED),
        lambda model: conversations_sum(model) / NUM_COUNTED,
    ),
    "pairs": Case(
        TRANSLATE, PairsObjective(PAIRS, END), lambda model: sum_of(pair_sum(model, *pair) for pair in PAIRS) / 31
    ),
    "ranking": Case(
        LearnerSource(
            RandomInit(lambda: ScalarModel(DECODER, labels=OBJECTIVES), 4), AuxiliaryParameters(LOG_NU, RATING_STD)
        ),
        RankingObjective(COMPARISONS, "decoder", objectives=OBJECTIVES, rating_coef=RATING_COEF, rating_std=RATING_STD),
        lambda model: davidson_sum(model) / SUM_OF_WEIGHTS,
        max_grad_norm=0.2,
    ),
    "encoder-ranking": Case(
        LearnerSource(RandomInit(lambda: SequenceClassifier(ENCODER, ["score"]), 5), AuxiliaryParameters()),
        RankingObjective([replace(comparison, objective=0) for comparison in COMPARISONS], "encoder"),
        lambda model: ranking_sum(encoder_score(model.network)) / SUM_OF_WEIGHTS,
        max_grad_norm=0.2,
    ),
}


# With dropout no plain loop is the judge, but the whole batch on one rank, and for both ways to pack the packed one.
DROPOUT = "-dropout"
DROPPING: dict[str, ModelSource[Any]] = {
    "stream": RandomInit(lambda: LanguageModel(DECODER, 0.1), 1),
    "packed": RandomInit(lambda: LanguageModel(DECODER, 0.1), 1),
    "unpacked": RandomInit(lambda: LanguageModel(DECODER, 0.1), 1),
    "pairs": RandomInit(lambda: EncoderDecoder(BOTH, 0.1), 3),
    "ranking": LearnerSource(
        RandomInit(lambda: ScalarModel(DECODER, 0.1, OBJECTIVES), 4), AuxiliaryParameters(LOG_NU, RATING_STD)
    ),
    "encoder-ranking": LearnerSource(
        RandomInit(lambda: SequenceClassifier(ENCODER, ["score"], 0.1), 5), AuxiliaryParameters()
    ),
}
CASES |= {name + DROPOUT: replace(CASES[name], source=source) for name, source in DROPPING.items()}
DPO = Case(
    PolicySource(LANGUAGE, LOG_NU[0]),
    PreferenceObjective(
        PREFERENCES,
        REFERENCE,
        DPOConfig.model_validate(
            {"rankings": {"source": "unread"}, "beta": BETA, "sft_coef": SFT_COEF, "ties": "davidson"}
        ),
    ),
    lambda model: preference_sum(model) / SUM_OF_WEIGHTS,
)
CASES |= {
    "classify-sequence": Case(
        RandomInit(lambda: SequenceClassifier(TYPED, LABELS), 8),
        ClassifyObjective(examples_of(SEQUENCE_TARGETS), "sequence", has_types=True),
        lambda model: classify_sum(model, SEQUENCE_TARGETS) / NUM_ROWS,
    ),
    "classify-token": Case(
        RandomInit(lambda: TokenClassifier(TYPED, LABELS), 9),
        ClassifyObjective(examples_of(TOKEN_TARGETS), "token", has_types=True),
        lambda model: classify_sum(model, TOKEN_TARGETS) / sum(t >= 0 for of_row in TOKEN_TARGETS for t in of_row),
    ),
    "classify-span": Case(
        RandomInit(lambda: SpanPredictor(TYPED), 10),
        ClassifyObjective(examples_of(SPAN_TARGETS), "span", has_types=True),
        lambda model: classify_sum(model, SPAN_TARGETS) / NUM_ROWS,
    ),
    "next-sentence": Case(
        RandomInit(lambda: NextSentenceModel(TYPED), 11),
        NEXT,
        lambda model: (
            next_sentence_sum(model)
            / sum(min(2, int((row_T > MASK).sum())) for row_T in NEXT.pairs(np.arange(NUM_ROWS))[0])
        ),
    ),
}
CASES["mixture"] = Case(
    RandomInit(lambda: LanguageModel(MIXTURE), 12),
    PackedObjective(PACKED),
    lambda model: conversations_sum(model) / NUM_COUNTED,
)
CASES["lora-experts"] = Case(
    Adapted(CASES["mixture"].source, LoRAConfig(rank=2, alpha=6.0, targets="experts"), 6),
    PackedObjective(PACKED),
    lambda model: conversations_sum(model) / NUM_COUNTED,
    max_grad_norm=0.2,
)
# Clipped: plain steps of rate 1 make more of the rounding of α's exponential.
CASES["linear"] = replace(CASES["mixture"], source=RandomInit(lambda: LanguageModel(LINEAR), 13), max_grad_norm=0.2)
DPO_DROPPING = PolicySource(RandomInit(lambda: LanguageModel(DECODER, 0.1), 1), LOG_NU[0])
CASES |= {"dpo": DPO, "dpo" + DROPOUT: replace(DPO, source=DPO_DROPPING)}


# --- KTO: desirable and undesirable responses, some of several labelers, and a baseline of the whole batch ------------

KTO = KTOConfig(desirable_above=3, undesirable_flags=("rude",), desirable_weight=1.3)
LABELLED = [
    replace(
        comparison,
        verdicts=(
            Verdict(comparison.verdicts[0].ranks, tuple(float((row + 2 * k) % 6) for k in range(K)), 1 + row % 2),
            # Another labeler has flagged a response and rated none.
            *[Verdict(comparison.verdicts[0].ranks, flags=(("rude",), *[()] * (K - 1)))] * (row % 3 == 0),
        ),
    )
    for row, comparison in enumerate(PREFERENCES)
    for K in (len(comparison.sequences),)
]
OTHERS = mismatched(LABELLED, 3, 32)
OTHERS_REFERENCE = [np.array([-32.0 - row], dtype=np.float32) for row in range(NUM_ROWS)]


def kto_mean(learner: nn.Module) -> Tensor:
    """The loss of each labelled response, written out, with the mean log-ratio of the other responses as baseline."""

    def logprob(sequence: Sequence[int], num: int) -> Tensor:
        ids = torch.tensor([int(token) for token in sequence])
        return -next_tokens_loss(learner.network(ids[None])[0][-num - 1 : -1], ids[-num:])  # type: ignore[operator]

    with torch.no_grad():
        ratios = [
            logprob(other.sequences[0], other.response_tokens[0]) - float(before[0])
            for other, before in zip(OTHERS, OTHERS_REFERENCE, strict=True)
        ]
        baseline = float(sum_of(ratios)) / NUM_ROWS
        assert baseline > 1
    losses, weights = [], 0.0
    for comparison, reference in zip(LABELLED, REFERENCE, strict=True):
        responses = zip(comparison.sequences, comparison.response_tokens, reference, strict=True)
        leads = [0.03 * (logprob(tokens, num) - float(before) - baseline) for tokens, num, before in responses]
        for k, lead in enumerate(leads):
            # The labeler who flags the first response says nothing of the others.
            labelling = [verdict for verdict in comparison.verdicts if k == 0 or not verdict.flags]
            for verdict in labelling:
                share = verdict.weight / len(labelling)
                is_desirable = not verdict.flags and verdict.ratings[k] > 3
                losses.append(share * (1.3 * torch.sigmoid(-lead) if is_desirable else torch.sigmoid(lead)))
                weights += share
    return sum_of(losses) / weights


CASES["kto"] = Case(
    PolicySource(LANGUAGE),
    PreferenceObjective(
        LABELLED,
        REFERENCE,
        DPOConfig.model_validate({"rankings": {"source": "unread"}, "loss": "kto", "beta": 0.03, "kto": KTO}),
        OTHERS,
        OTHERS_REFERENCE,
    ),
    kto_mean,
    max_grad_norm=0.01,
)


# --- PPO: a rollout with unequal responses, of which some failed to be scored -----------------------------------------

PROMPTS, RESPONSES = [tokens(n) for n in (3, 9, 1, 4, 2, 7, 5, 6)], [tokens(n) for n in (5, 1, 6, 2, 4, 6, 1, 3)]
ROLLOUT = Rollout.of(range(NUM_ROWS), PROMPTS, RESPONSES, [True] * NUM_ROWS, RESPONSES, max_new_tokens=6, pad_id=PAD)
SCORED_BR = ROLLOUT.response_mask_BR & torch.tensor([1, 1, 0, 0, 1, 0, 1, 1]).bool()[:, None]
OLD_LOGPROBS_BR, ADVANTAGES_BR, OLD_VALUES_BR, RETURNS_BR = (
    torch.from_numpy(drawn.normal(mean, 1, (NUM_ROWS, 6)).astype(np.float32)) for mean in (-6.0, 0.0, 0.0, 1.0)
)
PTX_ROWS = torch.tensor([5, 0, 3, 6])
TEMPERATURE, CLIP, VALUE_CLIP, PTX_COEF = 0.7, 0.2, 0.5, 0.3
NUM_RESPONSE_TOKENS = 5 + 1 + 4 + 1 + 3
MAX_POLICY_NORM, MAX_VALUE_NORM = 0.4, 0.15
KL_COEF, CLIP_HIGH, REF_LOGPROBS_B = 0.1, 0.3, torch.tensor([-30.0, -5, -36, -13, -20, -37, -6, -18])
# PPO, and without a value function: the other weights of tokens, with the KL in the loss and both ratios.
WITHOUT_VALUES = {"advantage": GroupMean(samples_per_prompt=2), "kl": KLConfig(coef=KL_COEF, kind="loss")}
PPO_MODES: dict[str, dict[str, Any]] = {
    "ppo": {
        "advantage": GAE(value_optimizer=sgd(MAX_VALUE_NORM), value_clip_range=VALUE_CLIP),
        "kl": KLConfig(coef=KL_COEF),
        "loss": TokenLoss(clip_range=CLIP),
    },
    "ppo-response": {**WITHOUT_VALUES, "loss": ResponseLoss(clip_range=CLIP, clip_range_high=CLIP_HIGH)},
    "ppo-constant": {
        **WITHOUT_VALUES,
        "loss": TokenLoss(clip_range=CLIP, clip_range_high=CLIP_HIGH, token_weight="constant"),
    },
}


def ppo_config(mode: str, batch: BatchConfig) -> PPOConfig:
    return PPOConfig(
        prompts=DataConfig(source="unread.jsonl"), num_iterations=1, rollout_batch_size=NUM_ROWS, num_epochs=1,
        minibatch=batch, max_new_tokens=6, temperature=TEMPERATURE, policy_optimizer=sgd(MAX_POLICY_NORM),
        missing_eos_penalty=1.0, ptx=PTXConfig(coef=PTX_COEF, rows=4), ema=EMAConfig(decay=0.5),
        save_every_iterations=1, **PPO_MODES[mode],
    )  # fmt: skip


def policy_batch(config: PPOConfig) -> PolicyBatch:
    """The whole minibatch, weighted as the controller does."""
    weight_BR, num_tokens = token_weights(SCORED_BR, config.loss.token_weight, config.max_new_tokens)
    kl_weight_B = KL_COEF * weight_BR.amax(dim=1) / num_tokens
    kl = ResponseKL(REF_LOGPROBS_B, kl_weight_B) if config.kl.kind == "loss" else None
    advantages_BR = ADVANTAGES_BR[:, :1].expand(-1, 6) if config.loss.is_per_response else ADVANTAGES_BR
    return PolicyBatch(ROLLOUT, OLD_LOGPROBS_BR, advantages_BR, weight_BR, num_tokens, PTX_ROWS, len(PTX_ROWS), kl=kl)


def write_parents(folder: Path) -> None:
    tokenizer = Tokenizer.train(["the cat sat on the mat, the mat on the cat"], VOCABULARY, "chat")
    for name, kind, seed in (("sft", LanguageModel, 6), ("reward", ScalarModel, 7)):
        model = kind(DECODER)
        init_weights(model, seed)
        save_model(folder / name, model, model.state_dict(), tokenizer)
    STREAM.tofile(folder / "train.bin")


def policy_mean(model: nn.Module) -> Tensor:
    losses = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits_TV = model(torch.tensor([[*prompt, *response]]))[0]
        for t, token in enumerate(response):
            if SCORED_BR[row, t]:
                logprob = F.log_softmax(logits_TV[len(prompt) - 1 + t] / TEMPERATURE, dim=-1)[token]
                ratio, advantage = (logprob - OLD_LOGPROBS_BR[row, t]).exp(), ADVANTAGES_BR[row, t]
                losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
    return sum_of(losses) / NUM_RESPONSE_TOKENS + PTX_COEF * ptx_mean(model)


def ptx_mean(model: nn.Module) -> Tensor:
    rows = torch.from_numpy(STREAM).long()[PTX_ROWS]
    return sum_of(next_tokens_loss(model(row[None, :-1])[0], row[1:]) for row in rows) / (len(rows) * 8)


def mean_without_values(model: nn.Module, mode: str) -> Tensor:
    """The mean over the scored responses of each one's loss and of half its squared log ratio to the reference."""
    losses, num_scored = [], int(SCORED_BR.any(dim=1).sum())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        if not SCORED_BR[row, 0]:
            continue
        logits_TV = model(torch.tensor([[*prompt, *response]]))[0] / TEMPERATURE
        logprobs = [F.log_softmax(logits_TV[len(prompt) - 1 + t], dim=-1)[token] for t, token in enumerate(response)]
        changes = [new - OLD_LOGPROBS_BR[row, t] for t, new in enumerate(logprobs)]
        divisor = len(response) if mode == "ppo-response" else 6
        if mode == "ppo-response":
            changes = [sum_of(changes) / len(response)] * len(response)
        for t, change in enumerate(changes):
            ratio, advantage = change.exp(), ADVANTAGES_BR[row, 0 if mode == "ppo-response" else t]
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP_HIGH) * advantage)
            losses.append(-gain / divisor / num_scored)
        log_ratio = sum_of(logprobs) - REF_LOGPROBS_B[row]
        losses.append(KL_COEF * log_ratio**2 / 2 / divisor / num_scored)
    return sum_of(losses) + PTX_COEF * ptx_mean(model)


def value_mean(model: nn.Module) -> Tensor:
    losses = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        values_T = model(torch.tensor([[*prompt, *response]]))[0]
        for t in range(len(response)):
            if SCORED_BR[row, t]:
                value, old, target = values_T[len(prompt) - 1 + t], OLD_VALUES_BR[row, t], RETURNS_BR[row, t]
                near = old + (value - old).clamp(-VALUE_CLIP, VALUE_CLIP)
                losses.append(0.5 * torch.max((value - target) ** 2, (near - target) ** 2))
    return sum_of(losses) / NUM_RESPONSE_TOKENS


# --- the splits, drawn ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """One way to compute a batch."""

    name: str
    num_ranks: int
    micro_batch: int
    engine: EngineConfig

    def __str__(self) -> str:
        engine = self.engine
        parts = [self.name, f"{self.num_ranks}-ranks", f"micro-{self.micro_batch}", f"zero-{engine.zero_stage}"]
        parts += [f"sequence-{engine.sequence_parallel_size}"] * (engine.sequence_parallel_size > 1)
        offloaded = [f"offload-{name}" for name in engine.offload]
        return "-".join(parts + offloaded + ["checkpoint"] * engine.checkpoint_activations)

    @property
    def num_shares(self) -> int:
        return self.engine.data_parallel_size(self.num_ranks)


OFFLOADS: list[list[tuple[str, ...]]] = [
    [()], [(), ("optimizer",)], [(), ("optimizer",)], [(), ("optimizer",), ("parameters",), ("optimizer", "parameters")]
]  # fmt: skip


def batch_of(split: Split, num_rows: int) -> BatchConfig:
    """Where sequences differ in length, four ranks count a pass in tokens; some then have fewer passes to fill."""
    if split.num_ranks == 4 and (
        split.name in PPO_MODES or any(name in split.name for name in ("ranking", "dpo", "kto"))
    ):
        return BatchConfig(batch_size=num_rows, micro_batch_tokens=20 * split.micro_batch, forward_tokens=50)
    return BatchConfig(batch_size=num_rows, micro_batch_size=split.micro_batch)


# New ones come last, so that the others keep their splits.
CLASSIFIERS = ("classify-sequence", "classify-token", "classify-span", "next-sentence")
LATER = ("ppo", "dpo", "dpo" + DROPOUT, "lora", "grouped", *CLASSIFIERS, "kto", "mixture", "lora-experts", "linear")
NAMES = [*(name for name in CASES if name not in LATER), *LATER]
# How many ranks split a sequence: of the first two ranks, and of four. An encoder's sequences stay whole, as do those
# that linear layers read.
NEVER_SPLIT = ("masked", "denoising", "pairs", "encoder-ranking", "linear", *CLASSIFIERS)
SPLIT_OF_FOUR = {"packed": 2, "ppo": 2, "grouped": 4, "mixture": 2, "lora-experts": 2}


def draw_splits() -> list[Split]:
    """The whole batch on one rank, and for 1, 2 and 4 ranks other splits; a stage meets every ZeRO stage once."""
    generator, splits = np.random.default_rng(6), []
    for place, name in enumerate(NAMES):
        num_rows = 16 if name.startswith("unpacked") else NUM_ROWS
        splits.append(Split(name, 1, num_rows, EngineConfig(precision="fp32", trackers=())))
        zero_stages = np.roll(range(4), place - 1).tolist()
        of_two = 1 if name.removesuffix(DROPOUT) in NEVER_SPLIT else 2
        sequence_ranks = (1, of_two, 1, SPLIT_OF_FOUR.get(name, 1))
        for num_ranks, zero_stage, split_by in zip((1, 2, 2, 4), zero_stages, sequence_ranks, strict=True):
            micros = [size for size in (1, 2, 4, 8) if num_rows % (size * num_ranks) == 0 and size < num_rows]
            values = {
                "precision": "fp32",
                "zero_stage": zero_stage,
                "sequence_parallel_size": split_by,
                "trackers": (),
                "offload": OFFLOADS[zero_stage][generator.integers(len(OFFLOADS[zero_stage]))],
                "checkpoint_activations": bool(generator.integers(2)),
                "collective_timeout_seconds": 240.0,  # what the others wait for a rank that failed
            }
            split = Split(name, num_ranks, int(generator.choice(micros)), EngineConfig.model_validate(values))
            if (name != "grouped" or split_by > 1) and (name not in CLASSIFIERS or num_ranks > 1):
                splits.append(split)
    # Of four ranks, one reads a sequence per row and the others packed rows; all have to gather the same shards.
    values = {"precision": "fp32", "zero_stage": 3, "trackers": (), "collective_timeout_seconds": 240.0}
    splits.append(Split("ranking", 4, 1, EngineConfig.model_validate(values)))
    # What differs from PPO is in the batch, so two splits of it suffice.
    others = [mode for mode in PPO_MODES if mode != "ppo"]
    return splits + [
        replace(split, name=mode)
        for mode, kept in zip(others, (slice(1, None, 3), slice(2, None, 2)), strict=True)
        for split in [split for split in splits if split.name == "ppo"][kept]
    ]


SPLITS = draw_splits()


# With dropout, CI has whole and packed rows, an encoder-decoder, rankings and DPO.
NIGHTLY = ("unpacked" + DROPOUT, "encoder-ranking" + DROPOUT)


def splits_of_ci() -> set[str]:
    """One split of each stage; of PPO, all, and the whole batch. All numbers of ranks meet all ZeRO stages."""
    chosen = set[str]()
    for place, name in enumerate(dict.fromkeys(split.name for split in SPLITS)):
        of_stage = [str(split) for split in SPLITS if split.name == name]
        others = of_stage[1:]
        if name not in NIGHTLY:
            chosen |= {*(of_stage if name == "ppo" else others[(place + place // 4) % len(others) :][:1])}
    return chosen


OF_CI = splits_of_ci()
WHOLE = {split.name: str(split) for split in reversed(SPLITS) if split.num_ranks == 1 and split.micro_batch >= NUM_ROWS}


def with_each(splits: Iterable[Split]) -> Any:
    """As a decorator: a test with each of the splits, of which CI leaves some to the nightly tests."""
    given = [*splits]
    chosen = [split for split in given if str(split) in OF_CI]
    return pytest.mark.parametrize("split", in_ci(given, chosen), ids=str)


# --- the ranks' program -----------------------------------------------------------------------------------------------


def train(split: Split, folder: Path) -> dict[str, Any]:
    """Two steps through the loop that the stages run. Returns the curve and the weights."""
    case, num_rows = CASES[split.name], len(CASES[split.name].objective)
    engine: Engine[Any] = Engine(
        case.source,
        sgd(case.max_grad_norm),
        split.engine,
        world_size=split.num_ranks,
        micro_batch=split.micro_batch,
    )
    batch = batch_of(split, num_rows)
    config = LoopConfig("split", 5, NUM_STEPS, batch, save_every_steps=9, evaluate_every_steps=9)
    loop = TrainingLoop(engine, config, case.objective, case.objective, folder / str(split))
    heldout = loop.run()["loss"]
    weights = {name: weight.clone() for name, weight in full_weights(engine).items()}
    engine.close()
    curve = read_metrics(folder / str(split) / "metrics.jsonl")
    shares = [{name: line[name] for name in line if "accuracy" in name} for line in curve]
    return {"losses": [*(line["loss"] for line in curve), heldout], "norms": [line["gradient_norm"] for line in curve],
            "weights": weights, "shares": shares}  # fmt: skip


def train_ppo(split: Split, folder: Path) -> dict[str, Any]:
    """Two updates of the policy and of the value function, each rank with its share of the minibatch."""
    models = InitialModels(
        folder / "sft", folder / "reward", ScoreScale(0.0, 1.0), TokenStream(folder / "train.bin", 9),
        teachers=(folder / "sft", folder / "sft"),
    )  # fmt: skip
    config = ppo_config(split.name, batch_of(split, NUM_ROWS))
    scorer, generator = Scorer(config, split.engine, models), Generator(config, split.engine, models)
    learner = Learner(config, split.engine, models, split.num_ranks)
    lengths_B, everything = ROLLOUT.num_tokens_B, [torch.arange(NUM_ROWS)]
    shares = shares_of(lengths_B, split.num_shares, config.minibatch, with_gradients=True)
    place = learner.policy.data_rank
    policy = policy_batch(config).shares(shares)[place]
    value = ValueBatch(ROLLOUT, OLD_VALUES_BR, RETURNS_BR, SCORED_BR, NUM_RESPONSE_TOKENS).shares(shares)[place]
    by_update = shares_by_update(lengths_B, split.num_shares, config.minibatch, everything)
    mine = by_update[place]
    repeated = Repeated.of(ROLLOUT, by_update, len(mine.pass_sizes))  # the first update takes the passes, without ZeRO
    sampled = replace(ROLLOUT, behaviour_logprobs_BR=OLD_LOGPROBS_BR * ROLLOUT.response_mask_BR)
    drawn = Drawn.of(sampled).rows(mine.rows)
    mine_alone, prompts = sampled.rows(mine.rows), [PROMPTS[row] for row in mine.rows.tolist()]
    passes = {
        "generate": lambda: generator.generate(mine.rows.tolist(), prompts, range(len(prompts))),
        "scores": lambda: scorer.scores(mine_alone, Asked()),
        "reference_logprobs": lambda: scorer.reference_logprobs(mine_alone, mine.pass_sizes),
        "teacher_logprobs": lambda: scorer.teacher_logprobs(mine_alone, mine.pass_sizes),
        "policy_logprobs": lambda: learner.policy_logprobs(mine_alone, mine.pass_sizes, repeated, drawn),
    }
    collectives = {name: num_collectives(run) for name, run in passes.items()}
    of_teachers_BMR = scorer.teacher_logprobs(mine_alone, mine.pass_sizes)
    assert torch.equal(of_teachers_BMR[:, 1], scorer.reference_logprobs(mine_alone, mine.pass_sizes))
    metrics = []
    for update in range(NUM_STEPS):
        metrics.append(dict(learner.update_policy(policy, 1e6, update)))
        if config.value_optimizer is not None:
            metrics[-1] |= learner.update_value(value, 1e6, update)
    weights = {
        f"{role}/{name}": weight.clone()
        for role, engine in learner.engines.items()
        for name, weight in full_weights(engine).items()
    }
    learner.close()
    evidence = learner.take_evidence().sums_3N
    return {"shares": metrics, "weights": weights, "collectives": collectives, "evidence": evidence}


def num_collectives(run: Callable[[], object]) -> int:
    """How often this rank talks to others in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::"))


def rank_program(rank: int, num_ranks: int, port: int, folder: Path, names: Sequence[str]) -> None:
    log = os.open(folder / f"{num_ranks}-ranks-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Accelerate goes from plain ranks to DeepSpeed within a process, but not back.
    for split in sorted(SPLITS, key=lambda split: split.engine.on_ranks(split.num_ranks).zero_stage):
        if split.num_ranks == num_ranks and str(split) in names:
            found = train_ppo(split, folder) if split.name in PPO_MODES else train(split, folder)
            torch.save(found, folder / f"{split}-rank-{rank}.pt")
    torch.distributed.destroy_process_group()


def fork_groups(folder: Path, names: Sequence[str]) -> None:
    import tests.training.rank_process_imports  # noqa: F401 - once, for all ranks

    write_parents(folder)
    import torch._dynamo  # noqa: F401 - recomputed activations would import it in every rank

    gc.collect()
    gc.freeze()  # or each engine that closes looks at all of it
    context = multiprocessing.get_context("fork")
    for num_ranks in (1, 2, 4):
        port = free_port()
        ranks = [
            context.Process(target=rank_program, args=(r, num_ranks, port, folder, names)) for r in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * num_ranks


# --- the comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks have computed for the splits of the tests that were chosen, and for what those compare with."""
    folder = tmp_path_factory.mktemp("splits")
    chosen = tried(request, "split")
    wholes = [whole for split in SPLITS if str(split) in chosen for whole in compared_with(split)]
    names = dict.fromkeys([*chosen, *wholes])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    with (folder / "program.log").open("w") as log:
        code = subprocess.call(
            [sys.executable, __file__, str(folder), *names],
            env=environment,
            stdout=log,
            stderr=log,
            timeout=LIMIT_SECONDS,
        )
    assert code == 0, "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    return folder


def compared_with(split: Split) -> list[str]:
    """The whole batches that a split of dropout, or of PPO, is compared with."""
    if split.name.endswith(DROPOUT):
        judge = split.name.removeprefix("un")
        return [WHOLE[judge], WHOLE[judge.removesuffix(DROPOUT)]]
    return [WHOLE["ppo"]] if split.name == "ppo" else []


Expected = tuple[list[float], list[float], dict[str, Tensor]]


def descend(source: ModelSource[Any], mean: Callable[[Any], Tensor], max_grad_norm: float) -> Expected:
    """Losses, gradient norms before clipping, and the weights after plain SGD of rate 1."""
    model, losses, norms = load(source), [], []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(NUM_STEPS):
        loss = mean(model)
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= gradient * min(1.0, max_grad_norm / float(norm))
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    assert min(norms) > max_grad_norm
    weights = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return [*losses, float(mean(model).detach())], norms, weights


PLAIN = [split for split in SPLITS if split.name not in PPO_MODES and not split.name.endswith(DROPOUT)]


@with_each(PLAIN)
def test_a_split_changes_nothing(folder: Path, split: Split) -> None:
    case = CASES[split.name]
    losses, norms, weights = descend(case.source, case.mean, case.max_grad_norm)
    for rank in range(split.num_ranks):
        found = torch.load(folder / f"{split}-rank-{rank}.pt")
        assert found["losses"] == pytest.approx(losses, rel=2e-6)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert_same_weights(found["weights"], weights)


@with_each(split for split in SPLITS if split.name.endswith(DROPOUT))
def test_a_split_changes_nothing_with_dropout(folder: Path, split: Split) -> None:
    whole, without = compared_with(split)
    expected = torch.load(folder / f"{whole}-rank-0.pt")
    assert expected["losses"][0] != pytest.approx(torch.load(folder / f"{without}-rank-0.pt")["losses"][0], rel=2e-5)
    for rank in range(split.num_ranks):
        found = torch.load(folder / f"{split}-rank-{rank}.pt")
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_same_weights(found["weights"], expected["weights"])


@with_each(split for split in SPLITS if split.name == "ranking")
@torch.no_grad()
def test_a_split_changes_no_accuracy_of_an_objective(folder: Path, split: Split) -> None:
    """The accuracy of an objective that is missing in most micro-batches is divided by the weights of its own
    comparisons on all ranks; the accuracy over both objectives is divided by all weights.
    """
    model = load(CASES["ranking"].source)
    right, total = [0.0, 0.0], [0.0, 0.0]
    for comparison in COMPARISONS:
        head = comparison.objective
        scores = [float(model.network(torch.tensor([s]))[0, -1, head]) for s in comparison.sequences]
        for verdict in comparison.verdicts:
            untied = [
                (i, j) for i, j in itertools.permutations(range(len(scores)), 2) if verdict.ranks[i] < verdict.ranks[j]
            ]
            share = verdict.weight / len(comparison.verdicts)
            right[head] += share * (sum(scores[i] > scores[j] for i, j in untied) / len(untied) if untied else 0.5)
            total[head] += share
    for rank in range(split.num_ranks):
        shares = torch.load(folder / f"{split}-rank-{rank}.pt")["shares"]
        for head, name in enumerate(OBJECTIVES):
            assert shares[0][f"accuracy/{name}"] == pytest.approx(right[head] / total[head], rel=1e-5)
        assert shares[0]["accuracy"] == pytest.approx(sum(right) / SUM_OF_WEIGHTS, rel=1e-5)
        assert set(shares[-1]) == {
            f"{side}accuracy{of}" for side in ("", "heldout_") for of in ("", *(f"/{name}" for name in OBJECTIVES))
        }


@with_each(split for split in SPLITS if split.name == "ppo")
def test_a_split_changes_no_update_of_ppo(folder: Path, split: Split) -> None:
    policy = descend(ModelFolder(folder / "sft", LanguageModel), policy_mean, MAX_POLICY_NORM)
    value = descend(ModelFolder(folder / "reward", ScalarModel), value_mean, MAX_VALUE_NORM)
    ranks = [torch.load(folder / f"{split}-rank-{rank}.pt") for rank in range(split.num_ranks)]
    for step in range(NUM_STEPS):
        figures = sum_of_shares(split, [rank["shares"][step] for rank in ranks])
        assert figures["policy_gradient_norm"] == pytest.approx(policy[1][step], rel=1e-5)
        assert figures["value_gradient_norm"] == pytest.approx(value[1][step], rel=1e-5)
        total = figures["policy_loss"] + PTX_COEF * figures["ptx_loss"]
        assert total == pytest.approx(policy[0][step], rel=1e-5)
        assert figures["value_loss"] == pytest.approx(value[0][step], rel=1e-5)
    expected = {
        **{f"policy/{name}": weight for name, weight in policy[2].items()},
        **{f"value/{name}": weight for name, weight in value[2].items()},
    }
    for rank in ranks:
        assert_same_weights(rank["weights"], expected)


def sum_of_shares(split: Split, metrics: list[dict[str, float]]) -> dict[str, float]:
    """Sum the metrics of the batch's shares. All ranks of a sequence group have their share's."""
    size = split.engine.sequence_parallel_size
    for first in range(0, len(metrics), size):
        assert metrics[first : first + size] == [metrics[first]] * size
    return {name: sum(of_share[name] for of_share in metrics[::size]) for name in metrics[0]}


@with_each(s for s in SPLITS if s.name in PPO_MODES and s.name != "ppo")
def test_a_split_changes_no_update_without_a_value_function(folder: Path, split: Split) -> None:
    norm = MAX_POLICY_NORM
    policy = descend(ModelFolder(folder / "sft", LanguageModel), lambda m: mean_without_values(m, split.name), norm)
    ranks = [torch.load(folder / f"{split}-rank-{rank}.pt") for rank in range(split.num_ranks)]
    for step in range(NUM_STEPS):
        figures = sum_of_shares(split, [rank["shares"][step] for rank in ranks])
        assert figures["policy_gradient_norm"] == pytest.approx(policy[1][step], rel=1e-5)
        total = figures["policy_loss"] + figures["kl_loss"] + PTX_COEF * figures["ptx_loss"]
        assert total == pytest.approx(policy[0][step], rel=1e-5)
    for rank in ranks:
        assert_same_weights(rank["weights"], {f"policy/{name}": weight for name, weight in policy[2].items()})


@with_each(split for split in SPLITS if split.name == "ppo")
def test_a_split_changes_no_evidence_about_draws(folder: Path, split: Split) -> None:
    (whole,) = compared_with(split)
    expected = torch.load(folder / f"{whole}-rank-0.pt")["evidence"]
    assert expected.abs().max() > 1
    found = sum(torch.load(folder / f"{split}-rank-{rank}.pt")["evidence"] for rank in range(split.num_ranks))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@with_each(split for split in SPLITS if split.name == "ppo")
def test_only_the_learners_passes_gather_shards(folder: Path, split: Split) -> None:
    """Sampling and the frozen models have whole weights; under ZeRO-3 a pass of a learner gathers them."""
    for rank in range(split.num_ranks):
        collectives = torch.load(folder / f"{split}-rank-{rank}.pt")["collectives"]
        names = ("generate", "scores", "reference_logprobs", "teacher_logprobs")
        assert [collectives[name] for name in names] == [0, 0, 0, 0]
        is_split = split.engine.sequence_parallel_size > 1
        assert (collectives["policy_logprobs"] > 0) == (split.engine.zero_stage == 3 or is_split)


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_the_draw_meets_every_ranks_and_zero_stage() -> None:
    of_ci = [split for split in SPLITS if str(split) in OF_CI]
    met = {(split.num_ranks, split.engine.zero_stage) for split in of_ci}
    assert met == set(itertools.product((1, 2, 4), range(4)))
    offloads = {split.engine.offload for split in of_ci}
    assert offloads == {(), ("optimizer",), ("parameters",), ("optimizer", "parameters")}


if __name__ == "__main__":
    fork_groups(Path(sys.argv[1]), sys.argv[2:])
