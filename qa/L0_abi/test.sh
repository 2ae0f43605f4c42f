#!/usr/bin/env bash
# The built libraries: exported symbols, SONAME, NEEDED; and the headers against real CUDA and NCCL ones.
. "$(dirname "$0")/../common.sh"
check "release build" cargo build --release --locked
lib=$TARGET/release

# exports LIBRARY LIST: what the library exports is exactly the committed list.
exports() { diff <(nm -D --defined-only "$lib/$1" | awk '{print $NF}' | LC_ALL=C sort) "$ROOT/$2"; }
check "exports of libnvte_ep.so" exports libnvte_ep.so abi/register_layer/exports.txt
check "exports of libnvte_ep_stub.so" exports libnvte_ep_stub.so abi/register_layer/exports.txt
check "exports of libnvte_ep_host.so" exports libnvte_ep_host.so host/exports.txt

# dynamic LIBRARY SONAME: its SONAME, and nothing needed but the C and C++ runtimes.
dynamic() {
  local found; found=$(readelf -d "$lib/$1")
  grep -q "SONAME.*\[$2\]" <<<"$found" || { echo "$1: SONAME is not $2"; return 1; }
  local extra; extra=$(grep NEEDED <<<"$found" | grep -vE '\[(libstdc\+\+\.so\.6|libgcc_s\.so\.1|libc\.so\.6|libm\.so\.6|ld-linux-[a-z0-9-]+\.so\.[0-9])\]')
  [ -z "$extra" ] || { echo "$1: $extra"; return 1; }
}
check "libnvte_ep.so" dynamic libnvte_ep.so libnvte_ep.so.1
check "libnvte_ep_stub.so" dynamic libnvte_ep_stub.so libnvte_ep.so.1
check "libnvte_ep_host.so" dynamic libnvte_ep_host.so libnvte_ep_host.so.1

small() { local bytes; bytes=$(stat -L -c %s "$lib/$1"); echo "$1: $bytes bytes"; [ "$bytes" -lt 3000000 ]; }
for library in libnvte_ep.so libnvte_ep_stub.so libnvte_ep_host.so; do check "size of $library" small "$library"; done

# Headers alone, then after the real ones.
wheels=$("$ROOT/qa/wheels.sh")
real="-isystem $wheels/nvidia/cu13/include -isystem $wheels/nvidia/cu13/include/cccl -isystem $wheels/nvidia/nccl/include"
# shellcheck disable=SC2086
compiles() { local compiler=$1 flags=$2; shift 2; printf '#include <%s>\n' "$@" | $compiler -Wall -Wextra -Werror $flags -I"$ROOT/include/nvte_ep" -fsyntax-only -; }
for compiler in "gcc -std=c11 -x c" "g++ -std=c++17 -x c++" "clang -std=c11 -x c" "clang++ -std=c++17 -x c++"; do
  for header in transformer_engine/ep.h transformer_engine/comm_window.h transformer_engine/transformer_engine.h nvte_ep_ext.h; do
    check "$header alone, $compiler" compiles "$compiler" -pedantic "$header" "$header"
    check "$header after CUDA and NCCL, $compiler" compiles "$compiler" "$real" cuda_runtime_api.h nccl.h "$header"
  done
done
finish
