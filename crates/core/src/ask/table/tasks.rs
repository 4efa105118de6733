//! Settings of what a run trains for, called as TRL and sentence-transformers call them.

use serde_json::{Value, json};

use crate::ask::runner::{Runner, Scope};
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;
use crate::plan::TaskKind;

const WHO: Scope = Scope::ONE_CARD.and(Scope::DDP).and(Scope::FSDP).and(Runner::Deepspeed.alone());

const fn task(path: &'static str, flag: &'static str, kind: Kind, help: &'static str) -> Setting {
    setting(path, flag, kind, help).on(Topic::Task, WHO)
}

pub(super) const ROWS: &[Setting] = &[
    task("objective.kind", "task", Kind::Spelled(TASK), "What is trained for: dpo, kto, orpo, cpo, reward, prm, grpo, rloo, online-dpo, ppo, distillation or gkd by TRL's trainers, policy or value as verl's and OpenRLHF's actor and critic, mnrl, cached-mnrl, triplet, cross-encoder or colbert by those of sentence-transformers")
        .value("TASK")
        .from("sft: the model's own loss")
        .example("--task dpo --seq-len 64"),
    task("objective.max_prompt_length", "max-prompt-length", Kind::Whole, "Tokens of a prompt: of pairs, the first part of --seq-len, on which no loss is; of rollouts, what is generated from; of colbert a query's")
        .from("of pairs none, the most that can count; of rollouts our guess, 512")
        .example("--max-prompt-length 64 --task grpo --max-completion-length 4"),
    task("objective.max_completion_length", "max-completion-length", Kind::Whole, "Tokens that are generated for each prompt")
        .also(&["max-new-tokens", "response-length"])
        .from("trl 1.16: 512; of online-dpo 64, of ppo 53")
        .example("--max-completion-length 8 --task grpo --max-prompt-length 8"),
    task("objective.loss_type", "loss-type", Kind::Text, "Which of the task's losses, several joined by +; only kto's decides memory, and policy's: verl, verl-entropy or openrlhf")
        .value("NAME")
        .from("trl 1.16's")
        .example("--loss-type apo_zero_unpaired --task kto --seq-len 512"),
    task("objective.beta", "beta", Kind::Real, "How strongly the reference holds the policy of grpo and rloo; 0: there is no reference")
        .from("trl 1.16: grpo 0, rloo 0.05")
        .example("--beta 0.04 --task grpo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.cpo_alpha", "cpo-alpha", Kind::Real, "How much the likelihood of chosen answers counts in cpo; 0: it is not computed")
        .from("trl 1.16: 1")
        .example("--cpo-alpha 0 --task cpo --seq-len 256"),
    task("objective.precompute_ref_log_probs", "precompute-ref-log-probs", Kind::Switch, "The reference of dpo and kto is run before training and does not stay")
        .example("--precompute-ref-log-probs --task dpo --seq-len 64"),
    task("objective.use_weighting", "use-weighting", Kind::Switch, "Pairs of dpo are weighted by how likely they are")
        .example("--use-weighting --task dpo --batch-size 16 --seq-len 2048"),
    task("objective.steps_per_generation", "steps-per-generation", Kind::Whole, "Micro-batches that share one generation")
        .from("as many as a step has")
        .example("--steps-per-generation 4 --task grpo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.num_iterations", "num-iterations", Kind::Whole, "How often the completions of a generation are gone over")
        .from("trl 1.16: 1")
        .example("--num-iterations 2 --task grpo --max-prompt-length 64 --max-completion-length 4 --batch-size 8"),
    task("objective.temperature", "temperature", Kind::Real, "The temperature that scores are divided by before sampling")
        .from("trl 1.16: 1, of online-dpo 0.9")
        .example("--temperature 0.7 --task grpo --batch-size 512 --max-prompt-length 1 --max-completion-length 2 --lora"),
    task("objective.top_k", "top-k", Kind::Whole, "Sampling is among so many likeliest tokens")
        .from("trl 1.16: 0, all of them")
        .example("--top-k 50 --task grpo --batch-size 512 --max-prompt-length 1 --max-completion-length 2 --lora"),
    task("objective.forced_length", "min-new-tokens", Kind::Switch, "Every completion has all its tokens (min_new_tokens in generation_kwargs)")
        .example("--min-new-tokens --task grpo --batch-size 512 --max-prompt-length 1 --max-completion-length 2 --lora"),
    task("objective.vllm.mode", "vllm-mode", Kind::Choice(&[
        ("colocate", "on the same card as the trainer"),
        ("server", "elsewhere"),
    ]), "vLLM generates in the policy's place (use_vllm), and where")
        .from("transformers' generate; beside another option of vLLM colocate")
        .example("--vllm-mode colocate --task grpo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.vllm.gpu_memory_utilization", "vllm-gpu-memory-utilization", Kind::Real, "The share of the card that vLLM is granted")
        .from("trl 1.16: 0.3, of online-dpo 0.55")
        .example("--vllm-gpu-memory-utilization 0.5 --task grpo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.vllm.enable_sleep_mode", "vllm-enable-sleep-mode", Kind::Switch, "vLLM gives its memory back while the policy is trained")
        .example("--vllm-enable-sleep-mode --task grpo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.reward_model.model", "reward-model", Kind::Text, "A model that scores completions")
        .also(&["reward-model-path", "reward-model-name-or-path"])
        .value("MODEL")
        .from("rewards are computed on the host; of ppo a model like the policy")
        .example("--reward-model Qwen/Qwen2.5-0.5B --task grpo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.value_model.model", "value-model", Kind::Text, "The model that ppo trains beside the policy, to foresee scores")
        .value("MODEL")
        .from("one like the policy")
        .on(Topic::Task, Scope::ONE_CARD)
        .example("--value-model Qwen/Qwen2.5-0.5B --task ppo --max-prompt-length 8 --max-completion-length 4"),
    task("objective.teacher.model", "teacher-model", Kind::Text, "The model that is distilled")
        .also(&["teacher-model-name-or-path"])
        .value("MODEL")
        .from("none; a distillation needs one")
        .example("--teacher-model Qwen/Qwen2.5-0.5B --task distillation --max-prompt-length 8 --max-completion-length 4"),
    task("objective.lmbda", "lmbda", Kind::Real, "How often the student of gkd writes completions anew: 0 never, 1 always")
        .from("trl 1.16: 0.5")
        .example("--lmbda 0 --task gkd --teacher-model Qwen/Qwen2.5-0.5B --seq-len 8 --max-completion-length 64"),
    task("objective.mini_batch_size", "mini-batch-size", Kind::Whole, "Samples that go through the model at once: texts of a cached loss; in ppo's rollout; of policy and value, those that are scored before the update")
        .also(&["local-rollout-forward-batch-size"])
        .from("sentence-transformers 6: 32; trl 1.12's ppo: 64; the batch")
        .example("--mini-batch-size 4 --task cached-mnrl --batch-size 64 --seq-len 64"),
    task("objective.num_mini_batches", "num-mini-batches", Kind::Whole, "Parts that a batch of ppo is cut into: what a pass returned is held until the end of its part")
        .from("trl 1.12: 1")
        .on(Topic::Task, Scope::ONE_CARD)
        .example("--num-mini-batches 2 --task ppo --gradient-accumulation 2 --max-prompt-length 64 --max-completion-length 16"),
    task("objective.texts", "texts-per-sample", Kind::Whole, "Texts of a sample of mnrl and colbert: 2, and one more for every hard negative")
        .from("2")
        .example("--texts-per-sample 3 --task mnrl --seq-len 64"),
    task("objective.num_generations", "num-generations", Kind::Refused("how many completions share a prompt decides no memory, and --batch-size counts all of them, as TRL does"), "Completions of a prompt"),
];

const TASK: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match TaskKind::called(text) {
        Some(kind) => Ok(tree::of("objective.kind", json!(kind.name()))),
        None => {
            let known = TaskKind::ALL.map(|(_, name, _)| name).join(", ");
            Err(format!("one of {known}"))
        }
    },
    write: |plan| tree::get(plan, "objective.kind").and_then(Value::as_str).map(str::to_owned),
};
