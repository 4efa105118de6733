//! What `torch.compile` is called on, and what it is not modelled with.

use serde::{Deserialize, Serialize};

use super::parallel::{Engine, Parallel, TensorForm};
use super::{AttentionKind, Checkpointing, Fault, Faults, Kernels, LossKind, ModelCode, TaskKind, TrainPlan};

/// The torch whose compiler the rules follow.
pub const RULES: &str = "torch 2.11";

/// Where it is said that weights are gathered as bytes.
const GATHER: &str = "parallel.engine.fsdp2.float8_gather";

/// What is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Compile {
    /// The model as a whole, its loss with it: `torch.compile(model)`, the Trainer's `torch_compile`.
    Model,
    /// The same with CUDA graphs: `mode="reduce-overhead"`.
    ReduceOverhead,
    /// The model as a whole without its loss, and the loss by itself.
    ModelAndLoss,
    /// Each layer by itself, the rest eager: `layer.compile(fullgraph=True)`.
    Layers,
    /// The same, and the loss by itself, as torchtitan's `compile.components` are by default.
    LayersAndLoss,
}

/// How torchao's float8 training scales what it casts to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Float8 {
    /// One scale for each tensor.
    Tensorwise,
    /// One for each row, and for each column where a product sums over those.
    Rowwise,
}

impl Compile {
    /// Whether each layer is a graph of its own.
    pub fn by_layer(self) -> bool {
        !self.is_whole()
    }

    /// Whether the whole model is compiled.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Model | Self::ReduceOverhead | Self::ModelAndLoss)
    }
}

impl TrainPlan {
    /// The rules, and what is taken for granted.
    pub(super) fn compile_notes(&self) -> Vec<String> {
        let Some(compile) = self.compile else { return Vec::new() };
        let mut notes = vec![format!("torch.compile by the rules of {RULES}")];
        if compile.is_whole() && self.autocast.is_some() && !self.keep_outputs {
            notes.push("torch.compile: the loop is taken for the Trainer's, whose autocast widens logits".into());
        }
        notes
    }

    /// Refuses by name what is not modelled inside a compiled graph.
    pub(super) fn check_compile(&self, faults: &mut Faults) {
        self.check_float8(faults);
        let Some(compile) = self.compile else { return };
        let whole = compile.is_whole();
        let alone = |parallel: &Parallel| {
            let mesh = &parallel.mesh;
            let form = match &parallel.engine {
                Engine::Fsdp2(fsdp) => fsdp.tensor.form,
                Engine::Tp(tensor) => tensor.form,
                _ => return false,
            };
            (mesh.tp == 1 || form == TensorForm::Torchtitan) && mesh.sp == 1
        };
        let spread = self.parallel.as_ref();
        let losses: &[LossKind] = match compile {
            Compile::LayersAndLoss => &[LossKind::Standard, LossKind::Chunked],
            Compile::Layers => &[self.loss.kind],
            _ => &[LossKind::Standard],
        };
        let refused = [
            (
                self.quantization.is_some() && (whole || self.model_code != ModelCode::Torchtune),
                "quantised weights (torchtune's NF4, layer by layer, is)",
            ),
            (self.kernels != Kernels::Transformers, "kernels of Liger"),
            (
                !losses.contains(&self.loss.kind),
                "a loss other than transformers' own (or, layer by layer, one in chunks)",
            ),
            (
                !matches!(self.attention, AttentionKind::Sdpa | AttentionKind::Flex | AttentionKind::Eager),
                "attention other than SDPA, flex attention and eager code",
            ),
            (
                self.save_on_cpu && (whole || self.checkpointing == Checkpointing::Off),
                "saving activations on the host, other than inputs of checkpoints around compiled layers,",
            ),
            (
                self.checkpoints.runs_nested()
                    || whole && (self.checkpoints.selective.is_some() || self.checkpoints.every > 1),
                "this kind of gradient checkpointing",
            ),
            (whole && spread.is_some(), "the whole model on several cards (each layer by itself is)"),
            (
                !whole && !spread.is_none_or(alone),
                "several cards, other than FSDP2's data, context and pipeline parallel and torchtitan's tensor parallel",
            ),
            (self.job.is_flat(), "batches without padding, which are traced anew with symbols for sizes,"),
            (self.objective.kind != TaskKind::Sft, "a task other than the model's own loss"),
            (
                !(self.model_code == ModelCode::Transformers || !whole && self.model_code == ModelCode::Torchtune),
                "model code other than transformers', and torchtune's layers,",
            ),
        ];
        for (_, what) in refused.into_iter().filter(|(used, _)| *used) {
            faults.add(
                Fault::unsupported("torch_compile", format!("torch.compile with {what}")).or_drop("torch_compile"),
            );
        }
    }

    fn check_float8(&self, faults: &mut Faults) {
        let gathers = self
            .parallel
            .as_ref()
            .is_some_and(|parallel| matches!(&parallel.engine, Engine::Fsdp2(fsdp) if fsdp.float8_gather));
        if gathers && self.float8 != Some(Float8::Tensorwise) {
            let what = "gathering bytes without one scale for each tensor";
            faults.add(Fault::unsupported(GATHER, what).or_set("float8", "tensorwise").or_drop(GATHER));
        }
        if self.float8.is_none() {
            return;
        }
        if self.compile.is_none() {
            let fault = Fault::unsupported("float8", "float8 training without torch.compile");
            faults.add(fault.or_set("torch_compile", "layers").or_drop("float8"));
        }
        if self.adapter.is_some() {
            faults.add(Fault::unsupported("float8", "float8 training with adapters").or_drop("float8"));
        }
    }
}
