//! Tensor parallel through DTensor, by itself or under `fully_shard`.

use serde::{Deserialize, Serialize};

use super::mesh::{TP, divides};
use super::{Engine, ModelSizes, Parallel};
use crate::plan::optimizer::Implementation;
use crate::plan::{Fault, Faults, Kernels, TrainPlan};

/// Who splits the layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TensorForm {
    /// transformers, by the model's own plan (`tp_plan="auto"`).
    #[default]
    Transformers,
    /// torchtitan, as it splits Llama: norms and residuals along the sequence.
    Torchtitan,
}

/// Options of tensor parallel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TensorParallel {
    /// Who splits the layers.
    pub form: TensorForm,
    /// Whether the loss is computed on parts of the vocabulary (`loss_parallel`).
    pub loss_parallel: bool,
}

/// What torch itself does not run although it is simulated, said with the result.
pub(crate) fn note(plan: &TrainPlan) -> Option<String> {
    let parallel = plan.parallel.as_ref().filter(|parallel| matches!(parallel.engine, Engine::Tp(_)))?;
    let mixed = plan.clip || plan.optimizer.implementation != Implementation::Forloop;
    (mixed && parallel.tensor()?.form == TensorForm::Transformers).then(|| {
        "torch 2.11 refuses foreach and fused kernels on split and whole parameters together: make the whole ones \
         replicated DTensors, or use a for-loop optimizer without clipping"
            .to_owned()
    })
}

/// Refuses what tensor parallel cannot run or the simulation does not know.
pub(super) fn check(parallel: &Parallel, plan: &TrainPlan, sizes: &ModelSizes, faults: &mut Faults) {
    let (tp, world) = (parallel.mesh.tp, parallel.mesh.world());
    let Some(TensorParallel { form, loss_parallel }) = parallel.tensor() else { return };
    let place = if matches!(parallel.engine, Engine::Tp(_)) { "tp" } else { "fsdp2.tensor" };
    let at = |key: &str| format!("parallel.engine.{place}.{key}");
    if tp < 2 {
        faults.when(matches!(parallel.engine, Engine::Tp(_)) && world > 1, || {
            let fault = Fault::new(TP, format!("{{parallel.engine}} tp with {{{TP}}} {tp} splits nothing"));
            match sizes.heads.filter(|heads| !heads.is_multiple_of(world)) {
                Some(heads) => fault.or(format!("take as many cards as divide the {heads} attention heads")),
                None => fault.or_set(TP, world),
            }
        });
        return;
    }
    if let (Engine::Fsdp2(_), 1, 1) = (&parallel.engine, parallel.sharded_over(), parallel.mesh.pp) {
        let problem = format!("fsdp2 with {{{TP}}} {tp} and {{parallel.mesh.dp_shard}} 1 shards nothing");
        faults.add(
            Fault::new("parallel.engine", problem).or_set("parallel.engine", super::named("tp")).or("take more GPUs"),
        );
    }
    // A head is never cut: the model's code views a card's columns as whole heads.
    if sizes.copies_keys(tp) {
        divides(faults, TP, tp, "key and value heads", sizes.kv_heads);
    }
    if form == TensorForm::Torchtitan {
        divides(faults, TP, tp, "tokens of a sequence (torchtitan splits the sequence)", sizes.seq_len);
    } else if loss_parallel {
        let path = at("loss_parallel");
        let problem = format!("{{{path}}} with transformers' plan, which gathers the logits");
        faults.add(Fault::new(&path, problem).or_set(at("form"), "torchtitan").or_drop(&path));
    }
    let refused = [
        (plan.adapter.is_some(), "adapter", "an adapter"),
        (plan.quantization.is_some(), "quantization", "quantised weights"),
        (plan.kernels == Kernels::Liger, "kernels", "Liger's kernels (DTensor's linears are torch's)"),
    ];
    for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
        faults.add(Fault::unsupported(path, format!("{{{TP}}} {tp} with {what}")).or_drop(path));
    }
}
