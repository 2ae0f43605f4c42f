"""The EP groups of this process, one for each device: made from a process group, ended once."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from . import _library as c

CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class Group:
    """The EP group of a device, and what it was made with."""

    device: torch.device
    process_group: dist.ProcessGroup
    ranks: int
    rank: int
    num_experts: int
    max_tokens_per_rank: int
    hidden_dim: int
    recv_capacity_per_rank: int | None
    zero_copy: bool
    drop_on_overflow: bool
    max_token_dtype: torch.dtype
    num_topk: int
    max_num_sms: int
    host: Any = None
    comm: int = 0
    host_stream: int = 0
    # Addresses of symmetric memory that was handed out.
    symmetric: list[int] = dataclasses.field(default_factory=list)
    # What buffers know it by; they keep no process group alive.
    token: object = dataclasses.field(default_factory=object)
    # How often release_symm_mem_pool took it back.
    released: int = 0
    # A child that is forked off has the group's memory, but not its threads or the device.
    process: int = dataclasses.field(default_factory=os.getpid)

    @property
    def eager(self) -> bool:
        return self.recv_capacity_per_rank is None

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ranks

    def stream(self) -> int:
        """The stream that a call is queued on: torch's current one."""
        if self.host is not None:
            return self.host_stream
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def finish(self) -> None:
        """After a call: on the CPU its work is done when it returns, as that of torch's own operators is."""
        if self.host is not None and self.host.cudaStreamSynchronize(self.host_stream):
            raise c.EpError(host_error(self.host))

    def synchronize(self) -> None:
        """Waits for what is queued on the current stream."""
        if self.host is None:
            torch.cuda.current_stream(self.device).synchronize()
        else:
            self.finish()


_groups: dict[torch.device, Group] = {}
_lock = threading.Lock()
_host: Any = None


def host_error(host: Any) -> str:
    host.nvte_ep_host_last_error.restype = ctypes.c_char_p
    return (host.nvte_ep_host_last_error() or host.ncclGetLastError(None) or b"the host runtime failed").decode(errors="replace")


def group_of(device: torch.device, function: str) -> Group:
    """The group of a device.

    Raises:
        EpError: there is none.
    """
    group = _groups.get(device)
    if group is None:
        there = f"; there are groups on {', '.join(map(str, _groups))}" if _groups else ""
        raise c.EpError(f"nvte_ep.{function}: there is no EP group on {device}: call nvte_ep.ep_bootstrap first{there}")
    return group


def groups() -> list[Group]:
    return list(_groups.values())


def default_device() -> torch.device:
    """The device of buffers that name none: that of the only group, or torch's current one."""
    if len(_groups) == 1:
        return next(iter(_groups))
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def canonical(device: torch.device | str | None) -> torch.device:
    """A device with its index."""
    if device is None:
        return default_device()
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return CPU if device.type == "cpu" else device


def _device_of(process_group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of a process group are: on the GPU if it has NCCL for that. A group of gloo alone takes tensors of GPUs as
    well, but by way of the host, and has no communicator: it means the CPU."""
    types = {device.type for device in process_group._device_types}
    if "cuda" in types and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        if process_group._get_backend(device).name() != "gloo":
            return device
    return CPU


def _host_communicator(host: Any, process_group: dist.ProcessGroup, ranks: int, rank: int) -> int:
    """A communicator of the host runtime with the ranks of a process group on the CPU."""
    unique = c.UniqueId()
    if rank == 0 and host.ncclGetUniqueId(ctypes.byref(unique)):
        raise c.EpError(host_error(host))
    shared = torch.tensor(list(bytes(unique)), dtype=torch.uint8, device="cpu")
    dist.broadcast(shared, src=dist.get_global_rank(process_group, 0), group=process_group)
    ctypes.memmove(ctypes.byref(unique), bytes(shared.tolist()), ctypes.sizeof(unique))
    comm = ctypes.c_void_p()
    if host.ncclCommInitRank(ctypes.byref(comm), ranks, unique, rank):
        raise c.EpError(host_error(host))
    return comm.value


def _nccl_communicator(process_group: dist.ProcessGroup, device: torch.device) -> int:
    """The communicator that a process group's NCCL backend has for a device; made here if there was no collective yet."""
    backend = process_group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        raise c.EpNotSupportedError(
            f"nvte_ep.ep_bootstrap: ep_group's backend for {device} is {type(backend).__name__} of torch {torch.__version__}, which "
            "does not tell its communicator: use a group with the backend nccl, and torch 2.9 or later"
        )
    dist.barrier(group=process_group, device_ids=[device.index])
    return backend._comm_ptr()


def bootstrap(process_group: dist.ProcessGroup | None, device: torch.device | str | None, **settings: Any) -> None:
    """Makes the group of a device; see `ep_bootstrap`."""
    global _host
    if not dist.is_initialized():
        raise c.EpError("nvte_ep.ep_bootstrap: torch.distributed is not initialized: call init_process_group first")
    if process_group is None:
        process_group = dist.group.WORLD
    if process_group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"nvte_ep.ep_bootstrap: ep_group must be a torch.distributed.ProcessGroup or None, found {type(process_group).__name__}")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise c.EpArgumentError("nvte_ep.ep_bootstrap: ep_group has to be a group that this rank is in")
    there = _device_of(process_group) if device is None else canonical(device)
    with _lock:
        if there in _groups:
            raise c.EpError(
                f"nvte_ep.ep_bootstrap: there is an EP group on {there} already: call nvte_ep.ep_finalize before another one"
            )
        others = {other.type for other in _groups} - {there.type}
        if others:
            raise c.EpError(f"nvte_ep.ep_bootstrap: this process has groups on {others.pop()}, and can have none on {there.type} beside")
        ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        group = Group(there, process_group, ranks, rank, **settings)
        if there.type == "cpu":
            if _host is None:
                _host = c.load_host_runtime()
            group.host, group.comm = _host, _host_communicator(_host, process_group, ranks, rank)
            stream = ctypes.c_void_p()
            if _host.cudaStreamCreateWithFlags(ctypes.byref(stream), 1):
                raise c.EpError(host_error(_host))
            group.host_stream = stream.value
        else:
            group.comm = _nccl_communicator(process_group, there)
        try:
            _initialize(group)
        except BaseException:
            _release(group)
            raise
        _groups[there] = group


def _initialize(group: Group) -> None:
    dtype = c.DTYPES.get(group.max_token_dtype)
    if dtype is None:
        raise TypeError(f"nvte_ep.ep_bootstrap: max_token_dtype must be a torch dtype of tokens, found {group.max_token_dtype}")
    config = c.GroupConfig(
        ctypes.sizeof(c.GroupConfig), group.ranks, group.num_experts, group.max_tokens_per_rank, group.recv_capacity_per_rank or 0,
        group.hidden_dim, group.max_num_sms, dtype, group.zero_copy, group.num_topk, group.drop_on_overflow,
    )
    wanted = "host" if group.host is not None else "cuda"
    previous = os.environ.get("NVTE_EP_RUNTIME")
    found = previous or wanted
    if found != wanted:
        raise c.EpError(
            f"nvte_ep.ep_bootstrap: ep_group is one of {group.device.type} tensors, which takes NVTE_EP_RUNTIME={wanted}, found {found}: "
            "unset the variable"
        )
    os.environ["NVTE_EP_RUNTIME"] = wanted
    try:
        with device_of(group.device):
            c.check(c.LIBRARY.nvte_ep_try_initialize(group.comm, ctypes.byref(config)))
    finally:
        if previous is None:
            del os.environ["NVTE_EP_RUNTIME"]


def device_of(device: torch.device) -> Any:
    """Makes a device the thread's current one, which the library goes by."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _release(group: Group) -> None:
    """Gives back what was made for a group on the CPU. A process group's communicator stays its own."""
    if group.host is not None:
        if group.host_stream:
            group.host.cudaStreamDestroy(group.host_stream)
        group.host.ncclCommDestroy(group.comm)


def finalize() -> None:
    """Ends all groups of this process."""
    with _lock:
        if not _groups:
            return
        if any(group.host is None for group in _groups.values()) and not dist.is_initialized():
            raise c.EpError("nvte_ep.ep_finalize: the process group is gone, whose communicator the EP group would be ended with: call it "
                            "before destroy_process_group")
        ended = list(_groups.values())
        _groups.clear()
        try:
            c.check(c.LIBRARY.nvte_ep_try_shutdown())
        finally:
            for group in ended:
                _release(group)


@atexit.register
def _at_exit() -> None:
    """Ends what the program has not: unless an exception ends it, since the other ranks then wait elsewhere, the communicator
    is gone already, or the groups are those of the process that this one was forked off."""
    failed = getattr(sys, "last_value", None) is not None
    forked = any(group.process != os.getpid() for group in _groups.values())
    borrowed = any(group.host is None for group in _groups.values())
    if _groups and not failed and not forked and not (borrowed and not dist.is_initialized()):
        try:
            finalize()
        except c.EpError as error:
            print(f"nvte_ep: at exit: {error}", file=sys.stderr)
