//! What a task goes with, and what it refuses.

use super::{Objective, TaskKind, VllmMode};
use crate::model::{Model, Task};
use crate::plan::draft::vocabulary;
use crate::plan::{AdapterPlan, Checkpointing, Fault, Faults, Kernels, LossKind, TrainPlan};

/// A setting: its place, whether it is stated, and who has it.
type Owned = (&'static str, fn(&Objective) -> bool, &'static [TaskKind]);

/// What of the settings a task has.
const SETTINGS: &[Owned] = {
    use TaskKind::*;
    &[
        (
            "objective.max_prompt_length",
            |task| task.max_prompt_length.is_some(),
            &[Dpo, Kto, Grpo, Rloo, OnlineDpo, Ppo, Distillation, Gkd, Colbert],
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
        ("objective.texts", |task| task.texts.is_some(), &[Mnrl, CachedMnrl, Colbert]),
    ]
};

impl Objective {
    /// Refuses what the task does not have.
    pub(in crate::plan) fn check(&self, plan: &TrainPlan, faults: &mut Faults) {
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
        let apart = self.kind.rolls_out() || self.kind == TaskKind::Colbert;
        faults.when(!apart && prompt >= plan.batch.seq_len.max(1), || {
            let expected =
                format!("less than the {} tokens of a sample, of which it is the first part", plan.batch.seq_len);
            Fault::value("objective.max_prompt_length", prompt, expected).or_drop("objective.max_prompt_length")
        });
    }

    /// A teacher's probabilities are laid beside the student's, token by token (trl 1.16, gkd_trainer.py and
    /// distillation_trainer.py refuse other vocabularies).
    pub(in crate::plan) fn check_on(&self, model: &Model, faults: &mut Faults) {
        let masked = model.task() == Task::MaskedLm && self.wanted() == Task::CausalLm;
        faults.when(masked && !self.is_plain(), || {
            let problem = format!("task {} scores next tokens, and this model fills masked ones", self.kind.name());
            Fault::new("objective.kind", problem).or("give a causal language model")
        });
        let Some(teacher) =
            self.teacher.as_ref().filter(|_| matches!(self.kind, TaskKind::Distillation | TaskKind::Gkd))
        else {
            return;
        };
        if let (Some(own), Some(other)) = (vocabulary(model.config()), vocabulary(&teacher.config)) {
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
}
