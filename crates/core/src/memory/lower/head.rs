//! The output head and the loss on it, for losses that take both at once.

use smallvec::smallvec;
use std::collections::BTreeSet;

use super::Runner;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Binary, Loss, Op, ParameterId, ValueId};
use crate::model::{Program, Shape, Step};
use crate::plan::{Compile, LossKind, LossOptions};

/// The head of a language model whose product is not made by itself.
#[derive(Debug, Clone, Default)]
pub struct Head {
    /// Its matrix.
    pub weight: Option<ParameterId>,
    /// Its bias.
    pub bias: Option<ParameterId>,
    /// The logits, and what is computed on them before the loss: never made.
    pub unmade: BTreeSet<ValueId>,
    /// Whether those are casts of the logits alone.
    casts: bool,
}

impl Head {
    /// Finds the next-token loss and the head before it; nothing where the head is not a linear.
    pub fn find(program: &Program) -> Self {
        Self::before(program, |loss| loss == Loss::CausalLm)
    }

    /// What goes into the loss, of whatever kind, from the head on.
    pub fn logits(program: &Program) -> BTreeSet<ValueId> {
        Self::before(program, |_| true).unmade
    }

    fn before(program: &Program, wants: impl Fn(Loss) -> bool) -> Self {
        let runs = || {
            program.steps.iter().rev().filter_map(|step| match step {
                Step::Run { op, inputs, outputs, .. } => Some((op, inputs, outputs)),
                _ => None,
            })
        };
        let mut wanted = runs().find_map(|(op, inputs, _)| match op {
            Op::Loss(loss) if wants(*loss) => inputs.first().copied(),
            _ => None,
        });
        let (mut unmade, mut casts) = (BTreeSet::new(), true);
        for (op, inputs, outputs) in runs() {
            let Some(value) = wanted.filter(|value| outputs.contains(value)) else { continue };
            unmade.insert(value);
            if let Op::Linear { weight, bias, .. } = op {
                return Self { weight: Some(*weight), bias: *bias, unmade, casts };
            }
            casts &= matches!(op, Op::Cast(_));
            wanted = inputs.first().copied();
        }
        Self::default()
    }

    /// Whether the loss is computed on the linear's result itself.
    pub fn is_plain(&self) -> bool {
        self.weight.is_some() && self.unmade.len() == 1
    }

    /// The same, in whatever type: torchtune's model widens logits that are not in chunks.
    pub fn is_cast(&self) -> bool {
        self.weight.is_some() && self.casts
    }
}

/// A loss that takes the head along.
#[derive(Debug, Clone)]
pub struct HeadLoss {
    head: Head,
    options: LossOptions,
    /// What is returned in place of the loss, token by token.
    scores: Option<Scores>,
    /// Whether hidden states are returned as they are.
    passes: bool,
}

/// What TRL's fused head returns for every token (`add_fused_lm_head`); log-probabilities in any case.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scores {
    /// Tokens that count: all but the first of every sample when absent.
    pub counted: Option<u64>,
    /// Entropies too.
    pub entropy: bool,
    /// Further figures that no gradient flows into, in fp32.
    pub further: u8,
    /// Whether the token is the likeliest.
    pub top: bool,
}

impl HeadLoss {
    /// What a plan asks for, where it is not transformers' own.
    pub fn new(program: &Program, options: LossOptions) -> Option<Self> {
        (options.kind != LossKind::Standard).then(|| Self {
            head: Head::find(program),
            options,
            scores: None,
            passes: false,
        })
    }

    /// The head scores tokens instead.
    pub fn scoring(program: &Program, scores: Scores) -> Self {
        let options = LossOptions { kind: LossKind::TrlFused, ..LossOptions::default() };
        Self { head: Head::find(program), options, scores: Some(scores), passes: false }
    }

    /// What goes into the head is returned.
    pub fn passing(program: &Program) -> Self {
        Self { passes: true, ..Self::scoring(program, Scores::default()) }
    }
}

impl Runner {
    /// Whether a value is one that is never made.
    pub(super) fn is_unmade(&self, value: ValueId, training: bool) -> bool {
        let liger = self.wrapped.liger.as_ref().is_some_and(|liger| liger.leaves_out(value, training));
        liger || self.wrapped.loss.as_ref().is_some_and(|loss| loss.head.unmade.contains(&value))
    }

    /// What such a loss makes of an operation; `None`: it leaves it alone.
    pub(super) fn head_loss(
        &self,
        torch: &mut Torch,
        op: &Op,
        inputs: &[Option<Tensor>],
        outputs: &[ValueId],
    ) -> Option<Vec<Option<Tensor>>> {
        let loss = self.wrapped.loss.as_ref()?;
        let first = inputs.first().and_then(Option::as_ref);
        if outputs.first().is_some_and(|value| loss.head.unmade.contains(value)) {
            // The hidden states are passed on in place of the logits.
            return Some(vec![first.cloned()]);
        }
        let Op::Loss(Loss::CausalLm) = op else { return None };
        let quantised = self.wrapped.quantised.get(&loss.head.weight?);
        if quantised.is_some() && loss.options.kind != LossKind::Chunked {
            torch.refuse("a fused loss on an output head that is quantised");
        }
        let weight = self.parameter(loss.head.weight?);
        let bias = loss.head.bias.map(|id| self.parameter(id));
        let (hidden, labels) = (first?, inputs.get(1).and_then(Option::as_ref)?);
        if loss.passes {
            return Some(vec![Some(hidden.clone())]);
        }
        let reader = super::trl_loss::Reader(self.hooks.clone());
        if let Some(scores) = loss.scores {
            let score =
                |torch: &mut Torch| super::trl_loss::scores(torch, scores, (hidden, labels), (weight, bias), &reader);
            return Some(torch.in_category(Category::Logits, score).into_iter().map(Some).collect());
        }
        let made = torch.in_category(Category::Logits, |torch| match loss.options.kind {
            LossKind::CutCrossEntropy => cut(torch, hidden, labels, weight),
            LossKind::TrlFused => {
                super::trl_loss::loss(torch, (hidden, labels), (weight, bias), (self.settings.counted, &reader))
            }
            _ => {
                let product = |torch: &mut Torch, piece: &Tensor| match quantised {
                    Some(matrix) => torch.quantised_linear(piece, matrix, bias),
                    None => torch.linear(piece, weight, bias),
                };
                let entropy: fn(&mut Torch, &Tensor, &Tensor) -> Tensor = match self.settings.compile {
                    Some(Compile::LayersAndLoss) => compiled_cross_entropy,
                    _ => widened_cross_entropy,
                };
                chunked(torch, (hidden, labels), (product, entropy), loss.options.chunks)
            }
        });
        Some(vec![Some(made)])
    }
}

/// Head and cross entropy a piece of the sequence at a time: all pieces of the logits are made first.
fn chunked(
    torch: &mut Torch,
    (hidden, labels): (&Tensor, &Tensor),
    (product, entropy): (impl Fn(&mut Torch, &Tensor) -> Tensor, impl Fn(&mut Torch, &Tensor, &Tensor) -> Tensor),
    chunks: u64,
) -> Tensor {
    let (batch, seq) = (hidden.shape.size(0), hidden.shape.size(1));
    let length = seq.div_ceil(chunks.max(1)).max(1);
    let lengths: Vec<u64> = (0..seq.div_ceil(length)).map(|part| length.min(seq - part * length)).collect();
    let padded = torch.fresh("constant_pad_nd", labels.shape.with(-1, seq + 1), DType::I64);
    let pieces = torch.split(hidden, 1, &lengths);
    let logits: Vec<Tensor> = pieces.iter().map(|piece| product(torch, piece)).collect();
    drop(pieces);
    let counted = torch.fresh("ne", labels.shape, DType::Bool);
    let total = torch.fresh("sum", Shape::new(&[]), DType::I64);
    drop(counted);
    let targets: Vec<Tensor> = lengths
        .iter()
        .map(|length| match batch {
            1 => padded.detached().with_shape(Shape::from([*length])),
            _ => torch.fresh("clone", Shape::from([batch * length]), DType::I64),
        })
        .collect();
    let mut sum: Option<Tensor> = None;
    for (piece, target) in logits.iter().zip(&targets) {
        let classes = piece.shape.last();
        let flat = torch.reshape(piece, Shape::from([piece.elements() / classes.max(1), classes]));
        let loss = entropy(torch, &flat, target);
        drop(flat);
        sum = Some(match sum {
            None => torch.scalar(Binary::Add, &loss),
            Some(sum) => torch.in_place(Binary::Add, &sum, &loss),
        });
    }
    drop((targets, logits, padded));
    match sum {
        Some(sum) => torch.binary(Binary::Div, &sum, &total),
        None => total,
    }
}

fn widened_cross_entropy(torch: &mut Torch, logits: &Tensor, labels: &Tensor) -> Tensor {
    let wide = torch.cast(logits, DType::F32);
    torch.cross_entropy(&wide, labels)
}

/// The same as a compiled graph: it keeps the logits as they are and two numbers for each row.
fn compiled_cross_entropy(torch: &mut Torch, logits: &Tensor, labels: &Tensor) -> Tensor {
    let rows = Shape::from([logits.shape.size(0), 1]);
    let [largest, log] = [(), ()].map(|()| torch.fresh("compiled kernel", rows, DType::F32));
    let loss = torch.fresh("compiled kernel", Shape::new(&[]), DType::F32);
    if !torch.records(&[logits]) {
        return loss;
    }
    let saved: Vec<Saved> = [logits, labels, &largest, &log].map(|tensor| Saved::new(torch, tensor)).into();
    let (shape, dtype) = (logits.shape, logits.dtype);
    torch.attach(loss, &[logits], move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let made = torch.fresh("compiled kernel", shape, dtype);
        drop((kept, gradient));
        smallvec![Some(made)]
    })
}

/// `LinearCrossEntropyFunction` of cut-cross-entropy, which shifts the labels itself.
fn cut(torch: &mut Torch, hidden: &Tensor, labels: &Tensor, weight: &Tensor) -> Tensor {
    let (width, classes) = (hidden.shape.last(), weight.shape.size(0));
    let rows = hidden.elements() / width.max(1);
    let hidden = torch.contiguous(hidden);
    let flat = torch.reshape(&hidden, Shape::from([rows, width]));
    let counted = rows - (rows / labels.shape.last().max(1)).min(rows);
    let pairs = torch.fresh("nonzero", Shape::from([counted, labels.shape.rank() as u64]), DType::I64);
    let narrow = torch.fresh("_to_copy", pairs.shape, DType::I32);
    drop(pairs);
    let valid = torch.fresh("sum", Shape::from([counted]), DType::I64);
    drop(narrow);
    let sums = torch.fresh("cce lse", Shape::from([counted]), DType::F32);
    let locks = torch.fresh("cce locks", Shape::from([counted.div_ceil(128)]), DType::U32);
    let wants = torch.records(&[&flat, weight]);
    let averages = wants.then(|| torch.fresh("cce logit_avg", Shape::from([classes]), DType::F32));
    drop(locks);
    let dots = torch.fresh("cce neg_dot", Shape::from([counted]), DType::F32);
    let loss = torch.fresh("mean", Shape::new(&[]), DType::F32);
    drop(dots);
    if !wants {
        return loss;
    }
    let kept = [&flat, weight, &sums, labels, &valid].into_iter().chain(&averages);
    let saved: Vec<Saved> = kept.map(|tensor| Saved::new(torch, tensor)).collect();
    let (shape, table, dtype) = (flat.shape, weight.shape, flat.dtype);
    let (own, needs_weight) = (weight.dtype, weight.needs_grad());
    torch.attach(loss, &[&flat, weight], move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let sorted = torch.fresh("sort", Shape::from([classes]), DType::F32);
        let places = torch.fresh("sort", Shape::from([classes]), DType::I64);
        let order = torch.fresh("_to_copy", Shape::from([classes]), DType::I32);
        drop((sorted, places));
        let for_hidden = torch.fresh("zeros_like", shape, dtype);
        let for_weight = needs_weight.then(|| torch.fresh("zeros_like", table, dtype));
        let blocks = width.div_ceil(64).max(1);
        let locks =
            [counted, classes].map(|n| torch.fresh("cce locks", Shape::from([n.div_ceil(blocks), blocks]), DType::I32));
        drop((locks, order, kept, gradient));
        let for_weight = for_weight.map(|made| torch.cast(&made, own));
        smallvec![Some(for_hidden), for_weight]
    })
}
