"""Draw the figures of the logits path from a result of `scripts/gpu_logits.py`, as plain SVG.

    python3 scripts/plot_logits.py benchmarks/results/DATE-DEVICE-COMMIT-logits-table.json \
        docs/logits.svg

Left: 8,192 rows, each way's time as a part of the bare product's. Right: drawing one token a row,
time beside a product with float32 output, softmax and the exponential trick, both axes by powers.
"""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT = 860, 330
INK, SOFT, OURS, OTHERS = "#24292f", "#d0d7de", "#0969da", "#9a6700"
BARS = (
    ("bare", "bare product", OTHERS),
    ("logprob", "logprob, 64 MiB", OURS),
    ("k=20, 512 MiB", "20 best, 512 MiB", OURS),
    ("k=20", "20 best, 64 MiB", OURS),
    ("chunks", "2,048-row chunks, no best", OTHERS),
)


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{INK}">{words}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = SOFT) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def bars(score: dict[str, float]) -> list[str]:
    left, top, room, step = 170, 60, 190, 44
    most = max(score[name] for name, _, _ in BARS)
    drawn = [text(20, 28, "8,192 rows: time, of the bare product's", size=14)]
    for i, (name, words, colour) in enumerate(BARS):
        y, width = top + i * step, room * score[name] / most
        drawn.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="24" fill="{colour}"/>')
        drawn.append(text(left - 8, y + 17, words, "end"))
        drawn.append(text(left + width + 6, y + 17, f"{score[name] / score['bare']:.2f}"))
    return drawn


def lines(draw: dict[str, dict[str, float]]) -> list[str]:
    left, right, top, bottom = 500, 770, 50, 280
    rows = sorted(int(name) for name in draw)
    times = [draw[str(r)][way] for r in rows for way in ("ours", "peer")]
    low, high = math.floor(math.log2(min(times))), math.ceil(math.log2(max(times)))
    last = math.log2(rows[-1])

    def x(count: float) -> float:
        return left + (right - left) * math.log2(count) / last

    def y(ms: float) -> float:
        return bottom - (bottom - top) * (math.log2(ms) - low) / (high - low)

    drawn = [text(460, 28, "drawing one token a row: milliseconds by rows", size=14)]
    for power in range(low, high + 1):
        drawn += [line(left, y(2**power), right, y(2**power))]
        drawn += [text(left - 6, y(2**power) + 4, f"{2.0**power:g}", "end")]
    for count in (1, 16, 64, 256, 1024, 3000):
        drawn.append(text(x(count), bottom + 18, f"{count:,}", "middle"))
    for way, words, colour in (("peer", "with the matrix", OTHERS), ("ours", "fused", OURS)):
        points = [(x(r), y(draw[str(r)][way])) for r in rows]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        end = points[-1]
        drawn.append(text(end[0] + 8, end[1] + (10 if way == "ours" else -2), words))
    return drawn


def main() -> int:
    source, target = (Path(name) for name in sys.argv[1:3])
    found = json.loads(source.read_text(encoding="utf-8"))
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *bars(found["score"]),
        *lines(found["draw"]),
        text(20, HEIGHT - 12, f"one H200, bf16, 4,096 x 128,256; {source.name}", size=11),
        "</svg>",
    ]
    target.write_text("\n".join(svg) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
