"""Environment variables for processes whose libraries are not loaded yet, and Ray's token. Standard library only."""

import os
from pathlib import Path

# glibc returns large buffers to the system at every free and pays for new pages at every allocation. Training allocates
# the same sizes again at once, so keeping them saves up to a third of a small model's step.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}

# Threads that spin while they wait for each other slow down everything else on the machine, and threads that sleep at
# once wake up slowly. These spin for a quarter of a millisecond, then sleep (GNU's OpenMP; others sleep at once).
# docs/negative-results.md has the times.
WAITING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
}

# Widths differ from one micro-batch to the next. PyTorch's allocator then keeps blocks of many sizes that fit no other
# request; expandable segments fit all of them. No effect without a GPU.
GPU_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

# Ray runs workers at a niceness of 15. Next to other busy processes they would get little CPU time and send heartbeats
# too late (docs/negative-results.md).
NICENESS = {"RAY_worker_niceness": "0"}

WORKER_ENVIRONMENT = ALLOCATOR | WAITING | GPU_ALLOCATOR | NICENESS

# What a launcher such as torchrun sets for its own ranks. A driver that one of them starts must not join their process
# group, or open a port that they have taken.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# For a Ray that Heed starts. Ray would start one idle worker per core in advance, but without the environment above, so
# no rank could use it. On a busy machine, a node may take longer to start than Ray's limit of 30 seconds.
RAY_ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0", "RAY_raylet_start_wait_time_s": "120"} | NICENESS


def token_warning() -> str:
    """Return one line if other users can read the file with the cluster's token; "" if not, or if there is no file.

    `ray get-auth-token --generate` creates the file with the user's umask, so usually everybody can read it.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or os.environ.get("RAY_AUTH_TOKEN"):
        return ""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:  # Ray reports what is missing
        return ""
    if not mode & 0o077 or not path.is_file():
        return ""
    return (
        f"{path} has mode {mode:04o}: whoever reads this token can run code on the cluster as you;"
        f" expected 0600: chmod 600 {path}"
    )
