"""A plan as a Graphviz graph."""

from __future__ import annotations

from torchacc.graph_view.plan import (
    PlanData,
    short_op,
    size_text,
    source_text,
    summary,
    time_text,
)


def render(plan: PlanData) -> str:
    """Operators as boxes, one cluster per generated kernel, an arrow per buffer that is handed on.

    Ellipses are inputs that an operator reads before any writes them.
    """
    lines = ["digraph plan {"]
    lines.append(f"  label={_quoted(chr(10).join(summary(plan)), left=True)};")
    lines.append('  labelloc=t; labeljust=l; fontname="sans-serif"; rankdir=TB;')
    lines.append('  node [shape=box, style=filled, fillcolor="#eef2f7", fontname="sans-serif"];')
    lines.append('  edge [fontname="sans-serif", fontsize=9];')
    for i, step in enumerate(plan["steps"]):
        time = f", {time_text(step['seconds'])}" if step["seconds"] is not None else ""
        if step["kernel"] is None:
            lines.append("  " + _node(plan, step["nodes"][0], f"step {i}{time}"))
            continue
        lines.append(f"  subgraph cluster_{i} {{")
        name = f"step {i}: kernel {step['kernel']}{time}"
        lines.append(f"    label={_quoted(name)};")
        lines.append('    style=filled; color="#e8a33d"; fillcolor="#fdf1de";')
        lines += ["    " + _node(plan, node, "") for node in step["nodes"]]
        lines.append("  }")
    lines += _edges(plan)
    lines.append("}")
    return "\n".join(lines) + "\n"


def _node(plan: PlanData, index: int, where: str) -> str:
    node = plan["nodes"][index]
    label = [short_op(node["op"]), source_text(node), where]
    text = _quoted("\n".join(filter(None, label)))
    return f"n{index} [label={text}, tooltip={_quoted(node['text'])}];"


def _edges(plan: PlanData) -> list[str]:
    """From the last operator that wrote a buffer's storage to those that read it."""
    buffers = plan["buffers"]
    writer: dict[int, int] = {}
    inputs: set[int] = set()
    lines = []
    for step in plan["steps"]:
        for index in step["nodes"]:
            node = plan["nodes"][index]
            for buffer in node["reads"]:
                storage = buffers[buffer]["group"]
                label = f"%{buffer} {size_text(buffers[buffer]['bytes'])}"
                start = f"n{writer[storage]}" if storage in writer else f"b{buffer}"
                if storage not in writer and buffer not in inputs:
                    inputs.add(buffer)
                    lines.append(f"  {start} [shape=ellipse, label={_quoted(label)}];")
                lines.append(f"  {start} -> n{index} [label={_quoted(label)}];")
            for buffer in node["writes"]:
                writer[buffers[buffer]["group"]] = index
    return lines


def _quoted(text: str, left: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\l" if left else "\\n") + ('\\l"' if left else '"')
