#!/usr/bin/env bash
# TransformerEngine's headers, the list of what its library exports and how large it is, from its PyPI wheel, in target/wheels
# (once per pin). Prints the folder: include/, exports.txt and size.txt. usage: te_wheel.sh
# Nothing here is shipped; the library itself (343 MB) is read and removed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
pin="transformer-engine-cu13==2.20.2"
out=${CARGO_TARGET_DIR:-$root/target}/wheels/te-$(sha256sum "$root/qa/te_wheel.sh" | cut -c1-12)
if [ ! -e "$out/.complete" ]; then
  tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 -d "$tmp" "$pin" >&2
  rm -rf "$out"; mkdir -p "$out"
  python3 - "$tmp" "$out" >&2 <<'PY'
import pathlib, sys, zipfile
source, target = map(pathlib.Path, sys.argv[1:])
(wheel,) = source.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if "/common/include/" in name:
            path = target / "include" / name.split("/common/include/")[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
        elif name.endswith("/libtransformer_engine.so"):
            (source / "te.so").write_bytes(archive.read(name))
PY
  nm -D --defined-only "$tmp/te.so" | awk '{print $NF}' | LC_ALL=C sort >"$out/exports.txt"
  needed=$(readelf -d "$tmp/te.so" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | grep -vE '^(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux.*)\.so' | xargs)
  echo "$pin: libtransformer_engine.so $(stat -c %s "$tmp/te.so") bytes; needs $needed" >"$out/size.txt"
  touch "$out/.complete"
fi
echo "$out"
