"""What the tests share: groups and data of a fixed size, of which every rank knows everybody's, and a dense reference."""

import torch
import torch.distributed as dist
from conftest import CUDA

import nvte_ep

RANK, RANKS = dist.get_rank(), dist.get_world_size()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")
TOKENS, HIDDEN, EXPERTS, TOP_K = 32, 512, 8, 2
LOCAL = EXPERTS // RANKS
CAPACITY = RANKS * TOKENS * TOP_K + LOCAL * 15


def bootstrap(**changes):
    values = dict(num_experts=EXPERTS, max_tokens_per_rank=TOKENS, hidden_dim=HIDDEN, num_topk=TOP_K, recv_capacity_per_rank=CAPACITY,
                  max_token_dtype=torch.float32)
    nvte_ep.ep_bootstrap(dist.group.WORLD, **{**values, **changes})


def buffer(**changes):
    values = dict(top_k=TOP_K, max_tokens_per_rank=TOKENS, hidden_dim=HIDDEN, num_local_experts=LOCAL, payload_dtype=torch.float32)
    return nvte_ep.EpBuffer(**{**values, **changes})


class Data:
    """The tokens, indices and weights of all ranks."""

    def __init__(self, seed=0, counts=None, dtype=torch.float32, indices=torch.int64):
        self.counts = counts or [TOKENS] * RANKS
        generator = torch.Generator("cpu").manual_seed(seed)
        self.all_tokens, self.all_idx, self.all_weights = [], [], []
        for count in self.counts:
            self.all_tokens.append(torch.randn(count, HIDDEN, generator=generator, device="cpu").to(dtype).to(DEVICE))
            self.all_idx.append(torch.rand(count, EXPERTS, generator=generator, device="cpu").topk(TOP_K).indices.to(indices).to(DEVICE))
            self.all_weights.append(torch.rand(count, TOP_K, generator=generator, device="cpu").to(DEVICE))

    tokens = property(lambda self: self.all_tokens[RANK])
    idx = property(lambda self: self.all_idx[RANK])
    weights = property(lambda self: self.all_weights[RANK])

    def leaves(self):
        """Own tokens and weights, which want gradients."""
        return self.tokens.clone().requires_grad_(), self.weights.clone().requires_grad_()

    def received(self, alignment=1):
        """Rows, weights and counts that this rank has to receive, by the rules of `nvte_ep_dispatch`."""
        rows, weights, counts = [], [], []
        for expert in range(RANK * LOCAL, (RANK + 1) * LOCAL):
            taken = 0
            for tokens, idx, all_weights in zip(self.all_tokens, self.all_idx, self.all_weights):
                for row, slot in (idx == expert).nonzero().tolist():
                    rows.append(tokens[row])
                    weights.append(all_weights[row, slot])
                    taken += 1
            padding = -taken % max(alignment, 1)
            rows += [torch.zeros(HIDDEN, dtype=self.all_tokens[0].dtype, device=DEVICE)] * padding
            weights += [torch.zeros((), device=DEVICE)] * padding
            counts.append(taken + padding)
        some = torch.stack(rows) if rows else torch.zeros(0, HIDDEN, device=DEVICE), torch.stack(weights) if weights else torch.zeros(0, device=DEVICE)
        return *some, counts


def scales_of_experts():
    """What each expert multiplies a row by: different for each, so that a row at a wrong expert is seen."""
    return torch.linspace(0.5, 2.0, EXPERTS, device=DEVICE)


def experts(rows, counts):
    """Multiplies each slab by its expert's number; zero behind the slabs. Reads the counts on the device."""
    place = torch.arange(rows.shape[0], device=DEVICE)
    expert = torch.searchsorted(counts.cumsum(0), place, right=True)
    factors = torch.cat([scales_of_experts()[RANK * LOCAL : (RANK + 1) * LOCAL], torch.zeros(1, device=DEVICE)])[expert].unsqueeze(1)
    return torch.where(factors != 0, rows * factors, 0).to(rows.dtype)


def layer(some_buffer, tokens, idx, weights, **options):
    received, received_weights, counts = nvte_ep.ep_dispatch(some_buffer, tokens, idx, weights)
    return nvte_ep.ep_combine(some_buffer, experts(received, counts), weights=received_weights, **options)


def dense(tokens, idx, weights):
    """The layer without ranks."""
    return tokens * (weights * scales_of_experts()[idx.long()]).sum(1, keepdim=True)


def assert_close(found, wanted, dtype=torch.float32, terms=TOP_K):
    """Within the roundings of a sum of so many products: each rounds once more than the exact result."""
    unit = torch.finfo(dtype).eps * (terms + 2)
    found, wanted = found.detach(), wanted.detach()
    scale = wanted.abs().max().clamp(min=1) if wanted.numel() else 1
    torch.testing.assert_close(found.float(), wanted.float(), rtol=unit, atol=unit * float(scale))
