// @ts-check
/** Looking and deciding: the timeline event by event, modules, plans that fit, what a real run left behind, serving tables. */

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { after, before, test } from 'node:test';
import { answered, file, inGib, launch, open, printedTotals, quiet, screenshot, soundEverywhere, totals, vramcast } from './support.js';

/** @type {import('playwright-core').Browser} */
let browser;
/** One page for all of it. @type {Awaited<ReturnType<typeof open>>} */
let opened;
before(async () => {
  browser = await launch();
  opened = await open(browser, '#model=openai-community/gpt2&gpu=T4&batch.batch_size=16&optimizer.kind=adamw&weights=bf16', {
    viewport: { width: 1440, height: 1000 },
  });
});
after(async () => {
  quiet(opened.complaints);
  await browser.close();
});

/** First and last event that the timeline shows, and how many tensors one by one. */
async function shown() {
  const text = (await opened.page.locator('.picture').getAttribute('data-events')) ?? '';
  const [from = 0, to = 0, lives = 0] = text.split(' ').map(Number);
  return { from, to, lives };
}

/** @param {number} x  share of the width @param {number} y */
async function pointer(x, y) {
  const box = await opened.page.locator('.picture').boundingBox();
  assert.ok(box);
  await opened.page.mouse.move(box.x + box.width * x, box.y + box.height * y, { steps: 2 });
}

/** Does something as on a phone. @template T @param {() => Promise<T>} look */
async function onPhone(look) {
  const { page } = opened;
  const before = page.viewportSize();
  await page.setViewportSize({ width: 390, height: 844 });
  // Pictures follow the width in the next frame.
  await page.waitForTimeout(300);
  const seen = await look();
  if (before) await page.setViewportSize(before);
  return seen;
}

test('every event of the run: tensors under the pointer, a brush that zooms, what lives follows', async () => {
  const { page } = opened;
  await page.locator('#timeline').scrollIntoViewIfNeeded();
  const whole = await shown();
  assert.ok(whole.from === 0 && whole.to > 5000 && whole.lives > 1000, JSON.stringify(whole));
  assert.match(await page.locator('#alive-title').innerText(), /at the peak/);
  const phases = (await page.locator('.picture svg .axis').allTextContents()).filter((text) => /[a-z]/.test(text));
  assert.equal(new Set(phases).size > 3 && phases.filter((text) => text === 'step 1').length, 1, phases.join());
  // The limit of the card is a line, since it does not fit.
  assert.match((await page.locator('.limit-name').textContent()) ?? '', /T4 ends: \d+\.\d\d GiB/);
  await pointer(0.42, 0.8);
  assert.match(await page.locator('.readout').innerText(), /event [\d\s]+ of/);
  assert.match(await page.locator('.readout').innerText(), /\[[\d, ]+\] \w+, \w+ in (transformer|\(model\))/);
  await screenshot(page, 'page-timeline', '#timeline');
  await soundEverywhere(page, '#timeline');
  // The peak's words stand whole beside the scale, on a phone too.
  const [words, picture] = await onPhone(async () => [
    await page.locator('.picture .peak-name').boundingBox(),
    await page.locator('.picture').boundingBox(),
  ]);
  assert.ok(words && picture && words.x >= picture.x && words.x + words.width <= picture.x + picture.width, JSON.stringify([words, picture]));
  await pointer(0.42, 0.5);
  await page.mouse.down();
  await pointer(0.5, 0.5);
  await page.mouse.up();
  await page.waitForFunction(() => !document.querySelector('.picture')?.getAttribute('data-events')?.startsWith('0 '));
  const part = await shown();
  assert.ok(part.to - part.from < (whole.to - whole.from) / 5, JSON.stringify(part));
  await pointer(0.3, 0.9);
  assert.match(await page.locator('#alive-title').innerText(), /Alive in \w+ of/);
  // By keys: the cursor, and from the buttons.
  const before = await page.locator('.readout').innerText();
  await page.locator('#timeline-cursor').focus();
  await page.keyboard.press('ArrowRight');
  assert.notEqual(await page.locator('.readout').innerText(), before);
  await page.getByRole('button', { name: 'Whole run' }).click();
  assert.deepEqual(await shown(), whole);
});

test('modules open down to their tensors, and add up', async () => {
  const { page } = opened;
  const crumbs = page.locator('.crumbs');
  const size = async () => Number(/([\d.]+) GiB/.exec(await crumbs.innerText())?.[1]);
  const whole = await size();
  const cells = async () => (await page.locator('.treemap .number').allInnerTexts()).reduce((sum, text) => sum + Number(text), 0);
  assert.ok(Math.abs((await cells()) - whole) < 0.06, `${await cells()} of ${whole}`);
  await screenshot(page, 'page-modules', '#pair');
  await soundEverywhere(page, '#modules');
  while ((await page.locator('.treemap button').count()) > 0) {
    const outer = await size();
    await page.locator('.treemap button').first().click();
    assert.ok((await size()) <= outer);
  }
  assert.match((await page.locator('.treemap .cell').first().getAttribute('title')) ?? '', /\[[\d, ]+\]|several/);
  await crumbs.getByRole('button', { name: 'whole model' }).click();
  assert.equal(await size(), whole);
});

test('a setting is found by a word, and by keys alone', async () => {
  const { page } = opened;
  const fields = page.locator('#groups .field:visible');
  const all = await fields.count();
  await page.locator('#setting-search').focus();
  await page.keyboard.type('offload');
  const found = await fields.count();
  assert.ok(found > 0 && found < all, `${found} of ${all}`);
  assert.match(await page.locator('#setting-found').innerText(), new RegExp(`^(one|${found}) setting.*with another engine: --`));
  await screenshot(page, 'page-search', '#plan');
  await soundEverywhere(page, '#plan');
  await page.keyboard.press('Enter');
  assert.ok(await page.evaluate(() => document.activeElement?.closest('#groups .field')), 'the first one has the focus');
  await page.locator('#setting-search').focus();
  await page.keyboard.press('Escape');
  assert.equal(await fields.count(), all);
});

test('the other way round: what fits is found, and taken by a click', async () => {
  const { page } = opened;
  await page.getByRole('button', { name: 'Largest batch' }).click();
  await page.getByRole('button', { name: 'Longest sequence' }).click();
  for (const name of ['batch', 'seq-len']) await page.locator(`#solved-${name} strong`).waitFor();
  await screenshot(page, 'page-solve', '#solve');
  await soundEverywhere(page, '#solve');
  const line = page.locator('#solved-batch');
  const [asked, found] = await onPhone(async () => [await line.locator('.asked').boundingBox(), await line.locator('.what').boundingBox()]);
  assert.ok(asked && found && asked.y + asked.height <= found.y + 1, 'what was asked stands above what was found');
  const flags = ['gpt2', '--gpu', 'T4', '--precision', 'bf16', '--optimizer', 'adamw'];
  const printed = JSON.parse(await vramcast('train', ...flags, '--solve', 'batch', '--json'));
  assert.equal(await page.locator('#solved-batch strong').innerText(), printed.answer);
  await answered(page, () => page.locator('#solved-batch').getByRole('button', { name: /^Take/ }).click());
  assert.deepEqual(await totals(page), inGib(printed.totals));
  assert.match(await page.locator('#headline').innerText(), /fits T4/);
  await page.locator('#undo:enabled').waitFor();
  await answered(page, () => page.getByRole('button', { name: 'Undo' }).click());
});

test('a plan of the frontier is taken by a click and holds; undo and redo', async () => {
  const { page } = opened;
  const asked = await totals(page);
  await page.getByRole('button', { name: 'Find plans that fit' }).click();
  const rows = page.locator('#frontier tbody tr');
  await rows.first().waitFor();
  assert.equal(await page.locator('#frontier .point').count(), await rows.count());
  await screenshot(page, 'page-plans', '#frontier');
  await soundEverywhere(page, '#frontier');
  const wide = await onPhone(() => page.locator('#frontier .scroll').evaluate((box) => box.scrollWidth - box.clientWidth));
  assert.ok(wide <= 0, `plans stick out by ${wide} px`);
  const promised = await rows.first().locator('td.number').first().innerText();
  await answered(page, () => page.locator('#frontier .point').first().click());
  assert.equal((await totals(page)).process, promised);
  assert.match(await page.locator('#headline').innerText(), /fits T4/);
  // A step is written down a moment after it was made.
  await page.locator('#undo:enabled').waitFor();
  await answered(page, () => page.getByRole('button', { name: 'Undo' }).click());
  assert.deepEqual(await totals(page), asked);
  await answered(page, () => page.getByRole('button', { name: 'Redo' }).click());
  assert.equal((await totals(page)).process, promised);
});

test('a message, a snapshot, a measured row and a tool’s file are each known for what they are', async () => {
  const { page } = opened;
  const drop = async (/** @type {string} */ name, /** @type {Buffer} */ bytes) => {
    const data = await page.evaluateHandle(
      ([name, bytes]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([Uint8Array.from(bytes)], name));
        return transfer;
      },
      /** @type {const} */ ([name, [...bytes]]),
    );
    await page.dispatchEvent('body', 'drop', { dataTransfer: data });
  };
  const says = (/** @type {RegExp} */ words) =>
    page.waitForFunction((source) => new RegExp(source).test(document.getElementById('real-body')?.textContent ?? ''), words.source);
  const message =
    'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.05 GiB is free. Of the allocated memory 12.90 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.';
  await drop('train.log', Buffer.from(message));
  await says(/needs more than the card has.*12\.90/);
  // The plan has room there: what leaves as much free as the run lacked is a click away.
  const help = page.locator('#real .suggestions li').first();
  const promised = ((await help.innerText()).match(/([\d.]+) GiB/) ?? [])[1];
  await answered(page, () => help.getByRole('button', { name: /^Apply/ }).click());
  assert.equal((await totals(page)).process, promised);
  // A message of another card offers that.
  await drop('train.log', Buffer.from(message.replace('14.56', '39.39').replace('12.90', '37.73')));
  await answered(page, () => page.locator('#real').getByRole('button', { name: 'Take A100-40GB' }).click());
  assert.equal(await page.locator('#train-gpu').inputValue(), 'A100-40GB');
  await drop('snapshot.pickle', await readFile(`${process.env['RECORDINGS']}/train.pickle`));
  await says(/memory snapshot of torch.*optimizer state/);
  const rows = (await readFile(`${process.env['RECORDINGS']}/../../../../truth/ledger/h200.jsonl`, 'utf8')).split('\n');
  const row = JSON.parse(rows.find((text) => text.includes('"oom":false')) ?? '{}');
  await drop('row.json', Buffer.from(JSON.stringify(row)));
  await says(/a measured run.*0\.0\.fwd/);
  await screenshot(page, 'page-real', '#real');
  await soundEverywhere(page, '#real');
  const gib = (row.measured.peak_allocated / 2 ** 30).toFixed(2);
  assert.ok((await page.locator('#real-body').innerText()).includes(gib));
  await page.locator('#real').getByRole('button', { name: 'Close' }).click();
  const text = 'base_model: openai-community/gpt2\nsequence_len: 512\nmicro_batch_size: 3\nwandb_project: x\nadapter: lora\nlora_r: 8\n';
  await answered(page, () => drop('axolotl.yml', Buffer.from(text)));
  const path = await file('axolotl.yml', text);
  const card = await page.locator('#train-gpu').inputValue();
  assert.deepEqual(await totals(page), await printedTotals('fit', path, '--gpu', card));
});

test('a serving engine over cards, formats, contexts', async () => {
  const { page } = opened;
  await page.goto(`${page.url().split('#')[0]}#kind=infer&model=openai-community/gpt2&engine=vllm&gpu=T4`);
  await page.waitForFunction(() => /tokens/.test(document.getElementById('headline')?.textContent ?? ''));
  await page.getByRole('button', { name: /^Compare cards/ }).click();
  const cells = page.locator('#heat td.heat button');
  await cells.first().waitFor();
  await screenshot(page, 'page-serving', '#heat');
  await soundEverywhere(page, '#heat');
  // The table is one stop of the Tab key; arrows go through its cells.
  assert.equal(await page.locator('#heat td.heat button[tabindex="0"]').count(), 1);
  const beside = page.locator('#heat tr.own td.heat button').nth(1);
  await page.locator('#heat td.heat button[tabindex="0"]').focus();
  await page.keyboard.press('ArrowRight');
  assert.ok(await beside.evaluate((button) => button === document.activeElement && button.tabIndex === 0));
  // What the engine notes stands once.
  const notes = await page.locator('#origin-body .notes li').allInnerTexts();
  assert.ok(notes.length > 0 && (await page.locator('#serving .notes').count()) === 0, notes.join());
  const cell = cells.nth((await cells.count()) - 2);
  const [card = '', format = ''] = ((await cell.getAttribute('aria-label')) ?? '').split(/[,:] /);
  await answered(page, () => cell.click());
  const served = JSON.parse(await vramcast('infer', 'gpt2', '--gpu', card, '--engine', 'vllm', '--quantization', format, '--json'));
  const tokens = (await page.locator('#headline .big').innerText()).replace(/\D/g, '');
  assert.equal(Number(tokens), served.budgets[0].cache_tokens, `${card} ${format}`);
});
