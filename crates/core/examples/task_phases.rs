//! Peaks of a recorded job's simulation, phase by phase, and what is alive at the largest: `task_phases FILE ID`.
//! Development aid, like `verify_ledger`.

use vramcast_core::memory::log::Event;
use vramcast_core::verify::jobs;

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, file, wanted] = arguments.as_slice() else {
        eprintln!("task_phases FILE ID");
        std::process::exit(2);
    };
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    for row in rows.filter(|row| row["id"] == wanted.as_str()) {
        let (_, _, simulation) = match jobs::simulated(&row) {
            Ok(simulated) => simulated,
            Err(why) => {
                eprintln!("{why}");
                continue;
            }
        };
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        for (phase, memory) in simulation.log.phases.iter().zip(&simulation.replay.phases) {
            println!("{phase:>12} {:10.1} {:10.1}", mib(memory.peak), mib(memory.peak_reserved));
        }
        let mut alive = std::collections::BTreeMap::new();
        for event in &simulation.log.events[..=simulation.replay.peak_event] {
            match event {
                Event::Allocate(id) => drop(alive.insert(*id, ())),
                Event::Free(id) => drop(alive.remove(id)),
                _ => {}
            }
        }
        let mut sums: std::collections::BTreeMap<String, (u64, u64)> = Default::default();
        for id in alive.keys() {
            let storage = &simulation.log.storages[id.0 as usize];
            let sum = sums
                .entry(format!("{:?} {} {:?} {}", storage.category, storage.operation, storage.shape, storage.dtype))
                .or_default();
            *sum = (sum.0 + 1, sum.1 + storage.bytes);
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
        for (what, (count, bytes)) in sums.into_iter().take(25) {
            println!("{:10.1} MiB {count:>5} x {what}", mib(bytes));
        }
    }
}
