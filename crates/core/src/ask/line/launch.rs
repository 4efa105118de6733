//! What launchers and variables say of cards, laid over what the program says of itself.

use serde_json::{Map, Value, json};

use super::variables;
use crate::ask::file::Content;
use crate::ask::{environment, tree};
use crate::plan::Fault;
use crate::plan::import::{self, Beside};

/// What launchers say.
#[derive(Debug, Default)]
pub(super) struct Launch {
    /// Whether there was one.
    pub(super) starts: bool,
    /// Cards of a node, and nodes.
    pub(super) gpus: Option<u64>,
    /// accelerate's `--num_processes` among a program's own arguments: those of all machines.
    pub(super) processes: Option<u64>,
    pub(super) nodes: Option<u64>,
    /// accelerate's options, as its file would hold them.
    pub(super) accelerate: Option<Map<String, Value>>,
    /// accelerate's file.
    pub(super) file: Option<String>,
    /// Cards of a node that a scheduler gives to each line.
    pub(super) given: Option<u64>,
    /// Cards that the environment shows.
    pub(super) visible: Option<u64>,
    /// Nodes and cards of each that SLURM was asked for, and cards or tasks of all nodes.
    pub(super) slurm: (Option<u64>, Option<u64>, Option<u64>),
    /// `PYTORCH_ALLOC_CONF`.
    pub(super) allocator: Option<String>,
    /// Variables of serving engines.
    pub(super) variables: Vec<(String, String)>,
    /// Names of others that decide no memory.
    pub(super) idle: Vec<String>,
    pub(super) notes: Vec<String>,
}

impl Launch {
    /// Those of all nodes, where they are said.
    pub(super) fn cards(&self) -> Option<u64> {
        self.gpus.or(self.visible).map(|gpus| gpus.saturating_mul(self.nodes.unwrap_or(1).max(1)))
    }

    /// What a variable of the environment says.
    pub(super) fn environment(&mut self, name: &str, value: &str) {
        match name {
            _ if environment::is_allocator(name) => self.allocator = Some(value.to_owned()),
            "SLURM_NNODES" => self.slurm.0 = value.parse().ok(),
            "SLURM_GPUS_ON_NODE" => self.slurm.1 = value.parse().ok(),
            "SLURM_GPUS" => self.slurm.2 = value.parse().ok(),
            "SLURM_NTASKS" => self.slurm.2 = self.slurm.2.or(value.parse().ok()),
            "SLURM_NTASKS_PER_NODE" => self.slurm.1 = self.slurm.1.or(value.parse().ok()),
            "NPROC_PER_NODE" => self.gpus = value.parse().ok(),
            "NNODES" => self.nodes = value.parse().ok(),
            _ if variables::engine(name).is_some() => self.variables.push((name.to_owned(), value.to_owned())),
            _ => match environment::cards(name, value) {
                Some(cards) => self.visible = Some(cards),
                None => match environment::open(name, value) {
                    Some(said) => self.notes.push(said),
                    None => self.idle.push(name.to_owned()),
                },
            },
        }
    }

    /// Options of accelerate that stand among a program's own.
    pub(super) fn take(&mut self, object: &mut Map<String, Value>) {
        if let Some(number) = object.shift_remove("num_processes") {
            self.gpus = number.as_u64();
            self.processes = self.gpus;
        }
        // TRL's own names of configurations.
        if let Some(name) = object.shift_remove("accelerate_config").and_then(|name| name.as_str().map(str::to_owned)) {
            let zero = name.strip_prefix("zero").and_then(|stage| stage.parse::<u64>().ok());
            let mut file = Map::new();
            match name.as_str() {
                "single_gpu" => drop(file.insert("distributed_type".into(), json!("NO"))),
                "multi_gpu" => drop(file.insert("distributed_type".into(), json!("MULTI_GPU"))),
                "fsdp1" | "fsdp2" => {
                    file.insert("distributed_type".into(), json!("FSDP"));
                    file.insert("fsdp_config".into(), json!({"fsdp_version": name[4..].parse::<u64>().unwrap_or(1)}));
                }
                _ if zero.is_some() => {
                    file.insert("distributed_type".into(), json!("DEEPSPEED"));
                    file.insert("deepspeed_config".into(), json!({"zero_stage": zero}));
                }
                _ => self.file = Some(name.clone()),
            }
            if self.file.is_none() {
                file.insert("mixed_precision".into(), json!("bf16"));
                self.accelerate = Some(file);
            }
        }
    }

    /// Lays what launchers say over what they start.
    pub(super) fn lay(
        mut self,
        content: &mut Content,
        open: &dyn Fn(&str) -> Result<Value, String>,
    ) -> Result<(), Vec<Fault>> {
        let mut options = match &self.file {
            None => self.accelerate.take(),
            Some(file) => {
                let mut value =
                    open(file).map_err(|problem| vec![Fault::new("", format!("--config_file {file}: {problem}"))])?;
                for (key, over) in self.accelerate.take().into_iter().flatten() {
                    match (value.get_mut(&key), &over) {
                        (Some(Value::Object(inner)), Value::Object(new)) => inner.extend(new.clone()),
                        _ => value[key] = over,
                    }
                }
                value.as_object().cloned()
            }
        };
        if let Some(file) = options.as_mut() {
            if file.get("distributed_type").is_some_and(|kind| kind == "MEGATRON_LM") {
                let fault = Fault::unsupported("", "accelerate's Megatron-LM (--use_megatron_lm) around a script");
                return Err(vec![fault.or("Megatron-LM's own runs are: `vramcast train MODEL --engine megatron`")]);
            }
            self.compute(content, file);
            self.counted(file);
            let many =
                file.get("num_processes").and_then(Value::as_u64).or(self.visible).is_some_and(|cards| cards > 1);
            // A program may say itself how it spreads: the launcher then says on how many cards alone.
            let own = tree::get(&content.tree, "parallel.mesh").is_some() && !file.contains_key("distributed_type");
            if own && !file.contains_key("parallelism_config") {
                let cards = file.get("num_processes").and_then(Value::as_u64);
                cards.into_iter().for_each(|cards| tree::set(&mut content.tree, "parallel.gpus", json!(cards)));
                content.notes.append(&mut self.notes);
                return Ok(());
            }
            if many && !file.contains_key("distributed_type") {
                file.insert("distributed_type".into(), json!("MULTI_GPU"));
            }
            if let (Some(cards), false) = (self.visible, file.contains_key("num_processes")) {
                file.insert("num_processes".into(), json!(cards));
            }
            // accelerate takes all that the machine has.
            let engine = file.get("distributed_type").is_some_and(|kind| kind == "FSDP" || kind == "DEEPSPEED");
            if engine && !file.contains_key("num_processes") && !file.contains_key("parallelism_config") {
                file.insert("num_processes".into(), json!(8));
                self.notes.push("the line does not say on how many cards it runs: 8 are taken".into());
            }
            if file.is_empty() {
                self.notes.push("accelerate launch without a file: one card is taken".into());
            } else {
                self.accelerated(content, &Value::Object(std::mem::take(file)), open)?;
            }
        } else {
            // torchrun alone is DDP around a Trainer: the framework says so itself.
            let gpus = self.gpus.or(self.visible.filter(|cards| *cards > 1 && self.starts));
            if let Some(cards) = self.visible.filter(|cards| *cards > 1 && gpus.is_none() && !self.spread(content)) {
                self.notes.push(format!(
                    "not simulated: {cards} cards are shown to one process: one is simulated, as if it ran there alone, not what \
                     DataParallel or a device map puts on each; torchrun --nproc_per_node {cards} is DDP"
                ));
            }
            let gpus = gpus.or_else(|| {
                self.nodes.filter(|nodes| *nodes > 1)?;
                self.notes.push("cards of a node are not said: 8 are taken; --gpus says more".into());
                Some(8)
            });
            for (path, value) in [("parallel.gpus", gpus), ("parallel.nodes", self.nodes.filter(|nodes| *nodes > 1))] {
                let spread = tree::get(&content.tree, "parallel").is_some() || content.deepspeed.is_some();
                if let Some(value) = value.filter(|value| *value > 1 || spread) {
                    tree::set(&mut content.tree, path, json!(value));
                }
            }
        }
        if let Some(text) = self.allocator {
            content.named.push(("alloc-conf".into(), crate::ask::Given::Text(text)));
        }
        content.notes.append(&mut self.notes);
        Ok(())
    }

    /// Whether the program itself says how many cards it takes.
    fn spread(&self, content: &Content) -> bool {
        tree::get(&content.tree, "parallel.gpus").is_some() || !content.named.is_empty()
    }

    /// accelerate counts the processes of all machines, and what it is told stands above what Slurm says of a node.
    fn counted(&self, file: &mut Map<String, Value>) {
        if let Some(nodes) = self.nodes.filter(|nodes| *nodes > 1) {
            file.entry("num_machines").or_insert(json!(nodes));
        }
        let machines = file.get("num_machines").and_then(Value::as_u64).unwrap_or(1).max(1);
        if let Some(all) = self.processes {
            file.insert("num_processes".into(), json!(all));
        } else if let Some(gpus) = self.gpus {
            file.entry("num_processes").or_insert(json!(gpus.saturating_mul(machines)));
        }
    }

    /// What the program itself computes in: the Trainer's `--bf16` is its mixed precision whatever accelerate says
    /// (transformers 5.17, training_args.py: the environment first, then its own); TRL's own default is bf16.
    fn own(content: &Content) -> Option<String> {
        match tree::get(&content.tree, "autocast") {
            Some(Value::String(own)) => Some(own.clone()),
            None if content.framework.as_deref() == Some("trl") => Some("bf16".to_owned()),
            _ => None,
        }
    }

    fn compute(&self, content: &Content, file: &mut Map<String, Value>) {
        let own = Self::own(content);
        let engine = file.get("distributed_type").is_some_and(|kind| kind == "FSDP" || kind == "DEEPSPEED");
        if let Some(own) = own.filter(|_| engine || file.contains_key("parallelism_config")) {
            file.insert("mixed_precision".into(), json!(own));
        }
    }

    /// accelerate's file over a program's.
    fn accelerated(
        &self,
        content: &mut Content,
        file: &Value,
        open: &dyn Fn(&str) -> Result<Value, String>,
    ) -> Result<(), Vec<Fault>> {
        let beside = Beside { open, adapter: content.tree.get("adapter").is_some(), ..Beside::default() };
        let over = Content::of_imported(import::read_as("accelerate", file, &beside)?);
        let mut tree = over.tree;
        // The program's own choice of types stands, unless an engine brings its own; accelerate's "no" is no choice.
        let plain = tree::get(&tree, "parallel.engine.ddp").is_some() || tree.get("parallel").is_none();
        let trainer = content.framework.as_deref().is_none_or(|name| ["hf-trainer", "trl"].contains(&name));
        let silent =
            trainer && Self::own(content).is_none() && tree::get(&tree, "autocast").is_some_and(Value::is_string);
        if plain && !silent {
            tree::take(&mut tree, "autocast");
        }
        tree::lay(&mut content.tree, &tree);
        content.deepspeed = over.deepspeed.or(content.deepspeed.take());
        content.notes.extend(over.notes);
        Ok(())
    }
}
