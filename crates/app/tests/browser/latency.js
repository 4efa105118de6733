// @ts-check
/**
 * How long a change takes from the input to the painted number, over 50 changes of four jobs, and a cold load: not a test,
 * for docs/benchmarks.md. `BASE=http://127.0.0.1:8000/ CHROMIUM=chromium VRAMCAST=vramcast node latency.js`
 */

import { launch, open, unfold } from './support.js';

/** @typedef {import('playwright-core').Page} Page */

const CHANGES = 50;
/** Somebody who changes a value four times a second. */
const PAUSE = 250;

/** @type {[string, string, string, (page: Page) => Promise<unknown>][]} */
const JOBS = [
  ['8B training', '#model=meta-llama/Meta-Llama-3-8B', 'train-batch-batch-size', async () => {}],
  [
    '70B FSDP2',
    '#model=meta-llama/Meta-Llama-3-70B',
    'train-batch-batch-size',
    async (page) => {
      await unfold(page, 'parallel');
      await page.locator('#train-engine').selectOption('fsdp2');
    },
  ],
  ['8B inference', '#kind=infer&model=meta-llama/Meta-Llama-3-8B', 'infer-new-tokens', async () => {}],
  ['Mamba 2.8B', '#model=state-spaces/mamba-2.8b-hf', 'train-batch-batch-size', async () => {}],
];

/**
 * From an input to the moment at which the browser presents the number that belongs to it (Element Timing).
 * @param {Page} page @param {string} id @param {string} value @returns {Promise<number>}
 */
function change(page, id, value) {
  return page.evaluate(
    async ([id, value]) => {
      const field = /** @type {HTMLInputElement} */ (document.getElementById(id ?? ''));
      const painted = new Promise((done) =>
        new PerformanceObserver((list, observer) => {
          observer.disconnect();
          done(/** @type {any} */ (list.getEntries().at(-1)).renderTime);
        }).observe({ type: 'element', buffered: false }),
      );
      const began = performance.now();
      field.value = value ?? '';
      field.dispatchEvent(new Event('input', { bubbles: true }));
      return Number(await painted) - began;
    },
    [id, value],
  );
}

const browser = await launch();
for (const [name, fragment, id, prepare] of JOBS) {
  const { page, close } = await open(browser, fragment);
  await prepare(page);
  await page.waitForTimeout(3000);
  /** @type {number[]} */
  const times = [];
  for (let step = 0; step < CHANGES; step += 1) {
    times.push(await change(page, id, String(2 + step)));
    await page.waitForTimeout(PAUSE);
  }
  times.sort((a, b) => a - b);
  const at = (/** @type {number} */ part) => times[Math.ceil(part * times.length) - 1]?.toFixed(0);
  console.log(`${name}: p50 ${at(0.5)} ms, p95 ${at(0.95)} ms, longest ${at(1)} ms`);
  await close();
}
/** @type {number[]} */
const loads = [];
for (let load = 0; load < 5; load += 1) {
  const context = await browser.newContext();
  const page = await context.newPage();
  const began = Date.now();
  await page.goto(process.env['BASE'] ?? '', { waitUntil: 'commit' });
  await page.waitForFunction(() => document.getElementById('total-process'), undefined, { polling: 'raf' });
  loads.push(Date.now() - began);
  await context.close();
}
console.log(`first number from a cold load: ${loads.join(', ')} ms`);
await browser.close();
