"""A plan as one picture: an operator per row, and beside the rows the life of each buffer."""

from __future__ import annotations

import textwrap
from xml.sax.saxutils import escape

from torchacc.graph_view.plan import (
    PLACE_TEXT,
    PLACES,
    PlanData,
    lanes,
    lifetime,
    short_op,
    size_text,
    source_text,
    summary,
    time_text,
)

ROW = 15  # pixels
LANE = 7
TIME, LABEL, SOURCE, MEMORY = 60, 250, 500, 800  # columns
COLORS = {"given": "#9aa5b1", "arena": "#2a9d8f", "own": "#3b6fb6", "adopted": "#8e5bb5"}
STEP_COLORS = ("#eef2f7", "#fdf1de")  # an operator, a generated kernel


def render(plan: PlanData) -> str:
    """The picture; its parts tell more when the pointer rests on them."""
    head = [line for text in summary(plan) for line in textwrap.wrap(text, 150)]
    top = 50 + 16 * len(head) + 20 * (len(COLORS) + 2) + 30
    tops, height = _rows(plan, top)
    columns, starts, width = _columns(plan)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20}"'
        ' font-family="sans-serif" font-size="11">',
        f"<title>Plan of acc:{plan['device']}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 28, f"What one step does: a plan of acc:{plan['device']}", size=20),
    ]
    out += [_text(10, 50 + 16 * i, line) for i, line in enumerate(head)]
    out += _legend(50 + 16 * len(head))
    titles = {10: "step", TIME: "time", LABEL: "operator", SOURCE: "line of the program"}
    out += [_text(x, top - 8, title, bold=True) for x, title in titles.items()]
    out.append(_text(MEMORY, top - 24, "memory: a bar per buffer while it lives", bold=True))
    out += [_text(x, top - 8, place) for place, x in starts.items()]
    out += _steps(plan, tops)
    out += _memory(plan, tops, columns)
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _rows(plan: PlanData, top: int) -> tuple[list[int], int]:
    """Where each step begins, the end of the last included, and that end."""
    tops = [top]
    for step in plan["steps"]:
        tops.append(tops[-1] + ROW * len(step["nodes"]))
    return tops, tops[-1]


def _columns(plan: PlanData) -> tuple[dict[int, int], dict[str, int], int]:
    """From left to right: each buffer, the first of each place, and the end of the picture."""
    columns: dict[int, int] = {}
    starts: dict[str, int] = {}
    x = MEMORY
    found = lanes(plan)
    for place in PLACES:
        here = {i: lane for i, lane in found.items() if plan["buffers"][i]["place"] == place}
        for i, lane in here.items():
            columns[i] = x + LANE * lane.row
        if here:
            starts[place] = x
            x += max(60, LANE * (max(lane.row for lane in here.values()) + 1) + 14)
    return columns, starts, max(x, 1200)


def _legend(top: int) -> list[str]:
    entries = [
        (STEP_COLORS[0], "a step that is one operator of PyTorch"),
        (STEP_COLORS[1], "a step that is a generated kernel: all of its operators in one pass"),
    ]
    entries += [(COLORS[place], f"memory, {place}: {PLACE_TEXT[place]}") for place in PLACES]
    out = []
    for i, (color, text) in enumerate(entries):
        y = top + 20 * i
        out.append(f'<rect x="10" y="{y}" width="16" height="12" fill="{color}" stroke="#555"/>')
        out.append(_text(34, y + 10, text))
    return out


def _steps(plan: PlanData, tops: list[int]) -> list[str]:
    longest = max((step["seconds"] or 0.0 for step in plan["steps"]), default=0.0)
    out = []
    for i, step in enumerate(plan["steps"]):
        y, fused = tops[i], step["kernel"] is not None
        tall = tops[i + 1] - y
        hover = f"step {i}, {time_text(step['seconds'])}, holds {size_text(step['held_bytes'])}"
        if fused:
            hover += f", kernel {step['kernel']} ({step['launches']} launches)"
        out.append(
            f'<g><title>{escape(hover)}</title><rect x="5" y="{y}" width="{MEMORY - 15}"'
            f' height="{tall}" fill="{STEP_COLORS[fused]}" stroke="white"/>'
        )
        out.append(_text(10, y + 11, str(i)))
        if step["seconds"] is not None:
            wide = 100 * step["seconds"] / longest if longest else 0
            out.append(
                f'<rect x="{TIME}" y="{y + 3}" width="{wide:.1f}" height="9" fill="#d1495b"/>'
            )
            out.append(_text(TIME + 105, y + 11, time_text(step["seconds"])))
        for k, index in enumerate(step["nodes"]):
            node = plan["nodes"][index]
            out.append(f"<g><title>{escape(node['text'])}</title>")
            out.append(_text(LABEL + 12 * fused, y + 11 + ROW * k, short_op(node["op"])))
            out.append(_text(SOURCE, y + 11 + ROW * k, source_text(node)) + "</g>")
        out.append("</g>")
    return out


def _memory(plan: PlanData, tops: list[int], columns: dict[int, int]) -> list[str]:
    out = []
    for i, x in columns.items():
        buffer = plan["buffers"][i]
        first, last = lifetime(plan, buffer)
        y, end = tops[first], tops[last + 1]
        color = COLORS[buffer["place"]]
        kept = ", kept for the program" if buffer["output"] else ""
        hover = f"%{i}: {size_text(buffer['bytes'])}, {buffer['place']}, steps {first} to {last}"
        out.append(
            f'<rect x="{x}" y="{y + 1}" width="{LANE - 1}" height="{end - y - 2}"'
            f' fill="{color}"><title>{hover}{kept}</title></rect>'
        )
    return out


def _text(x: float, y: float, text: str, size: int = 0, bold: bool = False) -> str:
    style = f' font-size="{size}"' if size else ""
    style += ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>'
