"""Sampling a policy on all workers of a stage."""

from collections.abc import Sequence

from reward.sampling import Sample, Sampler, SamplingSpec
from stages.data import sample_in_parts
from stages.run import StageRun
from training.data import Prompt


def sample_everywhere(run: StageRun, phase: str, spec: SamplingSpec, prompts: Sequence[Prompt]) -> list[Sample]:
    """Runs `sample_policy` on all workers, each of which loads the policy once. The result does not depend on their
    number.
    """
    return [Sample(**row) for row in sample_in_parts(run, phase, Sampler, spec, prompts)]
