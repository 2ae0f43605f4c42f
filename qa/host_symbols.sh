#!/usr/bin/env bash
# host/not_supported.txt: the functions of the CUDA runtime and NCCL that the host runtime only refuses. Those that the
# libraries of the pinned wheels export, less those that host/src/surface defines. usage: host_symbols.sh --check | --write
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
wheels=$(qa/wheels.sh)
list() {
  comm -23 <(cat "$wheels"/symbols/*.txt | grep -E '^(__)?(cuda|nccl|pnccl)' | LC_ALL=C sort -u) \
    <(grep -rhoE '^pub unsafe extern "C(-unwind)?" fn \w+' host/src/surface | awk '{print $NF}' | LC_ALL=C sort -u)
}
case ${1:-} in
  --write) list >host/not_supported.txt ;;
  --check) diff <(list) host/not_supported.txt ;;
  *) echo "usage: host_symbols.sh --check | --write" >&2; exit 2 ;;
esac
