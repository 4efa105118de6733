"""One rank of a world without the others (`--world`, `--rank`). Part of `vramcast rehearse`; standard library only."""
import os

WORLD = int(os.environ.get("VRAMCAST_WORLD", "0"))
kept = []  # C++ calls back into stores, so they must live on


def install(distributed):
    """The others are taken to have said what this rank waits for."""
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
            store = Store()
            kept.append(store)
        return begin_group(backend, world_size=WORLD, rank=rank, store=store, group_name=group_name, **options)

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = init_process_group
