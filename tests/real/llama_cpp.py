"""Reads GGUF files with llama.cpp (cyllama). Runs in a process of its own, where that package is found.

Reads JSON on standard input: files, each with token lists and texts. Writes JSON to the file that is its argument:
logits after each token list, tokens of texts, the end token and the chat template. llama.cpp itself writes on standard
output.
"""

import json
import sys
from pathlib import Path
from typing import Any

import cyllama.llama.llama_cpp as llama  # type: ignore[import-not-found]


class Model(llama.LlamaModel):  # type: ignore[misc]
    @property
    def n_vocab(self) -> int:  # which the package asks for, and lacks
        return int(self.get_vocab().n_vocab)


def read(job: dict[str, Any]) -> dict[str, Any]:
    settings = llama.LlamaModelParams()
    settings.n_gpu_layers = 0
    model = Model(job["file"], settings)
    vocabulary = model.get_vocab()
    logits = []
    for tokens in job["tokens"]:
        options = llama.LlamaContextParams()
        options.n_ctx, options.n_threads = 64 + len(tokens), 1
        context = llama.LlamaContext(model, options)
        batch = llama.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        batch.set_batch(tokens, 0, False)
        batch.set_last_logits_to_true()
        context.decode(batch)
        logits.append(list(context.get_logits_ith(-1)))
        context.close()
    return {
        "logits": logits,
        "texts": [list(vocabulary.tokenize(text, False, False)) for text in job["texts"]],
        "end": vocabulary.token_eos(),
        "template": model.get_default_chat_template(),
    }


Path(sys.argv[1]).write_text(json.dumps([read(job) for job in json.load(sys.stdin)]), encoding="utf-8")
