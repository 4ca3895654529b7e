// The picture of host and workers: it reads /stats once a second while the page is seen, and draws what
// has changed since the numbers before.
// SPDX-License-Identifier: Apache-2.0

const byId = (id) => document.getElementById(id);
const EVERY_MS = 1000, TIMEOUT_MS = 5000, KEPT = 60;
// How the states of a worker (holders/membership.py) look; all others are on their way.
const LOOKS = { ready: "ready", lost: "lost", quarantined: "lost" };
const WIDTH = 320, HOST_HEIGHT = 44, ROW_HEIGHT = 46;

let before = null;
const rates = [];

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function amount(value) {
  if (!Number.isFinite(value)) return "–";
  return value && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function bytes(value) {
  const power = value >= 1e9 ? 3 : value >= 1e6 ? 2 : value >= 1e3 ? 1 : 0;
  return `${amount(value / 1000 ** power)} ${["B", "kB", "MB", "GB"][power]}`;
}

const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Returns how much something grew a second since the numbers before, NaN where there are none.
function rateOf(now, read) {
  if (!before?.engine) return NaN;
  const grown = read(now) - read(before);
  return grown >= 0 ? grown / (now.measured_s - before.measured_s) : NaN;
}

function sizesOf(stats) {
  const sum = (read) => stats.engine.batch_sizes.reduce((total, [size, count]) => total + read(size, count), 0);
  return [sum((size, count) => size * count), sum((_size, count) => count)];
}

function showEngine(stats) {
  const { engine } = stats, { total, free } = engine.blocks, counted = (count) => count.toLocaleString("en");
  byId("running").textContent = engine.running;
  byId("waiting").textContent = engine.waiting;
  byId("blocks").textContent = `${counted(total - free)} of ${counted(total)}`;
  byId("mode").textContent = stats.mode;
  byId("mode").title = stats.mode_reason;
  if (!before?.engine) return;
  const [sequences, steps] = sizesOf(stats), [sequencesBefore, stepsBefore] = sizesOf(before);
  byId("batch").textContent = steps > stepsBefore ? amount((sequences - sequencesBefore) / (steps - stepsBefore)) : "–";
  const rate = rateOf(stats, (one) => one.engine.generated_tokens);
  byId("tokens-rate").textContent = amount(rate);
  rates.push(rate || 0);
  if (rates.length > KEPT) rates.shift();
  const most = Math.max(...rates, 1);
  const points = rates.map((one, place) => `${160 - (rates.length - 1 - place) * (160 / (KEPT - 1))},${38 - (one / most) * 36}`);
  byId("rate-line").replaceChildren(
    shape("path", { class: "base", d: "M0 39H160" }), shape("polyline", { class: "line", points: points.join(" ") }),
  );
}

function hostOf(stats, height) {
  const group = shape("g", {}), { total, free } = stats.engine.blocks, share = total ? (total - free) / total : 0;
  group.append(
    shape("path", { class: "wire", d: `M16 ${HOST_HEIGHT}V${height}` }),
    shape("rect", { class: "box", x: 0.5, y: 0.5, width: WIDTH - 1, height: HOST_HEIGHT - 1, rx: 6 }),
    shape("text", { x: 12, y: 19 }, "host"),
    shape("text", { class: "small right", x: WIDTH - 12, y: 19 }, `KV ${Math.round(share * 100)} %`),
    shape("rect", { class: "track", x: 12, y: 28, width: WIDTH - 24, height: 6, rx: 3 }),
    shape("rect", { class: "level", x: 12, y: 28, width: (WIDTH - 24) * share, height: 6, rx: 3 }),
  );
  return group;
}

function workerOf(stats, name, y) {
  const one = stats.workers[name], look = LOOKS[one.state] ?? "coming";
  const rate = (key) => rateOf(stats, (of) => of.workers[name]?.[key] ?? NaN);
  const rows = rate("rows"), out = rate("request_bytes"), back = rate("reply_bytes"), middle = y + 16;
  const hasRates = look === "ready" && Number.isFinite(rows);
  const width = 1 + (hasRates ? Math.min(4, Math.log10(1 + (out + back) / 1e4)) : 0);
  const detail = hasRates ? `${one.transport} · ${bytes(out)}/s out · ${bytes(back)}/s back` : one.reason || one.transport;
  const group = shape("g", { class: look, "data-worker": name, "data-state": one.state });
  group.append(
    shape("path", { class: "wire", "stroke-width": width, d: `M16 ${middle}H30` }),
    shape("circle", { class: "dot", cx: 36, cy: middle, r: 4.5 }),
    shape("text", { x: 50, y: y + 20 }, clipped(name, 22)),
    shape("text", { class: "word right", x: WIDTH, y: y + 20 }, hasRates ? `${amount(rows)} rows/s` : one.state),
    shape("text", { class: "small", x: 50, y: y + 36 }, clipped(detail, 46)),
    shape("title", {}, `${name}: ${one.state}${one.reason ? `, ${one.reason}` : ""}`),
  );
  return group;
}

function draw(stats) {
  const names = Object.keys(stats.workers).filter((name) => stats.workers[name].state !== "gone").sort();
  const picture = byId("picture"), last = HOST_HEIGHT + 6 + (names.length - 1) * ROW_HEIGHT + 16;
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${HOST_HEIGHT + 8 + names.length * ROW_HEIGHT}`);
  picture.setAttribute("aria-label", `Host and workers: ${names.map((name) => `${name} ${stats.workers[name].state}`).join(", ")}`);
  picture.replaceChildren(
    hostOf(stats, names.length ? last : HOST_HEIGHT),
    ...names.map((name, place) => workerOf(stats, name, HOST_HEIGHT + 6 + place * ROW_HEIGHT)),
  );
}

const WORDS = { ready: "ready", loading: "the model is being loaded", draining: "the server ends", away: "cannot be reached" };

function showState(state, why) {
  const shown = byId("state");
  // A status that is written again would be read aloud again.
  if (shown.dataset.is !== state) {
    shown.dataset.is = state;
    shown.textContent = WORDS[state] ?? "a part is away";
  }
  if (byId("why").textContent !== why) byId("why").textContent = why;
}

function show(stats) {
  byId("model").textContent = stats.model;
  document.title = stats.model;
  const isStale = stats.state === "ready" && !stats.is_up;
  const state = stats.state !== "ready" ? stats.state : isStale || stats.unready ? "poor" : "ready";
  showState(state, isStale ? "The engine process does not answer; these are its last numbers." : stats.unready ?? "");
  byId("machine").classList.toggle("stale", isStale);
  if (!stats.engine || stats.measured_s === before?.measured_s) return;
  showEngine(stats);
  draw(stats);
  before = stats;
}

async function look() {
  try {
    const response = await fetch("/stats", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!response.ok) throw new Error(`${response.status}`);
    show(await response.json());
  } catch {
    showState("away", "");
    byId("machine").classList.add("stale");
  }
}

async function run() {
  for (;;) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    await look();
    await new Promise((passed) => setTimeout(passed, EVERY_MS));
  }
}

if (matchMedia("(max-width: 60rem)").matches) byId("machine").open = false;
run();
