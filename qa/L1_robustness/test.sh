#!/usr/bin/env bash
# No call aborts, exits, hangs or corrupts memory: random valid and invalid calls, what is left behind after many groups and
# many steps, and ranks that fail, hang or die at a chosen call. On the host runtime; with BUNDLE on GPUs, without the faults.
# usage: test.sh [BUNDLE]      NVTE_EP_STRESS_SECONDS: for the random calls, of all runs together (default 30)
#                              NVTE_EP_STRESS_SEED: where they start (default: the day)
. "$(dirname "$0")/../common.sh"
seconds=${NVTE_EP_STRESS_SECONDS:-30} seed=${NVTE_EP_STRESS_SEED:-$(date +%Y%m%d)}
cycles=40 steps=1500 patience=120
[ "$seconds" -lt 300 ] || cycles=200 steps=20000
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NVTE_EP_TEST_WAIT_SECONDS=60
if [ $# -gt 0 ]; then
  programs=$(cd "$1" && pwd) on=gpu
  # NCCL EP compiles its kernels in the first round that has a shape.
  patience=400
  export LD_LIBRARY_PATH=$programs:${LD_LIBRARY_PATH:-}
else
  # The build of L1_cpp_distributed, with the same options.
  build=$TARGET/cpp programs=$TARGET/cpp/tests_cpp on=host
  check "configure" cmake -S "$ROOT" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DNVTE_EP_WHEEL_HEADERS="$("$ROOT/qa/wheels.sh")" -DNVTE_EP_TE_HEADERS="$("$ROOT/qa/te_wheel.sh")/include"
  check "build" cmake --build "$build" -j2 --target test_stress test_stress_te
  library=$(sed -n 's/^NVTE_EP_LIBRARY_DIR:[A-Z]*=//p' "$build/CMakeCache.txt")
  export NVTE_EP_RUNTIME=host LD_LIBRARY_PATH=${library:-$TARGET/release}/host_runtime
fi
mpi() {
  local limit=$1 ranks=$2; shift 2
  timeout -k 5 "$limit" mpirun --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none -n "$ranks" "$@"
}
tried=0 raised=0 checked=0 replays=0 crashes=0 hangs=0 leaks=0
log=$(mktemp); trap 'rm -f "$log"' EXIT

# What a run that ended with code $1 and printed $log was: a hang, a crash, or neither.
judge() {
  if [ "$1" -eq 124 ] || [ "$1" -eq 137 ] || grep -q 'fault: HANG' "$log"; then
    hangs=$((hangs + 1)); echo "hang: ended by the time-out"; return 1
  fi
  if [ "$1" -gt 128 ] || grep -Eq 'exited on signal (4|6|7|8|11) ' "$log"; then
    crashes=$((crashes + 1)); echo "crash: ended by a signal"; return 1
  fi
}

# number PATTERN: what the pattern's group is in the figure line, 0 without one.
number() { local value; value=$(sed -n "s/^stress: ranks .*$1.*/\1/p" "$log" | tail -1); echo "${value:-0}"; }

# stress LIMIT RANKS PROGRAM ARGUMENTS...: a run of the driver, and its figures.
stress() {
  local code=0
  mpi "$1" "$2" "$programs/$3" "${@:4}" >"$log" 2>&1 || code=$?
  grep -E '^stress: |FAILED|again:|LEAK' "$log"
  tried=$((tried + $(number ' \([0-9]*\) tried')))
  raised=$((raised + $(number ' \([0-9]*\) raised')))
  checked=$((checked + $(number ' steps \([0-9]*\) checked')))
  leaks=$((leaks + $(number 'leaks \([0-9]*\)')))
  replays=$((replays + $(number 'replays \([0-9]*\)')))
  judge "$code" && [ "$code" -eq 0 ] || { tail -30 "$log"; return 1; }
}

each=$((seconds / 8)); [ "$each" -gt 0 ] || each=1
for ranks in 2 4; do
  for program in test_stress test_stress_te; do
    seed=$((seed + 1))
    check "random calls, $program, $ranks ranks, seed $seed" stress $((2 * each + patience)) "$ranks" $program \
      --kinds valid,invalid --seconds "$each" --seed "$seed"
  done
done
for program in test_stress test_stress_te; do
  check "what is left behind, $program" stress $((4 * patience)) 2 $program --kinds cycles,steps --cycles $cycles --steps $steps
done

# fault N VERDICT RULES: four ranks, of which rank 1 has a fault; N of them have to come to their end by themselves, having
# "raised" or with "nothing raised".
fault() {
  local expected=$1 verdict=$2 rules=$3 code=0 ended
  local stopped=(); [[ "$rules" == *do=stop* ]] && stopped=(NVTE_EP_STRESS_STOPPED_RANK=1)
  env NVTE_EP_HOST_FAULT="$rules" NVTE_EP_HOST_TIMEOUT_MS=1500 NVTE_EP_TIMEOUT_MS=3000 NVTE_EP_SHUTDOWN_TIMEOUT_MS=1500 \
    "${stopped[@]}" timeout -k 5 60 mpirun --enable-recovery --oversubscribe --bind-to none \
    --mca btl_vader_single_copy_mechanism none -n 4 "$programs/test_stress" --kinds faults >"$log" 2>&1 || code=$?
  grep -o 'fault: rank [0-9]* raised after [0-9]* ms in [a-z ]*' "$log" | sort
  ended=$(grep -c "^fault: rank [0-9]* ended, $verdict" "$log")
  if [ "$verdict" = raised ]; then tried=$((tried + expected)) raised=$((raised + ended)); fi
  judge "$code" || { tail -30 "$log"; return 1; }
  if grep -Eq 'TOO LATE|WRONG VALUES' "$log"; then tail -30 "$log"; return 1; fi
  if [ "$ended" -eq "$expected" ]; then return; fi
  # Under --enable-recovery mpirun does not tell of signals; a rank that did not hang and did not end has crashed.
  crashes=$((crashes + 1)); echo "$ended of $expected ranks came to an end as they should ($verdict)"; tail -30 "$log"; return 1
}
if [ $on = host ]; then
  for call in ncclEpCreateGroup ncclEpUpdateHandle ncclEpDispatch ncclEpCombine; do
    check "rank 1 is killed in $call" fault 3 raised "rank=1,call=$call,do=kill"
  done
  check "rank 1 exits in ncclEpDispatch" fault 3 raised "rank=1,call=ncclEpDispatch,nth=3,do=exit"
  check "rank 1 aborts in ncclEpCombine" fault 3 raised "rank=1,call=ncclEpCombine,nth=2,do=abort"
  for call in ncclEpUpdateHandle ncclEpDispatch ncclEpCombine; do
    check "$call fails on rank 1" fault 4 raised "rank=1,call=$call,nth=2,do=fail"
  done
  for call in ncclEpCreateGroup ncclEpDispatch; do
    check "rank 1 hangs in $call" fault 3 raised "rank=1,call=$call,do=stop"
  done
  check "rank 1 is late in ncclEpDispatch" fault 4 "nothing raised" "rank=1,call=ncclEpDispatch,do=delay,ms=700"
  check "rank 1 is too late in ncclEpCombine" fault 4 raised "rank=1,call=ncclEpCombine,do=delay,ms=4000"
fi
echo "$SUITE: steps checked $checked, replays $replays, inputs tried $tried, errors raised $raised, crashes $crashes, hangs $hangs, leaks $leaks"
finish
