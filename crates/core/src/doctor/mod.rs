//! What broke a run: out-of-memory messages of torch and of others, in logs of one rank or many, and what they say.
//!
//! | module | what is in it |
//! |---|---|
//! | `torch` | torch's own messages, of all versions, with their numbers |
//! | `others` | serving engines, libraries, the host and the kernel: words that say what happened |
//! | `place` | where a program was, by its traceback; whether memory grew |
//! | [`locate`] | which operation of a simulated run asks for so many bytes |

pub mod locate;
mod others;
mod place;
mod torch;

use serde::Serialize;

use crate::recording::Recording;

pub use place::Where;
pub use torch::Message;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// The run needs more than the card has.
    TooMuch,
    /// There is room, in pieces that are too small.
    Fragmentation,
    /// Somebody else holds much of the card.
    OtherProcess,
    /// The host's memory is full.
    Host,
    /// Memory grows from step to step.
    Leak,
    /// A serving engine's share is too small for its cache.
    Cache,
    /// A limit was set below what the card has.
    Limit,
    /// It is no lack of memory.
    NotMemory,
}

/// What is wrong, by one or several messages that say the same.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// What happened.
    pub cause: Cause,
    /// In words.
    pub because: String,
    /// Who said it.
    pub source: &'static str,
    /// Numbers of the message, where it has some; of the first where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
    /// Cards or ranks that said it.
    pub ranks: Vec<u64>,
    /// How often it was said.
    pub times: usize,
    /// Where the program was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<Where>,
    /// What to try, the smallest change first.
    pub cures: Vec<String>,
}

impl Cause {
    /// In words.
    pub fn title(self) -> &'static str {
        match self {
            Self::TooMuch => "the run needs more than the card has",
            Self::Fragmentation => "there is room, in pieces that are too small",
            Self::OtherProcess => "another process holds the card",
            Self::Host => "the host's memory is full, not the card's",
            Self::Leak => "memory grows from step to step",
            Self::Cache => "the engine's share is too small for its cache",
            Self::Limit => "a limit was set below what the card has",
            Self::NotMemory => "it is no lack of memory",
        }
    }
}

/// What a log, a traceback or a message says, what counts most first; nothing where it says nothing of memory.
pub fn diagnose(text: &str) -> Vec<Finding> {
    let place = place::of(text);
    let mut found: Vec<Finding> = Vec::new();
    for message in torch::messages(text) {
        let (cause, because) = message.cause();
        let finding = Finding {
            cause,
            because,
            source: message.source,
            ranks: message.rank.into_iter().collect(),
            times: 1,
            place: place.clone(),
            cures: Vec::new(),
            message: Some(message),
        };
        join(&mut found, finding);
    }
    for (cause, source, because) in others::said(text, !found.is_empty()) {
        let finding = Finding {
            cause,
            because,
            source,
            message: None,
            ranks: Vec::new(),
            times: 1,
            place: place.clone(),
            cures: Vec::new(),
        };
        join(&mut found, finding);
    }
    if let Some(growth) = place::growth(text)
        && let Some(first) =
            found.iter_mut().find(|finding| matches!(finding.cause, Cause::TooMuch | Cause::Fragmentation))
    {
        first.cause = Cause::Leak;
        first.because = growth;
    }
    // A host that is full stops ranks, which others then report as lost; a card that is full is said by itself.
    let certain = |finding: &Finding| (finding.cause == Cause::NotMemory, finding.message.is_none());
    crate::order::sort_by_key(&mut found, certain);
    if found.iter().any(|finding| finding.cause != Cause::NotMemory) {
        found.retain(|finding| finding.cause != Cause::NotMemory);
    }
    let engine = others::engine(text);
    for finding in &mut found {
        finding.cures = cures(finding, engine);
        if let Some((general, cure)) = others::figured(text, finding.source, finding.cause) {
            finding.cures.retain(|known| !known.contains(general));
            finding.cures.insert(0, cure);
        }
    }
    found
}

/// A log's text: UTF-8, or UTF-16 as PowerShell's `>` writes it, with a mark at its beginning or without.
pub fn text(bytes: &[u8]) -> String {
    let (body, little) = match bytes {
        [0xff, 0xfe, body @ ..] => (body, true),
        [0xfe, 0xff, body @ ..] => (body, false),
        [first, 0, second, 0, ..] if *first != 0 && *second != 0 => (bytes, true),
        [0, first, 0, second, ..] if *first != 0 && *second != 0 => (bytes, false),
        _ => return String::from_utf8_lossy(bytes).into_owned(),
    };
    let unit = |pair: &[u8]| {
        let pair = [pair[0], pair[1]];
        if little { u16::from_le_bytes(pair) } else { u16::from_be_bytes(pair) }
    };
    String::from_utf16_lossy(&body.chunks_exact(2).map(unit).collect::<Vec<u16>>())
}

/// What a snapshot says: why its last request was not granted, or that memory grew from step to step; `None` where nothing is
/// wrong in it.
pub fn of_recording(recording: &Recording) -> Option<Finding> {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    let floors = &recording.floors;
    let growth = (floors.len() >= 4).then(|| (floors[1], floors[floors.len() - 1]));
    let growth = growth.filter(|(first, last)| {
        floors[1..].windows(2).all(|pair| pair[1] >= pair[0]) && *last > first.saturating_add(first / 10)
    });
    let ended = recording.ended.as_ref();
    let (cause, because) = match (growth, ended) {
        (Some((first, last)), _) => (
            Cause::Leak,
            format!(
                "between steps {} are held at first and {} at last, and never less than before",
                gib(first),
                gib(last)
            ),
        ),
        (None, Some(end)) if end.idle >= end.asked && end.idle >= end.allocated.saturating_add(end.idle) / 10 => (
            Cause::Fragmentation,
            format!(
                "{} were asked for; torch holds {} that no tensor uses, in smaller pieces",
                gib(end.asked),
                gib(end.idle),
            ),
        ),
        (None, Some(end)) => {
            (Cause::TooMuch, format!("tensors hold {}, and {} more were asked for", gib(end.allocated), gib(end.asked)))
        }
        (None, None) => return None,
    };
    let message = ended.map(|end| Message {
        source: "torch",
        asked: Some(end.asked),
        free: end.free,
        allocated: Some(end.allocated),
        unused: Some(end.idle),
        ..Message::default()
    });
    let place =
        ended.map(|end| Where { phase: end.place, line: end.line.clone(), step: (floors.len() as u64).checked_add(1) });
    let mut finding = Finding {
        cause,
        because,
        source: "torch's snapshot",
        message,
        ranks: Vec::new(),
        times: 1,
        place,
        cures: Vec::new(),
    };
    finding.cures = cures(&finding, None);
    Some(finding)
}

fn join(found: &mut Vec<Finding>, finding: Finding) {
    match found.iter_mut().find(|known| known.cause == finding.cause && known.source == finding.source) {
        Some(known) => {
            known.times += 1;
            for rank in finding.ranks {
                if !known.ranks.contains(&rank) {
                    known.ranks.push(rank);
                }
            }
            crate::order::sort(&mut known.ranks);
        }
        None => found.push(finding),
    }
}

/// What to try where no plan is known, the smallest change first. `engine`: the serving engine whose log it is.
fn cures(finding: &Finding, engine: Option<&'static str>) -> Vec<String> {
    let place = finding.place.as_ref().map(|place| place.phase);
    let own = ["vLLM", "SGLang", "llama.cpp", "Ollama", "TGI", "TensorRT-LLM"].contains(&finding.source);
    let engine = if own { Some(finding.source) } else { engine };
    let all: &[&str] = match finding.cause {
        Cause::Fragmentation => &[
            "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF)",
            "pad batches to few lengths, so that freed blocks are used again",
        ],
        Cause::OtherProcess => &[
            "end what else runs on the card: nvidia-smi names it, and `vramcast detect`",
            "take another card: CUDA_VISIBLE_DEVICES",
        ],
        Cause::Host if finding.source == "Ollama" => &[
            "a smaller model, or the same in fewer bits (`ollama pull MODEL:…-q4_K_M`)",
            "a shorter context (num_ctx, OLLAMA_CONTEXT_LENGTH), fewer requests at once (OLLAMA_NUM_PARALLEL)",
            "end other models (`ollama ps`, `ollama stop MODEL`) and give the host or its container more memory or swap",
        ],
        Cause::Host if finding.source == "llama.cpp" => &[
            "leave --mlock and --no-mmap out, so that weights are read as they are needed",
            "a shorter context (-c), or more layers on the card (-ngl)",
        ],
        Cause::Host => &[
            "give the job more host memory (container limit, Slurm's --mem, shared memory by --ipc=host or --shm-size)",
            "fewer workers of the data loader; load weights in one rank or in shards (low_cpu_mem_usage, cpu_ram_efficient_loading)",
            "offload less to the host",
        ],
        Cause::Leak => &[
            "sum loss.item() or loss.detach(), not the loss itself; do not keep outputs of steps in a list",
            "`vramcast import SNAPSHOT` of torch.cuda.memory._dump_snapshot names the lines that hold it",
        ],
        Cause::Cache if finding.source == "llama.cpp" || finding.source == "Ollama" => &[
            "a shorter context (-c)",
            "a cache in fewer bits (-ctk q8_0 -ctv q8_0 with -fa)",
            "fewer layers on the card (-ngl)",
        ],
        Cause::Cache if finding.source == "SGLang" => &[
            "a shorter --context-length",
            "a larger --mem-fraction-static",
            "--kv-cache-dtype fp8_e5m2, fewer --max-running-requests, or more cards (--tp-size)",
        ],
        Cause::Cache => &[
            "a shorter --max-model-len",
            "a larger --gpu-memory-utilization",
            "--kv-cache-dtype fp8, fewer --max-num-seqs, or more cards (--tensor-parallel-size)",
        ],
        Cause::Limit => &[
            "raise or drop the limit: set_per_process_memory_fraction, gpu_memory_utilization, or the scheduler's share",
        ],
        Cause::TooMuch if engine == Some("vLLM") => match place {
            Some("loading") => &[
                "weights in fewer bits (--quantization fp8, or a checkpoint in 4 bits)",
                "more cards (--tensor-parallel-size), or weights on the host (--cpu-offload-gb)",
            ],
            _ => &[
                "fewer --max-num-seqs and --max-num-batched-tokens, which the profile run and the sampler take",
                "a smaller --gpu-memory-utilization, where it ends behind the profile run: graphs and the sampler stand beside the share",
                "--enforce-eager, or fewer sizes of graphs (--cuda-graph-sizes)",
                "weights in fewer bits, or more cards (--tensor-parallel-size)",
            ],
        },
        Cause::TooMuch if engine == Some("SGLang") => &[
            "a smaller --mem-fraction-static, which leaves more beside weights and cache",
            "a smaller --chunked-prefill-size, --cuda-graph-max-bs or --max-running-requests",
            "weights in fewer bits (--quantization fp8), or more cards (--tp-size)",
        ],
        Cause::TooMuch if engine == Some("TensorRT-LLM") => &[
            "a smaller --max_batch_size and --max_num_tokens, by which the engine's buffers are sized",
            "a smaller --kv_cache_free_gpu_memory_fraction, or a shorter --max_seq_len",
            "weights in fewer bits, or more cards (--tp_size)",
        ],
        Cause::TooMuch if engine.is_some() => &OF_GENERATION,
        Cause::TooMuch if finding.source == "transformers" => &[
            "fewer bits (load_in_4bit), or a smaller model",
            "device_map={'': 0} where it fits the card after all: 'auto' leaves room that it may not need",
            "llm_int8_enable_fp32_cpu_offload=True with a device_map of one's own: parts of it on the host, slowly",
        ],
        Cause::TooMuch => match place {
            Some("evaluation") => &[
                "a smaller per_device_eval_batch_size",
                "eval_accumulation_steps, or preprocess_logits_for_metrics, so that logits are not kept",
            ],
            Some("optimizer") => {
                &["an 8-bit or paged optimizer", "shard its states (ZeRO 1, FSDP)", "train adapters (LoRA)"]
            }
            Some("loading") => {
                &["load in 16 bits (dtype='auto') or in 4 bits", "load shard by shard (low_cpu_mem_usage=True)"]
            }
            Some("saving") => &["save shards (SHARDED_STATE_DICT) or gather on the host"],
            _ => &[
                "gradient checkpointing",
                "half the batch, and twice the gradient accumulation",
                "Liger's kernels or a chunked loss where logits are large",
            ],
        },
        Cause::NotMemory => &[],
    };
    all.iter().map(|cure| (*cure).to_owned()).collect()
}

/// What helps where nothing is trained.
const OF_GENERATION: [&str; 3] =
    ["a shorter context, fewer sequences at once", "weights in fewer bits", "more cards, or layers on the host"];

impl Finding {
    /// What torch says of a run that only generates: nothing of training helps it.
    pub fn of_generation(&mut self) {
        if self.cause == Cause::TooMuch && self.source == "torch" {
            self.cures = OF_GENERATION.map(str::to_owned).to_vec();
        }
    }
}

#[cfg(test)]
mod tests;
