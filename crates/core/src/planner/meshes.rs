//! Splits of a run over the cards it has: engines and axes, with as many samples a step as before.

use serde_json::{Value, json};

use super::moves::Now;
use crate::ask::{Runner, tree};
use crate::plan::ModelSizes;

/// Every split that is worth a try, by engine: those that shard by layers first, then those that cut layers and depth.
pub(super) fn splits(now: &Now<'_>) -> Vec<Value> {
    if !now.runner.trains() || now.runner == Runner::OneCard {
        return Vec::new();
    }
    let mesh = |axis: &str| now.number(&format!("parallel.mesh.{axis}"));
    let copies = mesh("dp_replicate").saturating_mul(mesh("dp_shard"));
    let world = ["tp", "sp", "cp", "pp"].iter().fold(copies, |product, axis| product.saturating_mul(mesh(axis)));
    // Samples of a step over all cards.
    let samples = now.number("batch.batch_size").saturating_mul(now.number("gradient_accumulation"));
    let cut = Cut {
        world,
        samples: samples.saturating_mul(copies),
        sizes: ModelSizes::of(now.model.config(), now.number("batch.seq_len")),
    };
    let adapts = tree::get(now.tree, "adapter").is_some_and(Value::is_object);
    let mut all = Vec::new();
    all.extend(cut.whole(json!({"ddp": {}})));
    for stage in [1, 2, 3] {
        all.extend(cut.whole(json!({"deepspeed": {"zero": {"stage": stage}}})));
    }
    all.extend(cut.whole(json!({"fsdp2": {}})));
    for node in nodes(world) {
        all.extend(cut.hybrid(node));
    }
    if adapts {
        return all;
    }
    for [tp, pp, cp, ep] in cut.axes() {
        all.extend(cut.split("megatron", [tp, pp, cp, ep]));
        if ep == 1 && tp <= 8 && pp <= 4 && tp * pp * cp > 1 {
            all.extend(cut.split("fsdp2", [tp, pp, cp, 1]));
        }
    }
    all
}

/// Parts of a world that a copy may fill: one machine of eight cards, or several.
fn nodes(world: u64) -> Vec<u64> {
    [8, 16, 32].into_iter().filter(|node| *node < world && world.is_multiple_of(*node)).collect()
}

struct Cut {
    world: u64,
    samples: u64,
    sizes: ModelSizes,
}

impl Cut {
    /// What each data-parallel card gets of a step, where that is a whole number.
    fn share(&self, copies: u64) -> Option<u64> {
        (copies > 0 && self.samples.is_multiple_of(copies)).then(|| self.samples / copies)
    }

    fn with(&self, copies: u64, micro: u64, parallel: Value) -> Option<Value> {
        let share = self.share(copies)?;
        (share >= micro && share.is_multiple_of(micro)).then(
            || json!({"batch": {"batch_size": share / micro}, "gradient_accumulation": micro, "parallel": parallel}),
        )
    }

    /// Every card has a part of a step's samples.
    fn whole(&self, engine: Value) -> Option<Value> {
        self.with(self.world, 1, json!({"gpus": self.world, "engine": engine}))
    }

    /// Shards within a group, copies between groups.
    fn hybrid(&self, group: u64) -> Option<Value> {
        let mesh = json!({"dp_replicate": self.world / group});
        self.with(self.world, 1, json!({"gpus": self.world, "mesh": mesh, "engine": {"fsdp2": {}}}))
    }

    fn split(&self, engine: &str, [tp, pp, cp, ep]: [u64; 4]) -> Option<Value> {
        let copies = self.world / (tp * pp * cp);
        // A pipeline is filled by micro-batches: four a stage where there are as many samples.
        let share = self.share(copies)?;
        let micro = if pp > 1 { share.min(pp * 4) } else { 1 };
        let micro = (1..=micro).rev().find(|micro| share.is_multiple_of(*micro))?;
        let mut mesh = json!({"tp": tp, "pp": pp, "cp": cp, "ep": ep});
        mesh.as_object_mut()?.retain(|_, size| *size != json!(1));
        let uneven = self.sizes.layers.is_some_and(|layers| !layers.is_multiple_of(pp));
        let options = match (engine, tp > 1) {
            // The embedding and the loss are dealt out like layers, as for the 126 of Llama-3.1-405B.
            ("megatron", _) if uneven => json!({"split": {"counted": {"embedding": true, "loss": true}}}),
            // Sequence parallel and the loss on parts of the vocabulary, as torchtitan runs it.
            ("fsdp2", true) => json!({"tensor": {"form": "torchtitan", "loss_parallel": true}}),
            _ => json!({}),
        };
        self.with(copies, micro, json!({"gpus": self.world, "mesh": mesh, "engine": {engine: options}}))
    }

    /// Axes that divide the model and the cards: heads by tensor parallel within a machine of eight, layers by pipeline,
    /// long sequences by context, experts by expert parallel.
    fn axes(&self) -> Vec<[u64; 4]> {
        let powers = |most: u64| (0..12).map(|power| 1u64 << power).take_while(move |size| *size <= most);
        let divides = |size: u64, what: Option<u64>| size == 1 || what.is_some_and(|what| what.is_multiple_of(size));
        let heads = |tp: u64| {
            divides(tp, self.sizes.heads)
                && (tp == 1 || self.sizes.kv_heads.is_some_and(|kv| kv.is_multiple_of(tp) || tp.is_multiple_of(kv)))
        };
        let tokens = self.sizes.seq_len.unwrap_or(0);
        let mut found = Vec::new();
        for tp in powers(8).filter(|tp| heads(*tp)) {
            for pp in powers(16).filter(|pp| *pp == 1 || self.sizes.layers.is_some_and(|layers| layers / pp >= 2)) {
                // A card keeps at least four thousand tokens.
                for cp in powers(16).filter(|cp| *cp == 1 || tokens / cp >= 4096) {
                    if !self.world.is_multiple_of(tp * pp * cp) {
                        continue;
                    }
                    let spread = self.world / (tp * pp * cp);
                    let experts =
                        |ep: &u64| *ep == 1 || (self.sizes.experts.is_some() && divides(*ep, self.sizes.experts));
                    let wide = powers((spread * cp).min(64)).filter(experts);
                    found.extend(wide.map(|ep| [tp, pp, cp, ep]));
                }
            }
        }
        found
    }
}
