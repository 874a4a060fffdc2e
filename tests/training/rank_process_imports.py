"""What the processes of `rank_process` are forked with."""

import os

from files.importing import imports_uncollected
from tests.training.rank_process import VARIABLES

os.environ.update(VARIABLES)

with imports_uncollected():
    import accelerate.utils.deepspeed  # noqa: F401
    import torch.distributed  # noqa: F401

    from training.internals import without_dynamo

    with without_dynamo():
        import deepspeed.runtime.engine
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    import training.engine
    import training.loop  # noqa: F401
