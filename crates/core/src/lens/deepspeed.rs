//! DeepSpeed's own estimators of model states.
//!
//! Source: DeepSpeed 0.19.8, `estimate_zero2_model_states_mem_needs` (runtime/zero/stage_1_and_2.py) and
//! `estimate_zero3_model_states_mem_needs` (runtime/zero/stage3.py); printed examples on its page "Memory Requirements".

use super::{EngineKind, Estimate, Facts, Method, Purpose, Question, Silent, silent};

/// Host memory is multiplied by this ("additional_buffer_factor").
const HOST_BUFFERS: f64 = 1.5;

/// Bytes on the host and on each card.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Needs {
    /// Of each node's host.
    pub host: f64,
    /// Of each card.
    pub card: f64,
}

/// ZeRO-2.
pub fn zero2(parameters: f64, cards_per_node: f64, nodes: f64, offload: bool) -> Needs {
    let cards = cards_per_node * nodes;
    if offload {
        Needs { card: 2.0 * parameters, host: parameters * (4.0 * cards).max(16.0) * HOST_BUFFERS }
    } else {
        let card = 2.0 * parameters + (18.0 * parameters / cards).floor();
        Needs { card, host: parameters * 4.0 * cards_per_node * HOST_BUFFERS }
    }
}

/// What ZeRO-3 keeps on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    Nothing,
    /// Optimizer states.
    Optimizer,
    /// Optimizer states and parameters.
    Both,
}

/// ZeRO-3. `zero_init`: the model is built in shards.
pub fn zero3(
    parameters: f64,
    largest: f64,
    cards_per_node: f64,
    nodes: f64,
    offload: Offload,
    zero_init: bool,
) -> Needs {
    let gathered = 4.0 * largest;
    let cards = cards_per_node * nodes;
    let on_host = |bytes: f64| {
        let whole = if zero_init { 0.0 } else { 4.0 * cards_per_node };
        parameters * whole.max(bytes / nodes) * HOST_BUFFERS
    };
    match offload {
        Offload::Both => Needs { card: gathered, host: on_host(18.0) },
        Offload::Optimizer => Needs { card: gathered + (2.0 * parameters / cards).floor(), host: on_host(16.0) },
        Offload::Nothing => {
            let built = if zero_init { largest } else { parameters };
            let card = gathered + (18.0 * parameters / cards).floor();
            Needs { card, host: built * 4.0 * cards_per_node * HOST_BUFFERS }
        }
    }
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    if question.purpose == Purpose::Infer {
        return silent("is about training");
    }
    if question.adapter.is_some() {
        return silent("knows no adapters");
    }
    let parameters = facts.parameters as f64;
    let cards = question.dp.max(1) as f64;
    let (needs, what) = match question.zero {
        3 => {
            let offload = match (question.offload_optimizer, question.offload_parameters) {
                (true, true) => Offload::Both,
                (true, false) => Offload::Optimizer,
                _ => Offload::Nothing,
            };
            (zero3(parameters, facts.largest_module as f64, cards, 1.0, offload, true), "model states under ZeRO-3")
        }
        2 => (zero2(parameters, cards, 1.0, question.offload_optimizer), "model states under ZeRO-2"),
        _ => return silent("has estimators for ZeRO-2 and ZeRO-3 only"),
    };
    let mut estimate = Estimate::new(Method::Deepspeed, vec![(what, needs.card)])
        .note("without activations; one node")
        .note(format!("host: {:.2} GiB", needs.host / super::GIB));
    if question.engine != EngineKind::Deepspeed {
        estimate = estimate.note("the run is not DeepSpeed's; the nearest stage is shown");
    }
    Ok(estimate)
}

#[cfg(test)]
mod tests {
    use super::super::GIB;
    use super::*;

    fn shown(needs: Needs) -> [String; 2] {
        [needs.host, needs.card].map(|bytes| format!("{:.2}", bytes / GIB))
    }

    /// Page "Memory Requirements", t5-3b (2851M parameters, 32M in the largest layer) on one node of 8 cards.
    #[test]
    fn t5_3b_as_printed() {
        let (parameters, largest) = (2_851_598_336.0, 32_899_072.0);
        let ask = |offload, zero_init| shown(zero3(parameters, largest, 8.0, 1.0, offload, zero_init));
        assert_eq!(ask(Offload::Both, true), ["71.71", "0.12"]);
        assert_eq!(ask(Offload::Both, false), ["127.48", "0.12"]);
        assert_eq!(ask(Offload::Optimizer, true), ["63.74", "0.79"]);
        assert_eq!(ask(Offload::Optimizer, false), ["127.48", "0.79"]);
        assert_eq!(ask(Offload::Nothing, true), ["1.47", "6.10"]);
        assert_eq!(ask(Offload::Nothing, false), ["127.48", "6.10"]);
        assert_eq!(shown(zero2(parameters, 8.0, 1.0, true)), ["127.48", "5.31"]);
        // The page prints 15.93, of an older 4 P + 16 P / N; the code of 0.19.8 returns this.
        assert_eq!(shown(zero2(parameters, 8.0, 1.0, false)), ["127.48", "11.29"]);
    }

    /// The same functions run on t5-small with one card.
    #[test]
    fn t5_small_as_computed_by_deepspeed() {
        let ask = |offload, zero_init| shown(zero3(60_506_624.0, 16_449_536.0, 1.0, 1.0, offload, zero_init));
        assert_eq!(ask(Offload::Both, true), ["1.52", "0.06"]);
        assert_eq!(ask(Offload::Optimizer, false), ["1.35", "0.17"]);
        assert_eq!(ask(Offload::Nothing, true), ["0.09", "1.08"]);
        assert_eq!(ask(Offload::Nothing, false), ["0.34", "1.08"]);
    }
}
