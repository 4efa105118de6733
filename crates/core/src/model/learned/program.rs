//! Programs that `vramcast learn` recorded: a model's forward pass as torch ran it, sizes as expressions.
//!
//! The file is a config of its own type, `learned_program`: every door that takes a config.json takes it. Steps name an
//! operation, the module whose code it is, the values it reads and the sizes of those it makes; `repeat` stands for layers
//! that do the same, in which values count from the layer's start and those from before it and the layer before are written as text.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::expression;
use crate::dtype::DType;
use crate::model::facts::Facts;
use crate::model::op::{
    Activation, Binary, Cast, Convolution, ExpertStyle, Experts, Input, LinearLayout, Loss, Norm, Op, ParameterId,
    Reduction, Role, Unary,
};
use crate::model::program::ModuleKind;
use crate::model::shape::MAX_DIMS;
use crate::model::{Config, Family, Graph, Inputs, ModelError, Shape, Task, Value};

/// The `model_type` of such a file.
pub const MODEL_TYPE: &str = "learned_program";

/// What reads such a file.
pub static FAMILY: Family = Family {
    name: "learned program",
    model_types: &[MODEL_TYPE],
    facts: Facts { tasks: Some(&[Task::SequenceClassification]), served: false, ..Facts::DEFAULT },
    build,
};

/// No pass has more steps than this.
const MOST_STEPS: usize = 1 << 21;

fn build(config: &Config<'_>, _: Task, graph: &mut Graph) -> Result<(), ModelError> {
    read(&Json::Object(config.object().clone()), graph)
}

/// Puts a recorded program into the graph.
pub(super) fn read(document: &Json, graph: &mut Graph) -> Result<(), ModelError> {
    if graph.inputs.past > 0 {
        return Err(ModelError::Unsupported {
            what: "generating with a learned program".into(),
            hint: "it knows one forward pass, without a cache".into(),
        });
    }
    let mut reader = Reader {
        graph,
        values: Vec::new(),
        shapes: Vec::new(),
        kinds: BTreeMap::new(),
        parameters: BTreeMap::new(),
        done: 0,
    };
    // What is counted does not run; how large images are is not known then.
    let counted = reader.graph.inputs == Inputs::inventory();
    reader
        .modules(document)
        .and_then(|()| if counted { Ok(()) } else { reader.pass(document) })
        .map_err(|problem| ModelError::Inconsistent { module: "learned program".into(), problem })
}

type Read<T> = Result<T, String>;

struct Reader<'a> {
    graph: &'a mut Graph,
    values: Vec<Option<Value>>,
    shapes: Vec<Shape>,
    kinds: BTreeMap<String, ModuleKind>,
    parameters: BTreeMap<String, ParameterId>,
    done: usize,
}

/// Where a step stands among repeated layers: the number that takes the place of `{}`, and the layer's first value.
#[derive(Clone, Copy, Default)]
struct Turn {
    index: Option<u64>,
    start: usize,
}

fn list<'j>(json: &'j Json, what: &str) -> Read<&'j [Json]> {
    json.as_array().map(Vec::as_slice).ok_or_else(|| format!("{what} is no list"))
}

fn text<'j>(json: &'j Json, what: &str) -> Read<&'j str> {
    json.as_str().ok_or_else(|| format!("{what} is no text"))
}

fn sizes(json: &Json, what: &str) -> Read<Shape> {
    let sizes: Option<Vec<u64>> = list(json, what)?.iter().map(Json::as_u64).collect();
    sizes.map(|sizes| Shape::new(&sizes)).ok_or_else(|| format!("{what}: a size is no whole number"))
}

fn dtype(name: &str) -> Option<DType> {
    Some(match name {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bool" => DType::Bool,
        "i32" => DType::I32,
        "u8" | "i8" => DType::U8,
        "i64" | "f64" | "c64" | "i16" => DType::I64,
        _ => return None,
    })
}

impl Reader<'_> {
    fn modules(&mut self, document: &Json) -> Read<()> {
        for module in list(&document["modules"], "modules")? {
            let number = |place: usize| module[place].as_u64().unwrap_or(0);
            let kind = match text(&module[1], "a module's kind")? {
                "linear" => ModuleKind::Linear { inputs: number(2), outputs: number(3) },
                "embedding" => ModuleKind::Embedding { rows: number(2), width: number(3) },
                "convolution" => ModuleKind::Convolution,
                "norm" => ModuleKind::Norm,
                "layer" => ModuleKind::Layer,
                _ => ModuleKind::Container,
            };
            self.kinds.insert(text(&module[0], "a module's path")?.to_owned(), kind);
        }
        for parameter in list(&document["parameters"], "parameters")? {
            let name = text(&parameter[0], "a parameter's name")?;
            let (path, last) = name.rsplit_once('.').unwrap_or(("", name));
            let kind = self.kinds.get(path).copied().unwrap_or(ModuleKind::Container);
            let role = match kind {
                _ if parameter[2] == "frozen" => Role::Frozen,
                ModuleKind::Linear { .. } if last == "weight" => Role::Linear,
                ModuleKind::Embedding { .. } => Role::Embedding,
                ModuleKind::Convolution if last == "weight" => Role::Convolution,
                ModuleKind::Norm => Role::Norm,
                ModuleKind::Linear { .. } | ModuleKind::Convolution => Role::Bias,
                _ => Role::Other,
            };
            let id = self.graph.declare(name.to_owned(), sizes(&parameter[1], name)?, role);
            self.parameters.insert(name.to_owned(), id);
            if !path.is_empty() && kind != ModuleKind::Layer {
                let module = self.graph.leaf(path, kind);
                self.graph.attach(module, &[Some(id)]);
            }
        }
        for pair in document["tied"].as_array().into_iter().flatten() {
            if let (Some(name), Some(own)) = (pair[0].as_str(), pair[1].as_str())
                && let Some(id) = self.parameters.get(own).copied()
            {
                self.parameters.insert(name.to_owned(), id);
                self.graph.alias(name, id);
            }
        }
        for buffer in document["buffers"].as_array().into_iter().flatten() {
            let (name, kind) = (text(&buffer[0], "a buffer's name")?, buffer[2].as_str().unwrap_or_default());
            let shape = sizes(&buffer[1], name)?;
            match dtype(kind) {
                Some(dtype) => self.graph.buffer(name, shape, dtype, false),
                None => self.graph.declare_model_buffer(name, shape),
            }
        }
        Ok(())
    }

    fn pass(&mut self, document: &Json) -> Read<()> {
        let pass = &document[if self.graph.inputs.labels { "training" } else { "forward" }];
        let inputs = self.graph.inputs.clone();
        let images = inputs.images;
        let number = |name: &str| {
            let size = match name {
                "batch" => Some(inputs.batch),
                "seq" => Some(inputs.seq),
                "height" => images.map(|images| images.height),
                "width" => images.map(|images| images.width),
                "frames" => images.map(|images| images.frames),
                _ => None,
            };
            size.map(|size| [i128::from(size), 1])
        };
        for (name, step) in document["multiples"].as_object().into_iter().flatten() {
            let (size, step) = (number(name).map(|[size, _]| size), i128::from(step.as_u64().unwrap_or(1).max(1)));
            if let Some(size) = size.filter(|size| size % step != 0) {
                return Err(format!("{name} {size}: what runs was learned for multiples of {step}"));
            }
        }
        for shape in list(&pass["shapes"], "shapes")? {
            let parts = text(shape, "a shape")?.split(',').filter(|part| !part.is_empty());
            let sizes: Result<Vec<u64>, String> = parts.map(|part| expression::value(part, &number)).collect();
            self.shapes.push(Shape::new(&sizes.map_err(|what| match what.as_str() {
                "height" | "width" | "frames" => {
                    format!("{what} is not known: say how large images are (batch.images)")
                }
                _ => what,
            })?));
        }
        self.steps(list(&pass["steps"], "steps")?, Turn::default())
    }

    fn steps(&mut self, steps: &[Json], turn: Turn) -> Read<()> {
        for step in steps {
            self.done += 1;
            if self.done > MOST_STEPS {
                return Err("more steps than any pass has".into());
            }
            match text(&step[0], "a step")? {
                "in" => {
                    let path = self.name(&step[1], turn)?;
                    let kind = self.kinds.get(&path).copied().unwrap_or(ModuleKind::Container);
                    self.graph.enter(&path, kind);
                }
                "out" => self.graph.exit(),
                "free" => {
                    let value = self.place(&step[1], turn)?;
                    if let Some(held) = self.values.get_mut(value) {
                        *held = None;
                    }
                }
                "repeat" if turn.index.is_none() => {
                    let (count, first) = (step[1].as_u64().unwrap_or(0), step[2].as_u64().unwrap_or(0));
                    for index in first..first.saturating_add(count) {
                        self.steps(list(&step[4], "a layer")?, Turn { index: Some(index), start: self.values.len() })?;
                    }
                }
                kind => self.operation(kind, step, turn)?,
            }
        }
        Ok(())
    }

    fn name(&self, json: &Json, turn: Turn) -> Read<String> {
        let name = text(json, "a name")?;
        Ok(turn.index.map_or_else(|| name.to_owned(), |index| name.replacen("{}", &index.to_string(), 1)))
    }

    fn place(&self, json: &Json, turn: Turn) -> Read<usize> {
        let place = match json.as_i64() {
            Some(number) => turn.start as i64 + number,
            None => text(json, "a value")?.parse().map_err(|_| format!("{json} is no value"))?,
        };
        usize::try_from(place).map_err(|_| format!("{json} is no value"))
    }

    fn parameter(&self, json: &Json, turn: Turn) -> Read<Option<ParameterId>> {
        if json.is_null() {
            return Ok(None);
        }
        let name = self.name(json, turn)?;
        self.parameters.get(&name).copied().map(Some).ok_or_else(|| format!("{name} is no parameter"))
    }

    fn needed(&self, json: &Json, turn: Turn) -> Read<ParameterId> {
        self.parameter(json, turn)?.ok_or_else(|| "a parameter is missing".to_owned())
    }

    fn operation(&mut self, kind: &str, step: &Json, turn: Turn) -> Read<()> {
        let mut inputs = Vec::new();
        for value in list(&step[2], "inputs")? {
            let place = self.place(value, turn)?;
            let held = self.values.get(place).and_then(Option::as_ref);
            inputs.push(held.cloned().ok_or_else(|| format!("{kind} reads value {place}, which is not there"))?);
        }
        let mut shapes = Vec::new();
        for shape in list(&step[3], "sizes")? {
            let shape = shape.as_u64().and_then(|place| self.shapes.get(usize::try_from(place).ok()?));
            shapes.push(*shape.ok_or_else(|| format!("{kind}: no such sizes"))?);
        }
        let op = self.op(kind, step, turn, &inputs)?;
        let module = self.name(&step[1], turn)?;
        let module = self.kinds.get(&module).filter(|kind| is_leaf(**kind)).map(|kind| self.graph.leaf(&module, *kind));
        let read: Vec<&Value> = inputs.iter().collect();
        if let Op::Return = op {
            self.graph.run(op, &read, []);
            return Ok(());
        }
        if shapes.is_empty() || self.needs(&op) > read.len() {
            return Err(format!("{kind} lacks inputs or outputs"));
        }
        let made = self.graph.run_in(module, op, &read, &shapes);
        self.values.extend(made.into_iter().map(Some));
        Ok(())
    }

    /// How many inputs an operation reads at the least.
    fn needs(&self, op: &Op) -> usize {
        match op {
            Op::Input(_) | Op::Parameter(_) | Op::Buffer(_) | Op::ModelBuffer | Op::Fill(_) | Op::FillModel => 0,
            Op::Binary(_)
            | Op::InPlace(_)
            | Op::Assign { .. }
            | Op::MatMul
            | Op::Gather(_)
            | Op::Index
            | Op::Loss(_)
            | Op::MaskedFill { .. } => 2,
            Op::AddMatMul | Op::Where | Op::MaskedScatter | Op::ScaledDotProduct { .. } | Op::Experts(_) => 3,
            _ => 1,
        }
    }

    fn op(&self, kind: &str, step: &Json, turn: Turn, inputs: &[Value]) -> Read<Op> {
        let word = |place: usize| step[place].as_str().unwrap_or_default();
        let dim = |place: usize| {
            let dim = step[place].as_u64().filter(|dim| *dim < MAX_DIMS as u64);
            dim.map(|dim| dim as u8).ok_or_else(|| format!("{kind}: no such dimension"))
        };
        Ok(match kind {
            "input" => Op::Input(match word(4) {
                "tokens" => Input::Tokens,
                "decoder_tokens" => Input::DecoderTokens,
                "labels" => Input::Labels,
                "pixels" => Input::Pixels,
                _ => Input::Other(dtype(word(5)).unwrap_or(DType::F32)),
            }),
            "parameter" => Op::Parameter(self.needed(&step[4], turn)?),
            "buffer" => dtype(word(4)).map_or(Op::ModelBuffer, Op::Buffer),
            "fill" => match dtype(word(4)) {
                Some(dtype) => Op::Fill(dtype),
                None => Op::FillModel,
            },
            "embedding" => Op::Embedding { weight: self.needed(&step[4], turn)? },
            "linear" => Op::Linear {
                weight: self.needed(&step[4], turn)?,
                bias: self.parameter(&step[5], turn)?,
                layout: LinearLayout::OutIn,
            },
            "norm" => Op::Norm {
                kind: match word(4) {
                    "layer" if step[5].is_null() => Norm::LayerPlain,
                    "layer" => Norm::Layer,
                    "rms_fused" => Norm::RmsFused,
                    "batch" => Norm::Batch,
                    other => Norm::Group(other.strip_prefix("group:").and_then(|n| n.parse().ok()).unwrap_or(1)),
                },
                weight: self.parameter(&step[5], turn)?,
                bias: self.parameter(&step[6], turn)?,
            },
            "convolution" => Op::Convolution {
                weight: self.needed(&step[4], turn)?,
                bias: self.parameter(&step[5], turn)?,
                spec: Convolution { stride: [1; 3], padding: [0; 3], groups: 1, transposed: false },
            },
            "attention" => {
                Op::ScaledDotProduct { causal: step[4] == true, dropout: step[5] == true, grouped: step[6] == true }
            }
            "dropout" => Op::Dropout { per_mille: 100 },
            "activation" => Op::Activation(activation(word(4))),
            "softmax" => Op::Softmax { dim: dim(4)?, dtype: step[5].as_str().and_then(dtype) },
            "matmul" => Op::MatMul,
            "add_matmul" => Op::AddMatMul,
            "cast" => Op::Cast(dtype(word(4)).map_or(Cast::Model, Cast::To)),
            "reshape" => Op::Reshape,
            "expand" => Op::Expand,
            "contiguous" => Op::Contiguous,
            "transpose" => Op::Transpose(dim(4)?, dim(5)?),
            "permute" => {
                let mut order = [0; MAX_DIMS];
                for (to, from) in list(&step[4], "an order")?.iter().enumerate().take(MAX_DIMS) {
                    order[to] = from.as_u64().filter(|from| *from < MAX_DIMS as u64).unwrap_or(0) as u8;
                }
                Op::Permute(order)
            }
            "slice" => Op::Slice { dim: dim(4)?, start: 0, step: step[5].as_u64().unwrap_or(1).max(1) },
            "select" => Op::Select(dim(4)?),
            "split" => Op::Split(dim(4)?),
            "cat" => Op::Cat(dim(4)?),
            "stack" => Op::Stack(dim(4)?),
            "pad" => Op::Pad,
            "unary" => Op::Unary(unary(word(4))?),
            "binary" => Op::Binary(binary(word(4))?),
            "scalar" => Op::Scalar(binary(word(4))?),
            "in_place" => match word(4) {
                "relu" => Op::InPlaceUnary(Unary::Relu),
                "scaled" => Op::InPlaceUnary(Unary::Neg),
                "assign" => Op::Assign { dim: 0, start: 0 },
                other => Op::InPlace(binary(other)?),
            },
            "reduce" => Op::Reduce {
                kind: match word(4) {
                    "mean" => Reduction::Mean,
                    "max" => Reduction::Max,
                    "variance" => Reduction::Variance,
                    "norm" => Reduction::Norm,
                    "log_sum_exp" => Reduction::LogSumExp,
                    _ => Reduction::Sum,
                },
                dim: if step[5].is_null() { None } else { Some(dim(5)?) },
                keep: step[6] == true,
            },
            "topk" | "sort" => Op::TopK { sorted: true },
            "gather" => Op::Gather(dim(4)?),
            "index" => Op::Index,
            "where" => Op::Where,
            "masked_fill" => Op::MaskedFill { in_place: false },
            "masked_scatter" => Op::MaskedScatter,
            "compare" => Op::Compare,
            "cumulative_sum" => Op::CumulativeSum(0),
            "repeated" => Op::Repeat,
            "roll" => Op::Roll(0),
            "triangle" => Op::Triangle,
            "average_pool" => Op::Pool { places: false },
            "max_pool" => Op::Pool { places: true },
            "interpolate" => Op::Interpolate,
            "fourier" => Op::Fourier,
            "loss" => Op::Loss(match word(4) {
                "cross_entropy" => Loss::CrossEntropy,
                "each" => Loss::EachToken,
                "binary" => Loss::BinaryCrossEntropy,
                _ => Loss::MeanSquared,
            }),
            "detach" => Op::Detach,
            "experts" => self.experts(step, turn)?,
            "return" => Op::Return,
            other => return Err(format!("{other} with {} inputs is no operation of this version", inputs.len())),
        })
    }
}

impl Reader<'_> {
    /// Experts by transformers' interface: how many a token goes to, whether there is a gate, the activation, how weights
    /// lie, and the parameters.
    fn experts(&self, step: &Json, turn: Turn) -> Read<Op> {
        let [gate_up, down] = [8, 9].map(|place| self.needed(&step[place], turn));
        let (gate_up, down) = (gate_up?, down?);
        let shape = self.graph.shape_of(down);
        let (transposed, gated) = (step[7] == true, step[5] == true);
        if shape.rank() != 3 {
            return Err("experts: weights of three dimensions are missing".into());
        }
        let biases = match step[10].is_null() {
            true => None,
            false => Some((self.needed(&step[10], turn)?, self.needed(&step[11], turn)?)),
        };
        Ok(Op::Experts(Experts {
            count: shape.size(0),
            top_k: step[4].as_u64().unwrap_or(1),
            gate_up,
            down,
            biases,
            width: shape.size(if transposed { 1 } else { 2 }),
            gated,
            activation: activation(step[6].as_str().unwrap_or_default()),
            transposed,
            style: ExpertStyle::Interface,
        }))
    }
}

fn activation(name: &str) -> Activation {
    match name {
        "silu" => Activation::Silu,
        "relu" => Activation::Relu,
        "mish" => Activation::Mish,
        _ => Activation::Gelu,
    }
}

/// Modules that run one operation and are entered by it alone.
fn is_leaf(kind: ModuleKind) -> bool {
    !matches!(kind, ModuleKind::Container | ModuleKind::Layer)
}

fn binary(name: &str) -> Read<Binary> {
    Ok(match name {
        "add" => Binary::Add,
        "sub" => Binary::Sub,
        "mul" => Binary::Mul,
        "div" => Binary::Div,
        "pow" => Binary::Pow,
        "max" => Binary::Max,
        "min" => Binary::Min,
        other => return Err(format!("{other} is no operation on two tensors")),
    })
}

fn unary(name: &str) -> Read<Unary> {
    const ALL: [(&str, Unary); 21] = [
        ("neg", Unary::Neg),
        ("exp", Unary::Exp),
        ("log", Unary::Log),
        ("sqrt", Unary::Sqrt),
        ("rsqrt", Unary::Rsqrt),
        ("cos", Unary::Cos),
        ("sin", Unary::Sin),
        ("abs", Unary::Abs),
        ("square", Unary::Square),
        ("reciprocal", Unary::Reciprocal),
        ("tanh", Unary::Tanh),
        ("sigmoid", Unary::Sigmoid),
        ("softplus", Unary::Softplus),
        ("silu", Unary::Silu),
        ("relu", Unary::Relu),
        ("log_sigmoid", Unary::LogSigmoid),
        ("clamp", Unary::Clamp),
        ("round", Unary::Round),
        ("not", Unary::Not),
        ("clone", Unary::Clone),
        ("identity", Unary::Clone),
    ];
    ALL.iter()
        .find(|(known, _)| *known == name)
        .map(|(_, op)| *op)
        .ok_or_else(|| format!("{name} is no operation on a tensor"))
}
