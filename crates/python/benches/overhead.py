"""What a call from Python costs beyond the estimate itself, both measured in the same run.

    pip install .        # the release build
    python crates/python/benches/overhead.py

A call reads its options, finds the model, settles the plan, estimates, and hands over the document, whose totals are read;
the estimate is the simulation and its report alone, timed in Rust. Both are asked in turn, so that a busy machine is busy
for both; the quickest of many is what the program takes when nothing else runs.
"""

import time

import vramcast
from vramcast import _core
from vramcast.estimate import question

CALLS = {
    "gpt2": {"batch_size": 2, "seq_len": 512},
    "llama3-8b": {"batch_size": 4, "seq_len": 2048, "gradient_checkpointing": True},
    "Qwen/Qwen2.5-0.5B": {"batch_size": 4, "seq_len": 512, "optimizer": "sgd", "lora": True},
}
TIMES = 300


def timed(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def milliseconds(times, share):
    return 1000 * sorted(times)[int(share * len(times))]


def main():
    print(f"{'model':20} {'share':>6} {'call ms':>9} {'estimate ms':>12} {'beyond ms':>10} {'to_dict ms':>11}")
    for model, options in CALLS.items():
        report = vramcast.train(model, **options)
        calls, estimates, dicts = [], [], []
        for _ in range(TIMES):
            calls.append(timed(lambda: vramcast.train(model, **options).process))
            estimates.append(_core.answer_seconds(question("train", model, options)))
            dicts.append(timed(report.to_dict))
        for share in (0.0, 0.5):
            call, estimate, whole = (milliseconds(times, share) for times in (calls, estimates, dicts))
            print(f"{model:20} {share:6.0%} {call:9.3f} {estimate:12.3f} {call - estimate:10.3f} {whole:11.3f}")


if __name__ == "__main__":
    main()
