#!/usr/bin/env bash
# The proof of the native engine on one Hopper GPU: the C++ suites without nvcc and without NCCL EP, its kernels against a plain
# reference with ranks that are late, and compute-sanitizer. usage: native.sh BUNDLE [PART...]
# BUNDLE is what bundle.sh gathered. Parts: suites runs robustness teardown kernels late sleeps sanitizer (all by default, about 25
# minutes). RANKS limits suites and runs to these numbers of ranks (default "2 4 8"), ORDERS teardown to these orders (default all),
# SECONDS_EACH every run (default 150), GTEST_FILTER the suites to these tests. Of a suite its failures and last lines are printed as
# soon as it has ended; all of it is in the folder XML_LOG_DIR (default target/qa).
# Needs in the environment: Open MPI; libcudart and NCCL on LD_LIBRARY_PATH; several ranks on one GPU: a running MPS and
# NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0. The last four parts compile a program with nvcc (NVCC, or on PATH) and run as one
# process.
. "$(dirname "$0")/../common.sh"
bundle=$(cd "${1:?usage: native.sh BUNDLE [PART...]}" && pwd); shift
[ $# -gt 0 ] || set -- suites runs robustness teardown kernels late sleeps sanitizer
parts=" $* "
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")}
export LD_LIBRARY_PATH=$bundle:${LD_LIBRARY_PATH:-} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export NVTE_EP_BACKEND=native NVTE_EP_TEST_WAIT_SECONDS=60
each=${SECONDS_EACH:-150}
limited() { timeout -k 5 "$each" "$@"; }
# No compiler that a program of ours could find, and no NCCL EP: the library must not ask for either.
mpi() {
  local ranks=$1 path; shift
  path=$(tr ':' '\n' <<<"$PATH" | while read -r folder; do [ -x "$folder/nvcc" ] || echo "$folder"; done | paste -sd:)
  limited env -u CUDA_HOME -u NCCL_EP_JIT_NVCC PATH="$path" NVTE_EP_NCCL_EP_LIB=/nonexistent/libnccl_ep.so \
    mpirun --oversubscribe --bind-to none -n "$ranks" "$@"
}
part() { [[ "$parts" == *" $1 "* ]]; }
with_ranks() { [[ " ${RANKS:-2 4 8} " == *" $1 "* ]]; }
# suite NAME COMMAND...: prints the failures and the end of what goes to NAME.log.
suite() {
  local log=$XML_LOG_DIR/$1.log code=0; shift
  "$@" >"$log" 2>&1 || code=$?
  grep -aE '^\[ +(PASSED|FAILED) +\]|Failure$|^\[rank ' "$log" | sort -u | head -n 30 | cut -c1-500
  tail -n "$((code == 0 ? 3 : 12))" "$log" | cut -c1-500
  return "$code"
}
# The kernels alone; ranks are streams of one process, outside MPS.
kernels() { CUDA_MPS_PIPE_DIRECTORY=/nonexistent limited "$@"; }

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if part suites; then
  for ranks in 2 4; do
    with_ranks "$ranks" || continue
    for program in test_te test_ep; do
      # All but what asks for NCCL EP: low-latency groups, and a group with backend=nccl_ep.
      check "$program, $ranks ranks" suite "$program.$ranks" mpi "$ranks" "$bundle/$program" --gtest_color=no \
        --gtest_filter="${GTEST_FILTER:--LowLatency*:GroupOptions.StepsAreRightWithEach}"
    done
  done
  if with_ranks 8; then
    check "test_te, 8 ranks" suite test_te.8 mpi 8 env NVTE_EP_TEST_MAX_SMS=16 "$bundle/test_te" --gtest_color=no \
      --gtest_filter='Forward.*:Backward.*:Graphs.*:Handles.*:Windows.*'
  fi
fi
if part runs; then
  for ranks in 2 4 8; do
    with_ranks "$ranks" || continue
    sms=(); [ "$ranks" -lt 8 ] || sms=(--max-sms 16)
    check "nvte-ep run, $ranks ranks" limited "$bundle/nvte-ep" run --runtime cuda --ranks "$ranks" --experts 64 --top-k 8 "${sms[@]}"
  done
  same() {
    diff <(limited "$bundle/nvte-ep" run --runtime host --digest "$@" | grep digest) \
      <(limited "$bundle/nvte-ep" run --runtime cuda --digest "$@" | grep digest) && echo "same digests: $*"
  }
  for dtype in bf16 f16 f32; do check "host and GPU agree, $dtype" same --ranks 2 --dtype "$dtype" --top-k 8 --experts 32; done
fi
if part teardown; then
  for order in ${ORDERS:-$("$bundle/test_teardown" --list)}; do
    check "test_teardown $order" suite "test_teardown.$order" mpi 2 "$bundle/test_teardown" "$order"
  done
fi
if part robustness; then check "L1_robustness" bash "$ROOT/qa/L1_robustness/test.sh" "$bundle"; fi

program=$(mktemp -d)/native_kernels
trap 'rm -rf "$(dirname "$program")"' EXIT
if part kernels || part late || part sleeps || part sanitizer; then
  check "compile" "$nvcc" -std=c++20 -O3 -arch=sm_90 -lineinfo -x cu -I "$ROOT/kernels" -I "$ROOT/tests_cpp/native" \
    "$ROOT/tests_cpp/native/native_kernels.cc" -o "$program"
fi
if part kernels; then each=600 check "10,000 steps of random shapes" kernels "$program" --steps 10000 --seed 3; fi
if part late; then each=300 check "ranks late by up to 2 ms" kernels "$program" --steps 1000 --seed 5 --delay 2000; fi
# Four calls a step.
if part sleeps; then each=580 check "1,000 calls after 200 ms on one rank" kernels "$program" --steps 250 --seed 7 --sleep 200; fi
if part sanitizer; then
  for tool in memcheck racecheck; do
    each=300 check "compute-sanitizer $tool" kernels "$sanitizer" --tool "$tool" --error-exitcode 9 "$program" --steps 40 --seed 11
  done
fi
finish
