"""What the processes of `rank_process` are forked with."""

import gc
import os

from tests.training.rank_process import VARIABLES

os.environ.update(VARIABLES)
gc.disable()

import accelerate.utils.deepspeed  # noqa: E402, F401
import torch.distributed  # noqa: E402, F401

from training.internals import without_dynamo  # noqa: E402

with without_dynamo():
    import deepspeed.runtime.engine
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

import training.engine  # noqa: E402
import training.loop  # noqa: E402, F401

gc.freeze()
