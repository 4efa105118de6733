// @ts-check
/** What people bring who serve a model: a line, a Compose file, an upload's name, a card that is too small. */

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { answered, launch, open, printedTotals, quiet, soundEverywhere, totals, vramcast } from './support.js';

/** @typedef {import('playwright-core').Page} Page */

/** @type {import('playwright-core').Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

/** The hub as a page without a server finds it. @param {Page} page @param {Record<string, unknown>} configs */
async function hub(page, configs) {
  const headers = { 'access-control-allow-origin': '*' };
  await page.route('https://huggingface.co/**', (route) => {
    const known = Object.entries(configs).find(([name]) => route.request().url().includes(`/${name}/`));
    return known ? route.fulfill({ json: known[1], headers }) : route.fulfill({ status: 404, headers });
  });
}

/** @param {Page} page @param {string} text */
async function bring(page, text) {
  await page.getByRole('button', { name: 'Import' }).click();
  await page.locator('#import-text').fill(text);
  await answered(page, () => page.locator('#import-use').click());
}

test('an upload that a line names is known by its name, which is said', async () => {
  const { page, close } = await open(browser, '#model=openai-community/gpt2&gpu=A100-40GB');
  await hub(page, {});
  // Shares of cards stand in the plan where a count of cards would, a second model where another engine has it too.
  await bring(page, 'llama-server -m gpt2-Q4_K_M.gguf --tensor-split 3,1 -c 512');
  const shares = ['--engine', 'llama.cpp', '--quantization', 'Q4_K_M', '--tensor-split', '3,1', '--context', '512'];
  assert.deepEqual(await totals(page), await printedTotals('infer', 'gpt2', ...shares, '--gpu', 'A100-40GB'));
  const line = 'vllm serve Qwen/Qwen2.5-32B-Instruct-AWQ --max-model-len 32768 --tensor-parallel-size 2';
  await bring(page, line);
  assert.equal(await page.locator('#model').inputValue(), 'Qwen/Qwen2.5-32B-Instruct-AWQ');
  const facts = await page.locator('#model-facts').innerText();
  assert.match(facts, /is not in the catalogue: Qwen\/Qwen2\.5-32B-Instruct, .* stands in/);
  const flags = ['--engine', 'vllm', '--context', '32768', '--tensor-parallel-size', '2', '--gpu', 'A100-40GB'];
  assert.deepEqual(await totals(page), await printedTotals('infer', 'Qwen/Qwen2.5-32B-Instruct', '--quantization', 'awq', ...flags));
  assert.match(await page.title(), /^Qwen2\.5-32B-Instruct-AWQ: [\d\s]+ tokens of cache on A100-40GB/);
  // A name that says nothing is refused, and nothing of the model before stands beside it.
  await page.locator('#model').fill('somebody/nothing');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.getElementById('model-problem')?.textContent?.includes('somebody/nothing'));
  assert.equal(await page.locator('#model-facts').innerText(), '');
  await close();
});

test('without a server, a file’s or a link’s model comes from the hub', async () => {
  const { page, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  const isAlone = (await page.locator('meta[name="vramcast-core"]').count()) > 0;
  await hub(page, { 'somebody/small': { model_type: 'gpt2', architectures: ['GPT2LMHeadModel'], n_layer: 3, n_embd: 96, n_head: 4 } });
  if (isAlone) {
    await bring(page, 'vllm serve somebody/small --max-model-len 512');
    assert.equal(await page.locator('#model').inputValue(), 'pasted: somebody/small');
    assert.match(await page.locator('#headline').innerText(), /tokens/);
  }
  await close();
});

test('what would help an engine that does not fit is applied by a click', async () => {
  const { page, complaints, close } = await open(
    browser,
    '#kind=infer&engine=llama.cpp&model=meta-llama/Llama-3.3-70B-Instruct&gpu=RTX%204090&option.quantization=Q4_K_M',
  );
  const help = page.locator('#suggestions li');
  await help.first().waitFor();
  assert.match((await help.allInnerTexts()).join(), /--n-gpu-layers \d+/);
  await soundEverywhere(page, '#suggestions');
  const flags = ['infer', 'meta-llama/Llama-3.3-70B-Instruct', '--engine', 'llama.cpp', '--quantization', 'Q4_K_M'];
  for (const at of [0, 1]) {
    const words = (await help.nth(at).locator('.code').innerText()).split(' ');
    await answered(page, () => help.nth(at).getByRole('button').click());
    assert.deepEqual(await totals(page), await printedTotals(...flags, '--gpu', 'RTX 4090', ...words));
    assert.match(await page.locator('#headline').innerText(), /\bfits RTX 4090/);
    await answered(page, () => page.locator('#undo').click());
    await help.first().waitFor();
  }
  quiet(complaints);
  await close();
});

test('a cache that is too short for one sequence says by how much', async () => {
  const words = ['infer', 'Qwen/Qwen3-8B', '--engine', 'vllm', '--gpu', 'RTX 4090'];
  const { page, complaints, close } = await open(browser, '#kind=infer&engine=vllm&model=Qwen/Qwen3-8B&gpu=RTX%204090');
  const { budgets, verdicts } = JSON.parse(await vramcast(...words, '--json'));
  assert.ok(!budgets[0].fits && budgets[0].missing === 0 && budgets[0].cache_tokens > 0);
  const headline = (await page.locator('#headline').innerText()).replace(/\u202f/g, '');
  assert.ok(headline.includes(`${budgets[0].cache_tokens} tokens`), headline);
  const short = (-verdicts[0].headroom / 2 ** 30).toFixed(2);
  assert.ok(headline.includes(`${short} GiB short of one sequence of ${budgets[0].full_length}`), headline);
  assert.ok((await page.locator('#serving').innerText()).includes(`${short} GiB short`));
  // Nothing stands beyond the edge.
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
  quiet(complaints);
  await close();
});

test('a format that was chosen stands among the others', async () => {
  const { page, complaints, close } = await open(
    browser,
    '#kind=infer&engine=llama.cpp&model=openai-community/gpt2&gpu=T4&option.quantization=Q4_K_M',
  );
  await page.getByRole('button', { name: /^Compare cards/ }).click();
  const cells = page.locator('#heat td.heat button');
  await cells.first().waitFor();
  const other = cells.and(page.getByLabel(/^T4, Q8_0: fits/));
  await answered(page, () => other.click());
  assert.equal(await page.locator('#infer-option-quantization').inputValue(), 'Q8_0');
  const flags = ['--gpu', 'T4', '--engine', 'llama.cpp', '--quantization', 'Q8_0'];
  assert.deepEqual(await totals(page), await printedTotals('infer', 'gpt2', ...flags));
  quiet(complaints);
  await close();
});

test('a Compose file gives the numbers of fit', async () => {
  const { page, complaints, close } = await open(browser, '#model=openai-community/gpt2&gpu=A30');
  const text =
    'services:\n  llm:\n    image: vllm/vllm-openai:v0.10.1\n    command: --model openai-community/gpt2 --max-model-len 512 --gpu-memory-utilization 0.8\n';
  await bring(page, text);
  const { budgets } = JSON.parse(
    await vramcast('infer', 'gpt2', '--engine', 'vllm', '--engine-version', '0.10.1', '--context', '512', '--gpu-memory-utilization', '0.8', '--gpu', 'A30', '--json'),
  );
  const tokens = (await page.locator('#headline .big').innerText()).replace(/\D/g, '');
  assert.equal(Number(tokens), budgets[0].cache_tokens);
  // What a file brought can be undone.
  await answered(page, () => page.locator('#undo').click());
  assert.ok(await page.getByRole('radio', { name: 'Train' }).isChecked());
  quiet(complaints);
  await close();
});
