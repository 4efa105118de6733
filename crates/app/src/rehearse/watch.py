"""Phases and peaks of a program, seen from outside. Part of `vramcast rehearse`; standard library only.

Phases are found from forward calls, autograd and optimizers, or named by the program (`vramcast.phase`).
"""
import atexit, contextlib, ctypes, os, pickle, sys, threading, time

from vramcast_hook import REAL, import_beside, journal

STEPS = int(os.environ.get("VRAMCAST_STEPS", "0"))
SOURCES = os.environ.get("VRAMCAST_SOURCES", "1") == "1"
SNAPSHOT = os.environ.get("VRAMCAST_SNAPSHOT", "")
RANK = int(os.environ.get("RANK", "0"))
WATCHDOG = 0.3  # seconds; NCCL's watchdog of torch comes round every 0.1
standin = ctypes.CDLL(None)
peak = import_beside("vramcast_peak")


class Watch:
    """Phases and peaks of this process."""

    only = None  # the one there is

    def __init__(self, torch):
        self.torch, self.stats, self.reset = torch, torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self.started = False  # whether the program has touched the card
        self.busy = False  # inside a model's call, or backward
        self.stepped = False  # an optimizer began its step since the last forward call
        self.whole = False  # and came to its end
        self.phase, self.step, self.micro = "load", 0, 0
        self.seen = {}  # per device: the program's own peaks, which phases must not disturb
        self.most = {}  # per device and kind: the peak of the phase so far
        self.before = {}
        self.ended = False
        self.named = False  # inside a phase that the program named itself
        self.run = import_beside("vramcast_recognise").Run(torch)
        self.shapes = import_beside("vramcast_shapes").Shapes(torch)
        self.lock, self.thread = threading.RLock(), threading.get_ident()

    # --- statistics -----------------------------------------------------------------------------------------------------

    def devices(self):
        return range(self.torch.cuda.device_count())

    def collect(self, device):
        """Takes over the peaks since the last reset, for the phase and for the program."""
        stats = self.stats(device)
        kept = self.seen.setdefault(device, {})
        for name, pools in stats.items():
            for pool, values in pools.items() if isinstance(pools, dict) else ():
                if isinstance(values, dict):
                    kept[name, pool] = max(kept.get((name, pool), 0), values.get("peak", 0))
        for kind in ("allocated_bytes", "reserved_bytes"):
            # Statistics of an allocator that the program brings (vLLM's sleep mode) may have no peaks.
            total = stats.get(kind, {}).get("all", {})
            peak = total.get("peak", total.get("current", 0))
            self.most[device, kind] = max(self.most.get((device, kind), 0), peak)
        return stats

    def program_stats(self, device):
        """What the program reads: as if nobody but itself had reset the peaks."""
        stats, kept = self.stats(device), self.seen.get(device, {})
        for (name, pool), peak in kept.items():
            values = stats.get(name, {}).get(pool)
            if isinstance(values, dict) and "peak" in values:
                values["peak"] = max(values["peak"], peak)
        return stats

    def program_reset(self, device):
        self.collect(device)
        self.reset(device)
        self.seen[device] = {}

    # --- phases ---------------------------------------------------------------------------------------------------------

    def enter(self, name):
        """Ends the phase that runs and begins another."""
        if not self.started or name == self.phase:
            self.phase = name
            return
        with self.lock:
            self.close()
            self.phase = name

    def close(self):
        for device in self.devices():
            stats = self.collect(device)
            most = {kind: self.most.pop((device, kind), 0) for kind in ("allocated_bytes", "reserved_bytes")}
            now, held = (stats.get(kind, {}).get("all", {}).get("current", 0) for kind in ("allocated_bytes", "reserved_bytes"))
            if most["reserved_bytes"]:
                used, peak, refused = self.driver(device)
                journal("phase", phase=self.phase, device=device, before=self.before.get(device, 0), after=now, peak=most["allocated_bytes"],
                        reserved=held, peak_reserved=most["reserved_bytes"], driver=used, driver_peak=peak, refused=refused)
            self.before[device] = now
            self.reset(device)

    def driver(self, device):
        """What was asked from the driver, now and at most, and how often it was full."""
        if REAL:
            free, total = self.torch.cuda.mem_get_info(device)
            return total - free, total - free, 0
        numbers = [ctypes.c_uint64() for _ in range(3)]
        standin.vramcast_used(device, *map(ctypes.byref, numbers))
        return [number.value for number in numbers]

    def forward(self):
        """A model is called by the program itself."""
        if self.stepped:
            self.stepped, self.step, self.micro = False, self.step + 1, 0
            journal("step", step=self.step)
            self.let_watchdog_pass()
            if STEPS and self.step >= STEPS:
                print(f"vramcast: stopped after {STEPS} optimizer steps, as asked", file=sys.stderr)
                raise SystemExit(0)
        if not REAL:
            sys.modules["vramcast_values"].Patience.lost = 0
        grad = self.torch.is_grad_enabled()
        self.found(f"{self.step}.{self.micro}.fwd" if grad else "inference")

    def let_watchdog_pass(self):
        """torch's NCCL thread lets finished collectives go, and their tensors: DDP's first buckets. A step on a card takes
        longer than that thread sleeps, one without kernels may not. (Inferred: with the pause row 0312 is exact, without it not always.)"""
        distributed = self.torch.distributed
        if self.step == 1 and not REAL and distributed.is_available() and distributed.is_initialized():
            time.sleep(WATCHDOG)

    def found(self, name):
        """A phase seen from outside; one that the program named goes before it."""
        if not self.named:
            self.enter(name)

    @contextlib.contextmanager
    def marked(self, name):
        """A phase that the program names; inside another it interrupts that one."""
        outer = self.phase if self.named else None
        self.named = True
        self.enter(name)
        try:
            yield
        finally:
            self.named = outer is not None
            self.enter(outer or "other")

    def backward(self):
        self.found(f"{self.step}.{self.micro}.bwd")
        self.micro += 1

    def optimizer(self, optimizer):
        self.stepped, self.whole = True, False
        self.run.stepping(optimizer, self.micro)
        self.found(f"{self.step}.opt")

    def after_optimizer(self, optimizer):
        self.whole = True
        self.run.stepped(optimizer)
        self.found(f"{self.step}.zero")

    # --- beginning and end ----------------------------------------------------------------------------------------------

    def start(self):
        """torch initialises CUDA."""
        self.started = True
        torch = self.torch
        journal("start", torch=torch.__version__, arguments=sys.argv, rank=RANK,
                world=int(os.environ.get("WORLD_SIZE", "1")), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), device=torch.cuda.get_device_name(0))
        if SOURCES:
            # Not of frees: those happen while an exception passes through torch, and gathering frames would lose it.
            torch.cuda.memory._record_memory_history(max_entries=peak.LARGEST_HISTORY, context="alloc", stacks="python")
        observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if observe:
            observe(self.full)

    def full(self, device, wanted, total, free):
        """torch gives up an allocation."""
        held = [self.stats(device)[kind]["all"]["current"] for kind in ("allocated_bytes", "reserved_bytes")]
        journal("full", phase=self.phase, device=device, wanted=wanted, total=total, free=free, allocated=held[0], reserved=held[1])

    def finish(self):
        """The program ends: the last phase, and what was alive at the peak."""
        if not self.started or self.ended:
            return
        self.ended = True
        try:
            self.close()
            alive = []
            if SOURCES:
                snapshot = self.torch.cuda.memory._snapshot()
                alive = [{"device": device, **peak.at(trace, self.run)} for device, trace in enumerate(snapshot["device_traces"]) if trace]
                if SNAPSHOT:
                    with open(of_rank(SNAPSHOT), "wb") as file:
                        pickle.dump(peak.without_us(snapshot), file)
            journal("run", **self.run.answer())
            journal("end", steps=self.steps(), alive=alive)
        except Exception as error:  # the report suffers, the program must not
            journal("end", steps=self.steps(), alive=[], problem=repr(error))

    def steps(self):
        """Whole steps; one that an optimizer did not end is none."""
        return self.step + (self.stepped and self.whole)

    def forked(self):
        """A forked child that uses CUDA has a journal of its own. Once its parent uses CUDA it cannot (torch refuses): such a
        child, as DataLoader's workers are, holds nothing, and the parent's statistics are not its own."""
        self.ended = self.started = self.stepped = False


def of_rank(path):
    """Every rank has a file of its own; the first has the name that was asked for."""
    start, ending = os.path.splitext(path)
    return f"{start}-rank{RANK}{ending}" if RANK else path


def install(torch):
    """Puts the watch into torch."""
    if not hasattr(torch._C, "_cuda_memoryStats"):
        return
    it = Watch.only = Watch(torch)
    unseen = import_beside("vramcast_unseen")
    if not REAL:
        import_beside("vramcast_values").install(torch)
    torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats = it.program_stats, it.program_reset
    torch.cuda._lazy_call(it.start)

    call = torch.nn.Module.__call__

    def watched_call(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            # Dynamo traces what it is called through: a thread's name would break its graph.
            return call(self, *args, **kwargs)
        if it.busy:
            if it.run.inner:
                it.run.inside()
            if threading.get_ident() != it.thread and not REAL:
                return sys.modules["vramcast_values"].followed(call, self, *args, **kwargs)
            return call(self, *args, **kwargs)
        it.busy = True
        try:
            it.forward()
            it.run.called(self, args, kwargs)
            it.shapes.called(self, args, kwargs)
            return call(self, *args, **kwargs)
        finally:
            it.busy = False

    unseen.replace(torch.nn.Module, "__call__", watched_call)

    def watched(function):
        def watched_backward(*args, **kwargs):
            if it.busy:
                return function(*args, **kwargs)
            it.busy = True
            try:
                it.backward()
                return function(*args, **kwargs)
            finally:
                it.busy = False

        return watched_backward

    unseen.replace(torch.autograd, "backward", watched(torch.autograd.backward))
    from torch.optim import optimizer as stepping

    before = stepping.register_optimizer_step_pre_hook(lambda optimizer, *_: it.optimizer(optimizer))
    after = stepping.register_optimizer_step_post_hook(lambda optimizer, *_: it.after_optimizer(optimizer))
    unseen.hook(stepping._global_optimizer_pre_hooks, before)
    unseen.hook(stepping._global_optimizer_post_hooks, after)
    clip = torch.nn.utils.clip_grad_norm_

    def watched_clip(*args, **kwargs):
        it.run.clipped = True
        it.found(f"{it.step}.clip")
        return clip(*args, **kwargs)

    for place in (torch.nn.utils, torch.nn.utils.clip_grad):
        unseen.replace(place, "clip_grad_norm_", watched_clip)

    hook, leave = sys.excepthook, os._exit

    def on_exception(kind, value, trace):
        journal("exception", kind=kind.__name__, message=str(value)[:500], full=kind.__name__ == "OutOfMemoryError", phase=it.phase)
        hook(kind, value, trace)

    def on_leave(code):
        it.finish()
        leave(code)

    sys.excepthook, os._exit = on_exception, on_leave
    os.register_at_fork(after_in_child=it.forked)
    atexit.register(it.finish)
