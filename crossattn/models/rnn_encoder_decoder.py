"""The recurrent encoder-decoder: an RNN reads the source, another attends to it and writes the target.

    source [S] ─► embed ─► GRUs or LSTMs, from both ends ─► m [S M] ─────────┐ keys, values
                                                    │ last states            │
    target [T] ─► embed ─► x ─────────────────────► s_0 ─► s_1 ─► ... ─► attend ─► readout ─► logits

    s_0 = tanh(W [m_S; m_1])                             forward's last state and backward's, or copies
    c_t = sum_i softmax_i(v . tanh(W s_(t-1) + U m_i)) m_i                              "bahdanau"
    s_t = RNN([x_t; c_t], s_(t-1));  o_t = maxout(W [s_t; x_t; c_t])
    s_t = RNN([x_t; o_(t-1)], s_(t-1));  c_t = sum_i softmax_i(score(s_t, m_i)) m_i     "luong"
    o_t = tanh(W [c_t; s_t])                             the attentional vector, which feeds the next input
    s_t = RNN(x_t, s_(t-1));  o_t = s_t                                                 none

Logits are o_t times a table. Of several layers the last one attends. A decoder without attention knows the
source by s_0 alone. ``nn.recurrent`` has the cells, ``nn.scores`` the scores and local attention.

Source: Sutskever et al. 2014, "Sequence to Sequence Learning with Neural Networks"; Bahdanau, Cho and Bengio
2015, "Neural Machine Translation by Jointly Learning to Align and Translate", section 3 and appendix A, with
the GRU of ``RecurrentCell``; Luong, Pham and Manning 2015, "Effective Approaches to Attention-based Neural
Machine Translation", section 3.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.decoding import Autoregressive
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import pairs
from crossattn.nn.inputs import InputConfig, TokenInput, without_padding
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import OutputConfig, TokenOutput, logits_of
from crossattn.nn.recurrent import Cell, RecurrentStack, segment_starts
from crossattn.nn.recurrent_decoding import RecurrentDecoder, RecurrentStates
from crossattn.nn.scores import AdditiveAttention, LocalAttention, LuongAttention, Score
from crossattn.nn.states import check_rows
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops.dropout import dropout
from crossattn.types import Array, Bool, Count, Float, Int, Key, Rate

Scope = Literal["global", "local-m", "local-p"]


@dataclass(frozen=True)
class RNNEncoderDecoderConfig:
    """The shape of a recurrent encoder-decoder.

    Attributes:
      vocab_size: target vocabulary, V.
      dim: size of embeddings and of the decoder's states, D.
      encoder_layers, decoder_layers: depth of the encoder, and of the decoder.
      cell: of both.
      attention: Bahdanau's, before the cells; Luong's, after them; or None, the last states alone.
      score: of Luong's attention.
      scope: of Luong's attention: all places, those around the step's, or around a predicted one.
      window: places on either side in a local scope.
      input_feeding: Luong's attentional vector is an input of the next step.
      bidirectional: the encoder reads from both ends, each with half of its size.
      encoder_dim: size of the encoder's vectors, M; None is ``dim``.
      bridge: a layer makes the decoder's first states; without it they are copies, layer by layer.
      source_vocab_size: vocabulary of the source; None shares the target's and its table.
      max_length: the longest source and target, which is no limit here.
      pad_id: the padding token of sources in calls without segments; None masks none.
      input: embeddings of source and target.
      tie_output: the output layer is the target's embedding table.
      output: options of the output layer besides its table.
      dropout_rate: of embeddings, of vectors between layers and of those before the output.
      dtype: computation dtype.
    """

    vocab_size: int
    dim: Count
    encoder_layers: Count
    decoder_layers: Count
    cell: Cell = "gru"
    attention: Literal["bahdanau", "luong"] | None = "bahdanau"
    score: Score = "general"
    scope: Scope = "global"
    window: Count = 10
    input_feeding: bool = True
    bidirectional: bool = True
    encoder_dim: Count | None = None
    bridge: bool = True
    source_vocab_size: int | None = None
    max_length: int = 512
    pad_id: int | None = None
    input: InputConfig = InputConfig()
    tie_output: bool = True
    output: OutputConfig = OutputConfig()
    dropout_rate: Rate = 0.0
    dtype: Any = None


def tiny(**changes: Any) -> RNNEncoderDecoderConfig:
    """Returns a small configuration for tests."""
    small = RNNEncoderDecoderConfig(vocab_size=64, dim=32, encoder_layers=2, decoder_layers=2)
    return replace(small, **changes)


def example(config: RNNEncoderDecoderConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    source_vocab = config.source_vocab_size or config.vocab_size
    return pairs(rows, source_vocab, config.vocab_size, padding)


class RNNEncoderDecoder(Autoregressive):
    """Source tokens and target tokens in, logits of the next target token out, as in ``Transformer``.

    Raises:
      ValueError: states are to be copied, and encoder and decoder differ in size or depth; or as
        ``RecurrentStack`` and ``LuongAttention`` do.
    """

    def __init__(self, config: RNNEncoderDecoderConfig, *, rngs: nnx.Rngs):
        D, M, L = config.dim, config.encoder_dim or config.dim, config.decoder_layers
        if not config.bridge and (M != D or L != config.encoder_layers):
            raise ValueError(
                f"bridge is False, which copies states, but the encoder has {config.encoder_layers} layers"
                f" of size {M}, the decoder {L} of size {D}; expected the same, or a bridge."
            )
        options: dict[str, Any] = dict(dtype=config.dtype, rngs=rngs)
        inputs: dict[str, Any] = dict(
            positions="none", max_length=config.max_length, config=config.input
        )
        inputs |= dict(dropout_rate=config.dropout_rate, **options)
        self.target_input = TokenInput(config.vocab_size, D, **inputs)
        separate = config.source_vocab_size
        self.source_input = None if separate is None else TokenInput(separate, D, **inputs)
        self.encoder = RecurrentStack(
            config.cell,
            config.encoder_layers,
            D,
            M,
            bidirectional=config.bidirectional,
            dropout_rate=config.dropout_rate,
            **options,
        )
        self.decoder = RecurrentDecoder(
            config.cell,
            L,
            D,
            attention=_attention(config, M, rngs),
            memory_dim=M,
            before=config.attention == "bahdanau",
            feeding=config.input_feeding,
            dropout_rate=config.dropout_rate,
            **options,
        )
        begin = self.decoder.cells[0].begin((L,), None).shape
        axes: dict[str, Any] = dict(in_axes=("embed",), out_axes=(None, None, "mlp"))
        self.bridge = linear(M, begin, **axes, **options) if config.bridge else None
        # The output layer takes size and dtype from a block.
        block = BlockConfig.of(D, 1, D, dtype=config.dtype)
        self.output = TokenOutput(
            config.vocab_size, block, config.output, tied=config.tie_output, rngs=rngs
        )
        self.pad_id = config.pad_id
        self.dropout_rate = config.dropout_rate

    @on_any_mesh
    def encode(
        self,
        source: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Encoded, list[Float[Array, "*B S P M"]]]:
        """Encodes the source to vectors [*B S M], and the states of each layer [*B S P M]."""
        segment_ids, keys = without_padding(source, segment_ids, self.pad_id), split(key, 2)
        x = (self.source_input or self.target_input)(source, positions, keys[0])
        x, states = self.encoder(x, segment_ids, keys[1])
        valid = None if segment_ids is None else segment_ids > 0
        return Encoded(x, valid, positions), states

    def _begin(
        self, states: list[Array], allowed: Bool[Array, "*B T S"]
    ) -> Float[Array, "*B T L P D"]:
        """Computes the decoder's first states for each mask of the source."""
        if self.bridge is None:
            return jnp.stack([self.encoder.final(x, allowed) for x in states], axis=-3)
        return jnp.tanh(self.bridge(self.encoder.final(states[-1], allowed)[..., 0, :]))

    @on_any_mesh
    def hidden(
        self,
        source: Int[Array, "*B S"],
        target_in: Int[Array, "*B T"],
        *,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        target_segment_ids: Int[Array, "*B T"] | None = None,
        source_positions: Int[Array, "*#B S"] | None = None,
        target_positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"] | None]:
        """Computes the vectors before the output layer, and the attention weights [1 *B 1 T S], or None.

        Args:
          source: tokens [*B S].
          target_in: tokens [*B T], beginning-of-sentence first.
          source_segment_ids, target_segment_ids: of the texts packed into a row; 0 is padding. States begin
            anew with each text.
          source_positions, target_positions: in their text, for local attention; None is ``arange``.
          key: turns dropout on.
          return_weights: return the weights; row t predicts the token after ``target_in[t]``.

        Raises:
          ValueError: weights are asked for, and there is no attention.
        """
        source_segment_ids = without_padding(source, source_segment_ids, self.pad_id)
        keys = split(key, 4)
        encoded, states = self.encode(source, source_segment_ids, source_positions, keys[0])
        allowed = _allowed(source, source_segment_ids, target_segment_ids)
        begin, packed = self._begin(states, allowed), None
        if target_segment_ids is not None:  # Their masks have the padding of the source too.
            encoded = replace(encoded, valid=None)
            packed = segment_starts(target_segment_ids), begin, allowed
        hidden, _, weights = self.decoder(
            self.target_input(target_in, target_positions, keys[1]),
            self.decoder.start(begin[..., 0, :, :, :]),
            self.decoder.read(encoded),
            target_positions,
            texts=packed,
            key=keys[2],
            return_weights=return_weights,
        )
        return dropout(hidden, self.dropout_rate, keys[3]), weights

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [*B T V] of the token after each of ``target_in``; the arguments of ``hidden``."""

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        source: Int[Array, "B S"],
        source_segment_ids: Int[Array, "B S"] | None = None,
    ) -> RecurrentStates:
        """Makes decoding states that have read the source; for the other arguments see ``Autoregressive``.

        Args:
          source, source_segment_ids: of the encoder; padding has segment 0.

        Raises:
          ValueError: the source does not have ``batch`` rows.
        """
        check_rows("source", source, batch)
        source_segment_ids = without_padding(source, source_segment_ids, self.pad_id)
        encoded, states = self.encode(source, source_segment_ids, None, None)
        begin = self._begin(states, _allowed(source, source_segment_ids, None))
        return self.decoder.prefill(encoded, begin, batch, num_beams)


def _attention(config: RNNEncoderDecoderConfig, memory_dim: int, rngs: nnx.Rngs) -> Any:
    """Makes the attention of a config, or returns None."""
    for name, kinds in (("attention", ("bahdanau", "luong", None)), ("scope", get_args(Scope))):
        if (given := getattr(config, name)) not in kinds:
            raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(str, kinds))}.")
    options: dict[str, Any] = dict(memory_dim=memory_dim, dtype=config.dtype, rngs=rngs)
    if config.attention is None:
        return None
    if config.attention == "bahdanau":
        return AdditiveAttention(config.dim, **options)
    options["score"] = config.score
    if config.scope == "global":
        return LuongAttention(config.dim, **options)
    local = dict(window=config.window, predicted=config.scope == "local-p")
    return LocalAttention(config.dim, **local, **options)


def _allowed(
    source: Array, source_segment_ids: Array | None, target_segment_ids: Array | None
) -> Bool[Array, "*B T S"]:
    """Returns the part of the source that each target token may read; T is 1 without target segments."""
    ids, others = source_segment_ids, target_segment_ids
    if ids is None:
        return jnp.ones(
            (*source.shape[:-1], 1 if others is None else others.shape[-1], source.shape[-1]), bool
        )
    readable = (ids > 0)[..., None, :]
    return readable if others is None else readable & (others[..., None] == ids[..., None, :])
