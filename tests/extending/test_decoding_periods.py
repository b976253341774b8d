"""A period of unlike blocks, looped, scanned or shared, decodes with every search as without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.decode import Capture, ModelDraft, PromptLookup, generate, sampling
from crossattn.models import Decoder, decoder
from crossattn.nn import Block, BlockConfig, DecoderBlock, DecoderStack
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.decode.markov import EOS, log_softmax, plain_beam_search, plain_greedy, texts
from tests.decode.search.test_contrastive import K, plain

from .flamingo import Flamingo

V, D, M, LENGTH, BATCH = 16, 12, 6, 6, 3
LAYOUTS = {
    "looped": {},
    "scanned": dict(scan=True),
    "shared": dict(share=True),
    "shared and scanned": dict(share=True, scan=True),
}
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(BATCH, 2, 5, M)).astype(np.float32)
PLACES = np.array([[0, 2], [0, 1], [1, 4]], np.int32)
PREFIX = RNG.integers(3, V, (BATCH, 3)).astype(np.int32)


@functools.cache
def flamingo(name):
    """A way to build it, and parameters whose texts depend on the images and end now and then."""
    build = lambda rngs: Flamingo(V, D, M, rngs=rngs, **LAYOUTS[name])  # noqa: E731
    params = oracle.random_params(build, seed=13)
    params["output"]["table"][[0, 1]] = 0
    params["output"]["table"] *= 3
    return build, params


@functools.cache
def whole(name):
    """Vectors and logits of padded rows of tokens, without a cache."""
    build, params = flamingo(name)

    @jax.jit
    def call(tokens, images, places):
        model = xa.functional.bind(build, params)
        hidden = model.hidden(tokens, images, places)
        return hidden, model.logits(hidden)

    return call


def vectors(row, tokens, which=0):
    """Computes the vectors of the scanned model's text; with ``which`` 1, the logits."""
    padded = np.pad(np.asarray(tokens, np.int32), (0, 12 - len(tokens)))[None]
    found = whole("scanned")(padded, IMAGES[row][None], PLACES[row][None])[which]
    return np.asarray(found[0, : len(tokens)], np.float64)


def next_log_p(row, before, tokens):
    return log_softmax(vectors(row, (*before, *tokens), 1)[-1])


def run(prefix=PREFIX, **options):
    """Hypotheses of the scanned model."""
    build, params = flamingo("scanned")

    def search(params):
        inputs = dict(images=IMAGES, places=PLACES)
        model = xa.functional.bind(build, params)
        return generate(model, inputs=inputs, max_new_tokens=LENGTH, prefix=prefix, **options)

    return jax.device_get(jax.jit(search)(params))


def expected(prefix=PREFIX):
    each = [functools.partial(next_log_p, row, tuple(prefix[row])) for row in range(BATCH)]
    return [[plain_greedy(log_p, LENGTH)] for log_p in each]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_token_by_token_equals_the_whole_text(name):
    build, params = flamingo(name)
    tokens, J = RNG.integers(3, V, (BATCH, 2, 5)).astype(np.int32), 2

    @jax.jit
    def steps(params, tokens, images, places):
        model = xa.functional.bind(build, params)
        states = model.prefill(BATCH, J, 5, images=images, places=places)
        first, states = model.decode_step(tokens[..., :2], states)
        read = lambda s, t: model.decode_step(t[..., None], s)[::-1]  # noqa: E731
        _, later = jax.lax.scan(read, states, jnp.moveaxis(tokens[..., 2:], -1, 0))
        return jnp.concatenate([first, jnp.moveaxis(later[..., 0, :], 0, 2)], axis=2)

    found = steps(params, tokens, IMAGES, PLACES)
    for j in range(J):
        close(found[:, j], whole(name)(tokens[:, j], IMAGES, PLACES)[1])


@pytest.mark.slow
def test_it_says_greedily_what_the_uncached_model_says():
    found = run()
    assert [texts(found, row) for row in range(BATCH)] == expected()
    assert any(EOS in text for [text] in expected()) and len({str(t) for t in expected()}) == BATCH
    drawn = run(key=jax.random.key(0), processors=[sampling.top_k(1)])
    np.testing.assert_array_equal(drawn.tokens, found.tokens)


@pytest.mark.slow
def test_its_beams_are_those_of_a_plain_beam_search_and_their_attention_is_kept():
    found = run(num_beams=3, capture=Capture())
    for row in range(BATCH):
        log_p = functools.partial(next_log_p, row, tuple(PREFIX[row]))
        plainly = plain_beam_search(log_p, 3, LENGTH, 0.6)
        assert texts(found, row, 3) == [tokens for tokens, _ in plainly]
    # Two gated layers; of what stands at positions 2 and later, row 0 reads its second image alone.
    assert found.weights.shape == (BATCH, 3, 2, 4, LENGTH, 6)
    said = found.weights[0, 0, :, :, : found.lengths[0, 0]]
    close(said[..., 3:].sum(-1), np.ones(said.shape[:-1]))
    assert not said[..., :3].any()


@pytest.mark.slow
def test_it_contrasts_what_a_plain_loop_contrasts():
    found = run(candidates=K, alpha=0.5)
    model = xa.functional.bind(*flamingo("scanned"))
    logits = jax.jit(lambda hidden: model.logits(hidden.astype(jnp.float32)))
    for row in range(BATCH):
        before = tuple(PREFIX[row])
        plainly = plain(functools.partial(vectors, row), logits, 0.5, before)
        assert texts(found, row) == [plainly[:LENGTH]]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["prompt", "model"])
def test_a_draft_changes_nothing(draft):
    if draft == "prompt":
        guesses = PromptLookup(PREFIX, 3)
    else:
        config = decoder.tiny(vocab_size=V, layers=1)
        build = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
        small = xa.functional.bind(build, oracle.random_params(build))
        guesses = ModelDraft(small.decode_step, lambda n: small.prefill(BATCH, 1, n), 2)
    found = run(draft=guesses)
    assert [texts(found, row) for row in range(BATCH)] == expected()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_prompts_of_unlike_lengths_are_padded_on_the_left(options):
    prompts = [PREFIX[0].tolist(), PREFIX[1, :2].tolist(), [5, 6, 7, 8, 9]]
    found = run(prefix=prompts, **options)
    if not options:
        assert [texts(found, row) for row in range(BATCH)] == expected(prompts)
    for row in range(BATCH if options else 0):
        log_p = functools.partial(next_log_p, row, tuple(prompts[row]))
        plainly = plain_beam_search(log_p, 3, LENGTH, 0.6)
        assert texts(found, row, 3) == [tokens for tokens, _ in plainly]


SHAPE = BlockConfig.of(D, num_heads=2, mlp_dim=2 * D)


def stack(rngs, build, **options):
    return DecoderStack(SHAPE, 2, build=build, positions="none", **options, rngs=rngs)


def readers(rngs):
    return Block(cross=SHAPE.cross_attention(rngs, memory_dim=M), mlp=SHAPE.feedforward(rngs))


@pytest.mark.parametrize("scan", [False, True])
def test_blocks_without_self_attention_alone_decode_without_a_cache(scan):
    build = lambda rngs: stack(rngs, readers, scan=scan)  # noqa: E731
    made = xa.functional.bind(build, oracle.random_params(build))
    x, source = RNG.normal(size=(BATCH, 4, D)), jnp.asarray(IMAGES[:, 0])
    embed = lambda _, positions, context: jnp.asarray(x, jnp.float32)[:, None, positions]  # noqa: E731

    def decoded(made):
        states = made.prefill(made.read(source=source), BATCH, 1, 4)
        tokens, found = jnp.zeros((BATCH, 1, 2), int), []
        for _ in range(2):
            vectors, states = made.decode(embed, tokens, states)
            found.append(vectors[:, 0])
        return jnp.concatenate(found, axis=1)

    whole = lambda made: made(jnp.asarray(x, jnp.float32), made.read(source=source))[0]  # noqa: E731
    close(compiled(decoded, made), compiled(whole, made))


def test_what_a_stack_cannot_read_or_return_is_refused_in_a_sentence():
    made = lambda build: xa.functional.bind(  # noqa: E731
        lambda rngs: stack(rngs, build), oracle.random_params(lambda rngs: stack(rngs, build))
    )
    alone = made(lambda rngs: DecoderBlock(SHAPE, None, rngs=rngs))
    x = jnp.zeros((1, 2, D))
    other = lambda r: Block(a=SHAPE.cross_attention(r, memory_dim=M, reads="b"))  # noqa: E731
    both, memories = (
        made([readers, other]),
        dict(source=jnp.zeros((1, 3, M)), b=jnp.zeros((1, 4, M))),
    )
    names = ("cross.weights", "a.weights")
    captured = lambda stack, x, given: stack(x, stack.read(**given), capture=names)[1]  # noqa: E731
    states = compiled(captured, both, x, memories)
    for call, said in (
        (lambda: alone.read(source=x), "^got the memory 'source', which no layer reads; .* none"),
        (alone.reading, "^return_weights asks for .* reads no memory; leave it out"),
        (
            both.reading,
            "^return_weights, capture or coverage .* memories b, source; .* weights_of=",
        ),
        (
            lambda: stack(nnx.Rngs(0), readers, weights_of="images"),
            "^weights_of is 'images', which no block reads; expected of source",
        ),
        (
            lambda: stack(nnx.Rngs(0), readers, memory_dim=M),
            "^got build and memory_dim 6, which only the default blocks take",
        ),
        (
            lambda: xa.nn.layer_weights(states),
            "^layers have attention weights of shapes .* one array cannot",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()
