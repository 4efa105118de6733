//! Settings of a batch and of a training step.

use serde_json::{Value, json};

use super::FLOATS;
use crate::ask::runner::Scope;
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;
use crate::plan::OptimizerKind;

/// What training and generation on tensors share: not what Megatron's own data loader makes.
const TOKENS: Scope = Scope::TORCH.and(Scope::GENERATE);

/// What a model of an unknown type is taken for.
const ASSUMPTIONS: Kind =
    Kind::Choice(&[("decoder", "a Llama-style decoder, with experts where its config counts some")]);

/// What goes in.
pub(super) const BATCH: &[Setting] = &[
    setting("assume", "assume", ASSUMPTIONS, "What to take a model for whose type is not known")
        .from("a model of an unknown type is refused")
        .on(Topic::Batch, Scope::ALL),
    setting("batch.batch_size", "batch-size", Kind::Whole, "Samples per card; prompts at once")
        .short('b')
        .also(&["per-device-batch", "per-device-train-batch-size"])
        .from("our guess")
        .on(Topic::Batch, Scope::TENSORS)
        .example("--batch-size 4"),
    setting("batch.seq_len", "seq-len", Kind::Whole, "Tokens per sample")
        .short('s')
        .also(&["sequence-length", "seq-length", "max-seq-len", "max-seq-length", "max-length"])
        .from("our guess")
        .on(Topic::Batch, Scope::TRAIN)
        .example("--seq-len 512"),
    setting("batch.seq_len", "prompt", Kind::Whole, "Tokens of a prompt")
        .short('p')
        .also(&["seq-len", "seq-length", "sequence-length"])
        .from("our guess")
        .on(Topic::Batch, Scope::GENERATE)
        .example("--prompt 512"),
    setting(
        "batch.target_len",
        "target-len",
        Kind::Whole,
        "Tokens per sample of the decoder, in encoder-decoder models",
    )
    .from("as many as the encoder's")
    .on(Topic::Batch, Scope::TORCH)
    .example("--target-len 64"),
    setting("batch.images", "images", Kind::Spelled(IMAGES), "Images of the whole batch, in pixels")
        .value("NxHxW")
        .on(Topic::Batch, TOKENS)
        .example("--images 1x448x448"),
    setting("batch.audio_frames", "audio-frames", Kind::Whole, "Audio frames per sample").on(Topic::Batch, TOKENS),
    setting("batch.mask", "mask", Kind::Switch, "Pass an attention mask of ones")
        .from("a plain training loop passes none")
        .on(Topic::Batch, TOKENS)
        .example("--mask"),
    setting("batch.padded", "padded", Kind::Switch, "Samples are padded, so the mask really masks")
        .on(Topic::Batch, Scope::TORCH)
        .example("--padded"),
    setting(
        "batch.real_tokens",
        "real-tokens",
        Kind::Whole,
        "Tokens of the whole batch that are no padding: flash attention computes on those alone",
    )
    .from("all of them")
    .on(Topic::Batch, Scope::TORCH)
    .example("--real-tokens 1000 --padded --attention flash2"),
    setting("gradient_accumulation", "gradient-accumulation", Kind::Whole, "Micro-batches per optimizer step")
        .also(&["grad-accum", "gradient-accumulation-steps"])
        .from("transformers 5.17's default")
        .on(Topic::Batch, Scope::TRAIN)
        .example("--gradient-accumulation 4"),
];

/// How a step runs.
pub(super) const STEP: &[Setting] = &[
    setting("weights", "precision", Kind::Spelled(PRECISION), "Weights and autocast: pure, or fp32 weights under autocast")
        .also(&["dtype"])
        .value("PRECISION")
        .from("our guess: how most models are published")
        .on(Topic::Precision, Scope::TRAIN)
        .example("--precision bf16-mixed"),
    setting("weights", "weights", FLOATS, "The type the weights are held in")
        .value("TYPE")
        .from("our guess: how most models are published")
        .on(Topic::Precision, Scope::TRAIN)
        .example("--weights fp16"),
    setting("autocast", "autocast", FLOATS, "The type autocast computes in")
        .value("TYPE")
        .on(Topic::Precision, Scope::TORCH)
        .example("--autocast bf16 --weights fp32"),
    setting("gradients", "gradient-dtype", FLOATS, "Keep gradients in this type (Parameter.grad_dtype)")
        .value("TYPE")
        .from("that of the weights")
        .on(Topic::Optimizer, Scope::ONE_CARD)
        .example("--gradient-dtype fp32 --master-weights"),
    setting("optimizer.kind", "optimizer", Kind::Listed(optimizers), "The optimizer; see `vramcast list optimizers`")
        .also(&["optim"])
        .value("NAME")
        .from("transformers 5.17's default (Trainer)")
        .on(Topic::Optimizer, Scope::TRAIN)
        .example("--optimizer adafactor"),
    setting("optimizer.implementation", "optimizer-implementation", Kind::Choice(&[
        ("foreach", "all parameters at once, by lists"),
        ("fused", "one fused kernel"),
        ("forloop", "one parameter after the other"),
    ]), "How the optimizer steps")
        .from("torch 2.11's default on CUDA")
        .on(Topic::Optimizer, Scope::TORCH)
        .example("--optimizer-implementation forloop"),
    setting("clip", "clip", Kind::Switch, "Clip gradients by their norm")
        .from("off in a plain training loop")
        .on(Topic::Optimizer, Scope::TORCH)
        .example("--clip"),
    setting("clip", "max-grad-norm", Kind::Spelled(NORM), "The largest norm of gradients; 0: they are not clipped")
        .value("NORM")
        .from("off in a plain training loop")
        .on(Topic::Optimizer, Scope::TORCH)
        .example("--max-grad-norm 1.0"),
    setting("optimizer.rank", "optimizer-rank", Kind::Whole, "The rank that galore-adamw and apollo-adamw project gradients to")
        .from("128 in both packages")
        .on(Topic::Optimizer, Scope::ONE_CARD)
        .example("--optimizer-rank 32 --optimizer galore-adamw"),
    setting("optimizer.master_weights", "master-weights", Kind::Switch, "Step fp32 copies of narrow weights, as apex and Megatron do")
        .on(Topic::Optimizer, Scope::ONE_CARD)
        .example("--master-weights"),
    setting("optimizer.state", "optimizer-state-dtype", FLOATS, "Keep the moments of adamw-anyprecision in this type")
        .value("TYPE")
        .from("fp32")
        .on(Topic::Optimizer, Scope::ONE_CARD)
        .example("--optimizer-state-dtype bf16 --optimizer adamw-anyprecision"),
    setting("optimizer.wide_embeddings", "wide-embeddings", Kind::Switch, "8-bit optimizers keep the state of embeddings in fp32, as the Trainer tells them to")
        .on(Topic::Optimizer, Scope::TORCH)
        .example("--wide-embeddings --optimizer adamw8bit"),
    setting("optimizer_in_backward", "optimizer-in-backward", Kind::Switch, "Step each parameter and free its gradient as soon as the gradient is complete")
        .on(Topic::Optimizer, Scope::ONE_CARD)
        .example("--optimizer-in-backward"),
    setting("checkpoints", "gradient-checkpointing", Kind::Spelled(CHECKPOINTS), "Recompute layers in backward (full); every N-th layer; inputs wait on the host (offload); some products are kept (selective: every second, selective-matmul: all)")
        .also(&["grad-checkpoint"])
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::TORCH)
        .example("--gradient-checkpointing"),
    setting("checkpointing", "", Kind::Choice(&[("off", ""), ("full", "")]), "Whether layers are recomputed in backward")
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::TORCH),
    setting("torch_compile", "torch-compile", Kind::Spelled(COMPILE), "Compile the model as a whole, as the Trainer does, with CUDA graphs (reduce-overhead), its loss apart (model-and-loss), or each layer by itself (layers, layers-and-loss)")
        .on(Topic::Kernels, Scope::ONE_CARD.and(Scope::FSDP2))
        .example("--torch-compile layers"),
    setting("float8", "float8", Kind::Choice(&[
        ("tensorwise", "one scale for each tensor"),
        ("rowwise", "one scale for each row"),
    ]), "Multiply in float8 inside compiled layers, as torchao's training does (the head stays as it is)")
        .value("RECIPE")
        .on(Topic::Kernels, Scope::ONE_CARD.and(Scope::FSDP2))
        .example("--float8 rowwise --torch-compile layers"),
    setting("loss.kind", "loss", Kind::Spelled(LOSS), "Whose loss: transformers' own, torchtune's chunked, cut cross entropy, TRL's or Liger's")
        .value("NAME")
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::ONE_CARD)
        .example("--loss chunked"),
    setting("loss.chunks", "loss-chunks", Kind::Whole, "Into how many pieces the chunked loss cuts the sequence")
        .from("torchtune's default")
        .on(Topic::Kernels, Scope::ONE_CARD)
        .example("--loss-chunks 2 --loss chunked"),
    setting("attention", "attention", Kind::Choice(&[
        ("sdpa", "torch chooses a kernel"),
        ("eager", "the model's own code"),
        ("flash2", "the flash-attn package (FlashAttention 2)"),
        ("flash3", "FlashAttention 3"),
        ("flex", "torch's flex attention, compiled by itself"),
    ]), "How attention is computed")
        .also(&["attn-implementation"])
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::TORCH)
        .example("--attention eager"),
    setting("attention", "attention", Kind::Choice(&[("sdpa", "torch chooses a kernel"), ("eager", "the model's own code")]), "How attention is computed")
        .also(&["attn-implementation"])
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::GENERATE)
        .example("--attention eager --new-tokens 0"),
    setting("attention", "eager", Kind::Spelled(EAGER), "Use the model's eager attention instead of SDPA")
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::GENERATE)
        .example("--eager --new-tokens 0"),
    setting("sdpa_kernel", "sdpa-kernel", Kind::Choice(&[("cudnn", ""), ("flash", ""), ("efficient", ""), ("math", "")]), "The kernel that SDPA must take (torch.nn.attention.sdpa_kernel)")
        .value("KERNEL")
        .from("torch chooses")
        .on(Topic::Kernels, Scope::ONE_CARD)
        .example("--sdpa-kernel math"),
    setting("save_on_cpu", "save-on-cpu", Kind::Switch, "What forward saves waits in pinned host memory (torch.autograd.graph.save_on_cpu)")
        .on(Topic::Kernels, Scope::ONE_CARD)
        .example("--save-on-cpu"),
    setting("kernels", "liger", Kind::Spelled(LIGER), "Liger's fused norms, rope, SwiGLU and linear cross entropy")
        .from("transformers 5.17's default")
        .on(Topic::Kernels, Scope::TORCH)
        .example("--liger"),
    setting("keep_outputs", "drop-outputs", Kind::Off, "The training loop lets go of the model's output before backward, as transformers' Trainer does")
        .from("a plain training loop keeps the output until backward is over")
        .on(Topic::Kernels, Scope::TORCH)
        .example("--drop-outputs"),
    setting("keep_loss", "keep-loss", Kind::Switch, "The training loop does not delete the loss: it is alive, with its graph, until the next one is there")
        .on(Topic::Kernels, Scope::ONE_CARD),
    setting("frozen", "freeze", Kind::Names, "Do not train these: embeddings, vision, first-N-layers, or parameters whose name starts so")
        .value("PARTS")
        .on(Topic::Kernels, Scope::TORCH)
        .example("--freeze embeddings"),
    setting("model_code", "model-code", Kind::Choice(&[
        ("transformers", ""),
        ("litgpt", "LitGPT 0.4.6 to 0.4.13"),
        ("litgpt-spring2024", "LitGPT 0.3 to 0.4.5"),
        ("litgpt-adapter", "LitGPT's finetune_adapter"),
        ("litgpt-adapter-v2", "LitGPT's finetune_adapter_v2"),
        ("torchtune", "torchtune 0.4 and 0.5"),
    ]), "Whose code the model is")
        .value("WHOSE")
        .from("transformers")
        .on(Topic::Kernels, Scope::ONE_CARD)
        .example("--model-code litgpt"),
    setting("attention", "flashattn", Kind::Spelled(FLASHATTN), "Another tool's word for flash attention, true or false")
        .on(Topic::Kernels, Scope::TORCH),
    setting("loss.kind", "fused-loss", Kind::Spelled(FUSED_LOSS), "Another tool's word for Liger's loss")
        .on(Topic::Kernels, Scope::ONE_CARD),
    setting("stack.load_full_model", "load-full-model", Kind::Spelled(NOTHING), "Another tool's word: parameters are counted from the config either way")
        .on(Topic::Kernels, Scope::TENSORS),
    setting("stack", "", Kind::Text, "Versions of the software: stack.torch, stack.transformers and so on")
        .from("the newest that the rules were checked against")
        .on(Topic::Hardware, Scope::TENSORS),
];

fn optimizers() -> Vec<String> {
    OptimizerKind::ALL.iter().map(|(kind, _)| kind.name()).collect()
}

const IMAGES: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let parts: Option<Vec<u64>> = text.split(['x', '×']).map(|part| part.trim().parse().ok()).collect();
        match parts.as_deref() {
            Some(sizes @ [_, _, _]) if sizes.iter().all(|size| (1..=1 << 16).contains(size)) => {
                Ok(tree::of("batch.images", json!(sizes)))
            }
            _ => Err("COUNTxHEIGHTxWIDTH, each from 1 to 65536, such as 2x448x448".into()),
        }
    },
    write: |plan| {
        let sizes = tree::get(plan, "batch.images")?.as_array()?;
        Some(sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join("x"))
    },
};

/// Words of `--precision`: the type of the weights and that of autocast.
const PRECISIONS: [(&str, &str, Option<&str>); 6] = [
    ("fp32", "fp32", None),
    ("bf16", "bf16", None),
    ("fp16", "fp16", None),
    ("bf16-mixed", "fp32", Some("bf16")),
    ("fp16-mixed", "fp32", Some("fp16")),
    ("bf16-autocast", "bf16", Some("bf16")),
];

const PRECISION: Spelling = Spelling {
    words: &["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-autocast"],
    bare: None,
    read: |text| {
        let plain = text.replace("bfloat16", "bf16").replace("float", "fp");
        let plain = match plain.as_str() {
            "amp-bf16" => "bf16-mixed",
            "amp-fp16" => "fp16-mixed",
            "f32" => "fp32",
            "f16" => "fp16",
            other => other,
        };
        let known = PRECISIONS.iter().find(|(word, ..)| *word == plain);
        known
            .map(|(_, weights, autocast)| json!({"weights": weights, "autocast": autocast}))
            .ok_or_else(|| "fp32, bf16, fp16, bf16-mixed, fp16-mixed or bf16-autocast".into())
    },
    write: |plan| {
        let (weights, autocast) = (plan.get("weights")?.as_str()?, plan.get("autocast")?.as_str());
        let known = PRECISIONS.iter().find(|(_, known, cast)| *known == weights && *cast == autocast);
        known.map(|(word, ..)| (*word).to_owned())
    },
};

const NORM: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match text.parse::<f64>() {
        Ok(norm) if (0.0..=f64::MAX).contains(&norm) => Ok(json!({"clip": norm > 0.0})),
        _ => Err("a number from 0 (no clipping) up".into()),
    },
    write: |_| None,
};

const CHECKPOINTS: Spelling = Spelling {
    words: &["full", "every-N", "reentrant", "offload", "selective", "selective-matmul", "off"],
    bare: Some("full"),
    read: |text| {
        let plain = json!({"every": 1, "reentrant": false, "offload": false, "selective": null});
        let with = |key: &str, value: Value| {
            let mut options = plain.clone();
            options[key] = value;
            Ok(json!({"checkpointing": "full", "checkpoints": options}))
        };
        match text {
            "off" | "none" | "false" => Ok(json!({"checkpointing": "off", "checkpoints": plain})),
            "full" | "true" => Ok(json!({"checkpointing": "full", "checkpoints": plain})),
            "reentrant" | "offload" => with(text, true.into()),
            "selective" => with("selective", "alternate-matmuls".into()),
            "selective-matmul" => with("selective", "matmuls".into()),
            _ => match text.strip_prefix("every-").map(str::parse::<u32>) {
                Some(Ok(every)) => with("every", every.into()),
                _ => Err("full, every-N, reentrant, offload, selective, selective-matmul or off".into()),
            },
        }
    },
    write: |plan| {
        let on = plan.get("checkpointing")?.as_str()? == "full";
        let options = plan.get("checkpoints")?;
        let is = |key: &str| options[key] == true;
        Some(match (on, options["selective"].as_str(), options["every"].as_u64()) {
            (false, ..) => "off".into(),
            (_, Some("matmuls"), _) => "selective-matmul".into(),
            (_, Some(_), _) => "selective".into(),
            _ if is("reentrant") => "reentrant".into(),
            _ if is("offload") => "offload".into(),
            (_, _, Some(every)) if every != 1 => format!("every-{every}"),
            _ => "full".into(),
        })
    },
};

const COMPILE: Spelling = Spelling {
    words: &["model", "reduce-overhead", "model-and-loss", "layers", "layers-and-loss", "off"],
    bare: Some("model"),
    read: |text| match text {
        "off" | "false" | "none" => Ok(json!({"torch_compile": null})),
        "model" | "true" => Ok(json!({"torch_compile": "model"})),
        "reduce-overhead" => Ok(json!({"torch_compile": "reduce-overhead"})),
        "model-and-loss" => Ok(json!({"torch_compile": "model-and-loss"})),
        "layers" | "per-layer" => Ok(json!({"torch_compile": "layers"})),
        "layers-and-loss" => Ok(json!({"torch_compile": "layers-and-loss"})),
        _ => Err("model, reduce-overhead, model-and-loss, layers, layers-and-loss or off".into()),
    },
    write: |plan| Some(plan.get("torch_compile")?.as_str()?.to_owned()),
};

const LOSS: Spelling = Spelling {
    words: &["standard", "chunked", "cce", "trl-fused", "liger"],
    bare: None,
    read: |text| match text {
        "standard" | "transformers" => Ok(json!({"loss": {"kind": "standard"}})),
        "chunked" | "trl-fused" => Ok(json!({"loss": {"kind": text}})),
        "cce" | "cut-cross-entropy" => Ok(json!({"loss": {"kind": "cut-cross-entropy"}})),
        "liger" | "fused-linear" => Ok(json!({"kernels": "liger", "loss": {"kind": "standard"}})),
        _ => Err("standard, chunked, cce, trl-fused or liger".into()),
    },
    write: |plan| {
        let kind = tree::get(plan, "loss.kind")?.as_str()?;
        Some(if kind == "cut-cross-entropy" { "cce".into() } else { kind.to_owned() })
    },
};

const EAGER: Spelling =
    Spelling { words: &["true"], bare: Some("true"), read: |_| Ok(json!({"attention": "eager"})), write: |_| None };

const LIGER: Spelling = Spelling {
    words: &["true"],
    bare: Some("true"),
    read: |_| Ok(json!({"kernels": "liger"})),
    write: |plan| (plan.get("kernels")? == "liger").then(|| "true".into()),
};

const FLASHATTN: Spelling = Spelling {
    words: &["true", "false"],
    bare: Some("true"),
    read: |text| match text {
        "true" => Ok(json!({"attention": "flash2"})),
        "false" => Ok(json!({"attention": "eager"})),
        _ => Err("true or false".into()),
    },
    write: |_| None,
};

const FUSED_LOSS: Spelling = Spelling {
    words: &["true", "false"],
    bare: Some("true"),
    read: |text| match text {
        "true" => Ok(json!({"kernels": "liger", "loss": {"kind": "standard"}})),
        "false" => Ok(json!({})),
        _ => Err("true or false".into()),
    },
    write: |_| None,
};

const NOTHING: Spelling =
    Spelling { words: &["true", "false"], bare: Some("true"), read: |_| Ok(json!({})), write: |_| None };
