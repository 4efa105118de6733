//! Programs that start others on cards: what they say about how many there are, and about who spreads the run.

use serde_json::{Map, Value, json};

use super::arguments::typed;
use super::{base, serving, shell, variables};
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
    gpus: Option<u64>,
    /// accelerate's `--num_processes` among a program's own arguments: those of all machines.
    processes: Option<u64>,
    nodes: Option<u64>,
    /// accelerate's options, as its file would hold them.
    accelerate: Option<Map<String, Value>>,
    /// accelerate's file.
    file: Option<String>,
    /// Cards of a node that a scheduler gives to each line.
    given: Option<u64>,
    /// Cards that the environment shows.
    pub(super) visible: Option<u64>,
    /// Nodes and cards of each that SLURM was asked for, and cards or tasks of all nodes.
    slurm: (Option<u64>, Option<u64>, Option<u64>),
    /// `PYTORCH_ALLOC_CONF`.
    pub(super) allocator: Option<String>,
    /// Variables of serving engines.
    pub(super) variables: Vec<(String, String)>,
    /// Names of others that decide no memory.
    pub(super) idle: Vec<String>,
    pub(super) notes: Vec<String>,
}

/// Takes launchers off the front of a line.
pub(super) fn peel<'a>(words: &'a [String], launch: &mut Launch) -> Result<&'a [String], Vec<Fault>> {
    let mut rest = words;
    loop {
        let Some(first) = rest.first() else { return Ok(rest) };
        if let Some((name, value)) = shell::assignment(first) {
            launch.environment(&name, &value);
            rest = &rest[1..];
            continue;
        }
        match base(first) {
            "export" | "env" | "sudo" | "nohup" | "time" | "exec" | "stdbuf" | "numactl" | "nice" | "then" | "do"
            | "else" | "uvx" => {
                rest = valued(&rest[1..]);
            }
            "uv" | "poetry" | "conda" | "pipenv" | "pixi" if rest.get(1).is_some_and(|word| word == "run") => {
                rest = valued(&rest[2..]);
            }
            "mpirun" | "mpiexec" | "horovodrun" => rest = mpirun(&rest[1..], launch),
            "ray" if rest.get(1).is_some_and(|word| word == "job") => {
                let at = rest.iter().position(|word| word == "--").unwrap_or(rest.len() - 1);
                rest = &rest[at + 1..];
            }
            "srun" => rest = srun(&rest[1..], launch)?,
            "torchrun" => rest = torchrun(&rest[1..], launch)?,
            "accelerate" if rest.get(1).is_some_and(|word| word == "launch") => rest = accelerate(&rest[2..], launch)?,
            "deepspeed" => rest = deepspeed(&rest[1..], launch)?,
            python if python.starts_with("python") && !python.ends_with(".py") => {
                rest = skip(&rest[1..], |word| ["-u", "-O", "-X", "-W"].contains(&word));
                if rest.first().is_some_and(|word| word == "-m") {
                    rest = &rest[1..];
                    match rest.first().map(String::as_str) {
                        Some("torch.distributed.run" | "torch.distributed.launch") => {
                            rest = torchrun(&rest[1..], launch)?
                        }
                        Some("accelerate.commands.launch") => rest = accelerate(&rest[1..], launch)?,
                        _ => return Ok(rest),
                    }
                }
            }
            _ => return Ok(rest),
        }
    }
}

fn skip(words: &[String], is: impl Fn(&str) -> bool) -> &[String] {
    let at = words.iter().position(|word| !is(word)).unwrap_or(words.len());
    &words[at..]
}

/// Options of what surrounds a program, some of which have a value behind them.
fn valued(words: &[String]) -> &[String] {
    const VALUED: [&str; 16] = [
        "--with",
        "--python",
        "-p",
        "--extra",
        "--group",
        "--project",
        "--directory",
        "--env-file",
        "--from",
        "-n",
        "--name",
        "--cwd",
        "-u",
        "-C",
        "--with-requirements",
        "--index-url",
    ];
    let mut rest = words;
    while let Some(word) = rest.first().filter(|word| word.starts_with('-')) {
        let takes = VALUED.contains(&word.as_str()) && rest.get(1).is_some_and(|next| !next.starts_with('-'));
        rest = &rest[if takes { 2 } else { 1 }..];
    }
    rest
}

fn mpirun<'a>(words: &'a [String], launch: &mut Launch) -> &'a [String] {
    launch.starts = true;
    // `-x NAME`, `-H hosts` and `--mca key value` stand between.
    let program = |at: &usize| {
        let word = &words[*at];
        word.starts_with("python")
            || word.ends_with(".py")
            || ["torchrun", "accelerate", "deepspeed"].contains(&base(word))
            || serving::program(&words[*at..]).is_some()
    };
    let at = (0..words.len()).find(program).unwrap_or(words.len());
    let tasks = words[..at].windows(2).find(|pair| ["-np", "-n", "--np"].contains(&pair[0].as_str()));
    launch.gpus = tasks.and_then(|pair| pair[1].parse().ok()).or(launch.gpus);
    &words[at..]
}

/// Options up to the program; those that take a value and have it as a word of its own are named.
fn options<'a>(words: &'a [String], bare: &[&str], mut each: impl FnMut(&str, &str)) -> &'a [String] {
    let mut rest = words;
    while let Some(word) = rest.first().filter(|word| word.starts_with('-')) {
        let name = word.trim_start_matches('-');
        if let Some((name, value)) = name.split_once('=') {
            each(&name.replace('-', "_"), value);
            rest = &rest[1..];
            continue;
        }
        let name = name.replace('-', "_");
        // A script behind a switch is the program.
        let next = rest
            .get(1)
            .filter(|next| !next.starts_with('-') && !next.ends_with(".py") && !bare.contains(&name.as_str()));
        each(&name, next.map_or("true", String::as_str));
        rest = &rest[if next.is_some() { 2 } else { 1 }..];
    }
    rest
}

/// A count, or how many cards a list names.
fn count(text: &str) -> Option<u64> {
    text.split(':').next_back().and_then(|text| text.parse().ok())
}

pub(super) fn torchrun<'a>(words: &'a [String], launch: &mut Launch) -> Result<&'a [String], Vec<Fault>> {
    launch.starts = true;
    // `gpu` and `auto` are all that whoever started torchrun gave it.
    let (mut unsaid, mut unknown, mut none) = (None, None, false);
    let rest = options(words, &["standalone", "use_env", "no_python", "m", "module"], |name, value| match name {
        "nproc_per_node" | "nproc" => {
            launch.gpus = value.parse().ok();
            unsaid = launch.gpus.is_none().then(|| value.to_owned());
            none = launch.gpus == Some(0);
        }
        "nnodes" => {
            launch.nodes = count(value);
            unknown = launch.nodes.is_none().then(|| value.to_owned());
        }
        _ => {}
    });
    if none {
        return Err(vec![Fault::new("", "torchrun --nproc_per_node 0 starts nothing").or("use 1 or more")]);
    }
    if let Some(word) = unknown {
        launch.notes.push(format!("--nnodes {word} is not known here: one node is taken; --nodes says more"));
    }
    if let Some(word) = unsaid {
        launch.notes.push(format!("--nproc_per_node {word} is as many cards as the machine has"));
        launch.gpus = launch.given.or(launch.visible).or(launch.slurm.1).or(Some(8));
    }
    Ok(rest)
}

/// Options that a tool hands on to the launcher it calls itself.
pub(super) fn launched(name: Option<&str>, words: &[String], launch: &mut Launch) -> Result<(), Vec<Fault>> {
    match name {
        _ if words.is_empty() => {}
        Some("torchrun") => drop(torchrun(words, launch)?),
        Some("python") => {}
        _ => drop(accelerate(words, launch)?),
    }
    Ok(())
}

fn deepspeed<'a>(words: &'a [String], launch: &mut Launch) -> Result<&'a [String], Vec<Fault>> {
    launch.starts = true;
    let rest = options(
        words,
        &["module", "no_python", "no_ssh", "bind_cores_to_rank", "force_multi"],
        |name, value| match name {
            "num_gpus" => launch.gpus = value.parse().ok(),
            "num_nodes" => launch.nodes = value.parse().ok(),
            // `localhost:0,1,2`, `worker-0:0,1@worker-1:0,1`
            "include" | "i" => {
                let nodes: Vec<&str> = value.split('@').collect();
                launch.gpus = nodes[0].split_once(':').map(|(_, list)| list.split(',').count() as u64).or(launch.gpus);
                launch.nodes = launch.nodes.or(Some(nodes.len() as u64));
            }
            _ => {}
        },
    );
    if launch.gpus.is_none() {
        launch.gpus = launch.visible;
    }
    Ok(rest)
}

fn srun<'a>(words: &'a [String], launch: &mut Launch) -> Result<&'a [String], Vec<Fault>> {
    launch.starts = true;
    let (mut tasks, mut cards, mut each, mut per_task) = (None, None, None, None);
    let rest = options(words, &["exclusive", "l", "label", "u", "unbuffered", "overlap"], |name, value| {
        // `-n4`
        let (name, value) = match name.split_at_checked(1) {
            Some((short @ ("n" | "N" | "G"), number)) if number.parse::<u64>().is_ok() => (short, number),
            _ => (name, value),
        };
        match name {
            // `-N 2-4`: at least so many.
            "N" | "nodes" => launch.nodes = value.split('-').next().and_then(|least| least.parse().ok()),
            "gpus_per_node" | "gres" => launch.gpus = count(value).or(launch.gpus),
            "ntasks_per_node" => each = value.parse::<u64>().ok(),
            "gpus_per_task" => per_task = count(value),
            "n" | "ntasks" => tasks = value.parse::<u64>().ok(),
            "G" | "gpus" => cards = count(value),
            _ => {}
        }
    });
    launch.nodes = launch.nodes.or(launch.slurm.0);
    // Both count those of all nodes.
    let nodes = launch.nodes.unwrap_or(1).max(1);
    let of_node = |all: u64| (all / nodes).max(1);
    let told = launch.gpus.or(cards.map(of_node));
    launch.given = told.or(per_task.map(|cards| cards.saturating_mul(each.or(tasks.map(of_node)).unwrap_or(1))));
    launch.gpus = launch.gpus.or(each).or(launch.slurm.1.filter(|_| cards.is_none()));
    launch.gpus = launch.gpus.or(cards.or(tasks).or(launch.slurm.2).map(of_node));
    Ok(rest)
}

/// Switches of `accelerate launch` that take no value.
const SWITCHES: [&str; 16] = [
    "multi_gpu",
    "use_fsdp",
    "use_deepspeed",
    "use_megatron_lm",
    "cpu",
    "tpu",
    "quiet",
    "debug",
    "m",
    "module",
    "no_python",
    "use_tp",
    "use_parallelism_config",
    "same_network",
    "enable_cpu_affinity",
    "downcast_bf16",
];

/// Its options that start processes, and those of what it was told by others.
const STARTING: &str = "machine_rank main_process_ip main_process_port main_training_function rdzv_backend rdzv_conf same_network \
                        gpu_ids num_cpu_threads_per_process max_restarts monitor_interval role tee log_dir quiet debug \
                        enable_cpu_affinity downcast_bf16 m module no_python use_tp use_parallelism_config \
                        deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter \
                        deepspeed_inclusion_filter";

fn accelerate<'a>(words: &'a [String], launch: &mut Launch) -> Result<&'a [String], Vec<Fault>> {
    launch.starts = true;
    let mut file = Map::new();
    let rest = options(words, &SWITCHES, |name, value| {
        let known = |key: &str, value: Value, file: &mut Map<String, Value>| drop(file.insert(key.to_owned(), value));
        match name {
            "config_file" => launch.file = Some(value.to_owned()),
            "num_processes" | "num_machines" | "mixed_precision" | "gradient_accumulation_steps" => {
                known(name, typed(value), &mut file);
            }
            "multi_gpu" => known("distributed_type", json!("MULTI_GPU"), &mut file),
            "use_fsdp" => known("distributed_type", json!("FSDP"), &mut file),
            "use_deepspeed" => known("distributed_type", json!("DEEPSPEED"), &mut file),
            "use_megatron_lm" => known("distributed_type", json!("MEGATRON_LM"), &mut file),
            "zero_stage"
            | "offload_optimizer_device"
            | "offload_param_device"
            | "gradient_clipping"
            | "deepspeed_config_file"
            | "zero3_init_flag"
            | "zero3_save_16bit_model" => {
                file.entry("deepspeed_config").or_insert_with(|| json!({}))[name] = typed(value);
            }
            fsdp if fsdp.starts_with("fsdp_") => {
                file.entry("fsdp_config").or_insert_with(|| json!({}))[name] = typed(value);
            }
            axis if axis.starts_with("parallelism_config_") => {
                file.entry("parallelism_config").or_insert_with(|| json!({}))[name] = typed(value);
            }
            "tp_size" => known("tp_config", json!({"tp_size": typed(value)}), &mut file),
            "dynamo_backend" if value == "no" => {}
            // Options of what is refused or said by its switch.
            part if ["megatron_lm_", "fp8_", "dynamo_"].iter().any(|group| part.starts_with(group))
                && part != "dynamo_backend" => {}
            part if STARTING.split_whitespace().any(|known| known == part) => {}
            "cpu" => known("use_cpu", json!(true), &mut file),
            // Its reader says which others it knows.
            _ => known(name, typed(value), &mut file),
        }
    });
    launch.accelerate = Some(file);
    Ok(skip(rest, |word| word == "-m"))
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
