// @ts-check
/** Mistakes, suggestions, files, links, pasted configs, two plans. */

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { after, before, test } from 'node:test';
import { BASE, answered, file, inGib, launch, open, printedTotals, quiet, screenshot, totals, unfold, visit, vramcast } from './support.js';

/** @type {import('playwright-core').Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

test('an impossible mesh is explained beside its field, and the last numbers stay', async () => {
  const { page, complaints, close } = await open(browser, '#model=meta-llama/Meta-Llama-3-8B');
  const good = await totals(page);
  await unfold(page, 'parallel');
  await answered(page, () => page.locator('#train-engine').selectOption('megatron'));
  const before8 = await totals(page);
  assert.notDeepEqual(before8, good);
  const field = page.locator('#train-cards');
  await answered(page, () => page.locator('#train-parallel-mesh-tp').fill('2'));
  const good8 = await totals(page);
  await field.fill('7');
  const problem = page.locator('#train-cards-problem');
  await page.waitForFunction(() => document.getElementById('train-cards-problem')?.textContent);
  assert.match(await problem.innerText(), /not 7/);
  assert.equal(await field.getAttribute('aria-invalid'), 'true');
  assert.ok((await field.getAttribute('aria-describedby'))?.includes('train-cards-problem'));
  assert.deepEqual(await totals(page), good8);
  assert.ok(await page.locator('#stale').isVisible());
  // Everything that is wrong is said, each at its field.
  await page.locator('#train-batch-seq-len').fill('0');
  assert.match(await page.locator('#train-batch-seq-len-problem').innerText(), /At least 1/);
  await page.locator('#train-batch-seq-len').fill('2048');
  await answered(page, () => field.fill('8'));
  assert.equal(await problem.innerText(), '');
  assert.equal(await page.locator('#stale').isVisible(), false);
  quiet(complaints);
  await close();
});

test('values are checked as they are typed', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2');
  await page.getByRole('spinbutton', { name: /^Batch size/ }).fill('0');
  assert.match(await page.locator('#train-batch-batch-size-problem').innerText(), /At least 1/);
  await page.getByRole('spinbutton', { name: /^Batch size/ }).fill('1.5');
  assert.match(await page.locator('#train-batch-batch-size-problem').innerText(), /whole number/);
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('2'));
  assert.equal(await page.locator('#train-batch-batch-size-problem').innerText(), '');
  await page.getByRole('spinbutton', { name: 'Sequence length' }).fill('5000');
  await page.waitForFunction(() => document.getElementById('train-batch-seq-len-problem')?.textContent);
  assert.match(await page.locator('#train-batch-seq-len-problem').innerText(), /1024/);
  quiet(complaints);
  await close();
});

test('a suggestion is applied by a click, and then it is true', async () => {
  const fragment = '#model=meta-llama/Meta-Llama-3-8B&gpu=H100-PCIe&batch.batch_size=4';
  const { page, complaints, close } = await open(browser, fragment);
  assert.match(await page.locator('#headline').innerText(), /does not fit/);
  const count = await page.locator('.suggestions li').count();
  assert.ok(count > 3);
  for (let at = 0; at < count; at += 1) {
    const one = page.locator('.suggestions li').nth(at);
    const promised = /([\d.]+) GiB/.exec(await one.locator('.number').innerText())?.[1];
    await answered(page, () => one.getByRole('button', { name: /Apply/ }).click());
    assert.equal((await totals(page)).process, promised, `suggestion ${at}`);
    await visit(page, fragment);
  }
  quiet(complaints);
  await close();
});

for (const form of ['YAML', 'JSON', 'TOML']) {
  test(`a plan goes out as ${form} and comes back`, async () => {
    const fragment =
      '#model=openai-community/gpt2&batch.batch_size=3&batch.seq_len=512&checkpointing=full&optimizer.kind=lion&gpu=A30';
    const { page, complaints, close } = await open(browser, fragment);
    const before = await totals(page);
    await page.getByRole('button', { name: 'Export' }).click();
    await page.getByRole('radio', { name: form, exact: true }).check();
    await page.waitForFunction(
      (wanted) =>
        /** @type {HTMLTextAreaElement} */ (document.getElementById('export-text')).value.includes('lion') &&
        document.querySelector(`#export-forms input[value=${wanted}]:checked`),
      form.toLowerCase(),
    );
    const [download] = await Promise.all([
      page.waitForEvent('download'),
      page.getByRole('button', { name: 'Download' }).click(),
    ]);
    const text = await readFile(await download.path(), 'utf8');
    await page.keyboard.press('Escape');
    // The command line reads the same file.
    const path = await file(download.suggestedFilename(), text);
    assert.deepEqual(before, await printedTotals('train', 'gpt2', '--plan', path));
    await visit(page, '#model=meta-llama/Meta-Llama-3-8B');
    await page.getByRole('button', { name: 'Import' }).click();
    await answered(page, () => page.locator('#import-file').setInputFiles(path));
    assert.deepEqual(await totals(page), before);
    assert.equal(await page.getByRole('spinbutton', { name: /^Batch size/ }).inputValue(), '3');
    assert.equal(await page.locator('#train-gpu').inputValue(), 'A30');
    quiet(complaints);
    await close();
  });
}

test('the answer goes out as Markdown, SVG, CSV and JSON', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  await page.getByRole('button', { name: 'Export' }).click();
  for (const [form, sign] of /** @type {[string, RegExp][]} */ ([
    ['Markdown', /\|.*process/],
    ['SVG', /<svg[^>]*>[^]*<\/svg>/],
    ['CSV', /process/],
    ['Result', /"totals"/],
  ])) {
    await page.getByRole('radio', { name: form, exact: true }).check();
    await page.waitForFunction(
      (source) =>
        new RegExp(source).test(/** @type {HTMLTextAreaElement} */ (document.getElementById('export-text')).value),
      sign.source,
    );
  }
  const result = JSON.parse(await page.locator('#export-text').inputValue());
  assert.deepEqual(inGib(result.totals), await totals(page));
  quiet(complaints);
  await close();
});

test('the copied command gives the same numbers', async () => {
  const { page, complaints, close } = await open(
    browser,
    '#model=openai-community/gpt2&batch.batch_size=5&checkpointing=full&gpu=A30',
  );
  await page.getByRole('button', { name: 'Copy command' }).click();
  await page.waitForFunction(() => document.getElementById('toast')?.textContent);
  const command = await page.evaluate(() => navigator.clipboard.readText());
  const words = command
    .trim()
    .split(/\s+/)
    .map((word) => word.replace(/^'(.*)'$/, '$1'));
  assert.equal(words[0], 'vramcast');
  assert.deepEqual(await totals(page), inGib(JSON.parse(await vramcast(...words.slice(1), '--json')).totals));
  quiet(complaints);
  await close();
});

test('a link restores everything, also a plan for comparison', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  await page.getByRole('button', { name: 'Pin as A' }).click();
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('6'));
  await unfold(page, 'adapter');
  await answered(page, () => page.locator('#train-adapter').selectOption('lora'));
  await answered(page, () => page.locator('#train-adapter-targets').fill('c_attn, c_proj'));
  await page.getByRole('button', { name: 'Copy link' }).click();
  await page.waitForFunction(() => document.getElementById('toast')?.textContent);
  const link = await page.evaluate(() => navigator.clipboard.readText());
  const [before, compared] = [await totals(page), await page.locator('#compare-body').innerText()];
  const other = await open(browser, link.slice(BASE.length));
  assert.deepEqual(await totals(other.page), before);
  assert.equal(await other.page.locator('#compare-body').innerText(), compared);
  assert.equal(await other.page.locator('#train-adapter-targets').inputValue(), 'c_attn, c_proj');
  assert.equal(await other.page.locator('#train-gpu').inputValue(), 'A30');
  quiet([...complaints, ...other.complaints]);
  await other.close();
  await close();
});

const CONFIG = {
  architectures: ['LlamaForCausalLM'],
  model_type: 'llama',
  hidden_size: 512,
  intermediate_size: 1376,
  num_hidden_layers: 6,
  num_attention_heads: 8,
  num_key_value_heads: 4,
  vocab_size: 32000,
  max_position_embeddings: 2048,
  rms_norm_eps: 1e-6,
  hidden_act: 'silu',
  torch_dtype: 'bfloat16',
};

test('a pasted config is taken, checked while it is typed, and shared by link', async () => {
  const { page, complaints, close } = await open(browser);
  await page.getByRole('button', { name: 'Paste a config.json' }).click();
  const area = page.locator('#config-text');
  await area.fill('{"a": ');
  assert.match(await page.locator('#config-problem').innerText(), /Not JSON/);
  await area.fill('{"a": 1}');
  assert.match(await page.locator('#config-problem').innerText(), /model_type/);
  await area.fill(JSON.stringify(CONFIG));
  await answered(page, () => page.getByRole('button', { name: 'Use this config' }).click());
  const path = await file('config.json', JSON.stringify(CONFIG));
  const shown = await totals(page);
  assert.deepEqual(shown, await printedTotals('train', path));
  await page.waitForFunction(() => location.hash.includes('config=~'));
  const other = await open(browser, await page.evaluate(() => location.hash));
  assert.deepEqual(await totals(other.page), shown);
  quiet([...complaints, ...other.complaints]);
  await other.close();
  await close();
});

test('several plans side by side', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  const a = await totals(page);
  await page.getByRole('button', { name: 'Pin as A' }).click();
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('2'));
  const b = await totals(page);
  await page.getByRole('button', { name: 'Pin as B' }).click();
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('4'));
  const c = await totals(page);
  const text = await page.locator('#compare-body').innerText();
  for (const value of [a.process, b.process, c.process, 'batch.batch_size'])
    assert.ok(text.includes(value), `${value} is not in ${text}`);
  await screenshot(page, 'page-compare', '#compare');
  await page.getByRole('button', { name: 'Drop B' }).click();
  assert.ok(!(await page.locator('#compare-body').innerText()).includes(b.process));
  await answered(page, () => page.getByRole('button', { name: 'Edit A' }).click());
  assert.deepEqual(await totals(page), a);
  await page.locator('#compare').getByRole('button', { name: 'Stop comparing' }).click();
  assert.equal(await page.locator('#compare').isVisible(), false);
  quiet(complaints);
  await close();
});

test('presets and the defaults of frameworks', async () => {
  const { page, complaints, close } = await open(browser);
  await page.getByRole('button', { name: 'Presets' }).click();
  const presets = page.locator('#presets-body .preset');
  const count = await presets.count();
  assert.ok(count >= 10);
  await page.keyboard.press('Escape');
  for (let at = 0; at < 9; at += 1) {
    await page.getByRole('button', { name: 'Presets' }).click();
    await answered(page, () => presets.nth(at).click());
    assert.equal(await page.locator('#stale').isVisible(), false, `preset ${at}`);
  }
  await visit(page, '#model=openai-community/gpt2');
  await page.getByRole('button', { name: 'Presets' }).click();
  await answered(page, () => presets.filter({ hasText: 'trl' }).click());
  assert.deepEqual(await totals(page), await printedTotals('train', 'gpt2', '--framework', 'trl'));
  quiet(complaints);
  await close();
});

test('going back undoes a step, the title says the answer, and a stale one has no sign', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2');
  const first = await totals(page);
  assert.match(await page.title(), /gpt2: [\d.]+ GiB, fits .* vramcast/);
  const address = page.url();
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('8'));
  await page.waitForFunction((old) => location.href !== old, address);
  assert.notDeepEqual(await totals(page), first);
  await answered(page, () => page.goBack());
  assert.deepEqual(await totals(page), first);
  assert.equal(await page.getByRole('spinbutton', { name: /^Batch size/ }).inputValue(), '1');
  assert.ok(await page.locator('#answer .sign').first().isVisible());
  await page.getByRole('spinbutton', { name: /^Batch size/ }).fill('0');
  assert.equal(await page.locator('#answer .sign').first().isVisible(), false);
  quiet(complaints);
  await close();
});
