//! ggml's graph allocator: every node gets the smallest free block that holds it, or its parent's where it may
//! overwrite it, and gives it back after its last use (`ggml_gallocr_alloc_graph_impl` of ggml-alloc.c).

use super::tensor::{Graph, Id, Op};

/// Nodes and leafs as the scheduler hands them over, each with its backend.
pub(crate) struct Placed {
    pub(crate) graph: Graph,
    pub(crate) nodes: Vec<(Id, usize)>,
    pub(crate) leafs: Vec<(Id, usize)>,
}

/// What a backend's buffers are made of.
pub(crate) trait Buffer {
    /// What offsets are multiples of.
    fn alignment(&self, backend: usize) -> u64;
    /// Bytes a tensor wants there.
    fn wants(&self, backend: usize, graph: &Graph, id: Id) -> u64;
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    children: u32,
    views: u32,
    backend: usize,
    offset: u64,
    allocated: bool,
}

struct Allocator<'a> {
    placed: &'a Placed,
    buffers: &'a dyn Buffer,
    states: Vec<State>,
    spaces: Vec<Space>,
}

/// Bytes of the buffer of every backend.
pub(crate) fn sizes(placed: &Placed, backends: usize, buffers: &dyn Buffer) -> Vec<u64> {
    let states = vec![State::default(); placed.graph.tensors.len()];
    let spaces = (0..backends).map(|backend| Space::new(buffers.alignment(backend))).collect();
    let mut allocator = Allocator { placed, buffers, states, spaces };
    allocator.run();
    allocator.spaces.iter().map(|space| space.highest).collect()
}

impl Allocator<'_> {
    fn run(&mut self) {
        let placed = self.placed;
        for (leaf, backend) in &placed.leafs {
            self.allocate(*leaf, *backend);
        }
        for (node, backend) in &placed.nodes {
            let tensor = &placed.graph[*node];
            if let (Some((root, _)), true) = (tensor.view, tensor.op != Op::None) {
                self.states[root.0].views += 1;
            }
            if tensor.input {
                self.allocate(*node, *backend);
            }
            for source in &tensor.sources {
                self.states[source.0].children += 1;
                if placed.graph[*source].input {
                    self.allocate(*source, *backend);
                }
            }
        }
        for (node, backend) in &placed.nodes {
            for source in &placed.graph[*node].sources {
                self.allocate(*source, *backend);
            }
            self.allocate(*node, *backend);
            for source in &placed.graph[*node].sources {
                self.used(*source);
            }
        }
    }

    /// One use of a tensor is over.
    fn used(&mut self, id: Id) {
        let state = &mut self.states[id.0];
        state.children = state.children.saturating_sub(1);
        if state.children > 0 || state.views > 0 {
            return;
        }
        match self.placed.graph[id].view {
            Some((root, _)) => {
                let held = &mut self.states[root.0];
                held.views = held.views.saturating_sub(1);
                if held.views == 0 && held.children == 0 && held.allocated {
                    self.free(root);
                }
            }
            None if state.allocated => self.free(id),
            None => {}
        }
    }

    fn free(&mut self, id: Id) {
        if self.placed.graph[id].output {
            return;
        }
        let State { backend, offset, .. } = self.states[id.0];
        let bytes = self.wants(backend, id);
        self.spaces[backend].put(offset, bytes);
        self.states[id.0].allocated = false;
    }

    fn wants(&self, backend: usize, id: Id) -> u64 {
        self.buffers.wants(backend, &self.placed.graph, id).next_multiple_of(self.buffers.alignment(backend))
    }

    fn allocate(&mut self, id: Id, backend: usize) {
        let tensor = &self.placed.graph[id];
        if self.states[id.0].allocated || tensor.place.is_some() || tensor.view.is_some() {
            return;
        }
        self.states[id.0].allocated = true;
        if tensor.op.in_place() {
            for source in &tensor.sources {
                if self.overwrites(id, *source) {
                    return;
                }
            }
        }
        let bytes = self.wants(backend, id);
        let offset = self.spaces[backend].take(bytes);
        let state = &mut self.states[id.0];
        (state.backend, state.offset) = (backend, offset);
    }

    /// Takes the parent's place where nobody else needs it and both are laid out alike. A view never does: ggml asks
    /// whether the parent was allocated, which views are not.
    fn overwrites(&mut self, id: Id, parent: Id) -> bool {
        let graph = &self.placed.graph;
        let State { children, views, backend, offset, allocated } = self.states[parent.0];
        if !allocated || children != 1 || views != 0 || id == parent {
            return false;
        }
        if graph[parent].output || !graph[id].same_layout(&graph[parent]) {
            return false;
        }
        let (old, new) = (self.wants(backend, parent), self.wants(backend, id));
        self.states[parent.0].allocated = false;
        let state = &mut self.states[id.0];
        (state.backend, state.offset) = (backend, offset);
        if old > new {
            self.spaces[backend].put(offset + new, old - new);
        }
        true
    }
}

/// Free blocks in the order of their offsets; the last one has no end.
struct Space {
    free: Vec<(u64, u64)>,
    highest: u64,
    alignment: u64,
}

const ENDLESS: u64 = u64::MAX / 2;

impl Space {
    fn new(alignment: u64) -> Self {
        Self { free: vec![(0, ENDLESS)], highest: 0, alignment }
    }

    fn take(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.next_multiple_of(self.alignment);
        let last = self.free.len().saturating_sub(1);
        let mut best = last;
        let mut smallest = u64::MAX;
        for (index, (_, size)) in self.free.iter().enumerate().take(last) {
            if *size >= bytes && *size <= smallest {
                (best, smallest) = (index, *size);
            }
        }
        let Some(block) = self.free.get_mut(best) else { return 0 };
        let offset = block.0;
        *block = (offset.saturating_add(bytes), block.1.saturating_sub(bytes));
        if block.1 == 0 {
            self.free.remove(best);
        }
        self.highest = self.highest.max(offset.saturating_add(bytes));
        offset
    }

    fn put(&mut self, offset: u64, bytes: u64) {
        if bytes == 0 {
            // ggml inserts or extends by nothing; only a block of its own would matter, and it holds nothing.
            return;
        }
        let at = self.free.partition_point(|(start, _)| *start < offset);
        let joins_next = self.free.get(at).is_some_and(|(start, _)| *start == offset + bytes);
        let joins_last = at.checked_sub(1).and_then(|at| self.free.get(at)).is_some_and(|(s, n)| s + n == offset);
        match (joins_last, joins_next) {
            (true, true) => {
                let (_, next) = self.free.remove(at);
                self.free[at - 1].1 += bytes + next;
            }
            (true, false) => self.free[at - 1].1 += bytes,
            (false, true) => self.free[at] = (offset, bytes + self.free[at].1),
            (false, false) => self.free.insert(at, (offset, bytes)),
        }
    }
}
