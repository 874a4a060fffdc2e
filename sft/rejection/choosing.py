"""Which of a prompt's samples the policy learns from."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from reward.sampling import Sample
from sft.rejection.results import Chosen


def is_usable(sample: Sample) -> bool:
    """Whether a sample may be kept. One without an end would teach the policy not to stop."""
    return sample.finished and bool(sample.response) and math.isfinite(sample.score)


def best_responses(samples: Sequence[Sample]) -> dict[str, Sample]:
    """The usable sample with the highest score by prompt, the first of equals; a prompt without one is left out."""
    found: dict[str, Sample] = {}
    for sample in filter(is_usable, samples):
        known = found.get(sample.prompt_id)
        if known is None or sample.score > known.score:
            found[sample.prompt_id] = sample
    return found


def count_chosen(samples: Sequence[Sample], best: Mapping[str, Sample], num_prompts: int, num_samples: int) -> Chosen:
    """Count what was kept, and why the rest was not."""
    texts: dict[str, set[str]] = {}
    best_texts: dict[str, set[str]] = {}
    for sample in filter(is_usable, samples):
        texts.setdefault(sample.prompt_id, set()).add(sample.response)
        if sample.score == best[sample.prompt_id].score:
            best_texts.setdefault(sample.prompt_id, set()).add(sample.response)
    ended = [sample for sample in samples if sample.finished]
    return Chosen(
        num_prompts=num_prompts,
        num_samples=num_samples,
        num_kept=len(best),
        num_truncated=len(samples) - len(ended),
        num_empty=sum(not sample.response for sample in ended),
        num_failed=sum(bool(sample.response) and not math.isfinite(sample.score) for sample in ended),
        num_identical=sum(len(found) == 1 for found in texts.values()),
        num_tied=sum(len(found) > 1 for found in best_texts.values()),
        sample_score=fmean(sample.score for sample in samples if math.isfinite(sample.score)),
        kept_score=fmean(sample.score for sample in best.values()),
    )
