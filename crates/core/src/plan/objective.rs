//! What a run trains for: preferences, rewards, rollouts, a teacher, pairs of sentences. Settings are called as TRL and
//! sentence-transformers call them.

mod checks;

use serde::{Deserialize, Serialize};

use super::{PlanError, TrainPlan};
use crate::dtype::DType;
use crate::model::{Model, Task};

/// The task of a run and its settings; those that a task does not have are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Objective {
    /// Which it is.
    pub kind: TaskKind,
    /// Tokens of a prompt: of pairs, those before chosen and rejected part; of rollouts, what is generated from; of late
    /// interaction a query's.
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
    /// `MultiVectorMultipleNegativesRankingLoss` of a `MultiVectorEncoder`: ColBERT's late interaction.
    Colbert,
}

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
    pub const ALL: [(Self, &'static str, &'static str); 20] = [
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
        (Self::Colbert, "colbert", "sentence-transformers: a MultiVectorEncoder, late interaction"),
    ];

    /// The one of a name, in the spellings that people use.
    pub fn called(name: &str) -> Option<Self> {
        let plain = name.trim().to_ascii_lowercase().replace('_', "-");
        let plain = match plain.as_str() {
            "onlinedpo" => "online-dpo",
            "distill" => "distillation",
            "rm" | "reward-modeling" => "reward",
            "late-interaction" | "multi-vector" => "colbert",
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
        matches!(self, Self::Mnrl | Self::CachedMnrl | Self::Triplet | Self::CrossEncoder | Self::Colbert)
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
