//! The joint graph of forward and backward, as AOTAutograd hands it to the partitioner: nodes of torch's smallest
//! operations, in order, equal ones once (`fx_graph_cse`).

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::rules::Rule;
use crate::dtype::DType;
use crate::memory::torch::promote;
use crate::memory::torch::ring::Ring;
use crate::model::Shape;

/// A node, by its place in [`Graph::nodes`].
pub(super) type Id = u32;

/// What a node is to the partitioner and to Inductor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// What comes in: a parameter, an activation, the batch.
    Primal,
    /// A gradient that comes in.
    Tangent,
    /// Computed element by element.
    Pointwise(&'static str),
    /// A reduction.
    Reduce(&'static str),
    /// The same memory under other sizes.
    View(&'static str),
    /// `aten.cat`: written by one kernel, but nothing is fused behind it.
    Join,
    /// Computed element by element, but not on the list of what may be computed again (embeddings, padding).
    Kept(&'static str),
    /// A matrix product.
    Product,
    /// Another kernel of a library with one result.
    Library(&'static str),
    /// Fused attention, and its backward pass; their results are [`Kind::Item`]s.
    Attention,
    AttentionBackward,
    /// One result of a kernel with several.
    Item(u8),
    /// Random numbers, each drawing its own; not drawn again.
    Random(u32),
    /// Zeros that a scatter is given, each its own.
    Zeros(u32),
    /// Rows added by index into zeros (`index_put` with atomics), its first input where those are a kernel of their own.
    Scatter,
}

impl Kind {
    /// `OpTypes.is_view`.
    pub(super) fn is_view(self) -> bool {
        matches!(self, Self::View(_))
    }

    /// `OpTypes.is_recomputable`, which without random operations is also `is_fusible`.
    pub(super) fn is_recomputable(self) -> bool {
        matches!(self, Self::Pointwise(_) | Self::Reduce(_) | Self::View(_) | Self::Item(_))
    }

    /// Whether it stands for several results, and has no memory of its own.
    pub(super) fn is_tuple(self) -> bool {
        matches!(self, Self::Attention | Self::AttentionBackward)
    }

    /// Whether a kernel of a library runs, which reads and writes whole buffers.
    pub(super) fn is_extern(self) -> bool {
        matches!(self, Self::Product | Self::Library(_) | Self::Attention | Self::AttentionBackward)
    }
}

/// A node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub(super) kind: Kind,
    pub(super) inputs: SmallVec<[Id; 3]>,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    /// The checkpoint it belongs to.
    pub(super) checkpoint: Option<u32>,
    /// Whether a selective checkpoint keeps it (`MUST_SAVE`).
    pub(super) kept: bool,
    /// Whose code it is.
    pub(super) module: u32,
}

impl Node {
    /// `_size_of`.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.elements().saturating_mul(self.dtype.size())
    }
}

/// What two nodes that compute the same have in common.
type Key = (Kind, SmallVec<[Id; 3]>, Shape, DType);

/// The graph while it is built.
#[derive(Default)]
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
    /// How to go back through each node.
    pub(super) rules: Vec<Rule>,
    /// Whether a gradient flows into it.
    pub(super) needs: Vec<bool>,
    /// What is returned.
    pub(super) outputs: Vec<Id>,
    /// Gradients that come in, one per output that has one.
    pub(super) tangents: Vec<Id>,
    /// Gradients that go out, one per primal.
    pub(super) gradients: Vec<Option<Id>>,
    pub(super) primals: Vec<Id>,
    /// Those of them that are parameters, which live on anyway.
    pub(super) parameters: Vec<Id>,
    pub(super) checkpoint: Option<u32>,
    pub(super) module: u32,
    /// Whether attention is flex attention.
    pub(super) flex: bool,
    /// Whether Inductor's benchmark decides otherwise than usual on products that give gradients of weights of odd widths.
    pub(super) pads_otherwise: bool,
    /// Whether buffers are reused whatever waits for it.
    pub(super) reuses_all: bool,
    /// The cards that share a sequence.
    pub(super) ring: Option<Ring>,
    /// Of what is bytes, its scale and its type before.
    pub(super) scales: BTreeMap<Id, (Id, DType)>,
    known: BTreeMap<Key, Id>,
}

impl Graph {
    /// A node, or the one that computes the same.
    pub(super) fn node(&mut self, kind: Kind, inputs: &[Id], shape: Shape, dtype: DType) -> Id {
        let inputs: SmallVec<[Id; 3]> = inputs.into();
        let fresh = matches!(kind, Kind::Primal | Kind::Tangent);
        let key = (kind, inputs.clone(), shape, dtype);
        if let Some(id) = self.known.get(&key).filter(|_| !fresh) {
            return *id;
        }
        let id = self.nodes.len() as Id;
        let needs = inputs.iter().any(|input| self.needs[*input as usize]);
        let (checkpoint, module) = (self.checkpoint, self.module);
        self.nodes.push(Node { kind, inputs, shape, dtype, checkpoint, kept: false, module });
        self.rules.push(Rule::None);
        self.needs.push(needs);
        self.known.insert(key, id);
        id
    }

    /// What comes in.
    pub(super) fn primal(&mut self, shape: Shape, dtype: DType, needs: bool) -> Id {
        let id = self.node(Kind::Primal, &[], shape, dtype);
        self.needs[id as usize] = needs;
        self.primals.push(id);
        id
    }

    pub(super) fn shape(&self, id: Id) -> Shape {
        self.nodes[id as usize].shape
    }

    pub(super) fn dtype(&self, id: Id) -> DType {
        self.nodes[id as usize].dtype
    }

    /// A node with its way back.
    pub(super) fn with_rule(&mut self, kind: Kind, inputs: &[Id], shape: Shape, dtype: DType, rule: Rule) -> Id {
        let before = self.nodes.len();
        let id = self.node(kind, inputs, shape, dtype);
        if id as usize >= before {
            self.rules[id as usize] = rule;
        }
        id
    }

    /// Element by element over one input, in its sizes.
    pub(super) fn map(&mut self, name: &'static str, x: Id, dtype: DType) -> Id {
        self.node(Kind::Pointwise(name), &[x], self.shape(x), dtype)
    }

    /// Element by element over two inputs, broadcast, in the type both meet in.
    pub(super) fn both(&mut self, name: &'static str, a: Id, b: Id) -> Id {
        let (x, y) = (self.shape(a), self.shape(b));
        let shape = x.broadcast(&y).unwrap_or(x);
        // A scalar tensor does not widen.
        let dtype = match (x.rank(), y.rank()) {
            (0, r) if r > 0 => self.dtype(b),
            (r, 0) if r > 0 => self.dtype(a),
            _ => promote(self.dtype(a), self.dtype(b)),
        };
        self.node(Kind::Pointwise(name), &[a, b], shape, dtype)
    }

    pub(super) fn view(&mut self, name: &'static str, x: Id, shape: Shape) -> Id {
        if self.shape(x) == shape && name == "view" {
            return x;
        }
        self.with_rule(Kind::View(name), &[x], shape, self.dtype(x), Rule::View)
    }

    /// One index of a dimension of two: the first that is asked for, then the other.
    pub(super) fn selected(&mut self, x: Id, shape: Shape) -> Id {
        let dtype = self.dtype(x);
        let known = self.known.contains_key(&(Kind::View("select 0"), SmallVec::from_slice(&[x]), shape, dtype));
        let name = if known { "select 1" } else { "select 0" };
        self.with_rule(Kind::View(name), &[x], shape, dtype, Rule::Slice)
    }

    /// `[rows, width]`.
    pub(super) fn flat(&mut self, x: Id) -> Id {
        let shape = self.shape(x);
        let width = shape.last();
        self.view("view", x, Shape::from([shape.elements() / width.max(1), width]))
    }

    pub(super) fn cast(&mut self, x: Id, dtype: DType) -> Id {
        if self.dtype(x) == dtype {
            return x;
        }
        self.with_rule(Kind::Pointwise("convert"), &[x], self.shape(x), dtype, Rule::Cast)
    }

    pub(super) fn add(&mut self, a: Id, b: Id) -> Id {
        let id = self.both("add", a, b);
        self.rules[id as usize] = Rule::Add;
        id
    }

    pub(super) fn mul(&mut self, a: Id, b: Id) -> Id {
        let id = self.both("mul", a, b);
        self.rules[id as usize] = Rule::Mul;
        id
    }

    /// Rows added by index into zeros, which are a kernel of their own.
    pub(super) fn scatter(&mut self, rows: Id, ids: Id, shape: Shape, dtype: DType) -> Id {
        let zeros = self.node(Kind::Zeros(self.nodes.len() as u32), &[], shape, dtype);
        self.node(Kind::Scatter, &[zeros, rows, ids], shape, dtype)
    }

    /// Users of every node.
    pub(super) fn users(&self) -> Vec<SmallVec<[Id; 4]>> {
        let mut users: Vec<SmallVec<[Id; 4]>> = vec![SmallVec::new(); self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            for input in &node.inputs {
                if users[*input as usize].last() != Some(&(at as Id)) {
                    users[*input as usize].push(at as Id);
                }
            }
        }
        users
    }
}
