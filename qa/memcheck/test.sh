#!/usr/bin/env bash
# The suites on the host runtime under valgrind's memcheck: no error in what we wrote. Some minutes; not part of CI.
# Expects what qa/L0_unittest and qa/L1_cpp_distributed have built, and valgrind.
. "$(dirname "$0")/../common.sh"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NVTE_EP_RUNTIME=host NVTE_EP_HOST_TIMEOUT_MS=600000
export LD_LIBRARY_PATH=$TARGET/release/host_runtime${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
suppressions=$(find /usr/share/openmpi -name openmpi-valgrind.supp 2>/dev/null | head -1)
memcheck=(valgrind --error-exitcode=9 --leak-check=no --max-threads=2000 --suppressions="$(dirname "$0")/openmpi.supp"
  ${suppressions:+--suppressions="$suppressions"})

# Programs whose tests measure time fail under valgrind, which is 20 times slower; errors of memory are what counts here.
no_errors() {
  local name=$1; shift
  "$@" >"$log/$name.out" 2>&1
  grep -h "ERROR SUMMARY" "$log/$name".*.log
  ! grep -hE "ERROR SUMMARY: [1-9]" "$log/$name".*.log
}

for program in test_ep test_te; do
  check "$program" mpirun --oversubscribe --bind-to none -n 2 "${memcheck[@]}" --log-file="$log/$program.%p.log" \
    "$TARGET/cpp/tests_cpp/$program" --gtest_brief=1
done
while read -r program; do
  name=$(basename "$program")
  check "${name%-*}" no_errors "$name" "${memcheck[@]}" --trace-children=yes --log-file="$log/$name.%p.log" "$program" -q
done < <(cargo test --workspace --locked --no-run --message-format=json 2>/dev/null |
  sed -n 's/.*"src_path":"[^"]*host\/\(tests\|src\)[^"]*".*"executable":"\([^"]*\)".*/\2/p')
finish
