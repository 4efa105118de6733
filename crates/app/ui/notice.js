// @ts-check
/** Short messages that go away by themselves, and the line that screen readers hear. */

import { byId } from './dom.js';

/** @type {ReturnType<typeof setTimeout> | undefined} */
let fading;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let speaking;

/** @param {string} text */
export function toast(text) {
  const element = byId('toast');
  element.textContent = text;
  element.classList.add('shown');
  clearTimeout(fading);
  fading = setTimeout(() => element.classList.remove('shown'), 4000);
}

/** Said once typing has paused, so that no half-typed number is read out. @param {() => string} text */
export function announce(text) {
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    byId('live').textContent = text();
  }, 700);
}

/** @param {string} text @param {string} what  for the message */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages over plain HTTP from another machine have no clipboard; the old way still works.
    const area = document.createElement('textarea');
    area.value = text;
    (document.querySelector('dialog[open]') ?? document.body).append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  toast(`${what} copied`);
}
