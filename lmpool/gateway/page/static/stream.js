// The stream of views: read as it comes, and begun again whenever it ends.

import { ask } from "./asking.js";

const SILENCE = 8000; // ms after which a stream that says nothing is taken to be dead
const PAUSE = 1000;

export class Stream {
  constructor(path, onView, onTrouble) {
    this.path = path;
    this.onView = onView;
    this.onTrouble = onTrouble;
    this.run = 0;
  }

  start() {
    this.stop();
    this.follow(++this.run);
  }

  stop() {
    this.run++;
    this.abort?.abort();
  }

  async follow(run) {
    while (run === this.run) {
      try {
        await this.read(run);
        await new Promise((done) => setTimeout(done, 100)); // its time was over
      } catch (error) {
        if (run !== this.run) return;
        this.onTrouble(error);
        if (error.status === 401) return; // until there is a key
        await new Promise((done) => setTimeout(done, PAUSE));
      }
    }
  }

  async read(run) {
    const abort = (this.abort = new AbortController());
    let silence;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE);
    };
    try {
      heard();
      const answer = await ask(this.path(), { signal: abort.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || run !== this.run) return;
        heard();
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) {
          if (event.startsWith("data: ")) this.onView(JSON.parse(event.slice(6)));
        }
      }
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
  }
}
