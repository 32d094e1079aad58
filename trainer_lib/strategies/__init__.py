"""How one model is trained by one or many processes: one file per way, one protocol (`base.Strategy`)."""
