// @ts-check
/** Puts the parts together: a change of the job asks the server, an answer fills the page. */

import { Refusal, get, inside, list, post } from './api.js';
import { Asker } from './ask.js';
import { Compare } from './compare.js';
import { byId, h, refill, setText, typed } from './dom.js';
import { Exporter } from './export.js';
import { isHonoured, rows, servers, unlisted } from './fields/settings.js';
import { Form, sentence } from './form.js';
import { Frontier } from './frontier.js';
import { short, spaced } from './format.js';
import { HeatTables } from './heat.js';
import { Importer } from './import.js';
import { announce, copy, toast } from './notice.js';
import { Picker } from './picker.js';
import { fillPresets } from './presets.js';
import { Placement } from './placement.js';
import { Real } from './real.js';
import { Results, ownVerdict } from './results.js';
import { setUpSearch } from './search.js';
import { Solver } from './solve.js';
import { Store, isServed, planOf, requestOf } from './state.js';
import { hideSuggestions, showSuggestions } from './suggestions.js';
import { setUpTheme } from './theme.js';
import { fragmentOf, readFragment } from './url.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Problem} Problem */

const store = new Store();
const form = new Form(store, () =>
  stale('A value in the form is not valid. The numbers below are of the last plan without a mistake.'),
);
const picker = new Picker(store);
const results = new Results((gpu) => store.update({ gpu }, 'apply'));
const compare = new Compare(store);
const real = new Real(store);
const placement = new Placement();
const frontier = new Frontier(store);
const heat = new HeatTables(store);
const solver = new Solver(store);
/** What an import had to say. @type {string[]} */
let imported = [];
/** @type {unknown} */
let answer = null;
let inspected = '';

const asker = new Asker((slow) => {
  byId('progress').hidden = !slow;
  byId('results').setAttribute('aria-busy', String(slow));
});

results.pinButton = compare.button;

/** @param {string} text */
function stale(text) {
  setText('stale', text);
  byId('results').classList.toggle('is-stale', text !== '');
}

/** Puts problems beside their fields, the others above the form. @param {Problem[]} problems */
function showProblems(problems) {
  const homeless = form.setProblems(problems);
  const model = homeless.filter((one) => /^\/(model|config)\b/.test(one.field ?? ''));
  const rest = homeless.filter((one) => !model.includes(one));
  setText('model-problem', model.map(sentence).join(' '));
  setText('plan-problem', rest.map(sentence).join(' '));
}

/** @param {Job} job @param {AbortSignal} signal @param {boolean} [every] on every card @returns {Promise<any>} */
function estimate(job, signal, every = false) {
  return post(job.kind === 'train' ? '/train' : '/infer', { ...requestOf(job), gpus_all: every }, signal);
}

/** What every serving engine says, each asked with the options it has. @param {Job} job @param {AbortSignal} signal */
async function everyEngine(job, signal) {
  const own = (/** @type {string} */ engine) =>
    Object.entries(job.engineOptions).filter(([key]) =>
      rows.some((row) => row.path === key && row.place && isHonoured(row, engine)),
    );
  /** @type {import('./serving.js').Served[]} */
  const engines = [];
  for (const engine of servers) {
    try {
      const asked = { ...job, engine, engineOptions: Object.fromEntries(own(engine)) };
      engines.push({ engine, report: await estimate(asked, signal) });
    } catch (error) {
      if (!(error instanceof Refusal) || error.status !== 422) throw error;
      engines.push({ engine, problem: error.problems.map(sentence).join(' ') });
    }
  }
  return engines;
}

/** Changes that come faster than this, in ms, are a burst: what follows a number then waits until they pause. */
const BURST = 1000;
const PAUSE = 300;
let lastAsked = -BURST;

/** The question of every change. */
function ask() {
  const { job } = store;
  const started = performance.now();
  const isBurst = started - lastAsked < BURST;
  lastAsked = started;
  // What somebody had looked for by a click is of the question before, and would hold this one up.
  for (const search of [frontier, solver, heat]) search.stop();
  void asker.ask(async (signal) => {
    try {
      const document = await (job.kind === 'infer' && job.engine === 'all' ? everyEngine : estimate)(job, signal);
      signal.throwIfAborted();
      answer = document;
      show(job, document, started);
      await painted();
      signal.throwIfAborted();
      explain(job);
      if (isBurst) await new Promise((done) => setTimeout(done, PAUSE));
      signal.throwIfAborted();
      await follow(job, signal);
    } catch (error) {
      signal.throwIfAborted();
      refused(error);
    }
  });
}

/** The number on the page. @param {Job} job @param {any} document @param {number} started */
function show(job, document, started) {
  stale('');
  if (Array.isArray(document)) results.showEngines(job.gpu, document);
  else results.showReport(job, document);
  byId('results').dataset['answeredIn'] = (performance.now() - started).toFixed(1);
  byId('results').dataset['answers'] = String(Number(byId('results').dataset['answers'] ?? 0) + 1);
}

const frame = () => new Promise((done) => requestAnimationFrame(done));

/**
 * What is in the page now is on the screen: the first frame lays it out, and when the next begins it is shown. Work before that
 * takes the processor from whoever draws, and a new title makes the browser draw its own window first.
 */
async function painted() {
  await frame();
  await frame();
  await new Promise((done) => setTimeout(done));
}

/** What belongs to the number and may come a frame later. @param {Job} job */
function explain(job) {
  results.explain();
  form.setResolved(results.report);
  redraw();
  heat.reset(isServed(job) && results.report !== null);
  frontier.reset(job.kind === 'train' && results.report !== null);
  solver.reset(results.report !== null);
  showProblems([]);
  compare.show(results.report);
  standIn(job);
  byId('mini').textContent = results.words();
  window.document.title = `${job.model.split('/').pop() || 'a config'}: ${results.words()} · vramcast`;
  announce(() => results.words());
}

/** A model that is not known here may have one in its place, which is said beside its name. @param {Job} job */
function standIn(job) {
  const note = results.report?.notes.find((one) => one.startsWith(`${job.model} is not in the catalogue`));
  if (!note || job.config) return;
  byId('model-facts').dataset['inspected'] = 'yes';
  picker.setFacts([note]);
  void picker.seek();
}

/** An answer that the page can do without: what is refused is not there. @template T @param {Promise<T>} asked @returns {Promise<T | null>} */
async function optional(asked) {
  try {
    return await asked;
  } catch (error) {
    if (error instanceof Refusal) return null;
    throw error;
  }
}

/** What is asked once the number stands: every card, pinned plans of a link, help, formulas, facts of the model. @param {Job} job @param {AbortSignal} signal */
async function follow(job, signal) {
  const { report } = results;
  if (report && !report.budgets) {
    const every = await optional(estimate(job, signal, true));
    if (every) answer = every;
    results.showCards((every ?? report).verdicts);
  }
  if (report && !isServed(job)) {
    const asked = { ...requestOf(job), kind: job.kind };
    results.timeline.bring = (window) => optional(post('/events', { ...asked, window }, signal));
    const events = await optional(post('/events', asked, signal));
    if (events) results.timeline.showEvents(events);
  }
  for (const other of compare.missing) {
    const known = await optional(estimate(other, signal));
    if (known) compare.learn(other, known);
  }
  compare.show(results.report);
  if (real.isShown) await real.again(job, signal);
  await optional(placement.again(job.gpu, signal));
  const stuck = report && !(report.budgets ? report.budgets.every((one) => one.fits) : ownVerdict(report).fits);
  const help = stuck ? await optional(post('/suggest', { ...requestOf(job), kind: job.kind }, signal)) : null;
  showSuggestions(store, help?.suggestions ?? []);
  const formulas = report && job.kind === 'train' ? await optional(post('/compare', requestOf(job), signal)) : null;
  results.showLenses(formulas?.methods ?? [], formulas?.baseline ?? 0);
  await inspect(job, signal);
  byId('results').dataset['settled'] = byId('results').dataset['answers'];
}

/** @param {Job} job @param {AbortSignal} signal */
async function inspect(job, signal) {
  const key = job.config ? JSON.stringify(job.config) : job.model;
  if (key === inspected) return;
  const facts = await optional(post('/inspect', job.config ? { config: job.config } : { model: job.model }, signal));
  inspected = key;
  if (!facts) return;
  byId('model-facts').dataset['inspected'] = 'yes';
  const perToken = facts.cache?.bytes_per_token_bf16;
  picker.setFacts([
    facts.family,
    `${short(facts.parameters.total)} parameters`,
    facts.context_length && `${spaced(facts.context_length)} positions`,
    perToken && `${spaced(perToken / 1024)} KiB of cache per token`,
  ]);
}

/** @param {unknown} error */
function refused(error) {
  if (!(error instanceof Refusal)) {
    stale(`The ${inside ? 'core' : 'server'} cannot be reached; these numbers are of the last answer.`);
    return;
  }
  hideSuggestions();
  const busy = error.status === 429 || error.status === 503;
  stale(
    busy
      ? `The server is busy (${error.message}); these numbers are of the last answer.`
      : `${error.problems.map(sentence).join('; ')}. The numbers below are of the last plan without a mistake.`,
  );
  if (!busy) showProblems(error.problems);
  if (error.problems.some((one) => one.field === '/model')) void picker.seek();
}

/** Parts of the plan that no field shows, and whose defaults lie below it. */
function showUnshown() {
  const { job } = store;
  const others = isServed(job) ? [] : unlisted(planOf(job));
  const drop = () => store.update({ framework: '' }, 'apply');
  const forget = () => {
    imported = [];
    showUnshown();
  };
  refill(
    byId('unshown'),
    job.kind === 'train' &&
      job.framework !== '' &&
      h(
        'p',
        { class: 'help' },
        `Defaults of ${job.framework.replace('@', ' ')}. `,
        h('button', { type: 'button', class: 'link', onclick: drop }, 'Back to plain torch'),
      ),
    imported.length > 0 &&
      h(
        'div',
        { class: 'import-notes' },
        h('p', {}, 'What the imported file says that is not in the form, or in another sense:'),
        h('ul', {}, ...imported.map((note) => h('li', {}, note))),
        h('button', { type: 'button', class: 'link', onclick: forget }, 'Dismiss'),
      ),
    others.length > 0 &&
      h(
        'p',
        { class: 'help' },
        `Also in this plan: ${others.map(([path, value]) => `${path} = ${JSON.stringify(value)}`).join(', ')}`,
      ),
  );
}

/** @type {ReturnType<typeof setTimeout> | undefined} */
let writing;
/** The address as it was last written or read. */
let written = '';

/** @param {boolean} isStep */
async function address(isStep) {
  const fragment = `#${await fragmentOf(store.job, store.pinned)}`;
  // Someone went to another address meanwhile: that one is about to be read, and must not be written over.
  if (written !== '' && location.hash !== written) return;
  const isNew = isStep && written !== '' && fragment !== written;
  written = fragment;
  if (isNew) {
    furthest = step() + 1;
    history.pushState({ step: furthest }, '', written);
  } else history.replaceState({ step: step() }, '', written);
  showSteps();
}

/** The last step that can be gone to. */
let furthest = 0;

/** Which step of this visit is shown. @returns {number} */
const step = () => history.state?.step ?? 0;

function showSteps() {
  typed('undo', HTMLButtonElement).disabled = step() === 0;
  typed('redo', HTMLButtonElement).disabled = step() >= furthest;
}

/**
 * The address follows the job, not more often than browsers allow; each step can be undone by going back. What a link
 * brought is written at once: an edit right after it is a step already.
 * @param {boolean} isStep
 */
function writeAddress(isStep) {
  clearTimeout(writing);
  if (isStep) writing = setTimeout(() => void address(true), 400);
  else void address(false);
}

store.subscribe((why) => {
  if (why === 'pin') {
    compare.show(results.report);
    writeAddress(true);
    return;
  }
  if (['model', 'taken', 'restore'].includes(why)) {
    delete byId('model-facts').dataset['inspected'];
    inspected = '';
  }
  // What was typed is checked already, so the question goes out first; what it changes in the form follows the number.
  if (why === 'typed') {
    if (form.isValid) ask();
    writeAddress(true);
    clearTimeout(redrawing);
    redrawing = setTimeout(() => {
      form.sync();
      redraw();
    }, LATEST);
    return;
  }
  const isEdit = why === 'edit';
  if (isEdit && form.isValid) ask();
  form.sync(!isEdit);
  redraw();
  writeAddress(why !== 'restore');
  if (!isEdit && form.isValid) ask();
});

/** Where a number takes longer than this, in ms, the form does not wait for it. */
const LATEST = 100;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let redrawing;

/** What is shown of the job besides the form's fields. */
function redraw() {
  clearTimeout(redrawing);
  picker.sync();
  showUnshown();
}

/** The state of the address, where there is one. */
async function readAddress() {
  showSteps();
  if (location.hash === written) return false;
  written = location.hash;
  try {
    const found = await readFragment(location.hash);
    if (!found) return false;
    // A field that someone types in is left alone; nobody types who goes back.
    if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
    store.restore(found.job, found.pinned, 'restore');
    return true;
  } catch (error) {
    toast(`The link cannot be read: ${error instanceof Error ? error.message : error}`);
    return false;
  }
}

/** Lists that the form offers. Each comes when it comes: the first count of all models takes the server a moment. */
async function loadLists() {
  const models = get('/models').then((all) => picker.setModels(all));
  const cards = list('gpus').then((rows) => {
    const options = rows.map((row) => ({
      value: row['card'] ?? '',
      label: `${row['card']} · ${row['GiB']} GiB`,
      group: row['maker'] ?? '',
    }));
    for (const kind of ['train', 'infer']) form.setOptions(`${kind}-gpu`, options);
  });
  const optimizers = list('optimizers').then((rows) =>
    form.setOptions(
      'train-optimizer-kind',
      rows.map((row) => ({
        value: row['optimizer'] ?? '',
        label: `${row['optimizer']}${row['recorded_runs'] === 'yes' ? '' : ' (not yet measured)'}`,
        group: (row['whose_code'] ?? '').split(/[ .]/)[0] ?? '',
      })),
    ),
  );
  const frameworks = list('frameworks').then((rows) => fillPresets(store, rows));
  const version = get('/version').then((answer) => {
    byId('version').textContent = `vramcast ${answer.version}`;
  });
  await Promise.all([models, cards, optimizers, frameworks, version]);
  document.body.dataset['lists'] = 'here';
}

setUpTheme();
setUpSearch(form);
if (inside) byId('where').textContent = 'everything is computed in this page; nothing but names of models leaves it';
new Exporter(store, () => answer);
new Importer(store, real, placement, (notes) => {
  imported = notes;
  showUnshown();
});
byId('copy-link').addEventListener('click', async () => {
  const fragment = await fragmentOf(store.job, store.pinned);
  const isLocal = /^(localhost|127\.|\[::1\])/.test(location.hostname);
  const what = isLocal ? 'Link, which opens where this server runs; from # on it fits every vramcast,' : 'Link';
  await copy(`${location.origin}${location.pathname}#${fragment}`, what);
});
byId('undo').addEventListener('click', () => history.back());
byId('redo').addEventListener('click', () => history.forward());
for (const id of ['skip', 'mini']) {
  byId(id).addEventListener('click', (event) => {
    event.preventDefault();
    byId('results').focus();
    byId('results').scrollIntoView();
  });
}
// On narrow screens the total stays in sight while the form is.
new IntersectionObserver(([entry]) => byId('mini').classList.toggle('away', entry?.isIntersecting ?? false)).observe(
  byId('answer'),
);
addEventListener('hashchange', () => void readAddress());
loadLists().catch((error) =>
  toast(`The server’s lists cannot be read: ${error instanceof Error ? error.message : error}`),
);
if (!(await readAddress())) store.update({}, 'restore');
