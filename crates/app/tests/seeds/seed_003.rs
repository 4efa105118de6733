//! "LLM/VLM GPU Memory Estimator": fine-tuning with every flag of its reference.

use super::{has_row, json, stderr, text, vramcast};

const FIRST: &str = "train --model meta-llama/Llama-2-7b-hf --dtype bf16 --seq-len 4096 --per-device-batch 2 --grad-accum 128 \
                     --zero 2 --dp 8 --tp 1 --pp 1 --flashattn true --grad-checkpoint true";

/// "1. Full Fine-Tuning (7B Model)": base weights as printed, 13.48 in decimal GB. The other figures follow from none of
/// the document's formulas (docs/lenses.md).
#[test]
fn full_fine_tuning_by_its_factors() {
    let page = text(&format!("{FIRST} --method factors"));
    assert!(has_row(&page, &["base weights", "12.55", "13.48"]), "{page}");
    for term in ["trainable state", "attention activations", "MLP activations", "output logits", "peak buffer"] {
        assert!(page.contains(term), "{term} is missing in:\n{page}");
    }
}

/// The same command, simulated on one of eight cards under ZeRO-2.
#[test]
fn full_fine_tuning_simulated() {
    let report = json(&FIRST.replace("--grad-accum 128", "--grad-accum 1"));
    let plan = &report["plan"]["train"];
    assert_eq!((&plan["batch"]["batch_size"], &plan["batch"]["seq_len"]), (&2.into(), &4096.into()));
    assert_eq!((&plan["gradient_accumulation"], &plan["checkpointing"]), (&1.into(), &"full".into()));
    assert_eq!(plan["parallel"]["mesh"]["dp_shard"], 8);
    assert_eq!(plan["parallel"]["engine"]["deepspeed"]["zero"]["stage"], 2);
}

/// "2. LoRA Fine-Tuning (13B Model)": modules by spaces.
#[test]
fn lora() {
    let line = "train --model meta-llama/Llama-2-13b-hf --dtype bf16 --seq-len 8192 --per-device-batch 1 --grad-accum 256 \
                --lora true --lora-rank 8 --lora-target-modules q_proj k_proj v_proj o_proj --zero 3 --dp 16 --flashattn true \
                --grad-checkpoint true --method factors";
    let document = json(line);
    // 4 modules of 5120 × 5120 in 40 layers at rank 8; bf16 gradients and Adam's 8 bytes over 16 cards.
    let adapters = 40.0 * 4.0 * 8.0 * (5120.0 + 5120.0);
    assert_eq!(document["terms"][1]["bytes"].as_f64(), Some(adapters * 10.0 / 16.0));
    let simulated = json(
        "train --model meta-llama/Llama-2-13b-hf --dtype bf16 --seq-len 1024 --lora true --lora-rank 8 \
         --lora-target-modules q_proj k_proj v_proj o_proj --flashattn true --grad-checkpoint true",
    );
    assert_eq!(simulated["model"]["adapter"], 40 * 4 * 8 * (5120 + 5120));
}

/// "3. QLoRA (70B Model)": 0.56 bytes a weight over 4 tensor-parallel and 32 data-parallel cards.
#[test]
fn qlora() {
    let line = "train --model meta-llama/Llama-2-70b-hf --dtype bf16 --qlora true --lora-rank 64 --seq-len 4096 \
                --per-device-batch 1 --grad-accum 512 --zero 3 --dp 32 --tp 4 --flashattn true --grad-checkpoint true";
    let document = json(&format!("{line} --method factors"));
    let expected = 68_976_648_192.0 * 0.56 / 4.0 / 32.0;
    assert!((document["terms"][0]["bytes"].as_f64().unwrap() - expected).abs() < 1.0);
    // One card of it, simulated.
    let one = json("train --model meta-llama/Llama-2-7b-hf --qlora true --lora-rank 64 --grad-checkpoint true");
    assert_eq!(one["plan"]["train"]["quantization"]["scheme"], "nf4");
}

/// "4. With Empirical Probe": `vramcast probe`, which here finds no Python to run; without it the estimate stands.
#[test]
fn probe() {
    let line = "train --model mistralai/Mistral-7B-v0.1 --dtype bf16 --seq-len 4096 --per-device-batch 1 --flashattn true \
                --grad-checkpoint true";
    let refused =
        vramcast(&format!("{line} --probe true --warmup-steps 3 --probe-steps 6 --python no-such-python")).failure();
    assert!(stderr(&refused).contains("no-such-python"), "{}", stderr(&refused));
    assert!(json(&format!("{line} --probe false --estimate-only true"))["totals"].is_object());
}

/// "Advanced Tuning": every coefficient moves the formula, and only the formula.
#[test]
fn advanced_tuning() {
    let total =
        |rest: &str| json(&format!("train gpt2 --seq-len 512 --method factors {rest}"))["total"].as_f64().unwrap();
    let plain = total("");
    for option in [
        "--attn-act-factor-fa 2",
        "--mlp-act-factor 12",
        "--logits-factor 3",
        "--fragmentation-gib 9",
        "--misc-overhead-gib 4",
        "--cuda-libs-gib 3",
        "--master-weights true",
    ] {
        assert!(total(option) > plain, "{option}");
    }
    assert!(total("--grad-checkpoint true --grad-ckpt-reduction 0.5") > total("--grad-checkpoint true"));
    assert!(total("--flashattn false --attn-act-factor-no-fa 9") > total("--flashattn false"));
    assert!(total("--fused-loss true") < plain);
    let refused = vramcast("train gpt2 --mlp-act-factor 12").code(2);
    assert!(stderr(&refused).contains("--mlp-act-factor") && stderr(&refused).contains("factors"));
}

/// The parameter reference: every switch is understood by the simulation too.
#[test]
fn every_switch() {
    let base = "train --model gpt2 --seq-len 256 --per-device-batch 1 --grad-accum 1";
    for option in [
        "--dtype fp16",
        "--dtype fp32",
        "--zero 0",
        "--dp 1",
        "--dp 4",
        "--dp 2 --zero 1",
        "--flashattn false",
        "--flashattn true",
        "--grad-checkpoint true",
        "--grad-checkpoint false",
        "--liger false",
        "--lora false",
        "--lora true --lora-alpha 16",
        "--qlora true",
    ] {
        assert!(json(&format!("{base} {option}"))["totals"].is_object(), "{option}");
    }
    let llama = "train --model llama3.2-1b --seq-len 256";
    let plain = json(llama)["totals"]["allocated"].as_u64();
    for option in ["--liger true", "--fused-loss true"] {
        assert!(json(&format!("{llama} {option}"))["totals"]["allocated"].as_u64() < plain, "{option}");
    }
}
