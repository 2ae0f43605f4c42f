#!/usr/bin/env bash
# Installs a Debian package into a copy-on-write copy of this machine, builds and runs consumers there as on any machine that
# has the package, and removes it. usage, as root: unshare -m debian.sh FOLDER [PACKAGE]
# FOLDER is where the copy is mounted. Without a package: only whether such a copy can be made here.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
copy=$1; mkdir -p "$copy"
mount --make-rprivate /
mount -t tmpfs none "$copy"
mkdir "$copy/upper" "$copy/work" "$copy/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$copy/upper,workdir=$copy/work" "$copy/root"
[ $# -gt 1 ] || exit 0
mount --bind /dev "$copy/root/dev"
mount -t proc proc "$copy/root/proc"
cp -r "$root/tests_cpp/consumers" "$copy/root/consumers"
cp "$2" "$copy/root/package.deb"
chroot "$copy/root" bash -euo pipefail -s <<'INSIDE'
dpkg -i /package.deb >/dev/null
cmake -S /consumers -B /built -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build /built >/dev/null
export NVTE_EP_RUNTIME=host
/built/c | grep -x "step exact"
for program in cpp_17 cpp_20 te_17 te_20; do /built/$program | grep -E '^lib(nvte_ep|transformer_engine) '; done
/built/loader libnvte_ep.so.1 | grep '^libnvte_ep '
g++ -std=c++17 /consumers/consumer.cc -o /by_pc $(pkg-config --cflags --libs nvte_ep)
/by_pc | grep '^libnvte_ep '
nvte-ep run --ranks 2 --tokens 32 --hidden 64 | tail -1 | grep -x "all checks passed"
files=$(dpkg -L nvte-ep | while read -r path; do [ -d "$path" ] || echo "$path"; done)
dpkg -r nvte-ep >/dev/null
for file in $files; do [ ! -e "$file" ] || { echo "$file stayed"; exit 1; }; done
echo "removed: $(wc -w <<<"$files") files"
INSIDE
