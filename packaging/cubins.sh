#!/usr/bin/env bash
# Compiles kernels/native.ptx to machine code for the architectures that releases carry, so that nothing is compiled at load, and
# prints what each kernel takes. Errors: a kernel that spills registers on sm_90 or sm_100, or that has no bulk copies. usage: cubins.sh OUT
# NVTE_EP_CUBINS=OUT makes a build take them in (build.rs). Compiler and disassembler alone, out of their PyPI wheels (42 MB, once).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "${1:?usage: cubins.sh OUT}"); mkdir -p "$out"
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
# tool PACKAGE PROGRAM: where it is, unpacked once for a pin.
tool() {
  local pin folder
  pin=$(grep "^$1==" "$root/packaging/requirements-cubins.txt")
  folder=${CARGO_TARGET_DIR:-$root/target}/wheels/$pin
  if [ ! -x "$folder/nvidia/cu13/bin/$2" ]; then
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform manylinux_2_17_x86_64 -d "$tmp/$1" "$pin" >&2
    python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(sys.argv[2], sys.argv[3])' "$tmp/$1"/*.whl "nvidia/cu13/bin/$2" "$tmp/$1"
    chmod +x "$tmp/$1/nvidia/cu13/bin/$2"
    mkdir -p "$folder/nvidia/cu13/bin"; mv "$tmp/$1/nvidia/cu13/bin/$2" "$folder/nvidia/cu13/bin/$2"
  fi
  echo "$folder/nvidia/cu13/bin/$2"
}
ptxas=$(tool nvidia-cuda-nvcc ptxas)
nvdisasm=$(tool nvidia-cuda-nvdisasm nvdisasm)
kernels=$(sed -n 's/^\.visible \.entry \([a-z0-9_]*\)(.*/\1/p' "$root/kernels/native.ptx")
[ "$(wc -w <<<"$kernels")" -ge 5 ] || { echo "kernels/native.ptx has too few kernels"; exit 1; }
result=0
for arch in 90 100 120; do
  cubin=$out/native_sm_$arch.cubin
  "$ptxas" -v -arch="sm_$arch" "$root/kernels/native.ptx" -o "$cubin" >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
  "$nvdisasm" -c "$cubin" >"$tmp/code"
  for kernel in $kernels; do
    taken=$(grep -A3 "Compiling entry function '$kernel'" "$tmp/log")
    registers=$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' <<<"$taken")
    spilled=$(sed -n 's/.* \([0-9]*\) bytes spill stores.*/\1/p' <<<"$taken")
    # count PATTERN: instructions of the kernel.
    count() { awk -v begin=".text.$kernel:" '$0 ~ /^\.text\./ {inside = $0 == begin} inside' "$tmp/code" | grep -c "$1" || true; }
    loads=$(count 'UBLKCP\.S\.G') stores=$(count 'UBLKCP\.G\.S')
    echo "sm_$arch $kernel: $registers registers, $spilled bytes spilled, $loads bulk loads, $stores bulk stores"
    if [ "$arch" -lt 120 ] && [ "$spilled" != 0 ]; then echo "!!! spills"; result=1; fi
    case $kernel in
      *dispatch) [ "$loads" -gt 0 ] && [ "$stores" -gt 0 ] || { echo "!!! no bulk copies"; result=1; } ;;
      *combine*) [ "$loads" -gt 0 ] || { echo "!!! no bulk loads"; result=1; } ;;
    esac
  done
done
exit $result
