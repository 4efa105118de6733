// @ts-check
/** Numbers as people read them; GiB as the command line prints them. */

const GIB = 2 ** 30;

/** Bytes as GiB with two digits. @param {number} bytes */
export function gib(bytes) {
  return (bytes / GIB).toFixed(2);
}

/** A difference in GiB with its sign. @param {number} bytes */
export function signedGib(bytes) {
  if (gib(Math.abs(bytes)) === '0.00') return '±0.00';
  return `${bytes > 0 ? '+' : '−'}${gib(Math.abs(bytes))}`;
}

/** A share with one digit. @param {number} part @param {number} whole */
export function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : '–';
}

/** A count with three digits and a letter: 8.03B. @param {number} count */
export function short(count) {
  for (const [size, letter] of /** @type {[number, string][]} */ ([
    [1e12, 'T'],
    [1e9, 'B'],
    [1e6, 'M'],
    [1e3, 'K'],
  ])) {
    if (count >= size) return `${Number((count / size).toPrecision(3))}${letter}`;
  }
  return String(count);
}

/** A count with thin spaces between thousands. @param {number} count */
export function spaced(count) {
  return String(Math.round(count)).replace(/\B(?=(\d{3})+$)/g, '\u202f');
}

/** A value of a plan in a few characters. @param {unknown} value */
export function shown(value) {
  if (value === undefined) return 'default';
  if (value === null) return 'none';
  return typeof value === 'string' ? value : JSON.stringify(value);
}

/** What a phase of the run is called. @param {string} phase */
export function phaseName(phase) {
  const parts = phase.split('.');
  const what = shortPhase(phase);
  if (!/^\d+$/.test(parts[0] ?? '')) return what;
  return parts[0] === '0' ? `${what} of the first step` : `${what} of a later step`;
}

const PHASES = /** @type {Record<string, string>} */ ({
  fwd: 'forward',
  bwd: 'backward',
  opt: 'optimizer step',
  clip: 'gradient clipping',
  zero: 'zero_grad',
  load: 'loading',
});

/** The last word of a phase. @param {string} phase */
export function shortPhase(phase) {
  const last = phase.split('.').at(-1) ?? phase;
  return PHASES[last] ?? last;
}
