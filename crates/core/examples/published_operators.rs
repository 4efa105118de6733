//! Our operations beside Liger's published benchmarks of single operators, as a Markdown table:
//! `cargo run -p vramcast-core --example published_operators -- truth/external/liger_kernel_ops.json`.
//!
//! What is run is what benchmark/scripts of linkedin/Liger-Kernel run: the operator on one input again and again, whose
//! gradient stays from one turn to the next; the peak of one turn is reported. Those scripts keep the graph
//! (`retain_graph=True`), so only rows are read where that changes nothing: one operation, or forward alone.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::memory::device::Device;
use vramcast_core::memory::phase::{Phase, Work};
use vramcast_core::memory::tensor::Tensor;
use vramcast_core::memory::torch::Torch;
use vramcast_core::memory::{allocator, autograd};
use vramcast_core::model::Shape;
use vramcast_core::model::op::{Activation, Binary};
use vramcast_core::plan::{AllocatorOptions, Gpus};

#[allow(clippy::disallowed_methods)]
fn main() {
    let path = std::env::args().nth(1).expect("liger_kernel_ops.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut left_out = BTreeMap::<String, u32>::new();
    let mut errors = Vec::new();
    println!("| operator | published | ours | difference |\n|---|---:|---:|---:|");
    for row in file["rows"].as_array().unwrap() {
        let Some(ours) = peak(row) else {
            *left_out.entry(format!("{} {}", text(row, "provider"), text(row, "kernel"))).or_default() += 1;
            continue;
        };
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let published = row["measured_bytes"].as_f64().unwrap();
        let error = (ours as f64 / published - 1.0) * 100.0;
        errors.push(error.abs());
        let [kernel, mode, x, gpu] = ["kernel", "mode", "x_name", "gpu"].map(|key| text(row, key));
        let name = format!("{kernel} {mode}, {x} {}, {}", row["x"], gpu.trim_start_matches("NVIDIA "));
        println!("| {name} | {:.3} MiB | {:.3} MiB | {error:+.2} % |", mib(published), mib(ours as f64));
    }
    errors.sort_by(f64::total_cmp);
    if let Some(last) = errors.last() {
        println!("\n{} figures, median {:.2} %, largest {last:.2} %", errors.len(), errors[errors.len() / 2]);
    }
    println!("left out: {}", left_out.values().sum::<u32>());
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

/// What one turn takes at most; `None` where the row is not one of those read.
fn peak(row: &Value) -> Option<u64> {
    let config = &row["config"];
    let size = |key: &str| config[key].as_u64();
    let dtype = if text(config, "dtype") == "torch.bfloat16" { DType::BF16 } else { DType::F32 };
    let (kernel, mode) = (text(row, "kernel"), text(row, "mode"));
    let torchs_own = matches!(text(row, "provider"), "torch" | "huggingface");
    let x = row["x"].as_u64();
    let card = match text(row, "gpu") {
        "NVIDIA H100 80GB HBM3" => "H100-80GB",
        "NVIDIA B200" => "B200-180GB",
        _ => "A100-80GB",
    };
    let device = Device::of(&Gpus::embedded().find(card).ok()?);
    match (kernel, mode) {
        // An older script that measured something else: less than its own input.
        ("softmax", _) if size("hidden_size").is_none() => None,
        _ if !torchs_own => None,
        ("cross_entropy", "full") => {
            let (rows, classes) = match (size("B"), text(row, "x")) {
                (Some(batch), _) => (batch * size("T")?, x?),
                (_, "qwen2.5_7b") => (size("seq_len")?, 152_064),
                (_, "deepseek_v3") => (size("seq_len")?, 129_280),
                _ => (x?, size("vocab_size")?),
            };
            let target = RefCell::new(None);
            Some(turns(device, Shape::new(&[rows, classes]), DType::F32, &[], true, |torch, input, _| {
                let make = || torch.fresh("target", Shape::new(&[rows]), DType::I64);
                let target = target.borrow_mut().get_or_insert_with(make).clone();
                torch.cross_entropy(input, &target)
            }))
        }
        ("softmax", "full") => {
            let shape = Shape::new(&[x?, size("hidden_size")?]);
            Some(turns(device, shape, dtype, &[], true, |torch, input, _| torch.softmax(input, None, "_softmax")))
        }
        ("layer_norm", "full") => {
            let shape = match size("M") {
                Some(rows) => [rows, x?],
                None => [x?, size("hidden_size")?],
            };
            let weights = [[shape[1], 1]; 2];
            Some(turns(device, Shape::new(&shape), dtype, &weights, true, |torch, input, weights| {
                torch.layer_norm(input, Some(&weights[0]), Some(&weights[1]), 2)
            }))
        }
        ("swiglu" | "geglu", "forward") => {
            let (hidden, inner) = (size("hidden_size")?, size("intermediate_size")?);
            let shape = Shape::new(&[size("bsz").or_else(|| size("B"))?, x?, hidden]);
            let kind = if kernel == "swiglu" { Activation::Silu } else { Activation::Gelu };
            let weights = [[inner, hidden], [inner, hidden], [hidden, inner]];
            Some(turns(device, shape, dtype, &weights, false, |torch, input, weights| {
                let gate = torch.linear(input, &weights[0], None);
                let gate = torch.activation(kind, &gate);
                let up = torch.linear(input, &weights[1], None);
                let product = torch.binary(Binary::Mul, &gate, &up);
                drop((gate, up));
                torch.linear(&product, &weights[2], None)
            }))
        }
        _ => None,
    }
}

/// Three turns of an operator on one input; the peak of the last. Where only forward is asked for, gradients are let go.
fn turns(
    device: Device,
    shape: Shape,
    dtype: DType,
    weights: &[[u64; 2]],
    backward: bool,
    operator: impl Fn(&mut Torch, &Tensor, &[Tensor]) -> Tensor,
) -> u64 {
    let mut torch = Torch::new(device);
    let input = torch.fresh("input", shape, dtype);
    let (input, input_leaf) = torch.leaf(input);
    let mut leaves = Vec::new();
    let mut tensors = Vec::new();
    for sizes in weights {
        let vector = if sizes[1] == 1 { &sizes[..1] } else { &sizes[..] };
        let weight = torch.fresh("weight", Shape::new(vector), dtype);
        let (weight, leaf) = torch.leaf(weight);
        tensors.push(weight);
        leaves.push(leaf);
    }
    for turn in 0..3 {
        torch.log.borrow_mut().phase(Phase::pass(turn, 0, Work::Forward));
        let output = operator(&mut torch, &input, &tensors);
        // Scripts time backward passes first, in the same process: its thread keeps a workspace of its own.
        if backward || turn == 0 {
            autograd::backward(&mut torch, &output);
        }
        drop(output);
        torch.drop_graph(0);
        if !backward {
            leaves.iter().for_each(|leaf| drop(leaf.grad.take()));
            drop(input_leaf.grad.take());
        }
        torch.log.borrow_mut().end_phase();
    }
    let log = torch.log.borrow();
    allocator::replay(&log, AllocatorOptions::default(), None).phases[2].peak
}
