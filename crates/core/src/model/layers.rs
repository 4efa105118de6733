//! Operations with parameters: each declares what it owns and records that it runs.

use super::graph::{Graph, Value};
use super::op::{Activation, Binary, Convolution, Input, LinearLayout, Norm, Op, ParameterId, Role, RotaryTable};
use super::program::ModuleKind;
use super::shape::Shape;
use crate::dtype::DType;

/// What models call the table of their learned positions.
const POSITION_TABLES: [&str; 3] = ["wpe", "embed_positions", "position_embeddings"];

impl Graph {
    /// `nn.Embedding`.
    pub fn embedding(&mut self, name: &str, ids: &Value, rows: u64, width: u64) -> Value {
        let weight = self.parameter_of(name, "weight", [rows, width], Role::Embedding);
        self.embedding_with(name, weight, ids, rows, width)
    }

    /// `nn.Embedding` over a table that another module owns.
    pub fn embedding_with(&mut self, name: &str, weight: ParameterId, ids: &Value, rows: u64, width: u64) -> Value {
        self.alias(&format!("{name}.weight"), weight);
        if POSITION_TABLES.contains(&name) {
            self.limit_positions(rows);
        }
        let module = self.leaf(name, ModuleKind::Embedding { rows, width });
        self.attach(module, &[Some(weight)]);
        self.run_one(Some(module), Op::Embedding { weight }, &[ids], ids.shape().inserted(-1, width))
    }

    /// An embedding that scales its rows in its own forward pass (`…ScaledWordEmbedding`).
    pub fn scaled_embedding(&mut self, name: &str, ids: &Value, rows: u64, width: u64) -> Value {
        let table = self.embedding(name, ids, rows, width);
        let module = self.leaf(name, ModuleKind::Embedding { rows, width });
        self.run_one(Some(module), Op::Scalar(Binary::Mul), &[&table], table.shape())
    }

    /// `nn.Linear`.
    pub fn linear(&mut self, name: &str, x: &Value, outputs: u64, bias: bool) -> Value {
        let weight = self.parameter_of(name, "weight", [outputs, x.size(-1)], Role::Linear);
        self.linear_on(name, weight, x, outputs, bias)
    }

    /// `nn.Linear` over a matrix that another module owns (a tied head).
    pub fn linear_with(&mut self, name: &str, weight: ParameterId, x: &Value, outputs: u64, bias: bool) -> Value {
        self.alias(&format!("{name}.weight"), weight);
        self.linear_on(name, weight, x, outputs, bias)
    }

    fn linear_on(&mut self, name: &str, weight: ParameterId, x: &Value, outputs: u64, bias: bool) -> Value {
        let bias = bias.then(|| self.parameter_of(name, "bias", [outputs], Role::Bias));
        let module = self.leaf(name, ModuleKind::Linear { inputs: x.size(-1), outputs });
        self.attach(module, &[Some(weight), bias]);
        let op = Op::Linear { weight, bias, layout: LinearLayout::OutIn };
        self.run_one(Some(module), op, &[x], x.shape().with(-1, outputs))
    }

    /// GPT-2's `Conv1D`: a linear whose matrix is `[in, out]`, always with a bias.
    pub fn conv1d_linear(&mut self, name: &str, x: &Value, outputs: u64) -> Value {
        let weight = self.parameter_of(name, "weight", [x.size(-1), outputs], Role::Linear);
        let bias = Some(self.parameter_of(name, "bias", [outputs], Role::Bias));
        let module = self.leaf(name, ModuleKind::Conv1d { inputs: x.size(-1), outputs });
        self.attach(module, &[Some(weight), bias]);
        let op = Op::Linear { weight, bias, layout: LinearLayout::InOut };
        self.run_one(Some(module), op, &[x], x.shape().with(-1, outputs))
    }

    /// A norm over the last dimension; `bias` is for the LayerNorm kinds. Kinds without weight declare none.
    pub fn norm(&mut self, name: &str, x: &Value, kind: Norm, bias: bool) -> Value {
        self.norm_of(name, &[x], kind, bias, x.size(-1))
    }

    /// A norm with further inputs (a gate) or a weight of another width (channels).
    pub fn norm_of(&mut self, name: &str, inputs: &[&Value], kind: Norm, bias: bool, width: u64) -> Value {
        self.norm_shaped(name, inputs, kind, bias, Shape::from([width]))
    }

    /// A norm whose weight has a shape of its own (Cohere's per-head norm).
    pub fn norm_shaped(&mut self, name: &str, inputs: &[&Value], kind: Norm, bias: bool, shape: Shape) -> Value {
        let bare = matches!(kind, Norm::RmsBare | Norm::LayerBare | Norm::LayerPlain | Norm::L2);
        let weight = (!bare).then(|| self.parameter_of(name, "weight", shape, Role::Norm));
        let bias = bias.then(|| self.parameter_of(name, "bias", shape, Role::Norm));
        let module = self.leaf(name, ModuleKind::Norm);
        self.attach(module, &[weight, bias]);
        let shape = inputs.first().map_or(Shape::from([1]), |x| x.shape());
        self.run_one(Some(module), Op::Norm { kind, weight, bias }, inputs, shape)
    }

    /// A convolution over the dimensions after channels: `x` is `[batch, channels, …]`.
    pub fn convolution(
        &mut self,
        name: &str,
        x: &Value,
        outputs: u64,
        kernel: &[u64],
        spec: Convolution,
        bias: bool,
    ) -> Value {
        let groups = spec.groups.max(1);
        let mut sizes =
            if spec.transposed { vec![x.size(1), outputs / groups] } else { vec![outputs, x.size(1) / groups] };
        sizes.extend_from_slice(kernel);
        let weight = self.parameter_of(name, "weight", sizes.as_slice(), Role::Convolution);
        let bias = bias.then(|| self.parameter_of(name, "bias", [outputs], Role::Bias));
        let module = self.leaf(name, ModuleKind::Convolution);
        self.attach(module, &[Some(weight), bias]);
        let mut shape = vec![x.size(0), outputs];
        for (i, &size) in kernel.iter().enumerate() {
            let (stride, padding) = (u64::from(spec.stride[i]).max(1), u64::from(spec.padding[i]));
            let length = x.size(2 + i as i64);
            shape.push(if spec.transposed {
                (length.max(1) - 1).saturating_mul(stride).saturating_add(size).saturating_sub(2 * padding)
            } else {
                (length.saturating_add(2 * padding).saturating_sub(size) / stride).saturating_add(1)
            });
        }
        self.run_one(Some(module), Op::Convolution { weight, bias, spec }, &[x], Shape::new(&shape))
    }

    /// A pointwise activation.
    pub fn activation(&mut self, kind: Activation, x: &Value) -> Value {
        self.run(Op::Activation(kind), &[x], x.shape())
    }

    /// `kind(gate) * up`.
    pub fn glu(&mut self, kind: Activation, gate: &Value, up: &Value) -> Value {
        self.run(Op::Glu(kind), &[gate, up], gate.shape())
    }

    /// `kind(gate)`, of `kind(gate(x)) * up(x)`: `up` runs after it.
    pub fn gate(&mut self, kind: Activation, gate: Value) -> Value {
        self.run(Op::Gate(kind), &[&gate], gate.shape())
    }

    /// The product of a gate made by [`Graph::gate`] and `up`.
    pub fn gate_product(&mut self, kind: Activation, gate: Value, up: Value) -> Value {
        self.run(Op::GateProduct(kind), &[&gate, &up], gate.shape())
    }

    /// Dropout with probability `p`; nothing outside training or for `p = 0`.
    pub fn dropout(&mut self, x: &Value, p: f64) -> Value {
        let per_mille = (p.clamp(0.0, 1.0) * 1000.0).round() as u32;
        if per_mille == 0 { x.clone() } else { self.run(Op::Dropout { per_mille }, &[x], x.shape()) }
    }

    /// The positions of `seq` tokens: those `generate` gives, else counted on the spot.
    pub fn positions(&mut self, seq: u64) -> Value {
        if self.inputs.position_ids {
            self.input(Input::Positions, [self.inputs.batch, seq])
        } else {
            self.fill(DType::I64, [1, seq])
        }
    }

    /// A parameter as a tensor.
    pub fn read(&mut self, parameter: ParameterId, shape: impl Into<Shape>) -> Value {
        self.run(Op::Parameter(parameter), &[], shape)
    }

    /// The rotary tables of a model: cosine and sine, `[batch or 1, seq, dim]`, with the buffers that make them.
    ///
    /// transformers keeps `inv_freq` and a copy of it as buffers of `rotary_emb`, half as long as the rotated part.
    pub fn rotary_table(&mut self, name: &str, seq: u64, table: RotaryTable) -> (Value, Value) {
        let half = table.dim / 2;
        for buffer in ["inv_freq", "original_inv_freq"] {
            self.buffer(&format!("{name}.{buffer}"), [half], DType::F32, false);
        }
        self.rotary_table_bare(seq, table)
    }

    /// The rotary tables without buffers of the usual names.
    pub fn rotary_table_bare(&mut self, seq: u64, table: RotaryTable) -> (Value, Value) {
        let rows = self.inputs.position_rows();
        let shape = Shape::from([rows, seq, if table.doubled { table.dim } else { table.dim / 2 }]);
        let mut both = self.run_many(Op::RotaryTable(table), &[], &[shape, shape]);
        let sine = both.pop();
        match (both.pop(), sine) {
            (Some(cosine), Some(sine)) => (cosine, sine),
            _ => unreachable!("run_many returns one value per shape"),
        }
    }
}
