//! `accelerate estimate-memory`: the size of a model without its head, and four (or two) times it to train.
//!
//! Source: accelerate 1.15.0, commands/estimate.py; printed example for bert-base-cased on the page "Model memory
//! estimator".

use super::{Estimate, Facts, Method, Purpose, Question, Silent, silent};

/// One row of its table, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The largest layer, which is not split.
    pub largest_layer: f64,
    /// The whole model.
    pub total: f64,
    /// Training with Adam; `None` where it prints N/A.
    pub training: Option<f64>,
}

/// The row for weights of so many bytes each (4, 2, 1 or 0.5), from the sizes in fp32.
pub fn row(total_fp32: f64, largest_fp32: f64, bytes: f64) -> Row {
    let share = bytes / 4.0;
    let training = match bytes {
        4.0 => Some(total_fp32 * 4.0),
        // The largest of model (1), gradients (1.5) and optimizer (2).
        2.0 => Some(total_fp32 * 2.0),
        _ => None,
    };
    Row { largest_layer: largest_fp32 * share, total: total_fp32 * share, training }
}

/// Sizes as it prints them: two digits at most, in the largest unit that leaves 1 or more.
pub fn shown(mut bytes: f64) -> String {
    for unit in ["bytes", "KB", "MB", "GB", "TB"] {
        if bytes < 1024.0 {
            let text = format!("{bytes:.2}");
            let text = text.strip_suffix('0').unwrap_or(&text);
            return format!("{text} {unit}");
        }
        bytes /= 1024.0;
    }
    format!("{bytes:.2} PB")
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    if question.adapter.is_some() {
        return silent("knows no adapters");
    }
    let (total, largest) = facts.headless;
    let row = row(total as f64 * 4.0, largest as f64 * 4.0, question.weight_bytes);
    let estimate = match question.purpose {
        Purpose::Infer => Estimate::new(Method::Accelerate, vec![("model", row.total)]),
        Purpose::Train => {
            // Mixed precision is its float16 row.
            let training = if question.mixed { Some(total as f64 * 8.0) } else { row.training };
            let Some(training) = training else { return silent("prints N/A for training in this type") };
            Estimate::new(Method::Accelerate, vec![("training using Adam", training)])
        }
    };
    Ok(estimate.note("the model without its head, one card, no activations"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page "Model memory estimator": bert-base-cased, 108,310,272 parameters and 4 KiB each of position and token type ids; its largest
    /// layer is the embedding of 28,996 words. float32's total is printed as 418.18 MB, but twice float16's 206.59 and a
    /// quarter of its own 1.61 GB are 413.18.
    #[test]
    fn bert_base_cased_as_printed() {
        let (total, largest) = (108_310_272.0 * 4.0 + 8192.0, 28_996.0 * 768.0 * 4.0);
        let printed = |bytes: f64| {
            let row = row(total, largest, bytes);
            [shown(row.largest_layer), shown(row.total), row.training.map_or("N/A".into(), shown)]
        };
        assert_eq!(printed(4.0), ["84.95 MB", "413.18 MB", "1.61 GB"]);
        assert_eq!(printed(2.0), ["42.47 MB", "206.59 MB", "826.36 MB"]);
        assert_eq!(printed(1.0), ["21.24 MB", "103.29 MB", "N/A"]);
        assert_eq!(printed(0.5), ["10.62 MB", "51.65 MB", "N/A"]);
    }
}
