"""Six programs, each a small step on the one before: `python -m lab.steps.p0` to p5, on the embedded pair."""
