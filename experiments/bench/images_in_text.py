"""Cost of a training step of a LLaVA (images as a prefix) and of a Flamingo (gated cross-attention).

    python -m experiments.bench.images_in_text [--side=PIXELS] [--rows=N]

Models of ``configs/emoji_llava.py`` and ``configs/emoji_flamingo.py``, float32, on rows of 1, 2, 4 and 8
images with captions of 16 tokens, and the Flamingo without its resampler. Prints, for the loss with its
gradient, seconds (the fastest of 9 calls), bytes of the program's temporaries, and FLOPs and bytes accessed
as XLA counts them with plain matrix products for attention.
"""

from typing import Any

import jax
import numpy as np

from configs import emoji_flamingo, emoji_llava
from crossattn import functional, models, use_backend
from crossattn.data.features.interleaved import interleaved
from crossattn.models import Flamingo
from crossattn.train.linear_loss import linear_cross_entropy
from experiments import launch
from experiments.bench import contest
from experiments.options import Options
from experiments.settings import model_config

IMAGES, CAPTION, VOCABULARY, CALLS = (1, 2, 4, 8), 16, 1000, 9


class AllPatches(Flamingo):
    """A Flamingo whose tokens read all patches of an image, without the resampler."""

    def encode(self, images: Any, key: Any = None) -> Any:
        """Computes vectors [B (I P) M] of the patches of images."""
        vectors = self.vision.encode(images, key=key).vectors
        return vectors.reshape(len(vectors), -1, vectors.shape[-1])


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument(
        "--side", default=32, type=int, metavar="PIXELS", help="side of an image; 32"
    )
    parser.add_argument("--rows", default=4, type=int, metavar="N", help="rows of a batch; 4")
    options = parser.parse_args()
    print(
        f"{contest.machine()}; jax {jax.__version__}; {options.rows} rows of images of {options.side}\n"
    )
    print("| reads | images | tokens in a row | step | temporaries | GFLOP | bytes accessed |")
    print("|---|---|---|---|---|---|---|")
    for images in IMAGES:
        for reads in ("prefix", "gated, resampled", "gated, all patches"):
            print(row(reads, images, options.side, options.rows), flush=True)


def row(reads: str, images: int, side: int, rows: int) -> str:
    """Measures and formats a line of the table."""
    build, image_tokens = model(reads, images, side)
    random = np.random.default_rng(0)
    batch = interleaved(random.integers(3, VOCABULARY, (rows, images, CAPTION)), image_tokens)
    batch["images"] = random.random((rows, images, side, side, 3), np.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
        made = functional.bind(build, params)
        given = {name: batch[name] for name in ("images", "image_positions")}
        segments = batch["target_segment_ids"]
        hidden = made.hidden(batch["target_in"], segment_ids=segments, **given)
        told, targets = batch["shots"] >= 0, batch["target_out"]
        return linear_cross_entropy(hidden, made.output_table(), targets, told)[0]

    params = functional.init(build, jax.random.key(0))
    step = jax.value_and_grad(loss)
    counted: Any
    with use_backend("reference"):  # XLA counts its products
        plain = jax.jit(lambda *given: step(*given))
        counted = plain.lower(params, batch).compile().cost_analysis()
    compiled = jax.jit(step).lower(params, batch).compile()
    memory: Any = compiled.memory_analysis()
    call = lambda: jax.block_until_ready(compiled(params, batch))  # noqa: E731
    seconds = contest.alternate({"step": call}, CALLS, warmup=0)["step"]
    cells = [
        f"{1e3 * min(seconds):,.0f} ms",
        f"{memory.temp_size_in_bytes / 2**20:,.0f} MiB",
        f"{counted['flops'] / 1e9:.2f}",
        f"{counted['bytes accessed'] / 2**20:,.0f} MiB",
    ]
    return f"| {reads} | {images} | {batch['target_in'].shape[1]} | {' | '.join(cells)} |"


def model(reads: str, images: int, side: int) -> tuple[Any, int]:
    """Returns a function that builds the model, and the number of tokens of an image in its text."""
    prefix = reads == "prefix"
    section: Any = (emoji_llava if prefix else emoji_flamingo).get_config().model
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, max_length=1, image_size=(side, side))
    if reads == "gated, all patches":
        section.image_latents = (side // section.patch_size) ** 2
    config = model_config(section, **sizes)
    module = AllPatches if reads == "gated, all patches" else models.find(section.name).module
    return lambda rngs: module(config, rngs=rngs), getattr(config, "image_tokens", 1)


if __name__ == "__main__":
    launch.script(main)
