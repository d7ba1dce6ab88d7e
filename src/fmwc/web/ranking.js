// The state of a gallery: the order of the samples, which are kept, which are shown, and which one is selected.

/** The columns that a text is searched in. */
export const SEARCHED = ["formula", "name"];

/**
 * Return whether the formula or the name of a sample contains a text. In a formula, a text that begins with a capital is
 * one or more elements: "O" is in SiO2, but not in Co or Os.
 */
export function finder(columns, text) {
  const lower = text.toLowerCase();
  const holds = {
    name: (value) => value.toLowerCase().includes(lower),
    formula: (value) => {
      if (!/^[A-Z]/.test(text)) return value.toLowerCase().includes(lower);
      for (let at = value.indexOf(text); at >= 0; at = value.indexOf(text, at + 1))
        if (!/[a-z]/.test(value[at + text.length] || "")) return true;
      return false;
    },
  };
  const names = SEARCHED.filter((name) => columns[name]);
  return (i) => names.some((name) => holds[name](String(columns[name][i] ?? "")));
}

export class Ranking extends EventTarget {
  /** @param {import("./samples.js").Samples} run */
  constructor(run) {
    super();
    this.run = run;
    const { count } = run;
    /** Samples from the surest to the most doubtful. */
    this.order = run.order;
    /** The place of each sample in that order. */
    this.place = new Uint32Array(count);
    this.order.forEach((sample, place) => (this.place[sample] = place));
    // Failed and judged samples among the first n, so that the slider answers at once.
    this.failedUpTo = new Uint32Array(count + 1);
    this.judgedUpTo = new Uint32Array(count + 1);
    for (let n = 0; n < count; n++) {
      const bad = run.bad ? run.bad[this.order[n]] : -1;
      this.failedUpTo[n + 1] = this.failedUpTo[n] + (bad === 1);
      this.judgedUpTo[n + 1] = this.judgedUpTo[n] + (bad >= 0);
    }
    this.kept = count;
    this.selected = -1;
    this.by = "";
    this.rising = true;
    this.filter = "all";
    this.text = "";
    this.shown = this.order;
  }

  /** Whether a sample is among the kept ones. */
  keeps(sample) {
    return this.place[sample] < this.kept;
  }

  /** Whether a sample failed, is good (`false`), or was not judged (`null`). */
  failed(sample) {
    const bad = this.run.bad ? this.run.bad[sample] : -1;
    return bad < 0 ? null : bad === 1;
  }

  /** Return how many samples are kept and dropped, how many of them were judged, and how many failed. */
  outcome() {
    const { kept, failedUpTo, judgedUpTo } = this, all = this.run.count;
    return {
      kept: { count: kept, judged: judgedUpTo[kept], failed: failedUpTo[kept] },
      dropped: { count: all - kept, judged: judgedUpTo[all] - judgedUpTo[kept], failed: failedUpTo[all] - failedUpTo[kept] },
      all: { count: all, judged: judgedUpTo[all], failed: failedUpTo[all] },
    };
  }

  /** Keep a share of the samples, surest first. */
  keep(share) {
    this.kept = Math.max(1, Math.min(this.run.count, Math.round(this.run.count * share)));
    if (this.filter === "kept" || this.filter === "dropped") this.#arrange();
    this.#tell("keep");
  }

  /** Sort by a column; by confidence if the name is empty. */
  sort(by, rising = true) {
    Object.assign(this, { by, rising });
    this.#arrange();
    this.#tell("shown");
  }

  /** Show only some samples: `all`, `kept`, `dropped`, `failed` or `good`, and those that contain a text. */
  show(filter, text = this.text) {
    Object.assign(this, { filter, text });
    this.#arrange();
    this.#tell("shown");
  }

  /** Select a sample; −1 for none. */
  select(sample) {
    if (sample === this.selected) return;
    this.selected = sample;
    this.#tell("select");
  }

  /** Select the sample `steps` further in the order that is shown. */
  move(steps) {
    if (!this.shown.length) return;
    const at = this.shown.indexOf(this.selected);
    const next = at < 0 ? (steps >= 0 ? 0 : this.shown.length - 1) : at + steps;
    this.select(this.shown[Math.max(0, Math.min(this.shown.length - 1, next))]);
  }

  #arrange() {
    const { run, by, rising } = this;
    const wanted = this.text.trim(), found = finder(run.columns, wanted);
    const tests = { kept: (i) => this.keeps(i), dropped: (i) => !this.keeps(i), failed: (i) => this.failed(i) === true,
      good: (i) => this.failed(i) === false };
    const test = tests[this.filter] || (() => true);
    const fits = (i) => test(i) && (!wanted || found(i));
    const some = this.filter === "all" && !wanted ? this.order.slice() : this.order.filter(fits);
    const column = by && run.columns[by];
    if (column) {
      const side = rising ? 1 : -1, text = column.some((value) => typeof value === "string");
      const missing = (value) => value === null || value === undefined || Number.isNaN(value);
      const compare = text ? (a, b) => a.localeCompare(b) : (a, b) => a - b;
      some.sort((a, b) => {
        const [u, v] = [column[a], column[b]];
        if (missing(u) || missing(v)) return missing(u) - missing(v);
        return side * compare(u, v) || this.place[a] - this.place[b];
      });
    } else if (!rising) some.reverse();
    this.shown = some;
  }

  #tell(name) {
    this.dispatchEvent(new Event(name));
  }
}
