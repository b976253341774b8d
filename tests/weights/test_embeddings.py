"""Inputs of a loaded model, held to transformers: odd and stored sinusoids, padding's gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from tests.peers import peer

torch = peer("torch")
transformers = peer("transformers")

from experiments.parity import ours, reference  # noqa: E402  (it needs torch)
from experiments.parity.cases import CASES, FRAMES, MELS, PAD, VOCAB  # noqa: E402


def named(name):
    [case] = [case for case in CASES if case.name == name]
    return dataclasses.replace(case, search=0)


@pytest.mark.parametrize(
    "name, table",
    [
        ("Marian, scaled, swish", "model.shared.weight"),
        ("Bart, untied, relu", "model.decoder.embed_tokens.weight"),
        ("Whisper, gelu", "model.decoder.embed_tokens.weight"),
        ("BERT, decoder alone", "bert.embeddings.word_embeddings.weight"),
        ("T5, tied, relu", "shared.weight"),  # the one without a padding_idx
    ],
)
def test_the_vector_of_padding_learns_what_it_learns_in_transformers(name, table, tmp_path):
    """Padding stands amid texts that nothing hides."""
    case = named(name)
    theirs = reference.build(case, tmp_path)
    random = np.random.default_rng(0)
    texts = [random.integers(3, VOCAB, (2, 6)) for _ in range(2)]
    for text in texts:
        text[:, 2] = PAD
    weights = random.standard_normal((2, 6, VOCAB)).astype(np.float32)
    frames = random.standard_normal((2, FRAMES, MELS)).astype(np.float32)
    source = {
        "speech": dict(input_features=torch.tensor(frames).transpose(1, 2)),
        "pair": dict(input_ids=torch.tensor(texts[0])),
        "decoder": {},
    }[case.kind]
    last = "input_ids" if case.kind == "decoder" else "decoder_input_ids"
    logits = theirs(**source, **{last: torch.tensor(texts[1])}).logits
    (logits * torch.tensor(weights)).sum().backward()
    expected = dict(theirs.named_parameters())[table].grad.numpy()

    model, params, _ = xa.load(tmp_path)
    read = {"speech": [frames], "pair": texts[:1], "decoder": []}[case.kind]
    given = [jnp.asarray(x) for x in (*read, texts[1])]
    grads = jax.jit(jax.grad(lambda p: jnp.sum(xa.apply(model, p, *given) * weights)))(params)
    known = next(k for names in model.layout.files.values() for n, k in names.items() if n == table)
    found = xa.weights.Tensors.of(model, grads)[known]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_an_odd_number_of_features_has_one_more_sine(tmp_path):
    case = named("Marian, scaled, swish")
    odd = dict(d_model=15, encoder_attention_heads=3, decoder_attention_heads=5)
    case = dataclasses.replace(case, config=case.config | odd)
    expected = reference.measure(case, reference.build(case, tmp_path), tmp_path)
    found = ours.measure(case, tmp_path, [])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-4)


def test_sinusoids_of_half_precision_are_those_of_the_file(tmp_path):
    case = named("Pegasus, scaled, relu")
    length = 150
    case = dataclasses.replace(case, config=case.config | dict(max_position_embeddings=length))
    reference.build(case, tmp_path / "whole").bfloat16().save_pretrained(tmp_path / "half")
    theirs = (
        getattr(transformers, case.model).from_pretrained(tmp_path / "half", dtype="float32").eval()
    )
    model, params, _ = xa.load(tmp_path / "half")
    source = np.random.default_rng(0).integers(3, 40, (2, length))
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(source)
        ).logits.numpy()
    found = xa.apply(model, params, jnp.asarray(source), jnp.asarray(source))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    with pytest.raises(
        ValueError, match="151 tokens was asked for, but this model's table has 150"
    ):
        xa.apply(model, params, jnp.ones((1, length + 1), int), jnp.ones((1, 3), int))
    again = xa.save(tmp_path / "again", model, params)
    for file in (tmp_path / "half").iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
