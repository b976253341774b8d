"""The attention-sum reader: a question with a blank points at the words of a passage that may stand there.

    passage x [S] ──► embed ─► GRUs from both ends, up to each token and not over it ─► m [S D]  keys
    question q [T] ─► the same layers ────────────────────────────────────────────────► u [T D]  queries

    a [T S] = softmax_i(u_t . m_i)              over the tokens of the passage that may be answers
    p_t(w)  = sum_i a_ti [x_i = w]              what stands at place t of the question

A vector is what stands around its token: the forward state before it and the backward state after it. So a
place of the question does not see the token that stands there, the output at a blank is its answer, and equal
surroundings have equal vectors before anything is learnt. In the paper passage and question have GRUs of
their own, a passage's states have read their token too, and the question's vector are its last states.

Source: Kadlec et al. 2016, "Text Understanding with the Attention Sum Reader Network", section 4.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.copying import pointed
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import pairs
from crossattn.nn.inputs import InputConfig, TokenInput, without_padding
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import logits_of
from crossattn.nn.recurrent import Cell, RecurrentCell, over, segment_starts
from crossattn.nn.scores import LuongAttention, Score
from crossattn.nn.sublayers import split
from crossattn.ops import masks
from crossattn.types import Array, Bool, Count, Float, Int, Key, Rate


@dataclass(frozen=True)
class AttentionSumReaderConfig:
    """The shape of an attention-sum reader.

    Attributes:
      vocab_size: of passages and questions, V.
      dim: size of the vectors, half of it in each direction, D.
      embedding_dim: size of the embeddings, E; None is ``dim``.
      cell: of the recurrent layers.
      score: of a query against a key; "dot" is the paper's.
      max_length: the longest passage and question, which is no limit here.
      pad_id: the padding token in calls without segments; None masks none.
      input: embeddings.
      dropout_rate: of embeddings.
      dtype: computation dtype.
    """

    vocab_size: int
    dim: Count
    embedding_dim: Count | None = None
    cell: Cell = "gru"
    score: Score = "dot"
    max_length: int = 512
    pad_id: int | None = None
    input: InputConfig = InputConfig()
    dropout_rate: Rate = 0.0
    dtype: Any = None


def tiny(**changes: Any) -> AttentionSumReaderConfig:
    """Returns a small configuration for tests."""
    return replace(AttentionSumReaderConfig(vocab_size=64, dim=32), **changes)


def example(config: AttentionSumReaderConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    given = pairs(rows, config.vocab_size, config.vocab_size, padding)
    return {name.replace("target_in", "target"): x for name, x in given.items()}


class AttentionSumReader(nnx.Module):
    """A passage and a question in, log-probabilities of what stands at each place of the question out.

    Raises:
      ValueError: ``dim`` is odd; or as ``RecurrentCell`` and ``LuongAttention`` do.
    """

    def __init__(self, config: AttentionSumReaderConfig, *, rngs: nnx.Rngs):
        if config.dim % 2:
            raise ValueError(f"dim is {config.dim}; two directions expect an even number.")
        options: dict[str, Any] = dict(dtype=config.dtype, rngs=rngs)
        size = config.embedding_dim or config.dim
        self.input = TokenInput(
            config.vocab_size,
            size,
            positions="none",
            max_length=config.max_length,
            config=config.input,
            dropout_rate=config.dropout_rate,
            **options,
        )
        cells = (RecurrentCell(config.cell, size, config.dim // 2, **options) for _ in range(2))
        self.cells = nnx.List(cells)
        self.attention = LuongAttention(config.dim, score=config.score, **options)
        self.vocab_size, self.pad_id = config.vocab_size, config.pad_id

    @on_any_mesh
    def encode(
        self,
        tokens: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Computes vectors [*B S D] of what stands around each token in its text.

        Args:
          tokens: of passages or of questions.
          segment_ids: of the texts packed into a row; 0 is padding.
          key: turns dropout on.
        """
        segment_ids = without_padding(tokens, segment_ids, self.pad_id)
        ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        x, found = self.input(tokens, None, key), []
        for cell, reverse in zip(self.cells, (False, True), strict=True):
            states = over(cell, x, ids, reverse)[..., 0, :]
            before = jnp.roll(states, -1 if reverse else 1, axis=-2)
            begins = segment_starts(ids, reverse)
            found.append(jnp.where(begins[..., None], 0, before))
        valid = None if segment_ids is None else segment_ids > 0
        return Encoded(jnp.concatenate(found, axis=-1), valid)

    @on_any_mesh
    def hidden(
        self,
        source: Int[Array, "*B S"],
        target: Int[Array, "*B T"],
        *,
        candidates: Bool[Array, "*B S"] | None = None,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        target_segment_ids: Int[Array, "*B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T V"], Float[Array, "L *B N T S"] | None]:
        """Computes log p of each place [*B T V], and the weights [1 *B 1 T S], or None.

        Args:
          source: tokens of passages.
          target: tokens of questions. What stands at a place does not move the output there.
          candidates: the tokens of the passage that may be answers; None is all.
          source_segment_ids, target_segment_ids: of the texts packed into a row; 0 is padding. A question
            reads the passage of its own number.
          key: turns dropout on.
          return_weights: return the weights too.
        """
        source_segment_ids = without_padding(source, source_segment_ids, self.pad_id)
        keys = split(key, 2)
        passage: Any = self.encode(source, source_segment_ids, keys[0])
        question: Any = self.encode(target, target_segment_ids, keys[1])
        valid = passage.valid
        if candidates is not None:
            valid = candidates if valid is None else valid & candidates
        mask = None
        if target_segment_ids is not None:
            ids = jnp.ones_like(source) if source_segment_ids is None else source_segment_ids
            mask = masks.segments(target_segment_ids, ids)
        memory = self.attention.memory(passage.vectors, valid=valid)
        _, weights = self.attention(question.vectors, memory, mask, return_weights=True)
        log_p = pointed(weights[..., 0, :, :], source, self.vocab_size)
        return log_p, weights[None] if return_weights else None

    def logits(self, log_p: Float[Array, "*B T V"]) -> Float[Array, "*B T V"]:
        """Returns the log-probabilities of ``hidden``."""
        return log_p

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes log p [*B T V] of what stands at each place; the arguments of ``hidden``."""
