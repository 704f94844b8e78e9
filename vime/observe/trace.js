"use strict";
// The timeline of vime trace: one canvas of samples, zoomed and moved by wheel and mouse. Times are in milliseconds.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline"), context = canvas.getContext("2d");
const tip = document.getElementById("tip"), detail = document.getElementById("detail"), note = document.getElementById("rows");
const by = document.getElementById("by"), sort = document.getElementById("sort"), find = document.getElementById("find");
const LEFT = 96, AXIS = 22, LOOP = 16, BUSY = 44, TOP = AXIS + LOOP + BUSY + 14;
const INK = "#1d2126", SOFT = "#687078", RULE = "#e4e6e8", PALE = "#f4f5f6";
const LOOPS = {rollout: "#d5dde6", train: "#b0488a", sync: "#1d2126", eval: "#c2a21a", checkpoint: "#8a8f98"};
const F = {begin: 0, end: 1, group: 2, number: 3, task: 4, step: 5, prompt: 6, tokens: 7, oldest: 8, newest: 9, finish: 10,
  reward: 11, fault: 12, server: 13, stale: 14, over: 15, spans: 16};
const samples = data.samples, S = data.strings;
const own = s => s[F.end] - s[F.begin];

let view = {from: 0, to: data.end, top: 0, rows: 1}, rows = [], bands = [], chosen = -1, hovered = -1, hidden = new Set();

function seconds(ms) {
  const s = ms / 1000;
  if (Math.abs(s) < 1) return ms < 10 && ms > 0 ? ms.toFixed(1) + "ms" : ms.toFixed(0) + "ms";
  if (s < 60) return s.toFixed(s < 10 ? 2 : 1) + "s";
  if (s < 3600) return Math.floor(s / 60) + "m" + String(Math.floor(s % 60)).padStart(2, "0") + "s";
  return Math.floor(s / 3600) + "h" + String(Math.floor(s % 3600 / 60)).padStart(2, "0") + "m";
}

const KEYS = {
  none: () => "", step: s => s[F.step] === null ? "untrained" : (S[s[F.group]].startsWith("eval-") ? "eval " : "step ") + s[F.step],
  server: s => S[s[F.server]] || "no server", group: s => S[s[F.group]],
};
const SORTS = {start: s => s[F.begin], duration: s => -own(s), tokens: s => -s[F.tokens], finish: s => s[F.end]};

/** Which sample is in which row, by the choices above the canvas. */
function arrange() {
  const key = KEYS[by.value], rank = SORTS[sort.value], text = find.value.trim().toLowerCase();
  const first = new Map();
  rows = samples.map((s, i) => i).filter(i => !text || label(samples[i]).toLowerCase().includes(text));
  for (const i of rows) {
    const k = key(samples[i]), value = rank(samples[i]);
    first.set(k, Math.min(first.get(k) ?? Infinity, by.value !== "step" ? value : samples[i][F.step] === null ? 1e15 : samples[i][F.begin]));
  }
  const names = by.value === "server" ? [...first.keys()].sort() : [...first.keys()].sort((a, b) => first.get(a) - first.get(b));
  const place = new Map(names.map((name, i) => [name, i]));
  const keyed = rows.map(i => [place.get(key(samples[i])), rank(samples[i]), i]);
  keyed.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  rows = keyed.map(k => k[2]);
  bands = [];
  keyed.forEach((k, row) => { if (!bands.length || bands.at(-1).place !== k[0]) bands.push({place: k[0], row, name: names[k[0]]}); });
  view.top = 0; view.rows = Math.max(1, rows.length);
  draw();
}

const label = s => `${S[s[F.group]]} ${S[s[F.task]]} ${S[s[F.server]]} ${S[s[F.finish]]} ${S[s[F.fault]]}`;

/** Requests at the servers over time: [times, counts], a step function. */
const busy = (() => {
  const changes = [];
  for (const s of samples) for (let i = F.spans; i < s.length; i += 4)
    if (data.phases[s[i]].served) changes.push([s[i + 1], 1], [s[i + 1] + s[i + 2], -1]);
  changes.sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  const times = [0], counts = [0];
  for (const [time, change] of changes) { times.push(time); counts.push(counts.at(-1) + change); }
  return {times, counts, peak: counts.reduce((a, b) => Math.max(a, b), 1)};
})();

const width = () => canvas.clientWidth - LEFT, height = () => canvas.clientHeight - TOP;
const x = time => LEFT + (time - view.from) / (view.to - view.from) * width();
const timeAt = px => view.from + (px - LEFT) / width() * (view.to - view.from);
const rowHeight = () => height() / view.rows;

function draw() { if (!draw.asked) { draw.asked = true; requestAnimationFrame(paint); } }

function paint() {
  draw.asked = false;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio; canvas.height = canvas.clientHeight * ratio;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle";
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  paintBands(); paintAxis(); paintRows(); paintLoop(); paintBusy();
}

function paintAxis() {
  const span = view.to - view.from, raw = span / Math.max(2, width() / 110);
  const strides = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 9e5, 18e5, 36e5, 72e5, 216e5, 864e5];
  const stride = strides.find(s => s >= raw) || strides.at(-1);
  context.textAlign = "center";
  for (let t = Math.ceil(view.from / stride) * stride; t <= view.to; t += stride) {
    context.fillStyle = RULE; context.fillRect(x(t), AXIS - 4, 1, canvas.clientHeight);
    context.fillStyle = SOFT; if (x(t) > LEFT + 12) context.fillText(seconds(t), x(t), 9);
  }
  context.textAlign = "right"; context.fillStyle = SOFT;
  context.fillText("loop", LEFT - 8, AXIS + LOOP / 2);
  context.fillText(`at servers, ${busy.peak}`, LEFT - 8, AXIS + LOOP + 12);
}

function clip(paintInside, top) {
  context.save(); context.beginPath(); context.rect(LEFT, top, width(), canvas.clientHeight); context.clip();
  paintInside(); context.restore();
}

function paintLoop() {
  clip(() => {
    context.textAlign = "center";
    for (const [name, step, start, end] of data.loop) {
      const a = x(start), b = x(end);
      if (b < LEFT || a > canvas.clientWidth) continue;
      context.fillStyle = LOOPS[name] || "#8a8f98";
      context.fillRect(a, AXIS, Math.max(1, b - a - 0.5), LOOP);
      const text = b - a > 74 ? `${name} ${step}` : b - a > 22 && name !== "sync" ? String(step) : "";
      if (text) { context.fillStyle = name === "rollout" ? INK : "#fff"; context.fillText(text, Math.max(a, LEFT) / 2 + Math.min(b, canvas.clientWidth) / 2, AXIS + LOOP / 2 + 0.5); }
      if (name === "sync") { context.fillStyle = "rgba(29,33,38,.35)"; context.fillRect(a, AXIS + LOOP, 1, canvas.clientHeight); }
      if (name === "eval") { context.fillStyle = "rgba(194,162,26,.08)"; context.fillRect(a, AXIS + LOOP, b - a, canvas.clientHeight); }
    }
    context.strokeStyle = "#b3362b"; context.setLineDash([4, 3]);
    for (const t of data.resumes) { context.beginPath(); context.moveTo(x(t), AXIS); context.lineTo(x(t), canvas.clientHeight); context.stroke(); }
    context.setLineDash([]);
  }, AXIS);
}

function paintBusy() {
  const base = AXIS + LOOP + 4 + BUSY, {times, counts, peak} = busy;
  context.fillStyle = RULE; context.fillRect(LEFT, base, width(), 1);
  context.fillStyle = "#2f6fb5"; context.globalAlpha = 0.55;
  let at = lower(times, view.from);
  for (let px = 0; px < width(); px++) {
    const until = timeAt(LEFT + px + 1);
    let most = counts[at];
    while (at + 1 < times.length && times[at + 1] < until) most = Math.max(most, counts[++at]);
    context.fillRect(LEFT + px, base - most / peak * BUSY, 1, most / peak * BUSY);
  }
  context.globalAlpha = 1;
}

function lower(times, time) {
  let low = 0, high = times.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (times[middle] <= time) low = middle; else high = middle - 1; }
  return low;
}

function paintBands() {
  const h = rowHeight();
  bands.forEach((band, index) => {
    const end = index + 1 < bands.length ? bands[index + 1].row : rows.length;
    const y = TOP + (band.row - view.top) * h, bottom = TOP + (end - view.top) * h;
    if (bottom < TOP || y > canvas.clientHeight) return;
    if (index % 2) { context.fillStyle = PALE; context.fillRect(0, Math.max(TOP, y), canvas.clientWidth, bottom - Math.max(TOP, y)); }
    const from = Math.max(TOP, y), room = Math.min(bottom, canvas.clientHeight) - from;
    if (band.name && room >= 12) { context.fillStyle = INK; context.textAlign = "right"; context.fillText(band.name, LEFT - 8, from + Math.min(room / 2, 9), LEFT - 12); }
  });
}

function paintRows() {
  const h = rowHeight(), last = Math.min(rows.length, Math.ceil(view.top + view.rows));
  clip(() => {
    if (h >= 1) for (let row = Math.floor(view.top); row < last; row++) paintSample(rows[row], TOP + (row - view.top) * h, h);
    else for (let px = 0; px < height(); px++) {  // a line holds many samples: the longest whole, over the work of the others
      const from = Math.ceil(view.top + px / h), until = Math.min(last, view.top + (px + 1) / h);
      for (let row = from; row < until; row++) paintSample(rows[row], TOP + px, 1, false);
      if (from < until) paintSample(longestOf(from, until), TOP + px, 1);
    }
    for (const index of [hovered, chosen]) outline(index, h);
  }, TOP);
  note.textContent = rows.length === 0 ? "no sample has this text" : h >= 1 ? `${rows.length} samples` :
    `${rows.length} samples; a line holds ${Math.ceil(1 / h)}, the longest on top`;
}

function longestOf(from, until) {
  let longest = rows[from];
  for (let row = from + 1; row < until; row++) if (own(samples[rows[row]]) > own(samples[longest])) longest = rows[row];
  return longest;
}

function paintSample(index, y, h, waits = true) {
  const s = samples[index], thick = h > 3 ? h - 1 : h;
  for (let i = F.spans; i < s.length; i += 4) {
    if (hidden.has(s[i]) || !waits && (data.phases[s[i]].wait || s[i + 1] >= s[F.end])) continue;
    const a = x(s[i + 1]), b = x(s[i + 1] + s[i + 2]);
    if (b < LEFT || a > canvas.clientWidth) continue;
    const wait = data.phases[s[i]].wait && h > 3;
    context.fillStyle = data.phases[s[i]].color;
    context.fillRect(a, wait ? y + thick * 0.3 : y, Math.max(0.6, b - a), wait ? thick * 0.4 : thick);
  }
  if (s[F.fault] && h >= 2) { context.fillStyle = "#b3362b"; context.fillRect(x(s[F.end]) - 1, y, 3, thick); }
}

function outline(index, h) {
  const row = index < 0 ? -1 : rows.indexOf(index);
  if (row < 0) return;
  const s = samples[index], y = TOP + (row - view.top) * h;
  context.strokeStyle = INK; context.lineWidth = index === chosen ? 1.5 : 0.8;
  context.strokeRect(x(s[F.begin]) - 2, y - 1.5, Math.max(4, x(s[F.over]) - x(s[F.begin]) + 4), Math.max(4, h + 2));
  if (index === chosen) { context.fillStyle = INK; context.beginPath(); context.moveTo(LEFT, y + h / 2 - 5); context.lineTo(LEFT + 8, y + h / 2); context.lineTo(LEFT, y + h / 2 + 5); context.fill(); }
}

function sampleAt(event) {
  const y = event.offsetY - TOP;
  if (y < 0 || event.offsetX < LEFT) return -1;
  const h = rowHeight(), first = h >= 1 ? Math.floor(view.top + y / h) : Math.ceil(view.top + Math.floor(y) / h);
  return first < rows.length ? longestOf(first, Math.min(rows.length, view.top + (y + 1) / h)) : -1;
}

/** What is known of a sample, as [name, value] pairs. */
function facts(s) {
  const decoded = sum(s, i => data.phases[s[i]].decodes);
  return [
    ["group", `${S[s[F.group]]}, number ${s[F.number]}`], ["task", S[s[F.task]]],
    ["step", s[F.step] ?? "none"], ["duration", seconds(own(s))],
    ["tokens", `${s[F.tokens]} after ${s[F.prompt]}` + (decoded ? `, ${(s[F.tokens] / decoded * 1000).toFixed(0)}/s` : "")],
    ["server", S[s[F.server]] || "none"],
    ["versions", s[F.oldest] === null ? "none" : s[F.oldest] === s[F.newest] ? s[F.oldest] : `${s[F.oldest]} to ${s[F.newest]}`],
    ["staleness", s[F.stale] ?? "none"], ["finish", S[s[F.finish]] || "none"],
    ["reward", s[F.reward] === null ? "none" : Number(s[F.reward].toPrecision(4))], ...(s[F.fault] ? [["fault", S[s[F.fault]]]] : []),
  ];
}

const sum = (s, wanted) => { let all = 0; for (let i = F.spans; i < s.length; i += 4) if (wanted(i)) all += s[i + 2]; return all; };

function element(tag, text, css) { const made = document.createElement(tag); made.textContent = text; if (css) made.className = css; return made; }

function show(index) {
  detail.replaceChildren();
  if (index < 0) return;
  const s = samples[index], list = element("dl", "");
  for (const [name, value] of facts(s)) { const one = element("div", ""); one.append(element("dt", name), element("dd", value)); list.append(one); }
  const table = element("table", ""), head = element("tr", "");
  for (const name of ["phase", "at", "took", "where"]) head.append(element("th", name));
  table.append(head);
  for (let i = F.spans; i < s.length; i += 4) {
    const row = element("tr", ""), first = element("td", ""), key = element("span", "", "key"), dot = element("i", "");
    dot.style.background = data.phases[s[i]].color; key.append(dot); first.append(key, data.phases[s[i]].label);
    row.append(first, element("td", seconds(s[i + 1])), element("td", seconds(s[i + 2])), element("td", S[s[i + 3]]));
    table.append(row);
  }
  detail.append(element("h3", `Sample ${S[s[F.group]]}/${s[F.number]}`), list, table);
}

function choose(index) { chosen = index; show(index); draw(); }

/** Zooms to a sample, with some of its neighbours. */
function goTo(index) {
  if (!rows.includes(index)) { find.value = ""; arrange(); }
  const s = samples[index], margin = 0.15 * (s[F.over] - s[F.begin]) + 5, row = rows.indexOf(index);
  view = {from: s[F.begin] - margin, to: s[F.over] + margin, top: row, rows: Math.min(rows.length, 40)};
  view.top = row - view.rows / 2;
  bound(); choose(index);
  document.getElementById("over").scrollIntoView();
}

function bound() {
  const span = Math.min(Math.max(view.to - view.from, 2), data.end * 1.02 + 1);
  view.from = Math.max(-0.01 * data.end, Math.min(view.from, data.end * 1.01 - span)); view.to = view.from + span;
  view.rows = Math.min(Math.max(view.rows, Math.min(5, rows.length || 1)), Math.max(1, rows.length));
  view.top = Math.max(0, Math.min(view.top, rows.length - view.rows));
}

function zoomTime(factor, centre) {
  view = {...view, from: centre + (view.from - centre) * factor, to: centre + (view.to - centre) * factor};
  bound(); draw();
}

function zoomRows(factor, centre) {
  const share = (centre - view.top) / view.rows;
  view.rows *= factor; bound();
  view.top = centre - share * view.rows; bound(); draw();
}
const fit = () => { view = {from: 0, to: data.end, top: 0, rows: Math.max(1, rows.length)}; bound(); draw(); };
const middle = () => (view.from + view.to) / 2;

canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY || event.deltaX)) / 250);
  if (event.shiftKey) zoomRows(factor, view.top + (event.offsetY - TOP) / rowHeight());
  else zoomTime(factor, timeAt(event.offsetX));
}, {passive: false});

let drag = null;
canvas.addEventListener("pointerdown", event => { drag = {x: event.clientX, y: event.clientY, view: {...view}, moved: false}; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointermove", event => {
  if (drag) {
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    drag.moved ||= Math.abs(dx) + Math.abs(dy) > 4;
    const shift = dx / width() * (drag.view.to - drag.view.from);
    view = {...drag.view, from: drag.view.from - shift, to: drag.view.to - shift, top: drag.view.top - dy / rowHeight()};
    bound(); tip.hidden = true; draw();
    return;
  }
  const index = sampleAt(event);
  if (index !== hovered) { hovered = index; draw(); }
  tip.hidden = index < 0;
  if (index < 0) return;
  tip.replaceChildren(...facts(samples[index]).map(([name, value]) => { const line = element("div", ""); line.append(element("span", name), ` ${value}`); return line; }));
  const over = hoveredPhase(index, timeAt(event.offsetX));
  if (over) tip.prepend(element("b", over));
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
});
canvas.addEventListener("pointerup", event => { if (drag && !drag.moved) choose(sampleAt(event)); drag = null; });
canvas.addEventListener("pointerleave", () => { hovered = -1; tip.hidden = true; draw(); });
canvas.addEventListener("dblclick", fit);
canvas.addEventListener("keydown", event => {
  const span = view.to - view.from;
  const move = {ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, -0.2], ArrowDown: [0, 0.2]}[event.key];
  if (move) { event.preventDefault(); view = {...view, from: view.from + move[0] * span, to: view.to + move[0] * span, top: view.top + move[1] * view.rows}; bound(); draw(); }
  else if (event.key === "+") zoomTime(0.7, middle()); else if (event.key === "-") zoomTime(1.4, middle()); else if (event.key === "0") fit();
});

function hoveredPhase(index, time) {
  const s = samples[index];
  for (let i = F.spans; i < s.length; i += 4)
    if (time >= s[i + 1] && time <= s[i + 1] + s[i + 2]) return `${data.phases[s[i]].label}, ${seconds(s[i + 2])}`;
  return "";
}

for (const [id, action] of Object.entries({
  fit, "in": () => zoomTime(0.6, middle()), out: () => zoomTime(1.7, middle()),
  taller: () => zoomRows(0.5, view.top + view.rows / 2), flatter: () => zoomRows(2, view.top + view.rows / 2),
})) document.getElementById(id).addEventListener("click", action);
for (const control of [by, sort]) control.addEventListener("change", arrange);
find.addEventListener("input", arrange);
for (const key of document.querySelectorAll("[data-phase]")) key.addEventListener("click", () => {
  const phase = Number(key.dataset.phase);
  hidden.has(phase) ? hidden.delete(phase) : hidden.add(phase);
  key.classList.toggle("off", hidden.has(phase)); draw();
});
/** The sample that the address names, #sample-12: links of the tables do, and so may a person's. */
function follow() {
  const index = Number((location.hash.match(/^#sample-(\d+)$/) || [])[1] ?? -1);
  if (index >= 0 && index < samples.length) goTo(index);
}
document.addEventListener("click", event => {  // also again to the one that the address names already
  if (event.target.closest("a")?.getAttribute("href") === location.hash) follow();
});
addEventListener("hashchange", follow);
new ResizeObserver(draw).observe(canvas);
arrange(); follow();
