#!/usr/bin/env bash
# Makes the wheel for PyTorch of libraries that are there. usage: wheel.sh LIBRARIES PLATFORM OUT
# LIBRARIES is a folder that build.sh printed, PLATFORM a tag as manylinux_2_28_x86_64.
set -euo pipefail
libraries=$(realpath "${1:?usage: wheel.sh LIBRARIES PLATFORM OUT}") out=$(realpath "$3")
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
target=${CARGO_TARGET_DIR:-$root/target}
pin=setuptools==80.9.0
tools=$target/tools/$pin
if [ ! -d "$tools" ]; then
  python3 -m pip install -q --disable-pip-version-check --no-deps --root-user-action=ignore --target "$tools.part" "$pin" >&2
  mv "$tools.part" "$tools"
fi
NVTE_EP_LIBRARY_DIR=$libraries SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} PYTHONPATH=$tools \
  python3 -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --config-settings="--build-option=--plat-name=$2" \
  -w "$out" ./python
wheel=$(ls "$out"/nvte_ep-*.whl)
[ "$(stat -c %s "$wheel")" -lt 6000000 ] || { echo "$wheel is larger than 6 MB"; exit 1; }
python3 -m zipfile -l "$wheel" | awk '{print $1, $NF}' | grep -v dist-info
