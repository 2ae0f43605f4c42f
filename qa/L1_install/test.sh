#!/usr/bin/env bash
# The installed tree, moved after its installation: consumers by find_package and pkg-config, the command, the stub.
. "$(dirname "$0")/../common.sh"
work=$TARGET/install; rm -rf "$work"; mkdir -p "$work"
check "release build" cargo build --release --locked
install_tree() {
  cmake -S "$ROOT" -B "$work/build-$1" -G Ninja -DNVTE_EP_BUILD_TESTS=OFF -DNVTE_EP_LIBRARY_DIR="$TARGET/release" "${@:2}" >"$work/log" 2>&1 \
    && DESTDIR="$work/stage" cmake --install "$work/build-$1" --prefix /opt/nvte >>"$work/log" 2>&1 \
    && mv "$work/stage/opt/nvte" "$work/$1" || { cat "$work/log"; return 1; }
}
check "install, with DESTDIR, then move" install_tree full
lib=$work/full/lib; [ -d "$lib" ] || lib=$(dirname "$(find "$work/full" -name libnvte_ep.so.1)")
nothing_named() { ! grep -rIl -e "$work/stage" -e "$ROOT" -e /opt/nvte "$work/full"; }
check "nothing names the place of the build or the prefix" nothing_named
dangling() { ! find "$work/full" -xtype l | grep .; }
check "no link leads nowhere" dangling

consumers() {
  cmake -S tests_cpp/consumers -B "$work/consumers" -G Ninja -DCMAKE_CXX_COMPILER="$1" -DCMAKE_PREFIX_PATH="$work/full" --fresh >"$work/log" 2>&1 \
    && cmake --build "$work/consumers" >>"$work/log" 2>&1 || { cat "$work/log"; return 1; }
  for program in cpp_17 cpp_20 te c; do "$work/consumers/$program" || return 1; done
}
for compiler in g++ clang++; do check "find_package, $compiler" consumers "$compiler"; done
with_pkg_config() {
  # shellcheck disable=SC2046
  g++ -std=c++17 -Wall -Wextra -Werror tests_cpp/consumers/consumer.cc -o "$work/by_pc" \
    $(PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --cflags --libs nvte_ep) && LD_LIBRARY_PATH=$lib "$work/by_pc" | grep register_layer
}
check "pkg-config" with_pkg_config
command_runs() { env -u NVTE_EP_RUNTIME "$work/full/bin/nvte-ep" run --runtime host --ranks 2 --tokens 32 --hidden 64 | tail -1 | grep -x "all checks passed"; }
check "the installed command" command_runs
# shellcheck disable=SC2016
command_launches() { "$work/full/bin/nvte-ep" launch -n 2 -- sh -c 'test -e "${LD_LIBRARY_PATH%%:*}/libnccl.so.2" && test "$WORLD_SIZE" = 2'; }
check "the installed command launches programs" command_launches
versions() {
  local version
  for version in 0.1 0.2; do
    mkdir -p "$work/version-$version"
    printf 'cmake_minimum_required(VERSION 3.18)\nproject(p NONE)\nfind_package(nvte_ep %s REQUIRED)\n' $version >"$work/version-$version/CMakeLists.txt"
  done
  cmake -S "$work/version-0.1" -B "$work/version-0.1/build" -DCMAKE_PREFIX_PATH="$work/full" >/dev/null \
    && ! cmake -S "$work/version-0.2" -B "$work/version-0.2/build" -DCMAKE_PREFIX_PATH="$work/full" >/dev/null 2>&1
}
check "version 0.1 is taken, 0.2 is not" versions
check "install without NCCL EP" install_tree stub -DNVTE_EP_WITH_NCCL_EP=OFF
stub_serves() { LD_LIBRARY_PATH=$(dirname "$(find "$work/stub" -name libnvte_ep.so.1)") "$work/by_pc" | grep stub; }
check "and the stub serves the same program" stub_serves
finish
