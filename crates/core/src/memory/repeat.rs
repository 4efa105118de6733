//! Later steps of a training run without running them: they allocate what the first step did, less what it left behind.
//!
//! The first step makes the optimizer's state and the library workspaces; all else it makes, it frees. So its events,
//! without those, are the events of every later step: the same storages come to life again.

use super::log::{Event, Log, StorageId};

/// Where a step began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start {
    event: usize,
    storage: usize,
}

impl Start {
    /// Now.
    pub(super) fn now(log: &Log) -> Self {
        Self { event: log.events.len(), storage: log.storages.len() }
    }
}

/// Writes the first step down again as steps 1 up to `steps`.
pub(super) fn first_step(log: &mut Log, start: Start, steps: u32) {
    let first = start.storage as u32;
    let mut freed = vec![false; log.storages.len() - start.storage];
    for event in &log.events[start.event..] {
        if let Event::Free(id) = event
            && id.0 >= first
        {
            freed[(id.0 - first) as usize] = true;
        }
    }
    let stays = |id: StorageId| id.0 < first || !freed[(id.0 - first) as usize];
    let again = |event: &Event| !matches!(event, Event::Allocate(id) | Event::Free(id) if stays(*id));
    let mut events = Vec::with_capacity(log.events.len() - start.event);
    events.extend(log.events[start.event..].iter().copied().filter(again));
    log.events.reserve(events.len() * (steps as usize - 1));
    for step in 1..steps {
        let begin = log.events.len();
        log.events.extend_from_slice(&events);
        for event in &mut log.events[begin..] {
            if let Event::Phase(phase) = event {
                let again = log.phases[*phase as usize].in_step(step);
                *phase = log.phases.len() as u32;
                log.phases.push(again);
            }
        }
    }
}
