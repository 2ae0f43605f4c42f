# Sourced: the oldest runtimes that our releases run on, and the check of a file against them.
#
# glibc 2.28 is that of Debian 10, Ubuntu 18.10 and RHEL 8, and what wheels tagged manylinux_2_28 ask for, as NVIDIA's do;
# GCC 8's libstdc++ comes with these systems.
GLIBC_FLOOR=2.28 GLIBCXX_FLOOR=3.4.25 CXXABI_FLOOR=1.3.11 GCC_FLOOR=8.0.0

# within_floor FILE: none of the versioned symbols that it needs is newer than these. Prints the newest of each.
within_floor() {
  local family floor newest result=0 versions
  versions=$(objdump -T "$1" | grep -F '*UND*' | grep -oE '\((GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+\)' | tr -d '()' | sort -u)
  [ -n "$versions" ] || { echo "$1: needs no versioned symbol, so it was not read"; return 1; }
  for family in GLIBC GLIBCXX CXXABI GCC; do
    floor=${family}_FLOOR floor=${!floor}
    newest=$(sed -n "s/^${family}_//p" <<<"$versions" | sort -V | tail -1)
    [ -n "$newest" ] || continue
    if [ "$(printf '%s\n' "$newest" "$floor" | sort -V | tail -1)" != "$floor" ]; then
      echo "$(basename "$1"): ${family}_$newest is newer than ${family}_$floor:" \
        "$(objdump -T "$1" | grep -F "(${family}_$newest)" | awk '{print $NF}' | head -3 | xargs)"
      result=1
    else
      echo "$(basename "$1"): ${family}_$newest"
    fi
  done
  return $result
}
