//! The mesh of cards: its axes and the rules on their sizes.

use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Faults};

/// Cards along each axis; their product is the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Mesh {
    /// Copies of the model (the replicated part of data parallel).
    pub dp_replicate: u64,
    /// Cards that share one copy's parameters, gradients or states.
    pub dp_shard: u64,
    /// Tensor parallel.
    pub tp: u64,
    /// Whether activations between tensor-parallel parts are split along the sequence (Megatron's sequence parallel).
    pub sequence_parallel: bool,
    /// Sequence parallel over heads (Ulysses).
    pub sp: u64,
    /// Context parallel.
    pub cp: u64,
    /// Expert parallel; its cards are also data-parallel ones.
    pub ep: u64,
    /// Tensor parallel inside routed experts; as `tp` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etp: Option<u64>,
    /// Pipeline parallel.
    pub pp: u64,
}

impl Default for Mesh {
    fn default() -> Self {
        Self { dp_replicate: 1, dp_shard: 1, tp: 1, sequence_parallel: false, sp: 1, cp: 1, ep: 1, etp: None, pp: 1 }
    }
}

/// The cards along one axis, among which a process talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// As a report names it.
    pub name: &'static str,
    /// How many there are.
    pub ranks: u64,
    /// Who talks to whom.
    pub traffic: Traffic,
}

/// Who talks to whom in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// Gathers, scatters and sums, which go round.
    Ring,
    /// Sends to the next and receives from the one before.
    Neighbours,
    /// Each sends each its part (all-to-all).
    Everyone,
}

/// The sizes of a model that an axis must divide; absent ones are not checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelSizes {
    /// Whether they are of a model at all; a plan may be looked at without one.
    pub known: bool,
    /// Attention heads.
    pub heads: Option<u64>,
    /// Heads of keys and values.
    pub kv_heads: Option<u64>,
    /// Layers.
    pub layers: Option<u64>,
    /// Routed experts.
    pub experts: Option<u64>,
    /// Tokens of a sequence.
    pub seq_len: Option<u64>,
}

impl ModelSizes {
    /// Read from a config (or its text part).
    pub fn of(config: &serde_json::Value, seq_len: u64) -> Self {
        let text = config.get("text_config").filter(|text| text.is_object()).unwrap_or(config);
        let read = |keys: &[&str]| keys.iter().find_map(|key| text.get(key)?.as_u64());
        let heads = read(&["num_attention_heads", "n_head", "n_heads", "num_heads"]);
        Self {
            known: true,
            heads,
            kv_heads: read(&["num_key_value_heads"]).or(heads),
            layers: read(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"]),
            experts: read(&["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"]),
            seq_len: (seq_len > 0).then_some(seq_len),
        }
    }

    /// Whether fewer key heads than tensor-parallel cards are copied (Megatron, vLLM), so that each card has one.
    pub(super) fn copies_keys(&self, tp: u64) -> bool {
        self.kv_heads.is_some_and(|heads| tp > heads && tp.is_multiple_of(heads.max(1)))
    }

    /// Whether the model has no routed experts.
    pub fn is_dense(&self) -> bool {
        self.known && self.experts.is_none()
    }
}

/// Larger worlds than any that exists are a slip of the pen.
const MAX_WORLD: u64 = 1 << 20;

impl Mesh {
    /// A world of data-parallel cards that share one copy.
    pub fn sharded(world: u64) -> Self {
        Self { dp_shard: world, ..Self::default() }
    }

    /// A world of copies.
    pub fn replicated(world: u64) -> Self {
        Self { dp_replicate: world, ..Self::default() }
    }

    /// How many cards there are.
    pub fn world(&self) -> u64 {
        self.axes().iter().fold(1, |product: u64, (size, _)| product.saturating_mul(*size))
    }

    /// Tensor-parallel ranks of a routed expert.
    pub fn expert_tp(&self) -> u64 {
        self.etp.unwrap_or(self.tp).max(1)
    }

    /// Ranks that hold the same routed experts: their data-parallel group.
    pub fn expert_data_parallel(&self) -> u64 {
        let all = self.dp_replicate.saturating_mul(self.dp_shard).saturating_mul(self.cp).saturating_mul(self.tp);
        all / self.ep.saturating_mul(self.expert_tp()).max(1)
    }

    /// The axes whose product is the world, by name.
    fn axes(&self) -> [(u64, &'static str); 6] {
        [
            (self.dp_replicate, DP_REPLICATE),
            (self.dp_shard, DP_SHARD),
            (self.tp, TP),
            (self.sp, SP),
            (self.cp, CP),
            (self.pp, PP),
        ]
    }

    /// Axes without a card.
    fn empty_axes(&self) -> impl Iterator<Item = &'static str> {
        let all = self.axes().into_iter().chain([(self.ep, EP), (self.etp.unwrap_or(1), ETP)]);
        all.filter(|(size, _)| *size == 0).map(|(_, path)| path)
    }

    pub(super) fn has_empty_axis(&self) -> bool {
        self.empty_axes().next().is_some()
    }

    /// The axes that split the model or its activations rather than the batch.
    pub fn model_axes(&self) -> [(u64, &'static str); 5] {
        [(self.tp, TP), (self.sp, SP), (self.cp, CP), (self.ep, EP), (self.pp, PP)]
    }

    /// NCCL's groups that a process is in, one for each axis along which there is someone else.
    pub fn groups(&self) -> Vec<Group> {
        let named = [
            (self.dp_replicate, "NCCL of the replicas", Traffic::Ring),
            (self.dp_shard, "NCCL of data parallel", Traffic::Ring),
            (self.tp, "NCCL of tensor parallel", Traffic::Ring),
            (self.sp, "NCCL of sequence parallel", Traffic::Everyone),
            (self.cp, "NCCL of context parallel", Traffic::Neighbours),
            (self.pp, "NCCL of the pipeline", Traffic::Neighbours),
            (self.ep, "NCCL of expert parallel", Traffic::Everyone),
        ];
        let used = named.into_iter().filter(|(ranks, _, _)| *ranks > 1);
        used.map(|(ranks, name, traffic)| Group { name, ranks, traffic }).collect()
    }

    /// Refuses axes that do not divide what they split.
    pub fn check(&self, sizes: &ModelSizes, faults: &mut Faults) {
        for path in self.empty_axes() {
            faults.add(Fault::value(path, 0, "at least 1").or_set(path, 1));
        }
        // Divisions by nothing say nothing.
        if self.has_empty_axis() {
            return;
        }
        let world = self.world();
        if world > MAX_WORLD {
            faults.add(Fault::value("parallel.gpus", world, format!("up to {MAX_WORLD} GPUs")));
            return;
        }
        // What does not divide the heads does not divide the fewer heads of keys either.
        match indivisible((TP, self.tp), ("", 1), "attention heads", sizes.heads) {
            Some(fault) => faults.add(fault),
            None if sizes.copies_keys(self.tp) => {}
            None => divides(faults, TP, self.tp, "key and value heads", sizes.kv_heads),
        }
        if self.sequence_parallel {
            divides(faults, TP, self.tp, "tokens of a sequence ({parallel.mesh.sequence_parallel})", sizes.seq_len);
        }
        divides(faults, SP, self.sp, "attention heads", sizes.heads);
        divides(faults, SP, self.sp, "tokens of a sequence", sizes.seq_len);
        if self.cp > 1 {
            // Two chunks a card, so that causal work is even.
            divides_with(faults, (CP, self.cp), (" x 2 chunks", 2), "tokens of a sequence", sizes.seq_len);
        }
        divides(faults, PP, self.pp, "layers", sizes.layers);
        if sizes.is_dense() {
            for (path, ranks) in [(EP, Some(self.ep).filter(|ep| *ep > 1)), (ETP, self.etp)] {
                let Some(ranks) = ranks else { continue };
                let problem = format!("{{{path}}} {ranks} on a model without routed experts");
                faults.add(Fault::new(path, problem).or_drop(path));
            }
        } else if self.ep > 1 {
            divides(faults, EP, self.ep, "experts", sizes.experts);
            let data = self.dp_replicate.saturating_mul(self.dp_shard).saturating_mul(self.cp).saturating_mul(self.tp);
            let by = self.etp.map_or(String::new(), |etp| format!(" x {{{ETP}}} {etp}"));
            let etp = self.etp.unwrap_or(1);
            divides_with(faults, (EP, self.ep), (&by, etp), "GPUs of dp x cp x tp", Some(data));
        }
        faults.when(self.sequence_parallel && self.tp == 1, || {
            let path = "parallel.mesh.sequence_parallel";
            Fault::new(path, "{parallel.mesh.sequence_parallel} without tensor parallel").or_drop(path).or_set(TP, 2)
        });
    }
}

/// Where the axes are in a plan.
const DP_REPLICATE: &str = "parallel.mesh.dp_replicate";
const DP_SHARD: &str = "parallel.mesh.dp_shard";
pub(super) const TP: &str = "parallel.mesh.tp";
const SP: &str = "parallel.mesh.sp";
pub(super) const CP: &str = "parallel.mesh.cp";
const EP: &str = "parallel.mesh.ep";
const ETP: &str = "parallel.mesh.etp";
pub(super) const PP: &str = "parallel.mesh.pp";

/// Refuses an axis that does not divide `whole`, with the nearest sizes that do.
pub(super) fn divides(faults: &mut Faults, path: &str, size: u64, what: &str, whole: Option<u64>) {
    divides_with(faults, (path, size), ("", 1), what, whole);
}

/// The same for an axis that something else multiplies.
pub(super) fn divides_with(faults: &mut Faults, axis: (&str, u64), times: (&str, u64), what: &str, whole: Option<u64>) {
    if let Some(fault) = indivisible(axis, times, what, whole) {
        faults.add(fault);
    }
}

/// What is wrong with an axis that does not divide `whole`.
pub(super) fn indivisible(
    (path, size): (&str, u64),
    (by, times): (&str, u64),
    what: &str,
    whole: Option<u64>,
) -> Option<Fault> {
    let fits = |size: u64, whole: u64| whole.is_multiple_of(size.saturating_mul(times).max(1));
    let whole = whole.filter(|whole| !fits(size, *whole))?;
    let below = (1..size.min(whole.saturating_add(1))).rev().find(|candidate| fits(*candidate, whole));
    let above = (size.saturating_add(1)..=whole / times.max(1)).find(|candidate| fits(*candidate, whole));
    let fault = Fault::new(path, format!("{{{path}}} {size}{by} does not divide {whole} {what}"));
    Some([below, above].into_iter().flatten().fold(fault, |fault, size| fault.or_set(path, size)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> ModelSizes {
        let known = true;
        ModelSizes { known, heads: Some(32), kv_heads: Some(8), layers: Some(30), experts: None, seq_len: Some(4096) }
    }

    fn refused(mesh: Mesh) -> Vec<String> {
        let mut faults = Faults::default();
        mesh.check(&llama(), &mut faults);
        faults.end().err().into_iter().flatten().map(|fault| fault.to_string()).collect()
    }

    #[test]
    fn refusals_name_numbers_and_neighbours() {
        assert_eq!(
            refused(Mesh { tp: 3, pp: 4, ..Mesh::default() }),
            [
                "parallel.mesh.tp 3 does not divide 32 attention heads; use parallel.mesh.tp = 2, or use parallel.mesh.tp = 4",
                "parallel.mesh.pp 4 does not divide 30 layers; use parallel.mesh.pp = 3, or use parallel.mesh.pp = 5",
            ]
        );
        assert!(refused(Mesh { ep: 2, ..Mesh::default() })[0].contains("without routed experts"));
        assert!(refused(Mesh { cp: 3, ..Mesh::default() })[0].contains("3 x 2 chunks does not divide 4096 tokens"));
        assert_eq!(refused(Mesh { tp: 0, pp: 0, ..Mesh::default() }).len(), 2, "and no divisions by nothing");
        assert!(refused(Mesh { tp: 16, ..Mesh::default() }).is_empty());
    }
}
