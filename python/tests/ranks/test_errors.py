"""Mistakes: one Python exception with a text that says what to change, and the next right call works."""

import re

import pytest
import torch
from layer import CAPACITY, CUDA, DEVICE, HIDDEN, LOCAL, RANKS, TOKENS, TOP_K, Data, bootstrap, buffer, layer

import nvte_ep


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
    with refused(RuntimeError, "nvte_ep.ep_prepare: there is no EP group"):
        layer(here, data.tokens, data.idx, data.weights)


def test_bootstrap_twice():
    bootstrap()
    with refused(RuntimeError, f"nvte_ep.ep_bootstrap: there is an EP group on {DEVICE} already: call nvte_ep.ep_finalize"):
        bootstrap()
    nvte_ep.ep_finalize()
    bootstrap()


@pytest.mark.parametrize("changes, text", [
    (dict(num_topk=0), "num_topk must be 1 or more, found 0"),
    (dict(num_experts=RANKS * 4 + 1), "group_config.num_experts"),
    (dict(max_tokens_per_rank=0), "group_config.max_tokens_per_rank"),
    (dict(recv_capacity_per_rank=0), "recv_capacity_per_rank must be 1 or more, or None for eager mode, found 0"),
    (dict(recv_capacity_per_rank=None, zero_copy=True), "zero_copy needs recv_capacity_per_rank"),
    (dict(recv_capacity_per_rank=None, drop_on_overflow=True), "drop_on_overflow needs recv_capacity_per_rank"),
])
def test_groups(changes, text):
    with refused(ValueError, text):
        bootstrap(**changes)
    assert not nvte_ep.is_ep_bootstrapped()
    bootstrap()
    assert nvte_ep.is_ep_bootstrapped() and nvte_ep.is_ep_bootstrapped(DEVICE)


def test_buffers():
    bootstrap()
    for changes, kind, text in [
        (dict(alignment=3), ValueError, "nvte_ep_handle_mem_size: layer_cfg.dispatch_output_per_expert_alignment"),
        (dict(top_k=0), ValueError, "nvte_ep_handle_mem_size: layer_cfg.top_k"),
        (dict(max_tokens_per_rank=TOKENS + 1), ValueError, f"max_tokens_per_rank must be 1 to {TOKENS}"),
        (dict(num_local_experts=LOCAL + 1), ValueError, f"num_local_experts must be {LOCAL}"),
        (dict(recv_capacity_per_rank=CAPACITY - 1), ValueError, f"recv_capacity_per_rank must be at least {CAPACITY}"),
        (dict(payload_dtype=torch.float64), NotImplementedError, "payload_dtype must be torch.bfloat16"),
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
        ((torch.zeros(TOKENS + 1, HIDDEN, device=DEVICE), idx.new_zeros(TOKENS + 1, TOP_K), weights), ValueError, "nvte_ep_prepare: topk_idx"),
    ]:
        with refused(kind, text):
            nvte_ep.ep_dispatch(here, *arguments)
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
    layer(here, tokens, idx, weights)


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
