"""What a step costs: ``nvte-ep launch -n 2 -- python -m nvte_ep.bench`` (on GPUs: ``--runtime cuda``, or torchrun).

Each line is one way to do the same: tokens to their experts' ranks and back, weighted. Times are the median over the iterations of
the slowest rank, from a barrier to the end of the device's work.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import nvte_ep
from nvte_ep import _library, _ops
from nvte_ep._group import group_of


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.splits = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sent, received = ctx.splits
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


def all_to_all_layer(tokens: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """The layer over `all_to_all_single`: a row for each token and expert, sorted by expert here and there."""
    ranks = dist.get_world_size()
    order = idx.flatten().argsort(stable=True)
    source = order // idx.shape[1]
    counts = idx.flatten().bincount(minlength=experts)
    their_counts = torch.empty_like(counts)
    dist.all_to_all_single(their_counts, counts)
    # The splits have to be on the host: the wait of this way.
    sent, received = (c.view(ranks, -1).sum(1).tolist() for c in (counts, their_counts))
    rows = _AllToAll.apply(tokens[source], sent, received)
    local = torch.arange(experts // ranks, device=tokens.device).repeat(ranks).repeat_interleave(their_counts)
    by_expert = local.argsort(stable=True)
    slabs = rows[by_expert]
    back = torch.empty_like(slabs).index_copy(0, by_expert, slabs)
    returned = _AllToAll.apply(back, received, sent)
    weighted = (returned * weights.flatten()[order].unsqueeze(1)).to(tokens.dtype)
    return torch.zeros_like(tokens).index_add(0, source, weighted)


def measure(step: Callable[[], Any], iterations: int, device: torch.device) -> float:
    """Milliseconds."""
    times = []
    for iteration in range(iterations + 3):
        dist.barrier(**({"device_ids": [device.index]} if device.type == "cuda" else {}))
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if iteration >= 3:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist()) * 1e3


def python_time(step: Callable[[], Any], calls: int = 300) -> str:
    """Microseconds of a call in which the C library does nothing: what the package itself takes; lowest and median."""
    names = ("nvte_ep_try_prepare", "nvte_ep_try_dispatch")
    kept = {name: getattr(_library.LIBRARY, name) for name in names}
    try:
        for name in names:
            setattr(_library.LIBRARY, name, lambda *arguments: 0)
        for _ in range(30):
            step()
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    finally:
        for name, function in kept.items():
            setattr(_library.LIBRARY, name, function)
    return f"{min(times) * 1e6:.1f} us (median {statistics.median(times) * 1e6:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nvte_ep.bench", description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=4096 if cuda else 64, help="of a rank")
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    a = parser.parse_args()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def tell(*words: Any) -> None:
        if rank == 0:
            print(*words, flush=True)

    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(a.tokens, a.hidden, generator=generator).to(device, torch.bfloat16).requires_grad_()
    idx = torch.rand(a.tokens, a.experts, generator=generator).topk(a.top_k).indices.to(device)
    weights = torch.rand(a.tokens, a.top_k, generator=generator).to(device).requires_grad_()
    gradient = torch.randn(a.tokens, a.hidden, generator=generator).to(device, torch.bfloat16)
    capacity = ranks * a.tokens * min(a.top_k, a.experts // ranks)
    where = torch.cuda.get_device_name() if cuda else "CPU, host runtime"
    tell(f"{ranks} ranks, {a.tokens} tokens each, hidden {a.hidden}, top-{a.top_k} of {a.experts} experts, bfloat16, {a.iterations} iterations")
    tell(f"{where}; torch {torch.__version__}; {nvte_ep.version()}")
    tell(f"\n{'milliseconds':44} {'forward':>9} {'and backward':>13}")

    def report(name: str, layer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], backward: bool = True) -> None:
        with torch.no_grad():
            forward = measure(lambda: layer(tokens, idx, weights), a.iterations, device)
        both = f"{measure(lambda: layer(tokens, idx, weights).backward(gradient), a.iterations, device):13.3f}" if backward else ""
        tell(f"{name:44} {forward:9.3f} {both}")

    def bootstrap(module: ModuleType, **options: Any) -> Any:
        module.ep_bootstrap(dist.group.WORLD, a.experts, a.tokens, a.hidden, a.top_k, **options)
        return module.EpBuffer(a.top_k, a.tokens, a.hidden, a.experts // ranks, options.get("recv_capacity_per_rank"))

    def layer_of(module: ModuleType, buffer: Any) -> Callable[..., torch.Tensor]:
        def layer(tokens: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received, received_weights, _ = module.ep_dispatch(buffer, tokens, idx, weights)
            return module.ep_combine(buffer, (received * received_weights.unsqueeze(1)).to(received.dtype))

        return layer

    report("all_to_all_single", lambda *given: all_to_all_layer(*given, a.experts))

    buffer = bootstrap(nvte_ep, recv_capacity_per_rank=capacity)
    received, received_weights = torch.empty(capacity, a.hidden, dtype=torch.bfloat16, device=device), torch.empty(capacity, device=device)
    result = torch.empty(a.tokens, a.hidden, dtype=torch.bfloat16, device=device)
    group = group_of(device, "bench")

    def raw(tokens: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
        """The C calls, without weighting."""
        c = _library
        layer = c.LayerConfig(24, a.top_k, 0)
        handle, c_idx = c.describe(0, buffer.handle_mem), c.describe(1, idx)
        c.check(c.LIBRARY.nvte_ep_try_prepare(handle, c_idx, c.describe(2, buffer.tokens_per_expert), c.describe(3, buffer.total_recv_tokens),
                                              _library.ctypes.addressof(layer), group.stream()))
        c.check(c.LIBRARY.nvte_ep_try_dispatch(
            handle, c_idx, c.describe(2, tokens), c.NO_WINDOW, c.describe(3, weights), c.NO_WINDOW, c.describe(4, received), c.NO_WINDOW,
            c.describe(5, received_weights), c.NO_WINDOW, group.stream()))
        c.check(c.LIBRARY.nvte_ep_try_combine(handle, c.describe(4, received), c.NO_WINDOW, c.describe(6, result), group.stream()))
        group.finish()

    report("nvte_ep, C calls (rows not weighted)", raw, backward=False)
    layer = layer_of(nvte_ep, buffer)
    report("nvte_ep", layer)
    if not a.no_compile:
        report("nvte_ep, torch.compile", torch.compile(layer, fullgraph=True))
    if cuda:
        report_graph(tell, layer, tokens, idx, weights, gradient, a.iterations, device)

    with torch.no_grad():
        takes = python_time(lambda: nvte_ep.ep_dispatch(buffer, tokens, idx, weights))
    trains = python_time(lambda: nvte_ep.ep_dispatch(buffer, tokens, idx, weights))
    rows = tokens.detach()[: a.tokens // ranks * ranks]
    out = torch.empty_like(rows)
    other = measure(lambda: dist.all_to_all_single(out, rows), 100, device) * 1e3
    tell(f"\nPython's part of ep_dispatch with its prepare: {takes}, with autograd {trains}; "
         f"a whole all_to_all_single of the tokens: {other:.1f} us")
    nvte_ep.ep_finalize()

    buffer = bootstrap(nvte_ep)
    report("nvte_ep, eager mode", layer_of(nvte_ep, buffer))
    nvte_ep.ep_finalize()
    local = a.experts // ranks
    if local & (local - 1) == 0 and a.top_k <= 8:
        buffer = bootstrap(nvte_ep, recv_capacity_per_rank=capacity, zero_copy=True)
        report("nvte_ep, zero-copy", layer_of(nvte_ep, buffer))
        nvte_ep.ep_finalize()
    try:
        te = importlib.import_module("transformer_engine.pytorch.ep")
    except ImportError as error:
        tell(f"transformer_engine.pytorch.ep: not here ({error})")
    else:
        buffer = bootstrap(te, recv_capacity_per_rank=capacity)
        report("transformer_engine.pytorch.ep", layer_of(te, buffer))
        te.ep_finalize()
    dist.destroy_process_group()


def report_graph(tell: Callable[..., None], layer: Callable[..., torch.Tensor], tokens: torch.Tensor, idx: torch.Tensor,
                 weights: torch.Tensor, gradient: torch.Tensor, iterations: int, device: torch.device) -> None:
    """The layer as a CUDA graph, forward alone and with its gradients."""
    def both() -> None:
        torch.autograd.grad(layer(tokens, idx, weights), (tokens, weights), gradient)

    def forward() -> None:
        with torch.no_grad():
            layer(tokens, idx, weights)

    times = []
    for step in (forward, both):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        times.append(measure(graph.replay, iterations, device))
    tell(f"{'nvte_ep, CUDA graph':44} {times[0]:9.3f} {times[1]:13.3f}")


if __name__ == "__main__":
    main()
