//! Flags of runs on many cards: each reaches the plan, and what cannot be is refused with the way out.

use assert_cmd::Command;
use serde_json::{Value, json};

fn vramcast(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    let plan = ["train", "gpt2", "--batch-size", "1", "--seq-len", "64", "--gpu", "h100", "--gpus", "8"];
    command.env("HF_HUB_OFFLINE", "1").args(plan).args(arguments).assert()
}

fn document(arguments: &[&str]) -> Value {
    let all = [arguments, &["--json"]].concat();
    serde_json::from_slice(&vramcast(&all).success().get_output().stdout).unwrap()
}

fn engine(arguments: &[&str]) -> Value {
    document(arguments)["plan"]["train"]["parallel"]["engine"].clone()
}

fn refused(arguments: &[&str]) -> String {
    String::from_utf8(vramcast(arguments).code(2).get_output().stderr.clone()).unwrap()
}

#[test]
fn flags_of_ddp_and_fsdp_reach_the_plan() {
    let ddp = engine(&["--engine", "ddp", "--bucket-cap-mb", "50", "--gradient-as-bucket-view", "--static-graph"]);
    let wanted = json!({"bucket_cap_mb": 50, "gradient_as_bucket_view": true, "static_graph": true});
    assert_eq!(ddp["ddp"], wanted);
    let strategy = |name: &str, more: &[&str]| {
        let all = [&["--engine", "fsdp", "--sharding-strategy", name], more].concat();
        engine(&all)["fsdp1"]["strategy"].clone()
    };
    assert_eq!(strategy("NO_SHARD", &[]), "no");
    assert_eq!(strategy("SHARD_GRAD_OP", &[]), "grad-op");
    assert_eq!(strategy("hybrid", &["--dp-replicate", "2"]), "full");
    assert!(refused(&["--engine", "fsdp", "--sharding-strategy", "hybrid"]).contains("--dp-replicate"));
    assert!(refused(&["--sharding-strategy", "no"]).contains("fsdp1"));
    assert_eq!(engine(&["--reshard-root", "true"])["fsdp2"]["reshard_root"], true);
}

#[test]
fn single_keys_of_deepspeed_are_flags_too() {
    let flags = [
        "--zero",
        "3",
        "--zero-option",
        "overlap_comm=false",
        "--zero-option",
        "reduce_bucket_size=5e7",
        "--zero-option",
        "zero_hpz_partition_size=4",
        "--grad-accum-dtype",
        "fp32",
    ];
    let engine = engine(&flags)["deepspeed"].clone();
    assert_eq!(engine["zero"]["overlap_comm"], false);
    assert_eq!(engine["zero"]["reduce_bucket_size"], 50_000_000);
    assert_eq!(engine["zero"]["zero_hpz_partition_size"], 4);
    assert_eq!(engine["grad_accum_dtype"], json!(engine["grad_accum_dtype"].as_str().expect("a type")));
    assert!(refused(&["--zero-option", "no_such_key=1"]).contains("no_such_key"));
    assert!(refused(&["--zero-option", "overlap_comm"]).contains("KEY=VALUE"));
    assert!(refused(&["--zero", "3", "--zero-option", "mics_shard_size=3"]).contains("mics_shard_size 3"));
    assert!(refused(&["--zero", "2", "--zero-option", "mics_shard_size=4"]).contains("stage 3"));
    assert!(refused(&["--zero", "3", "--zero-option", "zero_hpz_partition_size=3"]).contains("=2"));
}

#[test]
fn a_part_of_the_cards_shares_one_copy() {
    let document = document(&["--zero", "3", "--zero-option", "mics_shard_size=4"]);
    let zero = &document["plan"]["train"]["parallel"]["engine"]["deepspeed"]["zero"];
    assert_eq!(zero["mics_shard_size"], 4);
    let said = document.to_string();
    assert!(said.contains("not yet measured") && said.contains("MiCS"), "{said}");
}

/// Megatron's combinations: flags reach the plan, and what was never measured is said.
#[test]
fn flags_of_megatrons_sharding_reach_the_plan() {
    let run = |arguments: &str| {
        let mut command = Command::cargo_bin("vramcast").unwrap();
        let plan = ["train", "llama3-8b", "--seq-len", "512", "--gpu", "h100", "--gpus", "8"];
        command.env("HF_HUB_OFFLINE", "1").args(plan).args(arguments.split_whitespace()).assert()
    };
    let document = |arguments: &str| -> Value {
        let output = run(&format!("{arguments} --json")).success().get_output().stdout.clone();
        serde_json::from_slice(&output).unwrap()
    };
    let engine = |arguments: &str| document(arguments)["plan"]["train"]["parallel"]["engine"]["megatron"].clone();
    let refused = |arguments: &str| String::from_utf8(run(arguments).code(2).get_output().stderr.clone()).unwrap();
    let fsdp = engine("--engine megatron-fsdp --data-parallel-sharding-strategy optim_grads");
    assert_eq!(fsdp["fsdp"]["strategy"], "optim_grads");
    assert_eq!(engine("--engine megatron-fsdp --fsdp-double-buffer")["fsdp"]["double_buffer"], true);
    assert!(refused("--engine megatron --fsdp-double-buffer").contains("--engine megatron-fsdp"));
    let zero = engine("--engine megatron-deepspeed --zero 1 --tp 2 --recompute uniform-1 --partition-activations");
    assert_eq!((&zero["deepspeed"]["zero"]["stage"], &zero["partition_activations"]), (&1.into(), &true.into()));
    assert_eq!(engine("--engine megatron-deepspeed --tp 8")["deepspeed"]["zero"]["stage"], 0);
    assert!(refused("--engine megatron-deepspeed --zero 3").contains("ZeRO 3"));
    assert_eq!(engine("--engine megatron --pp 4 --pipeline-schedule zb-h1")["schedule"], "zb-h1");
    let lora = engine("--engine megatron --tp 2 --megatron-lora=16 --megatron-lora-targets linear_qkv,linear_fc2");
    assert_eq!(lora["lora"], json!({"dim": 16, "targets": ["linear_qkv", "linear_fc2"]}));
    assert_eq!(engine("--engine megatron --cpu-offloading-num-layers 4")["cpu_offloading_layers"], 4);
    let said = document("--engine megatron-fsdp").to_string();
    assert!(said.contains("Megatron-FSDP: from the sources of Megatron, not yet measured"), "{said}");
}

#[test]
fn a_disk_takes_states_and_the_host_keeps_buffers() {
    let host = document(&["--zero", "3", "--offload-optimizer=cpu"]);
    let disk = document(&["--zero", "3", "--offload-optimizer=nvme"]);
    assert_ne!(host, disk);
    assert!(disk.to_string().contains("buffers to the disk"), "{disk}");
    assert!(!disk.to_string().contains("fp32 weights"));
}

#[test]
fn communicators_have_a_line_for_each_group() {
    let text = document(&["--engine", "fsdp2", "--dp-replicate", "2"]).to_string();
    for line in ["NCCL kernels", "NCCL of the replicas", "NCCL of data parallel"] {
        assert!(text.contains(line), "{line}: {text}");
    }
}
