#!/usr/bin/env bash
# Makes what is released, from a clean checkout: the archive nvte-ep-VERSION-linux-x86_64.tar.gz (the installed tree, with an
# SBOM of each binary), the Debian package, the wheel for PyTorch, and SHA256SUMS. usage: dist.sh [--verify | OUT]      (default: target/dist/out)
# --verify makes all of it a second time, from a clone in another folder, and compares the bytes.
# Takes minutes: a release build, once cargo-cyclonedx (from crates.io, compiled), and qa/L1_install on the result.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
. packaging/floor.sh
target=${CARGO_TARGET_DIR:-$root/target}
[ -z "$(git status --porcelain)" ] || { echo "a release is made of what is committed; git status says:"; git status --short; exit 1; }
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
verify=; [ "${1:-}" != --verify ] || { verify=1; shift; }
out=$(realpath -m "${1:-$target/dist/out}")
work=$target/dist/work; rm -rf "$work" "$out"; mkdir -p "$work" "$out"
export LC_ALL=C TZ=UTC; umask 022

echo "--- build"
packaging/cubins.sh "$work/cubins"
export NVTE_EP_CUBINS=$work/cubins
built=$(packaging/build.sh)
for file in "$built"/*.so "$built/nvte-ep"; do
  within_floor "$file"
  [ "$(stat -c %s "$file")" -lt 4200000 ] || { echo "$file is larger than 4.2 MB"; exit 1; }
  ! strings -a "$file" | grep -F -e "$root/" -e "${CARGO_HOME:-$HOME/.cargo}/" || { echo "$file names folders of this machine"; exit 1; }
done

echo "--- SBOM"
pin=cargo-cyclonedx@0.5.9
[ -x "$target/tools/$pin/bin/cargo-cyclonedx" ] || cargo install --quiet --locked --root "$target/tools/$pin" "$pin"
# It writes beside the sources and names their folder: so in a clone, whose name is taken out.
git clone --quiet "$root" "$work/source"
(cd "$work/source" && SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH "$target/tools/$pin/bin/cargo-cyclonedx" cyclonedx --quiet --format json \
  --spec-version 1.5 --describe binaries --no-build-deps --target x86_64-unknown-linux-gnu)
sbom=$work/sbom; mkdir "$sbom"
for file in "$work"/source/{abi/*,host,cli}/*.cdx.json; do
  sed "s#$work/source#/nvte-ep#g" "$file" >"$sbom/$(basename "$file" | sed 's/_\(cdylib\|cdylib-rlib\|bin\)\.cdx/.cdx/')"
done

echo "--- archive"
name=nvte-ep-$version-linux-x86_64
cmake -S . -B "$work/archive" -DNVTE_EP_BUILD_TESTS=OFF -DNVTE_EP_LIBRARY_DIR="$built" -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
cmake --install "$work/archive" --prefix "$work/$name" >/dev/null
cp -r "$sbom" "$work/$name/share/doc/nvte-ep/sbom"
tar -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go=rX -cf - "$name" \
  | gzip -9n >"$out/$name.tar.gz"

echo "--- Debian package"
cmake -S . -B "$work/debian" -DNVTE_EP_BUILD_TESTS=OFF -DNVTE_EP_LIBRARY_DIR="$built" -DCMAKE_INSTALL_PREFIX=/usr >/dev/null
SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH cpack -G DEB -B "$work/deb" --config "$work/debian/CPackConfig.cmake" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cp "$work"/deb/*.deb "$out/"

echo "--- wheel"
packaging/wheel.sh "$built" manylinux_2_28_x86_64 "$out"
(cd "$out" && sha256sum -- *.tar.gz *.deb *.whl >SHA256SUMS && cat SHA256SUMS)
[ -z "${NVTE_EP_DIST_ONLY:-}" ] || exit 0

echo "--- consumers"
NVTE_EP_RELEASED=$built bash qa/L1_install/test.sh >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
tail -1 "$work/log"

if [ -n "$verify" ]; then
  echo "--- once more, elsewhere"
  second=$(mktemp -d); trap 'rm -rf "$second"' EXIT
  git clone --quiet "$root" "$second/another name"
  mkdir -p "$second/target"; cp -r "$target/tools" "$second/target/"
  (cd "$second/another name" && NVTE_EP_DIST_ONLY=1 CARGO_TARGET_DIR=$second/target packaging/dist.sh "$second/out" >"$work/log" 2>&1) || { cat "$work/log"; exit 1; }
  diff "$out/SHA256SUMS" "$second/out/SHA256SUMS" && echo "both times the same bytes"
fi
