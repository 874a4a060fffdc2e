"""AdamW and Muon, the choice of parameters that each updates, the offloading of their states, gradients in groups."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.config import OptimizerConfig, cpu_multiplies_bf16
from training.internals import full_shape, host_bytes

# Muon's
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, by Jordan et al.
NUM_ITERATIONS = 5
EPS = 1e-7
BUFFER = "momentum_buffer"  # its name in checkpoints
# Gradients of as many numbers wait in bf16 to be added: 64 MB. While they are added, fp32 copies take 128 MB more.
AT_ONCE = 2**25


def make_optimizers(model: nn.Module, config: OptimizerConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, after Muon if the config asks for it; no parameter belongs to both."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if config.kind == "adamw":
        return [_make_adamw(list(parameters.values()), config, device)]
    inner = muon_matrices(parameters)
    outer = [p for name, p in parameters.items() if name not in inner]
    optimizers: list[torch.optim.Optimizer] = [_make_adamw(outer, config, device)]
    if inner:  # empty if only the layers after the blocks are trained
        matrices = [parameters[name] for name in inner]
        muon = Muon(matrices, config.learning_rate, config.weight_decay, dtype_on(device))
        optimizers.insert(0, muon)
    return optimizers


def muon_matrices(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns the names of the matrices that Muon trains: those of the blocks. Embedding and head are tables of one
    vector per token, and orthogonal updates are for maps between activations.

    Raises: ValueError for a mixture, whose experts' matrices are one tensor per layer.
    """
    inner = [name for name, p in parameters.items() if ".blocks." in name and p.dim() == 2]
    if any(".experts." in name for name in inner):
        raise ValueError("optimizer kind is 'muon', which does not train mixtures of experts; 'adamw' was expected")
    return inner


def _make_adamw(parameters: list[nn.Parameter], config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no scale to shrink."""
    matrices = [p for p in parameters if len(full_shape(p)) > 1]
    vectors = [p for p in parameters if len(full_shape(p)) <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=device.type in ("cpu", "cuda")
    )


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") with Nesterov momentum.

    Updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982). All ranks of the process group hold
    the same weights and gradients; each orthogonalises its share of the matrices and sends the results to the others,
    so all apply the same bits. `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` computes them all on every rank.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Orthogonalised updates, and the products that compute them, have `dtype`, the same on all ranks."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - Accelerate passes it
        """Update every matrix that has a gradient; a collective call."""
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            # The matrices that ranks compute at the same time cost about the same.
            matrices.sort(key=lambda p: min(p.shape) * p.numel(), reverse=True)
            for start in range(0, len(matrices), num_ranks):
                at_once = matrices[start : start + num_ranks]
                for matrix, update in zip(at_once, self._updates(at_once), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-0.2 * math.sqrt(max(matrix.shape)) * group["lr"])

    def _updates(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices' orthogonalised updates. Rank 0 computes the first, rank 1 the second, and so on."""
        for matrix in matrices:
            self._momentum(matrix).lerp_(_gradient(matrix), 1 - MOMENTUM)
        if not dist.is_initialized():
            return [self._update(matrix) for matrix in matrices]
        mine = matrices[0].new_empty(max(matrix.numel() for matrix in matrices), dtype=self._dtype)
        if dist.get_rank() < len(matrices):
            update = self._update(matrices[dist.get_rank()])
            mine[: update.numel()] = update.reshape(-1)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return [sent[: matrix.numel()].view_as(matrix) for sent, matrix in zip(gathered, matrices, strict=False)]

    def _update(self, matrix: Tensor) -> Tensor:
        return orthogonalised(_gradient(matrix).lerp(self._momentum(matrix), MOMENTUM), self._dtype)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(matrix)
        momentum: Tensor = state[BUFFER]
        return momentum


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype to orthogonalise in: bf16, or fp32 if any rank multiplies bf16 slowly. A collective call."""
    is_fast = torch.tensor(float(device.type != "cpu" or cpu_multiplies_bf16()), device=device)
    if dist.is_initialized():
        dist.all_reduce(is_fast, dist.ReduceOp.MIN)
    return torch.bfloat16 if is_fast else torch.float32


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """U S' Vᵀ with S' near 1 from the matrix U S Vᵀ, by the quintic Newton-Schulz iteration of Jordan et al.:
    X <- a X + (b A + c A²) X, A = X Xᵀ, computed in `dtype`.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype).T if is_tall else matrix.to(dtype)
    x = x / x.norm().clamp(min=EPS)  # no singular value is above 1
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class RoundedCopies:
    """bf16 copies of fp32 weights, whose gradients are added to those of the weights a group at a time.

    Autocast rounds each weight by a kernel of its own; each backward pass widens and adds each gradient by two more.
    Here one call rounds all weights, and two add a group of gradients. The numbers have the same bits.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._copies: dict[Tensor, Tensor] = {}  # by weight
        self._are_current = False
        self._waiting: list[tuple[nn.Parameter, Tensor]] = []  # weights, and gradients in bf16 not yet added

    def by_weight(self) -> Mapping[Tensor, Tensor]:
        """Returns copies of the current weights, which stay until `expire`."""
        if not self._copies:
            for weight in self._weights:
                copy = torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
                copy.requires_grad_().register_post_accumulate_grad_hook(partial(self._take, weight))
                self._copies[weight] = copy
        if self._copies and not self._are_current:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), list(self._weights))
            self._are_current = True
        return self._copies

    def _take(self, weight: nn.Parameter, copy: Tensor) -> None:
        """Called in the backward pass, once the copy has its gradient."""
        self._waiting.append((weight, _gradient(copy)))
        copy.grad = None
        if sum(gradient.numel() for _, gradient in self._waiting) >= AT_ONCE:
            self.add_gradients()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add to the weights' gradients what the copies received; the end of every backward pass needs it."""
        if not self._waiting:
            return
        widened = [torch.empty_like(weight, requires_grad=False) for weight, _ in self._waiting]
        torch._foreach_copy_(widened, [gradient for _, gradient in self._waiting])
        sums = [(weight.grad, wide) for (weight, _), wide in zip(self._waiting, widened, strict=True)]
        added = [(total, wide) for total, wide in sums if total is not None]
        if added:
            torch._foreach_add_([total for total, _ in added], [wide for _, wide in added])
        for (weight, _), wide in zip(self._waiting, widened, strict=True):
            if weight.grad is None:
                weight.grad = wide
        self._waiting.clear()

    def expire(self, *, keeps_memory: bool) -> None:
        """Forget what was rounded, since the weights change, and unless `keeps_memory` free it."""
        self._are_current = False
        if not keeps_memory:
            self._copies = {}


class Offload:
    """Moves the storage of tensors to CPU memory and back. Tensors and their views stay the same objects.

    The CPU memory, pinned where the tensors are on a GPU, is kept for the next time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []  # each with its bytes in CPU memory
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # unused CPU buffers, by size in bytes

    def send_away(self, tensors: Iterable[Tensor]) -> None:
        """Free the device memory of those tensors that are on the device. Do not touch them until `bring_back`."""
        there = [tensor for tensor in tensors if tensor.device.type == self.device.type]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in there}
        for storage in storages.values():
            spare = self._spare[storage.nbytes()]
            host = spare.pop() if spare else self._empty_host(storage.nbytes())
            host.copy_(self._bytes(storage), non_blocking=True)
            self._away.append((storage, host))
        self._finish_copies()
        for storage, _ in self._away:
            storage.resize_(0)

    def bring_back(self) -> None:
        """Undo `send_away`, if it was called."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            self._bytes(storage).copy_(host, non_blocking=True)
        self._finish_copies()
        for _, host in self._away:
            self._spare[host.nbytes].append(host)
        self._away.clear()

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def _empty_host(self, num_bytes: int) -> Tensor:
        return host_bytes(num_bytes, pinned=self.device.type == "cuda")

    def _finish_copies(self) -> None:
        if self.device.type == "cuda" and self._away:
            torch.cuda.synchronize(self.device)
