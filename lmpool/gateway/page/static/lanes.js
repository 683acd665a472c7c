// Lanes: how many are used, what waits in the longest, what was stolen, which tokens were kept.

import { $, changed, clean, count, make, put, row, share, show, span } from "./dom.js";

export function lanes(model, statistics) {
  const { lanes: found, own_jobs: own, stolen_jobs: stolen } = statistics;
  const several = model !== null && model.lanes > 1;
  put("lanes-used", several ? count(found.in_use) : "–");
  put("lanes-all", several ? `of ${count(found.lanes)}` : "");
  put("lanes-more", several ? waiting(found) : "every worker reads all");
  const taken = own + stolen;
  put("stolen", several && taken ? share(stolen / taken) : "–");
  put("stolen-more", several && taken ? `of ${count(taken)} jobs that workers took` : "none yet");
  const asked = statistics.prompt_tokens;
  kept(asked, statistics.computed_tokens);
  show("lanes", several);
  show("to-lanes", several);
  if (several) longest(found.longest, model.shards > 1);
}

// What a worker stole of what it took, with how much that is a second now.
export function stolenBy(worker) {
  const taken = worker.own_jobs + worker.stolen_jobs;
  const now = worker.stolen_per_second;
  return [taken ? share(worker.stolen_jobs / taken) : "–", now > 0 ? make("span", "sub", `${now.toFixed(1)}/s`) : ""];
}

// What was drawn, and padding, count as computed: more may have been kept.
function kept(asked, computed) {
  const known = asked > 0 && computed <= asked;
  put("kept", known ? share(1 - computed / asked) : "–");
  if (!asked) put("kept-more", "no engine tells of any");
  else put("kept-more", known ? `at least, of ${count(asked)}` : `${count(computed)} computed for ${count(asked)}, with drawn ones`);
}

function waiting({ waiting_jobs: jobs, waiting_lanes: in_, longest_jobs: most }) {
  if (!jobs) return "nothing waits in them";
  return `${count(jobs)} jobs wait in ${count(in_)}, ${share(most / jobs)} in the longest`;
}

function longest(found, shards) {
  show("lanes-table", found.length > 0);
  show("lanes-none", !found.length);
  const list = changed("lanes-rows", found);
  if (!list) return;
  const most = Math.max(1, ...found.map((lane) => lane.waiting));
  list.replaceChildren(...found.map((lane) => {
    const bar = make("span", "pace-bar");
    bar.append(make("i"));
    bar.firstElementChild.style.width = `${(100 * lane.waiting) / most}%`;
    const where = [`${lane.lane}${lane.priority === "batch" ? ", batch" : ""}`];
    if (shards) where.push(make("span", "sub", `shard ${lane.shard}`));
    return row([
      ["Lane", where],
      ["Home", make("bdi", "mono", clean(lane.home) || "anyone's")],
      ["Oldest job", span(lane.oldest_seconds), "number"],
      ["Waiting", [count(lane.waiting), bar], "number"],
    ]);
  }));
}
