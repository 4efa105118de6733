//! Words of serving engines, libraries, the host and the kernel, and what they say.

use std::sync::LazyLock;

use regex_lite::Regex;

use super::Cause;

/// Who says it, what it means, the words, and what happened in ours.
type Row = (&'static str, Cause, &'static str, &'static str);

/// Surer words first. Sources: the projects' own texts, by file.
const ROWS: &[Row] = &[
    // vLLM, v1/core/kv_cache_utils.py and v1/worker/gpu_worker.py.
    (
        "vLLM",
        Cause::Cache,
        r"No available memory for the cache blocks",
        "weights and the profile run leave nothing for the cache",
    ),
    (
        "vLLM",
        Cause::Cache,
        r"larger than the (?:maximum number of tokens that can be stored in|available) KV cache|KV cache is needed, which is larger",
        "the cache does not hold one sequence of full length",
    ),
    (
        "vLLM",
        Cause::OtherProcess,
        r"Free memory on device .{0,60}? on startup is less than desired GPU memory utilization",
        "the card is not free enough for the share that the engine shall take",
    ),
    (
        "vLLM",
        Cause::OtherProcess,
        r"Error in memory profiling|Initial free memory .{0,60}? current free memory",
        "the memory of the card changed while the engine measured it",
    ),
    (
        "vLLM",
        Cause::TooMuch,
        r"CUDA out of memory occurred when warming up",
        "graphs and the sampler do not fit beside weights and cache",
    ),
    // SGLang, model_executor/model_runner.py.
    (
        "SGLang",
        Cause::Cache,
        r"Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static",
        "weights leave nothing of the static share for the cache",
    ),
    // managers/schedule_batch.py, mem_cache/common.py.
    (
        "SGLang",
        Cause::Cache,
        r"alloc_\w+ runs out of memory|(?:Prefill|Decode) out of memory\. Try to lower your batch size",
        "the running requests take more of the pool than it has",
    ),
    ("SGLang", Cause::OtherProcess, r"The memory capacity is unbalanced", "the cards are not equally free"),
    ("TGI", Cause::TooMuch, r"Not enough memory to handle \d+ prefill tokens", "the warm-up does not fit"),
    ("TGI", Cause::Cache, r"Not enough memory to handle \d+ total tokens", "the cache that was asked for does not fit"),
    (
        "TensorRT-LLM",
        Cause::Cache,
        r"(?:insufficient GPU memory to allocate|Not enough free memory for) .{0,40}KV ?[Cc]ache",
        "what is free does not hold the cache",
    ),
    // cpp/include/tensorrt_llm/common/cudaUtils.h around runtime/tllmBuffers.h; pyexecutor/py_executor_creator.py.
    (
        "TensorRT-LLM",
        Cause::TooMuch,
        r"CUDA runtime error in .{1,160}: out of memory|Executor creation failed due to insufficient GPU memory",
        "weights and the engine's own buffers do not fit the card",
    ),
    // llama.cpp, ggml-cuda.cu, ggml-alloc.c, llama-context.cpp.
    (
        "llama.cpp",
        Cause::Cache,
        r"failed to allocate (?:buffer for )?kv cache|llama_kv_cache_(?:unified_)?init(?:: | )failed|llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "the cache does not fit beside the weights",
    ),
    (
        "llama.cpp",
        Cause::TooMuch,
        r"ggml_backend_cuda_buffer_type_alloc_buffer: allocating|ggml_gallocr_reserve_n: failed to allocate \w+ buffer|unable to allocate (?:CUDA|ROCm|Vulkan|backend)\w* buffer|failed to allocate compute (?:pp )?buffers|ggml_backend_metal_buffer_type_alloc_buffer: error|ggml_vulkan: .{0,40}ErrorOutOfDeviceMemory|cudaMalloc failed: out of memory",
        "a buffer of weights, cache or computation does not fit",
    ),
    ("llama.cpp", Cause::Host, r"ggml_cuda_host_malloc: failed to allocate", "pinned memory of the host was not there"),
    (
        "llama.cpp",
        Cause::Host,
        r"ggml_backend_cpu_buffer_type_alloc_buffer: failed|(?:failed|unable) to allocate CPU buffer",
        "weights that stay on the host do not fit its memory",
    ),
    // exllamav2 and 3, model.py, model_ls.py, where layers are dealt out over cards with the cache beside them.
    (
        "ExLlama",
        Cause::Cache,
        r"Insufficient VRAM (?:in split )?for model and cache",
        "the cards do not hold weights and a cache of this length",
    ),
    ("CTranslate2", Cause::TooMuch, r"CUDA failed with error out of memory", "the card has less than was asked for"),
    ("Ollama", Cause::Host, r"model requires more system memory", "the model does not fit the host's memory"),
    // The host.
    (
        "the kernel",
        Cause::Host,
        r"(?i)Out of memory: Killed? process|oom-kill(?:er|:|')|killed by the OOM killer|invoked oom-killer|Memory cgroup out of memory|OOMKilled|oom_reaper: reaped",
        "the kernel ended the process",
    ),
    // pkg/kubelet/eviction/helpers.go.
    (
        "Kubernetes",
        Cause::Host,
        r"node was low on resource: memory",
        "the node's memory ran low, and the pod had to go",
    ),
    // gcc's driver, and nvcc's: sources of kernels need gigabytes each.
    (
        "a compiler",
        Cause::Host,
        r"Killed signal terminated program|died due to signal 9|fatal error: Killed \(program",
        "the kernel ended the compiler: fewer jobs at once (MAX_JOBS) need less memory",
    ),
    (
        "Slurm",
        Cause::Host,
        r"(?i)oom[-_]kill event|Exceeded job memory limit|slurmstepd: error: .{0,60}memory|Some of the step tasks have been OOM Killed|OUT_OF_ME",
        "the job's limit of host memory was reached",
    ),
    (
        "Ray",
        Cause::Host,
        r"killed due to (?:memory pressure|the node running low on memory)|ray\.exceptions\.OutOfMemoryError|Task was killed due to the node running low on memory",
        "the node's memory ran low",
    ),
    (
        "the data loader",
        Cause::Host,
        r"DataLoader worker .{0,60}?killed by signal: (?:Killed|Bus error)|insufficient shared memory|unable to (?:open|write|mmap) .{0,80}?shared memory|No space left on device: '/dev/shm",
        "a worker of the data loader had no (shared) memory",
    ),
    (
        "a launcher",
        Cause::Host,
        r"(?m)exits with return code = -9|^\W*Killed\W*$|line \d+: +\d+ Killed|process (?:is|was|got) (?:always )?killed|exitcode *: -9|Signal 9 \(SIGKILL\)|died with <Signals\.SIGKILL|returned non-zero exit status 137|[Ee]xit code:? 137|Received -9|signal: 9|SIGKILL",
        "a rank was killed, as the kernel does when host memory is full",
    ),
    (
        "the host",
        Cause::Host,
        r"DefaultCPUAllocator: (?:can't|not enough memory)|\[enforce fail at .{0,30}alloc_cpu|std::bad_alloc|Unable to allocate .{0,40}for an array|Cannot allocate memory|numpy.{0,40}_ArrayMemoryError|cudaHostAlloc|pin_memory.{0,200}out of memory|\.pin_memory\([^)\n]*\)[\s^~]+\w+Error: CUDA error: out of memory|could not allocate pinned host memory|paging file is too small|os error 1455|\bMemoryError",
        "memory of the host was asked for, and was not there",
    ),
    ("Windows", Cause::Host, r"Windows fatal exception: code 0xc0000017", "the host has no memory left"),
    // torch before 0.4, THC/THCGeneral.cpp, where the check alone is in the log.
    ("torch", Cause::TooMuch, r"THCudaCheck FAIL .{1,200}error=2 : out of memory", "the card had no memory left"),
    // torch itself, c10/cuda/CUDACachingAllocator.cpp: a request failed, and NVML did not say what is free.
    (
        "torch",
        Cause::TooMuch,
        r"NVML_SUCCESS == .{1,60} INTERNAL ASSERT FAILED at .{1,120}CUDACachingAllocator",
        "the card had no memory left, and torch could not ask NVML how much there is",
    ),
    // Libraries on the card.
    (
        "cuBLAS",
        Cause::TooMuch,
        r"CUBLAS_STATUS_ALLOC_FAILED",
        "cuBLAS got no memory for its workspace: the card is full",
    ),
    (
        "cuBLAS",
        Cause::TooMuch,
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        "cuBLAS could not start, mostly because the card is full",
    ),
    (
        "cuDNN",
        Cause::TooMuch,
        r"CUDNN_STATUS_ALLOC_FAILED|FIND was unable to find an engine to execute this computation",
        "cuDNN got no memory for its workspace: the card is full",
    ),
    (
        "cuSOLVER",
        Cause::TooMuch,
        r"CUSOLVER_STATUS_ALLOC_FAILED|cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR",
        "cuSOLVER got no memory for its workspace",
    ),
    (
        "NCCL",
        Cause::TooMuch,
        r"Cuda failure (?:2 )?'?out of memory|Failed to CUDA (?:calloc|malloc)",
        "NCCL got no memory for its buffers: the card is full beside torch's share",
    ),
    (
        "NCCL",
        Cause::Host,
        r"Error while creating shared memory segment|(?:NCCL|nccl)[^\n]{0,400}?/dev/shm|No space left on device \(28\)",
        "NCCL got no shared memory",
    ),
    // csrc/pythonInterface.cpp asks for managed memory alone, which lies on the host: paged optimizers.
    (
        "bitsandbytes",
        Cause::Host,
        r"out of memory at line \d+ in file .{0,120}pythonInterface\.c",
        "a paged optimizer got no managed memory, which the host holds",
    ),
    (
        "bitsandbytes",
        Cause::TooMuch,
        r"(?i)Error:? .{0,40}?out of memory at line \d+ in file .{0,120}\.cu\b|CUDA Setup failed despite GPU being available. .{0,40}out of memory",
        "bitsandbytes got no memory for a buffer or paged states",
    ),
    // transformers, quantizers/quantizer_bnb_*.py.
    (
        "transformers",
        Cause::TooMuch,
        r"Make sure you have enough GPU RAM to fit the quantized model|Some modules are dispatched on the CPU or the disk",
        "the card has no room for the whole quantised model, so that parts of it were to lie on the host",
    ),
    (
        "JAX",
        Cause::TooMuch,
        r"RESOURCE_EXHAUSTED: (?:Out of memory|XLA:TPU compile permanent error|Failed to allocate)|Resource exhausted: Out of memory",
        "the device has less than was asked for",
    ),
    (
        "TensorFlow",
        Cause::TooMuch,
        r"OOM when allocating tensor with shape|failed to allocate .{1,60} from device: |Allocator \(GPU_\d+_bfc\) ran out of memory",
        "the device has less than was asked for",
    ),
    // paddle/phi/core/memory/allocation/cuda_allocator.cc.
    (
        "Paddle",
        Cause::TooMuch,
        r"Out of memory error on GPU \d+\. Cannot allocate",
        "the device has less than was asked for",
    ),
    // MLX (backend/metal) and ggml-metal report what the driver says of a buffer of commands.
    (
        "Metal",
        Cause::TooMuch,
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Command buffer execution failed: Insufficient Memory|\[metal::malloc\] ",
        "what the machine lends its graphics does not hold this",
    ),
    (
        "Metal",
        Cause::NotMemory,
        r"kIOGPUCommandBufferCallbackErrorImpactingInteractivity",
        "the system ended a buffer of commands that ran too long: a matter of time, not of memory",
    ),
    (
        "Vulkan",
        Cause::TooMuch,
        r"VK_ERROR_OUT_OF_DEVICE_MEMORY|ErrorOutOfDeviceMemory",
        "the device has less than was asked for",
    ),
    (
        "ONNX Runtime",
        Cause::TooMuch,
        r"Failed to allocate memory for requested buffer of size|BFCArena::AllocateRawInternal",
        "the arena could not grow",
    ),
    (
        "TensorRT",
        Cause::TooMuch,
        r"\[defaultAllocator\.cpp|Requested amount of GPU memory \(\d+ bytes\) could not be allocated|OutOfMemory \(Requested size was",
        "an engine's buffer does not fit",
    ),
    (
        "cudaMallocAsync",
        Cause::TooMuch,
        r"Allocation on device \d* ?would exceed allowed memory|Allocation on device\s*\(|torch\.(?:cuda\.)?OutOfMemoryError: Allocation on device",
        "the device has less than was asked for",
    ),
    // What is often taken for it.
    (
        "Triton",
        Cause::NotMemory,
        r"out of resource: shared memory",
        "a kernel wants more shared memory than a multiprocessor has: smaller blocks, not less memory",
    ),
    (
        "CUDA",
        Cause::NotMemory,
        r"an illegal memory access was encountered|CUBLAS_STATUS_EXECUTION_FAILED|device-side assert triggered|misaligned address",
        "a kernel went wrong: run with CUDA_LAUNCH_BLOCKING=1",
    ),
    (
        "NCCL",
        Cause::NotMemory,
        r"Watchdog caught collective operation timeout|NCCL communicator was aborted",
        "ranks waited for one that was gone: its own log says why",
    ),
    (
        "torch",
        Cause::TooMuch,
        r"(?i)(?:cuda|hip) runtime error \(2\) ?: ?out of memory|(?:CUDA|HIP)(?: driver)? error:? ?\(?(?:2\)?: )?(?:cuda)?(?:out of memory|cudaErrorMemoryAllocation)|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|torch\.(?:cuda\.)?OutOfMemoryError|hipErrorOutOfMemory|CUDA out of memory",
        "the driver had no memory left; a bare message says no numbers",
    ),
];

static PATTERNS: LazyLock<Vec<(Regex, Vec<String>, &'static Row)>> =
    LazyLock::new(|| ROWS.iter().filter_map(|row| Some((Regex::new(row.2).ok()?, plain(row.2), row))).collect());

/// Of each alternative of a pattern the longest run of plain letters, without which it finds nothing: a text is looked
/// through for those first, which is much faster. Nothing where an alternative has none.
fn plain(pattern: &str) -> Vec<String> {
    let (mut all, mut longest, mut run, mut depth) = (Vec::new(), String::new(), String::new(), 0_usize);
    let mut letters = pattern.trim_start_matches("(?i)").trim_start_matches("(?m)").chars().peekable();
    while let Some(letter) = letters.next() {
        let literal = match letter {
            '\\' => letters.next().filter(|next| !next.is_ascii_alphanumeric()),
            '(' | '[' => {
                depth += 1;
                None
            }
            ')' | ']' => {
                depth = depth.saturating_sub(1);
                None
            }
            '|' if depth == 0 => {
                all.push(longer(std::mem::take(&mut longest), std::mem::take(&mut run)));
                continue;
            }
            '.' | '^' | '$' | '*' | '+' | '?' | '|' => None,
            // A count of what stands before it.
            '{' => {
                letters.by_ref().take_while(|next| *next != '}').for_each(drop);
                None
            }
            other => Some(other),
        };
        let sure = literal.filter(|_| depth == 0 && !matches!(letters.peek(), Some('?' | '*' | '{')));
        match sure {
            Some(letter) => run.push(letter.to_ascii_lowercase()),
            None => longest = longer(longest, std::mem::take(&mut run)),
        }
    }
    all.push(longer(longest, run));
    if all.iter().any(String::is_empty) { Vec::new() } else { all }
}

fn longer(one: String, other: String) -> String {
    if other.len() > one.len() { other } else { one }
}

/// What is said beside torch's own messages; `told`: there is one with numbers, so bare words add nothing.
pub(super) fn said(text: &str, told: bool) -> Vec<(Cause, &'static str, String)> {
    let mut found: Vec<(Cause, &'static str, String)> = Vec::new();
    let lower = text.to_ascii_lowercase();
    for (pattern, words, (source, cause, _, because)) in PATTERNS.iter() {
        // Where a message has numbers, or surer words were there, these add nothing.
        let bare = matches!(*source, "torch" | "cuBLAS" | "cuDNN" | "cudaMallocAsync" | "a launcher");
        if bare && (told || !found.is_empty()) || told && *cause == Cause::TooMuch && *source != "NCCL" {
            continue;
        }
        let may = words.is_empty() || words.iter().any(|word| lower.contains(word.as_str()));
        if may && pattern.is_match(text) && !found.iter().any(|(known, who, _)| known == cause && who == source) {
            found.push((*cause, source, (*because).to_owned()));
        }
    }
    found
}

/// The serving engine whose log a text is, by frames of its traceback and names of its processes; none in a program that
/// trains beside one.
pub(super) fn engine(text: &str) -> Option<&'static str> {
    const MARKS: [(&str, &[&str]); 4] = [
        ("vLLM", &["/vllm/", "(EngineCore", "(VllmWorker", "vllm serve"]),
        ("SGLang", &["/sglang/", "sglang.launch_server"]),
        ("TensorRT-LLM", &["/tensorrt_llm/", "[TensorRT-LLM]", "[TRT-LLM]"]),
        ("TGI", &["/text_generation_server/", "text_generation_launcher"]),
    ];
    const TRAINS: [&str; 6] = ["/trl/", "Trainer", "training_step", "/verl/", "/openrlhf/", ".backward("];
    let trains = TRAINS.iter().any(|word| text.contains(word));
    MARKS.iter().find(|(_, words)| !trains && words.iter().any(|word| text.contains(word))).map(|(name, _)| *name)
}

/// vLLM's own figures as a cure: the length that its cache holds, the share that is free; with words of the general cure
/// that it stands for.
pub(super) fn figured(text: &str, source: &str, cause: Cause) -> Option<(&'static str, String)> {
    let number = |pattern: &str, at: usize| {
        let found = Regex::new(pattern).ok()?.captures(text)?;
        found.get(at)?.as_str().parse::<f64>().ok()
    };
    match (source, cause) {
        ("vLLM", Cause::Cache) => {
            let estimated = number(r"estimated maximum model length is (\d+)", 1).map(|length| (length, "estimates"));
            // Versions before 0.8.5 said how many tokens the cache holds.
            let stored = || number(r"can be stored in KV cache \((\d+)\)", 1).map(|length| (length, "says"));
            let (length, how) = estimated.or_else(stored).filter(|(length, _)| *length >= 1.0)?;
            Some(("--max-model-len", format!("--max-model-len {length}: the most that the cache holds, as vLLM {how}")))
        }
        ("vLLM", Cause::OtherProcess) => {
            const FREE: &str = r"Free memory on device .{0,20}?\(([\d.]+)/([\d.]+) GiB\)";
            let (free, total) = (number(FREE, 1)?, number(FREE, 2)?);
            let share = (free / total * 100.0).floor() / 100.0;
            let cure =
                format!("--gpu-memory-utilization {share}: the largest share that {free} free of {total} GiB hold");
            (share > 0.0 && share < 1.0).then_some(("--gpu-memory-utilization", cure))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_is_one() {
        assert_eq!(PATTERNS.len(), ROWS.len());
        for (_, words, row) in PATTERNS.iter() {
            assert!(words.iter().all(|word| word.len() > 2) && !words.is_empty(), "{words:?} of {}", row.2);
        }
    }
}
