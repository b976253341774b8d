"""The decoder-only language model (the GPT shape): the decoder's blocks, as a rule without cross-attention.

    tokens [T] ─► embed, + positions ─► y ─► layers of masked self-attention ─► norm ─► logits
    vectors [S E], with a ``memory_dim`` ───────┘ keys, values of cross-attention

    y <- y + Attend(LN y, LN y, causal);  (y <- y + Attend(LN y, vectors);)  y <- y + MLP(LN y)      pre-norm
    y <- LN(y + Attend(y, y, causal));  (y <- LN(y + Attend(y, vectors));)  y <- LN(y + MLP(y))      post-norm

Pre-norm is GPT-2's, with a norm after the last layer; post-norm (``norm_first=False``, no norm after the last
layer) is GPT's, and that of a BERT as a decoder.

A ``memory_dim`` adds cross-attention to vectors of any encoder. A block with ``num_persistent`` vectors and
without a feed-forward network, ``mlp_dim`` None, makes the all-attention decoder of Sukhbaatar et al. 2019.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.3;
Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training" (GPT), section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from crossattn.functional import Build
from crossattn.models.transformer import with_positions
from crossattn.nn.decoding import Autoregressive, DecoderStack
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts, vectors
from crossattn.nn.inputs import InputConfig, PositionScheme, TokenInput
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import OutputConfig, TokenOutput, logits_of
from crossattn.nn.stack import layer_weights
from crossattn.nn.states import CachedStates, check_rows
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.types import Array, Count, Float, Int, Key


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only model.

    Attributes:
      vocab_size: V.
      block: shape of every block.
      layers: depth, L.
      positions: position scheme.
      max_length: the longest sequence; a hard limit for the "learned" scheme only.
      window: the number of positions that a token reads, with its own; None is unlimited.
      tie_output: the output layer is the embedding table.
      memory_dim: size of the vectors that cross-attention reads; None is no cross-attention.
      input: embeddings.
      output: options of the output layer besides its table.
      scan: scan over layers instead of looping.
      remat: recompute activations in the backward pass; see ``Stack`` for policies by name.
    """

    vocab_size: int
    block: BlockConfig
    layers: Count
    positions: PositionScheme = "learned"
    max_length: int = 512
    window: Count | None = None
    tie_output: bool = True
    memory_dim: int | None = None
    input: InputConfig = InputConfig()
    output: OutputConfig = OutputConfig()
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> DecoderConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64, activation="gelu")
    return replace(DecoderConfig(vocab_size=64, block=block, layers=2, max_length=64), **changes)


def example(config: DecoderConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 5, config.vocab_size, padding)
    given: dict[str, Any] = dict(tokens=tokens, segment_ids=segment_ids)
    if config.memory_dim is not None:
        given["memory"] = vectors(rows, 4, config.memory_dim, padding=padding)
        given["memory_segment_ids"] = texts(rows, 4, config.vocab_size, padding)[1]
    return given


class Decoder(Autoregressive):
    """Tokens in, logits of the next token out.

    Args:
      config: the shape.
      build: makes the blocks of a period instead of a ``DecoderBlock``; see ``DecoderStack``.

    Raises:
      ValueError: the period does not divide the layers.
    """

    def __init__(
        self, config: DecoderConfig, *, build: Sequence[Build] | None = None, rngs: nnx.Rngs
    ):
        period = len(build or [None])
        if config.layers % period:
            raise ValueError(
                f"layers is {config.layers}; expected a multiple of the period, {period}."
            )
        block = with_positions(config.block, config.positions)
        self.memory_dim = config.memory_dim
        self.input = TokenInput(
            config.vocab_size,
            block.dim,
            positions=config.positions,
            max_length=config.max_length,
            config=config.input,
            dropout_rate=block.dropout_rate,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.decoder = DecoderStack(
            block,
            config.layers // period,
            build=build,
            memory_dim=config.memory_dim,
            positions=config.positions,
            window=config.window,
            scan=config.scan,
            remat=config.remat,
            rngs=rngs,
        )
        self.output = TokenOutput(
            config.vocab_size, block, config.output, tied=config.tie_output, rngs=rngs
        )

    @property
    def target_input(self) -> TokenInput:
        """The ``TokenInput`` of the generated tokens."""
        return self.input

    @on_any_mesh
    def hidden(
        self,
        tokens: Int[Array, "*B T"],
        *,
        memory: Encoded | Float[Array, "*B S M"] | None = None,
        memory_segment_ids: Int[Array, "*B S"] | None = None,
        segment_ids: Int[Array, "*B T"] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes the last vectors, before the output layer, and cross-attention's weights if asked for.

        Args:
          tokens: [*B T].
          memory, memory_segment_ids: ``Encoded`` or vectors [*B S M] for a model with a ``memory_dim``;
            padding has segment 0.
          segment_ids: of the texts packed into a row; 0 is padding.
          positions: of the tokens; None is ``arange``.
          key: turns dropout on.
          return_weights: return the weights [L *B N T S] too, those before dropout.
        """
        keys = split(key, 2)
        packed = segment_ids is not None and memory_segment_ids is not None
        x, states = self.decoder(
            self.input(tokens, positions, keys[0]),
            self._read(memory, None if packed else memory_segment_ids),
            keys[1],
            segment_ids=segment_ids,
            source_segment_ids=memory_segment_ids if packed else None,
            positions=positions,
            capture=self.decoder.reading() if return_weights else (),
        )
        return (x, layer_weights(states)) if return_weights else x

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [*B T V] of the token after each of ``tokens``; the arguments of ``hidden``."""

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        memory: Encoded | Float[Array, "B S M"] | None = None,
        memory_segment_ids: Int[Array, "B S"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states that have read the memory; for the other arguments see ``Autoregressive``.

        Args:
          memory, memory_segment_ids: of cross-attention; padding has segment 0.

        Raises:
          ValueError: ``cache_length`` is longer than ``longest``; the memory and ``memory_dim`` do
            not come together; or the memory has not ``batch`` rows.
        """
        if memory is not None:
            check_rows("memory", Encoded.of(memory).vectors, batch)
        layers = self._read(memory, memory_segment_ids)
        return self._filled(layers, batch, num_beams, cache_length, lookahead)

    def _read(self, memory: Any, segment_ids: Array | None) -> Any:
        if (memory is None) != (self.memory_dim is None):
            has, given = ("no", "one") if self.memory_dim is None else ("a", "none")
            raise ValueError(f"this Decoder has {has} memory_dim, but was given {given} to read.")
        if memory is None:
            return self.decoder.read()
        return self.decoder.read(source=Encoded.of(memory, segment_ids))
