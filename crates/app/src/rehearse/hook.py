"""What `vramcast rehearse` adds to a Python program, as its sitecustomize. Standard library only.

It waits until the program imports torch, then watches: phases (from forward calls, autograd and optimizers), peaks, and
the lines of source that hold memory. All it learns goes, line by line, to a journal in the folder of the rehearsal.
The program's own view of torch's statistics stays what it would be without this file.
"""
import atexit, contextlib, ctypes, importlib.util, json, os, sys, threading, time

FOLDER = os.environ.get("VRAMCAST_REHEARSAL", "")
STEPS = int(os.environ.get("VRAMCAST_STEPS", "0"))
SOURCES = os.environ.get("VRAMCAST_SOURCES", "1") == "1"
WORLD = int(os.environ.get("VRAMCAST_WORLD", "0"))
REAL = os.environ.get("VRAMCAST_REAL") == "1"  # watch a run on a card that is there
SNAPSHOT = os.environ.get("VRAMCAST_SNAPSHOT", "")
LARGEST_HISTORY = 2_000_000
standin = ctypes.CDLL(None)


def journal(event, **fields):
    """Appends one line to the journal of this process."""
    fields = {"event": event, "time": round(time.time(), 3), **fields}
    with open(os.path.join(FOLDER, f"journal-{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps(fields) + "\n")


class Watch:
    """Phases and peaks of this process."""

    def __init__(self, torch):
        self.torch, self.stats, self.reset = torch, torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self.started = False  # whether the program has touched the card
        self.busy = False  # inside a model's call, or backward
        self.stepped = False  # an optimizer stepped since the last forward call
        self.phase, self.step, self.micro = "load", 0, 0
        self.seen = {}  # per device: the program's own peaks, which phases must not disturb
        self.most = {}  # per device and kind: the peak of the phase so far
        self.before = {}
        self.ended = False
        self.named = False  # inside a phase that the program named itself
        self.run = import_beside("vramcast_recognise").Run(torch)
        Watch.only = self
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
                    kept[name, pool] = max(kept.get((name, pool), 0), values["peak"])
        for kind in ("allocated_bytes", "reserved_bytes"):
            peak = stats[kind]["all"]["peak"]
            self.most[device, kind] = max(self.most.get((device, kind), 0), peak)
        return stats

    def program_stats(self, device):
        """What the program reads: as if nobody but itself had reset the peaks."""
        stats, kept = self.stats(device), self.seen.get(device, {})
        for (name, pool), peak in kept.items():
            values = stats[name][pool]
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
            now, held = stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
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
            if STEPS and self.step >= STEPS:
                print(f"vramcast: stopped after {STEPS} optimizer steps, as asked", file=sys.stderr)
                raise SystemExit(0)
        if not REAL:
            sys.modules["vramcast_values"].Patience.lost = 0
        grad = self.torch.is_grad_enabled()
        self.found(f"{self.step}.{self.micro}.fwd" if grad else "inference")

    def found(self, name):
        """A phase seen from outside; one that the program named goes before it."""
        if not self.named:
            self.enter(name)

    def backward(self):
        self.found(f"{self.step}.{self.micro}.bwd")
        self.micro += 1

    def optimizer(self, optimizer):
        self.stepped = True
        self.run.stepping(optimizer, self.micro)
        self.found(f"{self.step}.opt")

    def after_optimizer(self, optimizer):
        self.run.stepped(optimizer)
        self.found(f"{self.step}.zero")

    # --- beginning and end ----------------------------------------------------------------------------------------------

    def start(self):
        """torch initialises CUDA."""
        self.started = True
        torch = self.torch
        journal("start", torch=torch.__version__, arguments=sys.argv, rank=int(os.environ.get("RANK", "0")),
                world=int(os.environ.get("WORLD_SIZE", "1")), device=torch.cuda.get_device_name(0))
        if SOURCES:
            torch.cuda.memory._record_memory_history(max_entries=LARGEST_HISTORY, stacks="python")
        observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if observe:
            observe(lambda device, wanted, allocated, free: journal("full", phase=self.phase, device=device, wanted=wanted, allocated=allocated, free=free))

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
                alive = [{"device": device, **peak(trace, self.run)} for device, trace in enumerate(snapshot["device_traces"]) if trace]
                if SNAPSHOT:
                    self.torch.cuda.memory._dump_snapshot(SNAPSHOT)
            journal("run", **self.run.answer())
            journal("end", steps=self.step + self.stepped, alive=alive)
        except Exception as error:  # the report suffers, the program must not
            journal("end", steps=self.step + self.stepped, alive=[], problem=repr(error))

    def forked(self):
        """A forked child that uses CUDA has a journal of its own."""
        self.ended = False


def peak(trace, run):
    """The largest sum of a list of allocations and frees, what was alive then by line of source, and what it was for."""
    now, most, last = 0, 0, -1
    sizes = {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            now += event["size"]
            if now > most:
                most, last = now, index
        elif event["action"] == "free_completed":
            now -= sizes.pop(event["addr"], 0)
    alive = {}
    for event in trace[:last + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    lines = {}
    for event in alive.values():
        line = lines.setdefault(source(event.get("frames", ())), [0, 0])
        line[0] += event["size"]
        line[1] += 1
    largest = sorted(lines.items(), key=lambda item: -item[1][0])
    deaths = {}
    for event in trace[last + 1:]:
        if event["action"] == "free_completed" and event["addr"] in alive:
            deaths.setdefault(event["addr"], event["time_us"])
    lives = {address: (event["size"], event["time_us"], deaths.get(address, float("inf"))) for address, event in alive.items()}
    return {"requested": most, "truncated": len(trace) >= LARGEST_HISTORY, "parts": run.parts(lives),
            "lines": [{"source": name, "bytes": size, "count": count} for name, (size, count) in largest]}


def source(frames):
    """The innermost lines outside torch; what autograd's own threads allocate has none."""
    shown = []
    for frame in frames:
        path = frame["filename"]
        if f"{os.sep}torch{os.sep}" in path or os.path.dirname(path) == os.path.dirname(__file__) or not path or path.startswith("<"):
            continue
        shown.append(f"{os.path.basename(path)}:{frame['line']} {frame['name']}")
        if len(shown) == 2:
            break
    return " < ".join(shown) or "backward (autograd's own thread)"


def watch(torch):
    """Puts the watch into torch."""
    if not hasattr(torch._C, "_cuda_memoryStats"):
        return
    it = Watch(torch)
    if not REAL:
        import_beside("vramcast_values").install(torch)
    torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats = it.program_stats, it.program_reset
    torch.cuda._lazy_call(it.start)

    call = torch.nn.Module.__call__

    def watched_call(self, *args, **kwargs):
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
            return call(self, *args, **kwargs)
        finally:
            it.busy = False

    torch.nn.Module.__call__ = watched_call

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

    torch.autograd.backward = watched(torch.autograd.backward)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, *_: it.optimizer(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: it.after_optimizer(optimizer))
    clip = torch.nn.utils.clip_grad_norm_

    def watched_clip(*args, **kwargs):
        it.run.clipped = True
        it.found(f"{it.step}.clip")
        return clip(*args, **kwargs)

    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = watched_clip

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


def alone(distributed):
    """One rank of a larger world: the others are taken to have said what this one waits for."""
    if not WORLD or not distributed.is_available():
        return

    class Store(distributed.Store):
        """Holds what this rank sets; what the others would have set is NCCL's identity, or theirs of a count."""

        def __init__(self):
            super().__init__()
            self.values = {}

        def set(self, key, value):
            self.values[key] = value if isinstance(value, bytes) else value.encode()

        def get(self, key):
            return self.values.get(key, b"\x01" * 128)

        def add(self, key, amount):
            self.values[key] = str(int(self.values.get(key, b"0")) + amount * WORLD).encode()
            return int(self.values[key])

        def compare_set(self, key, expected, desired):
            return self.values.setdefault(key, desired if isinstance(desired, bytes) else desired.encode())

        def wait(self, *_):
            pass

        def check(self, keys):
            return all(key in self.values for key in keys)

        def delete_key(self, key):
            return self.values.pop(key, None) is not None

    begin_group = distributed.init_process_group

    def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name="", **options):
        from torch.testing._internal.distributed import fake_pg  # registers a backend whose collectives do nothing

        if backend in (None, "", "nccl", "gloo", "cpu:gloo,cuda:nccl"):
            backend = "nccl" if backend == "nccl" else "cpu:fake,cuda:nccl"
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        if not isinstance(store, fake_pg.FakeStore):
            store = Watch.only.store = Store()  # C++ calls back into it, so it must live on
        return begin_group(backend, world_size=WORLD, rank=rank, store=store, group_name=group_name, **options)

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = init_process_group


AFTER_IMPORT = {"torch": watch, "torch.distributed": alone, "vramcast": lambda module: setattr(module, "phase", phase)}


class Finder:
    """Lets the import of a module run as ever, then calls what waits for it."""

    searching = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in AFTER_IMPORT or name in cls.searching:
            return None
        cls.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls.searching.discard(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                # Many only ask whether a module is there; it is the import that counts, and that once.
                AFTER_IMPORT.pop(name, lambda _: None)(module)

            spec.loader.exec_module = exec_module
        return spec


class Marks:
    """`import vramcast` where it is not installed: phases that the program names itself, `with vramcast.phase("warm-up"):`."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, cls) if name == "vramcast" else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        module.phase = phase


@contextlib.contextmanager
def phase(name):
    it = Watch.only
    outer, it.named = it.named, True
    it.enter(name)
    try:
        yield
    finally:
        it.named = outer
        it.enter("other")


def import_beside(name):
    """A module of this folder, which is not on the program's path."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begin():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    # The user's own sitecustomize, which this one hides.
    own = sys.modules["vramcast_hook"] = sys.modules.pop("sitecustomize", None)
    hidden = importlib.util.find_spec("sitecustomize")
    if hidden and hidden.loader:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(hidden)
        hidden.loader.exec_module(module)
    elif own:
        sys.modules["sitecustomize"] = own  # the import that runs this file looks for it
    if FOLDER:
        for name in ("vramcast_skips",) if REAL else ("vramcast_kernels", "vramcast_skips"):
            AFTER_IMPORT.update(import_beside(name).AFTER_IMPORT)
        sys.meta_path.insert(0, Finder)
        sys.meta_path.append(Marks)


begin()
