#!/usr/bin/env bash
# The Python package on GPUs: its tests with CUDA tensors and 2 and 4 ranks, CUDA graphs, torch's allocator with expandable segments,
# the example, and the bench. Several ranks share a GPU where there are fewer GPUs.
# usage: torch.sh BUNDLE [PART...]      BUNDLE is what bundle_torch.sh gathered
#   first      exact rows, gradients, CUDA graphs, torch.compile, zero-copy: one shape, so NCCL EP compiles few kernels
#   all        every test                      segments    with expandable segments
#   processes  how processes end               example     trains, and is compared with a dense model
#   bench      beside all_to_all_single
# RANKS: numbers of ranks (default: 2 4). NVTE_EP_BACKEND=native takes the native engine, which compiles nothing.
# Needs in the environment what qa/L2_gpu/test.sh needs, but Open MPI; PyTorch 2.9 or later for CUDA 13 in PYTHON (default: python3);
# and in NVTE_EP_TEST_NCCL the file of NCCL 2.30.4 or later, which is preloaded in place of PyTorch's own.
. "$(dirname "$0")/../common.sh"
bundle=$(cd "${1:?usage: torch.sh BUNDLE [PART...]}" && pwd); shift
: "${NVTE_EP_TEST_NCCL:?the libnccl.so.2 to preload}"
[ $# -gt 0 ] || set -- first all segments processes example bench
python=${PYTHON:-python3}
site=$TARGET/L2_torch
rm -rf "$site"; mkdir -p "$site"
for wheel in "$bundle"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site" || exit 1; done
chmod +x "$site/nvte_ep/bin/nvte-ep"
export PYTHONPATH=$site NVTE_EP_TEST_DEVICE=cuda PYTHONDONTWRITEBYTECODE=1
seconds=${SECONDS_EACH:-500}
# ranks N COMMAND...: with the newer NCCL in each rank, and in no other process.
ranks() {
  local count=$1; shift
  timeout -k 5 $((seconds + 10)) "$site/nvte_ep/bin/nvte-ep" launch -n "$count" --runtime cuda --timeout "$seconds" -- \
    env LD_PRELOAD="$NVTE_EP_TEST_NCCL" "$@"
}
tests() { local count=$1; shift; ranks "$count" "$python" -m pytest -v --durations=5 -p no:cacheprovider "$@"; }
in_ranks=$bundle/tests/ranks
first() {
  tests "$1" "$in_ranks/test_forward.py::test_rows_weights_and_counts_are_exact[indices0-dtype0]" \
    "$in_ranks/test_gradients.py::test_gradients_are_those_of_a_dense_model" \
    "$in_ranks/test_compile.py::test_cuda_graph_with_other_routings" "$in_ranks/test_zero_copy.py::test_staged_and_zero_copy_give_the_same_bits" \
    "$in_ranks/test_compile.py::test_fullgraph"
}
segments() {
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True tests "$1" "$in_ranks" -k "expandable or exact or dense or graph or segments"
}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
env LD_PRELOAD="$NVTE_EP_TEST_NCCL" "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())'
echo "backend: ${NVTE_EP_BACKEND:-auto}"
for part in "$@"; do
  for count in ${RANKS:-2 4}; do
    case $part in
      first) check "first, $count ranks" first "$count" ;;
      all) check "all tests, $count ranks" tests "$count" "$in_ranks" ;;
      segments) check "expandable segments, $count ranks" segments "$count" ;;
      processes) ;;
      example)
        check "the example trains, $count ranks" ranks "$count" "$python" "$bundle/examples/ep_moe.py"
        check "the example is a dense model, $count ranks" ranks "$count" "$python" "$bundle/examples/ep_moe.py" --check ;;
      bench) check "bench, $count ranks" ranks "$count" "$python" -m nvte_ep.bench ;;
      *) echo "no such part: $part"; exit 1 ;;
    esac
  done
  [ "$part" != processes ] || check "processes" "$python" -m pytest -v -p no:cacheprovider "$bundle/tests/test_processes.py"
done
finish
