//! Rehearsals with the real torch, of what only it can show: values that nobody knows, workers, memory that runs out.
#![cfg(target_os = "linux")]

#[path = "support/torch.rs"]
mod torch;

use std::path::Path;
use std::process::Command;

use torch::PythonWithTorch;

/// Runs a program on a pretended RTX 4090; its exit code and all it said.
fn rehearse(program: &str, options: &[&str]) -> (Option<i32>, String) {
    let python = PythonWithTorch::get();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.py"), program).unwrap();
    let output = Command::new(Path::new(env!("CARGO_BIN_EXE_vramcast")))
        .args(["rehearse", "--quiet", "--gpu", "rtx4090"])
        .args(options)
        .arg("--")
        .arg(&python.path)
        .arg(folder.path().join("train.py"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

const MASKS: &str = "
import torch
hidden = torch.nn.Embedding(1000, 64).cuda()(torch.randint(0, 1000, (8, 128)).cuda())
mask = torch.rand(8, 128, device='cuda') < 0.15
known = torch.arange(1024, device='cuda').view(8, 128) < 10
print('chosen', len(hidden[mask]), len(mask.nonzero()), len(torch.unique(torch.rand(100, device='cuda'))), len(torch.where(mask.detach())[0]))
print('known', len(hidden[known]), len(torch.masked_select(hidden[..., 0], known)))
out = torch.zeros(8, 128, device='cuda')
out[mask] = hidden[mask][:, 0].detach()
out[mask] = 1
hidden[mask].sum().backward()
torch.masked_select(torch.rand(8, 128, device='cuda', requires_grad=True), mask).sum().backward()
";

#[test]
#[ignore = "second ring: torch"]
fn masks_nobody_knows_choose_a_stated_share() {
    let (code, text) = rehearse(MASKS, &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("chosen 1024 1024 100 1024") && text.contains("known 10 10"), "{text}");
    assert!(text.contains("train.py:6 (nonzero: 1024 of 1024)") || text.contains("(nonzero: 1024"), "{text}");
    let (_, text) = rehearse(MASKS, &["--mask-fraction", "0.25"]);
    assert!(text.contains("chosen 256 256 25 256") && text.contains("known 10 10"), "{text}");
}

#[test]
#[ignore = "second ring: torch"]
fn checks_of_unknown_values_pass() {
    let program = "
import torch
from torch.distributions import Categorical, Normal
x = torch.rand(100, device='cuda')
assert (x >= 0).all() and ((x >= 0) & ~(x > 1)).view(10, 10).all(-1).all() and not (x > 2).any()
normal = Normal(torch.randn(4, device='cuda'), torch.rand(4, device='cuda') + 0.1)
normal.log_prob(normal.sample())
choice = Categorical(probs=torch.rand(4, 6, device='cuda').softmax(-1))
choice.log_prob(choice.sample())
assert not (torch.arange(5, device='cuda') > 2).all(), 'what is known stays known'
torch.linalg.svd(torch.rand(8, 8, device='cuda'))
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record(), end.record()
assert begin.elapsed_time(end) >= 1
torch.linalg.svd(torch.rand(8, 8, device='cuda'), driver='gesvda')
torch.sparse.mm(torch.eye(8, device='cuda').to_sparse_csr(), torch.rand(8, 8, device='cuda'))
# cuDNN copies input, kernel and output, with channels filled up to 24 and 40.
pictures, kernel = torch.rand(8, 20, 32, 32, device='cuda').half(), torch.rand(40, 20, 3, 3, device='cuda').half()
torch.cuda.reset_peak_memory_stats()
held = torch.cuda.memory_allocated()
out = torch.nn.functional.conv2d(pictures, kernel, padding=1)
copies = 2 * (8 * 24 * 32 * 32 + 40 * 24 * 9) + out.nbytes
assert 0 <= torch.cuda.max_memory_allocated() - held - out.nbytes - copies <= 1024
# max-autotune compiles and times no kernel of Triton's, and fuses none of the products it chooses for.
from torch._inductor import ir, scheduler, select_algorithm
template = object.__new__(select_algorithm.TritonTemplateCaller)
assert select_algorithm.AlgorithmSelectorCache.benchmark_choice(template, None) == 1
class Node:
    is_template = lambda self: True
    get_template_node = lambda self: object.__new__(ir.MultiTemplateBuffer)
assert scheduler.Scheduler.speedup_by_fusion(None, Node(), Node()).should_fuse is False
# Products are padded where a row of memory is no multiple of 16 bytes: no times decide it.
from torch._inductor.fx_passes import pad_mm
padded = lambda a, b: pad_mm.is_padded_faster(str(((a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype))), 0, 0)
rows, head = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(32, 50257, dtype=torch.bfloat16)
assert padded(rows, head) and not padded(rows[:63], head[:, :50256].contiguous())
# A kernel of Triton's is compiled where the program asks for that, and never run.
import pathlib
jit = pathlib.Path(__file__).parent / 'triton' / 'runtime' / 'jit.py'
jit.parent.mkdir(parents=True)
jit.write_text('class JITFunction:\\n    def run(self, warmup):\\n        return \"compiled\" if warmup else 1 / 0')
from triton.runtime.jit import JITFunction
assert JITFunction().run(warmup=True) == 'compiled' and JITFunction().run(warmup=False) is None
";
    let (code, text) = rehearse(program, &[]);
    assert_eq!(code, Some(0), "{text}");
}

#[test]
#[ignore = "second ring: torch"]
fn workers_that_never_use_the_card_are_no_processes_of_it() {
    let program = "
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(torch.rand(10, 64), batch_size=4, num_workers=2, multiprocessing_context='fork'):
    model(batch.cuda()).sum().backward()
    optimizer.step()
";
    let (code, text) = rehearse(program, &["--json"]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(text.matches("\"process\": ").count(), 1 + 1 + 1, "one process, its total and the run's: {text}");
    assert!(text.contains("shapes vary between steps (2×64 to 4×64)"), "{text}");
}

#[test]
#[ignore = "second ring: torch"]
fn memory_that_runs_out_says_what_was_needed() {
    let program = "
import torch
held = [torch.empty(4 << 30, dtype=torch.uint8, device='cuda') for _ in range(9)]
";
    let (code, text) = rehearse(program, &[]);
    assert_eq!(code, Some(1), "{text}");
    let line = text.replace('\n', " ");
    assert!(
        line.contains("4.00 GiB more were asked for, while tensors held 20.00 GiB, torch 20.00 GiB in all"),
        "{text}"
    );
    assert!(line.contains("does not fit RTX 4090") && !line.contains(" 0.00 GiB too much"), "{text}");
}

#[test]
#[ignore = "second ring: torch"]
fn a_fatal_signal_is_named_by_its_line() {
    let program = "
import ctypes, torch
torch.zeros(1, device='cuda')
ctypes.string_at(0)
";
    let (code, text) = rehearse(program, &[]);
    assert_eq!(code, Some(4), "{text}");
    let line = text.replace('\n', " ");
    assert!(line.contains("segmentation fault in") && line.contains("stand-in"), "{text}");
}

#[test]
#[ignore = "second ring: torch"]
fn a_step_that_its_optimizer_does_not_end_is_no_whole_one() {
    let program = "
import torch
class Failing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        raise KeyError('state')
model = torch.nn.Linear(64, 64).cuda()
optimizer = Failing(model.parameters(), 0.1)
model(torch.rand(4, 64).cuda()).sum().backward()
optimizer.step()
";
    let (code, text) = rehearse(program, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("no verdict") && !text.contains("fits"), "{text}");
}

#[test]
#[ignore = "second ring: torch"]
fn beams_run_to_their_full_length() {
    let program = "
import torch
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=2000, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config).cuda().eval()
tokens = torch.randint(20, 900, (2, 7)).cuda()
for options in (dict(num_beams=4), dict(num_beams=3, num_return_sequences=3), dict(num_beams=2, do_sample=True)):
    print('shape', tuple(model.generate(tokens, max_new_tokens=12, pad_token_id=0, **options).shape))
";
    let (code, text) = rehearse(program, &[]);
    assert_eq!(code, Some(0), "{text}");
    let shapes: Vec<&str> = text.lines().filter(|line| line.starts_with("shape")).collect();
    assert_eq!(shapes, ["shape (2, 19)", "shape (6, 19)", "shape (2, 19)"], "{text}");
}

/// As transformers counts the patches of Qwen's pictures.
#[test]
#[ignore = "second ring: torch"]
fn lengths_that_are_reckoned_on_the_card_are_known() {
    let program = "
import torch
grid = torch.tensor([[1, 16, 24]] * 2, device='cuda')
counts = grid[:, 0] * grid[:, 1] * grid[:, 2]
print('lengths', len(torch.arange(counts.sum(), device='cuda')), *torch.zeros((counts.max(), 3), device='cuda').shape)
";
    let (code, text) = rehearse(program, &[]);
    assert!(code == Some(0) && text.contains("lengths 768 384 3"), "{text}");
}

/// What is looked at of a model must not keep it alive when the program is done with it.
#[test]
#[ignore = "second ring: torch"]
fn a_model_that_the_program_lets_go_is_gone() {
    let program = "
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=1024, n_head=2, vocab_size=50000)).cuda()
model(torch.randint(20, 900, (2, 7)).cuda())
held = torch.cuda.memory_allocated()
del model
print('gone', (held - torch.cuda.memory_allocated()) >> 20)
";
    let (code, text) = rehearse(program, &[]);
    // The table of 50,000 × 1,024 in fp32 alone is 195 MiB.
    let gone = text.lines().find_map(|line| line.strip_prefix("gone ")).and_then(|line| line.parse::<u64>().ok());
    assert!(code == Some(0) && gone.is_some_and(|gone| gone >= 195), "{text}");
}

/// A recomputation ends by an exception, from within whichever operation keeps the last tensor; frames must not be gathered then.
#[test]
#[ignore = "second ring: torch"]
fn checkpoints_that_end_in_dropout_are_recomputed() {
    let program = "
import torch
from torch.utils.checkpoint import checkpoint
block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1)).cuda()
for step in range(2):
    checkpoint(block, torch.randn(8, 64, device='cuda'), use_reentrant=False).sum().backward()
print('recomputed')
";
    let (code, text) = rehearse(program, &[]);
    assert!(code == Some(0) && text.contains("recomputed") && text.contains("by line of source"), "{text}");
}

/// `vramcast learn` records the module of docs/learn.md as it did when `learned/net.json` was written, and refuses with a line what no program can say.
#[test]
#[ignore = "second ring: torch"]
fn a_module_is_learned() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("net.json");
    let module = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/learned/net.py");
    let other = folder.path().join("other.py");
    std::fs::write(&other, "from torch import nn\nclass Other(nn.Module):\n    def forward(self, x):\n        return x if x.sum() > 0 else -x\n").unwrap();
    // Its torch can be imported in a rehearsal only.
    let program = format!(
        "import subprocess, sys\nfor what, input in (({:?}, 'ids=int64[batch,seq]'), ({:?}, 'x=float[batch,8]')):\n    subprocess.run([{:?}, 'learn', what, '--input', input, '--out', {out:?}, '--python', sys.executable])\n",
        format!("{module}:Net"),
        format!("{}:Other", other.display()),
        env!("CARGO_BIN_EXE_vramcast"),
    );
    let (_, text) = rehearse(&program, &[]);
    assert!(
        text.contains("45372416 parameters, sizes by batch and seq")
            && text.contains("other.py:4: what runs depends on values"),
        "{text}"
    );
    let read = |path: &Path| {
        let mut learned: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        learned.as_object_mut().unwrap().remove("learned_from");
        learned
    };
    assert_eq!(read(&out), read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/learned/net.json"))));
}
