"""The engine, and the process it runs in.

``engine`` is the heart: requests in, one step after the other, outputs out. A step is

    batcher.plan ──▶ step_rows.layout ──▶ Transformer.forward ──▶ Sampler.verify ──▶ Sequence.accept
    who runs, drafts   arrays of one pass   logits                 tokens kept         text, or the end

``worker`` runs it in a process of its own, ``supervisor`` keeps that process alive and speaks to it over
``channel`` in ``messages``; ``client`` is what the server sees of all this, ``request`` what crosses.
"""
