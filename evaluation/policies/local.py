"""Policies that are model directories or hub models, sampled in this process."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.answers import OnProgress
from evaluation.policies.policy import Sampling
from evaluation.verdicts import Response
from files.hashes import folder_hash
from lm.hub import model_directory, model_hash
from lm.model import LanguageModel
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, read_config
from reward.sampling import SamplingSpec, sample_policy
from training.data import Prompt
from training.seeds import derive_seed


@dataclass(frozen=True)
class LocalPolicy:
    """`reference` is the model to measure its KL against; "" if none is set or its tokens differ from the policy's.

    `room_tokens` is what the longest prompt leaves of the context.
    """

    name: str
    spec: str
    folder: Path
    sha256: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    reference: str
    room_tokens: int

    @classmethod
    def open(cls, name: str, spec: str, prompts: Sequence[Prompt], sampling: Sampling) -> "LocalPolicy":
        """Raises: ValueError for a folder that holds no decoder, and naming a prompt that leaves no room for the
        response.
        """
        folder = model_directory(spec)
        ModelFolder(folder, LanguageModel).check()
        config, _, _ = read_config(folder, "language")
        tokenizer, context, longest = Tokenizer.load(folder), config.max_position_embeddings, 0
        for prompt in prompts:
            num_tokens = len(tokenizer.encode_prompt(prompt.messages))
            longest = max(longest, num_tokens)
            if num_tokens >= context:
                raise ValueError(
                    f"policy {name!r}: prompt {prompt.prompt_id!r} has {num_tokens} tokens, which leave no room for a"
                    f" response in its context of {context}"
                )
        reference = model_directory(sampling.reference) if sampling.reference else None
        is_measured = reference is not None and Tokenizer.load(reference) == tokenizer
        measured = str(reference) if is_measured else ""
        return cls(name, spec, folder, model_hash(spec), prompts, sampling, measured, context - longest)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "model",
            "spec": self.spec,
            "sha256": self.sha256,
            "sampling": asdict(self.sampling),
            "reference_sha256": folder_hash(Path(self.reference)) if self.reference else "",
        }

    def respond(self, on_progress: OnProgress) -> list[Response]:
        spec = SamplingSpec(
            policy=self.folder,
            num_samples=self.sampling.num_samples,
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            seed=derive_seed(self.sampling.seed, "compare", self.name),
            precision=self.sampling.precision,
            reference=self.reference,
        )
        samples = sample_policy(spec, self.prompts)
        on_progress(len(samples), len(samples))
        return [
            Response(
                policy=self.name,
                prompt_id=sample.prompt_id,
                index=sample.index,
                text=sample.response,
                num_tokens=sample.num_tokens,
                finished=sample.finished,
                log_ratio=sample.log_ratio,
            )
            for sample in samples
        ]
