"""MXFP8 rows: pairs of data and scales, and recipes that quantize inside."""

import pytest
import torch
from layer import CAPACITY, DEVICE, HIDDEN, TOP_K, Data, assert_close, bootstrap, buffer, dense, layer

import nvte_ep

# A value of E4M3 has a mantissa of three bits; of a sum of TOP_K rows each is off by that much.
STEP = 2.0**-4


def test_quantization():
    rows = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 8).unsqueeze(1)
    rows[3] = 0
    data, scales = nvte_ep.mxfp8_quantize(rows)
    assert data.dtype == torch.float8_e4m3fn and scales.dtype == torch.uint8 and scales.shape == (8, HIDDEN // 32)
    back = nvte_ep.mxfp8_dequantize(data, scales, torch.float32)
    largest = rows.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    # Relative to the value, or below the smallest normal value of the block to that.
    assert ((back - rows).abs() <= torch.maximum(rows.abs() * STEP, largest * 2.0**-17)).all()
    again = nvte_ep.mxfp8_quantize(back)
    assert torch.equal(nvte_ep.mxfp8_dequantize(*again, torch.float32), back)


def test_exact_powers_take_the_smallest_scale():
    data, scales = nvte_ep.mxfp8_quantize(torch.full((1, 32), 448.0))
    assert scales.item() == 127 and data.float().eq(448).all()
    data, scales = nvte_ep.mxfp8_quantize(torch.full((1, 32), 449.0))
    assert scales.item() == 128


@pytest.mark.parametrize("zero_copy", [False, True])
def test_pairs_arrive_bit_by_bit(zero_copy):
    bootstrap(zero_copy=zero_copy)
    data = Data(seed=1)
    pair = nvte_ep.mxfp8_quantize(data.tokens)
    (rows, scales), weights, counts = nvte_ep.ep_dispatch(
        buffer(dispatch_fwd_quant_recipe="mxfp8" if zero_copy else None), pair, data.idx, data.weights)
    assert rows.shape == (CAPACITY, HIDDEN) and scales.shape == (CAPACITY, HIDDEN // 32)
    data.all_tokens = [nvte_ep.mxfp8_dequantize(*nvte_ep.mxfp8_quantize(tokens), torch.float32) for tokens in data.all_tokens]
    wanted, wanted_weights, wanted_counts = data.received()
    total = len(wanted)
    assert counts.tolist() == wanted_counts and torch.equal(weights[:total], wanted_weights)
    assert torch.equal(nvte_ep.mxfp8_dequantize(rows[:total], scales[:total], torch.float32), wanted)


def test_no_gradient_of_a_pair_is_lost():
    bootstrap()
    data, here = Data(seed=1), buffer()
    pair, (_, weights) = nvte_ep.mxfp8_quantize(data.tokens), data.leaves()
    with pytest.raises(ValueError, match="topk_weights must not require a gradient where tokens are an MXFP8 pair"):
        nvte_ep.ep_dispatch(here, pair, data.idx, weights)
    with torch.no_grad():
        nvte_ep.ep_dispatch(here, pair, data.idx, weights)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_recipes(zero_copy):
    bootstrap(zero_copy=zero_copy)
    here = buffer(dispatch_fwd_quant_recipe="mxfp8", combine_bwd_quant_recipe="mxfp8")
    assert here.dispatch_fwd_quant_recipe == "mxfp8"
    data = Data(seed=2)
    tokens, weights = data.leaves()
    out = layer(here, tokens, data.idx, weights)
    through = nvte_ep.mxfp8_dequantize(*nvte_ep.mxfp8_quantize(data.tokens), torch.float32)
    assert_close(out, dense(through, data.idx, data.weights))
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    out.backward(gradient)
    rounded = nvte_ep.mxfp8_dequantize(*nvte_ep.mxfp8_quantize(gradient), torch.float32)
    reference = through.requires_grad_(), data.weights.clone().requires_grad_()
    dense(reference[0], data.idx, reference[1]).backward(rounded)
    assert_close(tokens.grad, reference[0].grad, terms=2 * TOP_K)
    assert_close(weights.grad, reference[1].grad, terms=HIDDEN)
