"""How processes end: each case is programs of two ranks, started by `nvte-ep launch`."""

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


# A child, which has the group's memory but not its threads, leaves the group to its parent; a call there is refused. It does not run
# to the interpreter's end, where the process group of gloo waits for threads that no child has.
FORKED = """
import os
child = os.fork()
if child == 0:
    try:
        step()
    except nvte_ep.EpError as error:
        nvte_ep._group._at_exit()
        os._exit(0 if "forked" in str(error) and nvte_ep.is_ep_bootstrapped() else 5)
    finally:
        os._exit(6)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
step()
"""

TOO_LATE = """
dist.destroy_process_group()
try:
    nvte_ep.ep_finalize()
except nvte_ep.EpError as error:
    assert "call it before destroy_process_group" in str(error), error
else:
    sys.exit("not refused")
"""


def run(body, ranks=2, timeout=120):
    preload = ["env", f"LD_PRELOAD={os.environ['NVTE_EP_TEST_NCCL']}"] if os.environ.get("NVTE_EP_TEST_NCCL") else []
    command = [COMMAND, "launch", "-n", str(ranks), "--runtime", "cuda" if CUDA else "host", "--timeout", str(timeout), "--", *preload,
               sys.executable, "-c", HEAD + body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + 30)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("body", [
    # CUDA itself refuses work in a child.
    "pass" if CUDA else FORKED,
    "dist.destroy_process_group()",
    "threading.Thread(target=step).start(); sys.exit(0)",
    pytest.param(TOO_LATE, marks=pytest.mark.skipif(not CUDA, reason="on the CPU the communicator is ours")),
], ids=["never, nor in a child", "process group first", "a thread, and sys.exit", "finalize too late"])
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
