#!/usr/bin/env python3
"""Makes PyTorch's wheel for CUDA importable on a machine without CUDA's libraries: cpu_torch.py FOLDER_OF_TORCH

PyPI has no wheel of PyTorch for the CPU alone. The one with CUDA needs 2 GB of CUDA's libraries to be imported, of which
nothing is called while tensors are on the CPU. In their place come libraries with the same names, versions and functions, in
each of which a call returns cudaErrorNoDevice. torch.cuda.is_available() is False with them.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

NO_DEVICE = 100


def output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def main(folder: pathlib.Path) -> None:
    libraries = sorted((folder / "lib").glob("*.so*"))
    needed, names = set(), {library.name for library in libraries}
    missing: dict[str, set[str]] = collections.defaultdict(set)
    unversioned, defined = set(), set()
    for library in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", library)))
        for line in output("nm", "-D", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if kind != "U":
                defined.add(name)
            elif version:
                missing[version].add(name)
            else:
                unversioned.add(name)
    cache = output("/sbin/ldconfig", "-p")
    absent = sorted(name for name in needed - names if f"\t{name} " not in cache)
    # Each function once: by its version, whose name is that of its library; one without a version in the first library.
    versions = {name: [version for version in missing if version == name or (version == "NVSHMEM" and "nvshmem" in name)]
                for name in absent}
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(absent):
            functions = {version: missing[version] for version in versions[name]}
            lines = [f"int {function}(void) {{ return {NO_DEVICE}; }}" for some in functions.values() for function in sorted(some)]
            if number == 0:
                lines += [f"int {function}(void) {{ return {NO_DEVICE}; }}" for function in sorted(unversioned - defined)
                          if re.match(r"(nccl|cuFile|curand|cusparseLt|cufft|cu[A-Z])", function)]
            source = pathlib.Path(scratch, "source.c")
            source.write_text("\n".join(lines) + "\n")
            script = pathlib.Path(scratch, "versions")
            script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(some))}; }};\n" for version, some in functions.items())
                              or "{ global: *; };\n")
            subprocess.run(["gcc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}",
                            "-o", str(folder / "lib" / name), str(source)], check=True)
    print(f"{len(absent)} libraries without a GPU behind them: {' '.join(absent)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
