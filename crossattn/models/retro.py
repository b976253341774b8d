"""RETRO: a language model whose chunks read passages that were retrieved for the text before them.

    text       chunk C_0  ..        chunk C_1  ..        chunk C_2  ..      m tokens each
                    │ retrieval          │ retrieval
                    ▼                    ▼
    passages   N_0 [K R]            N_1 [K R]         K neighbours of R tokens, each encoded with its chunk
                    │ encoder            │ encoder
                    └───── keys, ─┐      └───── keys, ─┐
                           values ▼             values ▼
    x ─► embed ─► plain blocks, RETRO blocks with chunked cross-attention (CCA) ─► norm ─► logits
         the last token of C_u and all of C_u+1 but its last read E_u; those of C_0 before its last, nothing

    e <- e + Attend(LN e, LN e); e <- e + Attend(LN e, C_u); e <- e + MLP(LN e);   E_u = LN e    encoder
    y <- y + Attend(LN y, LN y, causal);                     y <- y + MLP(LN y)                  plain
    y <- y + Attend(LN y, LN y, causal); y <- y + CCA(LN y, E); y <- y + MLP(LN y)               RETRO

The last token of a chunk reads what was retrieved for the chunk, because it predicts a token of the next one:
what a token reads depends on no later token. Without neighbours, CCA adds exactly 0, and the model is its
``Decoder``.

The encoder reads the embeddings of a chunk, the paper's the decoder's activations at the first RETRO block.
So neighbours are encoded as soon as they are found, before the decoder runs.

Source: Borgeaud et al. 2022, "Improving Language Models by Retrieving from Trillions of Tokens", section 2.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.functional import Build
from crossattn.models import decoder
from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.models.transformer import with_positions
from crossattn.nn.blocks import Block
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import logits_of
from crossattn.nn.stack import Stack, layer_weights
from crossattn.nn.states import CachedStates, check_rows
from crossattn.nn.sublayers import BlockConfig, Sublayer, split
from crossattn.ops import masks
from crossattn.types import AnyArray, Array, Count, Float, Int, Key


@dataclass(frozen=True)
class RetroConfig(DecoderConfig):
    """The shape of a RETRO: of its language model, and of what it retrieves.

    Attributes:
      chunk: tokens of a chunk, m.
      neighbours: passages of a chunk, K, for which decoding has room.
      neighbour_len: tokens of a passage, R, for which decoding has room.
      interval: blocks of the language model per block that reads neighbours, the last of each period.
      encoder_layers: depth of the encoder of neighbours, with the size of the language model's blocks.
    """

    chunk: Count = 64
    neighbours: Count = 2
    neighbour_len: Count = 128
    interval: Count = 2
    encoder_layers: Count = 2


def tiny(**changes: Any) -> RetroConfig:
    """Returns a small configuration for tests."""
    own = dict[str, Any](chunk=2, neighbours=2, neighbour_len=4, encoder_layers=1)
    return replace(RetroConfig(**vars(decoder.tiny()), **own), **changes)


def example(config: RetroConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 5, config.vocab_size, padding)
    count, K, R = 5 // config.chunk, config.neighbours, config.neighbour_len
    found, _ = texts(rows, count * K * R, config.vocab_size)
    chunks, _ = texts(rows, count * config.chunk, config.vocab_size)
    found = found.reshape(rows, count, K, R)
    found[:, :, -1, R // 2 :] = 0  # a short passage
    return dict(
        tokens=tokens,
        neighbours=found,
        chunks=chunks.reshape(rows, count, -1),
        segment_ids=segment_ids,
    )


class Retro(Decoder):
    """Tokens and the neighbours of their chunks in, logits of the next token out.

    Raises:
      ValueError: ``interval`` does not divide the layers, or ``memory_dim`` is given.
    """

    def __init__(self, config: RetroConfig, *, rngs: nnx.Rngs):
        block = with_positions(config.block, config.positions)
        super().__init__(config, build=_period(config, block), rngs=rngs)
        self.chunk, self.dim = config.chunk, block.dim
        self.room = config.neighbours, config.neighbour_len
        self.encoder = Stack(_reader(block), config.encoder_layers, rngs=rngs)
        self.encoder_bias = block.position_bias(config.positions, rngs, bidirectional=True)
        self.encoder_norm: Any = block.normalise(rngs) if block.norm_first else None

    @on_any_mesh
    def encode(
        self,
        chunks: Int[AnyArray, "B C m"],
        neighbours: Int[AnyArray, "B C K R"],
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes the neighbours of each chunk to vectors [B C K R D]; token 0 is padding.

        Raises:
          ValueError: chunks and neighbours have unlike axes, or a chunk not ``chunk`` tokens.
        """
        chunks, neighbours = jnp.asarray(chunks), jnp.asarray(neighbours)
        _check(chunks, neighbours, self.chunk)
        keys = split(key, 3)
        (*lead, K, R), m = neighbours.shape, self.chunk
        x = self.input(neighbours.reshape(-1, R), None, keys[0])
        asked = jnp.repeat(self.input(chunks.reshape(-1, m), None, keys[1]), K, axis=0)
        valid = neighbours > 0
        places = jnp.arange(R)
        x, _ = self.encoder(
            x,
            key=keys[2],
            memories={"chunk": asked},
            mask=masks.key_padding(valid.reshape(-1, R)),
            positions=places,
            bias=self.encoder_bias(places, places),
        )
        x = x if self.encoder_norm is None else self.encoder_norm(x)
        return Encoded(x.reshape(*lead, K, R, self.dim), valid)

    @on_any_mesh
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        neighbours: Int[AnyArray, "rows C K R"] | None = None,
        chunks: Int[AnyArray, "rows C m"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes the last vectors, before the output layer, and the weights on neighbours if asked for.

        Args:
          tokens: [B T], from position 0 on.
          neighbours: tokens of the passages of each chunk, 0 for padding and for no passage. Those of chunks
            after the last whole one of ``tokens`` are not read; chunks without any read nothing.
          chunks: the text for which they were retrieved; None is that of ``tokens``.
          segment_ids: 0 for padding.
          key: turns dropout on.
          return_weights: return the weights [L B N T (K R)] of the L blocks that read neighbours too.

        Raises:
          ValueError: as ``encode`` does, or rows differ in number.
        """
        keys, (B, T) = split(key, 3), tokens.shape
        count = max(T // self.chunk, 1)
        if neighbours is None:
            neighbours, chunks = jnp.zeros((B, count, *self.room), jnp.int32), None
        check_rows("neighbours", neighbours, B)
        if chunks is None:
            chunks = _fit(tokens, count * self.chunk).reshape(B, count, self.chunk)
        else:
            chunks = _fit(chunks, count)
        encoded = self.encode(chunks, _fit(neighbours, count), keys[2])
        x, states = self.decoder(
            self.input(tokens, None, keys[0]),
            self.decoder.read(neighbours=encoded),
            keys[1],
            segment_ids=segment_ids,
            positions=jnp.arange(T) if T < self.chunk else None,  # no whole chunk
            capture=self.decoder.reading() if return_weights else (),
        )
        return (x, layer_weights(states)) if return_weights else x

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [B T V] of the token after each of ``tokens``; the arguments of ``hidden``."""

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        neighbours: Int[AnyArray, "rows C K R"] | None = None,
        chunks: Int[AnyArray, "rows C m"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states with room for neighbours; for the other arguments see ``Autoregressive``.

        All sequences of a row read the same neighbours, so that retrieval as a text goes on, ``retrieved``,
        wants one sequence a row.

        Args:
          neighbours, chunks: of the first chunks, such as a prompt's, and the text for which they were
            retrieved.

        Raises:
          ValueError: one of the two is given alone, or as ``encode`` does.
        """
        if (neighbours is None) != (chunks is None):
            raise ValueError("got one of neighbours and chunks; expected both, or none.")
        count, room = max(cache_length // self.chunk, 1), self.room
        if neighbours is None or chunks is None:
            encoded = Encoded.empty((batch, count, room[0]), room[1], self.dim)
        else:
            check_rows("neighbours", neighbours, batch)
            count = max(count, neighbours.shape[1])
            encoded = self.encode(_fit(chunks, count), _fit(neighbours, count))
        layers = self.decoder.read(neighbours=encoded)
        return self._filled(layers, batch, num_beams, cache_length, lookahead)

    @on_any_mesh
    def retrieved(
        self,
        states: CachedStates,
        number: Int[AnyArray, "..."] | int,
        chunk: Int[AnyArray, "B m"],
        neighbours: Int[AnyArray, "B K R"],
    ) -> CachedStates:
        """Returns states whose later tokens read the neighbours of the chunk of this number, [] or [B].

        The tokens before the chunk's last one are in the states, and the last one is not.

        Raises:
          ValueError: as ``encode`` does, or the states have no room.
        """
        chunk, neighbours = jnp.asarray(chunk), jnp.asarray(neighbours)
        encoded = self.encode(chunk[:, None], neighbours[:, None])
        return self.decoder.reread(states, chunk=number, neighbours=encoded)

    @on_any_mesh
    def mass(
        self,
        tokens: Int[Array, "B T"],
        neighbours: Int[AnyArray, "B C K R"],
        chunks: Int[AnyArray, "rows C m"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T K"]:
        """Computes the share of attention that each token gives to each passage of its chunk.

        Shares are means over heads and over blocks that read neighbours, and add up to 1; or to 0 where a
        token reads no passage. They say what is read, not what is used: on planted passages the one with
        most mass is the one whose absence costs most at 52 to 77 % of places, where that with the greatest
        ``analysis.scores.passage_slopes`` is at 99 %.
        """
        given = dict[str, Any](neighbours=neighbours, chunks=chunks, segment_ids=segment_ids)
        _, weights = self.hidden(tokens, **given, return_weights=True)
        K, R = neighbours.shape[-2:]
        return weights.mean((0, 2)).reshape(*tokens.shape, K, R).sum(-1)


def _check(chunks: Any, neighbours: Any, size: int) -> None:
    if chunks.shape[:2] != neighbours.shape[:2] or chunks.shape[2] != size:
        raise ValueError(
            f"chunks have shape {chunks.shape} and their neighbours {neighbours.shape}; expected "
            f"[B C {size}] and [B C K R], of the same rows and chunks."
        )


def _fit(x: AnyArray, count: int) -> Array:
    """Cuts axis 1 to ``count``, or fills it up with 0."""
    x = jnp.asarray(x[:, :count])
    return jnp.pad(x, [(0, 0), (0, count - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _reader(block: BlockConfig) -> Build:
    """Makes a build of a block in which a neighbour reads itself and its chunk."""
    return lambda rngs: Block(
        attention=block.self_attention(rngs),
        cross=block.cross_attention(rngs, memory_dim=block.dim, reads="chunk"),
        feedforward=block.feedforward(rngs),
    )


def _period(config: RetroConfig, block: BlockConfig) -> list[Build]:
    """Makes builds of ``interval - 1`` plain blocks and a RETRO block, with the names of a ``Decoder``'s."""

    def built(rngs: nnx.Rngs, reads: bool) -> Block:
        parts: dict[str, Sublayer] = dict(attention=block.self_attention(rngs, causal=True))
        if reads:
            parts["chunked"] = block.chunked_attention(
                rngs, chunk=config.chunk, memory_dim=block.dim, relative=True
            )
        parts["feedforward"] = block.feedforward(rngs)
        return Block(scope="decoder_attention", **parts)

    plain, retro = (lambda rngs: built(rngs, False)), (lambda rngs: built(rngs, True))
    return [*[plain] * (config.interval - 1), retro]
