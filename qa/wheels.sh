#!/usr/bin/env bash
# Unpacks the headers that our checks compare against, from their PyPI wheels, into target/wheels (once per pin), and writes
# which symbols their libraries export into its folder symbols.
# Prints the folder. usage: wheels.sh
# Nothing here is shipped: the wheels' headers are read where they lie.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
pins="nvidia-nccl-cu13==2.30.7 nccl-extensions==0.1.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85"
key=$(printf '%s' "$pins symbols" | sha256sum | cut -c1-12)
out=${CARGO_TARGET_DIR:-$root/target}/wheels/$key
if [ ! -e "$out/.complete" ]; then
  tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
  # shellcheck disable=SC2086
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_18_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$tmp" $pins >&2
  rm -rf "$out"; mkdir -p "$out"
  python3 - "$tmp" "$out" >&2 <<'PY'
import pathlib, sys, zipfile
source, target = map(pathlib.Path, sys.argv[1:])
for wheel in sorted(source.glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/include/" in name:
                archive.extract(name, target)
            elif name.rsplit("/", 1)[-1] in ("libcudart.so.13", "libnccl.so.2"):
                archive.extract(name, source)
PY
  mkdir "$out/symbols"
  find "$tmp" -name 'lib*.so.*' | while read -r library; do
    nm -D --defined-only "$library" | awk '{print $NF}' | sed 's/@.*//' | LC_ALL=C sort -u >"$out/symbols/${library##*/}.txt"
  done
  touch "$out/.complete"
fi
echo "$out"
