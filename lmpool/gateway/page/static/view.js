// What a view shows.

import { $, bytes, changed, clean, clock, count, make, pace, put, row, share, show, span } from "./dom.js";
import { lanes, stolenBy } from "./lanes.js";

const POINTS = 180;
let history = [];

export function render(told) {
  const { view, asked } = told;
  if (told.history) history = told.history;
  else history.push([told.now, told.rate]);
  history = history.slice(-POINTS);

  put("pool-name", told.pool);
  put("version", `lmpool ${told.version}`);
  pools(told);
  if (!view) return;
  const { model, statistics, queues } = view;
  put("server", ` · ${[view.server, view.url].filter(Boolean).map(clean).join(" at ")}`);
  put("model", model === null ? "Nobody has served it yet." : [
    clean(model.model), `${clean(model.engine)}, ${clean(model.dtype)}`, `${count(model.vocab_size)} tokens`,
    `prompts up to ${count(model.max_prompt_tokens)}`,
  ].join(" · "));

  const live = told.state === "serving" || told.state === "no workers" || told.state === "no pool";
  put("as-of", live ? away(view.nodes) : `as it was at ${clock(view.read_at)}`);
  put("pace", live ? pace(told.rate) : "–");
  spark();
  const jobs = Object.values(queues).reduce((sum, queue) => sum + queue.jobs, 0);
  const running = Object.values(queues).reduce((sum, queue) => sum + queue.pending, 0);
  put("backlog", count(jobs));
  put("backlog-more", waiting(jobs, running, queues.batch?.jobs));
  const oldest = Math.max(0, ...Object.values(queues).map((queue) => queue.oldest_seconds));
  put("oldest", oldest ? span(oldest) : "–");
  put("oldest-more", oldest ? "since it came" : "no job");
  hits(asked);
  put("computed", count(statistics.computed));
  put("computed-more", statistics.batches ? `${(statistics.computed / statistics.batches).toFixed(1)} a batch` : "answers");
  held(view);
  put("evicted", count(statistics.evicted));
  put("failed", count(statistics.failed));
  put("failed-more", `${count(statistics.expired)} expired`);
  put("dead", view.dead_letters === null ? "–" : count(view.dead_letters));
  $("dead").closest(".tile").classList.toggle("alert", view.dead_letters > 0);
  put("alive", count(view.alive));
  put("alive-more", hosts(statistics.workers));
  workers(statistics.workers);
  lanes(model, statistics);
  adapters(view.adapters);
  failures(told.failures);
}

// Nodes of a cluster that do not answer: the figures are of the others.
function away(nodes) {
  const gone = nodes.filter((node) => !node.answers).map((node) => clean(node.address || "some nodes"));
  return gone.length ? `without ${gone.join(", ")}, which ${gone.length > 1 ? "do" : "does"} not answer` : "";
}

function waiting(jobs, running, batch) {
  if (!jobs) return "nothing waits";
  return `${count(running)} with workers${batch ? `, ${count(batch)} of batch` : ""}`;
}

function pools(told) {
  const several = told.pools.length > 1;
  show("pool-field", several);
  $("pool-name").classList.toggle("named", several);
  const choice = $("pool-choice");
  options(choice, told.pools.map((name) => [name, name]));
  if (document.activeElement !== choice) choice.value = told.pool;
}

// The options of a select, made anew only where they differ: an open one stays as it is.
export function options(select, wanted) {
  const is = [...select.options].map((option) => option.value);
  if (is.join("\n") === wanted.map(([value]) => value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(([value, text]) => {
    const option = make("option", "", clean(text));
    option.value = value;
    return option;
  }));
  if (wanted.some(([value]) => value === chosen)) select.value = chosen;
}

function hits(asked) {
  if (!asked || !asked.requests) {
    put("hits", "–");
    put("hits-more", "nothing asked here yet");
    return;
  }
  const found = asked.local_hits + asked.cache_hits + asked.joined;
  put("hits", share(found / asked.requests));
  put("hits-more", `of ${count(asked.requests)} asked here`);
}

function held(view) {
  const { held_bytes: size, oldest_seconds: oldest } = view.statistics;
  const bound = view.memory_max_bytes;
  put("held", bytes(size));
  put("held-bound", bound ? `of the server's ${bytes(bound)}` : "");
  show("held-meter", bound > 0);
  if (bound > 0) {
    const part = Math.min(1, size / bound);
    $("held-meter").firstElementChild.style.width = `${100 * part}%`;
    $("held-meter").setAttribute("aria-label", `${share(part)} of the server's memory`);
  }
  const age = oldest == null ? "none yet" : `the oldest is ${span(oldest)} old`;
  put("held-more", bound ? age : `${age}; no maxmemory set`);
}

function hosts(list) {
  const names = new Set(list.map((worker) => worker.host));
  return names.size ? `on ${names.size} ${names.size === 1 ? "host" : "hosts"}` : "none is alive";
}

// --- the pace as a line ---

function spark() {
  const points = history.filter(([, rate]) => rate != null);
  const svg = $("spark");
  const most = Math.max(1e-9, ...points.map(([, rate]) => rate));
  const end = history.length ? history.at(-1)[0] : 0;
  const x = (at) => Math.max(0, 240 - (240 * (end - at)) / POINTS);
  const y = (rate) => 42 - 40 * (rate / most);
  const line = points.map(([at, rate], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(rate).toFixed(1)}`).join("");
  const area = points.length > 1 ? `${line}L${x(points.at(-1)[0]).toFixed(1)} 44L${x(points[0][0]).toFixed(1)} 44Z` : "";
  svg.querySelector(".line").setAttribute("d", line);
  svg.querySelector(".area").setAttribute("d", area);
  svg.setAttribute("aria-label", points.length
    ? `Pace of the last 3 minutes: at most ${pace(Math.max(...points.map(([, rate]) => rate)))} answers a second`
    : "Pace of the last minutes");
}

// --- lists, each made anew only when what it says has changed ---

function workers(found) {
  show("workers-none", !found.length);
  const list = changed("workers-rows", found);
  if (!list) return;
  const most = Math.max(1e-9, ...found.map((worker) => worker.rows_per_second ?? 0));
  list.replaceChildren(...found.map((worker) => {
    const bar = make("span", "pace-bar");
    bar.append(make("i"));
    bar.firstElementChild.style.width = `${(100 * (worker.rows_per_second ?? 0)) / most}%`;
    const engine = [make("bdi", "", clean(worker.engine))];
    if (worker.execution) engine.push(make("span", "sub", clean(worker.execution)));
    return row([
      ["Worker", make("bdi", "mono", clean(worker.id))],
      ["GPU", make("bdi", "", clean(worker.gpu) || "none")],
      ["Engine", engine],
      ["Host", [make("bdi", "", clean(worker.host)), make("span", "sub", `process ${worker.pid}`)]],
      ["Lanes", count(worker.lanes), "number"],
      ["Stolen", stolenBy(worker), "number"],
      ["Answers/s", [pace(worker.rows_per_second), bar], "number"],
    ]);
  }));
}

function adapters(names) {
  show("adapters", names.length > 0);
  const list = changed("adapters-list", names);
  if (!list) return;
  list.replaceChildren(...names.map((name) => make("li", "", clean(name))));
  show("adapter-field", names.length > 0);
  options($("adapter"), [["", "none"], ...names.map((name) => [name, name])]);
}

function failures(found) {
  show("failures-table", found.length > 0);
  show("failures-none", !found.length);
  const list = changed("failures-rows", found);
  if (!list) return;
  list.replaceChildren(...found.map((failure) => row([
    ["When", clock(failure.at)],
    ["Worker", make("bdi", "mono", clean(failure.worker))],
    ["Why", make("bdi", "", clean(failure.reason))],
    ["Jobs", count(failure.jobs), "number"],
  ])));
}
