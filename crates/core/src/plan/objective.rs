//! What a run trains for: preferences, rewards, rollouts, a teacher, pairs of sentences. Settings are called as TRL and
//! sentence-transformers call them.

use serde::{Deserialize, Serialize};

use super::{AdapterPlan, Checkpointing, Fault, Faults, Kernels, LossKind, PlanError, TrainPlan};
use crate::dtype::DType;
use crate::model::{Model, Task};

/// The task of a run and its settings; those that a task does not have are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Objective {
    /// Which it is.
    pub kind: TaskKind,
    /// Tokens of a prompt: of pairs, those before chosen and rejected part; of rollouts, what is generated from.
    pub max_prompt_length: Option<u64>,
    /// Tokens that are generated for each prompt (`max_completion_length`, of online DPO `max_new_tokens`).
    pub max_completion_length: Option<u64>,
    /// Which of the task's losses.
    pub loss_type: Option<String>,
    /// How strongly the reference holds the policy; 0: there is none.
    pub beta: Option<f64>,
    /// How much the likelihood of chosen answers counts in CPO; 0: it is not computed.
    pub cpo_alpha: Option<f64>,
    /// The reference's log-probabilities are computed before training, so that it need not stay.
    pub precompute_ref_log_probs: bool,
    /// Pairs are weighted by how likely they are (WPO).
    pub use_weighting: bool,
    /// Steps that use the completions of one generation.
    pub steps_per_generation: Option<u64>,
    /// How often those completions are gone over.
    pub num_iterations: Option<u64>,
    /// Whether scores are divided by a temperature before sampling, and which.
    pub temperature: Option<f64>,
    /// Tokens are sampled among so many likeliest ones.
    pub top_k: Option<u64>,
    /// Completions are made to have all their tokens (`min_new_tokens` in `generation_kwargs`).
    pub forced_length: bool,
    /// An engine that generates in the policy's place.
    pub vllm: Option<Vllm>,
    /// A model that scores completions.
    pub reward_model: Option<OtherModel>,
    /// The model that is trained beside the policy of PPO, to foresee scores.
    pub value_model: Option<OtherModel>,
    /// The model that is distilled.
    pub teacher: Option<OtherModel>,
    /// How often the student of GKD writes completions anew, from 0 to 1.
    pub lmbda: Option<f64>,
    /// Samples that go through the model at once: of a cached contrastive loss, in PPO's rollout (`local_rollout_forward_batch_size`),
    /// or without a graph before an actor's or critic's update.
    pub mini_batch_size: Option<u64>,
    /// Parts that PPO's batch is cut into; at the end of each its names go.
    pub num_mini_batches: Option<u64>,
    /// Texts of a sample: 2, or 3 where each brings a hard negative.
    pub texts: Option<u64>,
}

/// A model besides the one that is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OtherModel {
    /// Its name.
    pub model: String,
    /// Its `config.json`; a plan file may leave it out where the name can be looked up.
    pub config: serde_json::Value,
    /// The type its weights are held in; that of the policy's when absent.
    pub weights: Option<DType>,
}

impl Default for OtherModel {
    fn default() -> Self {
        Self { model: String::new(), config: serde_json::Value::Null, weights: None }
    }
}

/// vLLM as TRL starts it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Vllm {
    /// Where it runs.
    pub mode: VllmMode,
    /// Its share of the card (`vllm_gpu_memory_utilization`).
    pub gpu_memory_utilization: Option<f64>,
    /// Whether it sleeps while the policy is trained (`vllm_enable_sleep_mode`).
    pub enable_sleep_mode: bool,
}

/// Where a rollout engine runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VllmMode {
    /// On the same cards as the trainer.
    #[default]
    Colocate,
    /// Elsewhere.
    Server,
}

/// The tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TaskKind {
    /// The model's own loss on its batch.
    #[default]
    Sft,
    /// TRL's `DPOTrainer`.
    Dpo,
    /// TRL's `KTOTrainer`.
    Kto,
    /// TRL's `ORPOTrainer` (trl.experimental).
    Orpo,
    /// TRL's `CPOTrainer` (trl.experimental).
    Cpo,
    /// TRL's `RewardTrainer`.
    Reward,
    /// TRL's `PRMTrainer` (trl.experimental).
    Prm,
    /// TRL's `GRPOTrainer`.
    Grpo,
    /// TRL's `RLOOTrainer`.
    Rloo,
    /// TRL's `OnlineDPOTrainer` (trl.experimental).
    OnlineDpo,
    /// `PPOTrainer` (trl.experimental, up to trl 1.12).
    Ppo,
    /// TRL's `DistillationTrainer`.
    Distillation,
    /// `GKDTrainer` (trl.experimental).
    Gkd,
    /// The update of verl's or OpenRLHF's actor, on sequences that are there.
    Policy,
    /// The update of their critic.
    Value,
    /// `MultipleNegativesRankingLoss` of sentence-transformers.
    Mnrl,
    /// `CachedMultipleNegativesRankingLoss`.
    CachedMnrl,
    /// `TripletLoss`.
    Triplet,
    /// `BinaryCrossEntropyLoss` of a `CrossEncoder`.
    CrossEncoder,
}

/// A setting: its place, whether it is stated, and who has it.
type Owned = (&'static str, fn(&Objective) -> bool, &'static [TaskKind]);

/// What of the settings a task has.
const SETTINGS: &[Owned] = {
    use TaskKind::*;
    &[
        (
            "objective.max_prompt_length",
            |task| task.max_prompt_length.is_some(),
            &[Dpo, Kto, Grpo, Rloo, OnlineDpo, Ppo, Distillation, Gkd],
        ),
        (
            "objective.max_completion_length",
            |task| task.max_completion_length.is_some(),
            &[Grpo, Rloo, OnlineDpo, Ppo, Distillation, Gkd],
        ),
        ("objective.loss_type", |task| task.loss_type.is_some(), &[Dpo, Kto, Cpo, Grpo, OnlineDpo, Policy]),
        ("objective.beta", |task| task.beta.is_some(), &[Grpo, Rloo]),
        ("objective.cpo_alpha", |task| task.cpo_alpha.is_some(), &[Cpo]),
        ("objective.precompute_ref_log_probs", |task| task.precompute_ref_log_probs, &[Dpo, Kto]),
        ("objective.use_weighting", |task| task.use_weighting, &[Dpo]),
        ("objective.steps_per_generation", |task| task.steps_per_generation.is_some(), &[Grpo, Rloo]),
        ("objective.num_iterations", |task| task.num_iterations.is_some(), &[Grpo, Rloo]),
        ("objective.temperature", |task| task.temperature.is_some(), &[Grpo, Rloo, OnlineDpo, Distillation]),
        ("objective.top_k", |task| task.top_k.is_some(), &[Grpo, Rloo, OnlineDpo, Distillation]),
        ("objective.forced_length", |task| task.forced_length, &[Grpo, Rloo, OnlineDpo, Distillation, Gkd]),
        ("objective.vllm.mode", |task| task.vllm.is_some(), &[Grpo, Rloo, OnlineDpo, Distillation]),
        ("objective.reward_model", |task| task.reward_model.is_some(), &[Grpo, Rloo, OnlineDpo, Ppo]),
        ("objective.value_model", |task| task.value_model.is_some(), &[Ppo]),
        ("objective.teacher", |task| task.teacher.is_some(), &[Distillation, Gkd]),
        ("objective.lmbda", |task| task.lmbda.is_some(), &[Gkd]),
        ("objective.mini_batch_size", |task| task.mini_batch_size.is_some(), &[CachedMnrl, Ppo, Policy, Value]),
        ("objective.num_mini_batches", |task| task.num_mini_batches.is_some(), &[Ppo]),
        ("objective.texts", |task| task.texts.is_some(), &[Mnrl, CachedMnrl]),
    ]
};

impl Default for Objective {
    fn default() -> Self {
        Self {
            kind: TaskKind::Sft,
            max_prompt_length: None,
            max_completion_length: None,
            loss_type: None,
            beta: None,
            cpo_alpha: None,
            precompute_ref_log_probs: false,
            use_weighting: false,
            steps_per_generation: None,
            num_iterations: None,
            temperature: None,
            top_k: None,
            forced_length: false,
            vllm: None,
            reward_model: None,
            value_model: None,
            teacher: None,
            lmbda: None,
            mini_batch_size: None,
            num_mini_batches: None,
            texts: None,
        }
    }
}

impl TaskKind {
    /// Every task, as a plan spells it, and what runs it.
    pub const ALL: [(Self, &'static str, &'static str); 19] = [
        (Self::Sft, "sft", "the model's own loss"),
        (Self::Dpo, "dpo", "TRL's DPOTrainer"),
        (Self::Kto, "kto", "TRL's KTOTrainer"),
        (Self::Orpo, "orpo", "TRL's ORPOTrainer"),
        (Self::Cpo, "cpo", "TRL's CPOTrainer, SimPO among its losses"),
        (Self::Reward, "reward", "TRL's RewardTrainer"),
        (Self::Prm, "prm", "TRL's PRMTrainer: a label for every step"),
        (Self::Grpo, "grpo", "TRL's GRPOTrainer"),
        (Self::Rloo, "rloo", "TRL's RLOOTrainer"),
        (Self::OnlineDpo, "online-dpo", "TRL's OnlineDPOTrainer"),
        (Self::Ppo, "ppo", "PPOTrainer of trl.experimental, up to 1.12"),
        (Self::Distillation, "distillation", "TRL's DistillationTrainer"),
        (Self::Gkd, "gkd", "TRL's GKDTrainer"),
        (Self::Policy, "policy", "the actor of verl or OpenRLHF"),
        (Self::Value, "value", "their critic"),
        (Self::Mnrl, "mnrl", "sentence-transformers: multiple negatives ranking"),
        (Self::CachedMnrl, "cached-mnrl", "the same by GradCache"),
        (Self::Triplet, "triplet", "sentence-transformers: triplets"),
        (Self::CrossEncoder, "cross-encoder", "sentence-transformers: a CrossEncoder"),
    ];

    /// The one of a name, in the spellings that people use.
    pub fn called(name: &str) -> Option<Self> {
        let plain = name.trim().to_ascii_lowercase().replace('_', "-");
        let plain = match plain.as_str() {
            "onlinedpo" => "online-dpo",
            "distill" => "distillation",
            "rm" | "reward-modeling" => "reward",
            other => other,
        };
        Self::ALL.iter().find(|(_, name, _)| *name == plain).map(|(kind, ..)| *kind)
    }

    /// As a plan spells it.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, ..)| *kind == self).map_or("sft", |(_, name, _)| name)
    }

    /// Whether the policy generates what it is trained on.
    pub fn rolls_out(self) -> bool {
        matches!(self, Self::Grpo | Self::Rloo | Self::OnlineDpo | Self::Ppo | Self::Distillation)
    }

    /// Whether the model is trained as one that gives a score (`AutoModelForSequenceClassification`, one label).
    pub fn scores(self) -> bool {
        matches!(self, Self::Reward | Self::CrossEncoder)
    }

    /// Whether it is sentence-transformers' own.
    pub fn compares(self) -> bool {
        matches!(self, Self::Mnrl | Self::CachedMnrl | Self::Triplet | Self::CrossEncoder)
    }

    /// Whether it is the update of a role of verl or OpenRLHF.
    pub fn is_role(self) -> bool {
        matches!(self, Self::Policy | Self::Value)
    }

    /// The framework whose trainer runs it.
    pub fn framework(self) -> Option<&'static str> {
        match self {
            Self::Sft | Self::Policy | Self::Value => None,
            _ if self.compares() => Some("hf-trainer"),
            _ => Some("trl"),
        }
    }

    /// The auto class of the model that it trains, where it is not the one of the config.
    pub fn auto_class(self) -> Option<&'static str> {
        match self {
            Self::Sft => None,
            Self::Value | Self::Prm => Some("AutoModelForTokenClassification"),
            _ if self.scores() => Some("AutoModelForSequenceClassification"),
            _ if self.compares() => Some("AutoModel"),
            _ => Some("AutoModelForCausalLM"),
        }
    }
}

impl Objective {
    /// Whether there is none: the plan's own loss on its batch.
    pub fn is_plain(&self) -> bool {
        self.kind == TaskKind::Sft
    }

    /// Whether nothing is said.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Tokens that are generated from, where samples have so many.
    pub fn prompt(&self, seq_len: u64) -> u64 {
        self.max_prompt_length.unwrap_or(seq_len)
    }

    /// Tokens of a completion.
    pub fn completion(&self) -> u64 {
        // GRPOConfig, RLOOConfig and DistillationConfig of trl 1.16; OnlineDPOConfig.
        let usual = match self.kind {
            TaskKind::OnlineDpo => 64,
            TaskKind::Gkd => 128,
            // PPOConfig.response_length of trl 1.12.
            TaskKind::Ppo => 53,
            _ => 512,
        };
        self.max_completion_length.unwrap_or(usual)
    }

    /// How strongly the reference holds the policy.
    pub fn held_by_reference(&self) -> bool {
        // GRPOConfig and RLOOConfig of trl 1.16.
        let usual = if self.kind == TaskKind::Rloo { 0.05 } else { 0.0 };
        match self.kind {
            TaskKind::Grpo | TaskKind::Rloo => self.beta.unwrap_or(usual) != 0.0,
            TaskKind::Dpo | TaskKind::Kto => !self.precompute_ref_log_probs,
            TaskKind::OnlineDpo | TaskKind::Ppo => true,
            _ => false,
        }
    }

    /// The share of a card that vLLM is granted.
    pub fn share(&self) -> f64 {
        // OnlineDPOConfig; GRPOConfig, RLOOConfig and DistillationConfig of trl 1.16.
        let usual = if self.kind == TaskKind::OnlineDpo { 0.55 } else { 0.3 };
        self.vllm.as_ref().and_then(|vllm| vllm.gpu_memory_utilization).unwrap_or(usual)
    }

    /// Whether KTO measures how far the policy has gone (`calculate_KL`).
    pub fn measures_divergence(&self) -> bool {
        self.kind == TaskKind::Kto && self.loss_type.as_deref().is_none_or(|name| name == "kto")
    }

    /// The model that is trained, where it is not the one of its config: another head, or none.
    pub fn own_model(&self, model: &Model) -> Result<Option<Model>, PlanError> {
        let (Some(class), wanted) = (self.kind.auto_class(), self.wanted()) else { return Ok(None) };
        if model.task() == wanted {
            return Ok(None);
        }
        let mut config = model.config().clone();
        if let Some(object) = config.as_object_mut().filter(|_| self.kind.scores() || self.kind == TaskKind::Value) {
            // One score, whatever the config says of labels.
            object.insert("num_labels".into(), 1.into());
            object.shift_remove("id2label");
        }
        Ok(Some(Model::new(config, Some(class))?))
    }

    fn wanted(&self) -> Task {
        match self.kind {
            TaskKind::Value | TaskKind::Prm => Task::TokenClassification,
            kind if kind.scores() => Task::SequenceClassification,
            kind if kind.compares() => Task::Base,
            _ => Task::CausalLm,
        }
    }

    /// Refuses what the task does not have.
    pub(super) fn check(&self, plan: &TrainPlan, faults: &mut Faults) {
        let name = self.kind.name();
        for (path, given, tasks) in SETTINGS {
            faults.when(given(self) && !tasks.contains(&self.kind), || {
                Fault::no_effect(*path, format!("where the task is {name}"))
            });
        }
        self.check_losses(faults);
        for (path, value) in [
            ("objective.max_completion_length", self.max_completion_length),
            ("objective.steps_per_generation", self.steps_per_generation),
            ("objective.num_iterations", self.num_iterations),
            ("objective.mini_batch_size", self.mini_batch_size),
            ("objective.num_mini_batches", self.num_mini_batches),
        ] {
            faults.range(path, value.unwrap_or(1), 1..=1 << 20);
        }
        faults.range("objective.texts", self.texts.unwrap_or(2), 2..=16);
        if self.is_plain() {
            return;
        }
        self.check_surroundings(plan, faults);
    }

    fn check_losses(&self, faults: &mut Faults) {
        let Some(name) = &self.loss_type else { return };
        let known: &[&str] = match self.kind {
            TaskKind::Policy => &["verl", "verl-entropy", "openrlhf"],
            TaskKind::Kto => &["kto", "apo_zero_unpaired"],
            TaskKind::Cpo => &["sigmoid", "hinge", "ipo", "simpo", "alphapo"],
            TaskKind::OnlineDpo => &["sigmoid", "ipo"],
            TaskKind::Grpo => &["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
            _ => &[
                "sigmoid",
                "hinge",
                "ipo",
                "exo_pair",
                "nca_pair",
                "robust",
                "bco_pair",
                "sppo_hard",
                "aot",
                "aot_unpaired",
                "apo_zero",
                "apo_down",
                "discopop",
                "sft",
                "sigmoid_norm",
            ],
        };
        let unknown = name.split(['+', ',']).find(|one| !known.contains(one));
        faults.when(unknown.is_some(), || {
            Fault::value("objective.loss_type", name, format!("one of {}", known.join(", ")))
                .or_drop("objective.loss_type")
        });
    }

    /// What of the rest of a plan tasks do not go with.
    fn check_surroundings(&self, plan: &TrainPlan, faults: &mut Faults) {
        let name = self.kind.name();
        let no =
            |path: &'static str, what: &str| Fault::unsupported(path, format!("{what} of task {name}")).or_drop(path);
        faults.when(plan.job.evaluation.is_some(), || no("job.evaluation", "evaluation"));
        faults.when(plan.job.packing.is_some(), || no("job.packing", "packing"));
        faults.when(plan.job.padding_free, || no("job.padding_free", "batches without padding"));
        faults.when(plan.job.resume, || no("job.resume", "resuming"));
        faults.when(plan.job.find_batch_size, || no("job.find_batch_size", "a search for the batch"));
        faults.when(plan.job.merge, || no("job.merge", "merging"));
        faults.when(plan.keep_loss, || no("keep_loss", "a kept loss"));
        faults.when(plan.batch.images.is_some(), || no("batch.images", "images"));
        faults.when(plan.batch.audio_frames.is_some(), || no("batch.audio_frames", "sound"));
        faults.when(plan.optimizer_in_backward, || no("optimizer_in_backward", "an optimizer in backward"));
        faults.when(matches!(plan.adapter, Some(AdapterPlan::Other(_))), || no("adapter", "adapters other than LoRA"));
        let fused = matches!(self.kind, TaskKind::Dpo);
        let odd = match plan.loss.kind {
            LossKind::TrlFused => self.kind.is_role(),
            LossKind::Standard => self.uses_fused_head() && !fused,
            _ => true,
        };
        faults.when(odd, || {
            let own = if self.kind.is_role() { "standard" } else { "trl-fused" };
            Fault::unsupported("loss.kind", format!("another loss than its own in task {name}"))
                .or_set("loss.kind", own)
        });
        faults.when(self.lmbda.is_some_and(|share| !(0.0..=1.0).contains(&share)), || {
            Fault::value("objective.lmbda", self.lmbda.unwrap_or(0.0), "from 0 to 1").or_drop("objective.lmbda")
        });
        faults.when(
            (self.kind.scores() || self.wanted() == Task::TokenClassification) && plan.kernels == Kernels::Liger,
            || {
                Fault::new("kernels", "Liger patches a language model's head, and a model that gives a score has none")
                    .or_drop("kernels")
            },
        );
        let sampled = [
            ("objective.temperature", self.temperature.is_some()),
            ("objective.top_k", self.top_k.is_some()),
            ("objective.forced_length", self.forced_length),
        ];
        for (path, given) in sampled {
            faults.when(given && self.vllm.is_some(), || Fault::no_effect(path, "where vLLM generates"));
        }
        if let Some(vllm) = &self.vllm {
            const SHARE: &str = "objective.vllm.gpu_memory_utilization";
            faults.when(!(0.0..=1.0).contains(&self.share()), || {
                Fault::value(SHARE, self.share(), "from 0 to 1").or_drop(SHARE)
            });
            let elsewhere = vllm.mode == VllmMode::Server;
            faults.when(elsewhere && vllm.gpu_memory_utilization.is_some(), || {
                Fault::no_effect(SHARE, "on an engine that runs elsewhere")
            });
            faults.when(elsewhere && vllm.enable_sleep_mode, || {
                Fault::no_effect("objective.vllm.enable_sleep_mode", "on an engine that runs elsewhere")
            });
        }
        if self.kind == TaskKind::Ppo {
            self.check_ppo(plan, faults);
        }
        let teacher = matches!(self.kind, TaskKind::Distillation | TaskKind::Gkd) && self.teacher.is_none();
        faults.when(teacher, || {
            Fault::new("objective.teacher", "a distillation needs a teacher")
                .or("name one by {objective.teacher.model}")
        });
        let prompt = self.max_prompt_length.unwrap_or(0);
        faults.when(!self.kind.rolls_out() && prompt >= plan.batch.seq_len.max(1), || {
            let expected =
                format!("less than the {} tokens of a sample, of which it is the first part", plan.batch.seq_len);
            Fault::value("objective.max_prompt_length", prompt, expected).or_drop("objective.max_prompt_length")
        });
    }

    /// A teacher's probabilities are laid beside the student's, token by token (trl 1.16, gkd_trainer.py and
    /// distillation_trainer.py refuse other vocabularies).
    pub(super) fn check_on(&self, model: &Model, faults: &mut Faults) {
        let tokens = |config: &serde_json::Value| {
            [config, &config["text_config"]].iter().find_map(|part| part["vocab_size"].as_u64())
        };
        let Some(teacher) =
            self.teacher.as_ref().filter(|_| matches!(self.kind, TaskKind::Distillation | TaskKind::Gkd))
        else {
            return;
        };
        if let (Some(own), Some(other)) = (tokens(model.config()), tokens(&teacher.config)) {
            faults.when(own != other, || {
                let name = &teacher.model;
                let problem = format!("{name} has a vocabulary of {other} tokens, and the student one of {own}");
                Fault::new("objective.teacher.model", problem).or("name a teacher with the student's vocabulary")
            });
        }
    }

    /// `PPOTrainer` has a loop and an Accelerator of its own.
    fn check_ppo(&self, plan: &TrainPlan, faults: &mut Faults) {
        const ALONE: &str = "in PPOTrainer, whose Accelerator is its own";
        faults.when(plan.autocast.is_some(), || Fault::no_effect("autocast", ALONE));
        faults.when(plan.checkpointing != Checkpointing::Off, || Fault::no_effect("checkpoints", ALONE));
        faults.when(plan.clip, || Fault::no_effect("clip", ALONE));
        // The Trainer's own beginning, which patches models, is passed over.
        faults.when(plan.kernels == Kernels::Liger, || Fault::no_effect("kernels", "in PPOTrainer"));
        faults.when(plan.parallel.is_some(), || Fault::unsupported("parallel", "task ppo on several cards"));
        let (rows, parts) = (self.rollout(plan), self.num_mini_batches.unwrap_or(1).max(1));
        faults.when(!rows.is_multiple_of(parts), || {
            let expected = format!("a divisor of the {rows} samples of a step");
            Fault::value("objective.num_mini_batches", parts, expected).or_drop("objective.num_mini_batches")
        });
    }

    /// Samples that PPO generates at once.
    pub(crate) fn rollout(&self, plan: &TrainPlan) -> u64 {
        plan.batch.batch_size.saturating_mul(u64::from(plan.gradient_accumulation.max(1)))
    }

    /// Whether TRL computes log-probabilities in tiles (`add_fused_lm_head`).
    pub fn uses_fused_head(&self) -> bool {
        matches!(self.kind, TaskKind::Dpo | TaskKind::Kto | TaskKind::Grpo | TaskKind::Rloo)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for (kind, name, _) in TaskKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), name);
            assert_eq!(kind.name(), name);
        }
    }

    #[test]
    fn what_a_task_does_not_have_is_refused() {
        let objective = Objective { kind: TaskKind::Dpo, num_iterations: Some(2), ..Objective::default() };
        let plan = TrainPlan { objective, ..TrainPlan::default() };
        let faults = plan.check().unwrap_err();
        assert!(faults.iter().any(|fault| fault.to_string().contains("dpo")), "{faults:?}");
    }
}
