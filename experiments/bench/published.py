"""Configs of published models of images and sound at their published sizes, for plans.

    python -m experiments.plan --config=experiments/bench/published.py:vit_b16 --topology=v5e:4x4

A plan reads no data, so these configs name synthetic data of the right image size, with fewer classes than
ImageNet.

Sources: Dosovitskiy et al. 2021 (ViT-B/16, batches of 4,096); Jaegle et al. 2021, "Perceiver IO" (512
latents of 1,024, eight times six layers, 224 x 224 pixels with 64 bands, batches of 1,024); Liu et al. 2023
(LLaVA 1.5 7B: Llama 7B, CLIP ViT-L/14 at 336, batches of 128); Whisper large-v3 (its config.json is in
``whisper_large_v3``).
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs import finetune_whisper, parts


def get_config(arg: str = ""):
    """Returns the config of vit_b16, perceiver_io, llava_7b or whisper_large_v3."""
    made = (_vit_b16, _perceiver_io, _llava_7b, _whisper_large_v3)
    models = {make.__name__[1:]: make for make in made}
    return models[parts.choice(parts.words(arg, tuple(models)), tuple(models))]()


def _vit_b16() -> ConfigDict:
    model = parts.picture_model(
        "vit", dim=768, num_heads=12, mlp_dim=3072, layers=12, patch_size=16
    )
    return _pictures(model, batch_size=4096)


def _perceiver_io() -> ConfigDict:
    model = parts.perceiver(
        dim=1024, num_heads=8, mlp_dim=1024, layers=6, repeats=8, latents=512, bands=64,
        cross_heads=1, cross_head_dim=1024,
    )  # fmt: skip
    return _pictures(model, batch_size=1024)


def _pictures(model: dict[str, Any], batch_size: int) -> ConfigDict:
    config: Any = parts.clothes(_large(model))
    config.data.update(name="shapes", label="shape", height=224, width=224, channels=3)
    config.data.update(batch_size=batch_size, flip=False)
    config.train.update(compute_dtype="bfloat16", ema_decay=None)
    return config


def _llava_7b() -> ConfigDict:
    model = parts.model(
        "llava", dim=4096, num_heads=32, mlp_dim=11008, layers=32, activation="swiglu", norm="rms",
        positions="rope", use_bias=False, tie_output=False, image_dim=1024, image_layers=24, image_heads=16,
        patch_size=14,
    )  # fmt: skip
    config: Any = parts.captions(_large(model) | {"remat": True}, steps=1000)
    config.data.update(
        name="shapes", batch_size=128, examples=1, text_len=1472, height=336, width=336
    )
    config.data.shift = 0
    config.tokenizer.vocab_size = 32000
    config.mesh.update(data=1, fsdp=-1)
    config.train.compute_dtype = "bfloat16"
    return config


def _whisper_large_v3() -> ConfigDict:
    config: Any = finetune_whisper.get_config("tiny")
    config.init["from"] = str(Path(__file__).with_name("whisper_large_v3"))
    config.model.update(dtype="bfloat16", remat=True)
    config.data.update(batch_size=64, target_len=448)
    config.loss.chunks = 4
    config.mesh.update(data=1, fsdp=-1)
    config.train.compute_dtype = "bfloat16"
    return config


def _large(model: dict[str, Any]) -> dict[str, Any]:
    return model | dict(dtype="bfloat16", scan=True, remat=False, dropout_rate=0.0)
