//! Text encoders: BERT and its relatives.

use super::Family;

pub mod albert;
pub mod bert;
pub mod deberta_v2;
pub mod distilbert;
pub mod electra;
mod heads;
pub mod modernbert;
pub mod mpnet;
pub mod roberta;

pub(crate) use bert::counted_positions;

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &bert::FAMILY,
    &roberta::FAMILY,
    &roberta::XLM_ROBERTA,
    &roberta::CAMEMBERT,
    &electra::FAMILY,
    &albert::FAMILY,
    &distilbert::FAMILY,
    &mpnet::FAMILY,
    &deberta_v2::FAMILY,
    &modernbert::FAMILY,
];
