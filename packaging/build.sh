#!/usr/bin/env bash
# Builds the libraries and the command as they are released: for the oldest glibc that we support, and without the names of
# this machine's folders in them. Prints the folder with the result.
# usage: build.sh [TRIPLE [CARGO ARGUMENT...]]       TRIPLE: x86_64-unknown-linux-gnu (default) or aarch64-unknown-linux-gnu
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
triple=${1:-x86_64-unknown-linux-gnu}; shift || true
arch=${triple%%-*}
target=${CARGO_TARGET_DIR:-$root/target}
. packaging/floor.sh

zig=$target/tools/ziglang==0.13.0
if [ ! -x "$zig/ziglang/zig" ]; then
  python3 -m pip install -q --disable-pip-version-check --no-deps --root-user-action=ignore --target "$zig.part" "$(basename "$zig")" >&2
  rm -rf "$zig"; mv "$zig.part" "$zig"
fi
export NVTE_EP_ZIG=$zig/ziglang/zig NVTE_EP_ZIG_TARGET=$arch-linux-gnu.$GLIBC_FLOOR
export ZIG_GLOBAL_CACHE_DIR=$target/tools/zig-cache ZIG_LOCAL_CACHE_DIR=$target/tools/zig-cache
export NVTE_EP_CXX=${CXX:-g++}
[ "$arch" = "$(uname -m)" ] || NVTE_EP_CXX=$arch-linux-gnu-g++
underscored=${triple//-/_}
export "CXX_$underscored=$NVTE_EP_CXX" "CARGO_TARGET_$(tr '[:lower:]-' '[:upper:]_' <<<"$triple")_LINKER=$root/packaging/zig-cc"

cargo fetch --quiet --locked --target "$triple" >&2
# What panic messages name: sources of this folder, of crates, and of the standard library where they are installed. Cargo's
# encoded form of flags, since folders may have spaces in their names.
flags=--remap-path-prefix=$root=/nvte-ep
for folder in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do flags+=$'\x1f'--remap-path-prefix=$folder=/crates; done
flags+=$'\x1f'--remap-path-prefix=$("${RUSTC:-rustc}" --print sysroot)/lib/rustlib/src/rust=/rust
export CARGO_ENCODED_RUSTFLAGS=$flags
cargo build --quiet --release --locked --target "$triple" --target-dir "$target/dist" "$@" >&2
echo "$target/dist/$triple/release"
