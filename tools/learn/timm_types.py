"""Learns the parameters of timm's models, by name: what follows the number of classes is written so.

    python tools/learn/timm_types.py OUT.jsonl [NAME…]

Without names those of MOST_USED. `tools/learn/pack.py` packs what comes out; `tools/learn/shipped.py` learns forward passes.
"""

import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

# Architectures that are much used, as far as we know: no count of downloads was looked up.
MOST_USED = """
mobilenetv3_small_100 mobilenetv3_large_100 mobilenetv2_100 mobilenetv4_conv_small mobilenetv4_conv_medium
resnet18 resnet26d resnet34 resnet50 resnet50d resnet101 resnet152 resnext50_32x4d resnext101_32x8d wide_resnet50_2 seresnext50_32x4d resnetv2_50x1_bit
vit_tiny_patch16_224 vit_small_patch16_224 vit_base_patch16_224 vit_large_patch16_224 vit_base_patch32_224 vit_base_patch16_384
vit_base_patch16_clip_224 vit_large_patch14_clip_224 vit_base_patch14_dinov2 vit_small_patch14_dinov2 vit_large_patch14_dinov2 vit_base_patch16_siglip_224
deit_tiny_patch16_224 deit_small_patch16_224 deit_base_patch16_224 deit3_base_patch16_224 beit_base_patch16_224 beitv2_base_patch16_224 eva02_base_patch14_448 eva02_large_patch14_448
convnext_tiny convnext_small convnext_base convnext_large convnextv2_tiny convnextv2_base
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 tf_efficientnet_b0 tf_efficientnet_b3 tf_efficientnet_b4 tf_efficientnet_b5 tf_efficientnet_b7
tf_efficientnetv2_s tf_efficientnetv2_m efficientnetv2_rw_s
swin_tiny_patch4_window7_224 swin_small_patch4_window7_224 swin_base_patch4_window7_224 swin_large_patch4_window12_384 swinv2_tiny_window8_256
densenet121 densenet201 vgg16 vgg16_bn vgg19 inception_v3 inception_v4 inception_resnet_v2 xception41
regnety_032 regnety_160 maxvit_tiny_tf_224 coatnet_0_rw_224 mixer_b16_224 nfnet_l0 dm_nfnet_f0 repvgg_a2 hrnet_w18 ghostnet_100 mnasnet_100 lcnet_050
mobilevit_s mobilevitv2_100 edgenext_small fastvit_t8 pvt_v2_b0 poolformer_s12 levit_128s cait_s24_224
""".split()


def shapes(name, classes):
    import timm
    import torch
    from model_types import kind_of

    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, num_classes=classes)
    modules = dict(model.named_modules())
    kind = lambda full: kind_of(modules[full.rpartition(".")[0]], full) if full.rsplit(".", 1)[-1] in ("weight", "bias") else "O"
    return {full: (kind(full), tuple(tensor.shape)) for full, tensor in model.named_parameters()}


def table(name):
    from timm.models import get_pretrained_cfg, list_pretrained

    some, other, none = shapes(name, 1000), shapes(name, 1009), shapes(name, 0)
    assert list(some) == list(other) and not set(none) - set(some), "parts come and go with the number of classes"
    rows = []
    for full, (kind, shape) in some.items():
        sizes = ["num_classes" if (a, b) == (1000, 1009) else a if a == b else None for a, b in zip(shape, other[full][1])]
        assert None not in sizes and (full not in none or none[full][1] == shape), full
        rows.append([kind, full, ",".join(map(str, sizes)), "" if full in none else "num_classes>0"])
    counts = {tag: get_pretrained_cfg(tag).num_classes for tag in list_pretrained(f"{name}.*")}
    tags = {tag.partition(".")[2]: count for tag, count in counts.items() if count != 1000}
    return {"literal": "timm", "parameters": rows, "defaults": {"num_classes": 1000}, "tags": tags, "known": [tag.partition(".")[2] for tag in counts]}


def main():
    import timm

    out, *names = sys.argv[1:]
    with open(out, "a") as file:
        for name in names or MOST_USED:
            try:
                found = table(name)
            except Exception as error:
                print(name, "FAILED", repr(error)[:200], flush=True)
                continue
            row = {"type": f"timm/{name}", "from": f"timm {timm.__version__}", "classes": {"AutoModelForImageClassification": found}}
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(name, len(found["parameters"]), found["tags"], flush=True)


if __name__ == "__main__":
    main()
