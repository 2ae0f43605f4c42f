#!/usr/bin/env bash
# Rust tests of every crate; the release build first, since the command's tests run it.
. "$(dirname "$0")/../common.sh"
check "cargo test" cargo test --workspace --locked
finish
