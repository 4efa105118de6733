//! What a forward pass keeps for backward: held, made again by a checkpoint, or sent to the host.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use super::log::{Category, SharedLog};
use super::tensor::{Layout, Tensor, contiguous_strides};
use super::torch::Torch;
use crate::dtype::DType;
use crate::model::Shape;
use crate::plan::Selective;

/// A tensor kept for backward.
pub enum Saved {
    /// Held.
    Held(Tensor),
    /// Recomputed on demand.
    Again(Rc<Holder>),
    /// Copied to the host, and back when it is needed.
    OnHost(OnHost),
}

/// A place in a checkpoint's list of tensors; when it goes, so does the recomputed tensor.
pub struct Holder {
    frame: Rc<Frame>,
    index: usize,
}

/// What runs a region again.
pub type Again = Rc<dyn Fn(&mut Torch)>;

/// A checkpointed region: how to run it again, and what the second run made.
#[derive(Default)]
pub struct Frame {
    /// Runs the region again (set once the region's first run is over).
    pub run: RefCell<Option<Again>>,
    holders: RefCell<Vec<Weak<Holder>>>,
    recomputed: RefCell<Option<Vec<Option<Tensor>>>>,
    /// Which results are kept from the first run for the second.
    policy: Option<Selective>,
    results: RefCell<VecDeque<Vec<Tensor>>>,
    /// Products so far, in the first run and in the second.
    products: [Cell<u64>; 2],
}

/// The kernels whose results a selective checkpoint may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Costly {
    /// `aten.mm`.
    Product,
    /// `aten.addmm`, `bmm`, `baddbmm`.
    OtherProduct,
    /// Fused attention.
    Attention,
}

impl Frame {
    /// An empty frame that recomputes everything but what the policy keeps.
    pub fn new(policy: Option<Selective>) -> Rc<Self> {
        Rc::new(Self { policy, ..Self::default() })
    }

    /// Whether the policy keeps the results of the next kernel of this kind.
    fn keeps(&self, kind: Costly, second: bool) -> bool {
        match (self.policy, kind) {
            (None, _) => false,
            (Some(_), Costly::Attention) | (Some(Selective::Matmuls), _) => true,
            (Some(Selective::AlternateMatmuls), Costly::OtherProduct) => false,
            (Some(Selective::AlternateMatmuls), Costly::Product) => {
                let count = &self.products[usize::from(second)];
                count.set(count.get() + 1);
                !count.get().is_multiple_of(2)
            }
        }
    }
}

impl Saved {
    /// Keeps a tensor for backward.
    pub fn new(torch: &mut Torch, tensor: &Tensor) -> Self {
        if let Some(frame) = torch.recording.clone() {
            let holder = Rc::new(Holder { frame: Rc::clone(&frame), index: frame.holders.borrow().len() });
            frame.holders.borrow_mut().push(Rc::downgrade(&holder));
            return Self::Again(holder);
        }
        if let Some(frame) = torch.recomputing.clone() {
            torch.keep_recomputed(&frame, tensor);
        } else if torch.sends_to_host(tensor) {
            return Self::OnHost(OnHost::new(torch, tensor));
        }
        Self::Held(tensor.detached())
    }

    /// The tensor, recomputed if need be.
    ///
    /// What was held stays so until the node is done with; what was recomputed or fetched only as long as the node's code
    /// needs it, which is over before its results are summed down to the sizes of what they are for.
    pub fn get(self, torch: &mut Torch) -> Tensor {
        match self {
            Self::Held(tensor) => {
                torch.retained.push(Self::Held(tensor.clone()));
                tensor
            }
            Self::Again(holder) => {
                torch.retained.push(Self::Again(Rc::clone(&holder)));
                if holder.frame.recomputed.borrow().is_none() {
                    torch.recompute(&holder.frame);
                }
                let taken = holder.frame.recomputed.borrow_mut().as_mut().and_then(|list| list[holder.index].take());
                // A second run that saves less than the first would be a bug of ours; an empty scalar stands in.
                taken.unwrap_or_else(|| torch.phantom(Shape::new(&[]), DType::F32))
            }
            Self::OnHost(copy) => {
                let tensor = copy.fetch(torch);
                torch.retained.push(Self::OnHost(copy));
                tensor
            }
        }
    }
}

/// What of all that forward saves waits on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToHost {
    /// All of it (`torch.autograd.graph.save_on_cpu`).
    All,
    /// torchtune's `OffloadActivations`: neither what is small nor what head and loss save, and the last few stay on the
    /// card until backward asks for the first.
    Activations,
}

/// What was sent to the host last and is still on the card, so that copies go on beside the computation (`fwd_stash` of
/// torchtune/training/_activation_offloading.py).
#[derive(Default)]
pub struct Stash {
    sent: u64,
    held: VecDeque<(u64, Tensor)>,
    asked: bool,
}

impl Stash {
    /// `max_fwd_stash_size`.
    const SIZE: u64 = 5;
    /// `min_offload_size`, in bytes.
    const SMALLEST: u64 = 1024;

    fn keep(&mut self, tensor: &Tensor) -> u64 {
        self.sent += 1;
        while self.held.front().is_some_and(|(id, _)| id + Self::SIZE <= self.sent) {
            self.held.pop_front();
        }
        self.held.push_back((self.sent, tensor.detached()));
        self.sent
    }

    fn get(&mut self, id: Option<u64>) -> Option<Tensor> {
        self.asked = true;
        self.held.iter().find(|(known, _)| Some(*known) == id).map(|(_, tensor)| tensor.clone())
    }

    /// A node of the backward pass is done: the first that asked for something ends what forward left.
    pub(super) fn node_done(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.held.clear();
        }
    }
}

/// A dense copy in pinned host memory.
pub struct OnHost {
    layout: Rc<Layout>,
    dtype: DType,
    log: SharedLog,
    stashed: Option<u64>,
}

impl OnHost {
    /// Copies a tensor there.
    pub fn new(torch: &mut Torch, tensor: &Tensor) -> Self {
        let stashed = (torch.saves_on_host == Some(ToHost::Activations)).then(|| torch.stash.keep(tensor));
        if stashed.is_none() && !tensor.is_contiguous() {
            // `save_on_cpu` packs into a dense tensor, so what lies otherwise is made dense on the card first
            // (`copy_requires_temporaries` of ATen/native/cuda/Copy.cu).
            drop(torch.fresh("contiguous", tensor.shape, tensor.dtype));
        }
        let copy = Self { layout: Rc::clone(&tensor.layout), dtype: tensor.dtype, log: Rc::clone(&torch.log), stashed };
        copy.log.borrow_mut().host.take(copy.bytes());
        copy
    }

    /// Copies it back: a fresh dense tensor, unless the first is still there.
    pub fn fetch(&self, torch: &mut Torch) -> Tensor {
        let shape = self.layout.shape;
        if let Some(tensor) = torch.stash.get(self.stashed) {
            torch.effort.host = torch.effort.host.saturating_add(self.bytes());
            return tensor;
        }
        // There and back.
        torch.effort.host = torch.effort.host.saturating_add(self.bytes().saturating_mul(2));
        torch.fresh_strided("_to_copy", shape, contiguous_strides(&shape), self.dtype)
    }

    fn bytes(&self) -> u64 {
        self.layout.shape.elements().saturating_mul(self.dtype.size())
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        self.log.borrow_mut().host.give_back(self.bytes());
    }
}

impl Torch {
    /// Whether a tensor that is saved now goes to the host.
    pub(super) fn sends_to_host(&self, tensor: &Tensor) -> bool {
        match self.saves_on_host {
            None => false,
            Some(ToHost::All) => true,
            Some(ToHost::Activations) => {
                let bytes = tensor.elements().saturating_mul(tensor.dtype.size());
                bytes >= Stash::SMALLEST && self.log.borrow().category() != Category::Logits
            }
        }
    }

    fn recompute(&mut self, frame: &Rc<Frame>) {
        let run = frame.run.borrow().clone();
        *frame.recomputed.borrow_mut() = Some(Vec::with_capacity(frame.holders.borrow().len()));
        let outer = self.begin_recompute(frame);
        if let Some(run) = run {
            run(self);
        }
        self.end_recompute(outer);
        let missing = frame.holders.borrow().len();
        if let Some(list) = frame.recomputed.borrow_mut().as_mut() {
            list.resize_with(missing, || None);
        }
    }

    /// The second run reached a tensor that the first one saved; after the last one it stops.
    fn keep_recomputed(&mut self, frame: &Rc<Frame>, tensor: &Tensor) {
        let mut list = frame.recomputed.borrow_mut();
        let Some(list) = list.as_mut() else { return };
        let holders = frame.holders.borrow();
        if list.len() < holders.len() && !self.stopped {
            let alive = holders[list.len()].strong_count() > 0;
            list.push(alive.then(|| tensor.detached()));
            if list.len() == holders.len() {
                self.stopped = true;
            }
        }
    }

    /// The results of a costly kernel: made, or those that a selective checkpoint kept from the first run
    /// (`create_selective_checkpoint_contexts` of torch/utils/checkpoint.py).
    pub(super) fn costly<const N: usize>(
        &mut self,
        kind: Costly,
        make: impl FnOnce(&mut Self) -> [Tensor; N],
    ) -> [Tensor; N] {
        if let Some(frame) = self.recording.clone() {
            let results = make(self);
            if frame.keeps(kind, false) {
                frame.results.borrow_mut().push_back(results.to_vec());
            }
            return results;
        }
        let second = self.recomputing.clone().filter(|_| !self.stopped);
        let kept =
            second.filter(|frame| frame.keeps(kind, true)).and_then(|frame| frame.results.borrow_mut().pop_front());
        match kept.and_then(|results| results.try_into().ok()) {
            Some(results) => results,
            None => make(self),
        }
    }
}
