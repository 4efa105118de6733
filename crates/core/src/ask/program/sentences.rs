//! sentence-transformers' losses (6.0: sentence_transformer/losses, cross_encoder/losses) and the tasks they are.

use serde_json::json;

use super::{Call, argument, find, name, unknown};
use crate::ask::file::Content;
use crate::ask::tree;
use crate::plan::{Fault, TaskKind};
use crate::source::python::Program;

/// A loss, the task that it is simulated as, and how many texts each sample has where that is not the task's own.
const LOSSES: [(&str, TaskKind, Option<u64>); 5] = [
    ("MultipleNegativesRankingLoss", TaskKind::Mnrl, None),
    ("CachedMultipleNegativesRankingLoss", TaskKind::CachedMnrl, None),
    ("TripletLoss", TaskKind::Triplet, None),
    ("BinaryCrossEntropyLoss", TaskKind::CrossEncoder, None),
    ("MultiVectorMultipleNegativesRankingLoss", TaskKind::Colbert, None),
];

/// Losses that compare the same embeddings by less than all with all: a number for each sample.
const KIN: [(&str, TaskKind, Option<u64>); 9] = [
    ("CosineSimilarityLoss", TaskKind::Mnrl, None),
    ("CoSENTLoss", TaskKind::Mnrl, None),
    ("AnglELoss", TaskKind::Mnrl, None),
    ("ContrastiveLoss", TaskKind::Mnrl, None),
    ("OnlineContrastiveLoss", TaskKind::Mnrl, None),
    ("SoftmaxLoss", TaskKind::Mnrl, None),
    ("MultipleNegativesSymmetricRankingLoss", TaskKind::Mnrl, None),
    ("MarginMSELoss", TaskKind::Mnrl, Some(3)),
    ("DistillKLDivLoss", TaskKind::Mnrl, Some(3)),
];

/// Those of a `CrossEncoder` with a score for each pair, as the known one of it.
const SCORES: [&str; 2] = ["CrossEntropyLoss", "MSELoss"];

/// Losses around another one that run it on parts of the same embeddings, and those that need more of the model.
const AROUND: [&str; 1] = ["MatryoshkaLoss"];
const DEEPER: [&str; 2] = ["AdaptiveLayerLoss", "Matryoshka2dLoss"];

/// The task of a program's loss, laid into its content; whether it has one.
pub(super) fn lay(program: &Program, config: &Call, content: &mut Content) -> Result<bool, Vec<Fault>> {
    let named = |wanted: &str| find(program, |name| name == wanted);
    let class = name(config);
    let sentences = ["SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVector"];
    let sentence = sentences.iter().any(|start| class.starts_with(start));
    let own = || LOSSES.iter().rev().find(|(loss, ..)| named(loss).is_some());
    let pairs = || KIN.iter().find(|(loss, ..)| named(loss).is_some());
    let scores = || SCORES.iter().find(|loss| class.starts_with("CrossEncoder") && named(loss).is_some());
    let (loss, task, texts, stands) = match (own(), pairs(), scores()) {
        (Some(found), ..) => (found.0, found.1, found.2, false),
        (_, Some(found), _) if !class.starts_with("CrossEncoder") => (found.0, found.1, found.2, true),
        (.., Some(loss)) => (*loss, TaskKind::CrossEncoder, None, true),
        _ if sentence => {
            let known: Vec<&str> = LOSSES.iter().chain(&KIN).map(|(loss, ..)| *loss).collect();
            let fault = Fault::new("", "its loss is none that is simulated");
            return Err(vec![fault.or(format!("known are {}", known.join(", ")))]);
        }
        _ => return Ok(false),
    };
    // `SentenceTransformer(modules=[…])`: a transformer among them is the model.
    if content.model.is_none() {
        content.model =
            named("Transformer").and_then(|call| argument(call, &super::NAMES)?.as_str()).map(str::to_owned);
    }
    if content.model.is_none() && content.config.is_none() {
        let fault =
            Fault::new("", "its model is put together of modules, none of which is a transformer that is known");
        return Err(vec![fault.or("`vramcast learn` records one's own")]);
    }
    if let Some(deeper) = DEEPER.iter().find(|loss| named(loss).is_some()) {
        let fault = Fault::unsupported("", format!("{deeper}, which compares every layer's embeddings,"));
        return Err(vec![fault.or(format!("{loss} alone is"))]);
    }
    let mut say = |what: String| content.notes.push(format!("not simulated: {what}"));
    if stands {
        let instead = if task == TaskKind::CrossEncoder { "a score for each pair" } else { "all with all of a batch" };
        say(format!("{loss}: its few numbers; {instead} is compared in their place"));
    }
    AROUND.iter().filter(|around| named(around).is_some()).for_each(|around| {
        say(format!("{around}: {loss} is simulated once, on whole embeddings"));
    });
    let others = LOSSES.iter().chain(&KIN).map(|(other, ..)| *other).filter(|other| named(other).is_some());
    let others: Vec<&str> = others.filter(|other| *other != loss).collect();
    if !others.is_empty() {
        say(format!("{}, by turns with {loss}: the latter is", others.join(", ")));
    }
    // The Trainer evaluates by the same loss, without a graph.
    if tree::take(&mut content.tree, "job.evaluation").is_some() {
        content.notes.push("not simulated: evaluation: it runs without a graph, on its own batches".into());
    }
    tree::set(&mut content.tree, "objective.kind", json!(task.name()));
    if let Some(texts) = texts {
        tree::set(&mut content.tree, "objective.texts", json!(texts));
    }
    // `CachedMultipleNegativesRankingLoss(model, scale, similarity_fct, mini_batch_size, …)`.
    let cached = named(loss).filter(|_| task == TaskKind::CachedMnrl);
    if let Some(size) = cached.and_then(|call| argument(call, &["mini_batch_size", "3"])) {
        if let Some(fault) = unknown("mini_batch_size", size) {
            return Err(vec![fault]);
        }
        tree::set(&mut content.tree, "objective.mini_batch_size", size.clone());
    }
    Ok(true)
}
