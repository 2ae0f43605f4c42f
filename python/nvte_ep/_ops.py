"""The calls of the library as operators of torch, so that torch.compile and CUDA graphs take them.

Each writes into tensors that it is given, and says so in its schema; none has a gradient of its own (`nvte_ep.ep` has them).
Arguments are checked by the library, but for what it cannot see: where a tensor is, and its strides.

`torch.library.custom_op` does the same in more steps, which cost 13 us a call.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import _library as c
from ._group import Group, device_of, group_of


def _group(function: str, handle_mem: torch.Tensor, **named: torch.Tensor | None) -> Group:
    """The group of a call's tensors, which all have to be on its device and contiguous."""
    device = handle_mem.device
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.device != device:
            raise c.EpArgumentError(f"nvte_ep.{function}: {name} must be on {device}, the device of handle_mem, found {tensor.device}")
        if tensor.dtype not in c.DTYPES:
            raise TypeError(
                f"nvte_ep.{function}: {name} must be of a dtype that the library has, found {tensor.dtype}; these are "
                f"{', '.join(map(str, c.DTYPES))}"
            )
        if not tensor.is_contiguous():
            raise c.EpArgumentError(
                f"nvte_ep.{function}: {name} must be contiguous, found strides {tuple(tensor.stride())} of shape "
                f"{tuple(tensor.shape)}: call .contiguous()"
            )
    return group_of(device, function)


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


# Where a thread keeps the NVTETensors of each call: places of its own, so that tensors that stay in place are described once.


def _prepare(handle_mem: torch.Tensor, topk_idx: torch.Tensor, tokens_per_expert: torch.Tensor, total_recv_tokens: torch.Tensor,
            top_k: int, alignment: int) -> None:
    group = _group("ep_prepare", handle_mem, topk_idx=topk_idx, tokens_per_expert=tokens_per_expert)
    layer = c.LayerConfig(ctypes.sizeof(c.LayerConfig), top_k, alignment)
    _call(group, c.LIBRARY.nvte_ep_try_prepare, handle_mem, c.describe(6, topk_idx), c.describe(7, tokens_per_expert),
          c.describe(8, total_recv_tokens), ctypes.addressof(layer))


def _dispatch(handle_mem: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
             topk_weights: torch.Tensor | None, recv_tokens: torch.Tensor, recv_scales: torch.Tensor | None,
             recv_topk_weights: torch.Tensor | None) -> None:
    group = _group("ep_dispatch", handle_mem, tokens=tokens, scales=scales, topk_idx=topk_idx, topk_weights=topk_weights,
                   recv_tokens=recv_tokens, recv_scales=recv_scales, recv_topk_weights=recv_topk_weights)
    _call(group, c.LIBRARY.nvte_ep_try_dispatch, handle_mem, c.describe(1, topk_idx), _rows(2, tokens, scales), c.NO_WINDOW,
          c.describe(3, topk_weights), c.NO_WINDOW, _rows(4, recv_tokens, recv_scales), _window(group, recv_tokens, recv_scales),
          c.describe(5, recv_topk_weights), c.NO_WINDOW)


def _combine(handle_mem: torch.Tensor, expert_out: torch.Tensor, result: torch.Tensor) -> None:
    group = _group("ep_combine", handle_mem, expert_out=expert_out, result=result)
    _call(group, c.LIBRARY.nvte_ep_try_combine, handle_mem, c.describe(9, expert_out), _window(group, expert_out),
          c.describe(10, result))


def _dispatch_bwd(handle_mem: torch.Tensor, grad: torch.Tensor, grad_recv_weights: torch.Tensor | None, grad_tokens: torch.Tensor,
                  grad_weights: torch.Tensor | None) -> None:
    group = _group("ep_dispatch's backward", handle_mem, grad=grad, g_recv_topk_weights=grad_recv_weights,
                   grad_tokens=grad_tokens, grad_topk_weights=grad_weights)
    _call(group, c.LIBRARY.nvte_ep_try_dispatch_bwd, handle_mem, c.describe(11, grad), _window(group, grad),
          c.describe(12, grad_recv_weights), c.NO_WINDOW, c.describe(13, grad_tokens), c.describe(14, grad_weights))


def _combine_bwd(handle_mem: torch.Tensor, grad: torch.Tensor, scales: torch.Tensor | None, grad_expert_out: torch.Tensor,
                grad_scales: torch.Tensor | None) -> None:
    group = _group("ep_combine's backward", handle_mem, grad=grad, scales=scales, grad_expert_out=grad_expert_out,
                   grad_scales=grad_scales)
    _call(group, c.LIBRARY.nvte_ep_try_combine_bwd, handle_mem, _rows(15, grad, scales), c.NO_WINDOW,
          _rows(16, grad_expert_out, grad_scales), _window(group, grad_expert_out, grad_scales))


_OPERATORS = torch.library.Library("nvte_ep", "DEF")


def _nothing(*arguments: Any, **named: Any) -> None:
    """What each returns where only shapes are computed."""


def _define(name: str, function: Callable[..., None], *written: str) -> Callable[..., None]:
    """Makes a function an operator that writes the named arguments."""
    places = [place for place, argument in enumerate(inspect.signature(function).parameters) if argument in written]

    def call(*arguments: Any) -> None:
        function(*arguments)
        # By which autograd knows that a tensor that it has saved was changed.
        for place in places:
            if arguments[place] is not None:
                torch.autograd.graph.increment_version(arguments[place])

    _OPERATORS.define(name + torch.library.infer_schema(function, mutates_args=written), tags=torch.Tag.pt2_compliant_tag)
    _OPERATORS.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nvte_ep::{name}", _nothing, lib=_OPERATORS)
    return getattr(torch.ops.nvte_ep, name).default


prepare = _define("prepare", _prepare, "handle_mem", "tokens_per_expert", "total_recv_tokens")
dispatch = _define("dispatch", _dispatch, "recv_tokens", "recv_scales", "recv_topk_weights")
combine = _define("combine", _combine, "result")
dispatch_bwd = _define("dispatch_bwd", _dispatch_bwd, "grad_tokens", "grad_weights")
combine_bwd = _define("combine_bwd", _combine_bwd, "grad_expert_out", "grad_scales")
# A zero-copy group sums a token's rows in place.
combine_in_place = _define("combine_in_place", _combine, "expert_out", "result")
dispatch_bwd_in_place = _define("dispatch_bwd_in_place", _dispatch_bwd, "grad", "grad_tokens", "grad_weights")
