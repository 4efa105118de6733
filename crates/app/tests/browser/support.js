// @ts-check
/** A browser, a page on the real server, the command line beside it, and what the browser complained about. */

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { writeFile, mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { AxeBuilder } from '@axe-core/playwright';
import { chromium } from 'playwright-core';

/** @typedef {import('playwright-core').Page} Page */
/** @typedef {import('playwright-core').BrowserContextOptions} ContextOptions */

export const BASE = given('BASE');
const VRAMCAST = given('VRAMCAST');
const FLAGS = [
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
];

/** @param {string} name */
function given(name) {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set: run this by \`cargo test --test browser\``);
  return value;
}

export function launch() {
  return chromium.launch({ executablePath: given('CHROMIUM'), args: FLAGS });
}

/**
 * A page whose complaints are kept: console errors, uncaught errors, violations of the CSP, failed requests. A refusal
 * (422) that a test provokes is logged by the browser as an error; those are not the page's fault.
 * @param {import('playwright-core').Browser} browser @param {string} [fragment] @param {ContextOptions} [options]
 */
export async function open(browser, fragment = '', options = {}) {
  const context = await browser.newContext({
    viewport: { width: 1280, height: 900 },
    permissions: ['clipboard-read', 'clipboard-write'],
    ...options,
  });
  // Machines that build at the same time are slow; nothing here asserts on time.
  context.setDefaultTimeout(180_000);
  const page = await context.newPage();
  /** @type {string[]} */
  const complaints = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type()) && !message.text().includes('status of 422'))
      complaints.push(message.text());
  });
  page.on('pageerror', (error) => complaints.push(String(error)));
  await page.addInitScript(() => {
    addEventListener('securitypolicyviolation', (event) =>
      console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`),
    );
  });
  await page.goto(BASE + fragment);
  await settled(page);
  return { page, complaints, close: () => context.close() };
}

/**
 * The page anew, at another address. By way of an empty one: going from one fragment to another is lost where the page
 * writes its own address in that very moment.
 * @param {Page} page @param {string} fragment
 */
export async function visit(page, fragment) {
  await page.goto('about:blank');
  await page.goto(BASE + fragment);
  await settled(page);
}

/** Waits until nothing is asked any more. @param {Page} page */
export async function settled(page) {
  await page.waitForFunction(() => {
    const { answers, settled: last } = document.getElementById('results')?.dataset ?? {};
    return answers !== undefined && answers === last && document.body.dataset['lists'] === 'here';
  });
}

/** Does something and waits for the answer to it. @param {Page} page @param {() => Promise<unknown>} change */
export async function answered(page, change) {
  const answers = () => page.locator('#results').getAttribute('data-answers');
  const before = await answers();
  await change();
  await page.waitForFunction((old) => document.getElementById('results')?.dataset['answers'] !== old, before);
  await settled(page);
}

/** The totals on the page, in GiB as it shows them. @param {Page} page */
export async function totals(page) {
  const read = (/** @type {string} */ key) => page.locator(`#total-${key}`).innerText();
  return { allocated: await read('allocated'), reserved: await read('reserved'), process: await read('process') };
}

/** What the command line prints. @param {...string} words */
export async function vramcast(...words) {
  const { stdout } = await promisify(execFile)(VRAMCAST, words, { maxBuffer: 1 << 26 }).catch((error) => {
    // 1 says that it does not fit; the answer is printed all the same.
    if (error.code === 1) return error;
    throw error;
  });
  return stdout;
}

/** The totals of `vramcast … --json`, as GiB with two digits. @param {...string} words */
export async function printedTotals(...words) {
  const document = JSON.parse(await vramcast(...words, '--json'));
  return inGib(document.totals);
}

/** @param {{ allocated: number, reserved: number, process: number }} bytes */
export function inGib(bytes) {
  const gib = (/** @type {number} */ count) => (count / 2 ** 30).toFixed(2);
  return { allocated: gib(bytes.allocated), reserved: gib(bytes.reserved), process: gib(bytes.process) };
}

/** A file with this content. @param {string} name @param {string} text */
export async function file(name, text) {
  const path = join(await mkdtemp(join(tmpdir(), 'vramcast-')), name);
  await writeFile(path, text);
  return path;
}

/** A picture of the page, or of a part of it. @param {Page} page @param {string} name @param {string} [part] */
export async function screenshot(page, name, part) {
  const folder = process.env['SHOTS'];
  if (!folder) return;
  const path = join(folder, `${name}.png`);
  // A message that will go away by itself is no part of it.
  await page.waitForFunction(() => !document.getElementById('toast')?.classList.contains('shown'));
  await (part ? page.locator(part).screenshot({ path }) : page.screenshot({ path, fullPage: true }));
}

/** What axe finds is said. @param {Page} page @param {string} where @param {string} [part] only this part of the page */
export async function sound(page, where, part = 'html') {
  const { violations } = await new AxeBuilder({ page }).include(part).analyze();
  const lines = violations.map((one) => `${one.id}: ${one.help}\n  ${one.nodes.map((node) => node.html).join('\n  ')}`);
  assert.deepEqual(lines, [], where);
}

/** The same for a part, narrow in the dark and wide in the light; nothing sticks out. @param {Page} page @param {string} part */
export async function soundEverywhere(page, part) {
  const before = page.viewportSize();
  for (const [width, colorScheme] of /** @type {const} */ ([
    [390, 'dark'],
    [1440, 'light'],
  ])) {
    await page.setViewportSize({ width, height: 1000 });
    await page.emulateMedia({ colorScheme });
    await sound(page, `${part}, ${colorScheme}, ${width} px`, part);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${part} sticks out at ${width} px`);
  }
  if (before) await page.setViewportSize(before);
}

/** @param {string[]} complaints */
export function quiet(complaints) {
  assert.deepEqual(complaints, [], 'the browser complained');
}

/** Opens a group of the form. @param {Page} page @param {string} group */
export async function unfold(page, group) {
  const details = page.locator(`#group-${group}`);
  if (!(await details.evaluate((element) => /** @type {HTMLDetailsElement} */ (element).open)))
    await details.locator('> summary').click();
}
