//! Programs that start others on cards: what they say about how many there are, and about who spreads the run.

use serde_json::{Map, Value, json};

use super::arguments::typed;
use super::launch::Launch;
use super::{base, serving, shell};
use crate::plan::Fault;

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
