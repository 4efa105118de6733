//! Variables of the environment, before a line or in a program: which decide memory, and which are read.

/// Variables that say how torch's allocator works.
const ALLOCATORS: [&str; 3] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

/// Variables that say which cards a process sees.
const CARDS: [&str; 4] =
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"];

/// Beginnings of variables by which libraries take other ways, or other buffers.
const OPEN: &str = "PYTORCH_ TORCH CUDA_ CUBLAS_ CUDNN_ NVTE_ ACCELERATE_ FSDP_ DEEPSPEED_ UNSLOTH_ XFORMERS_ FLASH_ LIGER_ BNB_ \
                    NCCL_BUFFSIZE NCCL_MAX_ NCCL_MIN_ MAX_PIXELS MIN_PIXELS VIDEO_MAX_ FPS_MAX_ IMAGE_FACTOR \
                    HF_DEACTIVATE_ASYNC_LOAD HF_ENABLE_PARALLEL_LOADING";

/// Of those, the ones that take no memory of a card, by their beginnings.
const HARMLESS: &str = "CUDA_LAUNCH_BLOCKING CUDA_DEVICE_ CUDA_HOME CUDA_PATH CUDA_ROOT CUDA_DIR CUDA_CACHE CUDA_VERSION CUDA_COREDUMP \
                        CUDA_ENABLE_COREDUMP TORCH_NCCL_ TORCH_DISTRIBUTED_ TORCH_CPP_ TORCH_SHOW_ TORCH_HOME TORCH_LOGS TORCH_TRACE \
                        TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_ TORCH_FR_ TORCH_USE_CUDA_DSA TORCH_CUDNN_SDPA_DETERMINISTIC TORCHELASTIC_ \
                        TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_FX_GRAPH_CACHE TORCHINDUCTOR_COMPILE_THREADS TORCHRUN TORCHX_ \
                        PYTORCH_KERNEL_CACHE PYTORCH_JIT PYTORCH_ENABLE_MPS ACCELERATE_LOG ACCELERATE_DEBUG UNSLOTH_IS_PRESENT \
                        UNSLOTH_DISABLE_STATISTICS UNSLOTH_STABLE CUDNN_PATH CUBLAS_DIR TORCH_DIST_ DEEPSPEED_TIMEOUT TORCH_COMPILE_DEBUG";

/// Whether a variable holds options of torch's allocator.
pub(super) fn is_allocator(name: &str) -> bool {
    ALLOCATORS.contains(&name)
}

/// How many cards a variable shows; `None` where it is another variable, or shows none.
pub(super) fn cards(name: &str, value: &str) -> Option<u64> {
    let shown = value.split(',').map(str::trim).take_while(|one| !one.is_empty() && !one.starts_with('-'));
    CARDS.contains(&name).then(|| shown.count() as u64).filter(|cards| *cards > 0)
}

/// What is said of a variable that may decide memory and is not read.
pub(super) fn open(name: &str, value: &str) -> Option<String> {
    let begins = |list: &str| list.split_whitespace().any(|start| name.starts_with(start));
    if CARDS.contains(&name) {
        return Some(format!("{name}={value} shows no card: one is taken, as if it were not set"));
    }
    (begins(OPEN) && !begins(HARMLESS))
        .then(|| format!("not simulated: {name}={value}: what this variable changes is not counted"))
}
