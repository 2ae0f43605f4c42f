"""The C structures of libtransformer_engine.so and the host runtime, as ctypes has them. Needs nothing but ctypes."""

import ctypes


class GroupConfig(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)] + [
        (name, ctypes.c_int)
        for name in ("ep_size", "num_experts", "max_tokens_per_rank", "max_recv_tokens_per_rank", "hidden_dim",
                     "num_comm_sms", "max_token_dtype", "zero_copy", "num_topk", "drop_on_overflow")
    ]


class LayerConfig(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("top_k", ctypes.c_int), ("alignment", ctypes.c_size_t)]


class Shape(ctypes.Structure):
    _fields_ = [("data", ctypes.c_size_t * 15), ("ndim", ctypes.c_size_t)]


class BasicTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("shape", Shape)]


class Window(ctypes.Structure):
    _fields_ = [("window", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("scale_window", ctypes.c_void_p),
                ("scale_offset", ctypes.c_uint64)]


class RecvTotals(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("needed", ctypes.c_uint64), ("received", ctypes.c_uint64),
                ("dropped", ctypes.c_uint64), ("not_experts", ctypes.c_uint64)]


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]
