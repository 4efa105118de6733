// @ts-check
/** Finding a setting by any word of its name, flag, place or help: fields that hold all words are shown, of whatever group. */

import { byId, refill, typed } from './dom.js';
import { rows } from './fields/settings.js';

/** @typedef {import('./form.js').Form} Form */
/** @typedef {import('./types.js').Setting} Setting */

/** Settings of other engines that are named at most. */
const MOST_OTHERS = 4;

/** What a setting is found by. @param {Setting} row @param {string} [label] */
export function wordsOf({ flag, path, help, kind }, label = '') {
  const words = (kind.words ?? []).map((word) => word.value);
  return [label, flag, flag.replaceAll('-', ' '), path, help, ...words].join(' ').toLowerCase();
}

/** @param {Form} form */
export function setUpSearch(form) {
  const input = typed('setting-search', HTMLInputElement);
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = form.find(words);
    const flags = new Set(found.map((field) => field.row.flag));
    const others = rows.filter((row) => row.flag && !flags.has(row.flag) && words.every((word) => wordsOf(row).includes(word)));
    const named = [...new Set(others.map((row) => `--${row.flag} (${row.engines.slice(0, 3).join(', ')}${row.engines.length > 3 ? ', …' : ''})`))];
    const elsewhere = named.length > 0 && `; with another engine: ${named.slice(0, MOST_OTHERS).join(', ')}${named.length > MOST_OTHERS ? ', …' : ''}`;
    const count = found.length === 1 ? 'one setting' : `${found.length || 'no'} settings`;
    refill(byId('setting-found'), words.length > 0 && count, words.length > 0 && elsewhere);
    return found;
  };
  input.addEventListener('input', show);
  input.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
      input.value = '';
      show();
    } else if (event.key === 'Enter') {
      const [first] = show();
      if (first && input.value) byId(first.id).focus();
    }
  });
}
