"""Llama, CLIP and LLaVA: names of older files, what is read of a tower, and what is refused by name."""

import jax
import numpy as np
import pytest

import crossattn as xa
from tests.weights import checkpoints
from tests.weights.test_round_trip import same_files, same_params


def renamed(folder, prefixes):
    """Replaces prefixes of a checkpoint's names."""

    def change(tensors):
        for name in list(tensors):
            old = next((old for old in prefixes if name.startswith(old)), "")
            if old:
                tensors[prefixes[old] + name.removeprefix(old)] = tensors.pop(name)

    return checkpoints.rewrite(folder, change)


@pytest.mark.parametrize(
    "prefixes",
    [
        {"vision_tower": "vision_tower.vision_model"},
        {
            "vision_tower": "model.vision_tower",
            "multi_modal_projector": "model.multi_modal_projector",
            "language_model.model": "model.language_model",
            "language_model.lm_head": "lm_head",
        },
    ],
    ids=["a tower in a tower", "one model in another"],
)
def test_the_names_of_other_versions_are_known(prefixes, tmp_path):
    folder = checkpoints.fresh(checkpoints.LLAVA, tmp_path / "llava")
    _, expected, _ = xa.load(folder)
    _, params = same_files(renamed(folder, prefixes), tmp_path)
    same_params(params, expected)


def test_layers_of_a_tower_that_are_not_read_are_kept_and_not_built(tmp_path):
    whole = xa.weights.describe(checkpoints.CLIP)
    tower = xa.weights.Tensors.of(whole, xa.init(whole, jax.random.key(1)))
    folder = checkpoints.fresh(checkpoints.LLAVA, tmp_path / "llava")

    def add(tensors):
        names = {name: name.replace("vision_model", "vision_tower") for name in tower}
        tensors |= {names[name]: np.asarray(x) for name, x in tower.items()}

    model, params = same_files(checkpoints.rewrite(folder, add), tmp_path)
    assert model.config.vision.layers == 1 and set(params["vision"]["encoder"]["layers"]) == {"0"}
    assert "norm" not in params["vision"]


def test_an_early_config_of_a_half_of_clip_replaces_the_later_one():
    """CLIPConfig of transformers makes a whole config of it, whose every value replaces the other's."""
    text = dict(hidden_size=12, num_attention_heads=3, intermediate_size=20, num_hidden_layers=2)
    picture = checkpoints.CLIP | dict(patch_size=2)
    later = checkpoints.WHOLE_CLIP["text_config"] | dict(eos_token_id=2, layer_norm_eps=0.5)
    early = checkpoints.WHOLE_CLIP | dict(text_config=later, text_config_dict=text)
    found = xa.weights.describe(early | dict(vision_config_dict=picture)).config
    expected = checkpoints.WHOLE_CLIP | dict(text_config=text, vision_config=picture)
    assert found == xa.weights.describe(expected).config
    assert (found.text.vocab_size, found.text.block.dim, found.vision.patch_size) == (
        49408,
        12,
        (2, 2),
    )
    none = dict(text_config_dict=None, vision_config_dict=None)
    plain = xa.weights.describe(checkpoints.WHOLE_CLIP).config
    assert xa.weights.describe(checkpoints.WHOLE_CLIP | none).config == plain


def test_a_size_that_a_half_of_clip_leaves_out_is_its_default_whatever_its_width():
    """transformers writes no value of a nested config that is the default of its class."""
    half = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    config = checkpoints.WHOLE_CLIP | dict(text_config=half, vision_config=half)
    found = xa.weights.describe(config).config
    assert found.text.block.mlp.hidden == 2048
    assert found.vision.block.mlp.hidden == 3072


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (checkpoints.LLAMA | dict(rope_scaling=dict(rope_type="longrope")), "rope_type 'longrope'"),
        (checkpoints.LLAMA | dict(rope_scaling=dict(type="linear")), "lacks factor"),
        (checkpoints.LLAMA | dict(model_type="qwen2", use_sliding_window=True), "use_sliding_window True"),
        (checkpoints.LLAMA | dict(rope_parameters=dict(partial_rotary_factor=0.5)),
         "partial_rotary_factor 0.5"),
        (checkpoints.LLAMA | dict(hidden_act="quick_gelu"), "hidden_act 'quick_gelu'; expected one of relu"),
        (checkpoints.WHOLE_CLIP | dict(text_config_dict=dict(hidden_size=-8)), "hidden_size -8; expected"),
        (checkpoints.LLAVA | dict(vision_feature_layer=[-2, -5]), r"vision_feature_layer \[-2, -5\], which"),
        (checkpoints.LLAVA | dict(vision_feature_layer=3), "vision_feature_layer 3 of a tower of 2 layers"),
        (checkpoints.LLAVA | dict(vision_feature_select_strategy="cls"), "select_strategy 'cls', which"),
        (checkpoints.LLAVA | dict(vision_config=dict(model_type="siglip_vision_model")),
         "vision_config of model_type 'siglip_vision_model', which"),
        (checkpoints.LLAVA | dict(text_config=dict(model_type="mistral")),
         "text_config of model_type 'mistral', which"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_one_line(config, said):
    with pytest.raises(xa.weights.CheckpointError, match=said):
        xa.weights.describe(config)
