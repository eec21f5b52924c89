"""A bar chart as SVG: one bar a row, its length a mean, with a line for the spread."""

from html import escape

BAR, GAP, LABEL, SCALE, FIGURE, MARGIN = 22, 12, 300, 420, 110, 16  # pixels

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1a1d21; font-variant-numeric: tabular-nums; }
  .title { font-weight: 600; } .ground { fill: #ffffff; } .bar { fill: #2457c5; } .first { fill: #1b8a4b; }
  .spread { stroke: #1a1d21; stroke-width: 1.5; } .tick { stroke: #e2e4e7; } .quiet { fill: #5a636e; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e9ebee; } .ground { fill: #191c20; } .bar { fill: #8ab0ff; } .first { fill: #4fc583; }
    .spread { stroke: #e9ebee; } .tick { stroke: #2b3037; } .quiet { fill: #9ba4af; }
  }
"""


def bar_chart(title: str, bars: list[tuple[str, float, float]]) -> str:
    """Bars of (name, mean, spread), means from 0 to 1. The first has a colour of its own: it is the whole method."""
    top, step = 64, BAR + GAP
    width, height = LABEL + SCALE + FIGURE + 2 * MARGIN, top + len(bars) * step + MARGIN
    left = MARGIN + LABEL

    def x(value: float) -> float:
        return round(left + SCALE * min(1.0, max(0.0, value)), 1)

    parts = [f'<text class="title" x="{MARGIN}" y="{MARGIN + 14}">{escape(title)}</text>']
    for tenth in range(0, 11, 2):
        at = x(tenth / 10)
        parts.append(f'<line class="tick" x1="{at}" x2="{at}" y1="{top - 6}" y2="{height - MARGIN}"/>')
        parts.append(f'<text class="quiet" x="{at}" y="{top - 10}" text-anchor="middle">{tenth / 10:.1f}</text>')
    for number, (name, mean, spread) in enumerate(bars):
        y = top + number * step
        middle = y + BAR / 2
        kind = "first" if number == 0 else "bar"
        parts.append(f'<text x="{left - 10}" y="{middle + 5}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{left}" y="{y}" width="{round(x(mean) - left, 1)}" height="{BAR}" rx="3"/>'
        )
        if spread:
            low, high = x(mean - spread), x(mean + spread)
            parts.append(f'<line class="spread" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
        parts.append(
            f'<text x="{left + SCALE + 10}" y="{middle + 5}">{mean:.3f}{f" ± {spread:.3f}" if spread else ""}</text>'
        )
    inside = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
        f'<rect class="ground" width="{width}" height="{height}"/>\n{inside}\n</svg>\n'
    )
