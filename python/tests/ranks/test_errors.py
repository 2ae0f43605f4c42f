"""Mistakes: one Python exception with a text that says what to change, and the next right call works."""

import re

import pytest
import torch
from layer import CAPACITY, CUDA, DEVICE, HIDDEN, LOCAL, RANK, RANKS, TOKENS, TOP_K, Data, bootstrap, buffer, layer

import nvte_ep


class Index:
    """An integer that is no int, as numpy's are."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def refused(kind, text):
    return pytest.raises(kind, match=re.escape(text))


def test_before_bootstrap():
    assert not nvte_ep.is_ep_bootstrapped()
    with refused(nvte_ep.EpError, f"nvte_ep.EpBuffer: there is no EP group on {DEVICE}: call nvte_ep.ep_bootstrap first"):
        nvte_ep.EpBuffer(TOP_K, TOKENS, HIDDEN, LOCAL, device=DEVICE)
    bootstrap()
    here, data = buffer(), Data()
    nvte_ep.ep_finalize()
    nvte_ep.ep_finalize()
    with refused(RuntimeError, "nvte_ep.ep_dispatch: there is no EP group"):
        layer(here, data.tokens, data.idx, data.weights)


def test_bootstrap_twice():
    bootstrap()
    with refused(RuntimeError, f"nvte_ep.ep_bootstrap: there is an EP group on {DEVICE} already: call nvte_ep.ep_finalize"):
        bootstrap()
    nvte_ep.ep_finalize()
    bootstrap()


@pytest.mark.parametrize("changes, text", [
    (dict(num_topk=0), "num_topk must be 1 or more, and below 2**31, found 0"),
    (dict(max_num_sms=-1), "max_num_sms must be 0 or more"),
    # A C int would be 0, which means eager mode.
    (dict(recv_capacity_per_rank=1 << 32), "and below 2**31, found 4294967296"),
    (dict(num_experts=RANKS * 4 + 1), "group_config.num_experts"),
    (dict(max_tokens_per_rank=0), "group_config.max_tokens_per_rank"),
    (dict(recv_capacity_per_rank=0), "recv_capacity_per_rank (None: eager mode) must be 1 or more, and below 2**31, found 0"),
    (dict(recv_capacity_per_rank=None, zero_copy=True), "zero_copy needs recv_capacity_per_rank"),
    (dict(recv_capacity_per_rank=None, drop_on_overflow=True), "drop_on_overflow needs recv_capacity_per_rank"),
])
def test_groups(changes, text):
    with refused(ValueError, text):
        bootstrap(**changes)
    assert not nvte_ep.is_ep_bootstrapped()
    bootstrap()
    assert nvte_ep.is_ep_bootstrapped() and nvte_ep.is_ep_bootstrapped(DEVICE)


def test_types_of_a_group():
    for changes, text in [
        (dict(hidden_dim=512.0), "hidden_dim must be an integer, found 512.0"),
        (dict(num_topk="2"), "num_topk must be an integer, found '2'"),
        (dict(max_token_dtype="bfloat16"), "max_token_dtype must be a torch dtype of tokens, found bfloat16"),
    ]:
        with refused(TypeError, text):
            bootstrap(**changes)
    with refused(TypeError, "ep_group must be a torch.distributed.ProcessGroup or None, found str"):
        nvte_ep.ep_bootstrap("world", 8, TOKENS, HIDDEN, TOP_K)
    bootstrap(num_topk=Index(TOP_K), recv_capacity_per_rank=Index(CAPACITY))


def test_ranks_that_differ_are_all_told():
    with refused(nvte_ep.EpError, "max_tokens_per_rank"):
        bootstrap(max_tokens_per_rank=TOKENS + 4 * RANK)
    bootstrap()


@pytest.mark.skipif(CUDA, reason="the host runtime's variable")
def test_a_runtime_that_does_not_fit_is_told(monkeypatch):
    monkeypatch.setenv("NVTE_EP_RUNTIME", "cuda")
    with refused(nvte_ep.EpError, "which takes NVTE_EP_RUNTIME=host, found cuda: unset the variable"):
        bootstrap()


def test_buffers():
    bootstrap()
    for changes, kind, text in [
        (dict(alignment=3), ValueError, "nvte_ep_handle_mem_size: layer_cfg.dispatch_output_per_expert_alignment"),
        (dict(top_k=0), ValueError, "nvte_ep_handle_mem_size: layer_cfg.top_k"),
        (dict(max_tokens_per_rank=TOKENS + 1), ValueError, f"max_tokens_per_rank must be 1 to {TOKENS}"),
        (dict(num_local_experts=LOCAL + 1), ValueError, f"num_local_experts must be {LOCAL}"),
        (dict(recv_capacity_per_rank=CAPACITY - 1), ValueError, f"recv_capacity_per_rank must be at least {CAPACITY}"),
        (dict(payload_dtype=torch.float64), NotImplementedError, "payload_dtype must be torch.bfloat16"),
        (dict(top_k="2"), TypeError, "top_k must be an integer, found '2'"),
        (dict(hidden_dim=512.0), TypeError, "hidden_dim must be an integer, found 512.0"),
        (dict(alignment=-1), ValueError, "alignment must be 0 or more"),
        (dict(dispatch_fwd_quant_recipe="fp4"), NotImplementedError, 'dispatch_fwd_quant_recipe must be None or "mxfp8"'),
    ]:
        with refused(kind, text):
            buffer(**changes)
    nvte_ep.ep_finalize()
    bootstrap(recv_capacity_per_rank=None)
    with refused(ValueError, "recv_capacity_per_rank must be None, since the group is eager"):
        buffer(recv_capacity_per_rank=CAPACITY)


def test_calls():
    """All ranks make the same mistakes, so none waits; then the same buffers do a right step."""
    bootstrap()
    here, data = buffer(), Data()
    tokens, idx, weights = data.tokens, data.idx, data.weights
    for arguments, kind, text in [
        ((tokens.bfloat16(), idx, weights), TypeError, "tokens must be torch.float32, payload_dtype of the buffer, found torch.bfloat16"),
        ((tokens, idx, weights.double()), TypeError, "topk_weights must be torch.float32, found torch.float64"),
        ((tokens, idx.float(), weights), ValueError, "nvte_ep_prepare: topk_idx"),
        ((tokens, idx.short(), weights), ValueError, "nvte_ep_prepare: topk_idx"),
        ((tokens[:, : HIDDEN // 2], idx, weights), ValueError, f"tokens must be [rows, {HIDDEN}]"),
        ((tokens[:-1], idx, weights), ValueError, "nvte_ep_dispatch: tokens must have as many rows as the prepared topk_idx"),
        ((tokens, idx[:, :1], weights), ValueError, f"topk_idx must be [tokens, {TOP_K}]"),
        ((tokens, idx, weights[:, :1]), ValueError, "nvte_ep_dispatch: topk_weights"),
        ((tokens, idx.bool(), weights), TypeError, "nvte_ep.ep_prepare: topk_idx must be of a dtype that the library has, found torch.bool"),
        ((tokens.tolist(), idx, weights), TypeError, "nvte_ep.ep_dispatch: tokens must be a torch.Tensor, found list"),
        ((None, idx, weights), TypeError, "tokens must be a torch.Tensor, found NoneType"),
        ((tokens, None, weights), TypeError, "topk_idx must be a torch.Tensor, found NoneType"),
        ((tokens.to_sparse(), idx, weights), ValueError, "tokens must be a dense tensor, found torch.sparse_coo: call .to_dense()"),
        (((tokens,), idx, weights), TypeError, "tokens must be a pair (data, scales), found a tuple of 1"),
        (((tokens, None), idx, weights), TypeError, "scales must be a torch.Tensor, found NoneType"),
        ((torch.zeros(TOKENS + 1, HIDDEN, device=DEVICE), idx.new_zeros(TOKENS + 1, TOP_K), weights), ValueError, "nvte_ep_prepare: topk_idx"),
    ]:
        with refused(kind, text):
            nvte_ep.ep_dispatch(here, *arguments)
    with refused(TypeError, "nvte_ep.ep_dispatch: buffer must be an EpBuffer, found Tensor"):
        nvte_ep.ep_dispatch(tokens, here, idx, weights)
    with refused(TypeError, "recv_tokens must be a pair (data, scales), found Tensor"):
        nvte_ep.ep_dispatch(here, nvte_ep.mxfp8_quantize(tokens), idx, weights, recv_tokens=torch.empty(CAPACITY, HIDDEN, device=DEVICE))
    with refused(TypeError, "recv_tokens must be a torch.Tensor, found tuple"):
        nvte_ep.ep_dispatch(here, tokens, idx, weights, recv_tokens=nvte_ep.mxfp8_quantize(torch.zeros(CAPACITY, HIDDEN, device=DEVICE)))
    with refused(TypeError, "recv_topk_weights must be of a dtype that the library has, found torch.float64"):
        nvte_ep.ep_dispatch(here, tokens, idx, weights, recv_topk_weights=torch.empty(CAPACITY, dtype=torch.float64, device=DEVICE))
    with refused(ValueError, "recv_tokens must not require a gradient, since it is written: give .detach() of it"):
        nvte_ep.ep_dispatch(here, tokens, idx, weights, recv_tokens=torch.empty(CAPACITY, HIDDEN, device=DEVICE, requires_grad=True))
    with refused(ValueError, "recv_topk_weights must be None without topk_weights"):
        nvte_ep.ep_dispatch(here, tokens, idx, None, recv_topk_weights=torch.empty(CAPACITY, device=DEVICE))
    with refused(ValueError, "recv_tokens must be contiguous, found strides"):
        nvte_ep.ep_dispatch(here, tokens, idx, weights, recv_tokens=torch.empty(HIDDEN, CAPACITY, device=DEVICE).T)
    with refused(ValueError, "nvte_ep_dispatch: recv_tokens"):
        nvte_ep.ep_dispatch(here, tokens, idx, weights, recv_tokens=torch.empty(CAPACITY - 1, HIDDEN, device=DEVICE))
    layer(here, tokens, idx, weights)
    out = torch.zeros(CAPACITY, HIDDEN, device=DEVICE)
    with refused(TypeError, "expert_out must be torch.float32"):
        nvte_ep.ep_combine(here, out.bfloat16())
    with refused(ValueError, "nvte_ep_combine: expert_out"):
        nvte_ep.ep_combine(here, out[:-1])
    with refused(ValueError, "nvte_ep_combine: result"):
        nvte_ep.ep_combine(here, out, num_local_tokens=TOKENS - 1)
    with refused(ValueError, f"weights must be [{CAPACITY}], one for each row of expert_out, found [{CAPACITY}, 1]"):
        nvte_ep.ep_combine(here, out, weights=torch.ones(CAPACITY, 1, device=DEVICE))
    with refused(ValueError, "num_local_tokens must be 0 or more"):
        nvte_ep.ep_combine(here, out, num_local_tokens=-1)
    with refused(TypeError, "num_local_tokens must be an integer, found 32.0"):
        nvte_ep.ep_combine(here, out, num_local_tokens=32.0)
    layer(here, tokens, idx, weights)


def test_a_buffer_of_a_group_that_has_ended():
    bootstrap()
    here, data = buffer(), Data()
    nvte_ep.ep_finalize()
    bootstrap()
    for call in (lambda: layer(here, data.tokens, data.idx, data.weights), lambda: nvte_ep.ep_combine(here, data.tokens)):
        with refused(RuntimeError, "buffer was made for an EP group that has ended: make a new EpBuffer"):
            call()


def test_combine_without_a_routing():
    bootstrap()
    with refused(RuntimeError, "was not prepared"):
        nvte_ep.ep_combine(buffer(), torch.zeros(CAPACITY, HIDDEN, device=DEVICE))


def test_eager_mode_takes_no_buffers():
    bootstrap(recv_capacity_per_rank=None)
    data = Data()
    with refused(ValueError, "recv_tokens and recv_topk_weights must be None in eager mode"):
        nvte_ep.ep_dispatch(buffer(), data.tokens, data.idx, data.weights, recv_tokens=torch.empty(CAPACITY, HIDDEN, device=DEVICE))


def test_tensors_of_another_device():
    bootstrap()
    here, data = buffer(), Data()
    other = torch.device("cpu" if CUDA else "meta")
    for call, name in [
        (lambda: nvte_ep.ep_prepare(here, data.idx.to(other)), "topk_idx"),
        (lambda: nvte_ep.ep_dispatch(here, data.tokens.to(other), data.idx, data.weights), "tokens"),
        (lambda: nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights.to(other)), "topk_weights"),
        (lambda: nvte_ep.ep_combine(here, torch.zeros(CAPACITY, HIDDEN, device=other)), "expert_out"),
    ]:
        with refused(ValueError, f"{name} must be on {DEVICE}, the buffer's device, found {other}"):
            call()
    into = torch.empty(CAPACITY, HIDDEN, device=other)
    with refused(ValueError, f"recv_tokens must be on {DEVICE}"):
        nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights, recv_tokens=into)
    layer(here, data.tokens, data.idx, data.weights)
