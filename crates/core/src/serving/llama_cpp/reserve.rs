//! What a context reserves: caches, and the largest graph on every backend (`llama_context` and `sched_reserve`).

use super::architectures::{self, Architecture};
use super::facts::Facts;
use super::file::ModelFile;
use super::graph::{Builder, Fused, Shape};
use super::place::{self, Placement};
use super::{Build, Flash, LlamaCppError, LlamaCppPlan, Split, element_kind};
use crate::serving::ggml::allocate::{self, Buffer};
use crate::serving::ggml::cuda;
use crate::serving::ggml::schedule::{self, Backends};
use crate::serving::ggml::tensor::{Graph, Id, Kind, Op, Place};

/// Copies of inputs that a pipeline over devices keeps (`GGML_SCHED_MAX_COPIES`).
const COPIES: usize = 4;

/// A context's settings (`llama_cparams`).
#[derive(Debug, Clone)]
pub(super) struct Session {
    pub(super) placed: Placement,
    pub(super) devices: usize,
    pub(super) capability: u64,
    /// All layers and the output are on devices.
    pub(super) full: bool,
    pub(super) flash: bool,
    /// Values are stored transposed: without flash attention.
    pub(super) transposed: bool,
    pub(super) unified: bool,
    pub(super) keys: Kind,
    pub(super) values: Kind,
    pub(super) context_per_sequence: u64,
    pub(super) streams: u64,
    pub(super) window_cells: u64,
    pub(super) offloads_cache: bool,
    offloads_operations: bool,
    copies: usize,
    /// Whether one kernel computes gated delta rules, of a token and of many.
    pub(super) fused_rule: [bool; 2],
    pub(super) build: Build,
}

/// Keys and values of a layer.
pub(super) struct Cache {
    pub(super) keys: [u64; 4],
    pub(super) values: Option<[u64; 4]>,
}

impl Session {
    fn new(plan: &LlamaCppPlan, facts: &Facts, placed: Placement) -> Result<Self, LlamaCppError> {
        let parallel = plan.parallel.max(1);
        let whole = if plan.context == 0 { facts.positions } else { plan.context };
        let flash = plan.flash_attention != Flash::Off;
        let step = plan.build.step(flash);
        // Before, sequences always shared their cells.
        let unified = plan.unified || !plan.build.streams();
        let each = match (unified, step) {
            (true, _) => whole,
            (false, 1) => whole.div_ceil(parallel),
            (false, _) => whole / parallel,
        };
        let context = each.max(1).next_multiple_of(step);
        let micro_batch = plan.micro_batch.min(plan.batch).min(whole.max(1));
        let seen = facts.window.saturating_mul(if unified { parallel } else { 1 }).saturating_add(micro_batch);
        let cut = !plan.full_windows && plan.build.windows();
        let layers = facts.all_layers as u64;
        let full = plan.gpu_layers > layers;
        let pipelined =
            plan.devices() > 1 && full && plan.split == Split::Layer && plan.offload_cache && plan.overrides.is_empty();
        Ok(Self {
            placed,
            devices: plan.devices(),
            capability: plan.capability,
            full,
            flash,
            transposed: !flash,
            unified,
            keys: element_kind(&plan.key_type)?,
            values: element_kind(&plan.value_type)?,
            context_per_sequence: context,
            streams: if unified { 1 } else { parallel },
            window_cells: if cut { context.min(seen).next_multiple_of(step) } else { context },
            offloads_cache: plan.offload_cache,
            offloads_operations: plan.offload_operations,
            copies: if pipelined { COPIES } else { 1 },
            fused_rule: [true; 2],
            build: plan.build,
        })
    }

    /// Cells of a stream.
    pub(super) fn cells(&self, sliding: bool) -> u64 {
        if sliding { self.window_cells } else { self.context_per_sequence }
    }

    /// The layer whose cache a layer reads: its own, or that of the last one of its kind that has one.
    pub(super) fn cached_layer(&self, facts: &Facts, layer: usize) -> usize {
        if layer < facts.caching {
            return layer;
        }
        facts.caching.saturating_sub(if facts.slides(layer) { 2 } else { 1 })
    }

    pub(super) fn cache_of(&self, facts: &Facts, layer: usize) -> Cache {
        let cells = self.cells(facts.slides(layer));
        let keys = [facts.keys(layer), cells, self.streams, 1];
        let wide = if self.transposed { facts.widest_values() } else { facts.values(layer) };
        Cache {
            keys,
            values: (!facts.compressed() || self.build.keeps_values()).then_some([wide, cells, self.streams, 1]),
        }
    }

    pub(super) fn cache_place(&self, layer: usize) -> Place {
        if self.offloads_cache { self.placed.layer(layer) } else { Place::Host }
    }

    /// Sizes of the Hadamard matrices for keys and values of the layers of one kind.
    pub(super) fn turned(&self, facts: &Facts, sliding: bool) -> (Option<u64>, Option<u64>) {
        if !self.build.turns_cache() {
            return (None, None);
        }
        let own = (0..facts.layers.min(facts.caching)).filter(|layer| facts.slides(*layer) == sliding);
        let own: Vec<usize> = own.collect();
        let same = |width: &dyn Fn(usize) -> u64| {
            let first = own.first().map_or(0, |layer| width(*layer));
            (first > 0 && own.iter().all(|layer| width(*layer) == first)).then_some(first)
        };
        let keys = same(&|layer| facts.key(layer)).filter(|_| self.keys.quantised() && facts.key(0).is_multiple_of(64));
        let keys = keys.map(|width| {
            let mut size = 64;
            while width.is_multiple_of(size * 2) {
                size *= 2;
            }
            size
        });
        let values = same(&|layer| facts.value(layer))
            .filter(|_| self.values.quantised() && facts.value(0).is_multiple_of(64))
            .map(|_| 64);
        (keys, values)
    }
}

impl Backends for Session {
    fn devices(&self) -> usize {
        self.devices
    }

    fn supports(&self, device: usize, graph: &Graph, id: Id) -> bool {
        let elsewhere = |source: &Id| matches!(graph[*source].place, Some(Place::Device(at)) if at != device);
        !graph[id].sources.iter().any(elsewhere) && cuda::supports(graph, id, self.capability)
    }

    fn offloads(&self, _device: usize, graph: &Graph, id: Id) -> bool {
        self.offloads_operations && self.build.offloads() && cuda::offloads(graph, id)
    }

    fn follows_weights(&self, op: Op) -> bool {
        // Factors of rotary embeddings and attention sinks are too small to decide.
        op != Op::Rope && (op != Op::FlashAttention || !self.build.frees_sinks())
    }

    fn copies(&self) -> usize {
        self.copies
    }
}

impl Buffer for Session {
    fn alignment(&self, backend: usize) -> u64 {
        if backend < self.devices { cuda::ALIGNMENT } else { cuda::HOST_ALIGNMENT }
    }

    fn wants(&self, backend: usize, graph: &Graph, id: Id) -> u64 {
        if backend < self.devices {
            cuda::wants(graph, id, self.capability, self.build.copies_in_graph())
        } else if self.build.parts_inputs() && graph[id].input {
            0
        } else {
            graph[id].bytes()
        }
    }
}

/// Every buffer that llama.cpp's log names, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LoggedBuffer {
    /// `model`, `KV`, `RS`, `compute`, `output`.
    pub kind: &'static str,
    /// `CUDA0`, `CPU_Mapped`, `CPU`, `CUDA_Host`.
    pub device: String,
    /// Its bytes.
    pub bytes: u64,
}

/// Bytes of weights on every device, and on the host.
pub(super) fn weights(plan: &LlamaCppPlan, file: &ModelFile) -> Result<(Vec<u64>, u64), LlamaCppError> {
    let (rules, _) = architectures::of(&file.architecture);
    let facts = Facts::of(file, rules).map_err(LlamaCppError::File)?;
    let placed = Placement::new(plan, file, facts.all_layers, facts.layers)?;
    let (devices, host) = placed.weights(plan, file);
    Ok((devices, host.bytes))
}

/// Bytes of caches and states on every device, then on the host.
pub(super) fn held(plan: &LlamaCppPlan, file: &ModelFile) -> Result<Vec<u64>, LlamaCppError> {
    let (rules, _) = architectures::of(&file.architecture);
    let facts = Facts::of(file, rules).map_err(LlamaCppError::File)?;
    let placed = Placement::new(plan, file, facts.all_layers, facts.layers)?;
    let session = Session::new(plan, &facts, placed)?;
    let mut held = vec![0u64; session.devices + 1];
    let all = [caches(&session, &facts, false), caches(&session, &facts, true), states(&session, &facts, kept(plan))];
    for (place, bytes) in all.into_iter().flatten() {
        let at = if let Place::Device(at) = place { at } else { session.devices };
        held.iter_mut().skip(at).take(1).for_each(|sum| *sum = sum.saturating_add(bytes));
    }
    Ok(held)
}

/// The buffers of a model, in the order of the log, and what a reader should know.
pub fn buffers(plan: &LlamaCppPlan, file: &ModelFile) -> Result<(Vec<LoggedBuffer>, Vec<String>), LlamaCppError> {
    plan.check()?;
    let (rules, _) = architectures::of(&file.architecture);
    let facts = Facts::of(file, rules).map_err(LlamaCppError::File)?;
    let placed = Placement::new(plan, file, facts.all_layers, facts.layers)?;
    let mut session = Session::new(plan, &facts, placed)?;
    let mut notes = Vec::new();
    if !file.is_modelled() {
        notes.push(format!("the graph of {} is not modelled: compute buffers are those of a Llama", file.architecture));
    }
    let parts = (file, &facts, rules);
    if plan.flash_attention == Flash::Auto && !runs_where_layers_are(parts, &session, plan, (Fused::Attention, 1)) {
        session.flash = false;
        // Builds have kernels for keys and values of one type (`GGML_CUDA_FA_ALL_QUANTS` is off).
        let why = match session.keys == session.values {
            true => "the card has no kernel for these heads and this cache".to_owned(),
            false => "there are kernels only where keys (-ctk) and values (-ctv) have one type".to_owned(),
        };
        notes.push(format!("flash attention is off: {why}"));
    }
    // Each is asked for with what was found of those before it (`resolve_fused_ops`).
    let rules_of_states = [(Fused::RuleOfToken, 1), (Fused::RuleOfPrompt, 16)];
    for (at, probe) in rules_of_states.into_iter().enumerate().filter(|_| facts.recurs_anywhere()) {
        session.fused_rule[at] = runs_where_layers_are(parts, &session, plan, probe);
    }
    if !session.flash && session.values.quantised() {
        return Err(LlamaCppError::Unsupported(
            "a quantised cache of values needs flash attention, and flash attention keys of the same type (-ctk)",
        ));
    }
    let mut all = Vec::new();
    let (devices, host) = session.placed.weights(plan, file);
    let place_name = |place: Place| match place {
        Place::Device(at) => format!("CUDA{at}"),
        Place::Host => "CPU".to_owned(),
    };
    let mut push = |kind: &'static str, device: String, bytes: u64| {
        if bytes > 0 {
            all.push(LoggedBuffer { kind, device, bytes });
        }
    };
    push("model", if plan.mapped { "CPU_Mapped" } else { "CUDA_Host" }.to_owned(), host.bytes);
    for (at, bytes) in devices.into_iter().enumerate() {
        push("model", format!("CUDA{at}"), bytes);
    }
    let output = plan.parallel.max(1).saturating_mul(facts.vocabulary).saturating_mul(4);
    let pinned = if session.placed.output() == Place::Host { "CPU" } else { "CUDA_Host" };
    push("output", pinned.to_owned(), output);
    if !rules.encoder || plan.build.caches_all() {
        for sliding in [false, true] {
            for (place, bytes) in caches(&session, &facts, sliding) {
                push("KV", place_name(place), bytes);
            }
        }
        for (place, bytes) in states(&session, &facts, kept(plan)) {
            push("RS", place_name(place), bytes);
        }
    }
    for (backend, bytes) in compute(plan, file, &facts, rules, &session).into_iter().enumerate() {
        let device = if backend < session.devices { format!("CUDA{backend}") } else { "CUDA_Host".to_owned() };
        push("compute", device, bytes);
    }
    Ok((all, notes))
}

/// Bytes of the caches of layers that slide or do not.
fn caches(session: &Session, facts: &Facts, sliding: bool) -> Vec<(Place, u64)> {
    let own = |layer: &usize| facts.slides(*layer) == sliding && facts.attends(*layer);
    by_place(session, (0..facts.layers.min(facts.caching)).filter(own), |layer, place| {
        let cache = session.cache_of(facts, layer);
        let keys = place::cached(session.keys, cache.keys, place);
        keys.saturating_add(cache.values.map_or(0, |ne| place::cached(session.values, ne, place)))
    })
}

/// Bytes of states of constant size, in fp32, for every sequence (llama-memory-recurrent.cpp).
fn states(session: &Session, facts: &Facts, sequences: u64) -> Vec<(Place, u64)> {
    by_place(session, (0..facts.layers).filter(|layer| facts.recurs(*layer)), |_, place| {
        let held = facts.states.map(|size| place::cached(Kind::F32, [size, sequences, 1, 1], place));
        held[0].saturating_add(held[1])
    })
}

/// States that are kept: of every sequence one, and one for every token that may have to be taken back (`n_rs_seq`).
fn kept(plan: &LlamaCppPlan) -> u64 {
    plan.parallel.max(1).saturating_mul(plan.ahead.saturating_add(1))
}

/// Sums over layers by where these keep what they keep, the host's first as in the log.
fn by_place(
    session: &Session,
    layers: impl Iterator<Item = usize>,
    bytes: impl Fn(usize, Place) -> u64,
) -> Vec<(Place, u64)> {
    let mut sums: Vec<(Place, u64)> =
        std::iter::once(Place::Host).chain((0..session.devices).map(Place::Device)).map(|place| (place, 0)).collect();
    for layer in layers {
        let place = session.cache_place(layer);
        if let Some((_, sum)) = sums.iter_mut().find(|(at, _)| *at == place) {
            *sum = sum.saturating_add(bytes(layer, place));
        }
    }
    sums
}

/// Bytes of the compute buffer of every backend: a prompt's and a token's graph share it.
fn compute(plan: &LlamaCppPlan, file: &ModelFile, facts: &Facts, rules: &Architecture, session: &Session) -> Vec<u64> {
    let sequences = plan.parallel.max(1);
    let whole = if plan.context == 0 { facts.positions } else { plan.context };
    let batch = if facts.causal { plan.batch.min(whole) } else { plan.batch };
    let tokens = plan.micro_batch.min(batch).min(session.context_per_sequence.saturating_mul(session.streams)).max(1);
    let few = plan.outputs.filter(|_| plan.build.few_logits());
    let most = few.unwrap_or(batch).max(1);
    let shapes = [
        Shape { tokens, sequences, outputs: tokens.min(most) },
        Shape { tokens: sequences, sequences, outputs: sequences },
    ];
    let mut largest = vec![0; session.devices + 1];
    for shape in shapes {
        let built = Builder::build((file, facts, rules), session, shape);
        let placed = schedule::split(built.graph, session);
        let sizes = allocate::sizes(&placed, session.devices + 1, session);
        largest.iter_mut().zip(sizes).for_each(|(most, size)| *most = size.max(*most));
    }
    largest
}

/// Whether what one kernel computes runs on the device of its layer, everywhere, in a batch of so many tokens a sequence.
fn runs_where_layers_are(
    parts: (&ModelFile, &Facts, &Architecture),
    session: &Session,
    plan: &LlamaCppPlan,
    (what, each): (Fused, u64),
) -> bool {
    let sequences = plan.parallel.max(1);
    let tokens = each.saturating_mul(sequences);
    let built = Builder::build(parts, session, Shape { tokens, sequences, outputs: tokens });
    let fused = built.fused.clone();
    let backends = schedule::backends_of(built.graph, session);
    fused.iter().filter(|(kind, ..)| *kind == what).all(|(_, layer, id)| {
        let wanted = match session.placed.layer(*layer) {
            Place::Device(at) => at,
            Place::Host => session.devices,
        };
        backends.get(id.0).copied().flatten() == Some(wanted)
    })
}
