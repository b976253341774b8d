"""Pictures of any kind from the command line, and pictures as they are changed in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments.tasks.augmentation import augmented

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (12, 12, 3), np.uint8)


@pytest.fixture(scope="module")
def run(trained):
    from tests.experiments.test_configs import get_config

    return f"--workdir={trained(get_config('fashion_vit', 'tiny'), 2)}"


def shown(out):
    return [line.partition(": ")[2] for line in out.splitlines()]


@pytest.mark.slow
def test_the_same_picture_in_any_mode_is_of_the_same_class(run, launched, tmp_path):
    grey = Image.fromarray(COLOURS[..., 0])
    for mode in ("L", "RGB", "RGBA", "P"):
        grey.convert(mode).save(tmp_path / f"{mode}.png")
    wide = np.asarray(grey).astype(np.uint16) * 257
    Image.fromarray(wide).save(tmp_path / "sixteen.png")
    frames = [grey.convert("P"), Image.fromarray(COLOURS[..., 1]).convert("P")]
    frames[0].save(tmp_path / "animated.gif", save_all=True, append_images=frames[1:])
    turned, exif = grey.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    black = grey.point(lambda x: 255 - x)
    Image.merge("CMYK", [*[Image.new("L", grey.size)] * 3, black]).save(tmp_path / "cmyk.tiff")
    code, out, err = launched("classify", run, *map(str, tmp_path.iterdir()))
    lines = shown(out)
    assert code == 0 and len(lines) == 8, err
    assert dict.fromkeys(lines) == {lines[0]: None}


@pytest.mark.slow
def test_a_broken_file_is_named_and_does_not_stop_the_others(run, launched, refused, tmp_path):
    good, broken = tmp_path / "good.png", tmp_path / "broken.png"
    Image.fromarray(COLOURS).resize((300, 40)).save(good)
    broken.write_bytes(good.read_bytes()[:200])
    code, out, err = launched("classify", run, str(broken), str(good))
    assert code == 1 and len(shown(out)) == 1
    assert err.count("\n") == 1 and str(broken) in err
    assert str(broken) in refused("classify", run, str(broken))
    assert "missing" in refused("classify", run, str(tmp_path / "none.png"))
    assert "got no picture" in refused("classify", run)


@pytest.mark.slow
def test_what_is_read_is_drawn_for_each_picture(run, launched, tmp_path):
    for name in ("a", "b"):
        Image.fromarray(COLOURS).save(tmp_path / f"{name}.png")
    plot = tmp_path / "read.png"
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    code, _, err = launched("classify", run, *paths, f"--plot={plot}")
    assert code == 0, err
    assert all((tmp_path / f"read-{name}.png").stat().st_size > 1000 for name in ("a", "b"))


def test_pictures_are_mirrored_and_shifted_by_the_key_alone():
    image = jnp.asarray(RNG.normal(size=(64, 5, 6, 2)), jnp.float32)
    key = jax.random.key(0)
    assert augmented(image, key) is image
    mirrored = augmented(image, key, flip=True)
    same = np.all(mirrored == image, axis=(1, 2, 3))
    assert 16 < same.sum() < 48
    np.testing.assert_array_equal(mirrored[~same], image[~same][:, :, ::-1])
    moved = augmented(image, key, shift=2)
    np.testing.assert_array_equal(moved, augmented(image, key, shift=2))
    wide = np.pad(image, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(wide, (5, 6), axis=(1, 2))  # [n y x 2 5 6]
    same = np.all(windows == np.moveaxis(moved, 3, 1)[:, None, None], axis=(3, 4, 5))
    assert same.any(axis=(1, 2)).all() and same.any(axis=0)[[0, 4, 2], [0, 4, 2]].all()
