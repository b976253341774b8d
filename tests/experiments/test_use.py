"""A trained run at work: scored, asked for translations, drawn."""

import io
import json
import re
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import sacrebleu
from matplotlib import image

from crossattn import decode
from crossattn.data.sources import open_source
from experiments import runs
from experiments.settings import saved_config
from experiments.tasks import make_task
from tests.experiments.conftest import ROOT, start

LIMIT = 30


@pytest.fixture(scope="module")
def results(tiny_run, tmp_path_factory):
    """What `evaluate` wrote, of a copy."""
    workdir = shutil.copytree(tiny_run, tmp_path_factory.mktemp("evaluated") / "run")
    assert start("evaluate", f"--workdir={workdir}", f"--limit={LIMIT}") == 0
    return json.loads((workdir / "results-test.json").read_text())


@pytest.mark.slow
def test_evaluation_writes_every_number(results):
    assert results["split"] == "test" and results["sentences"] == LIMIT
    assert results["num_beams"] == 1 and results["cut_sources"] == 0
    assert "tok:13a" in results["bleu_signature"] and "nc:6" in results["chrf_signature"]
    for name in ("aer", "precision", "recall"):
        assert 0 <= results[name] <= 100
    assert results["links"] == "human" and "layer" in results["alignment_recipe"]
    assert results["perplexity"] == pytest.approx(np.exp(results["nll"]))
    assert 0 < results["accuracy"] < 1 and results["test_loss"] > 0 and "loss" not in results
    assert results["decoded_sentences_per_second"] > 0


def test_the_scores_are_those_of_the_translations_beside_them(results):
    test = open_source("phrases", "test")
    samples = results["samples"]
    assert [s["source"] for s in samples] == [test[i]["source"] for i in range(LIMIT)]
    assert [s["reference"] for s in samples] == [test[i]["target"] for i in range(LIMIT)]
    hypotheses = [sample["translation"] for sample in samples]
    references = [[sample["reference"] for sample in samples]]
    assert results["bleu"] == sacrebleu.corpus_bleu(hypotheses, references).score
    assert results["chrf"] == sacrebleu.corpus_chrf(hypotheses, references).score


def test_translation_says_what_evaluation_said(results, launched, tiny_run):
    samples = results["samples"][:3]
    sentences = [sample["source"] for sample in samples]
    code, out, _ = launched("translate", f"--workdir={tiny_run}", *sentences)
    assert code == 0
    assert out.splitlines() == [sample["translation"] for sample in samples]


@pytest.mark.slow
def test_tags_follow_their_words_and_none_is_lost(launched, refused, tiny_run):
    plain, marked = (
        "the black cat sleeps",
        "<p class='x'>the <b>black <i>cat</i></b><br> sleeps</p>",
    )
    run = f"--workdir={tiny_run}"
    for options in ((), ("--num_beams=2",)):
        _, expected, _ = launched("translate", run, plain, "two dogs", *options)
        code, out, err = launched("translate", run, "--markup", marked, "two <b>dogs</b>", *options)
        assert code == 0 and not err
        assert [re.sub("<[^>]*>", "", line) for line in out.splitlines()] == expected.splitlines()
        first, second = (re.findall("<[^>]*>", line) for line in out.splitlines())
        assert sorted(first) == sorted(re.findall("<[^>]*>", marked)) and second == ["<b>", "</b>"]
        assert first[0] == "<p class='x'>" and first[-1] == "</p>"
        assert first.index("<b>") < first.index("<i>") < first.index("</i>") < first.index("</b>")
    said = refused("translate", run, "--markup", "all <b>right</b>", "a <b>cat")
    assert "text 2 of --markup: <b> at character 3 is not closed; expected </b> after it." in said
    assert "leave --nbest out" in refused("translate", run, "--markup", "a", "--nbest=1")


@pytest.mark.slow
def test_the_attention_of_the_search_is_that_of_its_own_text(tiny_run):
    """Rows are those of the model that reads the tokens again, and spans cover the text."""
    task = make_task(saved_config(tiny_run), tiny_run / "assets")
    params = runs.parameters(task, tiny_run)
    sources = ["the black cat sleeps", "two dogs"]
    translator = task.translator(params, capture=decode.Capture())
    attended = translator.attended(sources)
    assert [text for text, _ in attended] == translator.texts(sources)
    model, tokenizer = task.bind(params), task.corpus.tokenizer
    for source, (text, own) in zip(sources, attended, strict=True):
        words = "".join(text[a:b] for a, b in own.target_spans)
        assert words == text.replace(" ", "")
        ids = np.array([[*tokenizer.encode(source), 2]])
        written = decode.generate(model, ids, max_new_tokens=own.weights.shape[2]).tokens[:, 0]
        weights = decode.attention_of(model, ids, written, bos_id=1)
        np.testing.assert_allclose(own.weights, weights[:, 0], atol=1e-5)
    with pytest.raises(ValueError, match="capture"):
        task.translator(params).attended(sources)


@pytest.mark.slow
def test_sentences_may_come_from_standard_input(launched, refused, tiny_run, monkeypatch):
    def give(raw):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw)))

    run = f"--workdir={tiny_run}"
    give(b"the black cat\ntwo dogs\n")
    code, out, _ = launched("translate", run)
    assert code == 0 and out.count("\n") == 2
    assert launched("translate", run, "the black cat", "two dogs")[1] == out
    give(b"")
    assert "got no text" in refused("translate", run)
    give("the cat\nl'été\n".encode("latin-1"))
    said = "line 2 of standard input is not UTF-8 (byte 3)"
    assert said in refused("translate", run)


@pytest.mark.slow
def test_beams_and_a_picture_on_demand(launched, tiny_run, tmp_path):
    picture = tmp_path / "cat.png"
    arguments = ("the black cat", "--num_beams=2", f"--plot={picture}")
    code, out, _ = launched("translate", f"--workdir={tiny_run}", *arguments)
    assert code == 0 and out.count("\n") == 1
    pixels = image.imread(picture)
    assert min(pixels.shape[:2]) > 50 and pixels[..., :3].std() > 0.01


@pytest.mark.slow
def test_the_best_of_a_beam_come_with_their_scores(launched, tiny_run):
    sentences = ("the black cat", "two dogs")
    asked = (f"--workdir={tiny_run}", "--num_beams=3")
    _, best, _ = launched("translate", *asked, *sentences)
    code, out, _ = launched("translate", *asked, "--nbest=3", *sentences)
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and len(rows) == 6
    assert [text for _, text in rows[::3]] == best.splitlines()
    for group in (rows[:3], rows[3:]):
        scores = [float(score) for score, _ in group]
        assert scores == sorted(scores, reverse=True) and scores[0] < 0
    _, other, _ = launched("translate", *asked, "--nbest=3", "--length_penalty=0", *sentences)
    unlike = [float(line.split("\t")[0]) for line in other.splitlines()]
    assert unlike[0] < float(rows[0][0])  # sums of log-probabilities, divided by nothing


@pytest.mark.slow
def test_drawn_translations_follow_the_seed_and_narrow_draws_are_greedy(launched, tiny_run):
    def said(*options):
        code, out, _ = launched("translate", f"--workdir={tiny_run}", *options, "the cat", "a dog")
        assert code == 0 and out.count("\n") == 2
        return out

    hot = ("--temperature=5",)
    assert said(*hot) == said(*hot) != said(*hot, "--seed=1")
    assert said("--top_k=1", "--top_p=0.5", "--temperature=2") == said()


@pytest.mark.slow
def test_no_sequence_of_tokens_comes_twice_where_that_is_asked_for(launched, tiny_run):
    """A model that has hardly learnt repeats tokens, though none of the longest sequence it can say."""
    asked = (f"--workdir={tiny_run}", "the black cat and the dog")
    _, free, _ = launched("translate", *asked)
    assert launched("translate", *asked, "--no_repeat_ngram=32") == (0, free, "")
    code, out, _ = launched("translate", *asked, "--no_repeat_ngram=1")
    assert code == 0 and out != free


def test_a_source_longer_than_the_model_is_cut_and_counted(launched, tiny_run):
    code, _, err = launched("translate", f"--workdir={tiny_run}", "the cat " * 40, "two dogs")
    assert code == 0
    assert "note: 1 of 2 sentences were longer than 32 tokens and were cut." in err


@pytest.mark.parametrize(
    ("launcher", "arguments", "said"),
    [
        ("evaluate", ["--split=dev"], "no split 'dev'; it has train, validation, test"),
        ("evaluate", ["--step=7"], "no checkpoint 7"),
        ("evaluate", ["--step=best"], "has a best metric; use 'last'"),
        ("evaluate", ["--num_beams=0"], "num_beams"),
        ("evaluate", ["--limit=0"], "limit"),
        ("evaluate", ["test"], "got test; expected only flags"),
        ("translate", ["--nbest=2", "--num_beams=1", "a"], "--nbest is 2 of 1 beams"),
        ("translate", ["--nbest=0", "a"], "nbest"),
        ("translate", ["--temperature=0", "a"], "temperature is 0.0; expected above 0"),
        ("translate", ["--top_p=1.5", "a"], "top_p: p is 1.5; expected above 0, at most 1"),
        ("translate", ["--top_k=0", "a"], "top_k"),
        ("translate", ["--top_k=5", "--num_beams=2", "a"], "=2 searches and --top_k draws"),
        ("translate", ["--no_repeat_ngram=0", "a"], "no_repeat_ngram"),
        ("translate", ["--length_penalty=-1", "a"], "length_penalty"),
        ("translate", ["--plot=cat.jpg", "the cat"], "cat.jpg; expected one of .png"),
    ],
)
def test_what_a_run_cannot_do_is_one_line(refused, tiny_run, launcher, arguments, said):
    assert said in refused(launcher, f"--workdir={tiny_run}", *arguments)


@pytest.mark.parametrize("launcher", ["evaluate", "translate"])
def test_a_folder_without_a_run_is_refused(refused, launcher, tmp_path):
    sentence = ["a cat"] if launcher == "translate" else []
    assert f"there is no run in {tmp_path}" in refused(launcher, f"--workdir={tmp_path}", *sentence)
    assert "--workdir is missing" in refused(launcher, *sentence)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("lm") / "run"
    config = (f"--config={ROOT}/configs/lm_small.py:tiny", "--config.train.steps=12")
    assert start("train", *config, f"--workdir={workdir}") == 0
    return workdir


@pytest.mark.slow
def test_a_language_model_goes_on_with_texts(launched, language_model):
    prompts = ("the black cat", "a", "")
    code, out, err = launched("generate", f"--workdir={language_model}", *prompts)
    assert code == 0, err
    task = make_task(saved_config(language_model), language_model / "assets")
    params, tokenizer = runs.parameters(task, language_model), task.corpus.tokenizer
    most, told = task.config.data.target_len, jax.jit(lambda p, ids: task.bind(p)(ids)[0])
    for prompt, line in zip(prompts, out.splitlines(), strict=True):
        assert line.startswith(prompt)
        ids = [tokenizer.frame.start, *tokenizer.encode(prompt)]
        for _ in range(most - len(tokenizer.encode(prompts[0]))):
            logits = told(params, np.array([ids + [0] * (most - len(ids))], np.int32))
            ids.append(int(np.argmax(logits[len(ids) - 1])))
            if ids[-1] in tokenizer.frame.after:
                break
        assert line == tokenizer.decode(ids)


@pytest.mark.slow
def test_bits_a_byte_are_of_the_texts_that_were_scored(language_model):
    task = make_task(saved_config(language_model), language_model / "assets")
    tokenizer, most = task.corpus.tokenizer, task.config.data.target_len
    found = task.report(runs.parameters(task, language_model), "test")
    side = task.config.data.side
    ids = [tokenizer.encode(pair[side]) for pair in task.corpus.split("test")]
    tokens = sum(min(len(each) + 1, most) for each in ids)
    size = sum(len(tokenizer.decode(each[:most]).encode()) for each in ids)
    assert found["bits_per_byte"] == pytest.approx(
        found["nll"] * tokens / np.log(2) / size, rel=1e-5
    )


@pytest.mark.slow
def test_a_language_model_draws_by_the_seed_and_stops_at_a_length(launched, language_model):
    def said(*options):
        arguments = (f"--workdir={language_model}", "--max_new_tokens=5", *options, "the")
        code, out, err = launched("generate", *arguments)
        assert code == 0, err
        return out

    hot = ("--temperature=5",)
    assert said(*hot) == said(*hot) != said(*hot, "--seed=1")
    assert said("--top_k=1", "--temperature=2") == said() == said("--num_beams=1")


@pytest.mark.slow
def test_what_cannot_be_gone_on_with_is_refused(refused, language_model, tiny_run):
    said = refused("generate", f"--workdir={language_model}", "the black cat " * 40)
    assert "tokens with its beginning; expected at most 32" in said
    said = refused("generate", f"--workdir={tiny_run}", "a")
    assert "is a translation, not a language_model" in said
