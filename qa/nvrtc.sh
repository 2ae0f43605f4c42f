#!/usr/bin/env bash
# Unpacks NVRTC from its PyPI wheel into target/wheels (once per pin) and prints the library. usage: nvrtc.sh
# It compiles kernels/*.cu to PTX; an old one, so that every driver for CUDA 12 loads what it writes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
pin=nvidia-cuda-nvrtc-cu12==12.1.105
out=${CARGO_TARGET_DIR:-$root/target}/wheels/$pin
library=$out/nvidia/cuda_nvrtc/lib/libnvrtc.so.12
if [ ! -e "$out/.complete" ]; then
  tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform manylinux1_x86_64 -d "$tmp" "$pin" >&2
  rm -rf "$out"; mkdir -p "$out"
  python3 -m zipfile -e "$tmp"/*.whl "$out"
  touch "$out/.complete"
fi
echo "$library"
