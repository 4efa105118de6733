//! What can be changed in a plan: one row per move. Searches read the table and know none of the rows.
//!
//! A new move is a new row: which settings it decides, what it costs, why it helps, and the values they may take in a given
//! plan, from the one that changes least to the one that saves most.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::meshes;
use crate::ask::Runner;
use crate::ask::tree;
use crate::model::{Model, ModuleKind};
use crate::plan::{Gpu, Gpus, ModelSizes, RunPlan, adapter};

/// One kind of change.
pub struct Move {
    /// The settings it decides.
    pub settings: &'static [&'static str],
    /// Settings that, once stated, forbid it where what is stated stays.
    pub fixed: &'static [&'static str],
    /// What it costs.
    pub cost: Cost,
    /// What it does to memory.
    pub why: &'static str,
    /// What the settings may become, mildest first; nothing where it does not apply.
    pub values: fn(&Now<'_>) -> Vec<Value>,
}

/// A plan as it stands.
pub struct Now<'a> {
    /// Its tree.
    pub tree: &'a Value,
    /// Who runs it.
    pub runner: Runner,
    /// The model.
    pub model: &'a Model,
    /// The cards there are to choose from.
    pub cards: &'a [Gpu],
}

/// What a change costs, cheapest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Cost {
    /// The same result.
    Nothing,
    /// The same result, later.
    Time,
    /// Other rounding or another optimizer.
    Arithmetic,
    /// Fewer samples at once.
    Batch,
    /// Shorter samples.
    Length,
    /// Only adapters are trained.
    Training,
    /// Another split over the same cards.
    Mesh,
    /// More or larger cards.
    Hardware,
}

impl Cost {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Nothing => "same result",
            Self::Time => "same result, slower",
            Self::Arithmetic => "other arithmetic",
            Self::Batch => "fewer samples at once",
            Self::Length => "shorter samples",
            Self::Training => "trains adapters only",
            Self::Mesh => "another split",
            Self::Hardware => "more hardware",
        }
    }
}

impl Now<'_> {
    fn is(&self, path: &str, value: &str) -> bool {
        tree::get(self.tree, path).and_then(Value::as_str) == Some(value)
    }

    pub(super) fn on(&self, path: &str) -> bool {
        tree::get(self.tree, path) == Some(&Value::Bool(true))
    }

    pub(super) fn absent(&self, path: &str) -> bool {
        tree::get(self.tree, path).is_none_or(Value::is_null)
    }

    /// A number of the plan.
    pub(super) fn number(&self, path: &str) -> u64 {
        tree::get(self.tree, path).and_then(Value::as_u64).unwrap_or(1)
    }

    fn trains(&self) -> bool {
        self.runner.trains()
    }

    /// Whether transformers' layers are trained: Megatron has options of its own.
    fn by_torch(&self) -> bool {
        self.trains() && !self.runner.is_megatron()
    }

    fn alone(&self) -> bool {
        self.runner == Runner::OneCard
    }

    fn adam(&self) -> bool {
        self.is("optimizer.kind", "adamw")
    }
}

pub(super) fn when(applies: bool, values: impl IntoIterator<Item = Value>) -> Vec<Value> {
    if applies { values.into_iter().collect() } else { Vec::new() }
}

fn recomputed(offload: bool, selective: Value) -> Value {
    let options = json!({"every": 1, "reentrant": false, "offload": offload, "selective": selective});
    json!({"checkpointing": "full", "checkpoints": options})
}

/// What adapters are added to where PEFT has no choice of its own: the linears of layers by name where experts are one tensor, all
/// linears of types that it does not know.
fn targets(model: &Model) -> Option<Value> {
    let known = model.config()["model_type"].as_str().and_then(adapter::defaults::lora).is_some();
    let experts = ModelSizes::of(model.config(), 1).experts.is_some();
    if experts { Some(json!(linears(model))) } else { (!known).then(|| json!("all-linear")) }
}

fn linears(model: &Model) -> BTreeSet<String> {
    let modules = model.inventory().map(|all| all.modules).unwrap_or_default();
    let inside = modules.iter().filter(|module| matches!(module.kind, ModuleKind::Linear { .. }));
    inside.filter_map(|module| module.path.rsplit_once('.').map(|(_, leaf)| leaf.to_owned())).collect()
}

/// What goes with the kind of the optimizer.
const OPTIMIZER: &[&str] =
    &["optimizer.kind", "optimizer.implementation", "optimizer.state", "optimizer.rank", "optimizer.master_weights"];

/// The table, in the order in which moves are tried.
pub const MOVES: &[Move] = &[
    Move {
        settings: &["attention"],
        fixed: &["attention"],
        cost: Cost::Nothing,
        why: "no matrix of scores is kept",
        values: |now| when(now.by_torch() && now.is("attention", "eager"), [json!({"attention": "sdpa"})]),
    },
    Move {
        settings: &["optimizer.implementation"],
        fixed: &["optimizer.implementation"],
        cost: Cost::Nothing,
        why: "the step makes no temporaries",
        values: |now| {
            let fused = now.is("optimizer.implementation", "fused");
            let applies = now.by_torch() && now.adam() && !fused;
            when(applies, [json!({"optimizer": {"implementation": "fused"}})])
        },
    },
    Move {
        settings: &["keep_outputs"],
        fixed: &["keep_outputs"],
        cost: Cost::Nothing,
        why: "the logits go before backward begins",
        values: |now| when(now.by_torch() && now.on("keep_outputs"), [json!({"keep_outputs": false})]),
    },
    Move {
        settings: &["kernels", "loss"],
        fixed: &["kernels", "loss"],
        cost: Cost::Nothing,
        why: "fused kernels, and logits of a few rows at a time",
        values: |now| {
            let plain = now.is("kernels", "transformers") && now.is("loss.kind", "standard");
            when(now.by_torch() && plain, [json!({"kernels": "liger"})])
        },
    },
    Move {
        settings: &["loss", "kernels"],
        fixed: &["loss", "kernels"],
        cost: Cost::Nothing,
        why: "the loss is computed on parts of the sequence",
        values: |now| {
            let plain = now.is("kernels", "transformers") && now.is("loss.kind", "standard");
            when(now.alone() && plain, [json!({"loss": {"kind": "chunked"}})])
        },
    },
    Move {
        settings: &["adapter.targets"],
        fixed: &["adapter.targets"],
        cost: Cost::Nothing,
        why: "PEFT finds none by itself for models of this type",
        values: |now| {
            let open = now.by_torch() && !now.absent("adapter") && now.absent("adapter.targets");
            let found = targets(now.model).filter(|_| open);
            found.map(|targets| json!({"adapter": {"targets": targets}})).into_iter().collect()
        },
    },
    Move {
        settings: &["allocator.expandable_segments"],
        fixed: &["allocator.expandable_segments"],
        cost: Cost::Nothing,
        why: "segments grow instead of lying beside each other",
        values: |now| {
            let off = tree::get(now.tree, "allocator.expandable_segments") == Some(&Value::Bool(false));
            when(off, [json!({"allocator": {"expandable_segments": true}})])
        },
    },
    Move {
        settings: &["optimizer_in_backward"],
        fixed: &["optimizer_in_backward"],
        cost: Cost::Nothing,
        why: "each gradient is freed as soon as it is used",
        values: |now| {
            let whole = now.number("gradient_accumulation") == 1 && !now.on("clip");
            let applies = now.alone() && whole && !now.on("optimizer_in_backward");
            when(applies, [json!({"optimizer_in_backward": true})])
        },
    },
    Move {
        settings: &["cache"],
        fixed: &["cache"],
        cost: Cost::Nothing,
        why: "the cache is made once",
        values: |now| when(!now.trains() && now.is("cache", "dynamic"), [json!({"cache": "static"})]),
    },
    Move {
        settings: &["checkpointing", "checkpoints"],
        fixed: &["checkpointing", "checkpoints"],
        cost: Cost::Time,
        why: "layers are computed again in backward",
        values: |now| {
            let full = recomputed(false, Value::Null);
            let offloaded = recomputed(true, Value::Null);
            match (now.by_torch(), now.is("checkpointing", "full")) {
                (true, false) if now.alone() => vec![full, offloaded],
                (true, false) => vec![full],
                (true, true) => when(now.alone() && !now.on("checkpoints.offload"), [offloaded]),
                _ => Vec::new(),
            }
        },
    },
    Move {
        settings: &["parallel.engine.megatron.distributed_optimizer"],
        fixed: &["parallel.engine.megatron.distributed_optimizer"],
        cost: Cost::Nothing,
        why: "each card keeps its part of the optimizer's states",
        values: |now| {
            let at = "parallel.engine.megatron.distributed_optimizer";
            let whole = now.runner == Runner::Megatron && tree::get(now.tree, at) == Some(&Value::Bool(false));
            when(whole && now.number("parallel.mesh.dp_shard") > 1, [tree::of(at, json!(true))])
        },
    },
    Move {
        settings: &["parallel.engine.megatron.recompute"],
        fixed: &["parallel.engine.megatron.recompute"],
        cost: Cost::Time,
        why: "layers are computed again in backward",
        values: |now| {
            let at = "parallel.engine.megatron.recompute";
            let attention = json!({"selective": ["core_attn"]});
            let applies = now.runner.is_megatron() && (now.absent(at) || now.is(at, "none"));
            when(applies, [attention, json!({"uniform": 1})].map(|how| tree::of(at, how)))
        },
    },
    Move {
        settings: &["batch.batch_size", "gradient_accumulation"],
        fixed: &["gradient_accumulation"],
        cost: Cost::Time,
        why: "fewer samples at once, as many a step",
        values: |now| {
            let (batch, micro) = (now.number("batch.batch_size"), now.number("gradient_accumulation"));
            let parts = (1..batch.min(1 << 16)).rev().filter(|part| batch % part == 0);
            let cut = |part: u64| {
                let micro = micro.saturating_mul(batch / part);
                json!({"batch": {"batch_size": part}, "gradient_accumulation": micro})
            };
            when(now.trains() && now.absent("job.lengths"), parts.map(cut))
        },
    },
    Move {
        settings: &["save_on_cpu"],
        fixed: &["save_on_cpu"],
        cost: Cost::Time,
        why: "what forward saves waits in the host's memory",
        values: |now| when(now.alone() && !now.on("save_on_cpu"), [json!({"save_on_cpu": true})]),
    },
    Move {
        settings: &["parallel.engine.fsdp2.offload"],
        fixed: &["parallel.engine.fsdp2.offload"],
        cost: Cost::Time,
        why: "shards, gradients and states are in the host's memory",
        values: |now| {
            let applies = now.runner == Runner::Fsdp2 && !now.on("parallel.engine.fsdp2.offload");
            when(applies, [json!({"parallel": {"engine": {"fsdp2": {"offload": true}}}})])
        },
    },
    Move {
        settings: &["parallel.engine.deepspeed.zero.offload_optimizer"],
        fixed: &["parallel.engine.deepspeed.zero.offload_optimizer"],
        cost: Cost::Time,
        why: "states are in the host's memory",
        values: |now| {
            let at = "parallel.engine.deepspeed.zero.offload_optimizer";
            let on_host = tree::get(now.tree, at).is_some_and(|place| place["device"] == "cpu");
            when(now.runner == Runner::Deepspeed && !on_host, [tree::of(at, json!({"device": "cpu"}))])
        },
    },
    Move {
        settings: &["diffusion.offload"],
        fixed: &["diffusion.offload"],
        cost: Cost::Time,
        why: "parts of the pipeline that do not run wait on the host",
        values: |now| {
            let here = now.absent("diffusion.offload") || now.is("diffusion.offload", "none");
            let how = ["model", "sequential"].map(|how| tree::of("diffusion.offload", json!(how)));
            when(!now.trains() && now.model.is_pipeline() && here, how)
        },
    },
    Move {
        settings: &["weights", "autocast"],
        fixed: &["weights", "autocast"],
        cost: Cost::Arithmetic,
        why: "weights and gradients in two bytes",
        values: |now| {
            let wide = now.is("weights", "fp32") && now.absent("quantization");
            let old = tree::get(now.tree, "gpu.capability").and_then(Value::as_u64).is_some_and(|known| known < 80);
            let mixed = json!({"weights": "fp32", "autocast": if old { "fp16" } else { "bf16" }});
            let narrow = json!({"weights": "bf16", "autocast": null});
            match (wide, now.trains()) {
                (true, true) if old => when(now.absent("autocast"), [mixed]),
                (true, true) => {
                    if now.absent("autocast") {
                        vec![mixed, narrow]
                    } else {
                        vec![narrow]
                    }
                }
                (true, false) => vec![json!({"weights": if old { "fp16" } else { "bf16" }})],
                _ => Vec::new(),
            }
        },
    },
    Move {
        settings: OPTIMIZER,
        fixed: OPTIMIZER,
        cost: Cost::Arithmetic,
        why: "states in one byte; paged ones go to the host when the card is full",
        values: |now| {
            let kinds = ["adamw8bit", "paged-adamw8bit"];
            when(now.by_torch() && now.adam(), kinds.map(|kind| json!({"optimizer": {"kind": kind}})))
        },
    },
    Move {
        settings: OPTIMIZER,
        fixed: OPTIMIZER,
        cost: Cost::Arithmetic,
        why: "states by row and column",
        values: |now| when(now.by_torch() && now.adam(), [json!({"optimizer": {"kind": "adafactor"}})]),
    },
    Move {
        settings: &["quantization"],
        fixed: &["quantization"],
        cost: Cost::Arithmetic,
        why: "the weights beneath the adapters in four bits",
        values: |now| {
            let plain = now.by_torch() && now.is("adapter.method", "lora") && now.absent("quantization");
            when(plain, [json!({"quantization": {"scheme": "nf4", "double": false}})])
        },
    },
    Move {
        settings: &["quantization.experts", "quantization.prepare"],
        fixed: &["quantization.experts"],
        cost: Cost::Arithmetic,
        why: "experts are packed like linears, and what is not packed stays in two bytes",
        values: |now| {
            let experts = ModelSizes::of(now.model.config(), 1).experts.is_some() && now.alone();
            let whole = experts && !now.on("quantization.experts") && !now.is("quantization.scheme", "int8");
            let prepared = now.by_torch() && !now.absent("adapter") && now.on("quantization.prepare");
            let packed = when(whole, [json!({"experts": true})]);
            let narrow = when(prepared, [json!({"prepare": false})]);
            let both = when(whole && prepared, [json!({"experts": true, "prepare": false})]);
            let values = packed.into_iter().chain(narrow).chain(both).map(|how| json!({"quantization": how}));
            when(!now.absent("quantization"), values)
        },
    },
    Move {
        settings: &["batch.batch_size"],
        fixed: &["batch.batch_size"],
        cost: Cost::Batch,
        why: "fewer prompts at once",
        values: |now| {
            let fewer = (1..now.number("batch.batch_size").min(1 << 16)).rev();
            when(!now.trains(), fewer.map(|samples| json!({"batch": {"batch_size": samples}})))
        },
    },
    Move {
        settings: &["batch.seq_len"],
        fixed: &["batch.seq_len"],
        cost: Cost::Length,
        why: "fewer tokens a sample",
        values: |now| {
            let steps = now.number("batch.seq_len").saturating_sub(1) / 64;
            (1..=steps.min(1 << 14)).rev().map(|step| json!({"batch": {"seq_len": step * 64}})).collect()
        },
    },
    Move {
        settings: &["adapter", "quantization"],
        fixed: &["adapter", "quantization"],
        cost: Cost::Training,
        why: "no gradients and states of the model's own weights",
        values: |now| {
            let adapter = match targets(now.model) {
                Some(targets) => json!({"method": "lora", "targets": targets}),
                None => json!({"method": "lora"}),
            };
            let lora = json!({"adapter": adapter});
            // Recomputation follows, unless somebody decided about it.
            let qlora = json!({"adapter": adapter, "quantization": {}});
            match (now.by_torch(), now.absent("adapter"), now.absent("quantization")) {
                (true, true, true) => vec![lora, qlora],
                _ => Vec::new(),
            }
        },
    },
    Move {
        settings: &["parallel", "batch.batch_size", "gradient_accumulation"],
        fixed: &["parallel.dp"],
        cost: Cost::Mesh,
        why: "another split over the cards",
        values: meshes::splits,
    },
    Move {
        settings: &["parallel"],
        fixed: &["parallel.engine", "parallel.mesh", "parallel.dp"],
        cost: Cost::Hardware,
        why: "more cards share weights, gradients and states",
        values: |now| {
            let spread = |power: u32| json!({"parallel": {"gpus": 1u64 << power, "engine": {"fsdp2": {}}}});
            when(now.alone(), (1..=10).map(spread))
        },
    },
    Move {
        settings: &["gpu"],
        fixed: &["gpu"],
        cost: Cost::Hardware,
        why: "a larger card",
        values: |now| {
            let Some(asked) = tree::get(now.tree, "gpu").and_then(|card| Gpu::deserialize(card).ok()) else {
                return Vec::new();
            };
            let mut larger = Gpus::instead_of(now.cards.iter().cloned(), &asked);
            larger.retain(|card| card.memory > asked.memory);
            larger.dedup_by(|a, b| a.memory == b.memory);
            larger.into_iter().map(|card| json!({"gpu": card.name})).collect()
        },
    },
];

/// The tree of a plan.
pub(super) fn tree_of(plan: &RunPlan) -> Value {
    let tree = match plan {
        RunPlan::Train(plan) => serde_json::to_value(plan),
        RunPlan::Infer(plan) => serde_json::to_value(plan),
        RunPlan::Serve(plan) => serde_json::to_value(plan),
    };
    tree.unwrap_or_default()
}
