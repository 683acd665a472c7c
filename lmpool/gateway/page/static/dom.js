// Elements and words. All text goes in as text: what a pool says is never read as HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

// Only what differs is written, so that nothing selected or announced is disturbed.
export function put(id, text) {
  const found = typeof id === "string" ? $(id) : id;
  if (found.textContent !== text) found.textContent = text;
}

export function show(id, wanted) {
  $(id).hidden = !wanted;
}

// Controls and marks that turn the direction of writing could make a name look like another.
const unseen = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/gu;

export function clean(text) {
  return String(text ?? "").replace(unseen, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

// A token as a visible word.
export function word(text) {
  return clean(text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥"));
}

// And as it is read out.
export function spoken(text) {
  const names = text.replaceAll("\n", " line end ").replaceAll("\t", " tab ");
  return clean(names.trim() ? (text.startsWith(" ") ? `space ${names.trim()}` : names) : "space");
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => (n == null ? "–" : n < 100000 ? whole.format(n) : short.format(n));
export const pace = (n) => (n == null ? "–" : n > 0 && n < 9.95 ? n.toFixed(1) : count(Math.round(n)));

export function share(p) {
  if (p == null) return "–";
  const percent = 100 * p;
  if (percent > 0 && percent < 0.05) return "< 0.1 %";
  return `${percent.toFixed(1)} %`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1000 && at < 4; at++) n /= 1024;
  return `${n < 10 && at ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}

export function clock(seconds) {
  const at = new Date(seconds == null ? NaN : 1000 * seconds);
  if (Number.isNaN(at.getTime())) return "–";
  const today = at.toDateString() === new Date().toDateString();
  const time = at.toLocaleTimeString("en-GB");
  return today ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

// A list that is to be made anew, as what it says has changed.
export function changed(id, value) {
  const list = $(id);
  const said = JSON.stringify(value);
  if (list.said === said) return null;
  list.said = said;
  return list;
}

// A row of a table that is a card where there is no room.
export function row(cells) {
  const made = make("tr");
  made.setAttribute("role", "row");
  for (const [label, content, name] of cells) {
    const cell = make("td", name ?? "");
    cell.setAttribute("role", "cell");
    cell.dataset.label = label;
    const inner = make("div");
    inner.append(...[content].flat());
    cell.append(inner);
    made.append(cell);
  }
  return made;
}
