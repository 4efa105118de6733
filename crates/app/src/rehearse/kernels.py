"""Kernels that are made while the program runs: Triton's own, and those of torch.compile. Part of `vramcast rehearse`.

They do nothing, and are not even compiled; what surrounds them (torch.compile's buffers and their reuse) is as ever.
"""
import functools


def triton(module):
    """Triton's functions, as Liger and bitsandbytes call them."""
    for name in ("JITFunction", "Autotuner", "Heuristics"):
        if hasattr(module, name):
            getattr(module, name).run = run


def run(self, *args, warmup=False, **kwargs):
    if warmup:
        name = getattr(self, "__name__", None) or getattr(getattr(self, "fn", None), "__name__", "?")
        raise NotImplementedError(f"vramcast's stand-in: {name}.warmup asks for a compiled Triton kernel, and in a rehearsal none is compiled")


class Nothing:
    """A compiled kernel."""

    def run(self, *args, **kwargs):
        pass


def inductor(module):
    """The kernels that torch.compile writes in Triton."""
    module.AsyncCompile.triton = lambda self, *args, **kwargs: Nothing()
    module.AsyncCompile.multi_kernel = lambda self, *args, **kwargs: Nothing()


def capable(module):
    """Whether torch may use Triton is asked of Triton's driver, which looks for a real card."""
    module.has_triton = functools.cache(lambda: module.has_triton_package())


def driver(module):
    """Triton's driver compiles a helper in C that talks to the card; what it answers comes from torch instead."""
    import torch

    class Utilities:
        def get_device_properties(self, device):
            card = torch.cuda.get_device_properties(device)
            return {"max_shared_mem": card.shared_memory_per_block_optin, "multiprocessor_count": card.multi_processor_count, "warpSize": 32,
                    "max_num_regs": card.regs_per_multiprocessor, "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0}

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    module.CudaUtils = Utilities


AFTER_IMPORT = {
    "triton.runtime.jit": triton,
    "triton.runtime.autotuner": triton,
    "triton.backends.nvidia.driver": driver,
    "torch._inductor.async_compile": inductor,
    "torch.utils._triton": capable,
}
