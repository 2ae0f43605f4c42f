#!/usr/bin/env bash
# The GPU proof: the C++ suites, the main job and its real size, and host against GPU bit by bit, on one Hopper GPU.
# usage: test.sh BUNDLE      BUNDLE is what bundle.sh gathered
# Needs in the environment: Open MPI; libcudart, NCCL and NCCL EP on LD_LIBRARY_PATH; NCCL EP's compiler settings where they
# are not found by themselves (docs/environment.md); for several ranks on one GPU a running MPS and
# NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0. SECONDS_EACH limits every run (default 150).
. "$(dirname "$0")/../common.sh"
bundle=$(cd "${1:?usage: test.sh BUNDLE}" && pwd)
export LD_LIBRARY_PATH=$bundle:${LD_LIBRARY_PATH:-} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
limit="timeout -k 5 ${SECONDS_EACH:-150}"
mpi() { local ranks=$1; shift; $limit mpirun --oversubscribe --bind-to none -n "$ranks" "$@"; }

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for ranks in 2 4; do check "test_ep, $ranks ranks" mpi "$ranks" "$bundle/test_ep"; done
for ranks in 2 4; do check "test_te, $ranks ranks" mpi "$ranks" "$bundle/test_te"; done
for ranks in 2 4; do
  # It compiles more kernels than the others.
  limit="timeout -k 5 ${SECONDS_EACH:-280}" check "nccl_ep_conformance, $ranks ranks" mpi "$ranks" "$bundle/nccl_ep_conformance" \
    --expect "$bundle/h200_nccl_ep_0.1.0_${ranks}ranks.txt"
  check "nccl_ep_low_latency, $ranks ranks" mpi "$ranks" "$bundle/nccl_ep_low_latency"
done
# TransformerEngine's released library, in the folder NVTE_EP_TE_LIBRARY_DIR; its cuBLAS and cuDNN on LD_LIBRARY_PATH.
if [ -n "${NVTE_EP_TE_LIBRARY_DIR:-}" ]; then
  te=$NVTE_EP_TE_LIBRARY_DIR
  for ranks in 2 4; do
    check "TransformerEngine alone, $ranks ranks" mpi "$ranks" env LD_LIBRARY_PATH="$te:$LD_LIBRARY_PATH" "$bundle/test_te_source" none
    check "TransformerEngine and our preload, $ranks ranks" mpi "$ranks" env LD_LIBRARY_PATH="$te:$LD_LIBRARY_PATH" \
      LD_PRELOAD="$bundle/libnvte_ep_preload.so" "$bundle/test_te_source" libnvte_ep_preload
    check "ours in its place, $ranks ranks" mpi "$ranks" "$bundle/test_te_source" libtransformer_engine
    check "200 random cases, $ranks ranks" mpi "$ranks" "$bundle/te_differential" --a "$te/libtransformer_engine.so" \
      --b "$bundle/libtransformer_engine.so" --separate-a --cases 200 --shapes 4
  done
else
  echo "skipped: TransformerEngine's library (set NVTE_EP_TE_LIBRARY_DIR)"
fi
for order in $("$bundle/test_teardown" --list); do
  # Under MPS a trap fails every rank of the GPU, and NCCL EP aborts in those that are launching.
  if [ "$order" = overflow_that_traps ] && [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then echo "skipped: $order takes a GPU for each of 2 ranks"; continue; fi
  check "test_teardown $order" mpi 2 "$bundle/test_teardown" "$order"
done
check "test_boundary" $limit "$bundle/test_boundary"
check "test_tensor" $limit "$bundle/test_tensor"
check "test_stub" env LD_LIBRARY_PATH="$bundle/stub:$LD_LIBRARY_PATH" "$bundle/test_stub"

# A suite of its own, with its own report.
check "L1_robustness" bash "$ROOT/qa/L1_robustness/test.sh" "$bundle"

run() { $limit "$bundle/nvte-ep" run --runtime cuda "$@"; }
for ranks in 2 4; do check "nvte-ep run, $ranks ranks" run --ranks "$ranks"; done

# Host and GPU: the same digests of counts, received rows and weights, results and gradients.
same() {
  diff <($limit "$bundle/nvte-ep" run --runtime host --digest "$@" | grep digest) <(run --digest "$@" | grep digest) \
    && echo "same digests: $*"
}
for dtype in bf16 f16 f32; do check "host and GPU agree, $dtype" same --ranks 2 --dtype "$dtype" --top-k 8 --experts 32; done
check "host and GPU agree, 4 ranks" same --ranks 4 --align 128 --top-k 8 --experts 64

check "nvte-ep run, real size" run --ranks 4 --tokens 4096 --hidden 7168 --top-k 8 --experts 64 --dtype bf16 --steps 3
# Staged against zero-copy: times, the same bits, and device memory predicted and measured.
bench() { $limit "$bundle/nvte-ep" bench --runtime cuda --ranks 4 --dtype bf16,mxfp8 "$@"; }
check "bench, real size" bench --tokens 4096 --hidden 7168 --top-k 8 --experts 64
check "bench, many experts" bench --tokens 4096 --hidden 4096 --top-k 8 --experts 128 --align 128
check "bench, small rows" bench --tokens 16384 --hidden 2048 --top-k 4 --experts 64
check "bench, graphs" bench --tokens 128,4096 --hidden 7168 --top-k 8 --experts 64 --graph
# By turns with TransformerEngine's library: the ratios, prepare's among them, are for docs/benchmarks.md.
if [ -n "${NVTE_EP_TE_LIBRARY_DIR:-}" ]; then
  against() {
    $limit env NVTE_EP_LIB="$bundle/libtransformer_engine.so" LD_LIBRARY_PATH="$NVTE_EP_TE_LIBRARY_DIR:$LD_LIBRARY_PATH" \
      "$bundle/nvte-ep" bench --runtime cuda --tokens 128,4096 --hidden 7168 --top-k 8 --experts 64 --align 0 --transfer staged \
      --against "$NVTE_EP_TE_LIBRARY_DIR/libtransformer_engine.so" "$@"
  }
  check "bench against TransformerEngine, 2 and 4 ranks" against --ranks 2,4
  check "bench against TransformerEngine, 8 ranks" against --ranks 8 --max-sms 16
fi
finish
