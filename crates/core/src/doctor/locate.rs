//! Which operation of a simulated run asks for so many bytes.

use serde::Serialize;

use crate::memory::log::{Event, Log};
use crate::memory::simulation::Simulation;
use crate::report::category_name;

/// Requests of a run that a message may mean, alike ones together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Request {
    /// The operation.
    pub operation: &'static str,
    /// The module whose code ran.
    pub module: String,
    /// When.
    pub phase: String,
    /// What for.
    pub purpose: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// How often.
    pub times: u64,
}

const MIB: u64 = 1 << 20;

/// What the allocator asks the driver for: its blocks are of 2 and 20 MiB where less is wanted (CUDACachingAllocator.cpp,
/// get_allocation_size).
fn asked_of_driver(bytes: u64) -> u64 {
    if bytes <= MIB {
        2 * MIB
    } else if bytes < 10 * MIB {
        20 * MIB
    } else {
        bytes.next_multiple_of(2 * MIB)
    }
}

/// Whether a size is the one of a message, which has two digits behind the point.
fn is_said(bytes: u64, said: u64) -> bool {
    let shown = |bytes: u64| match bytes {
        ..MIB => format!("{:.2}K", bytes as f64 / 1024.0),
        MIB..1_073_741_824 => format!("{:.2}M", bytes as f64 / MIB as f64),
        _ => format!("{:.2}G", bytes as f64 / 1_073_741_824.0),
    };
    shown(asked_of_driver(bytes)) == shown(said)
}

/// The requests of a run that a message of so many bytes may mean, the most frequent first.
pub fn requests(run: &Simulation, said: u64) -> Vec<Request> {
    let mut found: Vec<Request> = Vec::new();
    let Log { events, storages, phases, .. } = &run.log;
    let mut phase = String::new();
    for event in events {
        match event {
            Event::Phase(at) => phase = phases.get(*at as usize).map(ToString::to_string).unwrap_or_default(),
            Event::PhaseEnd => phase.clear(),
            Event::Allocate(id) => {
                let Some(info) = storages.get(id.0 as usize).filter(|info| is_said(info.bytes, said)) else { continue };
                // Layers are alike: their numbers say nothing.
                let path = run.program.modules.get(info.module as usize).map_or("", |module| module.path.as_str());
                let plain: Vec<&str> = path.split('.').filter(|part| part.parse::<u64>().is_err()).collect();
                let purpose = category_name(info.category);
                let request = Request {
                    operation: info.operation,
                    module: plain.join("."),
                    phase: phase.clone(),
                    purpose,
                    bytes: info.bytes,
                    times: 1,
                };
                let same = |known: &&mut Request| Request { times: 1, ..(**known).clone() } == request;
                match found.iter_mut().find(same) {
                    Some(known) => known.times += 1,
                    None => found.push(request),
                }
            }
            _ => {}
        }
    }
    crate::order::sort_by(&mut found, |a, b| {
        b.times.cmp(&a.times).then(a.phase.cmp(&b.phase)).then(a.operation.cmp(b.operation))
    });
    found
}
