//! The kernels that Inductor makes of a graph, in order, and the life of their buffers (torch/_inductor/scheduler.py,
//! codegen/wrapper.py): what libraries read and write, what is returned and what reductions give has memory; everything else
//! is computed inside a kernel.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::graph::{Graph, Id, Kind};
use super::pad;
use super::reorder::{self, Work};
use crate::dtype::DType;

/// How far ahead a kernel looks for others that read the same (`are_long_distant_nodes`).
const NEAR: usize = 64;

/// One kernel.
#[derive(Debug)]
pub(super) struct Launch {
    /// What it writes, and whose memory it takes over.
    pub(super) outputs: SmallVec<[(Id, Option<Id>); 2]>,
    /// Buffers that nobody needs after it.
    pub(super) frees: SmallVec<[Id; 4]>,
    /// The node of a library's kernel.
    pub(super) library: Option<Id>,
}

/// A kernel and the buffers it reads.
type Planned = (Launch, SmallVec<[Id; 4]>);

/// A graph of its own: the forward or the backward part.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) launches: Vec<Launch>,
    /// Where each wanted result lies.
    pub(super) results: Vec<Option<Id>>,
}

/// What is known of each node while a schedule is made.
struct Planner<'a> {
    graph: &'a Graph,
    given: Vec<bool>,
    needed: Vec<bool>,
    buffered: Vec<bool>,
}

/// The schedule of the nodes in `order` between what is given and what is wanted; of what is given, `donated` may be overwritten.
pub(super) fn schedule(graph: &Graph, order: &[Id], given: &[Id], wanted: &[Option<Id>], donated: &[Id]) -> Schedule {
    let count = graph.nodes.len();
    let mark = |ids: &mut dyn Iterator<Item = Id>| {
        let mut marks = vec![false; count];
        ids.for_each(|id| marks[id as usize] = true);
        marks
    };
    let mut planner = Planner {
        graph,
        given: mark(&mut given.iter().copied()),
        needed: mark(&mut order.iter().copied()),
        buffered: vec![false; count],
    };
    let donated = mark(&mut donated.iter().copied());
    planner.find_buffers(order, wanted);
    let kept = mark(&mut wanted.iter().flatten().map(|id| planner.base(*id)));
    let launches = planner.launches(order);
    let (order, memory) = reorder::order(&planner.work(&launches, &kept, &donated));
    let mut launches: Vec<Option<Planned>> = launches.into_iter().map(Some).collect();
    let mut launches: Vec<Planned> = order.iter().filter_map(|at| launches[*at].take()).collect();
    let mut last = vec![usize::MAX; count];
    for (at, (launch, reads)) in launches.iter().enumerate() {
        reads.iter().chain(launch.outputs.iter().map(|(id, _)| id)).for_each(|id| last[*id as usize] = at);
    }
    for (at, (launch, reads)) in launches.iter_mut().enumerate() {
        // What another kernel wrote into in place is not taken over.
        let scattered = |id: Id| graph.nodes[id as usize].kind == Kind::Scatter;
        let owned = |id: Id| (planner.buffered[id as usize] || donated[id as usize]) && !scattered(id);
        let mut dying: SmallVec<[Id; 4]> =
            reads.iter().copied().filter(|id| last[*id as usize] == at && !kept[*id as usize]).collect();
        // What the kernel itself alone reads of what it wrote, later results may lie in.
        let mut own: SmallVec<[Id; 4]> = SmallVec::new();
        if launch.library.is_none() {
            for (output, place) in &mut launch.outputs {
                let node = |id: Id| &graph.nodes[id as usize];
                let large = |id: Id| node(id).bytes() == node(*output).bytes() || pad::within(node(id), node(*output));
                let zeros = planner.zeros(*output);
                let fits = |id: &Id| zeros == Some(*id) || owned(*id) && large(*id) && planner.in_place(*output, *id);
                if let Some(found) = own.iter().position(fits) {
                    *place = Some(own.remove(found));
                } else if let Some(found) = dying.iter().position(fits) {
                    *place = Some(dying.remove(found));
                }
                own.extend((last[*output as usize] == at && !kept[*output as usize]).then_some(*output));
            }
        } else {
            let outputs = launch.outputs.iter().map(|(id, _)| *id);
            own.extend(outputs.filter(|id| last[*id as usize] == at && !kept[*id as usize]));
        }
        dying.extend(own);
        launch.frees = dying;
    }
    let results = wanted.iter().map(|id| id.map(|id| planner.base(id))).collect();
    let mut launches: Vec<Launch> = launches.into_iter().map(|(launch, _)| launch).collect();
    planner.drop_own(&mut launches);
    planner.reuse(&mut launches, memory, &kept);
    Schedule { launches, results }
}

impl Planner<'_> {
    /// What only its own kernel reads has no memory (`remove_kernel_local_buffers`), but where another result lies in it.
    fn drop_own(&self, launches: &mut [Launch]) {
        for launch in launches.iter_mut().filter(|launch| launch.library.is_none()) {
            let Launch { outputs, frees, .. } = launch;
            let element = |id: Id| matches!(self.graph.nodes[id as usize].kind, Kind::Pointwise(_) | Kind::Random(_));
            let local: SmallVec<[Id; 4]> = outputs
                .iter()
                .filter(|(id, place)| place.is_none() && element(*id) && frees.contains(id))
                .map(|(id, _)| *id)
                .collect();
            outputs.retain(|(id, _)| !local.contains(id));
            frees.retain(|id| !local.contains(id));
        }
    }

    /// What is freed waits for the next buffer of its type and size, unless that would be more memory than the most that is
    /// estimated (codegen/wrapper.py, `should_reuse_buffer`, since torch 2.9).
    fn reuse(&self, launches: &mut [Launch], mut memory: Vec<u64>, kept: &[bool]) {
        let most = memory.iter().copied().max().unwrap_or(0);
        let mut pool: BTreeMap<(DType, u64), Vec<(Id, usize)>> = BTreeMap::new();
        for at in 0..launches.len() {
            let library = launches[at].library;
            // Other kernels of libraries make their results themselves.
            let planned = library.is_none_or(|id| self.graph.nodes[id as usize].kind == Kind::Product);
            for output in 0..launches[at].outputs.len() {
                let (id, place) = launches[at].outputs[output];
                if !planned || place.is_some() {
                    continue;
                }
                let key = self.reuse_key(id, kept);
                let Some((old, since)) = pool.get_mut(&key).and_then(Vec::pop) else { continue };
                let between = &mut memory[since + 1..at];
                let fits = self.graph.reuses_all || between.iter().all(|memory| memory + key.1 <= most);
                if !fits {
                    pool.entry(key).or_default().push((old, since));
                    continue;
                }
                between.iter_mut().for_each(|memory| *memory += key.1);
                launches[at].outputs[output].1 = Some(old);
                launches[since].frees.retain(|id| *id != old);
            }
            for id in &launches[at].frees {
                if self.buffered[*id as usize] && !self.graph.nodes[*id as usize].kind.is_tuple() {
                    pool.entry(self.reuse_key(*id, kept)).or_default().push((*id, at));
                }
            }
        }
    }

    /// Type and bytes of a buffer as it is laid out.
    fn reuse_key(&self, id: Id, kept: &[bool]) -> (DType, u64) {
        let node = &self.graph.nodes[id as usize];
        let plain = node.kind.is_extern() || matches!(node.kind, Kind::Item(_)) || kept[id as usize];
        let shape = if plain { node.shape } else { pad::laid(node.shape, node.dtype) };
        (node.dtype, shape.elements().saturating_mul(node.dtype.size()))
    }

    /// The node whose memory a node shows.
    fn base(&self, mut id: Id) -> Id {
        while !self.given[id as usize] && self.graph.nodes[id as usize].kind.is_view() {
            id = self.graph.nodes[id as usize].inputs[0];
        }
        id
    }

    /// The zeros that rows are added into, where a kernel of its own makes them.
    fn zeros(&self, id: Id) -> Option<Id> {
        let node = &self.graph.nodes[id as usize];
        let first = node.inputs.first().copied().filter(|_| node.kind == Kind::Scatter);
        first.filter(|first| matches!(self.graph.nodes[*first as usize].kind, Kind::Zeros(_)))
    }

    fn find_buffers(&mut self, order: &[Id], wanted: &[Option<Id>]) {
        let mut buffered = vec![false; self.graph.nodes.len()];
        wanted.iter().flatten().for_each(|id| buffered[self.base(*id) as usize] = true);
        for &id in order {
            let node = &self.graph.nodes[id as usize];
            // A padded operand reads what has memory of its own.
            if node.kind.is_extern() || matches!(node.kind, Kind::Kept("pad rows" | "pad columns")) {
                node.inputs.iter().for_each(|input| buffered[self.base(*input) as usize] = true);
            }
            if node.kind.is_extern()
                || matches!(node.kind, Kind::Item(_) | Kind::Reduce(_) | Kind::Scatter | Kind::Random(_))
            {
                buffered[id as usize] = true;
            }
            if node.kind == Kind::Pointwise("add to a gradient") {
                buffered[id as usize] = true;
            }
            if let Some(zeros) = self.zeros(id) {
                buffered[zeros as usize] = true;
            }
        }
        for (at, mark) in buffered.iter_mut().enumerate() {
            *mark &= self.needed[at] && !self.given[at];
        }
        self.buffered = buffered;
        self.write_down_sums(order);
    }

    /// What reads many buffers and is used twice is written down, and what reads very many in any case (`mark_reuse`,
    /// `has_exceeded_max_reads` of torch/_inductor/ir.py).
    fn write_down_sums(&mut self, order: &[Id]) {
        let mut users = vec![0u32; self.graph.nodes.len()];
        for &id in order {
            self.graph.nodes[id as usize].inputs.iter().for_each(|input| users[*input as usize] += 1);
        }
        let mut reads: Vec<SmallVec<[Id; 4]>> = vec![SmallVec::new(); self.graph.nodes.len()];
        for &id in order {
            let node = &self.graph.nodes[id as usize];
            if self.buffered[id as usize] || !matches!(node.kind, Kind::Pointwise(_)) {
                continue;
            }
            let mut own: SmallVec<[Id; 4]> = SmallVec::new();
            for input in &node.inputs {
                let base = self.base(*input);
                let written = self.given[base as usize] || self.buffered[base as usize];
                let from: &[Id] = if written { &[base] } else { &reads[base as usize] };
                from.iter().for_each(|read| {
                    if !own.contains(read) {
                        own.push(*read);
                    }
                });
            }
            self.buffered[id as usize] = own.len() > 8 || own.len() > 4 && users[id as usize] > 1;
            reads[id as usize] = own;
        }
    }

    /// The buffers that the kernel of a node reads, through all that is computed inside it.
    fn reads(&self, id: Id, found: &mut SmallVec<[Id; 4]>) {
        for input in &self.graph.nodes[id as usize].inputs {
            let base = self.base(*input);
            if self.given[base as usize] || self.buffered[base as usize] {
                if !found.contains(&base) {
                    found.push(base);
                }
            } else {
                self.reads(base, found);
            }
        }
    }

    /// How many elements a kernel goes over.
    fn domain(&self, id: Id) -> u64 {
        let node = &self.graph.nodes[id as usize];
        match (node.kind, node.inputs.first()) {
            (Kind::Reduce(_), Some(input)) => self.graph.nodes[*input as usize].shape.elements(),
            _ => node.shape.elements(),
        }
    }

    fn stands_alone(&self, id: Id) -> bool {
        matches!(
            self.graph.nodes[id as usize].kind,
            Kind::Zeros(_) | Kind::Scatter | Kind::Reduce("column sum" | "sum of all" | "amax of all" | "column amax")
        )
    }

    /// Whether what is computed reads each element of a buffer where it is written, so that it may be written over.
    fn in_place(&self, id: Id, over: Id) -> bool {
        let moves = |kind: Kind| {
            matches!(
                kind,
                Kind::Scatter
                    | Kind::Join
                    | Kind::Kept(_)
                    | Kind::Pointwise(
                        "rotate back" | "clone" | "sum of heads" | "slice_backward" | "index" | "sum of experts"
                    )
            )
        };
        let mut found = false;
        let mut open = vec![(id, false)];
        while let Some((id, moved)) = open.pop() {
            let node = &self.graph.nodes[id as usize];
            let moved = moved || moves(node.kind);
            for input in &node.inputs {
                let base = self.base(*input);
                if base == over && moved {
                    return false;
                }
                found |= base == over;
                if !self.given[base as usize] && !self.buffered[base as usize] {
                    open.push((*input, moved));
                }
            }
        }
        found
    }

    /// Kernels and buffers for [`reorder`]; parameters are never freed, gradients that come in are. What is added into zeros
    /// has no memory of its own, and who reads it reads those.
    fn work(&self, launches: &[Planned], kept: &[bool], donated: &[bool]) -> Work {
        let sizes = self.graph.nodes.iter().enumerate().map(|(at, node)| {
            let freed = node.kind == Kind::Tangent || donated[at] || self.buffered[at];
            if freed && !node.kind.is_tuple() && self.zeros(at as Id).is_none() { node.bytes() } else { 0 }
        });
        let numbers = |ids: &mut dyn Iterator<Item = Id>| ids.map(|id| id as usize).collect::<Vec<usize>>();
        let behind = |reads: &SmallVec<[Id; 4]>| {
            numbers(&mut reads.iter().flat_map(|id| std::iter::once(*id).chain(self.zeros(*id))))
        };
        let mut returned = kept.to_vec();
        (0..kept.len())
            .filter(|at| kept[*at])
            .filter_map(|at| self.zeros(at as Id))
            .for_each(|id| returned[id as usize] = true);
        Work {
            sizes: sizes.collect(),
            reads: launches.iter().map(|(_, reads)| behind(reads)).collect(),
            makes: launches.iter().map(|(launch, _)| numbers(&mut launch.outputs.iter().map(|(id, _)| *id))).collect(),
            returned,
        }
    }

    fn launches(&self, order: &[Id]) -> Vec<Planned> {
        let mut ready = self.given.clone();
        let mut found = Vec::new();
        let computed: Vec<Id> = order.iter().copied().filter(|id| self.buffered[*id as usize]).collect();
        let all: Vec<SmallVec<[Id; 4]>> = computed
            .iter()
            .map(|id| {
                let mut reads = SmallVec::new();
                self.reads(*id, &mut reads);
                reads
            })
            .collect();
        for (at, &id) in computed.iter().enumerate() {
            if ready[id as usize] {
                continue;
            }
            let kind = self.graph.nodes[id as usize].kind;
            let mut reads = all[at].clone();
            let mut outputs: SmallVec<[(Id, Option<Id>); 2]> = SmallVec::new();
            outputs.push((id, None));
            ready[id as usize] = true;
            if kind.is_extern() {
                // Results of one kernel are there together.
                let items = computed[at + 1..].iter().take(NEAR).filter(|next| {
                    let node = &self.graph.nodes[**next as usize];
                    matches!(node.kind, Kind::Item(_)) && node.inputs[0] == id
                });
                for item in items {
                    outputs.push((*item, None));
                    ready[*item as usize] = true;
                }
            } else if kind == Kind::Reduce("column sum") {
                // Sums of columns that read a whole buffer in common are one kernel, wherever in the graph their inputs are made.
                let domain = self.domain(id);
                let whole = |read: &Id| self.graph.nodes[*read as usize].shape.elements() == domain;
                for (next, others) in computed[at + 1..].iter().zip(&all[at + 1..]).take(NEAR) {
                    let node = &self.graph.nodes[*next as usize];
                    let alike = node.kind == kind && self.domain(*next) == domain && !ready[*next as usize];
                    if alike && others.iter().any(|read| whole(read) && reads.contains(read)) {
                        ready[*next as usize] = true;
                        others.iter().for_each(|read| {
                            if !reads.contains(read) {
                                reads.push(*read);
                            }
                        });
                        outputs.push((*next, None));
                    }
                }
            } else if !self.stands_alone(id) {
                let domain = self.domain(id);
                let mut grown = true;
                while grown {
                    grown = false;
                    for (next, others) in computed[at + 1..].iter().zip(&all[at + 1..]).take(NEAR) {
                        let node = &self.graph.nodes[*next as usize];
                        let same = self.domain(*next) == domain
                            || reads.len() < 8
                                && node.shape.last() == 1
                                && node.shape.elements() < domain
                                && outputs.iter().any(|(id, _)| others.contains(id));
                        let joins = !ready[*next as usize]
                            && !node.kind.is_extern()
                            && !matches!(node.kind, Kind::Item(_))
                            && !self.stands_alone(*next)
                            && same
                            && others.iter().all(|read| ready[*read as usize])
                            && others
                                .iter()
                                .any(|read| reads.contains(read) || outputs.iter().any(|(id, _)| id == read));
                        if joins {
                            ready[*next as usize] = true;
                            for read in others {
                                if !reads.contains(read) && !outputs.iter().any(|(id, _)| id == read) {
                                    reads.push(*read);
                                }
                            }
                            outputs.push((*next, None));
                            grown = true;
                        }
                    }
                }
            }
            let library = kind.is_extern().then_some(id);
            found.push((Launch { outputs, frees: SmallVec::new(), library }, reads));
        }
        self.after_their_inputs(found)
    }

    /// `topological_sort_schedule`: a fused kernel stands where the first of its nodes stood, all that it needs before it.
    fn after_their_inputs(&self, found: Vec<Planned>) -> Vec<Planned> {
        let mut maker = vec![usize::MAX; self.graph.nodes.len()];
        for (at, (launch, _)) in found.iter().enumerate() {
            launch.outputs.iter().for_each(|(id, _)| maker[*id as usize] = at);
        }
        let mut placed = vec![false; found.len()];
        let mut order = Vec::with_capacity(found.len());
        for start in 0..found.len() {
            let mut open = vec![start];
            while let Some(&at) = open.last() {
                let mut needs = found[at].1.iter().map(|read| maker[*read as usize]);
                let missing = needs.find(|from| *from != usize::MAX && *from != at && !placed[*from]);
                match missing.filter(|from| !open.contains(from)) {
                    Some(from) => open.push(from),
                    None => {
                        open.pop();
                        if !std::mem::replace(&mut placed[at], true) {
                            order.push(at);
                        }
                    }
                }
            }
        }
        let mut found: Vec<Option<Planned>> = found.into_iter().map(Some).collect();
        order.into_iter().filter_map(|at| found[at].take()).collect()
    }
}
