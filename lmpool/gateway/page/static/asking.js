// Calls to the gateway, with the key of this tab where there is one.

const KEPT = "lmpool-key";
const TRIES = 5;
const AGAIN = 500; // ms

export const key = {
  get: () => sessionStorage.getItem(KEPT),
  set: (value) => sessionStorage.setItem(KEPT, value),
  forget: () => sessionStorage.removeItem(KEPT),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) options.body = JSON.stringify(body);
  for (let left = TRIES; ; left--) {
    const answer = await fetched(path, options);
    if (answer.ok) return answer;
    // A key that may have few requests at once: an earlier one is about to end.
    if (answer.status === 429 && left) await new Promise((done) => setTimeout(done, AGAIN));
    else throw await refused(answer);
  }
}

async function fetched(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the gateway does not answer");
  }
}

async function refused(answer) {
  let message = `the gateway answered ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* no words of ours */ }
  if (answer.status === 401) dispatchEvent(new CustomEvent("locked", { detail: message }));
  return new Refused(answer.status, message);
}

export const json = async (path, options) => (await ask(path, options)).json();
