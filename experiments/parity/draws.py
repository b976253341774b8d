"""Random small configs of every family, over every option that changes results."""

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from experiments.parity import cases
from experiments.parity.cases import BOS, EOS, PAD, VOCAB, Case

# Option -> alternatives; an alternative that is a dict has several options.
Options = Mapping[str, tuple[Any, ...]]

_DEPTHS, _HEADS = (1, 2, 3), (1, 2, 4)
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
_TIED = {"tie_word_embeddings": (True, False)}
_START = {"decoder_start_token_id": (PAD, BOS, EOS)}
_STACKS = {
    "activation_function": _ACTIVATIONS,
    "scale_embedding": (False, True),
    "encoder_layers": _DEPTHS,
    "decoder_layers": _DEPTHS,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
}
_TABLES = {
    "tables": (
        dict(share_encoder_decoder_embeddings=True),
        dict(share_encoder_decoder_embeddings=False),
        dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCAB - 4),
    )
}
_T5 = {
    "feed_forward_proj": (*_ACTIVATIONS, "gated-gelu", "gated-silu"),
    "output": (
        dict(),
        dict(tie_word_embeddings=False),
        dict(tie_word_embeddings=False, untied=("lm_head.weight",)),
    ),
    "buckets": tuple(
        dict(relative_attention_num_buckets=buckets, relative_attention_max_distance=distance)
        for buckets, distance in ((4, 6), (8, 6), (8, 10), (32, 20), (32, 128))
    ),
    "num_layers": _DEPTHS,
    "num_decoder_layers": _DEPTHS,
    "num_heads": _HEADS,
    "layer_norm_epsilon": (1e-6, 1e-2),
}
_BERT_STACK = {
    "hidden_act": _ACTIVATIONS,
    "layer_norm_eps": (1e-12, 1e-2),
    "type_vocab_size": (2, 3),
    "num_hidden_layers": _DEPTHS,
    "size": (
        dict(num_attention_heads=1),
        dict(num_attention_heads=4),
        dict(hidden_size=24, num_attention_heads=3),
    ),
}
_LEFT_TO_RIGHT = dict(model="BertLMHeadModel", kind="decoder", is_decoder=True)
_BERT = {
    "class": (
        dict(model="BertModel"),
        dict(model="BertForMaskedLM"),
        dict(model="BertForPreTraining"),
        _LEFT_TO_RIGHT,
        _LEFT_TO_RIGHT | dict(add_cross_attention=True),
    ),
    **_TIED,
    **_BERT_STACK,
}
_GPT2 = {
    "activation_function": _ACTIVATIONS,
    "scale_attn_weights": (True, False),
    "add_cross_attention": (False, True),
    "n_inner": (None, 20),
    "n_layer": _DEPTHS,
    "n_head": _HEADS,
    "layer_norm_epsilon": (1e-5, 1e-2),
    **_TIED,
}
_PERCEIVER = {
    "class": (
        dict(model="PerceiverForImageClassificationFourier"),
        dict(model="PerceiverForImageClassificationLearned"),
        dict(model="PerceiverForMaskedLM", kind="bytes"),
        dict(model="PerceiverForSequenceClassification", kind="bytes"),
    ),
    "hidden_act": _ACTIVATIONS,
    "num_blocks": _DEPTHS,
    "num_self_attends_per_block": _DEPTHS,
    "num_self_attention_heads": _HEADS,
    "num_cross_attention_heads": _HEADS,
    "keys": (dict(), dict(qk_channels=8), dict(v_channels=None, cross_attention_widening_factor=2)),
    "self_attention_widening_factor": (1, 2),
    "num_latents": (2, 6),
    "use_query_residual": (True, False),
}


_VIT = {
    "model": (
        "ViTModel", "DeiTModel", "ViTForImageClassification", "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
    ),
    "hidden_act": _ACTIVATIONS,
    "layer_norm_eps": (1e-12, 1e-2),
    "num_hidden_layers": _DEPTHS,
    "num_attention_heads": _HEADS,
    "patch_size": (2, [2, 3], [7, 1]),
    "qkv_bias": (True, False),
}  # fmt: skip
_LLAMA = {
    "hidden_act": _ACTIVATIONS,
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (4, 6),
    "rms_norm_eps": (1e-6, 1e-2),
    "rope": (
        dict(),
        dict(rope_parameters={"rope_theta": 50.0}),
        cases.stretched("linear"),
        cases.stretched("dynamic"),
        cases.stretched("llama3", low_freq_factor=0.2, high_freq_factor=0.5),
        cases.stretched("yarn", beta_fast=2.0, beta_slow=0.1),
    ),
    "num_hidden_layers": _DEPTHS,
    **_TIED,
}
_CLIP_VISION = {
    "hidden_act": ("quick_gelu", *_ACTIVATIONS),
    "layer_norm_eps": (1e-5, 1e-2),
    "num_hidden_layers": _DEPTHS,
    "num_attention_heads": _HEADS,
    "patch_size": (2, 3, 7),
}
_LLAVA = {
    "projector_hidden_act": _ACTIVATIONS,
    "multimodal_projector_bias": (True, False),
    "features": (
        dict(),
        dict(vision_feature_layer=-1),
        dict(vision_feature_layer=1, vision_feature_select_strategy="full", image_seq_length=5),
    ),
}
_SPEECHT5 = {
    "hidden_act": _ACTIVATIONS,
    "layer_norm_eps": (1e-5, 1e-2),
    "reduction_factor": (1, 2, 3),
    "encoder_layers": _DEPTHS,
    "decoder_layers": _DEPTHS,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_max_relative_position": (2, 20),
    "speech_decoder_postnet_layers": _DEPTHS,
}
_CAPTIONER = {"reader": ("vit", "deit"), "writer": ("gpt2", "bert", "trocr")}
_ENCODERS = ({}, dict(hidden_size=24), dict(num_hidden_layers=1, hidden_act="relu"))


def random_cases(seed: int, count: int) -> tuple[Case, ...]:
    """Returns ``count`` models of every family; a larger count adds models to those of the same seed."""
    return tuple(
        draw(f"random {seed}.{index}", np.random.RandomState([seed, index, zlib.crc32(name.encode())]))
        for name, draw in _FAMILIES.items()
        for index in range(count)
    )  # fmt: skip


def _of(build: Callable[..., Case], options: Options) -> Callable[..., Case]:
    return lambda name, random: build(name, **_pick(random, options))


def _pair(name: str, random: np.random.RandomState) -> Case:
    halves = {half: _pick(random, _BERT_STACK) for half in ("encoder", "decoder")}
    # Not PAD, which the loss of transformers masks in the decoder's input.
    return cases.bert_pair(name, **halves, **_pick(random, {"decoder_start_token_id": (BOS, EOS)}))


def _llava(name: str, random: np.random.RandomState) -> Case:
    # Both halves have two layers, so that every tensor whose gradient is compared is read.
    vision = _pick(random, _CLIP_VISION) | dict(num_hidden_layers=2, patch_size=3)
    text = _pick(random, _LLAMA) | dict(num_hidden_layers=2)
    return cases.llava(name, vision=vision, text=text, **_pick(random, _LLAVA))


def _vit(name: str, **options: Any) -> Case:
    return cases.vit(f"ViT, {name}", **options)


def _captioner(name: str, random: np.random.RandomState) -> Case:
    # Options that are dicts go together, but the encoder's is an argument.
    encoder = random.randint(len(_ENCODERS))
    halves = {half: names[random.randint(len(names))] for half, names in _CAPTIONER.items()}
    return cases.captioner(f"Captioner, {name}", **halves, encoder=_ENCODERS[encoder])


def _pick(random: np.random.RandomState, options: Options) -> dict[str, Any]:
    """Returns one alternative of every option."""
    picked: dict[str, Any] = {}
    for key, alternatives in options.items():
        value = alternatives[random.randint(len(alternatives))]
        picked |= value if isinstance(value, dict) else {key: value}
    return picked


_FAMILIES: dict[str, Callable[[str, np.random.RandomState], Case]] = {
    "T5": _of(cases.t5, _T5 | _START),
    "Bart": _of(partial(cases.bart, "Bart"), _STACKS | _TIED | _START),
    "MBart": _of(partial(cases.bart, "MBart"), _STACKS | _TIED),
    "Marian": _of(
        partial(cases.bart, "Marian", model="MarianMTModel"), _STACKS | _TIED | _TABLES | _START
    ),
    "Pegasus": _of(partial(cases.bart, "Pegasus"), _STACKS | _TIED | _START),
    "BERT": _of(cases.bert, _BERT),
    "BERT pair": _pair,
    "Whisper": _of(cases.whisper, _STACKS | _START),
    "GPT-2": _of(cases.gpt2, _GPT2),
    "Llama": _of(cases.llama, _LLAMA),
    "CLIP": _of(cases.clip_vision, _CLIP_VISION),
    "LLaVA": _llava,
    "ViT": _of(_vit, _VIT),
    "Captioner": _captioner,
    "Perceiver": _of(cases.perceiver, _PERCEIVER),
    "SpeechT5": _of(cases.speecht5, _SPEECHT5),
}
