//! "GPU Memory Calculator for LLM Training": job files, quick answers, validation.

use super::{json, stderr, stdout, text, vramcast, words};

/// `calculate --config configs/llama2_7b_deepspeed.json`, the document's own file.
#[test]
fn calculate_from_a_file() {
    let page = text("calculate --config configs/llama2_7b_deepspeed.json --method engines");
    for line in ["Memory per GPU:", "Fits on GPU: yes", "Utilization:", "feasible"] {
        assert!(page.contains(line), "{line} is missing in:\n{page}");
    }
    // ZeRO-3 with its optimizer on the host: 4 × largest layer and the 2 of 18 bytes that stay.
    let document = json("calculate --config configs/llama2_7b_deepspeed.json --method engines");
    let part = |index: usize| document["breakdown"][index]["bytes"].as_u64().unwrap();
    assert_eq!(part(0), 4 * 32_000 * 4096);
    assert_eq!(part(1), 2 * 7_000_000_000 / 8);
    assert_eq!(document["fits_on_gpu"], true);
}

/// The ZeRO-3 formula in full: 4 × largest layer + 18 × P / N.
#[test]
fn zero_3_without_offload() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.json");
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/llama2_7b_deepspeed.json"));
    std::fs::write(&path, text.unwrap().replace("\"cpu\"", "\"none\"").replace("steps\": 4", "steps\": 1")).unwrap();
    let line = format!("calculate --config {}", path.display());
    let formula = json(&format!("{line} --method engines"));
    let part = |index: usize| formula["breakdown"][index]["bytes"].as_u64().unwrap();
    assert_eq!((part(0), part(1)), (4 * 32_000 * 4096, 18 * 7_000_000_000 / 8));
    // And simulated, on the model that the file means.
    let simulated = json(&line);
    assert_eq!(simulated["method"], "simulate");
    assert!(simulated["notes"].to_string().contains("meta-llama/Llama-2-7b-hf"));
}

/// The document's three presets, and those that come with them, by file and by name.
#[test]
fn presets() {
    for name in ["llama2_7b_deepspeed", "gpt3_175b_megatron", "pytorch_ddp_example"] {
        let by_file = json(&format!("calculate --config configs/{name}.json"));
        assert_eq!(by_file, json(&format!("calculate --config {name}")), "{name}");
        assert!(by_file["total_memory_per_gpu"].as_u64() > Some(0));
    }
    assert!(stdout(&vramcast("list presets").success()).contains("gpt3_175b_megatron"));
    let missing = vramcast("calculate --config configs/nothing.json").code(2);
    assert!(stderr(&missing).contains("configs/nothing.json"));
}

/// `quick 7 --gpus 8 --engine deepspeed` and `quick 70 --gpus 64 --gpu-mem 80 --engine megatron`.
#[test]
fn quick() {
    let seven = json("quick 7 --gpus 8 --engine deepspeed");
    assert_eq!((&seven["num_gpus"], &seven["gpu_memory"]), (&8.into(), &(80u64 << 30).into()));
    assert_eq!((&seven["method"], &seven["fits_on_gpu"]), (&"simulate".into(), &true.into()));
    let seventy = json("quick 70 --gpus 64 --gpu-mem 80 --engine megatron --method engines");
    assert_eq!(seventy["breakdown"][0]["bytes"].as_u64(), Some(70_000_000_000 * 2 / 8));
    let formula = json("quick 7 --gpus 8 --engine deepspeed --method engines");
    assert_eq!(formula["breakdown"][1]["bytes"].as_u64(), Some(18 * 7_000_000_000 / 8));
    for line in ["quick seven", "quick 7 --gpus 0", "quick 7 --gpu-mem -1", "quick 7 --zero-stage 4"] {
        vramcast(line).code(2);
    }
}

/// What does not fit says so, ends with 1, and has suggestions that were simulated.
#[test]
fn not_feasible_with_suggestions() {
    let assert = vramcast("quick 7 --gpus 1 --gpu-mem 40 --engine ddp --batch-size 8").code(1);
    let page = stdout(&assert);
    assert!(page.contains("not feasible") && page.contains("cheapest first"), "{page}");
    let document = json("quick 7 --gpus 1 --gpu-mem 40 --engine ddp --batch-size 8");
    let suggestions = document["suggestions"].as_array().unwrap();
    assert!(!suggestions.is_empty());
    for suggestion in suggestions {
        // Another card is judged by its own memory.
        let other = suggestion["change"].as_str().unwrap().starts_with("--gpu ");
        assert!(suggestion["fits"] == true, "{suggestion}");
        assert!(other || suggestion["process"].as_u64() <= Some(40 << 30), "{suggestion}");
    }
}

/// `validate`: all problems, with their lines.
#[test]
fn validate() {
    let valid = vramcast("validate configs/llama2_7b_deepspeed.json").success();
    assert!(stdout(&valid).contains("no problems"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("my_config.json");
    std::fs::write(
        &path,
        "{\n  \"model\": {\"num_parameters\": \"7Q\", \"num_layers\": 32, \"hidden_size\": 4096},\n  \"training\": {\"dtype\": \"fp7\",\n    \"colour\": \"red\"},\n  \"engine\": {\"type\": \"warp\"}\n}\n",
    )
    .unwrap();
    let name = path.to_str().unwrap();
    let invalid = stdout(&words(&["validate", name]).code(2));
    for place in [
        ":2:31: model.num_parameters: \"7Q\"",
        ":2:12: model.num_attention_heads: is missing",
        ":3:25: training.dtype: \"fp7\"",
        ":4:15: training.colour: is not known",
        ":5:22: engine.type: \"warp\"",
        "5 problems",
    ] {
        assert!(invalid.contains(place), "{place} is missing in:\n{invalid}");
    }
    let refused = words(&["calculate", "--config", name]).code(2);
    assert!(stderr(&refused).contains("line 2") && stderr(&refused).contains("validate"));
    std::fs::write(&path, "{\"model\": ").unwrap();
    assert!(stdout(&words(&["validate", name]).code(2)).contains("1 problem"));
}
