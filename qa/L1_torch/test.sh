#!/usr/bin/env bash
# The Python package on the CPU: the wheel, and its tests with 2 and 4 ranks over the host runtime. Downloads PyTorch: see install.sh.
. "$(dirname "$0")/../common.sh"
environment=$(qa/L1_torch/install.sh) || { echo "no PyTorch"; exit 1; }
python=$environment/bin/python
cargo build --release --locked || exit 1
wheels=$TARGET/python; rm -rf "$wheels" "$TARGET/python_build"; mkdir -p "$wheels"

# Built as a user does, but from the libraries that are there.
wheel() {
  cp -r python "$TARGET/python_build" && cp Cargo.toml LICENSE THIRD_PARTY_LICENSES "$TARGET/" \
    && NVTE_EP_LIBRARY_DIR=$TARGET/release "$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$wheels" \
      "$TARGET/python_build" && ls -l "$wheels" && [ "$(stat -c %s "$wheels"/*.whl)" -lt 6000000 ]
}
check "the wheel is built, and below 6 MB" wheel
installed() { "$python" -m pip install -q --disable-pip-version-check --no-deps --no-index --force-reinstall "$wheels"/*.whl; }
check "the wheel is installed" installed
check "nvte-ep is on PATH" env PATH="$environment/bin:$PATH" nvte-ep run --runtime host --ranks 2 --tokens 16 --hidden 64
ranks() {
  local count=$1; shift
  timeout -k 5 170 "$environment/bin/nvte-ep" launch -n "$count" --timeout 160 -- "$python" -m pytest -q -p no:cacheprovider "$@"
}
for count in 2 4; do check "tests, $count ranks" ranks "$count" python/tests/ranks; done
check "processes" "$python" -m pytest -q -p no:cacheprovider python/tests/test_processes.py
finish
