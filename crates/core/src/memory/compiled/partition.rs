//! What a compiled forward pass keeps: `min_cut_rematerialization_partition` of torch/_functorch/partitioners.py, with the
//! defaults of torch/_functorch/config.py in torch 2.11.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use smallvec::SmallVec;

use super::flow::{INFINITE, Network};
use super::graph::{Graph, Id, Kind};

/// Farther than any node is from the backward pass.
const FAR: u64 = 1_000_000_000;

struct Cut<'a> {
    graph: &'a Graph,
    users: Vec<SmallVec<[Id; 4]>>,
    /// Needed for what is returned.
    forward: Vec<bool>,
    /// Depends on gradients that come in.
    backward: Vec<bool>,
    /// Steps to the next node that is not of the forward pass.
    distance: Vec<u64>,
    banned: Vec<bool>,
    /// Computed again by a checkpoint's wish.
    again: Vec<bool>,
}

/// The nodes whose results are kept, in order.
pub(super) fn saved(graph: &Graph) -> Vec<Id> {
    let users = graph.users();
    let count = graph.nodes.len();
    let mut forward = vec![false; count];
    graph.outputs.iter().for_each(|output| forward[*output as usize] = true);
    for at in (0..count).rev() {
        if forward[at] {
            graph.nodes[at].inputs.iter().for_each(|input| forward[*input as usize] = true);
        }
    }
    graph.primals.iter().for_each(|primal| forward[*primal as usize] = true);
    let mut backward = vec![false; count];
    for (at, node) in graph.nodes.iter().enumerate() {
        backward[at] = node.kind == Kind::Tangent || node.inputs.iter().any(|input| backward[*input as usize]);
    }
    let mut distance = vec![0; count];
    for at in (0..count).rev() {
        if forward[at] {
            let nearest = users[at].iter().map(|user| distance[*user as usize] + 1).min();
            distance[at] = nearest.unwrap_or(FAR).min(FAR);
        }
    }
    // A checkpoint computes its nodes again, except those that a later checkpoint reads (`cleanup_recompute_tags`).
    let again: Vec<bool> = (0..count)
        .map(|at| {
            let own = graph.nodes[at].checkpoint;
            let leaves = |user: &Id| {
                let other = graph.nodes[*user as usize].checkpoint;
                forward[*user as usize] && other.is_some() && other != own
            };
            let wished = own.is_some() && !graph.nodes[at].kept;
            wished && forward[at] && graph.nodes[at].kind != Kind::Primal && !users[at].iter().any(leaves)
        })
        .collect();
    let mut cut = Cut { graph, users, forward, backward, distance, banned: vec![false; count], again };
    let mut network = cut.network();
    cut.ban_far_apart(&mut network);
    cut.ban_long_chains(&mut network);
    let sink_side = network.cut();
    (0..count).filter(|at| !sink_side[2 * at] && sink_side[2 * at + 1]).map(|at| at as Id).collect()
}

impl Cut<'_> {
    fn kind(&self, at: Id) -> Kind {
        self.graph.nodes[at as usize].kind
    }

    fn is_fusible(&self, a: Id, b: Id) -> bool {
        self.kind(b) == Kind::Join || self.kind(a).is_recomputable() && self.kind(b).is_recomputable()
    }

    fn is_materialised_backwards(&self, at: Id) -> bool {
        if self.kind(at).is_view() {
            return false;
        }
        let mut open = vec![at];
        while let Some(current) = open.pop() {
            for &user in &self.users[current as usize] {
                if !self.forward[user as usize] && !self.is_fusible(current, user) {
                    return true;
                }
                if self.kind(user).is_view() {
                    open.push(user);
                }
            }
        }
        false
    }

    fn must_not_run_again(&self, at: Id) -> bool {
        let node = &self.graph.nodes[at as usize];
        match node.kind {
            Kind::Item(_) | Kind::Primal | Kind::Tangent => return false,
            kind if !kind.is_recomputable() => return true,
            _ => {}
        }
        let inputs: u64 = node.inputs.iter().map(|input| self.graph.nodes[*input as usize].bytes()).sum();
        self.is_materialised_backwards(at) || node.bytes().saturating_mul(4) < inputs
    }

    fn weight(&self, at: Id) -> u64 {
        let node = &self.graph.nodes[at as usize];
        // `treat_parameters_as_free_to_save`.
        if node.kind == Kind::Primal && self.graph.parameters.contains(&at) {
            return 0;
        }
        if matches!(node.kind, Kind::Attention | Kind::AttentionBackward) {
            return INFINITE;
        }
        let near = self.distance[at as usize].clamp(1, 100) as i32;
        let bytes = (node.bytes() as f64 * 1.1f64.powi(near)) as u64;
        let materialised =
            node.kind == Kind::Primal || !self.users[at as usize].iter().all(|user| self.is_fusible(at, *user));
        if materialised { bytes } else { bytes.saturating_mul(2) }
    }

    fn ban(&mut self, network: &mut Network, at: Id) {
        if self.kind(at).is_view() || self.again[at as usize] || self.banned[at as usize] {
            return;
        }
        self.banned[at as usize] = true;
        network.source_edge(2 * at as usize);
    }

    fn network(&mut self) -> Network {
        let count = self.graph.nodes.len();
        let mut network = Network::new(2 * count);
        for at in 0..count {
            let id = at as Id;
            if self.backward[at] || self.again[at] {
                network.sink_edge(2 * at);
                continue;
            }
            if self.kind(id) == Kind::Primal || self.forward[at] && self.must_not_run_again(id) {
                self.ban(&mut network, id);
            }
            network.edge(2 * at, 2 * at + 1, self.weight(id));
            for user in &self.users[at] {
                network.edge(2 * at + 1, 2 * *user as usize, INFINITE);
            }
        }
        network
    }

    /// A node that is used near and far is not the start of two fused kernels.
    fn ban_far_apart(&mut self, network: &mut Network) {
        for at in 0..self.graph.nodes.len() {
            if !self.forward[at] {
                continue;
            }
            let users: SmallVec<[Id; 4]> =
                self.users[at].iter().copied().filter(|user| self.forward[*user as usize]).collect();
            let Some(&last) = users.iter().max() else { continue };
            if users.len() < 2 {
                continue;
            }
            let first = self.first_unfusible(&users, last);
            for user in users {
                if user > first && self.is_fusible(at as Id, user) {
                    self.ban(network, user);
                }
            }
        }
    }

    fn first_unfusible(&self, starts: &[Id], last: Id) -> Id {
        let mut open: BinaryHeap<Reverse<(Id, bool)>> = starts.iter().map(|start| Reverse((*start, true))).collect();
        let mut known: BTreeSet<(Id, bool)> = starts.iter().map(|start| (*start, true)).collect();
        while let Some(Reverse((at, fusible))) = open.pop() {
            if !fusible {
                return at;
            }
            for &user in &self.users[at as usize] {
                if self.forward[user as usize] && user <= last {
                    let next = (user, self.is_fusible(at, user));
                    if known.insert(next) {
                        open.push(Reverse(next));
                    }
                }
            }
        }
        last
    }

    /// No chain of fusible nodes through the whole model.
    fn ban_long_chains(&mut self, network: &mut Network) {
        let mut visited = vec![false; self.graph.nodes.len()];
        for start in 0..self.graph.nodes.len() {
            if !self.forward[start] {
                continue;
            }
            let mut open = BinaryHeap::from([Reverse(start as Id)]);
            while let Some(Reverse(at)) = open.pop() {
                if std::mem::replace(&mut visited[at as usize], true) {
                    continue;
                }
                if at as usize > start + 100 && open.is_empty() {
                    self.ban(network, at);
                    break;
                }
                for &user in &self.users[at as usize] {
                    if self.forward[user as usize] && self.is_fusible(at, user) && !self.banned[user as usize] {
                        open.push(Reverse(user));
                    }
                }
            }
        }
    }
}
