"""Kernels that are made while the program runs: Triton's own, and those of torch.compile. Part of `vramcast rehearse`.

They do nothing, and are not even compiled, but where a program asks for a compiled kernel (`warmup`) to read its registers
and shared memory; what surrounds them (torch.compile's buffers and their reuse) is as ever.
"""
import functools, re, struct, types


def triton(module):
    """Triton's functions, as Liger and bitsandbytes call them."""
    for name in ("JITFunction", "Autotuner", "Heuristics"):
        if hasattr(module, name):
            kind = getattr(module, name)
            kind.run = only_warm(kind.run)


def only_warm(own):
    """Triton's compiler needs no card, so `warmup` is Triton's own."""

    @functools.wraps(own)
    def run(self, *args, warmup=False, **kwargs):
        return own(self, *args, warmup=True, **kwargs) if warmup else None

    return run


def registers(name, binary):
    """Registers of a thread: EIATTR_REGCOUNT of a cubin's `.nv.info`, a mark of four bytes, the function, the number."""
    mark = binary.find(b"\x04\x2f\x08\x00")
    if mark < 0:
        raise NotImplementedError(f"vramcast's stand-in: the registers of {name} are not in the binary that Triton made")
    return struct.unpack_from("<I", binary, mark + 8)[0]


class Nothing:
    """A compiled kernel."""

    def run(self, *args, **kwargs):
        pass


class Timed:
    """One that Inductor times in several shapes when it first runs: each time takes a buffer as large as the card's L2 cache,
    and copies of what the kernel writes over. The timing is torch's own, of a kernel that does nothing."""

    def __init__(self, tuner):
        self.tuner, self.shapes = tuner, list(tuner.configs)

    def run(self, *args, stream=None, benchmark_run=False, **kwargs):
        while self.shapes:
            self.tuner.bench(Shape(self.shapes.pop()), *args, **kwargs)


class Shape:
    n_spills = n_regs = shared = 0

    def __init__(self, config):
        self.config = config

    def __call__(self, *args, **kwargs):
        pass


def inductor(module):
    """The kernels that torch.compile writes in Triton."""
    load = getattr(module, "_load_triton_kernel_from_source", None)

    def triton(self, name, source, *args, **kwargs):
        tuner = load(name, source) if load else None
        return Timed(tuner) if len(getattr(tuner, "configs", None) or ()) > 1 else Nothing()

    module.AsyncCompile.triton = triton
    module.AsyncCompile.multi_kernel = lambda self, *args, **kwargs: Nothing()


def choices(module):
    """max-autotune: kernels in Triton are neither compiled nor timed; the first choice, the library's, is as good as any."""
    if not hasattr(module.AlgorithmSelectorCache, "benchmark_choice"):  # up to torch 2.5 each choice times itself
        module.TritonTemplateCaller.benchmark = lambda self, *args, out: 1.0
        module.TritonTemplateCaller.precompile = lambda self: None
        return
    own = module.AlgorithmSelectorCache.benchmark_choice

    def benchmark_choice(choice, *args, **kwargs):
        return 1.0 if isinstance(choice, module.TritonTemplateCaller) else own(choice, *args, **kwargs)

    module.AlgorithmSelectorCache.benchmark_choice = staticmethod(benchmark_choice)


def fusions(module):
    """Whether a product takes its neighbour in is decided by times as well: with the library's, none does."""
    own = module.Scheduler.speedup_by_fusion

    def speedup_by_fusion(self, *nodes):
        if any(node.is_template() and isinstance(node.get_template_node(), module.ir.MultiTemplateBuffer) for node in nodes):
            return module.FusionResult.fuse(False) if hasattr(module, "FusionResult") else False
        with module.config.patch(benchmark_fusion=False):
            return own(self, *nodes)

    module.Scheduler.speedup_by_fusion = speedup_by_fusion


def padding(module):
    """Whether a product's operands are padded is decided by times. On an H200 they are where rows of memory lie at odd places in 16 bits; at
    even ones that are no multiple of 16 bytes for the gradient of the input, and forward from 2048 rows on; in fp32, and for few classes, they are not
    (docs/how-compiled-memory-works.md)."""
    name = "is_padded_faster" if hasattr(module, "is_padded_faster") else "should_pad"  # as torch 2.5 calls it
    own = getattr(module, name, None)
    if own is None:  # up to 2.4 the benchmark answers itself
        return

    def is_padded_faster(key, *times):
        operands = re.findall(r"torch\.Size\(\[([\d, ]+)\]\), \(([\d, ]+)\), torch\.(\w+)", key)[:2]
        if len(operands) < 2:
            return own(key, *times)
        numbers = [[[int(n) for n in part.split(",") if n.strip()] for part in operand[:2]] for operand in operands]
        (sizes, strides), (others, _) = numbers
        rows = [n for _, own in numbers for n in own if n != 1] + [others[-1]]
        turned = strides[-1] != 1  # the gradient of a weight
        inner = sizes[-1] % 8 != 0  # the gradient of an input
        even = not turned and (inner or sizes[0] >= 2048)
        few = min(sizes + others) < 16  # heads of few classes
        near = turned and others[-1] <= 768 and sizes[-1] > 3072 and sizes[-1] % 128 != 0  # `pads_weight` of the simulator
        answer = not few and not near and operands[0][2] != "float32" and any(n % 2 or even and n % 8 for n in rows)
        module.set_cached_should_pad(key, answer)
        return answer

    setattr(module, name, is_padded_faster)


def capable(module):
    """Whether torch may use Triton is asked of Triton's driver, which looks for a real card."""
    module.has_triton = functools.cache(lambda: module.has_triton_package())


def driver(module):
    """Triton's driver compiles a helper in C that talks to the card; what it answers comes from torch instead."""
    import torch

    class Launcher:
        def __init__(self, *args):
            pass

        def __call__(self, *args, **kwargs):
            pass

    class Utilities:
        def load_binary(self, name, binary, shared, device):
            return 1, 1, registers(name, binary), 0, 1024  # module, function, registers, spills, threads at most

        def get_device_properties(self, device):
            card = torch.cuda.get_device_properties(device)
            return {"max_shared_mem": card.shared_memory_per_block_optin, "multiprocessor_count": card.multi_processor_count, "warpSize": 32,
                    "max_num_regs": card.regs_per_multiprocessor, "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0}

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    module.CudaUtils, module.CudaLauncher = Utilities, Launcher


def backends(module):
    """Up to Triton 3.1 drivers are loaded by their files, which no hook of imports sees."""
    nvidia = getattr(module, "backends", {}).get("nvidia")
    names = getattr(nvidia.driver.__init__, "__globals__", {}) if nvidia else {}
    if names.get("__name__") != "triton.backends.nvidia.driver" and "CudaUtils" in names:
        own = types.SimpleNamespace()
        driver(own)
        names.update(vars(own))


AFTER_IMPORT = {
    "triton.backends": backends,
    "triton.runtime.jit": triton,
    "triton.runtime.autotuner": triton,
    "triton.backends.nvidia.driver": driver,
    "torch._inductor.async_compile": inductor,
    "torch._inductor.select_algorithm": choices,
    "torch._inductor.scheduler": fusions,
    "torch._inductor.fx_passes.pad_mm": padding,
    "torch.utils._triton": capable,
}
