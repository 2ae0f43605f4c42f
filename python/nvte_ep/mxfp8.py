"""MXFP8 rows in plain torch: float8_e4m3fn values, and for each 32 of them a power of two as a biased exponent (E8M0, uint8)."""

from __future__ import annotations

import torch

BLOCK = 32
_LARGEST = 448.0
_BIAS = 127


def mxfp8_quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows.

    Args:
        rows: [T, H], a floating type; H is a multiple of 512 for `ep_dispatch`, of 32 here.

    Returns:
        data: [T, H] float8_e4m3fn.
        scales: [T, H / 32] uint8; value = data * 2 ** (scale - 127). The smallest power of two with which the block's largest value
            fits is taken.
    """
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1) / _LARGEST)
    # frexp's mantissa is in [0.5, 1): of an exact power of two the exponent is one too large.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), (exponent + _BIAS).to(torch.uint8)


def mxfp8_dequantize(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The rows that `mxfp8_quantize` gave, in `dtype`.

    Args:
        data: [T, H] float8_e4m3fn.
        scales: [T, H / 32] uint8.
    """
    blocks = data.float().unflatten(-1, (-1, BLOCK))
    return torch.ldexp(blocks, scales.to(torch.int32).unsqueeze(-1) - _BIAS).flatten(-2).to(dtype)
