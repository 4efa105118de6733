//! The keys of a recorded run (`run` of truth/ledger/FORMAT.md) and where a plan has them: one table, read both ways.

use serde_json::{Map, Value};

/// A key of a run, and the path of the plan that means the same.
pub(super) struct Key {
    run: &'static str,
    plan: &'static str,
    /// Values that the two spell differently; all others are the same. Of several for one, the first is written.
    words: &'static [(&'static str, &'static str)],
    /// Whether the probe's program knows the key.
    probed: bool,
}

/// A key that the probe's program knows, too.
const fn probed(run: &'static str, plan: &'static str, words: &'static [(&'static str, &'static str)]) -> Key {
    Key { run, plan, words, probed: true }
}

/// A key of the ledger alone.
const fn ledger(run: &'static str, plan: &'static str, words: &'static [(&'static str, &'static str)]) -> Key {
    Key { run, plan, words, probed: false }
}

/// Of every run.
pub(super) const ANY: &[Key] = &[
    probed("batch", "batch.batch_size", &[]),
    probed("seq", "batch.seq_len", &[]),
    probed("target_seq", "batch.target_len", &[]),
    probed("mask", "batch.mask", &[]),
    probed("weights", "weights", &[]),
    probed("attn", "attention", &[("flash_attention_2", "flash2"), ("flex_attention", "flex")]),
];

/// Of training.
pub(super) const TRAINING: &[Key] = &[
    probed("autocast", "autocast", &[]),
    probed("checkpointing", "checkpointing", &[("true", "full"), ("false", "off")]),
    probed("reentrant", "checkpoints.reentrant", &[]),
    probed("optimizer", "optimizer.kind", &[]),
    probed("impl", "optimizer.implementation", &[]),
    probed("grad_accum", "gradient_accumulation", &[]),
    probed("clip", "clip", &[("true", "true"), ("value", "true"), ("forloop", "true")]),
    probed("keep_outputs", "keep_outputs", &[]),
    probed("liger", "kernels", &[("true", "liger"), ("false", "transformers")]),
    ledger("grad_dtype", "gradients", &[]),
    ledger("state_dtype", "optimizer.state", &[]),
    ledger("rank", "optimizer.rank", &[]),
    ledger("master_weights", "optimizer.master_weights", &[]),
    ledger("opt_in_backward", "optimizer_in_backward", &[]),
    ledger("sdpa_kernel", "sdpa_kernel", &[]),
    ledger("selective", "checkpoints.selective", &[("matmul", "matmuls"), ("torchtitan", "alternate-matmuls")]),
    ledger("every", "checkpoints.every", &[]),
    ledger("save_on_cpu", "save_on_cpu", &[]),
    ledger("loss", "loss.kind", &[("cce", "cut-cross-entropy")]),
    ledger("chunks", "loss.chunks", &[]),
    ledger("padded", "batch.padded", &[]),
    ledger("frozen", "frozen", &[]),
    ledger("model_code", "model_code", &[]),
    ledger("compile", "torch_compile", &[]),
    ledger("float8", "float8", &[]),
];

/// Of generation.
pub(super) const GENERATION: &[Key] = &[
    probed("new_tokens", "new_tokens", &[]),
    probed("beams", "beams", &[]),
    ledger("sample", "choice", &[("true", "sample"), ("false", "greedy")]),
    ledger("assistant", "assistant", &[]),
    ledger("prompt_lookup", "prompt_lookup", &[]),
    ledger("accepted", "accepted", &[]),
];

/// `run.cache_config`, of a quantised cache.
pub(super) const CACHE: &[Key] = &[
    probed("backend", "backend", &[]),
    probed("nbits", "bits", &[]),
    probed("q_group_size", "group_size", &[]),
    probed("residual_length", "residual_length", &[]),
];

/// `run.dist` of the engines, under the engine's own options.
pub(super) const DDP: &[Key] =
    &[probed("bucket_view", "gradient_as_bucket_view", &[]), probed("static_graph", "static_graph", &[])];

/// Of FSDP1.
pub(super) const FSDP1: &[Key] = &[
    probed(
        "strategy",
        "strategy",
        &[("full", "full"), ("hybrid", "full"), ("grad_op", "grad-op"), ("hybrid_grad_op", "grad-op")],
    ),
    ledger("wrap", "wrap", &[]),
    ledger("offload", "offload", &[]),
    ledger("ignored", "ignored", &[]),
    ledger("backward_prefetch", "backward_prefetch", &[]),
    ledger("forward_prefetch", "forward_prefetch", &[]),
    ledger("orig_params", "flat_params", &[("true", "false"), ("false", "true")]),
];

/// Of `fully_shard`, with all that may stand beside it in a mesh.
pub(super) const FSDP2: &[Key] = &[
    probed("reshard", "reshard_after_forward", &[]),
    ledger("reshard", "reshard_root", &[]),
    ledger("reshard_root", "reshard_root", &[]),
    ledger("offload", "offload", &[]),
    ledger("ignored", "ignored", &[]),
    ledger("float8_gather", "float8_gather", &[]),
    ledger("form", "tensor.form", &[]),
    ledger("loss_parallel", "tensor.loss_parallel", &[]),
    ledger(
        "schedule",
        "pipeline.schedule",
        &[
            ("1F1B", "1f1b"),
            ("GPipe", "gpipe"),
            ("Interleaved1F1B", "interleaved-1f1b"),
            ("LoopedBFS", "looped-bfs"),
            ("InterleavedZeroBubble", "interleaved-zero-bubble"),
            ("ZBVZeroBubble", "zbv-zero-bubble"),
        ],
    ),
    ledger("stages_per_rank", "pipeline.stages_per_rank", &[]),
    ledger("rotate", "context.rotate", &[]),
    ledger("load_balance", "context.load_balance", &[]),
    ledger("pp_rank", "rank.pp", &[]),
    ledger("cp_rank", "rank.cp", &[]),
];

/// Of tensor parallel alone.
pub(super) const TENSOR: &[Key] = &[ledger("form", "form", &[]), ledger("loss_parallel", "loss_parallel", &[])];

/// Writes what a run says into a plan.
pub(super) fn read(keys: &[Key], run: &Value, plan: &mut Value) {
    for key in keys {
        let value = &run[key.run];
        if !value.is_null() {
            put(plan, key.plan, translated(value, key.words.iter().copied()));
        }
    }
}

/// What a plan says, in the keys that the probe's program knows.
pub(super) fn write(keys: &[Key], plan: &Value) -> Map<String, Value> {
    let known = keys.iter().filter(|key| key.probed);
    let written = known.filter_map(|key| {
        let value = key.plan.split('.').try_fold(plan, |value, part| value.get(part))?;
        let words = key.words.iter().map(|(run, plan)| (*plan, *run));
        (!value.is_null()).then(|| (key.run.to_owned(), translated(value, words)))
    });
    written.collect()
}

/// Sets a value by its path; sections that are not there yet are made.
pub(super) fn put(tree: &mut Value, path: &str, value: Value) {
    let place = path.split('.').fold(tree, |place, part| {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        &mut place[part]
    });
    *place = value;
}

fn translated(value: &Value, mut words: impl Iterator<Item = (&'static str, &'static str)>) -> Value {
    let word = match value {
        Value::String(text) => text.clone(),
        Value::Bool(flag) => flag.to_string(),
        _ => return value.clone(),
    };
    match words.find(|(from, _)| *from == word) {
        Some((_, "true")) => true.into(),
        Some((_, "false")) => false.into(),
        Some((_, to)) => to.into(),
        None => value.clone(),
    }
}
