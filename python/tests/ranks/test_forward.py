"""What prepare, dispatch and combine write, exactly."""

import pytest
import torch
from layer import CAPACITY, DEVICE, HIDDEN, LOCAL, RANK, RANKS, TOKENS, TOP_K, Data, assert_close, bootstrap, buffer, dense, experts, layer

import nvte_ep


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indices", [torch.int64, torch.int32])
def test_rows_weights_and_counts_are_exact(dtype, indices):
    bootstrap()
    for alignment in (0, 16):
        data = Data(dtype=dtype, indices=indices)
        rows, weights, counts = data.received(alignment)
        here = buffer(payload_dtype=dtype, alignment=alignment)
        found = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
        assert found[0].shape == (CAPACITY, HIDDEN) and found[1].shape == (CAPACITY,)
        assert found[2].tolist() == counts and found[2] is here.tokens_per_expert
        assert here.total_recv_tokens.tolist() == [sum(counts)]
        assert torch.equal(found[0][: len(rows)], rows)
        assert torch.equal(found[1][: len(weights)], weights)


def test_prepare_alone_counts():
    bootstrap()
    data = Data(seed=3)
    assert nvte_ep.ep_prepare(buffer(), data.idx).tolist() == data.received()[2]


def test_identity_round_trip():
    """Each token comes back once for each of its experts."""
    bootstrap()
    data = Data(seed=1)
    here = buffer()
    received, weights, _ = nvte_ep.ep_dispatch(here, data.tokens, data.idx, None)
    assert weights is None
    assert torch.equal(nvte_ep.ep_combine(here, received), data.tokens * TOP_K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_is_that_of_a_dense_model(dtype):
    bootstrap()
    data = Data(seed=2, dtype=dtype)
    out = layer(buffer(payload_dtype=dtype), data.tokens, data.idx, data.weights)
    assert out.dtype == dtype
    assert_close(out, dense(data.tokens.float(), data.idx, data.weights), dtype)


@pytest.mark.parametrize("counts", [[TOKENS, 0, 5, 1], [0, TOKENS, 0, 0], [0, 0, 0, 0]])
def test_uneven_and_no_tokens(counts):
    bootstrap()
    data = Data(seed=4, counts=counts[:RANKS])
    here = buffer()
    tokens, weights = data.leaves()
    out = layer(here, tokens, data.idx, weights)
    assert out.shape == (counts[RANK], HIDDEN)
    assert_close(out, dense(data.tokens, data.idx, data.weights))
    out.sum().backward()
    assert tokens.grad.shape == tokens.shape and weights.grad.shape == weights.shape
    assert nvte_ep.ep_combine(here, torch.zeros(CAPACITY, HIDDEN, device=DEVICE), num_local_tokens=counts[RANK]).shape == out.shape


def test_masked_and_unknown_experts_route_nowhere():
    bootstrap()
    data = Data(seed=5)
    for idx in data.all_idx:
        idx[::2, 0], idx[1::2, 1] = -1, 1000
    here = buffer()
    received, _, counts = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
    rows, _, wanted = data.received()
    assert counts.tolist() == wanted and torch.equal(received[: len(rows)], rows)
    assert torch.equal(nvte_ep.ep_combine(here, received), data.tokens)


def test_views_are_read_by_their_strides():
    """Transposed, strided and sliced inputs are what they look like."""
    bootstrap()
    data = Data(seed=6)
    here = buffer()
    wide = torch.empty(HIDDEN, TOKENS, device=DEVICE).T
    wide.copy_(data.tokens)
    idx = torch.empty(TOP_K, TOKENS, dtype=torch.int64, device=DEVICE).T
    idx.copy_(data.idx)
    weights = torch.empty(TOKENS, 2 * TOP_K, device=DEVICE)[:, ::2]
    weights.copy_(data.weights)
    assert not (wide.is_contiguous() or idx.is_contiguous() or weights.is_contiguous())
    received, received_weights, counts = nvte_ep.ep_dispatch(here, wide, idx, weights)
    rows, row_weights, _ = data.received()
    assert torch.equal(received[: len(rows)], rows) and torch.equal(received_weights[: len(rows)], row_weights)
    turned = torch.empty(HIDDEN, CAPACITY, device=DEVICE).T
    turned.copy_(experts(received, counts))
    assert torch.equal(nvte_ep.ep_combine(here, turned), nvte_ep.ep_combine(here, experts(received, counts)))


def test_the_same_bits_over_100_iterations():
    bootstrap()
    data = Data(seed=7)
    here = buffer()
    first = None
    for _ in range(100):
        tokens, weights = data.leaves()
        out = layer(here, tokens, data.idx, weights)
        out.square().sum().backward()
        found = out.detach(), tokens.grad, weights.grad
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found))


def test_caller_supplied_buffers():
    bootstrap()
    data = Data(seed=8)
    here = buffer()
    into, into_weights, grad = (torch.full(shape, 7.0, device=DEVICE) for shape in ((CAPACITY, HIDDEN), (CAPACITY,), (CAPACITY, HIDDEN)))
    tokens, weights = data.leaves()
    received, received_weights, counts = nvte_ep.ep_dispatch(here, tokens, data.idx, weights, recv_tokens=into, recv_topk_weights=into_weights)
    assert received.data_ptr() == into.data_ptr() and received_weights.data_ptr() == into_weights.data_ptr()
    out = nvte_ep.ep_combine(here, experts(received, counts), weights=received_weights, grad_out=grad)
    assert_close(out, dense(data.tokens, data.idx, data.weights))
    out.sum().backward()
    total = sum(data.received()[2])
    assert torch.equal(grad[:total], torch.ones(total, HIDDEN, device=DEVICE))
    reference = data.leaves()
    dense(reference[0], data.idx, reference[1]).sum().backward()
    assert_close(tokens.grad, reference[0].grad)


def test_dropping():
    bootstrap(recv_capacity_per_rank=TOKENS, drop_on_overflow=True)
    data = Data(seed=9)
    for idx in data.all_idx:
        idx[:, 0], idx[:, 1] = 0, LOCAL - 1 if LOCAL > 1 else -1
    here = buffer()
    _, _, counts = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
    assert counts.sum() <= TOKENS
    assert here.total_recv_tokens.item() == (RANKS * TOKENS * (2 if LOCAL > 1 else 1) if RANK == 0 else 0)


def test_eager_mode_sizes_each_step():
    bootstrap(recv_capacity_per_rank=None)
    here = buffer()
    assert here.eager and here.recv_capacity_per_rank is None
    for counts in ([TOKENS, 0, 5, 1], [3, 9, TOKENS, 0], [0, 0, 0, 0]):
        data = Data(seed=10, counts=counts[:RANKS])
        tokens, weights = data.leaves()
        received, received_weights, found = nvte_ep.ep_dispatch(here, tokens, data.idx, weights)
        rows, row_weights, wanted = data.received()
        assert found.tolist() == wanted and received.shape == (sum(wanted), HIDDEN) and received_weights.shape == (sum(wanted),)
        assert torch.equal(received, rows) and torch.equal(received_weights, row_weights)
        out = nvte_ep.ep_combine(here, experts(received, found), weights=received_weights)
        assert_close(out, dense(data.tokens, data.idx, data.weights))
        out.square().sum().backward()
        reference = data.leaves()
        dense(reference[0], data.idx, reference[1]).square().sum().backward()
        assert_close(tokens.grad, reference[0].grad, terms=2 * TOP_K)
