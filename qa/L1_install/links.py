#!/usr/bin/env python3
"""Whether every link in the Markdown files below a folder leads to a file there, and to a heading of it. usage: links.py FOLDER"""

import pathlib
import re
import sys

ROOT = pathlib.Path(sys.argv[1])


def text_of(path):
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path):
    """The anchors of a page: its headings as GitHub names them, and those written as <a id>."""
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', path.read_text(encoding="utf-8")))
    for heading in re.findall(r"^#+ (.+)$", text_of(path), flags=re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


dead, links = [], 0
pages = sorted(ROOT.rglob("*.md"))
for page in pages:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        links += 1
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(f"{page.relative_to(ROOT)}: {target}")
print("\n".join(dead) or f"{links} links in {len(pages)} pages")
sys.exit(bool(dead) or links == 0)
