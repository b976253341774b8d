"""Interventions are inputs: activations of any model scaled, replaced and captured, as arguments of its call.

    interventions = {"decoder.cross.heads": Intervention(scale=jnp.ones((6, 8)).at[2, 5].set(0))}
    logits = run(model, interventions, **batch)                           head 5 of layer 2 knocked out
    logits, found = run(model, None, **batch, capture=["decoder.+cross"])

A site is an activation with a name, ``sites(model)`` lists them; an ``Intervention`` edits it, ``capture``
returns it. Both are plain values: ``jax.jit``, ``jax.vmap`` and ``jax.grad`` go through them, so that one
compiled program computes all knockouts, or the importance of all heads. Where nothing is given, the program
is that of the model alone.
"""

from crossattn.interventions.gates import gates, hard_concrete, open_probability
from crossattn.interventions.heads import importance, knockout, knockouts, scales
from crossattn.interventions.prune import prune
from crossattn.interventions.sites import Site, Sites, captured, intervene, run, sites
from crossattn.nn.edits import Intervention

__all__ = [
    "Intervention",
    "Site",
    "Sites",
    "captured",
    "gates",
    "hard_concrete",
    "importance",
    "intervene",
    "knockout",
    "knockouts",
    "open_probability",
    "prune",
    "run",
    "scales",
    "sites",
]
