"""Writes ``log_mel.npz``: what the feature extractor of ``transformers`` makes of half a second of sound.

python -m tests.data.golden_log_mel
"""

from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("log_mel.npz")


def sound(samples: int) -> np.ndarray:
    """A rising tone in noise."""
    t = np.arange(samples) / 16_000
    tone = 0.3 * np.sin(2 * np.pi * (200 + 1500 * t) * t)
    noise = 0.01 * np.random.default_rng(0).standard_normal(samples)
    return (tone + noise).astype(np.float32)


def reference(audio: np.ndarray, mels: int) -> np.ndarray:
    """Frames [F M] by ``transformers``."""
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor(feature_size=mels)
    whole = dict(padding=False, truncation=False)
    found = extract(audio, sampling_rate=16_000, return_tensors="np", **whole)
    return found.input_features[0].T


if __name__ == "__main__":
    audio = sound(8_000)
    np.savez_compressed(PATH, **{f"mels{mels}": reference(audio, mels) for mels in (80, 128)})
