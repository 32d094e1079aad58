"""`trainer.accelerator`: an `accelerate.Accelerator` around the Trainer's own engine, made when it is first used."""
