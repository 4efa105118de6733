//! Tensor parallel through DTensor, by itself or under `fully_shard`.

use serde::{Deserialize, Serialize};

use super::mesh::divides;
use super::{Engine, ModelSizes, Parallel};
use crate::plan::optimizer::Implementation;
use crate::plan::{Kernels, PlanError, TrainPlan};

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
pub(super) fn check(parallel: &Parallel, plan: &TrainPlan, sizes: &ModelSizes) -> Result<(), PlanError> {
    let tp = parallel.mesh.tp;
    if tp < 2 {
        return match parallel.engine {
            Engine::Tp(_) if parallel.mesh.world() > 1 => Err(PlanError::Conflict {
                what: format!("engine tp with tp {tp} splits nothing"),
                hint: format!("set tp to {}", parallel.mesh.world()),
            }),
            _ => Ok(()),
        };
    }
    if parallel.tensor().is_none() {
        return Err(PlanError::Unsupported {
            what: format!("tp {tp} under {}", parallel.engine.name()),
            hint: "tensor parallel is simulated by itself (tp), under fsdp2, and in megatron".into(),
        });
    }
    if let (Engine::Fsdp2(_), 1, 1) = (&parallel.engine, parallel.sharded_over(), parallel.mesh.pp) {
        return Err(PlanError::Conflict {
            what: format!("fsdp2 with tp {tp} and dp_shard 1 shards nothing"),
            hint: "use the engine tp, or more GPUs".into(),
        });
    }
    // A head is never cut: the model's code views a card's columns as whole heads.
    divides("tp", tp, "attention heads", sizes.heads)?;
    divides("tp", tp, "key and value heads", sizes.kv_heads)?;
    if let Some(TensorParallel { form, loss_parallel }) = parallel.tensor() {
        if form == TensorForm::Torchtitan {
            divides("tp", tp, "tokens of a sequence (torchtitan splits the sequence)", sizes.seq_len)?;
        } else if loss_parallel {
            return Err(PlanError::Conflict {
                what: "loss_parallel with transformers' plan, which gathers the logits".into(),
                hint: "use torchtitan's form, or drop it".into(),
            });
        }
    }
    let unsupported = |what: &str, hint: &str| {
        Err(PlanError::Unsupported { what: format!("tp {tp} with {what}"), hint: hint.into() })
    };
    if plan.adapter.is_some() {
        return unsupported("an adapter", "train the whole model, or use data parallel");
    }
    if plan.quantization.is_some() {
        return unsupported("quantised weights", "use 16-bit weights");
    }
    if plan.kernels == Kernels::Liger {
        return unsupported("Liger's kernels", "leave them out: DTensor's linears are torch's");
    }
    Ok(())
}
