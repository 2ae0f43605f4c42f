#!/usr/bin/env bash
# The Python package on the CPU: the wheel, and its tests with 2 and 4 ranks over the host runtime. Downloads PyTorch: see install.sh.
. "$(dirname "$0")/../common.sh"
environment=$(qa/L1_torch/install.sh) || { echo "no PyTorch"; exit 1; }
python=$environment/bin/python
cargo build --release --locked || exit 1
wheels=$TARGET/python; rm -rf "$wheels"; mkdir -p "$wheels"

# Built as a user does, but from the libraries that are there.
wheel() {
  NVTE_EP_LIBRARY_DIR=$TARGET/release "$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$wheels" \
    ./python && ls -l "$wheels" && [ "$(stat -c %s "$wheels"/*.whl)" -lt 6000000 ]
}
check "the wheel is built, and below 6 MB" wheel
installed() { "$python" -m pip install -q --disable-pip-version-check --no-deps --no-index --force-reinstall "$wheels"/*.whl; }
check "the wheel is installed" installed
check "nvte-ep is on PATH" env PATH="$environment/bin:$PATH" nvte-ep run --runtime host --ranks 2 --tokens 16 --hidden 64
ranks() {
  local count=$1; shift
  timeout -k 5 170 "$environment/bin/nvte-ep" launch -n "$count" --timeout 160 -- "$python" -m pytest -q -p no:cacheprovider "$@"
}
check "tests, 2 ranks" ranks 2 python/tests/ranks
# What does not depend on the number of ranks is left out.
check "tests, 4 ranks" ranks 4 python/tests/ranks/test_forward.py python/tests/ranks/test_gradients.py python/tests/ranks/test_zero_copy.py
check "processes" "$python" -m pytest -q -p no:cacheprovider python/tests/test_processes.py
example() {
  local count=$1; shift
  timeout -k 5 120 "$environment/bin/nvte-ep" launch -n "$count" --timeout 110 -- "$python" examples/pytorch/ep_moe.py "$@"
}
check "the example trains" example 2
check "the example is a dense model, 4 ranks" example 4 --check
bench() { timeout -k 5 120 "$environment/bin/nvte-ep" launch -n 2 --timeout 110 -- "$python" -m nvte_ep.bench --iterations 3 --no-compile; }
check "bench" bench
readme() {
  sed -n '/^```python$/,/^```$/p' python/README.md | sed '1d;$d' >"$wheels/readme.py"
  timeout -k 5 120 "$environment/bin/nvte-ep" launch -n 2 --timeout 110 -- "$python" "$wheels/readme.py"
}
check "the README's program" readme
finish
