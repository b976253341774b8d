"""Cloze questions: only the answer counts, pointing is summed attention, the unanswerable is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import help_cloze
from crossattn.nn.copying import FLOOR
from experiments.errors import SettingsError
from experiments.plan.compiling import unread_task
from experiments.settings import check
from experiments.tasks import make_task
from experiments.tasks.cloze import (
    Question,
    answer_places,
    most_frequent,
    nearest,
    question_of,
)

EXAMPLE = {"id": "a#1", "source": "enta red . entb blue .", "target": "___ azure entb"}


@pytest.fixture(scope="module", params=help_cloze.ANSWERS)
def task(request):
    return make_task(packed(request.param))


def packed(variant):
    config = help_cloze.get_config(f"{variant},tiny")
    config.data.mode = "pack"
    return config


@pytest.mark.quick(1)
def test_only_the_answer_counts_in_packed_rows(task):
    batch = next(task.train_iterator(0, 1))
    told, tokenizer = np.asarray(answer_places(batch["target_segment_ids"])), task.corpus.tokenizer
    assert told.sum() == sum(len(set(row[row > 0])) for row in batch["target_segment_ids"])
    assert np.asarray(task.told(batch)).sum() == told.sum()
    assert (batch["target_segment_ids"].max(1) > 1).any()  # several in a row
    for ids in batch["target_out"][told]:
        assert tokenizer.decode([ids]).strip().startswith("ent")
    np.testing.assert_array_equal(
        batch["target_out"][:, 1:][told[:, :-1]], tokenizer.frame.after[0]
    )
    first, second = tokenizer.encode("enta a enta")[0], tokenizer.encode("a enta")[-1]
    assert first == second  # a passage may begin with its answer


def test_a_generated_answer_alone_has_a_loss():
    task = make_task(help_cloze.get_config("generate,tiny"))
    batch, params = next(task.train_iterator(0, 1)), task.init(jax.random.key(0))
    told, labels = np.asarray(task.told(batch)), batch["target_out"]
    loss = jax.jit(lambda batch: task.loss(params, batch, None)[0])
    assert loss(batch) == loss({**batch, "target_out": np.where(told, labels, 5)})
    assert loss(batch) != loss({**batch, "target_out": np.where(told, 5, labels)})


def test_a_reader_that_points_is_asked_at_the_first_blank_and_never_told_the_answer():
    task = make_task(packed("point"))
    encode = task.corpus.tokenizer.encode
    asked = ["___ azure ___ entb", "olive ___ entc"]
    ids = [[*encode(text), *task.corpus.tokenizer.frame.after] for text in asked]
    row = dict(
        target_out=np.array([[*ids[0], *ids[1], 0]], np.int32),
        target_segment_ids=np.array([[*[1] * len(ids[0]), *[2] * len(ids[1]), 0]], np.int32),
    )
    second = len(ids[0]) + len(encode("olive"))
    assert np.flatnonzero(task.told(row)[0]).tolist() == [0, second]
    labels = np.asarray(task.labels(row))[0]
    assert [labels[0], labels[second]] == [encode("a entb")[-1], encode("a entc")[-1]]

    params = task.init(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, next(task.train_iterator(0, 1)))
    read = jax.jit(lambda batch: task.read_source(task.bind(params), batch, None)[0])
    own = np.asarray(answer_places(batch["target_segment_ids"]))
    hidden = own | np.pad(own[:, :-1], ((0, 0), (1, 0)))  # and the ends
    other = batch | {"target_out": jnp.where(hidden, 7, batch["target_out"])}
    told = np.asarray(task.told(batch))
    np.testing.assert_array_equal(read(batch)[told], read(other)[told])


def test_a_plan_of_a_reader_that_points_needs_no_texts():
    task = unread_task(packed("point"))
    params = jax.eval_shape(task.init, jax.random.key(0))
    loss = jax.eval_shape(lambda p, b: task.loss(p, b, None)[0], params, task.batch_shapes(1))
    assert loss.shape == ()


@pytest.mark.slow
def test_pointing_is_the_sum_of_attention_over_the_occurrences():
    task = make_task(packed("point"))
    params = task.init(jax.random.key(1))
    batch = jax.tree.map(jnp.asarray, next(iter(task.eval_batches("test", None))))
    model = task.bind(params)
    hidden, weights = task.read_source(model, batch, None, return_weights=True)
    told, V = np.asarray(task.told(batch)), task.corpus.tokenizer.vocab_size
    p = np.exp(np.asarray(model.logits(hidden), np.float64))
    first = np.asarray(weights[-1][:, 0], np.float64)
    labels, source = np.asarray(task.labels(batch)), np.asarray(batch["source"])
    for row, place in np.argwhere(told)[:20]:
        label = int(labels[row, place])
        mass = first[row, place][source[row] == label].sum()
        assert p[row, place, label] == pytest.approx((1 - FLOOR) * mass + FLOOR / V, rel=1e-4)
        assert mass > 0
        read = set(source[row][first[row, place] > 0].tolist())
        assert all(task.corpus.tokenizer.tokens([x])[0].startswith("▁ent") for x in read)


def test_an_answer_has_the_chances_of_the_loss_and_the_words_that_were_read(task):
    params = task.init(jax.random.key(1))
    own, examples = task.outcomes(params, "test"), task.examples("test")
    for number in range(3):
        found = task.answered(params, examples[number])
        assert found.question == question_of(examples[number])
        chances = [*found.chances.values()]
        assert [*found.chances] != [] and chances == sorted(chances, reverse=True)
        assert {*found.chances} == {*found.question.candidates}
        nll = -np.log(found.chances[found.question.answer])
        assert nll == pytest.approx(own["nll"][number], rel=1e-4)
        assert len(found.read) == len(found.question.passage)
        if task.config.model.name == "attention_sum_reader":  # reads names, and nothing else
            names = [word in found.chances for word in found.question.passage]
            assert found.read[names].sum() == pytest.approx(1, rel=1e-5)
            assert (found.read[names] > 0).all()
        assert 0 < found.read.sum() <= 1 + 1e-5
    with pytest.raises(SettingsError, match="asks for 'entb', which is not in its passage"):
        task.answered(params, EXAMPLE | dict(source="enta red ."))


@pytest.mark.slow
def test_answers_are_printed_and_drawn(launched, refused, trained, tmp_path):
    named = f"--workdir={trained(help_cloze.get_config('point,tiny'), 2)}"
    picture = tmp_path / "answers.png"
    asked = ("answer", "0", "3", named, f"--plot={picture}")
    code, out, err = launched(*asked, "--answers=2")
    first, chances, second, _ = out.splitlines()
    assert code == 0 and first.startswith("0: ") and second.startswith("3: "), err
    assert first.count("___") and chances.count("ent") == 3 and "; right is ent" in chances
    assert picture.stat().st_size > 10_000
    said = refused("answer", "400", named)
    assert "got question 400; the test split has 0 to 399." in said, said
    assert "got question -1" in refused("answer", named, "--", "-1")
    assert "got no question" in refused("answer", named)


@pytest.mark.slow
def test_the_split_is_the_mean_of_its_questions(task):
    params = task.init(jax.random.key(2))
    whole, own = task.split_loss(params, "test"), task.outcomes(params, "test")
    assert whole.keys() == {"loss", "nll", "exact_match"}
    assert len(own["group"]) == len(task.examples("test"))
    for name in ("nll", "exact_match"):
        assert whole[name] == pytest.approx(np.mean(own[name]), rel=1e-5)
    assert set(own["exact_match"]) <= {0.0, 1.0}


def test_baselines_by_hand():
    passage = "entc opens . enta closes a window . enta . entb closes a door . entc enta".split()
    asked = Question(passage, "___ closes the door , enta says".split(), "entb")
    assert most_frequent(asked) == "enta" and most_frequent(asked, other=True) == "entc"
    assert nearest(asked, 3) == "entb"  # closes, door; enta shares closes alone
    assert nearest(asked, 1) == "enta"  # closes alone, which the first of both shares
    assert nearest(asked, 1, other=True) == "entb"
    every = Question(["enta"], ["___", "enta"], "enta")
    assert most_frequent(every, other=True) == "enta"  # there is no other


def test_made_up_questions_need_more_than_shared_words(task):
    """Each passage has three to five names; its questions use other words."""
    found = task.baselines("test")
    assert set(found) == {
        f"{name}_exact_match" for name in ("most_frequent", "most_frequent_not_asked", "nearest")
    }
    assert all(0.1 < value < 0.5 for value in found.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(source="enta red . entc blue ."), "asks for 'entb', which is not in its passage"),
        (dict(target="___ azure blue"), "ends with 'blue'; expected a question with ___"),
        (dict(target="what is azure ? entb"), "ends with 'entb'; expected a question with ___"),
        (dict(target=""), "ends with ''"),
        (
            dict(source="enta red . entb blue . " * 9),
            "the passage of a#1 has 55 tokens; config.data.source_len is 40",
        ),
        (dict(target="___ azure . " * 9 + "entb"), "the question with its answer of a#1 has"),
    ],
)
def test_what_cannot_be_answered_is_one_line(task, change, said):
    task._refuse_unfit([EXAMPLE])
    with pytest.raises(SettingsError, match=said) as error:
        task._refuse_unfit([EXAMPLE | change])
    assert "\n" not in str(error.value)


def test_a_name_of_several_tokens_is_refused(task, monkeypatch):
    encode = task.corpus.tokenizer.encode
    monkeypatch.setattr(
        task.corpus.tokenizer, "encode", lambda text: encode(text.replace("entb", "ent b"))
    )
    with pytest.raises(SettingsError, match=r"'entb' is \d tokens; expected one"):
        task._refuse_unfit([EXAMPLE])


def test_both_sides_share_a_tokenizer():
    config = help_cloze.get_config("generate,tiny")
    config.tokenizer.joint = False
    with pytest.raises(SettingsError, match="tokenizer.joint is False"):
        check(config)


def test_both_variants_read_the_same_questions():
    point, generate = (help_cloze.get_config(name).to_dict() for name in help_cloze.ANSWERS)
    assert point["data"].pop("mode") == "bucket" and generate["data"].pop("mode") == "pack"
    for section in ("data", "tokenizer", "loss"):
        assert point[section] == generate[section]
    assert question_of(EXAMPLE).candidates == ["enta", "entb"]
