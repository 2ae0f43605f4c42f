#!/usr/bin/env bash
# Rust tests of every crate.
. "$(dirname "$0")/../common.sh"
check "cargo test" cargo test --workspace --all-features --locked --no-fail-fast
finish
