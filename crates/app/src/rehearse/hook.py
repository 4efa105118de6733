"""What `vramcast rehearse` adds to a Python program, as its sitecustomize. Standard library only.

It waits until the program imports torch, then puts the watch into it (`watch.py`). All that is learned goes, line by line,
to a journal in the folder of the rehearsal. The program's own view of torch's statistics stays what it would be without.

    watch.py      phases and peaks                    kernels.py  Triton and torch.compile
    peak.py       what is alive at the peak           values.py   small values that decide what a program does
    recognise.py  the same run in the ledger's words  skips.py    what may be left out
    shards.py     how it is spread over ranks         alone.py    one rank of a larger world
    shapes.py     whether batches differ              guesses.py  sizes that only data decides
    unseen.py     what torch.compile must not see of us
"""
import contextlib, faulthandler, importlib.util, json, os, sys, time

FOLDER = os.environ.get("VRAMCAST_REHEARSAL", "")
REAL = os.environ.get("VRAMCAST_REAL") == "1"  # watch a run on a card that is there


def journal(event, **fields):
    """Appends one line to the journal of this process."""
    fields = {"event": event, "time": round(time.time(), 3), **fields}
    with open(os.path.join(FOLDER, f"journal-{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps(fields) + "\n")


def phase(name):
    """A phase that the program names itself; before it imports torch there is nothing to see."""
    watch = getattr(sys.modules.get("vramcast_watch"), "Watch", None)
    return watch.only.marked(name) if watch and watch.only else contextlib.nullcontext()


def import_beside(name):
    """A module of this folder, which is not on the program's path."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AFTER_IMPORT = {
    "torch": lambda torch: import_beside("vramcast_watch").install(torch),
    "torch.distributed": lambda distributed: import_beside("vramcast_alone").install(distributed),
}


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
    """`import vramcast` where it is not installed: all there is of it are phases. The installed one asks `phase` above."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, cls) if name == "vramcast" else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        module.phase = phase


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
    if FOLDER and not REAL:
        # Where a fault of the stand-in happened; a program that wants this for itself takes it over.
        faulthandler.enable(open(os.path.join(FOLDER, f"fault-{os.getpid()}.txt"), "w"))
    if FOLDER:
        for name in ("vramcast_skips", "vramcast_unseen") if REAL else ("vramcast_kernels", "vramcast_skips", "vramcast_unseen"):
            AFTER_IMPORT.update(import_beside(name).AFTER_IMPORT)
        sys.meta_path.insert(0, Finder)
        sys.meta_path.append(Marks)


begin()
