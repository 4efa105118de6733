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
    assert!(refused(&["--sharding-strategy", "no"]).contains("FSDP1"));
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
    assert!(refused(&["--zero", "3", "--zero-option", "mics_shard_size=4"]).contains("mics_shard_size"));
    assert!(refused(&["--zero", "3", "--zero-option", "zero_hpz_partition_size=3"]).contains("2 and 4"));
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
