//! A decoder as Megatron has it: what each layer adds to the residual stream, in operations that Megatron and Transformer
//! Engine have a kernel for. [`super::read`] makes it of a model's program.

use crate::plan::PlanError;
use crate::plan::parallel::megatron::{Fp8, Megatron};

/// A decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Architecture {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the vocabulary, without padding.
    pub vocabulary: u64,
    /// Whether the head is the embedding's table.
    pub tied: bool,
    /// Whether the embedding is multiplied by a number.
    pub scaled_embedding: bool,
    /// Whether the logits are.
    pub scaled_logits: bool,
    /// The norm behind the last layer.
    pub norm: Norm,
    /// Layers, in order.
    pub layers: Vec<Layer>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its module in the program.
    pub module: u32,
    /// Whether its products are in fp8.
    pub fp8: bool,
    /// What is added to the residual stream, one after the other.
    pub branches: Vec<Branch>,
}

/// What runs on the residual stream and is added to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branch(pub Vec<Op>);

/// An operation of a branch: one or a few of the program's, as far as one of Megatron's modules takes them together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// A norm that stands alone.
    Norm(Norm),
    /// Linears on one value side by side, with the norm before them: split by their outputs.
    Column(Column),
    /// Norms of queries and keys, over a head or over all of them: the widths of their scales.
    HeadNorms([u64; 2]),
    /// The rotation of queries and keys, of so many dimensions of a head.
    Rotary(u64),
    /// The attention kernel on the heads that a [`Op::Column`] made.
    Attention(Grouped),
    /// An activation, on its own or times the other half.
    Activation {
        /// Whether there is another half.
        gated: bool,
    },
    /// The linear at the end of a branch: split by its inputs.
    Row(Row),
    /// Latent attention.
    Latent(Latent),
    /// Routed experts.
    Mixture(Mixture),
    /// A product with a number.
    Scale,
    /// Dropout, which keeps its mask.
    Dropout,
}

impl Op {
    fn name(&self) -> &'static str {
        match self {
            Self::Latent(_) => "latent attention",
            Self::Mixture(_) => "routed experts",
            _ => "layers without a norm at their start",
        }
    }
}

/// The norms that Transformer Engine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// A scale.
    Rms,
    /// A scale and a shift.
    Layer,
}

impl Norm {
    /// Vectors it holds.
    pub fn vectors(self) -> u64 {
        match self {
            Self::Rms => 1,
            Self::Layer => 2,
        }
    }
}

/// Linears on one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// The norm before them.
    pub norm: Option<Norm>,
    /// What they make.
    pub makes: Makes,
    /// Whether they have a bias.
    pub bias: bool,
}

/// What the linears at the start of a branch make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Makes {
    /// Queries, keys and values.
    Heads(Grouped),
    /// So many values for an activation.
    Width(u64),
}

impl Makes {
    /// Outputs on all of `tp` ranks together: fewer groups than ranks are held several times.
    pub fn outputs(&self, tp: u64) -> u64 {
        match self {
            Self::Heads(sizes) => sizes.queries() + 2 * sizes.kv_heads.max(tp) * sizes.head_dim,
            Self::Width(width) => *width,
        }
    }
}

/// The linear at the end of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Width of its input.
    pub inputs: u64,
    /// Whether it has a bias.
    pub bias: bool,
    /// Whether attention made its input, and keeps it too.
    pub of_attention: bool,
}

/// Attention with grouped queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouped {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

impl Grouped {
    /// Width of all queries.
    pub fn queries(&self) -> u64 {
        self.heads * self.head_dim
    }
}

/// Multi-head latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Heads.
    pub heads: u64,
    /// Width of the queries' latent, where there is one.
    pub query_rank: Option<u64>,
    /// Width of the keys' and values' latent.
    pub key_rank: u64,
    /// Part of a key that is not rotated.
    pub plain_dim: u64,
    /// Part that is.
    pub rotary_dim: u64,
    /// Width of a value.
    pub value_dim: u64,
}

impl Latent {
    /// Width of a query.
    pub fn query_dim(&self) -> u64 {
        self.plain_dim + self.rotary_dim
    }
}

/// Routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixture {
    /// How many.
    pub experts: u64,
    /// How many run for a token.
    pub top_k: u64,
    /// Width of one.
    pub width: u64,
    /// Width of the shared experts together, 0 without.
    pub shared: u64,
    /// Whether the shared experts' output is gated.
    pub shared_gate: bool,
}

impl Architecture {
    /// Marks the layers whose products are in fp8.
    pub fn with_fp8(mut self, fp8: Option<Fp8>) -> Self {
        let count = self.layers.len() as u64;
        for (layer, index) in self.layers.iter_mut().zip(0..) {
            layer.fp8 = fp8.is_some_and(|fp8| fp8.covers(index, count));
        }
        self
    }

    /// Refuses layers that Megatron-DeepSpeed's code or Megatron-Bridge's LoRA has no rule for here.
    pub fn check(&self, options: &Megatron) -> Result<(), PlanError> {
        let plain = |op: &&Op| match op {
            Op::Column(own) => own.norm == Some(Norm::Rms) && !own.bias,
            Op::Row(own) => !own.bias,
            Op::Activation { gated } => *gated,
            Op::Rotary(_) | Op::Attention(_) => true,
            _ => false,
        };
        let adapted = |op: &&Op| match op {
            Op::Column(own) => own.norm.is_some(),
            op => !matches!(op, Op::Latent(_) | Op::Mixture(_)),
        };
        let operations = || self.layers.iter().flat_map(|layer| &layer.branches).flat_map(|branch| &branch.0);
        let scaled = self.scaled_embedding || self.scaled_logits || self.norm != Norm::Rms;
        if options.deepspeed.is_some() && (scaled || !operations().all(|op| plain(&op))) {
            return Err(unsupported("DeepSpeed and layers other than Llama's"));
        }
        match operations().find(|op| options.lora.is_some() && !adapted(op)) {
            Some(op) => Err(unsupported(&format!("LoRA and {}", op.name()))),
            None => Ok(()),
        }
    }
}

impl Branch {
    /// Its operations in the order in which Megatron's modules register their parameters: the output projection of attention
    /// is made first (`Attention.__init__`), then what `SelfAttention` adds, norms of heads last.
    pub fn registered(&self) -> Vec<&Op> {
        let mut list: Vec<&Op> = self.0.iter().collect();
        if list.iter().any(|op| matches!(op, Op::Attention(_))) {
            crate::order::sort_by_key(&mut list, |op| match op {
                Op::Column(_) => 1,
                Op::HeadNorms(_) => 2,
                _ => 0,
            });
        }
        list
    }
}

/// A refusal, by what Megatron has no place for.
pub(super) fn unsupported(what: &str) -> PlanError {
    crate::plan::Fault::unsupported("parallel.engine", format!("Megatron with {what}"))
        .or("decoders are simulated whose layers add grouped-query or latent attention and MLPs or routed experts to one \
             residual stream, with norms that Transformer Engine has")
        .into()
}
