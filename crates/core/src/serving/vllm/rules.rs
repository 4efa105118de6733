//! What changed in vLLM from version to version, as far as memory goes.

/// The rules of a range of versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The first version they hold for, major, minor and patch.
    pub since: [u32; 3],
    /// Whether the V1 engine runs (chunked prefill always, logits on every rank, compiled forward).
    pub v1: bool,
    /// Whether captured CUDA graphs are taken out of the cache's share.
    pub graphs_in_budget: bool,
    /// Blocks that a sequence holds of a group with constant state.
    pub state_blocks: u64,
    /// Whether the printed token count is concurrency times the longest sequence (else blocks per group times block).
    pub tokens_by_concurrency: bool,
    /// Rows that adapters may add to the vocabulary, for which the tables' slots have room (none since 0.12).
    pub lora_extra_vocabulary: u64,
    /// `max_split_size` of the allocator while weights are loaded (`_scoped_allocator_max_split` of gpu_worker.py).
    pub load_max_split: Option<u64>,
    /// Whether top-p sampling sorts all logits, or a Triton kernel finds the threshold (`apply_top_k_top_p`).
    pub sampler_sorts: bool,
    /// `--gpu-memory-utilization` when it is not given, in thousandths: 0.92 since vLLM's pull request 38284 of April
    /// 2026, taken to hold from 0.21 on.
    pub utilization_thousandths: u64,
    /// Where this was read.
    pub source: &'static str,
}

/// From new to old.
pub const RULES: &[Rules] = &[
    Rules {
        since: [0, 21, 0],
        v1: true,
        graphs_in_budget: true,
        state_blocks: 2,
        tokens_by_concurrency: true,
        lora_extra_vocabulary: 0,
        load_max_split: Some(20 << 20),
        sampler_sorts: false,
        utilization_thousandths: 920,
        source: "truth/external/vllm_logs.json: 0.24 log of a 40-layer hybrid, 300 blocks, 69 per sequence",
    },
    Rules {
        since: [0, 17, 0],
        v1: true,
        graphs_in_budget: false,
        state_blocks: 1,
        tokens_by_concurrency: false,
        lora_extra_vocabulary: 0,
        load_max_split: None,
        sampler_sorts: false,
        utilization_thousandths: 900,
        source: "vllm/v1/sample/ops/topk_topp_sampler.py of v0.17.0 uses Triton from 8 sequences on",
    },
    Rules {
        since: [0, 12, 0],
        v1: true,
        graphs_in_budget: false,
        state_blocks: 1,
        tokens_by_concurrency: false,
        lora_extra_vocabulary: 0,
        load_max_split: None,
        sampler_sorts: true,
        utilization_thousandths: 900,
        source: "vllm/config/lora.py of v0.12.0: adapters no longer add words",
    },
    Rules {
        since: [0, 11, 0],
        v1: true,
        graphs_in_budget: false,
        state_blocks: 1,
        tokens_by_concurrency: false,
        lora_extra_vocabulary: 256,
        load_max_split: None,
        sampler_sorts: true,
        utilization_thousandths: 900,
        source: "truth/external/vllm_logs.json: four H100 logs of 0.11.0 add up without graphs",
    },
    Rules {
        since: [0, 9, 0],
        v1: true,
        graphs_in_budget: false,
        state_blocks: 1,
        tokens_by_concurrency: false,
        lora_extra_vocabulary: 256,
        load_max_split: None,
        sampler_sorts: true,
        utilization_thousandths: 900,
        source: "V1 is the default engine; logs of 0.9 in truth/external/vllm_logs.json",
    },
    Rules {
        since: [0, 0, 0],
        v1: false,
        graphs_in_budget: false,
        state_blocks: 1,
        tokens_by_concurrency: false,
        lora_extra_vocabulary: 256,
        load_max_split: None,
        sampler_sorts: true,
        utilization_thousandths: 900,
        source: "logs of 0.6 to 0.8 in truth/external/vllm_logs.json: four terms add up to the grant",
    },
];

/// Bytes per logit at the peak of the profile run's sampler: logits in 16 bits and in fp32, then `sort` (values and
/// indices, and 20 bytes of its own; 33 with fewer than 128 rows), as the same operations take on torch 2.11.
pub(super) const SORTED: u64 = 38;
/// The same with fewer than 128 sequences.
pub(super) const SORTED_FEW: u64 = 51;
/// Without sorting: logits twice, probabilities and the noise they are divided by.
pub(super) const UNSORTED: u64 = 14;

/// What a process holds outside torch when profiled, per multiprocessor of the card: 0.13 GiB on an H100 (132 of them),
/// 0.09 on an A100 (108), 0.03 on a T4 (40) in truth/external/vllm_logs.json.
pub(super) const OUTSIDE_TORCH: u64 = 1 << 20;
/// Each further rank's share of communication buffers.
pub(super) const COMMUNICATION: u64 = 424 << 20;

/// Graphs captured by default: 0.1 to 0.6 GiB in logs; the mean of those between 0.5 and 8 billion parameters.
pub(super) const GRAPHS: u64 = 400 << 20;

/// The rules of a version such as `0.11.0`; the newest where it cannot be read.
pub fn rules(version: &str) -> &'static Rules {
    let mut numbers = version
        .split(['.', '-', '+'])
        .map(|part| part.chars().take_while(char::is_ascii_digit).collect::<String>())
        .map_while(|digits| digits.parse::<u32>().ok());
    let parsed = numbers.next().map(|major| [major, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)]);
    let wanted = parsed.unwrap_or([u32::MAX; 3]);
    RULES.iter().find(|rules| wanted >= rules.since).unwrap_or(&RULES[RULES.len() - 1])
}
