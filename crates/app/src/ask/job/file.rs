//! The format of job files: keys, ranges, and rules between keys.

use serde_json::{Map, Value};
use vramcast_core::lens::EngineKind;
use vramcast_core::plan::OptimizerKind;
use vramcast_core::units::parse_count;

use super::places::{self, Place};

/// A job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    pub name: String,
    pub parameters: u64,
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub vocab: u64,
    pub seq_len: u64,
    pub batch_size: u64,
    pub accumulation: u64,
    pub optimizer: OptimizerKind,
    pub dtype: String,
    pub checkpointing: bool,
    pub tp: u64,
    pub pp: u64,
    pub dp: u64,
    pub sequence_parallel: bool,
    pub engine: EngineKind,
    pub zero: u8,
    pub offload_optimizer: String,
    pub offload_parameters: String,
    pub gpus: u64,
    pub gpu_memory: u64,
}

/// Something wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub path: String,
    pub place: Option<Place>,
    pub message: String,
}

/// What a value may be.
enum Kind {
    Text,
    /// `7B`, `350M` or a number.
    Count,
    Whole(u64, u64),
    Positive,
    OneOf(&'static [&'static str]),
    Flag,
    /// A flag, or a level from 0 to 4.
    Level,
    Optimizer,
}

const ENGINES: &[&str] = &[
    "pytorch_ddp",
    "ddp",
    "pytorch",
    "deepspeed",
    "megatron",
    "megatron_lm",
    "megatron_deepspeed",
    "fsdp",
    "pytorch_fsdp",
];
const STRATEGIES: &[&str] = &["full_shard", "shard_grad_op", "no_shard"];
const DEVICES: &[&str] = &["none", "cpu", "nvme"];
const MANY: u64 = 1 << 20;

/// Every key: its section, its name, what it may be, and whether it must be there.
const KEYS: &[(&str, &str, Kind, bool)] = &[
    ("model", "name", Kind::Text, false),
    ("model", "num_parameters", Kind::Count, true),
    ("model", "num_layers", Kind::Whole(1, 4096), true),
    ("model", "hidden_size", Kind::Whole(1, MANY), true),
    ("model", "num_attention_heads", Kind::Whole(1, 65_536), true),
    ("model", "num_key_value_heads", Kind::Whole(1, 65_536), false),
    ("model", "vocab_size", Kind::Whole(1, 1 << 24), false),
    ("model", "max_seq_len", Kind::Whole(1, 1 << 24), false),
    ("training", "batch_size", Kind::Whole(1, MANY), false),
    ("training", "gradient_accumulation_steps", Kind::Whole(1, MANY), false),
    ("training", "optimizer", Kind::Optimizer, false),
    ("training", "dtype", Kind::OneOf(&["bf16", "fp16", "fp32"]), false),
    ("training", "activation_checkpointing", Kind::Level, false),
    ("parallelism", "tensor_parallel_size", Kind::Whole(1, MANY), false),
    ("parallelism", "pipeline_parallel_size", Kind::Whole(1, MANY), false),
    ("parallelism", "data_parallel_size", Kind::Whole(1, MANY), false),
    ("parallelism", "sequence_parallel", Kind::Flag, false),
    ("engine", "type", Kind::OneOf(ENGINES), false),
    ("engine", "zero_stage", Kind::Whole(0, 3), false),
    ("engine", "offload_optimizer", Kind::OneOf(DEVICES), false),
    ("engine", "offload_param", Kind::OneOf(DEVICES), false),
    ("engine", "sharding_strategy", Kind::OneOf(STRATEGIES), false),
    ("hardware", "num_gpus", Kind::Whole(1, MANY), false),
    ("hardware", "gpu_memory_gb", Kind::Positive, false),
];

/// Reads a job and lists everything that is wrong with it.
pub(crate) fn check(text: &str) -> (Option<Job>, Vec<Problem>) {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) => {
            let place = Place { line: error.line(), column: error.column() };
            let message = error.to_string();
            let message = match text.trim().is_empty() {
                true => "the file is empty".to_owned(),
                false => format!("not JSON: {}", message.split(" at line").next().unwrap_or(&message)),
            };
            return (None, vec![Problem { path: String::new(), place: Some(place), message }]);
        }
    };
    let places = places::of(text);
    let mut problems = Vec::new();
    let mut report = |path: &str, message: String| {
        // What is missing is missed in its section.
        let section = path.split('.').next().unwrap_or_default();
        let place = places.get(path).or_else(|| places.get(section)).or_else(|| places.get("")).copied();
        problems.push(Problem { path: path.to_owned(), place, message });
    };
    let Some(root) = value.as_object() else {
        report("", "a job file holds an object".into());
        return (None, problems);
    };
    for (section, contents) in root {
        if !KEYS.iter().any(|(known, ..)| known == section) {
            report(section, format!("is no section; these are: {}", sections().join(", ")));
        } else if let Some(object) = contents.as_object() {
            for key in object.keys().filter(|key| !KEYS.iter().any(|(s, k, ..)| s == section && k == key)) {
                report(&format!("{section}.{key}"), "is not known and has no effect".into());
            }
        } else {
            report(section, format!("{contents} is not an object"));
        }
    }
    for (section, key, kind, required) in KEYS {
        let path = format!("{section}.{key}");
        match root.get(*section).and_then(|section| section.get(*key)) {
            None if *required => report(&path, "is missing".into()),
            None => {}
            Some(value) => {
                if let Some(expected) = mistake(kind, value) {
                    report(&path, format!("{value} is not {expected}"));
                }
            }
        }
    }
    // Rules between keys make sense only of keys that are right themselves.
    let job = problems.is_empty().then(|| Job::of(root));
    if let Some(job) = &job {
        let mut report = |path: &str, message: String| {
            let place = places.get(path).or_else(|| places.get("")).copied();
            problems.push(Problem { path: path.to_owned(), place, message });
        };
        rules(job, root, &mut report);
    }
    vramcast_core::order::sort_by(&mut problems, |a, b| (a.place, &a.path).cmp(&(b.place, &b.path)));
    (job.filter(|_| problems.is_empty()), problems)
}

fn sections() -> Vec<&'static str> {
    let mut names: Vec<&str> = KEYS.iter().map(|(section, ..)| *section).collect();
    names.dedup();
    names
}

/// What was expected, where a value is not that.
fn mistake(kind: &Kind, value: &Value) -> Option<String> {
    let within = |low: u64, high: u64| value.as_u64().is_some_and(|n| (low..=high).contains(&n));
    match kind {
        Kind::Text => (!value.is_string()).then(|| "a text".into()),
        Kind::Count => {
            let count = value.as_u64().or_else(|| value.as_str().and_then(|text| parse_count(text).ok()));
            count.is_none_or(|count| count == 0).then(|| "a number of parameters, such as 7000000000 or \"7B\"".into())
        }
        Kind::Whole(low, high) => (!within(*low, *high)).then(|| format!("a whole number from {low} to {high}")),
        Kind::Positive => value.as_f64().is_none_or(|n| !(n > 0.0 && n <= 65_536.0)).then(|| "above 0".into()),
        Kind::OneOf(names) => {
            let known = value.as_str().is_some_and(|text| names.contains(&text));
            (!known).then(|| format!("one of {}", names.join(", ")))
        }
        Kind::Flag => (!value.is_boolean()).then(|| "true or false".into()),
        Kind::Level => (!value.is_boolean() && !within(0, 4)).then(|| "a level from 0 to 4, true or false".into()),
        Kind::Optimizer => {
            let known = value.as_str().is_some_and(|name| optimizer(name).is_some());
            (!known).then(|| "an optimizer vramcast knows (`vramcast list optimizers`)".into())
        }
    }
}

fn optimizer(name: &str) -> Option<OptimizerKind> {
    serde_json::from_value(Value::String(name.to_lowercase().replace('_', "-"))).ok()
}

fn rules(job: &Job, root: &Map<String, Value>, report: &mut impl FnMut(&str, String)) {
    let divides = |part: u64, whole: u64| whole.is_multiple_of(part);
    if !divides(job.heads, job.hidden) {
        report("model.num_attention_heads", format!("{} does not divide hidden_size {}", job.heads, job.hidden));
    }
    if !divides(job.kv_heads, job.heads) {
        report("model.num_key_value_heads", format!("{} does not divide {} heads", job.kv_heads, job.heads));
    }
    if !divides(job.tp, job.heads) {
        report("parallelism.tensor_parallel_size", format!("{} does not divide {} heads", job.tp, job.heads));
    }
    if !divides(job.pp, job.layers) {
        report("parallelism.pipeline_parallel_size", format!("{} does not divide {} layers", job.pp, job.layers));
    }
    if job.sequence_parallel && job.tp == 1 {
        report("parallelism.sequence_parallel", "needs tensor_parallel_size of 2 or more".into());
    }
    let world = job.tp.saturating_mul(job.pp).saturating_mul(job.dp);
    if world != job.gpus {
        let message = format!("{} GPUs, but tensor × pipeline × data parallel is {world}", job.gpus);
        report("hardware.num_gpus", message);
    }
    let has = |key: &str| root.get("engine").is_some_and(|engine| engine.get(key).is_some());
    let zero = matches!(job.engine, EngineKind::Deepspeed | EngineKind::MegatronDeepspeed);
    if has("zero_stage") && !zero {
        report("engine.zero_stage", "has no effect on this engine; it is DeepSpeed's".into());
    }
    if !zero && (job.offload_optimizer != "none" || job.offload_parameters != "none") {
        report("engine.offload_optimizer", "offload is DeepSpeed's".into());
    }
    if job.offload_parameters != "none" && job.zero < 3 {
        report("engine.offload_param", "needs zero_stage 3".into());
    }
    if job.offload_optimizer != "none" && zero && job.zero == 0 {
        report("engine.offload_optimizer", "needs zero_stage 1 or more".into());
    }
    if has("sharding_strategy") && job.engine != EngineKind::Fsdp {
        report("engine.sharding_strategy", "has no effect on this engine; it is FSDP's".into());
    }
    let model_parallel = matches!(job.engine, EngineKind::Megatron | EngineKind::MegatronDeepspeed);
    if !model_parallel && (job.tp > 1 || job.pp > 1) {
        report("engine.type", "tensor and pipeline parallel need megatron or megatron_deepspeed".into());
    }
}

impl Job {
    /// From an object whose keys have been checked.
    fn of(root: &Map<String, Value>) -> Self {
        let get = |section: &str, key: &str| root.get(section).and_then(|section| section.get(key));
        let whole =
            |section: &str, key: &str, default: u64| get(section, key).and_then(Value::as_u64).unwrap_or(default);
        let text = |section: &str, key: &str, default: &str| {
            get(section, key).and_then(Value::as_str).unwrap_or(default).to_owned()
        };
        let count = get("model", "num_parameters")
            .and_then(|value| value.as_u64().or_else(|| value.as_str().and_then(|text| parse_count(text).ok())));
        let heads = whole("model", "num_attention_heads", 1);
        let level = get("training", "activation_checkpointing");
        let engine = match text("engine", "type", "pytorch_ddp").as_str() {
            "deepspeed" => EngineKind::Deepspeed,
            "megatron" | "megatron_lm" => EngineKind::Megatron,
            "megatron_deepspeed" => EngineKind::MegatronDeepspeed,
            "fsdp" | "pytorch_fsdp" => EngineKind::Fsdp,
            _ => EngineKind::Ddp,
        };
        let zero = match (engine, text("engine", "sharding_strategy", "full_shard").as_str()) {
            (EngineKind::Fsdp, "full_shard") => 3,
            (EngineKind::Fsdp, "shard_grad_op") => 2,
            (EngineKind::Deepspeed | EngineKind::MegatronDeepspeed, _) => whole("engine", "zero_stage", 0) as u8,
            _ => 0,
        };
        let (tp, pp) =
            (whole("parallelism", "tensor_parallel_size", 1), whole("parallelism", "pipeline_parallel_size", 1));
        let dp = whole("parallelism", "data_parallel_size", 1);
        let gb = get("hardware", "gpu_memory_gb").and_then(Value::as_f64).unwrap_or(80.0);
        Self {
            name: text("model", "name", "model"),
            parameters: count.unwrap_or(0),
            layers: whole("model", "num_layers", 1),
            hidden: whole("model", "hidden_size", 1),
            heads,
            kv_heads: whole("model", "num_key_value_heads", heads),
            vocab: whole("model", "vocab_size", 32_000),
            seq_len: whole("model", "max_seq_len", 2048),
            batch_size: whole("training", "batch_size", 1),
            accumulation: whole("training", "gradient_accumulation_steps", 1),
            optimizer: optimizer(&text("training", "optimizer", "adamw")).unwrap_or(OptimizerKind::AdamW),
            dtype: text("training", "dtype", "bf16"),
            checkpointing: level.is_some_and(|level| level.as_bool().unwrap_or(level.as_u64() != Some(0))),
            tp,
            pp,
            dp,
            sequence_parallel: get("parallelism", "sequence_parallel").and_then(Value::as_bool).unwrap_or(false),
            engine,
            zero,
            offload_optimizer: text("engine", "offload_optimizer", "none"),
            offload_parameters: text("engine", "offload_param", "none"),
            gpus: whole("hardware", "num_gpus", tp.saturating_mul(pp).saturating_mul(dp)),
            // Makers' GB of memory are GiB.
            gpu_memory: (gb * f64::from(1 << 30)) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PRESETS;
    use super::*;

    #[test]
    fn the_documents_own_file() {
        let job = check(PRESETS[0].1).0.unwrap();
        assert_eq!((job.parameters, job.layers, job.zero, job.gpus), (7_000_000_000, 32, 3, 8));
        assert_eq!((job.offload_optimizer.as_str(), job.offload_parameters.as_str()), ("cpu", "none"));
        assert!(job.checkpointing && !job.sequence_parallel);
        assert_eq!(job.gpu_memory, 80 << 30);
    }

    #[test]
    fn all_problems_at_once_with_their_places() {
        let text = "{\n \"model\": {\"num_parameters\": \"7X\", \"num_layers\": 0, \"hidden_size\": 4096},\n \"training\": {\"optimizer\": \"adamx\", \"speed\": 1},\n \"magic\": {}\n}";
        let (job, problems) = check(text);
        assert!(job.is_none());
        let found: Vec<(&str, usize)> =
            problems.iter().map(|p| (p.path.as_str(), p.place.map_or(0, |place| place.line))).collect();
        assert_eq!(
            found,
            [
                ("model.num_attention_heads", 2),
                ("model.num_parameters", 2),
                ("model.num_layers", 2),
                ("training.optimizer", 3),
                ("training.speed", 3),
                ("magic", 4),
            ]
        );
        let (_, problems) = check("{\"model\": ");
        assert_eq!(problems.len(), 1);
        assert!(problems[0].place.is_some());
    }

    #[test]
    fn rules_between_keys() {
        let text = PRESETS[0].1.replace("\"data_parallel_size\": 8", "\"data_parallel_size\": 4");
        let (job, problems) = check(&text);
        assert!(job.is_none());
        assert_eq!((problems.len(), problems[0].path.as_str()), (1, "hardware.num_gpus"));
        let text = PRESETS[0].1.replace("\"type\": \"deepspeed\"", "\"type\": \"fsdp\"");
        let paths: Vec<String> = check(&text).1.into_iter().map(|problem| problem.path).collect();
        assert_eq!(paths, ["engine.zero_stage", "engine.offload_optimizer"]);
    }
}
