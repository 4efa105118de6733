//! The tensors of a batch, and how `generate` makes them longer.

use super::choose;
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Input, Op, ValueId};
use crate::model::{Program, Shape, Step};
use crate::plan::InferPlan;

/// The tensors of the batch that grow with every token.
pub(in crate::memory) struct Batch {
    pub(in crate::memory) ids: Tensor,
    pub(in crate::memory) mask: Option<Tensor>,
    pub(in crate::memory) positions: Option<Tensor>,
    pub(in crate::memory) media: Vec<(Input, Tensor)>,
    /// The mask of an encoder's tokens.
    encoder: Option<Tensor>,
    pub(in crate::memory) next: choose::Next,
}

impl Batch {
    /// What `loaded` holds: ids, the mask where one is given, images and audio.
    pub(in crate::memory) fn new(torch: &mut Torch, program: &Program, plan: &InferPlan) -> Self {
        torch.in_category(Category::Batch, |torch| {
            let shape = Shape::from([plan.batch.batch_size, plan.batch.seq_len]);
            let mut media = Vec::new();
            for (kind, shape) in inputs_of(program) {
                let dtype = match kind {
                    Input::Pixels | Input::Audio => plan.weights,
                    Input::Other(dtype) => dtype,
                    _ => continue,
                };
                media.push((kind, torch.fresh("batch", shape, dtype)));
            }
            let ids = torch.fresh("batch", shape, DType::I64);
            let given = plan.new_tokens > 0 || plan.batch.mask;
            let mask = given.then(|| torch.fresh("batch", shape, DType::I64));
            Self { ids, mask, positions: None, media, encoder: None, next: choose::Next::default() }
        })
    }

    /// Of ids and a mask that are there.
    pub(in crate::memory) fn of(ids: Tensor, mask: Option<Tensor>, media: Vec<(Input, Tensor)>) -> Self {
        Self { ids, mask, positions: None, media, encoder: None, next: choose::Next::default() }
    }

    /// What `generate` makes before the first pass: special tokens, positions counted over the mask, beams.
    pub(in crate::memory) fn prepare(&mut self, torch: &mut Torch, program: &Program, plan: &InferPlan, decoder: bool) {
        torch.in_category(Category::Batch, |torch| {
            let audio = self.media.iter().position(|(kind, _)| *kind == Input::Audio);
            if let (true, Some(at)) = (decoder, audio) {
                // Whisper cuts sound in segments and joins those of the batch; the caller holds the whole.
                let whole = &self.media[at].1;
                let segments = torch.fresh("cat", whole.shape, whole.dtype);
                self.media.insert(0, (Input::Audio, segments));
            }
            if decoder {
                // The mask is the encoder's and does not grow.
                self.encoder = self.mask.take();
                let start = Shape::from([plan.batch.batch_size, 1]);
                self.media
                    .push((Input::Tokens, std::mem::replace(&mut self.ids, torch.fresh("full", start, DType::I64))));
            }
            let uses_positions = program
                .steps
                .iter()
                .any(|step| matches!(step, Step::Run { op: Op::RotaryTable(_) | Op::Input(Input::Positions), .. }));
            if uses_positions {
                let counted = torch.fresh("cumsum", self.ids.shape, DType::I64);
                let shifted = torch.fresh("sub", self.ids.shape, DType::I64);
                drop(counted);
                let empty = torch.fresh("eq", self.ids.shape, DType::Bool);
                self.positions = Some(torch.fresh("masked_fill", self.ids.shape, DType::I64));
                drop((shifted, empty));
            }
            if plan.beams > 1 {
                let grown = std::iter::once(&mut self.ids).chain(&mut self.mask).chain(&mut self.positions);
                for tensor in grown.chain(&mut self.encoder) {
                    let shape = tensor.shape.with(0, plan.sequences());
                    *tensor = torch.fresh("repeat_interleave", shape, DType::I64);
                }
            }
        });
    }

    /// The tensors that a program's inputs are; token ids are a dense copy of the newest.
    pub(in crate::memory) fn bind(&self, torch: &mut Torch, program: &Program) -> Vec<(ValueId, Tensor)> {
        let mut bound = Vec::new();
        torch.in_category(Category::Batch, |torch| {
            for step in &program.steps {
                let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
                let shape = program.values[outputs[0].0 as usize];
                let tensor = match kind {
                    Input::Tokens | Input::DecoderTokens => torch.fresh("clone", shape, DType::I64),
                    Input::Mask => self
                        .mask
                        .clone()
                        .or_else(|| self.encoder.clone())
                        .unwrap_or_else(|| torch.phantom(shape, DType::I64)),
                    Input::Positions => torch.phantom(shape, DType::I64),
                    kind => {
                        let known = self.media.iter().find(|(known, tensor)| known == kind && tensor.shape == shape);
                        known.map_or_else(|| torch.phantom(shape, DType::I64), |(_, tensor)| tensor.clone())
                    }
                };
                let strides = tensor.strides;
                bound.push((outputs[0], tensor.with_layout(shape, strides)));
            }
        });
        bound
    }

    /// Positions and mask for one token more.
    pub(in crate::memory) fn update(&mut self, torch: &mut Torch) {
        torch.in_category(Category::Batch, |torch| {
            for tensor in self.positions.iter_mut().chain(&mut self.mask) {
                *tensor = longer(torch, tensor, 1);
            }
        });
    }

    /// The same tensors under another name, with nothing chosen yet and no media.
    pub(in crate::memory) fn shared(&self) -> Self {
        Self {
            ids: self.ids.clone(),
            mask: self.mask.clone(),
            positions: self.positions.clone(),
            media: Vec::new(),
            encoder: None,
            next: choose::Next::default(),
        }
    }

    /// Drafted tokens behind the others, with mask and positions for them.
    pub(in crate::memory) fn with_candidates(&self, torch: &mut Torch, ids: Tensor, drafted: u64) -> Self {
        let mut batch = Self { ids, ..self.shared() };
        if drafted > 0 {
            batch.lengthen(torch, drafted);
        }
        batch
    }

    /// Mask and positions as long as the ids have become.
    pub(in crate::memory) fn reach(&mut self, torch: &mut Torch, length: u64) {
        let known = self.mask.as_ref().map_or(length, |mask| mask.shape.size(1));
        if let Some(more) = length.checked_sub(known).filter(|more| *more > 0) {
            self.lengthen(torch, more);
        }
    }

    /// So many tokens are accepted: ids, then positions and mask.
    pub(in crate::memory) fn accept(&mut self, torch: &mut Torch, tokens: u64) {
        torch.in_category(Category::Batch, |torch| {
            for tensor in std::iter::once(&mut self.ids).chain(&mut self.positions).chain(&mut self.mask) {
                *tensor = longer(torch, tensor, tokens);
            }
        });
    }

    fn lengthen(&mut self, torch: &mut Torch, tokens: u64) {
        torch.in_category(Category::Batch, |torch| {
            for tensor in self.mask.iter_mut().chain(&mut self.positions) {
                *tensor = longer(torch, tensor, tokens);
            }
        });
    }

    /// All of it goes.
    pub(in crate::memory) fn let_go(&mut self, torch: &mut Torch) {
        self.ids = torch.phantom(self.ids.shape, DType::I64);
        self.mask = None;
        self.positions = None;
        self.media.clear();
        self.encoder = None;
    }

    /// The chosen tokens joined to the ids.
    pub(in crate::memory) fn append(&mut self, torch: &mut Torch) {
        self.ids = torch.in_category(Category::Batch, |torch| longer(torch, &self.ids, 1));
    }

    /// Steps that were skipped have made the ids longer.
    pub(in crate::memory) fn grow_to(&mut self, length: u64) {
        for tensor in std::iter::once(&mut self.ids).chain(&mut self.mask).chain(&mut self.positions) {
            tensor.shape = tensor.shape.with(1, length);
        }
    }
}

/// A tensor joined with so many positions more.
pub(in crate::memory) fn longer(torch: &mut Torch, tensor: &Tensor, tokens: u64) -> Tensor {
    let shape = tensor.shape.with(1, tensor.shape.size(1).saturating_add(tokens));
    torch.fresh("cat", shape, tensor.dtype)
}

fn inputs_of(program: &Program) -> impl Iterator<Item = (Input, Shape)> {
    program.steps.iter().filter_map(|step| match step {
        Step::Run { op: Op::Input(kind), outputs, .. } => Some((*kind, program.values[outputs[0].0 as usize])),
        _ => None,
    })
}
