#!/usr/bin/env bash
# Installs what the tests need on Debian 12 or Ubuntu 24.04, beside Rust and a C++ compiler. Does nothing if all is there.
set -euo pipefail
packages="cmake ninja-build libgtest-dev libopenmpi-dev openmpi-bin clang libclang-dev python3-pip python3-venv binutils g++ pkg-config
abigail-tools dpkg-dev file lintian shellcheck"
missing=""
for package in $packages; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=" $package"
done
[ -n "$missing" ] || exit 0
sudo=""; [ "$(id -u)" -eq 0 ] || sudo=sudo
echo "installing:$missing"
$sudo apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
