"""Scores of translations and transcripts, and what summed losses mean. BLEU and chrF are sacreBLEU's own."""

import math
import re
from collections.abc import Mapping, Sequence

from crossattn.train.errors import MissingPackage


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str | None = None
) -> dict[str, float | str]:
    """Corpus BLEU and chrF with their signatures.

    Args:
      hypotheses, references: detokenised sentences, one reference each.
      tokenize: sacreBLEU's tokenizer for BLEU; None is "13a". Japanese wants "char" or "ja-mecab".

    Raises:
      MissingPackage: sacrebleu is not installed.
    Source: Post 2018, "A call for clarity in reporting BLEU scores".
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingPackage("BLEU needs sacrebleu: pip install 'crossattn[train]'") from None
    scores: dict[str, float | str] = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenize)), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def caption_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU and chrF, and CIDEr-D, of captions with one reference each.

    CIDEr compares runs of one to four words, lower case and without punctuation, by how rare they are in all
    references: a caption of four words or more that is its reference has 10, one of a single word 2.5.

    Raises:
      MissingPackage: sacrebleu or pycocoevalcap is not installed.
    Source: Vedantam et al. 2015, "CIDEr: Consensus-based Image Description Evaluation", section 4.
    """
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError:
        raise MissingPackage(
            "CIDEr needs pycocoevalcap: pip install 'crossattn[captions]'"
        ) from None
    scores = translation_scores(hypotheses, references)
    said, right = (
        {row: [" ".join(re.findall(r"\w+", text.lower()))] for row, text in enumerate(texts)}
        for texts in (hypotheses, references)
    )
    cider, _ = Cider().compute_score(right, said)
    return {"bleu": float(scores["bleu"]), "chrf": float(scores["chrf"]), "cider": float(cider)}


def word_error_rate(references: Sequence[str], transcripts: Sequence[str]) -> float:
    """Errors in a hundred words of ``normalised`` texts: those substituted, left out and put in.

    References of which nothing counts are left out.

    Raises:
      MissingPackage: jiwer or whisper-normalizer is not installed.
    """
    try:
        import jiwer
    except ImportError:
        raise MissingPackage(
            "word errors need jiwer: pip install jiwer whisper-normalizer"
        ) from None
    pairs = [
        (normalised(text), normalised(written))
        for text, written in zip(references, transcripts, strict=True)
    ]
    counted = [pair for pair in pairs if pair[0]]
    return 100.0 * jiwer.wer([text for text, _ in counted], [written for _, written in counted])


def normalised(text: str) -> str:
    """Text without what does not count: case, punctuation, spelling of numbers, fillers.

    Raises:
      MissingPackage: whisper-normalizer is not installed.
    Source: Radford et al. 2022, appendix C.
    """
    try:
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError:
        raise MissingPackage(
            "word errors need whisper-normalizer: pip install 'crossattn[speech]'"
        ) from None
    return EnglishTextNormalizer()(text)


def loss_scores(sums: Mapping[str, float]) -> dict[str, float]:
    """Loss and accuracy a token, and perplexity, from sums over tokens."""
    weight = sums["weight"] or 1.0
    nll = sums["nll"] / weight
    return {
        "loss": sums["loss"] / weight,
        "nll": nll,
        "perplexity": math.exp(min(nll, 100.0)),
        "accuracy": sums["correct"] / weight,
    }
