#!/usr/bin/env bash
# The Python package on GPUs: its tests with CUDA tensors and 2 and 4 ranks, CUDA graphs, torch's allocator with expandable segments,
# and the bench. Several ranks share a GPU where there are fewer GPUs.
# usage: torch.sh BUNDLE      BUNDLE is what bundle_torch.sh gathered
# Needs in the environment what qa/L2_gpu/test.sh needs, but Open MPI; PyTorch 2.9 or later for CUDA 13 in PYTHON (default: python3);
# and in NVTE_EP_TEST_NCCL the file of NCCL 2.30.4 or later, which is preloaded in place of PyTorch's own.
. "$(dirname "$0")/../common.sh"
bundle=$(cd "${1:?usage: torch.sh BUNDLE}" && pwd)
: "${NVTE_EP_TEST_NCCL:?the libnccl.so.2 to preload}"
export PYTHONPATH=$bundle:$bundle/pytest NVTE_EP_TEST_DEVICE=cuda PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}
seconds=${SECONDS_EACH:-500}
ranks() {
  local count=$1; shift
  timeout -k 5 $((seconds + 10)) "$bundle/nvte_ep/bin/nvte-ep" launch -n "$count" --runtime cuda --timeout "$seconds" -- \
    env LD_PRELOAD="$NVTE_EP_TEST_NCCL" "$@"
}
tests() { local count=$1; shift; ranks "$count" "$python" -m pytest -q -p no:cacheprovider "$@" "$bundle/tests/ranks"; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
env LD_PRELOAD="$NVTE_EP_TEST_NCCL" "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())'
for count in ${RANKS:-2 4}; do check "tests, $count ranks" tests "$count"; done
check "tests, 2 ranks, expandable segments" env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$bundle/nvte_ep/bin/nvte-ep" launch -n 2 \
  --runtime cuda --timeout "$seconds" -- env LD_PRELOAD="$NVTE_EP_TEST_NCCL" "$python" -m pytest -q -p no:cacheprovider \
  -k "expandable or exact or dense or graph or segments" "$bundle/tests/ranks"
check "processes" "$python" -m pytest -q -p no:cacheprovider "$bundle/tests/test_processes.py"
if [ -e "$bundle/nvte_ep/bench.py" ]; then
  for count in ${RANKS:-2 4}; do check "bench, $count ranks" ranks "$count" "$python" -m nvte_ep.bench; done
fi
finish
