"""Code that a type checker must accept: the stubs say what the package does."""

import vramcast

report: vramcast.Report = vramcast.train("gpt2", batch_size=2, seq_len=512)
peak: int = report.process
parts: dict[str, int] = report.breakdown
fits: bool = report.fits
all_of_it, states, activations, buffers = vramcast.Estimator().estimate_gpu_memory_training(stage=3, gpu_num=4)
total: float = all_of_it
with vramcast.guard("gpt2", batch_size=1) as predicted:
    size: float = predicted.process_gib
formula = vramcast.train("gpt2", method="components")
if isinstance(formula, vramcast.Formula):
    bytes_of_it: float = formula.total
document: dict[str, object] = report.to_dict()
