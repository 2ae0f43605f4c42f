#!/usr/bin/env bash
# Builds the release for aarch64 (Grace Hopper), checks it, and runs programs and the command on the host runtime under qemu.
# Installs gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu, qemu-user and Open MPI (apt). usage: aarch64.sh
#
# Where the toolchain in use has no standard library for the target (`rustup target add aarch64-unknown-linux-gnu`), the
# compiler that Debian 12 carries for its browsers is taken, with its library for arm64, unpacked below target/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
. packaging/floor.sh
triple=aarch64-unknown-linux-gnu
tools=${CARGO_TARGET_DIR:-$root/target}/tools/$triple
packages=$(for p in gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user openmpi-bin; do dpkg -s "$p" >/dev/null 2>&1 || echo "$p"; done)
# shellcheck disable=SC2086
[ -z "$packages" ] || apt-get install -y -qq --no-install-recommends $packages >/dev/null

if [ ! -d "$(rustc --print target-libdir --target $triple)" ]; then
  if [ ! -e "$tools/.complete" ]; then
    rm -rf "$tools"; mkdir -p "$tools/apt/lists/partial" "$tools/cache/archives/partial" "$tools/packages"
    # apt of our own: the machine's list of architectures stays as it is.
    apt="-qq -o Dir::State=$tools/apt -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$tools/cache
      -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root"
    # shellcheck disable=SC2086
    { apt-get $apt update
      std=$(apt-cache $apt depends libstd-rust-web-dev | sed -n 's/.*Depends: \(libstd-rust-web-.*\)/\1/p')
      llvm=$(apt-cache $apt depends "$std" | sed -n 's/.*Depends: \(libllvm.*\)/\1/p')
      (cd "$tools/packages" && apt-get $apt download rustc-web libstd-rust-web-dev "$std" "$llvm" libstd-rust-web-dev:arm64); } >&2
    for package in "$tools"/packages/*.deb; do dpkg -x "$package" "$tools"; done
    rm -r "$tools/packages"; touch "$tools/.complete"
  fi
  export RUSTC=$tools/usr/bin/rustc LD_LIBRARY_PATH=$tools/usr/lib/x86_64-linux-gnu
fi
"${RUSTC:-rustc}" --version
built=$(packaging/build.sh $triple)
unset LD_LIBRARY_PATH
for file in "$built"/*.so "$built/nvte-ep"; do
  readelf -h "$file" | grep -q 'Machine: *AArch64' || { echo "$file is not for AArch64"; exit 1; }
  within_floor "$file"
done
wheels=${CARGO_TARGET_DIR:-$root/target}/dist/aarch64; rm -rf "$wheels"; mkdir -p "$wheels"
packaging/wheel.sh "$built" manylinux_2_28_aarch64 "$wheels"
diff <(nm -D --defined-only "$built/libnvte_ep.so" | awk '{print $NF}' | LC_ALL=C sort) abi/register_layer/exports.txt

aarch64-linux-gnu-gcc -std=c11 -Wall -Wextra -Werror -pedantic tests_cpp/consumers/consumer.c -o "$built/consumer" \
  -Iinclude/nvte_ep -Iinclude/nvte_ep_host -L"$built" -lnvte_ep -lnvte_ep_host
aarch64-linux-gnu-g++ -std=c++17 -Wall -Wextra -Werror -pedantic tests_cpp/consumers/consumer.cc -o "$built/consumer_cc" \
  -Iinclude/nvte_ep -L"$built" -lnvte_ep
emulate="qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$built:/usr/aarch64-linux-gnu/lib -E NVTE_EP_RUNTIME=host"
timeout 300 $emulate "$built/consumer" | tail -1 | grep -x "step exact"
timeout 300 $emulate "$built/consumer_cc" | grep "nvte_ep_combine: "
# One rank, as mpirun starts it: by itself the command would start its rank as a program of this machine. Not two, since qemu
# makes up the start time in /proc/self/stat by which the host runtime knows that a peer still lives.
export NVTE_EP_RUNTIME=host OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# step FILE PROGRAM...: its digests go to FILE.
step() {
  timeout 300 mpirun --oversubscribe --bind-to none -n 1 "${@:2}" run --tokens 16 --hidden 64 --digest >"$1.log"
  tail -1 "$1.log" | grep -qx "all checks passed"
  grep digest "$1.log" >"$1"
}
# shellcheck disable=SC2086
step "$built/digests" $emulate "$built/nvte-ep"
step "$built/digests_here" "$(unset RUSTC; packaging/build.sh)/nvte-ep"
diff "$built/digests" "$built/digests_here"
echo "nvte-ep run: all checks passed, and $(wc -l <"$built/digests") digests as on this machine"
