//! What surrounds the step in arguments of the Trainer and of TRL: evaluation, packing, what else there is between steps.

use super::reader::Reader;
use super::table::{Row, Sense};
use crate::plan::job::Generation;

/// Keys of the Trainer; they come before its others.
pub(super) const KEYS: &[Row] = &[
    Row("torch_empty_cache_steps", Sense::Whole("job.empty_cache_steps")),
    Row("auto_find_batch_size", Sense::Read("job.find_batch_size")),
    Row("resume_from_checkpoint", Sense::Read("job.resume")),
    Row(
        "eval_strategy evaluation_strategy do_eval per_device_eval_batch_size prediction_loss_only batch_eval_metrics \
         eval_accumulation_steps predict_with_generate generation_max_length generation_num_beams",
        Sense::Read("job.evaluation"),
    ),
];

/// Keys of TRL.
pub(super) const PACKING: &[Row] =
    &[Row("packing packing_strategy padding_free", Sense::Read("job.packing, job.padding_free"))];

/// Evaluation between steps, where a file asks for one, and what else the Trainer does around a step.
pub(super) fn around(reader: &mut Reader<'_>) {
    if reader.is_on("auto_find_batch_size") {
        reader.set("job.find_batch_size", true);
    }
    if reader.get("resume_from_checkpoint").is_some_and(|value| *value != false && *value != "" && *value != "false") {
        reader.set("job.resume", true);
    }
    evaluation(reader);
}

/// Evaluation between steps, with the Trainer's names.
pub(super) fn evaluation(reader: &mut Reader<'_>) {
    let strategies = ["eval_strategy", "evaluation_strategy"].map(|key| reader.text(key));
    let evaluates = strategies.into_iter().flatten().any(|strategy| strategy != "no") || reader.is_on("do_eval");
    // TrainingArguments' own.
    let samples = reader.number("per_device_eval_batch_size").unwrap_or(8);
    let loss_only = reader.is_on("prediction_loss_only");
    let by_batch = reader.is_on("batch_eval_metrics") && !loss_only;
    let every = reader.number("eval_accumulation_steps").filter(|_| !loss_only && !by_batch);
    let generates = reader.is_on("predict_with_generate") && !loss_only;
    let [longest, beams] = ["generation_max_length", "generation_num_beams"].map(|key| reader.number(key));
    if !evaluates {
        return;
    }
    reader.set("job.evaluation.batch_size", samples);
    if by_batch {
        reader.set("job.evaluation.by_batch", true);
    }
    if let Some(every) = every {
        reader.set("job.evaluation.accumulation_steps", every);
    }
    if generates {
        reader.set("job.evaluation.generation.max_length", longest.unwrap_or(Generation::default().max_length));
        beams.into_iter().for_each(|beams| reader.set("job.evaluation.generation.beams", beams));
    }
    match generates || by_batch || every.is_some() {
        true => reader.set("job.evaluation.metrics", true),
        false if loss_only => {}
        false => reader.notes.push(
            "evaluation: as without compute_metrics; a program that has one keeps predictions (job.evaluation.metrics)"
                .into(),
        ),
    }
}

/// How TRL joins samples.
pub(super) fn packing(reader: &mut Reader<'_>) {
    let strategy = reader.text("packing_strategy").unwrap_or("bfd");
    let (packs, flat) = (reader.is_on("packing"), reader.is_on("padding_free"));
    if packs && !["bfd", "bfd_split", "wrapped"].contains(&strategy) {
        reader.refuse("packing_strategy", strategy, "use bfd, bfd_split or wrapped");
    } else if packs {
        reader.set("job.packing", strategy);
    }
    // Packed rows that keep their ends imply it.
    if flat && (!packs || strategy == "wrapped") {
        reader.set("job.padding_free", true);
    }
}
