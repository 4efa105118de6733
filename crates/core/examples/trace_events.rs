//! Writes the events of ledger rows: `cargo run --example trace_events -- FILE IDS FOLDER`.
//!
//! One line each, so that they can be compared with a trace of the real allocator: `A bytes operation … stream`, `F bytes`.

use std::fmt::Write;
use vramcast_core::memory::log::{Event, Log};
use vramcast_core::verify::ledger::simulate;

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (file, wanted, folder) = (&arguments[1], &arguments[2], &arguments[3]);
    for line in std::fs::read_to_string(file).unwrap().lines().filter(|line| !line.trim().is_empty()) {
        let row: serde_json::Value = vramcast_core::source::json::parse(line.as_bytes()).unwrap();
        let id = row["id"].as_str().unwrap();
        if wanted == "all" || wanted.split(',').any(|known| known == id) {
            match simulate(&row) {
                Ok((simulation, _)) => std::fs::write(format!("{folder}/{id}.ev"), text(&simulation.log)).unwrap(),
                Err(why) => println!("{id}: {why}"),
            }
        }
    }
}

fn text(log: &Log) -> String {
    let mut text = String::new();
    let mut phase = 0;
    for event in &log.events {
        let size = |id: u32| log.storages[id as usize].bytes.next_multiple_of(512);
        let _ = match *event {
            Event::Allocate(id) | Event::Free(id) if size(id.0) == 0 => Ok(()),
            Event::Allocate(id) => {
                let info = &log.storages[id.0 as usize];
                let (name, shape, dtype) = (info.operation, info.shape, info.dtype);
                writeln!(text, "A {} {name} {shape:?} {dtype:?} m{} {:?}", size(id.0), info.module, info.stream)
            }
            Event::Free(id) => writeln!(text, "F {}", size(id.0)),
            Event::Phase(index) => {
                phase = index as usize;
                writeln!(text, "= {}", log.phases[phase])
            }
            Event::PhaseEnd => writeln!(text, "= end {}", log.phases[phase]),
            Event::EmptyCache => writeln!(text, "# empty_cache"),
        };
    }
    text
}
