"""Makes tasks for labelers: samples every policy on every prompt, and selects some of the samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from files.hashes import derive_seed
from lm.source import inference_dtype
from preferences.records import Message, Task
from preferences.task_selection import UNIFORM_SHARE, Candidate, PromptCandidates, Rule, choose_tasks
from reward.comparisons import encode_response
from reward.sampling import SamplingSpec, sample_policy
from reward.scoring import RewardModel, labels_of, weights_by_label
from training.data import Prompt

EVALUATION_SHARE = 0.1  # of the prompts, whose tasks are always selected uniformly, for evaluation


@dataclass(frozen=True)
class TaskSelection:
    """How samples become tasks. `preferences.task_selection.choose_tasks` explains each field."""

    batch: str
    rule: Rule
    responses_per_task: int
    tasks_per_prompt: int
    seed: int
    num_tasks: int


def sample_tasks(
    policies: Sequence[Path],
    judges: Sequence[Path],
    prompts: Sequence[Prompt],
    selection: TaskSelection,
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    weights: Mapping[str, float],
) -> list[Task]:
    """Sample `num_samples` responses from every policy to every prompt, and make tasks of some of them.

    A response's source is its policy's folder. `weights` are those of the judges' objectives, if there are several.
    Raises: ValueError for a directory without the expected kind of model, weights that do not fit a judge, a prompt
    that leaves no room for the response, and a conversation that does not fit a judge.
    """
    for judge in judges:
        weights_by_label(str(judge), labels_of(judge), weights)
    sampled: dict[str, list[tuple[str, str]]] = {prompt.prompt_id: [] for prompt in prompts}
    for policy in policies:
        spec = SamplingSpec(
            policy=policy,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=derive_seed(selection.seed, "label sample", str(policy)),
            precision="bf16" if inference_dtype() == torch.bfloat16 else "fp32",
        )
        for sample in sample_policy(spec, prompts):
            sampled[sample.prompt_id].append((sample.response, str(policy)))
    texts = {name: [text for text, _ in samples] for name, samples in sampled.items()}
    scores = scores_of(judges, weights, prompts, texts)
    candidates = [
        PromptCandidates(
            prompt.prompt_id,
            tuple(Message.of(message) for message in prompt.messages),
            tuple(
                Candidate(text, source, scores[prompt.prompt_id][place])
                for place, (text, source) in enumerate(sampled[prompt.prompt_id])
            ),
        )
        for prompt in prompts
    ]
    return choose_tasks(
        candidates,
        batch=selection.batch,
        rule=selection.rule,
        responses_per_task=selection.responses_per_task,
        tasks_per_prompt=selection.tasks_per_prompt,
        evaluation_share=EVALUATION_SHARE,
        seed=selection.seed,
        num_tasks=selection.num_tasks,
        uniform_share=UNIFORM_SHARE,
    )


def scores_of(
    judges: Sequence[Path], weights: Mapping[str, float], prompts: Sequence[Prompt], responses: dict[str, list[str]]
) -> dict[str, list[tuple[float, ...]]]:
    """Returns each judge's scores by prompt: one tuple per response, with one score per judge; higher is better."""
    columns: list[list[float]] = []
    for folder in judges:
        judge = RewardModel.load(folder, weights)
        sequences = []
        for prompt in prompts:
            messages = [Message.of(message) for message in prompt.messages]
            for response in responses[prompt.prompt_id]:
                tokens = encode_response(judge.tokenizer, messages, response)
                if not judge.fits(tokens):
                    raise ValueError(
                        f"prompt {prompt.prompt_id!r}: with a response it has {len(tokens)} tokens; {folder} reads at"
                        f" most {judge.network.config.max_position_embeddings}"
                    )
                sequences.append(tokens)
        columns.append(judge.score_sequences(sequences))
    rows = iter(zip(*columns, strict=True)) if columns else iter([])
    return {
        prompt.prompt_id: [next(rows) if columns else () for _ in responses[prompt.prompt_id]] for prompt in prompts
    }
