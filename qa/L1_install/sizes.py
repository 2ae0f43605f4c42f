#!/usr/bin/env python3
"""The sizes that README.md and docs/install.md tell, compared with an installed tree. usage: sizes.py --check|--write PREFIX

A size in a page is written as `<!-- size NAME -->1.4 MB<!-- -->`, where NAME is that of an installed file, or `tree`. --check allows
a tenth more or less, as compilers differ.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = ["README.md", "docs/install.md"]
SPAN = re.compile(r"(<!-- size (\S+) -->)([\d.]+) MB(<!-- -->)")

if len(sys.argv) != 3 or sys.argv[1] not in ("--check", "--write"):
    sys.exit(__doc__)
prefix = pathlib.Path(sys.argv[2])
files = [path for path in prefix.rglob("*") if path.is_file() and not path.is_symlink()]


def measured(name):
    """In megabytes."""
    sizes = [path.stat().st_size for path in files if name in ("tree", path.name)]
    if not sizes:
        sys.exit(f"{prefix} has no {name}")
    return sum(sizes) / 1e6


wrong, spans = [], 0
for page in PAGES:
    text = (ROOT / page).read_text(encoding="utf-8")
    for _, name, told, _ in SPAN.findall(text):
        spans += 1
        print(f"{page}: {name} {told} MB, measured {measured(name):.2f} MB")
        if abs(float(told) / measured(name) - 1) > 0.1:
            wrong.append(f"{page} says {told} MB for {name}: run {sys.argv[0]} --write {prefix}")
    if sys.argv[1] == "--write":
        (ROOT / page).write_text(SPAN.sub(lambda m: f"{m[1]}{measured(m[2]):.1f} MB{m[4]}", text), encoding="utf-8")
if sys.argv[1] == "--check":
    sys.exit("\n".join(wrong) if wrong else spans == 0)
