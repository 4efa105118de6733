// @ts-check
/** Light, dark, or as the system says. */

import { byId } from './dom.js';

const THEMES = /** @type {const} */ (['system', 'light', 'dark']);
const SIGNS = { system: '◐', light: '☀', dark: '☾' };

/** @param {string} theme */
function wear(theme) {
  const known = THEMES.find((one) => one === theme) ?? 'system';
  document.documentElement.dataset['theme'] = known;
  const button = byId('theme');
  button.textContent = SIGNS[known];
  button.setAttribute('aria-label', `Theme: ${known === 'system' ? 'as the system' : known}`);
  button.title = `Theme: ${known}`;
  return known;
}

/** Storage may be forbidden; the page works without. @param {() => string | null | void} use */
function stored(use) {
  try {
    return use() ?? null;
  } catch {
    return null;
  }
}

export function setUpTheme() {
  let now = wear(stored(() => localStorage.getItem('theme')) ?? 'system');
  byId('theme').addEventListener('click', () => {
    now = wear(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length] ?? 'system');
    stored(() => localStorage.setItem('theme', now));
  });
}
