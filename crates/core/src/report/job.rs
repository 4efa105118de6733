//! All cards of a run on several, and what each process keeps in the host's memory.

use serde::Serialize;

use crate::memory::log::{HostPart, OFFLOADED, ON_RANK_0};
use crate::memory::simulation::{Rank, Simulation};

/// A run on several cards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Job {
    /// How many cards there are.
    pub cards: u64,
    /// Those that need the same together, the worst first.
    pub ranks: Vec<Rank>,
    /// What all processes take on all cards.
    pub process: u64,
    /// What each process keeps in the host's memory.
    pub host: Vec<HostPart>,
    /// What all processes keep there.
    pub host_total: u64,
}

impl Job {
    /// Of a simulation of several cards, or of one that uses the host's memory.
    pub fn of(simulation: &Simulation) -> Option<Self> {
        let mut host = simulation.log.host_parts.clone();
        if simulation.log.host.peak > 0 {
            host.push(HostPart { name: "saved activations", bytes: simulation.log.host.peak, pinned: true });
        }
        if simulation.ranks.is_empty() && host.is_empty() {
            return None;
        }
        let mut ranks = simulation.ranks.clone();
        if ranks.is_empty() {
            ranks.push(simulation.as_rank("the card", 1));
        }
        crate::order::sort_by_key(&mut ranks, |rank| std::cmp::Reverse(rank.process));
        let cards = ranks.iter().map(|rank| rank.cards).sum();
        let process =
            ranks.iter().fold(0, |sum: u64, rank| sum.saturating_add(rank.process.saturating_mul(rank.cards)));
        let all = |part: &HostPart| {
            part.bytes.saturating_mul(if [ON_RANK_0, OFFLOADED].contains(&part.name) { 1 } else { cards })
        };
        let host_total = host.iter().fold(0, |sum: u64, part| sum.saturating_add(all(part)));
        Some(Self { cards, ranks, process, host, host_total })
    }
}
