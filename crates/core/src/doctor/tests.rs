use super::*;

fn cause(text: &str) -> Option<Cause> {
    diagnose(text).first().map(|finding| finding.cause)
}

/// Messages of our own numbers in the forms of torch's versions.
#[test]
fn torch_of_all_versions() {
    let old = "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 2; 10.92 GiB total capacity; 9.10 GiB already \
               allocated; 0.31 GiB free; 120.00 MiB cached)";
    assert_eq!(cause(old), Some(Cause::TooMuch));
    let middle = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.10 GiB total capacity; \
                  55.00 GiB already allocated; 1.10 GiB free; 76.00 GiB reserved in total by PyTorch) If reserved memory is >> \
                  allocated memory try setting max_split_size_mb";
    let found = diagnose(middle);
    assert_eq!(found[0].cause, Cause::Fragmentation);
    assert_eq!(found[0].message.as_ref().and_then(|message| message.unused), Some(21 * (1 << 30)));
    let new = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 3 has a total capacity of \
               23.64 GiB of which 100.00 MiB is free. Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of \
               the allocated memory 22.60 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.";
    let found = diagnose(new);
    assert_eq!((found[0].cause, found[0].ranks.as_slice()), (Cause::TooMuch, &[3][..]));
    let shared = "CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total capacity of 39.39 GiB of which 96.00 MiB is \
                  free. Process 77 has 31.00 GiB memory in use. Including non-PyTorch memory, this process has 8.20 GiB memory in \
                  use. Of the allocated memory 7.60 GiB is allocated by PyTorch, and 60.00 MiB is reserved by PyTorch but unallocated.";
    assert_eq!(cause(shared), Some(Cause::OtherProcess));
    assert_eq!(cause("RuntimeError: CUDA error: out of memory"), Some(Cause::TooMuch));
    let huge = "CUDA out of memory. Tried to allocate 256.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 60.00 GiB is free.";
    assert!(diagnose(huge)[0].because.contains("one tensor"));
    let short = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.00 GiB is free.";
    assert!(diagnose(short)[0].because.contains("tensors hold an unknown part"));
}

#[test]
fn others_are_known() {
    for (text, wanted) in [
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", Cause::Cache),
        (
            "Free memory on device (20/80 GiB) on startup is less than desired GPU memory utilization (0.9, 72 GiB).",
            Cause::OtherProcess,
        ),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB on device 0: cudaMalloc failed: out of memory",
            Cause::TooMuch,
        ),
        ("[1.0] Out of memory: Killed process 12 (python) total-vm:1kB", Cause::Host),
        ("[ERROR] [launch.py:320:sigkill_handler] exits with return code = -9", Cause::Host),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error.", Cause::Host),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Cause::TooMuch),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 'out of memory'",
            Cause::TooMuch,
        ),
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 3, Hardware limit: 2.",
            Cause::NotMemory,
        ),
        (
            "THCudaCheck FAIL file=/x/THCStorage.cu line=58 error=2 : out of memory\nRuntimeError: cuda runtime error (2) : out \
             of memory at /x/THC/generic/THCStorage.cu:58",
            Cause::TooMuch,
        ),
        ("Error out of memory at line 380 in file /x/git/bitsandbytes/csrc/pythonInterface.c", Cause::Host),
        (
            "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the \
             quantized model.",
            Cause::TooMuch,
        ),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", Cause::NotMemory),
    ] {
        assert_eq!(cause(text), Some(wanted), "{text}");
    }
    assert_eq!(cause("all is well"), None);
}

#[test]
fn ranks_are_one_finding_and_growth_is_a_leak() {
    let one = |rank: u64| {
        format!(
            "[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {rank} has a total capacity of \
             79.00 GiB of which 1.00 GiB is free. Of the allocated memory 75.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved \
             by PyTorch but unallocated.\n\n"
        )
    };
    let all: String = (0..4).map(one).collect();
    let found = diagnose(&all);
    assert_eq!((found.len(), found[0].ranks.as_slice()), (1, &[0, 1, 2, 3][..]));
    let log: String = (1..8).map(|step| format!("step {step} memory allocated {}.0 GiB\n", 10 + 9 * step)).collect();
    let leaking = format!("{log}{}", one(0));
    assert_eq!(diagnose(&leaking)[0].cause, Cause::Leak);
}

#[test]
fn tracebacks_say_where() {
    let text = "Traceback (most recent call last):\n  File \"/x/site-packages/transformers/trainer.py\", line 9, in evaluation_loop\n    y\n\
                torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 15.00 GiB of \
                which 0.10 GiB is free. Of the allocated memory 14.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch \
                but unallocated.";
    let found = diagnose(text);
    let place = found[0].place.clone().unwrap();
    assert_eq!((place.phase, place.line.as_deref()), ("evaluation", Some("transformers/trainer.py:9 evaluation_loop")));
    assert!(found[0].cures[0].contains("eval_batch_size"));
}

#[test]
fn figures_of_engines_are_cures() {
    let length = "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is \
                  larger than the available KV cache memory (5.44 GiB). Based on the available memory, the estimated maximum model length \
                  is 44544.";
    let found = diagnose(length);
    assert!(found[0].cures[0].starts_with("--max-model-len 44544:"), "{:?}", found[0].cures);
    assert!(!found[0].cures[1..].iter().any(|cure| cure.contains("--max-model-len")));
    let stored = "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV \
                  cache (26784). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.";
    assert!(diagnose(stored)[0].cures[0].starts_with("--max-model-len 26784:"), "{:?}", diagnose(stored)[0].cures);
    let share = "ValueError: Free memory on device (14.52/23.69 GiB) on startup is less than desired GPU memory utilization (0.9, 21.32 GiB).";
    assert!(diagnose(share)[0].cures[0].starts_with("--gpu-memory-utilization 0.61:"));
    let ollama = "Error: model requires more system memory (9.1 GiB) than is available (5.3 GiB)";
    assert!(diagnose(ollama)[0].cures.iter().all(|cure| !cure.contains("data loader")));
}

#[test]
fn what_only_generates_is_not_told_how_to_train() {
    let mut found = diagnose(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.20 GiB is free.",
    );
    assert!(found[0].cures[0].contains("checkpointing"), "{:?}", found[0].cures);
    found[0].of_generation();
    assert!(found[0].cures[0].contains("shorter context"));
}

#[test]
fn cures_of_a_server_are_its_own() {
    let message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.69 GiB of \
                   which 0.20 GiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch \
                   but unallocated.";
    let in_file = |file: &str, function: &str| {
        let frames = format!("Traceback (most recent call last):\n  File \"{file}\", line 9, in {function}\n    y\n");
        diagnose(&format!("{frames}{message}"))[0].cures.join("\n")
    };
    let profiled = in_file("/x/site-packages/vllm/v1/worker/gpu_worker.py", "profile_run");
    assert!(profiled.contains("--max-num-seqs") && !profiled.contains("gradient"), "{profiled}");
    let loaded = in_file("/x/site-packages/vllm/model_executor/model_loader/base_loader.py", "load_model");
    assert!(loaded.contains("--tensor-parallel-size") && !loaded.contains("low_cpu_mem"), "{loaded}");
    assert!(in_file("/x/site-packages/sglang/srt/models/llama.py", "forward").contains("--mem-fraction-static"));
    assert!(in_file("/x/site-packages/trl/trainer/grpo_trainer.py", "training_step").contains("checkpointing"));
    let engine = "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, stream): out of memory (tllmBuffers.h:1)";
    let found = diagnose(engine);
    assert_eq!((found[0].cause, found[0].source), (Cause::TooMuch, "TensorRT-LLM"));
    assert!(found[0].cures.iter().any(|cure| cure.contains("--max_batch_size")), "{:?}", found[0].cures);
}

#[test]
fn logs_of_power_shell_are_read() {
    let plain = "RuntimeError: CUDA error: out of memory";
    let units: Vec<u8> = plain.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked = [&[0xff, 0xfe][..], &units].concat();
    assert_eq!((text(&units).as_str(), text(&marked).as_str(), text(plain.as_bytes()).as_str()), (plain, plain, plain));
}
