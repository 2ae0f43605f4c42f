"""Expert parallelism with autograd. The names and arguments are those of ``transformer_engine.pytorch.ep``; docs/pytorch.md has a
table of the differences."""

from __future__ import annotations

import ctypes
import functools
import operator
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import _group as g
from . import _library as c
from . import _ops as ops
from ._symm import allocate, is_symm_backed
from .mxfp8 import BLOCK, mxfp8_dequantize, mxfp8_quantize

Mxfp8 = tuple[torch.Tensor, torch.Tensor]
_RECIPES = (None, "mxfp8")


def _integer(function: str, name: str, value: Any, least: int) -> int:
    """A whole number that a C int holds."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"nvte_ep.{function}: {name} must be an integer, found {value!r}") from None
    if not least <= number < 1 << 31:
        raise c.EpArgumentError(f"nvte_ep.{function}: {name} must be {least} or more, and below 2**31, found {number}")
    return number


def ep_bootstrap(ep_group: dist.ProcessGroup | None, num_experts: int, max_tokens_per_rank: int, hidden_dim: int, num_topk: int,
                 recv_capacity_per_rank: int | None = None, max_num_sms: int = 0, zero_copy: bool = False, drop_on_overflow: bool = False,
                 max_token_dtype: torch.dtype = torch.bfloat16, *, device: torch.device | str | None = None) -> None:
    """Makes the EP group of this rank's device. Collective; every rank passes the same values.

    On GPUs the communicator is borrowed from the process group's NCCL backend, and has to live until `ep_finalize`. For a process
    group on the CPU (gloo) the library runs on its host runtime, and tensors are on the CPU.

    Args:
        ep_group: the ranks that share the experts; None for the default process group.
        num_experts: of all ranks together; a multiple of the number of ranks and of 4.
        max_tokens_per_rank: most tokens that a rank dispatches in one step.
        hidden_dim: most elements of a token's row.
        num_topk: most experts of a token.
        recv_capacity_per_rank: rows of a rank's receive buffers. No routing needs more than ranks * max_tokens_per_rank * num_topk,
            and padding. None is eager mode: each step's buffers have the rows that the step delivers, at the price of one wait.
        max_num_sms: streaming multiprocessors that communication may use; 0 = automatic.
        zero_copy: peers write and read tensors in place, in symmetric memory. Needs a capacity.
        drop_on_overflow: rows beyond the capacity are dropped; else they are a fatal error of the device. Needs a capacity.
        max_token_dtype: the widest type of a token: bfloat16, float16 or float32.
        device: where the tensors are, if the process group has several; by default the current GPU if the group has NCCL, else the CPU.

    Raises:
        EpError: there is a group on the device already, ranks disagree, or the machine lacks something; the text says what.
        EpArgumentError (also a ValueError): a value breaks a rule.
    """
    num_topk = _integer("ep_bootstrap", "num_topk", num_topk, 1)
    num_experts, max_tokens_per_rank, hidden_dim, max_num_sms = (
        _integer("ep_bootstrap", name, value, 0)
        for name, value in (("num_experts", num_experts), ("max_tokens_per_rank", max_tokens_per_rank), ("hidden_dim", hidden_dim),
                            ("max_num_sms", max_num_sms))
    )
    if recv_capacity_per_rank is None and (zero_copy or drop_on_overflow):
        name = "zero_copy" if zero_copy else "drop_on_overflow"
        raise c.EpArgumentError(f"nvte_ep.ep_bootstrap: {name} needs recv_capacity_per_rank, found None (eager mode)")
    if recv_capacity_per_rank is not None:
        recv_capacity_per_rank = _integer("ep_bootstrap", "recv_capacity_per_rank (None: eager mode)", recv_capacity_per_rank, 1)
    g.bootstrap(
        ep_group, device, num_experts=num_experts, max_tokens_per_rank=max_tokens_per_rank, hidden_dim=hidden_dim, num_topk=num_topk,
        recv_capacity_per_rank=recv_capacity_per_rank, max_num_sms=max_num_sms, zero_copy=bool(zero_copy),
        drop_on_overflow=bool(drop_on_overflow), max_token_dtype=max_token_dtype,
    )


def is_ep_bootstrapped(device: torch.device | str | None = None) -> bool:
    """Whether this process has an EP group, on a device if one is named."""
    return bool(g.groups()) if device is None else any(group.device == g.canonical(device) for group in g.groups())


def ep_finalize() -> None:
    """Ends the EP groups of this process, after their queued work, and frees their symmetric memory. Without a group it does
    nothing. Call it before ``destroy_process_group``, whose communicator the group uses; else the interpreter's exit does it."""
    g.finalize()


class EpBuffer:
    """What a layer needs for one call in flight: its handle memory, which holds the routing from `ep_prepare` to the last
    gradient, and counters. A pipeline with three microbatches in flight has three of them a layer.

    Args:
        top_k: experts of a token.
        max_tokens_per_rank, hidden_dim, num_local_experts: as the group's.
        recv_capacity_per_rank: as the group's, or None for the group's.
        alignment: each expert's rows are padded to a multiple of this many; a power of two, 0 or 1 = no padding.
        payload_dtype: of tokens and gradients: bfloat16, float16 or float32.
        device: the group's device; None for the current one.
        dispatch_fwd_quant_recipe: "mxfp8": tokens travel as MXFP8 in the forward pass; they arrive in payload_dtype.
        combine_bwd_quant_recipe: "mxfp8": the same for the gradients of expert_out in the backward pass.
        caller_buffers: in a zero-copy group every dispatch is given recv_tokens and every combine grad_out, so that the buffer has no
            symmetric memory of its own for these.

    Attributes:
        handle_mem: [bytes] uint8.
        tokens_per_expert: [num_local_experts] int64 on the device: rows of each expert's slab after the last `ep_prepare`.
        total_recv_tokens: [1] int64: their sum, before any are dropped; on the device, in eager mode in pinned host memory.
        num_local_tokens: the tokens of the last `ep_prepare`.

    Making one is collective in zero-copy groups, since it allocates symmetric memory. A copy (``copy.deepcopy``, or a pickle that is
    loaded) is a new buffer with the same settings.
    """

    # Tensors that were made in inference mode could not be used in training.
    @torch.inference_mode(False)
    def __init__(self, top_k: int, max_tokens_per_rank: int, hidden_dim: int, num_local_experts: int,
                 recv_capacity_per_rank: int | None = None, alignment: int = 0, payload_dtype: torch.dtype = torch.bfloat16,
                 device: torch.device | str | None = None, dispatch_fwd_quant_recipe: Any = None, combine_bwd_quant_recipe: Any = None,
                 *, caller_buffers: bool = False) -> None:
        group = g.group_of(g.canonical(device), "EpBuffer")
        top_k, alignment, max_tokens_per_rank, hidden_dim, num_local_experts = (
            _integer("EpBuffer", name, value, 0)
            for name, value in (("top_k", top_k), ("alignment", alignment), ("max_tokens_per_rank", max_tokens_per_rank),
                                ("hidden_dim", hidden_dim), ("num_local_experts", num_local_experts))
        )
        for name, found, most in (("max_tokens_per_rank", max_tokens_per_rank, group.max_tokens_per_rank),
                                  ("hidden_dim", hidden_dim, group.hidden_dim)):
            if not 1 <= found <= most:
                raise c.EpArgumentError(f"nvte_ep.EpBuffer: {name} must be 1 to {most}, the group's, found {found}")
        if num_local_experts != group.num_local_experts:
            raise c.EpArgumentError(
                f"nvte_ep.EpBuffer: num_local_experts must be {group.num_local_experts}, num_experts by the number of ranks, "
                f"found {num_local_experts}"
            )
        if recv_capacity_per_rank is not None:
            recv_capacity_per_rank = _integer("EpBuffer", "recv_capacity_per_rank", recv_capacity_per_rank, 1)
            if group.recv_capacity_per_rank is None:
                raise c.EpArgumentError(
                    f"nvte_ep.EpBuffer: recv_capacity_per_rank must be None, since the group is eager, found {recv_capacity_per_rank}")
            if recv_capacity_per_rank < group.recv_capacity_per_rank:
                raise c.EpArgumentError(
                    f"nvte_ep.EpBuffer: recv_capacity_per_rank must be at least {group.recv_capacity_per_rank}, the group's, "
                    f"found {recv_capacity_per_rank}")
        if payload_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise c.EpNotSupportedError(
                f"nvte_ep.EpBuffer: payload_dtype must be torch.bfloat16, torch.float16 or torch.float32, found {payload_dtype}")
        for name, recipe in (("dispatch_fwd_quant_recipe", dispatch_fwd_quant_recipe), ("combine_bwd_quant_recipe", combine_bwd_quant_recipe)):
            if recipe not in _RECIPES:
                raise c.EpNotSupportedError(f'nvte_ep.EpBuffer: {name} must be None or "mxfp8", found {recipe!r}')
        if "mxfp8" in (dispatch_fwd_quant_recipe, combine_bwd_quant_recipe) and hidden_dim % 512:
            raise c.EpArgumentError(f"nvte_ep.EpBuffer: hidden_dim must be a multiple of 512 for MXFP8, found {hidden_dim}")
        self.device, self.eager, self.zero_copy = group.device, group.eager, group.zero_copy
        self._group, self._released, self._caller_buffers = group.token, group.released, caller_buffers
        self.top_k, self.alignment, self.payload_dtype = top_k, alignment, payload_dtype
        self.max_tokens_per_rank, self.hidden_dim, self.num_local_experts = max_tokens_per_rank, hidden_dim, num_local_experts
        self.recv_capacity_per_rank = recv_capacity_per_rank or group.recv_capacity_per_rank
        self.dispatch_fwd_quant_recipe, self.combine_bwd_quant_recipe = dispatch_fwd_quant_recipe, combine_bwd_quant_recipe
        self.num_local_tokens = max_tokens_per_rank

        layer, size = c.LayerConfig(ctypes.sizeof(c.LayerConfig), top_k, alignment), ctypes.c_size_t()
        with g.device_of(self.device):
            c.check(c.LIBRARY.nvte_ep_try_handle_mem_size(ctypes.byref(layer), ctypes.byref(size)))
        # Cleared, since memory that was freed may hold another buffer's routing.
        self.handle_mem = ops.aligned(torch.empty(size.value, dtype=torch.uint8, device=self.device)).zero_()
        self.tokens_per_expert = torch.zeros(num_local_experts, dtype=torch.int64, device=self.device)
        if self.eager:
            self.total_recv_tokens = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        else:
            self.total_recv_tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        # Zero-copy: what dispatch writes, what combine and dispatch's gradient read, what combine's gradient writes.
        self._recv: torch.Tensor | None = None
        self._recv_mxfp8: Mxfp8 | None = None
        self._read: torch.Tensor | None = None
        self._grad: torch.Tensor | None = None
        self._grad_mxfp8: Mxfp8 | None = None
        if self.zero_copy:
            rows = self.recv_capacity_per_rank, hidden_dim
            self._read = allocate(group, rows, payload_dtype)
            if not caller_buffers:
                self._recv, self._grad = (allocate(group, rows, payload_dtype) for _ in range(2))
            if dispatch_fwd_quant_recipe:
                self._recv_mxfp8 = _symmetric_mxfp8(group, rows)
            if combine_bwd_quant_recipe:
                self._grad_mxfp8 = _symmetric_mxfp8(group, rows)

    def __reduce__(self) -> Any:
        return functools.partial(EpBuffer, caller_buffers=self._caller_buffers), (
            self.top_k, self.max_tokens_per_rank, self.hidden_dim, self.num_local_experts, self.recv_capacity_per_rank, self.alignment,
            self.payload_dtype, self.device, self.dispatch_fwd_quant_recipe, self.combine_bwd_quant_recipe)

    def _rows(self) -> int:
        """Rows of the receive side: the capacity, or in eager mode what the step delivers."""
        if not self.eager:
            return self.recv_capacity_per_rank
        g.group_of(self.device, "ep_dispatch").synchronize()
        return int(self.total_recv_tokens)


def _symmetric_mxfp8(group: g.Group, shape: tuple[int, int]) -> Mxfp8:
    return (allocate(group, shape, torch.float8_e4m3fn), allocate(group, (shape[0], shape[1] // BLOCK), torch.uint8))


def _empty_mxfp8(rows: int, hidden: int, device: torch.device) -> Mxfp8:
    return (torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, hidden // BLOCK, dtype=torch.uint8, device=device))


_OPTIONAL = frozenset(("topk_weights", "recv_tokens", "recv_scales", "recv_topk_weights", "weights", "grad_out"))
# Tensors that are written: a gradient of theirs would be lost.
_WRITTEN = frozenset(("recv_tokens", "recv_scales", "recv_topk_weights", "grad_out"))
_STRIDED = torch.strided


def _require_tensors(function: str, buffer: EpBuffer, **named: torch.Tensor | None) -> None:
    """What every argument has to be, and the buffer."""
    if not isinstance(buffer, EpBuffer):
        raise TypeError(f"nvte_ep.{function}: buffer must be an EpBuffer, found {type(buffer).__name__}")
    if not torch.compiler.is_compiling():
        group = g.group_of(buffer.device, function)
        if group.token is not buffer._group:
            raise c.EpError(f"nvte_ep.{function}: buffer was made for an EP group that has ended: make a new EpBuffer")
        if buffer.zero_copy and group.released != buffer._released:
            raise c.EpError(f"nvte_ep.{function}: release_symm_mem_pool took the memory of buffer back: make a new EpBuffer")
    device = buffer.device
    for name, tensor in named.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"nvte_ep.{function}: {name} must be a torch.Tensor, found {type(tensor).__name__}")
        if tensor.device != device:
            raise c.EpArgumentError(f"nvte_ep.{function}: {name} must be on {device}, the buffer's device, found {tensor.device}")
        if tensor.layout != _STRIDED:
            raise c.EpArgumentError(f"nvte_ep.{function}: {name} must be a dense tensor, found {tensor.layout}: call .to_dense()")
        if name in _WRITTEN and tensor.requires_grad:
            raise c.EpArgumentError(f"nvte_ep.{function}: {name} must not require a gradient, since it is written: give .detach() of it")


def _require_pair(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        found = f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
        raise TypeError(f"nvte_ep.ep_dispatch: {name} must be a pair (data, scales), found {found}")


def _require_dtype(function: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, why: str = "") -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"nvte_ep.{function}: {name} must be {dtype}{why}, found {tensor.dtype}")


def _require_width(function: str, name: str, tensor: torch.Tensor, buffer: EpBuffer) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != buffer.hidden_dim:
        raise c.EpArgumentError(
            f"nvte_ep.{function}: {name} must be [rows, {buffer.hidden_dim}], hidden_dim of the buffer, found {list(tensor.shape)}")


def _stage(function: str, read: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies rows into symmetric memory of a buffer, where the call reads them."""
    if not torch.compiler.is_compiling() and not is_symm_backed(read):
        raise c.EpError(f"nvte_ep.{function}: the symmetric memory of the buffer was given back (release_symm_mem_pool, ep_finalize)")
    read.copy_(rows)


def _wants_gradient(*inputs: torch.Tensor | None) -> bool:
    """Whether autograd has to see a call; to go through it costs 10 us or more. In forward mode it sees to the refusal."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _send(handle_mem: torch.Tensor, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, rows: int,
          recv_tokens: torch.Tensor | None, recv_topk_weights: torch.Tensor | None, recv_mxfp8: Mxfp8 | None) -> Any:
    """Dispatches into the tensors that are given, or else into new ones; as MXFP8 through a pair."""
    if recv_tokens is None:
        recv_tokens = tokens.new_empty(rows, tokens.shape[1])
    if topk_weights is not None and recv_topk_weights is None:
        recv_topk_weights = topk_weights.new_empty(rows)
    if recv_mxfp8 is None:
        ops.dispatch(handle_mem, tokens, None, topk_idx, topk_weights, recv_tokens, None, recv_topk_weights)
    else:
        ops.dispatch(handle_mem, *mxfp8_quantize(tokens), topk_idx, topk_weights, *recv_mxfp8, recv_topk_weights)
        recv_tokens.copy_(mxfp8_dequantize(*recv_mxfp8, tokens.dtype))
    return recv_tokens, recv_topk_weights


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle_mem: torch.Tensor, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None,
                rows: int, recv_tokens: torch.Tensor | None, recv_topk_weights: torch.Tensor | None, recv_mxfp8: Mxfp8 | None,
                read: torch.Tensor | None) -> Any:
        recv_tokens, recv_topk_weights = _send(
            handle_mem, tokens, topk_idx, topk_weights, rows, recv_tokens, recv_topk_weights, recv_mxfp8)
        ctx.save_for_backward(handle_mem)
        ctx.read = read
        ctx.tokens, ctx.top_k, ctx.rows, ctx.dtype = tokens.shape, topk_idx.shape[1], recv_tokens.shape[0], tokens.dtype
        ctx.weighted = topk_weights is not None
        ctx.set_materialize_grads(False)
        return recv_tokens, recv_topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, grad_recv_weights: torch.Tensor | None = None) -> Any:
        # Every rank makes the same call, whatever of the outputs its loss uses.
        handle_mem, = ctx.saved_tensors
        device = handle_mem.device
        if grad is None:
            grad = torch.zeros(ctx.rows, ctx.tokens[1], dtype=ctx.dtype, device=device)
        grad_tokens = torch.empty(ctx.tokens, dtype=ctx.dtype, device=device)
        grad_weights = None
        if ctx.weighted:
            if grad_recv_weights is None:
                grad_recv_weights = torch.zeros(ctx.rows, dtype=torch.float32, device=device)
            grad_recv_weights = grad_recv_weights.contiguous()
            grad_weights = torch.empty(ctx.tokens[0], ctx.top_k, dtype=torch.float32, device=device)
        if ctx.read is None:
            ops.dispatch_bwd(handle_mem, grad.contiguous(), grad_recv_weights, grad_tokens, grad_weights)
        else:
            _stage("ep_dispatch's backward", ctx.read, grad)
            ops.dispatch_bwd_in_place(handle_mem, ctx.read, grad_recv_weights, grad_tokens, grad_weights)
        return None, grad_tokens, None, grad_weights, None, None, None, None, None


def _sum(handle_mem: torch.Tensor, expert_out: torch.Tensor, num_local_tokens: int, read: torch.Tensor | None) -> torch.Tensor:
    """Combines, in a zero-copy group out of `read`."""
    result = expert_out.new_empty(num_local_tokens, expert_out.shape[1])
    if read is None:
        ops.combine(handle_mem, expert_out, result)
    else:
        if read is not expert_out:
            _stage("ep_combine", read, expert_out)
        ops.combine_in_place(handle_mem, read, result)
    return result


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle_mem: torch.Tensor, expert_out: torch.Tensor, num_local_tokens: int, read: torch.Tensor | None,
                grad_out: torch.Tensor | None, quantized: bool, grad_data: torch.Tensor | None, grad_scales: torch.Tensor | None) -> Any:
        result = _sum(handle_mem, expert_out, num_local_tokens, read)
        ctx.save_for_backward(handle_mem)
        ctx.grad_out, ctx.quantized, ctx.grad_data, ctx.grad_scales = grad_out, quantized, grad_data, grad_scales
        ctx.shape, ctx.dtype = expert_out.shape, expert_out.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        handle_mem, = ctx.saved_tensors
        grad = grad.contiguous()
        out = ctx.grad_out
        if out is None:
            out = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device)
        if ctx.quantized:
            data, scales = mxfp8_quantize(grad)
            received, received_scales = ctx.grad_data, ctx.grad_scales
            if received is None:
                received, received_scales = _empty_mxfp8(ctx.shape[0], ctx.shape[1], grad.device)
            ops.combine_bwd(handle_mem, data, scales, received, received_scales)
            out.copy_(mxfp8_dequantize(received, received_scales, ctx.dtype))
        else:
            ops.combine_bwd(handle_mem, grad, None, out, None)
        return None, out, None, None, None, None, None, None


def ep_prepare(buffer: EpBuffer, topk_idx: torch.Tensor) -> torch.Tensor:
    """Exchanges a step's routing, and keeps it in the buffer. Collective. `ep_dispatch` does it by itself.

    Args:
        buffer: no call over an earlier routing of it may still have its gradient to come.
        topk_idx: [T, top_k] int64 or int32, the experts of each token; an index that is negative or no expert routes nowhere.

    Returns:
        ``buffer.tokens_per_expert``: [local experts] int64, rows of each local expert's slab. The next call writes it anew.
    """
    _require_tensors("ep_prepare", buffer, topk_idx=topk_idx)
    return _prepare(buffer, topk_idx.contiguous())


def _prepare(buffer: EpBuffer, topk_idx: torch.Tensor) -> torch.Tensor:
    if topk_idx.dim() != 2 or topk_idx.shape[1] != buffer.top_k:
        raise c.EpArgumentError(
            f"nvte_ep.ep_prepare: topk_idx must be [tokens, {buffer.top_k}], top_k of the buffer, found {list(topk_idx.shape)}")
    ops.prepare(buffer.handle_mem, topk_idx, buffer.tokens_per_expert, buffer.total_recv_tokens, buffer.top_k, buffer.alignment)
    buffer.num_local_tokens = topk_idx.shape[0]
    return buffer.tokens_per_expert


@overload
def ep_dispatch(buffer: EpBuffer, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, *,
                recv_tokens: torch.Tensor | None = None, recv_topk_weights: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def ep_dispatch(buffer: EpBuffer, tokens: Mxfp8, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, *,
                recv_tokens: Mxfp8 | None = None, recv_topk_weights: torch.Tensor | None = None,
                ) -> tuple[Mxfp8, torch.Tensor, torch.Tensor]: ...
def ep_dispatch(buffer, tokens, topk_idx, topk_weights, *, recv_tokens=None, recv_topk_weights=None):
    """Prepares, and sends each token's row and weights to the ranks of its experts. Collective; differentiable.

    Args:
        buffer: of this layer and microbatch.
        tokens: [T, H] of the buffer's payload_dtype; or MXFP8 as a pair (data, scales) of `mxfp8_quantize`, which has no gradient.
        topk_idx: [T, top_k] int64 or int32.
        topk_weights: [T, top_k] float32; or None, to move rows only.
        recv_tokens, recv_topk_weights: where to write, contiguous: [C, H] (or a pair) and [C] float32. Not in eager mode. In a zero-copy
            group recv_tokens lies in symmetric memory. Without them the tensors are new, but in a zero-copy group recv_tokens
            is the buffer's own, which its next dispatch writes anew.

    Returns:
        recv_tokens: [C, H], C = recv_capacity_per_rank, or in eager mode the rows that the step delivers: the slabs of the local
            experts one after the other, `tokens_per_expert` rows each, padding zero. Rows behind the last slab are undefined.
        recv_topk_weights: [C] float32, 0 in the padding; None without weights.
        tokens_per_expert: [local experts] int64, as of `ep_prepare`.
    """
    pair = isinstance(tokens, tuple)
    if pair:
        _require_pair("tokens", tokens)
        if recv_tokens is not None:
            _require_pair("recv_tokens", recv_tokens)
    data, scales = tokens if pair else (tokens, None)
    into, into_scales = recv_tokens if pair and recv_tokens is not None else (recv_tokens, None)
    _require_tensors("ep_dispatch", buffer, tokens=data, topk_idx=topk_idx, topk_weights=topk_weights, recv_tokens=into,
                     recv_scales=into_scales, recv_topk_weights=recv_topk_weights)
    if pair:
        _require_tensors("ep_dispatch", buffer, scales=scales)
    if not pair:
        _require_dtype("ep_dispatch", "tokens", tokens, buffer.payload_dtype, ", payload_dtype of the buffer")
    _require_width("ep_dispatch", "tokens", data, buffer)
    if topk_weights is not None:
        _require_dtype("ep_dispatch", "topk_weights", topk_weights, torch.float32)
        topk_weights = topk_weights.contiguous()
    elif recv_topk_weights is not None:
        raise c.EpArgumentError("nvte_ep.ep_dispatch: recv_topk_weights must be None without topk_weights, found a tensor")
    if buffer.eager and not (recv_tokens is None and recv_topk_weights is None):
        raise c.EpArgumentError(
            "nvte_ep.ep_dispatch: recv_tokens and recv_topk_weights must be None in eager mode, whose steps have as many rows as arrive: "
            "give ep_bootstrap a recv_capacity_per_rank")
    if pair and topk_weights is not None and topk_weights.requires_grad and torch.is_grad_enabled():
        raise c.EpArgumentError("nvte_ep.ep_dispatch: topk_weights must not require a gradient where tokens are an MXFP8 pair, which has none: "
                                'give .detach() of them, or bfloat16 tokens to a buffer with dispatch_fwd_quant_recipe="mxfp8"')
    if buffer.zero_copy and recv_tokens is None and (buffer._recv_mxfp8 if pair else buffer._recv) is None:
        raise c.EpArgumentError("nvte_ep.ep_dispatch: recv_tokens must be given, since the buffer has no symmetric memory for it: give one of "
                                'symm_mem_alloc, or make the buffer without caller_buffers (for pairs: with dispatch_fwd_quant_recipe="mxfp8")')
    topk_idx, data = topk_idx.contiguous(), data.contiguous()
    counts = _prepare(buffer, topk_idx)
    rows = buffer._rows()
    if pair:
        if recv_tokens is None:
            recv_tokens = buffer._recv_mxfp8 or _empty_mxfp8(rows, buffer.hidden_dim, data.device)
        if topk_weights is not None and recv_topk_weights is None:
            recv_topk_weights = topk_weights.new_empty(rows)
        with torch.no_grad():
            ops.dispatch(buffer.handle_mem, data, scales.contiguous(), topk_idx, topk_weights, *recv_tokens, recv_topk_weights)
        return recv_tokens, recv_topk_weights, counts
    recv_mxfp8 = None
    if buffer.dispatch_fwd_quant_recipe is not None:
        recv_mxfp8 = buffer._recv_mxfp8 or _empty_mxfp8(rows, buffer.hidden_dim, data.device)
    if recv_tokens is None and buffer._recv is not None:
        # An alias, whose flags may be changed.
        recv_tokens = buffer._recv.detach()
    arguments = buffer.handle_mem, data, topk_idx, topk_weights, rows, recv_tokens, recv_topk_weights, recv_mxfp8
    if _wants_gradient(data, topk_weights):
        recv_tokens, recv_topk_weights = _Dispatch.apply(*arguments, buffer._read)
    else:
        recv_tokens, recv_topk_weights = _send(*arguments)
    return recv_tokens, recv_topk_weights, counts


def ep_combine(buffer: EpBuffer, expert_out: torch.Tensor, *, num_local_tokens: int | None = None, grad_out: torch.Tensor | None = None,
               weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sums each token's rows back on its own rank. Collective; differentiable.

    Args:
        buffer: of the dispatch.
        expert_out: [C, H] of the buffer's payload_dtype, in the layout of recv_tokens. In a zero-copy group it is copied into symmetric
            memory of the buffer, unless it lies in symmetric memory: then it is read there, and modified (a token's rows are
            summed in place).
        num_local_tokens: rows of the result; by default those of the dispatch.
        grad_out: [C, H], where to write the gradient of expert_out; it is what autograd hands on. Without it the gradient is a new
            tensor, but in a zero-copy group the buffer's own.
        weights: [C] float32, recv_topk_weights of the dispatch: each row is multiplied by its weight first. By default the caller
            has done so.

    Returns:
        [num_local_tokens, H]: float32 sums, rounded; zeroes for a token without rows. The gradient of rows behind the last slab
        is undefined, as these rows are.
    """
    _require_tensors("ep_combine", buffer, expert_out=expert_out, weights=weights, grad_out=grad_out)
    _require_dtype("ep_combine", "expert_out", expert_out, buffer.payload_dtype, ", payload_dtype of the buffer")
    _require_width("ep_combine", "expert_out", expert_out, buffer)
    if weights is not None:
        _require_dtype("ep_combine", "weights", weights, torch.float32)
        if weights.shape != expert_out.shape[:1]:
            raise c.EpArgumentError(
                f"nvte_ep.ep_combine: weights must be [{expert_out.shape[0]}], one for each row of expert_out, found {list(weights.shape)}")
        expert_out = (expert_out * weights.unsqueeze(1)).to(buffer.payload_dtype)
    if num_local_tokens is None:
        num_local_tokens = buffer.num_local_tokens
    elif not torch.compiler.is_compiling():
        num_local_tokens = _integer("ep_combine", "num_local_tokens", num_local_tokens, 0)
    quantized = buffer.combine_bwd_quant_recipe is not None
    pair = buffer._grad_mxfp8 if quantized and buffer._grad_mxfp8 else (None, None)
    expert_out, read = expert_out.contiguous(), buffer._read
    if buffer.zero_copy:
        if grad_out is None and buffer._grad is None and expert_out.requires_grad and torch.is_grad_enabled():
            raise c.EpArgumentError("nvte_ep.ep_combine: grad_out must be given, since the buffer was made with caller_buffers")
        if not torch.compiler.is_compiling() and is_symm_backed(expert_out):
            read = expert_out
    if not _wants_gradient(expert_out):
        return _sum(buffer.handle_mem, expert_out, num_local_tokens, read)
    return _Combine.apply(
        buffer.handle_mem, expert_out, num_local_tokens, read, buffer._grad if grad_out is None else grad_out, quantized, *pair)
