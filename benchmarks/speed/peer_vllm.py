"""Measures vLLM's CPU build, in eager mode."""

import os

from benchmarks.speed.protocol import Clock, Measure, Task, main

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run its engine in this process instead of a second one
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import vllm


def measure_generation(task: Task, clock: Clock) -> str:
    model = vllm.LLM(
        model=str(task.path / "policy"),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=task.batch,
        enable_prefix_caching=False,  # every step has the same prompts, and reading them is part of the work
        skip_tokenizer_init=True,
    )
    prompts = [vllm.TokensPrompt(prompt_token_ids=tokens) for tokens in task.read("prompts")[: task.batch]]
    sampling = vllm.SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=task.response_tokens, ignore_eos=True, detokenize=False
    )
    for _ in range(task.num_steps):
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        clock.tick(sum(len(output.outputs[0].token_ids) for output in outputs))
    return f"vLLM {vllm.__version__}"


KINDS: dict[str, Measure] = {"generate": measure_generation}

if __name__ == "__main__":
    main(KINDS)
