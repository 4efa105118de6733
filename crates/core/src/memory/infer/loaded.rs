//! A model on the card, ready for passes of generation.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use super::batch::Batch;
use crate::memory::adapters::{self, Made};
use crate::memory::log::Category;
use crate::memory::lower::cache::Store;
use crate::memory::lower::{Dealt, Runner, Settings, Wrapped};
use crate::memory::stored;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::quantised::QuantisedWeight;
use crate::memory::torch::stored::{StoredKernel, StoredWeight};
use crate::model::Program;
use crate::model::op::ParameterId;
use crate::plan::{InferPlan, Kernels};
use crate::source::quantization as source;

/// Parameters and buffers, and the cache of the run under way.
pub(super) struct Loaded {
    pub(super) settings: Settings,
    pub(super) parameters: BTreeMap<String, Tensor>,
    pub(super) quantised: BTreeMap<String, QuantisedWeight>,
    pub(super) stored: BTreeMap<String, StoredWeight>,
    /// Held as long as the model is.
    pub(super) buffers: Vec<Tensor>,
    pub(super) store: Option<Rc<Store>>,
    /// Where modules are, if not all are on the card.
    pub(super) dealt: Option<Rc<Dealt>>,
}

impl Loaded {
    /// Parameters and buffers onto the card.
    pub(super) fn load(
        torch: &mut Torch,
        program: &Program,
        plan: &InferPlan,
        base: Option<(&source::Quantization, StoredKernel)>,
    ) -> Self {
        let ((mut loaded, untied), stored) = torch.in_category(Category::Weights, |torch| match base {
            Some(base) => {
                let (loaded, stored) = stored::load(torch, program, plan.weights, base);
                ((loaded, Vec::new()), stored)
            }
            None => (
                adapters::dense(torch, program, Made::for_inference(plan), plan.quantization.as_ref()),
                BTreeMap::new(),
            ),
        });
        let buffers = adapters::buffers(torch, program, plan.weights);
        drop(untied);
        let by_name = |id: ParameterId| program.parameters[id.0 as usize].name.clone();
        let quantised = plan.quantization.as_ref().map_or_else(BTreeMap::new, |scheme| {
            torch.in_category(Category::Weights, |torch| {
                adapters::quantise_linears(torch, program, plan.weights, scheme, &mut loaded)
            })
        });
        let quantised = crate::order::map(quantised.into_iter().map(|(id, weight)| (by_name(id), weight)));
        let stored = crate::order::map(stored.into_iter().map(|(id, weight)| (by_name(id), weight)));
        let names = program.parameters.iter().map(|parameter| parameter.name.clone());
        let parameters = crate::order::map(names.zip(loaded));
        Self { quantised, stored, buffers, ..Self::bare(plan, parameters) }
    }

    /// Parameters alone.
    pub(super) fn bare(plan: &InferPlan, parameters: BTreeMap<String, Tensor>) -> Self {
        let settings = Settings {
            attention: plan.attention,
            checkpointing: false,
            kernels: Kernels::Transformers,
            autocast: None,
            weights: plan.weights,
            buffers: plan.weights,
            mask: true,
            padded: plan.batch.padded,
            real_tokens: None,
            counted: None,
            documents: None,
            save_on_cpu: None,
            pads_otherwise: false,
            reuses_all: false,
            fills_cache: false,
            keeps_hidden: false,
            refuses_cache: false,
            compile: None,
            float8: None,
            drops_outputs: false,
        };
        Self {
            settings,
            parameters,
            quantised: BTreeMap::new(),
            stored: BTreeMap::new(),
            buffers: Vec::new(),
            store: None,
            dealt: None,
        }
    }

    /// One pass over a batch, with so many positions cached.
    pub(super) fn pass(&self, torch: &mut Torch, batch: &Batch, program: &Arc<Program>, past: u64) -> Vec<Tensor> {
        if let Some(store) = &self.store {
            store.begin(past);
        }
        self.runner(torch, batch, program).forward(torch)
    }

    /// A part of a pass.
    pub(super) fn pass_part(
        &self,
        torch: &mut Torch,
        batch: &Batch,
        program: &Arc<Program>,
        steps: std::ops::Range<usize>,
    ) -> Vec<Tensor> {
        self.runner(torch, batch, program).forward_part(torch, steps)
    }

    fn runner(&self, torch: &mut Torch, batch: &Batch, program: &Arc<Program>) -> Rc<Runner> {
        let known = |p: &crate::model::op::Parameter| self.parameters.get(&p.name).cloned();
        let parameters = program
            .parameters
            .iter()
            .map(|p| known(p).unwrap_or_else(|| torch.phantom(p.shape, self.settings.weights)))
            .collect();
        let inputs = batch.bind(torch, program);
        let ids = || (0..).map(ParameterId).zip(&program.parameters);
        let quantised = crate::order::map(ids().filter_map(|(id, p)| Some((id, self.quantised.get(&p.name)?.clone()))));
        let stored = crate::order::map(ids().filter_map(|(id, p)| Some((id, self.stored.get(&p.name)?.clone()))));
        let wrapped = Rc::new(Wrapped { quantised, stored, ..Wrapped::default() });
        let cache = self.store.as_ref().map(Rc::clone);
        let runner = Runner::with(Arc::clone(program), parameters, inputs, self.settings, wrapped, cache);
        Rc::new(runner.dealt(self.dealt.clone()))
    }
}
