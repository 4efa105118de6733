//! Lines of serving engines.

use super::*;

#[test]
fn variables_around_an_engines_line_are_said() {
    let said = content(
        "CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=x VLLM_LOGGING_LEVEL=INFO PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True VLLM_USE_FLASHINFER_SAMPLER=1 \
         vllm serve a/b --tensor_parallel 4",
    );
    let notes = said.notes.join("\n");
    assert!(notes.contains("variables without effect on memory: VLLM_LOGGING_LEVEL, HF_TOKEN"), "{notes}");
    assert!(notes.contains("show 2 cards and it splits the model over 4"), "{notes}");
    assert!(notes.contains("allocator with expandable_segments:True"), "{notes}");
    let named: Vec<&str> = said.named.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(named, ["engine", "flashinfer_sampler", "tensor_parallel_size"]);
    let sglang = content(
        "python -m sglang.launch_server --model a/b --tp 4 --enable-dp-attention --dp 2 --disable-overlap-schedule --deepep-mode auto",
    );
    let named: Vec<&str> = sglang.named.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(named, ["engine", "tp", "enable_dp_attention", "dp"]);
    assert!(sglang.notes.iter().any(|note| note.contains("deepep_mode")), "{:?}", sglang.notes);
}

#[test]
fn a_modelfile_is_read() {
    let text = "FROM llama3:8b\nPARAMETER num_ctx 8192\nPARAMETER stop \"x\"\nSYSTEM \"\"\"\nFROM nowhere\n\"\"\"\n";
    let read = modelfile(text).unwrap();
    assert_eq!(read.model.as_deref(), Some("llama3-8b"));
    assert!(read.named.iter().any(|(name, _)| name == "ctx_size"));
}

#[test]
fn flags_of_serving_engines_in_their_own_words() {
    let given = |line: &str, name: &str| {
        let content = content(line);
        let found = content.named.iter().rev().find(|(known, _)| known == name).map(|(_, given)| given.clone());
        (content, found)
    };
    for (line, name, value) in [
        ("docker run --gpus all vllm/vllm-openai:v0.11.0 --model a/b", "engine_version", json!("0.11.0")),
        ("docker run ghcr.io/ggml-org/llama.cpp:server-cuda-b5781 -m x.gguf", "engine_version", json!("b5781")),
        ("trtllm-serve a/b --max_seq_len 4096 --backend pytorch", "context", json!(4096)),
        ("trtllm-serve a/b --max_num_tokens 512", "max_num_batched_tokens", json!(512)),
        ("trtllm-serve a/b --max_batch_size 16", "max_num_seqs", json!(16)),
        ("trtllm-serve a/b --kv_cache_free_gpu_memory_fraction 0.8", "gpu_memory_utilization", json!(0.8)),
        ("trtllm-serve a/b --tp_size 2", "tp_size", json!(2)),
        (
            "text-generation-launcher --model-id a/b --max-batch-prefill-tokens 512",
            "max_num_batched_tokens",
            json!(512),
        ),
        ("text-generation-launcher --model-id a/b --cuda-memory-fraction 0.8", "gpu_memory_utilization", json!(0.8)),
        ("text-generation-launcher --model-id a/b --quantize eetq", "quantization", json!("int8")),
        ("vllm serve a/b --limit-mm-per-prompt image=2,video=0", "limit-mm-per-prompt", json!("image=2,video=0")),
        ("vllm serve a/b -O0", "enforce_eager", json!(true)),
        ("llama-server -m x.gguf --no-mmap", "no_mmap", json!(true)),
    ] {
        let found = given(line, name).1.unwrap_or_else(|| panic!("{line}: {name}"));
        assert!(format!("{found:?}").contains(value.to_string().trim_matches('"')), "{line}: {found:?}");
    }
    // No flag of vLLM's own is unknown: it is a setting, has no effect, is said, or is refused with a word on what to do.
    for (flag, follow) in super::vllm::flags() {
        let value = if *follow == super::vllm::Follow::None { "" } else { "1" };
        let words = shell::lines(&format!("vllm serve a/b --{flag} {value}")).remove(0);
        let said = read(&words, &open, &[]).err().unwrap_or_default();
        let said = said.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(!said.contains("what it changes is not known"), "{said}");
    }
    let (latest, version) = given("docker run vllm/vllm-openai:latest --model a/b", "engine_version");
    assert!(version.is_none() && latest.model.as_deref() == Some("a/b"));
    for length in ["auto", "-1"] {
        let (auto, found) = given(&format!("vllm serve a/b --max-model-len {length}"), "max_model_len");
        assert!(found.is_none() && auto.notes.iter().any(|note| note.contains("the longest that fits")));
    }
    let ollama = content("ollama run llama3.1:8b-instruct-q8_0");
    assert_eq!(ollama.model.as_deref(), Some("llama3.1-8b"));
    assert!(ollama.named.iter().any(|(name, given)| name == "quantization" && format!("{given:?}").contains("Q8_0")));
    let elsewhere = refused("vllm serve a/b --device cpu");
    assert!(elsewhere.contains("device cpu"), "{elsewhere}");
}

#[test]
fn variables_of_engines_are_flags() {
    for (line, name, value) in [
        ("OLLAMA_CONTEXT_LENGTH=16384 ollama run llama3.1:8b", "ctx_size", Some("16384")),
        ("OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_FLASH_ATTENTION=1 ollama run llama3.1:8b", "cache_type_v", Some("q8_0")),
        ("LLAMA_ARG_CTX_SIZE=32768 llama-server -m a.gguf", "ctx_size", Some("32768")),
        ("LLAMA_ARG_CTX_SIZE=32768 llama-server -m a.gguf -c 4096", "ctx_size", None),
        (
            "docker run -e LLAMA_ARG_N_GPU_LAYERS=20 ghcr.io/ggml-org/llama.cpp:server-cuda -m a.gguf",
            "n_gpu_layers",
            Some("20"),
        ),
    ] {
        let read = content(line);
        let found = read.named.iter().find(|(known, _)| known == name).map(|(_, given)| format!("{given:?}"));
        assert_eq!(value.is_some(), found.is_some(), "{line}: {:?}", read.named);
        assert!(found.is_none_or(|found| found.contains(value.unwrap())), "{line}");
        assert!(read.notes.is_empty(), "{line}: {:?}", read.notes);
    }
    assert_eq!(content("LLAMA_ARG_MODEL=b.gguf llama-server -c 4096").model.as_deref(), Some("b.gguf"));
    let said = content("VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_LOGGING_LEVEL=DEBUG vllm serve a/b");
    assert_eq!(
        said.notes,
        [
            "not simulated: VLLM_ATTENTION_BACKEND=FLASHINFER: what is usual is taken",
            "variables without effect on memory: VLLM_LOGGING_LEVEL"
        ]
    );
    // Another engine's variables are none of this one's.
    assert!(content("OLLAMA_CONTEXT_LENGTH=8 vllm serve a/b").notes.is_empty());
}

#[test]
fn unknown_flags_of_engines_name_the_nearest() {
    let near = refused("vllm serve a/b --max-model-length 4096");
    assert!(near.contains("--max-model-len,"), "{near}");
    assert!(refused("vllm serve a/b --zzz 4").contains("what it changes is not known"));
}

#[test]
fn engines_that_others_start_are_read() {
    for line in [
        "trl vllm-serve --model gpt2 --tensor_parallel_size 2",
        "vllm bench throughput --model gpt2 --input-len 8",
        "vllm run-batch -i a -o b --model gpt2",
    ] {
        let found = content(line);
        assert_eq!((found.model.as_deref(), found.task), (Some("gpt2"), Some(crate::ask::Task::Infer)), "{line}");
    }
}

#[test]
fn flags_without_effect_are_passed_over() {
    for line in [
        "llama-server.exe -m Qwen3-8B-Q4_K_M.gguf -cb --cache-ram 2048 --no-ui",
        "python -m sglang.launch_server --model-path gpt2 --enable-p2p-check --disable-disk-cache",
    ] {
        content(line);
    }
}
