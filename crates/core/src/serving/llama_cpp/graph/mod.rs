//! The graph that llama.cpp builds for a batch, node by node (llama-graph.cpp).

mod attention;
mod decoder;
mod delta;
mod experts;
mod latent;
mod recurrent;
mod streams;

use std::collections::BTreeMap;

use super::architectures::Architecture;
use super::facts::Facts;
use super::file::ModelFile;
use super::reserve::Session;
use crate::serving::ggml::cuda;
use crate::serving::ggml::tensor::{Graph, Id, Kind, Op, Place};

/// A graph under construction.
pub(super) struct Builder<'a> {
    pub(super) graph: Graph,
    file: &'a ModelFile,
    facts: &'a Facts,
    rules: &'a Architecture,
    session: &'a Session,
    /// Weights that the graph has used.
    weights: BTreeMap<(usize, usize), Id>,
    /// Keys and values of a layer.
    caches: BTreeMap<usize, (Id, Option<Id>)>,
    tokens: u64,
    outputs: u64,
    sequences: u64,
    /// States of a layer.
    states: BTreeMap<usize, [Id; 2]>,
    /// Which of them a batch reads, where layers keep some.
    copies: Option<recurrent::Copies>,
    /// Nodes that stand for many, with their layers.
    pub(super) fused: Vec<(Fused, usize, Id)>,
}

/// What one kernel computes where its layer's device has it (`llm_fused_op`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fused {
    Attention,
    /// A gated delta rule of one token of every sequence.
    RuleOfToken,
    /// Of many.
    RuleOfPrompt,
}

/// Tokens, sequences and rows with output of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) tokens: u64,
    pub(super) sequences: u64,
    pub(super) outputs: u64,
}

impl<'a> Builder<'a> {
    /// Builds the graph of a batch.
    pub(super) fn build(
        (file, facts, rules): (&'a ModelFile, &'a Facts, &'a Architecture),
        session: &'a Session,
        shape: Shape,
    ) -> Self {
        let sequences = shape.sequences.max(1);
        let mut builder = Self {
            graph: Graph::default(),
            file,
            facts,
            rules,
            session,
            weights: BTreeMap::new(),
            caches: BTreeMap::new(),
            states: BTreeMap::new(),
            copies: None,
            // A batch of equal sequences (`graph_reserve`).
            tokens: shape.tokens.next_multiple_of(sequences),
            outputs: shape.outputs,
            sequences,
            fused: Vec::new(),
        };
        builder.decoder();
        builder
    }

    /// A weight by its name.
    fn weight(&mut self, name: &str) -> Option<Id> {
        let at = self.file.find(name)?;
        Some(self.weight_at(at, self.session.placed.of(at)))
    }

    /// A tensor of the file as it lies in one place.
    fn weight_at(&mut self, at: usize, place: Place) -> Id {
        let key = (at, if let Place::Device(device) = place { device } else { usize::MAX });
        if let Some(id) = self.weights.get(&key) {
            return *id;
        }
        let entry = &self.file.tensors[at];
        let id = self.graph.stored(entry.kind, entry.ne, place, true);
        self.weights.insert(key, id);
        id
    }

    fn layer_weight(&mut self, layer: usize, name: &str) -> Option<Id> {
        self.weight(&format!("blk.{layer}.{name}"))
    }

    /// The table of the output: its own, or the embedding once more where the output runs.
    fn head(&mut self) -> Option<Id> {
        if let Some(id) = self.weight("output.weight") {
            return Some(id);
        }
        let table = self.file.find("token_embd.weight")?;
        Some(self.weight_at(table, self.session.placed.output()))
    }

    /// A product with a weight.
    fn times(&mut self, weight: Id, input: Id) -> Id {
        self.graph.mul_mat(weight, input)
    }

    /// A norm; `layer` says where it shall run when all is on devices or the batch is small.
    fn norm(&mut self, input: Id, weight: Option<Id>, bias: Option<Id>, layer: Option<usize>) -> Id {
        let op = if self.rules.layer_norm { Op::Norm } else { Op::RmsNorm };
        let mut current = self.graph.same(op, &[input]);
        if let (Some(layer), true) = (layer, weight.is_some() || bias.is_some()) {
            self.pin(current, layer);
        }
        if let Some(weight) = weight {
            current = self.graph.same(Op::Mul, &[current, weight]);
        }
        if let Some(bias) = bias {
            current = self.graph.same(Op::Add, &[current, bias]);
        }
        current
    }

    /// A norm of the layer's tensors `{name}.weight` and `{name}.bias`.
    fn layer_norm(&mut self, input: Id, layer: usize, name: &str) -> Id {
        let weight = self.layer_weight(layer, &format!("{name}.weight"));
        let bias = self.layer_weight(layer, &format!("{name}.bias"));
        self.norm(input, weight, bias, Some(layer))
    }

    /// `graph_get_cb`: norms are kept on the device of their layer.
    fn pin(&mut self, id: Id, layer: usize) {
        if self.tokens >= 32 && !self.session.full {
            return;
        }
        let (backend, device) = match self.session.placed.layer(layer) {
            Place::Device(device) => (device, true),
            Place::Host => (self.session.devices, false),
        };
        if !device || cuda::supports(&self.graph, id, self.session.capability) {
            self.graph[id].backend = Some(backend);
        }
    }

    /// `weight · input + bias` of a layer's tensors.
    fn linear(&mut self, input: Id, layer: usize, name: &str) -> Option<Id> {
        let weight = self.layer_weight(layer, &format!("{name}.weight"))?;
        let mut current = self.times(weight, input);
        if let Some(bias) = self.layer_weight(layer, &format!("{name}.bias")) {
            current = self.graph.same(Op::Add, &[current, bias]);
        }
        Some(current)
    }

    fn scale(&mut self, input: Id) -> Id {
        self.graph.same(Op::Scale, &[input])
    }

    /// Tokens, or vectors in their place: both are inputs, one is used (`build_inp_embd`).
    fn embedding(&mut self) -> Id {
        let tokens = self.graph.input(Kind::I32, [self.tokens, 1, 1, 1]);
        let vectors = self.graph.input(Kind::F32, [self.facts.hidden, self.tokens, 1, 1]);
        let Some(table) = self.weight("token_embd.weight") else { return vectors };
        let mut current = self.graph.get_rows(table, tokens);
        self.graph.expand(current);
        let joined = self.layer_weight(0, "nextn.eh_proj.weight");
        if self.session.build.two_inputs() && joined.is_none() {
            self.graph.expand(vectors);
        }
        if self.facts.embedding_scale {
            current = self.scale(current);
        }
        // Layers that guess ahead join the token with the model's last hidden state, an input (`graph_mtp` of qwen35.cpp).
        if let Some(matrix) = joined {
            let state = self.layer_norm(vectors, 0, "nextn.hnorm");
            let token = self.layer_norm(current, 0, "nextn.enorm");
            let both = self.graph.concat(token, state, 0);
            current = self.times(matrix, both);
        }
        self.graph.expand(current);
        current
    }

    fn rows_with_output(&mut self) -> Id {
        self.graph.input(Kind::I32, [self.outputs, 1, 1, 1])
    }
}
