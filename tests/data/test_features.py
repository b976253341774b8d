"""Features: what each kind makes of a value, what it refuses, and batches of several together."""

import io
import json
import zlib
from collections import Counter

import numpy as np
import pytest

from crossattn.data import mel, pipeline, sources, tokenizers
from crossattn.data.errors import DataError
from crossattn.data.features import (
    Boxes,
    Image,
    Label,
    PackedTexts,
    Sound,
    SoundWindow,
    TaggedText,
    Text,
    Vectors,
)
from crossattn.data.packing import Layout
from tests.peers import package

from .batches import joined, same, take

pillow = package("PIL.Image", "images")

COLOURS = ("black", "white", "red")


@pytest.fixture(scope="module")
def tokenizer():
    pairs = sources.open_source("phrases", "test")
    return tokenizers.train_tokenizer([pair["source"] for pair in pairs], 300)


@pytest.fixture(scope="module")
def examples():
    """70 tiny pictures with captions of many lengths, a colour, a vector and some boxes."""
    rng = np.random.default_rng(0)
    texts = [pair["source"] for pair in sources.open_source("phrases", "test")]
    found = []
    for index in range(70):
        buffer = io.BytesIO()
        pillow.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8)).save(buffer, "PNG")
        caption = " and ".join(texts[index : index + 1 + index % 3])
        boxes = [(i, 0, i + 1, 2) for i in range(index % 5)]
        found.append(
            {
                "id": str(index),
                "image": buffer.getvalue(),
                "caption": caption,
                "colour": COLOURS[index % 3],
                "vector": rng.normal(size=4),
                "page": {"boxes": boxes, "size": (10, 2)},
            }
        )
    return found


def png(picture) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def plain(**options) -> Image:
    """Values from 0 to 1."""
    return Image(**({"height": 4, "width": 4, "mean": (0.0,), "std": (1.0,)} | options))


# --- kinds


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_a_grey_picture_is_the_same_in_every_mode(mode):
    grey = pillow.new("L", (4, 4), 255).convert("RGB").convert("RGBA" if mode == "PA" else mode)
    picture = grey if mode != "PA" else grey.convert("P").convert("PA")
    for channels in (1, 3):
        found = plain(channels=channels).prepare(picture)
        assert found.shape == (4, 4, channels) and found.dtype == np.float32
        np.testing.assert_allclose(found, 1, atol=0.02)


@pytest.mark.parametrize(
    ("dtype", "white"), [(np.uint16, 65535), (np.int32, 65535), (np.float32, 1)]
)
def test_deep_greys_keep_their_share_of_white(dtype, white):
    ramp = (np.arange(16).reshape(4, 4) / 15 * white).astype(dtype)
    found = plain(channels=1).prepare(pillow.fromarray(ramp))[..., 0]
    np.testing.assert_allclose(found, np.arange(16).reshape(4, 4) / 15, atol=1 / 255)


def test_what_is_transparent_stands_on_white():
    picture = pillow.new("RGBA", (4, 4), (255, 0, 0, 0))
    picture.putpixel((0, 0), (255, 0, 0, 128))
    found = plain().prepare(png(picture))
    np.testing.assert_allclose(found[0, 0], [1, 127 / 255, 127 / 255], atol=0.01)
    assert (found[1:] == 1).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_exif_says(orientation):
    upright = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
    # What a camera stored, by the meaning of the tag in the standard.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = pillow.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    pillow.fromarray(np.ascontiguousarray(stored)).save(buffer, "PNG", exif=exif)
    found = plain(width=6, channels=1, resize="exact").prepare(buffer.getvalue())
    np.testing.assert_allclose(found[..., 0] * 255, upright, atol=1e-3)


def test_pictures_of_any_shape_are_cropped_evenly_or_stretched():
    wide = np.zeros((4, 12), np.uint8)
    wide[:, 4:8] = 255
    assert plain(channels=1).prepare(wide).min() > 0.9
    assert plain(channels=1, resize="stretch").prepare(wide)[:, 0].max() < 0.1
    with pytest.raises(DataError, match="12 x 4 pixels; expected 4 x 4"):
        plain(resize="exact").prepare(wide)


def test_values_are_centred_and_scaled_by_channel():
    mean, std = (0.5, 0.25, 0.0), (0.5, 1.0, 2.0)
    found = Image(2, 2, mean=mean, std=std).prepare(np.full((2, 2, 3), 255, np.uint8))
    np.testing.assert_allclose(found[0, 0], [1.0, 0.75, 0.5])


def test_permuted_pixels_are_the_same_ones_in_one_order_for_all_pictures():
    plain, permuted = Image(5, 4), Image(5, 4, permuted=True)
    numbers = np.arange(20, dtype=np.uint8).reshape(5, 4)
    pictures = np.stack([numbers, numbers[::-1], 200 - numbers])
    rows = [[f.prepare(x).reshape(20, 3) for x in pictures] for f in (plain, permuted)]
    order = [int(np.argmin(abs(rows[0][0][:, 0] - x))) for x in rows[1][0][:, 0]]
    assert sorted(order) == list(range(20)) != order
    for own, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(own[order], other)


def test_arrays_of_floats_and_paths_are_pictures_too(tmp_path):
    ramp = np.linspace(0, 1, 16).reshape(4, 4)
    found = plain(channels=1).prepare(ramp)
    np.testing.assert_allclose(found[..., 0], ramp, atol=1 / 255)
    pillow.fromarray((ramp * 255).astype(np.uint8)).save(tmp_path / "a.png")
    np.testing.assert_allclose(plain(channels=1).prepare(tmp_path / "a.png"), found, atol=1 / 255)


GOOD = png(pillow.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)))


def test_a_file_that_would_start_a_program_is_no_picture(monkeypatch, tmp_path):
    pillow.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    path = (tmp_path / "a.eps").rename(tmp_path / "a.png")
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: started.append(a))
    monkeypatch.setattr("subprocess.check_call", lambda *a, **k: started.append(a))
    with pytest.raises(DataError, match="a.png is no image of a kind that is read: JPEG, PNG"):
        plain().prepare(path)
    assert not started


def test_a_picture_whose_exif_is_damaged_is_a_picture():
    damage = b"no exif at all"
    chunk = len(damage).to_bytes(4) + b"eXIf" + damage + zlib.crc32(b"eXIf" + damage).to_bytes(4)
    end = GOOD.index(b"IDAT") - 4
    np.testing.assert_array_equal(
        plain().prepare(GOOD[:end] + chunk + GOOD[end:]), plain().prepare(GOOD)
    )


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("JPEG", "RGB"),
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("PNG", "RGBA"),
        ("TIFF", "I;16"),
        ("BMP", "1"),
    ],
)
def test_a_large_picture_is_decoded_near_the_size_that_is_wanted(kind, mode, monkeypatch):
    from crossattn.data.features import image

    x, y = np.meshgrid(np.linspace(0, 1, 256), np.linspace(0, 1, 192))
    grey = pillow.fromarray(np.uint8(255 * (x + y) / 2))
    deep = pillow.fromarray(np.uint16(65535 * (x + y) / 2))
    picture = deep if mode == "I;16" else grey.convert("RGB").convert(mode)
    file, exif = io.BytesIO(), pillow.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    picture.save(file, kind, **({} if kind == "BMP" else {"exif": exif}))
    whole = plain(channels=1).prepare(file.getvalue())
    monkeypatch.setattr(image, "_MANY", 4096)
    assert max(plain().opened(file.getvalue(), 8).size) <= 2 * 8 * 256 / 192
    np.testing.assert_allclose(plain(channels=1).prepare(file.getvalue()), whole, atol=0.03)


def test_examples_whose_picture_cannot_be_read_are_left_out_and_counted(examples, caplog):
    broken = [dict(each) for each in examples]
    for index in (3, 40):
        broken[index]["image"] = broken[index]["image"][:60]
    features = {"image": plain(unreadable="skip"), "colour": Label(COLOURS)}
    whole = pipeline.feature_eval_batches(examples, features, batch_size=16)
    batches = pipeline.feature_eval_batches(broken, features, batch_size=16)
    for expected, found in zip(whole, batches, strict=True):
        read = ~np.isin(expected.indices, [3, 40]) & (expected.indices >= 0)
        np.testing.assert_array_equal(found.indices, np.where(read, expected.indices, -1))
        np.testing.assert_array_equal(found.batch["valid"], read)
        for name in ("image", "colour"):
            np.testing.assert_array_equal(found.batch[name][read], expected.batch[name][read])
            assert not found.batch[name][~read].any()
    assert batches.encoded.unreadable == {3, 40}
    assert "example 40, image: the image cannot be read" in caplog.text
    assert caplog.text.count("left out") == 2
    trained = pipeline.feature_batches(broken, features, mode="pad", batch_size=10)
    assert sum(batch["valid"].sum() for batch in take(trained, 7)) == 68
    # A batch of nothing that can be read is one of the first, not all there is.
    single = pipeline.feature_eval_batches(broken[3:8], features, batch_size=1)
    assert [int(item.batch["valid"].sum()) for item in single] == [0, 1, 1, 1, 1]
    with pytest.raises(DataError, match="example 3, image: the image cannot be read"):
        list(pipeline.feature_eval_batches(broken, {"image": plain()}, batch_size=16))
    none = [{"image": b""}] * 5
    with pytest.raises(DataError, match="not one of the first 5 examples can be read"):
        list(pipeline.feature_eval_batches(none, {"image": features["image"]}, batch_size=4))


def test_a_header_that_announces_too_much_is_refused(monkeypatch):
    from crossattn.data.features import image

    monkeypatch.setattr(image, "LARGEST", 4095)
    with pytest.raises(DataError, match="64 x 64 pixels; at most 4,095 are read"):
        plain().prepare(GOOD)


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: plain(height=0), "expected 1 x 1"),
        (lambda: plain(channels=2), "channels is 2"),
        (lambda: plain(resize="fit"), "resize is 'fit'"),
        (lambda: plain(mean=(0.0, 0.0)), "mean has 2 numbers"),
        (lambda: plain(std=(0.0,)), "numbers above 0"),
        (lambda: Label(()), "there are none"),
        (lambda: Label(("a", "a")), "not distinct"),
    ],
)
def test_bad_features_are_refused(build, complaint):
    with pytest.raises(DataError, match=complaint):
        build()


def test_sound_is_frames_of_its_samples(tmp_path):
    soundfile = package("soundfile", "speech")
    samples = np.sin(np.arange(4000) / 9).astype(np.float32) / 2
    sound = Sound(max_length=10, mels=20)
    assert sound.lengths([samples]).tolist() == [25]
    np.testing.assert_array_equal(sound.prepare(samples), mel.log_mel(samples[:1600], 20))
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    for value in (tmp_path / "a.wav", (tmp_path / "a.wav").read_bytes()):
        np.testing.assert_allclose(sound.prepare(value), sound.prepare(samples), atol=1e-4)


def test_labels_are_numbers_of_their_classes():
    label = Label(COLOURS)
    assert [label.prepare(v).tolist() for v in ("red", 1, np.int64(0))] == [2, 1, 0]
    several = Label(COLOURS, max_length=2)
    assert several.prepare(["red", "black", "red"]).tolist() == [2, 0]


@pytest.mark.parametrize("predicted", [True, False])
def test_a_tagged_text_is_the_text_behind_its_tag(tokenizer, predicted):
    plain_text = Text(tokenizer, 7, predicted)
    text = TaggedText(tokenizer, 8, predicted, ("en", "fr"))
    size = tokenizer.vocab_size
    assert text.vocab_size == size + 2
    for value in ("the cat", "the cat and the old dog and the bird"):
        expected = plain_text.prepare(value).tolist()
        expected[predicted:predicted] = [size + 1]
        found = text.prepare(("fr", value)).tolist()
        assert (
            found[: len(expected) - (not predicted)] == expected[: len(expected) - (not predicted)]
        )
        assert found[-1] == expected[-1]
        assert text.lengths([("en", value)]) == plain_text.lengths([value]) + 1
    for value, complaint in (
        (("de", "x"), "the tag is 'de'; expected one of en, fr"),
        ((None, "x"), "expected a tag and a text"),
        ("x", "str came; expected a tag and a text"),
    ):
        with pytest.raises(DataError, match=complaint):
            text.prepare(value)
    with pytest.raises(DataError, match="the tags are a, a; expected distinct ones"):
        TaggedText(tokenizer, tags=("a", "a"))


def test_texts_of_one_row_are_what_each_is_in_a_row_of_its_own(tokenizer):
    one = TaggedText(tokenizer, 9, True, ("en", "fr"))
    several = PackedTexts(one, 30)
    pairs = [("fr", "the cat"), ("en", "the cat and the old dog and the bird"), ("en", "a bird")]
    values = [pairs[:2], pairs[2:], pairs]
    layout = Layout(2, {"text": 30}, np.arange(3), np.array([0, 0, 1]),
                    {"text": np.array([0, several.lengths(values)[0], 0])}, np.array([1, 2, 1]))  # fmt: skip
    batch = several.collate("text", layout, [several.prepare(value) for value in values])
    for row, own in enumerate((pairs, pairs)):
        segments, begun = batch["text_segment_ids"][row], 0
        assert len(set(segments[segments > 0])) == 3
        for pair in own:
            ids = one.prepare(pair)
            here = slice(begun, begun := begun + len(ids) - 1)
            assert batch["text_in"][row, here].tolist() == ids[:-1].tolist()
            assert batch["text_out"][row, here].tolist() == ids[1:].tolist()
            assert batch["text_positions"][row, here].tolist() == [*range(len(ids) - 1)]
            assert len(set(segments[here])) == 1 and segments[here.start] > 0
        assert not segments[begun:].any() and not batch["text_in"][row, begun:].any()
        assert several.lengths([own]) == begun
    for value in ("x", ("en", "x"), []):
        with pytest.raises(DataError, match="came; expected"):
            several.prepare(value)
    with pytest.raises(DataError, match="the texts are not predicted"):
        PackedTexts(Text(tokenizer))


def test_boxes_are_fractions_of_their_page():
    found = Boxes(2).prepare(
        {"boxes": [(0, 5, 10, 10), (10, 0, 20, 5), (1, 1, 2, 2)], "size": (20, 10)}
    )
    np.testing.assert_allclose(found, [[0, 0.5, 0.5, 1], [0.5, 0, 1, 0.5]])
    assert Boxes().prepare({"boxes": [], "size": (2, 2)}).shape == (0, 4)


def test_vectors_have_one_size():
    assert Vectors(3).prepare([1, 2, 3]).dtype == np.float32
    assert Vectors(3, max_length=2).prepare(np.ones((5, 3))).shape == (2, 3)


@pytest.mark.parametrize(
    ("feature", "value", "complaint"),
    [
        (plain(), b"no picture", "is no image of a kind that is read"),
        (plain(), b"", "is no image of a kind that is read"),
        (plain(), GOOD[:2000], "cannot be read as an image.*or leave such out by unreadable=skip"),
        (plain(), GOOD[:60] + b"x" * 900 + GOOD[960:], "cannot be read as an image"),
        (plain(), "/nowhere/a.png", "/nowhere/a.png is missing"),
        (plain(), 7, "int came; expected a path"),
        (plain(), np.zeros((4, 4, 2), np.uint8), r"shape \[4, 4, 2\]; expected \[H W\]"),
        (plain(), np.zeros((0, 4), np.uint8), "at least one pixel"),
        (plain(), np.full((4, 4), np.nan), "values from nan"),
        (
            plain(),
            np.full((4, 4), 200.0),
            "values from 200.0 to 200.0; expected floats from 0 to 1",
        ),
        (plain(), np.zeros((4, 4), np.int64), "of int64; expected uint8"),
        (plain(), pillow.new("F", (4, 4), 7.0), "of what is white"),
        (Sound(), np.zeros(100, np.float32), "100 samples of sound; expected 160 or more, 10 ms"),
        (Sound(), np.zeros(400, np.int16), "expected floats"),
        (Sound(), np.full(400, np.nan), "NaN or infinite"),
        (Sound(), b"no sound", "the sound cannot be read as sound"),
        (Sound(), None, "NoneType came"),
        (Label(COLOURS), "rad", r"expected one of black, white, red \(did you mean red\?\)"),
        (Label(COLOURS), 3, "the label is 3; expected 0 to 2"),
        (Label(COLOURS), -1, "expected 0 to 2"),
        (Label(COLOURS), True, "the label is True"),
        (Label(COLOURS, 2), "red", "expected a sequence of labels"),
        (
            Boxes(),
            {"boxes": [(0, 0, 1, 1), (3, 0, 9, 1)], "size": (8, 8)},
            "box 1, 3, 0, 9, 1, is outside the page, 8 x 8",
        ),
        (Boxes(), {"boxes": [(-1, 0, 1, 1)], "size": (8, 8)}, "box 0, -1, 0, 1, 1, is outside"),
        (Boxes(), {"boxes": [(np.nan, 0, 1, 1)], "size": (8, 8)}, "outside"),
        (Boxes(), {"boxes": [(2, 2, 2, 3)], "size": (8, 8)}, "box 0, 2, 2, 2, 3, has no area"),
        (Boxes(), {"boxes": [(3, 2, 2, 3)], "size": (8, 8)}, "has no area"),
        (Boxes(), {"boxes": [(1, 2, 3)], "size": (8, 8)}, r"shape \[1, 3\]"),
        (Boxes(), {"boxes": [(0, 0, 1, 1)], "size": (0, 8)}, "a width and a height above 0"),
        (Boxes(), {"boxes": ["a"], "size": (8, 8)}, "no numbers"),
        (Boxes(), [(0, 0, 1, 1)], "list came"),
        (Vectors(3), [1, 2], r"shape \[2\] came; expected \[3\]"),
        (Vectors(3), np.ones((2, 3)), r"shape \[2, 3\] came"),
        (Vectors(3, 2), [1, 2, 3], r"expected \[n 3\]"),
        (Vectors(1), [np.inf], "NaN or infinity"),
        (Vectors(2), [[1], [2, 3]], "unlike sizes"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(feature, value, complaint):
    with pytest.raises(DataError, match=complaint) as caught:
        feature.prepare(value)
    assert "\n" not in str(caught.value)


# --- batches


def mixed(tokenizer) -> dict:
    return {
        "image": Image(8, 8),
        "caption": Text(tokenizer, 96, predicted=True),
        "colour": Label(COLOURS),
        "vector": Vectors(4),
        "page": Boxes(6),
    }


def read_back(batch, tokenizer, row) -> str:
    ids = batch["caption_out"][row][batch["caption_segment_ids"][row] == 1]
    assert ids[-1] == tokenizers.EOS and batch["caption_in"][row][0] == tokenizers.BOS
    return tokenizer.decode(ids)


@pytest.mark.parametrize("mode", ["bucket", "pad"])
def test_a_batch_holds_all_of_each_of_its_examples(examples, tokenizer, mode):
    features, by_text = mixed(tokenizer), {each["caption"]: each for each in examples}
    batches = take(pipeline.feature_batches(examples, features, mode=mode, batch_size=8), 30)
    seen = Counter()
    for batch in batches:
        assert batch["image"].shape == (8, 8, 8, 3) and batch["image"].dtype == np.float32
        for row in np.flatnonzero(batch["valid"]):
            example = by_text[read_back(batch, tokenizer, row)]
            seen[example["id"]] += 1
            for name in ("image", "colour", "vector"):
                np.testing.assert_array_equal(
                    batch[name][row], features[name].prepare(example[name])
                )
            boxes = features["page"].prepare(example["page"])
            np.testing.assert_array_equal(
                batch["page"][row][batch["page_segment_ids"][row] == 1], boxes
            )
        for name in features:
            empty = batch.get(name, batch.get(f"{name}_in"))[batch["valid"] == 0]
            assert not empty.any()
    assert len(seen) == 70 and max(seen.values()) - min(seen.values()) <= 1
    if mode == "pad":
        assert all(
            batch["valid"].all() and batch["caption_in"].shape == (8, 96) for batch in batches
        )
    else:
        assert len({batch["caption_in"].shape[1] for batch in batches}) > 1


def test_features_that_have_lengths_are_packed_together(examples, tokenizer):
    features = {"caption": Text(tokenizer, 96), "page": Boxes(16)}
    by_text = {each["caption"]: each for each in examples}
    seen = Counter()
    for batch in take(pipeline.feature_batches(examples, features, batch_size=4), 12):
        assert batch["caption"].shape == (4, 96) and batch["page"].shape == (4, 16, 4)
        assert "valid" not in batch
        for row in range(4):
            for segment in range(1, batch["caption_segment_ids"][row].max() + 1):
                here = batch["caption_segment_ids"][row] == segment
                example = by_text[tokenizer.decode(batch["caption"][row][here])]
                there = batch["page_segment_ids"][row] == segment
                boxes = features["page"].prepare(example["page"])
                np.testing.assert_array_equal(batch["page"][row][there], boxes)
                assert batch["page_positions"][row][there].tolist() == list(range(len(boxes)))
                seen[example["id"]] += 1
    assert len(seen) == 70


def test_text_features_make_the_batches_of_text_pairs(tokenizer):
    pairs = sources.open_source("phrases", "train")[:300]
    features = {"source": Text(tokenizer, 32), "target": Text(tokenizer, 40, predicted=True)}
    for mode in ("pack", "bucket", "pad"):
        ours = pipeline.feature_batches(pairs, features, mode=mode, batch_size=8, seed=3)
        theirs = pipeline.make_train_iterator(
            pairs, tokenizer, mode=mode, batch_size=8, seed=3, source_len=32, target_len=40
        )
        assert same(take(ours, 40), take(theirs, 40))
    ours = pipeline.feature_eval_batches(pairs, features, batch_size=8)
    theirs = pipeline.eval_batches(pairs, tokenizer, batch_size=8, source_len=32, target_len=40)
    assert same([item.batch for item in ours], [item.batch for item in theirs])


@pytest.mark.parametrize("mode", ["bucket", "pad"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restored_iterator_of_features_continues_bit_for_bit(examples, tokenizer, mode, prefetch):
    def begin():
        options = {"mode": mode, "batch_size": 4, "window": 20, "prefetch": prefetch}
        return pipeline.feature_batches(examples, mixed(tokenizer), **options)

    first, second = begin(), begin()
    take(first, 13)
    state = json.loads(json.dumps(first.get_state()))
    take(second, 3)
    second.set_state(state)
    assert same(take(first, 25), take(second, 25))


@pytest.mark.parametrize("mode", ["bucket", "pad"])
def test_processes_share_the_batches_of_features_that_one_would_see(examples, tokenizer, mode):
    def begin(index, count):
        options = {"mode": mode, "batch_size": 4, "process_index": index, "process_count": count}
        return pipeline.feature_batches(examples, mixed(tokenizer), batch_multiple=4, **options)

    assert same(joined([begin(index, 2) for index in range(2)], 25), take(begin(0, 1), 25))


@pytest.mark.parametrize("mode", ["bucket", "pad"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_may_have_one_example_and_so_may_the_data(examples, tokenizer, mode, count):
    options = {"mode": mode, "batch_size": 1}
    batches = take(
        pipeline.feature_batches(examples[:count], mixed(tokenizer), **options), 2 * count
    )
    seen = [batch["colour"].item() for batch in batches]
    assert sorted(seen) == sorted([i % 3 for i in range(count)] * 2)


def test_a_state_of_other_features_is_refused(examples, tokenizer):
    def begin(**changed):
        return pipeline.feature_batches(
            examples, mixed(tokenizer) | changed, mode="pad", batch_size=4
        )

    state = begin().get_state()
    for changed in ({"image": Image(8, 8, std=(1.0,))}, {"colour": Label(COLOURS[::-1])}):
        with pytest.raises(DataError, match="belongs to other data"):
            begin(**changed).set_state(state)


def test_evaluation_holds_every_example_once_and_shares_rows(examples, tokenizer):
    features = mixed(tokenizer) | {"caption": Text(tokenizer, 16, predicted=True)}
    whole = pipeline.feature_eval_batches(examples, features, batch_size=4)
    indices = np.concatenate([item.indices for item in whole])
    assert sorted(indices[indices >= 0]) == list(range(70)) and len(whole.shapes) <= 3
    long = sum(len(tokenizer.encode(each["caption"])) + 1 > 16 for each in examples)
    assert whole.cut["caption"] == long > 0
    halves = [
        pipeline.feature_eval_batches(
            examples, features, batch_size=4, process_index=i, process_count=2
        )
        for i in range(2)
    ]
    for item, *parts in zip(whole, *halves, strict=True):
        np.testing.assert_array_equal(item.indices >= 0, item.batch["valid"] == 1)
        for row, index in enumerate(item.indices):
            if index >= 0:
                assert item.batch["colour"][row] == index % 3
        assert same(
            [{k: np.concatenate([p.batch[k] for p in parts]) for k in item.batch}], [item.batch]
        )


def test_too_long_examples_are_dropped_or_cut(examples, tokenizer, caplog):
    features = {"caption": Text(tokenizer, 12)}
    short = {e["caption"] for e in examples if len(tokenizer.encode(e["caption"])) < 12}
    assert 0 < len(short) < 70
    for truncation in ("drop", "cut"):
        iterator = pipeline.feature_batches(examples, features, batch_size=4, truncation=truncation)
        texts = set()
        for batch in take(iterator, 40):
            for row in range(4):
                for segment in range(1, batch["caption_segment_ids"][row].max() + 1):
                    ids = batch["caption"][row][batch["caption_segment_ids"][row] == segment]
                    assert ids[-1] == tokenizers.EOS
                    texts.add(tokenizer.decode(ids))
        assert (texts == short) if truncation == "drop" else (short < texts)
    assert "(caption 12) are dropped" in caplog.text
    with pytest.raises(
        DataError, match="no example is short enough: the greatest lengths are caption 2"
    ):
        next(pipeline.feature_batches(examples, {"caption": Text(tokenizer, 2)}, batch_size=4))


class Counted(list):
    """Counts how often each of its items is read."""

    def __init__(self, items):
        super().__init__(items)
        self.reads = [0] * len(items)

    def __getitem__(self, index):
        self.reads[index] += 1
        return super().__getitem__(index)


def test_nothing_is_read_before_it_is_needed(examples, tokenizer):
    many = Counted(examples * 100)
    iterator = pipeline.feature_batches(
        many, {"image": Image(4, 4)}, mode="pad", batch_size=8, prefetch=0
    )
    before = sum(many.reads)
    take(iterator, 3)
    assert before < 40 and sum(many.reads) - before == 24


@pytest.mark.parametrize("mode", ["bucket", "pad"])
def test_cached_examples_give_the_same_batches_and_are_not_read_again(examples, tokenizer, mode):
    options = {"mode": mode, "batch_size": 4, "prefetch": 0}
    counted = Counted(examples)
    cached = pipeline.feature_batches(counted, mixed(tokenizer), cache_mib=8, **options)
    assert same(
        take(cached, 60), take(pipeline.feature_batches(examples, mixed(tokenizer), **options), 60)
    )
    before = list(counted.reads)
    take(cached, 60)
    assert counted.reads == before


def test_a_cache_keeps_evaluated_examples_and_not_the_arrays_of_their_source():
    class Reused(list):
        """Writes each example into the same array."""

        shared = np.zeros(3, np.float32)

        def __getitem__(self, index):
            self.shared[...] = super().__getitem__(index)
            return {"vector": self.shared}

    features = {"vector": Vectors(3)}
    batches = pipeline.feature_eval_batches(Reused(range(4)), features, batch_size=1, cache_mib=1)
    for _ in range(3):
        assert [item.batch["vector"].max() for item in batches] == [0, 1, 2, 3]


def test_a_cache_holds_no_more_than_its_size():
    picture = np.zeros((256, 256, 3), np.uint8)  # float32, 0.75 MiB
    counted = Counted([{"image": picture}] * 8)
    options = {"mode": "pad", "batch_size": 1, "prefetch": 0, "cache_mib": 2}
    iterator = pipeline.feature_batches(counted, {"image": Image(256, 256)}, **options)
    take(iterator, 16)
    before = list(counted.reads)
    take(iterator, 8)
    assert sorted(after - b for after, b in zip(counted.reads, before, strict=True)) == [
        0,
        0,
        *[1] * 6,
    ]
    with pytest.raises(DataError, match="cache_mib is -1; expected 0 or more"):
        pipeline.feature_batches(counted, {"image": Image(4, 4)}, mode="pad", cache_mib=-1)


def test_an_example_that_grows_is_refused_and_not_laid_over_others(tokenizer):
    class Growing(list):
        words = 0

        def __getitem__(self, index):
            self.words += 1  # more at every reading
            return {"caption": "cat " * self.words}

    features = {"caption": Text(tokenizer, 96)}
    options = {"mode": "bucket", "batch_size": 2, "prefetch": 0}
    iterator = pipeline.feature_batches(Growing([0] * 4), features, **options)
    with pytest.raises(DataError, match="caption is longer than when it was measured"):
        take(iterator, 20)


def test_a_wrong_example_is_named(examples):
    bad = [*examples[:5], examples[5] | {"image": b"junk"}]
    with pytest.raises(DataError, match="example 5, image: the image is no image") as caught:
        pipeline.feature_batches(bad, {"image": Image(4, 4)}, mode="pad", batch_size=2)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="example 0 has no 'picture'; it holds id, image"):
        pipeline.feature_batches(bad, {"picture": Image(4, 4)}, mode="pad", batch_size=2)
    late = [*examples * 3, examples[5] | {"page": {"boxes": [(0, 0, 99, 1)], "size": (8, 8)}}]
    iterator = pipeline.feature_batches(late, {"page": Boxes(4)}, mode="bucket", batch_size=2)
    with pytest.raises(
        DataError, match="example 5, page: box 0, 0, 0, 99, 1, is outside"
    ) as caught:
        take(iterator, 300)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "pack"}, "image, colour, vector cannot be packed"),
        ({"mode": "stack"}, "mode is 'stack'; expected 'pack', 'bucket' or 'pad'"),
        ({"mode": "pad", "batch_size": 3, "process_count": 2}, "batch_size is 3"),
        ({"mode": "pad", "truncation": "keep"}, "truncation is 'keep'"),
    ],
)
def test_bad_options_of_features_are_refused(examples, tokenizer, options, complaint):
    with pytest.raises(DataError, match=complaint):
        pipeline.feature_batches(examples, mixed(tokenizer), **options)


def test_no_examples_and_no_features_are_refused(examples):
    with pytest.raises(DataError, match="no examples"):
        pipeline.feature_batches([], {"image": Image(4, 4)}, mode="pad")
    with pytest.raises(DataError, match="no features"):
        pipeline.feature_batches(examples, {}, mode="pad")


def test_a_window_of_sound_is_what_whisper_hears_of_it_and_then_nothing():
    samples = np.random.default_rng(0).normal(size=16_050).astype(np.float32) / 9
    window = SoundWindow(length=300, mels=20)
    # As if silence followed to the end of the window.
    heard = mel.log_mel(samples, 20, silence=300 * mel.HOP)
    prepared = window.prepare(samples)
    np.testing.assert_array_equal(prepared[:101], heard[:101])
    assert prepared.shape == (300, 20) and not prepared[101:].any()
    assert window.max_length is None
    for wrong in (samples[:0], np.zeros(300 * mel.HOP + 1, np.float32)):
        with pytest.raises(DataError, match=r"s of sound; expected some, 3 s at most"):
            window.prepare(wrong)


class _Together(list):
    """A source that gives several items at once, and counts how often it was asked."""

    asked = 0

    def __getitems__(self, indices):
        self.asked += 1
        return [self[i] for i in indices]


def test_the_examples_of_a_batch_are_read_at_once():
    items = _Together({"id": i, "x": np.full(2, i, np.float32)} for i in range(6))
    source = sources.MappedSource(items, lambda item: item | {"x": item["x"] + 1})
    assert [item["x"][0] for item in source.__getitems__([4, 1])] == [5, 2]
    items.asked = 0
    batches = pipeline.feature_eval_batches(source, {"x": Vectors(2)}, batch_size=8)
    [batch] = [item.batch for item in batches]
    assert items.asked == 1 and batch["x"][:6, 0].tolist() == [1, 2, 3, 4, 5, 6]
