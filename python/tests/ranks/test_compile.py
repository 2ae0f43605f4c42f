"""torch.compile and CUDA graphs."""

import contextlib
import os
import tempfile

import pytest
import torch
import torch._inductor.config
from layer import CAPACITY, CUDA, DEVICE, HIDDEN, RANKS, TOKENS, Data, assert_close, bootstrap, buffer, dense, experts, layer

import nvte_ep


@pytest.fixture
def default_backend():
    """Inductor. On the CPU it compiles C++, here within a second or two: without the headers made ready and the tries of vector
    instructions, which take a minute, and into a folder of this run, so that nothing is taken over from an earlier one."""
    with contextlib.ExitStack() as stack:
        if not CUDA:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("TORCHINDUCTOR_CACHE_DIR", folder)
            stack.enter_context(torch._inductor.config.patch(
                {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}))
        yield
    torch.compiler.reset()


def test_fullgraph(default_backend):
    bootstrap()
    here = buffer()
    compiled = torch.compile(lambda tokens, idx, weights: layer(here, tokens, idx, weights).square(), fullgraph=True)
    for seed in range(3):
        data = Data(seed=seed)
        tokens, weights = data.leaves()
        out = compiled(tokens, data.idx, weights)
        out.sum().backward()
        plain_tokens, plain_weights = data.leaves()
        plain = layer(here, plain_tokens, data.idx, plain_weights).square()
        plain.sum().backward()
        for found, wanted in ((out, plain), (tokens.grad, plain_tokens.grad), (weights.grad, plain_weights.grad)):
            assert_close(found, wanted, terms=HIDDEN)


def test_other_numbers_of_tokens():
    """Compiled once more for any number, and without gradients."""
    bootstrap()
    here, compiled_for = buffer(), []

    def backend(graph, inputs):
        compiled_for.append(inputs)
        return graph.forward

    compiled = torch.compile(lambda tokens, idx, weights: layer(here, tokens, idx, weights), fullgraph=True, backend=backend)
    for count in (TOKENS, TOKENS // 2, 8, 4):
        data = Data(seed=count, counts=[count] * RANKS)
        with torch.no_grad():
            assert_close(compiled(data.tokens, data.idx, data.weights), dense(data.tokens, data.idx, data.weights))
        assert here.num_local_tokens == count
    assert len(compiled_for) == 2
    torch.compiler.reset()


def test_a_compiled_zero_copy_group_is_refused():
    """The compiler works on copies, which peers could not reach."""
    bootstrap(zero_copy=True)
    here, data = buffer(), Data(seed=2)
    compiled = torch.compile(lambda tokens, idx, weights: layer(here, tokens, idx, weights), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="nvte_ep_ext_window_of: ptr must be in memory of"):
        compiled(data.tokens.clone().requires_grad_(), data.idx, data.weights)
    torch.compiler.reset()


def test_operators_are_what_their_schemas_say():
    bootstrap()
    here, data = buffer(), Data(seed=3)
    # The others leave notes of their own in handle memory (which call was the last), which nobody else reads: no change to declare.
    names = ("test_faketensor",)
    prepare = here.handle_mem, data.idx, here.tokens_per_expert, here.total_recv_tokens, here.top_k, here.alignment
    torch.library.opcheck(torch.ops.nvte_ep.prepare.default, prepare, test_utils=("test_schema", "test_faketensor"))
    nvte_ep.ep_prepare(here, data.idx)
    received, weights = torch.empty(CAPACITY, HIDDEN, device=DEVICE), torch.empty(CAPACITY, device=DEVICE)
    dispatch = here.handle_mem, data.tokens, None, data.idx, data.weights, received, None, weights
    torch.library.opcheck(torch.ops.nvte_ep.dispatch.default, dispatch, test_utils=names)
    torch.ops.nvte_ep.dispatch(*dispatch)
    combine = here.handle_mem, experts(received, here.tokens_per_expert), torch.empty(TOKENS, HIDDEN, device=DEVICE)
    torch.library.opcheck(torch.ops.nvte_ep.combine.default, combine, test_utils=names)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("zero_copy", [False, True])
def test_cuda_graph_with_other_routings(zero_copy):
    bootstrap(zero_copy=zero_copy)
    here = buffer()
    first = Data(seed=4)
    tokens, weights = first.leaves()
    idx = first.idx.clone()
    into = None if zero_copy else torch.zeros(CAPACITY, HIDDEN, device=DEVICE)

    def step():
        received, received_weights, _ = nvte_ep.ep_dispatch(here, tokens, idx, weights, recv_tokens=into)
        # Behind the slabs anything may stand, whose product with a gradient of zero need not be zero.
        inside = torch.arange(CAPACITY, device=DEVICE) < here.total_recv_tokens
        out = nvte_ep.ep_combine(here, experts(received, here.tokens_per_expert), weights=torch.where(inside, received_weights, 0))
        return out, *torch.autograd.grad(out.square().sum(), (tokens, weights))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = step()
    for seed in (5, 6, 4):
        data = Data(seed=seed)
        with torch.no_grad():
            tokens.copy_(data.tokens), weights.copy_(data.weights)
        idx.copy_(data.idx)
        graph.replay()
        torch.cuda.synchronize()
        reference = data.leaves()
        wanted = dense(reference[0], data.idx, reference[1])
        gradients = torch.autograd.grad(wanted.square().sum(), reference)
        for found, exact in zip(outs, (wanted, *gradients)):
            assert_close(found, exact, terms=HIDDEN)
        assert here.tokens_per_expert.tolist() == data.received()[2]


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
def test_allocation_of_symmetric_memory_is_refused_during_capture():
    bootstrap(zero_copy=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="symmetric memory cannot be allocated while a CUDA graph is captured"):
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            nvte_ep.symm_mem_alloc((4,), torch.float32)


@pytest.mark.skipif(not CUDA, reason="torch's allocator for GPUs")
def test_expandable_segments():
    """Whether this run has them says its environment; then tensors lie in segments that grew piece by piece."""
    wanted = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    bootstrap()
    kept = [torch.empty(16 << 20, device=DEVICE) for _ in range(4)]
    data = Data(seed=7)
    out = layer(buffer(), data.tokens, data.idx, data.weights)
    assert_close(out, dense(data.tokens, data.idx, data.weights))
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()) == wanted
    del kept
