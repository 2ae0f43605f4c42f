#!/usr/bin/env bash
# Gathers what qa/L2_gpu/test.sh runs into a folder that can be carried to a GPU machine without a network or cargo.
# usage: bundle.sh DIR       (x86-64; builds the release libraries and the C++ tests first)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(realpath -m "${1:?usage: bundle.sh DIR}")
target=${CARGO_TARGET_DIR:-$root/target}
cd "$root"
cargo build --release --locked
cmake -S . -B "$target/cpp" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNVTE_EP_WHEEL_HEADERS="$(qa/wheels.sh)" \
  -DNVTE_EP_TE_HEADERS="$(qa/te_wheel.sh)/include" >/dev/null
programs=(test_ep test_stress test_stress_te test_teardown test_boundary test_tensor test_stub call_cost call_cost_te test_te
  test_te_source te_differential test_abis_register_layer test_abis_te nccl_ep_conformance
  nccl_ep_low_latency)
cmake --build "$target/cpp" -j2 --target "${programs[@]}" nvte_ep_no_op_runtime
rm -rf "$out"; mkdir -p "$out/stub"
cp "$target/release/nvte-ep" "$out/"
cp "$target/release/libnvte_ep.so" "$out/libnvte_ep.so.1"
cp "$target/release/libnvte_ep_stub.so" "$out/stub/libnvte_ep.so.1"
cp "$target/release/libnvte_ep_host.so" "$target/release/libtransformer_engine.so" "$target/release/libnvte_ep_preload.so" "$out/"
for program in "${programs[@]}" libnvte_ep_no_op_runtime.so; do
  strip -o "$out/$program" "$(find "$target/cpp" -name "$program" -type f -perm -u+x | head -1)"
done
cp tests_cpp/conformance/h200_nccl_ep_0.1.0_{2,4}ranks.txt "$out/"
ln -s libnvte_ep.so.1 "$out/libnvte_ep.so"
du -sh "$out"
