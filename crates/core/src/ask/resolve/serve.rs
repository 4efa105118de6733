//! A serving engine settled.

use serde_json::json;

use super::{Draft, Settled, Surroundings};
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::Model;
use crate::plan::{Fault, ModelSizes, RunPlan, ServePlan};

pub(super) fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    let defaults = ServePlan::default();
    let mut draft = Draft::new(request, &defaults);
    let plain = draft.tree.clone();
    if request.framework.is_some() {
        draft.faults.add(Fault::no_effect("framework", "on a serving engine"));
    }
    tree::lay(&mut draft.tree, &request.stated);
    draft.tree["engine"] = json!(request.runner.name());
    draft.honoured(&plain, around);
    draft.card(around);
    let Some(plan) = draft.plan::<ServePlan>() else { return Err(draft.faults.end().err().unwrap_or_default()) };
    check(model, &plan, &mut draft);
    draft.faults.clone().end()?;
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Serve(Box::new(plan)), notes: draft.notes, origins })
}

/// Refuses what no engine would start with.
fn check(model: &Model, plan: &ServePlan, draft: &mut Draft<'_>) {
    const MOST: u64 = 1 << 24;
    for (path, value, most) in [
        ("context", plan.context, MOST),
        ("max_num_seqs", plan.max_num_seqs, MOST),
        ("max_num_batched_tokens", plan.max_num_batched_tokens, MOST),
        ("block_size", plan.block_size, 65_536),
        ("tensor_parallel_size", plan.tensor_parallel_size, 65_536),
        ("pipeline_parallel_size", plan.pipeline_parallel_size, 65_536),
        ("data_parallel_size", plan.data_parallel_size, 65_536),
        ("ubatch_size", plan.ubatch_size, MOST),
        ("logical_batch", plan.logical_batch, MOST),
        ("parallel", plan.parallel, MOST),
        ("max_loras", plan.max_loras, MOST),
        ("max_lora_rank", plan.max_lora_rank, MOST),
    ] {
        let wrong = value.is_some_and(|value| !(1..=most).contains(&value));
        draft.faults.when(wrong, || Fault::value(path, value.unwrap_or_default(), format!("from 1 to {most}")));
    }
    let share = plan.gpu_memory_utilization.filter(|share| !(*share > 0.0 && *share <= 1.0));
    if let Some(share) = share {
        draft.faults.add(Fault::value("gpu_memory_utilization", share, "above 0 and at most 1"));
    }
    let sizes = ModelSizes::of(model.config(), 0);
    divided(draft, "tensor_parallel_size", plan.tensor_parallel_size, sizes.heads, "attention heads");
    if let (Some(stages), Some(layers)) = (plan.pipeline_parallel_size, sizes.layers) {
        draft.faults.when(stages > layers, || {
            Fault::new("pipeline_parallel_size", format!("{stages} stages of {layers} layers"))
                .or_set("pipeline_parallel_size", layers)
        });
    }
    let experts = sizes.experts.is_some();
    for (path, given) in [
        ("expert_parallel", plan.expert_parallel),
        ("cpu_moe", plan.cpu_moe),
        ("n_cpu_moe", plan.n_cpu_moe.is_some()),
        ("override_tensor", plan.override_tensor.is_some()),
    ] {
        draft.faults.when(given && !experts, || Fault::no_effect(path, "on a model without experts"));
    }
    for (path, given) in [("max_loras", plan.max_loras.is_some()), ("max_lora_rank", plan.max_lora_rank.is_some())] {
        draft.faults.when(given && !plan.enable_lora, || {
            Fault::no_effect(path, "without {enable_lora}").or_set("enable_lora", true)
        });
    }
    draft.faults.when(plan.num_speculative_tokens.is_some() && plan.speculative_model.is_none(), || {
        Fault::no_effect("num_speculative_tokens", "without {speculative_model}")
    });
    let placed = [plan.n_cpu_moe.is_some(), plan.cpu_moe, plan.override_tensor.is_some()];
    draft.faults.when(placed.iter().filter(|given| **given).count() > 1, || {
        Fault::new("n_cpu_moe", "{n_cpu_moe}, {cpu_moe} and {override_tensor} say the same thing in three ways")
            .or("give one of them")
    });
    let quantised = plan.cache_type_v.as_deref().is_some_and(|kind| !matches!(kind, "f16" | "bf16" | "f32"));
    draft.faults.when(quantised && plan.flash_attn.as_deref() == Some("off"), || {
        Fault::new("cache_type_v", "llama.cpp quantises values only with flash attention")
            .or_drop("cache_type_v")
            .or_drop("flash_attn")
    });
}

fn divided(draft: &mut Draft<'_>, path: &str, ranks: Option<u64>, whole: Option<u64>, what: &str) {
    let (Some(ranks), Some(whole)) = (ranks.filter(|ranks| *ranks > 1), whole) else { return };
    if whole.is_multiple_of(ranks) {
        return;
    }
    let divides = |count: &u64| whole.is_multiple_of(*count);
    let near = [(1..=whole.min(ranks - 1)).rev().find(divides), (ranks..=whole).find(divides)];
    let fault = Fault::new(path, format!("{{{path}}} {ranks} does not divide {whole} {what}"));
    draft.faults.add(near.into_iter().flatten().fold(fault, |fault, count| fault.or_set(path, count)));
}
