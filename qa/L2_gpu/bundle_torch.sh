#!/usr/bin/env bash
# Gathers what qa/L2_gpu/torch.sh runs into a folder that can be carried to a GPU machine without a network, 6 MB: the wheel of the
# Python package, its tests, its example, and pytest's wheels. usage: bundle_torch.sh DIR
# NVTE_EP_LIBRARY_DIR names a folder with the release libraries; without it they are built.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(realpath -m "${1:?usage: bundle_torch.sh DIR}")
libraries=${NVTE_EP_LIBRARY_DIR:-}
cd "$root"
if [ -z "$libraries" ]; then cargo build --release --locked; libraries=${CARGO_TARGET_DIR:-$root/target}/release; fi
rm -rf "$out"; mkdir -p "$out/wheels"
packaging/wheel.sh "$libraries" linux_x86_64 "$out/wheels" >/dev/null
# Pure Python, for any version of it.
python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform any --implementation py --abi none \
  --python-version 3.10 -d "$out/wheels" \
  pytest==8.4.2 pluggy==1.6.0 iniconfig==2.3.0 packaging==25.0 pygments==2.19.2 exceptiongroup==1.3.0 tomli==2.3.0 typing-extensions==4.15.0
cp -r python/tests "$out/tests"
cp -r examples/pytorch "$out/examples"
find "$out" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$out"
