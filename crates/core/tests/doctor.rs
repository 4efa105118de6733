//! Messages of public issues, by their numbers and forms (truth/messages.jsonl): what the doctor makes of them.

#![allow(clippy::disallowed_methods, missing_docs, reason = "a test reads its truth")]

use serde_json::Value;
use vramcast_core::doctor::diagnose;

/// A message with a row's numbers in the form of its program.
fn message(row: &Value) -> String {
    let text = |key: &str| row["numbers"][key].as_str().unwrap_or_default().to_owned();
    match row["form"].as_str().unwrap_or_default() {
        "torch-1" => format!(
            "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; {} \
             reserved in total by PyTorch)",
            text("asked"), text("total"), text("allocated"), text("free"), text("reserved")
        ),
        "torch-cached" => format!(
            "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; {} cached)",
            text("asked"), text("total"), text("allocated"), text("free"), text("reserved")
        ),
        "torch-2" => {
            let process = row["numbers"]["process"].as_str();
            let own = process.map(|size| format!(" Including non-PyTorch memory, this process has {size} memory in use."));
            format!(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is \
                 free.{} Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated.",
                text("asked"), text("total"), text("free"), own.unwrap_or_default(), text("allocated"), text("unused")
            )
        }
        "vllm-blocks" => "ValueError: No available memory for the cache blocks.".into(),
        "vllm-length" => {
            "ValueError: The model's max seq len is larger than the maximum number of tokens that can be stored in KV cache.".into()
        }
        "llama-cuda" => format!(
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating {} on device 0: cudaMalloc failed: out of memory",
            text("asked")
        ),
        "llama-buffer" => "error loading model: unable to allocate backend buffer".into(),
        "llama-host" => format!("ggml_cuda_host_malloc: failed to allocate {} of pinned memory: invalid argument", text("asked")),
        "killed" => "step 3 of 9\n\nKilled\n".into(),
        "shell-killed" => "/bin/bash: line 27: 318 Killed sh start.sh".into(),
        "return-9" => "[ERROR] [launch.py:320:sigkill_handler] exits with return code = -9".into(),
        "sigkill" => "subprocess.CalledProcessError: Command died with <Signals.SIGKILL: 9>.".into(),
        "exit-137" => "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)".into(),
        "nccl" => "host:1:2 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'".into(),
        "growth" => {
            let sizes = row["numbers"]["sizes"].as_array().cloned().unwrap_or_default();
            let line = |(at, size): (usize, &Value)| format!("Epoch {at}: {}\n", size.as_str().unwrap_or_default());
            let log: String = sizes.iter().enumerate().map(line).collect();
            format!("{log}RuntimeError: CUDA error: out of memory")
        }
        other => panic!("{other}"),
    }
}

#[test]
fn the_class_of_public_messages_is_right() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../truth/messages.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut wrong = Vec::new();
    for row in &rows {
        let found = diagnose(&message(row));
        let class = found.first().map(|finding| serde_json::to_value(finding.cause).unwrap());
        if class.as_ref() != Some(&row["class"]) {
            wrong.push(format!("{}: {} and not {class:?}", row["link"], row["class"]));
        }
    }
    assert!(rows.len() >= 60 && wrong.len() <= 5, "{} of {} wrong: {wrong:#?}", wrong.len(), rows.len());
    println!("{} of {} right; wrong: {wrong:#?}", rows.len() - wrong.len(), rows.len());
}
