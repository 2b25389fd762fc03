"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const rows = report.rows;
  const $$ = (id) => document.getElementById(id);
  const unique = (field) => [...new Set(rows.map((r) => r[field]))];
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "style") Object.assign(node.style, value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  };
  const METRICS = {
    us: ["Time (us)", false, (v) => v.toFixed(v < 100 ? 2 : 1)],
    of_floor: ["Fraction of the floor", true, (v) => v.toFixed(3)],
    of_dense: ["Fraction of dense", true, (v) => v.toFixed(3)],
    tflops: ["TFLOP/s", true, (v) => v.toFixed(1)],
    gbps: ["GB/s", true, (v) => v.toFixed(0)],
    hot_us: ["Hot (us)", false, (v) => v.toFixed(2)],
    host_us: ["Host per launch (us)", false, (v) => v.toFixed(1)],
    whole_host_us: ["Host per whole call (us)", false, (v) => v.toFixed(1)],
  };
  const entries = unique("entry");
  const palette = ["#2f6fde", "#d9822b", "#2a9d62", "#b3423f", "#7d5bbf", "#8a6d3b", "#c75a9b", "#5f6b7a", "#a3a329", "#2aa5b5", "#e0599a", "#4b4bb5", "#6fae3f", "#b58a2a"];
  const colour = Object.fromEntries(entries.map((name, i) => [name, palette[i % palette.length]]));
  const kind = Object.fromEntries(rows.map((r) => [r.entry, r.kind]));
  const state = { off: { suite: new Set(), dtype: new Set(), distribution: new Set(), entry: new Set() }, metric: "us", find: "", sort: null, down: false };

  const geomean = (values) => {
    const good = values.filter((v) => v > 0);
    return good.length ? Math.exp(good.reduce((s, v) => s + Math.log(v), 0) / good.length) : NaN;
  };
  const shown = () => rows.filter((r) =>
    Object.entries(state.off).every(([field, off]) => !off.has(r[field])) &&
    (r.case + " " + r.shape).toLowerCase().includes(state.find.toLowerCase()));
  const visibleEntries = () => entries.filter((name) => !state.off.entry.has(name));
  const group = (list, field) => {
    const found = new Map();
    for (const r of list) found.has(r[field]) ? found.get(r[field]).push(r) : found.set(r[field], [r]);
    return found;
  };

  const isAuto = (name) => name.startsWith("auto");
  const GROUPINGS = { suite: "suite", distribution: "group sizes", dtype: "dtype", form: "form" };

  /* From "all", a click shows that value alone; further clicks add and take away; none left means all again. */
  function choose(box, value) {
    const off = state.off[box.dataset.field], all = unique(box.dataset.field);
    if (off.size === 0 && all.length > 1) all.filter((v) => v !== value).forEach((v) => off.add(v));
    else off.has(value) ? off.delete(value) : off.add(value);
    if (off.size === all.length) off.clear();
    mark(box);
    draw();
  }

  function mark(box) {
    const off = state.off[box.dataset.field];
    box.classList.toggle("part", off.size > 0);
    for (const chip of box.querySelectorAll("button")) chip.setAttribute("aria-pressed", String(!off.has(chip.dataset.value)));
  }

  function chips() {
    for (const box of document.querySelectorAll(".filter")) {
      for (const value of unique(box.dataset.field)) {
        const chip = make("button", { type: "button", "aria-pressed": "true", "data-value": value }, value);
        chip.addEventListener("click", () => choose(box, value));
        box.append(chip);
      }
    }
    for (const [field, label] of Object.entries(GROUPINGS)) $$("by").append(make("option", { value: field }, label));
    $$("by").addEventListener("change", draw);
    for (const [key, [label]] of Object.entries(METRICS)) {
      if (rows.some((r) => r[key] != null)) $$("metric").append(make("option", { value: key }, label));
    }
    $$("metric").addEventListener("change", (e) => { state.metric = e.target.value; state.sort = null; draw(); });
    $$("find").addEventListener("input", (e) => { state.find = e.target.value; draw(); });
    $$("reset").addEventListener("click", () => {
      for (const off of Object.values(state.off)) off.clear();
      state.find = $$("find").value = "";
      state.sort = null;
      document.querySelectorAll(".filter").forEach(mark);
      draw();
    });
  }

  const MOSTLY = 0.9;
  /* Per entry: how near it is to the fastest of each workload, how often it is that, how many it ran. */
  function standing(list) {
    const found = new Map();
    for (const mine of group(list, "case").values()) {
      const able = mine.filter((r) => r.kind !== "ceiling");
      const best = Math.min(...able.filter((r) => r.us && !isAuto(r.entry)).map((r) => r.us));
      for (const r of able) {
        if (!found.has(r.entry)) found.set(r.entry, { name: r.entry, near: [], floors: [], won: 0, of: 0 });
        const entry = found.get(r.entry);
        entry.of += 1;
        if (!r.us || !Number.isFinite(best)) continue;
        entry.near.push(best / r.us);
        entry.floors.push(r.of_floor || 0);
        entry.won += r.us === best && !isAuto(r.entry);
      }
    }
    return [...found.values()].map((e) => ({ ...e, value: geomean(e.near), floor: geomean(e.floors), ran: e.near.length }));
  }

  function bars(list) {
    const mostly = (e) => e.ran >= MOSTLY * e.of;
    const entries = standing(list).sort((a, b) => mostly(b) - mostly(a) || (b.value || 0) - (a.value || 0));
    const top = Math.max(1, ...entries.map((e) => e.value || 0));
    const told = (e) => [isAuto(e.name) ? "" : `won ${e.won}`, `ran ${e.ran} of ${e.of}`, e.ran ? `${e.floor.toFixed(2)} of the floor` : ""].filter(Boolean).join(" · ");
    const part = entries.find((e) => !mostly(e));
    $$("bars").replaceChildren(...entries.flatMap((e) => [e === part ? make("div", { class: "gap" }, "These ran only a part of what is shown:") : "", make("div", { class: "bar " + kind[e.name] },
      make("div", { class: "name" }, e.name, make("small", {}, told(e))),
      make("div", { class: "track" }, make("div", { class: "fill", style: { width: (100 * (e.value || 0)) / top + "%", background: colour[e.name] } })),
      make("div", { class: "value" }, e.ran ? e.value.toFixed(3) : "–"))]));
  }

  function matrix(list) {
    const field = $$("by").value, names = visibleEntries().filter((name) => kind[name] !== "ceiling");
    $$("matrix").tHead.replaceChildren(make("tr", {}, ...[GROUPINGS[field], "workloads", ...names].map((h) => make("th", {}, h))));
    $$("matrix").tBodies[0].replaceChildren(...[...group(list, field)].map(([value, mine]) => {
      const by = Object.fromEntries(standing(mine).map((e) => [e.name, e]));
      const whole = (e) => e && e.ran === e.of && e.ran > 0;
      const best = Math.max(...Object.values(by).filter((e) => whole(e) && !isAuto(e.name)).map((e) => e.value));
      const cells = names.map((name) => {
        const e = by[name];
        if (!e || !e.ran) return make("td", { class: "none" }, "–");
        const shade = Math.min(0.32, Math.max(0, 1 - e.value) * 0.5);
        return make("td", { class: e.value === best ? "best" : whole(e) ? "" : "part", title: `ran ${e.ran} of ${e.of}, won ${e.won}`, style: { backgroundColor: shade > 0.01 ? `rgba(184,66,60,${shade})` : "" } }, e.value.toFixed(2));
      });
      return make("tr", {}, make("td", {}, value), make("td", {}, String(group(mine, "case").size)), ...cells);
    }));
  }

  /* A bar to the right or left of 1, on a logarithmic axis. */
  function scale(p, reach) {
    const half = (50 * Math.abs(Math.log2(p.ratio))) / reach, win = p.ratio >= 1 ? "win" : "loss";
    const fill = make("i", { class: win, style: { left: (win === "win" ? 50 : 50 - half) + "%", width: half + "%" } });
    return make("div", { class: "duel" }, make("div", { class: "name", title: p.name }, p.name), make("div", { class: "axis" }, fill), make("div", { class: "value " + win }, p.ratio.toFixed(2)));
  }

  const HOST = "[host sizes]";
  function autos(list) {
    const found = [];
    for (const [name, mine] of group(list, "case")) {
      for (const r of mine.filter((r) => isAuto(r.entry) && r.us)) {
        const knows = r.entry.endsWith(HOST);
        const others = mine.filter((o) => o.kind === "backend" && o.us && !isAuto(o.entry) && (knows || !o.entry.endsWith(HOST)));
        const best = others.reduce((a, b) => (a && a.us <= b.us ? a : b), null);
        if (best) found.push({ name: `${name}${knows ? ", sizes on the host" : ""}: ${best.entry}`, ratio: best.us / r.us });
      }
    }
    $$("auto-section").hidden = !found.length;
    found.sort((a, b) => a.ratio - b.ratio);
    const behind = (share) => found.filter((p) => p.ratio < 1 / (1 + share)).length;
    const told = `${found.length} choices, geometric mean ${geomean(found.map((p) => p.ratio)).toFixed(3)}; more than 3 % behind: ${behind(0.03)}, more than 10 %: ${behind(0.1)}. The worst:`;
    $$("auto").replaceChildren(make("p", {}, told), ...found.slice(0, SHORT).map((p) => scale(p, 1)));
  }

  const SHORT = 8;
  let duelWhole = false;
  function duel(list) {
    const best = (mine, of) => Math.min(...mine.filter((r) => r.kind === of && r.us).map((r) => r.us));
    const pairs = [...group(list, "case")].map(([name, mine]) => ({ name, ratio: best(mine, "peer") / best(mine, "backend") }))
      .filter((p) => Number.isFinite(p.ratio) && p.ratio > 0).sort((a, b) => a.ratio - b.ratio);
    if (!pairs.length) { $$("duel").replaceChildren("No workload shows both a backend and a peer."); return; }
    const reach = Math.max(0.1, ...pairs.map((p) => Math.abs(Math.log2(p.ratio))));
    const wins = pairs.filter((p) => p.ratio >= 1).length;
    const line = (p) => scale(p, reach);
    const hidden = duelWhole ? 0 : pairs.length - 2 * SHORT;
    const shownPairs = hidden > 2 ? [pairs.slice(0, SHORT), pairs.slice(-SHORT)] : [pairs, []];
    const nodes = shownPairs[0].map(line);
    if (hidden > 2) nodes.push(make("div", { class: "gap" }, `${hidden} between them: from ${pairs[SHORT].ratio.toFixed(2)} to ${pairs[pairs.length - SHORT - 1].ratio.toFixed(2)}, half above ${pairs[pairs.length >> 1].ratio.toFixed(2)}`));
    nodes.push(...shownPairs[1].map(line));
    if (pairs.length > 2 * SHORT + 2) nodes.push(make("button", { type: "button", class: "more", onclick: () => { duelWhole = !duelWhole; draw(); } }, duelWhole ? "Only the ends" : `All ${pairs.length}`));
    const mean = geomean(pairs.map((p) => p.ratio));
    $$("duel").replaceChildren(make("p", {}, `${wins} won, ${pairs.length - wins} lost, geometric mean ${mean.toFixed(3)}`), ...nodes);
  }

  function roof(list) {
    const points = list.filter((r) => r.us && r.tflops > 0 && r.bytes > 0).map((r) => ({ x: r.flops / r.bytes, y: r.tflops, r }));
    if (!points.length) { $$("roof").replaceChildren("Nothing to draw."); return; }
    const narrow = window.innerWidth < 640, W = narrow ? 430 : 900, H = narrow ? 330 : 380, L = 52, B = 34, T = 12, R = 14;
    const rates = Object.values(report.rates);
    const xs = points.map((p) => p.x).concat(rates.map((r) => (r.tflops / r.tbps) * 1.3));
    const ys = points.map((p) => p.y).concat(rates.map((r) => r.tflops * 1.3));
    const lg = Math.log10, x0 = lg(Math.min(...xs)) - 0.1, x1 = lg(Math.max(...xs)) + 0.1, y0 = lg(Math.min(...ys)) - 0.1, y1 = lg(Math.max(...ys)) + 0.05;
    const X = (v) => L + ((lg(v) - x0) / (x1 - x0)) * (W - L - R), Y = (v) => H - B - ((lg(v) - y0) / (y1 - y0)) * (H - B - T);
    const svgNode = (tag, attributes, text) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
      if (text != null) node.textContent = text;
      return node;
    };
    const svg = svgNode("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "roofline" });
    for (let e = Math.ceil(x0); e <= x1; e++) svg.append(svgNode("line", { x1: X(10 ** e), x2: X(10 ** e), y1: T, y2: H - B, stroke: "var(--line)" }), svgNode("text", { x: X(10 ** e), y: H - B + 16, "text-anchor": "middle" }, String(10 ** e)));
    for (let e = Math.ceil(y0); e <= y1; e++) svg.append(svgNode("line", { x1: L, x2: W - R, y1: Y(10 ** e), y2: Y(10 ** e), stroke: "var(--line)" }), svgNode("text", { x: L - 6, y: Y(10 ** e) + 4, "text-anchor": "end" }, String(+(10 ** e).toPrecision(3))));
    const ceilings = new Map();
    for (const [name, rate] of Object.entries(report.rates)) {
      const text = `${rate.tflops.toPrecision(3)} TFLOP/s, ${rate.tbps.toPrecision(3)} TB/s`;
      ceilings.set(text, { rate, names: [...(ceilings.get(text)?.names ?? []), name] });
    }
    for (const [index, [text, { rate, names }]] of [...ceilings].entries()) {
      const knee = rate.tflops / rate.tbps, low = Math.max(10 ** x0, 10 ** y0 / rate.tbps);
      svg.append(svgNode("polyline", { points: `${X(low)},${Y(low * rate.tbps)} ${X(knee)},${Y(rate.tflops)} ${X(10 ** x1)},${Y(rate.tflops)}`, fill: "none", stroke: "var(--ink)", "stroke-width": 1.2 }));
      svg.append(svgNode("text", { x: W - R, y: H - B - 8 - 15 * index, "text-anchor": "end" }, `${names.join(", ")}: ${text}`));
    }
    for (const p of points) {
      const dot = svgNode("circle", { cx: X(p.x), cy: Y(p.y), r: 4, fill: colour[p.r.entry], "fill-opacity": kind[p.r.entry] === "backend" ? 0.9 : 0.4 });
      dot.append(svgNode("title", {}, `${p.r.entry}\n${p.r.case}\n${p.r.us.toFixed(1)} us, ${p.y.toPrecision(4)} TFLOP/s`));
      svg.append(dot);
    }
    svg.append(svgNode("text", { x: (L + W) / 2, y: H - 4, "text-anchor": "middle" }, "FLOP per byte"));
    $$("roof").replaceChildren(svg);
  }

  function table(list) {
    const names = visibleEntries();
    const [, higher, format] = METRICS[state.metric];
    const heads = ["workload", "floor", ...names];
    const cases = [...group(list, "case")].map(([name, mine]) => ({ name, mine, floor: mine[0].floor_us, by: Object.fromEntries(mine.map((r) => [r.entry, r])) }));
    const value = (c, key) => key === "workload" ? c.name : key === "floor" ? c.floor : c.by[key]?.[state.metric] ?? (state.down ? -Infinity : Infinity);
    if (state.sort) cases.sort((a, b) => { const x = value(a, state.sort), y = value(b, state.sort); return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1); });
    $$("table").tHead.replaceChildren(make("tr", {}, ...heads.map((h) => make("th", { "aria-sort": state.sort === h ? (state.down ? "descending" : "ascending") : "none" },
      make("button", { type: "button", onclick: () => { state.down = state.sort === h ? !state.down : false; state.sort = h; draw(); } }, h + (state.sort === h ? (state.down ? " ↓" : " ↑") : ""))))));
    $$("table").tBodies[0].replaceChildren(...cases.map((c) => {
      const judged = c.mine.filter((r) => r.kind !== "ceiling" && r[state.metric] != null).map((r) => r[state.metric]);
      const best = judged.length ? (higher ? Math.max(...judged) : Math.min(...judged)) : null;
      const cells = names.map((name) => {
        const r = c.by[name], v = r?.[state.metric];
        if (v == null) return make("td", { class: r?.status === "failed" ? "failed" : "none", title: r?.reason ?? "" }, r == null ? "" : r.us ? "–" : r.status);
        const behind = best == null || r.kind === "ceiling" ? 0 : higher ? best / v - 1 : v / best - 1;
        const shade = Math.min(0.32, Math.max(0, behind) * 0.32);
        return make("td", { class: v === best && r.kind !== "ceiling" ? "best" : "", style: { backgroundColor: shade > 0.01 ? `rgba(184,66,60,${shade})` : "" }, title: r.kernel ?? "" }, format(v));
      });
      return make("tr", { onclick: () => detail(c) }, make("td", { title: c.mine[0].shape }, c.name), make("td", {}, c.floor.toFixed(1)), ...cells);
    }));
    $$("count").textContent = `${cases.length} workloads, ${list.filter((r) => r.us).length} times`;
  }

  function detail(c) {
    const lines = c.mine.map((r) => {
      if (!r.us) return `${r.entry}: ${r.status}: ${r.reason ?? ""}`;
      const q = r.graph && (!r.eager || r.graph.median <= r.eager.median) ? ["graph", r.graph] : ["eager", r.eager];
      const more = [r.kernel, r.config, r.why, r.hot_us && `hot ${r.hot_us} us`, r.host_us && `host ${r.host_us} us per launch`, r.whole_host_us && `${r.whole_host_us} us per whole call`, ...(r.notes ?? [])].filter(Boolean).join("; ");
      return `${r.entry}: ${r.us.toFixed(2)} us (${q[0]}, 20 % ${q[1].q20}, 80 % ${q[1].q80}, ${q[1].count} samples, repeats differ by ${(100 * q[1].spread).toFixed(1)} %), ${r.tflops} TFLOP/s, ${r.of_floor} of the floor\n    ${more}`;
    });
    $$("detail").hidden = false;
    $$("detail").replaceChildren(make("h2", {}, c.name), make("p", { class: "hint" }, c.mine[0].shape), make("pre", {}, lines.join("\n")));
  }

  function reasons(list) {
    const counted = new Map();
    for (const r of list.filter((r) => !r.us)) { const text = `${r.entry}: ${r.status}: ${r.reason ?? ""}`; counted.set(text, (counted.get(text) ?? 0) + 1); }
    const items = [...counted].map(([text, n]) => `${text} (${n} workload${n > 1 ? "s" : ""})`)
      .concat(Object.entries(report.absent).map(([name, why]) => `${name}: not here: ${why}`));
    const late = report.unfinished.length;
    if (late) items.push(`${late} workload${late > 1 ? "s" : ""} not reached within the time budget: ${report.unfinished.slice(0, 3).join(", ")}${late > 3 ? ", ..." : ""}`);
    $$("reasons").replaceChildren(...(items.length ? items : ["Everything ran."]).map((text) => make("li", {}, text)));
  }

  function method() {
    const m = report.machine, how = report.method, packages = Object.entries(m.packages).map(([k, v]) => `${k} ${v}`).join(", ");
    const clocks = Object.entries(m.clocks ?? {}).map(([k, v]) => `${k} ${v}`).join(", ");
    $$("where").textContent = `${m.device} · ${m.date.slice(0, 10)} · commit ${m.commit} · ${packages}`;
    const lines = [
      "Every answer was checked against a float32 reference, element by element, before it was timed; a wrong answer has no time.",
      `Style: ${how.style}. Before each call: ${how.flush}. All entries of a workload are interleaved in a rotating order on the same random data; up to ${how.reps} rounds; medians.${how.rest ? ` The device idled for ${Math.round(100 * how.rest)} % of the time, in pauses between bursts of 25 ms.` : ""}`,
      `The time shown is the better of an eager call and a CUDA graph replay. What the clock itself costs (${Object.entries(how.overhead_us).map(([k, v]) => `${k} ${v} us`).join(", ")}) is not subtracted.`,
      `Floor: the larger of FLOPs over the dense rate and bytes over the copy rate, ceilings ${how.rates}; ${how.rates === "given" ? "measured in this run " + Object.entries(how.measured_rates ?? {}).map(([k, r]) => `${k} ${r.tflops.toPrecision(4)} TFLOP/s, ${r.tbps.toPrecision(3)} TB/s`).join("; ") + "; " : ""}bytes count A, C and the B of every group with rows once. It is a yardstick, not a hard limit. "dense" is one torch.mm of the same FLOPs.`,
      `Machine: ${m.device}, Python ${m.python}, CUDA ${m.cuda || "none"}; ${clocks}`,
      `Measured ${m.date} with: ${how.command ?? "multigemm bench"}`,
    ];
    $$("method").replaceChildren(...lines.map((text) => make("p", {}, text)));
  }

  function draw() {
    const list = shown();
    bars(list); matrix(list); duel(list); autos(list); roof(list); table(list); reasons(list);
  }
  chips(); method(); draw();
})();
