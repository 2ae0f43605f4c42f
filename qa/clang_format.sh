#!/usr/bin/env bash
# clang-format over our C++ sources, of one version on every machine: versions differ in what they make of the same style.
# usage: clang_format.sh --check | --write
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
pin=clang-format==14.0.6
folder=${CARGO_TARGET_DIR:-$root/target}/$pin
[ -x "$folder/bin/clang-format" ] || python3 -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "$pin" 2>/dev/null
case ${1:-} in
  --check) mode=(--dry-run --Werror) ;;
  --write) mode=(-i) ;;
  *) echo "usage: clang_format.sh --check | --write" >&2; exit 2 ;;
esac
git ls-files -z '*.cc' '*.h' ':!include' | PYTHONPATH=$folder xargs -0 "$folder/bin/clang-format" "${mode[@]}" --style=file
