//! Linears with what surrounds them (float8, padding, LoRA), and the loss.

use super::graph::{Id, Kind};
use super::pad;
use super::rules::Rule;
use super::trace::{Source, Tracer, dropout};
use crate::dtype::DType;
use crate::model::Shape;
use crate::model::op::{LinearLayout, ModuleId};
use crate::plan::Selective;

impl Tracer<'_> {
    pub(super) fn linear(
        &mut self,
        x: Id,
        (weight, bias, layout): (Id, Option<Id>, LinearLayout),
        shape: Shape,
    ) -> Result<Id, String> {
        if let Some(how) = self.around.float8.filter(|_| self.in_layer && layout == LinearLayout::OutIn) {
            let x = self.narrow(x);
            let g = &mut self.graph;
            let product = g.float8_linear(x, weight, how);
            let whole = g.view("view", product, shape);
            return Ok(bias.map_or(whole, |bias| {
                let bias = g.cast(bias, g.dtype(whole));
                g.add(whole, bias)
            }));
        }
        let (weight, x) = (self.narrow(weight), self.narrow(x));
        let bias = bias.map(|bias| self.narrow(bias));
        let g = &mut self.graph;
        let dtype = g.dtype(x);
        let flat = g.flat(x);
        let rows = g.shape(flat).size(0);
        // fx_passes/pad_mm.py.
        let aligned = pad::aligned(dtype);
        let odd = |size: u64| !size.is_multiple_of(aligned);
        // A count of rows that is none leaves every row of memory where it was: its benchmark finds no gain.
        if odd(g.shape(flat).last()) {
            return Err(format!(
                "a product whose inner size is no multiple of {aligned}, which Inductor pads where its benchmark says so,"
            ));
        }
        let turned = match layout {
            LinearLayout::InOut => weight,
            LinearLayout::OutIn => {
                let sizes = g.shape(weight);
                let sizes = Shape::from([sizes.size(1), sizes.size(0)]);
                g.node(Kind::View("permute"), &[weight], sizes, g.dtype(weight))
            }
        };
        // `is_mm_compute_bound`: a product computes per byte at most as much as its smallest size, and no card so little.
        let bound = rows.min(shape.last()) >= pad::LEAST_BALANCE;
        g.pads_otherwise = self.around.pads_otherwise;
        if odd(shape.last()) && bound && pad::pays(dtype) {
            if layout == LinearLayout::InOut {
                return Err(format!("a transposed product whose width is no multiple of {aligned}"));
            }
            let product = g.padded_linear(flat, weight, turned, bias);
            return Ok(g.view("view", product, shape));
        }
        let mut inputs = vec![flat, turned];
        inputs.extend(bias);
        let rule = Rule::Linear { x: flat, weight, bias, layout };
        let product = g.with_rule(Kind::Product, &inputs, Shape::from([rows, shape.last()]), dtype, rule);
        self.products += u64::from(bias.is_none());
        g.nodes[product as usize].kept = match self.around.selective {
            Some(Selective::Matmuls) => true,
            // `aten.mm` alone is counted, not `addmm`.
            Some(Selective::AlternateMatmuls) => bias.is_none() && !self.products.is_multiple_of(2),
            None => false,
        };
        Ok(g.view("view", product, shape))
    }

    /// PEFT's `lora.Linear`: `result + lora_B(lora_A(x)) * scaling`, in the adapter's type, then as it was.
    pub(super) fn adapted(&mut self, x: Id, result: Id, shape: Shape) -> Result<Id, String> {
        let module = ModuleId(self.graph.module);
        let Some(first) = self.source(Source::Lora(module, 0)) else { return Ok(result) };
        let second = self.source(Source::Lora(module, 1)).ok_or("an adapter of one matrix")?;
        let dtype = self.graph.dtype(result);
        let drops = self.around.lora_dropout;
        // Under autocast it is narrowed again, and of two casts in a row the last is made (`pointless_convert`).
        let stays = self.autocast.is_some() && !drops;
        let x = if stays { x } else { self.graph.cast(x, self.graph.dtype(first)) };
        let x = if drops { dropout(&mut self.graph, x) } else { x };
        let rank = self.graph.shape(first).size(0);
        let plain = |matrix: Id| (matrix, None, LinearLayout::OutIn);
        let inner = self.linear(x, plain(first), shape.with(-1, rank))?;
        let outer = self.linear(inner, plain(second), shape)?;
        let g = &mut self.graph;
        let scaled = g.with_rule(Kind::Pointwise("scale"), &[outer], shape, g.dtype(outer), Rule::Scaled);
        let sum = g.add(result, scaled);
        Ok(g.cast(sum, dtype))
    }

    /// Cross entropy, computed in fp32; labels of `ForCausalLMLoss` are padded and moved by one.
    pub(super) fn cross_entropy(&mut self, logits: Id, labels: Id, moved: bool) -> Id {
        let g = &mut self.graph;
        let wide = g.cast(logits, DType::F32);
        let flat = g.flat(wide);
        let rows = g.shape(flat).size(0);
        let labels = if moved {
            let sizes = g.shape(labels);
            let padded = g.node(Kind::Kept("pad"), &[labels], sizes.with(-1, sizes.last() + 1), DType::I64);
            let moved = g.node(Kind::View("slice"), &[padded], sizes, DType::I64);
            g.map("clone", moved, DType::I64)
        } else {
            labels
        };
        let labels = g.view("view", labels, Shape::from([rows, 1]));
        let row = Shape::from([rows, 1]);
        let largest = g.node(Kind::Reduce("amax"), &[flat], row, DType::F32);
        let shifted = g.both("sub", flat, largest);
        let exponential = g.map("exp", shifted, DType::F32);
        let sums = g.node(Kind::Reduce("sum"), &[exponential], row, DType::F32);
        let log = g.map("log", sums, DType::F32);
        let normal = g.both("sub", shifted, log);
        let chosen = g.node(Kind::Pointwise("gather"), &[normal, labels], row, DType::F32);
        let count = g.node(Kind::Reduce("sum of all"), &[labels], Shape::new(&[]), DType::F32);
        let total = g.node(Kind::Reduce("sum of all"), &[chosen], Shape::new(&[]), DType::F32);
        let rule = Rule::CrossEntropy { logits: flat, largest, log, labels, count };
        g.with_rule(Kind::Pointwise("div"), &[total, count], Shape::new(&[]), DType::F32, rule)
    }
}
