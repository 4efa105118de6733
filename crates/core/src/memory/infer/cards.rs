//! A run whose modules are on several cards: one run, whose log says of every storage which card it is on.

use std::collections::BTreeMap;

use super::loaded::Loaded;
use super::placement::{self, Tree};
use crate::memory::log::{Category, Log, OFFLOADED};
use crate::memory::lower::{Dealt, NOWHERE};
use crate::memory::process;
use crate::memory::torch::Torch;
use crate::model::Program;
use crate::plan::device_map::{DeviceMap, Holder};
use crate::plan::{Fault, InferPlan, PlanError};

/// Where modules go.
pub(super) fn deal(
    program: &Program,
    plan: &InferPlan,
    map: &DeviceMap,
    notes: &mut Vec<String>,
) -> Result<Dealt, PlanError> {
    let context = process::parts(&Log::default(), &plan.gpu, None, false).first().map_or(0, |part| part.bytes);
    let tree = Tree::of(program, plan.weights, plan.quantization.as_ref());
    let packs = plan.quantization.is_some();
    let map = placement::place(&tree, map, plan.gpu.memory.saturating_sub(context), packs);
    notes.extend(shown(&map));
    let cards = map.values().filter_map(|holder| match holder {
        Holder::Card(card) => Some(*card),
        _ => None,
    });
    let main = cards.min().unwrap_or(0);
    if packs && map.values().any(|holder| !matches!(holder, Holder::Card(_))) {
        // `validate_environment` of the bitsandbytes quantizers.
        let what = "the cards have no room for all weights in few bits, and transformers leaves none on the host";
        return Err(Fault::new("device_map", what).or("add {device_map.cards}, or name a larger card").into());
    }
    Ok(Dealt { map, main })
}

/// Says of weights and buffers where they are.
pub(super) fn settle(torch: &mut Torch, program: &Program, loaded: &Loaded, dealt: &Dealt, notes: &mut Vec<String>) {
    let mut log = torch.log.borrow_mut();
    log.set_card(dealt.main);
    // What loading makes for a moment it makes on no card: tensors go straight to where they stay.
    log.storages.iter_mut().filter(|info| info.category == Category::Weights).for_each(|info| info.card = NOWHERE);
    let (mut host, mut disk) = (0u64, 0u64);
    for parameter in &program.parameters {
        let Some(tensor) = loaded.parameters.get(&parameter.name).filter(|tensor| tensor.storage.is_in(&torch.log))
        else {
            continue;
        };
        let Some(info) = log.storages.get_mut(tensor.storage.id().0 as usize) else { continue };
        match dealt.holder(&parameter.name) {
            Holder::Card(card) => info.card = card,
            Holder::Host => host = host.saturating_add(info.bytes),
            Holder::Disk => disk = disk.saturating_add(info.bytes),
        }
    }
    for (name, weight) in &loaded.quantised {
        let Holder::Card(card) = dealt.holder(name) else { continue };
        for part in weight.parts.iter().filter(|part| part.storage.is_in(&torch.log)) {
            if let Some(info) = log.storages.get_mut(part.storage.id().0 as usize) {
                info.card = card;
            }
        }
    }
    for (buffer, tensor) in program.buffers.iter().zip(&loaded.buffers) {
        let card = match dealt.holder(&buffer.name) {
            Holder::Card(card) => card,
            // They come over once and stay (`offload_buffers=False`).
            Holder::Host | Holder::Disk => dealt.main,
        };
        if let Some(info) = log.storages.get_mut(tensor.storage.id().0 as usize) {
            info.card = card;
        }
    }
    if host > 0 {
        log.on_host(OFFLOADED, host, false);
    }
    if disk > 0 {
        notes
            .push(format!("on disk: {:.2} GiB of weights, read again for every pass", crate::units::Bytes(disk).gib()));
    }
}

/// A map in words: names that count on are put together.
fn shown<'a>(map: &'a BTreeMap<String, Holder>) -> Vec<String> {
    let mut lines: BTreeMap<Holder, BTreeMap<&str, Vec<u64>>> = BTreeMap::new();
    for (name, holder) in map {
        let counted = |(stem, last): (&'a str, &str)| Some((stem, Some(last.parse::<u64>().ok()?)));
        let (stem, number) = name.rsplit_once('.').and_then(counted).unwrap_or((name, None));
        lines.entry(*holder).or_default().entry(stem).or_default().extend(number);
    }
    let part = |(stem, numbers): (&&str, &Vec<u64>)| match (numbers.iter().min(), numbers.iter().max()) {
        (Some(first), Some(last)) if first < last => format!("{stem}.{first} to {last}"),
        (Some(only), _) => format!("{stem}.{only}"),
        _ if stem.is_empty() => "all".to_owned(),
        _ => (*stem).to_owned(),
    };
    let line = |(holder, names): (&Holder, &BTreeMap<&str, Vec<u64>>)| {
        format!("on {holder}: {}", names.iter().map(part).collect::<Vec<_>>().join(", "))
    };
    lines.iter().map(line).collect()
}
