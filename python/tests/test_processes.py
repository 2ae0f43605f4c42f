"""How processes end, and what each needs of its own: each case is programs of two ranks, started by `nvte-ep launch`."""

import os
import pathlib
import subprocess
import sys

import pytest

import nvte_ep

COMMAND = pathlib.Path(nvte_ep.__file__).parent / "bin" / "nvte-ep"
CUDA = os.environ.get("NVTE_EP_TEST_DEVICE") == "cuda"
HEAD = f"""
import sys, threading, torch, torch.distributed as dist, nvte_ep
cuda = {CUDA}
device = torch.device("cuda", 0) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
rank = dist.get_rank()
nvte_ep.ep_bootstrap(None, num_experts=8, max_tokens_per_rank=32, hidden_dim=512, num_topk=2, recv_capacity_per_rank=188,
                     max_token_dtype=torch.float32)
buffer = nvte_ep.EpBuffer(2, 32, 512, 4, payload_dtype=torch.float32)
tokens = torch.ones(32, 512, device=device)
idx = (torch.arange(64, device=device) % 8).view(32, 2)
def step():
    received, weights, counts = nvte_ep.ep_dispatch(buffer, tokens, idx, torch.ones(32, 2, device=device))
    assert torch.equal(nvte_ep.ep_combine(buffer, received), 2 * tokens)
step()
"""


def run(body, ranks=2, timeout=120):
    preload = ["env", f"LD_PRELOAD={os.environ['NVTE_EP_TEST_NCCL']}"] if os.environ.get("NVTE_EP_TEST_NCCL") else []
    command = [COMMAND, "launch", "-n", str(ranks), "--runtime", "cuda" if CUDA else "host", "--timeout", str(timeout), "--", *preload,
               sys.executable, "-c", HEAD + body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + 30)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("body", [
    "pass",
    "dist.destroy_process_group()",
    "nvte_ep.ep_finalize(); nvte_ep.ep_bootstrap(None, 8, 32, 512, 2, 188)",
    "threading.Thread(target=step).start(); sys.exit(0)",
], ids=["never", "process group first", "a second group", "a thread, and sys.exit"])
def test_every_way_to_end_is_fine(body):
    code, output = run(body)
    assert code == 0 and "nvte_ep: at exit" not in output, output


def test_an_exception_ends_the_ranks():
    code, output = run("raise KeyError('the training loop failed')")
    assert code == 1 and "KeyError: 'the training loop failed'" in output, output


def test_one_rank_alone_fails():
    """Its peer is told who is missing, and does not wait for long."""
    code, output = run("if rank == 0: raise KeyError('rank 0')\nstep()")
    assert code != 0 and "KeyError: 'rank 0'" in output, output


def test_ranks_that_differ_are_all_told():
    code, output = run("""
nvte_ep.ep_finalize()
try:
    nvte_ep.ep_bootstrap(None, 8, 32 + 4 * rank, 512, 2, 188)
except nvte_ep.EpError as error:
    assert "max_tokens_per_rank" in str(error), error
else:
    sys.exit("not refused")
nvte_ep.ep_bootstrap(None, 8, 32, 512, 2, 188)
""")
    assert code == 0, output


def test_one_rank_is_a_group():
    code, output = run("", ranks=1)
    assert code != 0 and "num_local_experts must be 8" in output, output


@pytest.mark.skipif(CUDA, reason="the host runtime's variable")
def test_a_runtime_that_does_not_fit_is_told():
    os.environ["NVTE_EP_RUNTIME"] = "cuda"
    try:
        command = [COMMAND, "launch", "-n", "1", "--", "env", "NVTE_EP_RUNTIME=cuda", sys.executable, "-c", HEAD]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    finally:
        del os.environ["NVTE_EP_RUNTIME"]
    assert "which takes NVTE_EP_RUNTIME=host, found cuda" in done.stdout + done.stderr, done
