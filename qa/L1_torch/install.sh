#!/usr/bin/env bash
# A Python environment with PyTorch for the tests on the CPU, below target/ (once per pin). Prints its folder. usage: install.sh
# Downloads 560 MB the first time (pip keeps them in its cache): PyPI's wheel of PyTorch is that for CUDA. What CUDA's own
# libraries would add, 2 GB, is not downloaded: see cpu_torch.py.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
pins="filelock==3.20.0 typing-extensions==4.15.0 sympy==1.14.0 mpmath==1.3.0 networkx==3.4.2 jinja2==3.1.6 MarkupSafe==3.0.3 fsspec==2025.10.0
setuptools==80.9.0 numpy==2.2.6 pytest==8.4.2 pluggy==1.6.0 iniconfig==2.3.0 packaging==25.0 pygments==2.19.2"
torch=torch==2.11.0
key=$(cat "$0" "$root/qa/L1_torch/cpu_torch.py" | sha256sum | cut -c1-12)
out=${CARGO_TARGET_DIR:-$root/target}/torch/$key
if [ ! -e "$out/.complete" ]; then
  rm -rf "$out"
  python3 -m venv "$out" >&2 || { echo "python3 -m venv failed: apt install python3-venv" >&2; exit 1; }
  # Without the libraries of CUDA that it asks for.
  # shellcheck disable=SC2086
  "$out/bin/python" -m pip install -q --disable-pip-version-check --no-deps --only-binary=:all: --no-compile $pins $torch >&2
  "$out/bin/python" "$root/qa/L1_torch/cpu_torch.py" "$(dirname "$("$out/bin/python" -c 'import importlib.util as u; print(u.find_spec("torch").origin)')")" >&2
  touch "$out/.complete"
fi
echo "$out"
