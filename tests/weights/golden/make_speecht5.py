"""Results of SpeechT5 in ``transformers``, one small file: ``python -m tests.weights.golden.make_speecht5``.

Its weights are random by their names and are not kept. The prenet's dropout, which is drawn in evaluation
too, is taken out. Needs torch and transformers.
"""

import json
from pathlib import Path

import numpy as np

from experiments.parity.reference import without_dropout
from experiments.parity.weights import weight

FILE = Path(__file__).with_name("speecht5.npz")
SMALL = dict(
    vocab_size=20, hidden_size=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24,
    decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=20, num_mel_bins=6, reduction_factor=2,
    speech_decoder_prenet_units=12, speech_decoder_postnet_layers=3,
    speech_decoder_postnet_units=10, speech_decoder_postnet_kernel=5, speaker_embedding_dim=8,
    encoder_max_relative_position=3, max_text_positions=32, max_speech_positions=64,
)  # fmt: skip
STEPS = 6


def inputs() -> dict[str, np.ndarray]:
    """Returns two texts of unlike lengths, frames and speakers."""
    random = np.random.RandomState(0)
    source = random.randint(3, 20, (2, 9)).astype(np.int64)
    source[1, 6:] = 1
    frames = random.standard_normal((2, STEPS, 6)).astype(np.float32)
    speaker = random.standard_normal((2, 8)).astype(np.float32)
    return dict(
        source=source, present=(source != 1).astype(np.int64), frames=frames, speaker=speaker
    )


def measure() -> tuple[dict, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns config, tensors, and what a model of ``transformers`` computes and says."""
    import torch
    import transformers

    config = transformers.SpeechT5Config(**SMALL)
    model = transformers.SpeechT5ForTextToSpeech(config).eval()
    tensors = {name: weight(name, tuple(x.shape)) for name, x in model.state_dict().items()}
    model.load_state_dict({name: torch.from_numpy(np.array(x)) for name, x in tensors.items()})
    without_dropout(model)
    given = {name: torch.from_numpy(x) for name, x in inputs().items()}
    read = dict(attention_mask=given["present"], speaker_embeddings=given["speaker"])
    with torch.no_grad():
        hidden = model.speecht5(
            input_values=given["source"], decoder_input_values=given["frames"], **read
        )[0]
        stops = model.speech_decoder_postnet.prob_out(hidden)
        said, seen = model.generate_speech(
            given["source"][:1], given["speaker"][:1], threshold=2.0, maxlenratio=STEPS * 2 / 9,
            output_cross_attentions=True,
        )  # fmt: skip
    found = dict(stops=stops, said=said, seen=seen)
    settings = dict(SMALL, model_type="speecht5", architectures=["SpeechT5ForTextToSpeech"])
    return settings, tensors, {name: x.numpy() for name, x in found.items()}


if __name__ == "__main__":
    settings, tensors, found = measure()
    shapes = json.dumps({name: x.shape for name, x in tensors.items()})
    np.savez_compressed(FILE, config=json.dumps(settings), shapes=shapes, **found)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
    print({name: x.shape for name, x in found.items()})
