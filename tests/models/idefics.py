"""Small random Idefics of ``transformers``: their tensors as a ``Flamingo``'s parameters, and their logits.

``python -m tests.models.idefics`` writes ``golden/idefics.npz`` anew, for machines without PyTorch.
"""

from pathlib import Path

import numpy as np

from crossattn.models import FlamingoConfig
from crossattn.nn import BlockConfig, InputConfig

GOLDEN = Path(__file__).parent / "golden" / "idefics.npz"
VOCAB, D, M, P, L, IMAGE = 40, 16, 12, 5, 3, 7
TOKENS = np.random.default_rng(0).integers(8, VOCAB, (3, 9)).astype(np.int32)
# Text before the first image; two images at one place, and adjacent ones; and none at all.
POSITIONS = np.array([[2, 6, -1], [0, 4, 4], [-1, -1, -1]], np.int32)
PATCHES = np.random.default_rng(1).normal(size=(3, 3, P, M)).astype(np.float32)
CASES = {"every block": dict(interval=1), "every second block": dict(interval=2)}


def seen(positions, length):
    """Which images [B T I] each token reads, by the rule in words: those of the last place that has any."""
    allowed = np.zeros((*positions.shape[:1], length, positions.shape[1]), bool)
    for row, places in enumerate(positions):
        for t in range(length):
            before = [place for place in places if 0 <= place <= t]
            for image, place in enumerate(places):
                allowed[row, t, image] = bool(before) and place == max(before)
    return allowed


def config(interval):
    block = BlockConfig.of(
        D, 2, 24, norm="rms", norm_epsilon=1e-6, activation="swiglu", use_bias=False
    )
    return FlamingoConfig(
        vocab_size=VOCAB, block=block, layers=4, positions="rope", tie_output=False,
        input=InputConfig(scale=1.0), interval=interval, image_dim=M, image_heads=2,
        resampler_head_dim=5, image_latents=L, resampler_layers=2,
    )  # fmt: skip


def params(tensors, interval):
    """The parameters of ``Flamingo(config(interval))`` that hold a checkpoint's tensors."""

    def heads(name, count):
        return {"kernel": tensors[name].T.reshape(tensors[name].shape[1], count, -1)}

    def out(name, count):
        return {"kernel": tensors[name].T.reshape(count, -1, tensors[name].shape[0])}

    def attention(name, last="o_proj"):
        short = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
        read = {ours: heads(f"{name}.{other}.weight", 2) for ours, other in short.items()}
        return read | {"out": out(f"{name}.{last}.weight", 2)}

    def dense(**names):
        return {ours: {"kernel": tensors[f"{name}.weight"].T} for ours, name in names.items()}

    def norm(name):
        own = {"scale": tensors[f"{name}.weight"]}
        return own | ({"bias": tensors[f"{name}.bias"]} if f"{name}.bias" in tensors else {})

    def mlp(name):
        return dense(up=f"{name}.up_proj", gate=f"{name}.gate_proj", down=f"{name}.down_proj")

    layers = {}
    for i in range(4):
        at, gated = f"model.layers.{i}", f"model.gated_cross_attn_layers.{i // interval}"
        layers[str(i)] = {
            "attention": attention(f"{at}.self_attn"),
            "attention_residual": {"norm": norm(f"{at}.input_layernorm")},
            "feedforward": mlp(f"{at}.mlp"),
            "feedforward_residual": {"norm": norm(f"{at}.post_attention_layernorm")},
        }
        if i % interval == 0:
            gates = [
                tensors[f"{gated}.alpha_{name}"].reshape(()) for name in ("cross_attn", "dense")
            ]
            layers[str(i)] |= {
                "gated": attention(f"{gated}.cross_attn"),
                "gated_residual": {"norm": norm(f"{gated}.input_layernorm"), "gate": gates[0]},
                "gated_feedforward": mlp(f"{gated}.mlp"),
                "gated_feedforward_residual": {
                    "norm": norm(f"{gated}.post_attention_layernorm"),
                    "gate": gates[1],
                },
            }
    blocks = {}
    for i in range(2):
        reading, network = (f"model.perceiver_resampler.blocks.{i}.{part}" for part in (0, 1))
        blocks[str(i)] = {
            "reading": {
                "norm": norm(f"{reading}.context_layer_norm"),
                "attention": attention(reading, "output_proj"),
            },
            "reading_residual": {"norm": norm(f"{reading}.latents_layer_norm")},
            "feedforward": dense(up=f"{network}.fc", down=f"{network}.c_proj"),
            "feedforward_residual": {"norm": norm(f"{network}.ln")},
        }
    return {
        "input": {"embedding": {"table": tensors["model.embed_tokens.weight"]}},
        "decoder": {"stack": {"layers": layers}, "norm": norm("model.norm")},
        "output": {"table": tensors["lm_head.weight"]},
        "resampler": {
            "latents": tensors["model.perceiver_resampler.latents"],
            "layers": {"layers": blocks},
            "norm": norm("model.perceiver_resampler.layer_norm"),
        },
    }


def measured(interval):
    """The tensors of a random Idefics, and its logits [B T V] of ``TOKENS``."""
    import torch
    import transformers

    torch.manual_seed(interval)
    settings = transformers.IdeficsConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=2, cross_layer_interval=interval, use_resampler=True,
        alpha_type="float", pad_token_id=0,
        vision_config=dict(embed_dim=M, image_size=8, patch_size=4, num_hidden_layers=1,
                           num_attention_heads=2, intermediate_size=8),
        perceiver_config=dict(use_resampler=True, resampler_n_latents=L, resampler_depth=2,
                              resampler_n_heads=2, resampler_head_dim=5),
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.IdeficsForVisionText2Text(settings).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            spread = 0.5 if x.ndim < 2 or "alpha" in name else 1.5 / x.shape[-1] ** 0.5
            x.copy_(
                torch.randn(x.shape) * spread + (1 if "norm" in name and "weight" in name else 0)
            )
        logits = model(
            input_ids=torch.tensor(TOKENS, dtype=torch.long),
            image_encoder_embeddings=torch.tensor(PATCHES),
            image_attention_mask=torch.tensor(seen(POSITIONS, TOKENS.shape[1]).astype(np.int64)),
            use_cache=False,
        ).logits
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    wanted = {name: x for name, x in tensors.items() if "vision_model" not in name}
    return wanted, logits.numpy()


def main():
    arrays = {}
    for name, options in CASES.items():
        tensors, logits = measured(**options)
        arrays |= {f"{name}/{tensor}": x for tensor, x in tensors.items()}
        arrays[f"{name}/logits"] = logits
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, **arrays)


def golden(name):
    """Reads the tensors and logits of a case that ``main`` measured."""
    with np.load(GOLDEN, allow_pickle=False) as file:
        start = f"{name}/"
        arrays = {key.removeprefix(start): file[key] for key in file.files if key.startswith(start)}
    return {key: x for key, x in arrays.items() if key != "logits"}, arrays["logits"]


if __name__ == "__main__":
    main()
