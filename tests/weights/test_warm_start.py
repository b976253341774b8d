"""An encoder-decoder of two BERTs is the one that transformers makes of them."""

import functools
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import crossattn as xa
from crossattn.functional import flatten
from crossattn.weights import CheckpointError, warm_start
from experiments import tiny_checkpoints
from tests.closeness import close
from tests.compiled import compiled
from tests.peers import peer
from tests.weights import checkpoints

TOKENS = np.random.default_rng(0).integers(3, 250, (2, 9)).astype(np.int32)
SEGMENTS = (np.arange(9) < np.array([[9], [6]])).astype(np.int32)
UNREAD = ("decoder.bert.pooler", "decoder.cls.seq_relationship")
WIDE = checkpoints.BERT | dict(vocab_size=263, hidden_size=12, max_position_embeddings=64)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Returns the folder of a BERT with every head."""
    return tiny_checkpoints.write("bert", tmp_path_factory.mktemp("bert") / "given")


@pytest.fixture(scope="module")
def bare(bert, tmp_path_factory):
    """Returns the folder of a BERT of another size with a pooler and no head."""
    folder = tmp_path_factory.mktemp("bare")
    checkpoints.fresh(WIDE | dict(architectures=["BertModel"]), folder)
    (folder / "tokenizer.json").write_bytes((bert / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def pair(bert):
    model, params, tokenizer = warm_start(bert, key=jax.random.key(0))
    return model, params, tokenizer


def test_each_parameter_is_that_of_its_half_or_new(bert, bare):
    """Compares the tensors of the written files with those of the files that were read."""
    model, params, _ = warm_start(bare, bert, key=jax.random.key(0))
    other = warm_start(bare, bert, key=jax.random.key(1))[1]
    written = xa.weights.Tensors.of(model, params)
    again = xa.weights.Tensors.of(model, other)
    halves = {}
    for half, folder in (("encoder", bare), ("decoder", bert)):
        given, own, _ = xa.load(folder)
        for name, tensor in xa.weights.Tensors.of(given, own).items():
            name = name.removeprefix("bert.") if half == "encoder" else name
            halves[f"{half}.{name}"] = tensor
    new = {name for name in written if name not in halves}
    assert new == {n for n in written if "crossattention" in n or "enc_to_dec_proj" in n} and new
    unread = {n for n in halves if n not in written}
    assert unread and all(n.startswith(UNREAD) for n in unread)
    for name in written:
        if name in halves:
            np.testing.assert_array_equal(written[name], halves[name], err_msg=name)
    drawn = {n for n in new if not np.array_equal(written[n], again[n])}
    assert {n for n in new if n.endswith("weight") and "LayerNorm" not in n} <= drawn


def test_the_decoder_of_a_bare_encoder_has_a_new_head_and_no_pooler(bare):
    model, params, _ = warm_start(bare, key=jax.random.key(0))
    flat = flatten(params)
    assert "encoder.pooler.kernel" in flat and not any("decoder.pooler" in name for name in flat)
    assert {n for n in flat if n.startswith("decoder.output")} == {
        f"decoder.output.{n}"
        for n in ("bias", "dense.kernel", "dense.bias", "norm.scale", "norm.bias")
    }
    assert model.config.encoder.masked_lm is False
    embedding = flat["encoder.input.embedding.table"]
    np.testing.assert_array_equal(flat["decoder.input.embedding.table"], embedding)
    assert flat["decoder.input.embedding.table"] is not embedding  # a step may donate both


def logits_of(model, params, source, target_in, segments=None):
    """Returns the logits of a pair, of numpy arrays."""
    call = functools.partial(xa.apply, model)
    return np.asarray(compiled(call, params, source, target_in, source_segment_ids=segments))


def theirs_of(folder):
    """Loads the model that ``save`` wrote, by transformers."""
    transformers = peer("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.EncoderDecoderModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("halves", [("bert",), ("bare",), ("bare", "bert")])
def test_logits_are_those_of_transformers(halves, bert, bare, tmp_path):
    """It joins the same two files, with our values for what neither has."""
    torch, transformers = peer("torch"), peer("transformers")
    folders = [dict(bert=bert, bare=bare)[name] for name in halves]
    model, params, _ = warm_start(*folders, key=jax.random.key(0))
    xa.save(tmp_path / "ours", model, params)
    written = theirs_of(tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(
            folders[0], folders[-1]
        ).eval()
    state, new = written.state_dict(), ("crossattention", "enc_to_dec_proj")
    head = halves[-1] == "bare"
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if any(word in name for word in new) or (head and "cls." in name):
                value.copy_(state[name])
    inputs = dict(input_ids=TOKENS, attention_mask=SEGMENTS, decoder_input_ids=TOKENS[:, :5])
    given = {name: torch.tensor(x, dtype=torch.long) for name, x in inputs.items()}
    with torch.no_grad():
        wanted = theirs(**given).logits.numpy()
        close(written(**given).logits.numpy(), wanted)
    close(logits_of(model, params, TOKENS, TOKENS[:, :5], SEGMENTS), wanted)


def test_it_is_saved_and_loaded_as_a_pair_with_its_tokenizer(pair, tmp_path):
    model, params, tokenizer = pair
    again, same, reread = xa.load(xa.save(tmp_path / "pair", model, params))
    assert again.config == model.config and reread.to_str() == tokenizer.to_str()
    jax.tree.map(np.testing.assert_array_equal, same, params)
    settings = json.loads((tmp_path / "pair/config.json").read_text())
    assert settings["decoder"]["add_cross_attention"] and settings["decoder"]["is_decoder"]
    assert again.ids == dict(
        bos_id=tokenizer.token_to_id("<s>"), eos_id=tokenizer.token_to_id("</s>"), pad_id=256
    )


def test_padding_is_not_read(pair):
    model, params, _ = pair
    target = TOKENS[:, :5]
    padded = logits_of(model, params, TOKENS, target, SEGMENTS)
    other = logits_of(model, params, np.where(SEGMENTS > 0, TOKENS, 7), target, SEGMENTS)
    np.testing.assert_array_equal(padded, other)
    close(logits_of(model, params, TOKENS[1:, :6], target[1:]), padded[1:])


@pytest.mark.slow
def test_cached_decoding_is_the_whole_and_beams_are_no_worse_than_greedy(pair):
    model, params, _ = pair
    bound = xa.functional.bind(model, params)
    options: dict[str, Any] = dict(
        max_new_tokens=8, eos_id=(), bos_id=model.ids["bos_id"], pad_id=256
    )

    def found(beams):
        source = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
        texts = compiled(xa.decode.generate, bound, *source, num_beams=beams, **options)
        return np.asarray(texts.tokens[:, 0])

    def log_p(tokens):
        target = np.concatenate([np.full((2, 1), options["bos_id"]), tokens[:, :-1]], 1)
        logits = np.float64(logits_of(model, params, TOKENS, target.astype(np.int32), SEGMENTS))
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def score(tokens):
        return np.take_along_axis(log_p(tokens), tokens[..., None], -1).sum((1, 2))

    greedy = found(1)
    np.testing.assert_array_equal(log_p(greedy).argmax(-1), greedy)
    assert (score(found(4)) >= score(greedy) - 1e-4).all()


def test_what_makes_no_pair_is_refused_in_one_sentence(bert, tmp_path):
    def said(*folders):
        with pytest.raises(CheckpointError) as error:
            warm_start(*folders, key=jax.random.key(0))
        assert str(error.value).count(". ") == 0 and "\n" not in str(error.value)
        return str(error.value)

    gpt2 = tiny_checkpoints.write("gpt2", tmp_path / "gpt2")
    vit = checkpoints.fresh(checkpoints.VIT, tmp_path / "vit")
    decoder = checkpoints.fresh(WIDE | dict(is_decoder=True), tmp_path / "decoder")
    mute = checkpoints.fresh(WIDE, tmp_path / "mute")
    assert "holds a gpt2, which cannot be the encoder" in said(gpt2)
    assert "holds a vit, which cannot be the encoder" in said(vit, bert)
    assert "holds a gpt2, which cannot be the decoder" in said(bert, gpt2)
    assert "bert with causal attention, which cannot be the encoder" in said(decoder)
    assert "has no tokenizer; expected tokenizer.json" in said(mute)

    other = checkpoints.fresh(WIDE, tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(other / "tokenizer.json"))
    assert "have not the same tokens" in said(bert, other)
    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    content = json.loads(tokenizer.to_str()) | {"post_processor": None}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "puts no tokens around a text" in said(other)
