"""Decides once for all ranks of a job which precision they compute in, on the machines that will compute."""

import os

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.connection import connect
from cluster.failures import WorkerLostError, last_line, without_colours
from cluster.places import Bundle, hidden_gpus
from lm.config import Precision
from training.config import EngineConfig, cpu_multiplies_bf16


def resolve_precision(engine: EngineConfig, bundle: Bundle, num_ranks: int, limit_seconds: float) -> EngineConfig:
    """Replace "auto" in the config: by bf16 where every machine that can hold a rank is fast at it, else by fp32.

    The driver's processor may differ from the workers', and the workers' from each other. If each decided for itself,
    ranks would round differently, and samples would be drawn in another precision than the model was trained in.

    Raises:
        WorkerLostError: the machines do not answer within the limit.
    """
    if engine.precision != "auto":
        return engine
    if os.environ.get("RAY_ADDRESS"):
        connect(num_ranks)
        found = _asked(bundle, limit_seconds)
    else:  # all ranks run here
        found = {fast_precision("GPU" in bundle)}
    return engine.model_copy(update={"precision": "bf16" if found == {"bf16"} else "fp32"})


def fast_precision(on_gpu: bool) -> Precision:
    """The lowest precision that this machine computes fast in."""
    return "bf16" if on_gpu or cpu_multiplies_bf16() else "fp32"


def _asked(bundle: Bundle, limit_seconds: float) -> set[Precision]:
    """What `fast_precision` says on each living machine that can hold a rank."""
    nodes = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(kind, 0.0) >= amount for kind, amount in bundle.items())
    ]
    remote = ray.remote(fast_precision)
    asked = [
        remote.options(
            num_cpus=0,
            runtime_env={"env_vars": hidden_gpus(bundle)},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        ).remote("GPU" in bundle)
        for node in nodes
    ]
    try:
        return set(ray.get(asked, timeout=limit_seconds))
    except ray.exceptions.RayError as error:
        cause = last_line(without_colours(str(error)))
        raise WorkerLostError(f"start: a machine of the cluster did not report its precision: {cause}") from error
