// The page: which pool, how it fares, and who may look.

import { key } from "./asking.js";
import { $, clean, clock, put, show, span } from "./dom.js";
import { Letters } from "./letters.js";
import { Playground } from "./playground.js";
import { Stream } from "./stream.js";
import { render } from "./view.js";

const here = new URL(location.href);
let pool = here.searchParams.get("pool") ?? "";
let last = null; // what was told last
let trouble = null; // { since, message } while the gateway does not tell
let ahead = 0; // seconds that the gateway's clock is ahead of this one

const STATES = {
  looking: "Looking …",
  serving: "Serving",
  "no workers": "No worker is alive",
  "no pool": "Nobody serves this pool",
  "no server": "The server does not answer",
  "no gateway": "The gateway does not answer",
  locked: "Locked",
};

const now = () => Date.now() / 1000;
const letters = new Letters(() => pool);
const playground = new Playground(() => pool);
const stream = new Stream(
  () => `/live/events${pool ? `?pool=${encodeURIComponent(pool)}` : ""}`,
  (told) => {
    if (told.state === "serving") playground.recover(trouble || (last && last.state !== "serving"));
    if (last && modelOf(told) && modelOf(last) && modelOf(told) !== modelOf(last)) playground.restart(0);
    last = told;
    pool = told.pool;
    trouble = null;
    ahead = told.now - now();
    document.title = title(told);
    show("door", false);
    show("content", true);
    show("forget-key", key.get() !== null);
    render(told);
    letters.told(told);
    state();
  },
  (error) => {
    if (error.status === 401) return; // the door says so
    trouble ??= { since: now() };
    trouble.message = error.status ? error.message : "";
    if (!last) document.title = "lmpool: away";
    state();
  },
);

// Tokens that were taken are ids of one model alone.
function modelOf({ pool, view }) {
  return view?.model ? `${pool} ${view.model.fingerprint}` : "";
}

function title(told) {
  const workers = told.view?.alive ?? 0;
  const alive = `${workers} ${workers === 1 ? "worker" : "workers"}`;
  return `${told.pool}: ${told.state === "serving" ? alive : STATES[told.state]} · lmpool`;
}

// The state is announced when it changes; the banner, which counts seconds, is not.
function state() {
  const is = !$("door").hidden ? "locked" : trouble ? "no gateway" : (last?.state ?? "looking");
  $("state").dataset.state = is;
  put("state", trouble?.message ? "Refused" : STATES[is]);
  const banner = $("banner");
  const since = trouble ? trouble.since : (last?.since ?? now()) - ahead;
  const ago = `since ${clock(since)} (${span(Math.floor(now() - since))})`;
  const text = {
    "no gateway": trouble?.message
      ? `The gateway refuses: ${clean(trouble.message)}.`
      : `The gateway does not answer ${ago}. This page tries again by itself; what it shows is from before.`,
    "no server": `The pool's server does not answer ${ago}${last?.why ? `: ${clean(last.why)}` : ""}. What is shown is from before.`,
    "no workers": `No worker is alive ${ago}. What is asked waits for one: start it with lmpool worker --pool ${clean(pool)}`,
    "no pool": `Nobody has served the pool ${clean(pool)} yet, ${ago}: start a worker with lmpool worker --pool ${clean(pool)}`,
  }[is];
  banner.hidden = !text;
  banner.classList.toggle("bad", is === "no server" || is === "no gateway");
  put(banner, text ?? "");
}

setInterval(state, 1000);

// --- the key ---

addEventListener("locked", (event) => {
  const tried = key.get() !== null;
  key.forget();
  stream.stop();
  show("content", false);
  show("door", true);
  show("forget-key", false);
  put("door-error", tried ? `${clean(event.detail)}.` : "");
  trouble = null;
  state();
  $("key").focus();
});

$("door-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  stream.start();
});

$("forget-key").addEventListener("click", () => {
  key.forget();
  location.reload();
});

// --- the pool, and whether anyone looks ---

$("pool-choice").addEventListener("change", () => {
  pool = $("pool-choice").value;
  here.searchParams.set("pool", pool);
  window.history.replaceState(null, "", here);
  stream.start();
});

document.addEventListener("visibilitychange", () => {
  if (!$("door").hidden) return;
  if (document.hidden) stream.stop();
  else stream.start();
});

stream.start();
