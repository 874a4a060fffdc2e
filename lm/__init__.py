"""The transformer core: model, tokenizer, chat template, generation. Pure torch; two kinds of groups of ranks.

The modules, in the order in which to read them:

    the transformer       config, layers, dropout, positions, attention, cache, block, model, encoder
    parts of some models  delta (linear layers), sinks, experts, lora
    text and tokens       tokenizer, chat_template, chat_encoding, tool_calls
    log-probs and draws   sampling, sequence_logprobs, transfer (batches on a device)
    generation            generation, decoding (its steps), search
    model directories     hub, source, weights, tensor_files, adapters, families/
    llama.cpp's files     gguf_files, gguf_vocabulary
    groups of ranks       tensor_parallel (ranks sample together), sequence_parallel (ranks share rows)
    what a model does     inspection, progress
    kernels, engines      native/, samplers/
"""
