#!/usr/bin/env bash
# The README's commands, and the command under other launchers.
. "$(dirname "$0")/../common.sh"
export NVTE_EP_RUNTIME=host OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# First of all, so that on a clean checkout this command has to build what it needs.
check "the main job" cargo run --release --locked -p nvte-ep-cli -- run
check "release build" cargo build --release --locked
nvte_ep=$TARGET/release/nvte-ep
for arguments in "--ranks 2 --dtype f32 --top-k 1 --align 1" "--ranks 2 --dtype f16 --top-k 8 --align 128" "--ranks 8 --tokens 64 --top-k 8 --experts 64" \
  "--ranks 64 --tokens 32 --hidden 64 --top-k 4 --experts 256 --steps 1"; do
  # shellcheck disable=SC2086
  check "run $arguments" "$nvte_ep" run $arguments
done
check "bench" "$nvte_ep" bench --ranks 2 --tokens 64 --iterations 3
check "pictures of a run" "$nvte_ep" run --ranks 4 --tokens 256 --hidden 64 --experts 64 --steps 1 --plot "$TARGET/plot"
check "the guide's picture is the command's" cmp "$TARGET/plot/load.svg" docs/plots/expert_load.svg
check "run under mpirun" mpirun --oversubscribe --bind-to none -n 2 "$nvte_ep" run --tokens 64
refused() { ! "$nvte_ep" run --ranks 3 --experts 16 >/dev/null 2>&1; }
check "bad arguments are refused" refused

# The commands as the README has them, below the example that tests/docs.rs holds to be this file's.
commands=$(awk '/^## Use it from C\+\+/ { in_part = 1 } in_part && /^```sh/ { in_block = 1; next } in_block && /^```/ { exit } in_block' README.md |
  sed -E "s#([$]PWD/)?target/#$TARGET/#g")
check "the README's C++ commands" env -u NVTE_EP_RUNTIME bash -euo pipefail -c "$commands"

example=$TARGET/example_step
check "the example with MPI compiles" mpicxx -std=c++17 -Wall -Wextra -Werror examples/step.cc -o "$example" -Iinclude/nvte_ep -Iinclude/nvte_ep_host \
  -L"$TARGET/release" -lnvte_ep -lnvte_ep_host -Wl,-rpath,"$TARGET/release"
check "the example with MPI runs" mpirun --oversubscribe --bind-to none -n 2 "$example"

# The recipe for several machines, with one, and its program on two simulated ones.
echo "localhost slots=2" >"$TARGET/hosts"
check "the recipe for mpirun" env GPUS=2 NVTE_EP_HOST_DOMAINS=1 examples/cluster/mpirun.sh "$TARGET/hosts" 1 "$example"

# What a cluster runs, with programs that only say how they were called.
called=$TARGET/called; rm -rf "$called"; mkdir -p "$called"
for program in nvte-ep nccl_ep_conformance test_ep; do
  printf '#!/bin/sh\necho "%s $*"\n' "$program" >"$called/$program"; chmod +x "$called/$program"
done
gathered() {
  qa/nodes.sh "$called" "$TARGET/nodes.tar.gz" mpirun --oversubscribe --bind-to none -n 2 || return
  tar -xzf "$TARGET/nodes.tar.gz" -C "$called"
  [ "$(grep -c '^test_ep' "$called/test_ep.txt")" = 2 ] && [ "$(grep -c 'exit code 0' "$called/summary.txt")" = 5 ] &&
    [ "$(grep -c 'nvte-ep doctor' "$called/machines.txt")" = 1 ] && grep -q 'nvte-ep bench --ranks 8' "$called/bench.txt"
}
check "a cluster's record" gathered
echo 'exit 3' >>"$called/test_ep"
told() { ! qa/nodes.sh "$called" "$TARGET/nodes.tar.gz" mpirun --oversubscribe -n 2 >"$called/log" && grep 'test_ep: exit code 3' "$called/log"; }
check "a cluster's failure" told
finish
