//! What the processes on one card need together.
//!
//! Every process has a pretended card of its own and does not see what the others hold; on a machine they share. Peaks of
//! processes that were there at the same time are added up. Their peaks need not meet, so this is what is safe, not what
//! must be.

use std::collections::BTreeSet;

use serde::Serialize;

use super::report::Process;

/// One card that several processes use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SharedCard {
    /// Its number on the machine.
    pub card: u32,
    /// How many processes were on it at once.
    pub processes: usize,
    /// What they need together, in bytes.
    pub bytes: u64,
}

/// When a process was there, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Life {
    /// When it began to use the card.
    pub from: f64,
    /// When it ended; infinite where it did not say so.
    pub to: f64,
}

/// The machine's number of a process's device, by the process's `CUDA_VISIBLE_DEVICES`.
pub fn card_of(device: u32, visible: Option<&str>) -> u32 {
    let named = visible.and_then(|list| list.split(',').nth(device as usize));
    named.and_then(|number| number.trim().parse().ok()).unwrap_or(device)
}

/// The cards that more than one process used at the same time, each at its fullest.
pub fn shared(processes: &[Process]) -> Vec<SharedCard> {
    let cards: BTreeSet<u32> = processes.iter().map(|process| process.card).collect();
    let fullest = |card: u32| {
        let on_it = || processes.iter().filter(move |process| process.card == card);
        // The sum is largest at a moment when somebody comes.
        let moments = on_it().map(|process| process.life.from);
        let sums = moments.map(|moment| {
            let there = on_it().filter(|process| process.life.from <= moment && moment < process.life.to);
            there.fold((0, 0), |(bytes, count), process| (process.totals.process.saturating_add(bytes), count + 1))
        });
        let (bytes, processes) = sums.max()?;
        (processes > 1).then_some(SharedCard { card, processes, bytes })
    };
    cards.into_iter().filter_map(fullest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_cards_follow_what_a_process_sees() {
        assert_eq!([card_of(1, None), card_of(1, Some("3, 2")), card_of(0, Some("GPU-1f"))], [1, 2, 0]);
    }
}
