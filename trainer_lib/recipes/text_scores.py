"""Scores of texts that were written, by torchmetrics: ROUGE-L, chrF and exact match.

ROUGE-L is the F measure of the longest common subsequence of words (Lin, 2004); it knows Latin letters and digits. chrF
is that of n-grams of up to 6 characters (Popović, 2015), here the mean over rows, and without those that are longer
than the text to write. Both are from 0 to 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = ("exact_match", "rouge_l", "chrf", "lead_rouge_l", "lead_chrf")
"""What `measure_texts` takes of each row."""
_LONGEST = 6


def score_text(written: str, wanted: str) -> tuple[float, float, float]:
    """Exact match, ROUGE-L and chrF of one text; spaces at its ends do not count."""
    from torchmetrics.functional.text import chrf_score, rouge_score

    own, true = written.strip(), wanted.strip()
    if not own or not true:
        return (float(own == true),) * 3
    longest = min(_LONGEST, len(true.replace(" ", "")))  # a short text has no longer n-grams
    rouge = rouge_score(own, true, rouge_keys="rougeL")["rougeL_fmeasure"]
    chrf: Any = chrf_score([own], [[true]], longest, 0)
    return float(own == true), float(rouge), float(chrf)


def score_row(written: str, wanted: str, lead: str) -> np.ndarray:
    """The scores ``[5]`` (`NAMES`) of a text, and of the first words of the text that was read."""
    return np.array([*score_text(written, wanted), *score_text(lead, wanted)[1:]])


def measure_texts(scores: np.ndarray) -> dict[str, float]:
    """Means of the scores ``[rows, 5]``, and what the model is better by than the first words."""
    means = dict(zip(NAMES, scores.mean(axis=0).tolist(), strict=True))
    return {
        **means,
        "rouge_l_over_lead": means["rouge_l"] - means["lead_rouge_l"],
        "chrf_over_lead": means["chrf"] - means["lead_chrf"],
    }
