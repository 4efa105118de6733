// @ts-check
/** The page shows what the command line prints. */

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { answered, launch, open, printedTotals, quiet, totals, unfold, vramcast } from './support.js';

/** @type {import('playwright-core').Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

test('the page loads with an answer, and nothing complains', async () => {
  const { page, complaints, close } = await open(browser);
  assert.match(await page.title(), /^Meta-Llama-3-8B: \d+\.\d\d GiB, fits H200 · vramcast$/);
  assert.deepEqual(await totals(page), await printedTotals('train', 'meta-llama/Meta-Llama-3-8B'));
  assert.match(await page.locator('#version').innerText(), /vramcast \d+\.\d+/);
  assert.ok((await page.locator('#gpus-body tbody tr').count()) > 50);
  assert.ok((await page.locator('#breakdown-body tbody tr').count()) > 5);
  quiet(complaints);
  await close();
});

test('a model is found by searching', async () => {
  const { page, complaints, close } = await open(browser);
  await page.getByRole('combobox', { name: 'Model' }).fill('qwen 0.5');
  const options = page.getByRole('listbox', { name: 'Models' }).getByRole('option');
  await options.first().waitFor();
  for (const name of await options.allInnerTexts()) assert.match(name.toLowerCase(), /qwen/);
  const id = (await page.locator('#models .name').first().innerText()).trim();
  await answered(page, () => options.first().click());
  assert.equal(await page.locator('#model').inputValue(), id);
  assert.deepEqual(await totals(page), await printedTotals('train', id));
  assert.match(await page.locator('#model-facts').innerText(), /parameters/);
  quiet(complaints);
  await close();
});

test('a changed batch gives the numbers of the command line, in text and in bytes', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  const first = await totals(page);
  await answered(page, () => page.getByRole('spinbutton', { name: /^Batch size/ }).fill('7'));
  const shown = await totals(page);
  assert.notDeepEqual(shown, first);
  const document = JSON.parse(await vramcast('train', 'gpt2', '--batch-size', '7', '--gpu', 'A30', '--json'));
  assert.equal(Number(await page.locator('#total-process').getAttribute('data-bytes')), document.totals.process);
  const text = await vramcast('train', 'gpt2', '--batch-size', '7', '--gpu', 'A30');
  for (const [name, value] of Object.entries(shown)) assert.match(text, new RegExp(`${name}\\s+${value}\\b`));
  for (const row of await page.locator('#breakdown-body tbody tr:not(.sum)').all()) {
    const [name = '', value = ''] = await row.locator('th, td').allInnerTexts();
    assert.ok(text.replaceAll(/\s+/g, ' ').includes(`${name.trim()} ${value}`), `${name} ${value} is not in\n${text}`);
  }
  quiet(complaints);
  await close();
});

test('options of every group reach the plan', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  await answered(page, () => page.locator('#train-precision').selectOption('bf16-mixed'));
  await answered(page, () => page.locator('#train-optimizer-kind').selectOption('sgd-momentum'));
  await unfold(page, 'kernels');
  await answered(page, () => page.locator('#train-checkpointing').selectOption('full'));
  await unfold(page, 'adapter');
  await answered(page, () => page.locator('#train-adapter').selectOption('lora'));
  await answered(page, () => page.locator('#train-adapter-rank').fill('32'));
  const flags = [
    '--gpu',
    'A30',
    '--precision',
    'bf16-mixed',
    '--optimizer',
    'sgd-momentum',
    '--gradient-checkpointing',
    '--lora',
    '--lora-rank',
    '32',
  ];
  assert.deepEqual(await totals(page), await printedTotals('train', 'gpt2', ...flags));
  quiet(complaints);
  await close();
});

test('many cards: the engines of the form are those of the flags', async () => {
  const { page, complaints, close } = await open(browser, '#model=meta-llama/Meta-Llama-3-8B');
  await unfold(page, 'parallel');
  for (const engine of ['fsdp2', 'ddp', 'deepspeed', 'fsdp', 'megatron', 'megatron-fsdp', 'megatron-deepspeed']) {
    await answered(page, () => page.locator('#train-engine').selectOption(engine));
    assert.deepEqual(
      await totals(page),
      await printedTotals('train', 'llama3-8b', '--gpus', '8', '--engine', engine),
      engine,
    );
    assert.ok(await page.locator('#ranks').isVisible());
  }
  quiet(complaints);
  await close();
});

test('Megatron: a mesh gives a bar per stage', async () => {
  const { page, complaints, close } = await open(browser, '#model=meta-llama/Meta-Llama-3-8B');
  await unfold(page, 'parallel');
  await answered(page, () => page.locator('#train-engine').selectOption('megatron'));
  await answered(page, () => page.locator('#train-parallel-mesh-tp').fill('2'));
  await answered(page, () => page.locator('#train-parallel-mesh-pp').fill('2'));
  await answered(page, () => page.locator('#train-cards').fill('8'));
  assert.deepEqual(
    await totals(page),
    await printedTotals('train', 'llama3-8b', '--gpus', '8', '--engine', 'megatron', '--tp', '2', '--pp', '2'),
  );
  assert.equal(await page.locator('#ranks-body tbody tr').count(), 2);
  quiet(complaints);
  await close();
});

test('generation and serving engines', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  await answered(page, () => page.getByRole('radio', { name: 'Infer' }).check());
  await answered(page, () => page.locator('#infer-new-tokens').fill('16'));
  assert.deepEqual(await totals(page), await printedTotals('infer', 'gpt2', '--gpu', 'A30', '--new-tokens', '16'));
  await answered(page, () => page.locator('#infer-engine').selectOption('vllm'));
  const served = JSON.parse(await vramcast('infer', 'gpt2', '--gpu', 'A30', '--engine', 'vllm', '--json'));
  const tokens = (await page.locator('#headline .big').innerText()).replace(/\D/g, '');
  assert.equal(Number(tokens), served.budgets[0].cache_tokens);
  await answered(page, () => page.locator('#infer-option-context').fill('512'));
  const flags = ['infer', 'gpt2', '--gpu', 'A30', '--engine', 'vllm', '--context', '512'];
  assert.deepEqual(await totals(page), await printedTotals(...flags));
  await answered(page, () => page.locator('#infer-engine').selectOption('all'));
  assert.equal(await page.locator('.engine').count(), 6);
  quiet(complaints);
  await close();
});

test('every setting of the table has a field that writes it', async () => {
  const { page, complaints, close } = await open(browser);
  const lost = await page.evaluate(async () => {
    const { settings } = await (await fetch('/api/v1/settings')).json();
    const { fields } = await import(/** @type {any} */ ('/fields/index.js'));
    return settings
      .filter((/** @type {any} */ row) => row.kind.type !== 'refused')
      .filter((/** @type {any} */ row) => {
        const writes = fields.filter(
          (/** @type {any} */ field) =>
            (field.places.includes(row.path) || field.row.place === row.path) &&
            row.engines.some((/** @type {string} */ name) => field.row.engines.includes(name)) &&
            document.getElementById(field.id),
        );
        return writes.length === 0;
      })
      .map((/** @type {any} */ row) => row.path);
  });
  assert.deepEqual(lost, []);
  const doubled = await page.evaluate(() => {
    const ids = [...document.querySelectorAll('.field input, .field select')].map((element) => element.id);
    return ids.filter((id, at) => ids.indexOf(id) !== at);
  });
  assert.deepEqual(doubled, []);
  quiet(complaints);
  await close();
});

test('settings after “more” are those of the flags', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  const plain = await totals(page);
  for (const group of ['optimizer', 'kernels', 'adapter', 'parallel']) await unfold(page, group);
  for (const more of await page.locator('details.more > summary').all()) if (await more.isVisible()) await more.click();
  await answered(page, () => page.locator('#train-optimizer-master-weights').check());
  await answered(page, () => page.locator('#train-keep-outputs').check());
  await answered(page, () => page.locator('#train-frozen').fill('embeddings'));
  const flags = ['train', 'gpt2', '--gpu', 'A30'];
  assert.deepEqual(
    await totals(page),
    await printedTotals(...flags, '--master-weights', '--drop-outputs', '--freeze', 'embeddings'),
  );
  await answered(page, () => page.locator('#train-optimizer-master-weights').uncheck());
  await answered(page, () => page.locator('#train-keep-outputs').uncheck());
  await answered(page, () => page.locator('#train-frozen').fill(''));
  assert.deepEqual(await totals(page), plain);
  await answered(page, () => page.locator('#train-engine').selectOption('fsdp2'));
  await answered(page, () => page.locator('#train-parallel-engine-mixed-precision').check());
  await answered(page, () => page.locator('#train-parallel-engine-wrap').selectOption('root'));
  assert.deepEqual(
    await totals(page),
    await printedTotals(...flags, '--gpus', '8', '--shard-mixed-precision', '--wrap', 'root'),
  );
  await answered(page, () => page.locator('#train-parallel-engine-mixed-precision').uncheck());
  // What another engine does not have goes with it.
  await answered(page, () => page.locator('#train-engine').selectOption('deepspeed'));
  await answered(page, () => page.locator('#train-parallel-engine-zero').fill('contiguous_gradients=false'));
  const zero = ['--engine', 'deepspeed', '--gpus', '8', '--zero-option', 'contiguous_gradients=false'];
  assert.deepEqual(await totals(page), await printedTotals(...flags, ...zero));
  quiet(complaints);
  await close();
});
