"""Retrieval: what a window is given, what a report counts, texts that retrieve as they are written, mass."""

from typing import NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import retro
from crossattn import functional
from crossattn.analysis import scores
from crossattn.data.neighbours import CharacterNgrams
from crossattn.data.sources import facts
from crossattn.data.tokenizers import BOS
from crossattn.interventions import Intervention, run
from crossattn.train.loop import batches, fresh_state
from crossattn.train.program import make_program
from crossattn.train.sharding import make_mesh, put_batch
from experiments import generate, overlaps
from experiments.errors import SettingsError
from experiments.initial import initial
from experiments.settings import check, train_config
from experiments.tasks import make_task

M = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


def task_of(folder, arg="tiny", **data):
    config = retro.get_config(arg)
    config.data.update(data_dir=folder, **data)
    check(config)
    return make_task(config)


def test_windows_are_given_the_passages_of_their_own_chunks(folder):
    task = task_of(folder)
    examples, tokenizer = task.examples("test"), task.corpus.tokenizer
    right = asked = 0
    for example in (examples[i] for i in range(len(examples))):
        text = tokenizer.decode(example["target"])
        for part in text.split("tell me what ")[1:]:
            who, _, rest = part.partition(" will bring . ")
            if rest.count(" ") < 4:  # the window ends before the answer
                continue
            passages = [tokenizer.decode(x) for chunk in example["neighbours"] for x in chunk]
            asked += 1
            right += f"what {who} will bring to us is {rest.split()[3]} ;" in passages
    assert asked > 90 and right == asked


def test_a_text_that_is_written_gets_the_nearest_passages_of_one_index(folder, monkeypatch):
    """The index is written by the first task, and each task opens it once."""
    faiss, embed = pytest.importorskip("faiss"), CharacterNgrams()
    write, read = Mock(wraps=faiss.write_index), Mock(wraps=faiss.read_index)
    monkeypatch.setattr(faiss, "write_index", write)
    monkeypatch.setattr(faiss, "read_index", read)
    for opened in (1, 2):
        task = task_of(folder, neighbours=3, neighbour_len=M)  # no other test has this database
        chunks, tokenizer = task.retrieval.database.chunks, task.corpus.tokenizer
        vectors = embed(chunks.texts(tokenizer)).astype(np.float64)
        for text in ("tell me what mira tovel will bring", "what is in the box of the other one ?"):
            ids = np.array(tokenizer.encode(text)[:M], np.int32)
            scores = vectors @ embed([tokenizer.decode(ids)])[0]
            told = [
                scores[(chunks.passages == x).all(-1)].max() for x in task.retrieval.of_text(ids)
            ]
            np.testing.assert_allclose(told, np.sort(scores)[:-4:-1], atol=1e-5)
        assert (write.call_count, read.call_count) == (1, opened)


@pytest.mark.slow
def test_passages_of_the_split_itself_are_of_other_documents(folder):
    task = task_of(folder, passages="train")
    windows = task.retrieval.windows("train")
    chunks = task.retrieval.database.chunks
    near = windows.neighbours[:400]
    assert (near >= 0).all()
    assert (chunks.document[near] != chunks.document[:400, None]).all()


@pytest.mark.slow
def test_a_report_counts_tokens_bytes_and_overlaps_once(folder):
    task = task_of(folder)
    params = task.init(jax.random.key(0))
    found, split = task.report(params, "test"), task.split_loss(params, "test")
    texts = [text for each in task.corpus.split("test") for text in each["paragraphs"]]
    size = sum(len(text.encode()) + 1 for text in texts)
    tokens = sum(len(task.corpus.tokenizer.encode(text)) + 1 for text in texts)
    assert sum(found["examples"]["weight"]) == tokens
    for end in ("", "_without"):
        bits = split[f"nll{end}"] * tokens / np.log(2) / size
        np.testing.assert_allclose(found[f"bits_per_byte{end}"], bits, rtol=1e-5)
    counted = sum(value for name, value in found.items() if name.startswith("tokens_"))
    assert sum(found["chunks"]["weight"]) == counted
    for end in ("", "_without", "_random"):  # the bins have all chunks, each once
        binned = [
            found[f"nll{end}{name[6:]}"] * x for name, x in found.items() if "tokens_" in name
        ]
        np.testing.assert_allclose(sum(binned), sum(found["chunks"][f"nll{end}"]), rtol=1e-6)
    examples = task.examples("test")
    sizes = [len(examples[i]["target"]) for i in range(len(examples))]
    # The first chunk of a window reads nothing before its end.
    assert counted == sum(size - M for size in sizes if size > M)


@pytest.mark.slow
def test_blind_it_reads_nothing_and_a_plain_decoder_takes_the_same_windows(folder):
    task, blind = task_of(folder), task_of(folder, blind=True)
    batch = next(iter(task.eval_batches("test", None)))
    params = task.init(jax.random.key(0))
    sums, unseen = (jax.jit(each.loss)(params, batch, None)[1] for each in (task, blind))
    np.testing.assert_allclose(unseen["nll"], sums["nll_without"], rtol=1e-6)
    assert abs(float(unseen["nll"] - sums["nll"])) > 1e-3
    plain = task_of(folder, "plain,tiny")
    assert plain.memory == () and task.memory == ("neighbours",)
    own = next(iter(plain.eval_batches("test", None)))
    for name, x in batch.items():
        np.testing.assert_array_equal(own[name], x, err_msg=name)
    found = plain.report(plain.init(jax.random.key(0)), "test")
    assert 0 < found["bits_per_byte"] < np.inf and "bits_per_byte_random" not in found
    read = task.report(params, "test")
    for name in ("overlap", "weight", "group"):  # held to each other chunk by chunk
        assert found["chunks"][name] == read["chunks"][name]
    kept, lines = overlaps.gains({"plain": found, "retro": read})
    chunks = np.array(read["chunks"]["overlap"]) <= 0.25
    losses = {name: np.array(x)[chunks] for name, x in read["chunks"].items()}
    gain = (losses["nll_without"] - losses["nll"]).sum() / losses["weight"].sum()
    assert kept["0.25"] == losses["weight"].sum() > 0
    assert lines["retro over no passages"][list(kept).index("0.25")].value == pytest.approx(gain)
    assert list(lines)[2:] == ["retro over plain"]


def test_the_two_models_of_the_help_have_as_many_parameters():
    counts = []
    for kind in ("", "plain"):
        task = make_task(retro.get_config(kind)).without_data()
        counts.append(functional.count(functional.shapes(task.build)))
    assert abs(counts[0] / counts[1] - 1) < 1e-3


@pytest.mark.slow
def test_a_text_that_retrieves_as_it_is_written_is_that_of_whole_texts(folder):
    task = task_of(folder)
    params, tokenizer = task.init(jax.random.key(1)), task.corpus.tokenizer
    model = jax.jit(lambda p, tokens, near: task.bind(p)(tokens, neighbours=near))
    prompt = "tell me what mira tovel will bring . mira"
    [found] = task.continued(params, [prompt], 12)
    ids = [BOS, *tokenizer.encode(prompt)]
    for _ in range(12):  # without a cache: every chunk is looked up anew
        whole = np.pad(np.array(ids), (0, 32 - len(ids)))
        near = [
            task.retrieval.of_text(whole[u * M : (u + 1) * M].astype(np.int32)) for u in range(4)
        ]
        near = np.where(np.arange(4)[:, None, None] < len(ids) // M, np.stack(near), 0)
        logits = model(params, jnp.asarray(whole[None], jnp.int32), near[None])
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    ends = [i for i, token in enumerate(ids) if token == 2]
    assert found == tokenizer.decode(ids[: ends[0]] if ends else ids)


def test_what_is_drawn_of_a_text_is_what_its_tokens_after_the_last_whole_chunk_read(folder):
    task = task_of(folder)
    params, tokenizer = task.init(jax.random.key(1)), task.corpus.tokenizer
    text = "tell me what mira tovel will bring . mira tovel will bring the lamp , tell me what mira"
    ids = np.array([BOS, *tokenizer.encode(text)], np.int32)
    end = (len(ids) - 1) // M * M
    assert M < end < len(ids) - 1
    near = np.stack([task.retrieval.of_text(ids[i : i + M]) for i in range(0, end, M)])
    model = task.bind(params)
    mass = np.asarray(model.mass(jnp.asarray(ids[None, :-1]), near[None]))[0, end - 1 :].mean(0)
    chunk, rest, found = task.passages(params, text)
    assert tokenizer.encode(chunk) == ids[end - M : end].tolist()
    assert tokenizer.encode(rest) == ids[end:].tolist()
    np.testing.assert_allclose([each.mass for each in found], mass, rtol=1e-5)
    assert all(0.8 * each.mass < each.read.sum() <= each.mass + 1e-6 for each in found)
    texts = [tokenizer.decode(passage) for passage in near[-1]]
    assert [" ".join(each.words).split() for each in found] == [text.split() for text in texts]
    # The slope is that of the likelihood of what follows, nothing before it, when weights are scaled.
    told = lambda scale: likelihood(task, params, ids, near, scale)[end - 1 :].sum()  # noqa: E731
    for k, each in enumerate(found):
        step = np.eye(len(found))[k] * 1e-2
        np.testing.assert_allclose(each.slope, (told(1 + step) - told(1 - step)) / 2e-2, rtol=2e-2)
    figure = generate.draw([(chunk, rest, found)])
    shown = " ".join(text.get_text() for text in figure.texts + figure.axes[0].texts)
    assert all(word in shown for each in found for word in each.words)


def likelihood(task, params, ids, near, scale):
    """Log-likelihoods [T] of a text where the values of its passages are scaled, by their number."""
    values = Intervention(scale=jnp.repeat(jnp.asarray(scale, jnp.float32), near.shape[-1])[None])
    given = dict(neighbours=near[None], method="hidden")
    model = task.bind(params)
    hidden = run(model, {"decoder.chunked.values": values}, jnp.asarray(ids[None, :-1]), **given)
    told = jax.nn.log_softmax(model.logits(hidden))[0]
    return np.asarray(told[jnp.arange(len(ids) - 1), ids[1:]], np.float64)


@pytest.mark.parametrize(
    ("arg", "text", "said"),
    [
        ("plain,tiny", "tell me what", "a decoder reads no passages"),
        ("tiny", "tell", "expected 9 to 65, a chunk and what follows it"),
        ("tiny", "tell me what mira brings " * 20, "expected 9 to 65"),
    ],
)
def test_a_text_of_which_nothing_can_be_drawn_is_refused(folder, arg, text, said):
    task = task_of(folder, arg)
    with pytest.raises(SettingsError, match=said):
        task.passages(task.init(jax.random.key(0)), text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(target_len=60), "target_len is 60; expected a multiple of data.chunk, 8."),
        (dict(neighbour_len=7), "neighbour_len is 7; expected data.chunk, 8, or more."),
    ],
)
def test_lengths_that_do_not_fit_are_refused(folder, changes, said):
    with pytest.raises(SettingsError, match=said):
        task_of(folder, **changes)


def test_other_searches_and_long_texts_are_refused(folder):
    task = task_of(folder)
    params = task.init(jax.random.key(0))
    with pytest.raises(
        SettingsError, match="the likeliest token after the other; leave num_beams out"
    ):
        task.continued(params, ["tell me"], num_beams=3)
    with pytest.raises(SettingsError, match="expected at most 64, config.data.target_len"):
        task.continued(params, ["tell me what mira brings " * 20])


@pytest.fixture(scope="module")
def trained(folder):
    """A task, and parameters after 250 steps."""
    task = task_of(folder)
    task.config.train.steps = 250
    values = train_config(task.config)
    program = make_program(task, values, make_mesh(values.mesh))
    state, data = (
        fresh_state(program, initial(task.config, task)),
        batches(task, values, make_mesh(values.mesh)),
    )
    for _ in range(250):
        state, _ = program.step(state, put_batch(next(data), program.mesh, False, program.along))
    return task, state.eval_params


@pytest.mark.slow
def test_it_learns_to_read_passages_and_needs_the_one_with_the_answer(trained):
    """Its passages help, another text's harm, and the passage whose lack costs most has the answer."""
    task, params = trained
    read, shuffled = (task.split_loss(params, "test", x)["nll"] for x in (None, task.shuffled))
    assert read < task.split_loss(params, "test")["nll_without"] - 0.3 and read < shuffled - 0.2
    found = answers(task, params)
    assert len(found.cost) > 400 and (found.cost > 0).any(-1).mean() > 0.8
    sure = found.tells.sum(-1) == 1
    assert sure.mean() > 0.8
    assert (found.cost.argmax(-1) == found.tells.argmax(-1))[sure].mean() > 0.8


@pytest.mark.slow
def test_slopes_say_which_passage_is_needed_and_mass_does_not(trained):
    """The encoder, which reads the chunk, tells passages apart, and attention then reads both."""
    found = answers(*trained)
    needed = found.cost.argmax(-1)
    assert (found.slope.argmax(-1) == needed).mean() > 0.9
    assert (found.mass.argmax(-1) == needed).mean() < 0.9
    assert np.corrcoef(found.slope.ravel(), found.cost.ravel())[0, 1] > 0.6


class Answers(NamedTuple):
    """What passages [n K] are to each of n places where a thing is predicted.

    Attributes:
      mass: the share of attention on each.
      slope: of the log-likelihood for the weights on each, times them.
      cost: nats that leaving it out costs.
      tells: whether it is the passage of the person that is asked for, found by its text.
    """

    mass: np.ndarray
    slope: np.ndarray
    cost: np.ndarray
    tells: np.ndarray


def answers(task, params):
    tokenizer, nll, parts = task.corpus.tokenizer, jax.jit(task._nll), []
    mass = jax.jit(lambda p, batch: task.bind(p).mass(batch["target_in"], batch["neighbours"]))
    slope = jax.jit(lambda p, batch: scores.passage_slopes(task.bind(p), batch))
    things = [tokenizer.encode(thing)[0] for thing in facts.THINGS]
    for batch in task.eval_batches("test", None):
        near = batch["neighbours"]
        place = np.isin(batch["target_out"], things) & (batch["target_segment_ids"] > 0)
        whole, costs = nll(params, batch), []
        for k in range(near.shape[2]):
            left = near.copy()
            left[:, :, k] = 0
            costs.append(nll(params, {**batch, "neighbours": left}) - whole)
        tells = np.zeros((*place.shape, near.shape[2]), bool)
        for row, at in zip(*np.nonzero(place), strict=True):
            who = tokenizer.decode(batch["target_in"][row, : at + 1]).split()[-3:-1]
            texts = [tokenizer.decode(x) for x in near[row, (at + 1) // M - 1]]
            tells[row, at] = [text.startswith(f"what {' '.join(who)} will") for text in texts]
        read = np.asarray(mass(params, batch)), np.asarray(slope(params, batch))
        found = Answers(*read, np.stack(costs, -1), tells)
        parts.append([x[place] for x in found])
    return Answers(*map(np.concatenate, zip(*parts, strict=True)))
