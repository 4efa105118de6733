// @ts-check
// The API's description as a page: read from the server, laid out without any library.

/**
 * An element with content.
 * @param {string} name
 * @param {Record<string, string>} attributes
 * @param {...(Node | string)} content
 */
function make(name, attributes, ...content) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
}

/** @param {string} id */
function place(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`there is no ${id}`);
  return found;
}

/**
 * What a schema allows, in a few words; names of other schemas are links.
 * @param {any} schema
 * @returns {Node}
 */
function kind(schema) {
  const text = (/** @type {string} */ words) => document.createTextNode(words);
  if (schema === true || !schema || Object.keys(schema).length === 0) return text('anything');
  if (schema.$ref) {
    const name = schema.$ref.split('/').pop();
    return make('a', { href: `#schema-${name}` }, name);
  }
  if (schema.const !== undefined) return make('code', {}, JSON.stringify(schema.const));
  if (schema.enum) return text(schema.enum.map((/** @type {any} */ one) => JSON.stringify(one)).join(', '));
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) {
    const all = document.createElement('span');
    several.forEach((/** @type {any} */ one, /** @type {number} */ index) => {
      if (index > 0) all.append(' or ');
      all.append(kind(one));
    });
    return all;
  }
  if (schema.type === 'array') {
    const list = document.createElement('span');
    list.append('list of ', kind(schema.items));
    return list;
  }
  return text([schema.type ?? 'object'].flat().join(' or '));
}

/**
 * The keys of an object, a row each.
 * @param {any} schema
 */
function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([key, value]) => {
    const about = [value.description ?? ''];
    if (value.default !== undefined) about.push(`Default: ${JSON.stringify(value.default)}.`);
    const name = make('td', {}, make('code', {}, key), (schema.required ?? []).includes(key) ? ' (needed)' : '');
    return make('tr', {}, name, make('td', {}, kind(value)), make('td', {}, about.join(' ').trim()));
  });
  if (rows.length === 0) return make('p', {}, kind(schema));
  const head = make('tr', {}, ...['key', 'value', 'meaning'].map((word) => make('th', { scope: 'col' }, word)));
  return make('table', {}, make('thead', {}, head), make('tbody', {}, ...rows));
}

/**
 * One call.
 * @param {any} api
 * @param {string} path
 * @param {string} method
 * @param {any} operation
 */
function call(api, path, method, operation) {
  const parts = [
    make('h3', {}, make('code', {}, `${method.toUpperCase()} ${path}`)),
    make('p', {}, operation.summary),
  ];
  for (const parameter of operation.parameters ?? []) {
    parts.push(make('p', {}, make('code', {}, parameter.name), ` ${parameter.description}`));
  }
  const body = operation.requestBody?.content['application/json'];
  if (body) {
    const example = JSON.stringify(body.example);
    const url = `${location.origin}${path}`;
    const line = `curl -H 'content-type: application/json' -d '${example.replaceAll("'", "'\\''")}' ${url}`;
    parts.push(make('p', {}, 'Body: ', kind(body.schema)), make('pre', { tabindex: '0' }, make('code', {}, line)));
  }
  const answer = operation.responses['200'].content['application/json'].schema;
  parts.push(make('p', {}, 'Answer: ', kind(answer)));
  return make('article', { id: operation.operationId }, ...parts);
}

async function show() {
  const answer = await fetch('/api/v1/openapi.json');
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const api = await answer.json();
  place('about').textContent = `${api.info.description} Version ${api.info.version}.`;
  const links = [];
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(/** @type {any} */ (methods))) {
      const label = `${method.toUpperCase()} ${path}`;
      links.push(make('li', {}, make('a', { href: `#${operation.operationId}` }, label)));
      place('calls').append(call(api, path, method, operation));
    }
  }
  place('contents').append(make('ul', {}, ...links));
  for (const [name, schema] of Object.entries(api.components.schemas).sort(([a], [b]) => a.localeCompare(b))) {
    const parts = [make('summary', {}, make('code', {}, name)), make('p', {}, schema.description ?? ''), fields(schema)];
    place('schemas').append(make('details', { id: `schema-${name}` }, ...parts));
  }
}

/** A link to a schema opens it. */
function openLinked() {
  const linked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (linked instanceof HTMLDetailsElement) linked.open = true;
}

window.addEventListener('hashchange', openLinked);
show().then(openLinked, (error) => {
  place('about').textContent = `The description could not be read: ${error.message}`;
});
