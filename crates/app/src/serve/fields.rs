//! From what a message says is at fault to the place in a request's body.

use crate::cli::Place;

/// Options as messages spell them, and where they stand in a body.
const OPTIONS: &[(&str, &str)] = &[
    ("batch-size", "/plan/batch/batch_size"),
    ("seq-len", "/plan/batch/seq_len"),
    ("prompt", "/plan/batch/seq_len"),
    ("new-tokens", "/plan/new_tokens"),
    ("beams", "/plan/beams"),
    ("gradient-accumulation", "/plan/gradient_accumulation"),
    ("weights", "/plan/weights"),
    ("optimizer-rank", "/plan/optimizer/rank"),
    ("gradient-checkpointing", "/plan/checkpoints/every"),
    ("loss-chunks", "/plan/loss/chunks"),
    ("lora rank", "/plan/adapter/rank"),
    ("lora dropout", "/plan/adapter/dropout"),
    ("vera rank", "/plan/adapter/rank"),
    ("oft_block_size", "/plan/adapter/block_size"),
    ("target_modules", "/plan/adapter/targets"),
    ("target_parameters", "/plan/adapter/target_parameters"),
    ("quantization", "/plan/quantization"),
    ("quantization block size", "/plan/quantization/block_size"),
    ("quantization compute type", "/plan/quantization/compute"),
    ("int8 threshold", "/plan/quantization/threshold"),
    ("framework", "/framework"),
    ("gpu", "/gpu"),
    ("plan", "/plan"),
    ("mesh", "/plan/parallel/mesh"),
    ("dp_replicate", "/plan/parallel/mesh/dp_replicate"),
    ("dp_shard", "/plan/parallel/mesh/dp_shard"),
    ("tp", "/plan/parallel/mesh/tp"),
    ("sp", "/plan/parallel/mesh/sp"),
    ("cp", "/plan/parallel/mesh/cp"),
    ("2", "/plan/parallel/mesh/cp"),
    ("pp", "/plan/parallel/mesh/pp"),
    ("ep", "/plan/parallel/mesh/ep"),
    ("etp", "/plan/parallel/mesh/etp"),
    ("sequence_parallel", "/plan/parallel/mesh/sequence_parallel"),
    ("zero", "/plan/parallel/engine/deepspeed/zero/stage"),
    ("main_gradients", "/plan/parallel/engine/megatron/main_gradients"),
    ("make_vocab_size_divisible_by", "/plan/parallel/engine/megatron/make_vocab_size_divisible_by"),
    ("recompute.uniform", "/plan/parallel/engine/megatron/recompute"),
    ("recompute_num_layers", "/plan/parallel/engine/megatron/recompute"),
];

/// The JSON pointer of a place, where it is known.
pub(crate) fn pointer(place: &Place) -> Option<String> {
    match place {
        Place::Model => Some("/model".into()),
        Place::Request(pointer) => Some(pointer.clone()),
        Place::Plan(pointer) => Some(format!("/plan{pointer}")),
        Place::Config(path) if path.is_empty() => Some("/config".into()),
        Place::Config(path) => Some(format!("/config/{}", path.replace('.', "/"))),
        Place::Option(name) => OPTIONS.iter().find(|(known, _)| known == name).map(|(_, at)| (*at).to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        assert_eq!(pointer(&Place::Option("tp".into())).as_deref(), Some("/plan/parallel/mesh/tp"));
        assert_eq!(pointer(&Place::Plan("/batch".into())).as_deref(), Some("/plan/batch"));
        assert_eq!(pointer(&Place::Config("a.b".into())).as_deref(), Some("/config/a/b"));
        assert_eq!(pointer(&Place::Option("whatever".into())), None);
    }
}
