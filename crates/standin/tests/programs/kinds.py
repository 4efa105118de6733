"""kinds.py NAME: a small program of one kind; prints its peaks as JSON. For comparing a rehearsal with a real card.

Only torch (and torchvision, transformers where the name says so) is needed.
"""
import json, sys

import torch
from torch import nn
from torch.nn import functional as F

KINDS = {}


def kind(function):
    KINDS[function.__name__.replace("_", "-")] = function
    return function


def train(model, batch, loss_of, steps=3, optimizer=torch.optim.AdamW, autocast=None):
    optimizer = optimizer(model.parameters(), lr=1e-4)
    for _ in range(steps):
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(model(*batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def layers(width, depth, heads=16):
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


@kind
def perceptron():
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 16384), nn.GELU(), nn.Linear(16384, 1000)).cuda()
    batch, labels = torch.randn(4096, 4096, device="cuda"), torch.randint(0, 1000, (4096,), device="cuda")
    train(model, [batch], lambda out: F.cross_entropy(out, labels))


@kind
def encoder_autocast():
    model = layers(1024, 12).cuda()
    train(model, [torch.randn(16, 512, 1024, device="cuda")], lambda out: out.square().mean(), autocast=torch.bfloat16)


@kind
def compiled():
    model = torch.compile(layers(1024, 4).cuda())
    train(model, [torch.randn(8, 512, 1024, device="cuda")], lambda out: out.square().mean(), autocast=torch.bfloat16)


@kind
def lstm():
    model = nn.LSTM(512, 1024, num_layers=3, batch_first=True).cuda()
    train(model, [torch.randn(64, 256, 512, device="cuda")], lambda out: out[0].square().mean(), optimizer=torch.optim.SGD)


@kind
def resnet_fp32():
    import torchvision

    labels = torch.randint(0, 1000, (64,), device="cuda")
    train(torchvision.models.resnet50().cuda(), [torch.randn(64, 3, 224, 224, device="cuda")], lambda out: F.cross_entropy(out, labels))


@kind
def resnet_autocast():
    import torchvision

    labels = torch.randint(0, 1000, (64,), device="cuda")
    images = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    train(model, [images], lambda out: F.cross_entropy(out, labels), autocast=torch.bfloat16)


@kind
def detection():
    import torchvision

    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).cuda()
    images = [torch.rand(3, 320, 320, device="cuda") for _ in range(8)]
    boxes = torch.tensor([[10.0, 20.0, 200.0, 220.0], [50.0, 60.0, 150.0, 160.0]], device="cuda")
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2], device="cuda")} for _ in images]
    train(model, [images, targets], lambda losses: sum(losses.values()))


@kind
def graph():
    model = layers(512, 4, 8).cuda().eval()
    static = torch.randn(8, 128, 512, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            model(static)
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            model(static)
        for _ in range(3):
            recorded.replay()


@kind
def algebra():
    matrix = torch.randn(2048, 2048, device="cuda")
    positive = matrix @ matrix.T + 4096 * torch.eye(2048, device="cuda")
    torch.linalg.cholesky(positive)
    torch.linalg.qr(matrix)
    torch.linalg.solve(positive, matrix)
    torch.linalg.eigh(positive)


@kind
def spectra():
    signal = torch.randn(64, 16000 * 4, device="cuda")
    spectrum = torch.stft(signal, 1024, 256, window=torch.hann_window(1024, device="cuda"), return_complex=True)
    torch.istft(spectrum, 1024, 256, window=torch.hann_window(1024, device="cuda"))
    torch.fft.fft2(torch.randn(32, 1000, 1000, device="cuda"))


@kind
def sorting():
    values = torch.randn(1 << 24, device="cuda")
    values.sort()
    values.topk(1000)
    values.cumsum(0)
    torch.unique((values[:4096] > 0).long())


@kind
def generation():
    import transformers

    config = transformers.LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(10, 30000, (4, 200), device="cuda")
    mask = torch.ones_like(tokens)
    model.generate(tokens, attention_mask=mask, max_new_tokens=40, min_new_tokens=40, do_sample=True, top_p=0.9, top_k=50, pad_token_id=0)
    model.generate(tokens, attention_mask=mask, max_new_tokens=20, min_new_tokens=20, num_beams=4, pad_token_id=0)


@kind
def mixture():
    import transformers

    config = transformers.MixtralConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, num_local_experts=8)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = torch.randint(10, 30000, (4, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@kind
def two_models():
    """A generator and a critic, each with its optimizer."""
    maker = nn.Sequential(nn.ConvTranspose2d(128, 256, 4, 2, 1), nn.BatchNorm2d(256), nn.ReLU(), nn.ConvTranspose2d(256, 3, 4, 2, 1), nn.Tanh()).cuda()
    critic = nn.Sequential(nn.Conv2d(3, 128, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(128, 1, 4, 2, 1)).cuda()
    ours, theirs = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    for _ in range(3):
        made = maker(torch.randn(64, 128, 16, 16, device="cuda"))
        theirs.zero_grad()
        (critic(made.detach()).mean() - critic(torch.randn_like(made)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        (-critic(made).mean()).backward()
        ours.step()


def main():
    KINDS[sys.argv[1]]()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    print("peaks " + json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "used": total - free}))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(*KINDS, sep="\n")
    else:
        main()
