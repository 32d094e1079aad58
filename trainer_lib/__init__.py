"""HOUSE: a PyTorch trainer library that knows no orchestrator. Importing it imports no torch."""
