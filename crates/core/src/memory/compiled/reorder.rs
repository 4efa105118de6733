//! The order of kernels: `reorder_for_peak_memory` of torch/_inductor/memory.py tries three orders and takes the one whose
//! estimated peak is least; the order of the graph wins ties.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// Kernels and buffers as numbers.
pub(super) struct Work {
    /// Of each kernel: the buffers it reads, and those it makes.
    pub(super) reads: Vec<Vec<usize>>,
    pub(super) makes: Vec<Vec<usize>>,
    /// Bytes of each buffer that can be freed; zero for parameters.
    pub(super) sizes: Vec<u64>,
    /// Whether it is returned.
    pub(super) returned: Vec<bool>,
}

/// What follows from [`Work`].
struct Links {
    before: Vec<Vec<usize>>,
    after: Vec<Vec<usize>>,
    readers: Vec<Vec<usize>>,
    made: Vec<bool>,
    size: Vec<u64>,
}

/// The order in which kernels run, and the memory that is estimated for each.
pub(super) fn order(work: &Work) -> (Vec<usize>, Vec<u64>) {
    let links = Links::new(work);
    let plain: Vec<usize> = (0..work.reads.len()).collect();
    let most = |memory: &[u64]| memory.iter().copied().max().unwrap_or(0);
    let memory = estimate(work, &links, &plain);
    let mut best = (plain, memory);
    for order in [least_peak_first(work, &links), first_in_first_out(&links), depth_first(work, &links)] {
        let memory = estimate(work, &links, &order);
        if most(&memory) < most(&best.1) {
            best = (order, memory);
        }
    }
    best
}

impl Links {
    fn new(work: &Work) -> Self {
        let buffers = work.sizes.len();
        let mut maker = vec![usize::MAX; buffers];
        for (at, makes) in work.makes.iter().enumerate() {
            makes.iter().for_each(|buffer| maker[*buffer] = at);
        }
        let mut readers = vec![Vec::new(); buffers];
        let mut before = vec![Vec::new(); work.reads.len()];
        let mut after = vec![Vec::new(); work.reads.len()];
        for (at, reads) in work.reads.iter().enumerate() {
            for buffer in reads {
                readers[*buffer].push(at);
                let from = maker[*buffer];
                if from != usize::MAX && from != at && !before[at].contains(&from) {
                    before[at].push(from);
                    after[from].push(at);
                }
            }
        }
        let size = work.makes.iter().map(|makes| makes.iter().map(|buffer| work.sizes[*buffer]).sum()).collect();
        Self { before, after, readers, made: maker.iter().map(|maker| *maker != usize::MAX).collect(), size }
    }
}

/// `estimate_peak_memory`.
fn estimate(work: &Work, links: &Links, order: &[usize]) -> Vec<u64> {
    let mut step = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, kernel)| step[*kernel] = at);
    let mut comes = vec![0u64; order.len() + 1];
    let mut goes = vec![0u64; order.len() + 1];
    let end = |buffer: usize| links.readers[buffer].iter().map(|kernel| step[*kernel]).max();
    for (buffer, size) in work.sizes.iter().enumerate() {
        if !links.made[buffer] {
            comes[0] += size;
            if let Some(end) = end(buffer).filter(|_| !work.returned[buffer]) {
                goes[end + 1] += size;
            }
        }
    }
    for (at, kernel) in order.iter().enumerate() {
        for &buffer in &work.makes[*kernel] {
            comes[at] += work.sizes[buffer];
            if !work.returned[buffer] {
                goes[end(buffer).unwrap_or(at) + 1] += work.sizes[buffer];
            }
        }
    }
    let mut now = 0u64;
    let at_each = |(comes, goes): (&u64, &u64)| {
        now = (now + comes).saturating_sub(*goes);
        now
    };
    comes.iter().zip(&goes).map(at_each).collect()
}

/// `topological_sort_lpmf`: what stays below the peak so far and frees most goes first.
fn least_peak_first(work: &Work, links: &Links) -> Vec<usize> {
    let count = work.reads.len();
    let mut waits: Vec<usize> = links.before.iter().map(Vec::len).collect();
    let mut uses: Vec<usize> = links
        .readers
        .iter()
        .zip(&work.returned)
        .map(|(readers, returned)| readers.len() + usize::from(*returned))
        .collect();
    let used = |buffers: &[usize], times: usize| -> u64 {
        buffers.iter().filter(|buffer| uses[**buffer] == times).map(|buffer| work.sizes[*buffer]).sum()
    };
    let mut frees: Vec<u64> =
        work.reads.iter().zip(&work.makes).map(|(reads, makes)| used(reads, 1) + used(makes, 0)).collect();
    let sum =
        |pick: &dyn Fn(usize) -> bool| (0..work.sizes.len()).filter(|b| pick(*b)).map(|b| work.sizes[b]).sum::<u64>();
    let mut live = sum(&|buffer| !links.made[buffer] && !links.readers[buffer].is_empty());
    let mut most = live.max(sum(&|buffer| work.returned[buffer]));
    let mut ready: BTreeSet<usize> = (0..count).filter(|at| waits[*at] == 0).collect();
    let mut order = Vec::with_capacity(count);
    while let Some(at) = {
        let gap = most - live;
        ready.iter().copied().min_by_key(|at| {
            let size = links.size[*at];
            (if size > gap { size } else { 0 }, i128::from(size) - i128::from(frees[*at]), *at)
        })
    } {
        ready.remove(&at);
        order.push(at);
        live += links.size[at];
        most = most.max(live);
        live = live.saturating_sub(frees[at]);
        for &next in &links.after[at] {
            waits[next] -= 1;
            if waits[next] == 0 {
                ready.insert(next);
            }
        }
        for &buffer in &work.reads[at] {
            uses[buffer] -= 1;
            if uses[buffer] == 1 {
                links.readers[buffer].iter().for_each(|kernel| frees[*kernel] += work.sizes[buffer]);
            }
        }
    }
    order
}

/// `topological_sort_bfs`: whose predecessors ran earliest goes first.
fn first_in_first_out(links: &Links) -> Vec<usize> {
    let count = links.before.len();
    let mut waits: Vec<usize> = links.before.iter().map(Vec::len).collect();
    let mut placed = vec![0usize; count];
    let mut ready: BinaryHeap<Reverse<(Vec<usize>, usize)>> =
        (0..count).filter(|at| waits[*at] == 0).map(|at| Reverse((Vec::new(), at))).collect();
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse((_, at))) = ready.pop() {
        placed[at] = order.len();
        order.push(at);
        for &next in &links.after[at] {
            waits[next] -= 1;
            if waits[next] == 0 {
                let mut priority: Vec<usize> = links.before[next].iter().map(|before| placed[*before]).collect();
                priority.sort_unstable();
                ready.push(Reverse((priority, next)));
            }
        }
    }
    order
}

/// `topological_sort_dfs`: what touches least memory goes first, after what it needs.
fn depth_first(work: &Work, links: &Links) -> Vec<usize> {
    let count = work.reads.len();
    let touched: Vec<u64> = (0..count)
        .map(|at| links.size[at] + work.reads[at].iter().map(|buffer| work.sizes[*buffer]).sum::<u64>())
        .collect();
    let mut all: Vec<usize> = (0..count).collect();
    crate::order::sort_by_key(&mut all, |at| (touched[*at], *at));
    let (mut seen, mut done) = (vec![false; count], vec![false; count]);
    let mut order = Vec::with_capacity(count);
    for start in all {
        let mut open = vec![start];
        while let Some(&at) = open.last() {
            if !std::mem::replace(&mut seen[at], true) {
                let mut before: Vec<usize> = links.before[at].iter().copied().filter(|before| !seen[*before]).collect();
                crate::order::sort_by_key(&mut before, |at| Reverse((touched[*at], *at)));
                open.extend(before);
                continue;
            }
            open.pop();
            if !std::mem::replace(&mut done[at], true) {
                order.push(at);
            }
        }
    }
    order
}
