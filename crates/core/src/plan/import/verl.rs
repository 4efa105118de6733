//! verl's reinforcement learning: actor, rollout, reference, critic and reward model on shared cards (verl 0.7,
//! trainer/config/ppo_trainer.yaml; workers/fsdp_workers.py says what each keeps where).

use serde_json::{Value, json};

use super::reader::{Reader, whole};
use super::table::{Row, Sense};
use super::trainer::short;
use super::{Beside, Imported, roles};
use crate::plan::Fault;
use crate::plan::placement::{Group, Part, Placement, Question, Role};

pub(super) const KEYS: &[Row] = &[
    Row("actor_rollout_ref.model.path critic.model.path reward_model.model.path", Sense::Read("the models of roles")),
    Row(
        "trainer.n_gpus_per_node trainer.nnodes reward_model.enable reward_model.enable_resource_pool \
         reward_model.n_gpus_per_node reward_model.nnodes critic.enable algorithm.adv_estimator \
         algorithm.use_kl_in_reward actor_rollout_ref.actor.use_kl_loss",
        Sense::Read("which roles there are, and on which cards"),
    ),
    Row(
        "data.max_prompt_length data.max_response_length actor_rollout_ref.rollout.prompt_length \
         actor_rollout_ref.rollout.response_length",
        Sense::Read("batch.seq_len"),
    ),
    Row(
        "actor_rollout_ref.actor.ppo_micro_batch_size* actor_rollout_ref.actor.ppo_max_token_len_per_gpu \
         actor_rollout_ref.actor.use_dynamic_bsz \
         actor_rollout_ref.rollout.log_prob_* actor_rollout_ref.ref.log_prob_* critic.ppo_micro_batch_size* \
         critic.ppo_max_token_len_per_gpu critic.forward_* critic.use_dynamic_bsz reward_model.micro_batch_size* \
         reward_model.forward_max_token_len_per_gpu reward_model.use_dynamic_bsz",
        Sense::Read("batch.batch_size and objective.mini_batch_size of each role"),
    ),
    Row(
        "actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload \
         actor_rollout_ref.actor.fsdp_config.offload_policy actor_rollout_ref.actor.fsdp_config.model_dtype \
         actor_rollout_ref.ref.fsdp_config.model_dtype critic.model.fsdp_config.param_offload \
         critic.model.fsdp_config.optimizer_offload critic.model.fsdp_config.offload_policy \
         critic.model.fsdp_config.model_dtype actor_rollout_ref.actor.strategy critic.strategy",
        Sense::Read("the engine of each role, and what leaves the card"),
    ),
    Row(
        "actor_rollout_ref.rollout.name actor_rollout_ref.rollout.gpu_memory_utilization \
         actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.tensor_model_parallel_size \
         actor_rollout_ref.rollout.pipeline_model_parallel_size \
         actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes reward_model.use_reward_loop \
         reward_model.rollout.name reward_model.rollout.gpu_memory_utilization reward_model.rollout.free_cache_engine \
         reward_model.rollout.tensor_model_parallel_size",
        Sense::Read("engines: of rollouts, and of a reward model that is served"),
    ),
    Row(
        "actor_rollout_ref.model.lora_rank actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.target_modules actor_rollout_ref.model.use_liger \
         actor_rollout_ref.model.enable_gradient_checkpointing critic.model.enable_gradient_checkpointing \
         actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.calculate_entropy",
        Sense::Read("the actor's update"),
    ),
    Row(
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size \
         critic.ulysses_sequence_parallel_size actor_rollout_ref.actor.fsdp_config.fsdp_size critic.model.fsdp_config.fsdp_size",
        Sense::Read("1 and -1 are; others are refused"),
    ),
    Row(
        "actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.model.enable_activation_offload \
         critic.model.enable_activation_offload actor_rollout_ref.model.tiled_mlp.enabled critic.model.tiled_mlp.enabled \
         critic.model.lora_rank actor_rollout_ref.actor.use_prefix_grouper actor_rollout_ref.actor.calculate_sum_pi_squared",
        Sense::Refused("it is not simulated"),
    ),
    Row(
        "actor_rollout_ref.model.use_remove_padding critic.model.use_remove_padding",
        Sense::Said("rows of full length are simulated"),
    ),
    Row(
        "actor_rollout_ref.* critic.* reward_model.* algorithm.* reward_manager.* reward.* custom_reward_function.* \
         global_profiler.* ray_kwargs.* ray_init.* transfer_queue.* defaults* filter_groups.* +ray_kwargs.*",
        Sense::Harmless("sampling, data, logging and the course of training"),
    ),
];

/// Interpolations of OmegaConf stand for their defaults, which are the reader's own.
fn plain(value: &Value) -> Value {
    match value {
        Value::Object(object) => object.iter().map(|(key, value)| (key.clone(), plain(value))).collect(),
        Value::String(text) if text.contains("${") => Value::Null,
        other => other.clone(),
    }
}

/// Everything that a role's plan has in common with the others.
struct Shared {
    cards: u64,
    nodes: u64,
    length: u64,
}

pub(super) fn placement(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let value = plain(value);
    let mut reader = Reader::new(&roles::VERL, &value, beside);
    let at = |path: &str| format!("actor_rollout_ref.{path}");
    let model = reader.text(&at("model.path")).map(str::to_owned).unwrap_or_default();
    if model.is_empty() {
        reader.faults.add(Fault::new("", "actor_rollout_ref.model.path, the model, is missing"));
    }
    let mut count = |key: &str, usual: u64| reader.get(key).and_then(whole).unwrap_or(usual);
    let (gpus, nodes) = (count("trainer.n_gpus_per_node", 8).max(1), count("trainer.nnodes", 1).max(1));
    let length = count("data.max_prompt_length", 512) + count("data.max_response_length", 512);
    let shared = Shared { cards: gpus * nodes, nodes, length };
    let entropy = reader.real(&at("actor.entropy_coeff")).is_some_and(|share| share != 0.0)
        || reader.is_on(&at("actor.calculate_entropy"));
    let rank = reader.number(&at("model.lora_rank")).unwrap_or(0);
    let checkpoints = reader.switch(&at("model.enable_gradient_checkpointing")).unwrap_or(true);
    let dynamic = reader.is_on(&at("actor.use_dynamic_bsz"));
    let rows =
        Rows { micro: at("actor.ppo_micro_batch_size"), tokens: at("actor.ppo_max_token_len_per_gpu"), usual: 16384 };
    let scored = Rows {
        micro: at("rollout.log_prob_micro_batch_size"),
        tokens: at("rollout.log_prob_max_token_len_per_gpu"),
        usual: 16384,
    };
    let mut actor = update(&mut reader, &shared, (&at("actor.strategy"), &at("actor.fsdp_config")), checkpoints);
    batch(&mut reader, &mut actor, &shared, (dynamic, &rows, &scored));
    actor.push(("objective.kind".into(), "policy".into()));
    actor.push(("objective.loss_type".into(), if entropy { "verl-entropy" } else { "verl" }.into()));
    if reader.is_on(&at("model.use_liger")) {
        actor.push(("kernels".into(), "liger".into()));
    }
    if rank > 0 {
        let targets = reader.text(&at("model.target_modules")).unwrap_or("all-linear").to_owned();
        actor.extend(
            [("adapter.method", json!("lora")), ("adapter.rank", json!(rank)), ("adapter.targets", json!(targets))]
                .map(|(place, value)| (place.to_owned(), value)),
        );
        actor.extend(reader.real(&at("model.lora_alpha")).map(|alpha| ("adapter.alpha".to_owned(), json!(alpha))));
    }
    let mut found = vec![Role {
        name: "actor",
        model: model.clone(),
        part: trained(&mut reader, actor.clone(), &at("actor.fsdp_config")),
    }];
    // With an adapter the reference is the actor without it.
    if rank == 0 && (reader.is_on(&at("actor.use_kl_loss")) || reader.is_on("algorithm.use_kl_in_reward")) {
        let mut plan = actor.clone();
        let scored = Rows {
            micro: at("ref.log_prob_micro_batch_size"),
            tokens: at("ref.log_prob_max_token_len_per_gpu"),
            usual: 16384,
        };
        let rows = score(&mut reader, &shared, dynamic, &scored);
        plan.extend(rows.map(|rows| ("objective.mini_batch_size".to_owned(), json!(rows))));
        offload(&mut plan);
        found.push(Role { name: "reference", model: model.clone(), part: scores(plan) });
    }
    let estimator = reader.text("algorithm.adv_estimator").unwrap_or("gae");
    if reader.switch("critic.enable").unwrap_or(estimator == "gae") {
        found.push(critic(&mut reader, &shared, &model, dynamic));
    }
    let mut groups = Vec::new();
    if reader.is_on("reward_model.enable") {
        let (role, own) = reward(&mut reader, &shared, dynamic);
        match own {
            Some(cards) => groups.push(Group { cards, roles: vec![role], shared: true }),
            None => found.push(role),
        }
    }
    found.push(rollout(&mut reader, model.clone()));
    groups.insert(0, Group { cards: shared.cards, roles: found, shared: true });
    for key in ["actor.ulysses_sequence_parallel_size", "actor.fsdp_config.ulysses_sequence_parallel_size"].map(at) {
        if reader.number(&key).is_some_and(|size| size > 1) {
            reader.refuse(&key, "more than 1", "Ulysses is not simulated here: leave it out");
        }
    }
    for key in [at("actor.fsdp_config.fsdp_size"), "critic.model.fsdp_config.fsdp_size".into()] {
        if reader.get(&key).is_some_and(|size| size.as_f64() != Some(-1.0) && whole(size) != Some(shared.cards)) {
            reader.refuse(&key, "less than all cards", "replicated shards of roles are not simulated: leave it out");
        }
    }
    let placement = Placement { title: "verl 0.7", groups, notes: Vec::new() };
    reader.finish(None, Some(model)).map(|read| Imported { placement: Some(placement), ..read })
}

type Changes = Vec<(String, Value)>;

/// The engine of a role that is trained.
fn update(reader: &mut Reader<'_>, shared: &Shared, (strategy, config): (&str, &str), checkpoints: bool) -> Changes {
    // Megatron's settings stand beside `strategy`, which its own config file says and a line need not.
    let beside = format!("{}.megatron", strategy.trim_end_matches(".strategy"));
    let megatron = reader.get(&beside).is_some().then_some("megatron");
    let engine = match reader.text(strategy).or(megatron) {
        Some("fsdp") | None => "parallel.engine.fsdp1",
        Some("fsdp2") => "parallel.engine.fsdp2",
        Some(other) => {
            let other = other.to_owned();
            reader.refuse(strategy, &other, "roles are simulated under fsdp and fsdp2; ask for a megatron actor by `vramcast train MODEL --engine megatron`");
            "parallel.engine.fsdp2"
        }
    };
    let weights = reader.text(&format!("{config}.model_dtype")).map_or(Some("fp32"), short).unwrap_or_else(|| {
        reader.refuse(&format!("{config}.model_dtype"), "this type", "use fp32 or bf16");
        "fp32"
    });
    let places = [
        (format!("{engine}.mixed_precision"), json!({"parameters": "bf16", "reduce": "fp32"})),
        ("weights".into(), weights.into()),
        ("autocast".into(), Value::Null),
        ("checkpointing".into(), if checkpoints { "full" } else { "off" }.into()),
        ("attention".into(), "flash2".into()),
        ("optimizer.kind".into(), "adamw".into()),
        ("clip".into(), true.into()),
        ("keep_outputs".into(), false.into()),
        ("parallel.gpus".into(), (shared.cards / shared.nodes).into()),
        ("parallel.nodes".into(), shared.nodes.into()),
    ];
    let mut changes: Changes = places.into();
    if reader.is_on(&format!("{config}.offload_policy")) {
        changes.push((format!("{engine}.offload"), true.into()));
    }
    changes.retain(|(place, value)| place != "parallel.nodes" || *value != 1);
    changes
}

/// Keys of the rows, or tokens, that a pass has.
struct Rows {
    micro: String,
    tokens: String,
    usual: u64,
}

/// Rows of an update and of the scoring before it. Where batches are made of tokens, they lie in one row.
fn batch(reader: &mut Reader<'_>, plan: &mut Changes, shared: &Shared, (dynamic, rows, scored): (bool, &Rows, &Rows)) {
    let (count, length) = match dynamic {
        true => (1, reader.number(&rows.tokens).unwrap_or(rows.usual)),
        false => {
            let each = reader.number(&format!("{}_per_gpu", rows.micro));
            let all = reader.number(&rows.micro).map(|all| (all / shared.cards).max(1));
            let count = each.or(all).unwrap_or_else(|| {
                let problem =
                    format!("{}_per_gpu is missing, and verl starts without it only by use_dynamic_bsz", rows.micro);
                reader.faults.add(Fault::new("", problem));
                1
            });
            (count, shared.length)
        }
    };
    let tokens = count.saturating_mul(length);
    let key = if dynamic { &rows.tokens } else { &rows.micro };
    reader.notes.push(format!(
        "{key}: {tokens} tokens go through the model at once ({count} x {length}), none of them padding"
    ));
    plan.push(("batch.batch_size".into(), count.into()));
    plan.push(("batch.seq_len".into(), length.into()));
    // That gradients are summed over several counts, and how many do not.
    plan.push(("gradient_accumulation".into(), 2.into()));
    let found = match dynamic {
        true => Some(reader.number(&scored.tokens).unwrap_or(length).div_ceil(length)),
        false => score(reader, shared, dynamic, scored),
    };
    plan.extend(found.map(|rows| ("objective.mini_batch_size".to_owned(), json!(rows))));
}

/// Rows that are scored at once.
fn score(reader: &mut Reader<'_>, shared: &Shared, dynamic: bool, rows: &Rows) -> Option<u64> {
    if dynamic {
        return Some(1);
    }
    let each = reader.number(&format!("{}_per_gpu", rows.micro));
    each.or_else(|| reader.number(&rows.micro).map(|all| (all / shared.cards).max(1)))
}

fn offload(plan: &mut Changes) {
    let engine =
        plan.iter().find_map(|(place, _)| place.strip_suffix(".mixed_precision")).unwrap_or_default().to_owned();
    plan.push((format!("{engine}.offload"), true.into()));
}

fn trained(reader: &mut Reader<'_>, changes: Changes, config: &str) -> Part {
    let policy = reader.is_on(&format!("{config}.offload_policy"));
    let mut leaves = |key: &str| !policy && reader.is_on(&format!("{config}.{key}"));
    let (weights_leave, states_leave) = (leaves("param_offload"), leaves("optimizer_offload"));
    Part::Trained { plan: Question { changes, deepspeed: None }, weights_leave, states_leave }
}

/// Reference and reward model are in host memory always (`CPUOffload(offload_params=True)`).
fn scores(changes: Changes) -> Part {
    Part::Scores { plan: Question { changes, deepspeed: None }, offloaded: true, whole: false }
}

fn critic(reader: &mut Reader<'_>, shared: &Shared, actor: &str, dynamic: bool) -> Role {
    let model = reader.text("critic.model.path").map(str::to_owned).unwrap_or_else(|| {
        reader.notes.push("critic.model.path is silent: the actor's model is taken".into());
        actor.to_owned()
    });
    let checkpoints = reader.switch("critic.model.enable_gradient_checkpointing").unwrap_or(true);
    let dynamic = reader.switch("critic.use_dynamic_bsz").unwrap_or(dynamic);
    let mut plan = update(reader, shared, ("critic.strategy", "critic.model.fsdp_config"), checkpoints);
    let rows = |micro: &str, tokens: &str| Rows { micro: micro.into(), tokens: tokens.into(), usual: 32768 };
    let own = rows("critic.ppo_micro_batch_size", "critic.ppo_max_token_len_per_gpu");
    let scored = rows("critic.forward_micro_batch_size", "critic.forward_max_token_len_per_gpu");
    batch(reader, &mut plan, shared, (dynamic, &own, &scored));
    plan.push(("objective.kind".into(), "value".into()));
    Role { name: "critic", model, part: trained(reader, plan, "critic.model.fsdp_config") }
}

/// The reward model, and its cards where it has some of its own: served by an engine (`use_reward_loop`), or run in passes.
fn reward(reader: &mut Reader<'_>, shared: &Shared, dynamic: bool) -> (Role, Option<u64>) {
    let model = reader.text("reward_model.model.path").map(str::to_owned).unwrap_or_default();
    if model.is_empty() {
        reader.faults.add(Fault::new("", "reward_model.model.path, the reward model, is missing"));
    }
    let own = reader.is_on("reward_model.enable_resource_pool").then(|| {
        let mut count = |key: &str| reader.number(key).unwrap_or(0);
        (count("reward_model.n_gpus_per_node") * count("reward_model.nnodes")).max(1)
    });
    if reader.switch("reward_model.use_reward_loop").unwrap_or(true) {
        let part = engine(reader, "reward_model.rollout", None).1;
        return (Role { name: "reward model", model, part }, own);
    }
    let nodes = if own.is_some() { 1 } else { shared.nodes };
    let shared = Shared { cards: own.unwrap_or(shared.cards), nodes, ..*shared };
    let mut plan = update(reader, &shared, ("reward_model.strategy", "reward_model.model.fsdp_config"), false);
    let tokens = "reward_model.forward_max_token_len_per_gpu".into();
    let rows = Rows { micro: "reward_model.micro_batch_size".into(), tokens, usual: 32768 };
    batch(reader, &mut plan, &shared, (dynamic, &rows, &rows));
    plan.extend([("weights".to_owned(), json!("bf16")), ("objective.kind".to_owned(), json!("value"))]);
    offload(&mut plan);
    (Role { name: "reward model", model, part: scores(plan) }, own)
}

/// The engine that writes samples.
fn rollout(reader: &mut Reader<'_>, model: String) -> Role {
    let key = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes";
    let bucket = reader.number(key).unwrap_or(2048) << 20;
    let (name, part) = engine(reader, "actor_rollout_ref.rollout", Some(bucket));
    Role { name, model, part }
}

/// An engine; it gives back all it has while others run (`free_cache_engine`).
fn engine(reader: &mut Reader<'_>, below: &str, bucket: Option<u64>) -> (&'static str, Part) {
    let at = |path: &str| format!("{below}.{path}");
    let engine = match reader.text(&at("name")) {
        None | Some("vllm") => "vLLM",
        Some("sglang") => "SGLang",
        Some(other) => {
            let other = other.to_owned();
            reader.refuse(&at("name"), &other, "use vllm or sglang");
            "vLLM"
        }
    };
    let share = reader.real(&at("gpu_memory_utilization")).unwrap_or(0.5);
    if !(0.0..=1.0).contains(&share) {
        reader.refuse(&at("gpu_memory_utilization"), &share.to_string(), "from 0 to 1");
    }
    let sleeps = reader.switch(&at("free_cache_engine")).unwrap_or(true);
    let mut size = |key: &str, usual: u64| reader.number(&at(key)).unwrap_or(usual).max(1);
    let split = size("tensor_model_parallel_size", 2) * size("pipeline_model_parallel_size", 1);
    (engine, Part::Rollout { engine, share, sleeps, split, bucket })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Placement, String> {
        placement(&value, &Beside::default())
            .map(|read| read.placement.unwrap())
            .map_err(|faults| faults[0].to_string())
    }

    #[test]
    fn who_there_is_and_what_leaves() {
        let file = |more: Value| {
            let mut file = json!({"actor_rollout_ref": {"model": {"path": "a/b"}, "actor": {"ppo_micro_batch_size_per_gpu": 4,
                "use_kl_loss": true, "fsdp_config": {"param_offload": true}}, "rollout": {"n": 5}}, "algorithm": {"adv_estimator": "grpo"}});
            crate::ask::tree::lay(&mut file, &more);
            file
        };
        let found = read(file(json!({}))).unwrap();
        let names: Vec<&str> = found.groups[0].roles.iter().map(|role| role.name).collect();
        assert_eq!((names, found.groups[0].cards), (vec!["actor", "reference", "vLLM"], 8));
        assert!(matches!(
            found.groups[0].roles[0].part,
            Part::Trained { weights_leave: true, states_leave: false, .. }
        ));
        let gae = file(json!({"algorithm": {"adv_estimator": "gae"}, "critic": {"ppo_micro_batch_size_per_gpu": 2}}));
        assert!(read(gae).unwrap().groups[0].roles.iter().any(|role| role.name == "critic"));
        let adapter = file(json!({"actor_rollout_ref": {"model": {"lora_rank": 8}}}));
        assert!(read(adapter).unwrap().groups[0].roles.iter().all(|role| role.name != "reference"));
        for (more, said) in [
            (json!({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}), "actor.strategy: megatron"),
            (
                json!({"actor_rollout_ref": {"actor": {"megatron": {"tensor_model_parallel_size": 2}}}}),
                "actor.strategy: megatron",
            ),
            (json!({"actor_rollout_ref": {"rollout": {"name": "hf"}}}), "rollout.name: hf"),
            (json!({"actor_rollout_ref": {"model": {"use_fused_kernels": true}}}), "use_fused_kernels"),
            (json!({"actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": null}}}), "is missing"),
        ] {
            let text = read(file(more)).unwrap_err();
            assert!(text.contains(said), "{text}");
        }
    }
}
