//! OpenRLHF's reinforcement learning: each role a group of processes, on cards of its own or shared (OpenRLHF 0.9 and 0.11,
//! cli/train_ppo_ray.py; models/actor.py, utils/deepspeed, trainer/ppo_trainer.py say what each keeps where).

use serde_json::{Value, json};

use super::reader::{Reader, whole};
use super::table::{Row, Sense};
use super::{Beside, Imported, roles, sharding};
use crate::plan::Fault;
use crate::plan::placement::{Group, Part, Placement, Question, Role};

pub(super) const KEYS: &[Row] = &[
    Row(
        "actor.model_name_or_path critic.model_name_or_path critic_pretrain reward.model_name_or_path reward_pretrain \
         reward.remote_url remote_rm_url",
        Sense::Read("the models of roles"),
    ),
    Row(
        "actor.num_nodes actor_num_nodes actor.num_gpus_per_node actor_num_gpus_per_node ref.num_nodes ref_num_nodes \
         ref.num_gpus_per_node ref_num_gpus_per_node critic.num_nodes critic_num_nodes critic.num_gpus_per_node \
         critic_num_gpus_per_node reward.num_nodes reward_num_nodes reward.num_gpus_per_node reward_num_gpus_per_node \
         train.colocate_all colocate_all_models train.colocate_actor_ref colocate_actor_ref train.colocate_critic_reward \
         colocate_critic_reward algo.kl.init_coef init_kl_coef algo.advantage.estimator advantage_estimator \
         train.async_enable async_train",
        Sense::Read("which roles there are, and on which cards"),
    ),
    Row(
        "vllm.num_engines vllm_num_engines vllm.tensor_parallel_size vllm_tensor_parallel_size \
         vllm.gpu_memory_utilization vllm_gpu_memory_utilization vllm.enable_sleep vllm_enable_sleep",
        Sense::Read("the rollout engine"),
    ),
    Row(
        "ds.enable_sleep deepspeed_enable_sleep ref.offload reward.offload ref_reward_offload",
        Sense::Read("what leaves the card"),
    ),
    Row(
        "rollout.micro_batch_size micro_rollout_batch_size train.dynamic_batch_enable use_dynamic_batch \
         train.max_tokens_per_gpu train_max_tokens_per_gpu rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu prompt_max_len generate_max_len rollout.max_new_tokens \
         actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant",
        Sense::Read("batches and updates"),
    ),
    Row(
        "actor.* critic.* ref.* reward.* rollout.* algo.* vllm.* train.* rollout_batch_size n_samples_per_prompt num_episodes \
         temperature top_p prompt_data* prompt_split label_key normalize_reward actor_learning_rate critic_learning_rate \
         gamma lambd eps_clip* value_clip use_kl_loss use_kl_estimator_k3 kl_estimator kl_target kl_horizon freezing_actor_steps \
         save_value_network vllm_* enable_prefix_caching enforce_eager enable_vllm_is_correction async_queue_size agent_func_path \
         reward_clip_range entropy_loss_coef dynamic_filtering* ptx_coef policy_loss_type",
        Sense::Harmless("sampling, data, logging and the course of training"),
    ),
];

/// A key under its newer and its older name.
fn get<'a>(reader: &mut Reader<'a>, keys: &[&str]) -> Option<&'a Value> {
    keys.iter().map(|key| reader.get(key)).fold(None, |found, next| found.or(next))
}

fn on(reader: &mut Reader<'_>, keys: &[&str]) -> bool {
    // All of them are read, so that none is left over.
    keys.iter().filter(|key| reader.is_on(key)).count() > 0
}

fn number(reader: &mut Reader<'_>, keys: &[&str], usual: u64) -> u64 {
    get(reader, keys).and_then(whole).unwrap_or(usual)
}

fn real(reader: &mut Reader<'_>, keys: &[&str], usual: f64) -> f64 {
    get(reader, keys).and_then(|value| value.as_f64().or_else(|| value.as_str()?.parse().ok())).unwrap_or(usual)
}

/// Nodes and cards of each that a role asks for.
fn cards(reader: &mut Reader<'_>, role: &str) -> (u64, u64) {
    let mut count = |what: &str, usual: u64| {
        let names = [format!("{role}.{what}"), format!("{role}_{what}")];
        number(reader, &[&names[0], &names[1]], usual).max(1)
    };
    (count("num_nodes", 1), count("num_gpus_per_node", 8))
}

pub(crate) fn placement(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&roles::OPENRLHF, value, beside);
    let named = |reader: &mut Reader<'_>, keys: &[&str]| get(reader, keys).and_then(Value::as_str).map(str::to_owned);
    let model = named(&mut reader, &["actor.model_name_or_path", "pretrain", "model.model_name_or_path"]);
    let model = model.unwrap_or_else(|| {
        reader.faults.add(Fault::new("", "actor.model_name_or_path (pretrain), the model, is missing"));
        String::new()
    });
    let plan = Plans::read(&mut reader);
    let sleeps = on(&mut reader, &["ds.enable_sleep", "deepspeed_enable_sleep"]);
    let whole = plan.stage != 3;
    let both = on(&mut reader, &["ref_reward_offload"]);
    let held = real(&mut reader, &["algo.kl.init_coef", "init_kl_coef"], 0.01) > 0.0;
    let asynchronous = on(&mut reader, &["train.async_enable", "async_train"]);
    let all = on(&mut reader, &["train.colocate_all", "colocate_all_models"]);
    let with_reference = all || on(&mut reader, &["train.colocate_actor_ref", "colocate_actor_ref"]);
    let with_reward = on(&mut reader, &["train.colocate_critic_reward", "colocate_critic_reward"]);
    let trained = |plan: &Plans, role: &str, size: (u64, u64)| Part::Trained {
        plan: plan.of(role, size, plan.stage),
        weights_leave: false,
        states_leave: sleeps && !plan.adam_offload,
    };
    // In evaluation ZeRO 3 shards, and below it every card has the whole.
    let scores = |plan: &Plans, role: &str, size: (u64, u64), offloaded: bool| Part::Scores {
        plan: plan.of(role, size, plan.stage),
        offloaded,
        whole,
    };
    let actors = cards(&mut reader, "actor");
    let mut groups =
        vec![group(actors, Role { name: "actor", model: model.clone(), part: trained(&plan, "policy", actors) })];
    if held {
        let size = cards(&mut reader, "ref");
        let size = if with_reference { actors } else { size };
        let leaves = on(&mut reader, &["ref.offload"]) || both;
        let role = Role { name: "reference", model: model.clone(), part: scores(&plan, "policy", size, leaves) };
        put(&mut groups, with_reference.then_some(0), size, role);
    }
    let named_critic = named(&mut reader, &["critic.model_name_or_path", "critic_pretrain"]);
    let estimator = named(&mut reader, &["algo.advantage.estimator", "advantage_estimator"]);
    let mut of_critic = all.then_some(0);
    if let Some(critic) =
        named_critic.clone().or((estimator.as_deref().unwrap_or("gae") == "gae").then(|| model.clone()))
    {
        if named_critic.is_none() {
            reader.notes.push("no critic is named: the actor's model is taken".into());
        }
        let size = cards(&mut reader, "critic");
        let size = if all { actors } else { size };
        put(&mut groups, of_critic, size, Role { name: "critic", model: critic, part: trained(&plan, "value", size) });
        of_critic = of_critic.or_else(|| with_reward.then(|| groups.len() - 1));
    }
    let remote = get(&mut reader, &["reward.remote_url", "remote_rm_url"]).is_some();
    let reward = named(&mut reader, &["reward.model_name_or_path", "reward_pretrain"]);
    if let Some(reward) = reward.filter(|_| !remote) {
        let own = cards(&mut reader, "reward");
        let size = if all { actors } else { own };
        let leaves = on(&mut reader, &["reward.offload"]) || both;
        let role = Role { name: "reward model", model: reward, part: scores(&plan, "value", size, leaves) };
        put(&mut groups, of_critic, size, role);
    }
    let engines = number(&mut reader, &["vllm.num_engines", "vllm_num_engines"], 0);
    let split = number(&mut reader, &["vllm.tensor_parallel_size", "vllm_tensor_parallel_size"], 1).max(1);
    let share = real(&mut reader, &["vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization"], 0.95);
    let sleeps = on(&mut reader, &["vllm.enable_sleep", "vllm_enable_sleep"]);
    if !(0.0..=1.0).contains(&share) {
        reader.refuse("vllm_gpu_memory_utilization", &share.to_string(), "from 0 to 1");
    }
    match engines {
        0 => reader.refuse(
            "vllm_num_engines",
            "0",
            "rollouts by transformers' generate are not simulated here: `--task grpo` is TRL's",
        ),
        _ => {
            // Weights go over one by one.
            let part = Part::Rollout { engine: "vLLM", share, sleeps, split, bucket: Some(0) };
            let at = (all && !asynchronous).then_some(0);
            put(&mut groups, at, (1, engines * split), Role { name: "vLLM", model: model.clone(), part });
        }
    }
    let placement = Placement { title: "OpenRLHF 0.11", groups, notes: Vec::new() };
    reader.finish(None, Some(model)).map(|read| Imported { placement: Some(placement), ..read })
}

fn group((nodes, gpus): (u64, u64), role: Role) -> Group {
    Group { cards: nodes * gpus, roles: vec![role], shared: false }
}

/// A role on cards that are there already, or on its own.
fn put(groups: &mut Vec<Group>, at: Option<usize>, size: (u64, u64), role: Role) {
    match at.and_then(|at| groups.get_mut(at)) {
        Some(group) => group.roles.push(role),
        None => groups.push(group(size, role)),
    }
}

/// What all updates have in common.
struct Plans {
    stage: u64,
    adam_offload: bool,
    changes: Vec<(String, Value)>,
    deepspeed: Value,
}

impl Plans {
    fn read(reader: &mut Reader<'_>) -> Self {
        let stage = number(reader, &["ds.zero_stage", "zero_stage"], 2);
        let adam_offload = on(reader, &["ds.adam_offload", "adam_offload"]);
        let mut zero = json!({"stage": stage});
        if adam_offload {
            zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true});
        }
        if on(reader, &["ds.overlap_comm", "overlap_comm"]) {
            zero["overlap_comm"] = json!(true);
        }
        let kind = get(reader, &["ds.param_dtype", "param_dtype"]).and_then(Value::as_str).unwrap_or("bf16");
        let kind = if kind == "fp16" { "fp16" } else { "bf16" };
        let deepspeed = json!({"zero_optimization": zero, kind: {"enabled": true}, "gradient_clipping": 1.0});
        let before = reader.changes.len();
        let deepspeed = sharding::deepspeed(reader, deepspeed, Some(kind));
        let mut changes = reader.changes.split_off(before);
        let micro = number(reader, &["train.micro_batch_size", "micro_train_batch_size"], 1);
        let scored = number(reader, &["rollout.micro_batch_size", "micro_rollout_batch_size"], 1);
        let prompt = get(reader, &["prompt_max_len"]).and_then(whole);
        let written = number(reader, &["generate_max_len", "rollout.max_new_tokens"], 1024);
        let whole_length = number(reader, &["data.max_len", "max_len"], 2048);
        let length = prompt.map_or(whole_length, |prompt| prompt + written);
        // Batches that are made of tokens lie in one row.
        let (micro, scored, length) = match on(reader, &["train.dynamic_batch_enable", "use_dynamic_batch"]) {
            true => {
                let tokens = number(reader, &["train.max_tokens_per_gpu", "train_max_tokens_per_gpu"], 16192).max(1);
                let keys = ["rollout.max_tokens_per_gpu", "rollout_max_tokens_per_gpu"];
                (1, number(reader, &keys, tokens).div_ceil(tokens), tokens)
            }
            false => (micro, scored, length),
        };
        let checkpoints = on(reader, &["actor.gradient_checkpointing_enable", "gradient_checkpointing"]);
        changes.extend(
            [
                ("batch.batch_size", json!(micro)),
                ("batch.seq_len", json!(length)),
                ("objective.mini_batch_size", json!(scored)),
                ("checkpointing", json!(if checkpoints { "full" } else { "off" })),
                ("attention", json!("flash2")),
                ("gradient_accumulation", json!(2)),
                ("keep_outputs", json!(false)),
            ]
            .map(|(place, value)| (place.to_owned(), value)),
        );
        let rank = get(reader, &["ds.lora.rank", "model.lora.rank", "lora.rank", "lora_rank"]).and_then(whole);
        if let Some(rank) = rank.filter(|rank| *rank > 0) {
            changes.extend(
                [
                    ("adapter.method", json!("lora")),
                    ("adapter.rank", json!(rank)),
                    ("adapter.targets", json!("all-linear")),
                ]
                .map(|(place, value)| (place.to_owned(), value)),
            );
        }
        Self { stage, adam_offload, changes, deepspeed }
    }

    /// The update of a role on its cards.
    fn of(&self, task: &str, (nodes, gpus): (u64, u64), stage: u64) -> Question {
        let mut changes = self.changes.clone();
        changes.push(("objective.kind".into(), task.into()));
        if task == "policy" {
            changes.push(("objective.loss_type".into(), "openrlhf".into()));
        }
        changes.push(("parallel.gpus".into(), gpus.into()));
        if nodes > 1 {
            changes.push(("parallel.nodes".into(), nodes.into()));
        }
        let mut deepspeed = self.deepspeed.clone();
        deepspeed["zero_optimization"]["stage"] = stage.into();
        Question { changes, deepspeed: Some(deepspeed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Placement, String> {
        placement(&value, &Beside::default())
            .map(|read| read.placement.unwrap())
            .map_err(|faults| faults[0].to_string())
    }

    fn names(found: &Placement) -> Vec<Vec<&str>> {
        found.groups.iter().map(|group| group.roles.iter().map(|role| role.name).collect()).collect()
    }

    #[test]
    fn roles_have_cards_of_their_own_or_share_them() {
        let line = |more: Value| {
            let mut line = json!({"pretrain": "a/b", "reward_pretrain": "c/d", "vllm_num_engines": 2, "zero_stage": 3,
                "actor_num_gpus_per_node": 2, "advantage_estimator": "gae"});
            crate::ask::tree::lay(&mut line, &more);
            line
        };
        let apart = read(line(json!({}))).unwrap();
        assert_eq!(
            names(&apart),
            [vec!["actor"], vec!["reference"], vec!["critic"], vec!["reward model"], vec!["vLLM"]]
        );
        assert_eq!(apart.groups[0].cards, 2);
        let pairs = read(line(json!({"colocate_actor_ref": true, "colocate_critic_reward": true}))).unwrap();
        assert_eq!(names(&pairs), [vec!["actor", "reference"], vec!["critic", "reward model"], vec!["vLLM"]]);
        let all =
            read(line(json!({"colocate_all_models": true, "init_kl_coef": 0, "advantage_estimator": "rloo"}))).unwrap();
        assert_eq!(names(&all), [vec!["actor", "reward model", "vLLM"]]);
        for (more, said) in
            [(json!({"vllm_num_engines": 0}), "vllm_num_engines"), (json!({"colocate_al": 1}), "no key")]
        {
            let text = read(line(more)).unwrap_err();
            assert!(text.contains(said), "{text}");
        }
    }
}
