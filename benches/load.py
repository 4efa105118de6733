#!/usr/bin/env python3
"""A hundred clients at a server, with plans drawn from everything, heavy ones among them (docs/benchmarks.md).

    python3 benches/load.py target/release/vramcast --seconds 600

On one server, in turn: light plans alone for a while, then five times as long the same with one request in ten heavy, so
that what else the machine does falls on both. Printed as JSON: answers by status, the times of light requests in both, and
the server's resident memory over time. Standard library only.
"""
import argparse, asyncio, json, random, statistics, subprocess, time, urllib.request

LIGHT_MODELS = ["gpt2", "llama3-8b", "microsoft/phi-2", "Qwen/Qwen2.5-0.5B", "google-bert/bert-base-uncased", "google-t5/t5-small",
                "openai/whisper-tiny", "google/vit-base-patch16-224", "meta-llama/Meta-Llama-3-70B", "mistralai/Mixtral-8x7B-v0.1"]
DECODERS = ["gpt2", "llama3-8b", "microsoft/phi-2", "Qwen/Qwen2.5-0.5B"]
ENGINES = ["vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "ollama"]
HEAVY = [
    ("train", {"model": "state-spaces/mamba-2.8b-hf"}),
    ("train", {"model": "state-spaces/mamba-130m-hf", "plan": {"batch": {"seq_len": 100_000}}}),
    ("train", {"model": "RWKV/rwkv-4-169m-pile"}),
    ("infer", {"model": "deepseek-ai/DeepSeek-V3", "gpus_all": True}),
    ("infer", {"model": "Qwen/Qwen3-235B-A22B", "suggestions": True}),
    ("train", {"model": "meta-llama/Llama-3.1-405B", "suggestions": True, "gpus_all": True}),
    ("train", {"model": "gpt2", "plan": {"job": {"steps": 1000, "lengths": {"lognormal": {"mean": 6.0, "deviation": 1.0}}}}}),
]


def light(draw):
    kind = draw.randrange(5)
    if kind == 0:
        return "inspect", {"model": draw.choice(LIGHT_MODELS)}
    if kind == 1:
        engine = draw.choice(ENGINES)
        return "infer", {"model": draw.choice(DECODERS[1:]), "engine": engine, "engine_options": {"context": draw.choice([512, 1024, 2048])}}
    if kind == 2:
        return "infer", {"model": draw.choice(DECODERS), "plan": {"batch": {"batch_size": draw.randrange(1, 9), "seq_len": 512}, "new_tokens": 16}}
    plan = {"batch": {"batch_size": draw.randrange(1, 17), "seq_len": draw.choice([64, 128, 256, 512])}}
    if kind == 3:
        plan["adapter"] = {"method": "lora", "rank": draw.choice([8, 64])}
    return "train", {"model": draw.choice(DECODERS), "plan": plan}


async def ask(port, path, body):
    """One request on a connection of its own; its status and seconds."""
    data = json.dumps(body).encode()
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), time.monotonic() - began
    except (OSError, IndexError, ValueError):
        return 0, time.monotonic() - began


def resident(process):
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))


class Tally:
    def __init__(self):
        self.statuses, self.times, self.memory = {"light": {}, "heavy": {}}, {"light": [], "heavy": []}, []

    def summary(self):
        def of(taken):
            cuts = statistics.quantiles(taken, n=100) if len(taken) > 1 else [0] * 99
            return {"answers": len(taken), "p50_ms": round(1000 * cuts[49]), "p99_ms": round(1000 * cuts[98])}

        return {"statuses": self.statuses, **{kind: of(taken) for kind, taken in self.times.items()}, "resident_mib": self.memory}


async def phase(port, process, draws, seconds, heavy_share, tally):
    until = time.monotonic() + seconds

    async def client(draw):
        while time.monotonic() < until:
            kind = "heavy" if draw.random() < heavy_share else "light"
            status, took = await ask(port, *(draw.choice(HEAVY) if kind == "heavy" else light(draw)))
            tally.statuses[kind][status] = tally.statuses[kind].get(status, 0) + 1
            tally.times[kind].append(took)

    async def watch():
        while time.monotonic() < until:
            tally.memory.append(resident(process))
            await asyncio.sleep(seconds / 4)

    await asyncio.gather(watch(), *(client(draw) for draw in draws))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("binary")
    arguments.add_argument("--seconds", type=float, default=600, help="with heavy ones, in all")
    arguments.add_argument("--turns", type=int, default=10)
    arguments.add_argument("--clients", type=int, default=100)
    arguments.add_argument("--timeout", default="10", help="the server's, in seconds: more on a machine that does other things")
    arguments = arguments.parse_args()
    options = ["--port", "0", "--rate", "0", "--timeout", arguments.timeout, "--log-format", "off"]
    server = subprocess.Popen([arguments.binary, "serve", *options], stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline().rstrip("/\n").rsplit(":", 1)[1])
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/models").read()
        draws = [random.Random(number) for number in range(arguments.clients)]
        alone, mixed, turn = Tally(), Tally(), arguments.seconds / arguments.turns
        for _ in range(arguments.turns):
            asyncio.run(phase(port, server.pid, draws, turn / 5, 0.0, alone))
            asyncio.run(phase(port, server.pid, draws, turn, 0.1, mixed))
        alone, mixed = alone.summary(), mixed.summary()
        ratio = mixed["light"]["p99_ms"] / max(alone["light"]["p99_ms"], 1)
        print(json.dumps({"alone": alone, "mixed": mixed, "p99_of_light_times": round(ratio, 2)}))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
