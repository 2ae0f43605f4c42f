#!/usr/bin/env bash
# Formatting, lints, documentation, and whether what is generated and committed is current.
. "$(dirname "$0")/../common.sh"
check "cargo fmt" cargo fmt --all --check
check "cargo clippy" cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
check "arrows between files" cargo test --quiet --locked -p nvte-ep-core --test architecture
check "cargo doc" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features --locked --quiet
check "generated headers and the reference are current" cargo run --quiet --locked -p nvte-ep-codegen -- headers --check
wheels=$("$ROOT/qa/wheels.sh")
check "generated bindings are current" cargo run --quiet --locked -p nvte-ep-codegen -- bindings --check --wheels "$wheels"
check "the list of what the host runtime refuses is current" qa/host_symbols.sh --check
check "generated PTX is current" cargo run --quiet --locked -p nvte-ep-codegen -- kernels --check --nvrtc "$("$ROOT/qa/nvrtc.sh")"
check "pictures of the guide are current" packaging/pictures.py --check
check "the guide builds, and its links hold" qa/book.sh
check "C++ formatting" qa/clang_format.sh --check
check "shell scripts and recipes" qa/recipes.sh
check "licences and sources of dependencies" qa/deny.sh
check "third-party licences are current" packaging/third_party_licenses.py --check
finish
