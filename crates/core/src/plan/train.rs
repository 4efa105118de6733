//! A training run.

use serde::{Deserialize, Serialize};

use super::job::{Evaluation, Saving, Sizes};
use super::parallel::Engine;
use super::{
    AdapterLayout, AdapterPlan, AllocatorOptions, AttentionKind, Batch, CheckpointOptions, Compile, Fault, Faults,
    Float8, Gpu, Job, LossKind, LossOptions, ModelCode, ModelSizes, Objective, Optimizer, Package, Parallel, PlanError,
    Quantization, SdpaKernel, Stack,
};
use crate::dtype::DType;
use crate::model::op::{Parameter, Role};
use crate::model::{Assumption, Model, Program, Sharing};

/// What is trained, and how, on one card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainPlan {
    /// What goes in.
    pub batch: Batch,
    /// The type the weights are held in.
    pub weights: DType,
    /// The type autocast computes in.
    pub autocast: Option<DType>,
    /// The type gradients are kept in, when not that of the weights (`Parameter.grad_dtype` of torch 2.10 and later).
    pub gradients: Option<DType>,
    /// How attention is computed.
    pub attention: AttentionKind,
    /// The kernel that SDPA must take; torch chooses when absent.
    pub sdpa_kernel: Option<SdpaKernel>,
    /// What is compiled; absent: all is eager.
    #[serde(rename = "torch_compile")]
    pub compile: Option<Compile>,
    /// How products of layers are scaled to bytes (torchao's `convert_to_float8_training`); absent: they are not.
    pub float8: Option<Float8>,
    /// Whether layers are recomputed in backward.
    pub checkpointing: Checkpointing,
    /// Which layers those are, and how they are recomputed.
    pub checkpoints: CheckpointOptions,
    /// Whether all that forward saves waits in pinned host memory (`torch.autograd.graph.save_on_cpu`).
    pub save_on_cpu: bool,
    /// Whose code the model is.
    pub model_code: ModelCode,
    /// Whose kernels run norms, MLPs and the loss.
    pub kernels: Kernels,
    /// How the loss of a language model is computed.
    pub loss: LossOptions,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Whether each parameter is stepped, and its gradient freed, as soon as the gradient is complete.
    pub optimizer_in_backward: bool,
    /// Micro-batches per step.
    pub gradient_accumulation: u32,
    /// Whether gradients are clipped by their norm.
    pub clip: bool,
    /// Whether the loop keeps the model's output (and so the logits) until backward is over; `Trainer` does not.
    pub keep_outputs: bool,
    /// Whether Inductor's benchmark is taken to decide otherwise than usual on the padding of a head's gradient.
    #[serde(skip)]
    pub pads_otherwise: bool,
    /// Whether the loop's name for the loss is bound until the next one is there, and with it the graph: what its functions
    /// hold as plain attributes lives on through the next forward pass.
    pub keep_loss: bool,
    /// Parameters that are not trained: those whose name starts with one of these.
    pub frozen: Vec<String>,
    /// How the run is spread over several cards; `gpu` is then one of them, and the batch is what each gets.
    pub parallel: Option<Parallel>,
    /// What is trained instead of the model's own parameters.
    pub adapter: Option<AdapterPlan>,
    /// How the frozen weights are held, when not in `weights`.
    pub quantization: Option<Quantization>,
    /// What is trained for, where it is not the model's own loss.
    #[serde(skip_serializing_if = "Objective::is_default")]
    pub objective: Objective,
    /// What surrounds the step.
    #[serde(skip_serializing_if = "Job::is_plain")]
    pub job: Job,
    /// What the model is taken for where its type is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assume: Option<Assumption>,
    /// The card.
    pub gpu: Gpu,
    /// Options of the caching allocator.
    pub allocator: AllocatorOptions,
    /// Versions of the software.
    #[serde(skip_serializing_if = "Stack::is_default")]
    pub stack: Stack,
}

impl Default for TrainPlan {
    fn default() -> Self {
        Self {
            batch: Batch::default(),
            weights: DType::BF16,
            autocast: None,
            gradients: None,
            attention: AttentionKind::Sdpa,
            sdpa_kernel: None,
            compile: None,
            float8: None,
            checkpointing: Checkpointing::Off,
            checkpoints: CheckpointOptions::default(),
            save_on_cpu: false,
            model_code: ModelCode::Transformers,
            kernels: Kernels::Transformers,
            loss: LossOptions::default(),
            optimizer: Optimizer::default(),
            optimizer_in_backward: false,
            gradient_accumulation: 1,
            clip: false,
            keep_outputs: true,
            pads_otherwise: false,
            keep_loss: false,
            frozen: Vec::new(),
            parallel: None,
            adapter: None,
            quantization: None,
            objective: Objective::default(),
            job: Job::default(),
            assume: None,
            gpu: Gpu::h200(),
            allocator: AllocatorOptions::default(),
            stack: Stack::default(),
        }
    }
}

impl TrainPlan {
    /// Refuses what cannot run on any model; all of it at once.
    pub fn check(&self) -> Result<(), Vec<Fault>> {
        self.faults(&ModelSizes::default()).end()
    }

    /// Refuses what cannot run on this model; all of it at once.
    pub fn check_on(&self, model: &Model) -> Result<(), Vec<Fault>> {
        let sizes = ModelSizes::of(model.config(), self.batch.seq_len);
        let mut faults = self.faults(&sizes);
        let packs = self.quantization.as_ref().is_some_and(|known| known.experts);
        faults.when(packs && sizes.experts.is_none(), || {
            Fault::no_effect("quantization.experts", "on a model without experts")
        });
        self.batch.check_tokens(model, &mut faults);
        faults.when(model.is_pipeline(), || {
            let what = "a whole pipeline is not trained: name the folder of its part that is (unet, transformer, vae)";
            Fault { unsupported: true, ..Fault::new("model", what) }
        });
        self.job.check_on(model, &self.batch, &mut faults);
        self.objective.check_on(model, &mut faults);
        faults.end()
    }

    fn faults(&self, sizes: &ModelSizes) -> Faults {
        let mut faults = Faults::default();
        self.batch.check(&mut faults);
        self.allocator.check(&mut faults);
        self.job.check(&mut faults);
        self.objective.check(self, &mut faults);
        let engine = self.parallel.as_ref().map(|parallel| &parallel.engine);
        let whole = matches!(engine, Some(Engine::Deepspeed(options)) if options.zero.stage < 3);
        faults.when(whole && self.job.saving.is_some_and(Saving::is_full), || {
            Fault::no_effect("job.saving.state_dict", "below ZeRO 3, which alone has no whole matrices")
        });
        faults.when(self.job.merge && !matches!(self.adapter, Some(AdapterPlan::Lora(_))), || {
            Fault::new("job.merge", "there is no LoRA adapter to merge").or_drop("job.merge")
        });
        faults.range("gradient_accumulation", self.gradient_accumulation.into(), 1..=u32::MAX.into());
        faults.float("weights", self.weights);
        self.check_adapter(&mut faults);
        self.optimizer.check(self.weights, self.adapter.is_some(), &mut faults);
        self.check_options(&mut faults);
        self.model_code.check(self, &mut faults);
        if let Some(parallel) = &self.parallel {
            self.check_on_many_cards(parallel, &mut faults);
            parallel.check_into(self, sizes, &mut faults);
        }
        faults
    }

    /// The batches of a run; of several cards, those of the card that sees the longest: accelerate deals them out in turn.
    pub fn batches(&self) -> Vec<Sizes> {
        self.job.dealt(&self.batch, self.gradient_accumulation, self.data_cards() as usize)
    }

    /// The batches of an evaluation.
    pub fn evaluated(&self, evaluation: &Evaluation) -> Vec<Sizes> {
        let batch = Batch { batch_size: evaluation.batch_size, ..self.batch.clone() };
        self.job.evaluated_on(&batch, evaluation.rows, self.data_cards() as usize)
    }

    /// Cards that see batches of their own.
    pub fn data_cards(&self) -> u64 {
        let product = |parallel: &Parallel| parallel.mesh.dp_replicate.saturating_mul(parallel.mesh.dp_shard);
        self.parallel.as_ref().map_or(1, |parallel| product(parallel).clamp(1, 1 << 16))
    }

    /// What the adapter comes to on a model of this type.
    pub fn layout(&self, model_type: &str, program: &Program) -> Result<Option<AdapterLayout>, PlanError> {
        match &self.adapter {
            Some(AdapterPlan::Lora(lora)) => {
                let layout = AdapterLayout::of_program(lora, model_type, program)?;
                let fused = self.kernels == Kernels::Liger || self.loss.kind != LossKind::Standard;
                layout.check_simulated(lora, program, fused)?;
                Ok(Some(layout))
            }
            Some(AdapterPlan::Other(other)) => other.layout(model_type, program).map(Some),
            None => Ok(None),
        }
    }

    fn check_adapter(&self, faults: &mut Faults) {
        if let Some(quantization) = &self.quantization {
            quantization.check(faults);
            let loads = quantization.experts && self.job.from_pretrained;
            faults.when(loads, || {
                let what = "loading of experts that are packed";
                Fault::unsupported("quantization.experts", what).or_drop("job.from_pretrained")
            });
        }
        match &self.adapter {
            Some(AdapterPlan::Lora(lora)) => faults.take(lora.check()),
            Some(AdapterPlan::Other(other)) => {
                faults.take(other.check());
                faults.when(self.quantization.is_some(), || {
                    Fault::unsupported("quantization", "a quantised base under PEFT methods other than LoRA")
                        .or_drop("quantization")
                        .or("use LoRA ({adapter})")
                });
                faults.when(self.parallel.is_some(), || {
                    Fault::unsupported("adapter", "PEFT methods other than LoRA on several cards").or("run on one card")
                });
            }
            None if self.model_code.adapts() => {}
            None => faults.when(self.quantization.is_some() && self.job.steps != Some(0), || {
                Fault::new("quantization", "quantised weights cannot be trained themselves")
                    .or("train an adapter beside them (QLoRA): {adapter}")
                    .or_drop("quantization")
            }),
        }
    }

    /// The versions that rules go by: those of the stack, and those that plans named elsewhere before it was there.
    pub fn versions(&self) -> Stack {
        let mut stack = self.stack.clone();
        if let Some(Parallel { engine: super::parallel::Engine::Megatron(options), .. }) = &self.parallel {
            stack = options.older_spelling(stack);
        }
        if self.quantization.as_ref().is_some_and(|known| known.keeps_inputs)
            && stack.named(Package::Bitsandbytes).is_none()
        {
            stack = stack.with(Package::Bitsandbytes, Quantization::LAST_TO_KEEP_INPUTS);
        }
        stack
    }

    /// Whether 4-bit linears keep their input until the graph dies.
    pub fn keeps_inputs(&self) -> bool {
        self.quantization.is_some()
            && self.versions().version(Package::Bitsandbytes) <= Quantization::LAST_TO_KEEP_INPUTS
    }

    /// Tokens that an adapter puts before those of the batch.
    pub fn virtual_tokens(&self) -> u64 {
        match &self.adapter {
            Some(AdapterPlan::Other(other)) => other.virtual_tokens(),
            _ => 0,
        }
    }

    /// What becomes of weights that layers share: an engine that wraps layer after layer makes its own shards of them in each.
    pub fn sharing(&self) -> Sharing {
        match self.parallel.as_ref().is_some_and(Parallel::wraps_layers) {
            true => Sharing::Apart,
            false => self.quantization.as_ref().map_or(Sharing::Once, Quantization::sharing),
        }
    }

    /// Whether a parameter is left as it is: the plan says so, or the model's own code.
    pub fn is_frozen(&self, parameter: &Parameter) -> bool {
        parameter.role == Role::Frozen || self.frozen.iter().any(|prefix| parameter.name.starts_with(prefix.as_str()))
    }
}

/// What of a layer is recomputed in backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Checkpointing {
    /// Nothing.
    Off,
    /// Every layer, without reentrant autograd (`use_reentrant=False`).
    Full,
}

/// Whose kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kernels {
    /// transformers' own Python.
    Transformers,
    /// Liger's fused norms, rope, SwiGLU and linear cross entropy.
    Liger,
}
