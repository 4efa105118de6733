// @ts-check
/** Several roles on shared cards, from a file of verl or OpenRLHF: what each holds on a card, phase by phase. */

import { post } from './api.js';
import { byId, h, refill } from './dom.js';
import { gib } from './format.js';
import { number, scrolled, table } from './tables.js';

/** @typedef {{ name: string, roles: number[], outside: number, total: number }} Moment */
/**
 * @typedef {object} Group
 * @property {number} cards
 * @property {string[]} roles
 * @property {Moment[]} phases
 * @property {string} decides
 * @property {number} peak
 * @property {boolean} fits
 * @property {number} [largest_share]
 */
/** @typedef {{ placement: string, gpu: { name: string, memory: number }, fits: boolean, groups: Group[], notes: string[] }} Placed  the document of `/placement` */

export class Placement {
  /** The text that is shown, as it is sent. @type {{ text: string, name?: string } | null} */
  #file = null;

  /** Shows a text on a card. @param {{ text: string, name?: string }} file @param {string} gpu */
  async take(file, gpu) {
    this.#show(await post('/placement', { ...file, ...(gpu ? { gpu } : {}) }));
    this.#file = file;
    byId('placement').scrollIntoView({ block: 'nearest' });
  }

  /** The same on another card. @param {string} gpu @param {AbortSignal} signal */
  async again(gpu, signal) {
    if (this.#file) this.#show(await post('/placement', { ...this.#file, ...(gpu ? { gpu } : {}) }, signal));
  }

  /** @param {Placed} placed */
  #show(placed) {
    byId('placement').hidden = false;
    const close = () => {
      this.#file = null;
      byId('placement').hidden = true;
    };
    refill(
      byId('placement-body'),
      h(
        'p',
        { class: 'help lead' },
        `${placed.placement}, GiB on every card; from sources, not measured. `,
        h('button', { type: 'button', class: 'link', 'data-key': 'close-placement', onclick: close }, 'Close'),
      ),
      ...placed.groups.flatMap((group, at) => shown(group, placed, at)),
      placed.notes.length > 0 && h('ul', { class: 'notes' }, ...placed.notes.map((note) => h('li', { class: 'help' }, note))),
    );
  }
}

/** @param {Group} group @param {Placed} placed @param {number} at */
function shown(group, placed, at) {
  const rows = group.phases.map((phase) =>
    h(
      'tr',
      { class: phase.name === group.decides ? 'own' : null },
      h('th', { scope: 'row' }, phase.name),
      ...[...phase.roles, phase.outside, phase.total].map((bytes) => number(gib(bytes))),
    ),
  );
  const cards = group.cards === 1 ? '1 card' : `each of ${group.cards} cards`;
  const columns = ['Phase', ...group.roles.map((role) => `#${role}`), '#besides', '#all'];
  const share = group.largest_share;
  return [
    h('h3', {}, `${group.roles.join(', ')} on ${cards}`),
    scrolled(`Phases of group ${at + 1}`, table('What every role holds in each phase', columns, rows)),
    h(
      'p',
      {},
      `“${group.decides}” decides: ${gib(group.peak)} GiB, which ${group.fits ? 'fits' : 'does not fit'} ${placed.gpu.name} (${gib(placed.gpu.memory)} GiB).`,
      share !== undefined &&
        (share > 0
          ? ` Up to ${share.toFixed(2)} of the card as the engine’s share fits while it writes.`
          : ' No share of the card is left for the engine.'),
    ),
  ];
}
