#!/usr/bin/env bash
# The built libraries: exported symbols, SONAME, NEEDED, ABI, oldest glibc; and the headers against real CUDA and NCCL ones.
. "$(dirname "$0")/../common.sh"
. packaging/floor.sh
check "release build" cargo build --release --locked
lib=$TARGET/release

# exports LIBRARY LIST: what the library exports is exactly the committed list.
exports() { diff <(nm -D --defined-only "$lib/$1" | awk '{print $NF}' | LC_ALL=C sort) "$ROOT/$2"; }
check "exports of libnvte_ep.so" exports libnvte_ep.so abi/register_layer/exports.txt
check "exports of libnvte_ep_stub.so" exports libnvte_ep_stub.so abi/register_layer/exports.txt
check "exports of libnvte_ep_host.so" exports libnvte_ep_host.so host/exports.txt

check "exports of libtransformer_engine.so" exports libtransformer_engine.so abi/te_lib/exports.txt
check "exports of libnvte_ep_preload.so" exports libnvte_ep_preload.so abi/te_preload/exports.txt

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
check "libtransformer_engine.so" dynamic libtransformer_engine.so libtransformer_engine.so
check "libnvte_ep_preload.so" dynamic libnvte_ep_preload.so libnvte_ep_preload.so.1

small() { local bytes; bytes=$(stat -L -c %s "$lib/$1"); echo "$1: $bytes bytes"; [ "$bytes" -lt 3000000 ]; }
for library in libnvte_ep.so libnvte_ep_stub.so libnvte_ep_host.so libtransformer_engine.so libnvte_ep_preload.so; do check "size of $library" small "$library"; done

check "machine code of the native engine's kernels" packaging/cubins.sh "$TARGET/qa/cubins"

check "ABI of the last release" qa/L0_abi/describe.sh --check

# As releases are built; of all libraries by packaging/dist.sh. A symbol newer than the floor does not even link.
floor_build() { floor=$(NVTE_EP_CUBINS=$TARGET/qa/cubins packaging/build.sh x86_64-unknown-linux-gnu -p nvte-ep-register-layer -p nvte-ep-host); }
check "release build for glibc $GLIBC_FLOOR" floor_build
# A section of that name is in each architecture's code.
has_machine_code() { [ "$(grep -c -a "\.text\.nvte_ep_native_dispatch" <(strings -a "$floor/libnvte_ep.so"))" -ge 3 ] && [ "$(stat -c %s "$floor/libnvte_ep.so")" -lt 4200000 ]; }
check "libnvte_ep.so has the machine code, and less than 4.2 MB" has_machine_code
no_folders() { ! strings -a "$floor/$1" | grep -F -e "$ROOT/" -e "${CARGO_HOME:-$HOME/.cargo}/" | grep .; }
for library in libnvte_ep.so libnvte_ep_host.so; do
  check "$library needs no newer runtime" within_floor "$floor/$library"
  check "$library names no folder of this machine" no_folders "$library"
done
too_new() { local text; ! text=$(GLIBC_FLOOR=2.27 within_floor "$floor/libnvte_ep.so") && grep "GLIBC_2.28 is newer than GLIBC_2.27" <<<"$text"; }
check "and a newer symbol is noticed" too_new

# The headers after the real ones; L1_install compiles each alone.
wheels=$("$ROOT/qa/wheels.sh")
real="-isystem $wheels/nvidia/cu13/include -isystem $wheels/nvidia/cu13/include/cccl -isystem $wheels/nvidia/nccl/include"
# shellcheck disable=SC2086
compiles() {
  local compiler=$1 flags=$2 folder=$3; shift 3
  printf '#include <%s>\n' "$@" | $compiler -Wall -Wextra -Werror $flags -I"$ROOT/include/$folder" -fsyntax-only -
}
for compiler in "gcc -std=c11 -x c" "g++ -std=c++17 -x c++" "clang -std=c11 -x c" "clang++ -std=c++17 -x c++"; do
  for folder in nvte_ep nvte_ep/te; do
    for header in transformer_engine/ep.h transformer_engine/comm_window.h transformer_engine/transformer_engine.h nvte_ep_ext.h nvte_ep_status.h; do
      check "$folder/$header after CUDA and NCCL, $compiler" compiles "$compiler" "$real" $folder cuda_runtime_api.h nccl.h $header
    done
  done
  check "the host runtime's headers before ours, $compiler" compiles "$compiler" "-pedantic -I$ROOT/include/nvte_ep_host" nvte_ep \
    cuda_runtime_api.h nccl.h nvte_ep_host.h transformer_engine/ep.h
done

# TransformerEngine's ABI, against its own headers and library.
te=$("$ROOT/qa/te_wheel.sh") || { check "TransformerEngine's wheel" false; finish; }
work=$TARGET/qa/te_abi; mkdir -p "$work"
real="$real -I$te/include"
# Our prototypes alone, over TransformerEngine's types: a parameter or return type that differs does not compile.
prototypes() {
  printf '#include <transformer_engine/%s>\n' transformer_engine.h ep.h
  for header in transformer_engine/transformer_engine.h te/transformer_engine/ep.h; do
    echo 'extern "C" {'
    sed -n '/^extern "C" {/,/^}  \/\/ extern "C"/p' "include/nvte_ep/$header" | sed '1,2d;/^#/d;s/\bstruct //g'
  done
}
prototypes >"$work/prototypes.cc"
# shellcheck disable=SC2086
check "prototypes equal TransformerEngine's" g++ -std=c++17 -fsyntax-only $real "$work/prototypes.cc"
sed 's/size_t nvte_ep_handle_mem_size(/int nvte_ep_handle_mem_size(/' "$work/prototypes.cc" >"$work/changed.cc"
# shellcheck disable=SC2086
differs() { ! g++ -std=c++17 -fsyntax-only $real "$work/changed.cc" 2>/dev/null; }
check "and a changed prototype is noticed" differs
layout() {
  # shellcheck disable=SC2086
  g++ -std=c++17 $real qa/L0_abi/layout.cc -o "$work/layout_te" \
    && g++ -std=c++17 -Iinclude/nvte_ep/te qa/L0_abi/layout.cc -o "$work/layout_ours" \
    && diff <("$work/layout_te") <("$work/layout_ours") && "$work/layout_ours" | wc -l
}
check "structures and constants equal TransformerEngine's" layout
# Of our additions' names.
ours='^nvte_ep_(ext_.*|try_.*|last_error|status_string)$'
same_names() { diff <(grep '^nvte_ep_' "$te/exports.txt") <(grep '^nvte_ep_' "$ROOT/$1" | grep -vE "$ours"); }
check "nvte_ep_* of libtransformer_engine.so" same_names abi/te_lib/exports.txt
check "nvte_ep_* of libnvte_ep_preload.so" same_names abi/te_preload/exports.txt
provided() { comm -13 "$te/exports.txt" <(grep '^nvte_' "$ROOT/abi/te_lib/exports.txt" | grep -vE "$ours") | (! grep .); }
check "TransformerEngine exports all that we do" provided
finish
