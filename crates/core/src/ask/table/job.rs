//! Settings of what surrounds a step: lengths, order, evaluation, loading, a limit.

use serde_json::{Value, json};

use crate::ask::runner::{Runner, Scope};
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;
use crate::plan::job::Lengths;
use crate::units::Bytes;

/// One card, or many that each see batches of their own.
const DEALT: Scope = Scope::ONE_CARD.and(Scope::DDP).and(Scope::FSDP).and(Runner::Deepspeed.alone());

const fn job(path: &'static str, flag: &'static str, kind: Kind, help: &'static str) -> Setting {
    setting(path, flag, kind, help).on(Topic::Job, Scope::ONE_CARD)
}

const fn dealt(path: &'static str, flag: &'static str, kind: Kind, help: &'static str) -> Setting {
    setting(path, flag, kind, help).on(Topic::Job, DEALT)
}

const fn whole(path: &'static str, flag: &'static str, kind: Kind, help: &'static str) -> Setting {
    setting(path, flag, kind, help).on(Topic::Job, Scope::ONE_CARD.and(Scope::DDP))
}

const fn sharded(path: &'static str, flag: &'static str, kind: Kind, help: &'static str) -> Setting {
    setting(path, flag, kind, help).on(Topic::Job, Scope::FSDP.and(Runner::Deepspeed.alone()))
}

pub(super) const ROWS: &[Setting] = &[
    dealt("job.lengths", "lengths", Kind::Spelled(LENGTHS), "How long samples are: a file of numbers, numbers, lognormal:MEAN,DEVIATION (of the logarithm), normal:MEAN,DEVIATION or uniform:FROM-TO; batches are padded to their longest, longer samples are cut at --seq-len")
        .value("FILE|HOW")
        .from("all as long as --seq-len says")
        .example("--lengths uniform:16-2048 --steps 4"),
    dealt("job.order", "sampler", Kind::Choice(&[
        ("shuffled", "drawn anew for every epoch"),
        ("sequential", "as in the data set"),
        ("grouped", "those of like length together (group_by_length)"),
    ]), "In which order samples come")
        .from("shuffled, as the Trainer does")
        .example("--sampler sequential --lengths uniform:16-2048 --steps 4"),
    dealt("job.packing", "packing", Kind::Choice(&[
        ("bfd", "best fit, the longest first; longer samples are cut (TRL's own choice)"),
        ("bfd_split", "the same; longer samples go on in other rows"),
        ("wrapped", "one after the other, cut where a row is full"),
    ]), "Join samples into rows of --seq-len tokens, as TRL does; the ends of samples are kept by bfd, whose batches are one long row")
        .from("samples are rows")
        .example("--packing bfd --lengths uniform:16-512 --steps 4"),
    dealt("job.padding_free", "padding-free", Kind::Switch, "The samples of a batch lie in one row, one after the other, without padding")
        .example("--padding-free --batch-size 4"),
    dealt("job.seed", "seed", Kind::Whole, "The seed of that order, and of lengths that are drawn")
        .from("42, the Trainer's")
        .example("--seed 7 --lengths uniform:16-2048 --steps 4"),
    dealt("job.steps", "steps", Kind::Whole, "Steps that are run; 0: the model is only loaded")
        .also(&["max-steps"])
        .from("an epoch of --lengths, at most 1000; else as many as settle the allocator")
        .example("--steps 0 --from-pretrained"),
    dealt("job.pad_to_multiple_of", "pad-to-multiple-of", Kind::Whole, "Batches are padded to a multiple of so many tokens")
        .example("--pad-to-multiple-of 512 --lengths uniform:16-2048 --steps 4"),
    dealt("job.empty_cache_steps", "empty-cache-steps", Kind::Whole, "Cached memory goes back to the driver after the forward pass of every so many steps")
        .also(&["torch-empty-cache-steps"])
        .example("--empty-cache-steps 1 --lengths uniform:16-2048 --steps 4"),
    dealt("job.evaluation.batch_size", "eval-batch-size", Kind::Whole, "Evaluate between steps, as the Trainer does, with so many samples at once")
        .also(&["per-device-eval-batch-size"])
        .from("no evaluation; 8 where another option asks for one")
        .example("--eval-batch-size 32"),
    dealt("job.evaluation.rows", "eval-rows", Kind::Whole, "Samples of the evaluation")
        .from("64")
        .example("--eval-rows 256 --eval-metrics"),
    dealt("job.evaluation.every", "eval-steps", Kind::Whole, "Evaluate after every so many steps")
        .from("after the last step")
        .example("--eval-steps 1 --eval-batch-size 32"),
    dealt("job.evaluation.metrics", "eval-metrics", Kind::Switch, "Predictions are kept for compute_metrics")
        .example("--eval-metrics --eval-batch-size 16"),
    dealt("job.evaluation.accumulation_steps", "eval-accumulation-steps", Kind::Whole, "Kept predictions go to the host after so many batches")
        .from("at the end")
        .example("--eval-accumulation-steps 1 --eval-metrics"),
    dealt("job.evaluation.by_batch", "batch-eval-metrics", Kind::Switch, "Metrics are computed batch by batch: no predictions are kept")
        .example("--batch-eval-metrics --eval-metrics --eval-batch-size 16"),
    dealt("job.evaluation.argmax", "eval-argmax", Kind::Switch, "Only the likeliest token of each place is kept (preprocess_logits_for_metrics)")
        .example("--eval-argmax --eval-metrics --eval-batch-size 16"),
    dealt("job.evaluation.skip_logits", "eval-skip-logits", Kind::Switch, "Liger's loss leaves logits out of the evaluation, too, as it does in training (its skip_logits)")
        .from("logits are made; left out by TRL's SFTTrainer, which passes skip_logits")
        .example("--eval-skip-logits --liger --eval-batch-size 64"),
    whole("job.evaluation.generation.max_length", "generation-max-length", Kind::Whole, "Evaluation generates sequences of so many tokens and keeps those, not logits (predict_with_generate); a prompt without an encoder is counted in")
        .also(&["eval-generate"])
        .from("nothing is generated")
        .example("--generation-max-length 70 --seq-len 64 --eval-metrics --eval-rows 8"),
    whole("job.evaluation.generation.beams", "generation-num-beams", Kind::Whole, "Beams of that generation")
        .from("1")
        .example("--generation-num-beams 2 --generation-max-length 70 --seq-len 64 --eval-metrics --eval-rows 8"),
    whole("job.resume", "resume", Kind::Switch, "The optimizer's state is read back before the first step (resume_from_checkpoint)")
        .also(&["resume-from-checkpoint"])
        .example("--resume"),
    sharded("job.saving.every", "save-steps", Kind::Whole, "Write a checkpoint after every so many steps")
        .from("none is written; after the last step where another option asks for one")
        .example("--save-steps 2 --state-dict full"),
    sharded("job.saving.state_dict", "state-dict", Kind::Choice(&[
        ("full", "whole matrices, gathered on the cards and copied to the host of rank 0"),
        ("sharded", "each card's own part"),
    ]), "What a checkpoint holds (FSDP's state_dict_type, ZeRO 3's stage3_gather_16bit_weights_on_model_save)")
        .also(&["state-dict-type"])
        .from("sharded")
        .example("--state-dict full --save-steps 2"),
    whole("job.find_batch_size", "auto-find-batch-size", Kind::Switch, "A run that fails for want of memory begins again with nine tenths of its batch")
        .example("--auto-find-batch-size --batch-size 64 --memory-limit 12"),
    whole("job.from_pretrained", "from-pretrained", Kind::Switch, "Weights come from a checkpoint: loading is part of the run")
        .example("--from-pretrained"),
    whole("job.device_map", "device-map", Kind::Choice(&[
        ("cuda", "straight onto the card; one block for all of them is taken first"),
        ("cpu", "onto the host, as pages of their file, and over to the card one by one"),
    ]), "Where weights of a checkpoint go first")
        .from("cuda")
        .example("--device-map cpu --from-pretrained"),
    job("job.merge", "merge", Kind::Switch, "Merge an adapter into the weights (merge_and_unload) instead of training it")
        .example("--merge --lora"),
    dealt("job.memory_limit", "memory-limit", Kind::Spelled(LIMIT), "The most that torch's allocator may take (set_per_process_memory_fraction): GiB, or a size with its unit")
        .value("GIB")
        .from("what the card has left")
        .example("--memory-limit 8"),
];

const LENGTHS: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let document = serde_json::from_str::<Value>(text).ok().filter(|value| !value.is_number());
        let lengths = match document {
            Some(Value::Array(all)) => json!({"samples": all}),
            Some(Value::Object(counts)) => json!({"histogram": counts}),
            _ => json!(Lengths::parse(text)?),
        };
        Ok(tree::of("job.lengths", lengths))
    },
    write: |plan| {
        let lengths: Lengths = crate::typed::read(tree::get(plan, "job.lengths")?.clone()).ok()?;
        lengths.written()
    },
};

const LIMIT: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let bare = |gib: f64| Some((gib * f64::from(1 << 30)) as u64);
        let bytes = text.trim().parse().map_or_else(|_| text.parse().ok().map(Bytes::get), bare);
        match bytes.filter(|bytes| (1..1 << 50).contains(bytes)) {
            Some(bytes) => Ok(tree::of("job.memory_limit", json!(bytes))),
            None => Err("a size: 23.5 and 23.5GiB are the same, 24GB is 22.35 GiB".into()),
        }
    },
    write: |plan| {
        let bytes = tree::get(plan, "job.memory_limit")?.as_u64()?;
        Some(format!("{}", bytes as f64 / f64::from(1 << 30)))
    },
};
