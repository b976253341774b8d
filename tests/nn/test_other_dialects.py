"""What a reader of the papers or of PyTorch writes first is right here, or told what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.models import transformer
from crossattn.nn import Block, BlockConfig, DecoderBlock, MultiHeadAttention, Sublayer
from crossattn.nn.sublayers import Residual
from tests import numpy_model as oracle

B, T, S, D, M = 2, 5, 7, 24, 40


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X, SOURCE = normal(B, T, D), normal(B, S, M, seed=1)
HEADS = [normal(B, n, 4, 6, seed=n) for n in (T, S, S + 1)]  # queries, keys, values
HEADS[2] = HEADS[2][:, :S]


def layer(**options):
    return MultiHeadAttention(D, 4, memory_dim=M, **options, rngs=nnx.Rngs(0))


def block():
    return DecoderBlock(BlockConfig.of(D, 4, 48), M, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m: m(X, SOURCE, SOURCE), ValueError, r"write attention\(q, k\) where v is k"),
        (lambda m: m(X, SOURCE, SOURCE), ValueError, r"memory\(k, values_of=v\)"),
        (lambda m: m(X, SOURCE, key_padding_mask=None), TypeError, r"valid=~key_padding_mask"),
        (lambda m: m(X, SOURCE, attn_mask=None), TypeError, r"~attn_mask.* added is bias="),
        (lambda m: m(X, SOURCE, need_weights=False), TypeError, "it is return_weights=True"),
        (lambda m: xa.attend(*HEADS, dropout_p=0.1), TypeError, "it is dropout_rate="),
        (lambda m: xa.attend(*HEADS, key_padding_mask=None), TypeError, r"key_padding\(~key_pad"),
        (lambda m: layer(kdim=M), TypeError, "'kdim'; it is memory_dim"),
        (lambda m: layer(vdim=M), TypeError, "'vdim'; .* vectors of memory_dim"),
        (lambda m: layer(batch_first=True), TypeError, r"'batch_first'; axes are always"),
        (lambda m: layer(bias=False), TypeError, "'bias'; it is use_bias"),
        (lambda m: layer(dropout=0.1), TypeError, "'dropout'; it is dropout_rate"),
        (lambda m: layer(drop=0.1), TypeError, r"unexpected keyword argument 'drop'\.$"),
        (
            lambda m: m(query=X, key=SOURCE, value=SOURCE),
            TypeError,
            r"'query'; .*\(query, key\) wh",
        ),
        (lambda m: m(X, key=SOURCE, value=SOURCE), TypeError, r"'key'; .*values_of=value"),
        (
            lambda m: m(X, SOURCE, SOURCE, None),
            TypeError,
            "x, memory, mask by position, and 4 came",
        ),
        (lambda m: m(), TypeError, r"MultiHeadAttention\(\): missing a required argument: 'x'\.$"),
        (lambda m: m(X, encoder_hidden_states=SOURCE), TypeError, "second argument, memory="),
        (lambda m: m(X, output_attentions=True), TypeError, "it is return_weights=True"),
        (
            lambda m: m(X, SOURCE, attention_mask=None),
            TypeError,
            r"key_padding\(attention_mask > 0",
        ),
        (lambda m: m(X, use_causal_mask=True), TypeError, r"masks\.causal\(\)"),
        (lambda m: m(X, SOURCE, deterministic=True), TypeError, "where it gets a dropout_key"),
        (lambda m: m.memory(SOURCE, key_padding_mask=None), TypeError, "valid=~key_padding_mask"),
        (
            lambda m: MultiHeadAttention(embed_dim=D, num_heads=4),
            TypeError,
            "'embed_dim'; it is dim",
        ),
        (
            lambda m: MultiHeadAttention(num_heads=4, key_dim=6),
            TypeError,
            "it is head_dim, and the",
        ),
        (lambda m: MultiHeadAttention(num_heads=4, in_features=D), TypeError, "it is dim"),
        (lambda m: MultiHeadAttention(D, 4), TypeError, r"lacks rngs; .*rngs=flax.nnx.Rngs\(0\)"),
        (lambda m: MultiHeadAttention(D, 4, 0.1), TypeError, "dim, num_heads by position, and 3"),
        (lambda m: xa.attend(query=HEADS[0], key=HEADS[1], value=HEADS[2]), TypeError, "it is q"),
        (
            lambda m: xa.attend(*HEADS, None, 0.1),
            TypeError,
            "q, k, v, mask by position, and 5 came",
        ),
        (lambda m: xa.attend(*HEADS, enable_gqa=True), TypeError, "fewer heads than q are shared"),
        (lambda m: block()(X, SOURCE), TypeError, r'write memories=\{"source": memory\}'),
        (lambda m: block()(X, memory=SOURCE), TypeError, r'memories=\{"source": memory\}'),
        (
            lambda m: block()(X, memory_mask=None),
            TypeError,
            'memory_masks={"source": mask}, True =',
        ),
    ],
)
def test_what_a_reader_of_pytorch_types_first_is_told_what_to_write(call, error, said):
    with pytest.raises(error, match=said) as refusal:
        call(layer())
    assert "\n" not in str(refusal.value)


def test_what_the_hint_says_is_attention_of_queries_keys_and_values():
    attention, values = layer(out_dim=32), normal(B, S, M, seed=2)
    found = attention(X, attention.memory(SOURCE, values_of=values))
    params = xa.functional.params_of(attention)
    q, k, v = (
        np.einsum("btd,dnh->btnh", y, params[name]["kernel"]) + params[name]["bias"]
        for name, y in (("query", X), ("key", SOURCE), ("value", values))
    )
    weights = oracle.softmax(np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(D // 4))
    mixed = np.einsum("bnts,bsnh->btnh", weights, v)
    expected = np.einsum("btnh,nhd->btd", mixed, params["out"]["kernel"]) + params["out"]["bias"]
    assert found.shape == (B, T, 32)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("size", [1, 32])
def test_a_residual_of_another_size_is_refused_in_one_line(size):
    """Size 1 would broadcast."""
    shape = BlockConfig.of(D, 4, 48)
    sublayer = Sublayer(layer(out_dim=size), Residual(shape, nnx.Rngs(0)), reads="source")
    with pytest.raises(ValueError, match=f"size {size} to x of size {D}; .*out_dim={D}") as refusal:
        Block(cross=sublayer)(X, memories={"source": SOURCE})
    assert "\n" not in str(refusal.value)


def test_a_equals_b_is_self_attention():
    attention = MultiHeadAttention(D, 4, rngs=nnx.Rngs(0))
    plain = attention(X, return_weights=True)
    for memory in (X, attention.memory(X)):
        for found, expected in zip(attention(X, memory, return_weights=True), plain, strict=True):
            np.testing.assert_array_equal(found, expected)
    other = attention(X, X[:, ::-1])
    np.testing.assert_allclose(other, plain[0], atol=2e-6)  # the order of a memory means nothing
    assert not np.allclose(attention(X, X + 1), plain[0], atol=1e-2)


def test_the_mask_dialects_of_pytorch_are_what_the_page_says():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(np.asarray(x)).swapaxes(1, 2) for x in HEADS)
    allowed = np.random.default_rng(3).random((T, S)) < 0.6
    allowed[:, 0] = True

    def scaled(mask):
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.tensor(mask))
        return found.swapaxes(1, 2).numpy()

    ours = xa.attend(*HEADS, jnp.asarray(allowed)[None, None])
    np.testing.assert_allclose(scaled(allowed), ours, atol=1e-5)
    bias = np.where(allowed, 0, -np.inf).astype(np.float32)
    np.testing.assert_allclose(scaled(bias), ours, atol=1e-5)
    ours = xa.attend(*HEADS, bias=jnp.asarray(bias)[None, None])
    np.testing.assert_allclose(scaled(bias), ours, atol=1e-5)

    theirs = torch.nn.MultiheadAttention(D, 4, batch_first=True)
    x = torch.tensor(np.asarray(X))
    hidden = np.arange(T) >= np.array([[T], [3]])  # True hides
    later = ~np.tri(T, dtype=bool)
    for name, given in (("key_padding_mask", hidden), ("attn_mask", later)):
        _, weights = theirs(x, x, x, average_attn_weights=False, **{name: torch.tensor(given)})
        shape = (B, 1, 1, T) if name == "key_padding_mask" else (T, T)
        zero = np.broadcast_to(given.reshape(shape), weights.shape)
        np.testing.assert_array_equal(weights.detach().numpy() == 0, zero)


def test_a_padding_mask_of_pytorch_is_turned_round():
    hidden = np.arange(S) >= np.array([[S], [3]])  # key_padding_mask: True hides
    keys = jnp.where(hidden[..., None, None], np.nan, HEADS[1])
    found = xa.attend(HEADS[0], keys, HEADS[2], xa.masks.key_padding(~hidden))
    for row, count in enumerate((S, 3)):
        q, k, v = (np.asarray(x[row]) for x in HEADS)
        logits = np.einsum("tnh,snh->nts", q, k[:count]) / np.sqrt(q.shape[-1])
        expected = np.einsum("nts,snh->tnh", oracle.softmax(logits), v[:count])
        np.testing.assert_allclose(found[row], expected, atol=1e-5)


def test_a_mask_of_minus_1e9_averages_a_row_that_may_read_nothing():
    """Added numbers that are not -inf are logits like any: every key is as far away."""
    allowed = np.ones((1, 1, T, S), bool)
    allowed[..., 2, :] = False
    finite = xa.attend(*HEADS, bias=jnp.where(allowed, 0.0, -1e9))
    np.testing.assert_allclose(finite[:, 2], HEADS[2].mean(1), atol=1e-6)
    for options in ({"mask": allowed}, {"bias": jnp.where(allowed, 0.0, -jnp.inf)}):
        found = xa.attend(*HEADS, **options)
        assert not found[:, 2].any()
        rest = [0, 1, 3, 4]
        np.testing.assert_allclose(found[:, rest], finite[:, rest], atol=1e-6)


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.float32])
def test_a_mask_of_0_and_1_is_refused_with_a_hint_wherever_it_is_given(kind):
    ones = np.ones((T, S), kind)
    said = r"\.astype\(bool\)|mask > 0"
    calls = (
        lambda: layer()(X, SOURCE, ones),
        lambda: layer()(X, layer().memory(SOURCE, valid=ones[:B])),
        lambda: xa.attend(*HEADS, ones[None, None]),
        lambda: xa.masks.key_padding(ones),
        lambda: xa.masks.causal() & ones,
    )
    for call in calls:
        with pytest.raises(ValueError, match=said) as refusal:
            call()
        assert "\n" not in str(refusal.value)


def test_returned_weights_are_those_before_dropout():
    attention = layer(dropout_rate=0.5)
    still, expected = attention(X, SOURCE, return_weights=True)
    out, weights = attention(X, SOURCE, dropout_key=jax.random.key(0), return_weights=True)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert not np.allclose(out, still, atol=1e-2)


@pytest.mark.parametrize("scan", [False, True])
def test_the_three_attentions_of_a_transformer_share_no_parameters(scan):
    config = transformer.tiny(encoder_layers=1, decoder_layers=1, scan=scan)
    build = lambda rngs: transformer.Transformer(config, rngs=rngs)  # noqa: E731
    flat = xa.functional.flatten(xa.init(build, jax.random.key(0)))
    parts = "encoder", "decoder"
    kernels = {
        path: x
        for path, x in flat.items()
        if path.startswith(parts) and path.endswith(("query.kernel", "key.kernel", "value.kernel"))
    }
    assert len(kernels) == 9 and {x.size for x in kernels.values()} == {32 * 32}
    whole = [np.ravel(x) for x in kernels.values()]
    assert all(not np.allclose(a, b) for i, a in enumerate(whole) for b in whole[:i])
