//! Arguments of Megatron-LM's `pretrain_*.py` (Megatron-LM core 0.17, training/arguments.py).
//!
//! | module | what is in it |
//! |---|---|
//! | `keys` | what every argument means |
//! | `shape` | the model that the arguments describe |

pub(super) mod keys;
mod shape;

use serde_json::{Value, json};

use super::reader::Reader;
use super::table::Format;
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "Megatron-LM",
    version: "core 0.17",
    source: "Megatron-LM, megatron/training/arguments.py",
    keys: &[keys::KEYS],
};

/// Where its options stand.
const AT: &str = "parallel.engine.megatron";

/// Whole numbers, and the places that they are.
const NUMBERS: [(&str, &str); 16] = [
    ("micro_batch_size", "batch.batch_size"),
    ("seq_length", "batch.seq_len"),
    ("tensor_model_parallel_size", "parallel.mesh.tp"),
    ("pipeline_model_parallel_size", "parallel.mesh.pp"),
    ("context_parallel_size", "parallel.mesh.cp"),
    ("expert_model_parallel_size", "parallel.mesh.ep"),
    ("expert_tensor_parallel_size", "parallel.mesh.etp"),
    ("make_vocab_size_divisible_by", "parallel.engine.megatron.make_vocab_size_divisible_by"),
    ("mtp_num_layers", "parallel.engine.megatron.mtp_layers"),
    ("num_virtual_stages_per_pipeline_rank", "parallel.engine.megatron.virtual_pipeline"),
    ("virtual_pipeline_model_parallel_size", "parallel.engine.megatron.virtual_pipeline"),
    ("decoder_first_pipeline_num_layers", "parallel.engine.megatron.split.ends.first"),
    ("num_layers_in_first_pipeline_stage", "parallel.engine.megatron.split.ends.first"),
    ("decoder_last_pipeline_num_layers", "parallel.engine.megatron.split.ends.last"),
    ("num_layers_in_last_pipeline_stage", "parallel.engine.megatron.split.ends.last"),
    ("cpu_offloading_num_layers", "parallel.engine.megatron.cpu_offloading_layers"),
];

/// Switches, and the places that they turn on.
const SWITCHES: [(&str, &str); 4] = [
    ("overlap_grad_reduce", "overlap_grad_reduce"),
    ("account_for_embedding_in_pipeline_split", "split.counted.embedding"),
    ("account_for_loss_in_pipeline_split", "split.counted.loss"),
    ("moe_shared_expert_overlap", "moe.shared_expert_overlap"),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    reader.set(AT, json!({}));
    for (key, place) in NUMBERS {
        if let Some(size) = reader.number(key).filter(|size| *size > 0) {
            reader.set(place, size);
        }
    }
    for (key, place) in SWITCHES {
        if reader.is_on(key) {
            reader.set(&format!("{AT}.{place}"), true);
        }
    }
    spread(&mut reader);
    let weights = if reader.is_on("fp16") { "fp16" } else { "bf16" };
    reader.set("weights", weights);
    if !value.is_null() && !reader.is_on("fp16") && !reader.is_on("bf16") {
        reader.say("bf16", "without --bf16 and --fp16 it is fp32, which is not simulated under Megatron: bf16 is");
    }
    recompute(&mut reader);
    fp8(&mut reader);
    gradients(&mut reader, weights);
    optimizer(&mut reader);
    experts(&mut reader);
    loss(&mut reader);
    for key in ["attention_dropout", "hidden_dropout"] {
        if reader.real(key).unwrap_or(if beside.name == BRIDGE { 0.0 } else { USUAL_DROPOUT }) > 0.0 {
            reader.say(key, "masks of dropout (0.1 where it is not said) are not simulated: they are more");
        }
    }
    let config = shape::config(&mut reader);
    reader.finish(None, None).map(|read| Imported { config, ..read })
}

/// The name under which Megatron-Bridge and Megatron-SWIFT hand their arguments on: what is not said is off there.
pub(super) const BRIDGE: &str = "Megatron-Bridge";

/// Both arguments' default.
const USUAL_DROPOUT: f64 = 0.1;

/// The mesh, and how many micro-batches are a step.
fn spread(reader: &mut Reader<'_>) {
    let value = reader.value();
    let size = |key: &str| value.get(key).and_then(super::reader::whole).unwrap_or(1).max(1);
    let (tensor, stages, context) =
        (size("tensor_model_parallel_size"), size("pipeline_model_parallel_size"), size("context_parallel_size"));
    let sequence = reader.is_on("sequence_parallel") && tensor > 1;
    reader.set("parallel.mesh.sequence_parallel", sequence);
    let distributed = reader.is_on("use_distributed_optimizer");
    reader.set(&format!("{AT}.distributed_optimizer"), distributed);
    if reader.is_on("use_megatron_fsdp") || reader.is_on("use_custom_fsdp") {
        let strategy = reader.text("data_parallel_sharding_strategy").unwrap_or("no_shard").to_owned();
        reader.set(&format!("{AT}.fsdp.strategy"), strategy);
        if reader.is_on("fsdp_double_buffer") {
            reader.set(&format!("{AT}.fsdp.double_buffer"), true);
        }
    } else {
        reader.get("data_parallel_sharding_strategy");
    }
    // Layers of a chunk, where its arguments say those.
    if let (Some(each), Some(layers)) =
        (reader.number("num_layers_per_virtual_pipeline_stage"), reader.number("num_layers"))
    {
        reader.set(&format!("{AT}.virtual_pipeline"), (layers / stages / each.max(1)).max(1));
    }
    if let Some(layout) = reader.text("pipeline_model_parallel_layout").map(str::to_owned) {
        reader.set(&format!("{AT}.split.layout"), layout);
    }
    match reader.text("cp_comm_type") {
        None | Some("p2p") => {}
        Some("a2a") => reader.set(&format!("{AT}.cp_comm"), "a2a"),
        Some(other) => reader.refuse("cp_comm_type", other, "use p2p or a2a"),
    }
    let one = tensor.saturating_mul(stages).saturating_mul(context);
    let spread = size("expert_model_parallel_size").saturating_mul(size("expert_tensor_parallel_size"));
    let cards = reader.beside.cards.unwrap_or_else(|| fewest(reader, one, spread.saturating_mul(stages)));
    let Some(batch) = reader.number("global_batch_size") else { return };
    let micro = reader.number("micro_batch_size").unwrap_or(1).max(1);
    let replicas = (cards / one).max(1);
    let (steps, left) = (batch / micro.saturating_mul(replicas), batch % micro.saturating_mul(replicas));
    if steps == 0 || left > 0 {
        let problem = format!(
            "global_batch_size: {batch} is not so many times {micro} on each of {replicas} data-parallel ranks"
        );
        reader.notes.push(format!("{problem}: --gradient-accumulation says the micro-batches"));
    }
    reader.set("gradient_accumulation", steps.max(1));
}

/// Cards of a node, where nobody says how many there are.
const USUAL_CARDS: u64 = 8;

/// The fewest nodes whose cards hold the mesh, which is said where one does not.
fn fewest(reader: &mut Reader<'_>, one: u64, experts: u64) -> u64 {
    let holds = |cards: &u64| cards.is_multiple_of(one) && cards.is_multiple_of(experts);
    let cards = (1..=MOST_NODES).map(|nodes| nodes * USUAL_CARDS).find(holds).unwrap_or(USUAL_CARDS);
    if cards > USUAL_CARDS {
        reader.set("parallel.gpus", USUAL_CARDS);
        reader.set("parallel.nodes", cards / USUAL_CARDS);
        reader
            .notes
            .push(format!("how many cards there are is not said: {cards} are taken, the fewest that hold the mesh"));
    }
    cards
}

const MOST_NODES: u64 = 4096;

fn recompute(reader: &mut Reader<'_>) {
    let at = format!("{AT}.recompute");
    match reader.text("recompute_granularity") {
        Some("full") => {
            let how = reader.text("recompute_method").unwrap_or("uniform").to_owned();
            let layers = reader.number("recompute_num_layers").unwrap_or(1);
            reader.set(&at, json!({how: layers}));
        }
        Some("selective") => selective(reader),
        _ if reader.is_on("recompute_activations") => selective(reader),
        _ if reader.is_on("checkpoint_activations") => reader.set(&at, json!({"uniform": 1})),
        _ if reader.is_on("moe_layer_recompute") => reader.set(&at, json!({"selective": ["moe"]})),
        _ => {}
    }
}

fn selective(reader: &mut Reader<'_>) {
    let parts: Vec<&str> = match reader.get("recompute_modules") {
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        Some(Value::String(one)) => one.split([' ', ',']).filter(|part| !part.is_empty()).collect(),
        _ => vec!["core_attn"],
    };
    reader.set(&format!("{AT}.recompute"), json!({"selective": parts}));
}

fn fp8(reader: &mut Reader<'_>) {
    let on = |value: Option<&Value>| value.is_some_and(|value| !super::table::is_off(value));
    if !on(reader.get("fp8_format")) && !on(reader.get("fp8")) {
        return;
    }
    let recipe = reader.text("fp8_recipe").unwrap_or("delayed").to_owned();
    reader.set(&format!("{AT}.fp8.recipe"), recipe);
    if reader.is_on("fp8_param_gather") {
        reader.set(&format!("{AT}.fp8.param_gather"), true);
    }
    let ends = reader.is_on("first_last_layers_bf16");
    for end in ["start", "end"] {
        let layers = reader.number(&format!("num_layers_at_{end}_in_bf16")).unwrap_or(1);
        if ends && layers > 0 {
            reader.set(&format!("{AT}.fp8.layers_at_{end}_in_bf16"), layers);
        }
    }
}

fn gradients(reader: &mut Reader<'_>, weights: &str) {
    if reader.is_on("grad_reduce_in_bf16") {
        reader.set(&format!("{AT}.main_gradients"), "bf16");
    } else if weights == "fp16" && !reader.is_on("accumulate_allreduce_grads_in_fp32") {
        reader.say("fp16", "gradients are summed in fp32 in the simulation, which is more than fp16");
    }
    if reader.switch("gradient_accumulation_fusion") == Some(false) {
        reader.set(&format!("{AT}.gradient_accumulation_fusion"), false);
    }
}

fn optimizer(reader: &mut Reader<'_>) {
    match reader.text("optimizer") {
        None | Some("adam" | "adamw") => {}
        Some(other) => reader.refuse("optimizer", other, "use adam"),
    }
    if reader.is_on("use_precision_aware_optimizer") {
        for (key, state) in [("exp_avg_dtype", "exp_avg"), ("exp_avg_sq_dtype", "exp_avg_sq")] {
            let kind = reader.text(key).and_then(super::trainer::short).unwrap_or("fp32");
            reader.set(&format!("{AT}.precision_aware.{state}"), kind);
        }
        if reader.text("main_grads_dtype") == Some("bf16") {
            reader.set(&format!("{AT}.main_gradients"), "bf16");
        }
    }
    if reader.is_on("optimizer_cpu_offload") {
        let share = (reader.real("optimizer_offload_fraction").unwrap_or(1.0).clamp(0.0, 1.0) * 100.0).round() as u64;
        reader.set(&format!("{AT}.optimizer_cpu_offload_percent"), share);
    }
}

fn experts(reader: &mut Reader<'_>) {
    if reader.text("moe_router_dtype") == Some("fp32") {
        reader.set(&format!("{AT}.moe.router_fp32"), true);
    }
    if let Some(factor) = reader.real("moe_expert_capacity_factor").filter(|factor| *factor > 0.0) {
        if reader.is_on("moe_pad_expert_input_to_capacity") {
            reader.set(&format!("{AT}.moe.capacity_percent"), (factor * 100.0).round() as u64);
        } else {
            reader.say("moe_expert_capacity_factor", "tokens are taken as evenly routed, none dropped");
        }
    }
    match (reader.text("moe_token_dispatcher_type"), reader.text("moe_flex_dispatcher_backend")) {
        (Some("flex"), Some("hybridep")) => reader.set(&format!("{AT}.moe.dispatcher"), "hybridep"),
        (Some(other @ ("flex" | "allgather")), _) => {
            reader.say(&format!("moe_token_dispatcher_type: {other}"), "tokens go by an all-to-all in the simulation");
        }
        _ => {}
    }
}

/// Megatron-LM's own unless it is told to fuse it.
fn loss(reader: &mut Reader<'_>) {
    let fused = reader.is_on("cross_entropy_loss_fusion");
    let theirs = reader.text("cross_entropy_fusion_impl") == Some("te");
    if fused && !theirs {
        reader
            .say("cross_entropy_loss_fusion", "Megatron's own kernels of it are simulated one by one, which keep more");
    }
    reader.set(&format!("{AT}.cross_entropy"), if fused && theirs { "te" } else { "unfused" });
}

#[cfg(test)]
mod tests;
