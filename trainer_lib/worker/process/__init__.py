"""The process of a worker: its session, its events, and the Trainer that it assembles from a recipe and a request."""
