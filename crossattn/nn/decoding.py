"""The decoder of a model: a stack of decoder blocks, for whole sequences and step by step.

The encoder-decoder and the decoder-only model share it; the latter has no ``memory_dim``. It decodes any
period of blocks, also of gated ones and of ones without self-attention.
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
from crossattn.types import Array, Float, Int, Key, Shaped


class DecoderStack(nnx.Module):
    """Decoder blocks, their position bias and their final norm.

    Args:
      config: shape of the blocks.
      num_layers: L; the number of repeats for a period of several blocks.
      memory_dim: size of the source's vectors; None for a decoder without a source.
      build: makes a ``Block`` from ``nnx.Rngs``, or several such for a period of unlike blocks, which may
        read any memories; None is a ``DecoderBlock`` of ``config`` and ``memory_dim``.
      positions: the scheme. "relative" and "alibi" add a bias here, and "rope" rotates in blocks with a
        ``rope_base``; vectors of the others are not added here, but by the ``TokenInput`` of the model.
      weights_of: name of the memory whose weights ``return_weights``, captures, coverage and policies see;
        None where the blocks read one memory.
      window: the number of positions that a token reads, with its own; None is unlimited.
      share, scan, remat: see ``Stack``.

    Raises:
      ValueError: as ``Stack`` does; both ``build`` and ``memory_dim`` are given; there is no such scheme, or
        blocks of "rope" do not rotate; or no block reads the memory ``weights_of``.
    """

    def __init__(
        self,
        config: BlockConfig,
        num_layers: int,
        *,
        memory_dim: int | None = None,
        build: Build | Sequence[Build] | None = None,
        positions: PositionScheme,
        weights_of: str | None = None,
        window: int | None = None,
        share: bool = False,
        scan: bool = False,
        remat: bool | str = False,
        rngs: nnx.Rngs,
    ):
        if build is not None and memory_dim is not None:
            raise ValueError(
                f"got build and memory_dim {memory_dim}, which only the default blocks take; leave "
                "memory_dim out."
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
        self.weights_of = weights_of
        if weights_of is not None and weights_of not in (read := self._memories):
            raise ValueError(
                f"weights_of is {weights_of!r}, which no block reads; expected of "
                f"{', '.join(read) or 'none'}."
            )

    @on_any_mesh
    def read(self, **memories: Any) -> Any:
        """Projects memories for each layer that reads them: ``Encoded`` or vectors [*B S M], by name.

        Raises:
          ValueError: no layer reads a memory of that name.
        """
        read = self._memories
        if unread := [name for name in memories if name not in read]:
            raise ValueError(
                f"got the memory {unread[0]!r}, which no layer reads; expected of "
                f"{', '.join(read) or 'none'}."
            )
        return self.stack.map(lambda block: block.read(memories))

    def prefill(
        self, states: Any, batch: int, num_beams: int, cache_length: int, context: Any = None
    ) -> CachedStates:
        """Makes decoding states of layer states, with an empty cache in each layer with self-attention.

        The sequences of a row share their cache, [B (cache_length * num_beams) K H].

        Args:
          context: arrays [B ...] for ``embed``, ``memory_masks`` and ``condition`` of ``decode``.
        """
        size = cache_length * num_beams
        pairs = zip(self.stack.looped(states), self.stack.blocks(), strict=True)
        layers = tuple(replace(s, cache=block.cache((batch,), size)) for s, block in pairs)
        states = CachedStates.empty(layers, batch, num_beams, cache_length, context)
        return replace(states, watched=tuple(sorted(self._watched())))

    @on_any_mesh
    def reread(self, states: CachedStates, *, chunk: Any = None, **memories: Any) -> CachedStates:
        """Reads memories between steps of decoding: ``Encoded`` or vectors, by name.

        Args:
          states: of ``prefill`` or ``decode``.
          chunk: number of the chunk from which on neighbours [B C K R M] are written into those of the
            states, [] or one a row, [B]; it may be traced, and the states keep their shapes. None replaces
            whole memories, also by ones of other lengths.

        Raises:
          ValueError: no layer reads a memory of that name, or the states have no room for its chunks.
        """
        return states.with_memories(self.stack.looped(self.read(**memories)), chunk)

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
        """Runs all layers on whole sequences (states without caches).

        Args:
          x: [*B T D].
          states: of ``read``.
          key: turns dropout on.
          segment_ids: of the texts packed into a row; 0 is padding.
          source_segment_ids: of the memory ``source``.
          memory_masks: of other memories, by name, besides their padding masks.
          positions: None is ``arange``. Sublayers ``by_position`` count chunks by them, of one text a row.
          condition, capture: see ``Block``; ``reading`` names the weights that ``layer_weights`` gives.

        Raises:
          ValueError: as ``Stack`` does.
        """
        T = x.shape[-2]
        mask = masks.window(self.before)
        source_mask = None
        if source_segment_ids is not None:
            source_mask = masks.key_padding(source_segment_ids > 0)
        if segment_ids is not None:
            mask = mask & masks.segments(segment_ids)
            if source_segment_ids is not None:
                source_mask = masks.segments(segment_ids, source_segment_ids)
        placed = {}
        if positions is not None and self._by_position:
            placed["text_positions"] = positions
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
            **placed,
        )
        return x if self.norm is None else self.norm(x), states

    @on_any_mesh
    def decode(
        self,
        embed: Callable[
            [Shaped[Array, "B J T *F"], Int[Array, "..."], Any], Float[Array, "B J T D"]
        ],
        tokens: Shaped[Array, "B J T *F"],
        states: CachedStates,
        *,
        memory_masks: Callable[[Int[Array, "*B T"], Any], Mapping[str, Array]] | None = None,
        condition: Callable[[Any], Float[Array, "B C"]] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Runs the next T positions of each sequence through the caches: vectors [B J T D], and states.

        With ``return_weights``, the weights [L B J N T S] of the L layers that read a memory too.

        Args:
          embed: makes vectors of tokens, their positions [T] or [B 1 T] in their row's text, and the
            ``context`` of the states.
          tokens: [B J T]; or frames [B J T *F], whatever ``embed`` takes.
          states: of ``prefill``.
          memory_masks: makes masks [B 1 T S] of memories, by name, of the tokens' positions [T] or [B T] in
            their row's text, and of the ``context`` of the states.
          condition: makes the blocks' condition of the ``context`` of the states.
          return_weights: return the weights too.

        Raises:
          ValueError: weights are asked for where no layer reads a memory.
        """
        capture = self.reading() if return_weights else ()
        run = partial(self._decode, embed, memory_masks, condition, capture)
        decoded = by_row(run, tokens, states) if states.positions.ndim else run(tokens, states)
        return decoded if return_weights else decoded[:2]

    def reading(self) -> tuple[str, ...]:
        """Returns the names to ``capture`` for the weights with which layers read their memory.

        Raises:
          ValueError: no layer reads a memory; or layers read several, and none is named, ``weights_of``.
        """
        if not (memories := self._memories):
            raise ValueError(
                "return_weights asks for cross-attention, but this decoder reads no memory; leave it out."
            )
        if self.weights_of is None and len(memories) > 1:
            raise ValueError(
                "return_weights, capture or coverage asks for cross-attention, and this decoder reads the "
                f"memories {', '.join(memories)}; give DecoderStack weights_of= one of them."
            )
        return tuple(f"{name}.weights" for name in self._watched())

    @property
    def _memories(self) -> list[str]:
        """The names of the memories that layers read."""
        return sorted({name for block in self.stack.kinds() for name in block.readers.values()})

    def _watched(self) -> list[str]:
        """Returns the last sublayer of each kind of block that reads the memory ``weights_of``."""
        each = (
            [name for name, read in block.readers.items() if self.weights_of in (None, read)]
            for block in self.stack.kinds()
        )
        return list(dict.fromkeys(own[-1] for own in each if own))

    @property
    def _by_position(self) -> bool:
        """Whether a layer reads a memory by the positions of the tokens in their text."""
        return any(block.by_position for block in self.stack.kinds())

    def _decode(
        self,
        embed: Any,
        memory_masks: Any,
        condition: Any,
        capture: Collection[str],
        tokens: Array,
        states: CachedStates,
    ) -> Any:
        """Decodes rows that are all at the same position."""
        (J, T), X = tokens.shape[1:3], states.cache_length
        token_positions = states.token_positions(T)
        x = embed(tokens, token_positions, states.context)
        rows, read, placed = token_positions, {}, {}
        if rows.ndim > 1 and (memory_masks is not None or self._by_position):
            rows = rows.reshape(-1, T)
        if memory_masks is not None:
            read = memory_masks(rows, states.context)
            # Queries are folded: all beams of a position, then those of the next.
            read = {name: jnp.repeat(allowed, J, axis=-2) for name, allowed in read.items()}
        if self._by_position:
            placed["text_positions"] = jnp.repeat(rows, J, axis=-1)
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
            **placed,
        )
        x = beams.unfold(x if self.norm is None else self.norm(x), J)
        weights = layer_weights(layers)
        weights = None if weights is None else beams.unfold_weights(weights, J)
        return x, states.grown(layers, T), weights


class Autoregressive(nnx.Module):
    """A model that generates, of a ``TokenInput``, a ``DecoderStack`` and a ``TokenOutput``.

    A model also has ``prefill(batch, num_beams, cache_length, *, lookahead=0, ...)``, which encodes its
    source, if it has one, and returns states with empty caches:

      batch: rows, B.
      num_beams: sequences a row, J.
      cache_length: the largest number of tokens of a sequence, with its prefix.
      lookahead: further positions, for drafted tokens that may be rejected.
    """

    target_input: Any
    decoder: Any
    output: Any
    seen: Any = None
    """Makes masks of memories, see ``memory_masks`` of ``DecoderStack.decode``."""

    @property
    def longest(self) -> tuple[int | None, int | None]:
        """The largest numbers of source and target tokens that have positions; None is unlimited."""
        return None, self.target_input.longest

    def embed(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*#B T"] | None, context: Any = None
    ) -> Float[Array, "*B T D"]:
        """Embeds the next tokens, at these positions of rows with this ``context`` of their states."""
        return self.target_input(tokens, positions)

    @on_any_mesh
    def decode_hidden(
        self, tokens: Shaped[Array, "B J T *F"], states: Any, *, return_weights: bool = False
    ) -> Any:
        """Computes the vectors [B J T D] of ``decode_step`` before its output layer, and the new states."""
        return self.decoder.decode(
            self.embed,
            tokens,
            states,
            memory_masks=self.seen,
            return_weights=return_weights,
        )

    @on_any_mesh
    def decode_step(
        self, tokens: Shaped[Array, "B J T *F"], states: Any, *, return_weights: bool = False
    ) -> Any:
        """Computes logits [B J T V] after the next T tokens of each sequence, and the new states.

        With ``return_weights``, the weights [L B J N T S] of cross-attention too.
        """
        hidden, *rest = self.decode_hidden(tokens, states, return_weights=return_weights)
        return self.logits(hidden), *rest

    @on_any_mesh
    def logits(self, hidden: Any) -> Float[Array, "*B T V"]:
        """Applies the output layer to what ``decode_hidden`` gives: logits of the next token, float32."""
        return self.output.logits(hidden, self.target_input.embedding)

    def output_table(self) -> Float[Array, "V D"]:
        """Returns the weights of an output layer that has no other parameters, one row a token."""
        return self.output.rows(self.target_input.embedding)

    def output_product(
        self, hidden: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T E"], Float[Array, "V E"]]:
        """Returns vectors and a table, the factors of ``logits``, for losses fused with the softmax."""
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
        """Makes the states of ``prefill`` from layer states."""
        self.target_input.check(cache_length)
        return self.decoder.prefill(layers, batch, num_beams, cache_length + lookahead, context)
