"""The model of a Trainer: its preparation, its forward pass, what is made of it after training, its seeds."""
