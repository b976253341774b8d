"""A Perceiver IO that tells clothes apart from 784 raw pixels: no convolution, no patches. Argument: tiny."""

from configs import parts

ZOO = {"": 2000}


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    # Eight heads of queries share two of keys and values, so that 784 pixels cost little each.
    reading = dict(cross_heads=8, cross_head_dim=8, num_kv_heads=2)
    pixels = dict(pixel_positions="learned", pixel_dim=16)
    config = parts.clothes(
        parts.perceiver(latents=16, dim=96, mlp_dim=192, **reading, **pixels),
    )
    config.train.steps = 16_000
    if "tiny" in words:
        parts.tiny_pictures(config, dim=32, num_heads=2, mlp_dim=64, latents=8, repeats=2)
        config.model.update(pixel_positions="fourier", pixel_dim=None)
        config.model.update(cross_heads=1, cross_head_dim=32, num_kv_heads=None)
        config.loss.label_smoothing = 0.0
    return config
