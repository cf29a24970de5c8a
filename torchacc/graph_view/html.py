"""A plan as one page that needs nothing else: page.html with page.css, page.js and the data."""

from __future__ import annotations

import json
from collections.abc import Hashable
from html import escape
from importlib import resources
from typing import Any

from torchacc.graph_view.plan import (
    PLACE_TEXT,
    PlanData,
    lanes,
    lifetime,
    place_of,
    summary,
)

_LONGEST_LINE = 1000  # characters of a node that the page shows


def render(plan: PlanData) -> str:
    """The page. It loads nothing from anywhere."""
    parts = {
        "TITLE": f"Plan of acc:{plan['device']}",
        "SUMMARY": "\n".join(f"<p>{escape(sentence)}</p>" for sentence in summary(plan)),
        "STYLE": _file("page.css"),
        "SCRIPT": _file("page.js"),
        # "</script" and "<!--" in a name would end or change the script element.
        "DATA": json.dumps(data(plan), separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = _file("page.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"<!--{name}-->")
        if not mark:
            before, mark, after = page.partition(f"/*{name}*/")
        page = before + text + after
    return page


def data(plan: PlanData) -> dict[str, Any]:
    """The plan for page.js: rows as lists, names that recur as numbers.

    `places` are (file, line, function, node of autograd). A node is (operator, place, line of text,
    reads, writes), a step (nodes, kernel or null, launches, seconds or null, bytes held), a buffer
    (place, bytes, first step, last step, kept, row, height in bytes where it is drawn).
    """
    names: dict[Hashable, int] = {}
    places: dict[Hashable, int] = {}
    found = lanes(plan)
    buffers = []
    for i, buffer in enumerate(plan["buffers"]):
        if i not in found:
            buffers.append([buffer["place"], buffer["bytes"]])
            continue
        first, last = lifetime(plan, buffer)
        lane, kept = found[i], int(buffer["output"])
        row = [buffer["place"], buffer["bytes"], first, last, kept, lane.row, lane.at]
        buffers.append(row)
    nodes = []
    for node in plan["nodes"]:
        text = node["text"]
        if len(text) > _LONGEST_LINE:
            text = f"{text[:_LONGEST_LINE]} ... ({len(text)} characters)"
        nodes.append(
            [
                names.setdefault(node["op"], len(names)),
                places.setdefault(place_of(node), len(places)),
                text,
                node["reads"],
                node["writes"],
            ]
        )
    return {
        "device": plan["device"],
        "peak": plan["peak_bytes"],
        "arena": plan["arena_bytes"],
        "placeText": PLACE_TEXT,
        "ops": list(names),
        "places": list(places),
        "nodes": nodes,
        "steps": [
            [s["nodes"], s["kernel"], s["launches"], _rounded(s["seconds"]), s["held_bytes"]]
            for s in plan["steps"]
        ],
        "buffers": buffers,
        "kernels": [[k["name"], k["operations"], k["operands"]] for k in plan["kernels"]],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 8)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
