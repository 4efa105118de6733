// @ts-check
/** Models of the hub on a page without a server: the browser itself asks for their config.json. */

import { isObject } from './paths.js';

/** @typedef {import('./types.js').Plan} Plan */

/** The config of a model by its name, or why there is none. @param {string} name @returns {Promise<Plan | string>} */
export async function configOf(name) {
  const address = `https://huggingface.co/${name.split('/').map(encodeURIComponent).join('/')}/resolve/main/config.json`;
  try {
    const response = await fetch(address, { credentials: 'omit', referrerPolicy: 'no-referrer' });
    if (response.status === 401 || response.status === 403) return `${name} is not public, or not there`;
    if (!response.ok) return `the hub has no config.json of ${name} (${response.status})`;
    const config = await response.json();
    return isObject(config) ? { ...config, _name_or_path: name } : `the config.json of ${name} is not one`;
  } catch {
    return 'the hub cannot be reached';
  }
}
