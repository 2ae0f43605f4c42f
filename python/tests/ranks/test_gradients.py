"""Gradients against a dense model's, and what else training asks for."""

import threading

import pytest
import torch
import torch.distributed as dist
from layer import CUDA, DEVICE, EXPERTS, HIDDEN, LOCAL, RANK, RANKS, TOKENS, TOP_K, Data, assert_close, bootstrap, buffer, dense, experts, layer
from torch.utils.checkpoint import checkpoint

import nvte_ep


def assert_gradients(tokens, weights, data, terms=2 * TOP_K):
    reference = data.leaves()
    dense(reference[0], data.idx, reference[1]).square().sum().backward()
    assert_close(tokens.grad, reference[0].grad, terms=terms)
    # A sum over the row's elements.
    assert_close(weights.grad, reference[1].grad, terms=HIDDEN)


def test_gradients_are_those_of_a_dense_model():
    bootstrap()
    data = Data(seed=1)
    tokens, weights = data.leaves()
    layer(buffer(), tokens, data.idx, weights).square().sum().backward()
    assert_gradients(tokens, weights, data)


def test_finite_differences():
    """Along a random direction; linear in the tokens, so the difference is exact but for rounding."""
    bootstrap()
    data = Data(seed=2)
    here = buffer()
    tokens, weights = data.leaves()
    direction = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mask = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    (layer(here, tokens, data.idx, weights) * mask).sum().backward()
    with torch.no_grad():
        ahead, behind = (layer(here, data.tokens + step * direction, data.idx, data.weights) for step in (0.5, -0.5))
    wanted = ((ahead - behind).double() * mask).sum()
    found = (tokens.grad.double() * direction).sum()
    assert abs(found - wanted) <= 1e-4 * (tokens.grad * direction).abs().sum()


@pytest.mark.parametrize("used", ["tokens", "weights"])
def test_a_loss_that_uses_one_output_alone(used):
    """The gradient that does not exist is zero, on every rank the same call."""
    bootstrap()
    data = Data(seed=3)
    here = buffer()
    tokens, weights = data.leaves()
    received, received_weights, counts = nvte_ep.ep_dispatch(here, tokens, data.idx, weights)
    total = int(counts.sum())
    (received[:total].sum() if used == "tokens" else received_weights[:total].sum()).backward()
    assert torch.equal(tokens.grad, torch.full_like(tokens, TOP_K if used == "tokens" else 0))
    assert torch.equal(weights.grad, torch.full_like(weights, 0 if used == "tokens" else 1))


def test_second_derivatives_are_refused():
    """They would be zero without a word."""
    bootstrap()
    data, here = Data(seed=3), buffer()
    for use in (lambda out: out, lambda out: nvte_ep.ep_combine(here, out)):
        tokens, weights = data.leaves()
        received, _, counts = nvte_ep.ep_dispatch(here, tokens, data.idx, weights)
        first, = torch.autograd.grad(use(experts(received, counts)).square().sum(), tokens, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (first.square().sum() + tokens.square().sum()).backward()


def test_forward_mode_is_refused():
    """A tangent would be lost."""
    bootstrap()
    data, here = Data(seed=3), buffer()
    received, _, _ = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
    assert not received.requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(received, torch.ones_like(received))
        with pytest.raises(RuntimeError, match="jvp"):
            nvte_ep.ep_combine(here, dual)
        dual = torch.autograd.forward_ad.make_dual(data.tokens, torch.ones_like(data.tokens))
        with pytest.raises(RuntimeError, match="jvp"):
            nvte_ep.ep_dispatch(here, dual, data.idx, data.weights)


def test_a_buffer_made_in_inference_mode():
    bootstrap()
    data = Data(seed=3)
    with torch.inference_mode():
        here = buffer()
        assert layer(here, data.tokens, data.idx, data.weights).is_inference()
    tokens, weights = data.leaves()
    layer(here, tokens, data.idx, weights).square().sum().backward()
    assert_gradients(tokens, weights, data)


def test_gradients_add_up_over_two_backward_passes():
    bootstrap()
    data = Data(seed=3)
    tokens, weights = data.leaves()
    loss = layer(buffer(), tokens, data.idx, weights).square().sum()
    loss.backward(retain_graph=True)
    once = tokens.grad.clone()
    loss.backward()
    assert torch.equal(tokens.grad, 2 * once)


def test_tokens_that_want_no_gradient():
    bootstrap()
    data = Data(seed=4)
    _, weights = data.leaves()
    layer(buffer(), data.tokens, data.idx, weights).square().sum().backward()
    tokens, reference = data.leaves()
    dense(tokens, data.idx, reference).square().sum().backward()
    assert_close(weights.grad, reference.grad, terms=HIDDEN)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_recomputed(reentrant):
    """The recomputed dispatch has the layout of the first."""
    bootstrap()
    data = Data(seed=5)
    here = buffer()
    layouts = []

    def block(tokens, weights):
        received, received_weights, counts = nvte_ep.ep_dispatch(here, tokens, data.idx, weights)
        layouts.append((received[: int(counts.sum())].detach().clone(), counts.tolist()))
        return nvte_ep.ep_combine(here, experts(received, counts), weights=received_weights)

    tokens, weights = data.leaves()
    checkpoint(block, tokens, weights, use_reentrant=reentrant).square().sum().backward()
    assert len(layouts) == 2 and layouts[0][1] == layouts[1][1] and torch.equal(layouts[0][0], layouts[1][0])
    assert_gradients(tokens, weights, data)


def test_microbatches_in_the_order_of_1f1b():
    bootstrap()
    buffers = [buffer() for _ in range(3)]
    batches = [Data(seed=20 + number, counts=[TOKENS - number] * RANKS) for number in range(6)]
    leaves, outs = {}, {}

    def forward(number):
        leaves[number] = batches[number].leaves()
        outs[number] = layer(buffers[number % 3], leaves[number][0], batches[number].idx, leaves[number][1])

    def backward(number):
        outs.pop(number).square().sum().backward()
        assert_gradients(*leaves.pop(number), batches[number])

    for number in range(2):
        forward(number)
    for number in range(2, 6):
        forward(number)
        backward(number - 2)
    for number in range(4, 6):
        backward(number)


def test_a_buffer_used_again_before_its_gradient_is_told():
    bootstrap()
    data, here = Data(seed=6), buffer()
    tokens, weights = data.leaves()
    out = layer(here, tokens, data.idx, weights)
    layer(here, tokens, data.idx.flip(0), weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_microbatches_on_threads():
    """Three threads, each with a buffer, take turns in an order that is everybody's."""
    bootstrap()
    batches = [Data(seed=30 + number) for number in range(3)]
    buffers, order = [buffer() for _ in range(3)], threading.Condition()
    turn, errors = [0], []

    def work(number):
        try:
            if CUDA:
                torch.cuda.set_device(DEVICE)
            for step in range(8):
                data = batches[number]
                tokens, weights = data.leaves()
                for part in ("forward", "backward"):
                    with order:
                        place = (step * 2 + (part == "backward")) * 3 + number
                        assert order.wait_for(lambda: turn[0] == place or errors, timeout=60)
                        if errors:
                            return
                        if part == "forward":
                            out = layer(buffers[number], tokens, data.idx, weights)
                        else:
                            out.square().sum().backward()
                        turn[0] += 1
                        order.notify_all()
                assert_gradients(tokens, weights, data)
        except BaseException as error:
            with order:
                errors.append(error)
                order.notify_all()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_saved_tensors_that_are_moved():
    """Handle memory that a hook takes to the host and back is read where it is then."""
    bootstrap()
    data = Data(seed=7)
    tokens, weights = data.leaves()
    with torch.autograd.graph.save_on_cpu():
        out = layer(buffer(), tokens, data.idx, weights)
    out.square().sum().backward()
    assert_gradients(tokens, weights, data)


class Model(torch.nn.Module):
    """A router and experts of one matrix each, of which each rank has its own."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = torch.nn.Parameter(torch.randn(HIDDEN, EXPERTS, generator=generator).to(DEVICE) / HIDDEN)
        matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator).to(DEVICE) / HIDDEN**0.5
        self.experts = torch.nn.Parameter(matrices[RANK * LOCAL : (RANK + 1) * LOCAL].clone())
        self.buffer = buffer()

    def route(self, tokens):
        probabilities, idx = (tokens @ self.router).softmax(1).topk(TOP_K)
        return probabilities, idx

    def forward(self, tokens):
        probabilities, idx = self.route(tokens)
        received, weights, counts = nvte_ep.ep_dispatch(self.buffer, tokens, idx, probabilities)
        parts, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            parts.append(received[start : start + count] @ self.experts[expert])
            start += count
        parts.append(torch.zeros_like(received[start:]))
        return nvte_ep.ep_combine(self.buffer, torch.cat(parts), weights=weights)


def dense_gradients(batches):
    """Gradients of the same model in one process, over the tokens of all ranks."""
    generator = torch.Generator().manual_seed(0)
    router = (torch.randn(HIDDEN, EXPERTS, generator=generator).to(DEVICE) / HIDDEN).requires_grad_()
    matrices = (torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator).to(DEVICE) / HIDDEN**0.5).requires_grad_()
    for tokens in batches:
        probabilities, idx = (tokens @ router).softmax(1).topk(TOP_K)
        every = torch.einsum("th,ehi->tei", tokens, matrices)
        chosen = every.gather(1, idx.unsqueeze(-1).expand(-1, -1, HIDDEN))
        (chosen * probabilities.unsqueeze(-1)).sum(1).square().mean().backward()
    return router.grad, matrices.grad[RANK * LOCAL : (RANK + 1) * LOCAL]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_data_parallelism_around_it(wrapper):
    """The replicated router's gradient is averaged over the ranks; the experts' is each rank's own."""
    bootstrap()
    model = Model()
    data = Data(seed=8)
    if wrapper == "ddp":
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["experts"])
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model, mesh=init_device_mesh(DEVICE.type, (RANKS,)), ignored_params={model.experts})
    wrapped(data.tokens).square().mean().backward()
    router, matrices = dense_gradients(data.all_tokens)
    found = model.router.grad
    if wrapper == "fsdp":
        found = found.full_tensor()
    assert_close(found, router / RANKS, terms=TOKENS * HIDDEN)
    assert_close(model.experts.grad, matrices, terms=TOKENS * HIDDEN)
