#!/usr/bin/env bash
# Compiles kernels/native.ptx to machine code for the architectures that releases carry, so that nothing is compiled at load, and
# prints what each kernel takes. A kernel that spills registers on sm_90 or sm_100 is an error. usage: cubins.sh OUT
# NVTE_EP_CUBINS=OUT makes a build take them in (build.rs). The compiler is ptxas alone, out of its PyPI wheel.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "${1:?usage: cubins.sh OUT}"); mkdir -p "$out"
pin=$(grep '^nvidia-cuda-nvcc==' "$root/packaging/requirements-cubins.txt")
folder=${CARGO_TARGET_DIR:-$root/target}/wheels/$pin
if [ ! -e "$folder/.complete" ]; then
  tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform manylinux_2_17_x86_64 -d "$tmp" "$pin" >&2
  rm -rf "$folder"; mkdir -p "$folder"
  python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("nvidia/cu13/bin/ptxas", sys.argv[2])' "$tmp"/*.whl "$folder"
  chmod +x "$folder/nvidia/cu13/bin/ptxas"; touch "$folder/.complete"
fi
result=0
for arch in 90 100 120; do
  log=$("$folder/nvidia/cu13/bin/ptxas" -v -arch="sm_$arch" "$root/kernels/native.ptx" -o "$out/native_sm_$arch.cubin" 2>&1)
  [ "$(grep -c 'Compiling entry function' <<<"$log")" -ge 5 ] || { echo "$log"; exit 1; }
  sed -n "s/.*Compiling entry function '\(.*\)' for '\(.*\)'/\2 \1:/p; s/.*Used \([0-9]* registers\).*/  \1/p; s/.* \([1-9][0-9]* bytes spill stores\).*/  \1/p" <<<"$log"
  if [ "$arch" -lt 120 ] && grep -q '[1-9][0-9]* bytes spill' <<<"$log"; then echo "sm_$arch: a kernel spills registers"; result=1; fi
done
exit $result
