"""Real trained models and real data for tutorials, tests and benchmarks: `fetch` gets pinned packages, `g2p` and
`silero` define the models in plain torch and load their weights. Nothing here is part of the `quant` package, and no
other part of the project is imported.
"""
