#!/usr/bin/env bash
# Rust tests of every crate. The command's tests run it with the libraries beside it, so those are built first.
. "$(dirname "$0")/../common.sh"
check "cargo build" cargo build --locked
check "cargo test" cargo test --workspace --locked
finish
