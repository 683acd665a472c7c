// Calls to the gateway, with the key of this tab where there is one.

const KEPT = "lmpool-key";

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
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the gateway does not answer");
  }
  if (answer.ok) return answer;
  let message = `the gateway answered ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* no words of ours */ }
  if (answer.status === 401) dispatchEvent(new CustomEvent("locked", { detail: message }));
  throw new Refused(answer.status, message);
}

export const json = async (path, options) => (await ask(path, options)).json();
