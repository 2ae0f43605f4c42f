"""The C library through ctypes: where it is, its structures, and its status codes as exceptions.

Only the functions that return a status are called (``nvte_ep_try_*``); a C++ exception would end the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
from typing import Any

import torch

from ._abi import BasicTensor, GroupConfig, LayerConfig, RecvTotals, Shape, UniqueId, Window

FOLDER = pathlib.Path(__file__).resolve().parent
LIBRARIES = FOLDER / "lib"
NAME, HOST_NAME = "libtransformer_engine.so", "libnvte_ep_host.so.1"


class EpError(RuntimeError):
    """A call of the library failed; the text names the function, the argument, the rule, what was found, what to change."""


class EpArgumentError(EpError, ValueError):
    """An argument breaks a rule."""


class EpNotSupportedError(EpError, NotImplementedError):
    """The machine or this build lacks what the call needs."""


class EpTimeoutError(EpError, TimeoutError):
    """A wait ended without the awaited."""


# By NVTEEpStatus; the others are EpError.
_EXCEPTIONS: dict[int, type[EpError]] = {1: EpArgumentError, 3: EpNotSupportedError, 5: EpTimeoutError}

NO_WINDOW = Window()

# NVTEDType's numbers.
DTYPES: dict[torch.dtype, int] = {
    torch.uint8: 0, torch.int16: 1, torch.int32: 2, torch.int64: 3, torch.float32: 4, torch.float16: 5, torch.bfloat16: 6,
    torch.float8_e4m3fn: 7, torch.float8_e5m2: 8,
}
FLOAT8_E8M0 = 9
_ROWWISE_DATA, _ROWWISE_SCALE_INV = 0, 4
_DELAYED_SCALING, _MXFP8_SCALING = 0, 1


def _load() -> ctypes.CDLL:
    path = LIBRARIES / NAME
    if not path.exists():
        raise ImportError(f"nvte_ep: {path} is missing: install the wheel, or build the package (docs/pytorch.md says how)")
    # Not global: another library of the process may define the same names.
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    pointer, size, status = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.nvte_ep_last_error.restype = ctypes.c_char_p
    library.nvte_ep_ext_version.restype = ctypes.c_char_p
    for name, arguments in {
        "create_tensor": [ctypes.c_int, pointer],
        "destroy_tensor": [pointer],
        "set_tensor_param_v2": [pointer, ctypes.c_int, pointer, size],
        "handle_mem_size": [pointer, pointer],
        "initialize": [pointer, pointer],
        "shutdown": [],
        "prepare": [pointer] * 4 + [pointer, pointer],
        "dispatch": [pointer, pointer, pointer, Window, pointer, Window, pointer, Window, pointer, Window, pointer],
        "combine": [pointer, pointer, Window, pointer, pointer],
        "dispatch_bwd": [pointer, pointer, Window, pointer, Window, pointer, pointer, pointer],
        "combine_bwd": [pointer, pointer, Window, pointer, Window, pointer],
        "ext_recv_totals": [pointer, pointer, pointer],
        "ext_symm_alloc": [size, pointer, pointer, pointer],
        "ext_symm_free": [pointer],
        "ext_window_of": [pointer, pointer, pointer],
        "ext_is_symmetric": [pointer, pointer],
    }.items():
        function = getattr(library, f"nvte_ep_try_{name}")
        function.argtypes, function.restype = arguments, status
    return library


LIBRARY = _load()


def check(status: int) -> None:
    """Raises what a status other than success means, with the library's text."""
    if status:
        raise _EXCEPTIONS.get(status, EpError)(LIBRARY.nvte_ep_last_error().decode(errors="replace"))


def version() -> str:
    """Names the library and its version."""
    return LIBRARY.nvte_ep_ext_version().decode()


class _Slot:
    """An NVTETensor of a thread's own, which describes one torch tensor after the other."""

    __slots__ = ("tensor", "basic", "reference", "described")

    def __init__(self, scaling: int) -> None:
        tensor = ctypes.c_void_p()
        check(LIBRARY.nvte_ep_try_create_tensor(scaling, ctypes.byref(tensor)))
        self.tensor, self.basic = tensor.value, BasicTensor()
        self.described: tuple[object, ...] = ()
        self.reference = ctypes.addressof(self.basic)

    def set(self, parameter: int, tensor: torch.Tensor, dtype: int) -> None:
        basic, shape = self.basic, tensor.shape
        basic.data, basic.dtype = tensor.data_ptr(), dtype
        basic.shape.data[: len(shape)], basic.shape.ndim = shape, len(shape)
        check(LIBRARY.nvte_ep_try_set_tensor_param_v2(self.tensor, parameter, self.reference, _BASIC_BYTES))

    def __del__(self) -> None:
        if LIBRARY is not None:  # None at the interpreter's end
            LIBRARY.nvte_ep_try_destroy_tensor(self.tensor)


_BASIC_BYTES = ctypes.sizeof(BasicTensor)


class _Slots(threading.local):
    """The NVTETensors of a thread. They are made once: a call only says where its tensors are."""

    def __init__(self) -> None:
        self.plain: list[_Slot] = []
        self.scaled: list[_Slot] = []


_slots = _Slots()


def describe(position: int, tensor: torch.Tensor | None) -> int | None:
    """The NVTETensor at one position of a call's arguments, as it stands until the thread's next call."""
    if tensor is None:
        return None
    plain = _slots.plain
    while len(plain) <= position:
        plain.append(_Slot(_DELAYED_SCALING))
    slot = plain[position]
    # Often the same as before: frameworks reuse memory.
    described = tensor.data_ptr(), tensor.dtype, tensor.shape
    if slot.described != described:
        slot.described = ()
        slot.set(_ROWWISE_DATA, tensor, DTYPES[tensor.dtype])
        slot.described = described
    return slot.tensor


def describe_scaled(position: int, data: torch.Tensor, scales: torch.Tensor) -> int:
    """The same for MXFP8 rows with their inverse scales."""
    scaled = _slots.scaled
    while len(scaled) <= position:
        scaled.append(_Slot(_MXFP8_SCALING))
    slot = scaled[position]
    slot.set(_ROWWISE_DATA, data, DTYPES[data.dtype])
    slot.set(_ROWWISE_SCALE_INV, scales, FLOAT8_E8M0)
    return slot.tensor


def load_host_runtime() -> Any:
    """The host runtime, which stands for CUDA and NCCL where tensors are on the CPU."""
    host = ctypes.CDLL(os.environ.get("NVTE_EP_HOST_LIB") or str(LIBRARIES / HOST_NAME), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    pointer = ctypes.c_void_p
    host.ncclCommInitRank.argtypes = [pointer, ctypes.c_int, UniqueId, ctypes.c_int]
    host.ncclCommDestroy.argtypes = [pointer]
    host.cudaStreamCreateWithFlags.argtypes = [pointer, ctypes.c_uint]
    host.cudaStreamSynchronize.argtypes = host.cudaStreamDestroy.argtypes = [pointer]
    host.cudaGetErrorString.restype = host.ncclGetLastError.restype = ctypes.c_char_p
    host.ncclGetLastError.argtypes = [pointer]
    # Tensors of torch lie in ordinary memory.
    host.nvte_ep_host_set_pageable_memory.restype = None
    host.nvte_ep_host_set_pageable_memory(1)
    return host
