"""Zero-copy groups and symmetric memory."""

import pytest
import torch
from layer import CAPACITY, DEVICE, HIDDEN, LOCAL, TOKENS, Data, assert_close, bootstrap, buffer, dense, experts, layer

import nvte_ep


def test_a_step_without_buffers_of_the_caller():
    bootstrap(zero_copy=True)
    here = buffer()
    assert here.zero_copy
    for seed in range(3):
        data = Data(seed=seed)
        tokens, weights = data.leaves()
        received, received_weights, counts = nvte_ep.ep_dispatch(here, tokens, data.idx, weights)
        assert nvte_ep.is_symm_backed(received)
        rows, row_weights, _ = data.received()
        assert torch.equal(received[: len(rows)], rows) and torch.equal(received_weights[: len(rows)], row_weights)
        kept = experts(received, counts)
        before = kept.detach().clone()
        out = nvte_ep.ep_combine(here, kept, weights=received_weights)
        assert torch.equal(kept, before), "the caller's tensor is not changed"
        assert_close(out, dense(data.tokens, data.idx, data.weights))
        out.square().sum().backward()
        reference = data.leaves()
        dense(reference[0], data.idx, reference[1]).square().sum().backward()
        assert_close(tokens.grad, reference[0].grad, terms=4)
        assert_close(weights.grad, reference[1].grad, terms=HIDDEN)


def test_the_caller_has_symmetric_memory():
    bootstrap(zero_copy=True)
    data = Data(seed=4)
    here = buffer(caller_buffers=True)
    received, read, grad = (nvte_ep.symm_mem_alloc((CAPACITY, HIDDEN), torch.float32) for _ in range(3))
    assert all(nvte_ep.is_symm_backed(tensor) for tensor in (received, read, grad))
    assert not nvte_ep.is_symm_backed(torch.zeros(4, device=DEVICE))
    with pytest.raises(ValueError, match="recv_tokens must be given"):
        nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
    got, weights, counts = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights, recv_tokens=received)
    assert got.data_ptr() == received.data_ptr()
    read.copy_(experts(got, counts) * weights.nan_to_num().unsqueeze(1))
    version = read._version
    out = nvte_ep.ep_combine(here, read, grad_out=grad)
    assert_close(out, dense(data.tokens, data.idx, data.weights))
    assert read._version > version, "combine changes it, and autograd is told"


def test_memory_is_released():
    bootstrap(zero_copy=True)
    for _ in range(20):
        nvte_ep.symm_mem_alloc((1 << 20,), torch.float32).fill_(1)
        nvte_ep.release_symm_mem_pool()
    with pytest.raises(ValueError, match="ep_group must be the one that ep_bootstrap got"):
        nvte_ep.symm_mem_alloc((4,), torch.float32, torch.distributed.new_group())


def test_a_buffer_whose_memory_is_gone():
    """Nothing is written there."""
    bootstrap(zero_copy=True)
    data, here = Data(seed=4), buffer()
    tokens, weights = data.leaves()
    received, _, _ = nvte_ep.ep_dispatch(here, tokens, data.idx, weights)
    nvte_ep.release_symm_mem_pool()
    nvte_ep.release_symm_mem_pool()
    with pytest.raises(RuntimeError, match="the symmetric memory of the buffer was given back"):
        torch.autograd.grad(received, tokens, torch.ones(CAPACITY, HIDDEN, device=DEVICE))
    for call in (lambda: nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights),
                 lambda: nvte_ep.ep_combine(here, torch.ones(CAPACITY, HIDDEN, device=DEVICE))):
        with pytest.raises(RuntimeError, match="release_symm_mem_pool took the memory of buffer back: make a new EpBuffer"):
            call()
    assert_close(layer(buffer(), data.tokens, data.idx, data.weights), dense(data.tokens, data.idx, data.weights))


def test_shapes_of_symmetric_memory():
    bootstrap(zero_copy=True)
    assert nvte_ep.symm_mem_alloc((0, 5), torch.float32).shape == (0, 5)
    for arguments, kind, text in [
        ((16, torch.float32), TypeError, "shape must be a sequence of integers, found 16"),
        (((4, 0.5), torch.float32), TypeError, "shape must be a sequence of integers"),
        (((-1, 5), torch.float32), ValueError, "shape must have no negative size"),
        (((5,), "float32"), TypeError, "dtype must be a torch.dtype, found 'float32'"),
    ]:
        with pytest.raises(kind, match=text):
            nvte_ep.symm_mem_alloc(*arguments)


def test_memory_that_is_not_symmetric_is_refused():
    bootstrap(zero_copy=True)
    data = Data(seed=5)
    with pytest.raises(ValueError, match="nvte_ep_ext_window_of: ptr must be in memory of"):
        nvte_ep.ep_dispatch(buffer(), data.tokens, data.idx, data.weights, recv_tokens=torch.empty(CAPACITY, HIDDEN, device=DEVICE))


def test_capacity_of_the_buffer():
    bootstrap(zero_copy=True, recv_capacity_per_rank=TOKENS, drop_on_overflow=True)
    data = Data(seed=6)
    _, _, counts = nvte_ep.ep_dispatch(buffer(), data.tokens, data.idx, data.weights)
    assert counts.shape == (LOCAL,) and counts.sum() <= TOKENS


def test_staged_and_zero_copy_give_the_same_bits():
    data, found = Data(seed=7), []
    for zero_copy in (False, True):
        bootstrap(zero_copy=zero_copy)
        tokens, weights = data.leaves()
        out = layer(buffer(), tokens, data.idx, weights)
        out.square().sum().backward()
        found.append((out.detach(), tokens.grad, weights.grad))
        nvte_ep.ep_finalize()
    assert all(torch.equal(a, b) for a, b in zip(*found))
