"""Every rank runs these tests at the same time, in the same order: `nvte-ep launch -n 2 -- python -m pytest python/tests/ranks`.

On the CPU the ranks are a gloo group; with NVTE_EP_TEST_DEVICE=cuda an NCCL group, several ranks on one GPU if there are fewer.
"""

import os

import pytest
import torch
import torch.distributed as dist

import nvte_ep

CUDA = os.environ.get("NVTE_EP_TEST_DEVICE") == "cuda"


def pytest_configure():
    torch.set_num_threads(1)
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")


def pytest_unconfigure():
    nvte_ep.ep_finalize()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def without_group():
    """No test leaves a group behind."""
    yield
    nvte_ep.ep_finalize()
    assert not nvte_ep.is_ep_bootstrapped()
