"""Environment variables that a process is given before its libraries load. Standard library only."""

# glibc hands large buffers back to the system at every free and pays for fresh pages at every allocation; training
# allocates the same sizes again at once, so keeping them is worth up to a third of a small model's step.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}

# Threads that wait for each other by spinning stop a machine that anyone else uses, and threads that sleep at once are
# slow to wake: they spin for a quarter of a millisecond (GNU's OpenMP; others sleep), then sleep (docs/log.md).
WAITING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
}

WORKER_ENVIRONMENT = ALLOCATOR | WAITING
