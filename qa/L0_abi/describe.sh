#!/usr/bin/env bash
# The libraries' ABI, compared by abidiff with that of the last release, which is committed beside each list of exports.
# usage: describe.sh --check | --write      (--write at a release: docs/release.md)
# What is added is no change; a function that is gone, or whose parameters, return type or structures differ, is.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd); cd "$root"
target=${CARGO_TARGET_DIR:-$root/target}
work=$target/qa/abi; rm -rf "$work"; mkdir -p "$work"
# LIBRARY PACKAGE DESCRIPTION. The stub has the description of what it stands in for.
libraries="libnvte_ep nvte-ep-register-layer abi/register_layer/libnvte_ep.abi
libnvte_ep_stub nvte-ep-stub abi/register_layer/libnvte_ep.abi
libtransformer_engine nvte-ep-te-lib abi/te_lib/libtransformer_engine.abi
libnvte_ep_preload nvte-ep-te-preload abi/te_preload/libnvte_ep_preload.abi
libnvte_ep_host nvte-ep-host host/libnvte_ep_host.abi"
# The dev profile: release libraries have no debug information, which is where the types are.
# shellcheck disable=SC2046
cargo build --quiet --locked $(awk '{print "-p", $2}' <<<"$libraries")
describe() {
  abidw --no-corpus-path --no-comp-dir-path --no-show-locs --no-elf-needed "$target/debug/$1.so" | python3 qa/L0_abi/prune.py >"$2"
}
compare() { abidiff --no-added-syms "$1" "$2"; }
case ${1:-} in
  --write)
    grep -v stub <<<"$libraries" | while read -r library _ description; do describe "$library" "$description"; done ;;
  --check)
    result=0
    while read -r library _ description; do
      describe "$library" "$work/$library.abi"
      compare "$description" "$work/$library.abi" || { echo "$library differs from $description (abidiff: $?)"; result=1; }
    done <<<"$libraries"
    # The comparison itself: what is changed in a description has to be seen.
    seen() {
      ! compare "$work/libnvte_ep.abi" "$work/changed.abi" >"$work/log" && grep -q "$1" "$work/log" || { echo "not seen: $1"; result=1; }
    }
    i32=$(sed -n 's/.*type-decl name="i32".* id="\([^"]*\)".*/\1/p' "$work/libnvte_ep.abi")
    usize=$(sed -n 's/.*type-decl name="usize".* id="\([^"]*\)".*/\1/p' "$work/libnvte_ep.abi")
    sed "s/type-id=\"[^\"]*\" name=\"handle_mem_size\"/type-id=\"$i32\" name=\"handle_mem_size\"/" "$work/libnvte_ep.abi" >"$work/changed.abi"
    seen "parameter 2 of type 'usize\*' changed"
    sed "s/name=\"hidden_dim\" type-id=\"$i32\"/name=\"hidden_dim\" type-id=\"$usize\"/" "$work/libnvte_ep.abi" >"$work/changed.abi"
    seen "type of 'i32 hidden_dim' changed"
    sed '/elf-symbol name="nvte_ep_prepare"/d;/function-decl name="nvte_ep_prepare"/,/<\/function-decl>/d' "$work/libnvte_ep.abi" >"$work/changed.abi"
    seen "1 Removed function"
    compare "$work/changed.abi" "$work/libnvte_ep.abi" >/dev/null || { echo "an added function counts as a change"; result=1; }
    exit $result ;;
  *) echo "usage: describe.sh --check | --write" >&2; exit 2 ;;
esac
