// @ts-check
/** The page without a server: files that any host serves, with the core inside. */

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { answered, launch, open, printedTotals, quiet, settled, totals, unfold } from './support.js';

/** @type {import('playwright-core').Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

test('an answer, changes, help, a link and a command line, without a server', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  /** @type {string[]} */
  const asked = [];
  page.on('request', (request) => asked.push(request.url()));
  assert.deepEqual(await totals(page), await printedTotals('train', 'gpt2', '--gpu', 'A30'));
  assert.match(await page.locator('.foot').innerText(), /computed in this page/);
  const told = ((await page.locator('.picture').getAttribute('data-events')) ?? '').split(' ').map(Number);
  assert.ok((told[1] ?? 0) > 5000 && (told[2] ?? 0) > 1000, 'every event is there');
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('7'));
  assert.deepEqual(await totals(page), await printedTotals('train', 'gpt2', '--batch-size', '7', '--gpu', 'A30'));
  await unfold(page, 'parallel');
  await answered(page, () => page.locator('#train-engine').selectOption('fsdp2'));
  const flags = ['train', 'gpt2', '--batch-size', '7', '--gpu', 'A30', '--gpus', '8', '--engine', 'fsdp2'];
  assert.deepEqual(await totals(page), await printedTotals(...flags));
  await page.getByRole('button', { name: 'Copy command' }).click();
  await page.waitForFunction(() => /copied/.test(document.getElementById('toast')?.textContent ?? ''));
  const command = await page.evaluate(() => navigator.clipboard.readText());
  assert.deepEqual(await totals(page), await printedTotals(...command.split(' ').slice(1)));
  const message = 'CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 14.56 GiB';
  await page.getByRole('button', { name: 'Import' }).click();
  await page.locator('#import-text').fill(message);
  await page.locator('#import-use').click();
  await page.waitForFunction(() => /1\.53/.test(document.getElementById('real-body')?.textContent ?? ''));
  // A link opens for whoever has the same files.
  const link = new URL(page.url()).hash;
  const second = await open(browser, link);
  assert.deepEqual(await totals(second.page), await totals(page));
  await second.close();
  await answered(page, () => page.getByRole('radio', { name: 'Infer' }).check());
  assert.deepEqual(await totals(page), await printedTotals('infer', 'gpt2', '--gpu', 'A30'));
  await answered(page, () => page.locator('#infer-engine').selectOption('vllm'));
  assert.deepEqual(await totals(page), await printedTotals('infer', 'gpt2', '--gpu', 'A30', '--engine', 'vllm'));
  // Chromium asks for the icon with each new address.
  const fetched = asked.filter((address) => !address.endsWith('/icon.svg'));
  assert.deepEqual(fetched, [], 'something was fetched');
  quiet(complaints);
  await close();
});

test('a model of the hub comes by its config; one that is not there is said', async () => {
  const { page, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  const config = { model_type: 'gpt2', architectures: ['GPT2LMHeadModel'], n_layer: 3, n_embd: 96, n_head: 4 };
  await page.route('https://huggingface.co/**', (route) =>
    route.request().url().includes('/somebody/small/')
      ? route.fulfill({ json: config, headers: { 'access-control-allow-origin': '*' } })
      : route.fulfill({ status: 404, headers: { 'access-control-allow-origin': '*' } }),
  );
  const choose = async (/** @type {string} */ name) => {
    await page.locator('#model').fill(name);
    await page.keyboard.press('Enter');
  };
  const whole = await totals(page);
  await answered(page, () => choose('somebody/small'));
  assert.match(await page.locator('#model').inputValue(), /somebody\/small/);
  assert.ok(Number((await totals(page)).process) < Number(whole.process));
  await page.locator('#drop-config').click();
  await settled(page);
  await choose('somebody/nothing');
  await page.waitForFunction(() => document.getElementById('model-problem')?.textContent?.includes('paste a config.json'));
  await close();
});
