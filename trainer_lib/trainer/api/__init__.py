"""Methods of the public Trainer, by subject: every one may be overridden."""
