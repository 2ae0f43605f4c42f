"""The calls of the library as operators of torch, so that torch.compile and CUDA graphs take them.

Each writes into tensors that it is given, and says so in its schema; none has a gradient of its own (`nvte_ep._autograd` has
them). Arguments are checked by the library, but for what it cannot see: where a tensor is, and its strides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from . import _library as c
from ._group import Group, device_of, group_of


def _group(function: str, named: dict[str, torch.Tensor | None]) -> Group:
    """The group of a call's tensors, which all have to be on its device and contiguous."""
    group = None
    for name, tensor in named.items():
        if tensor is None:
            continue
        if group is None:
            group = group_of(tensor.device, function)
        if tensor.device != group.device:
            raise c.EpArgumentError(
                f"nvte_ep.{function}: {name} must be on {group.device}, the device of {next(iter(named))}, found {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise c.EpArgumentError(
                f"nvte_ep.{function}: {name} must be contiguous, found strides {tuple(tensor.stride())} of shape "
                f"{tuple(tensor.shape)}: call .contiguous()"
            )
    assert group is not None
    return group


def _call(group: Group, function: Callable[..., int], handle_mem: torch.Tensor, *arguments: Any) -> None:
    """Queues a call on the current stream of the group's device."""
    place = aligned(handle_mem)
    if place is not handle_mem:
        place.copy_(handle_mem)
    arguments = (c.describe(0, place), *arguments, group.stream())
    if group.host is None and torch.cuda.current_device() != group.device.index:
        with device_of(group.device):
            c.check(function(*arguments))
    else:
        c.check(function(*arguments))
    group.finish()
    if place is not handle_mem:
        handle_mem.copy_(place)


ALIGNMENT = 256


def aligned(memory: torch.Tensor) -> torch.Tensor:
    """The same memory, or new one, that starts where handle memory has to.

    A compiler may put a copy of handle memory in its place; on the CPU that starts anywhere.
    """
    if memory.data_ptr() % ALIGNMENT == 0:
        return memory
    wide = torch.empty(memory.numel() + ALIGNMENT - 1, dtype=memory.dtype, device=memory.device)
    start = -wide.data_ptr() % ALIGNMENT
    return wide[start : start + memory.numel()]


def _window(group: Group, tensor: torch.Tensor, scales: torch.Tensor | None = None) -> c.Window:
    """Where a tensor lies in symmetric memory; nowhere, in a staged group."""
    if not group.zero_copy or tensor.numel() == 0:
        return c.NO_WINDOW
    window = c.Window()
    at = ctypes.addressof(window)
    with device_of(group.device):
        c.check(c.LIBRARY.nvte_ep_try_ext_window_of(tensor.data_ptr(), at, at + 8))
        if scales is not None:
            c.check(c.LIBRARY.nvte_ep_try_ext_window_of(scales.data_ptr(), at + 16, at + 24))
    return window


def _rows(position: int, data: torch.Tensor, scales: torch.Tensor | None) -> int | None:
    return c.describe(position, data) if scales is None else c.describe_scaled(position, data, scales)


@torch.library.custom_op("nvte_ep::prepare", mutates_args=("handle_mem", "tokens_per_expert", "total_recv_tokens"))
def prepare(handle_mem: torch.Tensor, topk_idx: torch.Tensor, tokens_per_expert: torch.Tensor, total_recv_tokens: torch.Tensor,
            top_k: int, alignment: int) -> None:
    group = _group("ep_prepare", {"handle_mem": handle_mem, "topk_idx": topk_idx, "tokens_per_expert": tokens_per_expert})
    layer = c.LayerConfig(ctypes.sizeof(c.LayerConfig), top_k, alignment)
    _call(group, c.LIBRARY.nvte_ep_try_prepare, handle_mem, c.describe(1, topk_idx), c.describe(2, tokens_per_expert),
          c.describe(3, total_recv_tokens), ctypes.addressof(layer))


@torch.library.custom_op("nvte_ep::dispatch", mutates_args=("recv_tokens", "recv_scales", "recv_topk_weights"))
def dispatch(handle_mem: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
             topk_weights: torch.Tensor | None, recv_tokens: torch.Tensor, recv_scales: torch.Tensor | None,
             recv_topk_weights: torch.Tensor | None) -> None:
    group = _group("ep_dispatch", {
        "handle_mem": handle_mem, "tokens": tokens, "scales": scales, "topk_idx": topk_idx, "topk_weights": topk_weights,
        "recv_tokens": recv_tokens, "recv_scales": recv_scales, "recv_topk_weights": recv_topk_weights,
    })
    _call(group, c.LIBRARY.nvte_ep_try_dispatch, handle_mem, c.describe(1, topk_idx), _rows(2, tokens, scales), c.NO_WINDOW,
          c.describe(3, topk_weights), c.NO_WINDOW, _rows(4, recv_tokens, recv_scales), _window(group, recv_tokens, recv_scales),
          c.describe(5, recv_topk_weights), c.NO_WINDOW)


def _combine(handle_mem: torch.Tensor, expert_out: torch.Tensor, result: torch.Tensor) -> None:
    group = _group("ep_combine", {"handle_mem": handle_mem, "expert_out": expert_out, "result": result})
    _call(group, c.LIBRARY.nvte_ep_try_combine, handle_mem, c.describe(1, expert_out), _window(group, expert_out),
          c.describe(2, result))


def _dispatch_bwd(handle_mem: torch.Tensor, grad: torch.Tensor, grad_recv_weights: torch.Tensor | None, grad_tokens: torch.Tensor,
                  grad_weights: torch.Tensor | None) -> None:
    group = _group("ep_dispatch's backward", {
        "handle_mem": handle_mem, "grad": grad, "g_recv_topk_weights": grad_recv_weights, "grad_tokens": grad_tokens,
        "grad_topk_weights": grad_weights,
    })
    _call(group, c.LIBRARY.nvte_ep_try_dispatch_bwd, handle_mem, c.describe(1, grad), _window(group, grad),
          c.describe(2, grad_recv_weights), c.NO_WINDOW, c.describe(3, grad_tokens), c.describe(4, grad_weights))


# The same with one argument more that is written: a zero-copy group sums duplicate rows in place.
combine = torch.library.custom_op("nvte_ep::combine", _combine, mutates_args=("result",))
combine_in_place = torch.library.custom_op("nvte_ep::combine_in_place", _combine, mutates_args=("expert_out", "result"))
dispatch_bwd = torch.library.custom_op("nvte_ep::dispatch_bwd", _dispatch_bwd, mutates_args=("grad_tokens", "grad_weights"))
dispatch_bwd_in_place = torch.library.custom_op(
    "nvte_ep::dispatch_bwd_in_place", _dispatch_bwd, mutates_args=("grad", "grad_tokens", "grad_weights"))


@torch.library.custom_op("nvte_ep::combine_bwd", mutates_args=("grad_expert_out", "grad_scales"))
def combine_bwd(handle_mem: torch.Tensor, grad: torch.Tensor, scales: torch.Tensor | None, grad_expert_out: torch.Tensor,
                grad_scales: torch.Tensor | None) -> None:
    group = _group("ep_combine's backward", {
        "handle_mem": handle_mem, "grad": grad, "scales": scales, "grad_expert_out": grad_expert_out, "grad_scales": grad_scales,
    })
    _call(group, c.LIBRARY.nvte_ep_try_combine_bwd, handle_mem, _rows(1, grad, scales), c.NO_WINDOW,
          _rows(2, grad_expert_out, grad_scales), _window(group, grad_expert_out, grad_scales))


def _nothing(*arguments: Any, **named: Any) -> None:
    """What each returns where only shapes are computed."""


for _operator in (prepare, dispatch, combine, combine_in_place, dispatch_bwd, dispatch_bwd_in_place, combine_bwd):
    _operator.register_fake(_nothing)
