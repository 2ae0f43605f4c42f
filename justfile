# The commands to remember. Each is also spelled out in CONTRIBUTING.md.

# everything that needs no GPU, as CI runs it
test *SUITES:
    ./qa/test.sh {{SUITES}}

# the quick checks before a commit
check:
    ./qa/test.sh L0_lint L0_unittest L0_abi

# the main job on this machine
run *ARGS:
    cargo run --release -p nvte-ep-cli -- run {{ARGS}}

# rewrite the committed C headers and Rust bindings
generate:
    cargo run -p nvte-ep-codegen -- headers
    cargo run -p nvte-ep-codegen -- bindings --wheels "$(./qa/wheels.sh)"

# format Rust and C++
format:
    cargo fmt --all
    ./qa/clang_format.sh --write

# the guide, in target/book/html
book:
    ./qa/book.sh

# the release: archive with SBOM, Debian package, checksums; twice, and compared
dist:
    ./packaging/dist.sh --verify

# the release for aarch64, run under qemu
aarch64:
    ./packaging/aarch64.sh

# rewrite the ABI descriptions, at a release
abi:
    ./qa/L0_abi/describe.sh --write
