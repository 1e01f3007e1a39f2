"""Train a small language model on real text; its attention is this operator behind a top-k indexer."""


def add_arguments(p):
    pass


def run(a):
    return 0
