#!/usr/bin/env python3
"""The pictures of the guide, docs/pictures/*.svg, drawn from this file. usage: pictures.py --check|--write

SVG files are seen on a repository's page and in the built book alike; text in a fixed order makes them the same on every machine.
"""

import html
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures"
RANK = ["#cfe2ff", "#ffe0b8"]  # one colour for the tokens of a rank
EXPERT, PAD, GREY, LINE = "#d9f0d3", "#f0f0f0", "#e6e6e6", "#444444"


class Picture:
    def __init__(self, width, height, title):
        self.size, self.title, self.parts = (width, height), title, []

    def box(self, x, y, width, height, text="", fill="#ffffff", dashed=False, size=13):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{LINE}"{dash}/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4.5 + (i - (len(lines) - 1) / 2) * (size + 3), line, "middle", size=size)

    def text(self, x, y, text, anchor="start", bold=False, size=13):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{html.escape(text)}</text>')

    def arrow(self, *points, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{LINE}" stroke-width="1.3" marker-end="url(#head)"{dash}/>')

    def line(self, *points):
        self.parts.append(f'<path d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}" fill="none" stroke="{LINE}"/>')

    def svg(self):
        width, height = self.size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
                'font-family="DejaVu Sans, Verdana, sans-serif">',
                "<!-- Drawn by packaging/pictures.py: change it there. -->",
                f"<title>{html.escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
                f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def step():
    """Tokens a, b of rank 0 and c, d of rank 1; each goes to two of four experts."""
    p = Picture(860, 292, "One step on two ranks: dispatch, the experts, combine")
    to = {0: [("a", 0), ("c", 1)], 1: [("b", 0), ("d", 1)], 2: [("a", 0), ("d", 1)], 3: [("b", 0), ("c", 1)]}
    row_of = {}
    for x, label in ((70, "tokens [T, H]"), (365, "recv_tokens [C, H]"), (585, "expert_out [C, H]"), (790, "result [T, H]")):
        p.text(x, 24, label, "middle", bold=True)
    for rank in (0, 1):
        top = 44 + rank * 128
        p.text(14, top + 52, f"rank {rank}", bold=True)
        for i, name in enumerate("ab" if rank == 0 else "cd"):
            y = top + 16 + i * 32
            p.box(70, y, 34, 24, name, RANK[rank])
            p.box(756, y, 70, 24, f"sum of {name}", RANK[rank])
            row_of[name] = y + 12
        for slot, expert in enumerate((2 * rank, 2 * rank + 1)):
            y = top + slot * 52
            p.text(306, y + 26, f"expert {expert}", "end", size=12)
            p.box(312, y, 104, 44, "", EXPERT)
            p.box(533, y, 104, 44, "", EXPERT)
            for i, (name, source) in enumerate(to[expert]):
                p.box(318 + i * 48, y + 10, 44, 24, name, RANK[source])
                p.box(539 + i * 48, y + 10, 44, 24, f"f({name})", RANK[source], size=11)
            p.arrow((420, y + 22), (529, y + 22))
    for expert, held in to.items():
        y = 44 + expert // 2 * 128 + expert % 2 * 52 + 22
        for name, _ in held:
            p.arrow((106, row_of[name]), (238, y))
            p.arrow((641, y), (752, row_of[name]))
    p.text(172, 286, "nvte_ep_dispatch", "middle")
    p.text(474, 286, "your experts", "middle")
    p.text(697, 286, "nvte_ep_combine", "middle")
    return p


def slabs():
    p = Picture(860, 250, "The receive buffer of a rank with three local experts, slabs padded to multiples of 4")
    p.text(14, 24, "recv_tokens of a rank with three local experts, alignment 4", bold=True)
    x, width = 14, 40
    for name, counts, padded in (("local expert 0", (3, 2), 3), ("local expert 1", (1, 3), 0), ("local expert 2", (), 0)):
        rows = sum(counts) + padded
        if rows:
            p.line((x, 98), (x, 106), (x + rows * width, 106), (x + rows * width, 98))
            p.text(x + rows * width / 2, 124, f"slab of {name}: {rows} rows", "middle", size=12)
            p.text(x + rows * width / 2, 142, f"{sum(counts)} tokens" + (f", {padded} rows of padding" if padded else ", no padding"), "middle", size=12)
        for source, count in enumerate(counts):
            for _ in range(count):
                p.box(x, 56, width, 40, f"rank {source}", RANK[source], size=10)
                x += width
        for _ in range(padded):
            p.box(x, 56, width, 40, "0", PAD)
            x += width
    p.box(x, 56, 846 - x, 40, "rows beyond the last slab: keep what they held", "#ffffff", dashed=True, size=12)
    p.text(x + 40, 124, "local expert 2 got no token:", size=12)
    p.text(x + 40, 142, "its slab has no rows", size=12)
    p.line((14, 178), (14, 186), (846, 186), (846, 178))
    p.text(430, 206, "C = max_recv_tokens_per_rank rows", "middle")
    p.text(430, 234, "counts = [8, 4, 0]; in a slab: rows of rank 0 first, then rank 1; of a rank, in the order of its tokens", "middle", size=12)
    return p


def capacity():
    p = Picture(860, 250, "A step that needs more rows than the capacity: trap, drop, and eager mode")
    unit, start = 14, 190
    p.text(14, 40, "the step needs", bold=True)
    p.box(start, 22, 36 * unit, 26, "36 rows", EXPERT)
    for y, name, note in ((78, "trap (default)", ""), (134, "drop", ""), (190, "eager mode", "")):
        p.text(14, y + 18, name, bold=True)
    p.box(start, 78, 24 * unit, 26, "C = 24 rows", GREY)
    p.text(start + 24 * unit + 10, 96, "a fatal error of the device", size=12)
    p.box(start, 134, 24 * unit, 26, "C = 24 rows: filled", EXPERT)
    p.box(start + 24 * unit, 134, 12 * unit, 26, "12 rows dropped", PAD, dashed=True)
    p.text(start, 176, "dropped rows are missing from the sums; their gradients are 0", size=12)
    p.box(start, 190, 36 * unit, 26, "36 rows, allocated by the program after prepare", EXPERT)
    p.text(start, 234, "one wait for the device in each step; no CUDA graph", size=12)
    p.arrow((start + 24 * unit, 60), (start + 24 * unit, 76))
    p.text(start + 24 * unit + 8, 66, "max_recv_tokens_per_rank", size=11)
    return p


def pipeline():
    p = Picture(860, 262, "1F1B with two micro-batches in flight: each has a handle from its forward to its backward")
    order = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    x0, width = 150, 84
    p.text(14, 24, "time of one rank", bold=True)
    p.arrow((150, 19), (x0 + 8 * width, 19))
    for i, name in enumerate(order):
        p.box(x0 + i * width, 36, width - 6, 34, ("forward " if name[0] == "F" else "backward ") + name[1], RANK[int(name[1]) % 2], size=12)
    for handle, batches in enumerate(((0, 2), (1, 3))):
        y = 96 + handle * 48
        p.text(14, y + 20, f"handle {handle} holds", bold=True)
        for batch in batches:
            first, last = order.index(f"F{batch}"), order.index(f"B{batch}")
            p.box(x0 + first * width, y, (last - first + 1) * width - 6, 32, f"micro-batch {batch}'s routing", RANK[handle], size=12)
    p.text(14, 208, "forward: prepare, dispatch, experts, combine", size=12)
    p.text(14, 228, "backward: combine_bwd, the experts' gradient, dispatch_bwd", size=12)
    p.text(14, 248, "With one handle, forward 1 would prepare over the routing that backward 0 still needs.", size=12)
    return p


def call():
    p = Picture(860, 590, "The way of one call from the caller to the device")
    x, width = 210, 440
    rows = [
        ("your program", "C, C++ or Rust", "#ffffff"),
        ("abi/*", "one body a function: catch panics, parse, call", GREY),
        ("ffi", "C structures and tensors to the core's types; errors to exceptions", GREY),
        ("backend::group", "one call, in order:", RANK[0]),
        ("backend::engine", "queues the work", RANK[1]),
        ("engine::nccl_ep, engine::native", "descriptors and the index kernel; our own kernels", RANK[1]),
        ("sys", "tables of the loaded functions", GREY),
        ("CUDA, NCCL, NCCL EP", "or the host runtime", "#ffffff"),
    ]
    y = 14
    for i, (name, does, fill) in enumerate(rows):
        height = 158 if name == "backend::group" else 44
        p.box(x, y, width, height, "", fill)
        p.text(x + width / 2, y + 19, name, "middle", bold=True)
        p.text(x + width / 2, y + 36, does, "middle", size=11)
        if name == "backend::group":
            steps = (
                ("registry", "the group of the current device, locked"),
                ("prepared, routing", "which routing does the handle memory hold?"),
                ("ops", "is every argument right?"),
                ("placement, residency", "is its memory where it has to be?"),
                ("watch", "events before and after the work"),
            )
            for k, (module, question) in enumerate(steps):
                p.text(x + 22, y + 60 + k * 21, f"{k + 1}. {module}", bold=True, size=11)
                p.text(x + 180, y + 60 + k * 21, question, size=11)
        if i + 1 < len(rows):
            p.arrow((x + width / 2, y + height), (x + width / 2, y + height + 14))
        y += height + 14
    p.text(198, 80, "per C library", "end", size=11)
    p.text(198, 200, "refuses before", "end", size=11)
    p.text(198, 216, "anything is queued", "end", size=11)
    p.text(198, 370, "one of two engines", "end", size=11)
    return p


def native():
    p = Picture(860, 236, "Dispatch and combine of the native engine, from rank s to rank d and back")
    p.box(14, 34, 380, 188, "", "#ffffff", dashed=True)
    p.box(466, 34, 380, 188, "", "#ffffff", dashed=True)
    p.text(24, 24, "rank s: owns the tokens", bold=True)
    p.text(476, 24, "rank d: owns the experts", bold=True)
    p.box(30, 62, 110, 40, "tokens", RANK[0])
    p.box(230, 62, 140, 40, "staged window", GREY)
    p.box(482, 62, 140, 40, "shared memory", GREY)
    p.box(716, 62, 116, 40, "recv_tokens", EXPERT)
    p.arrow((140, 82), (228, 82))
    p.text(184, 74, "copy", "middle", size=11)
    p.arrow((370, 82), (480, 82))
    p.text(430, 60, "pull each", "middle", size=11)
    p.text(430, 74, "row once", "middle", size=11)
    p.arrow((622, 82), (714, 82))
    p.text(668, 60, "a store for", "middle", size=11)
    p.text(668, 74, "each slot", "middle", size=11)
    p.box(716, 154, 116, 40, "expert_out", EXPERT)
    p.box(230, 154, 140, 40, "summed window", GREY)
    p.box(30, 154, 110, 40, "result", RANK[0])
    p.arrow((716, 174), (372, 174))
    p.text(560, 166, "one sum for each token, stored by rank d", "middle", size=11)
    p.arrow((230, 174), (142, 174))
    p.text(186, 166, "sum", "middle", size=11)
    return p


# What the option --losses of examples/pytorch/ep_moe.py has written: the loss of every step.
LOSSES = FOLDER.parents[1] / "examples" / "pytorch" / "losses.txt"


def moe_loss():
    p = Picture(620, 300, "The loss of the example over its 150 steps")
    every = [float(loss) for loss in LOSSES.read_text(encoding="utf-8").split()]
    losses = [sum(every[i : i + 5]) / 5 for i in range(0, len(every), 5)]
    left, top, bottom, low, high = 70, 44, 250, 2, 5
    p.text(left, 26, "mean cross entropy of the next character", bold=True)
    for loss in range(low, high + 1):
        y = bottom - (loss - low) / (high - low) * (bottom - top)
        p.line((left, y), (590, y))
        p.text(left - 10, y + 4.5, str(loss), "end")
    for done in range(0, 151, 50):
        p.text(left + done / 150 * 520, bottom + 20, str(done), "middle")
    p.text(left + 260, bottom + 40, "steps", "middle")
    points = [
        (left + (5 * i + 2.5) / 150 * 520, round(bottom - (loss - low) / (high - low) * (bottom - top), 1))
        for i, loss in enumerate(losses)
    ]
    p.parts.append(
        f'<path d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}" fill="none" stroke="#1f6fd6" stroke-width="2"/>'
    )
    return p


PICTURES = [step, slabs, capacity, pipeline, call, native, moe_loss]

if len(sys.argv) != 2 or sys.argv[1] not in ("--check", "--write"):
    sys.exit(__doc__)
drawn = {FOLDER / f"{picture.__name__}.svg": picture().svg() for picture in PICTURES}
if sys.argv[1] == "--write":
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn.items():
        path.write_text(text, encoding="utf-8")
there = {path: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
stale = sorted(str(path.name) for path in drawn.keys() | there.keys() if drawn.get(path) != there.get(path))
sys.exit(f"docs/pictures: not as packaging/pictures.py draws them: {', '.join(stale)}; run it with --write" if stale else 0)
