#!/usr/bin/env bash
# Gathers what qa/L2_gpu/torch.sh runs into a folder that can be carried to a GPU machine without a network: the Python package with its
# libraries, its tests, and pytest. usage: bundle_torch.sh DIR      (builds the release libraries first)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(realpath -m "${1:?usage: bundle_torch.sh DIR}")
target=${CARGO_TARGET_DIR:-$root/target}
cd "$root"
cargo build --release --locked
rm -rf "$out"; mkdir -p "$out/nvte_ep/lib" "$out/nvte_ep/bin"
cp python/nvte_ep/*.py "$out/nvte_ep/"
cp -r python/tests "$out/tests"
[ ! -d examples/pytorch ] || cp -r examples/pytorch "$out/examples"
strip -o "$out/nvte_ep/lib/libtransformer_engine.so" "$target/release/libtransformer_engine.so"
strip -o "$out/nvte_ep/lib/libnvte_ep.so.1" "$target/release/libnvte_ep.so"
strip -o "$out/nvte_ep/lib/libnvte_ep_host.so.1" "$target/release/libnvte_ep_host.so"
strip -o "$out/nvte_ep/bin/nvte-ep" "$target/release/nvte-ep"
mkdir "$out/nvte_ep/bin/host_runtime"
for link in "$target"/release/host_runtime/*; do : >"$out/nvte_ep/bin/host_runtime/${link##*/}"; done
# Pure Python, for any version of it.
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile --target "$out/pytest" \
  pytest==8.4.2 pluggy==1.6.0 iniconfig==2.3.0 packaging==25.0 pygments==2.19.2 exceptiongroup==1.3.0 tomli==2.3.0 typing-extensions==4.15.0
find "$out" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$out"
