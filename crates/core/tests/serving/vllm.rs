//! vLLM's rules, by what its logs and sources say.

use super::*;

#[test]
fn vllm_makes_pages_of_hybrids_equal() {
    // truth/external/vllm_logs.json row 17: blocks of 2096 tokens, 69 of them for 131072 tokens, 300 in 6.01 GiB.
    let served = served("Qwen/Qwen3.5-35B-A3B");
    let plan = VllmPlan {
        version: "0.24.0".into(),
        max_model_len: Some(131_072),
        max_num_batched_tokens: Some(8192),
        cache_dtype: DType::F8E4M3,
        prefix_caching: true,
        ..VllmPlan::default()
    };
    let held = plan.blocks(&served, None, 6_453_188_362);
    assert_eq!((held.block_size, held.blocks, held.cache_tokens), (2096, 300, 569_878));
    assert_eq!(held.concurrency_thousandths, 4347);
}

#[test]
fn vllm_counts_layers_that_read_an_encoder() {
    // 40 layers with 8 heads of 128, eight of which read the image: all have blocks.
    let served = served("meta-llama/Llama-3.2-11B-Vision-Instruct");
    let plan = VllmPlan { version: "0.8.5 V0".into(), max_model_len: Some(4096), ..VllmPlan::default() };
    assert_eq!(plan.blocks(&served, None, 1 << 30).blocks, (1 << 30) / (16 * 40 * 2 * 8 * 128 * 2));
}

#[test]
fn vllm_lays_folded_keys_out_in_pages_of_several_sizes() {
    // q12 of truth/external/found: 10.29 GiB hold 1,993,100 tokens, with a layer that guesses and keeps its window alone.
    let served = served("deepseek-ai/DeepSeek-V4-Flash");
    let pool = |version: &str| {
        let plan = VllmPlan {
            version: version.into(),
            tensor_parallel: 2,
            max_model_len: Some(1 << 20),
            max_num_batched_tokens: Some(4096),
            ..VllmPlan::default()
        };
        let draft = Draft::of(Speculation::MultiToken, &served, &plan);
        plan.blocks(&served, Some(&draft), 11_053_000_000)
    };
    // 22 pages of 37,440 bytes, 21 of 8,640 and 20 of 1,728; before, 22 of each.
    let packed = 22 * 37_440 + 21 * 8_640 + 20 * 1_728;
    assert_eq!((pool("0.25.0").blocks, pool("0.25.0").cache_tokens), (11_053_000_000 / packed, 1_993_100));
    assert_eq!(pool("0.22.0").blocks, 11_053_000_000 / (22 * (37_440 + 8_640 + 1_728)));
    // Every block counts alike since 0.27: 4096 of 256 tokens, and those of windows over one batch more.
    let windows = [(128u64, 64u64, 2u64), (8, 4, 1), (128, 8, 1)];
    let held = windows.map(|(window, block, groups)| groups * ((window - 1 + 8192).div_ceil(block) + 1));
    let need = 4096 + held.iter().sum::<u64>();
    let now = pool("0.28.0");
    assert_eq!(now.concurrency_thousandths, now.blocks * 1000 / need);
}

#[test]
fn vllm_leaves_windows_room_for_batches_in_flight() {
    // truth/engines/vllm-1.jsonl v1-025: 3 of 4 layers see 4096 tokens; 512 in a batch, two batches since 0.26.
    let served = served("CohereForAI/c4ai-command-r7b-12-2024");
    let blocks = |version: &str| {
        let plan = VllmPlan {
            version: version.into(),
            max_model_len: Some(8192),
            max_num_batched_tokens: Some(512),
            ..VllmPlan::default()
        };
        let held = plan.blocks(&served, None, 1 << 36);
        held.blocks * 1000 / held.concurrency_thousandths
    };
    assert_eq!(blocks("0.32.0"), 3 * (4095 + 1024u64).div_ceil(16) + 3 + 512);
    assert_eq!(blocks("0.33.0"), blocks("0.32.0"));
    assert_eq!(blocks("0.24.0"), 3 * (4095 + 512u64).div_ceil(16) + 3 + 512);
}

/// Gemma 3 turns full layers by a table of eight times its positions, windows by one of as many (`LinearScalingRotaryEmbedding`):
/// 8.58 GiB of weights in the log of a 4B by vLLM 0.19.0, truth/external/found.
#[test]
fn vllm_makes_tables_for_scaled_positions() {
    let weights = |id: &str| {
        let plan = VllmPlan { version: "0.19.0".into(), ..VllmPlan::default() };
        part(&plan.budget(&served(id)), "weights") as f64 / f64::from(1 << 30)
    };
    for (id, logged) in
        [("google/gemma-3-4b-it", 8.58), ("google/gemma-3-12b-it", 23.31), ("google/gemma-3-27b-it", 51.45)]
    {
        assert!((weights(id) - logged).abs() < 0.02, "{id}: {}", weights(id));
    }
    let tables = |id: &str| served(id).tables;
    assert_eq!(tables("google/gemma-3-4b-it"), [8 * 131_072, 131_072]);
    // Images have positions of their own.
    assert_eq!(tables("Qwen/Qwen2.5-VL-7B-Instruct"), [4 * 128_000]);
    assert_eq!(tables("meta-llama/Llama-3.1-8B"), [131_072]);
}

/// The last stage of a pipeline holds what the stage before sent, and its residual: 2.01 GiB where one card has 1.89
/// (Llama-3.1-8B on H100s, vLLM 0.19.0).
#[test]
fn vllm_receives_what_a_stage_before_sends() {
    let served = served("meta-llama/Llama-3.1-8B");
    let plan = |stages| VllmPlan {
        version: "0.19.0".into(),
        card: "H100".into(),
        multiprocessors: 132,
        pipeline_parallel: stages,
        max_model_len: Some(8192),
        ..VllmPlan::default()
    };
    let activations = |stages| part(&plan(stages).budget(&served), "activations while profiling");
    assert_eq!(activations(2) - activations(1), 8192 * 4096 * 2 * 2);
    assert!(activations(1).abs_diff(1_935 << 20) < 16 << 20, "{}", activations(1));
}

/// FlashInfer sums over two cards in 4 buffers of 2 times 64 MiB since 0.17, on cards with a switch and not without compiling.
#[test]
fn vllm_fuses_sums_on_cards_with_a_switch() {
    let served = served("meta-llama/Llama-3.1-8B");
    let outside = |version: &str, card: &str, tensor, eager| {
        let plan = VllmPlan {
            version: version.into(),
            card: card.into(),
            multiprocessors: 132,
            tensor_parallel: tensor,
            enforce_eager: eager,
            ..VllmPlan::default()
        };
        part(&plan.budget(&served), "outside torch") >> 20
    };
    // 2.07 and 2.13 GiB in the logs.
    assert!(outside("0.19.0", "H100-80GB", 2, false).abs_diff(2120) < 8);
    assert!(outside("0.19.0", "H100-80GB", 4, false).abs_diff(2182) < 8);
    let plain = 132 + 424;
    assert_eq!(outside("0.16.0", "H100-80GB", 2, false), plain);
    assert_eq!(outside("0.19.0", "H100-80GB", 2, true), plain);
    assert!(outside("0.19.0", "RTX 4090", 2, false) < 900);
}

/// What vLLM sets aside for graphs grows with the sizes it captures and with layers; FlashAttention 3 splits sequences inside them.
#[test]
fn vllm_foresees_graphs_by_their_sizes() {
    let graphs = |id: &str, version: &str, card: &str, sequences| {
        let plan = VllmPlan {
            version: version.into(),
            card: card.into(),
            max_num_seqs: Some(sequences),
            ..VllmPlan::default()
        };
        part(&plan.budget(&served(id)), "CUDA graphs") >> 20
    };
    let (llama, large) = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B");
    // 0.84 GiB in logs of 51 sizes of either kind.
    assert!((700..900).contains(&graphs(llama, "0.20.0", "H100", 1024)), "{}", graphs(llama, "0.20.0", "H100", 1024));
    assert!(graphs(llama, "0.20.0", "H100", 8) < graphs(llama, "0.20.0", "H100", 256));
    assert!(graphs(llama, "0.20.0", "RTX 4090", 256) < graphs(llama, "0.20.0", "H100", 256));
    assert!(graphs(large, "0.20.0", "H100", 256) > graphs(llama, "0.20.0", "H100", 256));
    assert_eq!(graphs(llama, "0.19.0", "H100", 256), 0);
}

/// gpt-oss by Triton's kernels on Hopper: a layout of their own, padded by version, beside which scales stay as they were loaded
/// until 0.25. GiB of weights in logs (truth/external/found): d17, b40.
#[test]
fn vllm_lays_out_experts_in_mxfp4_by_version() {
    let weights = |id: &str, version: &str, cards: u64| {
        let plan = VllmPlan {
            version: version.into(),
            card: "H100".into(),
            multiprocessors: 132,
            tensor_parallel: cards,
            ..VllmPlan::default()
        };
        let model = model(id);
        let own = ServedModel::of(&model, &WeightFormat::of(&model).unwrap()).unwrap();
        part(&plan.budget(&own), "weights") as f64 / f64::from(1 << 30)
    };
    // Marlin's before 0.12 (vllm-project/vllm issue 23278).
    for (id, version, cards, logged) in [
        ("openai/gpt-oss-120b", "0.10.1", 1, 65.97),
        ("openai/gpt-oss-120b", "0.14.1", 1, 64.38),
        ("openai/gpt-oss-20b", "0.19.0", 2, 7.01),
    ] {
        let found = weights(id, version, cards);
        assert!((found / logged - 1.0).abs() < 0.003, "{id} by {version}: {found:.3}, not {logged}");
    }
    // The scales of 36 layers: 128 experts of 3 x 2880 x 90 bytes, 3.34 GiB, but for what torch's blocks are rounded to.
    let kept = weights("openai/gpt-oss-120b", "0.24.0", 1) - weights("openai/gpt-oss-120b", "0.25.0", 1);
    assert!((kept - 3.34).abs() < 0.05, "{kept}");
}

/// Nothing encodes images that nobody may send (`_mark_tower_model`, since 0.15): 50.22 GiB in a log of 0.30.0 (d8).
#[test]
fn vllm_leaves_out_encoders_that_are_not_asked_for() {
    let model = model("Qwen/Qwen3.5-27B");
    let weights = |version: &str, language_model_only: bool| {
        let plan = ServePlan { version: Some(version.into()), language_model_only, ..ServePlan::default() };
        let Served::Pool(budget) = start(&model, &plan).unwrap() else { panic!("no budget") };
        part(&budget, "weights") as f64 / f64::from(1 << 30)
    };
    assert!((weights("0.30.0", true) - 50.22).abs() < 0.05, "{}", weights("0.30.0", true));
    assert!(weights("0.30.0", false) > 51.0);
    assert_eq!(weights("0.14.0", true), weights("0.14.0", false));
}

/// 576 elements of 16 bits end at no multiple of 256 bytes, 640 do (0.7.2 and 0.7.3). Until 0.8 every layer keeps queries times keys
/// (1536 x 16 x 512) and values times outputs (16 x 512 x 7168) in 8 bits and what is turned (1536 x 16 x 64) in 16: a log of
/// eight H200 has 83.88 GiB of weights (k17).
#[test]
fn vllm_0_7_has_latents_of_its_own() {
    let budget = |version: &str| {
        let (version, kv_cache_memory_bytes) = (Some(version.into()), Some(1 << 34));
        let tensor_parallel_size = Some(8);
        let plan = ServePlan {
            version,
            tensor_parallel_size,
            kv_cache_memory_bytes,
            gpu: card("h200"),
            ..ServePlan::default()
        };
        pool("deepseek-ai/DeepSeek-R1", &plan)
    };
    let (old, new) = (budget("0.7.3"), budget("0.8.0"));
    let blocks = |elements: u64| (1 << 34) / (61 * elements * 2 * 16) * 16;
    assert_eq!([old.cache_tokens, new.cache_tokens], [blocks(640), blocks(576)]);
    let products = 61 * (16 * 512 * (1536 + 7168) + 2 * 1536 * 16 * 64);
    let [old, new] = [old, new].map(|budget| gib(part(&budget, "weights")));
    assert!((old - 83.88).abs() < 0.1 && (old - new - gib(products)).abs() < 0.1, "{old} and {new}");
}

/// Qwen 3's tables have slots since 0.16, and a tied head's once more until 0.28: 12.49 GiB with 64 of rank 16 (e18).
#[test]
fn vllm_has_slots_for_tables() {
    let weights = |id: &str, version: &str| {
        let (max_loras, max_lora_rank) = (Some(64), Some(16));
        let version = Some(version.into());
        let plan = ServePlan { version, enable_lora: true, max_loras, max_lora_rank, ..ServePlan::default() };
        let budget = pool(id, &plan);
        gib(part(&budget, "weights") + part(&budget, "LoRA slots"))
    };
    let tied = weights("Qwen/Qwen3-4B", "0.27.1");
    assert!((tied - 12.49).abs() < 0.01, "{tied}");
    assert!(weights("Qwen/Qwen3-4B", "0.28.0") < tied && weights("Qwen/Qwen3-4B", "0.15.0") < tied - 0.5);
}

/// A config may leave widths to its class (Llava's text), cards share the host's memory, and quantisers leave towers alone.
#[test]
fn vllm_reads_models_and_cards_as_they_are() {
    assert_eq!(served("llava-hf/llava-v1.6-mistral-7b-hf").hidden, 4096);
    let activations = |name: &str| {
        let plan = ServePlan { gpu: card(name), version: Some("0.13.0".into()), ..ServePlan::default() };
        part(&pool("Qwen/Qwen3-0.6B", &plan), "activations while profiling")
    };
    // NVML tells vLLM nothing of a DGX Spark: it gets the batches of a small card.
    assert!(activations("dgx-spark") < activations("h100") / 2);
    let weights = |quantization: &str| {
        let plan = ServePlan { quantization: Some(quantization.into()), ..ServePlan::default() };
        part(&pool("Qwen/Qwen2.5-VL-7B-Instruct", &plan), "weights")
    };
    // The tower's 0.68 billion weights in 16 bits.
    assert!(weights("awq_marlin") > weights("nf4") + (700 << 20), "{} {}", weights("awq_marlin"), weights("nf4"));
}

/// Qwen3-VL has buffers for what its encoder adds to three layers (f1, g24), copies of latent projections are in 16 bits and indexers
/// whole on every card (g18), and ModelOpt leaves the head alone.
#[test]
fn vllm_loads_more_than_is_stored() {
    let weights = |id: &str, plan: ServePlan| gib(part(&pool(id, &plan), "weights"));
    let of = |version: &str, name: &str, cards: u64| {
        let (version, tensor_parallel_size) = (Some(version.into()), Some(cards));
        ServePlan { version, tensor_parallel_size, gpu: card(name), ..ServePlan::default() }
    };
    let batched = ServePlan { max_num_batched_tokens: Some(8192), ..of("0.19.0", "a6000", 1) };
    assert!((weights("Qwen/Qwen3-VL-8B-Instruct", batched) - 16.78).abs() < 0.01);
    let sparse = ServePlan { quantization: Some("fp8".into()), ..of("0.20.0", "h200", 8) };
    assert!((weights("zai-org/GLM-5", sparse) / 89.39 - 1.0).abs() < 0.004);
    let packed = |method: &str| ServePlan { quantization: Some(method.into()), ..of("0.20.0", "rtx5090", 1) };
    // A nibble, a byte for 16 of them, a table and a head of 1.16 GiB.
    assert!((weights("Qwen/Qwen3-8B", packed("nvfp4")) - 5.97).abs() < 0.05);
    // Hopper's kernel keeps GPTQ's zeros and order (b55).
    let kept = ServePlan { quantization: Some("gptq".into()), ..of("0.19.0", "h100", 1) };
    assert!((weights("meta-llama/Llama-3.1-8B-Instruct", kept) - 5.38).abs() < 0.01);
}

/// What a checkpoint's config says of its experts and its cache: Nemotron 3 Nano as NVIDIA quantises it weighs 18.03 GiB where
/// Marlin runs it (h8 of truth/external/found) and is padded on Blackwell, most of all on two cards (e21, k22).
#[test]
fn vllm_serves_checkpoints_of_modelopt() {
    let upload = quantised("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4").unwrap();
    let mut config = catalogue::find("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").unwrap().config;
    config["quantization_config"] = upload.recipe.unwrap().0;
    let nano = Model::new(config, None).unwrap();
    let of = |version: &str, name: &str, cards: u64| {
        let (version, tensor_parallel_size) = (Some(version.to_owned()), Some(cards));
        let plan = ServePlan { version, tensor_parallel_size, gpu: card(name), ..ServePlan::default() };
        let Served::Pool(budget) = start(&nano, &plan).unwrap() else { panic!("no budget") };
        budget
    };
    for (version, name, cards, logged) in
        [("0.19.1", "h100-nvl", 1, 18.03), ("0.13.0", "rtx5080", 2, 9.83), ("0.21.0", "rtx5090", 1, 18.54)]
    {
        let found = gib(part(&of(version, name, cards), "weights"));
        assert!((found / logged - 1.0).abs() < 0.012, "{name}: {found:.3}, not {logged}");
    }
    // Keys and values in fp8, as it asks, since 0.14: twice the tokens of attention's pages in as many bytes.
    let bytes = |version: &str| of(version, "h200", 1).full_bytes;
    assert!(bytes("0.14.0") * 3 < bytes("0.13.0") * 2, "{} {}", bytes("0.14.0"), bytes("0.13.0"));
}

/// A DGX Spark's memory is its host's: what the process takes of that counts, is guessed, and is said to be.
#[test]
fn vllm_counts_what_it_takes_of_a_host_it_shares() {
    let on = |name: &str| pool("Qwen/Qwen3-0.6B", &ServePlan { gpu: card(name), ..ServePlan::default() });
    let (spark, desk) = (on("dgx-spark"), on("rtx5090"));
    assert!(gib(part(&spark, "outside torch")) > 2.0 && gib(part(&desk, "outside torch")) < 0.5);
    let said = |budget: &Budget| budget.notes.iter().any(|note| note.contains("its memory is the host's"));
    assert!(said(&spark) && !said(&desk));
}

/// Gemma 4 has keys and values in every layer of vLLM's, and a buffer for the inputs of its layers: GiB of weights in logs
/// (f10 and c5 of truth/external/found).
#[test]
fn vllm_has_keys_in_every_layer_of_gemma_4() {
    for (id, version, name, logged) in [
        ("google/gemma-4-31B-it", "0.23.0", "rtx-pro-6000", 58.99),
        ("google/gemma-4-E4B-it", "0.22.1", "rtx3090", 15.18),
    ] {
        let plan = ServePlan { version: Some(version.into()), gpu: card(name), ..ServePlan::default() };
        let found = gib(part(&pool(id, &plan), "weights"));
        assert!((found / logged - 1.0).abs() < 0.002, "{id}: {found:.3}, not {logged}");
    }
}
