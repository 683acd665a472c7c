// Dead letters: read when their number changes, retried and dropped by those who may.

import { json } from "./asking.js";
import { $, clean, clock, count, make, put, row, show } from "./dom.js";

const AGAIN = 15000; // ms after which they are read again, whatever their number

export class Letters {
  constructor(pool) {
    this.pool = pool;
    this.known = "";
    this.read = 0;
    this.reading = false;
    this.loads = 0; // how often they were asked for: an answer to an earlier one may come later
  }

  // What a view says of them.
  told({ view, operator, state }) {
    if (state === "no server") return; // what is known of them stays
    this.operator = operator;
    const number = view ? view.dead_letters : 0;
    const now = `${this.pool()} ${number} ${operator}`;
    put("letters-none", number === null
      ? "The gateway's user of the server may not see them. The page shows them where it connects as operator."
      : "No job was given up.");
    if (!number) {
      this.loads++; // an older list may be on its way
      this.reading = false;
      this.known = now;
      this.render([]);
    } else if (!this.reading && !this.asks() && (now !== this.known || Date.now() - this.read > AGAIN)) {
      this.load(now);
    }
  }

  // Whether somebody is at a button: the list stays as it is meanwhile.
  asks() {
    return $("letters-rows").querySelector(".asking") !== null;
  }

  async load(now) {
    const mine = ++this.loads, pool = this.pool();
    const isLate = () => mine !== this.loads || pool !== this.pool();
    this.reading = true;
    this.known = now;
    this.read = Date.now();
    try {
      const found = await json(`/live/dead-letters?pool=${encodeURIComponent(pool)}`);
      if (isLate()) return;
      this.render(found.letters);
      put("letters-error", "");
    } catch (error) {
      if (isLate()) return;
      this.read += 5000 - AGAIN; // it is tried again soon
      if (error.status !== 401) put("letters-error", `They could not be read: ${clean(error.message)}.`);
    } finally {
      if (mine === this.loads) this.reading = false;
    }
  }

  render(letters) {
    show("letters-table", letters.length > 0);
    show("letters-none", !letters.length);
    show("letters-right", letters.length > 0 && !this.operator);
    put("letters-right", "You may look. Without API keys, retrying and dropping is for the gateway's own machine; with them, for keys whose line says operator.");
    const said = JSON.stringify([letters, this.operator]);
    const list = $("letters-rows");
    if (list.said === said) return;
    list.said = said;
    list.replaceChildren(...letters.map((letter) => this.row(letter)));
  }

  row(letter) {
    const prompt = letter.length
      ? `${letter.tokens.join(" ")}${letter.length > letter.tokens.length ? ` … (${count(letter.length)})` : ""}`
      : `no job: ${count(letter.bytes)} bytes`;
    const wanted = [letter.want, letter.adapter && `adapter ${letter.adapter}`].filter(Boolean).join(", ");
    const to = letter.deliveries ? `${letter.deliveries} deliveries, last to ${letter.worker}` : letter.worker;
    return row([
      ["Given up", [clock(letter.given_up), make("span", "sub mono", clean(letter.name))]],
      ["Why", [make("bdi", "", clean(letter.reason)), make("span", "sub", clean(to))]],
      ["Prompt", [make("span", "mono", clean(prompt)), make("span", "sub", clean(wanted))]],
      ["What to do", this.operator ? this.buttons(letter) : make("span", "sub", "you may look")],
    ]);
  }

  buttons(letter) {
    const place = make("div", "row");
    const button = (text, name, action, about) => {
      const made = make("button", name, text);
      made.type = "button";
      made.setAttribute("aria-label", `${text} ${letter.name}`);
      if (about) made.setAttribute("aria-description", about);
      made.addEventListener("click", action);
      return made;
    };
    const offer = (focus) => {
      place.className = "row";
      const retry = button("Retry", "quiet", () => confirm("retry"));
      const drop = button("Drop", "quiet", () => confirm("drop"));
      place.replaceChildren(...(letter.length ? [retry, drop] : [drop]));
      if (focus) place.lastElementChild.focus();
    };
    const confirm = (what) => {
      place.className = "row asking";
      const words = what === "drop" ? "Forget it for good?" : "It may end a worker again. Ask?";
      const yes = button(what === "drop" ? "Drop it" : "Ask again", what === "drop" ? "danger" : "", () => act(what), words);
      const no = button("Keep it", "quiet", () => offer(true));
      place.replaceChildren(make("span", "sub", words), yes, no);
      no.focus();
    };
    const act = async (what) => {
      place.replaceChildren(make("span", "sub", what === "drop" ? "Dropping …" : "Asking …"));
      put("letters-error", "");
      try {
        const body = { pool: this.pool(), names: [letter.name] };
        const told = await json(`/live/dead-letters/${what}`, { body });
        const error = told.asked?.[0]?.error;
        if (error) throw new Error(error);
        const none = what === "drop" ? !told.dropped : !told.asked.length;
        put("letters-status", none ? `${letter.name} was gone already.` : `${letter.name} was ${what === "drop" ? "dropped" : "answered, and is dropped"}.`);
        $("letters-title").tabIndex = -1;
        $("letters-title").focus();
      } catch (error) {
        put("letters-status", "");
        put("letters-error", `${letter.name}: ${clean(error.message)}.`);
        offer(true);
      }
      place.classList.remove("asking");
      this.load("");
    };
    offer(false);
    return place;
  }
}
