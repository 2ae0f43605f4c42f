"""Expert parallelism for PyTorch over NCCL EP, and on the CPU over nvte-ep's host runtime.

    import torch, torch.distributed as dist, nvte_ep

    nvte_ep.ep_bootstrap(dist.group.WORLD, num_experts=8, max_tokens_per_rank=128, hidden_dim=256, num_topk=2, recv_capacity_per_rank=512)
    buffer = nvte_ep.EpBuffer(2, 128, 256, num_local_experts=4)
    recv, recv_weights, counts = nvte_ep.ep_dispatch(buffer, tokens, topk_idx, topk_weights)
    out = nvte_ep.ep_combine(buffer, experts(recv, counts), weights=recv_weights)
"""

from ._library import EpArgumentError, EpError, EpNotSupportedError, EpTimeoutError, version
from ._symm import is_symm_backed, release_symm_mem_pool, symm_mem_alloc
from .ep import EpBuffer, ep_bootstrap, ep_combine, ep_dispatch, ep_finalize, ep_prepare, is_ep_bootstrapped
from .moe import MoELayer
from .mxfp8 import mxfp8_dequantize, mxfp8_quantize

__all__ = [
    "EpArgumentError", "EpBuffer", "EpError", "EpNotSupportedError", "EpTimeoutError", "MoELayer", "ep_bootstrap", "ep_combine", "ep_dispatch",
    "ep_finalize", "ep_prepare", "is_ep_bootstrapped", "is_symm_backed", "mxfp8_dequantize", "mxfp8_quantize", "release_symm_mem_pool",
    "symm_mem_alloc", "version",
]
