#!/usr/bin/env bash
# The Python package on the CPU: installed as a user does, its tests with 2 and 4 ranks over the host runtime, the example, the README's
# program. Downloads PyTorch: see install.sh. The limits only end what hangs.
. "$(dirname "$0")/../common.sh"
environment=$(qa/L1_torch/install.sh) || { echo "no PyTorch"; exit 1; }
python=$environment/bin/python

# Builds with cargo, into target/release, where the suites before have built.
check "pip install ./python" "$python" -m pip install -q --disable-pip-version-check --force-reinstall --no-compile ./python
package=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
small() { local bytes; bytes=$(tar -C "$package" -cz nvte_ep | wc -c); echo "$bytes bytes compressed"; [ "$bytes" -lt 6000000 ]; }
check "the wheel stays below 6 MB" small
check "nvte-ep is on PATH" env PATH="$environment/bin:$PATH" nvte-ep run --runtime host --ranks 2 --tokens 16 --hidden 64
# ranks N PROGRAM ARGUMENT...: each rank runs a Python program.
ranks() {
  local count=$1; shift
  timeout -k 5 610 "$environment/bin/nvte-ep" launch -n "$count" --timeout 600 -- "$python" "$@"
}
tests() { local count=$1; shift; ranks "$count" -m pytest -q -p no:cacheprovider "$@"; }
check "tests, 2 ranks" tests 2 python/tests/ranks
# What does not depend on the number of ranks is left out.
check "tests, 4 ranks" tests 4 python/tests/ranks/test_forward.py python/tests/ranks/test_gradients.py python/tests/ranks/test_zero_copy.py
check "processes" "$python" -m pytest -q -p no:cacheprovider python/tests/test_processes.py
check "the example trains" ranks 2 examples/pytorch/ep_moe.py --steps 100
check "the example is a dense model, 4 ranks" ranks 4 examples/pytorch/ep_moe.py --check
check "bench" ranks 2 -m nvte_ep.bench --iterations 3 --no-compile
readme() {
  sed -n '/^```python$/,/^```$/p' python/README.md | sed '1d;$d' >"$TARGET/torch/readme.py"
  ranks 2 "$TARGET/torch/readme.py"
}
check "the README's program" readme
finish
