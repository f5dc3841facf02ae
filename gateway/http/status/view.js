// Shows snapshots: it keeps nodes and changes what differs, so that nothing flickers and a reader keeps the place.

const $ = (id) => document.getElementById(id);
const integer = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const stamp = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
const NONE = "–";

// Nodes

function el(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function put(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function widen(node, share) {
  const width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
  if (node.style.width !== width) node.style.width = width;
}

/** Makes, orders and removes children so that there is one for each item, by its key. */
function keyed(parent, views, items, keyOf, make) {
  const kept = new Set();
  items.forEach((item, place) => {
    const key = keyOf(item);
    kept.add(key);
    if (!views.has(key)) views.set(key, make(item));
    const view = views.get(key);
    if (parent.children[place] !== view.node) parent.insertBefore(view.node, parent.children[place] ?? null);
    view.show(item);
  });
  for (const [key, view] of views) {
    if (!kept.has(key)) {
      view.node.remove();
      views.delete(key);
    }
  }
}

// Words

const count = (n) => (n >= 1e6 ? compact.format(n) : integer.format(n));
const percent = (part, whole) => (whole ? `${Math.floor((100 * part) / whole)} %` : NONE);
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function seconds(s) {
  if (s === null || s === undefined) return NONE;
  if (s < 0.0995) return `${Math.max(1, Math.round(1000 * s))} ms`;
  return s < 9.95 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`;
}

function speed(tokens) {
  if (tokens === null || tokens === undefined) return NONE;
  return tokens < 9.95 ? tokens.toFixed(1) : integer.format(tokens);
}

function gib(bytes, total) {
  const [unit, name] = total >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  const said = (n) => (n / unit).toFixed(name === "GiB" ? 1 : 0);
  return `${said(bytes)} of ${said(total)} ${name}`;
}

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

// Colours: each session on the page has its own as long as there are enough

const HUES = 10;
const hues = new Map();

function assignHues(snapshot) {
  const lanes = snapshot.rings.flatMap((ring) => ring.lanes);
  const seen = new Set([...lanes, ...snapshot.turns].map((each) => each.session).filter(Boolean));
  for (const session of hues.keys()) if (!seen.has(session)) hues.delete(session);
  for (const session of seen) {
    if (hues.has(session)) continue;
    const taken = [...hues.values()];
    const uses = (hue) => taken.filter((each) => each === hue).length;
    const all = [...Array(HUES).keys()];
    hues.set(session, all.reduce((best, hue) => (uses(hue) < uses(best) ? hue : best)));
  }
}

const hued = (session) => `hued ${session === null ? "hue-none" : `hue-${hues.get(session)}`}`;

function showSession(node, session, otherwise) {
  const className = session === null ? "none" : `chip ${hued(session)}`;
  if (node.className !== className) node.className = className;
  say(node, session ?? otherwise);
}

// Figures

const figures = new Map();

function showFigures(snapshot) {
  const sum = (name) => snapshot.rings.reduce((total, ring) => total + ring[name], 0);
  const ended = snapshot.turns.filter((turn) => turn.outcome !== null);
  const firsts = ended.map((turn) => turn.ttft_s).filter((s) => s !== null);
  const speeds = ended.map((turn) => turn.tokens_per_s).filter((s) => s !== null);
  const [reused, fresh, drafted] = [sum("reused_rows"), sum("prefilled_rows"), sum("drafted")];
  const first = median(firsts);
  const share = (part, whole) => (whole ? [`${Math.floor((100 * part) / whole)}`, "%"] : [NONE, ""]);
  const items = [
    ["Running", [count(sum("running_jobs")), sum("running_jobs") === 1 ? "turn" : "turns"], `${count(sum("waiting_jobs"))} waiting, ${plural(sum("sessions"), "session")}`],
    ["Prompt rows reused", share(reused, reused + fresh), `${count(reused)} of ${count(reused + fresh)}`],
    ["First token, median", first === null ? [NONE, ""] : seconds(first).split(" "), firsts.length ? `slowest ${seconds(Math.max(...firsts))}` : "from request to first token"],
    ["Decode speed, median", speeds.length ? [speed(median(speeds)), "tokens/s"] : [NONE, ""], speeds.length ? `fastest ${speed(Math.max(...speeds))} tokens/s` : "of a turn"],
    ["Drafts accepted", share(sum("accepted"), drafted), `${count(sum("accepted"))} of ${count(drafted)}`],
  ];
  keyed($("figures"), figures, items, (item) => item[0], ([name]) => {
    const [number, unit, note] = [el("span"), el("small"), el("dd", "fine")];
    const node = el("div", "figure", el("dt", "", name), el("dd", "value", number, unit), note);
    return { node, show: ([, [value, of], more]) => { say(number, value); say(unit, of); say(note, more); } };
  });
}

// Rings

function makeRing(first) {
  const title = el("h2", "", first.name);
  const state = el("span", "pill");
  const facts = el("p", "fine");
  const reason = el("p", "reason");
  const stages = el("ol", "stages");
  const lanes = el("ul", "lanes");
  const lanesTitle = el("span");
  const legend = el("span", "legend", ...["reused", "fresh", "free"].map((kind) => el("span", "", el("i", `${kind} hued`), kind)));
  const lanesBox = el("div", "", el("h3", "", lanesTitle, legend), lanes);
  const store = makeStore();
  const misses = el("p");
  const missBox = el("div", "", el("h3", "", "Why turns reused less"), misses);
  const node = el("section", "card", el("div", "head", title, state, facts), reason, stages, lanesBox, el("div", "foot", store.node, missBox));
  node.setAttribute("aria-label", first.name);
  stages.setAttribute("aria-label", "Stages, in the order that frames pass them");
  const [stageViews, laneViews] = [new Map(), new Map()];
  function show(ring) {
    put(state, "data-state", ring.state);
    say(state, ring.state);
    const said = ring.lane_count ? [`${count(ring.waiting_jobs)} waiting`, ring.resting_jobs && `${count(ring.resting_jobs)} paused`, `epoch ${ring.epoch}`, ring.replaced && `${plural(ring.replaced, "stage")} replaced`, ring.spares && plural(ring.spares, "spare"), ring.numerics, plural(ring.frames, "frame"), plural(ring.refusals, "refusal")] : [];
    say(facts, said.filter(Boolean).join("  ·  "));
    reason.hidden = !ring.reason || ring.state === "loading" || ring.state === "draining";
    say(reason, ring.reason);
    keyed(stages, stageViews, ring.stages, (stage) => stage.stage, makeStage);
    for (const [number, view] of stageViews) view.place(ring, number);
    lanesBox.hidden = !ring.lanes.length;
    const shown = ring.lanes.length < ring.lane_count ? `, the ${ring.lanes.length} used last` : "";
    say(lanesTitle, `${plural(ring.lane_count, "lane")} of ${count(ring.max_rows)} rows, ${count(ring.busy_lanes)} busy${shown}`);
    keyed(lanes, laneViews, ring.lanes.map((lane) => ({ ...lane, room: ring.max_rows })), (lane) => lane.lane, makeLane);
    store.node.hidden = ring.store === null;
    if (ring.store) store.show(ring.store);
    const reasons = Object.entries(ring.misses).sort((a, b) => b[1] - a[1]);
    missBox.hidden = !reasons.length;
    say(misses, reasons.map(([kind, turns]) => `${kind.replaceAll("_", " ")} ${count(turns)}`).join("  ·  "));
  }
  return { node, show };
}

const SPARK = 120; // Samples: a minute.
const SVG = "http://www.w3.org/2000/svg";

function makeStage() {
  const [name, device, share, fill] = [el("span", "name"), el("span", "fine"), el("span", "share"), el("i", "fill")];
  const bar = el("div", "bar", fill);
  const spark = document.createElementNS(SVG, "svg");
  const [area, stroke] = [document.createElementNS(SVG, "path"), document.createElementNS(SVG, "path")];
  area.setAttribute("class", "area");
  spark.setAttribute("class", "spark");
  spark.setAttribute("viewBox", `0 0 ${SPARK - 1} 24`);
  spark.setAttribute("preserveAspectRatio", "none");
  spark.setAttribute("aria-hidden", "true");
  spark.append(area, stroke);
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", "100");
  const node = el("li", "stage", el("div", "line", name, device, share), spark, bar);
  const past = [];
  let stage = null;
  function show(next) {
    stage = next;
  }
  function place(ring, number) {
    const loads = ring.state === "loading";
    const tail = !loads && number === ring.stages.length - 1;
    say(name, `stage ${number}`);
    say(device, [stage.device, tail ? "tail" : "", loads ? stage.note : ""].filter(Boolean).join(", "));
    if (loads) showLoading(); else showBusy();
    spark.style.display = loads ? "none" : "";
    put(bar, "aria-label", `stage ${number} ${loads ? "loaded" : "busy"}`);
  }
  function showLoading() {
    const done = stage.bytes_total ? stage.bytes_done / stage.bytes_total : 0;
    say(share, stage.bytes_total ? gib(stage.bytes_done, stage.bytes_total) : "");
    widen(fill, done);
    put(bar, "aria-valuenow", String(Math.round(100 * done)));
  }
  function showBusy() {
    const busy = stage.busy ?? 0;
    say(share, stage.busy === null ? NONE : `${Math.round(100 * busy)} % busy`);
    widen(fill, busy);
    put(bar, "aria-valuenow", String(Math.round(100 * busy)));
    if (stage.busy === null) return;
    past.push(busy);
    if (past.length > SPARK) past.shift();
    const left = SPARK - past.length;
    const points = past.map((value, i) => `${left + i} ${(23 - 22 * value).toFixed(1)}`);
    put(stroke, "d", `M${points.join("L")}`);
    put(area, "d", `M${left} 24L${points.join("L")}L${SPARK - 1} 24Z`);
  }
  return { node, show, place };
}

const LANE_STATES = { empty: "empty", resting: "at rest", prefill: "prefilling", decode: "decoding" };

function makeLane() {
  const [name, session, state, rows, more, of] = [el("span", "name"), el("span"), el("span", "state"), el("span"), el("span", "more"), el("span")];
  const [reused, fresh] = [el("i", "reused"), el("i", "fresh")];
  const bar = el("div", "bar", reused, fresh);
  bar.setAttribute("role", "img");
  const node = el("li", "lane", el("div", "line", name, session, state, el("span", "rows", rows, more, of)), bar);
  function show(lane) {
    const share = percent(lane.reused_rows, lane.valid_rows);
    const told = lane.valid_rows ? `${count(lane.valid_rows)} rows, ${share} reused` : "";
    put(node, "data-state", lane.state);
    say(name, `lane ${lane.lane}`);
    session.hidden = lane.state === "empty";
    showSession(session, lane.session, "no session");
    say(state, LANE_STATES[lane.state] ?? lane.state);
    say(rows, lane.valid_rows ? count(lane.valid_rows) : "");
    say(more, lane.valid_rows ? " rows" : "");
    say(of, lane.valid_rows ? `, ${share} reused` : "");
    const className = `bar ${hued(lane.session)}`;
    if (bar.className !== className) bar.className = className;
    widen(reused, lane.reused_rows / lane.room);
    widen(fresh, (lane.valid_rows - lane.reused_rows) / lane.room);
    put(bar, "aria-label", `lane ${lane.lane}: ${told || "no rows"}, room for ${count(lane.room)}`);
  }
  return { node, show };
}

function makeStore() {
  const [pinned, kept, told] = [el("i", "pinned"), el("i", "fill"), el("p")];
  const bar = el("div", "bar", pinned, kept);
  bar.setAttribute("role", "img");
  const node = el("div", "", el("h3", "", "Chain store in host memory"), bar, told);
  function show(store) {
    widen(pinned, store.pinned / store.room);
    widen(kept, (store.rows - store.pinned) / store.room);
    const words = `${count(store.rows)} of ${count(store.room)} rows (${percent(store.rows, store.room)}), ${count(store.pinned)} pinned`;
    say(told, words);
    put(bar, "aria-label", `chain store: ${words}`);
  }
  return { node, show };
}

// Turns

const turns = new Map();
let fresh = true; // Nothing was shown before: all of it is new, and none of it is news.

function outcomeKind(outcome) {
  if (outcome === null) return "running";
  return { complete: "good", "tool calls": "good", "length limit": "limit", "client left": "left" }[outcome] ?? "bad";
}

function makeTurn() {
  const cell = (className, label) => {
    const node = el("td", className);
    if (label) node.dataset.label = label;
    return node;
  };
  const [time, who, why, outcome] = [cell("time"), cell("who"), cell("why"), cell("outcome")];
  const [prompt, first] = [cell("number prompt", "prompt"), cell("number", "first token")];
  const [generated, rate, drafts] = [cell("number", "generated"), cell("number", "tokens/s"), cell("number", "drafts")];
  const [session, fill, share, of] = [el("span"), el("i", "fill"), el("b"), el("span", "of")];
  const bar = el("span", "bar", fill);
  bar.setAttribute("aria-hidden", "true");
  const reuse = cell("reuse");
  reuse.append(el("div", "cached", bar, share, of));
  who.append(session);
  const node = el("tr", fresh ? "" : "new", time, who, prompt, reuse, why, first, generated, rate, drafts, outcome);
  function show(turn) {
    const asked = new Date(1000 * turn.asked_at);
    say(time, clock.format(asked));
    put(time, "title", stamp.format(asked));
    showSession(session, turn.session, "none");
    put(who, "title", turn.ring === null ? null : `${turn.ring}, lane ${turn.lane}`);
    say(prompt, turn.prompt_tokens === null ? NONE : count(turn.prompt_tokens));
    const cached = turn.prompt_tokens ? turn.cached_prefix / turn.prompt_tokens : 0;
    widen(fill, cached);
    say(share, turn.prompt_tokens === null ? NONE : percent(turn.cached_prefix, turn.prompt_tokens));
    say(of, turn.prompt_tokens === null ? "" : `of ${count(turn.prompt_tokens)}`);
    put(reuse, "title", turn.prompt_tokens === null ? null : `${count(turn.cached_prefix)} of ${count(turn.prompt_tokens)} tokens`);
    say(why, turn.why ?? "");
    say(first, seconds(turn.ttft_s));
    say(generated, count(turn.generated_tokens));
    say(rate, speed(turn.tokens_per_s));
    say(drafts, turn.drafted ? `${count(turn.accepted)} / ${count(turn.drafted)}` : NONE);
    say(outcome, turn.outcome ?? (turn.prompt_tokens === null ? "waiting" : turn.ttft_s === null ? "prefilling" : "answering"));
    put(node, "data-outcome", outcomeKind(turn.outcome));
  }
  return { node, show };
}

function showTurns(snapshot, withKey) {
  keyed($("turns"), turns, snapshot.turns, (turn) => turn.number, makeTurn);
  $("turns-box").hidden = !snapshot.turns.length;
  $("no-turns").hidden = snapshot.turns.length > 0;
  say($("turns-note"), snapshot.turns.length ? `the last ${snapshot.turns.length}, newest first` : "");
  const key = withKey ? " \\\n  -H \"authorization: Bearer $KEY\"" : "";
  const body = JSON.stringify({ model: snapshot.model, messages: [{ role: "user", content: "Hello" }] });
  say($("curl"), `curl ${location.origin}/v1/chat/completions${key} \\\n  -H 'content-type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}'`);
}

const rings = new Map();

/** `withKey`: this server asks its clients for one. */
export function show(snapshot, withKey) {
  assignHues(snapshot);
  showFigures(snapshot);
  keyed($("rings"), rings, snapshot.rings, (ring) => ring.name, makeRing);
  showTurns(snapshot, withKey);
  fresh = false;
  say($("model"), snapshot.model);
  say($("version"), `ringserve ${snapshot.version}`);
  say($("as-of"), `as of ${clock.format(new Date(1000 * snapshot.at))}`);
  document.title = `${snapshot.model} · ringserve`;
}
