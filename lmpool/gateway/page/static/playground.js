// The likeliest next tokens as bars, and a text coloured by surprise.

import { json } from "./asking.js";
import { $, clean, count, make, put, share, show, spoken, word } from "./dom.js";

const PAUSE = 350; // ms without a key before the pool is asked
const AGAIN = 2000; // ms until what failed is asked anew, where that may help
const LEVELS = [1, 3, 6, 10]; // bits
const IMPOSSIBLE = 9999;
const EXAMPLE = "The quick brown fox jumps over the lazy piano.";

export class Playground {
  constructor(pool) {
    this.pool = pool;
    this.chosen = []; // ids, taken one by one: never tokenized anew
    this.number = 0;
    this.failed = null; // why the last question was not answered
    $("text").addEventListener("input", () => this.restart(PAUSE));
    $("adapter").addEventListener("change", () => this.ask());
    $("undo").addEventListener("click", () => this.undo());
    $("restart").addEventListener("click", () => this.restart(0));
    $("example").addEventListener("click", () => {
      $("text").value = EXAMPLE;
      this.restart(0);
      $("text").focus();
    });
    $("bars").addEventListener("keydown", (event) => this.move(event));
  }

  restart(pause) {
    this.chosen = [];
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), pause);
  }

  undo() {
    if (!this.chosen.length) return;
    this.chosen.pop();
    this.ask();
    if ($("undo").disabled) $("text").focus();
  }

  take(id) {
    this.chosen.push(id);
    this.ask();
  }

  move(event) {
    const bars = [...$("bars").querySelectorAll("button")];
    const at = bars.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: bars.length - 1 }[event.key];
    if (to !== undefined) bars[Math.min(bars.length - 1, Math.max(0, to))]?.focus();
    else if (event.key === "Backspace") this.undo();
    else return;
    event.preventDefault();
  }

  // A later question ends an earlier one, which withdraws what it asked of the pool.
  async ask() {
    clearTimeout(this.timer);
    this.abort?.abort();
    const number = ++this.number;
    $("undo").disabled = $("restart").disabled = !this.chosen.length;
    const text = $("text").value;
    if (!text && !this.chosen.length) return this.empty();
    const abort = (this.abort = new AbortController());
    const body = { pool: this.pool(), adapter: $("adapter").value || null, text, appended: this.chosen };
    $("bars").setAttribute("aria-busy", "true");
    let failed = (this.failed = null);
    try { // one after the other: a key may have one request at once
      const options = { body, signal: abort.signal };
      this.next(await json("/live/next-tokens", options));
      this.colour(await json("/live/surprise", options));
    } catch (error) {
      failed = error;
    }
    if (number !== this.number) return;
    $("bars").removeAttribute("aria-busy");
    this.failed = failed;
    this.failedAt = Date.now();
    this.say(failed && failed.status !== 401 ? failed.message : "");
  }

  // The pool serves: what could not be answered is asked anew, `atOnce` where it has not before;
  // else later, as its answer may have come when that was known.
  recover(atOnce) {
    if (!this.failed) return;
    const mayPass = this.failed.status === 0 || this.failed.status >= 500;
    if (atOnce || (mayPass && Date.now() - this.failedAt > AGAIN)) this.ask();
  }

  say(message) {
    put("text-error", message ? `${clean(message).replace(/[.]$/, "")}.` : "");
    $("text").setAttribute("aria-invalid", message ? "true" : "false");
    if (message) put("text-status", "");
  }

  empty() {
    this.say("");
    $("bars").replaceChildren();
    $("bars").removeAttribute("aria-busy");
    $("coloured").replaceChildren();
    for (const id of ["rest", "surprise-sum", "text-status"]) put(id, "");
    show("chosen", false);
    show("surprise-details", false);
  }

  next(found) {
    const list = $("bars");
    const most = found.likeliest[0]?.probability || 1;
    // The same buttons with other words: the focus stays where it is.
    while (list.children.length > found.likeliest.length) list.lastElementChild.remove();
    found.likeliest.forEach((token, i) => {
      let button = list.children[i]?.firstElementChild;
      if (!button) {
        const item = make("li");
        button = make("button", "bar");
        button.type = "button";
        const track = make("span", "fill");
        track.append(make("i"));
        button.append(make("span", "token"), track, make("span", "share"));
        item.append(button);
        list.append(item);
      }
      const [name, track, part] = button.children;
      track.firstElementChild.style.width = `${(100 * token.probability) / most}%`;
      name.className = token.special ? "token special" : "token";
      put(name, word(token.text));
      put(part, share(token.probability));
      button.setAttribute("aria-label", `${spoken(token.text)}, ${share(token.probability)}`);
      button.onclick = () => this.take(token.id);
    });
    show("chosen", found.appended.length > 0);
    put("chosen", `… ${clean(found.appended_text).replaceAll("\\u{a}", "⏎\n").replaceAll("\\u{9}", "⇥")}`);
    put("rest", found.rest > 0.0005 ? `All others together: ${share(found.rest)}` : "");
    const [first] = found.likeliest;
    const tokens = found.count === 1 ? "token" : "tokens";
    put("text-status", `${count(found.count)} ${tokens} read` + (first ? `, the likeliest next is ${word(first.text)} with ${share(first.probability)}` : ""));
  }

  colour(found) {
    const parts = found.parts.map((part) => {
      const made = make("span", `part ${level(part.bits)}`, part.text.replace(/[^\n]/gu, clean));
      made.title = words(part);
      return made;
    });
    $("coloured").replaceChildren(...parts);
    const { scored, bits_per_token: token, bits_per_byte: byte } = found;
    put("surprise-sum", scored
      ? `${token === null ? "∞" : token.toFixed(2)} bits a token, ${byte === null ? "∞" : byte.toFixed(2)} a byte, ${count(scored)} tokens scored`
      : "The first token has nothing before it: write on.");
    $("surprise-rows").replaceChildren(...found.parts.map((part) => {
      const made = make("tr");
      const cells = [word(part.text), bits(part.bits), part.bits === null ? "–" : share(2 ** -part.bits), part.rank === null ? "–" : count(part.rank)];
      made.append(...cells.map((text, i) => make("td", i ? "number" : "mono", text)));
      return made;
    }));
    show("surprise-details", true);
  }
}

function level(bits) {
  if (bits === null) return "unscored";
  return `s${LEVELS.filter((bound) => bits >= bound).length}`;
}

const bits = (n) => (n === null ? "–" : n >= IMPOSSIBLE ? "impossible" : n.toFixed(1));

function words(part) {
  if (part.bits === null) return `${word(part.text)}: nothing stands before it`;
  const rank = part.tokens === 1 ? `, rank ${count(part.rank)}` : `, ${part.tokens} tokens`;
  return `${word(part.text)}: ${bits(part.bits)} bits, ${share(2 ** -part.bits)}${rank}`;
}
