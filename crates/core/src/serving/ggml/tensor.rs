//! Tensors and the operations that make them: ggml.c without arithmetic.

use crate::dtype::{Format, Per};

/// A type: its number in ggml, and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) number: u32,
    /// Elements of a block.
    pub(crate) block: u64,
    /// Bytes of a block.
    pub(crate) bytes: u64,
}

impl Kind {
    pub(crate) const F32: Self = Self { number: 0, block: 1, bytes: 4 };
    pub(crate) const F16: Self = Self { number: 1, block: 1, bytes: 2 };
    pub(crate) const I32: Self = Self { number: 26, block: 1, bytes: 4 };
    pub(crate) const I64: Self = Self { number: 27, block: 1, bytes: 8 };

    /// A format that GGUF files can hold.
    pub(crate) fn of(format: &Format) -> Option<Self> {
        let number = format.ggml_type?;
        let part = format.parts.first()?;
        let Per::Elements(block) = part.per else { return None };
        Some(Self { number, block: block.max(1), bytes: part.bytes })
    }

    pub(crate) fn quantised(self) -> bool {
        self.block > 1
    }

    /// Bytes of so many elements in a row (`ggml_row_size`).
    pub(crate) fn row(self, elements: u64) -> u64 {
        (elements / self.block).saturating_mul(self.bytes)
    }
}

/// A tensor of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id(pub(crate) usize);

/// Where a tensor lies that the graph did not make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Device(usize),
    Host,
}

/// What computes a tensor. Named after `ggml_op`; what memory does not tell apart is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    None,
    View,
    Reshape,
    Permute,
    Transpose,
    GetRows,
    SetRows,
    MulMat,
    MulMatId,
    Add,
    AddId,
    Mul,
    Div,
    Scale,
    Norm,
    RmsNorm,
    Rope,
    SoftMax,
    FlashAttention,
    Cont,
    Copy,
    Unary,
    Glu,
    Argsort,
    SumRows,
    Clamp,
    Concat,
    Square,
    Repeat,
    Fill,
    Pad,
    /// A convolution over the last inputs (`GGML_OP_SSM_CONV`).
    Convolve,
    /// Mamba's scan.
    Scan,
    /// Any other kernel: it writes a tensor of its own, and every card has it.
    Other,
}

impl Op {
    /// No kernel: the bytes of another tensor seen otherwise (`ggml_is_view_op`).
    pub(crate) fn looks(self) -> bool {
        matches!(self, Self::View | Self::Reshape | Self::Permute | Self::Transpose)
    }

    /// May write over a source (`ggml_op_can_inplace`).
    pub(crate) fn in_place(self) -> bool {
        use Op::{Add, AddId, Div, Fill, Mul, RmsNorm, Rope, Scale, SoftMax, Square, Unary};
        matches!(self, Fill | Scale | Add | AddId | Mul | Div | Square | Unary | Rope | RmsNorm | SoftMax)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) op: Op,
    pub(crate) kind: Kind,
    /// Elements of every dimension, the fastest first.
    pub(crate) ne: [u64; 4],
    /// Bytes from one element of a dimension to the next.
    pub(crate) nb: [u64; 4],
    pub(crate) sources: Vec<Id>,
    /// Whose bytes it has, followed to the end, and from where on.
    pub(crate) view: Option<(Id, u64)>,
    pub(crate) place: Option<Place>,
    /// In a buffer of weights.
    pub(crate) weight: bool,
    pub(crate) input: bool,
    pub(crate) output: bool,
    /// The backend it was told to run on.
    pub(crate) backend: Option<usize>,
}

impl Tensor {
    pub(crate) fn elements(&self) -> u64 {
        self.ne.iter().fold(1, |product, size| product.saturating_mul(*size))
    }

    pub(crate) fn rows(&self) -> u64 {
        self.ne[1..].iter().fold(1, |product, size| product.saturating_mul(*size))
    }

    /// From its first byte to its last (`ggml_nbytes`).
    pub(crate) fn bytes(&self) -> u64 {
        if self.elements() == 0 {
            return 0;
        }
        let further = |dimensions: std::ops::Range<usize>| {
            dimensions.fold(0u64, |sum, at| sum.saturating_add((self.ne[at] - 1).saturating_mul(self.nb[at])))
        };
        if self.kind.block == 1 {
            self.kind.bytes.saturating_add(further(0..4))
        } else {
            (self.ne[0].saturating_mul(self.nb[0]) / self.kind.block).saturating_add(further(1..4))
        }
    }

    pub(crate) fn same_layout(&self, other: &Self) -> bool {
        self.kind == other.kind && self.ne == other.ne && self.nb == other.nb
    }

    /// Whether nothing is skipped in its first dimensions up to `from`, nor after (`ggml_is_contiguous_n`).
    pub(crate) fn contiguous_from(&self, from: usize) -> bool {
        let mut next = self.kind.bytes;
        if self.ne[0] != self.kind.block && self.nb[0] != next {
            return false;
        }
        next = next.saturating_mul(self.ne[0] / self.kind.block);
        for at in 1..4 {
            if at > from {
                if self.ne[at] != 1 && self.nb[at] != next {
                    return false;
                }
                next = next.saturating_mul(self.ne[at]);
            } else {
                next = self.ne[at].saturating_mul(self.nb[at]);
            }
        }
        true
    }

    pub(crate) fn contiguous(&self) -> bool {
        self.contiguous_from(0)
    }

    /// Every row in one piece.
    pub(crate) fn contiguous_rows(&self) -> bool {
        self.ne[0] == self.kind.block || self.nb[0] == self.kind.bytes
    }
}

/// Tensors, and those of them that a graph computes in their order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Graph {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) nodes: Vec<Id>,
    pub(crate) leafs: Vec<Id>,
    visited: Vec<bool>,
}

impl std::ops::Index<Id> for Graph {
    type Output = Tensor;
    fn index(&self, id: Id) -> &Tensor {
        &self.tensors[id.0]
    }
}

impl std::ops::IndexMut<Id> for Graph {
    fn index_mut(&mut self, id: Id) -> &mut Tensor {
        &mut self.tensors[id.0]
    }
}

fn strides(kind: Kind, ne: [u64; 4]) -> [u64; 4] {
    let first = kind.row(ne[0]);
    let second = first.saturating_mul(ne[1]);
    [kind.bytes, first, second, second.saturating_mul(ne[2])]
}

impl Graph {
    pub(crate) fn push(&mut self, tensor: Tensor) -> Id {
        self.tensors.push(tensor);
        self.visited.push(false);
        Id(self.tensors.len() - 1)
    }

    fn make(&mut self, op: Op, kind: Kind, ne: [u64; 4], sources: &[Id]) -> Id {
        let nb = strides(kind, ne);
        self.push(Tensor {
            op,
            kind,
            ne,
            nb,
            sources: sources.to_vec(),
            view: None,
            place: None,
            weight: false,
            input: false,
            output: false,
            backend: None,
        })
    }

    fn see(&mut self, op: Op, of: Id, ne: [u64; 4], nb: [u64; 4], offset: u64) -> Id {
        let (root, start) = self[of].view.unwrap_or((of, 0));
        let id = self.make(op, self[of].kind, ne, &[of]);
        self[id].nb = nb;
        self[id].view = Some((root, start.saturating_add(offset)));
        id
    }

    /// A tensor in a buffer of its own: a weight, or a cache.
    pub(crate) fn stored(&mut self, kind: Kind, ne: [u64; 4], place: Place, weight: bool) -> Id {
        let id = self.make(Op::None, kind, ne, &[]);
        self[id].place = Some(place);
        self[id].weight = weight;
        id
    }

    pub(crate) fn input(&mut self, kind: Kind, ne: [u64; 4]) -> Id {
        let id = self.make(Op::None, kind, ne, &[]);
        self[id].input = true;
        id
    }

    /// A tensor like another, with room of its own (`ggml_dup_tensor_layout`).
    pub(crate) fn like(&mut self, of: Id) -> Id {
        let (kind, ne, nb) = (self[of].kind, self[of].ne, self[of].nb);
        let id = self.make(Op::None, kind, ne, &[]);
        self[id].nb = nb;
        id
    }

    /// What keeps `of` alive and is nothing itself (the scheduler's `input_dep`).
    pub(crate) fn dependency(&mut self, of: Id) -> Id {
        let (ne, nb) = (self[of].ne, self[of].nb);
        self.see(Op::None, of, ne, nb, 0)
    }

    /// As large as its first source.
    pub(crate) fn same(&mut self, op: Op, sources: &[Id]) -> Id {
        let first = sources.first().copied().unwrap_or(Id(0));
        let (kind, ne) = (self[first].kind, self[first].ne);
        self.make(op, kind, ne, sources)
    }

    pub(crate) fn mul_mat(&mut self, a: Id, b: Id) -> Id {
        let ne = [self[a].ne[1], self[b].ne[1], self[b].ne[2], self[b].ne[3]];
        self.make(Op::MulMat, Kind::F32, ne, &[a, b])
    }

    pub(crate) fn mul_mat_id(&mut self, experts: Id, b: Id, chosen: Id) -> Id {
        let ne = [self[experts].ne[1], self[chosen].ne[0], self[b].ne[2], 1];
        self.make(Op::MulMatId, Kind::F32, ne, &[experts, b, chosen])
    }

    pub(crate) fn get_rows(&mut self, a: Id, rows: Id) -> Id {
        let kind = if self[a].kind == Kind::I32 { Kind::I32 } else { Kind::F32 };
        let ne = [self[a].ne[0], self[rows].ne[0], self[rows].ne[1], self[rows].ne[2]];
        self.make(Op::GetRows, kind, ne, &[a, rows])
    }

    /// Rows written into `a`, whose bytes it has.
    pub(crate) fn set_rows(&mut self, a: Id, rows: Id, places: Id) -> Id {
        let id = self.written(Op::SetRows, a);
        self[id].sources = vec![rows, places, a];
        id
    }

    /// Another type; it is its own second source, as ggml's is.
    pub(crate) fn cast(&mut self, a: Id, kind: Kind) -> Id {
        let id = self.make(Op::Copy, kind, self[a].ne, &[a]);
        self[id].sources.push(id);
        id
    }

    /// Written to where `to` lies (`ggml_cpy`).
    pub(crate) fn copy(&mut self, from: Id, to: Id) -> Id {
        let id = self.written(Op::Copy, to);
        self[id].sources = vec![from, to];
        id
    }

    /// An operation that writes over its source, whoever else reads it (`ggml_…_inplace`).
    pub(crate) fn written(&mut self, op: Op, of: Id) -> Id {
        let (ne, nb) = (self[of].ne, self[of].nb);
        self.see(op, of, ne, nb, 0)
    }

    pub(crate) fn repeat(&mut self, a: Id, ne: [u64; 4]) -> Id {
        self.make(Op::Repeat, self[a].kind, ne, &[a])
    }

    pub(crate) fn cont(&mut self, a: Id, ne: [u64; 4]) -> Id {
        self.make(Op::Cont, self[a].kind, ne, &[a])
    }

    pub(crate) fn glu(&mut self, a: Id, b: Option<Id>) -> Id {
        let mut ne = self[a].ne;
        match b {
            Some(b) => self.make(Op::Glu, self[a].kind, ne, &[a, b]),
            None => {
                ne[0] /= 2;
                self.make(Op::Glu, self[a].kind, ne, &[a])
            }
        }
    }

    pub(crate) fn flash_attention(&mut self, [q, k, v]: [Id; 3], more: &[Id]) -> Id {
        let ne = [self[v].ne[0], self[q].ne[2], self[q].ne[1], self[q].ne[3]];
        let sources: Vec<Id> = [q, k, v].iter().chain(more).copied().collect();
        self.make(Op::FlashAttention, Kind::F32, ne, &sources)
    }

    pub(crate) fn argsort(&mut self, a: Id) -> Id {
        self.make(Op::Argsort, Kind::I32, self[a].ne, &[a])
    }

    pub(crate) fn sum_rows(&mut self, a: Id) -> Id {
        let ne = self[a].ne;
        self.make(Op::SumRows, self[a].kind, [1, ne[1], ne[2], ne[3]], &[a])
    }

    pub(crate) fn concat(&mut self, a: Id, b: Id, dimension: usize) -> Id {
        let mut ne = self[a].ne;
        ne[dimension] = ne[dimension].saturating_add(self[b].ne[dimension]);
        self.make(Op::Concat, self[a].kind, ne, &[a, b])
    }

    /// An operation with an output of any shape.
    pub(crate) fn shaped(&mut self, op: Op, kind: Kind, ne: [u64; 4], sources: &[Id]) -> Id {
        self.make(op, kind, ne, sources)
    }

    pub(crate) fn reshape(&mut self, a: Id, ne: [u64; 4]) -> Id {
        let nb = strides(self[a].kind, ne);
        self.see(Op::Reshape, a, ne, nb, 0)
    }

    /// `nb`: the strides of the second to fourth dimension.
    pub(crate) fn view(&mut self, a: Id, ne: [u64; 4], nb: [u64; 3], offset: u64) -> Id {
        self.see(Op::View, a, ne, [self[a].kind.bytes, nb[0], nb[1], nb[2]], offset)
    }

    pub(crate) fn permute(&mut self, a: Id, order: [usize; 4]) -> Id {
        let (mut ne, mut nb) = ([1; 4], [0; 4]);
        for (at, to) in order.into_iter().enumerate() {
            (ne[to], nb[to]) = (self[a].ne[at], self[a].nb[at]);
        }
        self.see(Op::Permute, a, ne, nb, 0)
    }

    pub(crate) fn transpose(&mut self, a: Id) -> Id {
        let (mut ne, mut nb) = (self[a].ne, self[a].nb);
        ne.swap(0, 1);
        nb.swap(0, 1);
        self.see(Op::Transpose, a, ne, nb, 0)
    }

    /// Adds what a tensor needs and was not there yet, then itself (`ggml_build_forward_expand`).
    pub(crate) fn expand(&mut self, id: Id) {
        if std::mem::replace(&mut self.visited[id.0], true) {
            return;
        }
        for source in self[id].sources.clone() {
            self.expand(source);
        }
        if self[id].op == Op::None { self.leafs.push(id) } else { self.nodes.push(id) }
    }
}
