//! The mesh of cards: its axes and the rules on their sizes.

use serde::{Deserialize, Serialize};

use crate::plan::PlanError;

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
            heads,
            kv_heads: read(&["num_key_value_heads"]).or(heads),
            layers: read(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"]),
            experts: read(&["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"]),
            seq_len: (seq_len > 0).then_some(seq_len),
        }
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
            (self.dp_replicate, "dp_replicate"),
            (self.dp_shard, "dp_shard"),
            (self.tp, "tp"),
            (self.sp, "sp"),
            (self.cp, "cp"),
            (self.pp, "pp"),
        ]
    }

    /// The axes that split the model or its activations rather than the batch.
    pub fn model_axes(&self) -> [(u64, &'static str); 5] {
        [(self.tp, "tp"), (self.sp, "sp"), (self.cp, "cp"), (self.ep, "ep"), (self.pp, "pp")]
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

    /// Whether the axes multiply out to a world, with the nearest data-parallel size when not.
    pub fn check_world(&self, world: u64) -> Result<(), PlanError> {
        let product = self.world();
        if product == world {
            return Ok(());
        }
        let rest = product / self.dp_shard.max(1);
        let below = (world / rest.max(1)).max(1);
        let hint = match world % rest.max(1) {
            0 => format!("dp_shard {below} would fit"),
            _ => format!("the nearest worlds are {} and {}", below * rest, (below + 1) * rest),
        };
        Err(PlanError::Conflict { what: format!("{} is {product} GPUs, not {world}", self.written()), hint })
    }

    /// The axes in use, as a product.
    fn written(&self) -> String {
        let used: Vec<String> =
            self.axes().iter().filter(|(size, _)| *size > 1).map(|(size, name)| format!("{name} {size}")).collect();
        if used.is_empty() { "one GPU".to_owned() } else { used.join(" x ") }
    }

    /// Refuses axes that do not divide what they split.
    pub fn check(&self, sizes: &ModelSizes) -> Result<(), PlanError> {
        for (size, name) in self.axes().into_iter().chain([(self.ep, "ep"), (self.etp.unwrap_or(1), "etp")]) {
            if size == 0 {
                return Err(PlanError::BadValue { key: name.into(), value: "0".into(), expected: "at least 1".into() });
            }
        }
        if self.world() > MAX_WORLD {
            return Err(PlanError::BadValue {
                key: "mesh".into(),
                value: self.world().to_string(),
                expected: format!("up to {MAX_WORLD} GPUs"),
            });
        }
        divides("tp", self.tp, "attention heads", sizes.heads)?;
        // Fewer key heads than cards are copied (Megatron, vLLM): then the cards must divide by the heads.
        match sizes.kv_heads {
            Some(heads) if self.tp > heads && self.tp.is_multiple_of(heads.max(1)) => {}
            heads => divides("tp", self.tp, "key and value heads", heads)?,
        }
        if self.sequence_parallel {
            divides("tp", self.tp, "tokens of a sequence (sequence_parallel)", sizes.seq_len)?;
        }
        divides("sp", self.sp, "attention heads", sizes.heads)?;
        divides("sp", self.sp, "tokens of a sequence", sizes.seq_len)?;
        if self.cp > 1 {
            // Two chunks a card, so that causal work is even.
            divides("2 x cp", self.cp.saturating_mul(2), "tokens of a sequence", sizes.seq_len)?;
        }
        divides("pp", self.pp, "layers", sizes.layers)?;
        if self.ep > 1 {
            match sizes.experts {
                None => {
                    return Err(PlanError::Conflict {
                        what: format!("ep {} on a model without routed experts", self.ep),
                        hint: "drop it".into(),
                    });
                }
                experts => divides("ep", self.ep, "experts", experts)?,
            }
            let data = self.dp_replicate.saturating_mul(self.dp_shard).saturating_mul(self.cp).saturating_mul(self.tp);
            let experts = self.ep.saturating_mul(self.etp.unwrap_or(1));
            divides(if self.etp.is_some() { "ep x etp" } else { "ep" }, experts, "GPUs of dp x cp x tp", Some(data))?;
        }
        if self.etp.is_some() && sizes.experts.is_none() {
            return Err(PlanError::Conflict {
                what: format!("etp {} on a model without routed experts", self.expert_tp()),
                hint: "drop it".into(),
            });
        }
        if self.sequence_parallel && self.tp == 1 {
            return Err(PlanError::Conflict {
                what: "sequence_parallel without tensor parallel".into(),
                hint: "set tp to 2 or more".into(),
            });
        }
        Ok(())
    }
}

/// Refuses an axis that does not divide `whole`, with the nearest sizes that do.
pub(super) fn divides(axis: &str, size: u64, what: &str, whole: Option<u64>) -> Result<(), PlanError> {
    let Some(whole) = whole.filter(|whole| size > 1 && whole % size != 0) else { return Ok(()) };
    let below = (1..size.min(whole + 1)).rev().find(|candidate| whole % candidate == 0);
    let above = (size.saturating_add(1)..=whole).find(|candidate| whole % candidate == 0);
    let nearest: Vec<String> = [below, above].into_iter().flatten().map(|size| size.to_string()).collect();
    Err(PlanError::Conflict {
        what: format!("{axis} {size} does not divide {whole} {what}"),
        hint: format!("the nearest that do are {}", nearest.join(" and ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> ModelSizes {
        ModelSizes { heads: Some(32), kv_heads: Some(8), layers: Some(30), experts: None, seq_len: Some(4096) }
    }

    #[test]
    fn refusals_name_numbers_and_neighbours() {
        let refused = |mesh: Mesh| mesh.check(&llama()).unwrap_err().to_string();
        assert_eq!(
            refused(Mesh { tp: 3, ..Mesh::default() }),
            "tp 3 does not divide 32 attention heads; the nearest that do are 2 and 4"
        );
        assert_eq!(
            refused(Mesh { pp: 4, ..Mesh::default() }),
            "pp 4 does not divide 30 layers; the nearest that do are 3 and 5"
        );
        assert!(refused(Mesh { ep: 2, ..Mesh::default() }).contains("without routed experts"));
        assert!(Mesh { tp: 16, ..Mesh::default() }.check(&llama()).is_ok());
    }

    #[test]
    fn worlds_must_multiply_out() {
        let mesh = Mesh { dp_shard: 4, tp: 2, ..Mesh::default() };
        assert!(mesh.check_world(8).is_ok());
        let text = mesh.check_world(16).unwrap_err().to_string();
        assert_eq!(text, "dp_shard 4 x tp 2 is 8 GPUs, not 16; dp_shard 8 would fit");
        assert!(mesh.check_world(9).unwrap_err().to_string().contains("8 and 10"));
    }
}
