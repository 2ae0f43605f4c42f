"""A Mixture-of-Experts layer over `ep_dispatch` and `ep_combine`, to read and to start from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ._group import canonical, group_of
from .ep import EpBuffer, ep_combine, ep_dispatch


class Router(nn.Module):
    """Chooses each token's experts: softmax over all, the top k of them, their weights scaled to a sum of 1.

    A bias for each expert takes part in the choice and not in the weights. Moved against the load after each step, it balances the
    experts without a loss of its own (`MoELayer.balance`).
    """

    def __init__(self, hidden_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_dim) * hidden_dim**-0.5)
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] -> experts [T, top_k] int64, weights [T, top_k] float32."""
        probabilities = F.linear(tokens.float(), self.weight.float()).softmax(-1)
        idx = (probabilities + self.bias).topk(self.top_k, sorted=False).indices
        weights = probabilities.gather(1, idx)
        return idx, weights / weights.sum(1, keepdim=True)


def expert_mlp(rows: torch.Tensor, counts: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Each expert's MLP over its slab of rows.

    Args:
        rows: [C, H], the slabs one after the other.
        counts: [L] int64, rows of each slab.
        up, down: [L, H, F] and [L, F, H].

    Returns:
        [C, H]; zero or undefined behind the slabs.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        # One kernel, which reads on the device where the slabs end: no wait. Slabs start at multiples of 16 rows (alignment).
        ends = counts.cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(F.gelu(torch._grouped_mm(rows, up, offs=ends)), down, offs=ends)
    sizes = counts.tolist()
    slabs = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    parts = [F.gelu(slab @ up[expert]) @ down[expert] for expert, slab in enumerate(slabs[:-1])]
    return torch.cat([*parts, torch.zeros_like(slabs[-1])])


class MoELayer(nn.Module):
    """Router, experts of this rank, and an optional shared expert that every token visits.

    `ep_bootstrap` has made the group; its num_experts and max_tokens_per_rank are the layer's.

    Args:
        hidden_dim: elements of a token's row.
        ffn_dim: width of an expert's MLP.
        top_k: experts of a token.
        shared_ffn_dim: width of the shared expert; 0 = none.
        buffers: microbatches in flight; `forward(..., microbatch=i)` uses the i-th.
        dtype, device: of the parameters and tokens.

    The parameters of the experts are this rank's own and have the attribute ``expert_parallel``: their gradients are complete. Those of
    all others are the same on every rank, and their gradients are to be averaged over the ranks (DDP does it; or `average_gradients`).
    """

    def __init__(self, hidden_dim: int, ffn_dim: int, top_k: int, shared_ffn_dim: int = 0, buffers: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> None:
        super().__init__()
        device = canonical(device)
        group = group_of(device, "MoELayer")
        # No process group among the attributes, which cannot be copied: `balance` asks for it.
        self.num_experts, local = group.num_experts, group.num_local_experts
        first = group.rank * local
        self.router = Router(hidden_dim, group.num_experts, top_k)
        # All experts are drawn, and those of this rank kept, so that the model does not depend on the number of ranks.
        up = torch.randn(group.num_experts, hidden_dim, ffn_dim) * hidden_dim**-0.5
        down = torch.randn(group.num_experts, ffn_dim, hidden_dim) * ffn_dim**-0.5
        self.up = nn.Parameter(up[first : first + local].clone())
        self.down = nn.Parameter(down[first : first + local].clone())
        self.up.expert_parallel = self.down.expert_parallel = True
        self.shared = None
        if shared_ffn_dim:
            self.shared = nn.Sequential(nn.Linear(hidden_dim, shared_ffn_dim), nn.GELU(), nn.Linear(shared_ffn_dim, hidden_dim))
        self.to(device=device, dtype=dtype)
        self.router.to(torch.float32)
        alignment = 16 if device.type == "cuda" else 0
        self.buffers = [
            EpBuffer(top_k, group.max_tokens_per_rank, hidden_dim, local, alignment=alignment, payload_dtype=dtype, device=device)
            for _ in range(buffers)
        ]
        # Rows that each of this rank's experts got since the last `balance`.
        self.register_buffer("load", torch.zeros(local, dtype=torch.int64, device=device), persistent=False)

    def forward(self, tokens: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        buffer = self.buffers[microbatch]
        idx, weights = self.router(tokens)
        rows, row_weights, counts = ep_dispatch(buffer, tokens, idx, weights)
        if self.training:
            self.load += counts
        result = ep_combine(buffer, expert_mlp(rows, counts, self.up, self.down), weights=row_weights)
        return result if self.shared is None else result + self.shared(tokens)

    @torch.no_grad()
    def balance(self, rate: float = 1e-3) -> torch.Tensor:
        """Moves the router's bias by `rate` against the load since the last call. Collective.

        Returns:
            [num_experts] float32: each expert's share of the load; 1 / num_experts is even.
        """
        group = group_of(self.load.device, "MoELayer.balance")
        every = [torch.empty_like(self.load) for _ in range(group.ranks)]
        dist.all_gather(every, self.load, group=group.process_group)
        load = torch.cat(every).float()
        share = load / load.sum().clamp(min=1)
        self.router.bias += rate * torch.sign(1 / self.num_experts - share)
        self.load.zero_()
        return share


@torch.no_grad()
def average_gradients(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Makes all gradients those of the mean loss over the ranks: averages what every rank has, and divides the experts'."""
    ranks = dist.get_world_size(process_group)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if not getattr(parameter, "expert_parallel", False):
            dist.all_reduce(parameter.grad, group=process_group)
        parameter.grad /= ranks
