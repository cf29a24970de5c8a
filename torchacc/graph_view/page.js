"use strict";
(() => {
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const steps = plan.steps.map(([nodes, kernel, launches, seconds, held], index) =>
    ({ index, nodes, kernel, launches, seconds, held, fused: kernel !== null }));
  const nodes = plan.nodes.map(([op, place, text, reads, writes]) =>
    ({ op: plan.ops[op], place, text, reads, writes }));
  const buffers = plan.buffers.map(([place, bytes, first, last, kept, row, at], index) =>
    ({ index, place, bytes, first, last, kept, row, at }));
  const timed = steps.some((step) => step.seconds !== null);
  const byId = (id) => document.getElementById(id);
  const most = (list, worth, least) => list.reduce((top, x) => Math.max(top, worth(x)), least);
  const longest = most(steps, (step) => step.seconds || 0, 1e-12);

  // --- words

  const sizeText = (n) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (n < 1024) return `${unit === "B" || n >= 100 ? n.toFixed(0) : n.toFixed(1)} ${unit}`;
      n /= 1024;
    }
    return `${n.toFixed(1)} GiB`;
  };
  const timeText = (s) => {
    if (s === null) return "-";
    if (s < 1e-3) return `${(s * 1e6).toFixed(1)} \u00b5s`;
    return s < 1 ? `${(s * 1e3).toFixed(1)} ms` : `${s.toFixed(2)} s`;
  };
  const shortOp = (name) => name.slice(name.indexOf("::") + 2).split(".")[0];
  const fileName = (file) => file.slice(file.lastIndexOf("/") + 1);
  const placeText = (place) => {
    const [file, line, name, autograd] = plan.places[place];
    if (!file) return autograd ? `backward of ${autograd}` : "";
    return `${fileName(file)}:${line} ${name}${autograd ? `, ${autograd}` : ""}`;
  };
  const label = (step) => {
    const counts = new Map();
    for (const node of step.nodes) {
      const name = shortOp(nodes[node].op);
      counts.set(name, (counts.get(name) || 0) + 1);
    }
    const text = [...counts].map(([name, n]) => (n > 1 ? `${name} x${n}` : name)).join(", ");
    return step.fused ? `kernel ${step.kernel}: ${text}` : text;
  };
  const total = (chosen) => (timed ? chosen.reduce((sum, s) => sum + (s.seconds || 0), 0) : null);
  const sums = (chosen) => {
    const time = timed ? `, ${timeText(total(chosen))}` : "";
    return `  ${chosen.length} step${chosen.length === 1 ? "" : "s"}${time}`;
  };

  // --- elements. Text is set as text, never as HTML: names come from the program.

  const make = (tag, cls, text) => {
    const element = document.createElement(tag);
    if (cls) element.className = cls;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const draw = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const tip = byId("tip");
  const hover = (element, text) => {
    element.addEventListener("mousemove", (event) => {
      tip.textContent = text();
      tip.hidden = false;
      const right = event.clientX > window.innerWidth / 2;
      tip.style.left = right ? "" : `${event.clientX + 14}px`;
      tip.style.right = right ? `${window.innerWidth - event.clientX + 14}px` : "";
      tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - 120)}px`;
    });
    element.addEventListener("mouseleave", () => { tip.hidden = true; });
    return element;
  };

  const stepTip = (step) => {
    const first = nodes[step.nodes[0]];
    const inside = step.nodes.length > 1 ? `\n${step.nodes.length} operators in one pass` : "";
    return `step ${step.index}: ${label(step)}${inside}\ntime ${timeText(step.seconds)}, `
      + `plan holds ${sizeText(step.held)}\n${placeText(first.place)}`;
  };
  const bufferTip = (buffer) => {
    const kept = buffer.kept ? ", kept for the program" : "";
    return `buffer %${buffer.index}: ${sizeText(buffer.bytes)}, ${buffer.place}${kept}\n`
      + `alive in steps ${buffer.first} to ${buffer.last}\n${plan.placeText[buffer.place]}`;
  };

  // --- time and memory

  const LEFT = 120;
  const drawCharts = () => {
    const box = byId("charts");
    const inner = Math.max(300, box.clientWidth - LEFT - 20) * 2 ** Number(byId("zoom").value);
    const x = (step) => LEFT + (inner * step) / Math.max(1, steps.length);
    const equal = byId("heights").value === "rows";
    const svg = draw("svg", { width: LEFT + inner + 10 });
    let y = 8;
    const title = (text, detail) => {
      svg.append(draw("text", { x: 4, y: y + 11 }, text));
      if (detail) svg.append(draw("text", { x: 4, y: y + 25 }, detail));
    };
    const mark = (shape, text, step) => {
      hover(shape, text).addEventListener("click", () => show(step));
      shape.setAttribute("class", "mark");
      svg.append(shape);
    };
    const bars = (height, worth, top, color) => {
      for (const step of steps) {
        const tall = top > 0 ? (height * worth(step)) / top : 0;
        const width = Math.max(0.5, x(step.index + 1) - x(step.index) - (inner > 3e3 ? 0.5 : 0));
        const fill = color(step);
        mark(draw("rect", { x: x(step.index), y: y + height - tall, width, height: tall, fill }),
          () => stepTip(step), step.index);
      }
      y += height + 14;
    };
    if (timed) {
      title("time per step", `up to ${timeText(longest)}`);
      bars(90, (step) => step.seconds || 0, longest,
        (step) => (step.fused ? "#e8a33d" : "#d1495b"));
    }
    title("memory held", `up to ${sizeText(plan.peak)}`);
    bars(90, (step) => step.held, plan.peak,
      (step) => (step.held === plan.peak ? "#d1495b" : "#7fa1cf"));
    for (const place of Object.keys(plan.placeText)) {
      const here = buffers.filter((buffer) => buffer.place === place && buffer.row !== undefined);
      if (here.length === 0) continue;
      const rows = most(here, (buffer) => buffer.row + 1, 1);
      const bytes = most(here, (buffer) => buffer.at + buffer.bytes, 1);
      const height = equal ? Math.max(8, Math.min(4, 600 / rows) * rows) : 130;
      title(`${place}, ${here.length}`, equal ? `${rows} at a time` : sizeText(bytes));
      svg.append(draw("rect", { x: LEFT, y, width: inner, height, fill: "#f7f7f7" }));
      for (const buffer of here) {
        const top = equal ? (height * buffer.row) / rows : (height * buffer.at) / bytes;
        const tall = equal ? height / rows : (height * buffer.bytes) / bytes;
        const gap = tall > 3 ? 1 : 0;
        mark(draw("rect", { x: x(buffer.first), y: y + top, height: Math.max(0.6, tall - gap),
          width: Math.max(1, x(buffer.last + 1) - x(buffer.first)), fill: `var(--${place})` }),
        () => bufferTip(buffer), buffer.first);
      }
      y += height + 14;
    }
    svg.setAttribute("height", y);
    box.replaceChildren(svg);
  };

  // --- steps

  const MANY_NODES = 30;
  const nodeRow = (index) => {
    const node = nodes[index];
    const line = make("div", "node");
    line.append(make("b", "", shortOp(node.op)), make("span", "at", placeText(node.place)),
      make("div", "code", node.text));
    hover(line.children[1], () => plan.places[node.place].slice(0, 2).join(":"));
    return line;
  };
  const stepRow = (step) => {
    const row = make("div", step.fused ? "step fused" : "step");
    row.id = `step-${step.index}`;
    row.append(make("span", "number", step.index));
    const time = make("span", "time", timeText(step.seconds));
    const bar = make("span", "bar");
    bar.style.width = `${(100 * (step.seconds || 0)) / longest}%`;
    time.append(bar);
    row.append(time, make("span", "held", sizeText(step.held)));
    const body = make("div");
    if (step.fused) {
      const launches = step.launches > 1 ? `, ${step.launches} launches` : "";
      const many = step.nodes.length === 1 ? "one operator" : `${step.nodes.length} operators`;
      body.append(make("div", "", `${label(step)} (${many}${launches})`));
    }
    body.append(...step.nodes.slice(0, MANY_NODES).map(nodeRow));
    if (step.nodes.length > MANY_NODES) {
      const more = make("button", "", `show ${step.nodes.length - MANY_NODES} more operators`);
      more.addEventListener("click", (event) => {
        event.stopPropagation();
        more.replaceWith(...step.nodes.slice(MANY_NODES).map(nodeRow));
      });
      body.append(more);
    }
    row.append(body);
    row.addEventListener("click", () => row.classList.toggle("open"));
    return row;
  };

  // Details whose contents are made when they are opened.
  const lazily = (cls, text, chosen, fill) => {
    const details = make("details", cls);
    const summary = make("summary", "", text);
    summary.append(make("span", "sums", sums(chosen)));
    details.append(summary);
    details.fill = () => {
      if (details.filled) return;
      details.filled = true;
      fill(details);
    };
    details.addEventListener("toggle", details.fill);
    details.from = chosen[0].index;
    details.to = chosen[chosen.length - 1].index;
    return details;
  };

  // Neighbours with an equal key.
  const runs = (chosen, key) => {
    const found = [];
    for (const step of chosen) {
      const name = key(step);
      const last = found[found.length - 1];
      if (last && last.name === name) last.steps.push(step);
      else found.push({ name, steps: [step] });
    }
    return found;
  };
  const placeOf = (step) => plan.places[nodes[step.nodes[0]].place];
  const isBackward = (step) => placeOf(step)[3] !== "";
  // The files that most steps come from.
  const files = (chosen) => {
    const counts = new Map();
    for (const step of chosen) {
      const name = fileName(placeOf(step)[0]) || "place unknown";
      counts.set(name, (counts.get(name) || 0) + 1);
    }
    const names = [...counts].sort((a, b) => b[1] - a[1]).map(([name]) => name);
    return names.slice(0, 3).join(", ") + (names.length > 3 ? ", ..." : "");
  };
  const group = (chosen) => {
    const [file, , name, autograd] = placeOf(chosen[0]);
    const lines = chosen.map((step) => placeOf(step)[1]);
    const low = -most(lines, (line) => -line, -Infinity);
    const high = most(lines, (line) => line, 0);
    const at = low === high ? `:${low}` : `:${low}-${high}`;
    const title = file ? `${name}  ${fileName(file)}${at}` : autograd || "place unknown";
    return lazily("group", title, chosen,
      (details) => details.append(...chosen.map(stepRow)));
  };
  const region = ({ steps: chosen }) => {
    const backward = isBackward(chosen[0]);
    const when = !steps.some(isBackward) ? ""
      : !steps.slice(0, chosen[0].index).some(isBackward) ? "before the backward pass: "
        : steps.slice(chosen[0].index).some(isBackward) ? "within the backward pass: "
          : "after the backward pass: ";
    const title = backward ? "backward pass" : when + files(chosen);
    return lazily("region", title, chosen, (details) => {
      const parts = runs(chosen, (step) => {
        const [file, , name, autograd] = placeOf(step);
        return file ? `${file}:${name}` : autograd;
      });
      if (parts.length < 2 || chosen.length <= 12) details.append(...chosen.map(stepRow));
      else details.append(...parts.map((part) => group(part.steps)));
    });
  };

  const wanted = (step, words, kind) => {
    if (kind !== "all" && step.fused !== (kind === "fused")) return false;
    if (words.length === 0) return true;
    const lines = step.nodes.map((index) => {
      const { op, text, place } = nodes[index];
      const [, , , autograd] = plan.places[place];
      return `${op} ${text} ${placeText(place)} ${plan.places[place].join(":")} `
        + `backward:${autograd ? "yes" : "no"}`;
    });
    const text = `${lines.join("\n")}\nstep:${step.index} kernel:${step.kernel}`.toLowerCase();
    // A number is matched as a whole: %1 is not %12.
    return words.every((word) => {
      for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1)) {
        if (!/\d$/.test(word) || !/\d/.test(text.charAt(at + word.length))) return true;
      }
      return false;
    });
  };

  const MANY = 400;
  const list = () => {
    const box = byId("steps");
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = byId("kind").value;
    const sorted = byId("order").value === "time";
    const chosen = steps.filter((step) => wanted(step, words, kind));
    if (sorted) chosen.sort((a, b) => (b.seconds || 0) - (a.seconds || 0));
    byId("count").textContent = `${sums(chosen)} of ${steps.length}`;
    if (!sorted && words.length === 0 && kind === "all") {
      box.replaceChildren(...runs(chosen, isBackward).map(region));
      const only = box.children.length === 1 || steps.length <= 60;
      if (only) for (const details of box.children) details.open = true;
      return;
    }
    box.replaceChildren(...chosen.slice(0, MANY).map(stepRow));
    if (chosen.length > MANY) {
      const more = make("button", "", `show ${chosen.length - MANY} more`);
      more.addEventListener("click", () => more.replaceWith(...chosen.slice(MANY).map(stepRow)));
      box.append(more);
    }
  };

  // Opens what hides a step, and goes there.
  const show = (index) => {
    for (const id of ["search", "kind", "order"]) {
      byId(id).value = { search: "", kind: "all", order: "run" }[id];
    }
    list();
    let level = byId("steps");
    for (;;) {
      const next = [...level.children].find((child) => child.from <= index && index <= child.to);
      if (!next) break;
      next.open = true;
      next.fill();
      level = next;
    }
    const row = byId(`step-${index}`);
    row.classList.add("chosen");
    row.scrollIntoView({ block: "center" });
  };

  // --- tables

  const table = (titles, rows) => {
    const element = make("table");
    const head = make("tr");
    for (const title of titles) head.append(make("th", "", title));
    element.append(head);
    for (const { cells, click } of rows) {
      const row = make("tr", click ? "link" : "");
      for (const cell of cells) row.append(make("td", typeof cell === "number" ? "n" : "", cell));
      if (click) row.addEventListener("click", click);
      element.append(row);
    }
    return element;
  };

  const drawLines = () => {
    const found = new Map();
    for (const step of steps) {
      for (const index of step.nodes) {
        const { place } = nodes[index];
        if (!found.has(place)) found.set(place, { place, operators: 0, seconds: 0 });
        const line = found.get(place);
        line.operators += 1;
        line.seconds += (step.seconds || 0) / step.nodes.length;
      }
    }
    const lines = [...found.values()].sort(
      (a, b) => b.seconds - a.seconds || b.operators - a.operators);
    const rows = lines.map(({ place, operators, seconds }) => {
      const [file, line, , autograd] = plan.places[place];
      return {
        cells: [timed ? timeText(seconds) : "-", operators, placeText(place) || "unknown",
          file],
        click: () => {
          byId("search").value = [file && `${fileName(file)}:${line}`, autograd || "backward:no"]
            .filter(Boolean).join(" ");
          list();
          byId("search").scrollIntoView();
        },
      };
    });
    const titles = ["time", "operators", "line", "file"];
    const box = byId("lines");
    box.append(table(titles, rows.slice(0, 30)));
    if (rows.length > 30) {
      const more = make("button", "", `show all ${rows.length} lines`);
      more.addEventListener("click", () => box.replaceChildren(table(titles, rows)));
      box.append(more);
    }
  };

  const whenOpened = (id, fill) => {
    byId(id).addEventListener("toggle", () => byId(id).append(fill()), { once: true });
  };
  whenOpened("buffers", () => table(
    ["buffer", "place", "bytes", "first step", "last step", ""],
    buffers.map((buffer) => ({
      cells: [`%${buffer.index}`, buffer.place, buffer.bytes, buffer.first ?? "", buffer.last ?? "",
        buffer.kept ? "kept for the program" : ""],
      click: buffer.row === undefined ? null : () => show(buffer.first),
    }))));
  whenOpened("kernels", () => table(
    ["kernel", "function", "operations on each element", "operands", "steps"],
    plan.kernels.map(([name, operations, operands], kernel) => ({
      cells: [kernel, name, operations, operands,
        steps.filter((step) => step.kernel === kernel).map((step) => step.index).join(", ")],
    }))));

  for (const id of ["search", "kind", "order"]) byId(id).addEventListener("input", list);
  for (const id of ["zoom", "heights"]) byId(id).addEventListener("input", drawCharts);
  drawCharts();
  drawLines();
  list();
})();
