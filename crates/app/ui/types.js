// @ts-check
/**
 * The shapes that travel between the modules of the page. Documents of the server are those of `--json`; only what the
 * page reads is written down here.
 *
 * @typedef {Record<string, any>} Plan  a plan file's object, every key optional
 * @typedef {'train' | 'infer'} Kind
 *
 * @typedef {object} Job  all that decides a number: what a share link holds
 * @property {Kind} kind
 * @property {string} model  an id or short name of the catalogue; '' with a pasted config
 * @property {Plan | null} config  a pasted config.json
 * @property {Plan} train  the plan of a training run
 * @property {Plan} infer  the plan of `generate`
 * @property {string} engine  who serves: 'hf' or a serving engine
 * @property {Plan} engineOptions  options of the serving engine, by the names of its flags
 * @property {string} framework  whose defaults lie below the plan of a training run; '' for ours
 * @property {string} gpu  the card's name; '' when the plan describes its own
 *
 * @typedef {object} Setting  a row of the table of settings
 * @property {string} path  its place in a plan; `*` is the engine that spreads the model
 * @property {string} [place]  of a serving engine's: its place in the answer's plan
 * @property {string} flag
 * @property {{ type: string, off?: boolean, words?: { value: string, help?: string, sets?: Plan | null }[] }} kind
 * @property {string} help
 * @property {any} default
 * @property {string} from  what stands behind the default
 * @property {string} topic
 * @property {string[]} engines  who honours it
 *
 * @typedef {object} Problem  something wrong with a value
 * @property {string} [field]  a JSON pointer into the request
 * @property {string} message
 * @property {string} [hint]
 *
 * @typedef {{ allocated: number, reserved: number, process: number }} Totals
 * @typedef {{ level: 'guess' | 'sources' | 'measured', runs: number, words: string, missing?: string[], band?: { allocated: number, reserved: number } }} Confidence
 * @typedef {{ name: string, bytes: number }} Part
 * @typedef {{ phase: string, bytes: number, weights: number, gradients: number, optimizer: number }} Sample
 * @typedef {{ component: string, module: string, operation: string, shape: number[], dtype: string, bytes: number, count: number }} Tensor
 * @typedef {{ component: string, bytes: number, tensors: Tensor[], others: number }} Term
 * @typedef {{ component: string, operation: string, shape: number[], dtype: string, bytes: number }} TensorKind
 * @typedef {{ gpu: string, memory: number, fits: boolean, headroom: number, utilization: number }} Verdict
 * @typedef {{ name: string, cards: number } & Totals} Rank
 *
 * @typedef {object} Report  the document of `train --json` and `infer --json`
 * @property {{ name: string, family: string, parameters: number, trainable: number }} model
 * @property {Record<string, Plan>} plan
 * @property {Totals} totals
 * @property {Confidence} confidence
 * @property {Part[]} breakdown
 * @property {{ path: string, bytes: number }[]} modules
 * @property {string} peak_phase
 * @property {Term[]} terms
 * @property {Sample[]} timeline
 * @property {{ cards: number, ranks: Rank[], process: number, host: Part[], host_total: number }} [job]
 * @property {Budget[]} [budgets]  of serving engines with a pool of cache
 * @property {{ engine: string, estimate: { devices: Buffers[], host: Buffers, notes: string[] } }[]} [buffers]
 * @property {Verdict[]} verdicts
 * @property {{ key: string, value: string, from: string }[]} provenance
 * @property {string[]} notes
 *
 * @typedef {object} Events  the document of `/events`: what lives when
 * @property {number} events  of the whole run
 * @property {number} from
 * @property {number} to
 * @property {number} peak
 * @property {{ name: string, at: number }[]} phases
 * @property {number[]} moments  the events at which it is looked at: a column each
 * @property {number[]} bytes  alive at each
 * @property {TensorKind[]} kinds
 * @property {string[]} modules
 * @property {[number, number, number, number][]} lives  kind, module, first event, the one after the last
 * @property {Record<string, number[]>} others  what is not told one by one, at each moment by component
 *
 * @typedef {object} Planned  a plan that the planner found
 * @property {{ setting: string, from: any, to: any, why: string }[]} changes
 * @property {string} keeps
 * @property {Totals} totals
 * @property {boolean} fits
 * @property {{ seconds: number | null } | null} cost
 * @property {number} [slower]
 * @typedef {{ gpu: string, memory: number, gpus: number, plans: Planned[], nearest?: Planned, tried: number }} Plans
 *
 * @typedef {object} Found  what the other way round found
 * @property {string | null} answer  in words; null: nothing fits
 * @property {{ setting: string, value: any, beside?: Plan } | null} solved
 * @property {{ value: any, why: string } | null} [next]
 * @typedef {Report & Found} Solved
 *
 * @typedef {object} Budget  what a serving engine with a pool of cache does with a card
 * @property {string} engine
 * @property {number} granted
 * @property {Part[]} parts
 * @property {number} cache
 * @property {number} missing
 * @property {number} cache_tokens
 * @property {number} full_length
 * @property {number} full_bytes
 * @property {number} concurrency_thousandths
 * @property {boolean} fits
 * @property {number} largest_sequence
 * @property {string[]} notes
 *
 * @typedef {{ model: number, cache: number, compute: number, output: number }} Buffers
 *
 * @typedef {object} Suggestion
 * @property {string} text
 * @property {string} [cost]
 * @property {number} saves
 * @property {Partial<Totals>} totals
 * @property {boolean} fits
 * @property {Plan} changes  settings to lay over the plan
 *
 * @typedef {{ method: string, bytes: number | null, difference_percent?: number, why?: string }} Lens
 * @typedef {{ id: string, name?: string, family: string, parameters: number | null, short_names: string[] }} CatalogueModel
 */
export {};
