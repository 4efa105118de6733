//! What is alive at the peak of a published Megatron run: `cargo run --example megatron_peak -- FILE CASE STAGE`, the case by
//! its name (SimuMax) or its row (Megatron-Bridge).

use std::collections::BTreeMap;

use vramcast_core::memory::log::Event;
use vramcast_core::memory::megatron;
use vramcast_core::verify::external::{bridge, simumax};

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&arguments[1]).unwrap()).unwrap();
    let rows = file["rows"].as_array().unwrap();
    let (model, plan) = match arguments[2].parse::<usize>() {
        Ok(index) => bridge::plan(&rows[index]).unwrap(),
        Err(_) => {
            let row = rows.iter().find(|row| row["case"] == arguments[2].as_str()).unwrap();
            simumax::plan(row, "B200").unwrap()
        }
    };
    let ranks = megatron::ranks(&model, &plan).unwrap();
    let simulation = &ranks[arguments[3].parse::<usize>().unwrap()].simulation;
    let mut alive = BTreeMap::new();
    let mut phase = 0;
    for event in &simulation.log.events[..=simulation.replay.peak_event] {
        match event {
            Event::Allocate(id) => drop(alive.insert(id.0, ())),
            Event::Free(id) => drop(alive.remove(&id.0)),
            Event::Phase(index) => phase = *index,
            _ => {}
        }
    }
    println!("peak {} in {}", simulation.replay.peak_allocated(), simulation.log.phases[phase as usize]);
    let mut groups = BTreeMap::<(String, String, String), (u64, u64)>::new();
    for id in alive.keys() {
        let info = &simulation.log.storages[*id as usize];
        let shape = if info.shape.sizes().len() == 1 { String::new() } else { format!("{:?}", info.shape) };
        let entry = groups.entry((format!("{:?}", info.category), info.operation.to_owned(), shape)).or_default();
        *entry = (entry.0 + 1, entry.1 + info.bytes);
    }
    for ((category, operation, shape), (count, bytes)) in groups {
        println!("{category:14} {operation:28} {shape:22} {count:>5} {bytes:>14}");
    }
}
