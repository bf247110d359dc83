"use strict";
// The page of one dispatcher: reads /events, keeps a quarter of an hour, draws it each second. Everything that
// comes is put in as text, never as markup. The token is in a variable here and nowhere else.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// {{{ made by docs/generate.py of the program's own words
const MEANINGS = {
  "draining": "shutting down",
  "paused": "an operator paused the queue",
  "queue-unreachable": "the queue's server cannot be reached",
  "starting": "a signal has not been read yet",
  "unreadable": "the metrics cannot be read",
  "stale": "the newest sample is too old",
  "no-endpoints": "the pool has no ready endpoint",
  "implausible": "the metrics cannot be true",
  "gateway-unreachable": "the gateway cannot be reached",
  "backpressure": "the gateway refused a request as overloaded",
  "no-room": "requests that are not ours take everything but the reserve",
  "saturated": "the pool is fuller than the reserve allows",
  "full": "our work fills what there is",
  "idle": "no request is ready to be sent",
  "open": "there is room, and work for it"
};
const OPEN = [
  "saturated",
  "full",
  "idle",
  "open"
];
const BY = {
  "learned": "what ran while requests waited",
  "search": "the search so far",
  "watch": "the Kubernetes watch",
  "picker": "the endpoint picker",
  "server": "the model servers",
  "setting": "budget.max_sys",
  "query": "signals.prometheus.queries.capacity"
};
// }}}
// A symbol and the word say what the colour says.
const HEALTH = {
  working: ["--good", "M3 1.5 14 8 3 14.5z"],
  idle: ["--soft", "M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zm0 2a5 5 0 1 1 0 10A5 5 0 0 1 8 3z"],
  waiting: ["--accent", "M8 .8a7.2 7.2 0 1 0 0 14.4A7.2 7.2 0 0 0 8 .8zm0 2a5.2 5.2 0 1 1 0 10.4A5.2 5.2 0 0 1 8 2.8zM7.1 4h1.8v3.7l2.5 1.5-.9 1.5-3.4-2z"],
  degraded: ["--warn", "M8 1 15.5 14.5H.5zM7.1 6v4.2h1.8V6zm0 5.4v1.8h1.8v-1.8z"],
  failing: ["--bad", "M5 1h6l4 4v6l-4 4H5l-4-4V5zM4.2 5.6 6.6 8l-2.4 2.4 1.4 1.4L8 9.4l2.4 2.4 1.4-1.4L9.4 8l2.4-2.4-1.4-1.4L8 6.6 5.6 4.2z"],
  unknown: ["--soft", "M4 5.5a4 4 0 1 1 5 3.9V11H7V7.6h1a2 2 0 1 0-2-2.1zM7 12.5h2v2H7z"],
};
const CODES = { "2xx": "--good", "4xx": "--waiting", "CANCELLED": "--realtime", "DEADLINE_EXCEEDED": "--r-stale" };
const MORE = ["--r-unreadable", "--r-paused", "--r-implausible", "--r-saturated", "--r-no-room"];

// -- small things

function make(tag, more = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(more)) {
    if (name === "tone") made.style.setProperty("--tone", `var(${value})`);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}
function draw(tag, more, ...inside) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(more)) {
    if (name === "tone") made.style.setProperty("--tone", `var(${value})`);
    else made.setAttribute(name, value);
  }
  made.append(...inside);
  return made;
}
const tone = (reason) => (MEANINGS[reason] ? `--r-${reason}` : "--soft");
const known = (value) => value !== null && value !== undefined;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const count = (value) => (Math.abs(value) < 100 ? tenths : whole).format(value);
const share = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const clock = (at, seconds = true) => new Date(at * 1000).toLocaleTimeString("en-GB",
  { hour: "2-digit", minute: "2-digit", ...(seconds ? { second: "2-digit" } : {}) });
const day = (at) => new Date(at * 1000).toLocaleString("en-GB",
  { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

const plural = (number, one, more) => `${count(number)} ${number === 1 ? one : more}`;
const cut = (text, most = 240) => (text.length > most ? `${text.slice(0, most)}… (${whole.format(text.length - most)} more characters)` : text);
const withCode = (text) => text.split("`").map((part, n) => (n % 2 ? make("code", {}, part) : part));
const age = (seconds) => (seconds < 10 ? `${Math.round(seconds)} s` : span(seconds));

function span(seconds) {
  const s = Math.abs(seconds);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => s >= size);
  const [[size, unit], [less, smaller]] = [units[first], units[first + 1]];
  const rest = Math.floor((s % size) / less);
  return `${Math.floor(s / size)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
}

const shown = {};
function changed(what, value) { // an unchanged part stays as it is while somebody reads or selects it
  const text = JSON.stringify(value);
  if (shown[what] === text) return false;
  shown[what] = text;
  return true;
}
function facts(id, rows) {
  if (!changed(id, rows)) return;
  $(id).replaceChildren(...rows.flatMap(([name, value, kind]) => [
    make("dt", {}, name), make("dd", { class: known(value) ? kind : "unknown" }, known(value) ? value : "unknown")]));
}
function table(id, heads, rows) {
  const cell = (tag, column, inside) => make(tag, { class: column.startsWith("#") ? "n" : undefined,
    scope: tag === "th" ? "row" : undefined }, ...[inside].flat().map((part) => (typeof part === "string" ? cut(part) : part)));
  $(id).replaceChildren(
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {
      scope: "col", class: head.startsWith("#") ? "n" : undefined }, head.replace("#", ""))))),
    make("tbody", {}, ...rows.map((row) => make("tr", {},
      ...row.map((inside, at) => cell(at ? "td" : "th", heads[at], inside))))));
}

// -- what is known

let status = null, settings = null, dead = null, totals = {}, samples = [], events = [], keep = 900;

const take = {
  history(told) {
    if (told.whole) { samples = []; events = []; }
    keep = told.seconds;
    told.samples.at.forEach((at, n) => {
      const one = { results: {} };
      for (const name in told.samples) one[name] = told.samples[name][n];
      for (const code in told.results) if (told.results[code][n]) one.results[code] = told.results[code][n];
      samples.push(one);
    });
    events.push(...told.events);
    totals = told.totals;
    trim();
  },
  sample(told) { samples.push({ results: {}, ...told, totals: undefined }); totals = told.totals; trim(); },
  event(told) { events.push(told); trim(); },
  status(told) { status = told; link("live"); soon(); },
  settings(told) { settings = told; soon(); },
  dead(told) { dead = told; soon(); },
};
function trim() {
  const since = samples.length ? samples.at(-1).at - keep : 0;
  samples = samples.filter((each) => each.at > since);
  events = events.slice(-200);
}

// -- the connection

const SILENT_MS = 8000; // a status comes each second
const PAUSE_MS = [1000, 8000];
let token = "", lastId = "", heardAt = Date.now(), lostWhy = "", pause = PAUSE_MS[0];

async function follow() {
  for (;;) {
    const stop = new AbortController();
    const asked = Date.now();
    const watching = setInterval(() => { if (Date.now() - Math.max(heardAt, asked) > SILENT_MS) stop.abort(); }, 1000);
    try {
      const headers = { Accept: "text/event-stream" };
      if (token) headers.Authorization = `Bearer ${token}`;
      if (lastId) headers["Last-Event-ID"] = lastId;
      const answer = await fetch("/events", { headers, signal: stop.signal, cache: "no-store" });
      if (answer.status === 401) { clearInterval(watching); await ask(); continue; }
      if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).trim().slice(0, 200)}`);
      await read(answer.body);
      link("lost");
    } catch (error) {
      link("lost", /^\d/.test(error.message) ? error.message : "");
    } finally {
      clearInterval(watching);
    }
    await new Promise((done) => setTimeout(done, pause * (0.8 + 0.4 * Math.random())));
    pause = Math.min(pause * 1.6, PAUSE_MS[1]);
  }
}

async function read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    heardAt = Date.now();
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) hear(message);
  }
}

function hear(message) {
  const fields = {};
  for (const line of message.split("\n")) {
    const at = line.indexOf(": ");
    if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
  }
  if (fields.retry) PAUSE_MS[0] = Number(fields.retry) || PAUSE_MS[0];
  if (fields.event in take) {
    take[fields.event](JSON.parse(fields.data));
    pause = PAUSE_MS[0];
  }
  if (fields.id) lastId = fields.id;
}

function ask() {
  const before = token;
  link("asking");
  $("ask").hidden = false;
  $("data").hidden = true;
  $("ask-wrong").textContent = before ? "The dispatcher does not accept this token." : "";
  $("token").value = "";
  $("token").focus();
  return new Promise((done) => {
    $("ask").onsubmit = (event) => {
      event.preventDefault();
      const given = $("token").value.trim();
      if (!/^[\x21-\x7e]+$/.test(given)) {
        $("ask-wrong").textContent = "A token consists of visible ASCII characters, without spaces.";
        return;
      }
      token = given;
      $("token").value = "";
      $("ask").hidden = true;
      done();
    };
  });
}

function link(state, why = "") {
  const before = document.body.dataset.link;
  document.body.dataset.link = state;
  lostWhy = why;
  const text = {
    live: "live", asking: "a token is needed", connecting: "connecting",
    lost: `disconnected since ${clock(heardAt / 1000)}, trying again`,
  }[state];
  if (changed("link", text)) $("link-text").textContent = text;
  $("health").hidden = state !== "live" && state !== "lost";
  if (state === "live") { $("data").hidden = false; $("ask").hidden = true; }
  if (state === "lost" && before !== "lost") {
    document.body.style.setProperty("--as-of", `" as of ${clock(heardAt / 1000)}"`);
    showHealth();
  }
}
setInterval(() => { if (document.body.dataset.link === "lost") showHealth(); }, 1000);

// -- the health

const ANNOUNCED_AFTER_S = 5; // a health that holds for less is not announced to screen readers

function showHealth() {
  const lost = document.body.dataset.link === "lost";
  const [tone, shape] = HEALTH[lost ? "failing" : status.health] || HEALTH.unknown;
  const word = lost ? "No contact" : status.health[0].toUpperCase() + status.health.slice(1);
  if (changed("state", word)) {
    $("health").style.setProperty("--tone", `var(${tone})`);
    $("state").replaceChildren(draw("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" },
      draw("path", { d: shape, fill: "currentColor", "fill-rule": "evenodd" })), word, make("em"));
  }
  $("state").lastChild.textContent = !lost && known(status.health_since_s) ? ` for ${age(status.health_since_s)}` : "";
  const silent = age((Date.now() - heardAt) / 1000);
  const sentence = !lost ? cut(status.health_sentence, 400)
    : `No contact with the dispatcher for ${silent}${lostWhy && ` (${lostWhy})`}${status ? "; the last known state is not shown as current" : ""}.`;
  if (changed("sentence", sentence)) $("sentence").textContent = sentence;
  const rows = lost ? [] : [
    status.health_look_at && ["Look at", ...withCode(status.health_look_at)],
    status.pending !== 0 && ["Done in", known(status.done_in_s) ? `about ${age(status.done_in_s)} at the present rate` : "unknown"],
  ].filter(Boolean);
  if (changed("lead", rows.map((row) => row.map((part) => part.textContent || part)))) {
    $("lead").replaceChildren(...rows.flatMap(([name, ...text]) => [make("dt", {}, name), make("dd", {}, ...text)]));
  }
  document.title = [word.toLowerCase(), status && status.pool].filter(Boolean).join(" · ");
  const announced = lost ? word : [status.health, status.health_cause];
  if ((lost || status.health_since_s >= ANNOUNCED_AFTER_S) && changed("announced", announced)) {
    $("say").textContent = lost ? "No contact with the dispatcher." : `${word}: ${sentence}`;
  }
}

// -- the page

for (const each of document.querySelectorAll("details.open")) each.open = innerWidth >= 900;

let due = false;
function soon() {
  if (due || document.hidden) return;
  due = true;
  requestAnimationFrame(() => { due = false; if (status) render(); });
}
document.addEventListener("visibilitychange", soon);

function render() {
  $("pool").textContent = status.pool;
  $("owner").textContent = `queue ${status.queue}`;
  $("version").textContent = `Version ${status.version}, owner ${status.owner}`;
  showHealth();
  gate();
  const now = samples.at(-1);
  if (now) capacity(now);
  charts();
  queue();
  price();
  outcomes();
  models();
  batching();
  showDead();
  replicas();
  eventList();
  settingsTable();
}

const NOTICES_MOST = 4;
function gate() {
  const { reason, explanation, health_sentence: sentence } = status;
  $("badge").textContent = `${status.open ? "Open" : "Closed"}: ${reason}.`;
  $("explanation").textContent = cut(explanation, 400);
  const shown = `${sentence} ${explanation}`;
  const notices = [
    status.config_problem && `The changed configuration is refused, the one before is in force: ${status.config_problem}`,
    ...[["Queue", status.queue_problem], ["Gateway", status.gateway_problem], ["Signals", status.signals_problem]]
      .map(([part, problem]) => problem && !shown.includes(problem) && `${part}: ${problem}`),
    each(),
    status.model_marks_problem && `Labels and drains of models in the queue cannot be read and are ignored: ${status.model_marks_problem}`,
    ...ended(),
  ].filter(Boolean);
  const more = notices.length - NOTICES_MOST;
  const list = more > 0 ? [...notices.slice(0, NOTICES_MOST), `And ${more} more on /status.`] : notices;
  if (changed("notices", list)) $("notices").replaceChildren(...list.map((each) => make("li", {}, cut(each, 160))));
  $("notices").hidden = !list.length;
}

const partsOf = (one) => {
  if (!known(one.max_sys) || !known(one.realtime) || !known(one.ours)) return null;
  const used = one.realtime + one.waiting + one.ours, reserve = one.reserve || 0;
  const free = Math.max(0, one.max_sys - reserve - used);
  return { used, free, left: Math.max(0, Math.min(reserve, one.max_sys - used)), over: Math.max(0, used - one.max_sys) };
};

function whose() { // as `batch-dispatcher status` says it
  const { max_sys_by: by, per_endpoint: each } = status;
  if (by === "setting") return known(each) ? `budget.per_endpoint, ${count(each)}, × ready endpoints` : BY.setting;
  return BY[by] || by;
}
function ended() {
  const off = (status.batching || []).filter((one) => one.why_off);
  const told = off.slice(0, 3).map((one) => `Batching has ended for ${one.model || "requests"} at ${one.path}: ${one.why_off}`);
  return off.length > 3 ? [...told, `Batching has ended for ${off.length - 3} more models`] : told;
}
function each() {
  const { per_endpoint: runs, per_endpoint_from: from, picker_max_concurrency: k } = status;
  if (from === "setting" && known(k) && k !== runs) return `budget.per_endpoint is ${count(runs)}, the endpoint picker counts with ${k}: one of them is wrong.`;
  if (from === "suggestion") return `The endpoint picker's metrics suggest ${count(runs)} requests per endpoint; readings have not confirmed it yet.`;
  if (from === "server") return `Each endpoint is assumed to run ${count(runs)} requests at once, as the model servers' metrics say.`;
  if (status.max_sys_by === "search") return `No setting or metric names the capacity: the search started at ${count(runs)} requests per endpoint, and the estimate grows while requests run and none waits.`;
  return "";
}

function capacity(now) {
  const parts = partsOf(now);
  const by = whose();
  $("capacity-by").textContent = [
    known(status.max_sys) ? `${count(status.max_sys)} requests${by ? ` by ${by}` : ""}` : "unknown",
    known(status.reading_age_s) ? `read ${span(status.reading_age_s)} ago${status.source ? ` from ${status.source}` : ""}` : "not read yet",
  ].join(", ");
  const rows = [
    ["realtime", "Realtime", now.realtime], ["waiting", "Waiting in the picker", now.waiting],
    ["ours", "Ours", now.ours], ["free", "Free", parts && parts.free], ["reserve", "Reserve", now.reserve],
  ];
  const list = rows.map(([kind, name, value]) => [kind, name, known(value) ? count(value) : null,
    known(value) && now.max_sys ? share(value / now.max_sys) : ""]);
  list.push(["limit", "Limit on ours", known(now.limit) ? count(now.limit) : null, ""]);
  list.push(["configured", "Configured capacity", known(now.configured_max_sys) ? count(now.configured_max_sys) : null, ""]);
  if (changed("parts", list)) {
    $("parts").replaceChildren(...list.map(([kind, name, value, of]) => make("div", {},
      make("dt", {}, kind === "limit" || kind === "configured"
        ? make("span", { class: "swatch line dash", tone: kind === "limit" ? "--limit" : "--ink" })
        : make("span", { class: `swatch p-${kind}` }), name),
      make("dd", { class: value === null ? "unknown" : undefined }, value === null ? "unknown" : value, of ? make("small", {}, of) : null))));
  }
  const bar = $("bar");
  bar.classList.toggle("unmeasured", !parts || !now.max_sys);
  if (!parts || !now.max_sys) {
    const text = now.max_sys === 0 ? "no capacity" : "unknown";
    if (bar.textContent !== text) bar.replaceChildren(make("span", {}, text));
    bar.setAttribute("aria-label", `The pool's capacity: ${text}`);
    return;
  }
  if (bar.firstChild && bar.firstChild.tagName === "SPAN") bar.replaceChildren();
  const learned = known(now.configured_max_sys) && now.configured_max_sys > now.max_sys;
  const most = Math.max(learned ? now.configured_max_sys : now.max_sys, parts.used), at = (value) => `${(value / most) * 100}%`;
  const pieces = [["realtime", now.realtime], ["waiting", now.waiting], ["ours", now.ours], ["free", parts.free], ["reserve", parts.left]];
  while (bar.children.length < pieces.length) bar.append(make("i"));
  let left = 0;
  pieces.forEach(([kind, value], n) => {
    const piece = bar.children[n];
    piece.className = `p-${kind}`;
    piece.style.left = at(left);
    piece.style.width = at(value);
    piece.style.display = value > 0 ? "" : "none";
    left += value;
  });
  const marks = [];
  if (learned) marks.push(["fits", now.max_sys, "dash"]);
  else if (parts.over > 0) marks.push(["capacity", now.max_sys, "solid"]);
  while (bar.children.length > pieces.length + marks.length) bar.lastChild.remove();
  marks.forEach(([name, value, kind], n) => {
    const place = Math.min(value, most);
    let mark = bar.children[pieces.length + n];
    if (!mark) bar.append(mark = make("b", {}, make("span")));
    mark.className = `${kind} ${place > most / 2 ? "left" : ""}`;
    mark.style.left = at(place);
    mark.firstChild.textContent = `${name} ${count(value)}`;
  });
  bar.setAttribute("aria-label", `Of ${count(now.max_sys)} requests: realtime ${count(now.realtime)}, waiting in the picker `
    + `${count(now.waiting)}, ours ${count(now.ours)}, free ${count(parts.free)}, reserve ${count(now.reserve || 0)}`
    + (learned ? `; configured are ${count(now.configured_max_sys)}` : "") + (parts.over ? "; more than there is" : ""));
}

// -- the charts

const LEFT = 38, BOTTOM = 24, TOP = 8, RIBBON = 6;
let hoverAt = null;

function runs() { // of equal reasons: [reason, from, to]
  const found = [];
  samples.forEach((one, n) => {
    const before = samples[n - 1], last = found.at(-1);
    const to = samples[n + 1] && samples[n + 1].at - one.at < 5 ? samples[n + 1].at : one.at + 1;
    if (last && last[0] === one.reason && before && one.at - before.at < 5) last[2] = to;
    else found.push([one.reason, one.at, to]);
  });
  return found;
}

function thinned(width) { // one point for each pixel or two, always of the same moments
  const step = Math.max(1, Math.ceil((keep * 1.4) / width));
  return step === 1 ? samples : samples.filter((one, n) =>
    n === samples.length - 1 || Math.floor(one.at / step) !== Math.floor(samples[n + 1].at / step));
}

class Chart {
  constructor(id, most) {
    this.box = $(id);
    this.least = most;
    this.box.addEventListener("pointermove", (event) => {
      const across = (event.clientX - this.box.getBoundingClientRect().left - LEFT) / (this.width - LEFT);
      hoverAt = this.from + Math.max(0, Math.min(1, across)) * keep;
      soon();
    });
    this.box.addEventListener("pointerleave", () => { hoverAt = null; soon(); });
  }
  begin(most) {
    this.width = this.box.clientWidth;
    this.height = this.box.clientHeight;
    this.to = samples.length ? samples.at(-1).at : Date.now() / 1000;
    this.from = this.to - keep;
    const rough = Math.max(most, this.least) / 4, power = 10 ** Math.floor(Math.log10(rough));
    this.step = [1, 2, 5, 10].find((times) => times * power >= rough) * power;
    this.most = Math.max(most, this.least) * 1.04;
    this.floor = this.height - BOTTOM - RIBBON;
    this.parts = [];
  }
  x(at) { return LEFT + ((at - this.from) / keep) * (this.width - LEFT); }
  y(value) { return this.floor - (Math.min(value, this.most) / this.most) * (this.floor - TOP); }
  put(tag, more, ...inside) { this.parts.push(draw(tag, more, ...inside)); }
  axes() {
    for (let value = 0; value <= this.most; value += this.step) {
      this.put("line", { class: "grid", x1: LEFT, x2: this.width, y1: this.y(value), y2: this.y(value) });
      const label = draw("text", { x: LEFT - 8, y: this.y(value) + 4, "text-anchor": "end" });
      label.textContent = this.step < 1 ? value.toFixed(this.step < 0.1 ? 2 : 1) : value >= 10000 ? `${value / 1000}k` : whole.format(value);
      this.parts.push(label);
    }
    const every = this.width < 420 ? 300 : 180;
    for (let at = Math.ceil(this.from / every) * every; at <= this.to; at += every) {
      const x = this.x(at);
      if (x < LEFT + 14 || x > this.width - 16) continue;
      const label = draw("text", { x, y: this.height - 5, "text-anchor": "middle" });
      label.textContent = clock(at, false);
      this.parts.push(label);
    }
  }
  gate(all) {
    for (const [reason, from, to] of all) {
      const x = Math.max(LEFT, this.x(from)), width = Math.max(1, Math.min(this.width, this.x(to)) - x);
      const colour = `var(${tone(reason)})`;
      if (!OPEN.includes(reason)) this.put("rect", { x, width, y: TOP, height: this.floor - TOP, fill: colour, opacity: 0.2 });
      this.put("rect", { x, width, y: this.floor + 3, height: RIBBON, fill: colour, opacity: OPEN.includes(reason) ? 0.55 : 1 });
    }
  }
  pieces(points, value) { // unbroken stretches of what is known
    const found = [];
    points.forEach((one, n) => {
      if (!known(value(one))) return;
      if (!n || !known(value(points[n - 1])) || one.at - points[n - 1].at > 12) found.push([]);
      found.at(-1).push(one);
    });
    return found;
  }
  line(points, value, more, steps = false) {
    const d = this.pieces(points, value).map((piece) => piece.map((one, n) => {
      const x = this.x(one.at).toFixed(1), y = this.y(value(one)).toFixed(1);
      return n ? (steps ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}`;
    }).join("")).join("");
    if (d) this.put("path", { d, fill: "none", "stroke-width": 1.75, "stroke-linejoin": "round", ...more });
  }
  area(points, low, high, more) {
    const d = this.pieces(points, high).map((piece) =>
      `M${piece.map((one) => `${this.x(one.at).toFixed(1)} ${this.y(high(one)).toFixed(1)}`).join("L")}`
      + `L${[...piece].reverse().map((one) => `${this.x(one.at).toFixed(1)} ${this.y(low(one)).toFixed(1)}`).join("L")}Z`).join("");
    if (d) this.put("path", { d, ...more });
  }
  end(label, one) {
    if (one) this.put("line", { x1: this.x(one.at), x2: this.x(one.at), y1: TOP, y2: this.floor, stroke: "var(--ink)", "stroke-width": 1, opacity: 0.6 });
    const svg = this.box.firstChild || this.box.appendChild(draw("svg", { "aria-hidden": "true" }));
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    svg.replaceChildren(...this.parts);
    this.box.setAttribute("aria-label", label);
  }
}

const load = new Chart("load", 1), waits = new Chart("waits", 4), results = new Chart("results", 0.4);
const range = (values) => {
  const some = values.filter(known);
  if (!some.length) return "unknown";
  const low = Math.min(...some), high = Math.max(...some);
  return low === high ? count(low) : `between ${count(low)} and ${count(high)}`;
};

function charts() {
  const all = runs();
  const one = hoverAt === null ? null : samples.reduce((best, each) =>
    (best && Math.abs(best.at - hoverAt) <= Math.abs(each.at - hoverAt) ? best : each), null);
  drawLoad(all, one);
  drawWaits(all, one);
  drawResults(all, one);
  if ($("table-details").open) minuteTable();
}

function drawLoad(all, one) {
  const base = (s) => s.realtime, middle = (s) => (known(s.realtime) ? s.realtime + s.waiting : null);
  const top = (s) => (known(s.realtime) && known(s.ours) ? s.realtime + s.waiting + s.ours : null);
  const mayBe = (s) => (known(s.realtime) && known(s.limit) ? s.realtime + s.waiting + s.limit : null);
  load.begin(Math.max(1, ...samples.map((s) => Math.max(s.max_sys || 0, top(s) || 0))));
  const points = thinned(load.width);
  load.gate(all);
  load.axes();
  load.put("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    draw("line", { x1: 0, x2: 0, y1: 0, y2: 7, stroke: "var(--reserve)", "stroke-width": 3 }));
  load.area(points, (s) => s.max_sys - (s.reserve || 0), (s) => s.max_sys, { fill: "url(#hatch)" });
  load.area(points, () => 0, base, { fill: "var(--realtime)" });
  load.area(points, base, middle, { fill: "var(--waiting)" });
  load.area(points, middle, top, { fill: "var(--ours)", opacity: 0.9 });
  load.line(points, (s) => s.max_sys, { stroke: "var(--ink)", "stroke-width": 2 }, true);
  load.line(points, mayBe, { stroke: "var(--limit)", "stroke-dasharray": "5 3", "stroke-width": 1.5 });
  const closed = {};
  for (const [reason, from, to] of all) closed[reason] = (closed[reason] || 0) + to - from;
  const spent = Object.entries(closed).sort((a, b) => b[1] - a[1]).map(([reason, s]) => [reason, span(Math.max(1, Math.round(s)))]);
  load.end(`Load, last 15 minutes. Realtime ${range(samples.map((s) => s.realtime))}, ours ${range(samples.map((s) => s.ours))}, `
    + `capacity ${range(samples.map((s) => s.max_sys))}. Gate: ${spent.map(([reason, s]) => `${reason} ${s}`).join(", ")}.`, one);
  legend("load-legend", [
    ["p-realtime", "realtime"], ["p-waiting", "waiting in the picker"], ["p-ours", "ours"],
    ["p-reserve", "reserve"], ["line", "capacity", "--ink"], ["line dash", "limit: ours may fill up to here", "--limit"]]);
  if (changed("reasons", spent)) {
    $("reasons").replaceChildren(...spent.map(([reason, s]) => make("li", { title: MEANINGS[reason] || "" },
      make("span", { class: "swatch reason", tone: tone(reason) }), make("span", {}, make("strong", {}, reason), ` ${s}`))));
  }
  const words = (s) => `${clock(s.at)}: ${s.reason}, ${["realtime", "waiting", "ours", "limit"]
    .map((name) => `${name} ${known(s[name]) ? count(s[name]) : "unknown"}`).join(", ")}`;
  $("load-read").textContent = one ? words(one) : "last 15 minutes, in requests";
}

function drawWaits(all, one) {
  waits.begin(Math.max(0, ...samples.map((s) => Math.max(s.pending || 0, s.delayed || 0, s.at_risk || 0))));
  const points = thinned(waits.width);
  waits.gate(all);
  waits.axes();
  waits.area(points, () => 0, (s) => s.pending, { fill: "var(--accent)", opacity: 0.16 });
  waits.line(points, (s) => s.pending, { stroke: "var(--accent)" });
  waits.line(points, (s) => s.delayed, { stroke: "var(--waiting)", "stroke-dasharray": "7 3" });
  waits.line(points, (s) => s.at_risk, { stroke: "var(--bad)", "stroke-dasharray": "2 2" });
  waits.end(`Requests that wait, last 15 minutes. Pending ${range(samples.map((s) => s.pending))}, delayed `
    + `${range(samples.map((s) => s.delayed))}, at risk ${range(samples.map((s) => s.at_risk))}.`, one);
  const now = one || samples.at(-1) || {};
  const told = (name, value) => `${name} ${known(value) ? count(value) : "unknown"}`;
  legend("waits-legend", [["line", told("pending", now.pending), "--accent"], ["line dash", told("delayed", now.delayed), "--waiting"],
    ["line dash", told("at risk", now.at_risk), "--bad"]]);
  $("waits-read").textContent = one ? clock(one.at) : "requests";
}

const BUCKET_S = 10;
function buckets() { // results per second by code, in steps of BUCKET_S
  const found = new Map();
  for (const one of samples) {
    const at = Math.floor(one.at / BUCKET_S) * BUCKET_S;
    const into = found.get(at) || found.set(at, { at, seconds: 0, rates: {} }).get(at);
    into.seconds += 1;
    for (const code in one.results) into.rates[code] = (into.rates[code] || 0) + one.results[code];
  }
  for (const each of found.values()) for (const code in each.rates) each.rates[code] /= each.seconds;
  return [...found.values()];
}
const sum = (rates) => Object.values(rates).reduce((a, b) => a + b, 0);
function colourOf(code, codes) {
  return CODES[code] || MORE[codes.filter((each) => !CODES[each]).indexOf(code) % MORE.length];
}

function drawResults(all, one) {
  const each = buckets();
  const codes = [...new Set(each.flatMap((bucket) => Object.keys(bucket.rates)))].sort();
  results.begin(Math.max(0, ...each.map((bucket) => sum(bucket.rates))));
  results.gate(all);
  results.axes();
  for (const bucket of each) {
    const x = Math.max(LEFT, results.x(bucket.at)), right = Math.min(results.width, results.x(bucket.at + BUCKET_S));
    let below = 0;
    for (const code of codes) {
      const rate = bucket.rates[code];
      if (!rate) continue;
      const y = results.y(below + rate);
      results.put("rect", { x, y, width: Math.max(1, right - x - 1), height: results.y(below) - y, fill: `var(${colourOf(code, codes)})` });
      below += rate;
    }
  }
  const perSecond = each.map((bucket) => sum(bucket.rates));
  results.end(codes.length ? `Results per second, last 15 minutes: ${range(perSecond)}, of ${codes.join(", ")}.` : "No results in the last 15 minutes.", one);
  const at = one ? each.find((bucket) => one.at >= bucket.at && one.at < bucket.at + BUCKET_S) : each.at(-2) || each.at(-1);
  legend("results-legend", codes.length ? codes.map((code) => ["", `${code} ${at ? count(at.rates[code] || 0) : ""}`, colourOf(code, codes)])
    : [["", Object.keys(totals).length ? "none in this time" : "unknown", "--soft"]]);
  $("results-read").textContent = one ? clock(one.at) : "per second, of this process";
}

function legend(id, rows) {
  if (!changed(id, rows)) return;
  $(id).replaceChildren(...rows.map(([kind, text, colour]) => {
    const swatch = make("span", { class: `swatch ${kind}`, "aria-hidden": "true", ...(colour ? { tone: colour } : {}) });
    if (kind === "") swatch.style.background = `var(${colour})`;
    return make("li", {}, swatch, text);
  }));
}

function minuteTable() {
  const rows = new Map();
  for (const one of samples) {
    const at = Math.floor(one.at / 60) * 60;
    (rows.get(at) || rows.set(at, []).get(at)).push(one);
  }
  const mean = (list, name) => {
    const some = list.map((one) => one[name]).filter(known);
    return some.length ? count(some.reduce((a, b) => a + b, 0) / some.length) : "unknown";
  };
  const body = [...rows].reverse().map(([at, list]) => [
    clock(at, false), [...new Set(list.map((one) => one.reason))].join(", "),
    ...["realtime", "waiting", "ours", "limit", "max_sys", "pending", "delayed", "at_risk"].map((name) => mean(list, name)),
    count(list.reduce((a, one) => a + sum(one.results), 0) / list.length)]);
  if (changed("minutes", body)) {
    table("minutes", ["Minute", "Gate", "#Realtime", "#In the picker", "#Ours", "#Limit", "#Capacity", "#Pending", "#Delayed", "#At risk", "#Results/s"], body);
  }
}
$("table-details").addEventListener("toggle", () => $("table-details").open && minuteTable());

// -- the rest

const maybe = (value, how) => (known(value) ? how(value) : null);

function queue() {
  const slack = status.earliest_deadline_s;
  facts("queue", [
    ["Pending", maybe(status.pending, count)], ["Leased, all replicas", maybe(status.leased, count)],
    ["Delayed for a retry", maybe(status.delayed, count)], ["Dead", maybe(status.dead, count), status.dead ? "wrong" : ""],
    ["Oldest at the head has waited", status.pending === 0 ? "none waits" : maybe(status.oldest_pending_age_s, span)],
    ["Earliest deadline", status.pending === 0 ? "none waits" : maybe(slack, (s) => (s < 0 ? `${span(s)} ago` : `in ${span(s)}`)), slack < 0 ? "wrong" : ""],
    ["Deadlines at risk", maybe(status.at_risk, count), status.at_risk ? "wrong" : ""],
    ["Ended per second", maybe(status.service_rate, count)],
    ...sequences(status.sequences || {}),
  ]);
}

function sequences(told) {
  const many = [["active", "alive"], ["parked", "not begun"], ["held", "held"], ["aborted", "aborted"]].filter(([name]) => told[name]);
  if (!many.length && !told.waiting) return [];
  return [["Sequences", many.map(([name, word]) => `${count(told[name])} ${word}`).join(", ") || "none", told.held ? "wrong" : ""],
    ["Wait for their turn", count(told.waiting || 0)]];
}

function price() {
  facts("price", [
    ["First token, median", maybe(status.ttft_p50_s, span)], ["First token, 95 %", maybe(status.ttft_p95_s, span)],
    ["Each further token, median", maybe(status.tpot_p50_s, span)], ["Each further token, 95 %", maybe(status.tpot_p95_s, span)],
    ["Batch share of the capacity", maybe(status.batch_share, share)], ["Reserve", maybe(status.reserve, share)],
  ]);
  const of = { realtime: "realtime alone", all: "all requests, ours among them" }[status.price_of];
  const measured = of && [`Over the last 5 minutes, of ${of}`, maybe(status.price_requests, (n) => `${count(n)} requests`),
    status.price_source && `by ${status.price_source}`].filter(Boolean).join(", ");
  $("price-note").textContent = [measured, status.price_why_not && `Unknown: ${status.price_why_not}`]
    .filter(Boolean).map((each) => `${each.replace(/\.$/, "")}.`).join(" ");
}

function outcomes() {
  const rows = Object.entries(totals).filter(([, total]) => total > 0).sort((a, b) => b[1] - a[1]);
  const every = rows.reduce((all, [, total]) => all + total, 0);
  facts("outcomes", rows.length ? rows.map(([code, total]) => [code, `${whole.format(total)}  (${share(total / every)})`])
    : [["Results", Object.keys(totals).length ? "none yet" : null]]);
  $("outcomes-note").textContent = `Results that this process wrote${known(status.started_at) ? ` since ${day(status.started_at)}` : ""}.`;
}

const ROWS_MOST = 20, VERSIONS_MOST = 5, PROBLEMS_MOST = 3;

function models() {
  const all = status.models || [], rows = [];
  for (const each of all.slice(0, ROWS_MOST)) {
    rows.push([each.name, each.state, `${each.serving} of ${each.endpoints}`, known(each.waiting) ? count(each.waiting) : "unknown", span(each.since_s), each.sentence]);
    const versions = (each.versions || []).filter((one) => one.state !== "gone"), more = versions.length - VERSIONS_MOST;
    for (const one of versions.slice(0, VERSIONS_MOST)) rows.push(["", one.state, String(one.serving), "", span(one.since_s), version(one, each.labels || {}), one.name]);
    if (more > 0) rows.push(["", "", "", "", "", `and ${more} more versions`]);
  }
  const number = status.model_count || all.length, waiting = all.reduce((sum, each) => sum + each.waiting, 0);
  const sum = [number && `${count(number)} known`, waiting && `${plural(waiting, "request waits for its", "requests wait for their")} model`].filter(Boolean).join(", ");
  const problems = status.model_problems || [], unread = problems.length - PROBLEMS_MOST;
  const note = [number > ROWS_MOST && `And ${number - Math.min(ROWS_MOST, all.length)} more models; /status has ${all.length}.`,
    ...problems.slice(0, PROBLEMS_MOST).map((each) => `${cut(each).replace(/\.$/, "")}.`),
    unread > 0 && `And ${plural(unread, "more endpoint", "more endpoints")} cannot be read.`].filter(Boolean).join(" ");
  $("models-card").hidden = !rows.length;
  if (!changed("models", [rows, sum, note])) return;
  $("models-sum").textContent = sum;
  table("models", ["Model", "State", "#Endpoints", "#Waiting", "#For", "How it is"],
    rows.map(([name, state, endpoints, waits, since, how, under]) => [
      under ? make("span", { class: "under" }, make("span", { class: "hidden" }, "version "), under) : name, state, endpoints, waits, since, how]));
  $("models-note").textContent = note;
}

function version(one, labels) {
  const named = (name) => (labels[name] && labels[name].by ? `${name} (${labels[name].by})` : name);
  return [one.share && `${share(one.share)} of the requests`, known(one.warm) && `warm at ${one.warm} of ${one.serving}`,
    one.labels.length && `labelled ${one.labels.map(named).join(", ")}`, one.drained && `drained ${one.drained_by || ""}`.trim()].filter(Boolean).join("; ");
}

function batching() {
  const told = [...status.batching || []].sort((one, other) => !!other.why_off - !!one.why_off);
  const rows = told.slice(0, ROWS_MOST).map((each) => [
    each.path, each.model || "none", String(each.size), known(each.takes) ? String(each.takes) : "unknown",
    known(each.gain) ? `${each.gain.toFixed(2)} ×` : "unknown", String(each.checked), each.sentence]);
  const calls = Object.values(status.batching_calls || {}).reduce((sum, each) => sum + each, 0);
  const sum = `${whole.format(status.batching_requests || 0)} requests in ${whole.format(calls)} merged calls, `
    + `${whole.format(status.batching_waiting || 0)} wait to be merged`;
  $("batching-card").hidden = !rows.length;
  if (!changed("batching", [rows, sum])) return;
  $("batching-sum").textContent = sum;
  table("batching", ["Path", "Model", "#Items a call", "#Server takes", "#Gain", "#Checked", "What is merged"], rows);
  $("batching-note").textContent = told.length > rows.length ? `And ${told.length - rows.length} more on /status.` : "";
}

function showDead() {
  const { read = 0, reasons = 0, groups = [] } = dead || {};
  const sum = status.dead && read ? [plural(status.dead, "request", "requests"), read < status.dead && `the newest ${read} by reason`].filter(Boolean).join(", ") : "";
  if (!changed("dead", [dead, sum, status.dead])) return;
  $("dead-sum").textContent = sum;
  $("dead").parentNode.hidden = !sum;
  const note = !known(status.dead) ? "Unknown: the queue is not counted." : !status.dead ? "No request is dead." : !read ? "Not read yet."
    : [reasons > groups.length && `And ${reasons - groups.length} more reasons: see \`batch-dispatcher dead list\`.`,
      "Each with a readable id has an error result; after `dead requeue` a second result comes. Add `--config FILE` to the commands."].filter(Boolean).join(" ");
  $("dead-note").replaceChildren(...withCode(note));
  table("dead", ["#Requests", "Reason", "Newest", "#Tries", "Died", "Commands for the newest"], groups.map(({ count: number, newest: one }) => [
    count(number), one.reason, one.id === null ? make("span", { class: "unknown" }, "unreadable") : one.id,
    String(one.attempts + one.refusals), day(one.died_at), one.todo.map((verb) => make("code", {}, `batch-dispatcher dead ${verb} ${one.entry}`))]));
}

function replicas() {
  const told = status.replicas || [];
  const rows = told.length ? told.map((one) => [one.owner, maybe(one.leases, String), maybe(status.queue_problem ? null : one.silent_s, (s) => `${span(s)} ago`)])
    : [[status.owner, String(status.running), "now"]];
  const more = (status.replica_count || 0) - told.length;
  $("replicas-sum").textContent = known(status.replica_count) ? count(status.replica_count) : "";
  $("replicas-note").textContent = !told.length ? "Others are unknown." : more > 0 ? `And ${more} more.` : "";
  if (changed("replicas", rows)) {
    table("replicas", ["Owner", "#In flight", "#Last sign"], rows.map(([owner, leases, sign]) => [
      [make("span", { class: "mono" }, owner), owner === status.owner ? " (this one)" : ""], leases ?? "unknown", sign ?? "unknown"]));
  }
}

function eventList() {
  const newest = events.slice(-60).reverse();
  if (!changed("events", newest)) return;
  $("events").replaceChildren(...newest.map((one) => {
    const { reason, explanation, ...rest } = one.fields;
    const more = explanation ? explanation.replace(/ \([a-z]+: pool .*/, "")
      : Object.entries({ ...(reason ? { reason } : {}), ...rest }).map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
    return make("li", { class: one.level, title: one.meaning }, make("time", { datetime: new Date(one.at * 1000).toISOString() }, clock(one.at)),
      make("span", {}, make("strong", {}, one.event), explanation ? `: ${reason}` : one.level === "info" ? "" : ` (${one.level})`, make("small", {}, more.slice(0, 400))));
  }));
  $("events-sum").textContent = newest.length ? `of this process; the newest: ${newest[0].event} at ${clock(newest[0].at)}` : "of this process";
  if (!newest.length) $("events").append(make("li", {}, make("span"), "none yet"));
}

const VALUE_MOST = 600;
function shorten(value) { // the value of a setting; of a long list as many items as fit
  if (typeof value === "string") return cut(value, VALUE_MOST);
  const text = JSON.stringify(value);
  if (!Array.isArray(value) || text.length <= VALUE_MOST) return cut(text, VALUE_MOST);
  const items = value.map((each) => cut((each && each.name) || JSON.stringify(each)));
  let shown = items[0], n = 1;
  while (n < items.length && shown.length + items[n].length < VALUE_MOST) shown += `, ${items[n++]}`;
  return n < items.length ? `${shown} and ${whole.format(items.length - n)} more` : shown;
}

const SETTINGS_MOST = 400;
function settingsTable() {
  if (!settings) return;
  const everything = $("all-settings").checked, defaults = new Set(settings.defaults), rows = [];
  const walk = (part, path) => {
    for (const [name, value] of Object.entries(part)) {
      const here = path ? `${path}.${name}` : name;
      const section = value !== null && typeof value === "object" && !Array.isArray(value) && !defaults.has(here);
      if (section && Object.keys(value).length) walk(value, here);
      else rows.push([here, shorten(value), !defaults.has(here)]);
    }
  };
  walk(settings.settings, "");
  const some = rows.filter(([, , set]) => everything || set);
  $("settings-sum").textContent = `${rows.filter(([, , set]) => set).length} of ${rows.length} settings are set`;
  $("settings-note").textContent = `${some.length > SETTINGS_MOST ? `And ${some.length - SETTINGS_MOST} more settings. ` : ""}`
    + `Configuration ${status.config_generation}${status.config_hash ? ` (${status.config_hash})` : ""} since the process began.`;
  if (!changed("settings", some)) return;
  table("settings", ["Setting", "Value", "From"], some.slice(0, SETTINGS_MOST).map(([path, value, set]) => [
    make("span", { class: "mono" }, path), make("code", {}, value === "" ? "(empty)" : value), set ? make("span", { class: "set" }, "✓ set") : "default"]));
}
$("all-settings").addEventListener("change", soon);

new ResizeObserver(soon).observe($("data"));
follow();
