//! vLLM's profile run: batches, towers, samplers, kernels that are tried out.

use super::*;

#[test]
fn vllm_tries_kernels_of_states_out_while_it_profiles() {
    // Where the batch is small the 256 MiB that Triton clears are the peak; FlashInfer's kernels on Hopper are not tried.
    let served = served("Qwen/Qwen3-Next-80B-A3B-Instruct");
    let activations = |version: &str, name: &str| {
        let gpu = card(name);
        let plan = VllmPlan {
            version: version.into(),
            max_num_seqs: Some(1),
            max_num_batched_tokens: Some(256),
            enforce_eager: true,
            memory: gpu.memory,
            card: (&gpu).into(),
            ..VllmPlan::default()
        };
        part(&plan.budget(&served), "activations while profiling")
    };
    let tried = activations("0.18.0", "a100-80gb") - activations("0.17.0", "a100-80gb");
    assert!((200 << 20..300 << 20).contains(&tried), "{tried}");
    assert_eq!(activations("0.18.0", "h100"), activations("0.17.0", "h100"));
}

/// Room for every time stamp of a video, four streams wide, in 0.11 (e13 of truth/external/found: 14.77 and 2.31 GiB); a video as
/// long as the sequence allows for Qwen2.5-VL, unless none may be sent.
#[test]
fn vllm_profiles_images_and_videos() {
    let (version, tensor_parallel_size) = (Some("0.11.0".into()), Some(4));
    let plan = ServePlan {
        version,
        tensor_parallel_size,
        context: Some(65_536),
        gpu: card("rtx3090"),
        ..ServePlan::default()
    };
    let budget = pool("Qwen/Qwen3-VL-30B-A3B-Instruct", &plan);
    assert!((gib(part(&budget, "weights")) / 14.7708 - 1.0).abs() < 0.003, "{budget:?}");
    assert!((gib(budget.cache) / 2.31 - 1.0).abs() < 0.06, "{budget:?}");
    let activations = |context: u64, no_videos: bool| {
        let plan = ServePlan { context: Some(context), no_videos, gpu: card("a100-80gb"), ..ServePlan::default() };
        part(&pool("Qwen/Qwen2.5-VL-7B-Instruct", &plan), "activations while profiling")
    };
    assert_eq!(activations(16_384, false), activations(16_384, true));
    assert!(activations(131_072 - 3072, false) > 3 * activations(32_768, true));
}

/// A first start holds the table of words once more while it compiles; one that finds what it compiled does not. GiB in logs: Qwen3-8B
/// on an RTX 4090 (g1 and g2), Qwen3-4B with 64 slots for adapters, whose rows stand beside the table (1.09 where a second has 0.15).
#[test]
fn vllm_compiles_when_it_first_starts() {
    let held = |id: &str, compile_cache: bool, slots: Option<u64>| {
        let version = Some("0.27.1".into());
        let (enable_lora, gpu) = (slots.is_some(), card("rtx4090"));
        let plan = ServePlan { version, compile_cache, enable_lora, max_loras: slots, gpu, ..ServePlan::default() };
        pool(id, &plan).cache
    };
    let lost = |id: &str, slots| gib(held(id, true, slots)) - gib(held(id, false, slots));
    assert!((lost("Qwen/Qwen3-8B", None) - 0.99).abs() < 0.02, "{}", lost("Qwen/Qwen3-8B", None));
    assert!((lost("Qwen/Qwen3-4B", Some(64)) - 0.94).abs() < 0.08, "{}", lost("Qwen/Qwen3-4B", Some(64)));
    // A model with an encoder is given embeddings.
    assert_eq!(held("google/gemma-3-4b-it", true, None), held("google/gemma-3-4b-it", false, None));
    let told = |enforce_eager: bool| {
        let plan = ServePlan { compile_cache: true, enforce_eager, gpu: card("h100"), ..ServePlan::default() };
        pool("Qwen/Qwen3-8B", &plan).notes.iter().any(|note| note.contains("changes nothing"))
    };
    assert_eq!([told(true), told(false)], [true, false]);
}

/// Where FlashInfer is installed beside 0.10.1, nothing is sorted: 0.95 GiB of Qwen2-7B's profile on an A100 (m23 and m24 of
/// truth/external/found). Later versions sample by it unasked.
#[test]
fn vllm_sorts_nothing_where_flashinfer_samples() {
    let of = |version: &str, flashinfer_sampler: bool| {
        let (version, gpu) = (Some(version.into()), card("a100-80gb"));
        let budget = pool("Qwen/Qwen2-7B", &ServePlan { version, flashinfer_sampler, gpu, ..ServePlan::default() });
        (gib(budget.cache), budget.notes.iter().any(|note| note.contains("changes nothing")))
    };
    let [without, with, late] = [of("0.10.1.1", false), of("0.10.1.1", true), of("0.28.0", true)];
    assert!((with.0 - without.0 - 0.9).abs() < 0.06, "{with:?} {without:?}");
    assert_eq!([without.1, with.1, late.1], [false, false, true]);
}

/// Pictures stay until the profile run ends: what it took of Gemma 3 by 0.19.0 on H100s, in GiB (b9 to b11 of truth/external/found).
#[test]
fn vllm_holds_pictures_while_the_text_runs() {
    for (id, logged) in
        [("google/gemma-3-12b-it", 3.94), ("google/gemma-3-27b-it", 3.99), ("google/gemma-3-4b-it", 3.89)]
    {
        let (version, context) = (Some("0.19.0".into()), Some(8192));
        let plan = ServePlan { version, context, gpu: card("h100"), ..ServePlan::default() };
        let found = gib(part(&pool(id, &plan), "activations while profiling"));
        assert!((found - logged).abs() < 0.01, "{id}: {found:.3}, not {logged}");
    }
}

/// Experts of Gemma 4 in NVFP4 run in vLLM's CUTLASS kernels on Blackwell where no other knows GELU, with three copies of what the
/// chosen are given and make: 4.0 GiB of a batch of 16,384 (a12 and k36 of truth/external/found, under WSL).
#[test]
fn vllm_copies_what_its_own_kernels_of_experts_sort() {
    let of = |version: &str, name: &str| {
        let (version, quantization) = (Some(version.to_owned()), Some("nvfp4".into()));
        let (max_num_batched_tokens, max_num_seqs) = (Some(16_384), Some(2));
        let plan = ServePlan {
            version,
            quantization,
            max_num_batched_tokens,
            max_num_seqs,
            gpu: card(name),
            ..ServePlan::default()
        };
        gib(part(&pool("google/gemma-4-26B-A4B-it", &plan), "activations while profiling"))
    };
    assert!((of("0.20.2", "rtx5090") - 4.02).abs() < 0.02, "{}", of("0.20.2", "rtx5090"));
    for (version, name) in [("0.21.0", "rtx5090"), ("0.24.0", "rtx5090"), ("0.20.2", "h100")] {
        assert!(of(version, name) < 2.3, "{version} on {name}: {}", of(version, name));
    }
    assert_eq!(of("0.23.0", "rtx5090"), of("0.20.2", "rtx5090"));
}

/// The gate of a gated delta net is a view of all that is projected, which therefore lives as long: 16,384 and 6,144 elements of a
/// token of Qwen3.5-27B (k14 and p20 of truth/external/found).
#[test]
fn vllm_hands_views_to_the_next_piece() {
    let of = |enforce_eager: bool| {
        let (version, max_num_batched_tokens) = (Some("0.24.0".into()), Some(65_536));
        let language_model_only = true;
        let gpu = card("dgx-spark");
        let plan = ServePlan {
            version,
            max_num_batched_tokens,
            enforce_eager,
            language_model_only,
            compile_cache: true,
            gpu,
            ..ServePlan::default()
        };
        part(&pool("Qwen/Qwen3.5-27B", &plan), "activations while profiling")
    };
    assert_eq!(of(false) - of(true), 65_536 * (16_384 + 6_144) * 2);
}

/// A tower has run when experts get their buffers, so that a batch whose buffers it outweighs changes nothing; pictures of a quarter of
/// the pixels take a quarter of it (r1 of truth/external/found has the whole one, to 0.01 GiB).
#[test]
fn vllm_runs_towers_before_experts_have_buffers() {
    let profiled = |batch: u64, max_pixels: Option<u64>| {
        let (version, gpu) = (Some("0.20.0".into()), card("rtx-pro-6000"));
        let (context, max_num_seqs, max_num_batched_tokens) = (Some(32_768), Some(1), Some(batch));
        let quantization = Some("fp8".into());
        let plan = ServePlan {
            version,
            gpu,
            context,
            max_num_seqs,
            max_num_batched_tokens,
            max_pixels,
            quantization,
            ..ServePlan::default()
        };
        gib(part(&pool("Qwen/Qwen3.5-35B-A3B", &plan), "activations while profiling"))
    };
    let [small, large, quarter] = [profiled(2048, None), profiled(4096, None), profiled(256, Some(1 << 22))];
    // g24, whose source says so of its pictures: 22.46 GiB, 5 % less with whole ones.
    let (version, gpu, gpu_memory_utilization) = (Some("0.19.0".into()), card("a6000"), Some(0.85));
    let (context, max_num_seqs, max_num_batched_tokens) = (Some(4096), Some(5), Some(8192));
    let (enforce_eager, max_pixels) = (true, Some(1_003_520));
    let plan = ServePlan {
        version,
        gpu,
        gpu_memory_utilization,
        context,
        max_num_seqs,
        max_num_batched_tokens,
        ..ServePlan::default()
    };
    let g24 = pool("Qwen/Qwen3-VL-8B-Instruct", &ServePlan { enforce_eager, max_pixels, ..plan });
    assert!((gib(g24.cache) - 22.46).abs() < 0.02, "{}", gib(g24.cache));
    assert!((large - small).abs() < 0.001, "{small} {large}");
    assert!(small - quarter > 1.0, "{small} {quarter}");
}

/// A batch that nobody bounds has no more tokens than all sequences of full length since 0.11.1 (`_set_default_args`).
#[test]
fn vllm_bounds_batches_by_their_sequences() {
    let cache = |version: &str, max_num_batched_tokens: Option<u64>| {
        let (version, gpu) = (Some(version.into()), card("rtx4090"));
        let (context, max_num_seqs) = (Some(256), Some(2));
        let plan = ServePlan {
            version,
            gpu,
            context,
            max_num_seqs,
            max_num_batched_tokens,
            compile_cache: true,
            ..ServePlan::default()
        };
        pool("Qwen/Qwen3-8B", &plan).cache
    };
    assert_eq!(cache("0.11.1", None), cache("0.11.1", Some(512)));
    assert_eq!(cache("0.11.0", None), cache("0.11.0", Some(2048)));
    assert!(cache("0.11.0", None) < cache("0.11.0", Some(512)));
}
