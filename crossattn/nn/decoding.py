"""The half of a model that generates: a stack of decoder blocks, for whole sequences and step by step.

The encoder-decoder and the decoder-only model share it; the latter has no ``memory_dim``. Any other period of
blocks is decoded as well, gated ones and ones without self-attention among them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.functional import Build
from crossattn.nn.blocks import DecoderBlock
from crossattn.nn.inputs import PositionScheme
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.stack import Stack, layer_weights
from crossattn.nn.states import CachedStates, by_row
from crossattn.nn.sublayers import BlockConfig
from crossattn.ops import beams, masks
from crossattn.types import Array, Float, Int, Key


class DecoderStack(nnx.Module):
    """Decoder blocks, their position bias and their final norm.

    Args:
      config: shape of the blocks.
      num_layers: L; of a period of several blocks, how often it is repeated.
      memory_dim: size of the source's vectors; None for a decoder without a source.
      build: makes a ``Block`` from ``nnx.Rngs``, or several such for a period of unlike blocks, which may
        read any memories; None is a ``DecoderBlock`` of ``config`` and ``memory_dim``.
      positions: position scheme of the self-attention.
      window: how many positions a token reads, its own among them; None is all before it.
      share, scan, remat: see ``Stack``.

    Raises:
      ValueError: as ``Stack`` does; or there are both ``build`` and ``memory_dim``.
    """

    def __init__(
        self,
        config: BlockConfig,
        num_layers: int,
        *,
        memory_dim: int | None = None,
        build: Build | Sequence[Build] | None = None,
        positions: PositionScheme,
        window: int | None = None,
        share: bool = False,
        scan: bool = False,
        remat: bool | str = False,
        rngs: nnx.Rngs,
    ):
        if build is not None and memory_dim is not None:
            raise ValueError(
                f"got build and memory_dim {memory_dim}, which is of the blocks that are built without one; "
                "leave memory_dim out."
            )
        if build is not None and not callable(build) and len(build) == 1:
            [build] = build
        self.stack = Stack(
            build or (lambda rngs: DecoderBlock(config, memory_dim, rngs=rngs)),
            num_layers,
            share=share,
            scan=scan,
            remat=remat,
            rngs=rngs,
        )
        self.before = None if window is None else window - 1
        self.bias = config.position_bias(positions, rngs, bidirectional=False)
        self.norm = config.normalise(rngs) if config.norm_first else None

    @on_any_mesh
    def read(self, **memories: Any) -> Any:
        """Each layer's memory of what it reads, projected once: ``Encoded`` or vectors [*B S M], by name.

        Raises:
          ValueError: no layer reads a memory of that name.
        """
        self._check_read(memories)
        return self.stack.map(lambda block: block.read(memories))

    def prefill(
        self, states: Any, batch: int, num_beams: int, cache_length: int, context: Any = None
    ) -> CachedStates:
        """Decoding states of these layer states, with an empty cache in each layer with self-attention.

        The sequences of a row share it: [B (cache_length * num_beams) K H].

        Args:
          context: what ``embed`` and ``memory_masks`` of ``decode`` need of each row, arrays [B ...].
        """
        size = cache_length * num_beams
        pairs = zip(self.stack.looped(states), self.stack.blocks(), strict=True)
        layers = tuple(replace(s, cache=block.cache((batch,), size)) for s, block in pairs)
        return CachedStates.empty(layers, batch, num_beams, cache_length, context)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        states: Any,
        key: Key[Array, ""] | None = None,
        *,
        segment_ids: Int[Array, "*B T"] | None = None,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        memory_masks: Mapping[str, Any] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        condition: Float[Array, "*B C"] | None = None,
        capture: Collection[str] = (),
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Whole sequences at once (states without caches).

        Args:
          x: [*B T D].
          states: what ``read`` gives.
          key: turns dropout on.
          segment_ids: of the texts packed into a row; 0 is padding.
          source_segment_ids: of the memory ``source``.
          memory_masks: of any other, by name, on top of the validity of what is read.
          positions: None is ``arange``.
          condition, capture: see ``Block``; ``reading`` names the weights that ``layer_weights`` gives.

        Raises:
          ValueError: there is a mask of a memory that no layer reads; or as ``Block`` does.
        """
        T = x.shape[-2]
        mask = masks.window(self.before)
        source_mask = None
        self._check_read(memory_masks or {})
        if source_segment_ids is not None:
            source_mask = masks.key_padding(source_segment_ids > 0)
        if segment_ids is not None:
            mask = mask & masks.segments(segment_ids)
            if source_segment_ids is not None:
                source_mask = masks.segments(segment_ids, source_segment_ids)
        positions = jnp.arange(T) if positions is None else positions
        x, states = self.stack(
            x,
            states,
            key,
            mask=mask,
            memory_masks=dict(memory_masks or {})
            | ({} if source_mask is None else {"source": source_mask}),
            positions=positions,
            bias=self.bias(positions, positions),
            condition=condition,
            capture=capture,
        )
        return x if self.norm is None else self.norm(x), states

    @on_any_mesh
    def decode(
        self,
        embed: Callable[[Int[Array, "B J T"], Int[Array, "..."], Any], Float[Array, "B J T D"]],
        tokens: Int[Array, "B J T"],
        states: CachedStates,
        *,
        memory_masks: Callable[[Int[Array, "*B T"], Any], Mapping[str, Array]] | None = None,
        condition: Callable[[Any], Float[Array, "B C"]] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The next T positions of each sequence, through the caches: vectors [B J T D], and states.

        With ``return_weights``, the weights [L B J N T S] of the L layers that read a memory too.

        Args:
          embed: makes vectors of tokens, of the positions [T] or [B 1 T] at which they stand in their row's
            text, and of the ``context`` of the states.
          tokens: [B J T].
          states: of ``prefill``.
          memory_masks: makes masks [B 1 T S] of memories, by name, of the positions [T] or [B T] at
            which tokens stand in their row's text, and of the ``context`` of the states.
          condition: makes the blocks' of the ``context`` of the states.
          return_weights: which to return.

        Raises:
          ValueError: weights are asked for where no layer reads a memory.
        """
        capture = self.reading() if return_weights else ()
        run = partial(self._decode, embed, memory_masks, condition, capture)
        decoded = by_row(run, tokens, states) if states.positions.ndim else run(tokens, states)
        return decoded if return_weights else decoded[:2]

    def _kinds(self) -> list[Any]:
        """A block of each kind."""
        layers = self.stack.layers
        return list(layers) if isinstance(layers, nnx.List) else [layers]

    def reading(self) -> tuple[str, ...]:
        """What to ``capture`` for the weights with which layers read memories.

        Raises:
          ValueError: no layer reads a memory.
        """
        last = [list(block.readers)[-1] for block in self._kinds() if block.readers]
        if not last:
            raise ValueError(
                "return_weights asks for cross-attention, but this decoder reads no memory; leave it out."
            )
        return tuple(f"{name}.weights" for name in last)

    def _check_read(self, memories: Mapping[str, Any]) -> None:
        names = {name for block in self._kinds() for name in block.readers.values()}
        if unread := [name for name in memories if name not in names]:
            raise ValueError(
                f"got the memory {unread[0]!r}, which no layer reads; expected of "
                f"{', '.join(sorted(names)) or 'none'}."
            )

    def _decode(
        self,
        embed: Any,
        memory_masks: Any,
        condition: Any,
        capture: Collection[str],
        tokens: Array,
        states: CachedStates,
    ) -> Any:
        """All rows stand at the same position."""
        (J, T), X = tokens.shape[-2:], states.cache_length
        token_positions = states.token_positions(T)
        x = embed(tokens, token_positions, states.context)
        read = {}
        if memory_masks is not None:
            rows = token_positions.reshape(-1, T) if token_positions.ndim > 1 else token_positions
            read = memory_masks(rows, states.context)
            # Queries are folded: all beams of a position, then those of the next.
            read = {name: jnp.repeat(allowed, J, axis=-2) for name, allowed in read.items()}
        positions = jnp.asarray(states.positions) + jnp.arange(T)
        mask = masks.window(self.before, offset=states.positions)
        bias = self.bias(positions, jnp.arange(X))
        if states.padding is not None:
            mask = mask & masks.key_padding(jnp.arange(X) >= states.padding[:, None])
        if states.ancestors is not None:
            mask, bias = beams.fold_mask(mask, bias, states.ancestors, T)
        x, layers = self.stack(
            beams.fold(x),
            states.growing(),
            None,
            mask=mask,
            memory_masks=read,
            positions=jnp.repeat(positions, J),
            bias=bias,
            condition=None if condition is None else condition(states.context),
            capture=capture,
        )
        x = beams.unfold(x if self.norm is None else self.norm(x), J)
        weights = layer_weights(layers)
        weights = None if weights is None else beams.unfold_weights(weights, J)
        return x, states.grown(layers, T), weights


class Autoregressive(nnx.Module):
    """A model that generates, of ``target_input``, ``decoder`` and ``output``.

    They are a ``TokenInput``, a ``DecoderStack`` and a ``TokenOutput``.

    A model also has ``prefill(batch, num_beams, cache_length, *, lookahead=0, ...)``, which reads once what
    it reads besides its own tokens, and gives states with empty caches:

      batch: rows, B.
      num_beams: sequences a row, J.
      cache_length: the most tokens of each that are read, prefix and generated ones together.
      lookahead: further positions, for guesses beyond them that are not kept.
    """

    target_input: Any
    decoder: Any
    output: Any
    seen: Any = None
    """Masks of memories, see ``memory_masks`` of ``DecoderStack.decode``."""

    @property
    def longest(self) -> tuple[int | None, int | None]:
        """The most tokens of what is read, and of what is generated, with positions; None is any number."""
        return None, self.target_input.longest

    def embed(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*#B T"] | None, context: Any = None
    ) -> Float[Array, "*B T D"]:
        """Vectors of the next tokens, at these positions of rows with this ``context`` of their states."""
        return self.target_input(tokens, positions)

    @on_any_mesh
    def decode_hidden(
        self, tokens: Int[Array, "B J T"], states: Any, *, return_weights: bool = False
    ) -> Any:
        """``decode_step`` before its output layer: the vectors [B J T D] that predict the next tokens."""
        return self.decoder.decode(
            self.embed,
            tokens,
            states,
            memory_masks=self.seen,
            return_weights=return_weights,
        )

    @on_any_mesh
    def decode_step(
        self, tokens: Int[Array, "B J T"], states: Any, *, return_weights: bool = False
    ) -> Any:
        """Logits [B J T V] after the next T tokens of each sequence, and the states that have read them.

        With ``return_weights``, the weights [L B J N T S] of cross-attention too.
        """
        hidden, *rest = self.decode_hidden(tokens, states, return_weights=return_weights)
        return self.logits(hidden), *rest

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B T D"]) -> Float[Array, "*B T V"]:
        """Logits of the token after each of ``hidden``'s vectors, float32: the output layer alone."""
        return self.output.logits(hidden, self.target_input.embedding)

    def output_table(self) -> Float[Array, "V D"]:
        """The output layer's weights, one row a token, where it has nothing else."""
        return self.output.rows(self.target_input.embedding)

    def output_product(
        self, hidden: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T E"], Float[Array, "V E"]]:
        """Vectors and a table whose product ``logits`` is, for losses that fuse it with the softmax."""
        return self.output.product(hidden, self.target_input.embedding)

    def _filled(
        self,
        layers: Any,
        batch: int,
        num_beams: int,
        cache_length: int,
        lookahead: int,
        context: Any = None,
    ) -> CachedStates:
        """What ``prefill`` gives, of layers that have read what they read."""
        self.target_input.check(cache_length)
        return self.decoder.prefill(layers, batch, num_beams, cache_length + lookahead, context)


__all__ = ["Autoregressive", "DecoderStack"]
