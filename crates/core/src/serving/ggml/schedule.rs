//! ggml's scheduler: which backend computes a node, where the graph is cut, and what is copied across a cut
//! (`ggml_backend_sched_split_graph` of ggml-backend.cpp).

use super::allocate::Placed;
use super::tensor::{Graph, Id, Op, Place};

/// What the scheduler asks the backends. Devices are numbered from 0; the host comes last.
pub(crate) trait Backends {
    fn devices(&self) -> usize;
    /// Whether a device can compute a node; the host can compute all.
    fn supports(&self, device: usize, graph: &Graph, id: Id) -> bool;
    /// Whether a device wants a node whose weights lie on the host.
    fn offloads(&self, device: usize, graph: &Graph, id: Id) -> bool;
    /// Whether the weights of an operation say where it runs: too small ones do not.
    fn follows_weights(&self, op: Op) -> bool;
    /// Copies of every input that a pipeline over devices holds; 1 without one.
    fn copies(&self) -> usize;
}

/// Inputs of a stretch after which the next begins (`GGML_SCHED_MAX_SPLIT_INPUTS`).
const MOST_INPUTS: usize = 30;

struct Scheduler<'a> {
    graph: Graph,
    backends: &'a dyn Backends,
    /// The backend of every tensor.
    ids: Vec<Option<usize>>,
    host: usize,
}

/// A stretch of nodes on one backend, and what it copies.
struct Split {
    backend: usize,
    nodes: std::ops::Range<usize>,
    inputs: Vec<Id>,
}

/// Cuts a graph.
pub(crate) fn split(graph: Graph, backends: &dyn Backends) -> Placed {
    let ids = graph.tensors.iter().map(|tensor| tensor.backend).collect();
    let mut scheduler = Scheduler { graph, backends, ids, host: backends.devices() };
    scheduler.assign();
    scheduler.cut()
}

/// The backend of a tensor alone (`ggml_backend_sched_get_tensor_backend` after a split).
pub(crate) fn backends_of(graph: Graph, backends: &dyn Backends) -> Vec<Option<usize>> {
    let ids = graph.tensors.iter().map(|tensor| tensor.backend).collect();
    let mut scheduler = Scheduler { graph, backends, ids, host: backends.devices() };
    scheduler.assign();
    scheduler.ids
}

impl Scheduler<'_> {
    fn supports(&self, backend: usize, id: Id) -> bool {
        backend == self.host || self.backends.supports(backend, &self.graph, id)
    }

    /// Where a tensor lies already: its own buffer or that of the tensor it shows.
    fn place(&self, id: Id) -> Option<Place> {
        let owner = self.graph[id].view.map_or(id, |(root, _)| root);
        self.graph[owner].place
    }

    fn backend_at(&self, place: Place) -> usize {
        match place {
            Place::Device(device) => device,
            Place::Host => self.host,
        }
    }

    /// The backend that can compute `op` where `id` lies.
    fn runs_where(&self, id: Id, op: Id) -> Option<usize> {
        let backend = self.backend_at(self.place(id)?);
        self.supports(backend, op).then_some(backend)
    }

    /// What a node's own place, its being an input, or its weights say.
    fn current(&self, id: Id) -> Option<usize> {
        if let Some(backend) = self.runs_where(id, id) {
            return Some(backend);
        }
        if let Some(place) = self.place(id) {
            return Some(self.backend_at(place));
        }
        let tensor = &self.graph[id];
        if tensor.input {
            return Some(self.host);
        }
        if !self.backends.follows_weights(tensor.op) {
            return None;
        }
        let weight = tensor.sources.iter().copied().find(|source| self.graph[*source].weight)?;
        let own = self.runs_where(weight, id);
        if own == Some(self.host) {
            let wanted =
                |device: &usize| self.supports(*device, id) && self.backends.offloads(*device, &self.graph, id);
            return (0..self.host).find(wanted).or(own);
        }
        own
    }

    fn assign(&mut self) {
        for id in self.graph.leafs.clone().into_iter().chain(self.graph.nodes.clone()) {
            if self.ids[id.0].is_none() {
                self.ids[id.0] = self.current(id);
            }
        }
        let nodes = self.graph.nodes.clone();
        for host_too in [false, true] {
            self.spread(nodes.iter().copied(), host_too);
            self.spread(nodes.iter().rev().copied(), host_too);
        }
        for id in &nodes {
            if self.ids[id.0].is_none() && !self.graph[*id].op.looks() {
                self.ids[id.0] = self.most_sources(*id);
            }
        }
        for id in &nodes {
            if self.ids[id.0].is_none() {
                self.ids[id.0] = self.graph[*id].view.and_then(|(root, _)| self.ids[root.0]);
            }
            for source in self.graph[*id].sources.clone() {
                if self.ids[source.0].is_none() {
                    self.ids[source.0] = match self.graph[source].view {
                        Some((root, _)) => self.ids[root.0],
                        None => self.ids[id.0],
                    };
                }
            }
            if self.ids[id.0].is_none() {
                self.ids[id.0] = (0..=self.host).find(|backend| self.supports(*backend, *id));
            }
        }
    }

    /// Neighbours go where a node is; the host only in the second round.
    fn spread(&mut self, nodes: impl Iterator<Item = Id>, host_too: bool) {
        let mut current = None;
        for id in nodes {
            if self.graph[id].op.looks() {
                continue;
            }
            match (self.ids[id.0], current) {
                (Some(backend), _) => current = (host_too || backend != self.host).then_some(backend),
                (None, Some(backend)) if self.supports(backend, id) => self.ids[id.0] = Some(backend),
                _ => {}
            }
        }
    }

    /// The backend that can read most of a node's sources.
    fn most_sources(&self, id: Id) -> Option<usize> {
        let mut best = None;
        let mut most = -1;
        for backend in (0..=self.host).filter(|backend| self.supports(*backend, id)) {
            let known = |source: &&Id| {
                let root = self.graph[**source].view.map(|(root, _)| root);
                self.ids[source.0].is_some() || root.is_some_and(|root| self.ids[root.0].is_some())
            };
            let sources = self.graph[id].sources.iter();
            let count = sources.filter(known).filter(|source| self.readable(**source, backend)).count() as i64;
            if count > most {
                (best, most) = (Some(backend), count);
            }
        }
        best
    }

    /// Whether a backend can read a tensor where it lies or will lie.
    fn readable(&self, id: Id, backend: usize) -> bool {
        if let Some(place) = self.place(id) {
            return self.backend_at(place) == backend;
        }
        let root = || self.graph[id].view.and_then(|(root, _)| self.ids[root.0]);
        self.ids[id.0].or_else(root) == Some(backend)
    }

    fn backend(&self, id: Id) -> usize {
        self.ids[id.0].unwrap_or(self.host)
    }

    fn cut(mut self) -> Placed {
        let copies = self.backends.copies().max(1);
        let nodes = self.graph.nodes.clone();
        let first = nodes.iter().find(|id| !self.graph[**id].op.looks());
        let mut current = first.map_or(self.host, |id| self.backend(*id));
        let mut splits = vec![Split { backend: current, nodes: 0..0, inputs: Vec::new() }];
        // Copies of a tensor on a backend, and inputs of the graph that have several.
        let mut made: std::collections::BTreeMap<(Id, usize), Vec<Id>> = std::collections::BTreeMap::new();
        let mut inputs: Vec<Id> = Vec::new();
        for (index, id) in nodes.iter().copied().enumerate() {
            if self.graph[id].op.looks() {
                continue;
            }
            let backend = self.backend(id);
            let sources = self.graph[id].sources.clone();
            let busy = splits.last().is_some_and(|split| !split.inputs.is_empty());
            // Weights copied for an earlier node of the stretch can make room.
            let foreign = |source: &Id| self.graph[*source].weight && !self.readable(*source, current);
            let full = splits.last().is_some_and(|split| split.inputs.len() >= MOST_INPUTS);
            let copied = |source: &Id| !self.readable(*source, current) && !made.contains_key(&(*source, current));
            let crowded = full && sources.iter().any(copied);
            if backend != current || (busy && sources.iter().any(foreign)) || crowded {
                if let Some(split) = splits.last_mut() {
                    split.nodes.end = index;
                }
                splits.push(Split { backend, nodes: index..index, inputs: Vec::new() });
                current = backend;
            }
            for (at, source) in sources.into_iter().enumerate() {
                let own = self.backend(source);
                if self.graph[source].input && copies > 1 && !made.contains_key(&(source, own)) {
                    let all = (0..copies).map(|copy| if copy == 0 { source } else { self.held(source) }).collect();
                    self.graph[source].output = true;
                    made.insert((source, own), all);
                    inputs.push(source);
                }
                if own == current || self.readable(source, current) {
                    continue;
                }
                if let std::collections::btree_map::Entry::Vacant(place) = made.entry((source, current)) {
                    let copy = |_| if copies > 1 { self.held(source) } else { self.duplicate(source) };
                    place.insert((0..copies).map(copy).collect());
                    if let Some(split) = splits.last_mut() {
                        split.inputs.push(source);
                    }
                }
                if let Some(copy) = made.get(&(source, current)).and_then(|all| all.first()) {
                    self.graph[id].sources[at] = *copy;
                }
            }
        }
        if let Some(split) = splits.last_mut() {
            split.nodes.end = nodes.len();
        }
        self.laid_out(&splits, &made, &inputs, copies > 1)
    }

    fn duplicate(&mut self, of: Id) -> Id {
        let id = self.graph.like(of);
        self.ids.push(None);
        id
    }

    /// A copy that stays: an input nobody may overwrite.
    fn held(&mut self, of: Id) -> Id {
        let id = self.duplicate(of);
        (self.graph[id].input, self.graph[id].output) = (true, true);
        id
    }

    fn laid_out(
        mut self,
        splits: &[Split],
        made: &std::collections::BTreeMap<(Id, usize), Vec<Id>>,
        inputs: &[Id],
        pipelined: bool,
    ) -> Placed {
        let (mut nodes, mut leafs) = (Vec::new(), Vec::new());
        let all = |id: Id, backend: usize| made.get(&(id, backend)).cloned().unwrap_or_default();
        for split in splits {
            for input in &split.inputs {
                let dependency = self.graph.dependency(*input);
                nodes.push((dependency, self.backend(*input)));
                nodes.extend(all(*input, split.backend).first().map(|copy| (*copy, split.backend)));
            }
            nodes.extend(self.graph.nodes[split.nodes.clone()].iter().map(|id| (*id, self.backend(*id))));
        }
        if pipelined {
            for input in inputs {
                let backend = self.backend(*input);
                leafs.extend(all(*input, backend).into_iter().map(|copy| (copy, backend)));
            }
            for split in splits {
                for input in &split.inputs {
                    leafs.extend(all(*input, split.backend).into_iter().map(|copy| (copy, split.backend)));
                }
            }
        }
        leafs.extend(self.graph.leafs.iter().map(|leaf| (*leaf, self.backend(*leaf))));
        Placed { graph: self.graph, nodes, leafs }
    }
}
