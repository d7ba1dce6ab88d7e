// What the studio knows: fields, runs and jobs as the server reports them, and the samples that were fetched.

import { samplesOf } from "../samples.js";
import { get, listen, tensors } from "./api.js";

const SUPPORT = { checkerboard: board() };

/** Return the cells that hold the data of the checkerboard. */
function board() {
  const cells = [];
  for (let row = 0; row < 4; row++) for (let column = row % 2; column < 4; column += 2) cells.push([column - 2, row - 2, column - 1, row - 1]);
  return cells;
}

class Store extends EventTarget {
  fields = [];
  runs = [];
  jobs = [];
  start = "";
  ready = false;
  problem = "";
  #samples = new Map();

  /** Follow the server's events. Dispatches `state`, `run`, `job`, `preview` and `connection`. */
  follow() {
    return listen(
      (name, data) => this.#hear(name, data),
      (problem) => {
        this.problem = problem;
        this.#tell("connection");
      },
    );
  }

  #hear(name, data) {
    if (name === "state") {
      Object.assign(this, data, { ready: true });
      this.#samples.clear();
    } else if (name === "run") this.runs = replace(this.runs, data);
    else if (name === "job") this.jobs = replace(this.jobs, data).slice(0, 200);
    else if (name === "removed") this.runs = this.runs.filter((run) => run.id !== data.run);
    this.#tell(name, data);
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
    if (name !== "preview") this.dispatchEvent(new CustomEvent("change", { detail: name }));
  }

  field(name) {
    return this.fields.find((field) => field.name === name);
  }

  run(id) {
    return this.runs.find((run) => run.id === id);
  }

  job(id) {
    return this.jobs.find((job) => job.id === id);
  }

  /** Return the job that works on a run, if any. */
  work(run) {
    return run.job ? this.job(run.job) : undefined;
  }

  /** Remember a run or job that a request returned, unless its events, which may be newer, have already arrived. */
  add({ run, job }) {
    if (run && !this.run(run.id)) this.#hear("run", run);
    if (job && !this.job(job.id)) this.#hear("job", job);
  }

  /** Return the word for failed samples of a run. */
  word(run) {
    const judge = (this.field(run.field) || {}).judge;
    return judge ? judge.bad : "failed";
  }

  /** Fetch the samples of a run; they are kept until they change. */
  samples(run) {
    const key = `${run.id} ${run.data} ${run.judged}`;
    if (!this.#samples.has(key)) {
      if (this.#samples.size > 6) this.#samples.delete(this.#samples.keys().next().value);
      const both = Promise.all([tensors(`runs/${run.id}/samples`), get(`runs/${run.id}/table`)]);
      const about = { kind: run.kind, label: run.order.name || "confidence", word: this.word(run), support: this.support(run) };
      const samples = both.then(([{ tensors: all }, table]) => samplesOf(about, all, table));
      samples.catch(() => this.#samples.delete(key));
      this.#samples.set(key, samples);
    }
    return this.#samples.get(key);
  }

  /** Return the rectangles that hold the data of a run's field. */
  support(run) {
    return SUPPORT[run.field] || SUPPORT[run.field.replace(/-joint$/, "")] || [];
  }

  /** Wait until a job has ended; return it, or throw its error. */
  finished(id) {
    return new Promise((done, failed) => {
      const look = () => {
        const job = this.job(id);
        if (!job || ["waiting", "running"].includes(job.state)) return;
        this.removeEventListener("job", look);
        this.removeEventListener("state", look);
        if (job.state === "done") done(job);
        else failed(new Error(job.error || `The job was ${job.state}.`));
      };
      this.addEventListener("job", look);
      this.addEventListener("state", look);
      look();
    });
  }
}

function replace(list, item) {
  const rest = list.filter((other) => other.id !== item.id), old = list.findIndex((other) => other.id === item.id);
  return old < 0 ? [item, ...rest] : list.map((other) => (other.id === item.id ? item : other));
}

export const store = new Store();

/** Return a few words on the state of a run. */
export function stateOf(run) {
  const job = store.work(run);
  if (job && job.state === "running" && run.state !== "done") return `${run.state}, ${Math.round(100 * job.share)} %`;
  const day = new Date(run.created), time = Number.isNaN(day.getTime()) ? "" : day.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  return run.state === "done" ? (run.source === "opened" ? "opened folder" : time) : run.state;
}
