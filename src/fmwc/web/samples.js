// The samples of a run, as galleries need them.

/**
 * @typedef {object} Samples
 * @property {"points"|"images"|"crystals"|"vectors"} kind
 * @property {number} count
 * @property {string} label `confidence`, or `rank` if the confidence is withheld.
 * @property {ArrayLike<number>|null} level Confidence or rank in [0, 1]; null if the run has neither.
 * @property {Uint32Array} order Sample numbers, surest first.
 * @property {Int8Array|null} bad 1 failed, 0 passed, −1 not judged; null if no sample was judged.
 * @property {string} word The word for samples that failed, such as "misplaced".
 * @property {Record<string, any[]>} columns One entry per sample.
 * @property {Record<string, string>} titles Readable names of columns.
 * @property {{shape: number[], data: any}|undefined} x Points, pixels or vectors.
 * @property {number[][]} support Rectangles that hold the data, as left, bottom, right, top.
 */

/**
 * Return the samples of a run.
 *
 * @param {{kind: string, label: string, word: string, support?: number[][]}} about
 * @param {Record<string, {shape: number[], data: any}>} tensors
 * @param {{columns: Record<string, any[]>, titles?: Record<string, string>}} table
 * @returns {Samples}
 */
export function samplesOf(about, tensors, table) {
  const { order, score, failed, first, x } = tensors;
  const levels = tensors.level || tensors.confidence || tensors.rank;
  const total = first ? first.shape[0] - 1 : x.shape[0];
  const places = order ? Uint32Array.from(order.data) : byScore(score ? score.data : null, total);
  return {
    ...about,
    count: total,
    level: levels ? levels.data : null,
    order: places,
    bad: failed ? Int8Array.from(failed.data, (value) => (value === 255 ? -1 : value)) : null,
    columns: table.columns,
    titles: table.titles || {},
    x,
    support: about.support || [],
    tensors,
  };
}

/** Return the word for samples that did not fail, such as "not misplaced" or "metastable". */
export const opposite = (word) => (word.startsWith("not ") ? word.slice(4) : `not ${word}`);

function byScore(score, total) {
  const order = Uint32Array.from({ length: total }, (_, i) => i);
  return score ? order.sort((a, b) => score[a] - score[b] || a - b) : order;
}

/** Return the structure of one crystal: rows of the cell (Å), atomic numbers and fractional coordinates. */
export function crystalOf(tensors, index) {
  const { lattice, first, species, coord } = tensors;
  const begin = first.data[index], end = first.data[index + 1];
  return {
    lattice: [0, 3, 6].map((row) => Array.from(lattice.data.subarray(9 * index + row, 9 * index + row + 3))),
    species: Array.from(species.data.subarray(begin, end)),
    coord: Array.from({ length: end - begin }, (_, i) => Array.from(coord.data.subarray(3 * (begin + i), 3 * (begin + i) + 3))),
  };
}
