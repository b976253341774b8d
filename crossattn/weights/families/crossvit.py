"""CrossViT of timm.

Its ``config.json`` names an architecture, "crossvit_9_240", and changes of its arguments, ``model_args``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crossattn.models.crossvit import CrossViT, CrossViTConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Part, Rules, under
from crossattn.weights.settings import Settings

_BLOCK: dict[str, str | Part] = {
    "attention_residual.norm": "norm1",
    **{f"attention.{name}": Part("attn.qkv", i, 3) for i, name in enumerate(("query", "key", "value"))},
    "attention.out": "attn.proj",
    "feedforward_residual.norm": "norm2",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
}  # fmt: skip
_EXCHANGE: dict[str, str | Part] = {
    "block.cross_residual.norm": "fusion.{own}.norm1",
    "block.cross.query": "fusion.{own}.attn.wq",
    "block.cross.key": "fusion.{own}.attn.wk",
    "block.cross.value": "fusion.{own}.attn.wv",
    "block.cross.out": "fusion.{own}.attn.proj",
    "there.norm": "projs.{own}.0",
    "there.linear": "projs.{own}.2",
    "back.norm": "revert_projs.{own}.0",
    "back.linear": "revert_projs.{own}.2",
}


def _architecture(dims: tuple[int, int], heads: int, depth: int, ratio: int) -> dict[str, Any]:
    return dict(
        img_scale=(1.0, 224 / 240),
        patch_size=(12, 16),
        embed_dim=dims,
        depth=((1, depth, 0),) * 3,
        num_heads=(heads, heads),
        mlp_ratio=(ratio, ratio, 1),
    )


_ARCHITECTURES = {
    "crossvit_tiny_240": _architecture((96, 192), 3, 4, 4),
    "crossvit_small_240": _architecture((192, 384), 6, 4, 4),
    "crossvit_base_240": _architecture((384, 768), 12, 4, 4),
    "crossvit_9_240": _architecture((128, 256), 4, 3, 3),
    "crossvit_15_240": _architecture((192, 384), 6, 5, 3),
    "crossvit_18_240": _architecture((224, 448), 7, 6, 3),
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    shape = _shape(settings)
    (small, large, crossed), *others = (tuple(stage) for stage in shape["depth"])
    if crossed or any(stage != (small, large, 0) for stage in others):
        raise CheckpointError(
            f"config.json has stages of depth {shape['depth']}; expected the same for all, with one "
            "cross-attention each, [layers, layers, 0]."
        )
    block, other = (_block(shape, branch, dtype) for branch in range(2))
    size = shape["img_size"]
    small_size, large_size = (
        (int(size[0] * scale), int(size[1] * scale)) for scale in shape["img_scale"]
    )
    config = CrossViTConfig(
        block,
        large_dim=other.dim,
        large_heads=other.attention.num_heads,
        large_mlp_dim=_mlp_dim(shape, 1),
        small_patch=shape["patch_size"][0],
        large_patch=shape["patch_size"][1],
        small_layers=small,
        large_layers=large,
        stages=len(others) + 1,
        num_classes=shape["num_classes"],
        image_size=size,
        channels=shape["in_chans"],
        small_size=small_size,
        large_size=large_size,
    )
    tables = (
        f"{b}_patches.{t}" for b in ("small", "large") for t in ("class_token", "positions.table")
    )
    return CrossViT, config, Rules(_names(small, large), rows=tuple(tables))


def _shape(settings: Settings) -> Mapping[str, Any]:
    """Returns the arguments in timm of the architecture, with the changes of this checkpoint."""
    name = settings["architecture"]
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"config.json has architecture {name!r}; expected one of {', '.join(_ARCHITECTURES)} (the "
            "patches of a dagger are cut by several convolutions, which is not supported)."
        )
    own = settings.get("model_args") or {}
    if not isinstance(own, Mapping):
        raise CheckpointError(f"config.json has model_args {own!r}; expected names and values.")
    for key, usual in (("multi_conv", False), ("crop_scale", False), ("global_pool", "token")):
        Settings(settings.get("pretrained_cfg") or {}, **own).refuse(key, usual)
    shape = dict(
        in_chans=3, img_size=240, qkv_bias=True, num_classes=settings.get("num_classes", 1000)
    )
    shape |= _ARCHITECTURES[name] | dict(own)
    size = shape["img_size"]
    return shape | dict(img_size=(size, size) if isinstance(size, int) else tuple(size))


def _block(shape: Mapping[str, Any], branch: int, dtype: Any) -> BlockConfig:
    dim = shape["embed_dim"][branch]
    block = BlockConfig.of(
        dim,
        shape["num_heads"][branch],
        _mlp_dim(shape, branch),
        activation="gelu_exact",
        norm_epsilon=1e-6,
        dtype=dtype,
    )
    return replace(
        block, attention=replace(block.attention, use_bias=shape["qkv_bias"], out_bias=True)
    )


def _mlp_dim(shape: Mapping[str, Any], branch: int) -> int:
    return int(shape["embed_dim"][branch] * shape["mlp_ratio"][branch])


def _names(small: int, large: int) -> dict[str, str | Part]:
    """Returns the rules' names; theirs number branches, ours name them."""
    names: dict[str, str | Part] = {}
    for branch, (name, layers) in enumerate((("small", small), ("large", large))):
        names |= {
            f"{name}_patches.projection": f"patch_embed.{branch}.proj",
            f"{name}_patches.class_token": f"cls_token_{branch}",
            f"{name}_patches.positions.table": f"pos_embed_{branch}",
            f"{name}_norm": f"norm.{branch}",
            f"{name}_output.linear": f"head.{branch}",
        }
        for layer in range(layers):
            theirs = f"blocks.{{}}.blocks.{branch}.{layer}"
            names |= under(f"stages.{{}}.{name}.layers.{layer}", theirs, _BLOCK)
        exchange = {ours: str(theirs).format(own=branch) for ours, theirs in _EXCHANGE.items()}
        names |= under(f"stages.{{}}.{name}_reads", "blocks.{}", exchange)
    return names
