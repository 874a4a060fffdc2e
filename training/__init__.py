"""The one engine of every stage: data, batches, optimisation, checkpoints, metrics."""
