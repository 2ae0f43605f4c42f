#!/usr/bin/env bash
# What is built, installed and moved: consumers of every kind, with every compiler and standard; the Debian package; the
# command; the options of the build; what it weighs beside TransformerEngine's library.
. "$(dirname "$0")/../common.sh"
work=$TARGET/install; rm -rf "$work"; mkdir -p "$work"
export NVTE_EP_RUNTIME=host
# quietly COMMAND...: its output only where it fails.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }; }

# ---- the build ----

# By CMake into target/; or, with NVTE_EP_RELEASED, the folder of a release build, which packaging/dist.sh gives.
built=${NVTE_EP_RELEASED:-$TARGET/release}
build() { quietly cmake -S "$ROOT" -B "$work/build" -DNVTE_EP_BUILD_TESTS=OFF && quietly cmake --build "$work/build" -j2; }
[ -n "${NVTE_EP_RELEASED:-}" ] || check "release build, by CMake" build

# The jobs that cargo is asked for, seen by a cargo that writes down its arguments.
mkdir -p "$work/jobs"; printf '#!/bin/sh\necho "$@" >"%s/jobs/arguments"\n' "$work" >"$work/jobs/cargo"; chmod +x "$work/jobs/cargo"
jobs_are() {
  local wanted=$1; shift
  env -u MAX_JOBS -u CMAKE_BUILD_PARALLEL_LEVEL -u MAKEFLAGS "$@" cmake -D CARGO="$work/jobs/cargo" -D PROFILE=release \
    -D TARGET_DIR="$work/jobs" -D TARGET= -D "PACKAGES=a;b" -P cmake/cargo_build.cmake || return 1
  [ "$(cat "$work/jobs/arguments")" = "build --quiet --locked --profile release${wanted:+ $wanted} -p a -p b" ] || { cat "$work/jobs/arguments"; return 1; }
}
check "no number of jobs" jobs_are ""
check "MAX_JOBS=0 is no number" jobs_are "" MAX_JOBS=0
check "MAX_JOBS" jobs_are "-j 3" MAX_JOBS=3 CMAKE_BUILD_PARALLEL_LEVEL=5
check "CMAKE_BUILD_PARALLEL_LEVEL" jobs_are "-j 5" CMAKE_BUILD_PARALLEL_LEVEL=5
check "make -j" jobs_are "-j 2" MAKEFLAGS=" -j2 --jobserver-auth=3,4"
bad_jobs() { ! jobs_are "" MAX_JOBS=many 2>"$work/log" && grep 'MAX_JOBS takes a number of jobs, got "many"' "$work/log"; }
check "MAX_JOBS=many is refused" bad_jobs
# refused WORDS OPTION...: CMake ends with these words where it configures this project with the options.
refused() {
  ! cmake -S "$ROOT" -B "$work/refused" -G Ninja --fresh -DNVTE_EP_BUILD_TESTS=OFF "${@:2}" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }
  tr -s ' \n' ' ' <"$work/log" | grep -F -e "$1" || { cat "$work/log"; return 1; }
}
check "NVTE_EP_LIBRARY_DIR that does not exist" refused \
  "NVTE_EP_LIBRARY_DIR is /nonexist, where these files are missing: libnvte_ep.so, " -DNVTE_EP_LIBRARY_DIR=/nonexist
mkdir -p "$work/half"; cp "$built"/*.so "$work/half/"
check "NVTE_EP_LIBRARY_DIR without the command" refused "where these files are missing: nvte-ep;" -DNVTE_EP_LIBRARY_DIR="$work/half"
check "NVTE_EP_WITH_NCCL_EP=maybe" refused 'NVTE_EP_WITH_NCCL_EP must be AUTO, ON or OFF, got "maybe"' \
  -DNVTE_EP_LIBRARY_DIR="$built" -DNVTE_EP_WITH_NCCL_EP=maybe
check "NVTE_EP_WITH_NCCL_EP and NVTE_CUDA_ARCHS" cmake -D WORK="$work" -P qa/L1_install/archs.cmake

# ---- the installed tree ----

# configure NAME OPTION...; place NAME [OPTION...]: the tree NAME, installed with DESTDIR and moved.
configure() {
  quietly cmake -S "$ROOT" -B "$work/build-$1" -G Ninja -DNVTE_EP_BUILD_TESTS=OFF -DNVTE_EP_LIBRARY_DIR="$built" "${@:2}"
}
place() {
  quietly env DESTDIR="$work/stage" cmake --install "$work/build-$1" --prefix /opt/nvte "${@:3}" && mv "$work/stage/opt/nvte" "$work/$2"
}
tree() { configure "$1" "${@:2}" && place "$1" "$1"; }
check "install, with DESTDIR, then move" tree full
lib=$(dirname "$(find "$work/full" -name libnvte_ep.so.1)")
nothing_named() { ! grep -rIl -e "$work/stage" -e "$ROOT" -e /opt/nvte "$work/full"; }
check "nothing names the place of the build or the prefix" nothing_named
dangling() { ! find "$work/full" -xtype l | grep .; }
check "no link leads nowhere" dangling
check "links in the installed pages lead somewhere" qa/L1_install/links.py "$work/full"
check "and those in the sources" qa/L1_install/links.py docs
uninstalls() {
  quietly cmake --install "$work/build-full" --prefix "$work/gone/nvte" "$@" && [ -n "$(find "$work/gone" -type l)" ] \
    && quietly cmake --build "$work/build-full" --target uninstall && [ -z "$(ls -A "$work/gone")" ] || { find "$work/gone"; return 1; }
}
check "uninstall leaves nothing" uninstalls
check "also of one component" uninstalls --component host
foreign_files_stay() {
  quietly cmake --install "$work/build-full" --prefix "$work/gone" && touch "$work/gone/lib/other" "$work/gone/.hidden" \
    && quietly cmake --build "$work/build-full" --target uninstall \
    && diff <(cd "$work/gone" && find . | sort) <(printf '%s\n' . ./.hidden ./lib ./lib/other)
}
check "uninstall leaves what it did not install" foreign_files_stay
sonames() {
  local file soname
  find "$lib" -maxdepth 1 -name '*.so.[0-9]*' -type f | while read -r file; do
    soname=$(readelf -d "$file" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
    [ "$soname" = "$(basename "$file")" ] && [ "$(readlink "${file%.[0-9]*}")" = "$soname" ] || { echo "$file: $soname"; return 1; }
  done
}
check "files have their SONAMEs, and links to them" sonames
licences() { cmp LICENSE "$work"/full/share/doc/nvte-ep/LICENSE && grep -q '^parking_lot \|, parking_lot ' "$work"/full/share/doc/nvte-ep/THIRD_PARTY_LICENSES; }
check "licences" licences

# Every header, alone, in every standard and with both compilers.
alone() {
  local header root
  for header in $(cd "$work/full/include" && find . -name '*.h'); do
    root=${header%%/transformer_engine/*}; [ "$root" != "$header" ] || root=$(dirname "$header")
    printf '#include "%s"\n' "${header#"$root"/}" | "$@" -Wall -Wextra -Werror -pedantic -I"$work/full/include/$root" -fsyntax-only - || return 1
  done
}
for compiler in gcc clang; do check "every header alone, $compiler, C11" alone $compiler -std=c11 -x c; done
for standard in 17 20; do
  for compiler in g++ clang++; do check "every header alone, $compiler, C++$standard" alone $compiler -std=c++$standard -x c++; done
done

# ---- consumers ----

# said WORDS COMMAND...: the command succeeds, and its output has the words.
said() { local output; output=$(timeout 120 "${@:2}") || { echo "$output"; return 1; }; grep -F -e "$1" <<<"$output" || { echo "$output"; return 1; }; }
te=$(qa/te_wheel.sh) && wheels=$(qa/wheels.sh) || check "wheels" false
te_include="$te/include;$wheels/nvidia/cu13/include;$wheels/nvidia/cu13/include/cccl"
ours=libnvte_ep\ ; theirs=libtransformer_engine\ ; stub='(stub of '
consumers() {
  quietly cmake -S tests_cpp/consumers -B "$work/consumers" -G Ninja -DCMAKE_C_COMPILER="$1" -DCMAKE_CXX_COMPILER="$2" \
    -DCMAKE_PREFIX_PATH="$work/full" -DNVTE_EP_TE_INCLUDE="$te_include" --fresh && quietly cmake --build "$work/consumers"
}
for compilers in "gcc g++" "clang clang++"; do
  # shellcheck disable=SC2086
  check "find_package, $compilers" consumers $compilers
  check "a step from C, $compilers" said "step exact" "$work/consumers/c"
  for standard in 17 20; do
    check "C++$standard, $compilers" said "$ours" "$work/consumers/cpp_$standard"
    check "C++$standard, TransformerEngine's ABI, $compilers" said "$theirs" "$work/consumers/te_$standard"
  done
  check "TransformerEngine's headers and our library, $compilers" said "$theirs" "$work/consumers/te_headers"
  check "dlopen, $compilers" said "$ours" "$work/consumers/loader" "$lib/libnvte_ep.so.1"
done
flags="-Wall -Wextra -Werror -pedantic"
# by_pc PROGRAM COMPILE... -- PACKAGE...
by_pc() {
  local program=$1 compile=(); shift
  while [ "$1" != -- ]; do compile+=("$1"); shift; done; shift
  # shellcheck disable=SC2046,SC2086
  "${compile[@]}" $flags -o "$work/$program" $(PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --cflags --libs "$@")
}
check "pkg-config nvte_ep" by_pc by_pc g++ -std=c++17 tests_cpp/consumers/consumer.cc -- nvte_ep
check "and it runs" said "$ours" env LD_LIBRARY_PATH="$lib" "$work/by_pc"
check "pkg-config nvte_ep_te" by_pc by_pc_te clang++ -std=c++20 tests_cpp/consumers/consumer.cc -- nvte_ep_te
check "and it runs" said "$theirs" env LD_LIBRARY_PATH="$lib/nvte_ep/te" "$work/by_pc_te"
check "pkg-config nvte_ep nvte_ep_host" by_pc by_pc_c gcc -std=c11 tests_cpp/consumers/consumer.c -- nvte_ep nvte_ep_host
check "and it runs" said "step exact" env LD_LIBRARY_PATH="$lib" "$work/by_pc_c"

# both_abis FIND: a program that links both ABIs, whose targets FIND gives, does not get past the configuration.
both_abis() {
  mkdir -p "$work/both"; echo 'int main() {}' >"$work/both/main.cc"
  printf 'cmake_minimum_required(VERSION 3.21)\nproject(p C CXX)\n%s\nadd_executable(p main.cc)\ntarget_link_libraries(p nvte_ep::nvte_ep nvte_ep::host %s)\n' \
    "$1" '${ALSO}' >"$work/both/CMakeLists.txt"
  local configure=(cmake -S "$work/both" -B "$work/both/build" --fresh -DCMAKE_PREFIX_PATH="$work/full" -DNVTE_EP_LIBRARY_DIR="$built")
  quietly "${configure[@]}" || return 1
  ! "${configure[@]}" -DALSO=nvte_ep::transformer_engine >"$work/log" 2>&1 && grep 'The INTERFACE_nvte_ep_abi property of "nvte_ep::transformer_engine" does' "$work/log"
}
check "both ABIs in one program, find_package" both_abis "find_package(nvte_ep REQUIRED)"
check "both ABIs in one program, add_subdirectory" both_abis "add_subdirectory($ROOT nvte_ep)"
# with_cli FIND: a test that starts the command by its target.
with_cli() {
  mkdir -p "$work/cli"
  printf 'cmake_minimum_required(VERSION 3.21)\nproject(p C CXX)\n%s\nenable_testing()\nadd_test(NAME ep COMMAND nvte_ep::cli launch -n 2 -- sh -c "test $WORLD_SIZE = 2")\n' \
    "$1" >"$work/cli/CMakeLists.txt"
  quietly cmake -S "$work/cli" -B "$work/cli/build" --fresh -DCMAKE_PREFIX_PATH="$work/full" -DNVTE_EP_LIBRARY_DIR="$built" \
    && quietly ctest --test-dir "$work/cli/build" --no-tests=error --timeout 60
}
check "the target nvte_ep::cli, find_package" with_cli "find_package(nvte_ep REQUIRED)"
check "the target nvte_ep::cli, add_subdirectory" with_cli "add_subdirectory($ROOT nvte_ep)"

subproject() {
  quietly cmake -S tests_cpp/consumers/subproject -B "$work/$1" -G Ninja -DNVTE_EP_SOURCE="$ROOT" "${@:2}" \
    && quietly cmake --build "$work/$1" && said "$ours" "$work/$1/with_nvte_ep" && said "$stub" "$work/$1/with_stub" && said "$theirs" "$work/$1/with_transformer_engine"
}
check "add_subdirectory, and cargo" subproject subdirectory -DNVTE_EP_CARGO_PROFILE=dev -DNVTE_EP_CARGO_TARGET_DIR="$TARGET"
check "FetchContent" subproject fetched -DFETCH=ON -DNVTE_EP_LIBRARY_DIR="$built"
without() {
  quietly cmake -S tests_cpp/consumers/subproject -B "$work/without" -G Ninja -DNVTE_EP_SOURCE="$ROOT" \
    -DNVTE_EP_LIBRARY_DIR="$built" -DNVTE_CUDA_ARCHS="80;89" && grep "at most SM 89" "$work/log" \
    && quietly cmake --build "$work/without" && said "$stub" "$work/without/with_nvte_ep"
}
check "inside a build for older GPUs it is the stub" without

# ---- versions and components ----

# finds EXPECTED ARGUMENTS...: whether find_package with the arguments succeeds in the tree in $prefix.
finds() {
  mkdir -p "$work/find"
  printf 'cmake_minimum_required(VERSION 3.21)\nproject(p NONE)\nfind_package(nvte_ep %s)\n' "${*:2}" >"$work/find/CMakeLists.txt"
  local found=no; cmake -S "$work/find" -B "$work/find/build" --fresh -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 && found=yes
  [ $found = "$1" ] || { cat "$work/log"; return 1; }
}
prefix=$work/full
check "version 0.1 is taken" finds yes 0.1 REQUIRED
check "version 0.2 is not" finds no 0.2 REQUIRED
check "all components are there" finds yes REQUIRED COMPONENTS nvte_ep transformer_engine host
check "a component that does not exist is not" finds no REQUIRED COMPONENTS nvte_ep device
check "install without NCCL EP and TransformerEngine's library" tree stub -DNVTE_EP_WITH_NCCL_EP=OFF -DNVTE_EP_INSTALL_TE_LIBRARY=OFF
prefix=$work/stub
check "which is missed where it is required" finds no REQUIRED COMPONENTS transformer_engine
check "and nowhere else" finds yes REQUIRED COMPONENTS nvte_ep OPTIONAL_COMPONENTS transformer_engine
stub_lib=$(dirname "$(find "$work/stub" -name libnvte_ep.so.1)")
check "linked to the full library, runs with the stub" said "$stub" env LD_LIBRARY_PATH="$stub_lib" "$work/by_pc"
check "linked to the stub" g++ -std=c++17 tests_cpp/consumers/consumer.cc -o "$work/by_stub" -I"$work/stub/include/nvte_ep" -L"$stub_lib" -lnvte_ep
check "runs with the full library" said "$ours" env LD_LIBRARY_PATH="$lib" "$work/by_stub"
check "the component host alone" place full host --component host
only_host() { diff <(cd "$work/host" && find . -not -type d | sort) <(cd "$work/full" && find . -not -type d -path '*host*' -not -path './share/doc/*' | sort); }
check "has all of the host runtime and nothing else" only_host

command_runs() { timeout 120 env -u NVTE_EP_RUNTIME "$work/full/bin/nvte-ep" run --runtime host --ranks 2 --tokens 32 --hidden 64 | tail -1 | grep -x "all checks passed"; }
check "the installed command" command_runs
# shellcheck disable=SC2016
command_launches() { timeout 60 "$work/full/bin/nvte-ep" launch -n 2 -- sh -c 'test -e "${LD_LIBRARY_PATH%%:*}/libnccl.so.2" && test "$WORLD_SIZE" = 2'; }
check "the installed command launches programs" command_launches

# ---- the Debian package, in a copy of this machine that is gone afterwards ----

check "configure for Debian" configure deb -DCMAKE_INSTALL_PREFIX=/usr
check "Debian package" quietly cpack -G DEB -B "$work/deb" --config "$work/build-deb/CPackConfig.cmake"
# Its overrides, with their reasons, are in cmake/debian.cmake. It warns of being run as root, on standard error.
clean() { [ -f "$(echo "$work"/deb/nvte-ep_*.deb)" ] && [ -z "$(lintian --tag-display-limit 0 "$work"/deb/nvte-ep_*.deb 2>&1 | grep -v 'running with root privileges' | tee /dev/stderr)" ]; }
check "lintian has nothing to say" clean
if unshare -m qa/L1_install/debian.sh "$work/copy" 2>/dev/null; then
  check "installs, serves consumers, and is removed without a rest" timeout 300 unshare -m qa/L1_install/debian.sh "$work/copy" "$work"/deb/nvte-ep_*.deb
else
  echo "skipped: installing the Debian package takes root, and a kernel that mounts overlays"
fi

# ---- what it weighs ----

weight() {
  local kib; kib=$(du -sk --apparent-size "$work/full" | cut -f1)
  echo "installed: $((kib * 1024)) bytes, of which libnvte_ep.so.1 $(stat -c %s "$lib/libnvte_ep.so.1")"
  cat "$te/size.txt"
  # Three libraries have 1.5 MB more in releases: machine code of the native engine's kernels.
  [ "$kib" -lt "$([ -n "${NVTE_EP_RELEASED:-}" ] && echo 20000 || echo 15000)" ]
}
check "size beside TransformerEngine's" weight
# They are of a build of one's own.
[ -n "${NVTE_EP_RELEASED:-}" ] || check "sizes in README.md and docs/install.md" qa/L1_install/sizes.py --check "$work/full"
finish
