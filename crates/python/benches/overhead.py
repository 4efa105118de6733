"""What a call from Python costs beyond the estimate itself, both measured in the same run.

    python crates/python/benches/overhead.py

A call reads its options, resolves the model and the plan, estimates, writes the answer as JSON and reads it into objects;
the estimate is the simulation and its report alone.
"""

import statistics
import time

import vramcast
from vramcast import _core

CALLS = {
    "gpt2": {"batch_size": 2, "seq_len": 512},
    "llama3-8b": {"batch_size": 4, "seq_len": 2048, "gradient_checkpointing": True},
    "Qwen/Qwen2.5-0.5B": {"batch_size": 4, "seq_len": 512, "optimizer": "sgd", "lora": True},
}


def words(model, options):
    from vramcast.estimate import option_words

    return ["vramcast", "train", model, *option_words(options)]


def milliseconds(function, times=60):
    """The middle of many, one after another."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        result = function()
        spent.append(result if isinstance(result, float) else time.perf_counter() - began)
    return 1000 * statistics.median(spent)


def main():
    print(f"{'model':20} {'call ms':>9} {'estimate ms':>12} {'beyond ms':>10} {'ratio':>6}")
    for model, options in CALLS.items():
        vramcast.train(model, **options)
        call = milliseconds(lambda: vramcast.train(model, **options))
        line = words(model, options)
        estimate = milliseconds(lambda: _core.estimate_seconds(line))
        print(f"{model:20} {call:9.3f} {estimate:12.3f} {call - estimate:10.3f} {call / estimate:6.2f}")


if __name__ == "__main__":
    main()
