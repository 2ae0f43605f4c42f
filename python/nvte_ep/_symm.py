"""Tensors in symmetric memory: the same place of every rank's memory, which peers read and write directly."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import _library as c
from ._group import Group, canonical, device_of, group_of, groups


class _DlTensor(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]


_CPU, _CUDA, _UNSIGNED = 1, 2, 1
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# What describes the memory of tensors; torch reads it until its last tensor there is gone.
_descriptions: list[object] = []


def _tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address as a tensor, which does not own them."""
    shape = (ctypes.c_int64 * 1)(size)
    kind, index = (_CPU, 0) if device.type == "cpu" else (_CUDA, device.index)
    description = _DlTensor(address, kind, index, 1, _UNSIGNED, 8, 1, ctypes.addressof(shape), None, 0, None, None)
    _descriptions.append((description, shape))
    return torch.from_dlpack(_new_capsule(ctypes.addressof(description), b"dltensor", None))


def allocate(group: Group, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in symmetric memory of a group, which every rank allocates at the same point."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    address = ctypes.c_void_p()
    with device_of(group.device):
        if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise c.EpError(
                "nvte_ep: symmetric memory cannot be allocated while a CUDA graph is captured: allocate it before, and pass it to the call"
            )
        c.check(c.LIBRARY.nvte_ep_try_ext_symm_alloc(size, ctypes.byref(address), None, None))
    group.symmetric.append(address.value)
    return _tensor_at(address.value, size, group.device)[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def symm_mem_alloc(shape: Sequence[int], dtype: torch.dtype, ep_group: dist.ProcessGroup | None = None,
                   device: torch.device | str | None = None, use_pool: bool = True) -> torch.Tensor:
    """Allocates a tensor in symmetric memory, for the calls of a zero-copy group. Collective: every rank allocates the same, in the
    same order; each allocation waits for the queued work of all ranks. So allocate once, and use the tensor in every step.

    The memory stays until `release_symm_mem_pool` or `ep_finalize`, whatever becomes of the tensor.

    Args:
        shape, dtype: of the tensor.
        ep_group: the process group that `ep_bootstrap` got; None for the group of `device`.
        device: the group's device; None for the current one.
        use_pool: accepted for TransformerEngine's sake; memory always comes from the group's pool.
    """
    group = group_of(canonical(device), "symm_mem_alloc")
    try:
        shape = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"nvte_ep.symm_mem_alloc: shape must be a sequence of integers, found {shape!r}") from None
    if any(size < 0 for size in shape):
        raise c.EpArgumentError(f"nvte_ep.symm_mem_alloc: shape must have no negative size, found {list(shape)}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"nvte_ep.symm_mem_alloc: dtype must be a torch.dtype, found {dtype!r}")
    if ep_group is not None and ep_group is not group.process_group:
        raise c.EpArgumentError("nvte_ep.symm_mem_alloc: ep_group must be the one that ep_bootstrap got, found another")
    return allocate(group, shape, dtype)


def is_symm_backed(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in symmetric memory of its device's EP group."""
    group = group_of(tensor.device, "is_symm_backed")
    answer = ctypes.c_int()
    with device_of(group.device):
        c.check(c.LIBRARY.nvte_ep_try_ext_is_symmetric(tensor.data_ptr(), ctypes.byref(answer)))
    return bool(answer.value)


def release_symm_mem_pool() -> None:
    """Gives back all memory of `symm_mem_alloc`, and that of zero-copy buffers. No tensor there may be used afterwards, and a
    zero-copy EpBuffer has to be made anew. Every rank calls it at the same point; `ep_finalize` does it as well."""
    for group in groups():
        group.released += 1
        with device_of(group.device):
            while group.symmetric:
                c.check(c.LIBRARY.nvte_ep_try_ext_symm_free(group.symmetric.pop()))
