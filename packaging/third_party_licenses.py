#!/usr/bin/env python3
"""Writes THIRD_PARTY_LICENSES: the terms of every crate that is linked into what we ship, with each crate's own text.

usage: third_party_licenses.py --check | --write     (after a change to Cargo.lock: --write)
"""

import collections
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "THIRD_PARTY_LICENSES"
HEAD = """What nvte-ep's libraries and command contain besides our own code (LICENSE).

The Rust standard library, Copyright (c) The Rust Project Contributors: MIT OR Apache-2.0.

The font Roboto in the command nvte-ep (cli/font/README.md), Copyright 2011 Google Inc.: Apache-2.0.
"""


def linked_crates():
    """The registry's crates that code of ours calls at run time: no build scripts' and no tests' dependencies."""
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    todo, seen = list(metadata["workspace_default_members"]), set()
    while todo:
        identity = todo.pop()
        if identity in seen or any("proc-macro" in target["kind"] for target in packages[identity]["targets"]):
            continue
        seen.add(identity)
        for dependency in nodes[identity]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                todo.append(dependency["pkg"])
    return sorted((packages[i] for i in seen if packages[i]["source"]), key=lambda p: (p["name"], p["version"]))


def text_of(package):
    """The text of the terms we take. Of a choice: MIT, which names the holders; then any."""
    folder = pathlib.Path(package["manifest_path"]).parent
    for name in ("LICENSE-MIT", "LICENSE", "LICENSE.md", "LICENSE.txt", "COPYING", "LICENSE-APACHE"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            return "\n".join(line.rstrip() for line in lines).strip()
    sys.exit(f"{package['name']} {package['version']} has no licence text that this script knows the name of")


by_text = collections.defaultdict(list)
for package in linked_crates():
    by_text[text_of(package)].append(f"{package['name']} {package['version']} ({package['license']})")
sections = (f"{', '.join(names)}\n\n{text}\n" for text, names in sorted(by_text.items(), key=lambda item: item[1]))
wanted = HEAD + "".join(f"\n{'-' * 80}\n{section}" for section in sections)

if sys.argv[1:] == ["--write"]:
    FILE.write_text(wanted, encoding="utf-8")
elif sys.argv[1:] == ["--check"]:
    if not FILE.exists() or FILE.read_text(encoding="utf-8") != wanted:
        sys.exit("THIRD_PARTY_LICENSES is not that of Cargo.lock; run packaging/third_party_licenses.py --write")
else:
    sys.exit(__doc__)
