"""Scores of translations, summaries, captions and transcripts, and means of summed losses."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from crossattn.train.errors import optional


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str | None = None
) -> dict[str, float | str]:
    """Computes sacreBLEU's corpus BLEU and chrF, with their signatures.

    Args:
      hypotheses, references: detokenised sentences, one reference each.
      tokenize: sacreBLEU's tokenizer for BLEU; None is "13a". Japanese wants "char" or "ja-mecab".

    Raises:
      MissingPackage: sacrebleu is not installed.
    Source: Post 2018, "A call for clarity in reporting BLEU scores".
    """
    metrics = optional("sacrebleu.metrics", "BLEU needs sacrebleu: pip install 'crossattn[train]'")
    scores: dict[str, float | str] = {}
    for name, metric in (("bleu", metrics.BLEU(tokenize=tokenize)), ("chrf", metrics.CHRF())):
        scores[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


ROUGE = ("rouge1", "rouge2", "rougeL")
"""Overlap of words, of pairs of words, and of the longest common subsequence."""
_WORD = re.compile("[a-z0-9]", re.IGNORECASE)


def rouge_scores(
    summaries: Sequence[str], references: Sequence[str]
) -> dict[str, Float[np.ndarray, " n"]]:
    """Computes ROUGE-1, ROUGE-2 and ROUGE-L of each summary, F1 in percent, of stemmed English words.

    A corpus has their means.

    Raises:
      MissingPackage: rouge-score is not installed.
      ValueError: a reference has no word of ROUGE, which are made of a to z and digits.
    Source: Lin 2004, "ROUGE: A package for automatic evaluation of summaries"; by rouge-score.
    """
    module, install = "rouge_score.rouge_scorer", "pip install 'crossattn[summaries]'"
    rouge = optional(module, f"ROUGE needs rouge-score: {install}")
    for reference in references:
        if not _WORD.search(reference):
            raise ValueError(
                f"ROUGE counts words of a to z and digits, of which the reference {reference[:40]!r} has none"
            )
    scorer = rouge.RougeScorer(list(ROUGE), use_stemmer=True)
    each = [scorer.score(right, said) for said, right in zip(summaries, references, strict=True)]
    return {name: np.array([100.0 * own[name].fmeasure for own in each]) for name in ROUGE}


def caption_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Computes corpus BLEU, chrF and the mean CIDEr-D of captions with one reference each.

    Raises:
      MissingPackage: sacrebleu or pycocoevalcap is not installed.
    """
    cider = float(np.mean(cider_scores(hypotheses, references)))
    scores = translation_scores(hypotheses, references)
    return {"bleu": float(scores["bleu"]), "chrf": float(scores["chrf"]), "cider": cider}


def cider_scores(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Computes CIDEr-D [n] of captions with one reference each.

    It compares runs of one to four words, lower case and without punctuation, by how rare they are in all
    references: a caption of four words or more that is its reference has 10, one of a single word 2.5.

    Raises:
      MissingPackage: pycocoevalcap is not installed.
    Source: Vedantam et al. 2015, "CIDEr: Consensus-based Image Description Evaluation", section 4.
    """
    module, install = "pycocoevalcap.cider.cider", "pip install 'crossattn[captions]'"
    cider = optional(module, f"CIDEr needs pycocoevalcap: {install}").Cider()
    said, right = (
        {row: [" ".join(re.findall(r"\w+", text.lower()))] for row, text in enumerate(texts)}
        for texts in (hypotheses, references)
    )
    return cider.compute_score(right, said)[1]


def word_error_rate(references: Sequence[str], transcripts: Sequence[str]) -> float:
    """Computes substitutions, deletions and insertions per hundred words, see ``word_errors``."""
    errors, words = word_errors(references, transcripts).sum(0)
    return 100.0 * float(errors / words)


def word_errors(
    references: Sequence[str], transcripts: Sequence[str]
) -> Int[np.ndarray, "texts 2"]:
    """Counts substitutions, deletions and insertions, and words, of each of ``normalised`` texts.

    A reference that is empty once normalised has none of either.

    Raises:
      MissingPackage: jiwer or whisper-normalizer is not installed.
    """
    jiwer = optional("jiwer", "word errors need jiwer: pip install jiwer whisper-normalizer")
    counts = np.zeros((len(references), 2), int)
    for row, (reference, transcript) in enumerate(zip(references, transcripts, strict=True)):
        if text := normalised(reference):
            found = jiwer.process_words(text, normalised(transcript))
            errors = found.substitutions + found.deletions + found.insertions
            counts[row] = errors, len(text.split())
    return counts


def normalised(text: str) -> str:
    """Normalises case, punctuation, the spelling of numbers, and fillers.

    Raises:
      MissingPackage: whisper-normalizer is not installed.
    Source: Radford et al. 2022, appendix C.
    """
    install = "pip install 'crossattn[speech]'"
    english = optional(
        "whisper_normalizer.english", f"word errors need whisper-normalizer: {install}"
    )
    return english.EnglishTextNormalizer()(text)


def lagging(
    delays: Sequence[float | int] | np.ndarray, source: float | int, reference: int
) -> float:
    """Computes length-adaptive average lagging: how far a text is behind an ideal that keeps pace.

        gamma = max(n, reference) / source        tau = the first t with d[t] >= source, or n
        LAAL = 1 / tau * sum of d[t] - (t - 1) / gamma over t = 1 .. tau

    Args:
      delays: d, how much of the source had arrived when each token or word was written.
      source: how much there is in all, in the same unit.
      reference: tokens or words of the reference.

    Raises:
      ValueError: nothing was written, or the source is empty.
    Source: Papi et al. 2022, "Over-Generation Cannot Be Rewarded"; as SimulEval computes it.
    """
    d = np.asarray(delays, np.float64)
    if not len(d) or source <= 0:
        raise ValueError(
            f"got {len(d)} delays and a source of {source}; expected one or more of each."
        )
    tau = min(int(np.sum(d < source)) + 1, len(d))
    pace = source / max(len(d), reference)
    return float(np.mean(d[:tau] - pace * np.arange(tau)))


def loss_scores(sums: Mapping[str, float]) -> dict[str, float]:
    """Computes loss and accuracy a token, and perplexity, from sums over tokens."""
    weight = sums["weight"] or 1.0
    nll = sums["nll"] / weight
    return {
        "loss": sums["loss"] / weight,
        "nll": nll,
        "perplexity": math.exp(min(nll, 100.0)),
        "accuracy": sums["correct"] / weight,
    }
