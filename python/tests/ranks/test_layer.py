"""`MoELayer` as a module of torch; that it computes what a dense layer does is `ep_moe.py --check`."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from layer import CUDA, DEVICE, EXPERTS, HIDDEN, LOCAL, RANK, RANKS, TOKENS, TOP_K, Data, bootstrap, buffer

import nvte_ep


def moe():
    torch.manual_seed(0)
    return nvte_ep.MoELayer(HIDDEN, 64, TOP_K, shared_ffn_dim=32, buffers=2, device=DEVICE)


def test_copies_and_files():
    """A copy has buffers of its own; what is loaded, too."""
    bootstrap()
    data, layer = Data(seed=1), moe()
    wanted = layer(data.tokens)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = moe()
    other.load_state_dict(layer.state_dict())
    for same in (copy.deepcopy(layer), torch.load(file, weights_only=False), other):
        assert torch.equal(same(data.tokens, microbatch=1), wanted)
        assert same.buffers[0].handle_mem.data_ptr() != layer.buffers[0].handle_mem.data_ptr()
        assert same.buffers[0].__dict__.keys() == layer.buffers[0].__dict__.keys()
    here = buffer(alignment=16, recv_capacity_per_rank=4096, payload_dtype=torch.float16, dispatch_fwd_quant_recipe="mxfp8")
    there = copy.deepcopy(here)
    for name in ("alignment", "recv_capacity_per_rank", "payload_dtype", "dispatch_fwd_quant_recipe", "combine_bwd_quant_recipe", "device"):
        assert getattr(there, name) == getattr(here, name)


def test_balance_moves_the_bias_against_the_load():
    bootstrap()
    layer = moe()
    with torch.no_grad():
        layer.router.bias[0] = 10
    layer(Data(seed=2).tokens)
    share = layer.balance(rate=0.5)
    assert share.argmax() == 0 and share[0] == 1 / TOP_K
    assert layer.router.bias[0] == 9.5 and layer.load.sum() == 0


@pytest.mark.skipif(CUDA, reason="reads the counts on the host, where PyTorch's grouped product is not used")
def test_compiled():
    bootstrap()
    data, layer = Data(seed=3), moe()
    wanted = layer(data.tokens)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(data.tokens), wanted)
    torch.compiler.reset()


@pytest.mark.parametrize("ranks", sorted({1, RANKS // 2}))
def test_groups_of_a_part_of_the_ranks(ranks):
    """Expert parallelism within, data parallelism across: rank 0 and 1, rank 2 and 3; and every rank alone."""
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, RANKS, ranks)]
    mine, local = groups[RANK // ranks], EXPERTS // ranks
    nvte_ep.ep_bootstrap(mine, EXPERTS, TOKENS, HIDDEN, TOP_K, recv_capacity_per_rank=ranks * TOKENS * TOP_K, max_token_dtype=torch.float32)
    with pytest.raises(ValueError, match=f"num_local_experts must be {local}"):
        nvte_ep.EpBuffer(TOP_K, TOKENS, HIDDEN, LOCAL, payload_dtype=torch.float32)
    here, data = nvte_ep.EpBuffer(TOP_K, TOKENS, HIDDEN, local, payload_dtype=torch.float32), Data(seed=4)
    received, _, counts = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
    first = RANK // ranks * ranks
    some, experts = torch.cat(data.all_idx[first : first + ranks]), range(RANK % ranks * local, (RANK % ranks + 1) * local)
    assert counts.tolist() == [int((some == expert).sum()) for expert in experts]
    assert torch.equal(nvte_ep.ep_combine(here, received), TOP_K * data.tokens)


@pytest.mark.parametrize("eager", [False, True])
def test_a_default_device_changes_nothing(eager):
    with torch.device("meta"):
        bootstrap(**(dict(recv_capacity_per_rank=None) if eager else {}))
        here, data = buffer(device=DEVICE), Data(seed=5)
        received, _, _ = nvte_ep.ep_dispatch(here, data.tokens, data.idx, data.weights)
        assert torch.equal(nvte_ep.ep_combine(here, received), TOP_K * data.tokens)


def test_a_group_of_gloo_alone_is_one_of_the_cpu(monkeypatch):
    """Also on a machine that has GPUs: a layer is tested there as anywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gloo = dist.new_group(backend="gloo")
    assert {device.type for device in gloo._device_types} == {"cpu", "cuda"}
    assert nvte_ep._group._device_of(gloo) == torch.device("cpu")
