#!/usr/bin/env bash
# Mutants: small changes of the code, one at a time, each of which a test has to notice. Hours; not part of CI.
# The Rust tests named for a group run first. What they do not notice meets the C++ suites, with the library in question exchanged.
# Needs what qa/L1_cpp_distributed builds, for this commit, and cargo-mutants:
#   cargo install --locked cargo-mutants@27.1.0
# usage: test.sh [GROUP...]      without any: all groups
#   NVTE_EP_MUTANTS_JOBS    mutants at a time (1)
#   NVTE_EP_MUTANTS_SUITES  rust: no C++ suites. cpp: the C++ suites, for what the last run's Rust tests did not notice
. "$(dirname "$0")/../common.sh"
# GROUP PACKAGE FILES, and the Rust tests that look at them, as filters of their names (none: all of the package).
groups="
pure     nvte-ep-core src/ops/*.rs,src/config.rs,src/tensor.rs,src/dtype.rs,src/limits.rs ops:: config:: tensor:: dtype:: limits:: memory:: ffi::
routing  nvte-ep-core src/backend/routing/*.rs                                            backend::routing
shared   nvte-ep-core src/symm_pool.rs,src/progress.rs,src/progress/*.rs                  symm_pool:: progress::
backend  nvte-ep-core src/backend/*.rs                                                    backend::
host     nvte-ep-host host/src/ep/*.rs,host/src/check.rs
"
which=${NVTE_EP_MUTANTS_SUITES:-all}
out=$TARGET/mutants tree=$out/tree built=$out/built/debug programs=$TARGET/cpp/tests_cpp
mkdir -p "$out"

# build: the libraries of $tree, as it is now.
build() {
  CARGO_TARGET_DIR=$out/built cargo build -q --manifest-path "$tree/Cargo.toml" -p nvte-ep-register-layer -p nvte-ep-te-lib -p nvte-ep-host
}

# ranks PROGRAM [ARGUMENT...]: on two ranks, with the libraries of $built.
ranks() {
  timeout -k 5 300 mpirun --allow-run-as-root --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none -n 2 \
    env NVTE_EP_RUNTIME=host NVTE_EP_SHUTDOWN_TIMEOUT_MS=10000 LD_LIBRARY_PATH="$built/host_runtime:$built" "$@" >"$out/last.log" 2>&1
}

# noticed: the first C++ suite that fails, or nothing.
noticed() {
  local order
  ranks "$programs/test_ep" --gtest_brief=1 || { echo test_ep; return; }
  ranks "$programs/test_te" --gtest_brief=1 || { echo test_te; return; }
  for order in $("$programs/test_teardown" --list); do
    # It needs a variable that ctest sets.
    [ "$order" != skipped_layer ] || continue
    ranks "$programs/test_teardown" "$order" || { echo "test_teardown $order"; return; }
  done
  ranks "$programs/test_stress" --kinds valid,invalid --seconds 10 --seed 1 || echo test_stress
}

# unchanged: the suites pass with the code as it is, and with these libraries. Else their failures would say nothing about a mutant.
unchanged() {
  local program failed
  # Cargo rebuilds what is newer than its last build, and a commit's files are as old as the commit.
  rm -rf "$tree" && mkdir "$tree" && git archive HEAD | tar -xm -C "$tree" && build || return 1
  for program in test_ep test_te test_teardown test_stress; do
    LD_LIBRARY_PATH=$built/host_runtime:$built ldd "$programs/$program" | grep -q "$built/lib" || {
      echo "$programs/$program is not there, or does not load the libraries of $built"; return 1
    }
  done
  failed=$(noticed)
  [ -z "$failed" ] || { echo "$failed fails with the code as it is:"; cat "$out/last.log"; return 1; }
}

# survivors GROUP: fails if the C++ suites do not notice a mutant of the group either.
survivors() {
  local results=$out/$1/mutants.out name diff file suite alive=0
  while IFS=$'\t' read -r name diff; do
    file=$tree/$(sed -n '1s/^--- //p' "$results/$diff")
    # cargo-mutants has compiled the mutant: what fails here is this script's fault.
    if patch -s "$file" <"$results/$diff" && build; then
      suite=$(noticed)
      echo "${suite:-NOTHING} notices: $name" | tee -a "$out/survivors_of_rust.txt"
      [ -n "$suite" ] || alive=1
    else
      echo "not tried: $name"; alive=1
    fi
    patch -s -R "$file" <"$results/$diff" || return 1
  done < <(python3 - "$results/outcomes.json" <<'PY'
import json, sys
for outcome in json.load(open(sys.argv[1], encoding="utf-8"))["outcomes"]:
    if outcome["summary"] == "MissedMutant":
        print(outcome["scenario"]["Mutant"]["name"], outcome["diff_path"], sep="\t")
PY
  )
  [ "$alive" -eq 0 ]
}

if [ "$which" != rust ]; then
  check "the suites pass with the code as it is" unchanged
  [ "$failed" -eq 0 ] || finish
fi
while read -r group package files filters; do
  [ -n "$group" ] || continue
  [ $# -eq 0 ] || [[ " $* " == *" $group "* ]] || continue
  arguments=(); IFS=, read -ra list <<<"$files"; for file in "${list[@]}"; do arguments+=(-f "$file"); done
  # Test names are words.
  # shellcheck disable=SC2086
  [ "$which" = cpp ] || CARGO_PROFILE_DEV_DEBUG=0 cargo mutants -p "$package" "${arguments[@]}" --no-times \
    --jobs "${NVTE_EP_MUTANTS_JOBS:-1}" -o "$out/$group" -- ${filters:+--lib} -- $filters
  wc -l "$out/$group"/mutants.out/{caught,missed,timeout,unviable}.txt
  [ "$which" = rust ] || check "mutants of $group that no test notices" survivors "$group"
done <<<"$groups"
finish
