//! What follows from the engine that spreads a model.

use serde_json::{Value, json};

use super::Draft;
use crate::ask::runner::Runner;
use crate::ask::tree;
use crate::plan::Framework;
use crate::plan::parallel::megatron::PipelineSplit;

/// Fills in what the engine itself decides.
pub(super) fn settle(draft: &mut Draft<'_>) {
    let runner = draft.request.runner;
    if runner == Runner::OneCard {
        return;
    }
    // The engine stands in the plan even where nobody named it.
    if tree::get(&draft.tree, runner.place()).is_none_or(|options| !options.is_object()) {
        let place = if runner == Runner::MegatronFsdp { "parallel.engine.megatron.fsdp" } else { runner.place() };
        tree::set(&mut draft.tree, place, json!({}));
    }
    if runner == Runner::Ddp && draft.request.framework.is_some() && !draft.states("parallel.engine") {
        draft.derived.push(("parallel.engine".into(), "as torchrun or accelerate starts it".into()));
        draft.notes.push("several cards are DDP, as torchrun starts it: every card holds the whole model".into());
    }
    let size = |draft: &Draft<'_>, axis: &str| {
        tree::get(&draft.tree, &format!("parallel.mesh.{axis}")).and_then(Value::as_u64).unwrap_or(1)
    };
    let (tp, pp) = (size(draft, "tp"), size(draft, "pp"));
    // What torchrun starts as DDP where nothing is said, accelerate wraps, and a Trainer runs.
    let framework = draft.request.framework.as_deref().and_then(|name| Framework::find(name).ok());
    let by_accelerate = framework.and_then(|framework| framework.engine).as_deref() == Some("ddp");
    let micro_batches = tree::get(&draft.tree, "gradient_accumulation").and_then(Value::as_u64).unwrap_or(1);
    let waits = matches!(runner, Runner::Ddp | Runner::Fsdp1 | Runner::Fsdp2) && pp == 1 && micro_batches > 1;
    if by_accelerate && waits {
        let why = "transformers 5.17: trainer.py reduces after the last micro-batch";
        draft.derive("parallel.no_sync", json!(true), why);
    }
    match runner {
        Runner::Fsdp1 => {
            if draft.tree.get("adapter").is_some_and(Value::is_object) {
                let why = "as transformers' Trainer and PEFT's examples wrap adapters";
                draft.derive("parallel.engine.fsdp1.wrap", json!("peft"), why);
            }
            narrowed(draft, by_accelerate, "fsdp1");
            reduced(draft, "fsdp1", "bf16");
        }
        Runner::Fsdp2 => {
            if pp > 1 && !draft.states("parallel.engine.fsdp2.reshard_after_forward") {
                draft.derive(
                    "parallel.engine.fsdp2.reshard_after_forward",
                    json!(false),
                    "torchtitan's under a pipeline",
                );
                draft.notes.push(
                    "parameters stay gathered between micro-batches, as torchtitan has it under a pipeline".into(),
                );
            }
            if by_accelerate {
                draft.derive("parallel.engine.fsdp2.wrap", json!("ends"), "accelerate's from 1.14 on");
            }
            narrowed(draft, by_accelerate, "fsdp2");
            reduced(draft, "fsdp2", "fp32");
        }
        // Megatron-DeepSpeed's own scripts start at ZeRO 0.
        Runner::Deepspeed => {
            draft.derive("parallel.engine.deepspeed.zero.stage", json!(2), "our guess");
            if let Some(narrow) = autocast(draft).filter(|_| by_accelerate && !draft.states("weights")) {
                let why = "accelerate 1.15: DeepSpeed computes in the type that autocast would";
                draft.derive("weights", narrow, why);
                draft.derive("autocast", Value::Null, why);
            }
        }
        _ if runner.is_megatron() => megatron(draft, (tp, pp), runner),
        _ => {}
    }
    if matches!(runner, Runner::Fsdp1 | Runner::Fsdp2) {
        stored_as_floats(draft);
    }
}

/// The type that a framework's autocast computes in, where nobody else said it.
fn autocast(draft: &Draft<'_>) -> Option<Value> {
    let known = tree::get(&draft.tree, "autocast").filter(|value| value.is_string()).cloned();
    known.filter(|_| !draft.states("autocast"))
}

/// accelerate trains fp32 shards where it computes in 16 bits, and reduces in 16 bits too (`fsdp2_prepare_model`).
fn narrowed(draft: &mut Draft<'_>, by_accelerate: bool, engine: &str) {
    let place = format!("parallel.engine.{engine}.mixed_precision");
    let [adapted, packed] = ["adapter", "quantization"].map(|key| draft.tree.get(key).is_some_and(Value::is_object));
    if !by_accelerate || packed || draft.states(&place) {
        return;
    }
    if let Some(narrow) = autocast(draft) {
        let why = "accelerate 1.15: the policy that autocast's type stands for";
        draft.derive("autocast", Value::Null, why);
        let mut types = json!({"parameters": narrow, "reduce": narrow});
        if adapted || draft.states("weights") {
            // What is frozen, and a reference, stay in the type they were loaded in.
            types["upcast"] = json!(true);
        } else {
            draft.derive("weights", json!("fp32"), why);
        }
        draft.derive(&place, types, why);
    }
}

/// What gradients are reduced in, where the engine computes in another type than it shards.
fn reduced(draft: &mut Draft<'_>, engine: &str, usual: &str) {
    let mixed = format!("parallel.engine.{engine}.mixed_precision");
    if tree::get(&draft.tree, &mixed).is_some_and(Value::is_object) {
        let why = "torch's example of such a policy";
        draft.derive(&format!("{mixed}.reduce"), json!(usual), why);
        draft.derive(&format!("{mixed}.parameters"), json!("bf16"), why);
    }
}

/// FSDP shards floats, so packed weights are stored as such.
fn stored_as_floats(draft: &mut Draft<'_>) {
    let Some(quantization) = draft.tree.get("quantization").filter(|known| known.is_object()) else { return };
    let storage = quantization.get("storage").and_then(Value::as_str).unwrap_or("u8");
    if draft.states("quantization.storage") || storage != "u8" || quantization["scheme"] == "int8" {
        return;
    }
    let weights = draft.tree["weights"].clone();
    draft.notes.push(format!("bnb_4bit_quant_storage is {}: FSDP shards floats", weights.as_str().unwrap_or_default()));
    draft.derive("quantization.storage", weights, "FSDP shards floats");
}

fn megatron(draft: &mut Draft<'_>, (tp, pp): (u64, u64), runner: Runner) {
    const AT: &str = "parallel.engine.megatron";
    draft.derive("parallel.mesh.sequence_parallel", json!(tp > 1), "on with tensor parallel");
    let loss = if runner == Runner::MegatronDeepspeed { "unfused" } else { "te" };
    draft.derive(&format!("{AT}.cross_entropy"), json!(loss), "Megatron-Bridge's default");
    if let Some(counted) = tree::get(&draft.tree, &format!("{AT}.split.counted")).cloned() {
        for key in ["embedding", "loss"] {
            if counted.get(key).is_none() {
                tree::set(&mut draft.tree, &format!("{AT}.split.counted.{key}"), json!(false));
            }
        }
    }
    if let Some(Value::String(layout)) = tree::get(&draft.tree, &format!("{AT}.split.layout"))
        && let Some(chunks) = PipelineSplit::Layout(layout.clone()).interleaved(pp)
    {
        draft.derive(&format!("{AT}.virtual_pipeline"), json!(chunks.max(1)), "the layout says it");
    }
}
