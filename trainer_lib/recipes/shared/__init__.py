"""Parts that recipes of several subjects share: options, targets, metrics, models of transformers."""
