/** @file Numbers in words that keep their width. */

const WHOLE = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat('en-US', { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export const NONE = '–';

/** @param {number | null | undefined} value */
export function whole(value) {
  return value === null || value === undefined ? NONE : WHOLE.format(value);
}

/** A number of about three digits. @param {number | null | undefined} value */
export function about(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 100 && value !== 0 ? ONE.format(value) : WHOLE.format(value);
}

/** @param {number | null | undefined} share of 1 */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const value = share * 100;
  return `${value > 0 && value < 10 ? ONE.format(value) : WHOLE.format(value)} %`;
}

/** @param {number | null | undefined} ms */
export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  return ms < 1000 ? `${about(ms)} ms` : age(ms / 1000);
}

/** @param {number} seconds */
export function age(seconds) {
  if (seconds < 10) return `${ONE.format(seconds)} s`;
  if (seconds < 120) return `${WHOLE.format(seconds)} s`;
  if (seconds < 7200) return `${WHOLE.format(seconds / 60)} min`;
  return `${WHOLE.format(seconds / 3600)} h`;
}

/** @param {number | null | undefined} count */
export function bytes(count) {
  if (count === null || count === undefined) return NONE;
  let [value, unit] = [count, 0];
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit && value < 100 ? ONE.format(value) : WHOLE.format(value)} ${UNITS[unit]}`;
}

/** Set a text only where it differs, so that nothing is drawn or read out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
