//! Settings of Megatron, under the names of its own arguments where it has them.

use serde_json::{Value, json};

use crate::ask::runner::{Runner, Scope};
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;

const M: Topic = Topic::Megatron;
const CORE: Scope = Scope::MEGATRON_CORE;
const OWN_FSDP: Scope = Runner::MegatronFsdp.alone();

/// Where its options stand.
const AT: &str = "parallel.engine.megatron";

pub(super) const ROWS: &[Setting] = &[
    setting("parallel.mesh.etp", "etp", Kind::Whole, "Tensor parallel inside routed experts").from("as tp").on(M, CORE),
    setting("parallel.engine.megatron.virtual_pipeline", "vpp", Kind::Whole, "Chunks of layers a pipeline rank holds: the interleaved schedule")
        .from("Megatron's default; a layout says it")
        .on(M, CORE)
        .example("--vpp 2 --pp 2 --gpus 2 --engine megatron --gradient-accumulation 4"),
    setting("parallel.mesh.sequence_parallel", "no-sequence-parallel", Kind::Off, "Activations between tensor-parallel parts whole on every rank")
        .from("on with tensor parallel, as Megatron-Bridge's recipes have it")
        .on(M, Scope::MEGATRON)
        .example("--no-sequence-parallel --tp 2 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.distributed_optimizer", "no-distributed-optimizer", Kind::Off, "States whole on every data-parallel rank")
        .from("Megatron-Bridge's default")
        .on(M, Runner::Megatron.alone())
        .example("--no-distributed-optimizer --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.main_gradients", "main-grads", Kind::Choice(&[("fp32", ""), ("bf16", "")]), "Sum and reduce gradients in this type")
        .value("TYPE")
        .from("Megatron's default")
        .on(M, CORE)
        .example("--main-grads bf16 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.precision_aware", "precision-aware-moments", Kind::Spelled(MOMENTS), "The precision-aware optimizer with moments in this type")
        .value("TYPE")
        .on(M, Runner::Megatron.alone())
        .example("--precision-aware-moments bf16 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.recompute", "recompute", Kind::Spelled(RECOMPUTE), "What is computed again in backward: uniform-N, block-N, or parts by name (core_attn, layernorm, moe_act, moe, mlp, shared_experts, mla_up_proj)")
        .value("WHAT")
        .on(M, Scope::MEGATRON)
        .example("--recompute uniform-1 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.cross_entropy", "cross-entropy", Kind::Choice(&[("unfused", "Megatron's own"), ("te", "Transformer Engine's")]), "Who computes the loss")
        .value("WHO")
        .from("Megatron-Bridge's default")
        .on(M, CORE)
        .example("--cross-entropy unfused --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.moe.capacity_percent", "moe-capacity-factor", Kind::Spelled(CAPACITY), "Pad every expert's tokens to this share of an even one (moe_expert_capacity_factor)")
        .value("FACTOR")
        .from("no token is dropped")
        .on(M, CORE),
    setting("parallel.engine.megatron.overlap_grad_reduce", "overlap-grad-reduce", Kind::Switch, "Gradients in buckets that are reduced during backward")
        .on(M, Runner::Megatron.alone())
        .example("--overlap-grad-reduce --gpus 6 --engine megatron"),
    setting("parallel.engine.megatron.gradient_accumulation_fusion", "no-gradient-accumulation-fusion", Kind::Off, "Weight gradients as tensors of their own before they are summed")
        .from("Megatron's default")
        .on(M, CORE)
        .example("--no-gradient-accumulation-fusion --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.make_vocab_size_divisible_by", "make-vocab-size-divisible-by", Kind::Whole, "Rows of the vocabulary are padded to a multiple of this times the tensor-parallel ranks")
        .from("Megatron's default")
        .on(M, Scope::MEGATRON)
        .example("--make-vocab-size-divisible-by 100000 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.fp8.recipe", "fp8", Kind::Choice(&[
        ("delayed", "one factor a tensor, from earlier steps"),
        ("tensorwise", "one factor a tensor, of the tensor itself"),
        ("blockwise", "a factor for every 1 x 128 values"),
        ("mxfp8", "a factor for every 32 values"),
    ]), "Products in fp8")
        .value("RECIPE")
        .on(M, CORE)
        .example("--fp8 delayed --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.fp8.param_gather", "fp8-param-gather", Kind::Switch, "Weights are fp8 themselves")
        .on(M, Runner::Megatron.alone())
        .example("--fp8-param-gather --fp8 delayed --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.fp8.weight_cache", "no-fp8-weight-cache", Kind::Off, "Make fp8 copies of bf16 weights for every micro-batch (disable_parameter_transpose_cache)")
        .from("Transformer Engine's default")
        .on(M, CORE)
        .example("--no-fp8-weight-cache --fp8 delayed --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.fp8.layers_at_start_in_bf16", "num-layers-at-start-in-bf16", Kind::Whole, "First layers that stay in bf16")
        .from("none")
        .on(M, CORE)
        .example("--num-layers-at-start-in-bf16 1 --fp8 tensorwise --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.fp8.layers_at_end_in_bf16", "num-layers-at-end-in-bf16", Kind::Whole, "Last layers that stay in bf16")
        .from("none")
        .on(M, CORE)
        .example("--num-layers-at-end-in-bf16 1 --fp8 tensorwise --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.mtp_layers", "mtp-num-layers", Kind::Whole, "Layers of multi-token prediction behind the last")
        .from("none")
        .on(M, Runner::Megatron.alone())
        .example("--mtp-num-layers 1 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.split.ends.first", "decoder-first-pipeline-num-layers", Kind::Whole, "Layers of the first pipeline stage; the others share the rest")
        .from("as many as the others")
        .on(M, Runner::Megatron.alone())
        .example("--decoder-first-pipeline-num-layers 2 --pp 2 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.split.ends.last", "decoder-last-pipeline-num-layers", Kind::Whole, "Layers of the last pipeline stage")
        .from("as many as the others")
        .on(M, Runner::Megatron.alone())
        .example("--decoder-last-pipeline-num-layers 2 --pp 2 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.split.counted.embedding", "account-for-embedding-in-pipeline-split", Kind::Switch, "Count the embedding as a layer when layers are dealt out")
        .on(M, Runner::Megatron.alone()),
    setting("parallel.engine.megatron.split.counted.loss", "account-for-loss-in-pipeline-split", Kind::Switch, "Count the loss as one")
        .on(M, Runner::Megatron.alone()),
    setting("parallel.engine.megatron.split.layout", "pipeline-layout", Kind::Text, "Which layers go where, as Et*3|(tt|)*29m|L (pipeline_model_parallel_layout)")
        .value("LAYOUT")
        .from("as many layers to each stage")
        .on(M, Runner::Megatron.alone()),
    setting("parallel.engine.megatron.optimizer_cpu_offload_percent", "optimizer-offload-fraction", Kind::Spelled(OFFLOADED), "The share of the optimizer's states on the host, 0 to 1 (optimizer_cpu_offload, with the precision-aware optimizer)")
        .value("SHARE")
        .from("none")
        .on(M, Runner::Megatron.alone())
        .example("--optimizer-offload-fraction 0.5 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.cp_comm", "cp-comm-type", Kind::Choice(&[("p2p", "a ring"), ("a2a", "over heads")]), "How context-parallel ranks exchange")
        .from("Megatron's default")
        .on(M, CORE)
        .example("--cp-comm-type a2a --cp 2 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.moe.router_fp32", "moe-router-fp32", Kind::Switch, "Score tokens for experts in fp32").on(M, CORE),
    setting("parallel.engine.megatron.moe.shared_expert_overlap", "moe-shared-expert-overlap", Kind::Switch, "Run shared experts beside the exchange of tokens").on(M, CORE),
    setting("parallel.engine.megatron.moe.dispatcher", "moe-token-dispatcher", Kind::Choice(&[("alltoall", ""), ("hybridep", "")]), "Who brings tokens to their experts")
        .value("WHO")
        .from("Megatron's default")
        .on(M, CORE),
    setting("parallel.engine.megatron.core", "megatron-core-minor", Kind::Whole, "Minor version of Megatron-Core 0")
        .from("the newest that the rules were checked against")
        .on(M, CORE),
    setting("parallel.engine.megatron.transformer_engine", "transformer-engine-minor", Kind::Whole, "Minor version of Transformer Engine 2")
        .from("the newest that the rules were checked against")
        .on(M, CORE),
    setting("parallel.engine.megatron.schedule", "pipeline-schedule", Kind::Choice(&[
        ("1f1b", "one forward, one backward"),
        ("zb-h1", "zero bubble, as much memory as 1F1B"),
        ("zb-h2", "zero bubble, up to twice as many micro-batches"),
    ]), "In which order micro-batches go through the stages")
        .value("NAME")
        .from("Megatron's default")
        .on(M, Runner::Megatron.alone())
        .example("--pipeline-schedule zb-h1 --pp 2 --gpus 2 --engine megatron --gradient-accumulation 4"),
    setting("parallel.engine.megatron.fsdp.strategy", "data-parallel-sharding-strategy", Kind::Choice(&[
        ("no_shard", ""),
        ("optim", ""),
        ("optim_grads", ""),
        ("optim_grads_params", ""),
    ]), "What Megatron-FSDP shards")
        .value("WHAT")
        .from("Megatron-Bridge's default")
        .on(M, OWN_FSDP)
        .example("--data-parallel-sharding-strategy optim --gpus 2 --engine megatron-fsdp"),
    setting("parallel.engine.megatron.fsdp.double_buffer", "fsdp-double-buffer", Kind::Switch, "Gather layers in two buffers that stay (Megatron-FSDP)")
        .on(M, OWN_FSDP)
        .example("--fsdp-double-buffer --gpus 2 --engine megatron-fsdp"),
    setting("parallel.engine.megatron.fsdp.communication_unit", "suggested-communication-unit-size", Kind::Whole, "Elements of gradients that may wait to be reduced; half as many are gathered ahead (Megatron-FSDP)")
        .from("1e9, or two layers")
        .on(M, OWN_FSDP)
        .example("--suggested-communication-unit-size 1000 --gpus 2 --engine megatron-fsdp"),
    setting("parallel.engine.megatron.cpu_offloading_layers", "cpu-offloading-num-layers", Kind::Whole, "What so many of the first layers keep for backward goes to the host (cpu_offloading)")
        .from("none")
        .on(M, CORE)
        .example("--cpu-offloading-num-layers 2 --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.partition_activations", "partition-activations", Kind::Switch, "Tensor-parallel ranks share what is kept for recompute (Megatron-DeepSpeed)")
        .on(M, Runner::MegatronDeepspeed.alone())
        .example("--partition-activations --recompute uniform-1 --tp 2 --gpus 2 --engine megatron-deepspeed"),
    setting("parallel.engine.megatron.lora.dim", "megatron-lora", Kind::Spelled(LORA), "Train adapters of this rank beside frozen linears, as Megatron-Bridge does")
        .value("DIM")
        .from("32 in Megatron-Bridge")
        .on(M, Runner::Megatron.alone())
        .example("--megatron-lora --gpus 2 --engine megatron"),
    setting("parallel.engine.megatron.lora.targets", "megatron-lora-targets", Kind::Names, "Which linears have adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2")
        .from("all, as in Megatron-Bridge")
        .on(M, Runner::Megatron.alone())
        .example("--megatron-lora-targets linear_qkv --megatron-lora --gpus 2 --engine megatron"),
];

fn at(plan: &Value, key: &str) -> Option<Value> {
    tree::get(plan, &format!("{AT}.{key}")).filter(|value| !value.is_null()).cloned()
}

fn put(key: &str, value: Value) -> Value {
    tree::of(&format!("{AT}.{key}"), value)
}

const MOMENTS: Spelling = Spelling {
    words: &["fp32", "bf16", "fp16"],
    bare: None,
    read: |text| match text {
        "fp32" | "bf16" | "fp16" => Ok(put("precision_aware", json!({"exp_avg": text, "exp_avg_sq": text}))),
        _ => Err("fp32, bf16 or fp16".into()),
    },
    write: |plan| Some(at(plan, "precision_aware.exp_avg")?.as_str()?.to_owned()),
};

/// Parts of a layer that Megatron can recompute by themselves.
const PARTS: [&str; 7] = ["core_attn", "layernorm", "moe_act", "moe", "mlp", "shared_experts", "mla_up_proj"];

const RECOMPUTE: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        for kind in ["uniform", "block"] {
            if let Some(count) = text.strip_prefix(kind).and_then(|rest| rest.strip_prefix('-')) {
                let count: u64 = count.parse().map_err(|_| format!("{kind}-N with a number of layers"))?;
                return Ok(put("recompute", json!({kind: count})));
            }
        }
        let parts: Vec<String> =
            text.split(',').map(|part| part.trim().replace('-', "_")).filter(|part| !part.is_empty()).collect();
        match parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
            Some(_) => Err(format!("uniform-N, block-N or parts of {}", PARTS.join(", "))),
            None => Ok(put("recompute", json!({"selective": parts}))),
        }
    },
    write: |plan| {
        let recompute = at(plan, "recompute")?;
        let (kind, value) = recompute.as_object()?.iter().next()?;
        match value.as_array() {
            Some(parts) => Some(parts.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",")),
            None => Some(format!("{kind}-{value}")),
        }
    },
};

const CAPACITY: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match text.parse::<f64>().map(|factor| (factor * 100.0).round()) {
        Ok(percent) if (1.0..=100_000.0).contains(&percent) => Ok(put("moe.capacity_percent", json!(percent as u64))),
        _ => Err("a number between 0.01 and 1000".into()),
    },
    write: |plan| Some(format!("{}", at(plan, "moe.capacity_percent")?.as_u64()? as f64 / 100.0)),
};

const OFFLOADED: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => {
            let mut tree = put("optimizer_cpu_offload_percent", json!((share * 100.0).round() as u64));
            // Megatron takes the offload only together with the precision-aware optimizer.
            tree::set(&mut tree, &format!("{AT}.precision_aware"), json!({}));
            Ok(tree)
        }
        _ => Err("between 0 and 1".into()),
    },
    write: |plan| Some(format!("{}", at(plan, "optimizer_cpu_offload_percent")?.as_u64()? as f64 / 100.0)),
};

const LORA: Spelling = Spelling {
    words: &[],
    bare: Some("32"),
    read: |text| match text.parse::<u64>() {
        Ok(dim) => Ok(put("lora.dim", dim.into())),
        Err(_) => Err("a rank".into()),
    },
    write: |plan| at(plan, "lora.dim").map(|dim| dim.to_string()),
};
