"""Captions of pictures: what a batch holds, what the loss is of, how texts are scored, and the launcher."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import emoji_captions, finetune
from crossattn import functional
from crossattn.data.errors import DataError
from crossattn.train.evaluate import caption_scores
from experiments import train
from experiments.bench import captions as bench
from experiments.errors import SettingsError
from experiments.runs import parameters
from experiments.settings import check, model_config, saved_config
from experiments.tasks import make_task
from experiments.tasks.written import words_read
from tests.experiments.conftest import ROOT
from tests.experiments.test_explore import views_of
from tests.peers import package
from tests.viz.test_explore import weights_of

CONFIG = f"--config={ROOT}/configs/emoji_captions.py:tiny"
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (20, 30, 3), np.uint8)


@pytest.fixture(scope="module")
def workdir(trained):
    return trained(emoji_captions.get_config("tiny"), 2)


@pytest.fixture(scope="module")
def task():
    return make_task(emoji_captions.get_config("tiny"))


@pytest.fixture(scope="module")
def params(task):
    params = jax.jit(task.init)(jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.05 * RNG.normal(size=x.shape).astype(x.dtype), params)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.slow
def test_a_caption_stands_behind_its_language_which_is_not_predicted(task, params):
    tokenizer = task.corpus.tokenizer
    (item, *_) = task._batches(task.examples("validation", 4), 4)
    batch, examples = item.batch, task.examples("validation", 4)
    filled = np.flatnonzero(item.indices >= 0)
    for row, index in zip(filled, item.indices[filled], strict=True):
        language, text = examples[index]["target"]
        tag = tokenizer.vocab_size + ("en", "de").index(language)
        ids = [1, tag, *tokenizer.encode(text), 2]
        assert batch["target_in"][row, : len(ids) - 1].tolist() == ids[:-1]
        assert task.prompts(examples, [int(index)]) == [ids[:2]] == [task.prompt_in(language)]
        assert task.decoded(ids) == text
    batch = jax.tree.map(jnp.asarray, dict(batch))
    config, options = task.model_config, task.config.loss
    loss, sums = task.loss(params, batch, None)
    assert sums["weight"] == (batch["target_segment_ids"] > 0).sum() - len(filled)
    model = task.bind(params)
    p = log_softmax(model(batch["source"], batch["target_in"]))
    told = np.take_along_axis(p, np.asarray(batch["target_out"])[..., None], -1)[..., 0]
    counted = np.array(batch["target_segment_ids"] > 0)
    counted[:, 0] = False
    np.testing.assert_allclose(sums["nll"], -told[counted].sum(), rtol=1e-5)
    even = (1 - options.label_smoothing) * -told - options.label_smoothing * p.mean(-1)
    np.testing.assert_allclose(loss, even[counted].sum(), rtol=1e-5)
    assert config.decoder.vocab_size == tokenizer.vocab_size + 2


@pytest.mark.slow
def test_a_picture_is_read_once_for_all_its_captions_with_the_loss_of_each_alone(task, params):
    config = emoji_captions.get_config("tiny")
    packed = make_task(config)
    rows, config.data.row_len = next(packed.train_iterator(0, 1)), None
    assert len(rows["source"]) == config.data.batch_size
    assert (rows["target_segment_ids"].max(1) == 2).all() and rows["valid"].all()
    tags = (
        rows["target_in"][:, 1],
        rows["target_in"][np.arange(16), (rows["target_segment_ids"] == 1).sum(1) + 1],
    )
    assert (np.stack(tags, 1) == task.corpus.tokenizer.vocab_size + np.arange(2)).all()
    loss, sums = packed.loss(params, jax.tree.map(jnp.asarray, dict(rows)), None)
    alone = {name: [] for name in rows}
    for row in range(len(rows["source"])):
        for number in (1, 2):
            here = rows["target_segment_ids"][row] == number
            for name, x in rows.items():
                text = name.startswith("target")
                own = np.pad(x[row][here], (0, 24 - int(here.sum()))) if text else x[row]
                alone[name].append(own)
    each = {name: jnp.asarray(np.stack(x)) for name, x in alone.items()}
    each["target_segment_ids"] = (each["target_segment_ids"] > 0).astype(jnp.int32)
    other, other_sums = task.loss(params, each, None)
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    assert sums["weight"] == other_sums["weight"]
    said = {task.decoded(row.tolist()) for row in np.asarray(each["target_in"])}
    every = task.examples("train")
    assert said <= {task.text_of(every[i]) for i in range(len(every))}


@pytest.mark.slow
def test_likelihoods_of_captions_are_the_products_of_their_tokens(task, params):
    examples = [task.examples("validation")[i] for i in (0, 1, 2, 5, 8)]
    pictures = [example["source"] for example in examples[:4]]
    told = [example["target"] for example in examples]
    expected = np.zeros((5, 4))
    model, features = task.bind(params), task.features
    for i, target in enumerate(told):
        ids = features["target"].prepare(target)
        for j, picture in enumerate(pictures):
            x = jnp.asarray(features["source"].prepare(picture)[None])
            p = log_softmax(model(x, jnp.asarray(ids[None, :-1])))[0]
            expected[i, j] = sum(p[t, ids[t + 1]] for t in range(1, len(ids) - 1))
    for rows in (2, 3):
        found = bench.log_likelihoods(task, params, pictures, told, rows)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    ranks = bench.ranks_of(task, params, examples[:4])
    own = np.diagonal(expected[:4])
    assert ranks.tolist() == [
        (row >= x - 1e-6).sum() for row, x in zip(expected, own, strict=False)
    ]


@pytest.mark.slow
def test_seeds_are_ranked_one_by_one_and_by_their_mean(tmp_path, monkeypatch, capsys):
    package("pycocoevalcap", "captions")
    config = emoji_captions.get_config("tiny")
    config.train.update(steps=2, seeds=2)
    train.run(config, tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["captions", str(tmp_path), "--split=validation", "--limit=6"])
    bench.main()
    said, task = capsys.readouterr().out, make_task(config, tmp_path / "assets")
    for language, examples in bench.by_language(task, "validation", 6).items():
        each = [
            bench.of_pairs(task, parameters(task, tmp_path, member=member), examples)
            for member in ("seed_0", "seed_1")
        ]
        pattern = rf"^{language},? .*?first 1 by its caption: ([\d.]+) .*?median rank ([\d.]+),"
        ranks = [bench.ranks(own) for own in (*each, (each[0] + each[1]) / 2)]
        expected = [(f"{np.mean(own == 1):.4g}", f"{np.median(own):g}") for own in ranks]
        known = [bench.by_language(task, split)[language] for split in ("train", "validation")]
        linear = bench.ranks(bench.regressed(task, *known, examples))
        expected.append((f"{np.mean(linear == 1):.4g}", f"{np.median(linear):g}"))
        assert re.findall(pattern, said, re.S | re.M) == expected


def test_a_linear_rival_finds_pictures_by_what_their_captions_say(task):
    package("sklearn", "baselines")
    language = next(iter(task.languages), "")
    train, seen = (bench.by_language(task, split)[language] for split in ("train", "validation"))
    found = bench.ranks(bench.regressed(task, train, seen, seen))
    targets = [example["target"] for example in train]
    mixed = [
        {**e, "target": other} for e, other in zip(train, targets[7:] + targets[:7], strict=True)
    ]
    astray = bench.ranks(bench.regressed(task, mixed, seen, seen))
    assert np.median(found) < 0.5 * np.median(astray)
    assert np.median(astray) > 0.2 * len(seen)


@pytest.mark.slow
def test_a_blind_model_finds_no_picture(params):
    config = emoji_captions.get_config("tiny")
    config.data.blind = True
    blind = make_task(config)
    examples = [blind.examples("validation")[i] for i in range(0, 8, 2)]
    assert bench.ranks_of(blind, params, examples).tolist() == [4] * 4


@pytest.mark.slow
def test_outcomes_are_the_loss_of_each_caption_in_its_family(task, params):
    examples, found = task.examples("test"), task.outcomes(params, "test")
    nll, weight = np.array(found["nll"]), np.array(found["weight"])
    assert nll.sum() / weight.sum() == pytest.approx(
        task.split_loss(params, "test")["nll"], rel=1e-5
    )
    told = [e["target"] for e in examples][:4]
    alone = bench.log_likelihoods(task, params, [e["source"] for e in examples][:4], told)
    np.testing.assert_allclose(nll[:4], -np.diagonal(alone), rtol=1e-4)
    assert found["group"] == [e["group"] for e in examples] and len(set(found["group"])) > 1


@pytest.mark.slow
def test_texts_do_not_depend_on_their_batch_and_follow_the_prompt(task, params):
    examples = [task.examples("validation")[i] for i in range(4)]
    _, together = task.texts(params, examples)
    assert together == [task.texts(params, [each])[1][0] for each in examples]
    writer = task.writer(params, num_beams=1)
    source = task.features["source"].prepare(examples[0]["source"])[None]
    ids = {k: writer(source, np.array([task.prompt_in(k)], np.int32))[0] for k in ("en", "de")}
    for language, row in ids.items():
        given = np.array([[*task.prompt_in(language), *row[:3]]], np.int32)
        logits = np.asarray(task.bind(params)(jnp.asarray(source), jnp.asarray(given)))[0, 1:4]
        assert logits.argmax(-1).tolist() == row[:3].tolist()


def test_words_read_what_their_tokens_do_at_the_mean(task, params):
    ids = task.corpus.tokenizer.encode("a redder a squarish")
    pieces = task.corpus.tokenizer.tokens(ids)
    weights = RNG.random((len(ids) + 1, 4, 4))
    found = words_read(task, [*ids, 2], weights)
    assert list(found) == ["a", "redder", "a (2)", "squarish"]
    assert len(ids) > 6
    words, owner = -1, []
    for piece in pieces:
        words += piece.startswith("▁")
        owner.append(words)
    for word, heat in enumerate(found.values()):
        rows = [row for row, own in enumerate(owner) if own == word]
        np.testing.assert_allclose(heat, weights[rows].mean(0))
    source = task.features["source"].prepare(task.examples("validation")[0]["source"])[None]
    tokens = np.array([[*task.prompt_in("de"), *ids]], np.int32)
    read = task.read_weights(params)(source, tokens)
    assert read.shape == (1, tokens.shape[1] - 1, 4, 4)
    assert (read >= 0).all() and (
        read.sum((-1, -2)) <= 1 + 1e-5
    ).all()  # the class token has the rest


def test_captions_are_scored_in_each_language(task):
    package("pycocoevalcap", "captions")
    examples = [
        dict(target=(k, t)) for k in ("en", "de") for t in ("a red big cat", "one blue dog")
    ]
    texts = ["a red big cat", "one blue dog", "nothing", "of it"]
    scores = task.text_scores(examples, texts)
    assert scores["chrf_en"] == pytest.approx(100) and scores["cider_de"] == pytest.approx(0)
    for name in ("bleu", "chrf", "cider"):
        assert scores[name] == (scores[f"{name}_en"] + scores[f"{name}_de"]) / 2


def test_cider_is_that_of_the_paper():
    """CIDEr-D of single references: of each length of n-grams the clipped cosine of their tf-idf."""
    package("pycocoevalcap", "captions")
    right = ["a black cat sits", "a white dog sits", "the old black car", "rocket"]
    said = ["A black cat", "a dog, a dog", "the old car", "rocket"]

    def grams(text, n):
        words = text.lower().replace(",", "").split()
        found = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        return {gram: found.count(gram) for gram in found}

    def idf(gram, n):
        return math.log(len(right)) - math.log(max(1, sum(gram in grams(x, n) for x in right)))

    def score(text, reference):
        total, lengths = 0, len(text.split()) - len(reference.split())
        for n in range(1, 5):
            x, y = ({g: c * idf(g, n) for g, c in grams(t, n).items()} for t in (text, reference))
            dot = sum(min(x[g], y.get(g, 0)) * y.get(g, 0) for g in x)
            norm = math.sqrt(sum(v * v for v in x.values()) * sum(v * v for v in y.values()))
            total += dot / norm * math.exp(-(lengths**2) / 72) if norm else 0
        return 10 * total / 4

    expected = np.mean([score(*pair) for pair in zip(said, right, strict=True)])
    assert caption_scores(said, right)["cider"] == pytest.approx(expected)
    assert score("rocket", "rocket") == pytest.approx(2.5)


def test_the_nearest_picture_and_the_most_frequent_caption():
    task = make_task(emoji_captions.get_config("tiny"))
    train = task.examples("train")
    some = [train[i] for i in (3, 0, 8)]  # of both languages
    own = [each | {"source": np.clip(each["source"], 1, 254)} for each in some]
    copied = task.copied(own)
    for example, nearest, frequent in zip(some, *copied.values(), strict=True):
        language = example["target"][0]
        known = [e for e in train if e["target"][0] == language]
        same = [task.text_of(e) for e in known if np.array_equal(e["source"], example["source"])]
        captions = [task.text_of(e) for e in known]
        assert nearest in same
        assert captions.count(frequent) == max(map(captions.count, captions))
    assert {each["target"][0] for each in some} == {"en", "de"}
    assert list(copied) == ["nearest_picture", "most_frequent"]


def test_baselines_have_the_scores_of_copied_captions():
    package("pycocoevalcap", "captions")
    task = make_task(emoji_captions.get_config("tiny"))
    found, examples = task.baselines("test"), task.examples("test")
    for name, captions in task.copied(examples).items():
        scores = task.text_scores(examples, captions)
        assert scores["chrf_de"] == found[f"{name}_chrf_de"] and found[f"{name}_chrf"] > 0
    alone = {name: found[name] for name in ("trigrams_nll", "trigrams_and_source_nll")}
    assert task.headline_baselines("test") == alone
    assert found["trigrams_and_source_nll"] < found["trigrams_nll"] - 0.05, "shapes are seen"


@pytest.mark.slow
def test_a_model_of_two_halves_has_a_section_for_each(launched, refused, tmp_path):
    config = emoji_captions.get_config("tiny")
    shape = model_config(config.model, vocab_size=50, max_length=9, image_size=(16, 16))
    assert (shape.encoder.block.dim, shape.decoder.block.dim) == (32, 48)
    assert shape.encoder.image_size == (16, 16) and shape.decoder.max_length == 9
    change = ("--config.model.decoder.dim=24", "--config.model.encoder.norm_epsilon=0.5")
    short = ("--config.train.steps=1", "--config.checkpoint.every=1")
    code, _, err = launched("train", CONFIG, *change, *short, f"--workdir={tmp_path}/run")
    assert code == 0, err
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["model.decoder.dim"] == 24 and saved["model.encoder.norm_epsilon"] == 0.5
    said = refused("train", CONFIG, "--config.model.dim=24", f"--workdir={tmp_path}/other")
    assert "model.dim" in said
    said = refused("train", CONFIG, "--config.model.decoder.dim=25", f"--workdir={tmp_path}/other")
    assert "config.model.decoder" in said


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("data", "languages", "en,en", "'en,en'; expected distinct names"),
        ("checkpoint", "best_metric", "cider", "evaluate.examples of 1 or more"),
        ("model", "decoder", {"patch_size": 4}, "no key model.decoder.patch_size"),
        ("model", "name", "transformer", "lists those of a captioning by a transformer"),
    ],
)
def test_configs_that_do_not_fit_are_refused(section, key, value, said):
    config = emoji_captions.get_config("tiny")
    with config.unlocked():
        config[section][key] = value
    with pytest.raises(SettingsError, match=said) as caught:
        check(config)
    assert "\n" not in str(caught.value)


def test_a_published_checkpoint_is_told_no_language():
    config = finetune.get_config("captioning,tiny")
    check(config)
    config.data.languages = "en"
    with pytest.raises(SettingsError, match="for which a pretrained model has no tokens"):
        check(config)


def table(folder, rows):
    for i in range(len(rows)):
        pixels = RNG.integers(0, 256, (9 + i % 3, 12, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    lines = [json.dumps({"image": f"{i}.png", **row}) for i, row in enumerate(rows)]
    (folder / "table.jsonl").write_text("\n".join(lines))
    names = ["image", *rows[0]]
    lines = ["\t".join([f"{i}.png", *row.values()]) for i, row in enumerate(rows)]
    (folder / "table.tsv").write_text("\n".join(["\t".join(names), *lines]))


@pytest.mark.parametrize("languages", ["en,fr", None])
@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_captions_of_the_users_own_pictures_are_learnt(tmp_path, kind, languages):
    rows = [
        {"caption": f"{'one' if i % 2 else 'un'} {i}", "language": "en" if i % 2 else "fr"}
        for i in range(40)
    ]
    table(tmp_path, rows)
    config = emoji_captions.get_config("tiny")
    config.data.update(name=f"pictures:{tmp_path}/table.{kind}", languages=languages)
    task = make_task(config)
    task.refuse_unready()
    batch = next(task.train_iterator(0, 1))
    first = batch["target_in"][:, 1] >= task.corpus.tokenizer.vocab_size
    assert first.all() if languages else not first.any()
    assert batch["source"].shape == (16, 16, 16, 3)
    if languages:
        config.data.languages = "en"
        task = make_task(config)
        with pytest.raises(DataError, match="target: the tag is 'fr'; expected one of en"):
            for _ in range(3):
                next(task.train_iterator(0, 1))


@pytest.mark.slow
def test_pictures_that_cannot_be_read_are_counted_and_not_scored(tmp_path, monkeypatch):
    rows = [{"caption": f"{'light' if i % 2 else 'dark'} number {i}"} for i in range(60)]
    table(tmp_path, rows)
    config = emoji_captions.get_config("tiny")
    config.data.update(name=f"pictures:{tmp_path}/table.tsv", languages=None, unreadable="skip")
    task, later = make_task(config), make_task(config)  # each reads a picture once
    params = jax.jit(task.init)(jax.random.key(0))
    every = list(task.examples("test"))
    scored = []
    for each in (task, later):
        monkeypatch.setattr(each, "text_scores", lambda _, texts: scored.append(texts) or {})
    whole = task.report(params, "test", num_beams=1)
    assert "unreadable" not in whole and whole["captions"] == len(every) > 2
    (tmp_path / every[1]["source"]).write_bytes(b"broken")
    found = later.report(params, "test", num_beams=1)
    assert found["unreadable"] == 1 and found["captions"] == len(every) - 1
    assert found["samples"] == [each for each in whole["samples"] if each["id"] != every[1]["id"]]
    assert [len(texts) for texts in scored] == [len(every), len(every) - 1]
    assert found["examples"]["weight"][1] == 0 < min(whole["examples"]["weight"])


def test_data_without_captions_or_languages_are_refused(tmp_path, refused):
    table(tmp_path, [{"label": "x"}] * 40)
    said = refused("train", CONFIG, f"--config.data.name=pictures:{tmp_path}/table.tsv",
                   f"--workdir={tmp_path}/run")  # fmt: skip
    assert "hold image, label, id; this task reads 'caption'" in said
    said = refused("train", CONFIG, "--config.data.name=shapes", f"--workdir={tmp_path}/run")
    assert "this task reads 'language'" in said


@pytest.fixture
def pictures(tmp_path):
    """The paths of two pictures and of a broken one."""
    paths = [tmp_path / f"{name}.png" for name in ("a", "b", "broken")]
    for path in paths:
        Image.fromarray(COLOURS).save(path)
    paths[2].write_bytes(paths[0].read_bytes()[:200])
    return [str(path) for path in paths]


@pytest.mark.slow
def test_pictures_are_captioned_and_drawn(workdir, launched, tmp_path, pictures):
    plot, page = tmp_path / "read.png", tmp_path / "page.png"
    drawn = (f"--plot={plot}", f"--gallery={page}")
    code, out, err = launched("caption", f"--workdir={workdir}", *pictures[:2], *drawn)
    assert code == 0, err
    assert [line.partition(": ")[0] for line in out.splitlines()] == pictures[:2]
    for path in (tmp_path / "read-a.png", tmp_path / "read-b.png", page):
        assert path.stat().st_size > 1000


@pytest.mark.slow
def test_pictures_are_explored_head_by_head(workdir, launched, tmp_path, pictures):
    out = tmp_path / "page.html"
    code, _, err = launched("explore", f"--workdir={workdir}", *pictures[:2], f"--out={out}")
    assert code == 0, err
    task = make_task(saved_config(workdir), workdir / "assets")
    read, x = (
        task.read_weights(parameters(task, workdir)),
        task.features["source"].prepare(pictures[0]),
    )
    prompt = np.array([task.prompt_in("en")], np.int32)
    ids = task.writer(parameters(task, workdir))(x[None], prompt)[0]
    mean = read(x[None], np.concatenate([prompt, ids[None]], 1))[0, prompt.shape[1] - 1 :]
    view, other = views_of(out)
    assert (view["kind"], view["name"], other["name"]) == ("picture", "a.png", "b.png")
    assert view["memory"]["grid"] == list(mean.shape[1:])
    kept = [i for i, id in enumerate(ids) if id != 0][: view["shape"][2]]
    np.testing.assert_allclose(
        weights_of(view).mean((0, 1)), mean.reshape(len(ids), -1)[kept], atol=1 / 400
    )
    # The click: head 1 of layer 0 is knocked out, as where its output kernel is 0.
    flat = functional.flatten(parameters(task, workdir))
    name = "decoder.decoder.stack.layers.0.cross.out.kernel"
    params = functional.nest(flat | {name: flat[name].at[1].set(0)})
    text = np.concatenate([prompt, ids[None]], 1)
    for p, said in (
        (functional.nest(flat), view["knockouts"]["whole"]),
        (params, view["knockouts"]["probabilities"][0][1]),
    ):
        model = task.bind(p)
        logits = model.logits(model.hidden(jnp.asarray(x[None]), jnp.asarray(text[:, :-1]))[0])[
            0, prompt.shape[1] - 1 :
        ]
        own = np.exp(log_softmax(logits))[np.arange(len(ids)), ids]
        np.testing.assert_allclose(said, own[kept], atol=2e-4)


@pytest.mark.slow
def test_what_cannot_be_captioned_is_one_line(workdir, launched, refused, tiny_run, pictures):
    (good, _, broken), run = pictures, f"--workdir={workdir}"
    code, out, err = launched("caption", run, broken, good, "--language=de", "--num_beams=2")
    assert code == 1 and out.startswith(f"{good}: ") and out.count("\n") == 1
    assert err.count("\n") == 1 and broken in err
    assert broken in refused("caption", run, broken)
    assert "got no picture" in refused("caption", run)
    said = refused("caption", run, good, "--language=xx")
    assert "--language is 'xx'; the run was told en, de." in said
    assert "--gallery names page.txt" in refused("caption", run, good, "--gallery=page.txt")
    said = refused("caption", f"--workdir={tiny_run}", good)
    assert "is a translation, not a captioning or interleaved" in said


@pytest.mark.slow
def test_the_benchmark_prints_a_table_a_language(workdir, capsys, monkeypatch):
    package("pycocoevalcap", "captions")
    monkeypatch.setattr("sys.argv", ["captions", str(workdir), "--limit=8"])
    bench.main()
    out = capsys.readouterr().out
    for part in (
        "en: 8 pictures",
        "de: 8 pictures",
        "nearest picture",
        "less the run: ",
        "by chance",
    ):
        assert part in out
