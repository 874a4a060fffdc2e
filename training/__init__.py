"""The engine of all stages: data, batches, optimisation, checkpoints, metrics.

The modules, in the order in which to read them:

    the loop              loop, objectives, metrics, notices
    the engine            config, engine, distributed, optimizers, recording, internals (private parts of libraries)
    data                  data, tokens, packing
    checkpoints           checkpoint (what is in one), writer (in the background)
"""
