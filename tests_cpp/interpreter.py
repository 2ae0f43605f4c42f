#!/usr/bin/env python3
"""A group in a Python process, through ctypes: interpreter.py LIBRARY CASE, on the host runtime.

LIBRARY is libtransformer_engine.so; the host runtime serves as CUDA and NCCL. The process has to end with 0 in every case.
"""

import atexit
import ctypes
import os
import pathlib
import subprocess
import sys
import threading

# The package's file alone: the package itself wants torch.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "python/nvte_ep"))
from _abi import BasicTensor, GroupConfig, LayerConfig, Shape, UniqueId, Window

# Sizes of the group, and NVTEDType's numbers.
RANKS, EXPERTS, TOKENS, HIDDEN, TOP_K = 1, 4, 8, 64, 2
BYTE, INT64, FLOAT32 = 0, 3, 4


def ok(code):
    if code != 0:
        raise RuntimeError(f"the host runtime returned {code}")


class Tensor:
    """Device memory with a shape, filled from `values` (a ctypes array) if there are any."""

    def __init__(self, run, dtype, element, shape, values=None):
        self.bytes = element
        for extent in shape:
            self.bytes *= extent
        self.run, self.memory = run, ctypes.c_void_p()
        ok(run.host.cudaMalloc(ctypes.byref(self.memory), ctypes.c_size_t(self.bytes)))
        if values is not None:
            ok(run.host.cudaMemcpy(self.memory, values, ctypes.c_size_t(self.bytes), 1))
        basic = BasicTensor(self.memory, dtype, Shape((ctypes.c_size_t * 15)(*shape), len(shape)))
        self.tensor = ctypes.c_void_p(run.ep.nvte_create_tensor(0))
        run.ep.nvte_set_tensor_param_v2(self.tensor, 0, ctypes.byref(basic), ctypes.c_size_t(ctypes.sizeof(basic)))

    def read(self, kind):
        values = (kind * (self.bytes // ctypes.sizeof(kind)))()
        ok(self.run.host.cudaMemcpy(values, self.memory, ctypes.c_size_t(self.bytes), 2))
        return list(values)


class Run:
    def __init__(self, library):
        self.ep = ctypes.CDLL(library)
        self.host = ctypes.CDLL("libcudart.so.13")
        self.ep.nvte_create_tensor.restype = ctypes.c_void_p
        self.ep.nvte_ep_handle_mem_size.restype = ctypes.c_size_t
        unique = UniqueId()
        ok(self.host.ncclGetUniqueId(ctypes.byref(unique)))
        self.comm, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.host.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        ok(self.host.ncclCommInitRank(ctypes.byref(self.comm), RANKS, unique, 0))
        ok(self.host.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1))
        self.initialize()

    def initialize(self):
        config = GroupConfig(ctypes.sizeof(GroupConfig), RANKS, EXPERTS, TOKENS, TOKENS * TOP_K, HIDDEN, 0, FLOAT32)
        self.ep.nvte_ep_initialize(self.comm, ctypes.byref(config))

    def step(self):
        """Every token goes to two experts and comes back twice."""
        layer = LayerConfig(ctypes.sizeof(LayerConfig), TOP_K, 0)
        indices = [(t + k) % EXPERTS for t in range(TOKENS) for k in range(TOP_K)]
        rows = [float(t + h % 7) for t in range(TOKENS) for h in range(HIDDEN)]
        memory = Tensor(self, BYTE, 1, [self.ep.nvte_ep_handle_mem_size(ctypes.byref(layer))])
        topk_idx = Tensor(self, INT64, 8, [TOKENS, TOP_K], (ctypes.c_int64 * len(indices))(*indices))
        tokens = Tensor(self, FLOAT32, 4, [TOKENS, HIDDEN], (ctypes.c_float * len(rows))(*rows))
        counts = Tensor(self, INT64, 8, [EXPERTS])
        received = Tensor(self, FLOAT32, 4, [TOKENS * TOP_K, HIDDEN])
        result = Tensor(self, FLOAT32, 4, [TOKENS, HIDDEN])
        none = Window()
        self.ep.nvte_ep_prepare(memory.tensor, topk_idx.tensor, counts.tensor, None, ctypes.byref(layer), self.stream)
        dispatch = self.ep.nvte_ep_dispatch
        dispatch(memory.tensor, topk_idx.tensor, tokens.tensor, none, None, none, received.tensor, none, None, none,
                 self.stream)
        self.ep.nvte_ep_combine(memory.tensor, received.tensor, none, result.tensor, self.stream)
        ok(self.host.cudaStreamSynchronize(self.stream))
        assert counts.read(ctypes.c_int64) == [indices.count(e) for e in range(EXPERTS)]
        assert result.read(ctypes.c_float) == [2 * value for value in rows]

    def shutdown(self):
        self.ep.nvte_ep_shutdown()


class Owner:
    def __init__(self, run):
        self.run = run

    def __del__(self):
        self.run.shutdown()


def plain(run):
    run.step()
    run.shutdown()
    run.shutdown()
    run.initialize()
    run.step()
    run.shutdown()


def statuses(run):
    """200 invalid calls, which say so and do no more; a C++ exception would end the process."""
    ep, tensor, size = run.ep, ctypes.c_void_p(), ctypes.c_size_t(0)
    ep.nvte_ep_last_error.restype = ep.nvte_ep_status_string.restype = ctypes.c_char_p
    invalid_argument, wrong_order = 1, 2
    shape, layer = Tensor(run, FLOAT32, 4, [TOKENS, HIDDEN]).tensor, LayerConfig(ctypes.sizeof(LayerConfig), 0, 0)
    none = Window()
    calls = [
        (lambda: ep.nvte_ep_try_create_tensor(77, ctypes.byref(tensor)), invalid_argument, b"nvte_create_tensor: scaling_mode"),
        (lambda: ep.nvte_ep_try_initialize(None, None), invalid_argument, b"nvte_ep_initialize: group_config"),
        (lambda: ep.nvte_ep_try_handle_mem_size(ctypes.byref(layer), ctypes.byref(size)), invalid_argument,
         b"nvte_ep_handle_mem_size: layer_cfg.top_k"),
        (lambda: ep.nvte_ep_try_combine(shape, shape, none, shape, run.stream), invalid_argument, b"nvte_ep_combine: handle_mem"),
    ]
    for _ in range(50):
        for call, status, text in calls:
            assert call() == status and ep.nvte_ep_last_error().startswith(text), ep.nvte_ep_last_error()
    assert tensor.value is None and size.value == 0
    assert ep.nvte_ep_status_string(wrong_order) == b"wrong order"
    run.step()
    assert ep.nvte_ep_try_shutdown() == 0
    layer.top_k = TOP_K
    status = ep.nvte_ep_try_handle_mem_size(ctypes.byref(layer), ctypes.byref(size))
    assert status == wrong_order, (status, ep.nvte_ep_last_error())
    text = b"nvte_ep_handle_mem_size: there is no EP group: nvte_ep_shutdown ended it; call nvte_ep_initialize for another"
    assert ep.nvte_ep_last_error().startswith(text), ep.nvte_ep_last_error()


def never(run):
    """Nobody shuts down."""
    run.step()


def at_exit(run):
    atexit.register(run.shutdown)
    run.step()


def in_del(run):
    """Shut down by an object that the interpreter collects at its very end."""
    sys.modules["__main__"].owner = Owner(run)
    run.step()


def threads(run):
    """ctypes lets go of the interpreter's lock during calls, so two threads are in the library at once."""
    errors = []

    def work():
        try:
            ok(run.host.cudaSetDevice(0))
            layer = LayerConfig(ctypes.sizeof(LayerConfig), TOP_K, 0)
            for _ in range(200):
                assert run.ep.nvte_ep_handle_mem_size(ctypes.byref(layer)) > 0
        except BaseException as error:  # reported below
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in range(5):
        run.step()
    for worker in workers:
        worker.join()
    assert not errors, errors
    run.shutdown()


def daemon(run):
    """A thread that still works when the interpreter ends."""
    layer = LayerConfig(ctypes.sizeof(LayerConfig), TOP_K, 0)

    def work():
        while True:
            run.ep.nvte_ep_handle_mem_size(ctypes.byref(layer))

    threading.Thread(target=work, daemon=True).start()
    run.step()


def fork(run):
    """A data loader's worker, which ends as an interpreter does."""
    run.step()
    atexit.register(run.shutdown)
    child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    run.step()


def close(run):
    """The library is closed while it has a group: it stays, and so does the group."""
    import _ctypes

    run.step()
    path = next(line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("libtransformer_engine.so"))
    _ctypes.dlclose(run.ep._handle)
    assert any(line.rstrip().endswith(path) for line in open("/proc/self/maps")), "the library was unloaded"
    run.ep = ctypes.CDLL(path)
    run.ep.nvte_create_tensor.restype = ctypes.c_void_p
    run.ep.nvte_ep_handle_mem_size.restype = ctypes.c_size_t
    run.step()
    run.shutdown()


def raising(run):
    """Not a case of its own: ends with 1, as interpreters do."""
    run.step()
    raise KeyError("the training loop failed")


def exception(run):
    """An interpreter that ends by an exception, with a group: with 1, not by a signal."""
    child = subprocess.run([sys.executable, __file__, sys.argv[1], "raising"], stderr=subprocess.PIPE, timeout=60)
    assert child.returncode == 1, child
    assert child.stderr.decode().rstrip().endswith("KeyError: 'the training loop failed'"), child


CASES = {f.__name__: f for f in (plain, never, at_exit, in_del, threads, daemon, fork, close, exception, raising, statuses)}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in CASES:
        sys.exit(f"usage: {sys.argv[0]} LIBRARY CASE, one of {', '.join(CASES)}")
    CASES[sys.argv[2]](Run(sys.argv[1]))
