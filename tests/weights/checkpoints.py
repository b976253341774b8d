"""Checkpoints for tests: small ones of every kind, split, renamed, damaged."""

import json
import tracemalloc
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file, save_file

import crossattn as xa
from crossattn.weights import CheckpointError

BART = dict(
    model_type="bart", vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12,
    max_position_embeddings=10, activation_function="gelu", pad_token_id=1, bos_token_id=0,
    eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
BERT = dict(
    model_type="bert", vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=12, max_position_embeddings=10, type_vocab_size=2, pad_token_id=0,
)  # fmt: skip
GPT2 = dict(
    model_type="gpt2", vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=10, eos_token_id=2
)
CLIP = dict(
    model_type="clip_vision_model", hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=12, image_size=6, patch_size=3,
)  # fmt: skip
WHOLE_CLIP = dict(
    model_type="clip", projection_dim=6, vision_config=CLIP,
    text_config=dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                     intermediate_size=12, max_position_embeddings=10),
)  # fmt: skip
LLAMA = dict(
    model_type="llama", vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=12, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAVA = dict(model_type="llava", vision_config=CLIP, text_config=LLAMA, image_token_index=19)
MARIAN = BART | dict(model_type="marian")
PERCEIVER = dict(
    model_type="perceiver", architectures=["PerceiverForMaskedLM"], num_latents=3, d_latents=8, d_model=16,
    num_blocks=2, num_self_attends_per_block=1, num_self_attention_heads=2, vocab_size=20,
    num_cross_attention_heads=2, qk_channels=6, v_channels=8, max_position_embeddings=10,
    train_size=[4, 6],
)  # fmt: skip
T5 = dict(
    model_type="t5", vocab_size=20, d_model=8, d_kv=3, d_ff=12, num_layers=1, num_heads=2,
    pad_token_id=0, eos_token_id=1,
)  # fmt: skip
TROCR = dict(
    model_type="trocr", vocab_size=20, d_model=8, decoder_layers=1, decoder_attention_heads=2,
    decoder_ffn_dim=12, max_position_embeddings=10, pad_token_id=1, bos_token_id=0, eos_token_id=2,
)  # fmt: skip
VIT = dict(
    model_type="vit", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
    image_size=6, patch_size=3,
)  # fmt: skip
DEIT = VIT | dict(model_type="deit", architectures=["DeiTForImageClassificationWithTeacher"])
CAPTIONER = dict(
    model_type="vision-encoder-decoder", encoder=VIT, decoder=GPT2 | dict(add_cross_attention=True),
    decoder_start_token_id=2, pad_token_id=2,
)  # fmt: skip
WHISPER = BART | dict(
    model_type="whisper", num_mel_bins=4, max_source_positions=6, max_target_positions=8
)
ALL = {
    config["model_type"]: config
    for config in (BART, BERT, CAPTIONER, CLIP, DEIT, GPT2, LLAMA, LLAVA, MARIAN, PERCEIVER, T5, TROCR, VIT,
                   WHISPER, WHOLE_CLIP)
}  # fmt: skip


def refused(call, *arguments, error=CheckpointError):
    """Returns the one line in which the call refuses, in little memory."""
    tracemalloc.start()
    with pytest.raises(error) as caught:
        call(*arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 2**27
    return str(caught.value)


def each(cases, every=1):
    """Parametrizes a test by cases; all but every so many are slow."""
    marks = [pytest.mark.slow if index % every else () for index in range(len(cases))]
    params = [pytest.param(c, id=c.name, marks=m) for c, m in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize("case", params)


def fresh(config: dict, folder: Path) -> Path:
    """Writes a checkpoint of random parameters."""
    model = xa.weights.describe(config)
    return xa.save(folder, model, xa.init(model, jax.random.key(0)))


def rewrite(folder: Path, change) -> Path:
    """Changes the dict of a checkpoint's tensors by ``change``."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def shard(folder: Path, count: int = 3) -> Path:
    """Splits a checkpoint into several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(count):
        name = f"model-{index + 1:05}-of-{count:05}.safetensors"
        own = {key: tensors[key] for key in sorted(tensors)[index::count]}
        save_file(own, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder
