"""What a checker in strict mode sees of the public functions; checked by ``make lint``, never run."""

import jax

import crossattn as xa
from crossattn.models import Transformer, TransformerConfig
from crossattn.nn import BlockConfig


def program(q: jax.Array, source: jax.Array, key: jax.Array) -> None:
    out: jax.Array = xa.attend(q, q, q, xa.masks.causal() & xa.masks.window(3))
    _, attended = xa.attend(q, q, q, return_weights=True)
    stats = xa.attention_stats(q, q, xa.masks.causal(), top_k=2)
    memory = xa.Memory.concat(xa.Memory(q, q), xa.Memory(q, q))
    merged, lse = xa.merge(q, q[..., 0], q, q[..., 0])
    config = TransformerConfig(90, BlockConfig.of(32, 4, 64), encoder_layers=1, decoder_layers=1)
    params = xa.init(lambda rngs: Transformer(config, rngs=rngs), key)
    model = xa.functional.bind(lambda rngs: Transformer(config, rngs=rngs), params)
    written = xa.decode.generate(model, source, max_new_tokens=4, num_beams=2)
    loaded, weights, _ = xa.load("folder")
    xa.save("another", loaded, weights)
    print(out, attended.shape, stats.entropy, memory.size, merged, lse, written.tokens)
    print(xa.explain(q, q, q).backend)
