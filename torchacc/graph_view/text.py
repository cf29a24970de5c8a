"""A plan as text."""

from __future__ import annotations

from torchacc.graph_view.plan import (
    PLACE_TEXT,
    PlanData,
    by_line,
    lifetime,
    placed,
    short_op,
    size_text,
    source_text,
    step_label,
    summary,
    time_text,
)


def render(plan: PlanData) -> str:
    """The steps with their operators, the memory of each buffer, the lines of the program."""
    lines = [f"Plan of acc:{plan['device']}", "", *summary(plan), "", "STEPS, in order", ""]
    lines.append("  step       time       held  operators, results and operands (%n is buffer n)")
    for i, step in enumerate(plan["steps"]):
        head = f"{i:6} {time_text(step['seconds']):>10} {size_text(step['held_bytes']):>10}  "
        if step["kernel"] is not None:
            launches = f", {step['launches']} launches" if step["launches"] > 1 else ""
            name = plan["kernels"][step["kernel"]]["name"]
            lines.append(f"{head}{step_label(plan, step)} ({name}{launches})")
            head = " " * (len(head) + 2)
        for index in step["nodes"]:
            node = plan["nodes"][index]
            source = source_text(node)
            lines.append(f"{head}{node['text']}{'  # ' + source if source else ''}")
    lines += ["", "MEMORY, by place", ""]
    lines += [f"  {place}: {text}" for place, text in PLACE_TEXT.items()]
    lines += ["", "  buffer place          bytes  from step to step"]
    for i in placed(plan):
        buffer = plan["buffers"][i]
        first, last = lifetime(plan, buffer)
        where = f" +{buffer['offset']}" if buffer["place"] == "arena" else ""
        kept = " kept" if buffer["output"] else ""
        lines.append(
            f"  %{i:<5} {buffer['place']:<7} {buffer['bytes']:12}  {first:9} {last:7}{where}{kept}"
        )
    lines += ["", "LINES of the program", "", "        time operators  line"]
    for line in by_line(plan):
        time = time_text(line.seconds if plan["timed_runs"] else None)
        place = source_text(line.node, full=True) or f"unknown ({short_op(line.node['op'])})"
        lines.append(f"  {time:>10} {line.operators:9}  {place}")
    return "\n".join(lines) + "\n"
