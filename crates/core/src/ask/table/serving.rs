//! Settings of serving engines, under the names their users know.

use serde_json::{Map, Value, json};

use crate::ask::runner::{Runner, Scope};
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};

const S: Topic = Topic::Serving;

pub(super) const ROWS: &[Setting] = &[
    setting("engine", "engine", Kind::Choice(&[
        ("hf", "transformers' generate, simulated"),
        ("vllm", ""),
        ("sglang", ""),
        ("tgi", ""),
        ("tensorrt-llm", ""),
        ("llama.cpp", ""),
        ("ollama", ""),
        ("all", "all that serve, side by side"),
    ]), "Who serves: transformers by simulation, or an engine by its own rules")
        .also(&["engines"])
        .value("ENGINE")
        .from("transformers")
        .on(S, Scope::INFER)
        .example("--engine sglang"),
    setting("version", "engine-version", Kind::Text, "The version whose rules hold (vLLM: 0.6 to 0.33, \"0.8.5 V0\" for the older engine; llama.cpp: a build such as b5781, current or early; Ollama: such as 0.32)")
        .value("VERSION")
        .from("the newest that the rules know")
        .on(S, Scope::VLLM.and(Scope::LOCAL)),
    setting("context", "context", Kind::Whole, "Longest sequence the engine shall hold")
        .also(&["max-model-len", "ctx-size", "num-ctx", "max-total-tokens", "context-length"])
        .from("the engine's")
        .on(S, Scope::SERVE)
        .example("--context 2048"),
    setting("quantization", "quantization", Kind::Text, "How weights are quantised when the config does not say: awq, gptq, fp8, mxfp4, nf4 or int8; a mixture such as Q4_K_M for llama.cpp")
        .value("METHOD")
        .from("as the config says")
        .on(S, Scope::SERVE)
        .example("--quantization nf4"),
    setting("dtype", "dtype", Kind::Choice(&[("auto", ""), ("fp32", ""), ("bf16", ""), ("fp16", "")]), "The type of weights that are not quantised, and of keys and values")
        .value("TYPE")
        .from("auto: 16 bits")
        .on(S, Scope::VLLM.and(Runner::Sglang.alone()))
        .example("--dtype float32"),
    setting("kv_cache_dtype", "kv-cache-dtype", Kind::Text, "The type of keys and values: auto, bf16, fp8 and the like")
        .value("TYPE")
        .from("auto: that of the weights")
        .on(S, Scope::POOLED)
        .example("--kv-cache-dtype fp8"),
    setting("tensor_parallel_size", "tensor-parallel-size", Kind::Whole, "Cards over which every layer is split")
        .also(&["tp", "tp-size", "num-shard", "gpus"])
        .from("one")
        .on(S, Scope::POOLED)
        .example("--tensor-parallel-size 2"),
    setting("decode_context_parallel_size", "decode-context-parallel-size", Kind::Whole, "Cards of the tensor-parallel ones that share the cache of a sequence, token by token")
        .also(&["dcp"])
        .from("one")
        .on(S, Scope::VLLM)
        .example("--decode-context-parallel-size 2 --tensor-parallel-size 8"),
    setting("pipeline_parallel_size", "pipeline-parallel-size", Kind::Whole, "Stages of layers")
        .also(&["pp"])
        .from("one")
        .on(S, Scope::VLLM)
        .example("--pipeline-parallel-size 2"),
    setting("data_parallel_size", "data-parallel-size", Kind::Whole, "Replicas that share experts; of attention with --enable-dp-attention")
        .also(&["dp", "dp-size"])
        .from("one")
        .on(S, Scope::VLLM.and(Runner::Sglang.alone()))
        .example("--data-parallel-size 2 --tensor-parallel-size 2 --enable-dp-attention"),
    setting("dp_attention", "enable-dp-attention", Kind::Switch, "Attention in --data-parallel-size replicas on the tensor-parallel cards, the rest split over all of them")
        .also(&["dp-attention"])
        .on(S, Runner::Sglang.alone())
        .example("--data-parallel-size 2 --tensor-parallel-size 2 --enable-dp-attention"),
    setting("expert_parallel", "expert-parallel", Kind::Switch, "Whole experts on each card instead of parts of all")
        .also(&["enable-expert-parallel", "ep"])
        .on(S, Scope::VLLM),
    setting("gpu_memory_utilization", "gpu-memory-utilization", Kind::Real, "Share of the card that the engine may use; SGLang's static share; TensorRT-LLM's share of what is free for keys and values")
        .also(&["mem-fraction-static", "cuda-memory-fraction"])
        .value("SHARE")
        .from("the version's default")
        .on(S, Scope::VLLM.and(Runner::Sglang.alone()).and(Runner::TensorrtLlm.alone()).and(Runner::Tgi.alone()))
        .example("--gpu-memory-utilization 0.5"),
    setting("max_num_seqs", "max-num-seqs", Kind::Whole, "Sequences in a batch")
        .from("the version's default")
        .on(S, Scope::VLLM.and(Runner::TensorrtLlm.alone()))
        .example("--max-num-seqs 8"),
    setting("max_num_batched_tokens", "max-num-batched-tokens", Kind::Whole, "Tokens in a batch; TGI's in its warm-up; SGLang's in a chunk of a prompt")
        .also(&["max-batch-prefill-tokens", "chunked-prefill-size"])
        .from("the version's default")
        .on(S, Scope::VLLM.and(Runner::TensorrtLlm.alone()).and(Runner::Tgi.alone()).and(Runner::Sglang.alone()))
        .example("--max-num-batched-tokens 1024"),
    setting("kv_cache_memory_bytes", "kv-cache-memory-bytes", Kind::Spelled(SIZE), "Bytes of the cache, in place of what the profile run leaves: 8G is 8 GiB, 8g is 8 billion")
        .value("SIZE")
        .from("what is left")
        .on(S, Scope::VLLM)
        .example("--kv-cache-memory-bytes 4G"),
    setting("cpu_offload_gb", "cpu-offload-gb", Kind::Real, "GiB of the weights that stay on the host")
        .value("GIB")
        .from("none")
        .on(S, Scope::VLLM)
        .example("--cpu-offload-gb 0.25"),
    setting("block_size", "block-size", Kind::Whole, "Tokens of a cache block")
        .also(&["page-size"])
        .from("the version's default")
        .on(S, Scope::VLLM.and(Runner::Sglang.alone()))
        .example("--block-size 64"),
    setting("enforce_eager", "enforce-eager", Kind::Switch, "No CUDA graphs")
        .also(&["disable-cuda-graph"])
        .on(S, Scope::VLLM.and(Runner::Sglang.alone())).example("--enforce-eager"),
    setting("max_cudagraph_capture_size", "max-cudagraph-capture-size", Kind::Whole, "The largest batch that CUDA graphs are captured for")
        .also(&["cuda-graph-max-bs"])
        .from("the version's default")
        .on(S, Scope::VLLM.and(Runner::Sglang.alone()))
        .example("--max-cudagraph-capture-size 8"),
    setting("compile_cache", "compile-cache", Kind::Switch, "What an earlier start has compiled is found again; a first start compiles, which leaves less for the cache")
        .on(S, Scope::VLLM),
    setting("flashinfer_sampler", "flashinfer-sampler", Kind::Switch, "FlashInfer samples (VLLM_USE_FLASHINFER_SAMPLER=1; before 0.11.1 wherever it is installed, as in vLLM's images, since 0.21 unasked): logits are not sorted in the profile run")
        .on(S, Scope::VLLM)
        .example("--flashinfer-sampler --engine-version 0.10.1.1"),
    setting("language_model_only", "language-model-only", Kind::Switch, "Encoders of images and sound are not loaded, as with 0 of all kinds in --limit-mm-per-prompt")
        .on(S, Scope::VLLM),
    setting("images_per_prompt", "limit-mm-per-prompt", Kind::Spelled(LIMITS), "What a prompt may hold, as vLLM's JSON object or image=2,video=0: the profile run takes no more of it, and with 0 of all that an encoder sees it is not loaded")
        .value("JSON")
        .from("999 of each kind")
        .on(S, Scope::VLLM)
        .example("--limit-mm-per-prompt {\"image\":0,\"video\":0}"),
    setting("max_pixels", "max-pixels", Kind::Whole, "Pixels of a picture at most, as --mm-processor-kwargs '{\"max_pixels\": 1003520}' bounds Qwen's")
        .from("as many as the model takes")
        .on(S, Scope::VLLM)
        .example("--max-pixels 200704"),
    setting("no_videos", "no-videos", Kind::Switch, "No videos in the profile run, as with 0 of them in --limit-mm-per-prompt")
        .on(S, Scope::VLLM),
    setting("mamba_ssm_cache_dtype", "mamba-ssm-cache-dtype", Kind::Choice(&[("auto", ""), ("fp32", ""), ("bf16", ""), ("fp16", "")]), "The type of recurrent states, but for those of convolutions")
        .value("TYPE")
        .from("auto: as the config says")
        .on(S, Scope::VLLM)
        .example("--mamba-ssm-cache-dtype bfloat16"),
    setting("no_audio", "no-audio", Kind::Switch, "No sound in a prompt, as with 0 of it in --limit-mm-per-prompt").on(S, Scope::VLLM),
    setting("skip_mm_profiling", "skip-mm-profiling", Kind::Switch, "No images, videos or sound in the profile run; encoders are loaded")
        .on(S, Scope::VLLM)
        .example("--skip-mm-profiling"),
    setting("enable_prefix_caching", "enable-prefix-caching", Kind::Switch, "Keep finished prompts in the cache; costs a model with states of constant size a second one a sequence")
        .on(S, Scope::VLLM),
    setting("enable_prefix_caching", "no-enable-prefix-caching", Kind::Off, "Do not keep finished prompts of a model with states, which vLLM 0.28 and later do by default")
        .on(S, Scope::VLLM),
    setting("enable_lora", "enable-lora", Kind::Switch, "Room for adapters").on(S, Scope::VLLM).example("--enable-lora"),
    setting("max_loras", "max-loras", Kind::Whole, "Adapters at once")
        .from("vLLM's default")
        .on(S, Scope::VLLM)
        .example("--max-loras 8 --enable-lora"),
    setting("max_lora_rank", "max-lora-rank", Kind::Whole, "Largest rank of an adapter")
        .from("vLLM's default")
        .on(S, Scope::VLLM)
        .example("--max-lora-rank 128 --enable-lora"),
    setting("speculative_model", "speculative-model", Kind::Text, "Who guesses tokens ahead: a model, mtp, eagle, eagle3, ngram, or the number of layers of a head counted elsewhere")
        .value("MODEL")
        .from("nobody")
        .on(S, Scope::VLLM)
        .example("--speculative-model eagle"),
    setting("num_speculative_tokens", "num-speculative-tokens", Kind::Whole, "Tokens guessed ahead")
        .from("none")
        .on(S, Scope::VLLM),
    setting("speculative_model", "speculative-config", Kind::Spelled(SPECULATION), "Who guesses tokens ahead, as vLLM's JSON object: method, model, num_speculative_tokens")
        .value("JSON")
        .from("nobody")
        .on(S, Scope::VLLM)
        .example("--speculative-config {\"method\":\"eagle\",\"num_speculative_tokens\":2}"),
    setting("speculative_model", "model-draft", Kind::Text, "A second model that guesses tokens ahead (-md)")
        .also(&["md", "spec-draft-model"])
        .value("MODEL")
        .from("nobody")
        .on(S, Scope::LLAMA_CPP)
        .example("--model-draft gpt2"),
    setting("num_speculative_tokens", "draft-max", Kind::Whole, "Tokens guessed ahead")
        .also(&["draft", "draft-n", "spec-draft-n-max"])
        .from("llama.cpp's default")
        .on(S, Scope::LLAMA_CPP)
        .example("--draft-max 16 --model-draft gpt2"),
    setting("n_gpu_layers_draft", "n-gpu-layers-draft", Kind::Whole, "Layers of the second model on the card (-ngld)")
        .also(&["ngld", "gpu-layers-draft", "spec-draft-ngl"])
        .from("all")
        .on(S, Scope::LLAMA_CPP)
        .example("--n-gpu-layers-draft 4 --model-draft gpt2"),
    setting("mmproj", "mmproj", Kind::Text, "The file of an image encoder, counted by its size (-mm)")
        .also(&["mm"])
        .value("FILE")
        .from("none")
        .on(S, Scope::LLAMA_CPP),
    setting("n_gpu_layers", "n-gpu-layers", Kind::Spelled(LAYERS), "Layers on the card, the output counted as one; all, or auto (-ngl)")
        .value("N|all|auto")
        .also(&["gpu-layers", "ngl"])
        .from("all")
        .on(S, Scope::LOCAL)
        .example("--n-gpu-layers 4"),
    setting("ubatch_size", "ubatch-size", Kind::Whole, "Tokens computed at once (-ub)")
        .also(&["ub"])
        .from("llama.cpp's default")
        .on(S, Scope::LOCAL)
        .example("--ubatch-size 64"),
    setting("logical_batch", "batch-size", Kind::Whole, "Tokens of a logical batch (-b)").also(&["logical-batch"])
        .short('b')
        .from("llama.cpp's default")
        .on(S, Scope::LLAMA_CPP)
        .example("--batch-size 64"),
    setting("flash_attn", "flash-attn", Kind::Spelled(FLASH), "Flash attention: on, off, or auto: where the card can (-fa)")
        .also(&["fa"])
        .value("on|off|auto")
        .from("llama.cpp's default")
        .on(S, Scope::LOCAL)
        .example("--flash-attn=off"),
    setting("cache_type_k", "cache-type-k", Kind::Text, "The ggml type of keys (-ctk)")
        .also(&["ctk"])
        .value("TYPE")
        .from("f16")
        .on(S, Scope::LOCAL)
        .example("--cache-type-k q8_0"),
    setting("cache_type_v", "cache-type-v", Kind::Text, "The ggml type of values (-ctv)")
        .also(&["ctv"])
        .value("TYPE")
        .from("f16")
        .on(S, Scope::LOCAL)
        .example("--cache-type-v q8_0 --cache-type-k q8_0 --flash-attn on"),
    setting("tensor_split", "tensor-split", Kind::Spelled(SHARES), "Shares of several cards, such as 3,1 (-ts)")
        .also(&["ts"])
        .value("SHARES")
        .from("one card")
        .on(S, Scope::LLAMA_CPP)
        .example("--tensor-split 3,1"),
    setting("tensor_split", "gpus", Kind::Spelled(CARDS), "Cards that share a model evenly")
        .value("N")
        .from("one card")
        .on(S, Scope::LOCAL)
        .example("--gpus 2"),
    setting("split_mode", "split-mode", Kind::Choice(&[("layer", ""), ("row", ""), ("tensor", ""), ("none", "")]), "How several cards share a model (-sm)")
        .also(&["sm"])
        .from("llama.cpp's default")
        .on(S, Scope::LLAMA_CPP)
        .example("--split-mode tensor --tensor-split 1,1"),
    setting("n_cpu_moe", "n-cpu-moe", Kind::Whole, "Layers whose experts stay on the host (-ncmoe)")
        .also(&["ncmoe"])
        .from("none")
        .on(S, Scope::LLAMA_CPP),
    setting("cpu_moe", "cpu-moe", Kind::Switch, "The experts of all layers stay on the host (-cmoe)").also(&["cmoe"]).on(S, Scope::LLAMA_CPP),
    setting("override_tensor", "override-tensor", Kind::Text, "Tensors that go elsewhere, by patterns of their names: exps=CPU, blk\\.[0-9]\\.=CUDA0; several with commas (-ot)")
        .also(&["ot"])
        .value("PATTERN=BUFFER")
        .from("none")
        .on(S, Scope::LLAMA_CPP),
    setting("no_kv_offload", "no-kv-offload", Kind::Switch, "Keys and values stay on the host (-nkvo)").also(&["nkvo"]).on(S, Scope::LLAMA_CPP).example("--no-kv-offload"),
    setting("no_op_offload", "no-op-offload", Kind::Switch, "Large batches on weights of the host run there too")
        .on(S, Scope::LLAMA_CPP)
        .example("--no-op-offload --n-gpu-layers 4"),
    setting("no_mmap", "no-mmap", Kind::Switch, "Weights on the host are read into a buffer instead of mapped").on(S, Scope::LLAMA_CPP).example("--no-mmap --override-tensor attn_q=CPU"),
    setting("swa_full", "swa-full", Kind::Switch, "Sliding layers get as many cells as the others").on(S, Scope::LLAMA_CPP),
    setting("kv_unified", "kv-unified", Kind::Switch, "Sequences share one run of cells (-kvu)").also(&["kvu"]).on(S, Scope::LLAMA_CPP),
    setting("parallel", "parallel", Kind::Whole, "Sequences at once (-np)")
        .also(&["num-parallel", "np"])
        .from("the engine's default")
        .on(S, Scope::LOCAL)
        .example("--parallel 4 --context 8192"),
];

const FLASH: Spelling = Spelling {
    words: &["on", "off", "auto"],
    bare: Some("on"),
    read: |text| match text {
        "on" | "1" | "true" => Ok(json!({"flash_attn": "on"})),
        "off" | "0" | "false" => Ok(json!({"flash_attn": "off"})),
        "auto" | "-1" => Ok(json!({"flash_attn": "auto"})),
        _ => Err("on, off or auto".into()),
    },
    write: |plan| Some(plan.get("flash_attn")?.as_str()?.to_owned()),
};

/// llama.cpp's words for layers (common/arg.cpp): auto, or -1, is what it does where nothing is said.
const LAYERS: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match text {
        "auto" | "-1" => Ok(json!({"n_gpu_layers": null})),
        "all" | "-2" => Ok(json!({"n_gpu_layers": ALL_LAYERS})),
        other => match other.parse::<u64>() {
            Ok(layers) => Ok(json!({"n_gpu_layers": layers})),
            Err(_) => Err("a number of layers, all or auto".into()),
        },
    },
    write: |plan| plan.get("n_gpu_layers")?.as_u64().map(|layers| layers.to_string()),
};
/// More than any model has: llama.cpp itself has room for 512 (`LLAMA_MAX_LAYERS` of llama-hparams.h).
const ALL_LAYERS: u64 = 999;

/// As vLLM reads sizes (`human_readable_int` of engine/arg_utils.py): small letters count in thousands, large ones in 1024.
const SIZE: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let wrong = || "bytes, such as 8G, 8.5g or 1073741824".to_owned();
        let plain = text.trim_end_matches(['i', 'B', 'b']);
        let split = plain.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        let number = split.parse::<f64>().ok().filter(|number| *number > 0.0).ok_or_else(wrong)?;
        let power = |at: Option<usize>| at.map_or(0, |at| at as i32 + 1);
        let factor = match &plain[split.len()..] {
            "" => 1.0,
            one if "kmgt".contains(one) && one.len() == 1 => 1000f64.powi(power("kmgt".find(one))),
            one if "KMGT".contains(one) && one.len() == 1 => 1024f64.powi(power("KMGT".find(one))),
            _ => return Err(wrong()),
        };
        Ok(json!({"kv_cache_memory_bytes": (number * factor) as u64}))
    },
    write: |plan| Some(plan.get("kv_cache_memory_bytes")?.as_u64()?.to_string()),
};

/// Cards that are alike: llama.cpp splits by what is free on each.
const CARDS: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match text.parse::<usize>() {
        Ok(cards @ 1..=64) => Ok(json!({"tensor_split": vec![1; cards]})),
        _ => Err("from 1 to 64".into()),
    },
    write: |_| None,
};

/// vLLM's object (vllm/config/speculative.py).
const SPECULATION: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let (who, tokens) = guesses(&object(text, r#"{"method": "mtp", "num_speculative_tokens": 3}"#)?)?;
        let mut tree = json!({"speculative_model": who});
        if let Some(tokens) = tokens {
            tree["num_speculative_tokens"] = tokens.into();
        }
        Ok(tree)
    },
    write: |_| None,
};

/// A text as an object. What shells make of one that is not between quotes has its parts, and not its braces or quotes.
fn object(text: &str, example: &str) -> Result<Value, String> {
    let read = serde_json::from_str(text).ok().filter(Value::is_object);
    read.ok_or_else(|| match text.contains(':') {
        true => {
            format!("a JSON object: a shell has taken its braces or quotes; put it between single quotes: '{example}'")
        }
        false => format!("a JSON object, such as '{example}'"),
    })
}

/// Who guesses ahead by vLLM's object, and how many tokens.
fn guesses(value: &Value) -> Result<(String, Option<u64>), String> {
    let (method, model) = (value["method"].as_str().unwrap_or_default(), value["model"].as_str());
    let who = match method {
        "ngram" | "suffix" | "ngram_gpu" => "ngram",
        _ if method == "mtp" || method.ends_with("_mtp") => "mtp",
        "eagle" | "eagle3" => model.unwrap_or(method),
        "" => model.ok_or("an object with a method or a model")?,
        "draft_model" => model.ok_or("an object with the model that guesses: \"model\": \"NAME\"")?,
        "dflash" | "dspark" if model.is_some() => model.unwrap_or_default(),
        other => {
            return Err(format!(
                "of a method that is simulated: {other} is none (mtp, eagle, eagle3, draft_model, ngram, suffix; dflash and dspark \
                 with a model); leave it out, or say how many layers its head has with --speculative-model N"
            ));
        }
    };
    Ok((who.to_owned(), value["num_speculative_tokens"].as_u64()))
}

/// vLLM's limits (`limit_per_prompt` of config/multimodal.py), or `image=2,video=0` of its older versions.
const LIMITS: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let older: Option<Map<String, Value>> = text
            .split(',')
            .map(|part| {
                let (kind, count) = part.split_once('=')?;
                Some((kind.trim().to_owned(), count.trim().parse::<u64>().ok()?.into()))
            })
            .collect();
        let limits =
            older.map_or_else(|| object(text, r#"{"image": 2, "video": 0}"#), |older| Ok(Value::Object(older)))?;
        let mut tree = json!({});
        for (kind, limit) in limits.as_object().into_iter().flatten() {
            let options = limit.as_object();
            if options.is_some_and(|options| options.keys().any(|key| key != "count")) {
                return Err("counts alone: sizes of pictures are not simulated".into());
            }
            let count = options.map_or(limit, |options| options.get("count").unwrap_or(&Value::Null)).as_u64();
            let count = count.ok_or_else(|| format!("a count of {kind}s, such as '{{\"{kind}\": 2}}'"))?;
            match kind.as_str() {
                "image" => tree["images_per_prompt"] = count.into(),
                "video" if count == 0 => tree["no_videos"] = true.into(),
                "audio" if count == 0 => tree["no_audio"] = true.into(),
                // One video or recording is what the profile run takes at most; other kinds have no encoder that is known.
                _ => {}
            }
        }
        Ok(tree)
    },
    write: |plan| Some(format!("image={}", plan.get("images_per_prompt")?.as_u64()?)),
};

const SHARES: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        // Only their ratio counts: fractions are taken in millionths where there are any.
        let shares: Option<Vec<f64>> = text.split([',', '/']).map(|part| part.trim().parse().ok()).collect();
        let shares = shares.filter(|all| all.iter().all(|share| (0.0..1e9).contains(share)));
        let shares = shares.ok_or_else(|| "numbers, such as 3,1 or 0.6,0.4".to_owned())?;
        let step = if shares.iter().all(|share| share.fract() == 0.0) { 1.0 } else { 1e6 };
        let shares: Vec<u64> = shares.iter().map(|share| (share * step).round() as u64).collect();
        Ok(json!({"tensor_split": shares}))
    },
    write: |plan| {
        let shares = plan.get("tensor_split")?.as_array()?;
        Some(shares.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
    },
};
